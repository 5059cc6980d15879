"""Probe protocol: a map from activations to one score per token and one per rollout, which rises for the class `positive`.

    token_bt = f(h_bt)          rollout_b = f( sum_t m_bt h_bt / sum_t m_bt )

`m` marks the *predictor* positions (from the last prompt token to the last but one token of the completion); the score of a rollout
is the score of its mean activation. Positions outside of the mask are never read, so padding may hold any value, NaN included,
and any label. A fitter is mutable and learns; the probe that it returns is frozen and scores. There is one file per variant.

Labels are one per rollout or one per token, and may be booleans, whole numbers or texts. A fitter's `positive` names the class that
the score rises for; all other labels are the negative class:

    fitter = LogisticFitter(unit="token", positive="hack")
    fitter.update(h, mask, labels)                             # labels: list or array of texts, [b] or [b s]
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, Shaped
from torch import Tensor

from mi_route2.checks import Mask, as_mask, checked

Unit = Literal["rollout", "token"]
Class = bool | int | str
"""Value of a label."""
Listed = Sequence[Class] | Sequence[Sequence[Class]] | Shaped[np.ndarray, "b"] | Shaped[np.ndarray, "b s"]
Labels = Bool[Tensor, "b"] | Integer[Tensor, "b"] | Bool[Tensor, "b s"] | Integer[Tensor, "b s"] | Listed
"""One label per rollout or per token."""


@runtime_checkable
class Probe(Protocol):
    """Frozen scorer of one layer's activations."""

    def score_tokens(self, h: Float[Tensor, "b s d"]) -> Float[Tensor, "b s"]:
        """Return one score per token, in float32 or wider. Scores at padding have no meaning: mask them."""
        ...

    def score_rollouts(self, h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, " b"]:
        """Return one score per rollout, that of the mean of `h` over `mask`. ValueError for a rollout with an empty mask."""
        ...


@runtime_checkable
class ProbeFitter(Protocol):
    """Mutable learner: collects labeled activations (`update`, any number of times), then returns a frozen probe (`fit`)."""

    def update(self, h: Float[Tensor, "b s d"], mask: Mask, labels: Labels) -> None:
        """Add a batch; `labels` are one per rollout or per token. Masks are booleans, or 0 and 1."""
        ...

    def fit(self) -> Probe:
        """Return the probe learned so far. ValueError if the examples do not determine one."""
        ...


def widen(h: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `h` in float32 at least, because bfloat16 sums over tokens would lose the differences that probes read."""
    return h.to(torch.promote_types(h.dtype, torch.float32))


def inner(h: Float[Tensor, "*n d"], w: Float[Tensor, "*m d"]) -> Float[Tensor, "*n"]:
    """Return `<h, w>` per row in the dtype of `h`; on a CPU, a row has the same bits alone and in any batch."""
    # A matrix product rounds by the shape of the batch. So does a sum by the layout, and by the threads that share a long row which
    # is alone: hence halves.
    products = (h * w.to(h)).contiguous()
    halves = torch.nn.functional.pad(products, (0, h.shape[-1] % 2)).unflatten(-1, (2, -1))
    return halves.sum(dim=-1).sum(dim=-1)


@checked
def pool(h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, "b d"]:
    """Return the mean activation over the masked positions of every rollout, in float32 or wider.

    It is a running mean in float64: that of a constant is the constant to the last bit, and neither padding nor other rollouts
    change a bit. A feature that cancels up to rounding is 0.

    Raises:
        ValueError: a rollout without a masked position.
    """
    mask = as_mask("mask", mask).to(h.device)
    count = mask.sum(dim=1)
    if empty := (count == 0).nonzero().flatten().tolist():
        raise ValueError(f"Rollouts {empty[:8]} have no position in the mask: drop them, or mark a predictor position.")
    mean = torch.zeros(len(h), h.shape[-1], dtype=torch.float64, device=h.device)
    size, number = mean.clone(), mask.cumsum(dim=1).double()
    for t in range(h.shape[1]):
        # torch.where and not a product, because 0 * NaN is NaN, and padding may hold NaN.
        marked, x = mask[:, t, None], h[:, t].double()
        mean = torch.where(marked, mean + (x - mean) / number[:, t, None], mean)
        size = torch.where(marked, size + x.abs(), size)
    # Bound of the rounding error of a running mean; a cosine would scale what is left of it up to 1.
    cancelled = mean.abs() <= 4 * torch.finfo(torch.float64).eps * size
    return torch.where(cancelled, 0.0, mean).to(widen(h).dtype)


def class_mask(labels: Labels, mask: Bool[Tensor, "b s"], positive: Class) -> Bool[Tensor, " b"] | Bool[Tensor, "b s"]:
    """Return which labels are `positive`, on the CPU: per rollout, or per token with False outside of the mask.

    Labels of tokens outside of the mask are not read. ``True`` accepts booleans and the numbers 0 and 1 alone.

    Raises:
        ValueError: labels of another shape, labels that are neither booleans, whole numbers nor texts, or labels other than 0 and 1
            without a class to name.
    """
    try:
        values = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError:  # rows of different lengths
        values = np.empty(0)
    if values.shape not in (tuple(mask.shape[:1]), tuple(mask.shape)):
        raise ValueError(f"Labels for {list(mask.shape)} positions: give one per rollout, or one per token, in rows of one length.")
    inside = np.ones(len(mask), dtype=bool) if values.ndim == 1 else mask.cpu().numpy()
    read = values[inside]
    if values.dtype.kind not in "biuU" or (positive is True and not np.isin(read, (0, 1)).all()):
        wrong = next((label for label in read.tolist() if not isinstance(label, Class) or label not in (0, 1)), None)
        raise ValueError(
            f"Labels are True and False, or 0 and 1, not {wrong!r}: name the class that the score rises for, positive='hack', say."
        )
    found = np.zeros(values.shape, dtype=bool)
    if (values.dtype.kind == "U") == isinstance(positive, str):  # a number equals no text
        found[inside] = read == positive
    return torch.from_numpy(found)


def examples(
    h: Float[Tensor, "b s d"], mask: Mask, labels: Labels, unit: Unit, positive: Class = True
) -> tuple[Float[Tensor, "n d"], Bool[Tensor, " n"]]:
    """Return training examples, in float64 on the CPU, and whether each is of the class `positive`.

    An example is the mean activation of a rollout, or (`unit="token"`) each masked token with its own or its rollout's label.

    Raises:
        ValueError: an activation inside the mask is not finite, labels as in `class_mask`, or labels of tokens for rollouts.
    """
    mask = as_mask("mask", mask).to(h.device)
    y = class_mask(labels, mask, positive)
    if unit == "rollout" and y.ndim == 2:
        raise ValueError("Labels per token fit a probe of tokens: pass unit='token', or give one label per rollout.")
    if unit == "rollout":
        x = pool(h, mask)
    else:
        x, y = h[mask], y.view(len(y), -1).expand(mask.shape)[mask.cpu()]
    x = x.detach().to("cpu", torch.float64)
    if not torch.isfinite(x).all():
        raise ValueError("Activations inside the mask hold NaN or infinity: a probe cannot be fitted to them.")
    return x, y


class ExampleStore:
    """Base of fitters that store the examples (float64, CPU) until `fit`."""

    def __init__(self, unit: Unit, positive: Class) -> None:
        self._unit: Unit = unit
        self._positive = positive
        self._batches: list[tuple[Tensor, Tensor]] = []

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, labels: Labels) -> None:
        """Add a batch. ValueError for non-finite activations inside the mask, or another width."""
        x, y = examples(h, mask, labels, self._unit, self._positive)
        require_width(x, self._batches[0][0].shape[1] if self._batches else x.shape[1])
        self._batches.append((x, y))

    def _stored(self) -> tuple[Float[np.ndarray, "n d"], Bool[np.ndarray, " n"]]:
        """Return all examples and labels. ValueError without both classes, or where variances would vanish or overflow."""
        y = torch.cat([y for _, y in self._batches]) if self._batches else torch.zeros(0, dtype=torch.bool)
        require_both_classes(int((~y).sum()), int(y.sum()), self._positive)
        x = torch.cat([x for x, _ in self._batches])
        if (size := float(x.abs().max())) and not 1e-150 < size < 1e150:
            raise ValueError(
                f"The largest activation is {size:.0e}, whose square no float64 holds: give activations in another unit."
            )
        return x.numpy(), y.numpy()


def require_both_classes(negative: int, positive: int, name: Class) -> None:
    """Raise ValueError unless both classes have examples."""
    if not negative or not positive:
        raise ValueError(
            f"A probe needs positive and negative examples; {positive} labels are positive={name!r} and {negative} are not: name "
            "a class that the labels have, and give examples of both."
        )


def require_width(h: Float[Tensor, "*n d"], width: int) -> None:
    """Raise ValueError unless the last axis of `h` has the probe's width."""
    if h.shape[-1] != width:
        raise ValueError(f"The activations have {h.shape[-1]} features, but the probe {width}: use the probe of this layer.")


def unit_vector(v: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Return `v / |v|` in float64 on the CPU. ValueError for a zero or non-finite vector."""
    v = v.detach().to("cpu", torch.float64)
    # Scaled by the largest entry first, because squares of 1e-200 underflow.
    largest = v.abs().max() if v.numel() else torch.tensor(0.0)
    if not torch.isfinite(largest) or largest == 0:
        raise ValueError("A direction must be finite and not zero.")
    v = v / largest
    return v / v.norm()
