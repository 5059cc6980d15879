"""Random probe, the control: projection on a direction drawn uniformly from the sphere (Haar measure).

    v = z / |z|,  z ~ N(0, I_d)        f(h) = <h, v>

v and -v are equally likely, so its AUROC is centered on .5 for any data. It is *not* concentrated there: if a few directions carry
most of the variance, single draws reach .8 and more. So a probe is compared with a high percentile of many draws, not with .5.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import Mask, checked
from mi_route2.probes.direction import DirectionProbe, Score
from mi_route2.probes.probe import Labels, unit_vector


@checked
class HaarProbeFitter:
    """Fitter whose every `fit` is a new draw from the CPU `generator`; of the activations only their width is used."""

    def __init__(self, generator: torch.Generator, score: Score = "projection") -> None:
        self._generator = generator
        self._score: Score = score
        self._width: int | None = None

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, labels: Labels) -> None:
        """Store the width. ValueError if it changes."""
        del mask, labels  # a control must not see the labels
        if self._width not in (None, h.shape[-1]):
            raise ValueError(f"The activations had {self._width} features before, now {h.shape[-1]}: use one fitter per layer.")
        self._width = h.shape[-1]

    def fit(self) -> DirectionProbe:
        """Return a new random direction. ValueError before the first `update`."""
        if self._width is None:
            raise ValueError("The width is not known yet: call update with a batch of activations first.")
        z = torch.randn(self._width, generator=self._generator, dtype=torch.float64, device="cpu")
        return DirectionProbe(unit_vector(z), self._score)
