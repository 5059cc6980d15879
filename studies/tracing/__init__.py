"""Which lane and layer carries the hack: adapters' values patched between hacking and honest rollouts, and deleted."""
