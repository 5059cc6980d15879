"""Quarantine routing of reward hacking: GRPO arms, controls and the report. See ``python -m studies.route2 --help``."""
