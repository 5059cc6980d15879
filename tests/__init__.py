"""Tests; from a checkout, two of their rooms also run as commands: ``python -m tests.attacks`` and ``python -m tests.soak``."""
