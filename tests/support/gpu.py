"""The device of tests/gpu: CUDA, or another one with ``ROUTE2_TEST_DEVICE=cpu pytest tests/gpu``."""

import os
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mi_route2.routing import TrainBatch

DEVICE = os.environ.get("ROUTE2_TEST_DEVICE", "cuda")
NEEDS = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")
CLOSE = 1e-4
"""Largest difference of a gradient or a weight, by norm: rotary angles are always float32, and Adam enlarges last bits."""


def on_device(batch: TrainBatch) -> TrainBatch:
    """The batch there, in float32."""
    tensors = {name: t for name, t in vars(batch).items() if isinstance(t, Tensor)}
    moved = {name: t.to(DEVICE, torch.float32 if t.is_floating_point() else t.dtype) for name, t in tensors.items()}
    return replace(batch, **moved, rollouts=batch.rollouts.to(torch.device(DEVICE)))


def assert_close(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    for name, right in expected.items():
        gap = float((own[name].cpu().double() - right.cpu().double()).norm())
        assert gap <= CLOSE * max(float(right.norm()), 1e-3), f"{name}: {gap:.1e}"
