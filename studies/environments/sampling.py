"""Sampling token by token: the loop that all worlds share, for any kind of cache.

    token = the first v with F(v) > u,      F the cumulative distribution of softmax(logits / temperature), u uniform on [0, 1)

The uniforms are drawn before the first token, so a row's tokens depend on its own uniforms alone, and rows that have ended leave
the batch.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GoOn = Callable[[Int[Tensor, " r"], Bool[Tensor, " b"]], Float[Tensor, "r v"]]
"""(drawn tokens of the rows that continue, mask of these rows among the previous ones) -> logits of their next token."""


def draw_uniforms(rows: int, max_new: int, generator: torch.Generator) -> Float[Tensor, "b n"]:
    """Return a uniform in [0, 1) for every row and step, on the generator's device."""
    return torch.rand(rows, max_new, dtype=torch.float64, generator=generator, device=generator.device)


@torch.no_grad()
def complete(
    first: Callable[[], Float[Tensor, "b v"]],
    go_on: GoOn,
    uniforms: Float[Tensor, "b n"],
    *,
    temperature: float,
    ends: Sequence[int],
    fill: int,
) -> Int[Tensor, "b n"]:
    """Sample up to n tokens per row; after the first token of ``ends`` a row is padded with ``fill``.

    Args:
        first: Function that feeds the model its prompts and returns the logits of the first token.
        go_on: Function that feeds the model the drawn tokens and returns the next logits.
        uniforms: One uniform per row and step.
        temperature: Temperature, above 0.
        ends: Tokens that end a row.
        fill: Token after the end of a row.

    Raises:
        ValueError: The temperature is not positive, or the logits are NaN or infinite.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} is not positive: choose one above 0")
    completions = torch.full(uniforms.shape, fill, device=uniforms.device)
    rows, stops = torch.arange(len(uniforms), device=uniforms.device), torch.tensor(ends, device=uniforms.device)
    last, logits = uniforms.shape[1] - 1, first()
    for step in range(last + 1):
        drawn = draw(logits, uniforms[rows, step], temperature)
        completions[rows, step] = drawn
        alive = ~torch.isin(drawn, stops)
        if step == last or not bool(alive.any()):
            break
        rows = rows[alive]
        logits = go_on(drawn[alive], alive)
    return completions


def draw(logits: Float[Tensor, "b v"], uniforms: Float[Tensor, " b"], temperature: float = 1.0) -> Int[Tensor, " b"]:
    """Return the token at which the cumulative distribution of softmax(logits / temperature) passes each uniform in [0, 1).

    Raises:
        ValueError: The logits have no softmax. A search in NaN would end at the last token, and a policy that diverged would look
            like one that neither solves nor hacks.
    """
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    if not bool(cumulative[:, -1].isfinite().all()):
        raise ValueError(
            "the model's logits are NaN or infinite, so no token can be drawn: did it diverge? Lower the learning rate"
        )
    # Rounding makes the last value not exactly 1, so the uniform is scaled to keep the search inside the vocabulary.
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
