"""One tiny study, run once without an interruption, that tests read and copy."""

from pathlib import Path

import pytest
from tiny_lanes import tiny_settings, write_texts
from tiny_study import made_once

from studies.lanes.settings import LanesSettings
from studies.lanes.study import run_study


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def tiny(texts: Path) -> LanesSettings:
    return tiny_settings(texts)


@pytest.fixture(scope="session")
def study(tiny: LanesSettings, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole tiny study, one seed."""
    made = made_once(tmp_path_factory, "lanes", lambda out: run_study(tiny, [0], out, text=texts, workers=1, quiet=True))
    return made / tiny.folder
