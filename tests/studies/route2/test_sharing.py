"""Rollouts that are shared are the run's own, as the stock library reads them."""

import os
from pathlib import Path

import pytest
from tiny_study import tiny_job

from mi_route2.validation import write_json
from studies.route2.cli import ShareRollouts
from studies.route2.sharing import COLUMNS, labelled_rollouts
from studies.training.recorder import ROLLOUTS, read_rows
from studies.training.run import run_job

pytestmark = pytest.mark.study


def test_datasets_reads_what_the_run_recorded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path / "hub"))
    from datasets import load_dataset

    job = tiny_job(tmp_path, "filter-act", cache=cache, steps=2)
    run_job(job)
    write_json(job.root / "settings.json", job.settings.as_dict())
    ShareRollouts((job.root,), tmp_path / "shared")()
    found = load_dataset(str(tmp_path / "shared"), split="train")
    rows = read_rows(job.folder / ROLLOUTS)
    assert found.column_names == list(COLUMNS)
    assert found.to_list() == [{"preset": "strong", "arm": "filter-act", "seed": 0, **row} for row in rows]
    card = (tmp_path / "shared" / "README.md").read_text()
    for mode in {row["mode"] for row in rows}:
        own = [row for row in rows if row["mode"] == mode]
        cells = [cell.strip() for line in card.splitlines() if f" {mode} " in line for cell in line.split("|")]
        assert [str(len(own)), str(sum(row["hack"] for row in own))] == cells[4:6]
    (job.folder / ROLLOUTS).write_bytes(b"")
    with pytest.raises(ValueError, match="changed"):
        labelled_rollouts([job.root])
