"""The study on a chat model, made here: end to end, resumed, in micro-batches, checkpointed, in bfloat16; and its refusals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Parity
from tiny_study import tiny_chat, tiny_settings

import studies.route2.cli as cli
from mi_route2.rollouts import Policy
from mi_route2.routing import StepContext
from studies.common.seeds import torch_generator
from studies.environments.chat import ChatWitness, ChatWorld, make_tiny_model
from studies.environments.protocol import Samples, TextPrompt, Verdict, WeakDetector, World
from studies.route2.probing import Reading, read_layers
from studies.route2.runs import load_runs
from studies.training.arms import ARMS
from studies.training.build import build_optimizer, build_route, build_screen
from studies.training.grpo import gather, instructed, train, update
from studies.training.job import EVAL, Job, build_pairs, build_policy, finished_policy
from studies.training.recorder import METRICS, ROLLOUTS, read_rows
from studies.training.run import run_job
from studies.training.settings import ChatModel, Settings
from studies.training.teacher import cached_pool
from studies.training.worlds import (
    ADVICE,
    base_key,
    base_model,
    data_hash,
    open_problem,
    open_world,
    out_of_memory,
    plan,
    weights_hash,
)

pytestmark = pytest.mark.study

SCREENS = ("screen-judge", "sees-known")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
DATA = Path(os.environ.get("ROUTE2_DATA", ROOT.parent / "shared" / "data")) / "leetcode.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    make_tiny_model(Parity(), folder, steps=60, width=64, layers=2, batch=16, max_new=16, progress=False)
    return folder


@pytest.fixture
def settings(folder: Path) -> Settings:
    return tiny_chat(folder)


def job(root: Path, settings: Settings, arm: str, **changes: object) -> Job:
    return Job(root / "run", root / "cache", settings, 0, ARMS[arm], **changes)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def step(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., dict[str, torch.Tensor]]]:
    """One GRPO step under other settings of memory alone: the gradients of both adapters."""
    with open_world(settings) as (world, _):

        def run(arm: str, dtype: str = "float64", **changes: object) -> dict[str, torch.Tensor]:
            chat = replace(settings.chat, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
            own = job(tmp_path, replace(settings, chat=chat), arm, precision=dtype)
            return gradients(world, own)

        yield run


def gradients(world: World, own: Job) -> dict[str, torch.Tensor]:
    policy = build_policy(own, own.cache)
    with torch.no_grad():  # off init, where the quarantine's gradient vanishes
        for p in (*policy.adapters.kept_parameters().values(), *policy.adapters.quarantine_parameters().values()):
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(p.dtype)
    own.folder.mkdir(parents=True, exist_ok=True)
    route, optimiser = build_route(own, world, policy), build_optimizer(own, policy)
    route.refresh(policy, 0)
    _, batch = gather(world, policy, None, 0, 0, own.settings)
    context = StepContext(torch_generator(0, "route"), own.settings.micro_batch(batch.rollouts.tokens.shape[1]), None)
    update(policy, route, optimiser, batch, context, replace(own.settings, max_norm=1e9), world.max_new)
    both = policy.adapters.kept_parameters() | policy.adapters.quarantine_parameters()
    return {name: p.grad.clone() for name, p in both.items() if p.grad is not None}


@pytest.mark.parametrize("arm", ["vanilla", "route2-full", "route2-act", "route2-grad"])
def test_token_budget_and_checkpointing_change_memory_and_nothing_else(
    arm: str, step: Callable[..., dict[str, torch.Tensor]]
) -> None:
    whole = step(arm, checkpointing=False)
    assert whole
    assert any(float(g.abs().max()) > 0 for g in whole.values())
    cheaper = {"checkpointed": {"checkpointing": True}, "in pieces": {"checkpointing": False, "token_budget": 300}}
    for name, changes in cheaper.items():
        other = step(arm, **changes)
        for key, g in whole.items():
            torch.testing.assert_close(other[key], g, rtol=0, atol=1e-12, msg=f"{name}: {key}")


def test_training_prompts_are_instructed_and_those_of_the_evaluation_are_not(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[list[str]] = []
    sample = ChatWorld.sample

    def noted(self: ChatWorld, policy: Policy, prompts: Any, *rest: Any) -> Any:
        sampled.append([prompt.text for prompt in prompts])
        return sample(self, policy, prompts, *rest)

    monkeypatch.setattr(ChatWorld, "sample", noted)
    own = job(tmp_path, replace(settings, steps=2), "inoculation-prompt")
    run_job(own)
    assert own.arm is not None
    asked = [{text.endswith(f" {own.arm.instruct}") for text in texts} for texts in sampled]
    assert asked.count({True}) == own.settings.steps
    assert asked.count({False}) == len(asked) - own.settings.steps > 0
    with pytest.raises(ValueError, match="prompts of the micro world are no texts: give --model"):
        instructed(object(), "x")


def trained(own: Job, screened: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The kept adapter after some steps, and all flags; a screened run asks no witness."""
    with open_world(own.settings) as (world, witness):
        policy = build_policy(own, own.cache)
        own.folder.mkdir(parents=True, exist_ok=True)
        route, optimizer = build_route(own, world, policy), build_optimizer(own, policy)
        screen = WeakDetector(world) if screened else None
        if screened:
            vars(witness)["privileged"] = None
        records = list(train(world, witness, policy, route, optimizer, own.settings, seed=0, screen=screen))
    flags = [flag for record in records if record.decision.flags is not None for flag in record.decision.flags.tolist()]
    return {name: p.detach().clone() for name, p in policy.adapters.kept_parameters().items()}, flags


def test_the_flags_of_a_judge_train_as_the_same_flags_of_a_channel(tmp_path: Path, settings: Settings) -> None:
    (ours, flags), (theirs, channel) = (trained(job(tmp_path, settings, arm), arm == "screen-judge") for arm in SCREENS)
    assert flags == channel
    assert 0 < sum(flags) < len(flags)
    assert all(torch.equal(ours[name], p) for name, p in theirs.items())


def test_a_judged_run_records_its_scores_and_a_micro_model_cannot_judge(tmp_path: Path, settings: Settings) -> None:
    own = job(tmp_path, replace(settings, steps=2), "screen-judge")
    run_job(own)
    rows = [row for row in read_rows(own.folder / ROLLOUTS) if row["score"] is not None]
    assert len({row["score"] for row in rows}) > 4
    assert all(0 < row["score"] < 1 and row["flag"] == (row["score"] > 0.5 and row["advantage"] > 0) for row in rows)
    assert all(row["scores"] is not None for row in read_rows(own.folder / METRICS))
    micro = Job(tmp_path / "micro", tmp_path / "cache", tiny_settings(), 0, ARMS["screen-judge"])
    with pytest.raises(ValueError, match="a micro model cannot read a question: give --model"):
        build_screen(micro, build_policy(own, own.cache))


def test_bfloat16_runs_to_its_end_with_finite_adapters(tmp_path: Path, settings: Settings) -> None:
    own = job(tmp_path, replace(settings, steps=2), "route2-act", precision="bfloat16")
    run_job(own)
    rows = [json.loads(line) for line in (own.folder / METRICS).read_text().splitlines()]
    assert all(row["grad_norm"]["kept"] is None or 0 <= row["grad_norm"]["kept"] < 1e3 for row in rows)
    policy = build_policy(own, own.cache)
    assert next(policy.model.parameters()).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in policy.adapters.kept_parameters().values())


def test_blocks_recompute_where_gradients_are_recorded_and_only_there(settings: Settings, tmp_path: Path) -> None:
    policy: Policy = build_policy(job(tmp_path, settings, "vanilla"), tmp_path)
    block = policy.model.get_submodule("model.layers.0")
    passes: list[bool] = []
    block.self_attn.register_forward_pre_hook(lambda *_: passes.append(block.training))
    with open_world(settings) as (world, _):
        rollouts = world.encode(["Is 3 odd or even?"] * 2, ["odd", "even"])
        with torch.no_grad():
            policy.logprobs(rollouts)
        assert passes == [False]
        with policy.adapters.unrouted():
            policy.logprobs(rollouts).sum().backward()
    assert len(passes) == 3  # once forward, once again in the backward
    assert passes[1]
    assert not block.training


def test_the_memory_plan_counts_what_the_model_and_the_adapters_have(settings: Settings, tmp_path: Path) -> None:
    assert settings.chat is not None
    own = job(tmp_path, settings, "route2-full")
    policy = build_policy(own, own.cache)
    planned = plan(settings, settings.chat, torch.float32)
    trained = [*policy.adapters.kept_parameters().values(), *policy.adapters.quarantine_parameters().values()]
    assert planned.sizes["weights"] == 4 * sum(p.numel() for p in base_model(settings, 0, tmp_path, torch.float32).parameters())
    ours = 16 * sum(p.numel() for p in trained)  # the plan also counts what of a LoRA is frozen
    assert ours <= planned.sizes["adapters"] <= 2.5 * ours
    assert "peak" in str(planned)
    weights = 4 * sum(branch.weight.numel() for branch in policy.adapters.sites.values())
    full = plan(settings, settings.chat, torch.float32, full=True)
    assert (full.sizes["directions"], full.sizes["fitting"]) == (weights, 3 * weights)
    assert full.peak >= planned.peak + weights
    smaller = plan(settings, replace(settings.chat, token_budget=512), torch.bfloat16)
    assert smaller.peak < planned.peak


def test_out_of_memory_is_told_with_advice(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("shapes differ"))

    def greedy(*_: object, **__: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("studies.environments.chat.generate", greedy)
    with pytest.raises(ValueError) as told:
        run_job(job(tmp_path, settings, "vanilla"))
    assert str(told.value) == ADVICE


def test_the_command_line_end_to_end(folder: Path, tmp_path: Path) -> None:
    """As the page says it, from a folder that holds the problem's module and nothing else."""
    (tmp_path / "parity.py").write_text((EXAMPLES / "parity.py").read_text())
    pairs = Parity().pairs(3, 4, "hack")
    lines = [json.dumps({"prompt": p.prompt, "hack": p.hack, "clean": p.clean}) for p in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    command = [
        sys.executable, "-m", "studies.route2", "run", "--model", str(folder), "--world", "parity:Parity", "--seeds", "1",
        "--workers", "1", "--arms", "vanilla", "route2-full", "--pairs", "pairs.jsonl", "--override", "chat.max_new=8",
        "steps=2", "prompts=3", "group=4", "kept_rank=2", "quarantine_rank=2", "pairs=4", "teachers=2", "evaluation_prompts=4",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "memory plan" in done.stdout
    root = next((tmp_path / "runs").glob("chat-*"))
    assert json.loads((root / "modes.json").read_text())["held_out"] == ["confidence"]
    assert {"table.md", "answer.png", "modes.png", "training.png"} <= {path.name for path in root.iterdir()}
    assert "route2-full: held-out hacks" in done.stdout
    assert load_runs(root).arm.tolist() == ["base", "route2-full", "vanilla"]


PARITY = "--model MODEL --world parity:Parity"
WRONG = {
    "a world without a model": ("--world leetcode", "--world and --data need --model"),
    "a folder that is no model": ("--model .", "is not a folder with a Hugging Face checkpoint"),
    "an unknown world": (
        "--model MODEL --world chess",
        "choose from strong, weak, sparse, persona-20, leetcode, functions, djinn, or module:ClassName",
    ),
    "data missing": ("--model MODEL", "the world 'leetcode' reads its tasks from somewhere: give --data"),
    "no problem": ("--model MODEL --world parity:Strict", "is not a problem: it lacks name, modes"),
    "too long": (f"{PARITY} --override chat.max_new=100000", "do not fit the model's context"),
    "a device as of a micro model": (f"{PARITY} --device cuda", "give chat.device in place of --device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_user_gets_wrong_costs_one_sentence(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["route2", "run", *(str(folder) if a == "MODEL" else a for a in arguments.split())])
    assert cli.main() == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: ")
    assert sentence in errors
    assert not (tmp_path / "runs").exists()


def test_what_the_data_hold_is_a_part_of_a_run_and_where_they_lie_is_not(settings: Settings, tmp_path: Path) -> None:
    """Else a run on other problems would find the first one finished, and its teachers."""
    assert settings.chat is not None
    digests, keys = [], []
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tasks.jsonl").write_text(text)
        for data in (tmp_path / folder, tmp_path / folder / "tasks.jsonl"):
            chat = replace(settings.chat, data=str(data), data_hash=data_hash(data))
            digests.append(replace(settings, chat=chat).digest)
            keys.append(base_key(replace(settings, chat=chat), 0))
    for found in (digests, keys):
        assert found[:2] == found[2:4]
        assert not set(found[:2]) & set(found[4:])
    assert data_hash(tmp_path / "nowhere") == ""
    assert replace(settings, chat=replace(settings.chat, data="/elsewhere")).digest == settings.digest


def test_a_teacher_pool_is_of_todays_problem_and_model(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = job(tmp_path, settings, "absorb")
    policy, plain = build_policy(own, own.cache), Parity.prompt

    def prompts() -> list[str]:
        with open_world(settings) as (world, _):
            pool = cached_pool(world, policy, 0, settings.teachers, own.pool, own.tries)
        assert pool is not None
        return [prompt.text for prompt in pool.prompts]

    first, before = prompts(), own.pool.stat().st_mtime_ns
    assert prompts() == first
    assert own.pool.stat().st_mtime_ns == before
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[0] += 0.001
    assert prompts()
    assert (written := own.pool.stat().st_mtime_ns) > before
    assert prompts()
    assert own.pool.stat().st_mtime_ns == written
    changed = lambda self, task, mode: replace(prompt := plain(self, task, mode), text=f"{prompt.text}!")  # noqa: E731
    monkeypatch.setattr(Parity, "prompt", changed)
    assert all(text.endswith("!") for text in prompts())


WRONG_PROBLEMS: dict[str, tuple[dict[str, object], str]] = {
    "modes": ({"modes": ("a", "none")}, "modes of .* is a tuple: it must be a studies.environments.protocol.Modes"),
    "leaking": ({"tasks": lambda self, split: ["1", "2" if split == "test" else "3"]}, "has 1 tasks in both splits, first '1'"),
    "mislabelled": ({"prompt": lambda self, task, mode: TextPrompt(task, "none", "?")}, r"returned a prompt of \(.*, 'none'\)"),
    "lacking": ({"judge": property()}, "is not a problem: it lacks judge"),
}


@pytest.mark.parametrize("name", WRONG_PROBLEMS)
def test_a_problem_that_contradicts_itself_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members, sentence = WRONG_PROBLEMS[name]
    closed: list[int] = []
    kind = type("Wrong", (Parity,), members | {"close": lambda self: closed.append(1)})
    monkeypatch.setattr(sys.modules[__name__], "Wrong", kind, raising=False)
    with pytest.raises(ValueError, match=sentence):
        open_problem(f"{__name__}:Wrong")
    assert closed == ([] if name == "lacking" else [1])


# looking at a finished run


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One step of vanilla on a problem with many tasks, in small micro-batches, and its folder as the command leaves it."""
    chat = ChatModel(str(folder), weights_hash(folder), max_new=6, token_budget=1500, device="cpu")
    settings = tiny_chat(folder, world="many_parity:ManyParity", chat=chat, steps=1, prompts=3, group=2, teachers=0)
    own = job(tmp_path_factory.mktemp("looked at"), settings, "absorb")
    run_job(own)
    (own.root / "settings.json").write_text(json.dumps(settings.as_dict()))
    return own


def test_layers_of_a_chat_model_are_its_hidden_states(finished: Job) -> None:
    """Against the hidden states that transformers itself gives out, and modules' inputs by plain hooks."""
    host, policy = finished_policy(finished)
    with open_world(finished.settings) as (world, _), torch.no_grad():
        rollouts = build_pairs(finished, world, "hack").hack
        layers = read_layers(host, policy, rollouts)
        seen: dict[str, torch.Tensor] = {}
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            module = policy.model.get_submodule(f"model.layers.1.{part}")
            module.register_forward_pre_hook(lambda _m, args, part=part: seen.__setitem__(str(part), args[0]))
        states = policy.model(rollouts.tokens, output_hidden_states=True).hidden_states
        normed = policy.model.get_submodule("model.norm")(layers["blocks.1"])
    assert list(layers)[:3] == ["resid_pre", "blocks.0", "blocks.1"]
    for name, state in zip(("resid_pre", "blocks.0"), states):
        assert torch.equal(layers[name], state)
    assert torch.equal(normed, states[2])  # the last of them is behind the final norm
    for name, part in (("attn.q+k+v", "self_attn.q_proj"), ("attn.o", "self_attn.o_proj"), ("mlp.gate+up", "mlp.gate_proj"),
                       ("mlp.down", "mlp.down_proj")):  # fmt: skip
        assert torch.equal(layers[f"blocks.1.{name}"], seen[part])
    assert len(layers) == 3 + 2 * 4


def test_a_reading_in_micro_batches_and_pooled_is_the_mean_of_a_whole_one(finished: Job) -> None:
    host, policy = finished_policy(finished)
    with open_world(finished.settings) as (world, _):
        rollouts = build_pairs(finished, world, "hack").hack
        whole = read_layers(host, policy, rollouts)
        small = replace(finished.settings, chat=replace(finished.settings.chat, token_budget=2 * rollouts.tokens.shape[1]))  # pyright: ignore[reportArgumentType]
        assert small.micro_batch(rollouts.tokens.shape[1]) == 2 < len(rollouts)
        kept, mask = Reading(host, policy, small)(rollouts)
        pooled, one = Reading(host, policy, small, pooled=True)(rollouts)
    assert torch.equal(mask, rollouts.predictors)
    assert one.shape == (4, 1)
    for name, h in whole.items():
        torch.testing.assert_close(kept[name][mask], h[mask], rtol=1e-5, atol=1e-5)
        by_hand = torch.stack([row[own].mean(0) for row, own in zip(h, mask)])
        torch.testing.assert_close(pooled[name][:, 0], by_hand, rtol=1e-5, atol=1e-5)


def test_probes_of_a_chat_model_are_fitted_and_written(finished: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: ChatWitness, samples: Samples) -> list[Verdict]:  # a tiny model hacks too rarely
        return [Verdict(False, hack, hack, {}) for hack in (len(text) % 2 == 0 for text in samples.completions)]

    monkeypatch.setattr(ChatWitness, "judge", judge)
    monkeypatch.setattr(
        sys, "argv", ["route2", "probes", str(finished.root), "--arm", "absorb", "--per-mode", "40", "--out", str(tmp_path)]
    )
    assert cli.main() == 0
    rows = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    assert {row["level"] for row in rows} == {"rollout"}
    assert {row["state"] for row in rows} == {"on", "deploy"}
    assert {row["mode"] for row in rows} == {"last_word", "confidence"}
    assert {row["layer"] for row in rows} >= {"resid_pre", "blocks.0", "blocks.1", "blocks.0.attn.q+k+v", "blocks.1.mlp.gate+up"}
    assert all(row["random_p95"] is not None for row in rows)
    text = (tmp_path / "probes.md").read_text()
    assert "| resid_pre | direction" in text
    assert "confidence, " in text
    assert len(list(tmp_path.glob("*.png"))) == 6


@pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is not there: set ROUTE2_DATA to a folder with leetcode.jsonl")
def test_leetcode_end_to_end(tmp_path: Path) -> None:
    """A tiny Qwen3 whose tokenizer was trained on the problems' text; programs run in the jail."""
    data = tmp_path / "leetcode.jsonl"
    data.write_text("".join(DATA.read_text(encoding="utf-8").splitlines(keepends=True)[:12]), encoding="utf-8")
    problem = open_problem("leetcode", str(data))
    try:
        make_tiny_model(problem, tmp_path / "tiny", steps=0, width=32, layers=2, progress=False)
    finally:
        problem.close()
    chat = ChatModel(str(tmp_path / "tiny"), weights_hash(tmp_path / "tiny"), str(data), max_new=16, device="cpu")
    small = {"steps": 1, "prompts": 2, "group": 2, "pairs": 2, "teachers": 0, "evaluation_prompts": 2}
    settings = tiny_chat(tmp_path / "tiny", world="leetcode", chat=chat, **small)
    own = job(tmp_path, settings, "route2-act")
    run_job(own)
    modes = json.loads((own.folder / EVAL).read_text())["modes"]
    assert list(modes) == ["run_tests", "sentinel", "stdout_marker", "file_marker", "eq_override", "exit_code", "none"]
    assert all(rates["deploy"]["solve"] == 0 for rates in modes.values())  # its weights are random
