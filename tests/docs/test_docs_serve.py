"""The Python blocks on serving run as they stand, against a real server on loopback."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from served import random_micro, running

from mi_route2.serve.models import Served, load
from studies.environments.micro import served
from studies.environments.micro.served import micro

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?:py|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def blocks(page: str) -> list[str]:
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the model that is served if none is named, after a few steps: the blocks run on it, and need not know much."""
    small = partial(micro, steps=40, adapted=2, cache=tmp_path_factory.mktemp("micro"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "micro", small)
        found = load("micro")
    with running(found) as one:
        yield one.url


def test_every_block_of_the_page_runs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = random_micro()
    # the last block serves a model of the reader's own
    namespace: dict = {"host": own.host, "tokenizer": own.tokenizer, "direction": own.vectors["probe"]}
    found = blocks("docs/serve.md")
    assert sum(ADDRESS in code for code in found) >= 2
    for code in found:
        exec(code.replace(ADDRESS, url), namespace)
    assert namespace["answer"]
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    mine = namespace["mine"]()
    assert isinstance(mine, Served)
    mine.opened.close()
    own.opened.close()


def test_the_snippet_of_the_readme_gives_a_reading_for_every_token(url: str) -> None:
    (code,) = (code for code in blocks("README.md") if ADDRESS in code)
    namespace: dict = {}
    exec(code.replace(ADDRESS, url), namespace)
    (choice,) = namespace["answer"].choices
    readings = choice.mi_route2["readings"]
    assert readings
    assert all(readings.values()) if isinstance(readings, dict) else all(readings)
