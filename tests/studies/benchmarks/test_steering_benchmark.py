"""The steering benchmark measures what it names: every side acts as it says, and the table has all of them."""

import pytest
import torch
from measured import Quick, cells

from studies.benchmarks.options import SteeringOptions
from studies.benchmarks.steering import ADDITION, SteeringBench, run

pytestmark = pytest.mark.study


def test_it_prints_every_side_and_writes_what_it_measured(quick: Quick) -> None:
    out, document = quick(run, SteeringOptions)
    printed = {line[0] for line in cells(out)}
    sides = SteeringBench(8, 4, 0).sides()
    assert list(document["microseconds"]["8"]) == list(sides)
    assert printed >= set(sides)
    assert all(min(rounds) > 0 and len(rounds) == 3 for rounds in document["microseconds"]["8"].values())


def test_a_step_changes_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each side, for how many requests the last activations come out changed."""
    bench = SteeringBench(8, 4, 0)
    last: list[torch.Tensor] = []
    changed = {}
    for name, step in bench.sides().items():
        if name == ADDITION:
            continue
        last.clear()
        with monkeypatch.context() as patch:
            patch.setattr("studies.benchmarks.steering.SteeringState.at", spied(last))
            step()
        out = last[-1] if last else bench.h
        changed[name] = int((out != bench.h).any(-1).sum())
    assert changed == {
        "nothing that acts": 0,
        "a site, each request its own vector": 4,
        "a site, every second request": 2,
        "an idle monitor, each request its own": 0,
        "a monitor that gates vectors at a later site": 4,
        "a clamp, each request its own": 4,
        "the same site, and an action before every step": 4,
    }


def spied(last: list[torch.Tensor]):
    """``SteeringState.at``, which also keeps what it returned."""
    from mi_route2.steering.state import SteeringState

    at = SteeringState.at

    def spy(state: SteeringState, site: object, h: torch.Tensor) -> torch.Tensor:
        last.append(at(state, site, h))  # pyright: ignore[reportArgumentType]
        return last[-1]

    return spy
