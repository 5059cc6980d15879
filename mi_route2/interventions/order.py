"""In which order the sites of a forward fire: what a monitor can gate in the forward that it reads.

    resid_pre  attn_in  [q k v]  z  [attn.o]  attn_out  resid_mid  mlp_in  [mlp.gate mlp.up]  [mlp.down]  mlp_out  resid_post

Brackets hold the adapters' own points (``kept_a``, ``kept_out``, ``quarantine_out``, in this order) of their Linears; the points
q, k and v stand behind those of their own Linear. Where q, k and v are fused in one module, all their adapters run before any of
the three points fires, and these in any order; where they are apart, q is through before k begins. Only what holds for both is an
order here.
"""

from mi_route2.architectures import ADAPTER_POINTS, LINEARS
from mi_route2.sites import Site

_POINT_STAGE = {
    "resid_pre": 0, "attn_in": 1, "q": 2, "k": 2, "v": 2, "z": 3, "attn_out": 5, "resid_mid": 6, "mlp_in": 7, "mlp_out": 10,
    "resid_post": 11,
}  # fmt: skip
_LINEAR_STAGE = {"attn.q": 2, "attn.k": 2, "attn.v": 2, "attn.o": 4, "mlp.gate": 8, "mlp.up": 8, "mlp.down": 9}
_ADAPTER = tuple(ADAPTER_POINTS)


def _stage(site: Site) -> int:
    return _LINEAR_STAGE[site.linear] if site.linear else _POINT_STAGE[site.point]


def precedes(first: Site, then: Site) -> bool:
    """Whether ``first`` fires before ``then`` in every forward, on every host and architecture."""
    if first.layer is None or then.layer is None:
        both = first.layer is None and then.layer is None
        return _ADAPTER.index(first.point) < _ADAPTER.index(then.point) if both else first.layer is not None
    if first.layer != then.layer:
        return first.layer < then.layer
    if _stage(first) != _stage(then):
        return _stage(first) < _stage(then)
    if not first.linear:
        return False  # among q, k and v, or a Linear's adapters may run before another Linear's point, or after it
    linear, other = LINEARS.index(first.linear), LINEARS.index(then.linear or f"attn.{then.point}")
    if not then.linear:
        return linear <= other
    return (linear, _ADAPTER.index(first.point)) < (other, _ADAPTER.index(then.point))
