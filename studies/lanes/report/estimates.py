"""The measurements of the claims: functions of `Study` (a study's artifacts) that return an estimate.

Arms are compared seed by seed, because arms of a seed share data, initial weights and test text. The sign of a quantity is chosen
such that less is better, as for bits per byte. A number that does not exist (of a run that diverged) is null in the artifacts, NaN
in the arrays here, and None in an estimate.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from statistics import fmean
from typing import Concatenate, ParamSpec

import numpy as np
from jaxtyping import Float
from scipy.stats import t

from studies.common.stats import Value, summary
from studies.lanes.gradients.symmetry import SUBLAYERS
from studies.lanes.quantization.growth import CLAIMED, CLAIMED_RHO, amplification
from studies.lanes.settings import BEFORE
from studies.lanes.study import Data, LanesStudy

ZERO = 1e-12
"""Tolerance of identities in float64."""


@dataclass(frozen=True)
class ClaimEstimate:
    """An estimate: the mean of n values with its Student-t interval (None for fewer than two values), or an identity.

    Attributes:
        value: The mean; of an identity the largest deviation, or the number that was measured.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Number of values.
        unit: Unit of the value.
        holds: Whether an identity holds; None for a quantity.
        each: The values.
        note: What a reader should know beside the number.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    unit: str
    holds: bool | None = None
    each: tuple[float | None, ...] = ()
    note: str = ""

    @staticmethod
    def of(values: Iterable[Value], unit: str, note: str = "") -> "ClaimEstimate":
        """Return the estimate from the defined ones of `values`."""
        s = summary([None if value is None or math.isnan(value) else float(value) for value in values])
        return ClaimEstimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    @staticmethod
    def identity(worst: float, holds: bool, n: int, unit: str, note: str = "") -> "ClaimEstimate":
        return ClaimEstimate(worst, None, None, n, unit, holds, (), note)


Measure = Callable[[LanesStudy], ClaimEstimate]
Names = ParamSpec("Names")


def measure(estimate: Callable[Concatenate[LanesStudy, Names], ClaimEstimate]) -> Callable[Names, Measure]:
    """Turn a function of a study and of arms into a function of the arms, which returns a measure."""
    return lambda *names, **options: lambda study: estimate(study, *names, **options)


def read(study: LanesStudy, arm: str, part: str, *keys: str) -> Float[np.ndarray, " seeds"]:
    """Return the number that every seed has under `keys` in a part of an arm."""
    return np.array([reduce(getitem, keys, data) for data in study.data(arm, part)], dtype=float)


def _text(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:.4f}"


@measure
def difference(study: LanesStudy, arm: str, reference: str, *keys: str, note: str = "") -> ClaimEstimate:
    """Difference in bits per byte of two arms; the keys are a part and those in it."""
    return ClaimEstimate.of(read(study, arm, *keys) - read(study, reference, *keys), "BPB", note)


def bpb(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms as trained."""
    return difference(arm, reference, "bpb", "bpb")


def bpb_quantized(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms after quantization."""
    return difference(arm, reference, "quantised", "bpb", note="quantised")


def as_submitted(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms in the record's final form: quantized, trained at test time, with hints."""
    return difference(arm, reference, "ttt", "hinted", "all", note="with hints and training")


@measure
def against_table(study: LanesStudy, arm: str, table: str) -> ClaimEstimate:
    """Bits per byte of an arm, minus those of a count table on the same text."""
    ours, other = read(study, arm, "bpb", "bpb"), read(study, "tables", "tables", table)
    return ClaimEstimate.of(ours - other, "BPB", f"{ours.mean():.3f} and {other.mean():.3f}")


@measure
def gap(study: LanesStudy, arm: str, reference: str) -> ClaimEstimate:
    """Difference of two arms in the cost of quantization."""
    ours, other = (read(study, name, "quantised", "bpb") - read(study, name, "bpb", "bpb") for name in (arm, reference))
    return ClaimEstimate.of(ours - other, "BPB", f"gaps {ours.mean():.4f} and {other.mean():.4f}")


def beyond_half(part: Float[np.ndarray, "*n"], gain: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Return a part of a gain minus half of the gain; the part itself if the gain is a loss in the mean.

    A difference, because a ratio to a gain near 0 is meaningless; of a loss, half would be below a part that is a loss too.
    """
    return part - gain / 2 if np.nansum(gain) > 0 else part


def before_quantization(study: LanesStudy) -> ClaimEstimate:
    """Return the two lanes' gain before quantization beyond half of their gain after it.

    The gain after it need not be shown: a claim of it compares the two whatever they are, and a loss contradicts it.
    """
    before, after = (read(study, "gptj", part, "bpb") - read(study, "shipped", part, "bpb") for part in ("bpb", "quantised"))
    return ClaimEstimate.of(beyond_half(before, after), "BPB", "gain before, minus half of the gain after quantisation")


def _apart(study: LanesStudy, suffix: str = "") -> Float[np.ndarray, " seeds"]:
    """Return the lanes' difference in bits per byte from the baseline; below 0 if they gain."""
    return read(study, f"shipped{suffix}", "bpb", "bpb") - read(study, f"gptj{suffix}", "bpb", "bpb")


def early_gain(study: LanesStudy) -> ClaimEstimate:
    """Return what two lanes gain at a quarter of the steps."""
    return ClaimEstimate.of(-_apart(study, "-short"), "BPB", "no gain shown")


def narrows(study: LanesStudy) -> ClaimEstimate:
    """Return the lanes' difference in bits per byte at full length minus that at a quarter of the steps.

    It is above 0 if their gain narrows, and if there is none: see `early_gain`.
    """
    long, short = _apart(study), _apart(study, "-short")
    return ClaimEstimate.of(long - short, "BPB", f"{long.mean():+.4f}, and {short.mean():+.4f} at a quarter of the steps")


def gains(study: LanesStudy, arm: str, run: str) -> Float[np.ndarray, " seeds"]:
    """Return the gain of a run on the test text, of `all`, `controls` or `shared`."""
    return read(study, arm, "ttt", "bpb", "plain") - read(study, arm, "ttt", "bpb", run)


@measure
def gain_of(study: LanesStudy, arm: str) -> ClaimEstimate:
    """Gain of an arm from test-time training of all parameters."""
    return ClaimEstimate.of(gains(study, arm, "all"), "BPB", "the second not shown")


@measure
def gain_left(study: LanesStudy, arm: str, reference: str) -> ClaimEstimate:
    """Return an arm's gain from test-time training of all parameters as a part of the reference's; each at its own rates."""
    ours, other = gains(study, arm, "all"), gains(study, reference, "all")
    means = [ClaimEstimate.of(each, "BPB").value for each in (ours, other)]
    return ratio(ours, other, "of that gain", f"gains {_text(means[0])} and {_text(means[1])}")


def ratio(part: Float[np.ndarray, " n"], whole: Float[np.ndarray, " n"], unit: str, note: str = "") -> ClaimEstimate:
    """Return the ratio of two paired means with Fieller's interval; no value unless the mean of `whole` is shown to be above 0.

    The interval has every r for which the t-interval of the mean of `part - r whole` contains 0. So r is excluded exactly where a
    t-test of that difference would exclude it, and a ratio to what may be 0, which could be anything, has no interval. `each` has
    the ratio plus each pair's deviation from it, `(part - r whole) / mean(whole)`.
    """
    paired = ~(np.isnan(part) | np.isnan(whole))
    a, b, n = part[paired], whole[paired], int(paired.sum())
    if n < 2:
        return ClaimEstimate(None, None, None, n, unit, note=note)
    factor = float(t.ppf(0.975, n - 1)) ** 2 / n
    (aa, ab), (_, bb) = factor * np.cov(a, b)
    square = float(b.mean() ** 2 - bb)  # of r in the quadratic whose roots are the interval's ends; above 0 if `whole` is not 0
    if b.mean() <= 0 or square <= 0:
        return ClaimEstimate(None, None, None, n, unit, note=note)
    value, middle = float(a.mean() / b.mean()), float(a.mean() * b.mean() - ab)
    root = math.sqrt(max(0.0, middle**2 - square * float(a.mean() ** 2 - aa)))
    each = value + (part - value * whole) / b.mean()
    values = tuple(None if math.isnan(number) else float(number) for number in each)
    return ClaimEstimate(value, (middle - root) / square, (middle + root) / square, n, unit, None, values, note)


def combined(study: LanesStudy) -> ClaimEstimate:
    """Return the bits per byte of `shipped` with hints and test-time training, minus those with neither."""
    plain, hinted, both = (
        read(study, "shipped", "ttt", *keys) for keys in (("bpb", "plain"), ("hinted", "plain"), ("hinted", "all"))
    )
    return ClaimEstimate.of(both - plain, "BPB", f"of which {_text((hinted - plain).mean())} by hints alone")


@measure
def controls(study: LanesStudy, run: str) -> ClaimEstimate:
    """Gain of a run on controls alone beyond half of the gain of all parameters, averaged over the arms trained at test time."""
    arms = study.measured("ttt")
    some, every = (np.array([gains(study, arm, name) for arm in arms]) for name in (run, "all"))
    share = study.data("shipped", "ttt")[0]["share"]
    edges = [edge for arm in arms for data in study.data(arm, "ttt") for edge in data["edges"].values()]
    note = f"gains {_text(some.mean())} and {_text(every.mean())}, by {share:.1%} of the parameters; "
    note += f"{sum(edges)} of {len(edges)} tuned rates at an edge of the sweep"
    return ClaimEstimate.of(map(fmean, beyond_half(some, every).T), "BPB", note)


@measure
def calibration(study: LanesStudy, a: str, b: str) -> ClaimEstimate:
    """Difference of two quantizations of the arm `shipped`."""
    return ClaimEstimate.of(read(study, "shipped", "calibrations", a) - read(study, "shipped", "calibrations", b), "BPB")


def _at_clip(study: LanesStudy, k: float, key: str) -> Float[np.ndarray, " seeds"]:
    """Return a number of the rate-distortion curve at a clip."""
    curves = [data["points"] for data in study.data("shipped", "calibrations")]
    return np.array([next(point[key] for point in curve if point["k"] == k) for curve in curves], dtype=float)


def bytes_by_clip(study: LanesStudy) -> ClaimEstimate:
    """Return the bytes at the record's clip, minus the bytes at the clip before it."""
    usual, before = (_at_clip(study, k, "bytes") for k in (study.settings.evaluation.gptq.k, BEFORE))
    return ClaimEstimate.of(usual - before, "bytes")


def bytes_predicted(study: LanesStudy) -> ClaimEstimate:
    """Return |actual bytes / predicted bytes - 1| at the record's clip."""
    actual, predicted = (_at_clip(study, study.settings.evaluation.gptq.k, key) for key in ("bytes", "by_gaussian"))
    return ClaimEstimate.of(abs(actual / predicted - 1), "share")


@measure
def hints(study: LanesStudy, a: str, b: str) -> ClaimEstimate:
    """Difference in bits per byte of two Tap-In mixtures of the same model."""
    offered, right = (read(study, "shipped", "tapin", "hints", key).mean() for key in ("offered", "right"))
    note = f"a hint at {offered:.0%} of the bytes, right in {right:.0%}"
    return ClaimEstimate.of(read(study, "shipped", "tapin", "bpb", a) - read(study, "shipped", "tapin", "bpb", b), "BPB", note)


def _identity(values: list[float], unit: str, *, tolerance: float = ZERO, note: str = "") -> ClaimEstimate:
    return ClaimEstimate.identity(max(values), max(values) <= tolerance, len(values), unit, note)


def _wirings(study: LanesStudy, wiring: str, key: str) -> list[float]:
    """Return a value of one wiring of the instrument `symmetry`, by draw."""
    return [float(row[key]) for data in study.drawn("symmetry") for row in data["wirings"] if row["wiring"] == wiring]


@measure
def worst(study: LanesStudy, wiring: str, key: str, unit: str, *, tolerance: float = ZERO) -> ClaimEstimate:
    """An identity of a wiring: its largest deviation over all draws."""
    return _identity(_wirings(study, wiring, key), unit, tolerance=tolerance)


@measure
def stays(study: LanesStudy, wiring: str, start: str) -> ClaimEstimate:
    """Largest distance of two lanes' weights over training, for lanes with equal initial weights."""
    traces = [t for data in study.drawn("traces") for t in data["traces"] if (t["name"], t["start"]) == (wiring, start)]
    note = f"after {traces[0]['steps'][-1]} steps of Adam"
    return _identity([max(trace["differences"]) for trace in traces], "weight", note=note)


@measure
def gauge_share(study: LanesStudy, wiring: str) -> ClaimEstimate:
    """The share of the routing scalars that are gauge: directions in which the loss has no slope.

    Computed for the scalars that a block uses, and for all; "roughly half" holds if either share is between two fifths and three
    fifths.
    """
    used, sloped, every = (_wirings(study, wiring, key) for key in ("used", "sloped", "scalars"))
    holds = any(all(0.4 <= 1 - live / total <= 0.6 for live in sloped) for total in (used[0], every[0]))
    least, most = used[0] - max(sloped), max(sloped)
    note = f"{least:.0f} of the {used[0]:.0f} that a block uses; all {every[0]:.0f} have {most:.0f} directions with a slope"
    return ClaimEstimate.identity(least / used[0], holds, len(sloped), "of those in use", note)


@measure
def routed(study: LanesStudy, arm: str, key: str, unit: str) -> ClaimEstimate:
    """A quantity of the routing after training; see `measures.routing`."""
    attn, mlp = (read(study, arm, "routing", "by_sublayer", sublayer).mean() for sublayer in SUBLAYERS)
    return ClaimEstimate.of(
        read(study, arm, "routing", key), unit, f"attention {attn:.2f}, MLP {mlp:.2f}" if key == "pattern" else ""
    )


def gptj_gap(study: LanesStudy) -> ClaimEstimate:
    return _identity([data["gptj"] for data in study.drawn("symmetry")], "logit")


def path_sums(study: LanesStudy) -> ClaimEstimate:
    by_draw = [max(row["missing"] for rows in data["rows"].values() for row in rows) for data in study.drawn("paths")]
    return _identity(by_draw, "of the total")


def closed_form(study: LanesStudy) -> ClaimEstimate:
    return _identity([data["closed_form"] for data in study.drawn("paths")], "of the direct path")


def _shares(rows_of: Iterable[Iterable[Data]], layer: int) -> Float[np.ndarray, " n"]:
    """Return the mean of |direct| / |total| over the sublayers of a layer, for each list of sublayers."""
    return np.array([fmean(row["direct"] for row in rows if row["layer"] == layer) for rows in rows_of])


@measure
def direct_share(study: LanesStudy, arm: str, reference: str | None = None) -> ClaimEstimate:
    """|direct| / |total| at the first layer behind the fork, where depth matters most; or its difference between two wirings."""
    first, draws = study.settings.instruments.lane_start, study.drawn("paths")
    shares = _shares((data["rows"][arm] for data in draws), first)
    if reference is not None:
        shares = shares - _shares((data["rows"][reference] for data in draws), first)
    return ClaimEstimate.of(shares, "|direct|/|total|")


def direct_share_trained(study: LanesStudy) -> ClaimEstimate:
    """Return the same difference on the trained models, between two lanes and the record's baseline."""
    first = study.settings.size.lane_start
    lanes, baseline = (_shares((data["rows"] for data in study.data(arm, "paths")), first) for arm in ("shipped", "gptj"))
    return ClaimEstimate.of(lanes - baseline, "|direct|/|total|", "trained")


@measure
def amplified(_: LanesStudy, k: int) -> ClaimEstimate:
    """A(k) by the formula at the record's own rho, compared with the number that the record claims."""
    value = amplification(CLAIMED_RHO, k)
    return ClaimEstimate.identity(value, abs(value - CLAIMED[k]) < 0.005, 1, f"A({k})")


def contraction(study: LanesStudy) -> ClaimEstimate:
    """Return rho of the wide arm's loop, averaged over the draws of a seed's perturbation."""
    return ClaimEstimate.of([fmean(row["rho"] for row in data["draws"]) for data in study.data("wide", "growth")], "rho")


def contraction_without_skips(study: LanesStudy) -> ClaimEstimate:
    """Return the remaining part of a perturbation at the end of the first pass, before any skip is mixed in."""
    left = [fmean(row["spreads"][0]["passes"][1] for row in data["draws"]) for data in study.data("wide", "growth")]
    return ClaimEstimate.of(left, "of the push")
