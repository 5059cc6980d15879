"""Area under the ROC curve, exact with ties, its bootstrap interval over clusters, and recall at few false positives.

    AUROC = P(score of a hack > score of a clean one) + P(equal) / 2
          = c' M c / ((c . n1) (c . n0))
    recall at a rate a of false positives = max over thresholds t with  #{clean: s >= t} <= a n0  of  #{hack: s >= t} / n1

Cluster i holds n1_i hacks and n0_i clean items, M_ij is the number of pairs (hack of i, clean of j) in the right order (ties count
half), and c_i is how often cluster i was drawn; c = 1 gives the plain value. So one table of pairs serves every bootstrap draw.
Clusters are rollouts, or rollouts of one text, and never tokens: tokens of a rollout are not independent, and an interval that
assumes so is far too narrow. Recall is that of a threshold, without interpolation, and undefined if a n0 < 1: a single false
positive would exceed the rate.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from mi_route2.checks import checked


@dataclass(frozen=True)
class Interval:
    """Value and bounds of an estimate; all None if undefined (one class only)."""

    value: float | None
    low: float | None
    high: float | None


Labels = Bool[np.ndarray, "n"] | Int[np.ndarray, "n"]


def binary(positive: Shaped[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Return labels as booleans; ValueError for anything but 0 and 1, such as numbers, which would be used as row indices."""
    if positive.dtype != bool and not np.isin(positive, (0, 1)).all():
        wrong = {str(label): label for label in positive.ravel().tolist() if label not in (0, 1)}  # None and text have no order
        raise ValueError(f"Labels are True and False, or 1 and 0, not {list(wrong.values())[:5]}.")
    return positive.astype(bool)


@checked
def auroc(scores: Float[np.ndarray, " n"], positive: Labels) -> float | None:
    """Return the AUROC of `scores` for the label `positive`; None if a class is absent.

    Raises:
        ValueError: a score that is not finite, or a label other than 0 and 1.
    """
    above, below = _sides(scores, positive)
    if not len(above) or not len(below):
        return None
    return float(_below(below, above).mean() / len(below))


@dataclass(frozen=True)
class Recall:
    """Recall at a bounded rate of false positives; `value` is None if undefined, which `note` explains."""

    value: float | None
    note: str = ""


@checked
def recall_at_fpr(scores: Float[np.ndarray, " n"], positive: Labels, rate: float = 0.01) -> Recall:
    """Return the largest recall of a threshold (`score >= t`) that flags at most the share `rate` of the negatives.

    Raises:
        ValueError: a score that is not finite, a label other than 0 and 1, or a rate outside (0, 1).

    Examples:
        >>> recall_at_fpr(np.array([0.9, 0.1]), np.array([True, False]))
        Recall(value=None, note='1 negatives, but a rate of 0.01 needs 100')
    """
    if not 0 < rate < 1:
        raise ValueError(f"A rate of false positives lies strictly between 0 and 1, not {rate}.")
    above, below = _sides(scores, positive)
    allowed = math.floor(rate * len(below) + 1e-9)  # 0.07 * 100 is 7.000000000000001, and 0.29 * 100 is 28.999999999999996
    if not allowed:
        return Recall(None, f"{len(below)} negatives, but a rate of {rate:g} needs {math.ceil(1 / rate - 1e-9)}")
    if not len(above):
        return Recall(None, "no positives")
    return Recall(float((above > below[-1 - allowed]).mean()))  # a threshold at or below this negative flags one too many


@checked
def auroc_interval(
    scores: Float[np.ndarray, " n"],
    positive: Labels,
    cluster: Int[np.ndarray, " n"],
    draws: Int[np.ndarray, "m clusters"],
    level: float = 0.95,
) -> Interval:
    """Return the AUROC and its percentile bootstrap interval.

    Args:
        scores: one score per item.
        positive: one label per item.
        cluster: index of each item's cluster.
        draws: `draws[i, j]` is how often draw i contains cluster j (`cluster_draws`). Give the same draws for several probes, so
            that their differences are paired. Draws without both classes are left out.
        level: level of the interval.

    Raises:
        ValueError: a cluster that the draws do not have, or a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"The level of an interval lies strictly between 0 and 1, not {level}.")
    if len(cluster) and not 0 <= cluster.min() <= cluster.max() < draws.shape[1]:
        raise ValueError(f"The draws are of {draws.shape[1]} clusters: clusters are numbered from 0 to {draws.shape[1] - 1}.")
    value = auroc(scores, positive)
    if value is None:
        return Interval(None, None, None)
    positive, clusters = binary(positive), draws.shape[1]
    pairs = _ordered_pairs(scores, positive, cluster, clusters)
    above = draws @ np.bincount(cluster[positive], minlength=clusters)
    below = draws @ np.bincount(cluster[~positive], minlength=clusters)
    ordered = ((draws @ pairs) * draws).sum(axis=1)
    both = (above > 0) & (below > 0)
    if not both.any():
        return Interval(value, None, None)
    boot = ordered[both] / (above[both] * below[both])
    low, high = np.quantile(boot, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def cluster_draws(clusters: int, draws: int, rng: np.random.Generator) -> Int[np.ndarray, "m clusters"]:
    """Draw `draws` resamples, with replacement, of `clusters` clusters, as counts. ValueError without a cluster."""
    if clusters < 1:
        raise ValueError(f"A bootstrap needs at least one cluster to draw from, not {clusters}.")
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=draws)


def _sides(
    scores: Float[np.ndarray, " n"], positive: Labels
) -> tuple[Float[np.ndarray, " n_positive"], Float[np.ndarray, " n_negative"]]:
    """Return the scores of the positives, and those of the negatives in increasing order."""
    if not np.isfinite(scores).all():
        raise ValueError("Scores must be finite, because a NaN has no rank: leave such items out.")
    positive = binary(positive)
    return scores[positive], np.sort(scores[~positive])


def _below(ordered: Float[np.ndarray, " n"], values: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
    """Return the number of `ordered` (increasing) values below each value, ties counting half."""
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2


def _ordered_pairs(
    scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], cluster: Int[np.ndarray, " n"], clusters: int
) -> Float[np.ndarray, "clusters clusters"]:
    """Return the matrix M of the module's equation."""
    pairs = np.zeros((clusters, clusters))
    below, owner = scores[~positive], cluster[~positive]
    for i in np.unique(cluster[positive]).tolist():
        above = np.sort(scores[positive & (cluster == i)])
        above = len(above) - _below(above, below)
        pairs[i] = np.bincount(owner, weights=above, minlength=clusters)
    return pairs
