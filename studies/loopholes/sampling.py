"""Sampling: token = F^-1(u), the inverse of the softmax's cumulative distribution at a uniform u.

All uniforms are drawn before the first token, one for each (row, step). So a row's tokens depend on its own prompt and
uniforms alone: finished rows leave the batch without changing what their neighbours draw.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from studies.loopholes.micro import KVCache, MicroGPT
from studies.loopholes.vocabulary import COMPLETION_LENGTH


@torch.no_grad()
def generate(
    model: MicroGPT,
    prompts: Int[Tensor, "b s"],
    max_new: int = COMPLETION_LENGTH,
    temperature: float = 1.0,
    *,
    generator: torch.Generator,
    eos: int,
) -> Int[Tensor, "b n"]:
    """Sampled completions [b max_new], filled with `eos` after the first one. Prompts all have the same length.

    Raises ValueError unless `temperature` is positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} is not positive: choose one above 0")
    uniforms = torch.rand(prompts.shape[0], max_new, dtype=torch.float64, generator=generator, device=generator.device)
    uniforms = uniforms.to(prompts.device)
    completions = torch.full((prompts.shape[0], max_new), eos, dtype=prompts.dtype, device=prompts.device)
    rows = torch.arange(prompts.shape[0], device=prompts.device)
    cache, new = KVCache(), prompts
    for step in range(max_new):
        logits = model(new, cache=cache)[:, -1]
        drawn = draw(logits, uniforms[rows, step], temperature)
        completions[rows, step] = drawn
        alive = drawn != eos
        if not alive.any():
            break
        if not alive.all():
            rows, drawn = rows[alive], drawn[alive]
            cache.keep(alive)
        new = drawn[:, None]
    return completions


def draw(logits: Float[Tensor, "b v"], uniforms: Float[Tensor, " b"], temperature: float = 1.0) -> Int[Tensor, " b"]:
    """The token where the cumulative distribution of softmax(logits / temperature) passes each uniform in [0, 1)."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # Rounding leaves the last value near 1, not at it: scaling the uniform keeps the search inside the vocabulary.
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
