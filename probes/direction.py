"""Direction probe: the projection of an activation on a given unit vector, or the cosine with it.

    projection: f(h) = <h, v>        cosine: f(h) = <h, v> / |h|        |v| = 1

A direction from persona pairs, from a routing rule or from a paper is a probe without training: it learns nothing from the rollouts
and has no threshold. The cosine ignores the norm of the activation; the score of h = 0 is 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import Mask, checked
from mi_route2.probes.probe import Class, Labels, inner, pool, require_width, unit_vector, widen

Score = Literal["cosine", "projection"]


@checked
@dataclass(frozen=True, eq=False)
class DirectionProbe:
    """Probe with a copy of `direction [d]` of norm 1 (up to 1e-5; ValueError otherwise: `DirectionFitter` normalizes).

    `positive` is the label of the class that the direction points to.
    """

    direction: Float[Tensor, " d"]
    score: Score = "cosine"
    positive: Class = True

    def __post_init__(self) -> None:
        if self.score not in ("cosine", "projection"):
            raise ValueError(f"Score {self.score!r} is not one of cosine, projection.")
        # Negated, so that a NaN norm fails too.
        if not abs(float(self.direction.detach().double().norm()) - 1) < 1e-5:
            raise ValueError("A direction probe needs a unit vector: DirectionFitter(v).fit() normalizes any v.")
        object.__setattr__(self, "direction", self.direction.detach().clone())

    @checked
    def score_tokens(self, h: Float[Tensor, "b s d"]) -> Float[Tensor, "b s"]:
        """Return the projection in activation units, or the cosine in [-1, 1], per token."""
        return self._score(h)

    @checked
    def score_rollouts(self, h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, " b"]:
        """Return the score of the mean activation over `mask`, per rollout."""
        return self._score(pool(h, mask))

    def _score(self, h: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        require_width(h, self.direction.shape[0])
        h = widen(h)
        if self.score == "projection":
            return inner(h, self.direction)
        h = _scaled(h)
        return inner(h, self.direction) / inner(h, h).sqrt().clamp_min(torch.finfo(h.dtype).tiny)


def _scaled(h: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Return `h` over a power of two, so that no square vanishes or overflows; a cosine has the same bits as without."""
    exponent = torch.frexp(h.abs().amax(dim=-1, keepdim=True)).exponent
    half = exponent // 2  # 2^exponent itself may be beyond the type
    return h * torch.ldexp(torch.ones_like(h[..., :1]), -half) * torch.ldexp(torch.ones_like(h[..., :1]), half - exponent)


@checked
class DirectionFitter:
    """Fitter that only normalizes a vector, which points to the class `positive`; `update` only checks the width."""

    def __init__(self, vector: Float[Tensor, " d"], score: Score = "cosine", positive: Class = True) -> None:
        self._probe = DirectionProbe(unit_vector(vector), score, positive)

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, labels: Labels) -> None:
        """Check that the activations have the vector's width."""
        del mask, labels  # not needed, because the direction is given
        require_width(h, self._probe.direction.shape[0])

    def fit(self) -> DirectionProbe:
        """Return the probe of the given vector, independent of the activations seen."""
        return self._probe
