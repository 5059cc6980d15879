"""The benchmark of a device runs every side, on a CPU too, and says so if there is no device."""

import pytest
import torch
from measured import Quick, demand_printed, published, results

from studies.benchmarks.device import ENGINE, STEPS, run, table
from studies.benchmarks.options import DeviceOptions
from studies.benchmarks.routing import FULL, LORA, POOLED, STACKED


@pytest.mark.process
def test_quick_prints_every_row_and_writes_everything(quick: Quick) -> None:
    printed, document = quick(run, DeviceOptions, device="cpu")
    tiny = document["sizes"]["tiny"]
    for what, rows in (("training", STEPS), ("sampling", ENGINE)):
        found = tiny[what]["rows"]
        assert [(row.over, row.under) for row in rows] == [(row["over"], row["under"]) for row in found]
        assert all(f"| {row.over} " in printed for row in rows)
        assert {len(seconds) for seconds in tiny[what]["seconds"].values()} == {3}
    assert all(bytes_ > 0 for bytes_ in tiny["training"]["bytes"].values())


def test_a_device_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"cuda. cannot be used here: choose from cpu$"):
        DeviceOptions(quick=True).check()


@pytest.mark.parametrize(("name", "size"), [("device", "135M"), ("device_large", "1.1B")])
def test_the_page_prints_what_was_measured(name: str, size: str) -> None:
    document = published(name)
    assert "H200" in document["device"]  # what the page says in words, here and below
    found = {}
    for what, amount in (("training", "bytes"), ("sampling", "tokens")):
        part = document["sizes"][size]
        rows = results(part[what])
        demand_printed("scale.md", f"{name} {what}", table(what, rows, part[what]["seconds"], part[what][amount]))
        found |= {(row.over, row.under): row.time for row in rows}
    assert all(1.14 < time.value < 1.41 for (over, _), time in found.items() if over in (LORA, STACKED))
    assert all(1.45 < found[f"{kind}: {POOLED}", kind].value < 2.1 for kind in (LORA, STACKED))
    assert found[f"{STACKED}: {FULL}", STACKED].value > 3.5
    engine = [found[row.over, row.under] for row in ENGINE]
    assert all(0.92 < time.value < 1.12 and time.lo < 1 < time.hi for time in engine)
