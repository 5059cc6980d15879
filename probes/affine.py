"""Affine probe, the frozen result of every fitter that learns a weight and a threshold.

    f(h) = <w, h> + c

f > 0 means the class `positive` at equal odds. Mean-difference, LDA and logistic regression differ only in how they choose (w, c).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import Mask, checked
from mi_route2.probes.probe import Class, inner, pool, require_width, widen


@checked
@dataclass(frozen=True, eq=False)
class AffineProbe:
    """Affine probe with a copy of `weight [d]` and a `bias` (a float), both finite (ValueError otherwise).

    The score rises for the label `positive`.
    Scores are computed in the activations' dtype, at least float32.
    """

    weight: Float[Tensor, " d"]
    bias: float
    positive: Class = True

    def __post_init__(self) -> None:
        bias = torch.tensor([self.bias], dtype=torch.float64, device="cpu")
        if not torch.isfinite(torch.cat([self.weight.double().cpu(), bias])).all():
            raise ValueError("The weight or the bias of an affine probe is NaN or infinite: fit it again on finite activations.")
        object.__setattr__(self, "weight", self.weight.detach().clone())

    @checked
    def score_tokens(self, h: Float[Tensor, "b s d"]) -> Float[Tensor, "b s"]:
        """Return `<w, h> + c` per token."""
        return self._score(h)

    @checked
    def score_rollouts(self, h: Float[Tensor, "b s d"], mask: Mask) -> Float[Tensor, " b"]:
        """Return `<w, mean h> + c` per rollout, which equals the mean of the masked tokens' scores."""
        return self._score(pool(h, mask))

    def _score(self, h: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        require_width(h, self.weight.shape[0])
        return inner(widen(h), self.weight) + self.bias
