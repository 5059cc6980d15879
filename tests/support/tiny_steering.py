"""A steering study small enough for tests: a short warm start, few tasks, few cells; everything else is the real thing."""

from dataclasses import dataclass
from pathlib import Path

from tiny_study import tiny_settings

from studies.environments.micro.settings import WarmStartConfig
from studies.steering.fitting import Fitted
from studies.steering.job import SteeringJob, fitted_of
from studies.steering.settings import SteeringSettings

TINY = SteeringSettings(
    run=tiny_settings(steps=2, warm=WarmStartConfig(steps=40, batch=32)),
    tasks=2,
    train=24,
    quantiles=(0.95,),
    gains=(1.0,),
    late_gains=(1.0,),
    delays=(1, 3),
    draws=1,
    exact=1,
    rows=64,
)


@dataclass(frozen=True)
class Made:
    """A study that has run, from nothing."""

    out: Path
    settings: SteeringSettings
    paths: list[Path]

    @property
    def folder(self) -> Path:
        return self.out / self.settings.folder

    def job(self, subject: str) -> SteeringJob:
        return SteeringJob(self.settings, self.out, 0, subject)

    def fitted(self, subject: str) -> Fitted:
        return fitted_of(self.job(subject))
