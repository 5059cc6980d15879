"""Training of one run or many: arms, settings, worlds, GRPO, checkpoints, and jobs over processes. Studies read the results."""
