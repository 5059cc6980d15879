"""Bytes of a quantized model: losslessly packed, counted, and predicted.

    sha-256 | compressed( length | manifest | codes | scales and controls )       after a magic word and the compressor's letter

Elements of more than one byte are shuffled first (all first bytes, then all second bytes), because the upper bytes of numbers of
similar size are much alike. Two predictions accompany the actual size:

    gaussian   h - log2(k / levels) bits a weight, h = log2(2 pi e) / 2 = 2.047 the entropy of a normal variable of spread 1:
               the scale follows each row's own spread, so its codes have the same entropy whatever the weights' size
    entropy    the entropy of a tensor's own codes, each by itself: a lower bound for any code without context

The Gaussian formula assumes that the step k / levels is small: it neglects log2(1 + step^2 / 12) / 2, .011 bits at k = 13.1. Both
predictions count the manifest as compressed by itself; the Gaussian one counts scales and controls uncompressed. For 160 000 normal
weights at k = 13.1, brotli takes 1.3 per cent more than predicted and LZMA 4.6; on few values (k = 26) LZMA takes 15 per cent more.
"""

import hashlib
import json
import lzma
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from studies.lanes.gptq import GPTQSettings, QuantizedMatrix, QuantizedWeights, collect_hessians, dequantized, distortion, quantize

Compressor = Literal["lzma", "brotli"]
MAGIC = b"LANES-1\n"
FIXED = len(MAGIC) + 1 + hashlib.sha256().digest_size
GAUSSIAN = 0.5 * math.log2(2 * math.pi * math.e)
_DTYPES = MappingProxyType({"int8": torch.int8, "float16": torch.float16, "float32": torch.float32})
_LETTERS = MappingProxyType({"lzma": b"x", "brotli": b"b"})


def gaussian_bits(k: float, levels: int) -> float:
    """Return the bits per weight of normal weights on a grid of step ``k / levels`` standard deviations.

    The formula is 2.047 + log2(levels / k).
    """
    return GAUSSIAN + math.log2(levels / k)


def entropy_bits(values: UInt8[np.ndarray, "..."]) -> float:
    """Return the entropy of the values' distribution in bits per element, each value by itself; 0 for none."""
    counts = np.bincount(values.reshape(-1), minlength=1)
    p = counts[counts > 0] / max(1, values.size)
    return float(-(p * np.log2(p)).sum()) + 0.0


def byte_shuffle(data: bytes, width: int) -> bytes:
    """Return all first bytes of elements of ``width`` bytes, then all second ones, and so on."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def byte_unshuffle(data: bytes, width: int) -> bytes:
    """Invert ``byte_shuffle``."""
    return np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes()


def compress(data: bytes, compressor: Compressor) -> bytes:
    """Compress with LZMA at its highest preset, or with brotli at 11 (``pip install 'mi-route2[lanes]'``)."""
    if compressor == "brotli":
        return _brotli().compress(data, quality=11, lgwin=24)
    # Codes are nearly independent, so a literal coder without context has the fewest parameters to learn.
    window = max(1 << 12, min(1 << 26, 1 << max(1, len(data) - 1).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0, "dict_size": window}]
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=filters)


def _brotli() -> Any:
    if find_spec("brotli") is None:
        raise ValueError("brotli is not installed: pip install 'mi-route2[lanes]', or use compressor='lzma'")
    return import_module("brotli")


def pack(weights: QuantizedWeights, compressor: Compressor = "lzma") -> bytes:
    """Return ``weights`` as one byte string with a checksum; its length is the size of the model."""
    manifest = _manifest(weights)
    sections: dict[str, list[Tensor]] = {dtype: [] for dtype in _DTYPES}  # in the manifest's order: codes, scales, controls
    every = weights.matrices.values()
    for t in (*(m.codes for m in every), *(m.scale for m in every), *weights.controls.values()):
        sections[_dtype(t)].append(t)
    planes = b"".join(byte_shuffle(b"".join(map(_raw, own)), own[0].element_size()) for own in sections.values() if own)
    body = compress(len(manifest).to_bytes(4, "little") + manifest + planes, compressor)
    return MAGIC + _LETTERS[compressor] + _digest(_LETTERS[compressor], body) + body


def unpack(data: bytes) -> QuantizedWeights:
    """Return what ``pack`` was given, bit for bit: a size counts only if the model can be restored from those bytes.

    Raises:
        ValueError: If the bytes are not from ``pack``, or are damaged.
    """
    if not data.startswith(MAGIC):
        raise ValueError("these bytes are not a packed model of this study: they do not start with its magic word")
    letter, digest, body = data[len(MAGIC) : len(MAGIC) + 1], data[len(MAGIC) + 1 : FIXED], data[FIXED:]
    if digest != _digest(letter, body):
        raise ValueError("the packed model is damaged: its checksum does not match; pack it again")
    whole = _brotli().decompress(body) if letter == _LETTERS["brotli"] else lzma.decompress(body, format=lzma.FORMAT_ALONE)
    at = 4 + int.from_bytes(whole[:4], "little")
    manifest = json.loads(whole[4:at])
    slots = [(m[0], "codes", "int8", m[1]) for m in manifest["matrices"]]
    slots += [(m[0], "scale", m[4], m[1][:1]) for m in manifest["matrices"]]
    slots += [(name, "control", dtype, shape) for name, dtype, shape in manifest["controls"]]
    found: dict[tuple[str, str], Tensor] = {}
    for name, dtype in _DTYPES.items():
        own = [(slot, part, shape) for slot, part, other, shape in slots if other == name]
        end = at + dtype.itemsize * sum(math.prod(shape) for _, _, shape in own)
        flat = torch.from_numpy(np.frombuffer(byte_unshuffle(whole[at:end], dtype.itemsize), np.dtype(name)).copy())
        for (slot, part, shape), t in zip(own, flat.split([math.prod(shape) for _, _, shape in own]), strict=True):
            found[slot, part] = t.reshape(shape).clone()
        at = end
    matrices = {m[0]: QuantizedMatrix(found[m[0], "codes"], found[m[0], "scale"], m[2], m[3]) for m in manifest["matrices"]}
    return QuantizedWeights(matrices, {name: found[name, "control"] for name, _, _ in manifest["controls"]})


def _digest(letter: bytes, body: bytes) -> bytes:
    return hashlib.sha256(MAGIC + letter + body).digest()


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _manifest(weights: QuantizedWeights) -> bytes:
    """Return names, shapes, grids and types of all tensors, in the order of their bytes."""
    matrices = [[n, list(m.codes.shape), m.k, m.levels, _dtype(m.scale)] for n, m in weights.matrices.items()]
    controls = [[n, _dtype(t), list(t.shape)] for n, t in weights.controls.items()]
    return json.dumps({"matrices": matrices, "controls": controls}, separators=(",", ":")).encode()


def _raw(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Sizes:
    """Bytes of the whole packed model, and the predictions of the Gaussian estimate and of the tensors' own entropies."""

    actual: int
    by_gaussian: float
    by_entropy: float


def sizes(weights: QuantizedWeights, compressor: Compressor = "lzma") -> Sizes:
    """Return the actual and the predicted bytes of ``weights``."""
    manifest = _manifest(weights)
    own = 8 * (len(compress(manifest, compressor)) + FIXED) / len(manifest)
    lines = [(len(manifest), own, own)]  # elements, bits per element by the Gaussian estimate, bits per element by entropy
    for m in weights.matrices.values():
        lines.append((m.codes.numel(), gaussian_bits(m.k, m.levels), _entropy(m.codes)))
        lines.append((m.scale.numel(), 8.0 * m.scale.element_size(), _entropy(m.scale)))
    lines += [(t.numel(), 8.0 * t.element_size(), _entropy(t)) for t in weights.controls.values()]
    by_gaussian, by_entropy = (sum(line[0] * line[i] / 8 for line in lines) for i in (1, 2))
    return Sizes(len(pack(weights, compressor)), by_gaussian, by_entropy)


def _entropy(t: Tensor) -> float:
    """Return the bits per element: the sum of the entropies of its bytes, each byte position by itself."""
    return sum(map(entropy_bits, np.frombuffer(_raw(t), np.uint8).reshape(-1, t.element_size()).T))


@dataclass(frozen=True)
class RatePoint:
    """One clip: packed and predicted bytes, the Linears' mean squared output change in calibration, and ``evaluate``'s result."""

    k: float
    bytes: int
    by_gaussian: float
    by_entropy: float
    distortion: float
    loss: float


def rate_distortion(
    model: nn.Module,
    batches: Iterable[Any],
    ks: Sequence[float],
    evaluate: Callable[[nn.Module], float],
    settings: GPTQSettings | None = None,
    compressor: Compressor = "lzma",
) -> list[RatePoint]:
    """Return a point for each clip ``k`` of the matrices, all with the same Hessians.

    ``evaluate`` is called with the quantized model; the model's own weights are restored afterwards. ``distortion`` is the sum of
    tr(d H d^T) over the matrices.
    """
    settings = settings or GPTQSettings()
    hessians = collect_hessians(model, batches, settings.batches)
    own = {name: p.detach().clone() for name, p in model.named_parameters() if name in hessians}
    points = []
    for k in ks:
        weights = quantize(model, hessians, replace(settings, k=k))
        found = sizes(weights, compressor)
        lost = sum(distortion(own[name], weights.matrices[name].dequantize(), h) for name, h in hessians.items())
        with dequantized(model, weights):
            loss = float(evaluate(model))
        points.append(RatePoint(k, found.actual, found.by_gaussian, found.by_entropy, lost, loss))
    return points
