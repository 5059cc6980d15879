"""Logistic probe: L2-regularized logistic regression on standardized activations.

    minimize  |u|^2 / 2 + C sum_i omega_i log(1 + exp(-y_i (<u, z_i> + e))),   z = (h - mean) / sd
    f(h) = <w, h> + c   with   w = u / sd,   c = e - <w, mean>

scikit-learn's LogisticRegression. Standardization gives C the same meaning at every layer; omega balances the classes, so that the
hack rate of the training set does not change the threshold. The score is the log odds at equal odds: calibrate it
(`mi_route2.probes.calibration`) before using it as a probability elsewhere.
"""

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from mi_route2.checks import checked
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.probe import Class, ExampleStore, Unit


@checked
class LogisticFitter(ExampleStore):
    """Fitter of a logistic probe; it stores the examples (float64, CPU) until `fit`.

    The score rises for the label `positive`. `c > 0` is the inverse of the penalty's strength. The objective is strictly convex in
    `u` and the solver (lbfgs) is deterministic, so all seeds give the same result; `seed` only fixes random choices that another
    version of scikit-learn might make.
    """

    def __init__(
        self, c: float = 0.1, seed: int = 0, unit: Unit = "rollout", max_iterations: int = 1000, positive: Class = True
    ) -> None:
        if not c > 0:
            raise ValueError(f"C must be positive, not {c}.")
        super().__init__(unit, positive)
        self._c = c
        self._seed = seed
        self._max_iterations = max_iterations

    def fit(self) -> AffineProbe:
        """Return the fitted probe. ValueError without both classes, or for activations below 1e-150 or above 1e150."""
        x, y = self._stored()
        scaler = StandardScaler().fit(x)
        model = LogisticRegression(C=self._c, class_weight="balanced", random_state=self._seed, max_iter=self._max_iterations)
        model.fit(scaler.transform(x), y)
        weight = model.coef_.reshape(-1) / scaler.scale_
        bias = float(np.ravel(model.intercept_)[0] - weight @ scaler.mean_)
        return AffineProbe(torch.from_numpy(weight), bias, self._positive)
