"""Token choice: greedy or sampled with one seed per request, and log-probabilities over the whole vocabulary.

A sampled token is ``F^-1(u)``, the inverse CDF of the distribution at a uniform ``u``. All uniforms of a request are drawn from its
own seed, one for each token that it may generate, so its tokens depend on its own logits alone. Log-probabilities are those of the
model's distribution, before temperature and truncation.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import index
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, PlainValidator
from torch import Tensor

from mi_route2.steering.specs import Plain
from mi_route2.validation import AtLeastOne, Natural, NonNegative, Probability, validated


def _ids(value: Any, info: Any) -> tuple[int, ...]:
    try:
        unordered = isinstance(value, Mapping) or (isinstance(value, Set) and info.field_name != "stop_tokens")
        if unordered or isinstance(value, str | bytes | bytearray | memoryview):
            raise TypeError
        ids: tuple[Any, ...] = tuple(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
        if {type(token) for token in ids} <= {int}:
            return ids
        ids = tuple(token.item() if isinstance(token, Tensor | np.generic) else token for token in ids)
        if any(isinstance(token, bool) for token in ids):
            raise TypeError
        return tuple(map(index, ids))
    except (TypeError, ValueError, RuntimeError) as error:
        excerpt = " ".join(repr(value).split())
        raise ValueError(f"{info.field_name} is one row of token ids, as (5, 17), not {excerpt:.60}") from error


def _texts(value: object) -> tuple[str, ...]:
    texts = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if (not texts and value != ()) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop is a sequence of texts that are not empty, as stop=('END',), not {value!r:.60}")
    return texts


TokenIds = Annotated[tuple[int, ...], PlainValidator(_ids)]


@validated
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 does not truncate.
        top_p: 1 does not truncate. A share of the whole distribution, also beside ``top_k``.
        min_p: drop tokens less likely than this share of the likeliest one, at the temperature; 0 does not truncate.
        seed: if ``None``, the engine draws one for a request that samples, and the result reports it.
        stop_tokens: token ids that end generation; they are part of the generated tokens.
        stop: texts that end generation; they need an engine with a tokenizer.
        logprobs: return each token's log-probability and those of this many most likely tokens (``None``: none).
        logprob_token_ids: return the exact log-probabilities of these tokens.
        prompt_logprobs: as ``logprobs``, of the prompt's tokens; the prompt is then computed anew.

    Raises:
        ValueError: a value is out of range.

    Examples:
        >>> sampling = Sampling(max_new=8, temperature=0.8, seed=3, logprobs=5)
    """

    max_new: Annotated[AtLeastOne, Plain] = 16
    temperature: Annotated[NonNegative, Plain] = 0.0
    top_k: Annotated[Natural, Plain] = 0
    top_p: Annotated[float, Field(gt=0, le=1), Plain] = 1.0
    min_p: Annotated[Probability, Plain] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63), Plain] | None = None
    stop_tokens: TokenIds = ()
    stop: Annotated[tuple[str, ...], PlainValidator(_texts)] = ()
    logprobs: Annotated[Natural, Plain] | None = None
    logprob_token_ids: TokenIds = ()
    prompt_logprobs: Annotated[Natural, Plain] | None = None

    @property
    def detailed(self) -> bool:
        """True if any log-probability is requested."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def plain(self) -> bool:
        """True if decoding is greedy."""
        return self.temperature == 0.0

    def uniforms(self) -> list[float]:
        """Return the request's uniforms in [0, 1), one per token."""
        if self.plain:
            return []
        assert self.seed is not None, "the engine draws one"
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return torch.rand(self.max_new, dtype=torch.float64, generator=generator, device="cpu").tolist()


def choose(
    logits: Float[Tensor, "n v"], how: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Return one token per row, by its own ``Sampling`` and uniform, and its logit: not finite if the row has NaN or +infinity."""
    chosen = _greatest(logits)
    values = logits.gather(1, chosen[:, None])[:, 0]
    drawn = [i for i, sampling in enumerate(how) if not sampling.plain]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        uniform = torch.tensor([uniforms[i] for i in drawn], dtype=torch.float32, device=logits.device)
        chosen[at] = _draw(_truncated(logits[at].double(), [how[i] for i in drawn]), uniform)
        values = torch.where(values.isfinite(), logits.gather(1, chosen[:, None])[:, 0], values)
    return chosen, values


def _greatest(logits: Float[Tensor, "n v"]) -> Int[Tensor, " n"]:
    """Return the argmax of each row (the first one), or its first NaN. On a CPU numpy is thirty times as fast as torch."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _truncated(logits: Float[Tensor, "n v"], how: Sequence[Sampling]) -> Float[Tensor, "n v"]:
    """Return each row's probabilities at its temperature, 0 outside of its top k, its nucleus and min p."""
    temperature = torch.tensor([sampling.temperature for sampling in how], dtype=logits.dtype, device=logits.device)
    scaled = logits / temperature[:, None]
    # Quotients by a temperature near 0 may all be infinite; those of the distances from the greatest logit never are.
    distances = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    probabilities = torch.where(scaled.amax(-1, keepdim=True).isfinite(), scaled, distances).softmax(-1)
    for i, sampling in enumerate(how):
        if not (sampling.top_k or sampling.min_p) and sampling.top_p == 1.0:
            continue
        ranked, order = probabilities[i].sort(descending=True, stable=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if sampling.top_k:
            keep[sampling.top_k :] = False
        # the nucleus is the smallest set of top tokens whose probabilities reach top_p: tokens before which the sum is below top_p
        keep &= ranked.cumsum(0) - ranked < sampling.top_p
        keep &= ranked >= sampling.min_p * ranked[0]
        probabilities[i] = torch.zeros_like(ranked).scatter(0, order[keep], ranked[keep])
    return probabilities


def _draw(probabilities: Float[Tensor, "n v"], uniforms: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    cumulative = probabilities.cumsum(-1)
    # the sum is not exactly 1, so the uniform is scaled to it; a token of probability 0 is never drawn
    target = uniforms.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (probabilities > 0).long().mul(torch.arange(probabilities.shape[-1], device=probabilities.device)).amax(-1)
    return torch.minimum(drawn, last)
