"""The record's claims as data, each with what we measure and the rule that turns the measurement into a verdict.

    exact                  an identity, and it holds (or a number that arithmetic gives)
    supported              the interval lies on the claimed side of the reference value, all of it, and reaches the claimed size
    contradicted           the interval lies on the other side, all of it; or an identity does not hold
    claimed size excluded  the interval lies short of the claimed effect, all of it: whatever there is here, it is smaller
    not testable here      the interval holds the reference, and the claimed effect is below the floor of this run
    null                   the interval holds the reference: of a claim without a size, or at a floor below the claimed size

The floor is the smallest effect that a paired t-test at a two-sided 5% would find in four runs of five, with the spread that was
seen and as many values as there are. `needed` is how many values put the floor at the claimed size; a row with fewer is
underpowered, whatever its verdict. The verdict is a function of the claim and the estimate alone; nobody writes one by hand. A
small model of source code is not the record's: no verdict but `exact` carries over. Source of the claims: parameter-golf, pull
request 1518.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from scipy.optimize import brentq
from scipy.stats import nct, norm, t

from studies.lanes.estimates import Measure
from studies.lanes.found import Estimate, Found

Verdict = Literal["exact", "supported", "claimed size excluded", "not testable here", "null", "contradicted"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Rule = Literal["identity", "higher", "lower"]
POWER, LEVEL = 0.8, 0.95


@dataclass(frozen=True)
class Claim:
    """One row.

    group: what it is about. words: the claim. record: the record's own number or words for it, empty for rows that are ours.
    rule: `identity`, or the side of `reference` on which the claim puts the measured value.
    size: the effect that was claimed, as a distance from the reference in the unit that is measured; None without a number.
    full: whether it needs an arm that only a full study trains.
    """

    id: str
    group: str
    words: str
    record: str
    rule: Rule
    measure: Measure
    reference: float = 0.0
    size: float | None = None
    full: bool = False


@dataclass(frozen=True)
class Row:
    """A claim and what became of it. floor, needed: see the module; None where nothing was spread, or no size was claimed."""

    claim: Claim
    estimate: Estimate
    verdict: Verdict
    floor: float | None
    needed: int | None

    @property
    def underpowered(self) -> bool:
        return self.needed is not None and self.estimate.n < self.needed

    def as_dict(self) -> dict[str, Any]:
        claim = {name: value for name, value in vars(self.claim).items() if name not in ("measure", "full")}
        found = {"verdict": self.verdict, "floor": self.floor, "needed": self.needed, "underpowered": self.underpowered}
        return {**claim, **found, "measured": asdict(self.estimate)}


def verdict(rule: Rule, estimate: Estimate, reference: float = 0.0, size: float | None = None) -> Verdict:
    """What the estimate says of a claim under its rule; see the module."""
    if rule == "identity":
        if estimate.holds is None:
            raise ValueError("an identity holds or does not: the estimate says neither")
        return "exact" if estimate.holds else "contradicted"
    if estimate.low is None or estimate.high is None:
        return "not testable here" if size else "null"
    least, most = (
        (estimate.low - reference, estimate.high - reference)
        if rule == "higher"
        else (reference - estimate.high, reference - estimate.low)
    )  # how far on the claimed side
    if most < 0:
        return "contradicted"
    if size is not None and most < size:
        return "claimed size excluded"
    if least > 0:
        return "supported"
    smallest = floor(estimate)
    return "not testable here" if size is not None and (smallest is None or smallest > size) else "null"


def deviation(estimate: Estimate) -> float | None:
    """The standard deviation of the values; None for fewer than two."""
    values = [value for value in estimate.each if value is not None]
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def power(n: int, shift: float) -> float:
    """How often a two-sided t-test of n values finds an effect `shift` standard errors from 0, and on its own side."""
    return float(nct.sf(t.ppf((1 + LEVEL) / 2, n - 1), n - 1, min(shift, 100.0)))  # far beyond that scipy gives NaN


def floor(estimate: Estimate) -> float | None:
    """The smallest effect that is found with probability `POWER`, at this spread and number of values; None for fewer than two."""
    spread = deviation(estimate)
    if spread is None:
        return None
    shift: Any = brentq(lambda x: power(estimate.n, x) - POWER, 0.0, 100.0)
    return float(shift) * spread / math.sqrt(estimate.n)


def needed(estimate: Estimate, size: float | None) -> int | None:
    """The fewest values that find an effect of `size` with probability `POWER`, at this spread.

    None without a size, and where fewer than two values show no spread.
    """
    spread = deviation(estimate)
    if not size or spread is None:
        return None
    z = float(norm.ppf((1 + LEVEL) / 2) + norm.ppf(POWER))
    n = max(2, math.ceil((z * spread / size) ** 2))  # what known spreads would need: a t-test needs no fewer, and a few more
    while spread and power(n, math.sqrt(n) * size / spread) < POWER:
        n += 1
    return n


def judge(found: Found, claims: Sequence[Claim]) -> list[Row]:
    """Every claim with its estimate and verdict, in the order of the table; without those that only a full study has arms for."""
    rows = []
    for claim in claims:
        if claim.full and not found.settings.full:
            continue
        estimate = claim.measure(found)
        outcome = verdict(claim.rule, estimate, claim.reference, claim.size)
        rows.append(Row(claim, estimate, outcome, floor(estimate), needed(estimate, claim.size)))
    return rows
