"""The probe protocol: activations to one score a token and one a rollout. Higher means more like a hack.

    token_bt = f(h_bt)          rollout_b = f( sum_t m_bt h_bt / sum_t m_bt )

`m` marks the *predictor* positions (from the last prompt token to the last but one of the completion); the score of a
rollout is the score of its mean activation. Positions outside the mask are never read, so padding may hold anything,
NaN included. A fitter is mutable and learns; what it returns is frozen and scores. One file a variant.
"""

from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from mi_route2.checks import Mask, as_mask

Unit = Literal["rollout", "token"]
Labels = Bool[Tensor, "b"] | Integer[Tensor, "b"]
"""One label a rollout, True or 1 for a hack."""


@runtime_checkable
class Probe(Protocol):
    """A frozen scorer of one layer's activations."""

    def score_tokens(self, h: Float[Tensor, "b s d"]) -> Float[Tensor, "b s"]:
        """One score per token, in float32 or wider. Scores at padding mean nothing: mask them."""
        ...

    def score_rollouts(self, h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, " b"]:
        """One score per rollout: that of the mean of `h` over `mask`. ValueError for a rollout with an empty mask."""
        ...


@runtime_checkable
class Fitter(Protocol):
    """Collects labelled activations (`update`, any number of times), then freezes them into a probe (`fit`)."""

    def update(self, h: Float[Tensor, "b s d"], mask: Mask, hack: Labels) -> None:
        """Add a batch; `hack` labels rollouts. Masks and labels are booleans, or 0 and 1."""
        ...

    def fit(self) -> Probe:
        """Return the probe learned so far. ValueError if the examples do not determine one."""
        ...


def widen(h: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """`h` in float32 at least: bfloat16 sums over tokens would lose the differences that probes read."""
    return h.to(torch.promote_types(h.dtype, torch.float32))


def pool(h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, "b d"]:
    """Mean activation over the masked positions of every rollout. ValueError for a rollout with none."""
    mask = as_mask("mask", mask)
    count = mask.sum(dim=1)
    if empty := (count == 0).nonzero().flatten().tolist():
        raise ValueError(f"Rollouts {empty[:8]} have no position in the mask: drop them, or mark a predictor position.")
    # where, not a product: 0 * NaN is NaN, and padding may hold one.
    kept = torch.where(mask[..., None], widen(h), 0.0)
    return kept.sum(dim=1) / count[:, None]


def examples(h: Float[Tensor, "b s d"], mask: Mask, hack: Labels, unit: Unit) -> tuple[Float[Tensor, "n d"], Bool[Tensor, " n"]]:
    """Training examples in float64 on the CPU: one mean a rollout, or (`unit="token"`) each masked token under its
    rollout's label. ValueError where an activation inside the mask is not finite."""
    mask, hack = as_mask("mask", mask), as_mask("hack", hack)
    if unit == "rollout":
        x, y = pool(h, mask), hack
    else:
        x, y = h[mask], hack[:, None].expand_as(mask)[mask]
    x = x.detach().to("cpu", torch.float64)
    if not torch.isfinite(x).all():
        raise ValueError("Activations inside the mask hold NaN or infinity: a probe cannot be fitted to them.")
    return x, y.to("cpu", copy=True)  # the caller may write the next batch's labels into its own


def require_both_classes(y: Bool[Tensor, " n"]) -> None:
    """ValueError unless there are hack and clean examples."""
    if y.numel() == 0 or bool(y.all()) or not bool(y.any()):
        raise ValueError(f"A probe needs hack and clean examples; it has {int(y.sum())} and {int((~y).sum())}.")


def require_width(h: Float[Tensor, "*n d"], width: int) -> None:
    """ValueError unless the last axis of `h` has the probe's width."""
    if h.shape[-1] != width:
        raise ValueError(f"The activations have {h.shape[-1]} features and the probe {width}: another layer's probe?")


def unit_vector(v: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """`v / |v|` in float64 on the CPU. ValueError for a zero or non-finite vector."""
    v = v.detach().to("cpu", torch.float64)
    # Scaled by the largest entry first: squares of 1e-200 vanish.
    largest = v.abs().max() if v.numel() else torch.tensor(0.0)
    if not torch.isfinite(largest) or largest == 0:
        raise ValueError("A direction must be finite and not zero.")
    v = v / largest
    return v / v.norm()
