"""One training run and many: arms, settings, worlds, GRPO, checkpoints, and jobs over processes. Studies read what runs leave."""
