"""Calibration of a probe: measures of its probabilities, and two maps from scores to probabilities.

    Brier = mean (p - y)^2        ECE = sum_bins (n_bin / n) |mean p - mean y|      (equal-width bins of [0, 1])
    Platt: p = 1 / (1 + exp(-(a s + c)))        isotonic: p = the best non-decreasing step-wise fit of y on s

Platt's targets are (n1 + 1)/(n1 + 2) and 1/(n0 + 2) instead of 1 and 0 (Platt, 1999), which keeps `a` finite if the scores separate
the classes. Fit on rollouts that are used neither to train nor to test the probe.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from mi_route2.checks import checked
from mi_route2.probes.auroc import Labels, binary


@dataclass(frozen=True)
class ReliabilityBin:
    """Probabilities in [low, high) (the last bin is closed): their number, their mean, and the rate of hacks among them."""

    low: float
    high: float
    count: int
    confidence: float
    rate: float


@runtime_checkable
class Calibrator(Protocol):
    """Frozen, monotone map from scores to probabilities.

    It leaves AUROC unchanged except for new ties, but for Platt's where hacks have the lower scores of those that it was fitted to:
    its slope is negative then, and AUROC one minus what it was.
    """

    def __call__(self, scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return probabilities in [0, 1]."""
        ...


@dataclass(frozen=True)
class Platt:
    """Map `p = sigmoid(slope * score + intercept)`."""

    slope: float
    intercept: float

    @checked
    def __call__(self, scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return probabilities in [0, 1]."""
        return expit(self.slope * scores.astype(np.float64) + self.intercept)


@dataclass(frozen=True)
class Isotonic:
    """Map that is piecewise linear through `(scores[i], probabilities[i])` (increasing tuples) and constant outside."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    @checked
    def __call__(self, scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return probabilities in [0, 1]."""
        x, knots, p = scores.astype(np.float64), np.array(self.scores), np.array(self.probabilities)
        place = np.searchsorted(knots, x, side="right") - 1
        left = place.clip(0, len(knots) - 1)
        right = (left + 1).clip(max=len(knots) - 1)
        # Each interval over a power of two of its own, so that no difference overflows, and none of small knots vanishes beside far
        # larger ones. It changes no bit of a probability.
        exponent = -np.frexp(np.maximum(np.abs(knots[left]), np.abs(knots[right])))[1]
        low, high, at = (np.ldexp(values, exponent) for values in (knots[left], knots[right], x.clip(knots[0], knots[-1])))
        slope = (p[right] - p[left]) / np.where(right > left, high - low, 1.0)
        return np.minimum(slope * (at - low) + p[left], p[right])  # rounding may pass the upper end


@checked
def fit_platt(scores: Float[np.ndarray, " n"], positive: Labels) -> Platt:
    """Fit Platt scaling. ValueError without both classes, for scores that are not finite, or for a slope beyond any float."""
    positive = _require_fittable(scores, positive)
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    target = np.where(positive, (n_positive + 1) / (n_positive + 2), 1 / (n_negative + 2))
    # over a power of two, so that no square in the spread vanishes or overflows; it changes no bit of the result
    exponent = _exponent(scores)
    scaled = np.ldexp(scores.astype(np.float64), -exponent)
    # equal scores have no spread but that of rounding, which is no unit to read other scores in
    center, scale = scaled.mean(), (scaled.std() or 1.0) if np.ptp(scaled) else 1.0
    x = np.tile((scaled - center) / scale, 2)[:, None]
    # A soft target t is the pair (label 1, weight t), (label 0, weight 1 - t).
    y, weight = np.repeat([1, 0], len(scores)), np.concatenate([target, 1 - target])
    model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(x, y, sample_weight=weight)
    slope = float(model.coef_[0, 0] / scale)
    intercept = float(model.intercept_[0] - slope * center)
    try:
        return Platt(math.ldexp(slope, -exponent), intercept)
    except OverflowError:
        raise ValueError(
            "The scores are so small that the slope is larger than any float: give scores in a smaller unit."
        ) from None


@checked
def fit_isotonic(scores: Float[np.ndarray, " n"], positive: Labels) -> Isotonic:
    """Fit isotonic regression. ValueError without both classes, or for scores that are not finite."""
    positive = _require_fittable(scores, positive)
    # on ranks, because scikit-learn takes scores closer than 1e-15 (float64) or 1e-6 (float32) for equal, in any unit
    values, rank = np.unique(scores.astype(np.float64), return_inverse=True)
    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(rank.astype(np.float64), positive.astype(float))
    return Isotonic(tuple(values[model.X_thresholds_.astype(int)].tolist()), tuple(model.y_thresholds_.tolist()))


@checked
def brier(p: Float[np.ndarray, " n"], positive: Labels) -> float:
    """Return the mean squared error of the probabilities, in [0, 1]; .25 for a constant 1/2."""
    positive, p = _require_probabilities(p, positive), p.astype(np.float64)
    return float(((p - positive) ** 2).mean())


@checked
def ece(p: Float[np.ndarray, " n"], positive: Labels, bins: int = 10) -> float:
    """Return the expected calibration error over equal-width bins, in [0, 1]. Biased upwards if bins hold few items."""
    curve = reliability(p, positive, bins)
    return sum(point.count * abs(point.confidence - point.rate) for point in curve) / len(p)


@checked
def reliability(p: Float[np.ndarray, " n"], positive: Labels, bins: int = 10) -> list[ReliabilityBin]:
    """Return the reliability curve: the non-empty bins, in increasing order. ValueError for p outside of [0, 1], or none."""
    positive, p = _require_probabilities(p, positive), p.astype(np.float64)
    if bins < 1:
        raise ValueError(f"Bins must be at least 1, not {bins}.")
    # compared with the edges that are returned, because p * bins rounds: 1/49 * 49 is below 1
    index = np.minimum(np.searchsorted(np.arange(bins + 1) / bins, p, side="right") - 1, bins - 1)
    curve = []
    for i in np.unique(index).tolist():
        rows = index == i
        confidence, rate = float(p[rows].mean()), float(positive[rows].mean())
        curve.append(ReliabilityBin(i / bins, (i + 1) / bins, int(rows.sum()), confidence, rate))
    return curve


def _exponent(scores: Float[np.ndarray, " n"]) -> int:
    """Return the exponent of the least power of two above every size."""
    return int(np.frexp(np.abs(scores.astype(np.float64)).max())[1])


def _require_probabilities(p: np.ndarray, positive: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Check the probabilities and return the labels as booleans."""
    if p.shape != positive.shape or not len(p):
        raise ValueError(f"{len(p)} probabilities for {len(positive)} labels: give as many of each, at least one.")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("Probabilities must lie in [0, 1]: map raw scores with fit_platt or fit_isotonic first.")
    return binary(positive)


def _require_fittable(scores: np.ndarray, positive: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Check the scores and return the labels as booleans."""
    if scores.shape != positive.shape or not np.isfinite(scores).all():
        raise ValueError("Calibration needs one finite score per label.")
    positive = binary(positive)
    if positive.all() or not positive.any():
        raise ValueError(f"Calibration needs both classes; it has {positive.sum()} positive of {len(positive)} labels.")
    return positive
