"""GPTQ: round matrices to 6-bit levels; each rounding error is fed into the columns that follow (Frantar et al. 2023).

    scale_i = k std(row i) / 31          levels -31 .. 31, so that the last level is the clip of k standard deviations
    H       = mean of x x^T              over the inputs of a Linear, damped by .01 of its mean diagonal
    U       = upper Cholesky of H^-1     columns in the order of H's diagonal, the largest first
    q_j     = clamp(round(w_j / scale)), e_j = (w_j - q_j scale) / U_jj, w_m <- w_m - e_j U_jm for m > j

The algorithm minimizes tr(d H d^T) column by column, where d is the error of the weights: this is the mean squared error of the
outputs. The method is greedy: on tiny matrices it can be worse than rounding to nearest, to which it reduces if H is a multiple of
the identity. An input that is always 0 in calibration has neither a diagonal entry nor correlations in H: its column is rounded to
nearest, not dropped.

Levels are symmetric: a level -32 would lie outside of the clip that the formula states. At k = 13.1 the clip is hardly ever
reached. k sets the step, .42 std, and thereby the entropy of the codes: 3.3 bits, not 6 (see ``size``). Embeddings are rounded to
nearest at 20 std / 127. All other parameters are controls and are kept in half precision.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int8
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from mi_route2.validation import AtLeastOne, NonNegative, Positive, validated
from studies.lanes.model import kinds_of

Levels = Annotated[int, Field(ge=1, le=127)]  # codes are 8-bit

FACTORS = (0.5, 2.0)
"""Bounds of the factor by which ``clip_lambda`` changes a row's clip: a large one would make the clip negative."""


@validated
class GPTQSettings:
    """Settings of quantization.

    Attributes:
        k: Clip of matrices, in standard deviations of a row.
        levels: Level that stands for the clip of matrices.
        embed_k: Clip of embeddings, whose rows are the tokens.
        embed_levels: Level that stands for the clip of embeddings.
        method: `gptq`, or `nearest` for rounding to nearest at the same scales (the control).
        batches: Batches of training data over which the Hessians are averaged.
        damping: Added to a Hessian's diagonal, as a fraction of its mean.
        block: Columns between two updates of all later columns; affects the speed only.
        clip_lambda: How far a row's importance moves its clip (see `row_importance`); 0 for not at all, .175 in the public record.
        controls: Data type of the controls.
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
    """Integer codes with one scale per row, and their grid: the clip is ``k`` standard deviations at the level ``levels``."""

    codes: Int8[Tensor, "d_out d_in"]
    scale: Float[Tensor, " d_out"]
    k: float
    levels: int

    def dequantize(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weights that the codes represent, in float32 (the products are exact if the scales are float16)."""
        return self.codes.float() * self.scale.float()[:, None]


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """All parameters of a model by name: matrices and embeddings as codes, controls in their stored type."""

    matrices: dict[str, QuantizedMatrix]
    controls: dict[str, Tensor]

    def dequantize(self) -> dict[str, Tensor]:
        """Return every parameter in float32, as a state dict."""
        return {name: m.dequantize() for name, m in self.matrices.items()} | {n: t.float() for n, t in self.controls.items()}


@contextmanager
def dequantized(model: nn.Module, weights: QuantizedWeights) -> Iterator[nn.Module]:
    """Context: ``model`` with the quantized weights; its own weights are restored afterwards, bit for bit."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        model.load_state_dict(weights.dequantize())
        yield model
    finally:
        model.load_state_dict(kept)


@torch.no_grad()
def collect_hessians(model: nn.Module, batches: Iterable[Any], count: int) -> dict[str, Float[Tensor, "d_in d_in"]]:
    """Return the mean of x x^T over the inputs of every Linear, in float64, by the weight's name.

    The inputs are those of ``model(batch)`` on the first ``count`` batches. If a Linear runs several times (depth recurrence), the
    mean is over all of its inputs. The model runs in its current mode.

    Raises:
        ValueError: If there are fewer batches than ``count``, or if an input is not finite.
    """
    inputs = list(islice(batches, count))
    if len(inputs) < count:
        raise ValueError(f"{count} calibration batches are needed, but only {len(inputs)} were given: set batches={len(inputs)}")
    sums: dict[str, Tensor] = {}
    seen: Counter[str] = Counter()

    def add(_: nn.Module, inputs: tuple[Tensor, ...], name: str) -> None:
        x = inputs[0].flatten(0, -2).double()
        sums[name] = sums[name].addmm_(x.mT, x) if name in sums else x.mT @ x
        seen[name] += x.shape[0]

    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_pre_hook(partial(add, name=name)) for name, module in linears.items()]
    try:
        for batch in tqdm(inputs, "calibration", disable=None, leave=False):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if wrong := [name for name, total in sums.items() if not bool(total.isfinite().all())]:
        raise ValueError(f"some inputs of {wrong[0]!r} are not finite: check the model and its text")
    return {name: sums[name] / seen[name] for name in linears}


def row_importance(weight: Float[Tensor, "d_out d_in"], hessian: Float[Tensor, "d_in d_in"]) -> Float[Tensor, " d_out"]:
    """Return each row's Hessian-weighted magnitude sum_j |W_ij| H_jj, divided by its mean over the rows; 1 if that mean is 0.

    The public record (pull request 1412) describes it as "row importance derived from Hessian-weighted magnitude"; the formula is
    that of its public implementations.
    """
    magnitude = weight.double().abs() @ hessian.double().diagonal()
    mean = magnitude.mean()
    return magnitude / mean if mean > 0 else torch.ones_like(magnitude)


def row_scales(
    weight: Float[Tensor, "d_out d_in"], k: float, levels: int, factor: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, " d_out"]:
    """Return ``k std(row) / levels``, times ``factor``, as stored: float16, or float32 if outside of float16's normal range.

    The formula assumes that rows have a mean near 0. A row whose mean lies outside of its own clip (a constant row is the extreme)
    would be lost, so its scale is max|w| / levels; the scale of a row of zeros is 1.
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
    """Return the nearest level of every weight, each by itself; ties go to the even level."""
    return (weight.double() / scale.double()[:, None]).round().clamp(-levels, levels).to(torch.int8)


def _feedback(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian; ``ValueError`` if the damped Hessian is singular."""
    mean = hessian.diagonal().mean()
    if mean == 0:  # all inputs were 0: nothing correlates
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
    """Return codes of ``weight`` under ``hessian`` at the given scales, computed in float64 (equations: see the module).

    Raises:
        ValueError: If the Hessian is not finite, or singular after damping.
    """
    if not bool(hessian.isfinite().all()):
        raise ValueError("the Hessian is not finite: check the calibration inputs")
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
    """Return tr(d H d^T) for d = other - weight: the mean squared change of a Linear's output, summed over its features."""
    d = other.double() - weight.double()
    return float(((d @ hessian.double()) * d).sum())


def quantize(model: nn.Module, hessians: dict[str, Float[Tensor, "d_in d_in"]], settings: GPTQSettings) -> QuantizedWeights:
    """Return the model's parameters on the grids of ``settings``, given the Hessians of ``collect_hessians``.

    The model is unchanged.

    Raises:
        ValueError: If a parameter is not finite, or if a control is out of range for its stored type.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    controls: dict[str, Tensor] = {}
    kinds = kinds_of(model)
    for name, p in tqdm(list(model.named_parameters()), settings.method, disable=None, leave=False):
        weight = p.detach()
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name!r} is not finite: nothing is quantized")
        if kinds[name] == "matrix":
            matrices[name] = _matrix(weight, hessians[name], settings)
        elif kinds[name] == "embedding":
            scale = row_scales(weight, settings.embed_k, settings.embed_levels)
            codes = round_to_nearest(weight, scale, settings.embed_levels)
            matrices[name] = QuantizedMatrix(codes, scale, settings.embed_k, settings.embed_levels)
        else:
            controls[name] = weight.to(getattr(torch, settings.controls), copy=True)
            if not bool(controls[name].isfinite().all()):
                raise ValueError(f"{name!r} is out of range for {settings.controls}: set controls='float32'")
    return QuantizedWeights(matrices, controls)


def _matrix(weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> QuantizedMatrix:
    """Quantize the weight of one Linear."""
    factor = None
    if settings.clip_lambda:
        factor = (1 + settings.clip_lambda * (row_importance(weight, hessian) - 1)).clamp(*FACTORS)
    scale = row_scales(weight, settings.k, settings.levels, factor)
    if settings.method == "nearest":
        codes = round_to_nearest(weight, scale, settings.levels)
    else:
        codes = gptq(weight, hessian, scale, levels=settings.levels, damping=settings.damping, block=settings.block)
    return QuantizedMatrix(codes, scale, settings.k, settings.levels)
