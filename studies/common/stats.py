"""Small-sample statistics over seeds (mean, median, Student-t intervals, paired differences), and rates of counts.

    mean +- t_{(1+level)/2, n-1} * s / sqrt(n),    s^2 = sum_i (x_i - mean)^2 / (n - 1)

Source: Student, "The probable error of a mean" (Biometrika, 1908). The interval assumes roughly normal values, which rates near
0 or 1 are not: it is not clipped to [0, 1], and the tables print the median and every seed beside it.

A value that does not exist (a ratio with denominator 0, an arm that was not trained) is `None`: it keeps its place in `seeds` and
counts nowhere else. NaN and infinity are mistakes, and raise `ValueError`. Sums are exactly rounded (`math.fsum`), so the order of
the seeds changes no digit, and computed on values scaled by a power of two, so that none overflows. A mean lies between the least
and the greatest value, so that seeds that agree have exactly their value, and an interval of width 0.
"""

import math
from collections.abc import Sequence
from typing import Any, TypedDict

from scipy.optimize import brentq
from scipy.special import stdtrit
from scipy.stats import nct

LEVEL = 0.95
POWER = 0.8
"""Probability with which an effect that counts as detectable is found."""

Value = float | int | None


class Summary(TypedDict):
    """Summary of one number over seeds.

    `lo` and `hi` bound the mean; both are `None` if `n < 2`. `n` counts the defined values.
    """

    mean: float | None
    median: float | None
    lo: float | None
    hi: float | None
    n: int
    seeds: list[float | None]


def mean(values: Sequence[Value]) -> float | None:
    """Return the mean of the defined values; `None` if there is none."""
    scaled, exponent = _scaled(values)
    return math.ldexp(_center(scaled), exponent) if scaled else None


def median(values: Sequence[Value]) -> float | None:
    """Return the median of the defined values (the midpoint of the middle two if their number is even); `None` if there is none."""
    ordered = sorted(_defined(values))
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else mean(ordered[middle - 1 : middle + 1])


def interval(values: Sequence[Value], level: float = LEVEL) -> tuple[float | None, float | None]:
    """Return the Student-t interval of the mean of the defined values; `(None, None)` for fewer than two values.

    Raises:
        ValueError: a level outside of (0, 1), or a bound larger than any float.
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval lies strictly between 0 and 1, not {level}")
    scaled, exponent = _scaled(values)
    n = len(scaled)
    if n < 2:
        return None, None
    center = _center(scaled)
    deviation = math.sqrt(math.fsum((value - center) ** 2 for value in scaled) / (n - 1))
    half = float(stdtrit(n - 1, (1 + level) / 2)) * deviation / math.sqrt(n)
    try:
        return math.ldexp(center - half, exponent), math.ldexp(center + half, exponent)
    except OverflowError:
        raise ValueError(f"the interval of {values} is larger than any float: give the values in a larger unit") from None


def summary(values: Sequence[Value], level: float = LEVEL) -> Summary:
    """Return the summary that a table prints about one number over seeds, with `values` in seed order."""
    lo, hi = interval(values, level)
    seeds = [None if value is None else float(value) for value in values]
    return Summary(mean=mean(values), median=median(values), lo=lo, hi=hi, n=len(_defined(values)), seeds=seeds)


def _defined(values: Sequence[Value]) -> list[float]:
    defined = [float(value) for value in values if value is not None]
    if not all(map(math.isfinite, defined)):
        raise ValueError(f"{values} holds NaN or infinity: correct its computation, or give None for a value that does not exist")
    return defined


def _center(scaled: Sequence[float]) -> float:
    """Return the mean, which rounding may put an ulp outside of the values."""
    return min(max(math.fsum(scaled) / len(scaled), min(scaled)), max(scaled))


def _scaled(values: Sequence[Value]) -> tuple[list[float], int]:
    """Return the defined values divided by a power of two, in [-1, 1], and the exponent; the scaling is exact."""
    defined = _defined(values)
    _, exponent = math.frexp(max(map(abs, defined), default=0.0))
    return [math.ldexp(value, -exponent) for value in defined], exponent


def power(n: int, shift: float) -> float:
    """Return the probability that a two-sided t-test of n values detects an effect of `shift` standard errors, with its sign."""
    return float(nct.sf(stdtrit(n - 1, (1 + LEVEL) / 2), n - 1, min(shift, 100.0)))  # far beyond that, scipy returns NaN


def detectable(n: int, deviation: float) -> float:
    """Return the smallest effect that n values of this standard deviation show with probability `POWER`."""
    shift: Any = brentq(lambda x: power(n, x) - POWER, 0.0, 100.0)
    return float(shift) * deviation / math.sqrt(n)
