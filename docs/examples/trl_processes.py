"""Compare the first step of trl_grpo.py in one process with the same step in two: ``python docs/examples/trl_processes.py``.

TRL samples on each process for itself, so two processes would answer otherwise than one. Here one process samples, and two get its
completions. What they compute must be the same: gradients of both adapters, and flags. The numbers are in ``comparison.json``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from trl_grpo import Settings, make_trainer


@dataclass(frozen=True)
class Comparison:
    """Settings of the comparison.

    Attributes:
        out: Output folder.
        dtype: Type of the weights and of the computation.
        seed: Seed of prompts, adapters and samples.
        prompts: Prompts of the step.
        group: Completions of each prompt.
    """

    out: Path = Path("runs/trl_processes")
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 0
    prompts: int = 2
    group: int = 4


class Gradients(TrainerCallback):
    """Callback that writes the gradients of the step, on the main process."""

    trainer: Any = None

    def __init__(self, file: Path):
        self._file = file

    def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
        adapters = self.trainer.adapters
        pairs = {"kept": adapters.kept_parameters(), "quarantine": adapters.quarantine_parameters()}
        found = {f"{name}.{key}": p.grad for name, parameters in pairs.items() for key, p in parameters.items()}
        if self.trainer.accelerator.is_main_process:
            save_file(found, self._file)


def step(comparison: Comparison) -> None:
    """Run the step in this process and keep its completions, or in its share of two processes, with those completions."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    file = comparison.out / "completions.json"
    stored: list[Any] = json.loads(file.read_text()) if processes > 1 else []

    def given(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        own = stored[trainer.accelerator.process_index * len(prompts) :][: len(prompts)]
        assert [row["prompt"] for row in own] == list(prompts)
        ids = trainer._tokenize_prompts(list(prompts))[0]
        return {"prompt_ids": ids, "completion_ids": [row["completion"] for row in own], "logprobs": None}

    seen = Gradients(comparison.out / f"gradients-{processes}.safetensors")
    settings = Settings(comparison.out / "trainer", 1, comparison.seed, comparison.prompts, comparison.group)
    trainer = make_trainer(settings, comparison.dtype, callbacks=[seen], rollout_func=given if stored else None)
    reward: Any = trainer.reward_funcs[0]

    def heard(prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
        if not stored:
            rows = [{"prompt": prompt, "completion": ids} for prompt, ids in zip(prompts, completion_ids)]
            file.write_text(json.dumps(rows))
        return reward(prompts=prompts, completion_ids=completion_ids, **columns)

    seen.trainer, trainer.reward_funcs = trainer, [heard]
    trainer.train()
    if trainer.is_world_process_zero():
        flagged = trainer.state.log_history[0]["route/flagged"]
        (comparison.out / f"flagged-{processes}.json").write_text(json.dumps(flagged))


def main(comparison: Comparison) -> None:
    comparison.out.mkdir(parents=True, exist_ok=True)
    step(comparison)
    if "WORLD_SIZE" in os.environ:
        return
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no"]
    subprocess.run([*launch, *sys.argv], check=True)
    one, two = (load_file(comparison.out / f"gradients-{n}.safetensors") for n in (1, 2))
    gap, largest = (max(float(t.abs().max()) for t in ts) for ts in ([two[name] - g for name, g in one.items()], one.values()))
    flagged = [json.loads((comparison.out / f"flagged-{n}.json").read_text()) for n in (1, 2)]
    print(f"gradients of {len(one)} factors differ by at most {gap:.1e}, and the largest is {largest:.1e}; flagged: {flagged}")
    rollouts = comparison.prompts * comparison.group
    found = {"factors": len(one), "gap": gap, "largest": largest, "flagged": [round(rollouts * share) for share in flagged]}
    settings = {"dtype": comparison.dtype, "seed": comparison.seed, "rollouts": rollouts}
    (comparison.out / "comparison.json").write_text(json.dumps(settings | found | {"torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Comparison, description=__doc__))
