"""Linear discriminant probe: Fisher's direction with a shrunk covariance.

    w = Sigma^-1 (mu_hack - mu_clean)        c = -<w, (mu_hack + mu_clean) / 2>

scikit-learn's LinearDiscriminantAnalysis (solver lsqr) with equal priors, so that the hack rate of the training set changes neither
the direction nor the threshold. Shrinkage "auto" is Ledoit and Wolf (2004): with fewer rollouts than features the plain covariance
is singular. Shrinkage 1 gives the mean-difference direction exactly. The score is the log odds.
"""

from typing import Literal

import torch
from jaxtyping import Float
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from mi_route2.checks import Mask, checked
from probes.affine import AffineProbe
from probes.probe import Labels, Unit, examples, require_both_classes


@checked
class LdaFitter:
    """Fitter of an LDA probe; it stores the examples (float64, CPU) until `fit`.

    `shrinkage` is "auto", a number in [0, 1], or None.
    """

    def __init__(self, shrinkage: float | Literal["auto"] | None = "auto", unit: Unit = "rollout") -> None:
        if isinstance(shrinkage, float) and not 0 <= shrinkage <= 1:
            raise ValueError(f"Shrinkage {shrinkage} is not 'auto', None or a number in [0, 1].")
        self._shrinkage = shrinkage
        self._unit: Unit = unit
        self._batches: list[tuple[Tensor, Tensor]] = []

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, hack: Labels) -> None:
        """Add a batch. ValueError for non-finite activations inside the mask."""
        self._batches.append(examples(h, mask, hack, self._unit))

    def fit(self) -> AffineProbe:
        """Return the fitted probe. ValueError without both classes."""
        y = torch.cat([y for _, y in self._batches]) if self._batches else torch.zeros(0, dtype=torch.bool)
        require_both_classes(y)
        x = torch.cat([x for x, _ in self._batches])
        lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=self._shrinkage, priors=[0.5, 0.5])
        lda.fit(x.numpy(), y.numpy())
        return AffineProbe(torch.from_numpy(lda.coef_[0].copy()), float(lda.intercept_[0]))
