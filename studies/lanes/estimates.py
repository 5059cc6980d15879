"""The measurements of the claims: functions of `Found` (a study's artifacts) that return an estimate.

Differences of arms are paired by seed: arms of a seed share data, initial weights and test text. The sign of a quantity is chosen
such that less is better, as for bits per byte.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from studies.common.stats import Value, mean, paired_difference
from studies.lanes.found import Estimate, Found
from studies.lanes.growth import CLAIMED, CLAIMED_RHO, amplification
from studies.lanes.settings import BEFORE
from studies.lanes.symmetry import SUBLAYERS

ZERO = 1e-12
"""Tolerance of identities in float64."""
HINTS = ("offered", "right")
Measure = Callable[[Found], Estimate]


def _bpb(content: Any) -> float:
    return content["bpb"]


def gains(found: Found, arm: str, run: str) -> dict[int, Value]:
    """Return the gain of a run on the test text by seed, of `all`, `controls` or `shared`; None if the run diverged."""
    return found.by_seed(arm, "ttt", lambda c: None if c["bpb"][run] is None else c["bpb"]["plain"] - c["bpb"][run])


def bpb(arm: str, reference: str, note: str = "") -> Measure:
    """Difference in bits per byte of two arms as trained."""
    return lambda found: found.difference(arm, reference, "bpb", _bpb, "BPB", note)


def bpb_quantised(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms after quantization."""
    return lambda found: found.difference(arm, reference, "quantised", _bpb, "BPB", "quantised")


def gap(arm: str, reference: str) -> Measure:
    """Difference of two arms in the cost of quantization."""

    def measure(found: Found) -> Estimate:
        own, other = _gaps(found, arm), _gaps(found, reference)
        means = [math.fsum(gaps.values()) / len(gaps) for gaps in (own, other)]
        note = f"gaps {means[0]:.4f} and {means[1]:.4f}"
        _, s = paired_difference(own, other)
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], "BPB", None, tuple(s["seeds"]), note)

    return measure


def _gaps(found: Found, arm: str) -> dict[int, float]:
    quantised, trained = found.by_seed(arm, "quantised", _bpb), found.by_seed(arm, "bpb", _bpb)
    return {seed: float(quantised[seed] or 0) - float(trained[seed] or 0) for seed in quantised}


def extraction(arm: str, reference: str) -> Measure:
    """Difference of two arms in the gain from test-time training of all parameters, each arm at its own tuned rates."""

    def measure(found: Found) -> Estimate:
        own, other = gains(found, arm, "all"), gains(found, reference, "all")
        _, s = paired_difference(own, other)
        note = "gains " + " and ".join(_text(mean(list(values.values()))) for values in (own, other))
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], "BPB", None, tuple(s["seeds"]), note)

    return measure


def as_submitted(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms in the record's final form: quantized, trained at test time, with hints."""
    return lambda found: found.difference(arm, reference, "ttt", lambda c: c["hinted"]["all"], "BPB", "with hints and training")


def raw(arm: str, reference: str) -> Measure:
    """Difference in bits per byte of two arms before hints and test-time training, on the same text."""
    return lambda found: found.difference(arm, reference, "ttt", lambda c: c["bpb"]["plain"], "BPB", "quantised")


def combined(found: Found) -> Estimate:
    """Return the bits per byte of `shipped` with hints and test-time training, minus those with neither."""
    less = lambda c: None if c["hinted"]["all"] is None else c["hinted"]["all"] - c["bpb"]["plain"]  # noqa: E731
    alone = mean(list(found.by_seed("shipped", "ttt", lambda c: c["hinted"]["plain"] - c["bpb"]["plain"]).values()))
    values = list(found.by_seed("shipped", "ttt", less).values())
    return Estimate.of(values, "BPB", f"of which {_text(alone)} by hints alone")


def _text(gain: float | None) -> str:
    return "none" if gain is None else f"{gain:.4f}"


def controls(run: str) -> Measure:
    """Gain of a run on controls alone, minus half of the gain of all parameters, averaged over the arms trained at test time.

    This is no ratio: if training all parameters loses, a share of its gain is meaningless.
    """

    def measure(found: Found) -> Estimate:
        own, full = ([gains(found, arm, name) for arm in found.measured("ttt")] for name in (run, "all"))
        pairs = {seed: [(a[seed], b[seed]) for a, b in zip(own, full, strict=True)] for seed in own[0]}
        each = [_mean([None if a is None or b is None else a - b / 2 for a, b in row]) for row in pairs.values()]
        means = [_mean([values[i] for row in pairs.values() for values in row]) for i in (0, 1)]
        share = found.contents["shipped", found.seeds[0], "ttt"]["share"]
        note = f"gains {_text(means[0])} and {_text(means[1])}, by {share:.1%} of the parameters; {edges(found)}"
        return Estimate.of(each, "BPB", note)

    return measure


def edges(found: Found) -> str:
    """Return a note on how many of the tuned rates were the smallest or the largest of the sweep."""
    tuned = [found.contents[arm, seed, "ttt"]["edges"] for arm in found.measured("ttt") for seed in found.seeds]
    at = [edge for edges in tuned for edge in edges.values()]
    return f"{sum(at)} of {len(at)} tuned rates at an edge of the sweep"


def _mean(values: Sequence[float | int | None]) -> float | None:
    """Return the mean; None if any value is None."""
    defined = [value for value in values if value is not None]
    return math.fsum(defined) / len(defined) if len(defined) == len(values) else None


def before_quantisation(found: Found) -> Estimate:
    """Return the two lanes' gain before quantization, minus half of their gain after it."""
    trained, after = (
        [found.by_seed(arm, part, read) for arm in ("gptj", "shipped")] for part, read in (("bpb", _bpb), ("quantised", _bpb))
    )
    each = [
        (float(trained[0][s] or 0) - float(trained[1][s] or 0)) - (float(after[0][s] or 0) - float(after[1][s] or 0)) / 2
        for s in trained[0]
    ]
    return Estimate.of(each, "BPB", "gain before, minus half of the gain after quantisation")


def calibration(a: str, b: str) -> Measure:
    """Difference of two quantizations of the arm `shipped`."""
    return lambda found: found.mean("shipped", "calibrations", lambda c: c[a] - c[b], "BPB")


def gptq_against_nearest(found: Found) -> Estimate:
    """Return the bits per byte of GPTQ, minus those of rounding to nearest at the same scales."""
    return found.mean("shipped", "calibrations", lambda c: c["few"] - c["nearest"], "BPB")


def bytes_by_clip(found: Found) -> Estimate:
    """Return the bytes at the record's clip, minus the bytes at the clip before it."""
    usual = found.settings.evaluation.gptq.k
    at = lambda c, k: next(point["bytes"] for point in c["points"] if point["k"] == k)  # noqa: E731
    return found.mean("shipped", "calibrations", lambda c: at(c, usual) - at(c, BEFORE), "bytes")


def bytes_predicted(found: Found) -> Estimate:
    """Return |actual bytes / predicted bytes - 1| at the record's clip."""
    usual = found.settings.evaluation.gptq.k
    point = lambda c: next(point for point in c["points"] if point["k"] == usual)  # noqa: E731
    return found.mean("shipped", "calibrations", lambda c: abs(point(c)["bytes"] / point(c)["by_gaussian"] - 1), "share")


def hints(a: str, b: str) -> Measure:
    """Difference in bits per byte of two Tap-In mixtures of the same model."""

    def measure(found: Found) -> Estimate:
        values = found.by_seed("shipped", "tapin", lambda c: c["bpb"][a] - c["bpb"][b])
        offered, right = (mean(list(found.by_seed("shipped", "tapin", lambda c, k=k: c["hints"][k]).values())) for k in HINTS)
        return Estimate.of(list(values.values()), "BPB", f"a hint at {offered or 0:.0%} of the bytes, right in {right or 0:.0%}")

    return measure


def worst(wiring: str, key: str, unit: str, *, tolerance: float = ZERO) -> Measure:
    """An identity of a wiring: its largest deviation over all draws."""

    def measure(found: Found) -> Estimate:
        values = found.wiring(wiring, lambda row: row[key])
        return Estimate.identity(max(values), max(values) <= tolerance, len(values), unit)

    return measure


def stays(wiring: str, start: str) -> Measure:
    """Largest distance of two lanes' weights over training, for lanes with equal initial weights."""

    def measure(found: Found) -> Estimate:
        own = [t for c in found.drawn("traces") for t in c["traces"] if (t["name"], t["start"]) == (wiring, start)]
        largest = max(max(trace["differences"]) for trace in own)
        return Estimate.identity(largest, largest <= ZERO, len(own), "weight", f"after {own[0]['steps'][-1]} steps of Adam")

    return measure


def gauge_share(wiring: str) -> Measure:
    """The share of the routing scalars that are gauge: directions in which the loss has no slope.

    Computed for the scalars that a block uses, and for all; "roughly half" holds if either share is between two fifths and three
    fifths.
    """

    def measure(found: Found) -> Estimate:
        used, sloped, every = (found.wiring(wiring, lambda row, key=key: float(row[key])) for key in ("used", "sloped", "scalars"))
        holds = any(all(0.4 <= 1 - live / total <= 0.6 for live in sloped) for total in (used[0], every[0]))
        least, most = used[0] - max(sloped), max(sloped)
        note = f"{least:.0f} of the {used[0]:.0f} that a block uses; all {every[0]:.0f} have {most:.0f} directions with a slope"
        return Estimate.identity(least / used[0], holds, len(sloped), "of those in use", note)

    return measure


def routed(arm: str, key: str, unit: str) -> Measure:
    """A quantity of the routing after training; see `measures.routing`."""

    def measure(found: Found) -> Estimate:
        by = [mean(list(found.by_seed(arm, "routing", lambda c, s=s: c["by_sublayer"][s]).values())) for s in SUBLAYERS]
        note = f"attention {by[0]:.2f}, MLP {by[1]:.2f}" if key == "pattern" else ""
        return Estimate.of(list(found.by_seed(arm, "routing", lambda c: c[key]).values()), unit, note)

    return measure


def against_table(arm: str, table: str) -> Measure:
    """Bits per byte of an arm, minus those of a count table on the same text."""

    def measure(found: Found) -> Estimate:
        own, other = found.by_seed(arm, "bpb", _bpb), {seed: c[table] for seed, c in found.by_draw("tables").items()}
        _, s = paired_difference(own, other)
        note = f"{mean(list(own.values())) or 0:.3f} and {mean(list(other.values())) or 0:.3f}"
        return Estimate(s["mean"], s["lo"], s["hi"], s["n"], "BPB", None, tuple(s["seeds"]), note)

    return measure


def narrows(found: Found) -> Estimate:
    """Return the lanes' difference in bits per byte at full length minus that at a quarter of the steps; above 0 if it narrows."""
    differences = []
    for suffix in ("", "-short"):
        own, other = (found.by_seed(arm + suffix, "bpb", _bpb) for arm in ("shipped", "gptj"))
        differences.append(paired_difference(own, other)[1])
    each = [None if a is None or b is None else a - b for a, b in zip(*(d["seeds"] for d in differences), strict=True)]
    note = f"{differences[0]['mean']:+.4f}, and {differences[1]['mean']:+.4f} at a quarter of the steps"
    return Estimate.of(each, "BPB", note)


def gptj_gap(found: Found) -> Estimate:
    values = [content["gptj"] for content in found.drawn("symmetry")]
    return Estimate.identity(max(values), max(values) <= ZERO, len(values), "logit")


def path_sums(found: Found) -> Estimate:
    missing = [row["missing"] for c in found.drawn("paths") for rows in c["rows"].values() for row in rows]
    return Estimate.identity(max(missing), max(missing) <= ZERO, len(found.drawn("paths")), "of the total")


def closed_form(found: Found) -> Estimate:
    values = [content["closed_form"] for content in found.drawn("paths")]
    return Estimate.identity(max(values), max(values) <= ZERO, len(values), "of the direct path")


def direct_share(arm: str, reference: str | None = None) -> Measure:
    """|direct| / |total| at the first layer behind the fork, where depth matters most; or its difference between two wirings."""

    def share(content: Any, name: str, found: Found) -> float:
        first = found.settings.instruments.lane_start
        rows = [row["direct"] for row in content["rows"][name] if row["layer"] == first]
        return math.fsum(rows) / len(rows)

    def measure(found: Found) -> Estimate:
        less = lambda c: 0.0 if reference is None else share(c, reference, found)  # noqa: E731
        return Estimate.of([share(c, arm, found) - less(c) for c in found.drawn("paths")], "|direct|/|total|")

    return measure


def direct_share_trained(found: Found) -> Estimate:
    """Return the same difference on the trained models, between two lanes and the record's baseline."""
    first = found.settings.size.lane_start
    share = lambda c: _mean([row["direct"] for row in c["rows"] if row["layer"] == first])  # noqa: E731
    return found.difference("shipped", "gptj", "paths", share, "|direct|/|total|", "trained")


def amplified(k: int) -> Measure:
    """A(k) by the formula at the record's own rho, compared with the number that the record claims."""

    def measure(found: Found) -> Estimate:
        value = amplification(CLAIMED_RHO, k)
        return Estimate.identity(value, abs(value - CLAIMED[k]) < 0.005, 1, f"A({k})")

    return measure


def contraction(found: Found) -> Estimate:
    """Return rho of the wide arm's loop, averaged over the draws of a seed's perturbation."""
    rho = lambda c: math.fsum(row["rho"] for row in c["draws"]) / len(c["draws"])  # noqa: E731
    return found.mean("wide", "growth", rho, "rho")


def contraction_without_skips(found: Found) -> Estimate:
    """Return the remaining part of a perturbation at the end of the first pass, before any skip is mixed in."""
    left = lambda c: math.fsum(row["spreads"][0]["passes"][1] for row in c["draws"]) / len(c["draws"])  # noqa: E731
    return found.mean("wide", "growth", left, "of the push")
