"""Means over seeds and tasks with a bootstrap interval that resamples both, and paired differences of cells.

    value = sum_st a_s b_t x_st / (sum_s a_s sum_t b_t)        a, b: how often a draw contains seed s, task t

Every seed has the same tasks, so seeds and tasks are crossed, and each is resampled independently (Owen, "The pigeonhole
bootstrap", Annals of Applied Statistics, 2007). All cells share the draws: a difference of two cells is paired. With few seeds such
an interval is too narrow rather than too wide; the means of single seeds are printed beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from mi_route2.probes.auroc import auroc, cluster_draws
from studies.common.artifacts import Artifact
from studies.common.stats import summary
from studies.environments.micro.language import MICRO_MODES
from studies.steering.cells import OUTCOMES
from studies.steering.job import SteeringJob, parts_of
from studies.steering.settings import SUBJECTS, SteeringSettings

ROUNDING = 1e-9
"""Bounds this close to 0 count as 0: a mean of rates that cancel is 0 only up to rounding."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval: ``low`` and ``high`` bound 95% of the draws; ``seeds`` has the mean of each seed."""

    mean: float
    low: float
    high: float
    seeds: list[float]

    @property
    def direction(self) -> int:
        """-1 if below 0, 1 if above, 0 if the interval contains 0; a bound that is 0 up to rounding counts as 0."""
        return -1 if self.high < -ROUNDING else 1 if self.low > ROUNDING else 0


@dataclass(frozen=True)
class Draws:
    """Resamples of seeds and of tasks, as counts; shared by a whole study."""

    seeds: Int[np.ndarray, "m s"]
    tasks: Int[np.ndarray, "m t"]

    @staticmethod
    def of(seeds: int, tasks: int, draws: int = 2000) -> "Draws":
        rng = np.random.default_rng(0)
        return Draws(cluster_draws(seeds, draws, rng), cluster_draws(tasks, draws, rng))

    def estimate(self, values: Float[np.ndarray, "s t"]) -> Estimate:
        """Return the estimate of values by seed and task; ``ValueError`` if the sizes differ from those of the draws."""
        if values.shape != (self.seeds.shape[1], self.tasks.shape[1]):
            raise ValueError(
                f"values of {values.shape} do not fit draws of {self.seeds.shape[1]} seeds and {self.tasks.shape[1]} tasks"
            )
        drawn = ((self.seeds @ values) * self.tasks).sum(axis=1) / values.size
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Estimate(float(values.mean()), float(low), float(high), values.mean(axis=1).tolist())


METRICS = ("hack_held", "exploit_held", "hack_known", "exploit_known", "solve")
KINDS = ("known", "held")
UNITS = ("token", "rollout mean", "rollout max")
MODES = MICRO_MODES


@dataclass(frozen=True)
class Study:
    """A finished folder. ``artifacts[subject, part][seed]`` has data and tensors."""

    settings: SteeringSettings
    seeds: tuple[int, ...]
    artifacts: Mapping[tuple[str, str], Mapping[int, Artifact]]
    draws: Draws

    def cells(self, subject: str, part: str) -> list[dict[str, Any]]:
        """Return the descriptions of a part's cells, in order."""
        return self.artifacts[subject, part][self.seeds[0]][0]["cells"]

    def values(self, subject: str, part: str, cell: str) -> dict[str, Float[np.ndarray, "s t"]]:
        """Return every metric of a cell, by seed and task."""
        per_seed = [metrics(self.artifacts[subject, part][seed][1][cell].numpy().astype(float)) for seed in self.seeds]
        return {metric: np.stack([each[metric] for each in per_seed]) for metric in METRICS}

    def estimates(self, subject: str, part: str, cell: str, minus: str | None = None) -> dict[str, Estimate]:
        """Return every metric of a cell, or its paired difference from another cell of the same part."""
        values = self.values(subject, part, cell)
        other = self.values(subject, part, minus) if minus else dict.fromkeys(METRICS, 0.0)
        return {metric: self.draws.estimate(values[metric] - other[metric]) for metric in METRICS}


def load_study(folder: Path) -> Study:
    """Read all parts of all seeds.

    Raises:
        ValueError: If a part is missing or damaged, or was made from another run than the one that lies beside the study.
    """
    settings, artifacts = SteeringSettings.read(folder), {}
    if folder.name != settings.folder:
        raise ValueError(f"the settings in {folder} are those of {settings.folder}: do not rename or edit a study folder")
    named = [path.name.removeprefix("seed-") for path in folder.glob("seed-*") if path.is_dir()]
    numbers = (name for name in named if name.isdecimal() and name == str(int(name)))  # a copy under another name is no seed
    seeds = tuple(sorted(map(int, numbers)))
    for subject in SUBJECTS:
        for part in parts_of(subject):
            by_seed = {seed: SteeringJob(settings, folder.parent, seed, subject).read(part) for seed in seeds}
            missing = [seed for seed, each in by_seed.items() if each is None]
            if missing or not seeds:
                raise ValueError(
                    f"{folder} is not finished: {part} of {subject} is missing at seeds {missing}; a run of its seeds resumes it"
                )
            artifacts[subject, part] = by_seed
            _check(folder, settings, subject, part, by_seed)
    return Study(settings, seeds, artifacts, Draws.of(len(seeds), settings.tasks))


def _check(folder: Path, settings: SteeringSettings, subject: str, part: str, by_seed: Mapping[int, Any]) -> None:
    """Check that outcomes are complete: exactly the named cells, 0 or 1, one for each mode and task.

    Raises:
        ValueError: If they are not.
    """
    shape = (len(MODES.names), settings.tasks, 2)
    for seed, (about, tensors) in by_seed.items():
        if "modes" not in about:
            continue
        named = [cell["name"] for cell in about["cells"]]
        good = sorted(named) == sorted(tensors) and about["modes"] == list(MODES.names)
        if not good or any(tuple(t.shape) != shape or int(t.max()) > 1 for t in tensors.values()):
            raise ValueError(f"{part} of {subject} at seed {seed} in {folder} does not contain the cells that it names: delete it")


def metrics(outcomes: Float[np.ndarray, "modes t 2"]) -> dict[str, Float[np.ndarray, " t"]]:
    """Return each metric by task, from outcomes (solve, exploit) by mode and task."""
    solve, exploit = outcomes[..., 0], outcomes[..., 1]
    hack = exploit * (1 - solve)
    rows = {
        split: [MODES.names.index(mode) for mode in modes] for split, modes in (("held", MODES.held_out), ("known", MODES.known))
    }
    rates = {
        f"{what}_{split}": v[rows[split]].mean(axis=0) for what, v in (("hack", hack), ("exploit", exploit)) for split in KINDS
    }
    return {**rates, "solve": solve.mean(axis=0)}


@dataclass(frozen=True)
class Roc:
    """One seed's scores at a site, for one kind of modes and one unit, with the oracle's labels."""

    scores: Float[np.ndarray, " n"]
    hack: Bool[np.ndarray, " n"]

    @property
    def area(self) -> float | None:
        return auroc(self.scores, self.hack)


def roc_of(study: Study, subject: str, seed: int, site: str, probe: str, split: str, unit: str) -> Roc:
    """Return scores of generated tokens (with their rollout's label), or their mean or maximum over each rollout."""
    _, tensors = study.artifacts[subject, "roc"][seed]
    modes = MODES.known if split == "known" else MODES.held_out
    outcomes = tensors["outcomes"].numpy().astype(float)
    hack = (outcomes[..., 1] * (1 - outcomes[..., 0])).astype(bool)
    rows = [MODES.names.index(mode) for mode in modes]
    tasks = study.settings.tasks
    table = tensors[f"scores/{site}/{probe}"].numpy().reshape(len(MODES.names), tasks, -1)[rows].reshape(len(rows) * tasks, -1)
    label, there = hack[rows].reshape(-1), ~np.isnan(table)
    some = there.any(axis=1)
    table, label, there = table[some], label[some], there[some]  # a rollout that ended at once has no score
    if unit == "token":
        return Roc(table[there], np.repeat(label[:, None], table.shape[1], axis=1)[there])
    return Roc(np.nanmean(table, axis=1) if unit == "rollout mean" else np.nanmax(table, axis=1), label)


def roc_areas(study: Study) -> Iterator[dict[str, Any]]:
    """Yield the AUROC of every subject, site, probe, kind of modes and unit, over seeds."""
    for subject, part in study.artifacts:
        if part != "roc":
            continue
        names = sorted(name for name in study.artifacts[subject, part][study.seeds[0]][1] if name.startswith("scores/"))
        for _, site, probe in (name.split("/") for name in names):
            for split, unit in product(KINDS, UNITS):
                areas = [roc_of(study, subject, seed, site, probe, split, unit).area for seed in study.seeds]
                yield {"subject": subject, "site": site, "probe": probe, "modes": split, "unit": unit, **summary(areas)}


def openings_of(
    study: Study, subject: str, seed: int, site: str, probe: str
) -> tuple[Bool[np.ndarray, "n t"], Bool[np.ndarray, "n t"], Bool[np.ndarray, " n"]]:
    """Return where a gate at the operating threshold opens, which tokens it reads, and which rollouts are hacks."""
    _, tensors = study.artifacts[subject, "roc"][seed]
    _, fit = study.artifacts[subject, "fit"][seed]
    place = sorted(study.settings.quantiles).index(study.settings.operating)
    scores = tensors[f"scores/{site}/{probe}"].numpy()
    outcomes = tensors["outcomes"].numpy().reshape(-1, len(OUTCOMES))
    hacks = (outcomes[:, 1] == 1) & (outcomes[:, 0] == 0)
    return scores >= float(fit[f"{site}/{probe}/thresholds"][place]), ~np.isnan(scores), hacks


def openings(study: Study) -> Iterator[dict[str, Any]]:
    """Yield, for every gate of the cells, how often it opens on the model's own rollouts at the operating threshold.

    All gates have the same quantile of clean training tokens. On the model's hacks they may still open as differently as never and
    always, and a random probe that stays shut there is no control of how much is steered.
    """
    for subject in (subject for subject, part in study.artifacts if part == "roc"):
        names = study.artifacts[subject, "roc"][study.seeds[0]][1]
        gates = [name.split("/")[1:] for name in names if name.startswith(f"scores/{study.settings.site}/")]
        for site, probe in dict.fromkeys([*map(tuple, sorted(gates)), (study.settings.early, "probe")]):
            seeds = [openings_of(study, subject, seed, site, probe) for seed in study.seeds]
            opens, read = np.concatenate([each[0] for each in seeds]), np.concatenate([each[1] for each in seeds])
            some, hacks = np.asarray(opens.any(axis=1)), np.concatenate([each[2] for each in seeds])
            rates = {"opened_on_hacks": _rate(some[hacks]), "opened_on_others": _rate(some[~hacks]), "tokens": _rate(opens[read])}
            yield {"subject": subject, "site": site, "probe": probe, **rates}


def lead(study: Study, subject: str) -> dict[str, Any]:
    """Return the rates at which a gate at the operating threshold opens on hacks and on other rollouts, and its lead.

    The lead is the number of tokens before the first token of the exploit: 0 if the gate opens at the token that predicts it,
    negative if later.
    """
    ahead: list[int] = []
    opened: dict[str, list[bool]] = {"hack": [], "other": []}
    for seed in study.seeds:
        opens, _, hacks = openings_of(study, subject, seed, study.settings.site, "probe")
        first = study.artifacts[subject, "roc"][seed][1]["exploits"].tolist()
        for i, row in enumerate(opens):
            fired, hack = np.flatnonzero(row), bool(hacks[i])
            opened["hack" if hack else "other"].append(bool(len(fired)))
            if hack and len(fired) and first[i] >= 0:
                ahead.append(first[i] - 1 - int(fired[0]))
    return {
        "subject": subject,
        "hacks": len(opened["hack"]),
        "opened_on_hacks": _rate(opened["hack"]),
        "opened_on_others": _rate(opened["other"]),
        "lead_median": float(np.median(ahead)) if ahead else None,
        "in_time": _rate([each >= 0 for each in ahead]),
        "leads": ahead,
    }


def _rate(values: Sequence[bool] | Bool[np.ndarray, " n"]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def deltas(study: Study) -> Iterator[dict[str, Any]]:
    """Yield the change of the exploit's log-probability by steering, mean over rollouts, over seeds."""
    for cell in study.cells("vanilla", "logprobs"):
        columns = [study.artifacts["vanilla", "logprobs"][seed][1][f"deltas/{cell['name']}"].numpy() for seed in study.seeds]
        means = [float(np.nanmean(column)) if (~np.isnan(column)).any() else None for column in columns]
        yield {**cell, "rollouts": int(sum((~np.isnan(column)).sum() for column in columns)), **summary(means)}


def shadows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield the shadow's counts, summed over seeds."""
    for subject, part in study.artifacts:
        if part == "shadow":
            books = [study.artifacts[subject, part][seed][0]["shadow"] for seed in study.seeds]
            yield {"subject": subject, **{key: sum(book[key] for book in books) for key in books[0]}}


def rows_of(results: Mapping[str, Any], subject: str, part: str) -> list[dict[str, Any]]:
    """Return the rows of a part's cells in results.json."""
    return [row for row in results["cells"] if (row["subject"], row["part"]) == (subject, part)]


def all_results(study: Study) -> dict[str, Any]:
    """Return the content of results.json: all results as plain data."""
    rows = []
    for subject, part in study.artifacts:
        if "modes" not in study.artifacts[subject, part][study.seeds[0]][0]:
            continue
        for cell in study.cells(subject, part):
            estimates = study.estimates(subject, part, cell["name"])
            entry = {"subject": subject, "part": part, **cell}
            rows.append(entry | {metric: asdict(each) for metric, each in estimates.items()})
    fits = {subject: [study.artifacts[subject, "fit"][seed][0]["counts"] for seed in study.seeds] for subject in SUBJECTS}
    return {
        "settings": study.settings.as_dict(),
        "seeds": list(study.seeds),
        "rollouts_per_cell": study.settings.tasks * len(MODES.names),
        "cells": rows,
        "roc": list(roc_areas(study)),
        "lead": [lead(study, subject) for subject, part in study.artifacts if part == "roc"],
        "openings": list(openings(study)),
        "logprobs": list(deltas(study)),
        "shadow": list(shadows(study)),
        "fits": fits,
    }
