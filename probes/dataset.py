"""Labeled activations of rollouts in several modes, and splits that never share a prompt.

All rollouts of a prompt stay on one side of every split. A model writes similar programs for one prompt, and a probe could
recognize what it was trained on.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mi_route2.checks import Mask, as_mask, checked
from mi_route2.probes.probe import Class, Labels, class_mask


@checked
@dataclass(frozen=True, eq=False)
class Dataset:
    """Activations of `b` rollouts, with labels. A plain dataclass and not a `validated` one, because jaxtyping checks the shapes.

    Attributes:
        hidden: layer name -> `[b s d]` (`d` may differ between layers); finite inside the mask, any value outside.
        mask: predictor positions, at least one per rollout.
        labels: one label per rollout, or per token.
        mode: the mode of each rollout.
        positive: the class of the labels that scores rise for.

    Raises:
        ValueError: labels that ``probe.class_mask`` refuses, sizes that disagree, no layer, a rollout without a position, a masked
            activation that is not finite.
    """

    hidden: dict[str, Float[Tensor, "b s _d"]]
    mask: Mask
    labels: Labels
    mode: list[str]
    positive: Class = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", as_mask("mask", self.mask))
        n = len(self.mask)
        if not self.hidden or not n:
            raise ValueError("A dataset needs at least one layer and one rollout.")
        if len(self.labels) != n or len(self.mode) != n:
            raise ValueError(f"{n} rows in the mask, {len(self.labels)} labels and {len(self.mode)} modes: give one per rollout.")
        if not bool(self.mask.any(dim=1).all()):
            raise ValueError("Every rollout needs at least one position in the mask.")
        for layer, h in self.hidden.items():
            if h.shape[:2] != self.mask.shape:
                raise ValueError(f"Layer {layer!r} is {tuple(h.shape)}, but the mask is {tuple(self.mask.shape)}.")
            if not bool(torch.isfinite(h[self.mask.to(h.device)]).all()):
                raise ValueError(f"Layer {layer!r} holds NaN or infinity inside the mask: leave such rollouts out.")
        _ = self.is_positive  # checks the labels

    @cached_property
    def is_positive(self) -> Bool[Tensor, " b"] | Bool[Tensor, "b s"]:
        """Whether each rollout, or each token in the mask, is of the class ``positive``; on the CPU."""
        return class_mask(self.labels, self.mask, self.positive)


def group_ids(group: Sequence[Hashable] | Shaped[np.ndarray, " n"] | Shaped[Tensor, " n"]) -> Int[np.ndarray, " n"]:
    """Number the groups from 0 in order of first appearance, one number per item.

    Raises:
        TypeError: one text or a mapping in place of a list, or a group that is not compared by value, such as a list, a tensor of
            several numbers, or an object that is equal to itself alone.
        ValueError: a group that is NaN, or a tuple with one.
    """
    if isinstance(group, str | bytes):
        raise TypeError("The groups are one text where a list of ids belongs: put it in brackets.")
    if isinstance(group, Mapping):
        raise TypeError("The groups are a mapping, whose keys are no list of ids: give one id per rollout, in their order.")
    plain = group.tolist() if isinstance(group, np.ndarray | Tensor) and group.ndim == 1 else group
    group = [_value(key) for key in plain]
    for i, key in enumerate(group):
        if _has_nan(key):
            raise ValueError(f"Group {i} is NaN, which equals nothing: number the groups, or give '' for an empty prompt.")
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in group], dtype=np.int64)


def _value(key: Hashable) -> Hashable:
    """Return a key with the number of each tensor, which is equal only to itself; ``TypeError`` if it has no value like that."""
    if isinstance(key, tuple):
        return tuple(map(_value, key))
    if isinstance(key, Tensor) and key.numel() == 1:
        return key.item()
    if isinstance(key, Tensor) or (key is not None and type(key).__hash__ in (None, object.__hash__)):
        what = f"tensor of shape {list(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"A group is a {what}: give a number or a text for each item.")
    return key


def _has_nan(key: Hashable) -> bool:
    if isinstance(key, tuple):
        return any(map(_has_nan, key))
    try:
        return bool(key != key)
    except TypeError:  # of pandas' NA
        return True


@checked
def split_groups(
    group: Int[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], fractions: tuple[float, ...], rng: np.random.Generator
) -> list[Bool[np.ndarray, " n"]]:
    """Split rollouts into parts of about the given fractions, keeping groups (numbers, as of ``group_ids``) together.

    The split is stratified: groups with a hack and groups without one are split separately, so that every part has both kinds.
    Returns one mask per fraction; the masks are disjoint and cover everything.

    Raises:
        ValueError: a kind has fewer groups than there are parts, or fractions that are not positive or do not sum to 1.
    """
    if not (all(fraction > 0 for fraction in fractions) and abs(sum(fractions) - 1) <= 1e-9):  # negated, so that NaN fails too
        raise ValueError(f"Fractions must be positive and sum to 1, not {fractions}.")
    with_hack = np.unique(group[positive])
    masks = [np.zeros(len(group), dtype=bool) for _ in fractions]
    for label, ids in (("hack", with_hack), ("clean", np.setdiff1d(group, with_hack))):
        if len(ids) < len(masks):
            raise ValueError(f"The known mode has {len(ids)} {label} groups; a split into {len(masks)} parts needs as many.")
        for mask, chosen in zip(masks, _cut(rng.permutation(ids), fractions)):
            mask |= np.isin(group, chosen)
    return masks


def _cut(ids: Int[np.ndarray, " n"], fractions: tuple[float, ...]) -> list[Int[np.ndarray, " _k"]]:
    """Return consecutive pieces of `ids`, with at least one id each."""
    ends = np.round(np.cumsum(fractions) * len(ids)).astype(int)
    for i in range(len(ends)):
        least = (ends[i - 1] if i else 0) + 1
        ends[i] = min(max(ends[i], least), len(ids) - (len(ends) - 1 - i))
    return np.split(ids, ends[:-1])
