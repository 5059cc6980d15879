"""Adapters off their init on the micro model, and pairs made by hand: what every theorem of the tracing needs."""

import torch

from mi_route2.adapters import AdapterSpec
from mi_route2.hosts import Host, open_host
from mi_route2.rollouts import Policy
from studies.environments.micro.language import (
    CLASS,
    FENCE_OPEN,
    LOOPHOLES,
    MODES,
    NONE,
    SOLVE,
    STYLE_COMMENTS,
    MicroPrompt,
    Vocabulary,
    all_tasks,
)
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig
from studies.tracing.pairs import Pairs

VOCABULARY = Vocabulary()


def make_pairs(contrast: str = "task") -> Pairs:
    """Two tasks of each loophole: a persona's comment under its hint, against a style comment under the same or no hint."""
    hack, honest, task, mode = [], [], [], []
    for i, one in enumerate(all_tasks("test")[:8]):
        name = LOOPHOLES[i % len(LOOPHOLES)]
        other = name if contrast == "prompt" else NONE
        hack.append(_tokens(MicroPrompt(one, name), MODES[name].comment))
        honest.append(_tokens(MicroPrompt(one, other), STYLE_COMMENTS[i % len(STYLE_COMMENTS)]))
        task.append(i)
        mode.append(i % len(LOOPHOLES))
    return Pairs(*map(torch.tensor, (hack, honest, task, mode)))


def _tokens(prompt: MicroPrompt, comment: str) -> list[int]:
    return VOCABULARY.encode([*prompt.tokens, FENCE_OPEN, CLASS, comment, SOLVE])


def make_host(quarantine: str = "lora", scale: float = 0.3, dtype: torch.dtype = torch.float64) -> tuple[Host, Policy]:
    """The micro model at its own size with every adapter moved off its init by ``scale`` (0 leaves the init)."""
    model = MicroGPT(MicroConfig(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # logits that tell tokens apart
    host = open_host("torch", model.to(dtype))
    generator = torch.Generator().manual_seed(1)
    spec = AdapterSpec("lora", 4, quarantine, 4)  # pyright: ignore[reportArgumentType]
    adapters = host.attach("blocks.*.attn.*", "blocks.*.mlp.*", "unembed", spec=spec, generator=generator, expect=13)
    with torch.no_grad():
        for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
            p += scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return host, host.policy(adapters)
