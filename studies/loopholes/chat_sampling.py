"""Sampling from a causal language model of transformers, in batches with a cache: token = F^-1(u), as in ``sampling``.

All uniforms are drawn before the first token, one for each (row, step), so a row's completion depends on its own prompt and
uniforms alone. Prompts are padded on the left; a row that has ended leaves the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from studies.loopholes.sampling import draw


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    temperature: float,
    generator: torch.Generator,
    ends: Sequence[int],
    pad: int,
    at_once: int,
) -> list[list[int]]:
    """A completion a prompt, up to and with the first token of ``ends``; one of ``max_new`` tokens may have no end.

    ``at_once`` rows are sampled at a time. Raises ValueError unless `temperature` is positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} is not positive: choose one above 0")
    uniforms = torch.rand(len(prompts), max_new, dtype=torch.float64, generator=generator, device=generator.device)
    device = next(model.parameters()).device
    # rows of like length together: less padding, and the same completions
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        batch = _Batch(model, [prompts[i] for i in rows], pad, device)
        for i, ids in zip(rows, _complete(batch, uniforms[rows].to(device), temperature, ends), strict=True):
            completions[i] = ids
    return completions


class _Batch:
    """Rows that are being completed: the model's cache, what is real in it, and where each row is."""

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], pad: int, device: torch.device):
        from transformers import DynamicCache

        self._model, width = model, max(map(len, prompts))
        self.tokens: Int[Tensor, "b s"] = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        self._real: Bool[Tensor, "b s"] = torch.arange(width, device=device) >= width - lengths[:, None]
        self._cache: Any = DynamicCache(config=getattr(model, "config", None))

    def logits(self) -> Float[Tensor, "b v"]:
        """Of the token after ``tokens``, which then are in the cache."""
        positions = (self._real.long().cumsum(1) - 1).clamp_min(0)[:, -self.tokens.shape[1] :]
        out: Any = self._model(
            input_ids=self.tokens,
            attention_mask=self._real.long(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].float()

    def step(self, drawn: Int[Tensor, " b"], alive: Bool[Tensor, " b"]) -> None:
        """Go on with the rows that are ``alive``, each with its drawn token."""
        if not bool(alive.all()):
            self._cache.batch_select_indices(alive.nonzero()[:, 0])
            self._real = self._real[alive]
        self.tokens = drawn[alive][:, None]
        self._real = torch.nn.functional.pad(self._real, (0, 1), value=True)


def _complete(batch: _Batch, uniforms: Float[Tensor, "b n"], temperature: float, ends: Sequence[int]) -> list[list[int]]:
    completions: list[list[int]] = [[] for _ in range(len(uniforms))]
    rows = torch.arange(len(uniforms), device=uniforms.device)
    stops = torch.tensor(ends, device=uniforms.device)
    for step in range(uniforms.shape[1]):
        drawn = draw(batch.logits(), uniforms[rows, step], temperature)
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            completions[row].append(token)
        alive = ~torch.isin(drawn, stops)
        if not bool(alive.any()):
            break
        rows = rows[alive]
        batch.step(drawn, alive)
    return completions
