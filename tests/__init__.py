"""Tests; some also run as commands from a checkout: ``python -m tests.attacks``, ``tests.soak`` and ``tests.soak.server``."""
