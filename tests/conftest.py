"""One thread (results then do not depend on the machine's cores), one set of hypothesis examples, a Ctrl-C that works."""

import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")
# A suite that was started in the background ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
