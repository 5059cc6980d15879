"""Routes of completions and studies, the schema of their bodies, and the page that describes them."""
