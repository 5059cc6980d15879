"""SteeringSettings that all parts of a study folder share (their hash is part of the folder's name), and the models under study."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from mi_route2.validation import AtLeastOne, Positive, read_settings, validated, write_json
from studies.training.settings import Settings as RunSettings

Quantile = Annotated[float, Field(gt=0, lt=1)]
FILE, RUN = "settings.json", "run.json"
FORMAT = 2
"""Increased if the computation changes in a way that no setting shows."""

SUBJECTS: Mapping[str, str] = MappingProxyType(
    {
        "base": "the warm-started model, not trained further",
        "untrained": "the same with both adapters at init, whose quarantine adds nothing",
        "vanilla": "kept adapter alone, trained without a route",
        "absorb": "kept adapter and quarantine, trained without a route",
        "route2-full": "kept adapter and quarantine, trained under a route",
    }
)


@validated
class SteeringSettings:
    """SteeringSettings of one study.

    Attributes:
        run: SteeringSettings of the underlying runs of ``studies.route2``.
        site: Where the gate reads and where steering adds, blocks.i.resid_post.
        early: Where a gate reads that can close every quarantine in the same forward: the first block's input.
        late: A third site to read at, for the ROC.
        tasks: Test tasks; each is used in every mode, so a cell has five times as many rollouts.
        train: Rollouts for fitting probes, from the model, and as many again from the base model.
        quantiles: Thresholds: quantiles of the probe's score over clean training tokens.
        operating: Quantile of all comparisons, fixed before anything was evaluated.
        gains: Steering along the direction, in units of the distance between the class means.
        gain: Gain of all comparisons, fixed likewise.
        late_gains: Gains at which latencies are compared: the fixed one, and one whose effect is large enough to be delayed (chosen
            after a first run of the sweep, in which the fixed one had almost no effect).
        delays: Tokens between a score and its effect.
        draws: Number of random probes, and of random directions.
        exact: Test tasks of the bit-exact comparison.
        sharpness: Sharpness of the gate, in standard deviations of the score; large values give a step function.
        temperature: Sampling temperature.
        rows: Maximum number of requests that an engine runs at once.
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
        from mi_route2.sites import Site  # with torch, which ``--help`` need not wait for

        for name in ("site", "early", "late"):
            Site.parse(getattr(self, name))
        for name in ("quantiles", "gains", "late_gains", "delays"):
            said = [f"{value:g}" for value in getattr(self, name)]  # as in the names of cells
            if len(set(said)) < len(said):
                raise ValueError(f"{name} must be given once each, not {', '.join(said)}")
        if not self.late_gains:
            raise ValueError("late_gains must have at least one gain")
        if self.operating not in self.quantiles or self.gain not in self.gains:
            raise ValueError(f"operating={self.operating} must be one of quantiles, and gain={self.gain} one of gains")
        if not set(self.late_gains) <= set(self.gains):
            raise ValueError(f"late_gains={self.late_gains} must be a subset of gains={self.gains}")
        if self.run.chat is not None:
            raise ValueError("this study runs in the micro world: choose a preset of studies.route2 without a chat model")
        if self.exact > self.tasks:
            raise ValueError(f"tasks={self.tasks} must be at least {self.exact}, the tasks of the bit-exact comparison (exact)")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON objects."""
        return json.loads(json.dumps({**asdict(self), "run": self.run.as_dict()}))

    @property
    def digest(self) -> str:
        """SHA-256 of all settings."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **self.as_dict()}, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the study folder: ``steering-<preset>-<8 hex digits>``."""
        return f"steering-{self.run.preset}-{self.digest[:8]}"

    def write(self, folder: Path) -> None:
        """Write the settings to a folder, those of the run to a file of their own."""
        write_json(folder / RUN, self.run.as_dict())
        write_json(folder / FILE, {name: value for name, value in self.as_dict().items() if name != "run"})

    @staticmethod
    def read(folder: Path) -> "SteeringSettings":
        """Return the settings that ``write`` stored in a folder; ``ValueError`` if the folder has none."""
        remedy = "give a folder that `run` created"
        run = read_settings(RunSettings, folder / RUN, remedy)
        return read_settings(SteeringSettings, folder / FILE, remedy, run=run.as_dict())
