"""The benchmark of a device runs every side, on a CPU too, and says so if there is no device."""

import json
from pathlib import Path

import pytest
import torch

from studies.benchmarks.device import ENGINE, STEPS, run
from studies.benchmarks.options import DeviceOptions


def test_quick_prints_every_row_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DeviceOptions(quick=True, device="cpu", out=tmp_path / "out.json")
    options.check()
    run(options)
    printed = capsys.readouterr().out
    tiny = json.loads((tmp_path / "out.json").read_text())["sizes"]["tiny"]
    for what, rows in (("training", STEPS), ("sampling", ENGINE)):
        found = tiny[what]["rows"]
        assert [(row.over, row.under) for row in rows] == [(row["over"], row["under"]) for row in found]
        assert all(f"| {row.over} " in printed for row in rows)
        assert {len(seconds) for seconds in tiny[what]["seconds"].values()} == {3}
    assert all(bytes_ > 0 for bytes_ in tiny["training"]["bytes"].values())


def test_a_device_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no accelerator here for --device cuda: give --device cpu"):
        DeviceOptions(quick=True).check()
