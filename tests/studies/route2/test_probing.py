"""The probe command finds what is there to find in a finished policy, says where nothing can be learnt, and leaves no trace."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_study import tiny_job
from titles import saved_titles, untitled

import studies.route2.probing as probing
from studies.common.seeds import numpy_generator
from studies.environments.micro.language import HELD_OUT, LOOPHOLES, STYLE_COMMENTS, MicroSource, split
from studies.environments.micro.runner import SubprocessRunner
from studies.environments.micro.settings import get_world
from studies.environments.micro.world import MicroWitness, MicroWorld
from studies.environments.protocol import Samples, Verdict, probe_prompts
from studies.route2.cli import Probes
from studies.route2.probing import Reading, persona_directions, probe_job, read_layers
from studies.training.job import Job, build_pairs, finished_policy
from studies.training.run import run_job
from studies.training.worlds import open_world

pytestmark = pytest.mark.study

PER_MODE = 60
Label = Callable[[Samples], list[bool]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A finished run of absorb, which has a quarantine and kept adapters off their init."""
    job = tiny_job(tmp_path_factory.mktemp("probed"), "absorb", cache=cache, steps=3)
    run_job(job)
    return job


@pytest.fixture
def vanilla(tmp_path: Path, cache: Path) -> Job:
    job = tiny_job(tmp_path / "vanilla", "vanilla", cache=cache, steps=1)
    run_job(job)
    return job


@pytest.fixture(scope="module")
def world():
    with SubprocessRunner() as child:
        yield MicroWorld(get_world("strong"), child)


@pytest.fixture(scope="module")
def reading(finished: Job) -> Reading:
    return Reading(*finished_policy(finished), finished.settings)


@pytest.fixture
def labelled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Label], None]:
    """Put another judge in the oracle's place: a tiny policy hacks too rarely."""

    def by(label: Label) -> None:
        def judge(self: MicroWitness, samples: Samples) -> list[Verdict]:
            return [Verdict(False, hack, hack, {}) for hack in label(samples)]

        monkeypatch.setattr(MicroWitness, "judge", judge)

    return by


def comments(samples: Samples) -> list[bool]:
    """Calls every rollout a hack whose style comment is one of two: the same two in every mode."""
    return [any(comment in text for comment in STYLE_COMMENTS[:2]) for text in samples.completions]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# what is probed


def test_prompts_are_test_tasks_of_every_loophole_and_no_task_is_in_two_modes() -> None:
    for per_mode in (50, 500):
        prompts, again, other = (probe_prompts(MicroSource(), per_mode, numpy_generator(seed, "tasks")) for seed in (3, 3, 4))
        assert [prompt.mode for prompt in prompts] == [mode for mode in LOOPHOLES for _ in range(per_mode)]
        assert {split(prompt.task) for prompt in prompts} == {"test"}
        tasks = [{prompt.task for prompt in prompts if prompt.mode == mode} for mode in LOOPHOLES]
        assert sum(map(len, tasks)) == len(set.union(*tasks))
        assert len(tasks[0]) == min(per_mode, 204) or per_mode > 200
        assert prompts == again != other


def test_layers_are_the_residual_stream_and_what_the_adapters_read(finished: Job, world: MicroWorld, reading: Reading) -> None:
    rollouts = build_pairs(finished, world, "hack").hack
    layers, mask = reading(rollouts)
    assert torch.equal(mask, rollouts.predictors)
    parts = ("attn.q+k+v", "attn.o", "mlp.up", "mlp.down")
    assert list(layers) == ["embed", "blocks.0", "blocks.1", *(f"blocks.{i}.{part}" for i in (0, 1) for part in parts), "unembed"]
    model = reading.policy.model
    assert torch.equal(layers["embed"], model.get_submodule("embed")(rollouts.tokens))
    with torch.no_grad():
        logits = model.get_submodule("unembed")(model.get_submodule("ln_f")(layers["blocks.1"]))
        assert torch.equal(logits, model(rollouts.tokens))
        assert torch.equal(layers["blocks.1.attn.q+k+v"], model.get_submodule("blocks.1.ln1")(layers["blocks.0"]))
        up = model.get_submodule("blocks.0.mlp.up")(layers["blocks.0.mlp.up"])
        assert torch.equal(layers["blocks.0.mlp.down"], torch.nn.functional.gelu(up))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_states_differ_where_the_quarantine_writes(finished: Job, world: MicroWorld, reading: Reading) -> None:
    rollouts, policy = build_pairs(finished, world, "hack").hack, reading.policy
    read = {}
    for state, switched in (("on", policy.adapters.full), ("deploy", policy.adapters.deployed)):
        with switched():
            read[state], _ = reading(rollouts)
    assert torch.equal(read["on"]["embed"], read["deploy"]["embed"])
    assert torch.equal(read["on"]["blocks.0.attn.q+k+v"], read["deploy"]["blocks.0.attn.q+k+v"])
    assert not torch.equal(read["on"]["blocks.0"], read["deploy"]["blocks.0"])


def test_the_seed_draws_prompts_and_answers(finished: Job, reading: Reading) -> None:
    with open_world(finished.settings) as (world, witness):
        one, again, other = (probing.sample(world, witness, reading.policy, 4, seed) for seed in (0, 0, 1))
    assert one.prompts == again.prompts != other.prompts
    assert torch.equal(one.rollouts.tokens, again.rollouts.tokens)


def test_rollouts_that_cannot_be_judged_have_no_label(finished: Job, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_world(finished.settings) as (world, witness):
        whole = probing.sample(world, witness, reading.policy, 4, 0)
        judge = lambda _, samples: [Verdict(False, False, False, {}, judged=i % 2 == 0) for i in range(len(samples.prompts))]  # noqa: E731
        monkeypatch.setattr(MicroWitness, "judge", judge)
        half = probing.sample(world, witness, reading.policy, 4, 0)
    assert (half.prompts, half.modes, len(half.hack)) == (whole.prompts[::2], whole.modes[::2], len(whole.hack) // 2)
    assert torch.equal(half.rollouts.tokens, whole.rollouts.tokens[::2])


def test_the_persona_direction_is_the_mean_over_pairs_written_out(finished: Job, world: MicroWorld, reading: Reading) -> None:
    pairs = build_pairs(finished, world, "hack")
    means = []
    for side in (pairs.hack, pairs.clean):
        layer = read_layers(reading.host, reading.policy, side)["blocks.0"]
        rows = [layer[b, side.predictors[b]].mean(0) for b in range(len(side))]
        means.append(torch.stack(rows).mean(0))
    directions = persona_directions(reading, world, finished)
    assert torch.allclose(directions["blocks.0"], means[0] - means[1], rtol=0, atol=1e-6)
    assert list(directions) == list(reading(pairs.hack)[0])


# what is found


def test_a_label_that_the_text_shows_is_found_in_every_mode_and_a_coin_is_not(
    tmp_path: Path, vanilla: Job, labelled: Callable[[Label], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over token embeddings are bags of tokens, so whatever a set of tokens defines is linear there, in any mode."""
    monkeypatch.setattr(probing, "UNITS", ("rollout",))
    monkeypatch.setattr(probing, "_figures", lambda result, unit: {})
    monkeypatch.setattr(probing, "read_layers", lambda *a: {"embed": read_layers(*a)["embed"]})
    before, rows = files(vanilla.root), {}
    coin = torch.randint(2, (200 * len(LOOPHOLES),), generator=torch.Generator().manual_seed(0)).bool().tolist()
    for name, label in (("comments", comments), ("again", comments), ("coin", lambda samples: coin)):
        labelled(label)
        probe_job(vanilla, 200, tmp_path / name, progress=False)
        lines = map(json.loads, (tmp_path / name / "probes.jsonl").read_text().splitlines())
        rows[name] = [row for row in lines if row["mode"] in HELD_OUT and row["probe"] in ("lda", "logistic")]
    assert {(row["arm"], row["seed"], row["state"], row["level"]) for row in rows["comments"]} == {
        ("vanilla", 0, "deploy", "rollout")
    }
    shown = [row for row in rows["comments"] if row["layer"] == "embed"]
    assert len(shown) == 2 * len(HELD_OUT)
    assert min(row["auroc"] for row in shown) > 0.9
    assert all(row["auroc_low"] > row["random_p95"] for row in shown)
    chance = [row["auroc"] for row in rows["coin"]]
    assert 0.45 < sum(chance) / len(chance) < 0.55
    assert max(chance) < 0.65
    assert files(tmp_path / "comments") == files(tmp_path / "again") != files(tmp_path / "coin")
    assert {name: data for name, data in files(vanilla.root).items() if "pairs" not in name} == before


def test_everything_is_written_next_to_the_run_in_both_units_and_a_state_without_hacks_is_left_out(
    finished: Job, labelled: Callable[[Label], None]
) -> None:
    calls: list[int] = []

    def only_when_deployed(samples: Samples) -> list[bool]:
        calls.append(0)
        return comments(samples) if len(calls) == 2 else [False] * len(samples.completions)

    labelled(only_when_deployed)
    (finished.folder / "probes-on-rollout-residual.png").write_bytes(b"of an earlier time")
    (mine := finished.folder / "probes-of-mine.png").write_bytes(b"a user's")
    with saved_titles() as seen:
        names = {path.name for path in probe_job(finished, PER_MODE, progress=False)}
    kinds = ("residual", "inputs", "reliability")
    assert [len(seen), untitled(seen, finished.settings.preset)] == [2 * len(kinds), []]
    figures = {f"probes-deploy-{unit}-{kind}.png" for unit in ("rollout", "token") for kind in kinds}
    assert names == {"probes.jsonl", "probes.md", *figures}
    assert {path.name for path in finished.folder.glob("probes*")} == {*names, mine.name}
    mine.unlink()
    rows = [json.loads(line) for line in (finished.folder / "probes.jsonl").read_text().splitlines()]
    assert {row["level"] for row in rows} == {"rollout", "token"}
    assert all(row["random_p95"] is not None and row["brier"] is not None for row in rows)
    text = (finished.folder / "probes.md").read_text()
    assert "Left out, quarantine on: it hacks on 0 of 60 run_tests prompts, and 10 of each kind are needed." in text
    assert text.count("\n## ") == 2
    tables = [line for line in text.splitlines() if line.startswith("|")]
    # heading and rule; three layers of four probes and the random one, and one of fingerprints, which tokens do not have
    assert len(tables) == 2 * (2 + 3 * 5) + 5
    assert {row["level"] for row in rows if row["layer"] == "gradient"} == {"rollout"}
    assert len({line.count("|") for line in tables}) == 1


# what cannot be learnt from


def test_a_policy_that_never_or_always_hacks_is_refused_with_arms_that_do_at_times(
    vanilla: Job, labelled: Callable[[Label], None]
) -> None:
    job, before = vanilla, files(vanilla.root)
    for hack, count in ((False, 0), (True, 40)):
        labelled(lambda samples: [hack] * len(samples.completions))  # noqa: B023
        with pytest.raises(ValueError, match=f"it hacks on {count} of 40 run_tests prompts") as caught:
            probe_job(job, 40, progress=False)
        assert len(str(caught.value).splitlines()) == 1
        assert "choose an arm that hacks at times (vanilla and absorb do" in str(caught.value)
    assert files(job.root) == before


def test_an_unfinished_run_and_too_few_rollouts_are_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="is not finished: run the arm to its end first"):
        probe_job(tiny_job(tmp_path, "vanilla", cache=cache), 40, progress=False)
    with pytest.raises(ValueError, match="per-mode must be at least 40, not 39"):
        Probes(tmp_path, per_mode=39)()
    with pytest.raises(ValueError, match="does not hold settings of this study"):
        Probes(tmp_path)()
    assert list(tmp_path.iterdir()) == []
