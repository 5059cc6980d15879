"""Partials and gaps against torch.func; what equal and unequal starts become; the same of two adapters."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_reader import byte_rows as draw
from tiny_reader import moved_model
from torch import Tensor
from torch.func import functional_call, grad

from studies.lanes.config import LanesConfig
from studies.lanes.gradients.symmetry import (
    PAIRS,
    TWO_LANES,
    AdapterPair,
    QuarantineSettings,
    SymmetrySettings,
    Trace,
    base,
    compared,
    exchange_gap,
    factors,
    gauge_gap,
    partials,
    relative,
    slopes,
    train_quarantine,
    train_symmetry,
    written,
)
from studies.lanes.model import LanesModel, byte_loss

pytestmark = pytest.mark.study

SMALL = LanesConfig(layers=4, d_model=8, heads=2, mlp=1, lane_start=2, zero_init=False)
SMALLEST = LanesConfig(layers=3, d_model=4, heads=1, mlp=1, lane_start=1, skips=False)


def make(config: LanesConfig, seed: int = 0) -> LanesModel:
    return LanesModel(config, torch.Generator().manual_seed(seed)).double()


def by_torch_func(model: LanesModel, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss that is written down here, by every parameter."""

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        logits = functional_call(model, parameters, (tokens[:, :-1],))
        return -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()

    return grad(loss)({name: p.detach() for name, p in model.named_parameters()})


# ---- partials


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("wiring", TWO_LANES)
def test_partials_are_the_gradients_and_leave_the_model_as_it_was(wiring: str, learned: bool) -> None:
    model = make(replace(SMALL, wiring=wiring, start="asymmetric", learned=learned))
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    found, expected = partials(model, draw()), by_torch_func(model, draw())
    for scalars in ("post", "resid"):
        assert torch.allclose(found[scalars], expected[scalars], rtol=0, atol=1e-14)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.requires_grad == before[name][1]
        assert p.grad is None


def test_partials_of_lanes_of_equal_weight() -> None:
    """Bit for bit equal under an exchange symmetry; in the gauge wherever the weights are; else not at all."""
    for wiring in TWO_LANES:
        for start in ("symmetric", "asymmetric"):
            model = make(replace(SMALL, wiring=wiring, start=start))
            pairs = partials(model, draw())["post"][list(compared(model.config))].flatten(0, 1)
            assert pairs.all(), "the instrument must see something"
            if wiring == "gauge" or (wiring, start) == ("z2", "symmetric"):
                assert all(relative(*pair) == 0.0 for pair in pairs), (wiring, start)
            else:
                assert all(relative(*pair) > 1e-3 for pair in pairs), (wiring, start)


# ---- gaps


@pytest.mark.parametrize("seed", range(3))
def test_gaps_are_zero_where_there_is_the_symmetry(seed: int) -> None:
    """For any routing scalars, gates and mixes."""
    gaps = {}
    for wiring in TWO_LANES:
        model = moved_model(replace(SMALL, wiring=wiring), seed)
        before = model.post.detach().clone()
        gaps[wiring] = exchange_gap(model, draw()), gauge_gap(model, draw())
        assert torch.equal(model.post, before)
    assert gaps["gauge"][0] == gaps["z2"][0] == 0.0
    assert abs(gaps["gauge"][1]) < 1e-13
    for gap in (*gaps["shipped"], *gaps["simultaneous"], gaps["z2"][1]):
        assert abs(gap) > 1e-8


# ---- along training


@cache
def trained(wiring: str, start: str, steps: int = 40, learned: bool = True) -> Trace:
    layers = SMALLEST.layers if wiring == "shipped" else 2  # in two, no lane of `shipped` lives on behind its writes
    config = replace(SMALLEST, layers=layers, wiring=wiring, start=start, learned=learned)
    return train_symmetry(config, SymmetrySettings(steps=steps, every=20, batch=1, rate=1e-2), draw(4, 7), 0)


def test_lanes_that_can_be_exchanged_stay_exactly_equal_for_300_steps() -> None:
    trace = trained("z2", "symmetric", 300)
    assert trace.steps == tuple(range(0, 301, 20))
    assert set(trace.differences) == {0.0}
    assert set(trace.partials) == {0.0}
    assert trace.losses[-1] < trace.losses[0] - 0.5


def test_unequal_lanes_keep_apart_and_others_come_apart() -> None:
    unequal = trained("z2", "asymmetric")
    assert unequal.differences[0] == pytest.approx(0.6, abs=1e-6)
    assert min(unequal.differences) > 0.3
    assert max(unequal.partials) > 1e-3
    shipped = trained("shipped", "symmetric")
    assert shipped.differences[0] == 0.0
    assert min(shipped.differences[1:]) > 1e-3
    gauge = trained("gauge", "asymmetric")
    assert gauge.differences == pytest.approx([0.6] * len(gauge.steps), abs=1e-6)
    assert set(gauge.partials) == {0.0}


# ---- a quarantine beside a kept adapter

QUARANTINES = QuarantineSettings(layers=1, d_model=8, heads=2, mlp=8, rank=2, batch=1, length=6, steps=20, every=5, rate=1e-2)


@cache
def quarantined(pair: AdapterPair) -> Trace:
    return train_quarantine(pair, QUARANTINES, draw(4, 7), 0)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.name}, {pair.start}")
def test_in_one_basis_both_adapters_receive_one_gradient(pair: AdapterPair) -> None:
    trace = quarantined(pair)
    assert (trace.kind, trace.steps) == ("quarantine", (0, 5, 10, 15, 20))
    assert trace.losses[-1] < trace.losses[0]
    if pair.quarantine == "shared":
        assert set(trace.partials) == {0.0}
        assert trace.differences == pytest.approx([trace.differences[0]] * 5, abs=1e-12)
        assert (trace.differences[0] == 0.0) == (pair.start == "equal")
    else:
        assert min(trace.partials) > 0.1
        assert trace.differences[0] == 0.0
        assert min(trace.differences[1:]) > 1e-3


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.name}, {pair.start}")
def test_partials_of_adapters_are_gradients_written_into_the_weight(pair: AdapterPair) -> None:
    """Against the matrices that the adapters say they add: a factor's gradient step moves them by this."""
    model = base(QUARANTINES, 7, torch.Generator().manual_seed(0))
    adapters = pair.attach(model, 2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    with adapters.unrouted():
        byte_loss(model(draw(2, 7)[:, :-1]), draw(2, 7)).backward()
    assert len(adapters.sites) == 6
    for branch in adapters.sites.values():
        own = factors(branch)
        for matrix, adapter in zip(written(branch, own), (branch.kept, branch.quarantine), strict=True):
            assert torch.allclose(matrix, adapter.delta(), rtol=0, atol=1e-14)
        before = [adapter.delta() for adapter in (branch.kept, branch.quarantine)]
        found = relative(*written(branch, {name: p.grad for name, p in own.items()}))
        with torch.no_grad():
            for p in own.values():
                p += p.grad
        kept, quarantine = (
            adapter.delta() - delta for adapter, delta in zip((branch.kept, branch.quarantine), before, strict=True)
        )
        assert found == pytest.approx(relative(kept, quarantine), abs=1e-9)
        assert (found == 0.0) == (pair.quarantine == "shared")


@pytest.mark.parametrize("wiring", TWO_LANES)
def test_slopes_are_the_rank_of_the_gradients_of_many_texts(wiring: str) -> None:
    """If the lanes are exchangeable, no text tells a sublayer's two weights apart: a direction without a slope for each."""
    model, texts = make(replace(SMALL, wiring=wiring)), draw(16, 7)
    by_text = [by_torch_func(model, text[None]) for text in texts]
    gradients = torch.stack([torch.cat((g["post"][2:].flatten(), g["resid"][2:].flatten())) for g in by_text])
    singular = torch.linalg.svdvals(gradients)
    found = slopes(model, texts)
    assert found == {"used": 12, "sloped": int((singular > 1e-10 * singular[0]).sum())}
    if wiring in ("gauge", "z2"):
        assert found["used"] - found["sloped"] >= 4
    with pytest.raises(ValueError, match="11 texts cannot show 12 directions"):
        slopes(model, texts[:11])
