"""From the artifacts of a study to an estimate: what the claims measure, each a function of `Found`.

Differences of arms are paired by seed: arms of a seed share data, start and test text. A quantity that has a sign is given so that
less is better, as bits per byte are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from studies.lanes.found import Estimate, Found
from studies.lanes.growth import CLAIMED, CLAIMED_RHO, amplification

ZERO = 1e-12
"""How far from an identity float64 may be."""
Measure = Callable[[Found], Estimate]
TTT_ARMS = ("sequential", "shipped", "wide", "wide-early")


def _bpb(content: Any) -> float:
    return content["bpb"]


def _gain(scope: str) -> Callable[[Any], float | None]:
    return lambda content: content[scope]["gain"]


def bpb(arm: str, reference: str, note: str = "") -> Measure:
    """Difference in bits per byte of two arms as they were trained."""
    return lambda found: found.difference(arm, reference, "bpb", _bpb, "BPB", note)


def bpb_quantised(arm: str, reference: str) -> Measure:
    """The same after quantisation."""
    return lambda found: found.difference(arm, reference, "quantised", _bpb, "BPB", "quantised")


def gap(arm: str, reference: str) -> Measure:
    """Difference in what quantisation costs."""

    def measure(found: Found) -> Estimate:
        own, other = _gaps(found, arm), _gaps(found, reference)
        means = [math.fsum(gaps.values()) / len(gaps) for gaps in (own, other)]
        note = f"gaps {means[0]:.4f} and {means[1]:.4f}"
        return Estimate.of([own[seed] - other[seed] for seed in own.keys() & other.keys()], "BPB", note)

    return measure


def _gaps(found: Found, arm: str) -> dict[int, float]:
    quantised, trained = found.by_seed(arm, "quantised", _bpb), found.by_seed(arm, "bpb", _bpb)
    return {seed: float(quantised[seed] or 0) - float(trained[seed] or 0) for seed in quantised}


def extraction(arm: str, reference: str) -> Measure:
    """Difference in what test-time training of all parameters gains, each arm at its own best rate."""

    def measure(found: Found) -> Estimate:
        means = [found.mean(name, "ttt", _gain("all"), "BPB").value for name in (arm, reference)]
        note = "gains " + " and ".join("none" if value is None else f"{value:.4f}" for value in means)
        return found.difference(arm, reference, "ttt", _gain("all"), "BPB", note)

    return measure


def controls(run: str) -> Measure:
    """What controls alone gain, minus half of what all parameters gain, in the mean over the arms that were trained at test time.

    No ratio: where all parameters lose, a share of it means nothing.
    """

    def measure(found: Found) -> Estimate:
        own, full = ([found.by_seed(arm, "ttt", _gain(scope)) for arm in TTT_ARMS] for scope in (run, "all"))
        pairs = {seed: [(a[seed], b[seed]) for a, b in zip(own, full, strict=True)] for seed in own[0]}
        each = [_mean([None if a is None or b is None else a - b / 2 for a, b in row]) for row in pairs.values()]
        gains = [_mean([values[i] for row in pairs.values() for values in row]) for i in (0, 1)]
        note = "gains " + " and ".join("none" if gain is None else f"{gain:.4f}" for gain in gains)
        return Estimate.of(each, "BPB", f"{note}; {edges(found)}")

    return measure


def edges(found: Found) -> str:
    """How many of the chosen rates were the smallest or the largest that was tried."""
    chosen = {
        (arm, seed, row["scope"]): row["edge"]
        for arm in TTT_ARMS
        for seed in found.seeds
        for row in found.contents[arm, seed, "ttt"]["tuning"]
    }
    return f"{sum(chosen.values())} of {len(chosen)} rates at an edge of the sweep"


def _mean(values: Sequence[float | int | None]) -> float | None:
    """None where one of them is."""
    defined = [value for value in values if value is not None]
    return math.fsum(defined) / len(defined) if len(defined) == len(values) else None


def before_quantisation(found: Found) -> Estimate:
    """What of the two lanes' gain is there before quantisation, above half of the gain after it."""
    trained, after = (
        [found.by_seed(arm, part, read) for arm in ("sequential", "shipped")] for part, read in (("bpb", _bpb), ("quantised", _bpb))
    )
    each = [
        (float(trained[0][s] or 0) - float(trained[1][s] or 0)) - (float(after[0][s] or 0) - float(after[1][s] or 0)) / 2
        for s in trained[0]
    ]
    return Estimate.of(each, "BPB", "gain before, minus half of the gain after quantisation")


def calibration(a: str, b: str) -> Measure:
    """Difference of two quantisations of the arm `shipped`."""
    return lambda found: found.mean("shipped", "calibrations", lambda c: c[a] - c[b], "BPB")


def gptq_against_nearest(found: Found) -> Estimate:
    """Bits per byte of GPTQ, minus those of rounding to nearest at the same scales."""
    return found.mean("shipped", "calibrations", lambda c: c["few"] - c["nearest"], "BPB")


def bytes_by_clip(found: Found) -> Estimate:
    """Bytes at the record's clip, minus those at the clip before it."""
    before, usual = 12.85, found.settings.evaluation.gptq.k
    at = lambda c, k: next(point["bytes"] for point in c["points"] if point["k"] == k)  # noqa: E731
    return found.mean("shipped", "calibrations", lambda c: at(c, usual) - at(c, before), "bytes")


def bytes_predicted(found: Found) -> Estimate:
    """Actual bytes over predicted ones, minus 1, at the record's clip."""
    usual = found.settings.evaluation.gptq.k
    point = lambda c: next(point for point in c["points"] if point["k"] == usual)  # noqa: E731
    return found.mean("shipped", "calibrations", lambda c: abs(point(c)["bytes"] / point(c)["by_gaussian"] - 1), "share")


def hints(a: str, b: str) -> Measure:
    """Difference of two mixtures of Tap-In, of one model."""
    return lambda found: found.mean("shipped", "tapin", lambda c: c["bpb"][a] - c["bpb"][b], "BPB")


def worst(wiring: str, key: str, unit: str, *, tolerance: float = ZERO) -> Measure:
    """An identity of a wiring, at its worst over all draws."""

    def measure(found: Found) -> Estimate:
        values = found.wiring(wiring, lambda row: row[key])
        return Estimate.identity(max(values), max(values) <= tolerance, len(values), unit)

    return measure


def stays(wiring: str, start: str) -> Measure:
    """Whether lanes that start equal stay equal over training: the largest distance of their weights."""

    def measure(found: Found) -> Estimate:
        own = [t for c in found.drawn("traces") for t in c["traces"] if (t["name"], t["start"]) == (wiring, start)]
        largest = max(max(trace["differences"]) for trace in own)
        return Estimate.identity(largest, largest <= ZERO, len(own), "weight", f"after {own[0]['steps'][-1]} steps of Adam")

    return measure


def live_scalars(found: Found) -> Estimate:
    values = found.wiring("shipped", lambda row: float(row["live"]))
    total = found.wiring("shipped", lambda row: float(row["scalars"]))[0]
    return Estimate.identity(
        max(values), min(values) == total, len(values), f"of {total:.0f}", "scalars whose gradient is not exactly 0"
    )


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
    """|direct| / |total| at the first layer behind the fork, where depth should tell most; or its difference of two wirings."""

    def share(content: Any, name: str, found: Found) -> float:
        first = found.settings.instruments.lane_start
        rows = [row["direct"] for row in content["rows"][name] if row["layer"] == first]
        return math.fsum(rows) / len(rows)

    def measure(found: Found) -> Estimate:
        less = lambda c: 0.0 if reference is None else share(c, reference, found)  # noqa: E731
        return Estimate.of([share(c, arm, found) - less(c) for c in found.drawn("paths")], "|direct|/|total|")

    return measure


def amplified(k: int) -> Measure:
    """A(k) by the formula, at the record's own rho; claimed is another number."""

    def measure(found: Found) -> Estimate:
        value = amplification(CLAIMED_RHO, k)
        return Estimate.identity(value, abs(value - CLAIMED[k]) < 0.005, 1, f"A({k})")

    return measure


def contraction(found: Found) -> Estimate:
    """rho of the wide arm's loop, a mean over draws of the push a seed."""
    rho = lambda c: math.fsum(row["rho"] for row in c["draws"]) / len(c["draws"])  # noqa: E731
    return found.mean("wide", "growth", rho, "rho")


def contraction_without_skips(found: Found) -> Estimate:
    """What is left of a push when the first pass ends, before any skip is mixed in."""
    left = lambda c: math.fsum(row["spreads"][0]["passes"][1] for row in c["draws"]) / len(c["draws"])  # noqa: E731
    return found.mean("wide", "growth", left, "of the push")
