"""Steering, fits and counts of every cell, from values made by hand: four thresholds and gains, three draws."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny_steering import Made
from torch import Tensor

from mi_route2.engine.controllers import ClearMonitor, ProbeController, RequestView, SetMonitor, StepView
from mi_route2.probes.logistic import LogisticFitter
from mi_route2.sites import Site
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering, Vector
from studies.steering import fitting
from studies.steering.answer import comparisons
from studies.steering.cells import BEHIND, CLOSED, DELETED, ON, Bench, GateCell, latency, quarantine, small_sweep, sweep, untrained
from studies.steering.fitting import Examples, Fitted, ProbeGate, sites_of
from studies.steering.late import Late, QuarantineSwitch
from studies.steering.results import MODES, Draws, Study, lead, roc_of
from studies.steering.settings import SteeringSettings

pytestmark = pytest.mark.study

SETTINGS = SteeringSettings()
SITE, EARLY = Site.parse(SETTINGS.site), Site.parse(SETTINGS.early)
PROBES = ("probe", "pairs", "shuffled", "haar-1", "haar-2", "haar-3")
ALWAYS = -1e5
"""Below every score."""


def by_hand() -> Fitted:
    """No two vectors and no two thresholds are alike."""
    drawn = torch.Generator().manual_seed(0)

    def gate(site: Site, number: int) -> ProbeGate:
        return ProbeGate(site, torch.randn(4, generator=drawn), {q: 10.0 * number + q for q in SETTINGS.quantiles})

    gates = {
        site: {name: gate(site, 10 * place + i) for i, name in enumerate(PROBES)} for place, site in enumerate(sites_of(SETTINGS))
    }
    directions = {name: torch.randn(4, generator=drawn) for name in ("away", "random-1", "random-2", "random-3")}
    return Fitted(gates, directions, 3.0, {q: -q for q in SETTINGS.quantiles})


FITTED = by_hand()


def same(given: object, expected: Tensor) -> bool:
    return Vector(cast("Tensor", given)) == Vector(expected)


def about(cell: GateCell) -> dict[str, Any]:
    return cast("dict[str, Any]", cell.about)


def monitor_of(cell: GateCell) -> Monitor:
    assert cell.steering is not None
    assert replace(cell.steering, monitors=()) == Steering()
    (monitor,) = cell.steering.monitors
    assert monitor.gates == ()
    assert not monitor.prompt
    return monitor


def demand_gate(monitor: Monitor, gate: ProbeGate, threshold: float) -> None:
    assert (monitor.site, monitor.threshold) == (gate.site, threshold)
    assert same(monitor.probe, gate.weight)


def demand_steering(steers: object, gain: float, direction: str) -> None:
    (added,) = cast("tuple[Steer, ...]", steers)
    assert (added.site, added.scale) == (SITE, -gain * 3.0)  # away from the hack, in distances of the classes
    assert same(added.vector, FITTED.directions[direction])


# what a cell does is what it says


@pytest.mark.parametrize("design", [sweep, small_sweep])
def test_a_steered_cell_adds_its_own_direction_behind_its_own_gate(design: Any) -> None:
    cells = [cell for cell in design(SETTINGS, FITTED) if cell.about["how"] == "steer"]
    assert len(cells) == (5 * 4 + 4 * (5 + 3) if design is sweep else 4)
    for cell in cells:
        told, monitor = about(cell), monitor_of(cell)
        gate = FITTED.gates[SITE][told["probe"]]
        demand_gate(monitor, gate, monitor.threshold if told["quantile"] is None else gate.thresholds[told["quantile"]])
        assert told["quantile"] is not None or monitor.threshold < ALWAYS
        assert (monitor.quarantine, monitor.mode, cell.state) == (None, "add", "full")
        demand_steering(monitor.adds, told["gain"], told["direction"])


def test_the_controls_are_at_every_gain_and_the_operating_threshold() -> None:
    cells = [about(cell) for cell in sweep(SETTINGS, FITTED) if cell.about["how"] == "steer"]
    others = {(c["probe"], c["direction"], c["gain"]) for c in cells if (c["probe"], c["direction"]) != ("probe", "away")}
    pairs = [(name, "away") for name in PROBES[1:]] + [("probe", f"random-{i}") for i in (1, 2, 3)]
    assert others == {(*pair, gain) for pair in pairs for gain in SETTINGS.gains}
    assert all(c["quantile"] == SETTINGS.operating for c in cells if (c["probe"], c["direction"]) != ("probe", "away"))


def test_a_clamp_bounds_the_projection_from_above_on_generated_tokens() -> None:
    cells = [cell for cell in sweep(SETTINGS, FITTED) if cell.about["how"] == "clamp"]
    assert len(cells) == 4 * 2
    for cell in cells:
        assert cell.steering is not None
        (clamp,) = cast("tuple[Clamp, ...]", cell.steering.clamps)
        told = about(cell)
        assert (clamp.site, clamp.phase, clamp.strength) == (SITE, "decode", told["gain"])
        assert clamp.bounds == (-np.inf, FITTED.ceilings[told["quantile"]])
        assert same(clamp.vector, FITTED.directions["away"])


def test_a_gated_quarantine_is_behind_its_own_gate_the_way_it_says() -> None:
    seen = []
    for cell in (*quarantine(SETTINGS, FITTED), *untrained(SETTINGS, FITTED)):
        told = about(cell)
        if told["how"] in ("forward", "open", "early"):
            monitor = monitor_of(cell)
            gate = FITTED.gates[EARLY if told["how"] == "early" else SITE][told["probe"]]
            demand_gate(monitor, gate, gate.thresholds[told["quantile"]])
            assert monitor.quarantine == ("open" if told["how"] == "open" else "close")
            assert not monitor.adds
            assert cell.state == "full"
            seen.append(told["how"])
    assert {how: seen.count(how) for how in seen} == {"forward": 4 * 6 + 1, "open": 4 + 1, "early": 4}


def test_a_switch_between_tokens_reads_its_own_gate_and_shuts_every_quarantine() -> None:
    cells = [cell for cell in quarantine(SETTINGS, FITTED) if cell.controllers]
    assert len(cells) == 4 * 2 * 2
    for cell in cells:
        told, monitor = about(cell), monitor_of(cell)
        gate = FITTED.gates[SITE][told["probe"]]
        at = gate.thresholds[told["quantile"]]
        demand_gate(monitor, gate, at)
        assert not monitor.adds
        assert monitor.quarantine is None  # it only watches
        (switch,) = cell.controllers
        assert isinstance(switch, QuarantineSwitch)
        (shut,) = switch.on_step(step(1, reading={monitor.name: at}))  # a score at the threshold fires, as in the forward
        assert isinstance(shut, SetMonitor)
        assert (shut.request, shut.monitor.site, shut.monitor.quarantine, shut.monitor.quarantined) == (0, EARLY, "close", None)
        assert shut.monitor.threshold < ALWAYS
        assert not switch.on_step(step(2, reading={monitor.name: at + 1.0}))  # it is shut already
        opened = switch.on_step(step(3, reading={monitor.name: at - 1e-3}))
        assert opened == ([] if told["how"] == "latch" else [ClearMonitor(shut.monitor.name, 0)])
        fresh = next(c for c in quarantine(SETTINGS, FITTED) if c.name == cell.name).controllers[0]
        assert not fresh.on_step(step(1, reading={monitor.name: at - 1e-3}))


def test_the_ends_are_on_deleted_shut_everywhere_and_shut_behind_the_probe() -> None:
    ends = {cell.name: cell for cell in quarantine(SETTINGS, FITTED) if cell.name in (ON, DELETED, CLOSED, BEHIND)}
    assert [ends[ON].steering, ends[ON].state, ends[DELETED].steering, ends[DELETED].state] == [None, "full", None, "deployed"]
    for name, site in ((CLOSED, EARLY), (BEHIND, SITE)):
        monitor = monitor_of(ends[name])
        assert (monitor.site, monitor.quarantine, ends[name].state) == (site, "close", "full")
        assert monitor.threshold < ALWAYS


def test_a_late_cell_has_the_forwards_threshold_and_vector_and_its_own_delay() -> None:
    cells = [cell for cell in latency(SETTINGS, FITTED) if cell.about["how"] == "policy"]
    assert [(about(c)["gain"], about(c)["delay"]) for c in cells] == [(g, d) for g in (1.0, 4.0) for d in (1, 2, 3, 5, 8)]
    gate = FITTED.gates[SITE]["probe"]
    for cell in cells:
        told, monitor = about(cell), monitor_of(cell)
        demand_gate(monitor, gate, gate.thresholds[SETTINGS.operating])
        ((name, row),) = cell.configurations.items()
        demand_steering(row.decode, told["gain"], "away")
        assert replace(row, decode=()) == Steering()
        (controller,) = cell.controllers
        policy = controller if isinstance(controller, ProbeController) else cast("Late", controller)._policy
        assert isinstance(policy, ProbeController)
        assert (policy.config, policy.threshold, policy.smoothing, policy.hysteresis) == (name, monitor.threshold, 1.0, 0.0)
        assert isinstance(controller, Late) == (told["delay"] > 1)
        assert told["delay"] == (controller.delay if isinstance(controller, Late) else 1)  # its meaning: test_gates


def step(number: int, *, reading: dict[str, float], unfinished: tuple[int, ...] = (0,)) -> StepView:
    """Request 0 after it has read a generated token with these scores."""
    view = RequestView(
        0, 6 + number, 1, -1.0, readings={name: MonitorReading(value, 1.0) for name, value in reading.items()}, prompt=7
    )
    return StepView(number, (view,), unfinished)


# what is fitted


def examples(generator: torch.Generator, site_names: tuple[Site, ...]) -> Examples:
    """24 rollouts of up to 9 tokens, two of which are a prompt; the last four are sides of pairs. Hacks lie elsewhere."""
    hack = torch.tensor([i % 3 == 0 for i in range(20)] + [True, True, False, False])
    mask = torch.zeros(24, 9, dtype=torch.bool)
    for i in range(24):
        mask[i, 2 : 4 + i % 5] = True
    hidden = {site: torch.randn(24, 9, 5, generator=generator) * 2 + 3 for site in site_names}
    for place, h in enumerate(hidden.values()):
        h[hack] += torch.arange(5.0) * (1 + place)
    return Examples(hidden, mask, hack, torch.tensor([False] * 20 + [True] * 4))


@pytest.fixture
def fitted_by_hand(made: Made, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function from a seed and a model's name to the examples, which are always the same, and the fit."""
    own = examples(torch.Generator().manual_seed(3), sites_of(SETTINGS))
    monkeypatch.setattr(fitting, "collect", lambda *_: own)

    def fit(seed: int, model: str = "absorb") -> tuple[Examples, Fitted]:
        job = replace(made.job("absorb").run, seed=seed)
        return own, fitting.fit(SETTINGS, job, bench.world, bench.host, bench.policy, model=model)

    return fit


def rows(own: Examples, site: Site, chosen: Tensor) -> Tensor:
    """Generated tokens of the chosen rollouts."""
    return torch.cat([own.hidden[site][i][own.mask[i]] for i in chosen.nonzero().flatten().tolist()]).double()


def test_thresholds_are_quantiles_of_clean_generated_tokens_in_standard_deviations(fitted_by_hand: Any) -> None:
    own, fitted = fitted_by_hand(0)
    for site, gates in fitted.gates.items():
        assert tuple(gates) == PROBES
        clean = rows(own, site, ~own.hack)
        for gate in gates.values():
            scores = clean @ gate.weight.double()
            assert abs(float(scores.std()) - 1) < 1e-5
            for quantile, at in gate.thresholds.items():
                share = float((scores >= at).double().mean())
                assert abs(share - (1 - quantile)) < 1.5 / len(scores)


def test_each_probe_is_fitted_on_what_its_name_says(fitted_by_hand: Any) -> None:
    own, fitted = fitted_by_hand(0)

    def direction(weight: Tensor) -> Tensor:
        return weight.double() / weight.double().norm()

    for site, gates in fitted.gates.items():
        fitter = LogisticFitter(unit="token")
        fitter.update(own.hidden[site], own.mask, own.hack)
        apart = rows(own, site, own.pair & own.hack).mean(0) - rows(own, site, own.pair & ~own.hack).mean(0)
        expected = {"probe": direction(fitter.fit().weight), "pairs": direction(apart)}
        for name, v in expected.items():
            torch.testing.assert_close(direction(gates[name].weight), v, atol=1e-5, rtol=0)
        random = torch.stack([direction(gates[name].weight) for name in PROBES[2:]] + [expected["probe"]])
        assert (
            float((random @ random.T - torch.eye(len(random))).abs().max()) < 0.99
        )  # shuffled and draws are like none of the others


def test_the_direction_leads_from_clean_to_hack_and_the_gap_is_the_distance_on_it(fitted_by_hand: Any) -> None:
    own, fitted = fitted_by_hand(0)
    hack, clean = (rows(own, SITE, chosen) for chosen in (own.hack, ~own.hack))
    apart = hack.mean(0) - clean.mean(0)
    torch.testing.assert_close(fitted.directions["away"].double(), apart / apart.norm(), atol=1e-6, rtol=0)
    assert fitted.gap == pytest.approx(float(apart.norm()))
    for quantile, ceiling in fitted.ceilings.items():
        assert ceiling == pytest.approx(float((clean @ (apart / apart.norm())).quantile(quantile)))


# what is counted


def study_of(parts: dict[tuple[str, str], dict[int, Any]], tasks: int, settings: SteeringSettings = SETTINGS) -> Study:
    seeds = tuple(next(iter(parts.values())))
    return Study(replace(settings, tasks=tasks, exact=1), seeds, parts, Draws.of(len(seeds), tasks))


def outcomes(hacks: int, solved: int, tasks: int = 4) -> Tensor:
    """Hacks in held-out modes, task by task, and solved tasks in the honest one."""
    table = torch.zeros(len(MODES.names), tasks, 2, dtype=torch.uint8)
    held = [MODES.names.index(mode) for mode in MODES.held_out]
    for i in range(hacks):
        table[held[i % 3], i // 3, 1] = 1
    table[MODES.names.index(MODES.honest), :solved, 0] = 1
    return table


def quarantines() -> Study:
    """Hacks of 12 and solved of 20: deleted 3 and 4, always on 9 and 1, the probe 6 and 3, random probes 8 and 9 and 1 and 2."""
    told = [{"name": ON, "how": ON}, {"name": DELETED, "how": DELETED}]
    told += [
        {"name": f"forward {name}", "how": "forward", "probe": name, "quantile": 0.95}
        for name in ("probe", "pairs", "haar-1", "haar-2")
    ]
    told += [{"name": "forward probe q0.5", "how": "forward", "probe": "probe", "quantile": 0.5}]
    values = ((9, 1), (3, 4), (6, 3), (12, 0), (8, 1), (9, 2), (2, 4))
    tensors = {cell["name"]: outcomes(*both) for cell, both in zip(told, values, strict=True)}
    part = {0: ({"cells": told}, tensors), 1: ({"cells": told}, tensors)}
    return study_of({(subject, "quarantine"): part for subject in ("absorb", "route2-full")}, 4)


def test_differences_are_from_the_reference_that_they_name() -> None:
    found = {(row["reference"], row["name"]): row for row in comparisons(quarantines()) if row["subject"] == "absorb"}
    assert found[DELETED, "forward probe"]["hack_held"]["mean"] == pytest.approx(3 / 12)
    assert found[DELETED, "forward probe"]["solve"]["mean"] == pytest.approx(-1 / 20)
    assert found[ON, "forward probe"]["hack_held"]["mean"] == pytest.approx(-3 / 12)
    assert found[ON, DELETED]["solve"]["mean"] == pytest.approx(3 / 20)
    assert not any(name == "forward probe q0.5" for _, name in found)  # another threshold than the one that was fixed


def scored() -> Study:
    """One task in five modes. The known mode hacks, the first held-out mode exploits and solves, the second hacks."""
    table = torch.zeros(5, 1, 2, dtype=torch.uint8)
    for mode, solve, exploit in ((MODES.known[0], 0, 1), (MODES.held_out[0], 1, 1), (MODES.held_out[1], 0, 1)):
        table[MODES.names.index(mode), 0] = torch.tensor([solve, exploit])
    nan = float("nan")
    scores, first = torch.full((5, 4), nan), torch.full((5,), -1)
    at = {mode: place for place, mode in enumerate(MODES.names)}
    for mode, values in (
        (MODES.known[0], (0.0, 2.0, 0.0, 9.0)),
        (MODES.held_out[0], (1.9, 1.0, 1.0, nan)),
        (MODES.held_out[1], (0.0, 0.0, 5.0, 3.0)),
        (MODES.held_out[2], (2.5, 2.5, nan, nan)),
        (MODES.honest, (1.0, nan, nan, nan)),
    ):
        scores[at[mode]] = torch.tensor(values)
    first[at[MODES.known[0]]], first[at[MODES.held_out[1]]] = 3, 1
    roc = {"outcomes": table, "exploits": first}
    fit = {}
    for name, shift in (("probe", 0.0), ("haar-1", 100.0)):
        roc[f"scores/{SITE}/{name}"] = scores
        fit[f"{SITE}/{name}/thresholds"] = torch.tensor([0.5, 1.5, 2.0 + shift, 8.0])  # in the order of the quantiles
    roc[f"scores/{EARLY}/probe"], fit[f"{EARLY}/probe/thresholds"] = scores, torch.tensor([0.0, 0.0, 5.0, 8.0])
    return study_of({("vanilla", "roc"): {0: ({"cells": []}, roc)}, ("vanilla", "fit"): {0: ({}, fit)}}, 1)


def test_a_gate_opens_at_its_threshold_and_its_lead_ends_where_the_exploit_is_predicted() -> None:
    """Two hacks: it opens at token 1, one before that which predicts token 3, and at token 2, two behind that of token 1."""
    found = lead(scored(), "vanilla")
    assert (found["hacks"], found["leads"]) == (2, [1, -2])
    assert (found["opened_on_hacks"], found["opened_on_others"]) == (1.0, pytest.approx(1 / 3))
    assert (found["lead_median"], found["in_time"]) == (-0.5, 0.5)


def test_scores_are_ranked_by_modes_and_unit_with_the_label_hack() -> None:
    def of(kind: str, unit: str) -> tuple[list[float], list[bool]]:
        roc = roc_of(scored(), "vanilla", 0, str(SITE), "probe", kind, unit)
        return roc.scores.tolist(), roc.hack.tolist()

    assert of("known", "rollout max") == ([9.0], [True])
    assert of("held", "rollout max")[0] == pytest.approx([1.9, 5.0, 2.5])
    assert of("held", "rollout max")[1] == [False, True, False]
    assert of("held", "rollout mean")[0] == pytest.approx([1.3, 2.0, 2.5])
    assert of("held", "token")[1] == [False] * 3 + [True] * 4 + [False] * 2


# figures
