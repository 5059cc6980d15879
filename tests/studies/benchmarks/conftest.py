"""A benchmark with ``--quick``, as most tests here run it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured import Quick

from studies.benchmarks.options import Benchmark


@pytest.fixture
def quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Quick:
    """Function of a benchmark's ``run`` and its options to what it printed and what it wrote."""

    def measured(run: Callable[[Any], object], kind: type[Benchmark], **given: Any) -> tuple[str, dict[str, Any]]:
        options = kind(quick=True, out=tmp_path / "out.json", **given)
        options.check()
        run(options)
        return capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    return measured
