"""The jobs of a study, their execution, and what they made: every arm at every seed, and the instruments. Each part is a file.

    <folder>/settings.json
             arms/<arm>/seed-<n>/train.json + .safetensors      weights and loss curve
                                 bpb.json, quantised.json ...   measurements on them
             instruments/<name>/draw-<n>/<name>.json

A part is written completely or not at all, from generators of (seed, purpose) alone: an interrupted run resumes and produces the
same bytes as an uninterrupted one. Workers share nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from studies.common.artifacts import Artifact, read_part, write_part
from studies.common.workers import Executor, demand, exclusive, job_lock, run_each
from studies.lanes.arms import ARMS, LanesArm
from studies.lanes.instruments import DRAWN, INSTRUMENTS
from studies.lanes.measures import MEASURES, Subject, measured, training_tokens
from studies.lanes.model import LanesModel
from studies.lanes.settings import LanesSettings, check_evaluation, open_text
from studies.lanes.text import TextCorpus
from studies.lanes.train import build, train

TRAIN = "train"
Data = Mapping[str, Any]
LOOPED_COST = 1.7  # relative to a plain arm, in time


@dataclass(frozen=True)
class LanesJob:
    """The work of one worker, by ``name`` and ``seed``: an arm at a seed, or a draw of an instrument.

    ``folder`` is the study's, ``text`` the corpus's (None for the running Python's library).
    """

    settings: LanesSettings
    folder: Path
    text: Path | None
    name: str
    seed: int

    @property
    def arm(self) -> LanesArm | None:
        return ARMS.get(self.name)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts that the job makes, in order."""
        return (self.name,) if self.arm is None else (TRAIN, *measured(self.name))

    @property
    def cost(self) -> float:
        """Rough relative duration of the job."""
        if self.arm is None:
            return 1.0 if self.name == "traces" else 0.1
        return self.arm.steps * (1.0 if self.arm.looped == "none" else LOOPED_COST) + 0.2 * len(self.part_names)

    def path(self, part: str) -> Path:
        if self.arm is None:
            return self.folder / "instruments" / self.name / f"draw-{self.seed}" / f"{part}.json"
        return self.folder / "arms" / self.name / f"seed-{self.seed}" / f"{part}.json"

    def identity(self, part: str) -> str:
        """Return a hash of everything except the code that a part depends on."""
        return hashlib.sha256(json.dumps([self.settings.digest, self.name, self.seed, part]).encode()).hexdigest()

    def read(self, part: str) -> Artifact | None:
        """Return the part if it exists; ``ValueError`` if it is damaged or belongs to other settings. It is never made again."""
        return read_part(self.path(part), self.identity(part))

    @property
    def finished(self) -> bool:
        """True if all parts exist; all of them are checked (see `read`)."""
        return None not in [self.read(part) for part in self.part_names]


def jobs_of(settings: LanesSettings, folder: Path, text: Path | None, seeds: Sequence[int], arms: Iterable[str]) -> list[LanesJob]:
    """Return every job of a study, the longest first, so that no long job runs alone at the end."""
    jobs = [LanesJob(settings, folder, text, arm, seed) for arm in arms for seed in seeds]
    for name in INSTRUMENTS:
        draws = range(settings.instruments.draws) if name in DRAWN else seeds
        jobs += [LanesJob(settings, folder, text, name, draw) for draw in draws]
    return sorted(jobs, key=lambda job: -job.cost)


_read_once = lru_cache(maxsize=1)(open_text)
"""The corpus of the jobs of one worker, which all read the same text."""


def run_job(job: LanesJob) -> None:
    """Make the missing parts of a job. Existing parts are kept."""
    torch.set_num_threads(1)  # one worker per core
    corpus = _read_once(job.text, job.settings.text)
    place = job.path(job.part_names[0]).parent
    with job_lock(place):
        for part in job.part_names:
            if job.read(part) is None:
                write_part(job.path(part), job.identity(part), *_make(job, part, corpus))


def _make(job: LanesJob, part: str, corpus: TextCorpus) -> Artifact:
    if job.arm is None:
        return INSTRUMENTS[part](job.settings, corpus, job.seed)
    if part != TRAIN:
        return MEASURES[part](Subject(job.settings, corpus, job.arm, job.seed, trained(job)))
    settings = job.settings
    result = train(job.arm, settings.size, settings.training, training_tokens(settings, corpus), job.seed)
    weights = {f"weights.{name}": value.detach() for name, value in result.model.state_dict().items()}
    return {"steps": len(result.losses), "last": float(result.losses[-10:].mean())}, {**weights, "losses": result.losses}


def trained(job: LanesJob) -> LanesModel:
    """Return the model of a finished training; ``ValueError`` if there is none."""
    part = job.read(TRAIN)
    if job.arm is None or part is None:
        raise ValueError(f"{job.path(TRAIN)} does not exist: run the study first")
    model = build(job.arm.config(job.settings.size), job.seed)
    model.load_state_dict({name.removeprefix("weights."): value for name, value in part[1].items() if name != "losses"})
    return model


def run_study(
    settings: LanesSettings,
    seeds: Sequence[int],
    out: Path,
    *,
    text: Path | None = None,
    workers: int = 2,
    executor: Executor = Executor(),  # noqa: B008 - frozen
    quiet: bool = False,
) -> Path:
    """Make everything that is missing of a study, and return its folder.

    Raises:
        ValueError: If `workers` is less than 1, or the text is too short.
        RuntimeError: If a job failed; the message names it.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    check_evaluation(open_text(text, settings.text), settings.evaluation)  # before anything is trained
    folder = out / settings.folder
    if text is not None and folder.resolve().is_relative_to(top := text.resolve()):
        below = folder.resolve().relative_to(top).parts
        if not any(name.startswith(".") for name in below):  # whose files are no text
            raise ValueError(f"what the study writes into {out} would be part of the text in {text}: choose another --out")
    with exclusive(folder):
        settings.write(folder)
        todo = [job for job in jobs_of(settings, folder, text, seeds, ARMS) if not job.finished]
        demand(run_each(run_job, todo, workers=workers, executor=executor, folder=folder, what="lanes", quiet=quiet))
    return folder


@dataclass(frozen=True)
class LanesStudy:
    """The settings of a study, and its contents: (arm or instrument, seed or draw, part) -> content of the part.

    Every arm has the same seeds.
    """

    settings: LanesSettings
    contents: Mapping[tuple[str, int, str], Data]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds at which arms were measured."""
        return tuple(sorted({seed for name, seed, part in self.contents if name in ARMS and part == "bpb"}))

    def data(self, name: str, part: str) -> list[Data]:
        """Return a part of an arm or an instrument, of every seed or draw in order; ``ValueError`` if the study has none."""
        by_seed = {seed: data for (arm, seed, made), data in self.contents.items() if (arm, made) == (name, part)}
        if not by_seed:
            raise ValueError(f"the study has no part {part!r} of {name!r}: run it again to create what is missing")
        return [by_seed[seed] for seed in sorted(by_seed)]

    def drawn(self, instrument: str) -> list[Data]:
        """Return all draws of an instrument, in order."""
        return self.data(instrument, instrument)

    def measured(self, part: str) -> list[str]:
        """Return the arms for which the study has a part, in the order of the table."""
        return [arm for arm in ARMS if any((arm, part) == (name, made) for name, _, made in self.contents)]


def load(folder: Path) -> LanesStudy:
    """Read and check all parts of a study.

    Raises:
        ValueError: If a part is missing or damaged, or if the folder has no finished study.
    """
    settings = LanesSettings.read(folder)
    if folder.name != settings.folder:
        raise ValueError(f"the settings in {folder} are those of {settings.folder}: do not rename or edit a study folder")
    places = sorted((folder / "arms").glob("*/seed-*"))
    named = {place.name.removeprefix("seed-") for place in places}
    seeds = sorted(int(name) for name in named if name.isdecimal())  # a copy under another name is no seed
    if not seeds:
        raise ValueError(f"{folder} contains no finished study: `run` creates one, or resumes an interrupted one")
    arms = [name for name in ARMS if (folder / "arms" / name).is_dir()]
    contents: dict[tuple[str, int, str], Data] = {}
    for job in jobs_of(settings, folder, None, seeds, arms):
        for part in job.part_names:
            artifact = job.read(part)
            if artifact is None:
                raise ValueError(f"{job.path(part)} is missing because the run was interrupted: a run of its seed resumes it")
            contents[job.name, job.seed, part] = artifact[0]
    return LanesStudy(settings, contents)
