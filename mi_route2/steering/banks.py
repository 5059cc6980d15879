"""Steering vectors of one step in buffers whose addresses never change, so that a recorded sequence of kernels sees every step.

    h <- h + bank[line] * scale + bank[-1] * gain        line, scale, gain: one number per token

``bank [lines + 1, d]`` of a site has the lines of its steering table and, last, the tier's vector. ``gain`` is 0 at prompt tokens.
A padded token, and one of a request without vectors, has line, scale and gain 0 and keeps every bit. Before a forward ``fill``
writes in place; in the forward ``add`` runs the same kernels at every step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.sites import Site
from mi_route2.steering.specs import term

Span = tuple[range, int, float, float]
"""Tokens of a forward, with their line, scale and gain."""


class VectorBanks:
    """Banks of the sites that were ever steered, and buffers for the numbers of ``tokens`` tokens, which all sites share.

    A bank is allocated when its site is first steered, and kept, because freed memory would come back at another address.
    """

    def __init__(self, lines: int, tokens: int, dtype: torch.dtype, device: torch.device):
        self._banks: dict[Site, Tensor] = {}
        self._height = lines + 1
        self._lines = torch.zeros(tokens, dtype=torch.long, device=device)
        self._scales = torch.zeros(2, tokens, dtype=dtype, device=device)
        self._used = False

    def __contains__(self, site: Site) -> bool:
        return site in self._banks

    @torch.inference_mode(False)  # memory of inference mode could not be written outside of it
    def lines(self, site: Site, width: int) -> Float[Tensor, "lines width"]:
        """Return the lines of a site's table, all zeros if the site was never steered."""
        if site not in self._banks:
            self._banks[site] = self._scales.new_zeros(self._height, width)
        return self._banks[site][:-1]

    def set_tier(self, tier: Mapping[Site, Tensor]) -> None:
        """Replace the tier's vectors at all sites."""
        for site, vector in tier.items():
            self.lines(site, len(vector))
        for site, bank in self._banks.items():
            bank[-1] = tier.get(site, 0)

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the numbers of the next forward's tokens; those outside of ``spans`` get zeros."""
        if not spans and not self._used:
            return
        lines, scales = torch.zeros_like(self._lines, device="cpu"), torch.zeros_like(self._scales, device="cpu")
        with np.errstate(over="ignore"):  # a scale beyond the dtype is infinite, and an error of its request
            for here, line, scale, gain in spans:
                cells = slice(here.start, here.stop)
                lines.numpy()[cells], scales.numpy()[0, cells], scales.numpy()[1, cells] = line, scale, gain
        self._lines.copy_(lines)
        self._scales.copy_(scales)
        self._used = bool(spans)

    def add(self, site: Site, x: Float[Tensor, "n d"], residual: Float[Tensor, "n d"] | None) -> tuple[Tensor, Tensor | None]:
        """Steer ``x + residual``; a token with a vector becomes the pair of its new value and 0, any other keeps its pair."""
        bank, count = self._banks[site], len(x)
        static = term(bank.index_select(0, self._lines[:count]), self._scales[0, :count], dtype=x.dtype)
        tier = term(bank[-1:], self._scales[1, :count], dtype=x.dtype)
        acts = ((static != 0) | (tier != 0)).any(-1, keepdim=True)
        h = x if residual is None else x + residual
        return torch.where(acts, h + static + tier, x), None if residual is None else residual.masked_fill(acts, 0)
