"""Predicted hours and memory of an arm on a GPU, from operations and the memory plan: ``python -m studies.training.cost``.

With P parameters, a token costs 2 P operations in a forward, 2 P in the backward through a frozen base (its weights get no
gradient), and 2 P more where blocks are recomputed. A score costs what its rule runs beside that: ``act`` a forward, ``full`` a
forward and a backward of its own, ``grad`` nothing. A step of decoding reads weights and cache once, which takes longer than
its operations. Nothing here was measured on a GPU.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from studies.common.tables import markdown_table
from studies.training.settings import CHAT_PRESETS, ChatModel, Settings
from studies.training.worlds import PROMPT as LONGEST
from studies.training.worlds import MemoryPlan, plan

PROMPT, COMPLETION = 600, 700
"""Assumed mean lengths in tokens of a LeetCode prompt and of its answer."""
EFFICIENCY = 0.4
"""Assumed share of the peak that training reaches."""
EXTRA: Mapping[str, int] = MappingProxyType({"vanilla, filters of a detector": 0, "grad": 0, "act": 2, "full": 6})
"""Rule -> operations per parameter and token beyond those of training."""
SIZES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"0.6B": (28, 1024, 3072, 16), "1.7B": (28, 2048, 6144, 16), "4B": (36, 2560, 9728, 32)}
)
"""Qwen3 -> layers, width, inner width and query heads."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: bfloat16 operations and bytes per second, and bytes of memory."""

    operations: float = 990e12
    bandwidth: float = 3.35e12
    memory: float = 80e9


def hours(settings: Settings, chat: ChatModel, memory: MemoryPlan, extra: int, card: Gpu) -> float:
    """Return the predicted hours of a run with ``extra`` operations per parameter and token for its score."""
    rollouts, parameters = settings.prompts * settings.group, memory.sizes["weights"] // 2
    per_token = (6 if chat.checkpointing else 4) + extra
    operations = rollouts * parameters * ((PROMPT + COMPLETION) * per_token + PROMPT * 2)
    cache = (memory.sizes["vLLM"] - memory.sizes["weights"]) * (PROMPT + COMPLETION / 2) / (LONGEST + chat.max_new)
    decoding = -(-rollouts // chat.at_once) * chat.max_new * (memory.sizes["weights"] + cache) / card.bandwidth
    return settings.steps * (operations / (EFFICIENCY * card.operations) + decoding) / 3600


def cost_table(preset: str = "qwen3-4b") -> str:
    """Return the table: one row per size of Qwen3, with the peaks of the memory plan under vLLM and the hours of each rule."""
    from transformers import Qwen3Config

    settings, how = CHAT_PRESETS[preset]
    body = []
    for size, (layers, width, inner, heads) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = Qwen3Config(
                vocab_size=151936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
            )  # fmt: skip
            config.save_pretrained(folder)
            chat = replace(ChatModel(folder, ""), device="cpu", **how)
            memory, full = (plan(replace(settings, chat=chat), chat, torch.bfloat16, True, full) for full in (False, True))
        times = [f"{hours(settings, chat, memory, extra, Gpu()):.1f}" for extra in EXTRA.values()]
        body.append([f"Qwen3-{size}", f"{memory.peak / 2**30:.0f}", *times, f"{full.peak / 2**30:.0f}"])
    return markdown_table(["model", "GiB", *EXTRA, "GiB of full"], body)


if __name__ == "__main__":
    print(cost_table(), end="")
