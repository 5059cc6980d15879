"""``python -m studies.route2.soak --kills N``."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, because a pool of threads does not survive a fork

import tyro

from studies.route2.soak.soak import Soak

if __name__ == "__main__":
    sys.exit(tyro.cli(Soak)())
