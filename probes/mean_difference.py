"""Mean-difference probe: projection on the line between the two class means, zero half way.

    w = (mu_hack - mu_clean) / |mu_hack - mu_clean|        c = -<w, (mu_hack + mu_clean) / 2>

Marks & Tegmark, 2310.06824. This is LDA under an isotropic covariance, and works with ten examples, because no covariance is
estimated. It streams: only sums of each class are stored, those of sizes among them: a difference within their rounding is 0.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.checks import Mask, checked
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.probe import Class, Labels, Unit, examples, require_both_classes, require_width, unit_vector


@checked
class MeanDifferenceFitter:
    """Fitter of a mean-difference probe by running class sums in float64; batching changes only rounding.

    The score rises for the label `positive`.
    """

    def __init__(self, unit: Unit = "rollout", positive: Class = True) -> None:
        self._unit: Unit = unit
        self._positive = positive
        self._sums: Tensor | None = None
        self._sizes: Tensor | None = None  # sums of absolute values, which say how far the sums may be rounded
        self._counts = torch.zeros(2, dtype=torch.int64, device="cpu")

    @checked
    def update(self, h: Float[Tensor, "b s d"], mask: Mask, labels: Labels) -> None:
        """Add a batch to the sums. ValueError for non-finite activations inside the mask, or another width."""
        x, y = examples(h, mask, labels, self._unit, self._positive)
        if self._sums is None or self._sizes is None:
            self._sums, self._sizes = torch.zeros(2, 2, x.shape[1], dtype=torch.float64, device="cpu")
        require_width(x, self._sums.shape[1])
        classes = [x[~y], x[y]]
        # new tensors, because sums of one batch under inference_mode cannot be written outside of it
        self._sums = self._sums + torch.stack([each.sum(dim=0) for each in classes])
        self._sizes = self._sizes + torch.stack([each.abs().sum(dim=0) for each in classes])
        self._counts = self._counts + torch.tensor([len(each) for each in classes], device="cpu")

    def fit(self) -> AffineProbe:
        """Return the fitted probe. ValueError without both classes, or if their means coincide."""
        negatives, positives = self._counts.tolist()
        require_both_classes(negatives, positives, self._positive)
        assert self._sums is not None
        assert self._sizes is not None
        clean, positive = self._sums / self._counts[:, None]
        apart = positive - clean
        # Sums round by their length and by the size of what they add, which may cancel: what they differ by is no direction.
        size = (self._sizes / self._counts[:, None]).sum(dim=0)
        apart[apart.abs() <= torch.finfo(torch.float64).eps * float(self._counts.sum()) * size] = 0.0
        weight = unit_vector(apart)
        return AffineProbe(weight, -float(weight @ (positive + clean)) / 2, self._positive)
