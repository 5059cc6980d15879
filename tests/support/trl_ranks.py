"""Ranks of TRL's loop with a route, which tests/mi_route2/integrations/test_trl.py runs under ``accelerate launch``.

trl_ranks.py OUT FSDP.yaml      two processes, then four

    OUT/<how>/<case>-<rank>.safetensors     gradients of each optimizer step, and final weights
    OUT/<how>/<case>.json                   what was flagged in each step
    OUT/run                                 what a run on a sharded model left: see ``run``

How: two processes under DDP; two and four under FSDP2, as the launcher's configuration has it.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, patch_environment
from datasets import Dataset
from families import make_family, move
from safetensors.torch import save_file
from tiny_trl import GROUP, LORA, PROMPTS, TEXTS, make_trainer, reward, weights
from torch.distributed import GradBucket
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec
from mi_route2.adapters import save_adapters
from mi_route2.integrations.trl import RoutedGRPOTrainer
from mi_route2.rollouts import Rollouts
from mi_route2.routing import CanarySpec, EraseSpec
from mi_route2.routing.canary import CanaryRoute


class Sharding(RoutedGRPOTrainer):
    """The trainer with accelerate's FSDP, as the launcher's configuration has it.

    accelerate leaves FSDP out where there is no accelerator, without a word; torch shards over gloo as over NCCL.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


SVD = AdapterSpec("svd", rank=5, quarantine_rank=2)
SHARED = AdapterSpec("lora", rank=3, quarantine="shared")


def by_token(rollouts: Rollouts) -> torch.Tensor:
    """A canary that likes what TRL's reward likes not: a number of each token."""
    return torch.nn.functional.pad(rollouts.tokens[None, :, 1:].double() % 11 - 5, (0, 1))


def samples(last: range) -> Rollouts:
    """Samples of a base, one for each last token."""
    return Rollouts.from_lists([[5]] * len(last), [[i, 2] for i in last], 0)


RANKED: dict[str, tuple[Any, AdapterSpec, dict[str, Any]]] = {
    "pooled": (MaskSpec(), LORA, {}),
    "detached": (MaskSpec(unit="rollout", through="detach"), SVD, {}),
    "tokens": (MaskSpec(score="act", unit="token"), LORA, {"gradient_checkpointing": True}),
    "unflagged": (
        MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged"), LORA, {"gradient_checkpointing": True},
    ),
    "erase": (EraseSpec(k=2, dispose="quarantine"), SHARED, {}),
    "flagged": (MaskRoute.from_flags(lambda batch: torch.ones(len(batch.rollouts), dtype=torch.bool)), LORA, {}),
    "emptied": (MaskRoute.from_flags(lambda batch: batch.rewards > 0.2, kept_advantage="unflagged"), LORA, {}),
    "canary": (CanaryRoute(CanarySpec(quantile=0.5, kept_advantage="own"), by_token, samples(range(3, 43))), LORA, {}),
}  # fmt: skip
"""Case -> rule, adapters and settings of TRL."""
HOWS = {
    "ddp-2": ["pooled", "detached", "unflagged", "erase"],
    "fsdp-2": [case for case in RANKED if case != "pooled"],
    "fsdp-4": ["pooled"],  # a group is in two processes
}
"""How -> cases: each in one of them at least, as the trainer averages the gradients itself, under DDP as under FSDP."""


def ranked(out: Path, processes: int, kind: type[RoutedGRPOTrainer], cases: list[str]) -> None:
    """Train every case on the rollouts of one process."""
    out.mkdir(exist_ok=True)
    for name in cases:
        rule, adapters, settings = RANKED[name]
        # FSDP has checkpointing of its own, which puts layers into others
        own = kind is Sharding and name == "detached"
        with patch_environment(fsdp_activation_checkpointing=str(own)):
            trainer, seen = make_trainer(
                out / "trainer",
                rule,
                adapters,
                kind=kind,
                size=GROUP * PROMPTS // processes // 2,
                gradient_accumulation_steps=2,
                logging_strategy="no",
                own={"record": Told()},
                **settings,
            )
        assert trainer.accelerator.num_processes == processes
        trainer.add_callback(SentOnce(trainer))
        trainer.train()
        assert any(hasattr(p, "full_tensor") for p in trainer.model.parameters()) == (kind is Sharding)
        rank = trainer.accelerator.process_index
        gradients = {f"{step}/{n}": g for step, found in enumerate(seen.gradients) for n, g in found.items()}
        final = {f"weights/{n}": p for n, p in weights(trainer.adapters).items()}
        save_file({**gradients, **final}, out / f"{name}-{rank}.safetensors")
        _ = trainer.adapters.base_hash  # of all processes
        if rank == 0:
            save_adapters(trainer.adapters, out / f"{name}.adapters")
            (out / f"{name}.json").write_text(json.dumps(trainer._record.steps))


class SentOnce(TrainerCallback):
    """Callback under which DDP may send nothing: the trainer averages each gradient once itself."""

    def __init__(self, trainer: RoutedGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_given: Any, **_named: Any) -> None:
        wrapped = self.trainer.model_wrapped
        assert isinstance(wrapped, DistributedDataParallel) != isinstance(self.trainer, Sharding)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(None, self.refuse)

    @staticmethod
    def refuse(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        raise AssertionError(f"DDP sends {bucket.buffer().numel()} numbers")


class Told:
    """Recorder that keeps the flagged completions of all processes, and finds each with its own reward."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]] | None] = []

    def __call__(self, step: Any) -> dict[str, float | None]:
        assert len(step.examples) == GROUP * PROMPTS
        assert {row["prompt"] for row in step.examples} == set(TEXTS[step.step * PROMPTS :][:PROMPTS])
        assert step.rewards == reward(step.completion_ids)
        flags = step.flags
        self.steps.append(flags and sorted(ids for ids, flag in zip(step.completion_ids, flags) if flag))
        return {}


def run(out: Path, kind: type[RoutedGRPOTrainer], processes: int) -> None:
    """Sample, train, evaluate, save and resume a model of float32 with TRL's fused head.

    Completions are the likeliest ones, and every even token ends one: so processes sample completions of unequal lengths.
    """
    asked: dict[str, list[list[int]]] = {"train": [], "evaluated": []}

    def heard(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        asked["train" if trainer.model.training else "evaluated"] += completion_ids
        return [one + i % GROUP for i, one in enumerate(reward(completion_ids))]  # those of a group are equal

    ends = [*range(2, 50, 2)]
    settings: dict[str, Any] = {
        "size": GROUP * PROMPTS // processes,
        "sampled": True,
        "top_k": 1,
        "beta": 0.1,
        "save_strategy": "steps",
    }
    settings |= {"save_steps": 1, "generation_kwargs": {"eos_token_id": ends}, "logging_strategy": "no"}
    found = []
    for resumed in (None, str(out / "trainer" / "checkpoint-1")):
        trainer, seen = make_trainer(
            out / ("again" if resumed else "trainer"), MaskSpec(), kind=kind, model=make_family("Llama", torch.float32), **settings
        )
        trainer.reward_funcs, trainer.eval_dataset = [heard], Dataset.from_dict({"prompt": TEXTS})
        trainer.eos_token_ids = ends
        move(trainer.adapters)
        trainer.train(resume_from_checkpoint=resumed)
        found.append(weights(trainer.adapters))
        if not resumed:
            rank, gradients = trainer.accelerator.process_index, seen.gradients
            trainer.evaluate()
            trainer.save_model(str(out / "deployed"))
            (out / f"asked-{rank}.json").write_text(json.dumps(asked))
            save_file(
                {f"{step}/{n}": g for step, one in enumerate(gradients) for n, g in one.items()}, out / f"run-{rank}.safetensors"
            )
    assert all(torch.equal(found[0][name], p) for name, p in found[1].items())


def rank(out: Path) -> None:
    warnings.simplefilter("ignore")
    if os.environ["WORLD_SIZE"] == "4":
        ranked(out / "fsdp-4", 4, Sharding, HOWS["fsdp-4"])
    else:
        with patch_environment(accelerate_use_fsdp="false"):
            ranked(out / "ddp-2", 2, RoutedGRPOTrainer, HOWS["ddp-2"])
        ranked(out / "fsdp-2", 2, Sharding, HOWS["fsdp-2"])
        run(out / "run", Sharding, 2)
    PartialState().destroy_process_group()


def launch(out: Path, config: str, processes: int) -> None:
    """Start ``rank`` by ``accelerate launch``, but as forks of this process: an import of TRL takes each as long as its cases."""

    def forks(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
        assert entrypoint == sys.executable
        started = elastic_launch(replace(config, start_method="fork"), rank)
        return lambda *_command: started(out)

    told = ["--config_file", config, "--num_processes", str(processes), "--main_process_port", "0", __file__]
    with mock.patch("torch.distributed.run.elastic_launch", forks):
        launch_command(launch_command_parser().parse_args(told))


if __name__ == "__main__":
    gc.freeze()  # accelerate collects garbage before each training: all that was imported here, half of a process's time
    for processes in (2, 4):
        launch(Path(sys.argv[1]), sys.argv[2], processes)
