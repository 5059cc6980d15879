"""TRL's GRPO on a tiny real Llama in float64: the trainer, its data, and our own loop on the same rollouts.

Completions are drawn from the prompt and the rollout's number in its group, through TRL's ``rollout_func``: however the batch is
cut over micro-batches and processes, the rollouts are the same.
"""

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1", HF_DATASETS_OFFLINE="1")

import accelerate.utils.imports as packages
import torch
from datasets import Dataset
from families import VOCAB, make_family
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from mi_route2 import AdapterSpec, MaskSpec, PairBatch, Policy, Rollouts, StepContext, TrainBatch, attach
from mi_route2.integrations.trl import RoutedGRPOTrainer
from mi_route2.rollouts import group_advantages
from mi_route2.routing import EraseSpec, Route
from mi_route2.validation import validated
from studies.training.grpo import Update, update, with_anchors
from studies.training.settings import Settings

# Or accelerate parses a package's metadata each time that it asks whether the package is there, many times for each trainer.
packages._is_package_available = functools.cache(packages._is_package_available)

GROUP, PROMPTS, LONGEST = 4, 2, 6
TEXTS = ["w5 w6 w7", "w8 w9 w16", "w10 w11", "w14 w15"]
"""Prompts of one length in each step: left padding shifts positions, and transformers computes rotary angles in float32."""
UNEVEN = ["w5", "w8 w9 w16 w17", "w10 w11", "w14 w15 w18"]
"""Prompts that are padded: our loop pads on the right, TRL on the left."""
RATE, QUARANTINE_RATE = 1e-2, 3e-3
LORA = AdapterSpec("lora", rank=3, quarantine_rank=2)


def tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a word: ``w5`` is token 5, or the words from 5 on; 0 is the padding and 2 the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    named = dict(enumerate(words, 5))
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {named.get(i, f"w{i}"): i for i in range(3, VOCAB)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", padding_side="left")


def drawn(text: str, number: int) -> list[int]:
    """Return the completion of a prompt's rollout ``number``: 2 to 6 tokens, the last one the end if there is room for it."""
    seed = int.from_bytes(hashlib.sha256(f"{text} {number}".encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
    ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return ids if length == LONGEST else [*ids[:-1], 2]


def rollouts(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """TRL's ``rollout_func``."""
    first = trainer.accelerator.process_index * len(prompts) % GROUP  # a group may lie on several processes
    count: Counter[str] = Counter(dict.fromkeys(prompts, first))
    completions = []
    for text in prompts:
        completions.append(drawn(text, count[text]))
        count[text] += 1
    return {"prompt_ids": trainer.processing_class(list(prompts))["input_ids"], "completion_ids": completions, "logprobs": None}


def reward(completion_ids: Sequence[Sequence[int]], **_columns: Any) -> list[float]:
    return [(sum(ids) * 7 % 5) / 4 for ids in completion_ids]


def pairs() -> PairBatch:
    prompts = [[5, 6], [7, 8, 9], [10, 11]]
    hack, clean = [[20, 21, 2], [20, 22, 2], [20, 21, 23, 2]], [[30, 31, 2], [32, 30, 2], [33, 34, 2]]
    return PairBatch(Rollouts.from_lists(prompts, hack, 0), Rollouts.from_lists(prompts, clean, 0), "tiny")


def general(folder: Path | str, size: int, steps: int = 2) -> dict[str, Any]:
    """Settings of any trainer, with ``size`` rows in a micro-batch."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": size,
        "max_steps": steps,
        "gradient_checkpointing": False,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }


def config(folder: Path | str, *, size: int = GROUP * PROMPTS, steps: int = 2, **more: Any) -> GRPOConfig:
    """Settings with ``size`` rollouts in a micro-batch."""
    usual: dict[str, Any] = {
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "loss_type": "dr_grpo",
        "use_bias_correction_kl": False,  # TRL's default multiplies K3 by the importance ratio, which has another gradient
        "scale_rewards": "none",
    }
    return GRPOConfig(**(general(folder, size, steps) | usual | more))


@dataclass
class Seen(TrainerCallback):
    """Gradients of every optimizer step (after clipping), and what was logged."""

    trainer: Any = None
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
        self.gradients.append(gradients(self.trainer.adapters))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_named: Any) -> None:
        self.logs.append(dict(logs or {}))


def named(adapters: Any) -> dict[str, torch.nn.Parameter]:
    kept = {f"kept.{name}": p for name, p in adapters.kept_parameters().items()}
    return kept | {f"quarantine.{name}": p for name, p in adapters.quarantine_parameters().items()}


def gradients(adapters: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named(adapters).items()}


def weights(adapters: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named(adapters).items()}


def make_trainer(
    folder: Path | str,
    route: Any,
    spec: Any = LORA,
    *,
    sampled: bool = False,
    own: Mapping[str, Any] | None = None,
    model: Any = None,
    texts: Sequence[str] = TEXTS,
    data: Any = None,
    kind: type[RoutedGRPOTrainer] = RoutedGRPOTrainer,
    **settings: Any,
) -> tuple[RoutedGRPOTrainer, Seen]:
    """Return a trainer with its callback; ``sampled`` lets the model write the completions itself."""
    seen = Seen()
    direction = isinstance(route, EraseSpec) or (isinstance(route, MaskSpec) and route.needs_direction)
    trainer = kind(
        make_family("Llama") if model is None else model,
        reward,
        config(folder, **settings),
        Dataset.from_dict({"prompt": [*texts]}) if data is None else data,
        processing_class=tokenizer(),
        rollout_func=None if sampled else rollouts,
        callbacks=[seen],
        adapters=spec,
        route=route,
        **{"pairs": pairs() if direction else None, "quarantine_lr": QUARANTINE_RATE, **(own or {})},
    )
    seen.trainer = trainer
    return trainer, seen


@validated
class Ours(Settings):
    """Settings of our own loop, equal to those of ``config``."""

    max_norm: float = 1e9
    prompts: int = PROMPTS
    group: int = GROUP
    steps: int = 2


def our_batch(step: int, prompts: Sequence[str] = TEXTS) -> TrainBatch:
    """The rollouts of an optimizer step, right-padded as ours are."""
    texts = [text for text in prompts[step % 2 * PROMPTS :][:PROMPTS] for _ in range(GROUP)]
    completions = [drawn(text, i % GROUP) for i, text in enumerate(texts)]
    made = Rollouts.from_lists([[int(word[1:]) for word in text.split()] for text in texts], completions, 0)
    rewards, groups = torch.tensor(reward(completions), dtype=torch.float64), torch.arange(len(texts)) // GROUP
    return TrainBatch(made, rewards, group_advantages(rewards, groups), groups, torch.zeros(len(texts), dtype=torch.bool))


def our_policy(spec: AdapterSpec, *adapt: str) -> Policy:
    """The same model and adapters as ``make_trainer``'s."""
    model = make_family("Llama")
    return Policy(model, attach(model, *(adapt or ("blocks.*",)), spec=spec, generator=torch.Generator().manual_seed(3)))


def our_loop(
    policy: Policy, route: Route, settings: Ours, prompts: Sequence[str] = TEXTS
) -> tuple[list[dict[str, Tensor]], list[Update]]:
    """Run our own loop; return the gradients of each optimizer step, and what each update reported."""
    adapters = policy.adapters
    groups: list[dict[str, object]] = [
        {"params": list(adapters.kept_parameters().values())},
        {"params": list(adapters.quarantine_parameters().values()), "lr": QUARANTINE_RATE},
    ]
    optimizer = torch.optim.AdamW(groups if adapters.has_quarantine else groups[:1], lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)
    seen, updates = [], []
    for step in range(settings.steps):
        route.refresh(policy, step)
        batch = with_anchors(policy, our_batch(step, prompts), settings)
        for _ in range(settings.updates_per_batch):
            context = StepContext(torch.Generator().manual_seed(step))
            updates.append(update(policy, route, optimizer, batch, context, settings, LONGEST))
            seen.append(gradients(adapters))
    return seen, updates
