"""Soak tests: killed, full or damaged runs, which must end with the bytes of an undisturbed run, and a server under load."""
