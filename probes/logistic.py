"""Logistic probe: L2-regularized logistic regression on standardized activations.

    minimize  |u|^2 / 2 + C sum_i omega_i log(1 + exp(-y_i (<u, z_i> + e))),   z = (h - mean) / sd
    f(h) = <w, h> + c   with   w = u / sd,   c = e - <w, mean>

scikit-learn's LogisticRegression. Standardization gives C the same meaning at every layer; omega balances the classes, so that the
hack rate of the training set does not change the threshold. The score is the log odds at equal odds: calibrate it
(`probes.calibration`) before using it as a probability elsewhere.
"""

import numpy as np
import torch
from jaxtyping import Float
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from mi_route2.checks import Mask, checked
from probes.affine import AffineProbe
from probes.probe import Labels, Unit, examples, require_both_classes, require_squares, require_width


@checked
class LogisticFitter:
    """Fitter of a logistic probe; it stores the examples (float64, CPU) until `fit`.

    `c > 0` is the inverse of the penalty's strength. The objective is strictly convex in `u` and the solver (lbfgs) is
    deterministic, so all seeds give the same result; `seed` only fixes random choices that another version of scikit-learn might
    make.
    """

    def __init__(self, c: float = 0.1, seed: int = 0, unit: Unit = "rollout", max_iterations: int = 1000) -> None:
        if not c > 0:
            raise ValueError(f"C must be positive, not {c}.")
        self._c = c
        self._seed = seed
        self._unit: Unit = unit
        self._max_iterations = max_iterations
        self._batches: list[tuple[Tensor, Tensor]] = []

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, hack: Labels) -> None:
        """Add a batch. ValueError for non-finite activations inside the mask, or another width."""
        x, y = examples(h, mask, hack, self._unit)
        require_width(x, self._batches[0][0].shape[1] if self._batches else x.shape[1])
        self._batches.append((x, y))

    def fit(self) -> AffineProbe:
        """Return the fitted probe. ValueError without both classes, or for activations below 1e-150 or above 1e150."""
        y = torch.cat([y for _, y in self._batches]) if self._batches else torch.zeros(0, dtype=torch.bool)
        require_both_classes(y)
        x = torch.cat([x for x, _ in self._batches])
        require_squares(x)
        scaler = StandardScaler().fit(x.numpy())
        model = LogisticRegression(C=self._c, class_weight="balanced", random_state=self._seed, max_iter=self._max_iterations)
        model.fit(scaler.transform(x.numpy()), y.numpy())
        weight = model.coef_.reshape(-1) / scaler.scale_
        return AffineProbe(torch.from_numpy(weight), float(np.ravel(model.intercept_)[0] - weight @ scaler.mean_))
