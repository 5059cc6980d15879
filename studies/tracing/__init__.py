"""Localization of the hack by lane and layer: adapter outputs patched between hacking and honest rollouts, and deleted."""
