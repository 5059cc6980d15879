"""The measurements of the claims: functions of `Study` (a study's artifacts) that return an estimate.

Differences of arms are paired by seed: arms of a seed share data, initial weights and test text. The sign of a quantity is chosen
such that less is better, as for bits per byte.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from studies.common.stats import Value, mean, paired_difference, summary
from studies.lanes.gradients.symmetry import SUBLAYERS
from studies.lanes.quantization.growth import CLAIMED, CLAIMED_RHO, amplification
from studies.lanes.settings import BEFORE
from studies.lanes.study import Data, Study

ZERO = 1e-12
"""Tolerance of identities in float64."""


@dataclass(frozen=True)
class Estimate:
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
    def of(values: Iterable[Value], unit: str, note: str = "") -> "Estimate":
        """Return the estimate from the defined ones of `values`."""
        s = summary(list(values))
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], unit, None, tuple(s["seeds"]), note)

    @staticmethod
    def paired(arm: Mapping[int, Value], reference: Mapping[int, Value], unit: str, note: str = "") -> "Estimate":
        """Return the estimate of `arm - reference`, paired by seed."""
        return Estimate.of(paired_difference(arm, reference)[1]["seeds"], unit, note)

    @staticmethod
    def identity(worst: float, holds: bool, n: int, unit: str, note: str = "") -> "Estimate":
        return Estimate(worst, None, None, n, unit, holds, (), note)


Measure = Callable[[Study], Estimate]


def _bpb(data: Data) -> float:
    return data["bpb"]


def difference(arm: str, reference: str, part: str, read: Callable[[Data], Value], unit: str = "BPB", note: str = "") -> Measure:
    """Difference of two arms in what `read` reads from a part."""
    return lambda study: Estimate.paired(study.by_seed(arm, part, read), study.by_seed(reference, part, read), unit, note)


def of_arm(arm: str, part: str, read: Callable[[Data], Value], unit: str) -> Measure:
    """Return the measure that applies `read` to a part of an arm."""
    return lambda study: Estimate.of(study.by_seed(arm, part, read).values(), unit)


def gains(study: Study, arm: str, run: str) -> dict[int, Value]:
    """Return the gain of a run on the test text by seed, of `all`, `controls` or `shared`; None if the run diverged."""
    return study.by_seed(arm, "ttt", lambda c: None if c["bpb"][run] is None else c["bpb"]["plain"] - c["bpb"][run])


def bpb(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms as trained."""
    return difference(arm, reference, "bpb", _bpb)


def bpb_quantized(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms after quantization."""
    return difference(arm, reference, "quantised", _bpb, note="quantised")


def gap(arm: str, reference: str) -> Measure:
    """Difference of two arms in the cost of quantization."""

    def measure(study: Study) -> Estimate:
        ours, other = _gaps(study, arm), _gaps(study, reference)
        means = [math.fsum(gaps.values()) / len(gaps) for gaps in (ours, other)]
        return Estimate.paired(ours, other, "BPB", f"gaps {means[0]:.4f} and {means[1]:.4f}")

    return measure


def _gaps(study: Study, arm: str) -> dict[int, float]:
    quantized, trained = study.by_seed(arm, "quantised", _bpb), study.by_seed(arm, "bpb", _bpb)
    return {seed: quantized[seed] - trained[seed] for seed in quantized}


def extraction(arm: str, reference: str) -> Measure:
    """Difference of two arms in the gain from test-time training of all parameters, each arm at its own tuned rates."""

    def measure(study: Study) -> Estimate:
        ours, other = gains(study, arm, "all"), gains(study, reference, "all")
        note = "gains " + " and ".join(_text(mean(list(values.values()))) for values in (ours, other))
        return Estimate.paired(ours, other, "BPB", note)

    return measure


def as_submitted(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms in the record's final form: quantized, trained at test time, with hints."""
    return difference(arm, reference, "ttt", lambda c: c["hinted"]["all"], note="with hints and training")


def raw(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms before hints and test-time training, on the same text."""
    return difference(arm, reference, "ttt", lambda c: c["bpb"]["plain"], note="quantised")


def combined(study: Study) -> Estimate:
    """Return the bits per byte of `shipped` with hints and test-time training, minus those with neither."""
    less = lambda c: None if c["hinted"]["all"] is None else c["hinted"]["all"] - c["bpb"]["plain"]  # noqa: E731
    by_hints = mean(list(study.by_seed("shipped", "ttt", lambda c: c["hinted"]["plain"] - c["bpb"]["plain"]).values()))
    return Estimate.of(study.by_seed("shipped", "ttt", less).values(), "BPB", f"of which {_text(by_hints)} by hints alone")


def _text(gain: float | None) -> str:
    return "none" if gain is None else f"{gain:.4f}"


def controls(run: str) -> Measure:
    """Gain of a run on controls alone, minus half of the gain of all parameters, averaged over the arms trained at test time.

    This is no ratio: if training all parameters loses, a share of its gain is meaningless.
    """

    def measure(study: Study) -> Estimate:
        chosen, full = ([gains(study, arm, name) for arm in study.measured("ttt")] for name in (run, "all"))
        pairs = {seed: [(a[seed], b[seed]) for a, b in zip(chosen, full, strict=True)] for seed in chosen[0]}
        each = [_mean([None if a is None or b is None else a - b / 2 for a, b in row]) for row in pairs.values()]
        means = [_mean([values[i] for row in pairs.values() for values in row]) for i in (0, 1)]
        share = study.contents["shipped", study.seeds[0], "ttt"]["share"]
        note = f"gains {_text(means[0])} and {_text(means[1])}, by {share:.1%} of the parameters; {edges(study)}"
        return Estimate.of(each, "BPB", note)

    return measure


def edges(study: Study) -> str:
    """Return a note on how many of the tuned rates were the smallest or the largest of the sweep."""
    tuned = [study.contents[arm, seed, "ttt"]["edges"] for arm in study.measured("ttt") for seed in study.seeds]
    at = [edge for edges in tuned for edge in edges.values()]
    return f"{sum(at)} of {len(at)} tuned rates at an edge of the sweep"


def _mean(values: Iterable[Value]) -> float | None:
    """Return the mean; None if any value is None."""
    defined = list(values)
    return None if None in defined else fmean(value for value in defined if value is not None)


def before_quantization(study: Study) -> Estimate:
    """Return the two lanes' gain before quantization, minus half of their gain after it."""
    (plain, lanes), (plain_after, lanes_after) = (
        [study.by_seed(arm, part, _bpb) for arm in ("gptj", "shipped")] for part in ("bpb", "quantised")
    )
    each = [(plain[seed] - lanes[seed]) - (plain_after[seed] - lanes_after[seed]) / 2 for seed in plain]
    return Estimate.of(each, "BPB", "gain before, minus half of the gain after quantisation")


def calibration(a: str, b: str) -> Measure:
    """Difference of two quantizations of the arm `shipped`."""
    return of_arm("shipped", "calibrations", lambda c: c[a] - c[b], "BPB")


def _clip(data: Data, k: float) -> Data:
    return next(point for point in data["points"] if point["k"] == k)


def bytes_by_clip(study: Study) -> Estimate:
    """Return the bytes at the record's clip, minus the bytes at the clip before it."""
    usual = study.settings.evaluation.gptq.k
    less = lambda c: _clip(c, usual)["bytes"] - _clip(c, BEFORE)["bytes"]  # noqa: E731
    return of_arm("shipped", "calibrations", less, "bytes")(study)


def bytes_predicted(study: Study) -> Estimate:
    """Return |actual bytes / predicted bytes - 1| at the record's clip."""
    usual = study.settings.evaluation.gptq.k
    off = lambda c: abs(_clip(c, usual)["bytes"] / _clip(c, usual)["by_gaussian"] - 1)  # noqa: E731
    return of_arm("shipped", "calibrations", off, "share")(study)


def hints(a: str, b: str) -> Measure:
    """Difference in bits per byte of two Tap-In mixtures of the same model."""

    def measure(study: Study) -> Estimate:
        contents = study.by_seed("shipped", "tapin").values()
        offered, right = (mean([c["hints"][key] for c in contents]) or 0 for key in ("offered", "right"))
        note = f"a hint at {offered:.0%} of the bytes, right in {right:.0%}"
        return Estimate.of([c["bpb"][a] - c["bpb"][b] for c in contents], "BPB", note)

    return measure


def _wirings(study: Study, wiring: str, key: str) -> list[float]:
    """Return a value of one wiring of the instrument `symmetry`, by draw."""
    return [float(row[key]) for data in study.drawn("symmetry") for row in data["wirings"] if row["wiring"] == wiring]


def _identity(values: list[float], unit: str, *, tolerance: float = ZERO, note: str = "") -> Estimate:
    return Estimate.identity(max(values), max(values) <= tolerance, len(values), unit, note)


def worst(wiring: str, key: str, unit: str, *, tolerance: float = ZERO) -> Measure:
    """An identity of a wiring: its largest deviation over all draws."""
    return lambda study: _identity(_wirings(study, wiring, key), unit, tolerance=tolerance)


def stays(wiring: str, start: str) -> Measure:
    """Largest distance of two lanes' weights over training, for lanes with equal initial weights."""

    def measure(study: Study) -> Estimate:
        traces = [t for c in study.drawn("traces") for t in c["traces"] if (t["name"], t["start"]) == (wiring, start)]
        note = f"after {traces[0]['steps'][-1]} steps of Adam"
        return _identity([max(trace["differences"]) for trace in traces], "weight", note=note)

    return measure


def gauge_share(wiring: str) -> Measure:
    """The share of the routing scalars that are gauge: directions in which the loss has no slope.

    Computed for the scalars that a block uses, and for all; "roughly half" holds if either share is between two fifths and three
    fifths.
    """

    def measure(study: Study) -> Estimate:
        used, sloped, every = (_wirings(study, wiring, key) for key in ("used", "sloped", "scalars"))
        holds = any(all(0.4 <= 1 - live / total <= 0.6 for live in sloped) for total in (used[0], every[0]))
        least, most = used[0] - max(sloped), max(sloped)
        note = f"{least:.0f} of the {used[0]:.0f} that a block uses; all {every[0]:.0f} have {most:.0f} directions with a slope"
        return Estimate.identity(least / used[0], holds, len(sloped), "of those in use", note)

    return measure


def routed(arm: str, key: str, unit: str) -> Measure:
    """A quantity of the routing after training; see `measures.routing`."""

    def measure(study: Study) -> Estimate:
        contents = study.by_seed(arm, "routing").values()
        by = [mean([c["by_sublayer"][sublayer] for c in contents]) for sublayer in SUBLAYERS]
        note = f"attention {by[0]:.2f}, MLP {by[1]:.2f}" if key == "pattern" else ""
        return Estimate.of([c[key] for c in contents], unit, note)

    return measure


def against_table(arm: str, table: str) -> Measure:
    """Bits per byte of an arm, minus those of a count table on the same text."""

    def measure(study: Study) -> Estimate:
        ours, other = study.by_seed(arm, "bpb", _bpb), study.by_seed("tables", "tables", lambda c: c[table])
        note = f"{mean(list(ours.values())):.3f} and {mean(list(other.values())):.3f}"
        return Estimate.paired(ours, other, "BPB", note)

    return measure


def narrows(study: Study) -> Estimate:
    """Return the lanes' difference in bits per byte at full length minus that at a quarter of the steps; above 0 if it narrows."""
    differences = []
    for suffix in ("", "-short"):
        lanes, baseline = (study.by_seed(arm + suffix, "bpb", _bpb) for arm in ("shipped", "gptj"))
        differences.append(paired_difference(lanes, baseline)[1])
    each = [None if a is None or b is None else a - b for a, b in zip(*(d["seeds"] for d in differences), strict=True)]
    note = f"{differences[0]['mean']:+.4f}, and {differences[1]['mean']:+.4f} at a quarter of the steps"
    return Estimate.of(each, "BPB", note)


def gptj_gap(study: Study) -> Estimate:
    return _identity([data["gptj"] for data in study.drawn("symmetry")], "logit")


def path_sums(study: Study) -> Estimate:
    by_draw = [max(row["missing"] for rows in c["rows"].values() for row in rows) for c in study.drawn("paths")]
    return _identity(by_draw, "of the total")


def closed_form(study: Study) -> Estimate:
    return _identity([data["closed_form"] for data in study.drawn("paths")], "of the direct path")


def _share(rows: Iterable[Data], layer: int) -> float:
    """Return the mean of |direct| / |total| over the sublayers of a layer."""
    return fmean(row["direct"] for row in rows if row["layer"] == layer)


def direct_share(arm: str, reference: str | None = None) -> Measure:
    """|direct| / |total| at the first layer behind the fork, where depth matters most; or its difference between two wirings."""

    def measure(study: Study) -> Estimate:
        first = study.settings.instruments.lane_start
        less = lambda c: 0.0 if reference is None else _share(c["rows"][reference], first)  # noqa: E731
        return Estimate.of([_share(c["rows"][arm], first) - less(c) for c in study.drawn("paths")], "|direct|/|total|")

    return measure


def direct_share_trained(study: Study) -> Estimate:
    """Return the same difference on the trained models, between two lanes and the record's baseline."""
    share = lambda c: _share(c["rows"], study.settings.size.lane_start)  # noqa: E731
    return difference("shipped", "gptj", "paths", share, "|direct|/|total|", "trained")(study)


def amplified(k: int) -> Measure:
    """A(k) by the formula at the record's own rho, compared with the number that the record claims."""

    def measure(study: Study) -> Estimate:
        value = amplification(CLAIMED_RHO, k)
        return Estimate.identity(value, abs(value - CLAIMED[k]) < 0.005, 1, f"A({k})")

    return measure


contraction = of_arm("wide", "growth", lambda c: fmean(row["rho"] for row in c["draws"]), "rho")
"""Rho of the wide arm's loop, averaged over the draws of a seed's perturbation."""

contraction_without_skips = of_arm(
    "wide", "growth", lambda c: fmean(row["spreads"][0]["passes"][1] for row in c["draws"]), "of the push"
)
"""The remaining part of a perturbation at the end of the first pass, before any skip is mixed in."""
