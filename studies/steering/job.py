"""One job: a subject at a seed. Each part of a job is a file, so an interrupted run can resume.

    <folder>/seed-0/absorb/fit.json + fit.safetensors         the fitted gates
                           quarantine.json + .safetensors     one experiment

A part stores its ``identity``, a hash of what it was made from (settings, the run's manifest, the part), and the SHA-256 of the
base model. A file with another identity is an error, and so is one of another base model than the one that is cached now:
``untrained`` is made of nothing else, and the manifest of an arm names its adapters alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from studies.common.artifacts import Artifact, read_part, write_part
from studies.common.workers import job_lock
from studies.steering import cells as designs
from studies.steering.cells import Bench, GateCell
from studies.steering.fitting import LABELS, Fitted, fit
from studies.steering.measuring import logprobs, roc, shadow
from studies.steering.settings import SteeringSettings
from studies.training.arms import ARMS
from studies.training.job import Job, build_hosted, finished_policy
from studies.training.manifest import MANIFEST, read_manifest
from studies.training.worlds import base_file, open_world

FIT = "fit"
AT_ONCE = 6
"""Cells with controllers in one engine: every controller reads every request of a step."""
BASE = "base"
"""Entry of a part: SHA-256 of the cached base model that it was made with; parts of earlier versions have none."""
Design = Callable[[SteeringSettings, Fitted], Iterator[GateCell]]
Measure = Callable[[Bench, SteeringSettings, Fitted], Artifact]

_CELLS: Mapping[str, Mapping[str, Design]] = MappingProxyType(
    {
        "base": {"sweep": designs.small_sweep},
        "untrained": {"quarantine": designs.untrained},
        "vanilla": {"sweep": designs.sweep, "latency": designs.latency},
        "absorb": {"quarantine": designs.quarantine},
        "route2-full": {"quarantine": designs.quarantine},
    }
)
_MEASURES: Mapping[str, Mapping[str, Measure]] = MappingProxyType(
    {
        "base": {"roc": roc},
        "untrained": {},
        "vanilla": {"roc": roc, "logprobs": logprobs, "shadow": shadow},
        "absorb": {"roc": roc, "shadow": shadow},
        "route2-full": {"roc": roc, "shadow": shadow},
    }
)


def parts_of(subject: str) -> tuple[str, ...]:
    """Return the names of a subject's parts, in order."""
    return FIT, *_MEASURES[subject], *_CELLS[subject]


@dataclass(frozen=True)
class SteeringJob:
    """One subject at a seed. ``out`` contains the runs and, under ``settings.folder``, this study."""

    settings: SteeringSettings
    out: Path
    seed: int
    subject: str

    @property
    def name(self) -> str:
        return self.subject

    @property
    def folder(self) -> Path:
        return self.out / self.settings.folder / f"seed-{self.seed}" / self.subject

    @property
    def run(self) -> Job:
        """The job of ``studies.route2`` that made the model (``untrained``: whose adapters it has at initialization)."""
        run = self.settings.run
        arm = None if self.subject == "base" else ARMS["absorb" if self.subject == "untrained" else self.subject]
        return Job(self.out / run.folder, self.out / "warmstarts", run, self.seed, arm)

    @property
    def finished(self) -> bool:
        """True if every part exists; ``ValueError`` if a part is damaged, or belongs to another run."""
        return None not in [self.read(part) for part in parts_of(self.subject)]

    def identity(self, part: str) -> str:
        """Return a hash of everything except the code that the part depends on: settings, and the trained adapters."""
        manifest = read_manifest(self.run.folder)
        made = [manifest.identity, sorted(manifest.checksums.items())] if self.subject != "untrained" else self.run.identity
        described = json.dumps([self.settings.digest, self.seed, self.subject, part, made], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    @property
    def base(self) -> Path:
        """The file in which the base model of the seed is cached."""
        return base_file(self.run.settings, self.seed, self.run.cache)

    def base_hash(self) -> str | None:
        """Return the SHA-256 of the cached base model; ``None`` if it is not cached."""
        return hashlib.sha256(self.base.read_bytes()).hexdigest() if self.base.exists() else None

    def path(self, part: str) -> Path:
        """Return the path of the part's JSON file."""
        return self.folder / f"{part}.json"

    def read(self, part: str) -> Artifact | None:
        """Return a part's data and tensors; ``None`` if it was not made yet.

        Raises:
            ValueError: If the part is damaged, or belongs to another run, or was made with another base model.
        """
        stored = read_part(self.path(part), self.identity(part) if (self.run.folder / MANIFEST).exists() else None)
        made_with = None if stored is None else stored[0].get(BASE)
        if made_with is not None and (now := self.base_hash()) is not None and made_with != now:
            arm = "" if self.subject in ("base", "untrained") else f" (and {self.run.folder}, if it was trained from the old one)"
            raise ValueError(
                f"{self.path(part)} was made with another base model than the one in {self.base}, which was trained again: put the "
                f"old one back, or delete {self.folder}{arm} and run the study again"
            )
        return stored


def run_steering(job: SteeringJob) -> None:
    """Make the missing parts of a job; ``ValueError`` if the run of ``studies.route2`` is not finished."""
    torch.set_num_threads(1)  # sums in another number of threads have other bytes
    job.folder.mkdir(parents=True, exist_ok=True)
    with job_lock(job.folder):
        if job.finished:
            return
        run = job.run
        host, policy = build_hosted(run, run.cache) if job.subject == "untrained" else finished_policy(run)
        with open_world(job.settings.run) as (world, witness):
            bench = Bench(job.settings, host, policy, world, witness, job.seed)
            for part in parts_of(job.subject):
                if job.read(part) is None:
                    _make(job, part, bench)


def _make(job: SteeringJob, part: str, bench: Bench) -> None:
    settings = job.settings
    if part == FIT:
        fitted = fit(settings, job.run, bench.world, bench.host, bench.policy, model=job.subject)
        data = {"labels": LABELS, "counts": dict(fitted.counts), "gap": fitted.gap}, fitted.tensors()
    elif part in _MEASURES[job.subject]:
        data = _MEASURES[job.subject][part](bench, settings, fitted_of(job))
    else:
        data = _outcomes(job, part, bench)
    record, tensors = data
    write_part(job.path(part), job.identity(part), {**record, BASE: job.base_hash()}, tensors)


def _outcomes(job: SteeringJob, part: str, bench: Bench) -> Artifact:
    cells = list(_CELLS[job.subject][part](job.settings, fitted_of(job)))
    outcomes = bench.run([cell for cell in cells if not cell.controllers], what=f"{job.subject} {part}")
    controlled = [cell for cell in cells if cell.controllers]
    for start in range(0, len(controlled), AT_ONCE):
        outcomes |= bench.run(controlled[start : start + AT_ONCE], what=f"{job.subject} {part}, between tokens")
    about = [{"name": cell.name, "state": cell.state, **cell.about} for cell in cells]
    return {"cells": about, "modes": list(bench.modes), "tasks": job.settings.tasks}, outcomes


def fitted_of(job: SteeringJob) -> Fitted:
    """Return the fit as stored in its file: an uninterrupted run reads it back too."""
    part = job.read(FIT)
    assert part is not None
    about, tensors = part
    return Fitted.of(job.settings, tensors, about["counts"])
