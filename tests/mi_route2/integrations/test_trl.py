"""TRL's own loop with a route takes the steps of ours, however its batch is cut, and ships the kept adapter alone."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl", reason="the extra trl is not installed: pip install 'mi-route2[trl]'")

import peft
from datasets import Dataset
from families import make_family, make_rollouts, move
from parity import Parity, parity
from sample import covering
from tiny_trl import (
    LORA,
    RATE,
    TEXTS,
    UNEVEN,
    Ours,
    Seen,
    config,
    general,
    gradients,
    make_trainer,
    our_batch,
    our_loop,
    our_policy,
    pairs,
    reward,
    tokenizer,
    weights,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_ranks import HOWS, RANKED, SHARED, SVD, run

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec, attach
from mi_route2.adapters import load_adapters, save_adapters
from mi_route2.integrations import trl_vllm
from mi_route2.integrations.trl import RoutedGRPOTrainer, RoutedSFTTrainer, RoutedStep
from mi_route2.integrations.trl_trainer import ADAPTERS, seed_of
from mi_route2.rollouts import Rollouts
from mi_route2.routing import (
    CanarySpec,
    EraseRoute,
    EraseSpec,
    HaarFitter,
    OpenRoute,
    OpenSpec,
    PersonaFitter,
    Route,
    RouteSpec,
    TrainBatch,
)
from mi_route2.routing.canary import Canary, CanaryRoute
from mi_route2.specs import LEGAL, PRIVILEGED
from studies.environments.chat import ChatTokenizer, ChatWitness, ChatWorld, make_tiny_model
from studies.training.recorder import trl_record

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::FutureWarning")]

ROOT = Path(__file__).parents[3]
ALONE = AdapterSpec("lora", rank=3, quarantine="none")
UNFLAGGED = MaskSpec(score_policy="ablated", kept_advantage="unflagged")
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
"""Settings of TRL under which it writes a checkpoint at every step."""


def ours(spec: RouteSpec | MaskRoute | CanaryRoute) -> Route:
    """The route that our own loop would use."""
    if isinstance(spec, MaskRoute | CanaryRoute):
        return spec
    if isinstance(spec, EraseSpec):
        return EraseRoute.from_pairs(pairs(), spec)
    if isinstance(spec, OpenSpec):
        return OpenRoute(spec)
    if spec.fitter == "persona":
        return MaskRoute.from_pairs(pairs(), spec) if spec.needs_direction else MaskRoute(spec, None)
    assert spec.score in ("act", "grad", "full")
    seed = seed_of(config("nowhere").seed, "haar", spec.draw)
    return MaskRoute(spec, HaarFitter(PersonaFitter("persona", spec.score, pairs()), seed))


def assert_close(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Gradients equal to 1e-12, where the largest are about 1e-2; weights to 1e-10, because Adam divides by gradients of 1e-8."""
    assert own.keys() == other.keys()
    for name, expected in other.items():
        gap = float((own[name] - expected).abs().max())
        assert gap <= (1e-10 if name.startswith("weights") else 1e-12), (
            f"{name}: off by {gap:.1e} where the largest is {float(expected.abs().max()):.1e}"
        )


def assert_ours(trainer: RoutedGRPOTrainer, seen: Seen, route: Route, settings: Ours | None = None, *adapt: str) -> None:
    """Gradients of every step, shares of flags and final weights are those of our own loop."""
    policy = our_policy(trainer.adapters.spec, *adapt)
    gradients, updates = our_loop(policy, route, Ours() if settings is None else settings)
    assert len(seen.gradients) == len(gradients)
    for own, expected in zip(seen.gradients, gradients):
        assert_close(own, expected)
    final = weights(policy.adapters)
    assert_close({f"weights.{n}": p for n, p in weights(trainer.adapters).items()}, {f"weights.{n}": p for n, p in final.items()})
    assert min(float(p.abs().max()) for name, p in final.items() if name.startswith("kept") and not name.endswith(".A")) > 1e-3
    flagged = [float(u.decision.flags.double().mean()) for u in updates if u.decision.flags is not None]
    assert [log["route/flagged"] for log in seen.logs if "route/flagged" in log] == flagged
    scored = isinstance(route.spec, MaskSpec) and route.spec.score != "none"
    assert not scored or 0 < sum(flagged) < len(flagged)


RULES = [(*key, through) for key, ways in LEGAL.items() if key[0] not in (*PRIVILEGED, "judge") for through in sorted(ways)]
ROUTES: dict[str, tuple[Any, AdapterSpec]] = {
    "-".join(rule): (MaskSpec(score=rule[0], unit=rule[1], score_policy=rule[2], through=rule[3]), LORA)  # pyright: ignore
    for rule in map(RULES.__getitem__, sorted(covering(RULES)))
}
"""Rules that have every two settings that any legal rule has (``test_mask_route.py`` has all rules), and others."""
ROUTES |= {
    "open": (OpenSpec(), LORA),
    "erase": (EraseSpec(k=2), LORA),
    "erase to the quarantine": (EraseSpec(k=2, dispose="quarantine"), SHARED),
    "svd": (MaskSpec(), SVD),
    "shared": (MaskSpec(unit="rollout"), SHARED),
    "no quarantine": (MaskSpec(score="act"), ALONE),
    "negative scale": (MaskSpec(score="act", negative_scale=0.3, reinforced_only=False), LORA),
    "random directions": (MaskSpec(fitter="haar", draw=1), LORA),
    "unflagged": (UNFLAGGED, LORA),
    "unflagged, detached": (MaskSpec(score="act", score_policy="ablated", kept_advantage="unflagged", through="detach"), LORA),
    "unflagged, no quarantine": (MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged"), ALONE),
}


@pytest.mark.parametrize("name", ROUTES)
def test_a_rule_learns_what_it_learns_in_our_own_loop(name: str, tmp_path: Path) -> None:
    """TRL accumulates two micro-batches here, ours has one."""
    rule, adapters = ROUTES[name]
    trainer, seen = make_trainer(tmp_path, rule, adapters, size=4, gradient_accumulation_steps=2)
    trainer.train()
    assert_ours(trainer, seen, ours(rule))


REFITTED = {
    "every step": MaskSpec(refresh_every=1),
    "every second step": MaskSpec(score="act", refresh_every=2),
    "erase": EraseSpec(k=2, refresh_every=1),
}


@pytest.mark.parametrize("name", REFITTED)
def test_directions_are_refitted_when_our_own_loop_refits_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every so many optimizer steps, not micro-batches; the log has the overlap, which axes (erase) have not."""
    rule, overlaps = REFITTED[name], list[float | None]()
    trainer, seen = make_trainer(tmp_path, rule, size=4, gradient_accumulation_steps=2, steps=3)
    trainer.train()
    route = ours(rule)

    def refresh(*given: Any, refresh: Any = route.refresh) -> float | None:
        overlaps.append(refresh(*given))
        return overlaps[-1]

    monkeypatch.setattr(route, "refresh", refresh)
    assert_ours(trainer, seen, route, Ours(steps=3))
    assert [round(seen.logs[step].get("route/overlap", 0), 9) for step in range(3)] == [round(one or 0, 9) for one in overlaps]
    due = [] if isinstance(rule, EraseSpec) else [step for step in (1, 2) if step % rule.refresh_every == 0]
    assert [step for step in range(3) if 0 < seen.logs[step].get("route/overlap", 0) < 1 - 1e-9] == due
    assert trainer.route.directions is not None
    assert trainer.route.directions.provenance.step == 2


def test_a_canary_does_what_it_does_in_our_own_loop(tmp_path: Path) -> None:
    draw, policy = torch.Generator().manual_seed(0), our_policy(ALONE)
    kept = policy.adapters.tensors(quarantine=False)
    canary = Canary(policy, [{n: torch.randn(t.shape, generator=draw, dtype=t.dtype) for n, t in kept.items()} for _ in range(2)])
    words = torch.randint(3, 40, (24, 4), generator=draw).tolist()
    route = CanaryRoute(CanarySpec(quantile=0.3), canary, Rollouts.from_lists([[5, 6]] * len(words), words, 0))
    trainer, seen = make_trainer(tmp_path, route, LORA, size=4, gradient_accumulation_steps=2)
    trainer.train()
    assert_ours(trainer, seen, route)
    assert any(0 < log.get("route/flagged", 0) < 1 for log in seen.logs)
    with pytest.raises(ValueError, match="pass CanaryRoute"):
        make_trainer(tmp_path, CanarySpec(), LORA)


CUTS = {
    "whole": {"size": 8},
    "single rollouts": {"size": 1, "gradient_accumulation_steps": 8},
    "checkpointing": {"size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "reentrant": {"size": 8, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("name", ["svd", "act-token-live-detach", "unflagged"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_of_a_batch_changes_nothing(cut: str, name: str, tmp_path: Path) -> None:
    rule, adapters = ROUTES[name]
    trainer, seen = make_trainer(tmp_path, rule, adapters, **CUTS[cut])
    trainer.train()
    assert_ours(trainer, seen, ours(rule))


@pytest.mark.parametrize("name", ["act-token-live-detach", "svd"])
def test_left_padding_is_a_rounding(name: str, tmp_path: Path) -> None:
    """Padded positions rotate by other angles, which are float32; a padded token that counted would move gradients by percents."""
    rule, adapters = ROUTES[name]
    trainer, seen = make_trainer(tmp_path, rule, adapters, texts=UNEVEN, size=4, gradient_accumulation_steps=2)
    trainer.train()
    gradients, _ = our_loop(our_policy(adapters), ours(rule), Ours(), UNEVEN)
    for own, expected in zip(seen.gradients, gradients):
        for name, gradient in expected.items():
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what processes under ``accelerate launch`` wrote, without a GPU they run on gloo."""
    out = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "trl_ranks.py"), str(out), str(ROOT / "tests/support/fsdp.yaml")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return out


@functools.cache
def of_one_process(case: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Gradients and weights of our own loop, and the completions that it flagged in each step."""
    rule, adapters, _ = RANKED[case]
    policy = our_policy(adapters)
    gradients, updates = our_loop(policy, ours(rule), Ours())
    expected = {f"{step}/{name}": g for step, found in enumerate(gradients) for name, g in found.items()}
    flagged = []
    for step, update in enumerate(updates):
        flags, completions = update.decision.flags, our_batch(step).rollouts.completions()
        flagged.append(None if flags is None else sorted(ids for ids, flag in zip(completions, flags.tolist()) if flag))
    return expected | {f"weights/{name}": p for name, p in weights(policy.adapters).items()}, flagged


@pytest.mark.parametrize(("how", "case"), [(how, case) for how, cases in HOWS.items() for case in cases])
def test_several_processes_learn_what_one_learns(how: str, case: str, ranks: Path) -> None:
    """And flag what it flags; their adapters are loaded on a model that is whole, by its hash."""
    expected, flagged = of_one_process(case)
    for rank in range(int(how.rpartition("-")[2])):
        found = load_file(ranks / how / f"{case}-{rank}.safetensors")
        assert_close(found, expected)
        if case == "flagged":
            assert all(bool((g == 0).all()) for name, g in found.items() if "/kept." in name and not name.startswith("weights"))
    assert json.loads((ranks / how / f"{case}.json").read_text()) == flagged
    policy = our_policy(RANKED[case][1])
    load_adapters(policy.adapters, ranks / how / f"{case}.adapters")
    assert_close(
        {f"weights/{name}": p for name, p in weights(policy.adapters).items()},
        {name: p for name, p in expected.items() if name.startswith("weights")},
    )


def test_a_sharded_model_samples_evaluates_and_saves_what_a_whole_one_does(ranks: Path, tmp_path: Path) -> None:
    """With both adapters while it trains, and the kept one alone in evaluation and in the folder; ``run`` itself resumes."""
    run(tmp_path, RoutedGRPOTrainer, 1)
    asked = [
        [json.loads((folder / f"asked-{rank}.json").read_text()) for rank in range(n)]
        for folder, n in ((tmp_path, 1), (ranks / "run", 2))
    ]
    whole, *processes = asked[0] + asked[1]
    assert whole["train"][:8] != processes[0]["train"]
    for when, completions in whole.items():
        assert sorted(completions) == sorted(ids for one in processes for ids in one[when])
    lengths = [{len(ids) for ids in one["train"][:4]} for one in processes]
    assert not lengths[0] & lengths[1]  # one process is done with its first completions before the other
    for rank in range(2):
        own, expected = load_file(ranks / "run" / f"run-{rank}.safetensors"), load_file(tmp_path / "run-0.safetensors")
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    names = [{path.name for path in (folder / "deployed").iterdir()} for folder in (tmp_path, ranks / "run")]
    assert names[0] == names[1]
    own, expected = (load_file(folder / "deployed" / "adapter_model.safetensors") for folder in (ranks / "run", tmp_path))
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    copies = [path.name for path in (ranks / "run" / "trainer" / "checkpoint-1").iterdir() if "model" in path.name]
    assert copies == ["adapter_model.safetensors"]  # and none of the base


def test_flagged_rollouts_leave_exactly_nothing_in_the_kept_adapter(tmp_path: Path) -> None:
    route = MaskRoute.from_flags(lambda batch: torch.ones(len(batch.rollouts), dtype=torch.bool))
    trainer, seen = make_trainer(tmp_path, route, gradient_checkpointing=True)
    before = weights(trainer.adapters)
    trainer.train()
    after = weights(trainer.adapters)
    for name in before:
        untouched = name.startswith("kept.")
        assert all(bool((step[name] == 0).all()) for step in seen.gradients) == untouched, name
        assert torch.equal(before[name], after[name]) == untouched, name


def test_the_reference_is_the_base_and_the_first_divergence_exactly_zero(tmp_path: Path) -> None:
    """The model writes the completions, of unequal lengths; TRL holds no second model."""
    trainer, seen = make_trainer(tmp_path, MaskSpec(), sampled=True, beta=0.1, steps=3)
    assert not isinstance(trainer.ref_model, torch.nn.Module)
    trainer.train()
    assert [log["kl"] > 0 for log in seen.logs if "kl" in log] == [False, True, True]
    assert seen.logs[0]["kl"] == 0
    assert trainer.args.beta == 0.1


@pytest.mark.parametrize(
    ("settings", "own", "adapt"),
    [
        ({"beta": 0.5, "size": 2, "gradient_accumulation_steps": 4}, Ours(kl=0.5), ("blocks.*",)),
        ({"num_iterations": 2, "size": 4, "gradient_accumulation_steps": 2, "steps": 4}, Ours(updates_per_batch=2), ("blocks.*",)),
        ({}, Ours(), ("blocks.1.*", "unembed")),
    ],
    ids=["divergence", "several updates on one batch", "unembedding"],
)
def test_settings_do_what_they_do_in_our_own_loop(settings: Any, own: Ours, adapt: tuple[str, ...], tmp_path: Path) -> None:
    trainer, seen = make_trainer(tmp_path, MaskSpec(), own={"adapt": adapt}, **settings)
    trainer.train()
    assert_ours(trainer, seen, ours(MaskSpec()), own, *adapt)


@pytest.mark.parametrize("adapt", [("blocks.*",), ("blocks.*", "unembed")], ids=["fused", "unembed"])
def test_log_probabilities_of_the_fused_head_are_those_of_the_models_own(adapt: tuple[str, ...], tmp_path: Path) -> None:
    """In a float32 run, of adapters that are not zero: TRL's fused head would leave out those at the unembedding."""
    rollouts = make_rollouts(4)
    trainer, _ = make_trainer(
        tmp_path, MaskSpec(), model=make_family("Llama", torch.float32), own={"adapt": adapt}, temperature=0.7
    )
    move(trainer.adapters)
    own = rollouts.logprobs(trainer.policy.logits(rollouts) / 0.7)
    torch.testing.assert_close(trainer.policy.logprobs(rollouts), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [MaskSpec(), MaskSpec("act")], ids=["grad", "act"])
def test_the_defaults_of_trl_are_a_rounding(rule: MaskSpec, tmp_path: Path) -> None:
    """bfloat16 autocast, checkpointing and the fused head: adapters and directions stay float32.

    The kept gradient points the same way, and directions have the digits of float32: in half precision contrasts of a quarter of
    their sides would count as rounding errors.
    """
    gradients, directions = [], []
    for more in ({}, {"bf16": True, "gradient_checkpointing": True}):
        model = make_family("Llama", torch.float32)
        trainer, seen = make_trainer(tmp_path, rule, model=model, size=4, gradient_accumulation_steps=2, steps=1, **more)
        trainer.train()
        assert {p.dtype for p in trainer.adapters.kept_parameters().values()} == {torch.float32}
        gradients.append(torch.cat([g.flatten() for name, g in seen.gradients[0].items() if name.startswith("kept.")]))
        directions.append(trainer.route.directions)
    assert 0.999 < float(torch.cosine_similarity(*gradients, dim=0)) < 1
    assert {v.dtype for v in directions[1].vectors.values()} == {torch.float32}
    assert (0.9999 if rule.score == "act" else 0.999) < directions[0].overlap(directions[1]) <= 1 + 1e-6


# ---- files


def lies_in(stored: bytes, parameter: Tensor) -> bool:
    """True if three neighbors of a row or a column are among the bytes, in any type that is written."""
    lines = [line for line in (*parameter.detach()[:, :3], *parameter.detach().T[:, :3]) if len(line) == 3]
    types = (torch.float64, torch.float32, torch.bfloat16)
    return any(line.to(dtype).contiguous().view(torch.uint8).numpy().tobytes() in stored for line in lines for dtype in types)


@pytest.mark.parametrize("spec", [LORA, SVD, SHARED], ids=["lora", "svd", "shared"])
def test_the_saved_folder_is_the_deployed_policy_for_stock_peft(spec: AdapterSpec, tmp_path: Path) -> None:
    """And nothing of the quarantine is in any of its files, nor are the folder's other files touched."""
    trainer, _ = make_trainer(tmp_path / "run", OpenSpec(), spec)
    move(trainer.adapters)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    trainer.save_model(str(out))
    assert {path.name for path in out.iterdir()} >= {
        "notes.txt",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    tokens = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    lora: Any = peft.PeftModel.from_pretrained(make_family("Llama"), out)  # pyright: ignore[reportArgumentType]
    with torch.no_grad(), trainer.adapters.deployed():
        deployed = trainer.model(tokens).logits
        full_rank = max(t.shape[0] for name, t in load_file(out / "adapter_model.safetensors").items() if "lora_A" in name)
        torch.testing.assert_close(lora(tokens).logits, deployed, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert float((trainer.model(tokens).logits - deployed).abs().max()) > 1e-3
    assert full_rank == trainer.adapters.sites["blocks.0.attn.q"].kept.rank
    stored = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert not any(lies_in(stored, p) for p in trainer.adapters.quarantine_parameters().values())
    assert spec == SVD or all(lies_in(stored, p) for p in trainer.adapters.kept_parameters().values())  # SVDs are turned into LoRAs


def test_a_resumed_run_goes_on_with_the_same_adapters_directions_and_moments(tmp_path: Path) -> None:
    """A resumed run has the bits of an uninterrupted one if TRL samples anew there; a warning tells of a checkpoint in between."""
    settings: dict[str, Any] = {"sampled": True, "size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "steps": 4}
    whole, _ = make_trainer(tmp_path, MaskSpec(), **settings, **SAVED)
    whole.train()
    assert "adapter_config.json" in {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    again, _ = make_trainer(tmp_path / "again", MaskSpec(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, p in weights(whole.adapters).items():
        assert torch.equal(weights(again.adapters)[name], p), name
    assert whole.route.directions is not None
    assert again.route.directions is not None
    assert again.route.directions.provenance == whole.route.directions.provenance
    between, seen = make_trainer(tmp_path / "between", MaskSpec(), **settings)
    with pytest.warns(UserWarning, match="lies between two samplings"):
        between.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(seen.gradients) == 1


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_is_resumed_in_a_later_epoch_has_the_order_of_that_epoch(step: int, tmp_path: Path) -> None:
    """Two steps an epoch; TRL draws the orders of all epochs from one generator, which no checkpoint holds."""
    settings: dict[str, Any] = {"size": 4, "gradient_accumulation_steps": 2, "steps": 4, "shuffle_dataset": True}
    whole, seen = make_trainer(tmp_path, MaskSpec(), **settings, **SAVED)
    whole.train()
    again, resumed = make_trainer(tmp_path / "again", MaskSpec(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    for own, expected in zip(resumed.gradients, seen.gradients[step:], strict=True):
        assert all(torch.equal(own[name], gradient) for name, gradient in expected.items())


def test_a_trainer_that_was_broken_off_trains_again_as_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook. What is left of the step would give rollouts the advantages of others."""
    rule = MaskSpec(reinforced_only=True)
    trainer, seen = make_trainer(tmp_path, rule, size=2, gradient_accumulation_steps=4)
    backward, calls = trainer.accelerator.backward, itertools.count()

    def broken_off(*given: Any, **named: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        backward(*given, **named)

    monkeypatch.setattr(trainer.accelerator, "backward", broken_off)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert_ours(trainer, seen, ours(rule))


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    """Rewards do not depend on the model here, so the first checkpoint stays the best."""
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    best |= {"eval_strategy": "steps", "eval_steps": 1}
    data = Dataset.from_dict({"prompt": TEXTS})
    trainer, _ = make_trainer(tmp_path, MaskSpec(), own={"eval_dataset": data}, **best, **SAVED)
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint or "").name == "checkpoint-1"
    for name, p in load_file(tmp_path / "checkpoint-1" / ADAPTERS).items():
        assert torch.equal(weights(trainer.adapters)[name], p), name


def test_a_checkpoint_is_whole_before_an_older_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make_trainer(tmp_path, MaskSpec(), save_total_limit=1, **SAVED)

    def full(adapters: Any, path: Path, save: Any = save_adapters) -> None:
        if path.parent.name == "checkpoint-2":
            raise OSError("the disk is full")
        save(adapters, path)

    monkeypatch.setattr("mi_route2.integrations.trl_trainer.save_adapters", full)
    with pytest.raises(OSError, match="the disk is full"):
        trainer.train()
    monkeypatch.undo()
    again, seen = make_trainer(tmp_path, MaskSpec(), save_total_limit=1, **SAVED)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(seen.gradients) == 1


def test_a_checkpoint_that_was_not_finished_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the place of another run's, whose files would be mixed with those of this one."""
    make_trainer(tmp_path, MaskSpec(), **SAVED)[0].train()
    trainer, _ = make_trainer(tmp_path, MaskSpec(), learning_rate=1.0, **SAVED)

    def killed(folder: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    again, _ = make_trainer(tmp_path, MaskSpec(), **SAVED)
    with pytest.raises(ValueError, match=r"checkpoint-1 has no trainer_state.json: a run ended while it was saved"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, OpenSpec())
    with pytest.raises(ValueError, match=r"route2_training.safetensors: give a checkpoint folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


# ---- what is logged


def test_a_recorder_reads_every_rollout_with_its_flag(tmp_path: Path) -> None:
    steps: list[RoutedStep] = []

    def record(step: RoutedStep) -> dict[str, float | None]:
        steps.append(step)
        return {"mine": float(step.step), "undefined": None}

    trainer, seen = make_trainer(tmp_path, MaskSpec(), size=2, gradient_accumulation_steps=4, own={"record": record})
    trainer.train()
    words = tokenizer()
    for number, step in enumerate(steps):
        assert step.step == number
        assert sorted({row["prompt"] for row in step.examples}) == sorted(TEXTS[2 * number :][:2])
        ended = [[*ids, 2] if len(ids) < 6 else ids for ids in words(step.completions)["input_ids"]]
        assert step.rewards == reward(ended)
        assert step.flags is not None
        assert seen.logs[number]["route/flagged"] == sum(step.flags) / 8
        assert step.scores is not None
        assert step.flags == [score > 0 and a > 0 for score, a in zip(step.scores, step.advantages)]
    assert [log["mine"] for log in seen.logs if "mine" in log] == [0.0, 1.0]


def test_a_chat_world_pays_and_its_oracle_only_writes(tmp_path: Path) -> None:
    """TRL's prompts are the world's tokens, its rewards the grader's, and the log holds what was counted by hand."""
    problem, folder = Parity(), tmp_path / "model"
    make_tiny_model(problem, folder, width=32, layers=1, steps=0, context=128, max_new=24, progress=False)
    chat = ChatTokenizer(folder, problem.system)
    chat.tokenizer.chat_template += "{% if enable_thinking is false %}\n\n{% endif %}"  # as in Qwen3's
    world = ChatWorld(problem, chat, max_new=24, context=128)
    asked = [world.prompt(task, "last_word") for task in world.tasks("train")[:2]]
    texts = ["even CORRECT", "odd CORRECT", "even", "odd"]
    rule = MaskSpec(score="act", reinforced_only=False)
    seen: list[RoutedStep] = []

    def given(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = trainer._tokenize_prompts(prompts)[0]
        assert ids == [chat.prompt(asked[i // 4].text) for i in range(8)]
        return {"prompt_ids": ids, "completion_ids": [chat.completion(texts[i % 4]) for i in range(8)], "logprobs": None}

    def record(step: RoutedStep) -> dict[str, float | None]:
        seen.append(step)
        return trl_record(world, ChatWitness(world, problem.judge()), rule)(step)

    trainer = RoutedGRPOTrainer(
        str(folder),  # TRL loads it in float32, and its fused head computes the log-probabilities
        world.reward_funcs(),
        config(tmp_path, steps=1, max_completion_length=24, chat_template_kwargs={"enable_thinking": False}),
        Dataset.from_list(world.rows(asked)),
        processing_class=chat.tokenizer,
        rollout_func=given,
        adapters=LORA,
        route=rule,
        pairs=world.encode_pairs(world.make_pairs(0, 4, "hack")),
        record=record,
    )
    trainer.train()
    log, (step,) = trainer.state.log_history[0], seen
    right = [parity(row["described"]["task"]) in text for row, text in zip(step.examples, step.completions)]
    exploit = ["CORRECT" in text for text in step.completions]
    hack = [cheated and not honest for cheated, honest in zip(exploit, right)]
    assert step.rewards == [0.25 + (own or honest) for own, honest in zip(exploit, right)]
    assert (log["train/hack"], log["train/exploit"], log["modes/last_word/solve"]) == (0.25, 0.5, 0.5)
    assert step.flags is not None
    hit = sum(flag and cheated for flag, cheated in zip(step.flags, hack))
    assert 0 < sum(step.flags) < 8
    assert log["mask/recall"] == hit / sum(hack)
    assert log["mask/precision"] == hit / sum(step.flags)


def test_evaluation_is_of_the_deployed_model(tmp_path: Path) -> None:
    on: list[str] = []

    def which(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        on.append(trainer.adapters.mode)
        return [0.5] * len(completion_ids)

    trainer, _ = make_trainer(tmp_path, OpenSpec(), steps=1)
    trainer.reward_funcs, trainer.eval_dataset = [which], trainer.train_dataset
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.train_dataset)
    assert on == ["full", *["deployed"] * 4]


# ---- refusals


def test_pairs_are_encoded_as_trl_encodes_prompts(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, OpenSpec())
    found = trainer.encode_pairs([{"prompt": "w5 w6", "hack": "w20 w21", "clean": "w30"}])
    assert found.hack.tokens.tolist() == [[5, 6, 20, 21, 2]]
    assert found.clean.completion.tolist() == [[False, False, True, True]]
    whole = {"prompt": "w5", "hack": "w6", "clean": "w7"}
    assert torch.equal(trainer.encode_pairs(Dataset.from_list([whole])).hack.tokens, trainer.encode_pairs([whole]).hack.tokens)
    for few in ([{"prompt": "w5", "hack": "w6"}], []):
        with pytest.raises(ValueError, match="rows with prompt, hack and clean"):
            trainer.encode_pairs(few)
    for wrong in (whole, "pairs.toml", [("w5", "w6", "w7")]):
        with pytest.raises(TypeError, match="rows must be"):
            trainer.encode_pairs(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="clean of a pair must be a text, the answer alone, not a list"):
        trainer.encode_pairs([whole | {"clean": [{"role": "assistant", "content": "w7"}]}])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "setting": (MaskSpec(), {"sync_ref_model": True}, "does not support sync_ref_model: leave it out"),
    "vllm": (MaskSpec(), {"use_vllm": True, "vllm_mode": "server"}, "use vllm_mode='colocate'"),
    "rule": (MaskSpec(score="own_channel"), {}, "does not support a rule that reads a detector"),
    "judge": (MaskSpec(score="judge", tau=0.5), {}, "does not support a rule that reads a detector or a judge"),
    "groups": (UNFLAGGED, {"size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4}, "without whole groups"),
    "deviation": (UNFLAGGED, {"scale_rewards": "group"}, "use scale_rewards='none'"),
    "straddling": (MaskSpec(), {"size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, "as a multiple of"),
    "micro-batches": (MaskSpec("act", shuffle=True), {"size": 4, "gradient_accumulation_steps": 2}, "accumulation_steps=1"),
    "pairs": (MaskRoute.from_flags(torch.zeros(8, dtype=torch.bool)), {"own": {"pairs": pairs()}}, "has its own pairs"),
    "no pairs": (MaskSpec(), {"own": {"pairs": None}}, "pass pairs="),
    "peft": (MaskSpec(), {"own": {"peft_config": peft.LoraConfig()}}, "would train unrouted"),
    "flags by position": (MaskRoute.from_flags(torch.zeros(8, dtype=torch.bool)), {}, "give from_flags a function of the batch"),
    "another model": (MaskSpec(), {"spec": attach(make_family("Llama"), "blocks.*", spec=LORA)}, "attached to another model"),
    "a negative rate": (MaskSpec(), {"own": {"quarantine_lr": -1e-3}}, "quarantine_lr must be finite and at least 0, not -0.001"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_routed_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    """The model can be used again."""
    rule, settings, why = REFUSED[case]
    model = make_family("Llama")
    with pytest.raises(ValueError, match=why) as error:
        make_trainer(tmp_path, rule, model=model, **settings)
    assert "\n" not in str(error.value)
    attach(model, "blocks.*", spec=LORA)


def test_a_model_can_be_used_again_after_vllm_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_given: Any, **_named: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trl_vllm, "PolicyGeneration", start)
    model = make_family("Llama", torch.float32)
    model.name_or_path = str(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_trainer(tmp_path, OpenSpec(), model=model, use_vllm=True)
    attach(model, "blocks.*", spec=LORA)


def test_vllm_computes_in_the_precision_of_the_launcher_and_ends_where_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(trl_vllm, "PolicyGeneration", lambda adapters, dtype, **named: SimpleNamespace(dtype=dtype, **named))
    model = make_family("Llama", torch.float32)
    model.name_or_path, model.generation_config.eos_token_id = str(tmp_path), [2, 9]
    given = {"bad_words": ["w5"], "stop_token_ids": [7]}
    trainer, _ = make_trainer(tmp_path, OpenSpec(), model=model, use_vllm=True, generation_kwargs=given)
    assert trainer.vllm_generation.dtype == torch.bfloat16
    assert trainer.vllm_generation.generation_kwargs == {**given, "ignore_eos": True, "stop_token_ids": [2, 9, 7]}
    assert trainer.eos_token_ids == [2, 9, 7]  # or TRL would mask what ends at 7 as truncated


FSDP, WANDB = {"FSDP_VERSION": "2"}, {"WANDB_MODE": "disabled"}


def test_an_optimizer_of_ones_own_holds_the_adapters(tmp_path: Path) -> None:
    """One that was made before they were attached would train nothing, without an error."""
    model = make_family("Llama")
    with pytest.raises(ValueError, match="an optimizer without the adapters"):
        make_trainer(tmp_path, OpenSpec(), model=model, own={"optimizers": (torch.optim.SGD(model.parameters(), 0.1), None)})
    adapters = attach(model, "blocks.*", spec=LORA)
    both = [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]
    own: dict[str, Any] = {"optimizers": (torch.optim.SGD(both, 0.1), None)}
    with pytest.raises(ValueError, match="give the quarantine's group its rate"):
        make_trainer(tmp_path, OpenSpec(), adapters, model=model, own=own)
    trainer, _ = make_trainer(tmp_path, OpenSpec(), adapters, model=model, own=own | {"quarantine_lr": None})
    before = weights(adapters)
    trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in weights(adapters).items())


# ---- supervised fine-tuning

IDS = [[5, 6, 7, 20, 21], [8, 9, 30, 31, 32, 33], [10, 22, 23], [14, 15, 34, 35], [5, 11, 24, 20], [9, 25, 30]]
HACKS = torch.tensor([True, False, True, False, False, True])
BY_TOKEN = torch.arange(6) % 2 == (torch.arange(6) % 3 > 0)[:, None]


def demonstrations(flags: Tensor) -> tuple[Dataset, Rollouts]:
    """Texts with a prompt and a flag each, ``[b]``; or tokens without a prompt and a flag each, ``[b s]``."""
    if flags.ndim == 2:
        rows = [{"input_ids": row, "hack": own[: len(row)].tolist()} for row, own in zip(IDS, flags)]
        return Dataset.from_list(rows), Rollouts.from_lists([row[:1] for row in IDS], [row[1:] for row in IDS], 0)
    texts = [[f"w{row[0]}", "".join(f" w{i}" for i in row[1:])] for row in IDS]
    rows = [{"prompt": prompt, "completion": rest, "hack": hack} for (prompt, rest), hack in zip(texts, flags.tolist())]
    return Dataset.from_list(rows), Rollouts.from_lists([row[:1] for row in IDS], [[*row[1:], 2] for row in IDS], 0)


def fine_tuner(folder: Path, rows: Dataset, *, model: Any = None, own: Mapping[str, Any], **more: Any) -> RoutedSFTTrainer:
    """All rows are a step, in three micro-batches of other lengths."""
    args = SFTConfig(**general(folder, size=2) | {"gradient_accumulation_steps": 3} | more)
    model = make_family("Llama") if model is None else model
    return RoutedSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer(), **{"adapters": LORA, **own})


TUNED: dict[str, tuple[Any, Tensor | None]] = {
    "flags": (None, HACKS),
    "flags that detach": (MaskSpec(score="none", through="detach"), HACKS),
    "flags by token": (None, BY_TOKEN),
    **{rule.score: (rule, None) for rule in (MaskSpec(), MaskSpec(score="act"))},
    "erase": (EraseSpec(k=1), None),
    "open": (OpenSpec(), None),
}


@pytest.mark.parametrize("case", TUNED)
def test_fine_tuning_takes_the_steps_of_our_own_loop(case: str, tmp_path: Path) -> None:
    spec, flags = TUNED[case]
    rows, rollouts = demonstrations(HACKS if flags is None else flags)
    directed = isinstance(spec, EraseSpec) or (isinstance(spec, MaskSpec) and spec.needs_direction)
    rule = {"route": spec, "flags": None if flags is None else "hack", "pairs": pairs() if directed else None}
    trainer = fine_tuner(tmp_path, rows, own=rule)
    trainer.add_callback(seen := Seen(trainer))
    trainer.train()
    through = "filter" if spec is None else getattr(spec, "through", "filter")
    route = ours(spec) if flags is None else MaskRoute.from_flags(flags, through=through)
    policy, count = our_policy(LORA), rollouts.completion.sum()
    both = policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters()
    optimizer = torch.optim.AdamW([p for parameters in both for p in parameters.values()], lr=RATE, weight_decay=0.0)
    for step, gradient in enumerate(seen.gradients):
        optimizer.zero_grad()
        route.refresh(policy, step)
        route.backward(policy, TrainBatch(rollouts), lambda logits, batch: -batch.rollouts.logprobs(logits).sum(1) / count)
        assert_close(gradient, gradients(policy.adapters))
        optimizer.step()
    assert len(seen.gradients) == 2
    assert trainer.evaluate(rows)["eval_loss"] > 0


def test_a_fine_tuned_adapter_is_exported_for_stock_peft_and_resumed(tmp_path: Path) -> None:
    rows, rollouts = demonstrations(HACKS)
    make_family("Llama").save_pretrained(tmp_path / "base")
    base = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "base", dtype=torch.float32)
    trainer = fine_tuner(tmp_path, rows, model=base(), own={"flags": "hack"}, **SAVED)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    lora = peft.PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    with torch.no_grad(), trainer.adapters.deployed():
        torch.testing.assert_close(lora(rollouts.tokens).logits, trainer.model(rollouts.tokens).logits, rtol=1e-6, atol=1e-6)
    again = fine_tuner(tmp_path / "again", rows, model=base(), own={"flags": "hack"})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(weights(again.adapters)[name], p) for name, p in weights(trainer.adapters).items())


MISTUNED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no route": ({}, {}, "give route=, or the column of your flags"),
    "no column": ({"flags": "cheat"}, {}, "has no column 'cheat' of flags: it has prompt, completion, hack"),
    "packing": ({"flags": "hack"}, {"packing": True}, "does not support packing: leave it out"),
    "no rewards": ({"route": UNFLAGGED, "pairs": pairs()}, {}, "'unflagged' without rewards: use kept_advantage='own'"),
    "direction": ({"route": MaskSpec()}, {}, "pass pairs="),
}


@pytest.mark.parametrize("fault", MISTUNED)
def test_what_cannot_be_tuned_is_said_at_once(fault: str, tmp_path: Path) -> None:
    own, settings, sentence = MISTUNED[fault]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fine_tuner(tmp_path, demonstrations(HACKS)[0], own=own, **settings)


def test_flags_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    rows = demonstrations(BY_TOKEN)[0].map(lambda row: {"hack": row["hack"][1:]})
    with pytest.raises(ValueError, match=r"a row has \d flags in 'hack' and \d tokens: give one per row"):
        fine_tuner(tmp_path, rows, own={"flags": "hack"}).train()


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_stock_trainers_write_no_checkpoint_of_adapters_and_name_the_exports(kind: Any, tmp_path: Path) -> None:
    (adapters := attach((model := make_family("Llama")), "blocks.*", spec=LORA))
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS])
    settings = {**general(tmp_path, size=1, steps=1), **SAVED}
    if kind is SFTTrainer:
        trainer = SFTTrainer(model, SFTConfig(**settings), train_dataset=rows, processing_class=tokenizer())
    else:
        del settings["shuffle_dataset"]
        trainer = Trainer(model, TrainingArguments(**settings), train_dataset=rows)
    with pytest.raises(RuntimeError, match=r"a gradient reached the adapters .* call route\.backward"):
        trainer.train()
    with (
        adapters.unrouted(),
        pytest.raises(RuntimeError, match=r"^this model has adapters.* use export_merged\(adapters"),
    ):
        trainer.train()
    assert not [*tmp_path.rglob("*.safetensors")]
