"""Scores before training: F against scikit-learn, thresholds against all of them, scores against the route's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import fbeta_score, roc_auc_score
from tiny_study import tiny_job

from mi_route2.rollouts import Rollouts
from mi_route2.routing import MaskRoute, MaskSpec
from mi_route2.routing.directions import FeatureKind, PersonaFitter, collect
from mi_route2.validation import write_json
from studies.route2.cli import Detection
from studies.route2.detection import KINDS, along, best_threshold, corda, crossed_flags, detect, f_score, input_directions, score
from studies.route2.probing import sample
from studies.route2.sharing import LabelledRollout, read_trajectories
from studies.training.job import Job, build_pairs, finished_policy
from studies.training.run import run_job
from studies.training.worlds import open_world

pytestmark = pytest.mark.study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    job = tiny_job(tmp_path_factory.mktemp("detected"), "vanilla", cache=cache, steps=2)
    run_job(job)
    return job


def test_f_half_is_scikit_learns_and_its_threshold_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        hack, scores = rng.random(40) < 0.3, rng.integers(0, 12, 40) / 11
        flags = rng.random(40) < 0.5
        assert f_score(flags, hack) == pytest.approx(fbeta_score(hack, flags, beta=0.5, zero_division=0))
        threshold = best_threshold(scores, hack)
        assert threshold is not None
        best = max(fbeta_score(hack, scores >= each, beta=0.5, zero_division=0) for each in scores)
        assert f_score(scores >= threshold, hack) == pytest.approx(best)
    assert best_threshold(scores, np.zeros(40, bool)) is None


def test_no_answer_is_flagged_at_a_threshold_that_saw_an_answer_to_its_prompt() -> None:
    rng = np.random.default_rng(0)
    prompts, hack, scores = rng.integers(0, 9, 60), rng.random(60) < 0.4, rng.random(60)
    flags = crossed_flags(scores, hack, prompts)
    for prompt in range(9):
        own = prompts == prompt
        assert (crossed_flags(scores, np.where(own, ~hack, hack), prompts)[own] == flags[own]).all()
    assert not crossed_flags(scores, hack, np.zeros(60, dtype=int)).any()  # no other prompt


@pytest.mark.parametrize("kind", get_args(FeatureKind))
def test_a_score_is_that_of_a_route_with_this_direction(finished: Job, kind: FeatureKind) -> None:
    with open_world(finished.settings) as (world, witness):
        _, policy = finished_policy(finished)
        sampled = sample(world, witness, policy, 4, 0)
        fitter = PersonaFitter("persona", kind, build_pairs(finished, world, "hack"))
    route = MaskRoute(MaskSpec(score=kind), fitter)
    route.refresh(policy, step=0)
    assert route.directions is not None
    with policy.adapters.deployed():
        twice = along(policy, [route.directions, route.directions])
        found = score(policy, sampled.rollouts, route.directions, [twice], finished.settings)
    expected = route.score(policy, sampled.rollouts)
    assert expected is not None
    torch.testing.assert_close(found[0], expected.double().cpu(), rtol=0, atol=1e-6)
    assert torch.equal(found[0], found[1])


def test_the_corda_direction_is_the_derivative_along_a_quarantine_that_starts_at_the_pairs_inputs(finished: Job) -> None:
    with open_world(finished.settings) as (world, _):
        _, policy = finished_policy(finished)
        pairs = build_pairs(finished, world, "hack")
    adapters, seen = policy.adapters, dict[str, torch.Tensor]()

    def mean_inputs(rollouts: Rollouts) -> dict[str, torch.Tensor]:
        def keep(site: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], None]:
            return lambda module, inputs: seen.update({site: inputs[0].detach()})

        handles = [adapters.modules[site].register_forward_pre_hook(keep(site)) for site in adapters.sites]
        policy.logits(rollouts)
        for handle in handles:
            handle.remove()
        rows = rollouts.predictors
        return {site: torch.stack([x[i][rows[i]].mean(0) for i in range(len(x))]).mean(0) for site, x in seen.items()}

    with adapters.deployed():
        hack, clean = mean_inputs(pairs.hack), mean_inputs(pairs.clean)
        inner = corda(policy, [input_directions(policy, pairs)])
        gradients = {site: each.values() for site, each in collect(policy, pairs.hack, "full", {}).items()}
        directions = dict[str, torch.Tensor]()
        for site, module in adapters.modules.items():
            u = hack[site] - clean[site]
            u, v = u / u.norm(), module.weight @ u
            directions[site] = -torch.outer(v / v.norm(), u)
            expected = (gradients[site] * directions[site]).sum(dim=(1, 2))
            torch.testing.assert_close(inner(site, gradients[site])[:, 0], expected, rtol=1e-3, atol=1e-5)
        site, eps = next(iter(adapters.sites)), 1e-3
        weight, before = adapters.modules[site].weight, adapters.modules[site].weight.clone()
        losses = []
        for sign in (1, -1):
            weight.data = before + sign * eps * directions[site]
            losses.append(-policy.logprobs(pairs.hack).sum(dim=1).detach())
        weight.data = before
    torch.testing.assert_close(inner(site, gradients[site])[:, 0], (losses[0] - losses[1]) / (2 * eps), rtol=5e-2, atol=5e-2)


def test_the_command_writes_table_figure_and_every_draw(finished: Job, tmp_path: Path) -> None:
    write_json(finished.root / "settings.json", finished.settings.as_dict())
    run_job(replace(finished, arm=None))
    Detection((finished.root, finished.root), arms=("base", "vanilla"), per_mode=12, draws=2, out=tmp_path)()
    rows = json.loads((tmp_path / "detection.json").read_text())
    assert {row["run"] for row in rows} == {"base", "vanilla, 2 steps"}
    rows = [row for row in rows if row["run"] == "base"]
    assert {(row["kind"], row["draw"]) for row in rows} == {(kind, draw) for kind in KINDS for draw in range(3)}
    assert {row["answers"] for row in rows} == {12}
    by_place = {(row["mode"], row["hacks"]) for row in rows}
    assert len(by_place) == len({mode for mode, _ in by_place})  # the same answers under every direction
    assert {path.name for path in tmp_path.iterdir()} == {"detection.json", "detection.md", "detection.png"}
    assert "act" in (tmp_path / "detection.md").read_text()


def test_trajectories_of_trace_are_scored_by_category_beside_all_benign_ones(finished: Job, tmp_path: Path) -> None:
    with open_world(finished.settings) as (world, _):
        prompts = [world.evaluation_prompts(world.modes.known[0], 8)[i] for i in range(8)]
        texts = [pair.hack for pair in world.make_pairs(0, 4, "hack")] + [pair.clean for pair in world.make_pairs(1, 4, "hack")]
        labels = ["1.2.1", "1.1.3", "2.1.1", "2.1.1", "0", "0", "0", "0"]
        rows = [
            {"trajectory_id": str(i), "conversation": json.dumps(talk(prompt.text, text)), "label": label}
            for i, (prompt, text, label) in enumerate(zip(prompts, texts, labels, strict=True))
        ]
        called = [{"role": "system", "content": "s"}, *talk("q", None), {"role": "tool", "content": "r"}, *talk("u", "a")]
        called[2]["tool_calls"] = [{"name": "edit", "parameters": {}}]
        rows.append({"conversation": called, "label": "3"})
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
        read = read_trajectories(tmp_path / "trace.jsonl")
        assert read[:8] == [
            LabelledRollout(p.text, text, label != "0", label[0]) for p, text, label in zip(prompts, texts, labels, strict=True)
        ]
        calls = '{"name": "edit", "parameters": {}}\n\n[tool]\nr\n\nu\n\na'
        assert read[8] == LabelledRollout("[system]\ns\n\nq", calls, True, "3")
        with pytest.warns(RuntimeWarning, match="1 of 9 trajectories are left out"):
            found, _ = detect(finished, 1, 0, tmp_path / "trace.jsonl")
        _, policy = finished_policy(finished)
        fitted = PersonaFitter("persona", "act", build_pairs(finished, world, "hack")).fit(policy, 0)
        answers = world.encode([p.text for p in prompts], texts)
        values = score(policy, answers, fitted, [along(policy, [fitted])], finished.settings)[0]
    for category, ours in (("1", [0, 1]), ("2", [2, 3])):
        row = next(row for row in found if (row.kind, row.mode) == ("act", category))
        assert (row.answers, row.hacks, row.f_half) == (6, 2, None)
        assert row.auroc == roc_auc_score([True] * 2 + [False] * 4, values[[*ours, 4, 5, 6, 7]])
    assert {row.mode for row in found} == {"1", "2"}
    (tmp_path / "trace.jsonl").write_text(json.dumps({"conversation": "[]", "label": "0"}))
    with pytest.raises(ValueError, match=r"conversation 0 of .* is no list of messages"):
        read_trajectories(tmp_path / "trace.jsonl")


def talk(asked: str, answer: str | None) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
