"""The table of wirings, and the symmetries that each row has or lacks, for any routing scalars."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from studies.lanes.config import BOS, STARTS, WIRINGS, LanesConfig
from studies.lanes.model import LanesModel

pytestmark = pytest.mark.study

CONFIG = LanesConfig(layers=4, d_model=8, heads=2, mlp=1, lane_start=2, zero_init=False)
TOKENS = torch.randint(0, BOS, (2, 6), generator=torch.Generator().manual_seed(1))
SEEDS = st.integers(0, 2**16)


def make(wiring: str, seed: int) -> LanesModel:
    """Random routing scalars, gates and mixes."""
    generator = torch.Generator().manual_seed(seed)
    model = LanesModel(replace(CONFIG, wiring=wiring), torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for name in ("post", "resid", "skip_gate", *(f"blocks.{i}.mix" for i in range(CONFIG.layers))):
            p = model.get_parameter(name)
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


@torch.no_grad()
def rerouted(model: LanesModel, post: Tensor) -> Tensor:
    """Logits with other weights of the lanes."""
    before = model.post.clone()
    model.post.copy_(post)
    logits = model(TOKENS)
    model.post.copy_(before)
    return logits


def moves(model: LanesModel, post: Tensor) -> bool:
    return not torch.allclose(rerouted(model, post), model(TOKENS), rtol=0, atol=1e-12)


def test_every_row_is_a_wiring() -> None:
    assert list(WIRINGS) == ["sequential", "gptj", "shipped", "simultaneous", "gauge", "z2"]
    for name, wiring in WIRINGS.items():
        assert wiring.name == name
        for weights in (wiring.attn, wiring.mlp, wiring.out):
            assert len(weights) == wiring.lanes
            assert sum(weights) == 1
    assert {name for name, wiring in WIRINGS.items() if wiring.lanes == 1} == {"sequential", "gptj"}


def test_the_starts_are_the_records() -> None:
    assert (STARTS["symmetric"].attn, STARTS["symmetric"].mlp) == ((1.0, 1.0), (1.0, 1.0))
    assert (STARTS["asymmetric"].attn, STARTS["asymmetric"].mlp) == ((1.3, 0.7), (0.7, 1.3))
    assert all(start.keep**2 == pytest.approx(1.1) for start in STARTS.values())


@settings(max_examples=3)
@given(seed=SEEDS)
def test_lanes_can_be_exchanged_where_both_are_read_alike(seed: int) -> None:
    for wiring in ("z2", "gauge"):
        model = make(wiring, seed)
        assert torch.equal(rerouted(model, model.post.flip(-1)), model(TOKENS)), wiring
    for wiring in ("shipped", "simultaneous"):
        model = make(wiring, seed)
        assert moves(model, model.post.flip(-1)), wiring


@settings(max_examples=3)
@given(seed=SEEDS, amount=st.floats(0.05, 1.0), layer=st.integers(2, 3), sublayer=st.integers(0, 1))
def test_a_weight_can_be_moved_between_lanes_in_the_gauge_alone(seed: int, amount: float, layer: int, sublayer: int) -> None:
    for wiring in ("gauge", "z2", "shipped", "simultaneous"):
        model = make(wiring, seed)
        post = model.post.detach().clone()
        post[layer, sublayer] += amount * torch.tensor((1.0, -1.0))
        assert moves(model, post) == (wiring != "gauge"), wiring


@settings(max_examples=3)
@given(seed=SEEDS)
def test_the_last_write_into_a_lane_that_is_not_read_out_is_lost(seed: int) -> None:
    for wiring in ("shipped", "simultaneous", "gauge", "z2"):
        model = make(wiring, seed)
        post = model.post.detach().clone()
        post[-1, :, 0] += 1
        assert moves(model, post) == (wiring in ("gauge", "z2")), wiring


def test_scalars_before_the_fork_do_nothing() -> None:
    for wiring in ("shipped", "simultaneous", "gauge", "z2"):
        model = make(wiring, 0)
        post = model.post.detach().clone()
        post[: CONFIG.lane_start] += 1
        assert torch.equal(rerouted(model, post), model(TOKENS))
