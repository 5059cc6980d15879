"""Steering by probes: what a monitor can do against hacking during generation, and the value of a quarantine under a monitor."""
