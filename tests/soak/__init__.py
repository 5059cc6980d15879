"""Soak test: runs are killed, lose disk space or are damaged, and must end with the bytes of an undisturbed run."""
