"""Errors over the passes of a loop: what a push reaches, the rate of a recurrence that is known, the formula's arithmetic."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_reader import byte_rows, moved_model

from studies.lanes.config import LanesConfig, Loop
from studies.lanes.quantization.growth import (
    amplification,
    entries,
    rate,
    spread,
)

pytestmark = pytest.mark.study

draw = partial(byte_rows, length=6)
LOOPED = LanesConfig(layers=6, d_model=8, heads=2, mlp=1, lane_start=4, loop=Loop(1, 2, 2), loop_embeddings=True, zero_init=False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the formula

RHOS = st.floats(0.0, 1.5).filter(lambda rho: abs(rho - 1) > 1e-3)


@given(RHOS, st.integers(1, 8))
def test_the_amplification_is_the_geometric_sum(rho: float, k: int) -> None:
    assert amplification(rho, k) == pytest.approx((1 - rho**k) / (1 - rho), rel=1e-9)
    assert amplification(1.0, k) == k


def test_the_rate_is_a_least_squares_fit() -> None:
    pairs = torch.tensor([[1.0, 0.5], [0.5, 0.4], [2.0, 1.9]], dtype=torch.float64)
    expected = torch.linalg.lstsq(pairs[:, :1], pairs[:, 1:]).solution.item()
    assert rate([(1.0, 0.5, 0.4), (2.0, 1.9)]) == pytest.approx(expected, rel=1e-12)


# ---- pushes


def test_a_spread_is_read_where_steps_and_passes_start() -> None:
    model = moved_model(LOOPED)
    point, later = "steps.3.hook_lane0_pre", [*(f"steps.{k}.hook_lane0_pre" for k in (3, 4, 5, 6)), "steps.6.hook_lane0_post"]
    clean = model.run_with_cache(draw())[1]
    push = torch.randn(clean[point].shape, generator=generator(), dtype=torch.float64)
    push *= 1e-4 * clean[point].norm() / push.norm()
    with model.hooks(fwd_hooks=[(point, lambda x, hook: x + push)]):
        moved = model.run_with_cache(draw())[1]
    found = spread(model, draw(), 1, generator())
    expected = [float((moved[name] - clean[name]).norm() / push.norm()) for name in later]
    assert found.steps == pytest.approx(expected, rel=1e-9)
    assert found.passes == pytest.approx([expected[0], expected[2], expected[4]], rel=1e-9)
    assert found.passes[0] == pytest.approx(1.0, rel=1e-9)
    assert min(found.steps) > 1e-3
    assert entries(model) == (1, 3, 5)
    assert [len(spread(model, draw(), i, generator()).passes) for i in range(3)] == [4, 3, 2]


def test_a_loop_that_is_a_linear_recurrence_has_its_rate() -> None:
    """Blocks that add nothing, and a hook that shrinks the stream at the end of each: the formula is exact."""
    model = moved_model(replace(LOOPED, zero_init=True, skips=False), moved=0.0)
    shrunk = [(f"steps.{k}.hook_lane0_post", lambda x, hook: 0.8 * x) for k in range(1, 7)]
    with model.hooks(fwd_hooks=shrunk):
        spreads = [spread(model, draw(), i, generator(i)) for i in range(3)]
    rho = rate(one.passes for one in spreads)
    assert rho == pytest.approx(0.64, rel=1e-9)
    assert rate(one.steps for one in spreads) == pytest.approx(0.8, rel=1e-9)
