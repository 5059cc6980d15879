"""Errors over the passes of a loop: what a push reaches, the rate of a recurrence that is known, the formula's arithmetic."""

from dataclasses import replace
from functools import partial
from itertools import accumulate, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_reader import byte_rows, moved_model

from studies.lanes.config import LanesConfig, Loop
from studies.lanes.quantization.growth import (
    CLAIMED,
    CLAIMED_RHO,
    ERRORS,
    accumulated,
    amplification,
    entries,
    growth,
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


def test_the_claimed_amplifications_are_not_those_of_the_claimed_rate_nor_of_any() -> None:
    assert round(amplification(CLAIMED_RHO, 2), 2) == 1.63 != CLAIMED[2]
    assert round(amplification(CLAIMED_RHO, 3), 2) == 2.03 != CLAIMED[3]
    rho = CLAIMED[2] - 1  # A(2) = 1 + rho leaves no choice
    assert amplification(rho, 3) > CLAIMED[3] + 0.1


@given(rho=st.floats(0.05, 1.5), start=st.floats(0.1, 10.0), passes=st.integers(2, 6))
def test_the_rate_of_a_linear_recurrence_is_found(rho: float, start: float, passes: int) -> None:
    values = list(accumulate(repeat(rho, passes), lambda x, r: x * r, initial=start))
    assert rate([values]) == pytest.approx(rho, rel=1e-9)
    assert rate([values, values[:1], [3 * v for v in values[1:]]]) == pytest.approx(rho, rel=1e-9)


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


def test_a_loop_that_is_a_linear_recurrence_has_its_rate_and_its_amplification() -> None:
    """Blocks that add nothing, and a hook that shrinks the stream at the end of each: the formula is exact."""
    model = moved_model(replace(LOOPED, zero_init=True, skips=False), moved=0.0)
    shrunk = [(f"steps.{k}.hook_lane0_post", lambda x, hook: 0.8 * x) for k in range(1, 7)]
    with model.hooks(fwd_hooks=shrunk):
        spreads = [spread(model, draw(), i, generator(i)) for i in range(3)]
        same, fresh = (accumulated(model, draw(), kind, generator()) for kind in ("same", "fresh"))
    rho = rate(one.passes for one in spreads)
    assert rho == pytest.approx(0.64, rel=1e-9)
    assert rate(one.steps for one in spreads) == pytest.approx(0.8, rel=1e-9)
    assert same == pytest.approx([amplification(rho, k) for k in (1, 2, 3)], rel=1e-9)
    quadrature = [amplification(rho**2, k) ** 0.5 for k in (1, 2, 3)]
    assert fresh == pytest.approx(quadrature, rel=0.25), "96 random entries are nearly, not quite, at right angles"
    assert fresh[2] < same[2]


def test_growth_puts_formula_and_measurement_side_by_side() -> None:
    model = moved_model(LOOPED)
    rows = growth(model, draw(), range(2))
    assert [row.seed for row in rows] == [0, 1]
    for row in rows:
        assert row.rho == rate(one.passes for one in row.spreads)
        assert row.formula == tuple(amplification(row.rho, k) for k in (1, 2, 3))
        assert tuple(row.accumulated) == tuple(row.misfit) == ERRORS
        for kind in ERRORS:
            assert row.accumulated[kind][0] == pytest.approx(1.0)
            again = [m * (1 + f) for m, f in zip(row.formula, row.misfit[kind], strict=True)]
            assert row.accumulated[kind] == pytest.approx(again, rel=1e-12)
    assert rows[0] != rows[1]
    assert rows == growth(model, draw(), range(2))


def test_noise_in_the_weights_is_that_of_looped_matrices_alone() -> None:
    """The error where passes end, against a model whose matrices are moved by hand."""
    model, noise = moved_model(LOOPED), generator(4)
    moved = moved_model(LOOPED)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if name.startswith(("blocks.1.", "blocks.2.")) and name.endswith(".weight"):
                p += 1e-3 * p.std() * torch.randn(p.shape, generator=noise, dtype=torch.float64)
    clean, noisy = (m.run_with_cache(draw())[1] for m in (model, moved))
    norms = [float((noisy[name] - clean[name]).norm()) for name in (f"steps.{k}.hook_lane0_post" for k in (2, 4, 6))]
    found = accumulated(model, draw(), "weights", generator(4), 1e-3)
    assert found == pytest.approx([norm / norms[0] for norm in norms], rel=1e-9)


def test_the_model_that_is_measured_stays_as_it_is() -> None:
    model = moved_model(LOOPED).float()
    before = {name: p.clone() for name, p in model.named_parameters()}
    growth(model, draw(), [0])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(hook.fwd_hooks for hook in model.hook_dict.values())


def test_blocks_that_add_nothing_have_no_error_to_measure() -> None:
    with pytest.raises(ValueError, match="train the model first"):
        accumulated(moved_model(replace(LOOPED, zero_init=True), moved=0.0), draw(), "weights", generator())
