"""Probe, gate, effect: what a monitor can do about hacking while a model writes, and what a quarantine is worth under one."""
