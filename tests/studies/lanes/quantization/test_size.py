"""A packed model comes back bit for bit, and its size is what the entropy of its codes says."""

import json
import lzma
import math

import brotli
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from studies.lanes.quantization import size
from studies.lanes.quantization.gptq import QuantizedMatrix, QuantizedWeights, row_scales
from studies.lanes.quantization.size import (
    GAUSSIAN,
    HEADER,
    byte_shuffle,
    compress,
    entropy_bits,
    gaussian_bits,
    pack,
    sizes,
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


def unpack(data: bytes, compressor: str) -> QuantizedWeights:
    """The weights behind packed bytes, as the format is described: only bytes that hold a model are its size."""
    whole = brotli.decompress(data) if compressor == "brotli" else lzma.decompress(data, format=lzma.FORMAT_ALONE)
    at = 4 + int.from_bytes(whole[:4], "little")
    manifest = json.loads(whole[4:at])
    wanted = [(name, "codes", "int8", shape) for name, shape, *_ in manifest["matrices"]]
    wanted += [(name, "scale", dtype, shape[:1]) for name, shape, _, _, dtype in manifest["matrices"]]
    wanted += [(name, "control", dtype, shape) for name, dtype, shape in manifest["controls"]]
    found: dict[tuple[str, str], Tensor] = {}
    for dtype in ("int8", "float16", "float32"):  # of each type all bytes of one place, then all of the next
        own, width = [one for one in wanted if one[2] == dtype], np.dtype(dtype).itemsize
        counts = [math.prod(shape) for *_, shape in own]
        end = at + width * sum(counts)
        flat = np.frombuffer(np.frombuffer(whole[at:end], np.uint8).reshape(width, -1).T.tobytes(), dtype)
        for (name, part, _, shape), values in zip(own, torch.from_numpy(flat.copy()).split(counts), strict=True):
            found[name, part] = values.reshape(shape)
        at = end
    assert at == len(whole)
    matrices = {m[0]: QuantizedMatrix(found[m[0], "codes"], found[m[0], "scale"], m[2], m[3]) for m in manifest["matrices"]}
    return QuantizedWeights(matrices, {name: found[name, "control"] for name, *_ in manifest["controls"]})


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9), st.sampled_from([1.0, 1e-9])), max_size=4),
    controls=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=4),
    compressor=st.sampled_from(COMPRESSORS),
)
def test_packed_weights_come_back_bit_for_bit(shapes, controls, compressor) -> None:
    """Of any shapes, scalars and empty ones too, and of both types of scales: float16 does not hold small ones."""
    matrices = {f"m{i}": coded(size * drawn(rows, columns, seed=i)) for i, (rows, columns, size) in enumerate(shapes)}
    assert all((m.scale.dtype == torch.half) == (size == 1.0) for m, (*_, size) in zip(matrices.values(), shapes, strict=True))
    kept = {f"c{i}": (drawn(*s, seed=i).half() if half else drawn(*s, seed=i)) for i, (s, half) in enumerate(controls)}
    assert_same(QuantizedWeights(matrices, kept), unpack(pack(QuantizedWeights(matrices, kept), compressor), compressor))


def test_without_brotli_there_is_lzma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="compressor='lzma'"):
        pack(small(), "brotli")
    assert_same(small(), unpack(pack(small()), "lzma"))


@given(data=st.binary(max_size=64), width=st.sampled_from([1, 2, 4]))
def test_shuffling_gathers_bytes_of_one_place(data: bytes, width: int) -> None:
    data = data[: len(data) // width * width]
    assert byte_shuffle(data, width) == b"".join(data[place::width] for place in range(width))


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
    assert found.by_entropy < found.bytes
    assert found.by_gaussian < found.bytes < found.by_gaussian * (1 + MARGINS[compressor, k])


@pytest.mark.parametrize(("compressor", "margin"), [("lzma", 0.13), ("brotli", 0.06)])
def test_the_entropy_foretells_weights_that_are_not_normal(compressor, margin: float) -> None:
    found = sizes(QuantizedWeights({"w": coded(drawn(250, 320, seed=1) ** 3)}, {}), compressor)
    assert found.by_entropy < found.bytes < found.by_entropy * (1 + margin)
    assert found.by_gaussian > 1.3 * found.bytes


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_sizes_count_every_byte(compressor) -> None:
    """By hand: codes at their entropies, everything else at its raw size, and the manifest as it is compressed alone."""
    weights = small()
    found = sizes(weights, compressor)
    assert found.bytes == HEADER + len(pack(weights, compressor))
    raw = sum(t.numel() * t.element_size() for t in (*weights.controls.values(), *(m.scale for m in weights.matrices.values())))
    codes = sum(m.codes.numel() * gaussian_bits(m.k, m.levels) for m in weights.matrices.values()) / 8
    manifest = len(compress(size._manifest(weights), compressor)) + HEADER
    assert found.by_gaussian == pytest.approx(raw + codes + manifest)
    assert found.by_entropy < found.by_gaussian
