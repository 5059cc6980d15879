"""The engine behind HTTP: OpenAI-compatible completions with interventions, patch sweeps, a page and a client."""
