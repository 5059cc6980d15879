"""The benchmark of packed batches: both layouts do the same work, and the page prints what was measured."""

import re

import numpy as np
import pytest
import torch
from measured import DOCS, Quick, demand_printed, published

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy
from studies.benchmarks.engine import random_model
from studies.benchmarks.measurement.paired import Measured, Ratio
from studies.benchmarks.options import PackedOptions
from studies.benchmarks.packed import SPECS, demand_equal, describe, run, table, tail

pytestmark = pytest.mark.study


def printed(document: dict) -> tuple[str, str]:
    times = {row["route"]: Ratio(**row["time"]) for row in document["rows"]}
    sides = {name: Measured(tuple(side["seconds"]), side["peak_bytes"]) for name, side in document["sides"].items()}
    return describe(document["lengths"]), table(times, sides)


def test_quick_compares_every_route_in_both_layouts(quick: Quick) -> None:
    out, document = quick(run, PackedOptions)
    assert [row["route"] for row in document["rows"]] == list(SPECS)
    assert {len(side["seconds"]) for side in document["sides"].values()} == {3}
    assert all(part in out for part in printed(document))


@pytest.mark.parametrize("wrong", ["kept", "quarantine", "absent", "both"])
def test_layouts_with_other_gradients_are_refused(wrong: str) -> None:
    policy = Policy(model := random_model(0), attach(model, "blocks.0.*", spec=AdapterSpec("lora", rank=2, quarantine_rank=2)))
    kept, quarantine = policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters()

    def step(*changed: dict[str, torch.nn.Parameter], factor: float = 1.0) -> None:
        for p in (*kept.values(), *quarantine.values()):
            p.grad = torch.ones_like(p)
        for one in changed:
            p = next(iter(one.values()))
            p.grad = None if not factor else factor * torch.ones_like(p)

    demand_equal(policy, step, step)
    cases = {"kept": (kept, 2.0), "quarantine": (quarantine, 2.0), "absent": (kept, 0.0), "both": (kept, float("nan"))}
    side, factor = cases[wrong]
    with pytest.raises(AssertionError):
        demand_equal(policy, step, lambda: step(side, factor=factor))


def test_lengths_have_a_long_tail() -> None:
    lengths = tail(16, 448, np.random.default_rng(0))
    assert max(lengths) == 448
    assert min(lengths) >= 1
    assert np.mean(lengths) < 448 / 2


@pytest.mark.parametrize(("name", "rounds"), [("packed", 9), ("packed_smollm2", 3)])
def test_the_page_prints_what_was_measured(name: str, rounds: int) -> None:
    document = published(name)
    described, expected = printed(document)
    demand_printed("scale.md", name, expected)
    found = re.search(rf"<!-- {name} -->\n\n(.*)\n\n<!-- table: {name} -->\n", (DOCS / "scale.md").read_text(encoding="utf-8"))
    assert found
    assert found[1].startswith(described), f"docs/scale.md must have, below <!-- {name} -->:\n\n{described}"
    assert document["rounds"] >= rounds
    assert document["smollm2"] == ("smollm2" in name)


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ValueError, match="unknown route 'gradient flag': did you mean 'gradient flags'"):
        PackedOptions(routes=("gradient flag",)).check()
    with pytest.raises(ValueError, match="rollouts must be at least 1, not 0"):
        PackedOptions(rollouts=0).check()
