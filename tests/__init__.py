"""Tests; from a checkout, one of their rooms also runs as a command: ``python -m tests.soak``."""
