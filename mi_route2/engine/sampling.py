"""Choosing tokens: greedy or sampled, one seed a request, and log-probabilities over the whole vocabulary.

A sampled token is ``F^-1(u)``, the inverse of the distribution's cumulative sum at a uniform ``u``. A request's uniforms are all
drawn from its own seed, one for each token that it may generate, so its tokens depend on its own logits alone. Log-probabilities
are those of the model's distribution, before temperature and truncation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mi_route2.checks import converts


@converts
@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens. ``temperature = 0`` is greedy; ``top_k = 0`` and ``top_p = 1`` truncate nothing.

    ``stop_tokens`` end it (and are a part of its tokens), ``stop`` are texts that do, where the engine has a tokenizer.
    ``logprobs`` asks for the log-probability of each token and of that many of the likeliest (``None``: for none),
    ``logprob_token_ids`` for those of given tokens, exactly. ``ValueError`` for values that cannot be.
    """

    max_new: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_new", "top_k", "seed", *(() if self.logprobs is None else ("logprobs",))):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("stop_tokens", "logprob_token_ids"):
            object.__setattr__(self, name, token_ids(name, getattr(self, name)))
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable) or not all(isinstance(one, str) for one in self.stop):
            raise ValueError(f"stop is a sequence of texts, as stop=('END',), not {self.stop!r:.60}")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), float | int):
                raise ValueError(f"{name} is a number, not {getattr(self, name)!r:.60}")
        for name, good, what in (
            ("max_new", self.max_new >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_k", self.top_k >= 0, "at least 0, which keeps all"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0, or None"),
            ("stop", all(self.stop), "texts of at least one character"),
        ):
            if not good:
                raise ValueError(f"{name} = {getattr(self, name)!r} cannot be: it is {what}")

    @property
    def detailed(self) -> bool:
        """Whether any log-probability is asked for."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def plain(self) -> bool:
        """Whether neither truncation nor chance is asked for."""
        return self.temperature == 0.0

    def uniforms(self) -> list[float]:
        """The request's own draws in [0, 1), one a token."""
        if self.plain:
            return []
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.max_new, dtype=torch.float64, generator=generator).tolist()


def whole(name: str, given: object) -> int:
    """``given`` as a whole number; ``ValueError`` where it is none."""
    try:
        return index(given)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ValueError(f"{name} is a whole number, not {given!r:.60}") from error


def token_ids(name: str, given: object) -> tuple[int, ...]:
    """``given`` as a tuple of whole numbers; ``ValueError`` where it is no row of them."""
    try:
        return tuple(map(index, given))  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ValueError(f"{name} is one row of token ids, as (5, 17), not {' '.join(repr(given).split()):.60}") from error


def choose(
    logits: Float[Tensor, "n v"], how: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """One token a row, by its own ``Sampling`` and its own uniform; its logit, not finite where the row has NaN or +infinity."""
    chosen = _greatest(logits)
    values = logits.gather(1, chosen[:, None])[:, 0]
    drawn = [i for i, one in enumerate(how) if not one.plain]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        uniform = torch.tensor([uniforms[i] for i in drawn], device=logits.device)
        chosen[at] = _draw(_truncated(logits[at].double(), [how[i] for i in drawn]), uniform)
        values = torch.where(values.isfinite(), logits.gather(1, chosen[:, None])[:, 0], values)
    return chosen, values


def _greatest(logits: Float[Tensor, "n v"]) -> Int[Tensor, " n"]:
    """The first of each row's greatest, or its first NaN. On a CPU numpy finds it thirty times as fast as torch."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _truncated(logits: Float[Tensor, "n v"], how: Sequence[Sampling]) -> Float[Tensor, "n v"]:
    """Probabilities at each row's temperature, 0 outside of its top k and its nucleus."""
    temperature = torch.tensor([one.temperature for one in how], dtype=logits.dtype, device=logits.device)
    probabilities = (logits / temperature[:, None]).softmax(-1)
    for i, one in enumerate(how):
        if not one.top_k and one.top_p == 1.0:
            continue
        ranked, order = probabilities[i].sort(descending=True, stable=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if one.top_k:
            keep[one.top_k :] = False
        # the nucleus is the fewest tokens whose probabilities reach top_p: those with less than top_p before them
        keep &= ranked.cumsum(0) - ranked < one.top_p
        probabilities[i] = torch.zeros_like(ranked).scatter(0, order[keep], ranked[keep])
    return probabilities


def _draw(probabilities: Float[Tensor, "n v"], uniforms: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    cumulative = probabilities.cumsum(-1)
    # the sum is not quite 1, so the uniform is scaled to it; a token of probability 0 is never where the sum passes it
    target = uniforms.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (probabilities > 0).long().mul(torch.arange(probabilities.shape[-1], device=probabilities.device)).amax(-1)
    return torch.minimum(found, last)
