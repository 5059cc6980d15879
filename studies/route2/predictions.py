"""Statistical tests of the comparisons that were named before their runs.

    d_s         = sum_{a in plus} metric(a, s) - sum_{a in minus} minus_metric(a, s)       of each seed s
    less, more    null: the mean of d is 0; exact two-sided sign-flip test (n seeds give no p below 2 / 2**n)
    same          null: |mean of d| >= margin; two one-sided sign-flip tests at the margins, the greater p of both
    Holm          the i-th smallest of m p-values times m - i, running maximum; one family per preset and kind of null

Sources: Schuirmann 1987 (two one-sided tests), Holm 1979. Student's t is reported beside each exact p. A sign flip assumes only
that d is symmetric about the mean under the null.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator
from scipy.stats import spearmanr, ttest_1samp

from studies.common.stats import Summary, summary
from studies.common.tables import interval, markdown_table, number
from studies.route2.report.measures import DESCRIPTIONS, LEARNING

FILE = "predictions.toml"
MOST = 44
"""Values of an exact test: half of them have 2**22 sums, in half a GiB and two seconds."""
Alternative = Literal["two-sided", "less", "greater"]
Seeded = Mapping[tuple[str, str], Mapping[int, float | None]]
"""``(arm, metric)`` -> the value of each seed."""


class Comparison(BaseModel):
    """One contrast of arms with its expected outcome, and for ``same`` the margin of equivalence."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    preset: str
    name: str
    plus: tuple[str, ...] = Field(min_length=1)
    minus: tuple[str, ...] = Field(min_length=1)
    metric: str
    minus_metric: str | None = None
    expect: Literal["less", "more", "same"]
    margin: float | None = Field(default=None, gt=0, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _complete(self) -> "Comparison":
        known = (*DESCRIPTIONS, *LEARNING)
        if unknown := {self.metric, self.minus_metric or self.metric} - {*known}:
            raise ValueError(f"{self.name}: unknown metric {', '.join(unknown)}; choose from {', '.join(known)}")
        if (self.expect == "same") != (self.margin is not None):
            raise ValueError(f"{self.name}: expect = 'same' needs a margin, and nothing else has one")
        if self.margin is not None and self.margin >= 1:
            raise ValueError(f"{self.name}: rates never differ by {self.margin:g}, so this could not fail: choose a margin below 1")
        if len(self.plus) != len(self.minus):
            raise ValueError(f"{self.name}: {len(self.plus)} arms are compared with {len(self.minus)}: give both sides as many")
        if sorted(self.plus) == sorted(self.minus) and self.minus_metric in (None, self.metric):
            raise ValueError(f"{self.name}: both sides are {', '.join(self.plus)}, which cannot differ: name another arm or metric")
        return self

    @property
    def contrast(self) -> str:
        """The contrast as text: ``a - b``, or ``(a + b) - (c + d)``; with a second metric both are named."""
        if self.minus_metric is not None:
            other = "" if self.minus == self.plus else f"{' + '.join(self.minus)}: "
            return f"{' + '.join(self.plus)}: {self.metric} - {other}{self.minus_metric}"
        sides = [" + ".join(side) if len(side) == 1 else f"({' + '.join(side)})" for side in (self.plus, self.minus)]
        return " - ".join(sides)

    def differences(self, values: Seeded) -> dict[int, float]:
        """Return the contrast of every seed for which all of its arms have the metric."""
        terms = [(1, values.get((arm, self.metric), {})) for arm in self.plus]
        terms += [(-1, values.get((arm, self.minus_metric or self.metric), {})) for arm in self.minus]
        seeds = set.intersection(*({seed for seed, value in term.items() if value is not None} for _, term in terms))
        return {seed: sum(sign * float(term[seed] or 0.0) for sign, term in terms) for seed in sorted(seeds)}


class Predictions(BaseModel):
    """Content of a predictions file: seeds, arms, the settings hash of each preset, and comparisons with their ``alpha``.

    ``method`` is the arm for which the file sets the goals, if it is not the rule that the report would judge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seeds: tuple[StrictInt, ...] = Field(min_length=2)
    alpha: float = Field(gt=0, lt=1, strict=True)
    arms: tuple[str, ...]
    presets: Mapping[str, str]
    method: str | None = None
    comparison: tuple[Comparison, ...]
    sha256: str

    @model_validator(mode="after")
    def _run_and_reported(self) -> "Predictions":
        """Refuse a comparison that would never be run or reported."""
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a seed is given twice: remove one of them")
        if len(self.seeds) > MOST:
            raise ValueError(f"there are {len(self.seeds)} seeds, and an exact test takes at most {MOST}: name fewer")
        if unknown := sorted({c.preset for c in self.comparison} - self.presets.keys()):
            raise ValueError(f"there are comparisons of {unknown[0]}, which is not among the presets {', '.join(self.presets)}")
        if unknown := sorted({arm for c in self.comparison for arm in (*c.plus, *c.minus)} - set(self.arms)):
            raise ValueError(f"{unknown[0]} is compared, and not among the arms {', '.join(self.arms)}")
        if self.method is not None and self.method not in self.arms:
            raise ValueError(f"{self.method} is the method, and not among the arms {', '.join(self.arms)}")
        return self

    @staticmethod
    def read(path: Path) -> "Predictions":
        """Read a predictions file and its hash; ``ValueError`` in one sentence if it is not one."""
        try:
            data = path.read_bytes()
            return Predictions(**tomllib.loads(data.decode()), sha256=hashlib.sha256(data).hexdigest())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid predictions file: {' '.join(str(error).split())}") from error

    def family(self, preset: str, equivalence: bool) -> list[Comparison]:
        """Return the comparisons of a preset that are corrected together."""
        return [c for c in self.comparison if c.preset == preset and (c.margin is not None) == equivalence]

    def undecidable(self) -> str:
        """Return a sentence on a family of which no result of these seeds could show anything; empty if there is none."""
        for preset in self.presets:
            for equivalence, what in ((False, "differences"), (True, "equivalences")):
                named = len(self.family(preset, equivalence))
                if named and not decides(len(self.seeds), named, self.alpha, equivalence):
                    most = max((n for n in range(named) if decides(len(self.seeds), n, self.alpha, equivalence)), default=0)
                    seeds = range(len(self.seeds), MOST + 1)
                    least = next((n for n in seeds if decides(n, named, self.alpha, equivalence)), None)
                    remedies = [f"name at most {most} of them"] if most else []
                    remedies.append("give a larger alpha" if least is None else f"give at least {least} seeds")
                    return (
                        f"by Holm's rule {len(self.seeds)} seeds can show none of the {named} {what} of {preset} at alpha = "
                        f"{self.alpha:g}: {', or '.join(remedies)}"
                    )
        return ""

    def apply_to(self, preset: str, settings_hash: str, seeds: Sequence[int]) -> bool:
        """Return True for runs with these settings and seeds."""
        return self.presets.get(preset) == settings_hash and set(seeds) <= set(self.seeds)


@dataclass(frozen=True)
class Outcome:
    """Test result of one comparison.

    ``p`` is exact, and ``p_holm`` is corrected within its family; both are 1.0 without runs.
    """

    comparison: Comparison
    difference: Summary
    p_student: float
    p: float
    p_holm: float
    alpha: float

    @property
    def verdict(self) -> str:
        if self.difference["n"] < 2:
            return "not run"
        if self.p_holm >= self.alpha:
            return "not shown"
        mean = self.difference["mean"]
        assert mean is not None
        opposite = {"less": mean > 0, "more": mean < 0, "same": False}[self.comparison.expect]
        return "the opposite" if opposite else "shown"


def sign_flip(values: Sequence[float], alternative: Alternative = "two-sided") -> float:
    """Return p of the exact sign-flip test that the mean is 0, over all ``2**n`` assignments of signs.

    They are counted, not listed: for each sum of one half of the values, the sums of the other half that are as extreme with it.

    Raises:
        ValueError: There are more than ``MOST`` values.
    """
    if len(values) > MOST:
        raise ValueError(f"the exact sign-flip test takes at most {MOST} values, not {len(values)}: report fewer seeds")
    one, other = _signed_sums(values[::2]), np.sort(_signed_sums(values[1::2]))
    # Equal sums differ by rounding; a bound relative to the observed sum, which may be near 0, would not make them equal.
    observed, rounding = sum(values), 1e-12 * sum(map(abs, values))
    less = other.searchsorted(observed + rounding - one, "right").sum() / 2 ** len(values)
    greater = (len(other) - other.searchsorted(observed - rounding - one, "left")).sum() / 2 ** len(values)
    return float({"less": less, "greater": greater, "two-sided": min(1.0, 2 * min(less, greater))}[alternative])


def _signed_sums(values: Sequence[float]) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def decides(seeds: int, comparisons: int, alpha: float, equivalence: bool) -> bool:
    """Return True if a family of so many comparisons has results of so many seeds by which one of them is shown."""
    least = (1 if equivalence else 2) / 2**seeds  # of `sign_flip`, if every seed is on one side
    return min(holm([least] * comparisons), default=0.0) < alpha


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's corrected p-values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(steps).clip(max=1.0)
    return corrected.tolist()


def p_values(differences: Sequence[float], margin: float | None) -> tuple[float, float]:
    """Return the exact and Student's p: of a mean of 0, or with a margin, of a mean at or outside of it."""
    if len(differences) < 2:
        return 1.0, 1.0
    d = np.asarray(differences)
    with np.errstate(all="ignore"):  # equal differences have no spread: t is infinite, or NaN if they are 0
        if margin is None:
            return sign_flip(d.tolist()), _student(d, 0.0, "two-sided")
        sides: tuple[tuple[float, Alternative], ...] = ((-margin, "greater"), (margin, "less"))
        exact = max(sign_flip((d - edge).tolist(), side) for edge, side in sides)
        return exact, max(_student(d, edge, side) for edge, side in sides)


def _student(d: np.ndarray, mean: float, alternative: Alternative) -> float:
    p = ttest_1samp(d, mean, alternative=alternative).pvalue  # pyright: ignore[reportAttributeAccessIssue]
    return float(np.nan_to_num(p, nan=1.0))


def ranks_within_seeds(points: Sequence[tuple[int, float, float]]) -> list[float]:
    """Return Spearman's correlation of the two values of ``(seed, x, y)`` within each seed in which both differ.

    Points of a seed share its model and prompts, so a seed counts once.
    """
    seeds = dict.fromkeys(seed for seed, *_ in points)
    sides = [zip(*((x, y) for each, x, y in points if each == seed), strict=True) for seed in seeds]
    return [float(spearmanr(x, y)[0]) for x, y in sides if len(set(x)) > 1 and len(set(y)) > 1]  # pyright: ignore


def outcomes(predictions: Predictions, preset: str, values: Seeded) -> list[Outcome]:
    """Return the outcomes of all comparisons of the preset, in the file's order.

    Comparisons that were not run count in their family too.
    """
    results = []
    for equivalence in (False, True):
        family = predictions.family(preset, equivalence)
        differences = [list(c.differences(values).values()) for c in family]
        ps = [p_values(d, c.margin) for d, c in zip(differences, family, strict=True)]
        corrected = holm([exact for exact, _ in ps])
        for c, d, (exact, student), p_holm in zip(family, differences, ps, corrected, strict=True):
            results.append(Outcome(c, summary(d), student, exact, p_holm, predictions.alpha))
    return sorted(results, key=lambda each: predictions.comparison.index(each.comparison))


def predictions_markdown(predictions: Predictions, results: Sequence[Outcome]) -> str:
    """Return predictions.md, a table of expectations and outcomes."""
    body = []
    for each in results:
        c = each.comparison
        expected = c.expect if c.margin is None else f"same, ±{number(c.margin)}"
        cells = [c.name, c.contrast, "" if c.minus_metric else c.metric, expected, str(each.difference["n"])]
        cells += [interval(each.difference, signed=True), *map(p_text, (each.p_student, each.p, each.p_holm)), each.verdict]
        body.append(cells)
    header = ["comparison", "contrast", "metric", "expected", "n", "difference", "p: Student", "exact", "Holm", "verdict"]
    return (
        f"Named before any of these seeds was run, in `{FILE}` (SHA-256 `{predictions.sha256}`). Differences: mean [95% Student-t "
        "interval], paired by seed. *less*, *more*: exact two-sided sign-flip test of a mean of 0. *same*: two one-sided sign-flip "
        f"tests at the margins. Holm-corrected within the preset's differences and within its equivalences; *shown* below "
        f"{number(predictions.alpha)}. What is *not shown* is not thereby absent.\n\n"
        f"{markdown_table(header, body, left=4)}"
    )


def p_text(value: float) -> str:
    """Format a p-value."""
    return "< .001" if value < 0.001 else number(value)
