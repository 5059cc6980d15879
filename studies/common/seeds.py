"""Seeds of every random choice, derived from (seed, purpose, step), so that a resumed run draws the same numbers.

No generator lives longer than a step, so there is no state to lose, and two arms with the same seed get the same prompts and
uniforms.
"""

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, step: int = 0) -> int:
    """Return a 63-bit seed for one purpose at one step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()[:8]) >> 1


def torch_generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, purpose, step))


def numpy_generator(seed: int, purpose: str, step: int = 0) -> np.random.Generator:
    return np.random.default_rng(derive(seed, purpose, step))
