"""One thread (results then do not depend on the machine's cores) and the same hypothesis examples on every run."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")
