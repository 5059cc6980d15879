"""Vectors in buffers: kernels that were recorded before any request see every later step, with the bits of the plan."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from mi_route2.steering.state import SteeringState

EARLY, LATE = SITES = Site(0, "resid_mid"), Site(1, "resid_pre")
TOKENS, WIDTH = 12, 5


def row(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


FIRST = Steering(base=(Steer(EARLY, row(1)),), prefill=(Steer(LATE, row(2)),), decode=(Steer(LATE, row(3)),))
SECOND = Steering(decode=(Steer(EARLY, row(4)),), clamps=(Clamp(LATE, row(5), value=2.0),))
WATCHED = Steering(base=(Steer(LATE, row(6)),), monitors=(Monitor(EARLY, row(7), gate_rows=True),))
TIER = (Steer(LATE, row(8)),)
STEPS: list[tuple[list[Callable[[SteeringState], object]], list[tuple[Piece, int]]]] = [
    # changes before a forward, and its pieces with the index of their first token; the other tokens are of nobody
    ([lambda s: s.admit(0, FIRST), lambda s: s.admit(1, SECOND)], [(Piece(0, 0, 5, 3), 1), (Piece(1, 0, 2, 2), 7)]),
    ([lambda s: s.set_scale(0.3, request=0), lambda s: s.set_tier(TIER)], [(Piece(0, 5, 1, 3), 0), (Piece(1, 2, 1, 2), 1)]),
    ([lambda s: s.hold("held", FIRST), lambda s: s.override(1, "held"), lambda s: s.set_scale(2.0)], [(Piece(1, 3, 1, 2), 4)]),
    ([], []),  # a step of others, while rows and tier are full
    ([lambda s: s.release(0), lambda s: s.admit(2, WATCHED)], [(Piece(2, 0, 4, 2), 0), (Piece(1, 4, 1, 2), 9)]),
    ([lambda s: s.release(1), lambda s: s.drop("held"), lambda s: s.clear_tier()], [(Piece(2, 4, 1, 2), 3)]),
    ([lambda s: s.admit(3, SECOND), lambda s: s.set_scale(0, request=3)], [(Piece(3, 2, 1, 2), 11)]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_recorded_with_empty_buffers_give_the_bits_of_the_plan_at_every_step(dtype: torch.dtype) -> None:
    banked, planned = (SteeringState(lambda site: (WIDTH,), rows=3, dtype=dtype, tokens=tokens) for tokens in (TOKENS, 0))
    banks = banked.banks
    assert banks is not None
    for site in SITES:
        banks.lines(site, WIDTH)
    recorded = {site: make_fx(partial(banks.add, site))(*row(0, 2, TOKENS).to(dtype)) for site in SITES}
    for number, (changes, pieces) in enumerate(STEPS):
        pair = x, residual = row(100 + number, 2, TOKENS).to(dtype)
        x[:, 0] = residual[:, 0] = -0.0
        cells = torch.cat([torch.arange(first, first + piece.count) for piece, first in pieces]) if pieces else []
        layout = BatchLayout.of([piece for piece, _ in pieces]) if pieces else None
        for state in (banked, planned):
            for change in changes:
                change(state)
            if layout is not None:
                state.begin(layout)
        banked.fill(pieces)
        expected = (x + residual)[cells]
        for site in SITES:
            x, residual = recorded[site](x, residual)
            if layout is not None:
                expected = at(planned, site, expected, layout)
                new = at(banked, site, (x + residual)[cells], layout)  # what has no buffer
                changed = (new != (x + residual)[cells]).any(-1)
                x[cells[changed]], residual[cells[changed]] = new[changed], 0
        assert torch.equal((x + residual)[cells], expected)
        others = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.as_tensor(cells, dtype=torch.long), False)
        for new, old in zip((x, residual), pair):
            assert torch.equal(new[others].view(torch.uint8), old[others].view(torch.uint8))  # equal signs of zeros too


def at(state: SteeringState, site: Site, h: Tensor, layout: BatchLayout) -> Tensor:
    padded = h.new_zeros(*layout.real.shape, WIDTH)
    padded[layout.real] = h
    return state.at(site, padded)[layout.real]
