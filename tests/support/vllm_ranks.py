"""Ranks of TRL's loop whose completions each come from a vLLM of its own; tests/mi_route2/vllm/test_trl_on_vllm.py runs them.

torchrun ... vllm_ranks.py BASE OUT      writes OUT/rank-<r>.json: what vLLM and the policy differ by, and the adapters' checksums
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_trl import GROUP, PROMPTS, make_trainer
from transformers import AutoModelForCausalLM

from mi_route2 import MaskSpec
from mi_route2.rollouts import Rollouts

TEMPERATURE = 0.8


def digest(trainer: Any) -> str:
    """Return a checksum of all adapters."""
    tensors = trainer.adapters.tensors()
    return hashlib.sha256(b"".join(tensors[name].detach().numpy().tobytes() for name in sorted(tensors))).hexdigest()


def main(base: Path, out: Path) -> None:
    """Train two steps, and write what each call of vLLM gave."""
    rank = int(os.environ["RANK"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given: dict[str, Any] = {"use_vllm": True, "vllm_max_model_length": 64, "temperature": TEMPERATURE, "steps": 2}
    size = GROUP * PROMPTS // int(os.environ["WORLD_SIZE"])
    trainer, _ = make_trainer(out / f"run-{rank}", MaskSpec(score="grad"), model=model, sampled=True, size=size, **given)
    generate, gaps, digests = trainer.vllm_generation.generate, [], []

    def seen(prompts: Any, *args: Any, **named: Any) -> Any:
        found = generate(prompts, *args, **named)
        rows = Rollouts.from_lists(prompts, found[1], 0)
        with torch.no_grad():
            logits = trainer.accelerator.unwrap_model(trainer.model)(rows.tokens).logits / TEMPERATURE
        theirs = torch.tensor([kept[0] for row in found[2] for kept in row])
        gaps.append(float((rows.logprobs(logits)[rows.predictors] - theirs).abs().max()))
        digests.append(digest(trainer))
        return found

    trainer.vllm_generation.generate = seen
    trainer.train()
    told = {"gaps": gaps, "digests": [*digests, digest(trainer)], "steps": trainer.state.global_step}
    (out / f"rank-{rank}.json").write_text(json.dumps(told))
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # TRL never ends vLLM


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
