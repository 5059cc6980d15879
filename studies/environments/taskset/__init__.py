"""Folder for the path: verifiers imports a taskset by a name without dots, ``route2_problems``."""
