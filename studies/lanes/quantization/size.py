"""Bytes of a quantized model: losslessly packed, counted, and predicted.

    compressed( length | manifest | codes | scales and controls )       and a header that names the format and holds a checksum

No file is written, so the header is only counted. Elements of more than one byte are shuffled first (all first bytes, then all
second bytes), because the upper bytes of numbers of similar size are much alike. Two predictions accompany the actual size:

    gaussian   h - log2(k / levels) bits a weight, h = log2(2 pi e) / 2 = 2.047 the entropy of a normal variable of spread 1:
               the scale follows each row's own spread, so its codes have the same entropy whatever the weights' size
    entropy    the entropy of a tensor's own codes, each by itself: a lower bound for any code without context

The Gaussian formula assumes that the step k / levels is small: it neglects log2(1 + step^2 / 12) / 2, .011 bits at k = 13.1. Both
predictions count the manifest as compressed by itself; the Gaussian one counts scales and controls uncompressed. For 160 000 normal
weights at k = 13.1, brotli takes 1.3 per cent more than predicted and LZMA 4.6; on few values (k = 26) LZMA takes 15 per cent more.
"""

import json
import lzma
import math
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from studies.lanes.quantization.gptq import QuantizedWeights

Compressor = Literal["lzma", "brotli"]
HEADER = 41
"""Bytes of a magic word, of the compressor's letter and of a SHA-256."""
GAUSSIAN = 0.5 * math.log2(2 * math.pi * math.e)
DTYPES = (torch.int8, torch.float16, torch.float32)


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


def compress(data: bytes, compressor: Compressor) -> bytes:
    """Compress with LZMA at its highest preset, or with brotli at 11 (``pip install 'mi-route2[lanes]'``)."""
    if compressor == "brotli":
        if find_spec("brotli") is None:
            raise ValueError("brotli is not installed: pip install 'mi-route2[lanes]', or use compressor='lzma'")
        return import_module("brotli").compress(data, quality=11, lgwin=24)
    # Codes are nearly independent, so a literal coder without context has the fewest parameters to learn.
    window = max(1 << 12, min(1 << 26, 1 << max(1, len(data) - 1).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0, "dict_size": window}]
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=filters)


def pack(weights: QuantizedWeights, compressor: Compressor = "lzma") -> bytes:
    """Return ``weights`` as one byte string, from which they can be restored bit for bit: only then does its length count."""
    manifest = _manifest(weights)
    every = weights.matrices.values()
    tensors = [*(m.codes for m in every), *(m.scale for m in every), *weights.controls.values()]
    by_dtype = [(dtype.itemsize, b"".join(_raw(t) for t in tensors if t.dtype == dtype)) for dtype in DTYPES]
    planes = b"".join(byte_shuffle(raw, width) for width, raw in by_dtype)
    return compress(len(manifest).to_bytes(4, "little") + manifest + planes, compressor)


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

    bytes: int
    by_gaussian: float
    by_entropy: float


def sizes(weights: QuantizedWeights, compressor: Compressor = "lzma") -> Sizes:
    """Return the actual and the predicted bytes of ``weights``."""
    manifest = _manifest(weights)
    bits = 8 * (len(compress(manifest, compressor)) + HEADER) / len(manifest)
    lines = [(len(manifest), bits, bits)]  # elements, bits per element by the Gaussian estimate, bits per element by entropy
    for m in weights.matrices.values():
        lines.append((m.codes.numel(), gaussian_bits(m.k, m.levels), _entropy(m.codes)))
        lines.append((m.scale.numel(), 8.0 * m.scale.element_size(), _entropy(m.scale)))
    lines += [(t.numel(), 8.0 * t.element_size(), _entropy(t)) for t in weights.controls.values()]
    by_gaussian, by_entropy = (sum(line[0] * line[i] / 8 for line in lines) for i in (1, 2))
    return Sizes(HEADER + len(pack(weights, compressor)), by_gaussian, by_entropy)


def _entropy(t: Tensor) -> float:
    """Return the bits per element: the sum of the entropies of its bytes, each byte position by itself."""
    return sum(map(entropy_bits, np.frombuffer(_raw(t), np.uint8).reshape(-1, t.element_size()).T))
