"""Area under the ROC curve, exact with ties, and its bootstrap interval.

    AUROC = P(score of a hack > score of a clean one) + P(equal) / 2

With weights (how often each item was drawn) and tied scores in blocks k, in increasing order:
    AUROC = sum_k W1_k (sum_{j<k} W0_j + W0_k / 2) / (W1 W0)
One sort serves every bootstrap draw. Draws are of *clusters* (rollouts, or rollouts of one text), not of tokens: tokens
of a rollout are not independent, and an interval that pretends so is far too narrow.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

CHUNK = 2**22  # weights held at once while bootstrapping: 32 MiB in float64


@dataclass(frozen=True)
class Interval:
    """Value and bounds; all None where undefined (one class only)."""

    value: float | None
    low: float | None
    high: float | None


def auroc(scores: Float[np.ndarray, "n"], hack: Bool[np.ndarray, "n"]) -> float | None:
    """AUROC of finite `scores` for the label `hack`; None where one class is absent. ValueError for NaN scores."""
    value = _weighted(scores, hack, np.ones((1, len(scores))))[0]
    return None if np.isnan(value) else float(value)


def auroc_interval(
    scores: Float[np.ndarray, "n"],
    hack: Bool[np.ndarray, "n"],
    cluster: Int[np.ndarray, "n"],
    draws: Int[np.ndarray, "m clusters"],
    level: float = 0.95,
) -> Interval:
    """AUROC and its percentile bootstrap interval.

    `cluster`: index of each item's cluster; `draws[i, j]`: how often draw i holds cluster j (`cluster_draws`), shared by
    the caller between probes so that their differences are paired. Draws without both classes are left out.
    """
    value = auroc(scores, hack)
    if value is None:
        return Interval(None, None, None)
    rows = max(1, CHUNK // max(1, len(scores)))
    parts = [draws[start : start + rows] for start in range(0, len(draws), rows)]
    boot = np.concatenate([_weighted(scores, hack, part[:, cluster].astype(float)) for part in parts])
    boot = boot[~np.isnan(boot)]
    if not len(boot):
        return Interval(value, None, None)
    low, high = np.quantile(boot, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def cluster_draws(clusters: int, draws: int, rng: np.random.Generator) -> Int[np.ndarray, "m clusters"]:
    """`draws` resamples, with replacement, of `clusters` clusters, as counts."""
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=draws)


def _weighted(
    scores: Float[np.ndarray, "n"], hack: Bool[np.ndarray, "n"], weights: Float[np.ndarray, "m n"]
) -> Float[np.ndarray, "m"]:
    """AUROC under each row of weights; NaN where a class has no weight."""
    if not np.isfinite(scores).all():
        raise ValueError("Scores must be finite: a NaN has no rank.")
    if not len(scores):
        return np.full(len(weights), np.nan)
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    starts = np.concatenate([[0], np.flatnonzero(ranked[1:] != ranked[:-1]) + 1])
    label = hack[order]
    positive = np.add.reduceat(weights[:, order] * label, starts, axis=1)
    negative = np.add.reduceat(weights[:, order] * ~label, starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    total = positive.sum(axis=1) * negative.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return (positive * below).sum(axis=1) / np.where(total > 0, total, np.nan)
