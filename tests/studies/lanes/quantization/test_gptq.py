"""GPTQ is the brute-force column-by-column method, to the last code; its Hessians are those of the inputs, over every pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from studies.lanes.quantization.gptq import (
    GPTQSettings,
    collect_hessians,
    dequantized,
    gptq,
    quantize,
    round_to_nearest,
    row_scales,
)

pytestmark = pytest.mark.study


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(d: int, seed: int) -> Tensor:
    """A Hessian of inputs with a random covariance, of few more samples than features."""
    return torch.cov((drawn(2 * d, d, seed=seed) @ drawn(d, d, seed=seed + 1)).mT, correction=0)


def matrix(rows: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    weight = drawn(rows, d, seed=seed) * drawn(rows, 1, seed=seed + 7).exp()
    return weight, row_scales(weight, 13.1, 31)


class Looped(nn.Module):
    """Two passes through one Linear and one through another; logits by the embedding; a bias and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.gate = nn.Parameter(torch.ones(2, 6))
        self.seen: dict[str, list[Tensor]] = {"inner.weight": [], "last.weight": []}
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(drawn(*p.shape, seed=i))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for gate in self.gate:
            self.seen["inner.weight"].append(x)
            x = torch.tanh(self.inner(x * 1)) * gate
        self.seen["last.weight"].append(x)
        return nn.functional.linear(self.last(x), self.embed.weight)


def tokens(count: int, high: int = 11) -> list[Tensor]:
    return [torch.randint(0, high, (2, 5), generator=torch.Generator().manual_seed(i)) for i in range(count)]


# --- the algorithm


def obq(weight: Tensor, hessian: Tensor, scale: Tensor, levels: int, damping: float) -> Tensor:
    """Optimal brain quantisation in a fixed order: every error is compensated by the exact least-squares change of what is left.

    Takes the inverse anew from the Hessian of the remaining columns, where the method under test updates one factor.
    """
    d = len(hessian)
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(d, dtype=torch.float64)
    left = sorted(range(d), key=lambda j: -float(hessian[j, j]))
    w, codes = weight.clone(), torch.zeros_like(weight)
    while left:
        j = left[0]
        inverse = torch.linalg.inv(damped[left][:, left])
        codes[:, j] = (w[:, j] / scale.double()).round().clamp(-levels, levels)
        error = w[:, j] - codes[:, j] * scale.double()
        w[:, left] -= torch.outer(error / inverse[0, 0], inverse[0])
        left = left[1:]
    return codes.to(torch.int8)


@pytest.mark.parametrize("d", [1, 2, 7, 40])
@pytest.mark.parametrize("levels", [3, 31])
@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_it_is_brute_force_obq_to_the_last_code(d: int, levels: int, damping: float) -> None:
    weight = drawn(9, d, seed=d)
    scale, hessian = (
        row_scales(weight, 2.5, levels),
        correlated(d, seed=d) if d > 1 else torch.full((1, 1), 3.0, dtype=torch.float64),
    )
    codes = obq(weight, hessian, scale, levels, damping)
    for block in (1, 5, 16, d, 128):
        assert torch.equal(gptq(weight, hessian, scale, levels=levels, damping=damping, block=block), codes)
    if d > 2:
        assert not torch.equal(codes, round_to_nearest(weight, scale, levels))


@given(seed=st.integers(0, 1000), factor=st.sampled_from([2.0**-20, 0.5, 2.0**30]))
def test_rows_are_independent_and_the_size_of_the_hessian_has_no_say(seed: int, factor: float) -> None:
    weight, scale = matrix(6, 10, seed)
    hessian = correlated(10, seed)
    codes = gptq(weight, hessian, scale, levels=31)
    assert torch.equal(gptq(weight[2:4], factor * hessian, scale[2:4], levels=31), codes[2:4])


def test_a_column_that_calibration_never_saw_is_rounded_to_nearest() -> None:
    weight, scale = matrix(8, 20, seed=5)
    hessian = correlated(20, seed=6)
    dead = [3, 11]
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    codes, nearest = gptq(weight, hessian, scale, levels=31), round_to_nearest(weight, scale, 31)
    live = [j for j in range(20) if j not in dead]
    assert torch.equal(codes[:, dead], nearest[:, dead])
    assert not torch.equal(codes, nearest)
    # The mean of the diagonal, and with it the damping, is over all columns.
    same = gptq(weight[:, live], hessian[live][:, live], scale, levels=31, damping=0.01 * len(live) / 20)
    assert torch.equal(codes[:, live], same)
    assert torch.equal(gptq(weight, torch.zeros_like(hessian), scale, levels=31), nearest)


# --- scales


@given(seed=st.integers(0, 1000), size=st.floats(1e-3, 1e3), k=st.floats(1, 30), levels=st.sampled_from([7, 31, 127]))
def test_the_last_level_is_k_standard_deviations(seed: int, size: float, k: float, levels: int) -> None:
    weight = size * drawn(5, 40, seed=seed)
    scale = row_scales(weight, k, levels)
    clip = k * (weight - weight.mean(dim=1, keepdim=True)).square().mean(dim=1).sqrt()
    assert torch.allclose(scale.double() * levels, clip, rtol=1e-3)
    codes = round_to_nearest(weight, scale, levels)
    assert int(codes.abs().max()) <= levels
    inside = weight.abs() <= scale.double()[:, None] * levels
    off = (codes * scale.double()[:, None] - weight).abs() / scale.double()[:, None]
    assert bool((off[inside] <= 0.5 + 1e-9).all())


# --- Hessians and models


def test_hessians_are_over_every_pass() -> None:
    model = Looped()
    hessians = collect_hessians(model, tokens(5), 3)
    assert list(hessians) == ["inner.weight", "last.weight"]
    for name, inputs in model.seen.items():
        assert len(inputs) == 3 * {"inner.weight": 2, "last.weight": 1}[name]
        x = torch.cat(inputs).flatten(0, 1).detach().double()
        assert torch.allclose(hessians[name], x.mT @ x / len(x), rtol=1e-12)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["gptq", "nearest"])
def test_a_model_is_quantised_whole_and_stays_as_it_is(method) -> None:
    model, settings = Looped(), GPTQSettings(batches=4, method=method)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = quantize(model, collect_hessians(model, iter(tokens(4)), 4), settings)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert set(weights.matrices) == {"embed.weight", "inner.weight", "last.weight"}
    assert set(weights.controls) == {"inner.bias", "gate"}
    embedding = weights.matrices["embed.weight"]
    assert embedding.levels == 127
    assert torch.equal(
        embedding.codes, round_to_nearest(before["embed.weight"], row_scales(before["embed.weight"], 20.0, 127), 127)
    )
    values = weights.dequantize()
    for name, m in weights.matrices.items():
        assert torch.equal(values[name].double(), m.codes.double() * m.scale.double()[:, None])  # exact, though in float32
    with dequantized(model, weights) as same:
        assert same is model
        assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
        again = quantize(model, collect_hessians(model, tokens(4), 4), GPTQSettings(method="nearest"))
        assert again.matrices.keys() == weights.matrices.keys()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="inside"), dequantized(model, weights):
        raise RuntimeError("inside")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- end to end
