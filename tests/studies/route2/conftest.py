"""One warm start for all files of the folder: base models are cached by their settings."""

from pathlib import Path

import pytest
from tiny_study import made_once, tiny_settings

from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import warm_start
from studies.training import build


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = tiny_settings()
    return made_once(
        tmp_path_factory,
        "warmstarts",
        lambda folder: warm_start(get_world(settings.world), settings.warm, 0, folder, progress=False),
    )


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary's threshold is computed from a quarter of the samples: that takes most of a tiny run's time."""
    monkeypatch.setattr(build, "CALIBRATION", build.CALIBRATION // 4)
