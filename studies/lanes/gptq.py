"""GPTQ: matrices rounded to 6-bit levels, each rounding error fed into the columns that are still to come (Frantar et al. 2023).

    scale_i = k std(row i) / 31          levels -31 .. 31, so that the last level is the clip of k standard deviations
    H       = mean of x x^T              over the inputs of a Linear, damped by .01 of its mean diagonal
    U       = upper Cholesky of H^-1     columns in the order of H's diagonal, the largest first
    q_j     = clamp(round(w_j / scale)), e_j = (w_j - q_j scale) / U_jj, w_m <- w_m - e_j U_jm for m > j

Minimised, column by column, is tr(d H d^T), d the error of the weights: the mean squared error of the outputs. It is a greedy
method: on tiny matrices it can lose against rounding to nearest, which is what it does where H is a multiple of the identity. An
input that calibration never saw has neither weight nor correlations in H: its column is rounded to nearest too, not dropped.

Levels are symmetric: a level -32 would lie outside of the clip that the formula states. At k = 13.1 the clip is hardly ever
reached. What k sets is the step, .42 std, and with it the entropy of the codes: 3.3 bits, not 6 (see ``size``).
Embeddings are rounded to nearest at 20 std / 127. All else is a control, kept in half precision.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int8
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, NonNegative, Positive, validated

Levels = Annotated[int, Field(ge=1, le=127)]  # codes are 8-bit

FACTORS = (0.5, 2.0)
"""Bounds of what ``clip_lambda`` may do to a row's clip: a large one would turn it negative."""


@validated
class GPTQSettings:
    """How a model is quantised.

    k, levels              of matrices: the clip in standard deviations of a row, and the level that stands for it
    embed_k, embed_levels  of embeddings, whose rows are the tokens
    method                 gptq, or nearest for rounding to nearest at the same scales (the control)
    batches                of training data that the Hessians are taken over
    damping                added to a Hessian's diagonal, as a part of its mean
    block                  columns between two updates of all later columns; changes the speed only
    clip_lambda            how far a row's importance moves its clip; 0 not at all, the public record says .175 (see row_importance)
    controls               the type that controls are kept in
    """

    k: Positive = 13.1
    levels: Levels = 31
    embed_k: Positive = 20.0
    embed_levels: Levels = 127
    method: Literal["gptq", "nearest"] = "gptq"
    batches: AtLeastOne = 16
    damping: NonNegative = 0.01
    block: AtLeastOne = 128
    clip_lambda: NonNegative = 0.0
    controls: Literal["float16", "float32"] = "float16"


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Integer codes with one scale a row, and the grid that they were taken on: the clip is ``k`` std at the level ``levels``."""

    codes: Int8[Tensor, "d_out d_in"]
    scale: Float[Tensor, " d_out"]
    k: float
    levels: int

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.int8 or self.codes.ndim != 2 or self.scale.shape != self.codes.shape[:1]:
            raise ValueError(f"codes {tuple(self.codes.shape)} and scales {tuple(self.scale.shape)} are not of one matrix")
        if self.codes.numel() and int(self.codes.short().abs().max()) > self.levels:
            raise ValueError(f"a code lies beyond the level {self.levels}")
        if not bool((torch.isfinite(self.scale) & (self.scale > 0)).all()):
            raise ValueError("a scale is not a positive number")

    def dequantize(self) -> Float[Tensor, "d_out d_in"]:
        """The weights that the codes stand for, in float32 (exact products where scales are float16)."""
        return self.codes.float() * self.scale.float()[:, None]


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """All parameters of a model by name: matrices and embeddings as codes, controls as they are kept."""

    matrices: dict[str, QuantizedMatrix]
    controls: dict[str, Tensor]

    def __post_init__(self) -> None:
        if twice := self.matrices.keys() & self.controls.keys():
            raise ValueError(f"{', '.join(sorted(twice))} are both matrix and control")
        for name, t in self.controls.items():
            if t.dtype not in (torch.float16, torch.float32):
                raise ValueError(f"the control {name!r} is {t.dtype}: keep it in float16 or float32")

    def dequantize(self) -> dict[str, Tensor]:
        """Every parameter in float32, as a state dict."""
        return {name: m.dequantize() for name, m in self.matrices.items()} | {n: t.float() for n, t in self.controls.items()}

    def load_into(self, model: nn.Module) -> None:
        """Write all parameters of ``model``, in place; ``ValueError``, changing nothing, where names or shapes are others."""
        own, new = dict(model.named_parameters()), self.dequantize()
        if own.keys() != new.keys():
            raise ValueError(f"these weights are of another model; they differ in {', '.join(sorted(own.keys() ^ new.keys())[:5])}")
        for name, p in own.items():
            if p.shape != new[name].shape:
                raise ValueError(f"{name!r} has shape {tuple(p.shape)} in the model, and {tuple(new[name].shape)} here")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(new[name])


@contextmanager
def dequantized(model: nn.Module, weights: QuantizedWeights) -> Iterator[nn.Module]:
    """Context: ``model`` with the quantised weights in it; its own come back afterwards, bit for bit."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights.load_into(model)
    try:
        yield model
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(kept[name])


def parts(model: nn.Module) -> tuple[dict[str, list[nn.Linear]], tuple[str, ...], tuple[str, ...]]:
    """Names of a model's parameters: matrices with the Linears that they serve, embeddings, controls.

    A matrix is the weight of an ``nn.Linear``. An embedding is that of an ``nn.Embedding``; a weight that is tied to one is
    an embedding. All else, a bias too, is a control.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    embeddings = {names[id(m.weight)] for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices: dict[str, list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and names[id(module.weight)] not in embeddings:
            matrices.setdefault(names[id(module.weight)], []).append(module)
    coded = matrices.keys() | embeddings
    ordered = names.values()
    return matrices, tuple(n for n in ordered if n in embeddings), tuple(n for n in ordered if n not in coded)


@torch.no_grad()
def collect_hessians(model: nn.Module, batches: Iterable[Any], count: int) -> dict[str, Float[Tensor, "d_in d_in"]]:
    """Mean of x x^T over the inputs of every Linear, in float64, by the weight's name, from ``model(batch)`` of ``count`` batches.

    Where a weight serves several passes (depth recurrence) or several Linears, the mean is over all of these inputs. The model runs
    in the mode that it is in.

    Raises:
        ValueError: fewer batches than ``count``, a Linear that did not run, or an input that is not finite.
    """
    matrices, _, _ = parts(model)
    sums: dict[str, Tensor] = {}
    seen = dict.fromkeys(matrices, 0)

    def add(name: str, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
        x = (inputs[0] if inputs else given["input"]).detach().flatten(0, -2).double()
        sums[name] = sums[name].addmm_(x.mT, x) if name in sums else x.mT @ x
        seen[name] += x.shape[0]

    with ExitStack() as hooks:
        for name, modules in matrices.items():
            for module in modules:
                hook = module.register_forward_pre_hook(
                    lambda _, inputs, given, name=name: add(name, inputs, given), with_kwargs=True
                )
                hooks.callback(hook.remove)
        ran = 0
        for batch in tqdm(islice(batches, count), total=count, desc="calibration", disable=None, leave=False):
            model(batch)
            ran += 1
    if ran < count:
        raise ValueError(f"{count} calibration batches were asked for and {ran} given: give more, or set batches={ran}")
    for name in matrices:
        if not seen[name]:
            raise ValueError(f"the Linear of {name!r} did not run in calibration: its module must be called, not its weight")
        if not bool(sums[name].isfinite().all()):
            raise ValueError(f"the inputs of {name!r} are not all finite")
    return {name: sums[name] / seen[name] for name in matrices}


def row_importance(weight: Float[Tensor, "d_out d_in"], hessian: Float[Tensor, "d_in d_in"]) -> Float[Tensor, " d_out"]:
    """A row's Hessian-weighted magnitude, sum_j |W_ij| H_jj, over its mean over the rows; all 1 where that mean is 0.

    The public record (pull request 1412) describes it as "row importance derived from Hessian-weighted magnitude"; the formula is
    that of its public implementations.
    """
    magnitude = weight.double().abs() @ hessian.double().diagonal()
    mean = magnitude.mean()
    return magnitude / mean if mean > 0 else torch.ones_like(magnitude)


def row_scales(
    weight: Float[Tensor, "d_out d_in"], k: float, levels: int, factor: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, " d_out"]:
    """``k std(row) / levels``, times ``factor``, as it is stored: float16, or float32 where one would leave float16's normal range.

    The formula takes rows to have a mean near 0. A row whose mean lies outside of its own clip (a constant one is the extreme)
    would be lost, and has max|w| / levels instead; a row of zeros has 1.
    """
    w = weight.double()
    clip = k * w.std(dim=1, correction=0) * (1.0 if factor is None else factor.double())
    clip = torch.where(w.mean(dim=1).abs() >= clip, w.abs().amax(dim=1), clip)
    scale = torch.where(clip > 0, clip / levels, 1.0)
    half = scale.half()
    if bool(half.isfinite().all()) and float(scale.min()) >= torch.finfo(torch.float16).smallest_normal:
        return half
    return scale.float().clamp_min(torch.finfo(torch.float32).tiny)


def round_to_nearest(
    weight: Float[Tensor, "d_out d_in"], scale: Float[Tensor, " d_out"], levels: int
) -> Int8[Tensor, "d_out d_in"]:
    """The nearest level of every weight by itself; ties go to the even level."""
    return (weight.double() / scale.double()[:, None]).round().clamp(-levels, levels).to(torch.int8)


def _feedback(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse."""
    mean = hessian.diagonal().mean()
    if mean == 0:  # no input was ever seen: nothing correlates
        return torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    damped = hessian + damping * mean * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    try:
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"the Hessian is singular at damping {damping}: raise it, or calibrate on more batches") from error


def gptq(
    weight: Float[Tensor, "d_out d_in"],
    hessian: Float[Tensor, "d_in d_in"],
    scale: Float[Tensor, " d_out"],
    *,
    levels: int,
    damping: float = 0.01,
    block: int = 128,
) -> Int8[Tensor, "d_out d_in"]:
    """Codes of ``weight`` under ``hessian`` at given scales, computed in float64 (see the module for the equations).

    ``ValueError`` for a Hessian that is not finite, or singular after damping.
    """
    if not bool(hessian.isfinite().all()):
        raise ValueError("the Hessian is not finite")
    order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = _feedback(hessian.double()[order][:, order], damping)
    w = weight.double().mT[order].contiguous()  # a row here is a column of the weight
    step = scale.double()
    codes = torch.empty_like(w)
    for start in range(0, len(w), block):
        stop = min(start + block, len(w))
        errors = torch.empty_like(w[start:stop])
        for j in range(start, stop):
            codes[j] = (w[j] / step).round().clamp(-levels, levels)
            errors[j - start] = (w[j] - codes[j] * step) / upper[j, j]
            w[j + 1 : stop].addr_(upper[j, j + 1 : stop], errors[j - start], alpha=-1)
        w[stop:].addmm_(upper[start:stop, stop:].mT, errors, alpha=-1)
    return codes[order.argsort()].mT.contiguous().to(torch.int8)


def distortion(
    weight: Float[Tensor, "d_out d_in"], other: Float[Tensor, "d_out d_in"], hessian: Float[Tensor, "d_in d_in"]
) -> float:
    """tr(d H d^T) for d = other - weight: the mean squared change of a Linear's output, summed over its features."""
    d = other.double() - weight.double()
    return float(((d @ hessian.double()) * d).sum())


def quantize(
    model: nn.Module, hessians: dict[str, Float[Tensor, "d_in d_in"]], settings: GPTQSettings | None = None
) -> QuantizedWeights:
    """The model's parameters on the grids of ``settings``, by the Hessians of ``collect_hessians``. The model stays as it is.

    ``ValueError`` naming a parameter that is not finite, or a control that float16 cannot hold.
    """
    settings = settings or GPTQSettings()
    matrices, embeddings, controls = parts(model)
    own = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in own.items():
        if not bool(p.isfinite().all()):
            raise ValueError(f"{name!r} is not finite: nothing is quantised")
    found: dict[str, QuantizedMatrix] = {}
    for name in embeddings:
        scale = row_scales(own[name], settings.embed_k, settings.embed_levels)
        codes = round_to_nearest(own[name], scale, settings.embed_levels)
        found[name] = QuantizedMatrix(codes, scale, settings.embed_k, settings.embed_levels)
    for name in tqdm(matrices, desc=settings.method, disable=None, leave=False):
        found[name] = _matrix(own[name], hessians[name], settings)
    kept = {name: own[name].to(getattr(torch, settings.controls), copy=True) for name in controls}
    for name, t in kept.items():
        if not bool(t.isfinite().all()):
            raise ValueError(f"{name!r} is out of {settings.controls}'s range: set controls='float32'")
    return QuantizedWeights({name: found[name] for name in own if name in found}, kept)


def _matrix(weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> QuantizedMatrix:
    """One weight of a Linear."""
    factor = None
    if settings.clip_lambda:
        factor = (1 + settings.clip_lambda * (row_importance(weight, hessian) - 1)).clamp(*FACTORS)
    scale = row_scales(weight, settings.k, settings.levels, factor)
    if settings.method == "nearest":
        codes = round_to_nearest(weight, scale, settings.levels)
    else:
        codes = gptq(weight, hessian, scale, levels=settings.levels, damping=settings.damping, block=settings.block)
    return QuantizedMatrix(codes, scale, settings.k, settings.levels)
