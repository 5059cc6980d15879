"""One warm start for all files of the folder: base models are cached by their settings."""

import os
import shutil
from pathlib import Path

import pytest
from tiny_study import tiny_settings

from studies.common.processes import locked
from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import warm_start


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the base model of ``tiny_settings``, which the first of pytest's workers trains and the others copy."""
    own, folder = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("warmstarts")
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with locked(shared / ".warmstart", "another worker is still training the base model", patience=300):
        settings = tiny_settings()
        warm_start(get_world(settings.world), settings.warm, 0, shared / "warmstart", progress=False)
    return shutil.copytree(shared / "warmstart", folder, dirs_exist_ok=True)
