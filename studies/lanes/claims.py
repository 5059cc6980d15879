"""The record's claims as data, each with what we measure and the rule that turns the measurement into a verdict.

    exact          an identity, and it holds (or a number that arithmetic gives)
    supported      the interval lies on the claimed side of the reference value, all of it
    null           the interval holds the reference: nothing was resolved at this size and this number of seeds
    contradicted   the interval lies on the other side, all of it; or an identity does not hold

The verdict is a function of the claim's rule and the estimate alone; nobody writes one by hand. A small model of source code is not
the record's: a null says nothing about the record, and `needed` says how many seeds would have resolved an effect of the claimed
size here. Source of the claims: parameter-golf, pull request 1518.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy.stats import norm

from studies.lanes.estimates import Measure
from studies.lanes.found import Estimate, Found

Verdict = Literal["exact", "supported", "null", "contradicted"]
VERDICTS: tuple[Verdict, ...] = ("exact", "supported", "null", "contradicted")
Rule = Literal["identity", "higher", "lower"]
POWER, LEVEL = 0.8, 0.95


@dataclass(frozen=True)
class Claim:
    """One row.

    group: what it is about. words: the claim. record: the record's own number or words for it, empty for rows that are ours.
    rule: `identity`, or the side of `reference` on which the claim puts the measured value.
    size: the effect that was claimed, as a distance from the reference in the unit that is measured; None without a number.
    """

    id: str
    group: str
    words: str
    record: str
    rule: Rule
    measure: Measure
    reference: float = 0.0
    size: float | None = None


@dataclass(frozen=True)
class Row:
    """A claim and what became of it."""

    claim: Claim
    estimate: Estimate
    verdict: Verdict
    needed: int | None

    def as_dict(self) -> dict[str, Any]:
        claim = {name: value for name, value in vars(self.claim).items() if name != "measure"}
        return {**claim, "verdict": self.verdict, "needed": self.needed, "measured": asdict(self.estimate)}


def verdict(rule: Rule, estimate: Estimate, reference: float = 0.0) -> Verdict:
    """What the estimate says of a claim under its rule; see the module."""
    if rule == "identity":
        if estimate.holds is None:
            raise ValueError("an identity holds or does not: the estimate says neither")
        return "exact" if estimate.holds else "contradicted"
    if estimate.low is None or estimate.high is None:
        return "null"
    above, below = estimate.low > reference, estimate.high < reference
    if not above and not below:
        return "null"
    return "supported" if above == (rule == "higher") else "contradicted"


def needed(estimate: Estimate, size: float | None) -> int | None:
    """Seeds that would tell an effect of `size` from none, at 80% power and a two-sided 5%, with the spread that was seen.

        n = (z_.975 + z_.8)^2 sd^2 / size^2         a normal approximation: too few where it is below ten or so

    None without a size, and where fewer than two values show no spread.
    """
    values = [value for value in estimate.each if value is not None]
    if not size or len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    z = float(norm.ppf((1 + LEVEL) / 2) + norm.ppf(POWER))
    return max(2, math.ceil(z**2 * variance / size**2))


def judge(found: Found, claims: Sequence[Claim]) -> list[Row]:
    """Every claim with its estimate and verdict, in the order of the table."""
    rows = []
    for claim in claims:
        estimate = claim.measure(found)
        rows.append(Row(claim, estimate, verdict(claim.rule, estimate, claim.reference), needed(estimate, claim.size)))
    return rows
