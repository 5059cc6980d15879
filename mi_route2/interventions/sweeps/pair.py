"""The clean and the corrupt run of a question, and the grid that lies between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mi_route2.architectures import HEADED
from mi_route2.interventions.sweeps.forwards import Forwards, Record
from mi_route2.interventions.sweeps.grid import Grid
from mi_route2.interventions.sweeps.question import CleanRun, Question
from mi_route2.interventions.sweeps.targets import Target, split
from mi_route2.sites import Site


@dataclass(frozen=True, eq=False)
class Pair:
    """Values of the targets' sites at the positions that can be patched, in the order of ``question.sources``, and both scores."""

    question: Question
    clean: Record
    corrupt: Record
    scores: tuple[float, float]

    def values(self, target: Target) -> tuple[Tensor, Tensor]:
        """The corrupt and the clean values ``[p ...]`` of a target at all positions that can be patched."""
        here, source = (run.values[target.site] for run in (self.corrupt, self.clean))
        return (here, source) if target.head is None else (here[:, target.head], source[:, target.head])

    def split(self, targets: Sequence[Target], heads: bool) -> tuple[Target, ...]:
        """``targets``, those by head as their heads where ``heads`` says so. ``ValueError`` for a head that is not there."""
        counts = {site: value.shape[1] for site, value in self.corrupt.values.items() if site.point in HEADED}
        for target in targets:
            if target.head is not None and target.head >= counts[target.site]:
                raise ValueError(f"{target} is outside the model: {target.site} has the heads 0..{counts[target.site] - 1}")
        return split(targets, counts) if heads else tuple(targets)

    def grid(
        self,
        targets: Sequence[Target],
        values: Mapping[tuple[Target, int | None], float],
        *,
        layers: int,
        alpha: float,
        kind: str = "patch",
        replicas: Sequence[float] = (),
        forwards: str = "",
        seconds: Mapping[str, float] | None = None,
        flops: Mapping[str, float] | None = None,
    ) -> Grid:
        """A grid with a value for every target and every position that can be patched. ``ValueError`` for one that is not
        finite."""
        question, (clean, corrupt) = self.question, self.scores
        columns = (None,) if question.together else question.positions
        table = np.full((len(targets), len(columns)), np.nan)
        column = {position: i for i, position in enumerate(columns)}
        line = {target: i for i, target in enumerate(targets)}
        for (target, position), value in values.items():
            if not np.isfinite(value):
                raise ValueError(
                    f"the score is {value} with {target} patched at position {position}: the model's own numbers overflow"
                )
            table[line[target], column[position]] = value
        logits = self.corrupt.logits
        return Grid(
            sites=tuple(targets),
            positions=question.positions,
            labels=tuple(question.corrupt.labels[position] for position in question.positions),
            grader=question.grader,
            at=question.at,
            alpha=alpha,
            values=table,
            clean=clean,
            corrupt=corrupt,
            replicas=tuple(replicas),
            resolution=torch.finfo(logits.dtype).eps * max(1.0, abs(clean), abs(corrupt)),
            skipped=question.skipped,
            alignment=question.alignment,
            layers=layers,
            together=question.together,
            kind=kind,
            forwards=forwards,
            seconds=dict(seconds or {}),
            flops=dict(flops or {}),
        )


def record(forwards: Forwards, question: Question, sites: Sequence[Site]) -> Pair:
    """Runs both prompts, up to the position that is scored. ``forwards`` can go on from the corrupt one then."""
    places, sources = list(question.sources), list(question.sources.values())
    corrupt = forwards.start(question.corrupt.tokens[: question.at + 1], sites, places)
    if isinstance(question.clean, CleanRun):
        clean = _captured(question.clean, corrupt, sources)
    else:
        clean = forwards.record(question.clean.tokens[: question.clean_at + 1], sites, sources)
    question.grader.check(len(corrupt.logits))
    logits = torch.stack([clean.logits.to(corrupt.logits), corrupt.logits])
    first, second = question.grader(logits, logits[0]).tolist()
    return Pair(question, clean, corrupt, (first, second))


def _captured(run: CleanRun, corrupt: Record, sources: Sequence[int]) -> Record:
    """The captured values where they are needed. ``KeyError`` for a site that was not captured, ``ValueError`` for another
    shape."""
    values = {}
    for site, here in corrupt.values.items():
        if site not in run.values:
            raise KeyError(f"the clean run has no values of {site}: it has {', '.join(map(str, run.values))}")
        values[site] = run.values[site][list(sources)].to(here)
        if values[site].shape != here.shape:
            raise ValueError(
                f"the clean run's {site} has shape {list(values[site].shape[1:])} a token, and the model's {list(here.shape[1:])}"
            )
    if run.logits.shape != corrupt.logits.shape:
        raise ValueError(f"the clean run has {len(run.logits)} logits, and the model {len(corrupt.logits)}")
    return Record(values, run.logits.to(corrupt.logits))
