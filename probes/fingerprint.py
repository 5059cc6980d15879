"""Gradient fingerprints: a random projection of each rollout's gradient, as features of a probe.

    g_b^m  = d(-log p(completion of b)) / d W_m = sum_t dy_bt x_bt^T          at every Linear m that has adapters
    z_b[i] = sum_m <g_b^m, u_mi v_mi^T> / (|g_b| sqrt(k)) = sum_m sum_t (dy_bt . u_mi) (x_bt . v_mi) / (|g_b| sqrt(k))

``u`` and ``v`` are standard normal, so ``z_b . z_c`` is the cosine of two rollouts' gradients in expectation. A projection of rank
one needs no matrix as large as the weights. Source: GRIFT (2604.16242), where such fingerprints tell reward hacking.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mi_route2.adapters import Adapters
from mi_route2.adapters.gradients import MatrixGrad, exact, rounding, wide
from mi_route2.adapters.tape import LearnNothing, Tape
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.directions import Features, FullGradientReader, backward


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Projections of every site's gradient to ``k`` numbers; call it on a policy and its rollouts.

    Examples:
        >>> fingerprint = Fingerprint.draw(policy.adapters, width=64, generator=torch.Generator().manual_seed(0))
        >>> z = fingerprint(policy, rollouts)  # [b 64]
    """

    left: Mapping[str, Float[Tensor, "d_out k"]]
    right: Mapping[str, Float[Tensor, "d_in k"]]

    @staticmethod
    @checked
    def draw(adapters: Adapters, width: int = 64, generator: torch.Generator | None = None) -> "Fingerprint":
        """Draw projections for the sites of ``adapters``, in the order of their names.

        Raises:
            ValueError: ``width`` is less than 1.
        """
        if width < 1:
            raise ValueError(f"width is the length of a fingerprint and at least 1, not {width}")
        left, right = {}, {}
        for site in sorted(adapters.sites):
            weight = adapters.sites[site].weight
            shape = adapters.sites[site].shape
            sides = (torch.randn(d, width, generator=generator, dtype=torch.float64, device="cpu") for d in shape)
            left[site], right[site] = (side.to(weight.device, wide(weight.dtype)) for side in sides)
        return Fingerprint(left, right)

    @checked
    @torch.inference_mode(False)  # in which nothing has a gradient
    def __call__(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, "b k"]:
        """Return the fingerprints of ``rollouts`` under the adapters as they are switched now; no ``.grad`` is touched.

        Raises:
            ValueError: A gradient is NaN or infinite, or the adapters are off, where none reaches them.
        """
        if policy.adapters.mode == "reference":
            raise ValueError("both adapters are off, so that no gradient reaches them: leave adapters.reference()")
        (b, s), reader = rollouts.tokens.shape, FullGradientReader()
        tape = Tape(b, s, kept=LearnNothing(), quarantine=LearnNothing(), outputs=reader, real=rollouts.attention)
        backward(policy, rollouts, tape, self.left)
        return self._projected(reader.features)

    @exact()
    def _projected(self, features: Features) -> Float[Tensor, "b k"]:
        """Return the projections of full-weight gradients; errors as in a call."""
        sketches, squares, floor = [], [], rounding(feature.magnitude() for feature in features.values())
        for site, u in self.left.items():
            gradient, v = features[site], self.right[site]
            if isinstance(gradient, MatrixGrad):
                out, into = (einsum(x.to(w), w, "b s d, d k -> b s k") for x, w in ((gradient.dy, u), (gradient.h, v)))
                sketches.append((out * into).sum(dim=1))
            else:  # the sum over several calls
                sketches.append(torch.stack([gradient.inner(torch.outer(*w)) for w in zip(u.T, v.T, strict=True)], dim=1))
            norms = gradient.norms()
            if not bool(norms.isfinite().all()):  # a comparison would take NaN for a rounding error
                wrong = (~norms.isfinite()).nonzero()[:, 0].tolist()
                raise ValueError(f"rollouts {wrong[:8]} have gradients at {site} that are NaN or infinite: leave them out")
            real = norms > floor  # the rest is rounding of a gradient that is 0 in theory
            sketches[-1] = torch.where(real[:, None], sketches[-1], 0.0)
            squares.append(torch.where(real, norms, 0.0).square())
        norms = torch.stack(squares).sum(dim=0).sqrt()[:, None] * u.shape[1] ** 0.5
        total = torch.stack(sketches).sum(dim=0)
        # A rollout without a gradient has no direction.
        return torch.where(norms > 0, total / torch.where(norms > 0, norms, 1.0), 0.0).to(total.dtype)
