"""The score of the tracing, and one cache of base models for the module."""

from functools import partial
from pathlib import Path

import pytest
from tiny_tracing import VOCABULARY

from studies.tracing.pairs import log_odds
from studies.tracing.patching import Score


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracing")


@pytest.fixture
def score() -> Score:
    return partial(log_odds, vocabulary=VOCABULARY)
