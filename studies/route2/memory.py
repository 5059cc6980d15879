"""What a run on a chat model will hold in memory, before it starts: an estimate from the config alone, in bytes.

weights       parameters in the run's precision
adapters      kept adapter and quarantine at every chosen Linear, in float32, with gradients and both Adam moments
activations   of one micro-batch of T tokens: with checkpointing one residual stream a block and one block's inner values, else
              the inner values of every block;  a block's inner values are ~ 8 d + 3 m + 2 (q + k + v) numbers a token
logits        T v numbers in float32, three times: logits, log-softmax, gradient
sampling      keys and values of ``at_once`` rows at full length
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from studies.route2.settings import ChatModel, Settings
from studies.route2.worlds import device_of

FLOAT = 4
PROMPT = 2048
"""Tokens that a prompt is taken to have."""
LACKING = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says of too little memory in errors of no kind of their own."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for, and what the device has (``None`` where that cannot be told)."""

    parts: dict[str, int]
    available: int | None

    @property
    def peak(self) -> int:
        """Sampling and training take turns: the larger of the two, on top of weights and adapters."""
        training = self.parts["activations"] + self.parts["logits"]
        return self.parts["weights"] + self.parts["adapters"] + max(training, self.parts["sampling"])

    def __str__(self) -> str:
        rows = [f"  {name:12} {_gib(size)}" for name, size in self.parts.items()]
        have = "" if self.available is None else f" of {_gib(self.available)}"
        return "\n".join(["memory plan, one worker:", *rows, f"  {'peak':12} {_gib(self.peak)}{have}"])


def plan(settings: Settings, chat: ChatModel, dtype: torch.dtype) -> MemoryPlan:
    """The plan of one worker. ``ValueError`` where the folder has no config that transformers knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(Path(chat.path), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    d, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or d // heads
    inner = getattr(config, "intermediate_size", None) or 4 * d
    size, tokens = dtype.itemsize, chat.token_budget
    block = 8 * d + 3 * inner + 2 * head * (heads + 2 * kv_heads)
    held = layers * d + block if chat.checkpointing else layers * block
    linears = [(d, heads * head), (d, kv_heads * head), (d, kv_heads * head), (heads * head, d), (d, inner), (d, inner), (inner, d)]
    rank = settings.quarantine_rank + (0 if settings.kept_rank is None else settings.kept_rank)
    adapters = layers * sum((a + b) * rank for a, b in linears)
    parts = {
        "weights": parameters * size,
        "adapters": 4 * FLOAT * adapters,
        "activations": tokens * held * size,
        "logits": 3 * FLOAT * tokens * vocabulary,
        "sampling": chat.at_once * min(config.max_position_embeddings, PROMPT + chat.max_new) * 2 * layers * kv_heads * head * size,
    }
    return MemoryPlan(parts, _available(device_of(chat)))


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is torch's or Python's word for too little memory."""
    lacking = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return lacking or (isinstance(error, RuntimeError) and any(word in str(error) for word in LACKING))


ADVICE = (
    "out of memory: choose a smaller token budget (--override chat.token_budget=8192), sample fewer completions at a time "
    "(chat.at_once=8), shorten them (chat.max_new=256), keep chat.checkpointing=true, or use --precision bfloat16; "
    "the same command goes on from the last checkpoint"
)


def _available(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
