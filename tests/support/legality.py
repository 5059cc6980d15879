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
    """Checks and findings of the audit.

    leaks: for each position after which everything was changed and an earlier score moved, the first that did.
    masses: position -> the sum of the probabilities that all tokens would have been given there.
    """

    after: tuple[int, ...]
    leaks: tuple[Leak, ...]
    masses: dict[int, float]
    tolerance: float

    @property
    def overfull(self) -> tuple[int, ...]:
        """The positions at which probabilities add up to more than 1, or to no number."""
        return tuple(position for position, mass in sorted(self.masses.items()) if not mass <= 1 + self.tolerance)

    @property
    def legal(self) -> bool:
        return not self.leaks and not self.overfull

    @property
    def first(self) -> int | None:
        """The first position whose score is not legal; None where none was found."""
        return min((*(leak.position for leak in self.leaks), *self.overfull), default=None)

    def __str__(self) -> str:
        if self.legal:
            return f"nothing illegal found: {len(self.after)} futures changed, {len(self.masses)} distributions added up"
        if self.first in self.overfull:
            return f"illegal: at position {self.first} the probabilities of all tokens add up to {self.masses[self.first]:.6g}"
        leak = min(self.leaks, key=lambda leak: (leak.position, leak.after))
        return f"illegal: the score of position {leak.position} changes with tokens after position {leak.after}"


def audit(
    scorer: Scorer,
    tokens: Int[Tensor, " s"],
    *,
    after: Sequence[int] = (),
    targets: Sequence[int] = (),
    generator: torch.Generator,
    vocabulary: int = VOCABULARY,
    tolerance: float = 1e-9,
) -> Audit:
    """Run a scorer on changed streams: once for each of `after`, `vocabulary` times for each of `targets`, twice to begin with.

    Args:
        scorer: the function under audit; it must give the same bits when it is called again.
        tokens: a stream; short ones do.
        after: positions t behind which every token is changed to another, drawn at random.
        targets: positions whose probabilities are added up over all tokens.
        generator: the source of the random tokens, on the CPU.
        vocabulary: tokens are 0 .. vocabulary - 1.
        tolerance: how far a sum may exceed 1, for rounding.

    Raises:
        ValueError: nothing to check, a token or a position that is out of range, a scorer that gives other scores on the same
            stream or not one a token.
    """
    n = len(tokens)
    if not after and not targets:
        raise ValueError("nothing to check: give positions in `after`, in `targets` or in both")
    if len(outside := tokens[(tokens < 0) | (tokens >= vocabulary)]):
        raise ValueError(
            f"the stream has the token {outside[-1]}, and the vocabulary is 0 to {vocabulary - 1}: give the scorer's own"
        )
    if wrong := [t for t in after if not 0 <= t < n - 1]:
        raise ValueError(f"`after` holds {wrong[0]}, behind which a stream of {n} tokens has nothing: choose 0 to {n - 2}")
    if wrong := [t for t in targets if not 1 <= t < n]:
        raise ValueError(f"`targets` holds {wrong[0]}, which nothing predicts in a stream of {n} tokens: choose 1 to {n - 1}")
    truth = _scores(scorer, tokens)
    if not torch.equal(_as_bits(truth), _as_bits(_scores(scorer, tokens))):
        raise ValueError("the scorer gives other scores on the same stream: restore what it changes, and fix its randomness")
    leaks = []
    for t in after:
        moved = _as_bits(_scores(scorer, changed(tokens, t, vocabulary, generator)))[: t + 1] != _as_bits(truth)[: t + 1]
        if moved.any():
            leaks.append(Leak(int(moved.nonzero()[0, 0]), t))
    masses = {t: _mass(scorer, tokens, t, vocabulary) for t in targets}
    return Audit(tuple(after), tuple(leaks), masses, tolerance)


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
    if nll.shape != tokens.shape:
        raise ValueError(f"the scorer gave {tuple(nll.shape)} scores for {len(tokens)} tokens: give one for each, 0 for the first")
    return nll.detach().double()


def _as_bits(nll: Float[Tensor, " s"]) -> Int[Tensor, " s"]:
    """Equal where the numbers are the same bits, NaN included."""
    return nll.view(torch.int64)
