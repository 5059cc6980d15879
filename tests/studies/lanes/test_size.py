"""A packed model comes back bit for bit or not at all, and its size is what the entropy of its codes says."""

import lzma
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor, nn

from studies.lanes import size
from studies.lanes.gptq import GPTQSettings, QuantizedMatrix, QuantizedWeights, quantize, row_scales
from studies.lanes.size import (
    GAUSSIAN,
    byte_shuffle,
    byte_unshuffle,
    compress,
    entropy_bits,
    gaussian_bits,
    pack,
    rate_distortion,
    sizes,
    unpack,
)

pytestmark = pytest.mark.study

COMPRESSORS = ("lzma", "brotli")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(weight: Tensor, k: float = 13.1, levels: int = 31) -> QuantizedMatrix:
    scale = row_scales(weight, k, levels)
    return QuantizedMatrix((weight / scale[:, None]).round().clamp(-levels, levels).to(torch.int8), scale, k, levels)


def small(seed: int = 0) -> QuantizedWeights:
    matrices = {
        "embed.weight": coded(drawn(9, 5, seed=seed), 20.0, 127),
        "blocks.0.attn.q.weight": coded(1e-9 * drawn(6, 5, seed=1)),
    }
    controls = {"gate": drawn(3, 2, seed=2).half(), "post": drawn(4, seed=3), "one": torch.tensor(1.5), "none": torch.zeros(0, 3)}
    return QuantizedWeights(matrices, controls)


def assert_same(one: QuantizedWeights, other: QuantizedWeights) -> None:
    assert list(one.matrices) == list(other.matrices)
    assert list(one.controls) == list(other.controls)
    for name, m in one.matrices.items():
        found = other.matrices[name]
        assert (m.k, m.levels) == (found.k, found.levels)
        assert m.scale.dtype == found.scale.dtype
        assert torch.equal(m.codes, found.codes)
        assert torch.equal(m.scale, found.scale)
    for name, t in one.controls.items():
        assert t.dtype == other.controls[name].dtype
        assert torch.equal(t, other.controls[name])


# --- packing


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_packed_weights_come_back_bit_for_bit(compressor) -> None:
    weights = small()
    assert {m.scale.dtype for m in weights.matrices.values()} == {torch.float16, torch.float32}
    assert_same(weights, unpack(pack(weights, compressor)))
    assert_same(QuantizedWeights({}, {}), unpack(pack(QuantizedWeights({}, {}), compressor)))


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), max_size=4),
    controls=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=4),
    compressor=st.sampled_from(COMPRESSORS),
)
def test_any_shapes_come_back(shapes, controls, compressor) -> None:
    matrices = {f"m{i}": coded(drawn(*shape, seed=i)) for i, shape in enumerate(shapes)}
    kept = {f"c{i}": (drawn(*s, seed=i).half() if half else drawn(*s, seed=i)) for i, (s, half) in enumerate(controls)}
    assert_same(QuantizedWeights(matrices, kept), unpack(pack(QuantizedWeights(matrices, kept), compressor)))


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_every_changed_byte_is_noticed(compressor) -> None:
    data = pack(small(), compressor)
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(ValueError, match=r"not a packed model|damaged"):
                unpack(bytes(damaged))
    for cut in (b"", data[:5], data[:20], data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match=r"not a packed model|damaged"):
            unpack(cut)


def test_without_brotli_there_is_lzma(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(small(), "brotli")
    monkeypatch.setattr(size, "find_spec", lambda name: None)
    for call in (lambda: pack(small(), "brotli"), lambda: unpack(packed)):
        with pytest.raises(ValueError, match="compressor='lzma'"):
            call()
    assert_same(small(), unpack(pack(small())))


@given(data=st.binary(max_size=64), width=st.sampled_from([1, 2, 4]))
def test_shuffling_is_undone_and_gathers_bytes_of_one_place(data: bytes, width: int) -> None:
    data = data[: len(data) // width * width]
    shuffled = byte_shuffle(data, width)
    assert byte_unshuffle(shuffled, width) == data
    assert shuffled == b"".join(data[place::width] for place in range(width))


def test_shuffling_helps_numbers_of_one_size() -> None:
    raw = (1 + 0.1 * drawn(4000, seed=0)).numpy().tobytes()
    assert len(compress(byte_shuffle(raw, 4), "lzma")) < len(compress(raw, "lzma"))


# --- predictions


def test_the_gaussian_constant_is_the_entropy_of_a_normal_variable() -> None:
    def density(x: float) -> float:
        p = stats.norm.pdf(x)
        return float(-p * math.log2(p))

    found, error = integrate.quad(density, -30, 30)
    assert error < 1e-8
    assert pytest.approx(found, abs=1e-9) == GAUSSIAN
    assert round(GAUSSIAN, 3) == 2.047


def of_bins(k: float, levels: int) -> float:
    """Entropy of a normal variable rounded to a grid of ``levels`` on either side of 0, the last taking in the tail."""
    edges = (torch.arange(-levels, levels + 2, dtype=torch.float64) - 0.5) * k / levels
    edges[0], edges[-1] = -torch.inf, torch.inf
    p = torch.from_numpy(stats.norm.cdf(edges.numpy())).diff()
    p = p[p > 0]
    return float(-(p * p.log2()).sum())


@pytest.mark.parametrize(("k", "levels"), [(7.0, 31), (13.1, 31), (20.0, 31), (31.0, 31), (20.0, 127)])
def test_the_estimate_lacks_what_the_width_of_a_bin_adds_to_the_variance(k: float, levels: int) -> None:
    """A bin spreads its weights evenly, so the entropy is that of a variance of 1 + step^2 / 12: .011 bits more at k = 13.1."""
    more = 0.5 * math.log2(1 + (k / levels) ** 2 / 12)
    assert gaussian_bits(k, levels) + more == pytest.approx(of_bins(k, levels), abs=2e-4)
    assert of_bins(13.1, 31) - gaussian_bits(13.1, 31) == pytest.approx(0.0107, abs=1e-4)


def test_the_estimate_fails_for_wide_steps_and_narrow_clips() -> None:
    assert of_bins(62.0, 31) - gaussian_bits(62.0, 31) > 0.19  # a step of two standard deviations
    assert gaussian_bits(1.0, 31) - of_bins(1.0, 31) > 0.5  # a third of the weights are clipped
    assert gaussian_bits(13.1, 31) == pytest.approx(3.29, abs=0.001)  # of the six bits that are spoken of


@given(codes=st.lists(st.integers(-128, 127), min_size=1, max_size=40))
def test_entropy_is_that_of_the_codes_own_counts(codes: list[int]) -> None:
    expected = stats.entropy([codes.count(c) for c in set(codes)], base=2)
    assert entropy_bits(np.array(codes, np.int8).view(np.uint8)) == pytest.approx(float(expected), abs=1e-9)
    assert entropy_bits(np.zeros(0, np.uint8)) == 0


MARGINS = {("lzma", 6.0): 0.04, ("lzma", 13.1): 0.06, ("lzma", 26.0): 0.16}
MARGINS |= {("brotli", 6.0): 0.01, ("brotli", 13.1): 0.02, ("brotli", 26.0): 0.04}
"""By how much the actual size may exceed the Gaussian prediction, for 160 000 normal weights: LZMA is poor at few values."""


@pytest.mark.parametrize(("compressor", "k"), MARGINS)
def test_the_size_of_normal_weights_is_foretold(compressor, k: float) -> None:
    spread = torch.linspace(-3, 3, 250).exp()  # rows of many sizes have one entropy
    matrices = {f"w{i}": coded(drawn(250, 320, seed=i) * spread[:, None], k) for i in range(2)}
    found = sizes(QuantizedWeights(matrices, {"gate": drawn(16, seed=9).half()}), compressor)
    assert found.by_entropy == pytest.approx(found.by_gaussian, rel=0.015)
    assert found.by_entropy < found.actual
    assert found.by_gaussian < found.actual < found.by_gaussian * (1 + MARGINS[compressor, k])


@pytest.mark.parametrize(("compressor", "margin"), [("lzma", 0.13), ("brotli", 0.06)])
def test_the_entropy_foretells_weights_that_are_not_normal(compressor, margin: float) -> None:
    found = sizes(QuantizedWeights({"w": coded(drawn(250, 320, seed=1) ** 3)}, {}), compressor)
    assert found.by_entropy < found.actual < found.by_entropy * (1 + margin)
    assert found.by_gaussian > 1.3 * found.actual


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_sizes_count_every_byte(compressor) -> None:
    """By hand: codes at their entropies, everything else at its raw size, and the manifest as it is compressed alone."""
    weights = small()
    found = sizes(weights, compressor)
    assert found.actual == len(pack(weights, compressor))
    raw = sum(t.numel() * t.element_size() for t in (*weights.controls.values(), *(m.scale for m in weights.matrices.values())))
    codes = sum(m.codes.numel() * gaussian_bits(m.k, m.levels) for m in weights.matrices.values()) / 8
    manifest = len(compress(size._manifest(weights), compressor)) + size.FIXED
    assert found.by_gaussian == pytest.approx(raw + codes + manifest)
    assert found.by_entropy < found.by_gaussian


# --- rate and distortion


def tiny() -> tuple[nn.Module, list[Tensor]]:
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Tanh(), nn.Linear(64, 48))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(drawn(*p.shape, seed=i) / 7)
    mix = drawn(48, 48, seed=5)
    return model, [drawn(40, 48, seed=10 + i) @ mix for i in range(4)]


def test_a_wider_clip_takes_fewer_bytes_and_loses_more() -> None:
    model, batches = tiny()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings, ks = GPTQSettings(batches=4), (6.0, 13.1, 26.0, 52.0)
    exact = [model(x).detach() for x in batches]

    def evaluate(quantised: nn.Module) -> float:
        with torch.no_grad():
            return float(sum((quantised(x) - y).square().mean() for x, y in zip(batches, exact)))

    points = rate_distortion(model, iter(batches), ks, evaluate, settings, "brotli")
    assert [point.k for point in points] == list(ks)
    for point, wider in pairwise(points):
        assert wider.bytes < point.bytes
        assert wider.by_entropy < point.by_entropy
        assert wider.by_gaussian < point.by_gaussian
        assert wider.distortion > 2 * point.distortion  # a step twice as wide loses four times as much
        assert wider.loss > point.loss
        assert point.by_entropy < point.bytes < 1.15 * point.by_entropy  # six thousand codes: little to learn from
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    # The first matrix by hand: its change of the outputs on the batches themselves.
    hessians = {"0.weight": sum(x.double().mT @ x.double() for x in batches) / 160}
    hidden = [torch.tanh(model[0](x)).detach().double() for x in batches]
    hessians["2.weight"] = sum(x.mT @ x for x in hidden) / 160
    weights = quantize(model, hessians, GPTQSettings(k=13.1)).dequantize()
    lost = 0.0
    for name, inputs in (("0.weight", [x.double() for x in batches]), ("2.weight", hidden)):
        change = weights[name].double() - own[name].double()
        lost += sum(float((x @ change.mT).square().sum()) for x in inputs) / 160
    assert points[1].distortion == pytest.approx(lost, rel=1e-6)


def test_lzma_files_are_of_the_plain_kind() -> None:
    assert lzma.decompress(compress(b"abc" * 100, "lzma"), format=lzma.FORMAT_ALONE) == b"abc" * 100
