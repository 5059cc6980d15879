"""The soak: runs are killed, starved of disk and damaged, and must end with the bytes of a run that nothing disturbed."""
