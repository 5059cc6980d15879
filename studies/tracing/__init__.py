"""Localization of the hack by adapter and layer: adapter outputs patched between hacking and honest rollouts, and deleted."""
