"""Run ``python -m tests.soak --kills N`` from a checkout."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, because a pool of threads does not survive a fork

import tyro

from tests.soak.soak import Soak

if __name__ == "__main__":
    sys.exit(tyro.cli(Soak)())
