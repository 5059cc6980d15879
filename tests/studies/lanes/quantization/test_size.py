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


# --- predictions


def test_the_gaussian_constant_is_the_entropy_of_a_normal_variable() -> None:
    def density(x: float) -> float:
        p = stats.norm.pdf(x)
        return float(-p * math.log2(p))

    found, error = integrate.quad(density, -30, 30)
    assert error < 1e-8
    assert pytest.approx(found, abs=1e-9) == GAUSSIAN
    assert round(GAUSSIAN, 3) == 2.047


@given(codes=st.lists(st.integers(-128, 127), min_size=1, max_size=40))
def test_entropy_is_that_of_the_codes_own_counts(codes: list[int]) -> None:
    expected = stats.entropy([codes.count(c) for c in set(codes)], base=2)
    assert entropy_bits(np.array(codes, np.int8).view(np.uint8)) == pytest.approx(float(expected), abs=1e-9)
    assert entropy_bits(np.zeros(0, np.uint8)) == 0


MARGINS = {("lzma", 6.0): 0.04, ("lzma", 13.1): 0.06, ("lzma", 26.0): 0.16}
MARGINS |= {("brotli", 6.0): 0.01, ("brotli", 13.1): 0.02, ("brotli", 26.0): 0.04}
"""By how much the actual size may exceed the Gaussian prediction, for 160 000 normal weights: LZMA is poor at few values."""


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
