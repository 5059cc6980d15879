"""What a run is graded by: the logits at one position, over the whole vocabulary.

    logit_diff   logit(answer) - logit(foil)
    logprob      log p(answer)
    kl           KL(clean || run), 0 for the clean run itself

in float32 at least, float64 where the device has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType({"logit_diff": ("answer", "foil"), "logprob": ("answer",), "kl": ()})
"""Every metric, and the tokens that it takes."""


@dataclass(frozen=True)
class Grader:
    """A metric with its tokens. ``ValueError`` for an unknown metric, and where it lacks a token or was given one too many."""

    metric: str
    answer: int | None = None
    foil: int | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"unknown metric {self.metric!r}: choose among {', '.join(METRICS)}")
        for name in ("answer", "foil"):
            token, takes = getattr(self, name), name in METRICS[self.metric]
            if takes != (token is not None):
                raise ValueError(
                    f"the metric {self.metric} {'needs' if takes else 'takes no'} {name}{'' if takes else ': leave it out'}"
                )
        if self.metric == "logit_diff" and self.answer == self.foil:
            raise ValueError(f"answer and foil are the same token {self.answer}: their difference is always 0")

    def check(self, vocabulary: int) -> None:
        """``ValueError`` for a token that is not in the vocabulary."""
        for name in ("answer", "foil"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < vocabulary:
                raise ValueError(f"the {name} {token} is no token: the vocabulary has 0..{vocabulary - 1}")

    def __call__(self, logits: Float[Tensor, "n v"], clean: Float[Tensor, " v"]) -> Float[Tensor, " n"]:
        """Every row's score, in nats or logits. ``clean`` are the clean run's logits."""
        wide = widened(logits)
        if self.metric == "logit_diff":
            return wide[:, self.answer] - wide[:, self.foil]
        chances = wide.log_softmax(-1)
        if self.metric == "logprob":
            return chances[:, self.answer]
        target = widened(clean).log_softmax(-1)
        return torch.where(target.isfinite(), target.exp() * (target - chances), 0.0).sum(-1)  # a token of no chance adds nothing


def widened(logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """In float64, or float32 on a device without it."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def one_token(given: int | str | None, tokenizer: Any, name: str) -> int | None:
    """The id of ``given``: itself, or a text that the tokenizer makes exactly one token of. ``ValueError`` otherwise."""
    if given is None or isinstance(given, int):
        return given
    if not isinstance(given, str):
        raise ValueError(f"the {name} {given!r:.60} is neither a token's id nor a text: give one of the two")
    if tokenizer is None:
        raise ValueError(f"the {name} {given!r} is a text, and there is no tokenizer: pass one, or give the token's id")
    ids = list(tokenizer.encode(given, add_special_tokens=False) if callable(tokenizer) else tokenizer.encode(given))
    if len(ids) != 1:
        raise ValueError(f"the {name} {given!r} is {len(ids)} tokens {ids}: choose a text of one (a leading space often matters)")
    return int(ids[0])
