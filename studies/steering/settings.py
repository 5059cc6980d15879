"""What all parts of one folder share, hashed into its name; and which models are looked at."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from mi_route2.sites import Site
from mi_route2.validation import AtLeastOne, Positive, read_settings, validated, write_json
from studies.training.arms import ARMS
from studies.training.job import Job
from studies.training.settings import Settings as RunSettings

Quantile = Annotated[float, Field(gt=0, lt=1)]
OWN, RUN = "settings.json", "run.json"
FORMAT = 2
"""Raised when what is computed changes in a way that no setting shows."""

SUBJECTS: Mapping[str, str] = MappingProxyType(
    {
        "base": "the warm-started model, not trained further",
        "untrained": "the same with both adapters at init, whose quarantine adds nothing",
        "vanilla": "kept adapter alone, trained without a route",
        "absorb": "kept adapter and quarantine, trained without a route",
        "route2-full": "kept adapter and quarantine, trained under a route",
    }
)
TRAINED = ("vanilla", "absorb", "route2-full")
QUARANTINED = ("untrained", "absorb", "route2-full")


@validated
class Settings:
    """One study. ``run`` are the settings of the runs of ``studies.route2`` that it stands on.

    site        where the gate reads and where steering adds, blocks.i.resid_post
    early       where a gate reads that can close every quarantine in the forward that it reads, the first block's input
    late        a third site to read at, for the ROC
    tasks       test tasks; each is asked in every mode, so a cell has five times as many rollouts
    train       rollouts that the probes learn from, from the model itself and as many again from the base model
    quantiles   thresholds: quantiles of the probe's score over clean training tokens
    operating   the quantile at which things are compared, fixed before anything was evaluated
    gains       steering along the direction, in units of the distance between the classes' means
    gain        the one at which things are compared, fixed likewise
    late_gains  the gains at which latencies are compared: the fixed one, and one with an effect that can be late (chosen after a
                first run of the sweep, where the fixed one had nearly none)
    delays      tokens between a score and what it does
    draws       random probes, and random directions
    exact       test tasks of the bit-exact comparison
    sharpness   of the gate, in standard deviations of the score: above it or not
    """

    run: RunSettings = field(default_factory=RunSettings)
    site: str = "blocks.0.resid_post"
    early: str = "blocks.0.resid_pre"
    late: str = "blocks.1.resid_post"
    tasks: AtLeastOne = 32
    train: AtLeastOne = 384
    quantiles: tuple[Quantile, ...] = (0.5, 0.8, 0.95, 0.99)
    operating: float = 0.95
    gains: tuple[Positive, ...] = (0.5, 1.0, 2.0, 4.0)
    gain: float = 1.0
    late_gains: tuple[Positive, ...] = (1.0, 4.0)
    delays: tuple[AtLeastOne, ...] = (1, 2, 3, 5, 8)  # 0 is the forward itself
    draws: AtLeastOne = 3
    exact: AtLeastOne = 2
    sharpness: Positive = 1000.0
    temperature: Positive = 1.0
    rows: AtLeastOne = 256

    def __post_init__(self) -> None:
        for name in ("site", "early", "late"):
            Site.parse(getattr(self, name))
        if self.operating not in self.quantiles or self.gain not in self.gains:
            raise ValueError(f"operating={self.operating} must be one of quantiles, and gain={self.gain} one of gains")
        if not set(self.late_gains) <= set(self.gains):
            raise ValueError(f"late_gains={self.late_gains} must be some of gains={self.gains}")
        if self.run.chat is not None:
            raise ValueError("this study runs in the micro world: choose a preset of studies.route2, no chat model")
        if self.exact > self.tasks:
            raise ValueError(f"exact={self.exact} tasks are some of the {self.tasks}: give at most as many")

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where scores are read, in the order in which they fire."""
        return tuple(sorted({Site.parse(name) for name in (self.early, self.site, self.late)}))

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return json.loads(json.dumps({**asdict(self), "run": self.run.as_dict()}))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **self.as_dict()}, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """``steering-<preset>-<8 hex digits>``."""
        return f"steering-{self.run.preset}-{self.digest[:8]}"

    def write(self, folder: Path) -> None:
        """Leave them in a folder, the run's in a file of their own."""
        write_json(folder / RUN, self.run.as_dict())
        write_json(folder / OWN, {name: value for name, value in self.as_dict().items() if name != "run"})

    @staticmethod
    def read(folder: Path) -> "Settings":
        """The settings that ``write`` left in a folder; ``ValueError`` where they are not there."""
        run = RunSettings.read(folder / RUN)
        return read_settings(Settings, folder / OWN, "point at a folder that `run` made", optional=("run.chat",), run=run.as_dict())


def run_job_of(settings: Settings, out: Path, seed: int, subject: str) -> Job:
    """The job of ``studies.route2`` whose result a subject is (``untrained``: the job whose adapters it has at init)."""
    arm = None if subject == "base" else ARMS["absorb" if subject == "untrained" else subject]
    return Job(out / settings.run.folder, out / "warmstarts", settings.run, seed, arm)
