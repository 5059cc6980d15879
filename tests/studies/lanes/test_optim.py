"""Muon is its equation, and torch's up to bfloat16; one optimiser steps a parameter; a resumed run is the uninterrupted one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from studies.lanes.config import LanesConfig, Loop
from studies.lanes.gptq import parts
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimiser, OptimSettings, build_optimizer, kind_of

pytestmark = pytest.mark.study

EXACT = 1e-4
"""Relative error of a step in float32."""
BFLOAT16 = 0.03
"""That of torch's five Newton-Schulz steps, which are in bfloat16: .012 to .022 on normal matrices of 8 to 256 rows and columns."""
SHAPES = {"blocks.0.attn.q.weight": (24, 24), "blocks.0.mlp.up.weight": (64, 16), "blocks.1.mlp.down.weight": (16, 64)}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tiny_model(**given: object) -> LanesModel:
    config = LanesConfig(**{"layers": 3, "d_model": 16, "heads": 2, "mlp": 2, "lane_start": 1, **given})
    return LanesModel(config, torch.Generator().manual_seed(0))


def orthogonalised(u: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz by its action on singular values, s -> 3.4445 s - 4.775 s^3 + 2.0315 s^5, from s / |s|."""
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return left @ torch.diag(s) @ right


def written_out(shape: tuple[int, int], settings: OptimSettings, total: int, *, nesterov: bool = True) -> list[Tensor]:
    """The weight after every step of the module's equation, in float64."""
    w, b, found = drawn(shape, 1).double(), torch.zeros(shape, dtype=torch.float64), []
    for step in range(total):
        g = drawn(shape, 100 + step).double()
        mu = 0.85 + (0.98 - 0.85) * min(1, step / settings.momentum_warmup)
        rate = settings.matrix_rate * min(1, (step + 1) / settings.warmup, (total - step) / (settings.warmdown * total))
        b = mu * b + (1 - mu) * g
        x = orthogonalised(mu * b + (1 - mu) * g if nesterov else b)
        w = (1 - rate * settings.decay) * w - rate * math.sqrt(max(1, shape[0] / shape[1])) * x
        found.append(w)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_muon_is_the_equation_written_out(name: str) -> None:
    shape, total = SHAPES[name], 12
    settings = OptimSettings(momentum=0.98, matrix_rate=0.05, momentum_warmup=8, warmup=3, warmdown=0.5, decay=0.12)
    p = nn.Parameter(drawn(shape, 1))
    optimiser = build_optimizer([(name, p)], settings)
    expected, others = written_out(shape, settings, total), written_out(shape, settings, total, nesterov=False)
    before, before64 = p.detach().double(), drawn(shape, 1).double()
    for step in range(total):
        p.grad = drawn(shape, 100 + step)
        optimiser.set(step, total)
        optimiser.step()
        after, size = p.detach().double(), (expected[step] - before64).norm()
        assert ((after - before) - (expected[step] - before64)).norm() < EXACT * size
        before, before64 = after, expected[step]
    assert (before - before64).norm() < EXACT * (before64 - drawn(shape, 1).double()).norm()
    assert (before - others[-1]).norm() > 3 * (before - before64).norm()  # the tolerance tells Nesterov's momentum from the plain


def test_matrices_of_one_shape_in_one_batch_are_torchs_one_by_one() -> None:
    settings = OptimSettings(matrix_rate=0.05, decay=0.12, momentum=0.9)
    shapes = [*SHAPES.values(), *SHAPES.values()]
    own, other = ([nn.Parameter(drawn(shape, i)) for i, shape in enumerate(shapes)] for _ in range(2))
    ours = build_optimizer([(f"blocks.{i}.attn.q.weight", p) for i, p in enumerate(own)], settings)
    theirs = torch.optim.Muon(other, lr=0.05, weight_decay=0.12, momentum=0.9, nesterov=True, adjust_lr_fn="original")
    for step in range(3):
        for i, (p, q) in enumerate(zip(own, other, strict=True)):
            p.grad = drawn(shapes[i], 10 * step + i)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for i, (p, q) in enumerate(zip(own, other, strict=True)):
        assert (p - q).norm() < BFLOAT16 * (q - drawn(shapes[i], i)).norm()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_the_size_of_a_gradient_has_no_say(size: float) -> None:
    moved = []
    for scale in (1.0, size):
        p = nn.Parameter(torch.zeros(16, 24))
        optimiser = build_optimizer([("blocks.0.attn.q.weight", p)], OptimSettings(matrix_rate=1.0, decay=0.0))
        p.grad = drawn((16, 24), 5) * scale
        optimiser.step()
        moved.append(p.detach().clone())
        singular = torch.linalg.svdvals(p.detach())
        assert 0.6 < singular.min() < singular.max() < 1.25
    assert (moved[0] - moved[1]).norm() < EXACT * moved[0].norm()


@pytest.mark.parametrize("name", SHAPES)
def test_decay_is_decoupled_and_free_of_the_shape(name: str) -> None:
    """With decay, a step ends at what it ends at without it, less rate * decay * W; a tall matrix decays like a wide one."""
    start, ends = drawn(SHAPES[name], 2), []
    for decay in (0.0, 0.5):
        p = nn.Parameter(start.clone())
        optimiser = build_optimizer([(name, p)], OptimSettings(matrix_rate=0.1, decay=decay))
        p.grad = drawn(SHAPES[name], 3)
        optimiser.step()
        ends.append(p.detach().clone())
    assert torch.allclose(ends[1], ends[0] - 0.1 * 0.5 * start, atol=1e-6)


def test_controls_do_not_decay_and_are_adamws() -> None:
    p, q = nn.Parameter(drawn((4,), 1)), nn.Parameter(drawn((4,), 1))
    own = build_optimizer([("blocks.0.attn_scale", p)], OptimSettings(momentum=0.98, control_rate=0.03))
    other = torch.optim.AdamW([q], lr=0.03, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        p.grad, q.grad = drawn((4,), step), drawn((4,), step)
        own.step()
        other.step()
    assert torch.allclose(p, q, atol=1e-6)
    assert own.rates()["momentum"] == 0.98


@given(start=st.floats(0, 0.9), end=st.floats(0.9, 1), warmup=st.integers(0, 40), step=st.integers(0, 60), more=st.integers(1, 20))
def test_momentum_is_warmed_linearly(start: float, end: float, warmup: int, step: int, more: int) -> None:
    settings = OptimSettings(momentum_start=start, momentum=end, momentum_warmup=warmup)
    assert settings.momentum_at(warmup) == pytest.approx(end)
    assert settings.momentum_at(warmup + more) == settings.momentum_at(warmup)
    assert settings.momentum_at(0) == pytest.approx(start if warmup else end)
    if step + 2 <= warmup:
        a, b, c = (settings.momentum_at(step + i) for i in range(3))
        assert c - b == pytest.approx(b - a, abs=1e-12)
        assert c - a == pytest.approx(2 * (end - start) / warmup)


@given(total=st.integers(1, 300), warmup=st.integers(0, 50), warmdown=st.floats(0, 1), part=st.floats(0, 1))
def test_rates_rise_and_fall_linearly(total: int, warmup: int, warmdown: float, part: float) -> None:
    settings = OptimSettings(warmup=warmup, warmdown=warmdown)
    step = round(part * (total - 1))
    factor = settings.rate_factor(step, total)
    assert 0 < factor <= 1
    if step >= warmup and total - step >= warmdown * total:
        assert factor == 1
    if warmdown * total >= 1:
        assert settings.rate_factor(total - 1, total) <= 1 / (warmdown * total) + 1e-12
    if warmup:
        assert factor <= (step + 1) / warmup


def test_set_reaches_both_optimisers() -> None:
    settings = OptimSettings(momentum=0.98, matrix_rate=0.4, embed_rate=0.2, control_rate=0.1, warmup=4, momentum_warmup=10)
    optimiser = build_optimizer(tiny_model().named_parameters(), settings)
    optimiser.set(1, 100)
    expected = {"matrix": 0.2, "embedding": 0.1, "control": 0.05, "momentum": 0.85 + 0.13 / 10}
    assert optimiser.rates() == pytest.approx(expected)
    optimiser.set(50, 100)  # factors do not pile up
    assert optimiser.rates()["matrix"] == pytest.approx(0.4 * 50 / 60)


VARIANTS = [
    {"wiring": "z2", "lane_start": 2, "loop": Loop(0, 1, 1), "loop_embeddings": True, "head_bias": True},
    {"wiring": "sequential"},
    {"learned": False},
]


@pytest.mark.parametrize("given", VARIANTS)
def test_every_parameter_is_in_exactly_one_optimiser(given: dict[str, object]) -> None:
    model = tiny_model(**given)
    optimiser = build_optimizer(model.named_parameters(), OptimSettings())
    held = [id(p) for one in (optimiser._muon, optimiser._adamw) for group in one.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters() if p.requires_grad}
    by_muon = {id(p) for p in optimiser._muon.param_groups[0]["params"]}
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 18
    assert by_muon == {id(w) for w in linears}
    assert [name for name, kind in optimiser.kinds.items() if kind == "embedding"] == ["embed.weight"]
    matrices, embeddings, controls = parts(model)  # what is quantised has the same three kinds
    for kind, names in {"matrix": matrices, "embedding": embeddings, "control": controls}.items():
        assert all(kind_of(name, model.get_parameter(name)) == kind for name in names)


def test_a_matrix_shaped_control_is_a_control() -> None:
    for name in ("blocks.0.mix", "skip_weight", "loop_embed", "blocks.0.attn.q_gain"):
        assert kind_of(name, torch.zeros(2, 8)) == "control"
    assert kind_of("blocks.0.norm.weight", torch.zeros(8)) == "control"


def trained(model: LanesModel, optimiser: LanesOptimiser, steps: range, total: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(0, 200, (4, 1), generator=generator)
        tokens = start + torch.arange(24) % 5  # predictable, so that the loss must fall
        loss = model.loss(tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.set(step, total)
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(stop: int) -> None:
    settings, total = OptimSettings(warmup=2, momentum_warmup=6), 8
    whole = tiny_model()
    optimiser = build_optimizer(whole.named_parameters(), settings)
    losses = trained(whole, optimiser, range(total), total)
    first = tiny_model()
    before = build_optimizer(first.named_parameters(), settings)
    early = trained(first, before, range(stop), total)
    file = save(before.state_dict())
    second = tiny_model()
    second.load_state_dict(first.state_dict())
    after = build_optimizer(second.named_parameters(), settings)
    after.load_state_dict(load(file))
    assert early + trained(second, after, range(stop, total), total) == losses
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    own, other = optimiser.state_dict(), after.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], other[key]) for key in own)
    assert losses[-1] < losses[0]


def test_loading_replaces_all_moments_and_shares_none() -> None:
    model = tiny_model()
    optimiser = build_optimizer(model.named_parameters(), OptimSettings())
    trained(model, optimiser, range(2), 4)
    state = optimiser.state_dict()
    copy = {key: value.clone() for key, value in state.items()}
    trained(model, optimiser, range(2, 4), 4)
    assert all(torch.equal(state[key], copy[key]) for key in state)
    optimiser.load_state_dict(state)
    trained(model, optimiser, range(2, 4), 4)
    assert all(torch.equal(state[key], copy[key]) for key in state)
    optimiser.load_state_dict({})
    assert optimiser.state_dict() == {}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s | {"exp_avg/nobody": torch.zeros(1)}, "belongs to no trained parameter"),
        (lambda s: s | {"momentum_buffer/embed.weight": torch.zeros(257, 16)}, "belongs to no trained parameter"),
        (lambda s: s | {"exp_avg/embed.weight": torch.zeros(3)}, "has shape"),
        (lambda s: {key: value for key, value in s.items() if key != "step/embed.weight"}, "no step"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage, message: str) -> None:
    model = tiny_model()
    optimiser = build_optimizer(model.named_parameters(), OptimSettings())
    trained(model, optimiser, range(1), 4)
    state = optimiser.state_dict()
    with pytest.raises(ValueError, match=message):
        optimiser.load_state_dict(damage(state))
    assert all(torch.equal(value, state[key]) for key, value in optimiser.state_dict().items())


def test_a_parameter_without_a_gradient_stays() -> None:
    model = tiny_model()
    optimiser = build_optimizer(model.named_parameters(), OptimSettings(embed_decay=0.5, control_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.blocks[0].attn.q.weight.grad = torch.ones(16, 16)
    optimiser.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"blocks.0.attn.q.weight"}


def test_what_cannot_be_optimised_is_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="one tensor"):
        build_optimizer([("embed.weight", p), ("unembed.weight", p)], OptimSettings())
    with pytest.raises(ValueError, match="nothing to optimize"):
        build_optimizer([("embed.weight", p.requires_grad_(False))], OptimSettings())
    optimiser = build_optimizer([("blocks.0.gate", nn.Parameter(torch.zeros(3)))], OptimSettings())
    for step in (-1, 5):
        with pytest.raises(ValueError, match="steps count from 0"):
            optimiser.set(step, 5)
    for wrong in ({"matrix_rate": -1.0}, {"momentum": 1.5}, {"newton_schulz": 0}, {"warmdown": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            OptimSettings(**wrong)
