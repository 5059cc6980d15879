"""Quarantine routing of reward hacking: the study of all arms and its report. See ``python -m studies.route2 --help``."""
