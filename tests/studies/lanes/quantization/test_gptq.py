"""GPTQ is the brute-force column-by-column method, to the last code; its Hessians are those of the inputs, over every pass."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from studies.lanes.config import LanesConfig, Loop
from studies.lanes.model import LanesModel
from studies.lanes.optim import LanesOptimizer, OptimSettings
from studies.lanes.quantization.gptq import (
    GPTQSettings,
    collect_hessians,
    dequantized,
    distortion,
    gptq,
    quantize,
    round_to_nearest,
    row_importance,
    row_scales,
)
from studies.lanes.quantization.size import sizes

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


@given(d=st.integers(2, 40), rows=st.integers(1, 12), seed=st.integers(0, 1000), size=st.sampled_from([1e-6, 1.0, 512.0]))
def test_under_a_multiple_of_the_identity_it_rounds_to_nearest(d: int, rows: int, seed: int, size: float) -> None:
    weight, scale = matrix(rows, d, seed)
    codes = gptq(weight, size * torch.eye(d, dtype=torch.float64), scale, levels=31)
    assert torch.equal(codes, round_to_nearest(weight, scale, 31))
    diagonal = torch.diag(drawn(d, seed=seed).square() + 0.1)  # no correlation, so no feedback, in whatever order
    assert torch.equal(gptq(weight, diagonal, scale, levels=31), codes)


@given(seed=st.integers(0, 1000), factor=st.sampled_from([2.0**-20, 0.5, 2.0**30]))
def test_rows_are_independent_and_the_size_of_the_hessian_has_no_say(seed: int, factor: float) -> None:
    weight, scale = matrix(6, 10, seed)
    hessian = correlated(10, seed)
    codes = gptq(weight, hessian, scale, levels=31)
    assert torch.equal(gptq(weight[2:4], factor * hessian, scale[2:4], levels=31), codes[2:4])


@pytest.mark.parametrize("d", [32, 64, 160])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [13.1, 30.0])
def test_from_32_features_on_it_loses_less_than_rounding_to_nearest(d: int, seed: int, k: float) -> None:
    """At these seeds. It is no theorem: the method is greedy, and the next test has a matrix where it loses."""
    weight, hessian = drawn(16, d, seed=seed), correlated(d, seed=10 * d + seed)
    scale = row_scales(weight, k, 31)
    lost = [
        distortion(weight, codes * scale[:, None].double(), hessian)
        for codes in (gptq(weight, hessian, scale, levels=31), round_to_nearest(weight, scale, 31))
    ]
    assert 0 < lost[0] < lost[1]


def test_on_tiny_matrices_it_can_lose() -> None:
    worse = 0
    for seed in range(50):
        weight, hessian = drawn(1, 8, seed=seed), correlated(8, seed=seed + 5000)
        scale = row_scales(weight, 13.1, 31)
        found = gptq(weight, hessian, scale, levels=31), round_to_nearest(weight, scale, 31)
        greedy, nearest = (distortion(weight, codes * scale.double()[:, None], hessian) for codes in found)
        worse += greedy > nearest
    assert 0 < worse < 25


@given(seed=st.integers(0, 1000), k=st.floats(5, 60))
def test_two_undamped_columns_never_lose(seed: int, k: float) -> None:
    """The first is rounded to nearest either way, and the second is then the best there is."""
    weight, hessian = drawn(4, 2, seed=seed), correlated(2, seed=seed)
    scale = row_scales(weight, k, 31).double()
    greedy = gptq(weight, hessian, scale, levels=31, damping=0.0) * scale[:, None]
    nearest = round_to_nearest(weight, scale, 31) * scale[:, None]
    for row in range(4):
        lost = [distortion(weight[row : row + 1], one[row : row + 1], hessian) for one in (greedy, nearest)]
        assert lost[0] <= lost[1] * (1 + 1e-9)


def test_distortion_is_the_mean_squared_change_of_the_outputs() -> None:
    x, weight, other = drawn(50, 7, seed=1), drawn(4, 7, seed=2), drawn(4, 7, seed=3)
    change = x @ (other - weight).mT
    assert distortion(weight, other, x.mT @ x / 50) == pytest.approx(float(change.square().sum(dim=1).mean()), rel=1e-12)


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


def test_a_hessian_that_says_nothing_is_refused() -> None:
    weight, scale = matrix(2, 3, seed=1)
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, torch.full((3, 3), torch.nan, dtype=torch.float64), scale, levels=31)
    with pytest.raises(ValueError, match="raise it"):
        gptq(weight, torch.ones(3, 3, dtype=torch.float64), scale, levels=31, damping=0.0)


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


def test_rows_without_spread_are_kept() -> None:
    weight = torch.tensor([[0.0, 0, 0, 0], [3.0, 3, 3, 3], [-5.0, -5.0001, -5, -5]], dtype=torch.float64)
    scale = row_scales(weight, 13.1, 31)
    for codes in (gptq(weight, correlated(4, seed=1), scale, levels=31), round_to_nearest(weight, scale, 31)):
        assert codes.tolist() == [[0] * 4, [31] * 4, [-31] * 4]
        assert torch.allclose(codes * scale[:, None].double(), weight, rtol=1e-3)
    single = torch.tensor([[2.5]])
    assert round_to_nearest(single, row_scales(single, 13.1, 31), 31).item() == 31


@pytest.mark.parametrize(
    ("size", "dtype"), [(1.0, torch.float16), (1e-9, torch.float32), (1e9, torch.float32), (1e-2, torch.float16)]
)
def test_scales_are_half_precision_where_it_holds_them(size: float, dtype: torch.dtype) -> None:
    scale = row_scales(size * drawn(4, 32, seed=1), 13.1, 31)
    assert scale.dtype == dtype
    assert torch.allclose(scale.double(), size * row_scales(drawn(4, 32, seed=1), 13.1, 31).double(), rtol=2e-3)


def test_importance_moves_the_clips() -> None:
    weight, hessian = drawn(6, 8, seed=1), correlated(8, seed=2)
    by_hand = [sum(abs(float(weight[i, j])) * float(hessian[j, j]) for j in range(8)) for i in range(6)]
    r = row_importance(weight, hessian)
    assert r.mean() == pytest.approx(1.0)
    assert torch.allclose(r, torch.tensor(by_hand, dtype=torch.float64) / (sum(by_hand) / 6))
    assert torch.equal(row_importance(torch.zeros(3, 8), hessian), torch.ones(3, dtype=torch.float64))
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    model[0].weight.data.copy_(weight)
    for clip_lambda in (0.0, 0.175, 50.0):
        found = quantize(model, {"0.weight": hessian}, GPTQSettings(clip_lambda=clip_lambda)).matrices["0.weight"].scale
        factor = (1 + clip_lambda * (r - 1)).clamp(0.5, 2.0)
        expected = 13.1 / 31 * weight.std(dim=1, correction=0) * factor
        assert torch.allclose(found.double(), expected, rtol=2e-3)


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


def test_what_calibration_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="3 calibration batches are needed, but only 2 were given"):
        collect_hessians(Looped(), tokens(2), 3)
    with pytest.raises(ValueError, match=r"inputs of '0.weight' are not finite"):
        collect_hessians(nn.Sequential(nn.Linear(3, 3)), [torch.full((2, 3), torch.inf)], 1)


def test_a_wider_clip_takes_fewer_bytes_and_loses_more() -> None:
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Tanh(), nn.Linear(64, 48)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(drawn(*p.shape, seed=i) / 7)
    batches = [drawn(40, 48, seed=10 + i) @ drawn(48, 48, seed=5) for i in range(4)]
    hessians, points = collect_hessians(model, batches, 4), []
    for k in (6.0, 13.1, 26.0, 52.0):
        weights = quantize(model, hessians, GPTQSettings(k=k))
        lost = sum(
            distortion(model.get_parameter(name).detach(), weights.matrices[name].dequantize(), h) for name, h in hessians.items()
        )
        points.append((sizes(weights, "brotli"), lost))
    for (found, loses), (wider, more) in pairwise(points):
        assert wider.bytes < found.bytes
        assert wider.by_entropy < found.by_entropy
        assert wider.by_gaussian < found.by_gaussian
        assert found.by_entropy < found.bytes < 1.15 * found.by_entropy  # six thousand codes: little to learn from
        assert more > 2 * loses  # a step twice as wide loses four times as much


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


def _set(name: str, value: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_parameter(name).data.view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("last.weight", torch.nan), "'last.weight' is not finite"),
        (_set("gate", torch.inf), "'gate' is not finite"),
        (_set("gate", 1e6), "controls='float32'"),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(change: Callable[[nn.Module], None], message: str) -> None:
    model = Looped()
    hessians = collect_hessians(model, tokens(2), 2)
    change(model)
    with pytest.raises(ValueError, match=message):
        quantize(model, hessians, GPTQSettings())
    if "float32" in message:
        assert quantize(model, hessians, GPTQSettings(controls="float32")).controls["gate"][0, 0] == 1e6


def test_settings_out_of_range_are_refused() -> None:
    for given_ in ({"k": 0.0}, {"levels": 128}, {"damping": -1.0}):
        with pytest.raises(ValueError, match=next(iter(given_))):
            GPTQSettings(**given_)


# --- end to end


def text(count: int, seed: int) -> list[Tensor]:
    """Batches of windows of one short text, started anywhere."""
    data = torch.tensor(list(b"two lanes that start equal receive equal gradients, so nothing can specialise. " * 2))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 79, (count, 8), generator=generator)
    return list(data[starts[..., None] + torch.arange(40)])


def test_a_trained_model_survives_six_bits_and_gptq_serves_it_better() -> None:
    config = LanesConfig(layers=3, d_model=32, heads=2, mlp=2, lane_start=2, loop=Loop(0, 1, 1), loop_embeddings=True)
    model = LanesModel(config, torch.Generator().manual_seed(0))
    optimizer = LanesOptimizer(model, OptimSettings(embed_rate=0.02, warmup=5, momentum_warmup=30))
    for step, batch in enumerate(text(30, seed=1)):
        model.zero_grad()
        model.loss(batch).backward()
        optimizer.set(step, 30)
        optimizer.step()
    held = torch.cat(text(4, seed=2))
    hessians = collect_hessians(model, [batch[:, :-1] for batch in text(8, seed=3)], 8)
    losses, moved, lost = {}, {}, {}
    with torch.no_grad():
        loss, logits = model.loss(held).item(), model(held)
        for method in ("gptq", "nearest"):
            weights = quantize(model, hessians, GPTQSettings(method=method))
            values = weights.dequantize()
            lost[method] = sum(distortion(model.get_parameter(name), values[name], h) for name, h in hessians.items())
            with dequantized(model, weights):
                losses[method] = model.loss(held).item()
                moved[method] = (model(held) - logits).square().mean().item()
    assert loss < 2.5  # it has learnt: chance is 5.5
    assert all(abs(one - loss) < 0.1 for one in losses.values())
    assert lost["gptq"] < 0.8 * lost["nearest"]
    assert 0 < moved["gptq"] < moved["nearest"]
    assert len(hessians) == 18
