"""One rank of TRL's loop with a route, which tests/mi_route2/integrations/test_trl.py runs under ``accelerate launch``.

accelerate launch ... trl_ranks.py OUT      writes OUT/<case>-<rank>.safetensors: gradients of each optimizer step, final weights

With FSDP2 in the launcher's configuration the base model is sharded, otherwise processes run under DDP.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from tiny_trl import GROUP, LORA, PROMPTS, TEXTS, make_trainer, reward, weights

from mi_route2 import AdapterSpec, MaskSpec
from mi_route2.integrations.trl import RoutedGRPOTrainer
from mi_route2.routing import EraseSpec


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


def counted(step: Any) -> dict[str, float]:
    """Recorder that finds the rollouts of both processes, each with its own reward."""
    assert len(step.examples) == len(step.flags) == GROUP * PROMPTS
    assert {row["prompt"] for row in step.examples} == set(TEXTS[step.step * PROMPTS :][:PROMPTS])
    assert step.rewards == reward(step.completion_ids)
    return {"recorded": len(step.flags)}


SVD = AdapterSpec("svd", rank=5, quarantine_rank=2)
SHARED = AdapterSpec("lora", rank=3, quarantine="shared")
RANKED: dict[str, tuple[Any, AdapterSpec, dict[str, Any]]] = {
    "pooled": (MaskSpec(), LORA, {"own": {"record": counted}}),
    "detached": (MaskSpec(unit="rollout", through="detach"), SVD, {}),
    "tokens": (MaskSpec(score="act", unit="token"), LORA, {"gradient_checkpointing": True}),
    "unflagged": (
        MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged"), LORA, {"gradient_checkpointing": True},
    ),
    "erase": (EraseSpec(k=2, dispose="quarantine"), SHARED, {}),
}  # fmt: skip
"""Case -> rule, adapters and settings of TRL."""
FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


def main(out: Path) -> None:
    warnings.simplefilter("ignore")
    processes = int(os.environ["WORLD_SIZE"])
    for name, (rule, adapters, settings) in RANKED.items():
        trainer, seen = make_trainer(
            out / "trainer",
            rule,
            adapters,
            kind=Sharding if FSDP else RoutedGRPOTrainer,
            size=GROUP * PROMPTS // processes // 2,
            gradient_accumulation_steps=2,
            logging_strategy="no",
            **settings,
        )
        assert trainer.accelerator.num_processes == processes
        trainer.train()
        steps = {f"{step}/{n}": g for step, gradients in enumerate(seen.gradients) for n, g in gradients.items()}
        final = {f"weights/{n}": p for n, p in weights(trainer.adapters).items()}
        save_file({**steps, **final}, out / f"{name}-{trainer.accelerator.process_index}.safetensors")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
