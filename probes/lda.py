"""Linear discriminant probe: Fisher's direction with a shrunk covariance.

    w = Sigma^-1 (mu_hack - mu_clean)        c = -<w, (mu_hack + mu_clean) / 2>

scikit-learn's LinearDiscriminantAnalysis (solver lsqr) with equal priors, so that the hack rate of the training set changes neither
the direction nor the threshold. Shrinkage "auto" is Ledoit and Wolf (2004): with fewer rollouts than features the plain covariance
is singular. Shrinkage 1 gives the mean-difference direction exactly. The score is the log odds.
"""

from typing import Literal

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from mi_route2.checks import checked
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.probe import Class, ExampleStore, Unit


@checked
class LdaFitter(ExampleStore):
    """Fitter of an LDA probe; it stores the examples (float64, CPU) until `fit`.

    `shrinkage` is "auto", a number in [0, 1], or None. The score rises for the label `positive`.
    """

    def __init__(self, shrinkage: float | Literal["auto"] | None = "auto", unit: Unit = "rollout", positive: Class = True) -> None:
        if shrinkage not in ("auto", None) and not 0 <= shrinkage <= 1:
            raise ValueError(f"Shrinkage {shrinkage} is not 'auto', None or a number in [0, 1].")
        super().__init__(unit, positive)
        self._shrinkage = shrinkage

    def fit(self) -> AffineProbe:
        """Return the fitted probe.

        Raises:
            ValueError: Without both classes, if they differ where the covariance is singular, or for activations below 1e-150 or
                above 1e150.
        """
        x, y = self._stored()
        lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=self._shrinkage, priors=[0.5, 0.5])
        lda.fit(x, y)
        apart = lda.means_[1] - lda.means_[0]
        # A least-squares solution has no part along a feature without variance, which may be the one that separates best.
        left = np.linalg.norm(lda.covariance_ @ lda.coef_[0] - apart)
        if left > 1e-6 * np.linalg.norm(apart) and left > 1e-12 * np.linalg.norm(lda.means_):  # the second: more than rounding
            remedy = "" if self._shrinkage else "choose shrinkage='auto' or a number above 0, or "
            if self._shrinkage == "auto":  # Ledoit and Wolf estimate 0 from two examples of a class
                remedy = "choose a number above 0 in its place if a class has two examples, or "
            raise ValueError(
                f"The covariance under shrinkage={self._shrinkage!r} is singular along the difference of the classes: {remedy}use "
                "MeanDifferenceFitter where the examples of a class do not vary."
            )
        return AffineProbe(torch.from_numpy(lda.coef_[0].copy()), float(lda.intercept_[0]), self._positive)
