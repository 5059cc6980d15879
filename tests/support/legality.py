"""An audit from outside of any function `tokens -> nll`: may its scores be called a code length?

    future: for every token > t changed, nll[0 .. t] are the same bits                 no score reads what lies behind its token
    mass:   sum over all v of exp(-nll_t(tokens with token t = v)) <= 1                no score reads its own token

The first finds a scorer that trained on the stream before it scored it, or that looks ahead. It cannot find one that builds the
distribution of a token from that very token (an index of n-grams to which a pair is added before it was predicted): the score
changes with its own token anyway. The second does: such probabilities add up to more than 1, and no code has those lengths (Kraft).
A mutation shows a violation but never proves that there is none: give positions at which a scorer could err, such as the ends of
windows, chunks and documents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from studies.lanes.config import VOCABULARY

Scorer = Callable[[Int[Tensor, " s"]], Float[Tensor, " s"]]
"""A stream -> the negative log-likelihood of each of its tokens, in nats."""


@dataclass(frozen=True)
class Leak:
    """The score at `position` changed when all tokens after `after` did."""

    position: int
    after: int


@dataclass(frozen=True)
class Audit:
    """Findings of the audit.

    leaks: for each position after which everything was changed and an earlier score moved, the first that did.
    masses: position -> the sum of the probabilities that all tokens would have been given there.
    """

    leaks: tuple[Leak, ...]
    masses: dict[int, float]

    @property
    def overfull(self) -> tuple[int, ...]:
        """The positions at which probabilities add up to more than 1, but for rounding, or to no number."""
        return tuple(position for position, mass in sorted(self.masses.items()) if not mass <= 1 + 1e-9)

    @property
    def legal(self) -> bool:
        return not self.leaks and not self.overfull


def audit(
    scorer: Scorer,
    tokens: Int[Tensor, " s"],
    *,
    after: Sequence[int] = (),
    targets: Sequence[int] = (),
    generator: torch.Generator,
    vocabulary: int = VOCABULARY,
) -> Audit:
    """Run a scorer on changed streams: once for each of `after`, `vocabulary` times for each of `targets`, twice to begin with.

    Args:
        scorer: the function under audit; it must give the same bits when it is called again.
        tokens: a stream; short ones do.
        after: positions t behind which every token is changed to another, drawn at random.
        targets: positions whose probabilities are added up over all tokens.
        generator: the source of the random tokens, on the CPU.
        vocabulary: tokens are 0 .. vocabulary - 1.
    """
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
    truth = _scores(scorer, tokens)
    assert torch.equal(_as_bits(truth), _as_bits(_scores(scorer, tokens))), "the scorer gives other scores on the same stream"
    leaks = []
    for t in after:
        moved = _as_bits(_scores(scorer, changed(tokens, t, vocabulary, generator)))[: t + 1] != _as_bits(truth)[: t + 1]
        if moved.any():
            leaks.append(Leak(int(moved.nonzero()[0, 0]), t))
    masses = {t: _mass(scorer, tokens, t, vocabulary) for t in targets}
    return Audit(tuple(leaks), masses)


def changed(tokens: Int[Tensor, " s"], after: int, vocabulary: int, generator: torch.Generator) -> Int[Tensor, " s"]:
    """The stream with every token behind `after` replaced by another one, uniform over the rest of the vocabulary."""
    shift = torch.randint(1, vocabulary, (len(tokens),), generator=generator).to(tokens.device)
    shift[: after + 1] = 0
    return (tokens + shift) % vocabulary


def _mass(scorer: Scorer, tokens: Int[Tensor, " s"], target: int, vocabulary: int) -> float:
    """The sum over all tokens of the probability that the scorer would give each of them at `target`."""
    found = []
    for token in range(vocabulary):
        stream = tokens.clone()
        stream[target] = token
        found.append(math.exp(-float(_scores(scorer, stream)[target])))
    return math.fsum(found)


def _scores(scorer: Scorer, tokens: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
    """Return the scorer's values on a copy of the stream, in float64."""
    nll = scorer(tokens.clone())
    assert nll.shape == tokens.shape
    return nll.detach().double()


def _as_bits(nll: Float[Tensor, " s"]) -> Int[Tensor, " s"]:
    """Equal where the numbers are the same bits, NaN included."""
    return nll.view(torch.int64)
