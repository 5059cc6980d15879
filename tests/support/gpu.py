"""The device of tests/gpu: CUDA, or another one with ``ROUTE2_TEST_DEVICE=cpu pytest tests/gpu``."""

import os
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

DEVICE = os.environ.get("ROUTE2_TEST_DEVICE", "cuda")
NEEDS = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")
CLOSE = 1e-4
"""Largest difference of a gradient or a weight, by norm: rotary angles are always float32, and Adam enlarges last bits."""


def assert_close(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    for name, right in expected.items():
        gap = float((own[name].cpu().double() - right.cpu().double()).norm())
        assert gap <= CLOSE * max(float(right.norm()), 1e-3), f"{name}: {gap:.1e}"
