"""The device of tests/gpu: CUDA, or another one with ``ROUTE2_TEST_DEVICE=cpu pytest tests/gpu``."""

import os

import pytest
import torch

DEVICE = os.environ.get("ROUTE2_TEST_DEVICE", "cuda")
NEEDS = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")]
