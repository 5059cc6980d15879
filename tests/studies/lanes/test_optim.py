"""Muon is its equation, and torch's up to bfloat16; one optimizer steps a parameter; moments survive a hand-over bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from studies.lanes.config import LanesConfig
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimizer, OptimSettings

pytestmark = pytest.mark.study

EXACT = 1e-4
"""Relative error of a step in float32."""
SHAPES = {"square": (24, 24), "tall": (64, 16), "wide": (16, 64)}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tiny_model(**given: object) -> LanesModel:
    config = LanesConfig(**{"layers": 3, "d_model": 16, "heads": 2, "mlp": 2, "lane_start": 1, **given})
    return LanesModel(config, torch.Generator().manual_seed(0))


def linears(*weights: Tensor) -> nn.Sequential:
    """A model of these matrices alone."""
    model = nn.Sequential(*(nn.Linear(w.shape[1], w.shape[0], bias=False) for w in weights))
    for module, weight in zip(model, weights, strict=True):
        module.weight = nn.Parameter(weight.clone())
    return model


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
    model = linears(drawn(shape, 1))
    optimizer, (p,) = LanesOptimizer(model, settings), model.parameters()
    expected, others = written_out(shape, settings, total), written_out(shape, settings, total, nesterov=False)
    before, before64 = p.detach().double(), drawn(shape, 1).double()
    for step in range(total):
        p.grad = drawn(shape, 100 + step)
        optimizer.set(step, total)
        optimizer.step()
        after, size = p.detach().double(), (expected[step] - before64).norm()
        assert ((after - before) - (expected[step] - before64)).norm() < EXACT * size
        before, before64 = after, expected[step]
    assert (before - before64).norm() < EXACT * (before64 - drawn(shape, 1).double()).norm()
    assert (before - others[-1]).norm() > 3 * (before - before64).norm()  # the tolerance tells Nesterov's momentum from the plain


def test_controls_do_not_decay_and_are_adamws() -> None:
    model, q = nn.Module(), nn.Parameter(drawn((4,), 1))
    model.scale = p = nn.Parameter(drawn((4,), 1))
    own = LanesOptimizer(model, OptimSettings(momentum=0.98, control_rate=0.03))
    other = torch.optim.AdamW([q], lr=0.03, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        p.grad, q.grad = drawn((4,), step), drawn((4,), step)
        own.step()
        other.step()
    assert torch.allclose(p, q, atol=1e-6)


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


def trained(model: LanesModel, optimizer: LanesOptimizer, steps: range, total: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(0, 200, (4, 1), generator=generator)
        tokens = start + torch.arange(24) % 5  # predictable, so that the loss must fall
        loss = model.loss(tokens)
        model.zero_grad()
        loss.backward()
        optimizer.set(step, total)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_run_that_was_handed_over_is_the_uninterrupted_one_bit_for_bit(stop: int) -> None:
    settings, total = OptimSettings(warmup=2, momentum_warmup=6), 8
    whole, first, second = tiny_model(), tiny_model(), tiny_model()
    losses = trained(whole, LanesOptimizer(whole, settings), range(total), total)
    before, after = LanesOptimizer(first, settings), LanesOptimizer(second, settings)
    early = trained(first, before, range(stop), total)
    second.load_state_dict(first.state_dict())
    after.adopt(before)
    trained(first, before, range(stop, total), total)  # shares nothing with the other
    assert early + trained(second, after, range(stop, total), total) == losses
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    assert losses[-1] < losses[0]
