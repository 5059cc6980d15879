"""Bytes of a quantised model: packed without loss, counted tensor by tensor, predicted, and held against a budget.

    sha-256 | compressed( length | manifest | codes | scales and controls )       after a magic word and the compressor's letter

Elements of more than one byte are shuffled first: all first bytes, then all second bytes, for the upper bytes of numbers of one
size are much alike. Two predictions stand beside the actual size:

    gaussian   h - log2(k / levels) bits a weight, h = log2(2 pi e) / 2 = 2.047 the entropy of a normal variable of spread 1:
               the scale follows each row's own spread, so its codes have the same entropy whatever the weights' size
    entropy    the entropy of a tensor's own codes, taken by themselves: what no code without context can pass

The Gaussian formula takes the step k / levels to be small: it lacks log2(1 + step^2 / 12) / 2, .011 bits at k = 13.1. Both
predictions count the manifest as it is compressed alone; the Gaussian one counts scales and controls raw. Of 160 000 normal weights
at k = 13.1, brotli takes 1.3 per cent more than predicted and LZMA 4.6; on few values (k = 26) LZMA takes 15 per cent more.
"""

import hashlib
import json
import lzma
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int8
from torch import Tensor, nn

from studies.common.tables import markdown_table
from studies.lanes.gptq import GPTQSettings, QuantizedMatrix, QuantizedWeights, collect_hessians, dequantized, distortion, quantize

Compressor = Literal["lzma", "brotli"]
MAGIC = b"LANES-1\n"
FIXED = len(MAGIC) + 1 + hashlib.sha256().digest_size
GAUSSIAN = 0.5 * math.log2(2 * math.pi * math.e)
_DTYPES = MappingProxyType({"int8": torch.int8, "float16": torch.float16, "float32": torch.float32})
_LETTERS = MappingProxyType({"lzma": b"x", "brotli": b"b"})


def gaussian_bits(k: float, levels: int) -> float:
    """Bits a weight of normal weights on a grid of step ``k / levels`` spreads: 2.047 + log2(levels / k)."""
    return GAUSSIAN + math.log2(levels / k)


def entropy_bits(codes: Int8[Tensor, "..."]) -> float:
    """Bits an element of the codes' own distribution, each code by itself; 0 for none."""
    return _entropy(codes.detach().cpu().numpy().view(np.uint8))


def _entropy(values: np.ndarray) -> float:
    counts = np.bincount(values.reshape(-1), minlength=1)
    p = counts[counts > 0] / max(1, values.size)
    return float(-(p * np.log2(p)).sum()) + 0.0


def byte_shuffle(data: bytes, width: int) -> bytes:
    """All first bytes of elements of ``width`` bytes, then all second ones, and so on."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def byte_unshuffle(data: bytes, width: int) -> bytes:
    """What ``byte_shuffle`` was given."""
    return np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes()


def compress(data: bytes, compressor: Compressor) -> bytes:
    """LZMA at its highest preset, or brotli at 11 (``pip install 'mi-route2[lanes]'``). ``ValueError`` for another compressor."""
    if compressor == "brotli":
        return _brotli().compress(data, quality=11, lgwin=24)
    if compressor != "lzma":
        raise ValueError(f"unknown compressor {compressor!r}: choose from {', '.join(_LETTERS)}")
    # Codes are nearly independent: a literal coder without context has the least to learn.
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0, "dict_size": _window(data)}]
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=filters)


def _window(data: bytes) -> int:
    return max(1 << 12, min(1 << 26, 1 << max(1, len(data) - 1).bit_length()))


def _decompress(data: bytes, letter: bytes) -> bytes:
    return _brotli().decompress(data) if letter == _LETTERS["brotli"] else lzma.decompress(data, format=lzma.FORMAT_ALONE)


def _brotli() -> Any:
    if find_spec("brotli") is None:
        raise ValueError("brotli is not installed: pip install 'mi-route2[lanes]', or choose the compressor lzma")
    return import_module("brotli")


def pack(weights: QuantizedWeights, compressor: Compressor = "lzma") -> bytes:
    """All of ``weights`` in one checked string of bytes; ``unpack`` gives back the same tensors, bit for bit."""
    manifest = _manifest(weights)
    planes = b"".join(_shuffled(tensors) for tensors in _sections(weights).values())
    body = compress(len(manifest).to_bytes(4, "little") + manifest + planes, compressor)
    letter = _LETTERS[compressor]
    return MAGIC + letter + _digest(letter, body) + body


def unpack(data: bytes) -> QuantizedWeights:
    """What ``pack`` was given. ``ValueError`` where the bytes are not of ``pack``, or one of them was changed."""
    if not data.startswith(MAGIC):
        raise ValueError("these bytes are no packed model of this study: they do not start with its mark")
    letter, digest, body = data[len(MAGIC) : len(MAGIC) + 1], data[len(MAGIC) + 1 : FIXED], data[FIXED:]
    if digest != _digest(letter, body):
        raise ValueError("the packed model is damaged: it does not match its own checksum; pack it again")
    if letter not in _LETTERS.values():
        raise ValueError(f"the packed model names an unknown compressor {letter!r}: a later version wrote it")
    whole = _decompress(body, letter)
    length = 4 + int.from_bytes(whole[:4], "little")
    manifest = json.loads(whole[4:length])
    slots = [(m[0], "codes", "int8", m[1]) for m in manifest["matrices"]]
    slots += [(m[0], "scale", m[4], m[1][:1]) for m in manifest["matrices"]]
    slots += [(name, "control", dtype, shape) for name, dtype, shape in manifest["controls"]]
    found = _unshuffled(slots, whole[length:])
    matrices = {m[0]: QuantizedMatrix(found[m[0], "codes"], found[m[0], "scale"], m[2], m[3]) for m in manifest["matrices"]}
    return QuantizedWeights(matrices, {name: found[name, "control"] for name, _, _ in manifest["controls"]})


def save_packed(weights: QuantizedWeights, path: Path, compressor: Compressor = "lzma") -> int:
    """Write the packed model whole or not at all; its bytes."""
    data = pack(weights, compressor)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(data)


def load_packed(path: Path) -> QuantizedWeights:
    """What ``save_packed`` wrote. ``ValueError`` naming the file where it is damaged."""
    try:
        return unpack(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _digest(letter: bytes, body: bytes) -> bytes:
    return hashlib.sha256(MAGIC + letter + body).digest()


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _manifest(weights: QuantizedWeights) -> bytes:
    """Names, shapes, grids and types of all tensors, in the order of their bytes."""
    matrices = [[n, list(m.codes.shape), m.k, m.levels, _dtype(m.scale)] for n, m in weights.matrices.items()]
    controls = [[n, _dtype(t), list(t.shape)] for n, t in weights.controls.items()]
    return json.dumps({"matrices": matrices, "controls": controls}, separators=(",", ":")).encode()


def _sections(weights: QuantizedWeights) -> dict[str, list[Tensor]]:
    """All tensors by type, in the manifest's order: codes, scales, controls."""
    sections: dict[str, list[Tensor]] = {dtype: [] for dtype in _DTYPES}
    sections["int8"] += [m.codes for m in weights.matrices.values()]
    for t in (*(m.scale for m in weights.matrices.values()), *weights.controls.values()):
        sections[_dtype(t)].append(t)
    return sections


def _raw(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _shuffled(tensors: Sequence[Tensor]) -> bytes:
    return byte_shuffle(b"".join(map(_raw, tensors)), tensors[0].element_size()) if tensors else b""


def _unshuffled(slots: list[tuple[str, str, str, list[int]]], planes: bytes) -> dict[tuple[str, str], Tensor]:
    """The tensors of ``slots`` (name, part, type, shape) out of the sections that lie behind one another."""
    sizes = {dtype: sum(math.prod(s) for _, _, d, s in slots if d == dtype) for dtype in _DTYPES}
    if sum(size * t.itemsize for size, t in zip(sizes.values(), _DTYPES.values(), strict=True)) != len(planes):
        raise ValueError("the packed model's manifest does not fit its content; pack it again")
    found: dict[tuple[str, str], Tensor] = {}
    at = 0
    for name, dtype in _DTYPES.items():
        end = at + sizes[name] * dtype.itemsize
        flat = torch.from_numpy(np.frombuffer(byte_unshuffle(planes[at:end], dtype.itemsize), np.dtype(name)).copy())
        taken = 0
        for slot, part, own, shape in slots:
            if own == name:
                found[slot, part] = flat[taken : taken + math.prod(shape)].reshape(shape).clone()
                taken += math.prod(shape)
        at = end
    return found


@dataclass(frozen=True)
class Line:
    """One tensor's account. ``gaussian`` and ``entropy`` are bits an element, predicted and measured; ``alone`` is its bytes when
    compressed by itself."""

    name: str
    kind: Literal["codes", "scale", "control", "manifest"]
    elements: int
    raw: int
    gaussian: float
    entropy: float
    alone: int


@dataclass(frozen=True)
class Account:
    """Where the bytes are. ``actual`` is the whole packed model; tensors share a context there, so ``alone`` does not sum to it."""

    lines: tuple[Line, ...]
    compressor: Compressor
    actual: int
    budget: int | None = None

    @property
    def by_gaussian(self) -> float:
        """Bytes that the Gaussian estimate predicts."""
        return sum(line.elements * line.gaussian / 8 for line in self.lines)

    @property
    def by_entropy(self) -> float:
        """Bytes that the entropies of the tensors' own values predict."""
        return sum(line.elements * line.entropy / 8 for line in self.lines)

    @property
    def fits(self) -> bool:
        """Whether the packed model is within its budget; True where none is stated."""
        return self.budget is None or self.actual <= self.budget

    def table(self) -> str:
        """A Markdown table: a line for each tensor, then the whole."""
        header = ("tensor", "part", "elements", "raw bytes", "gaussian bits", "entropy bits", "bytes alone")
        rows = [
            (x.name, x.kind, x.elements, x.raw, f"{x.gaussian:.3f}", f"{x.entropy:.3f}", x.alone)
            for x in sorted(self.lines, key=lambda line: -line.alone)
        ]
        total = markdown_table(header, rows, left=2)
        text = f"\n{self.actual:,} bytes by {self.compressor}; predicted {self.by_gaussian:,.0f} (gaussian), "
        text += f"{self.by_entropy:,.0f} (entropy)"
        if self.budget is not None:
            spare = self.budget - self.actual
            text += f"; {'within' if self.fits else 'over'} the budget of {self.budget:,} by {abs(spare):,}"
        return total + text + "\n"


def account(weights: QuantizedWeights, compressor: Compressor = "lzma", budget: int | None = None) -> Account:
    """The bytes of ``weights``, tensor by tensor and packed, against ``budget`` bytes."""
    manifest = _manifest(weights)
    size = len(compress(manifest, compressor)) + FIXED
    bits = 8 * size / len(manifest)
    lines = [Line("manifest", "manifest", len(manifest), len(manifest), bits, bits, size)]
    for name, m in weights.matrices.items():
        lines.append(_line(name, "codes", m.codes, compressor, gaussian_bits(m.k, m.levels)))
        lines.append(_line(name, "scale", m.scale, compressor))
    lines += [_line(name, "control", t, compressor) for name, t in weights.controls.items()]
    return Account(tuple(lines), compressor, len(pack(weights, compressor)), budget)


def _line(
    name: str, kind: Literal["codes", "scale", "control"], t: Tensor, compressor: Compressor, gaussian: float | None = None
) -> Line:
    raw = _raw(t)
    planes = np.frombuffer(raw, np.uint8).reshape(-1, t.element_size()).T
    shuffled = byte_shuffle(raw, t.element_size())
    bits = 8.0 * t.element_size() if gaussian is None else gaussian
    return Line(name, kind, t.numel(), len(raw), bits, sum(map(_entropy, planes)), len(compress(shuffled, compressor)))


@dataclass(frozen=True)
class RatePoint:
    """One clip: bytes packed and predicted, the Linears' mean squared change in calibration, and what ``evaluate`` gave."""

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
    """A point for each clip ``k`` of the matrices, all on the same Hessians; ``evaluate`` is called with the quantised model.

    The model has its own weights again afterwards. ``distortion`` is the sum of tr(d H d^T) over the matrices.
    """
    settings = settings or GPTQSettings()
    hessians = collect_hessians(model, batches, settings.batches)
    own = {name: p.detach().clone() for name, p in model.named_parameters() if name in hessians}
    points = []
    for k in ks:
        weights = quantize(model, hessians, replace(settings, k=k))
        sizes = account(weights, compressor)
        lost = sum(distortion(own[name], weights.matrices[name].dequantize(), h) for name, h in hessians.items())
        with dequantized(model, weights):
            loss = float(evaluate(model))
        points.append(RatePoint(k, sizes.actual, sizes.by_gaussian, sizes.by_entropy, lost, loss))
    return points
