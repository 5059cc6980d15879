"""What an intervention does to activations, as pure functions ``h -> h'`` that keep the type of ``h``.

    patch    (1 - alpha) * h + alpha * source
    steer    h + static * scale * row_gate + dynamic * token_scale
    clamp    h + strength * (clip(h.v, low, high) - h.v) * v            |v| = 1
    gate     sigmoid(sharpness * (h.probe - threshold))

The last axis is the vector's. At a point by head ([b s h dh]) flatten the heads first: ``h.flatten(-2)``, vectors likewise.
Sums and products are taken in float32 at least, and rounded to the type of ``h`` once. Where an edit does nothing (alpha 0, a
projection between its bounds, a factor of 0), ``h`` is returned bit for bit, whatever the other operand holds.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def patch(
    h: Float[Tensor, "*n d"], source: Float[Tensor, "*#n #d"], alpha: float | Float[Tensor, "*#n #d"]
) -> Float[Tensor, "*n d"]:
    """``(1 - alpha) * h + alpha * source``: alpha 1 is ``source`` bit for bit (rounded to the type of ``h``), alpha 0 is ``h``.

    ``alpha`` is one number, one per row (``[n 1]``) or one per dimension (``[d]``). This form, not ``h + alpha * (source - h)``:
    the difference would leave rounding at alpha 1.
    """
    kind = wide(h.dtype)
    weight = torch.as_tensor(alpha, dtype=kind, device=h.device)
    mixed = ((1 - weight) * h.to(kind) + weight * source.to(kind)).to(h.dtype)
    # Chosen, not multiplied: 0 * inf is NaN, and -0.0 + 0.0 is 0.0.
    return torch.where(weight == 1, source.to(h.dtype), torch.where(weight == 0, h, mixed)).expand_as(h)


def term(vector: Float[Tensor, "*#n d"], *factors: float | Float[Tensor, "*#n"], dtype: torch.dtype) -> Float[Tensor, "*#n d"]:
    """``vector * factor * ...`` from left to right (factors are numbers, or one per row), rounded to ``dtype`` once."""
    product = vector.to(wide(torch.promote_types(vector.dtype, dtype)))
    for factor in factors:
        product = product * (factor.to(product.dtype)[..., None] if isinstance(factor, Tensor) else factor)
    return product.to(dtype)


def steer(
    h: Float[Tensor, "*n d"],
    static: Float[Tensor, "*#n d"] | None = None,
    scale: float | Float[Tensor, "*#n"] = 1.0,
    row_gate: float | Float[Tensor, "*#n"] = 1.0,
    dynamic: Float[Tensor, "*#n d"] | None = None,
    token_scale: float | Float[Tensor, "*#n"] = 0.0,
) -> Float[Tensor, "*n d"]:
    """``h + static * scale * row_gate + dynamic * token_scale``, the two terms added in this order.

    A row whose factor is 0 is left as it is, bit for bit.
    """
    for vector, factors in ((static, (scale, row_gate)), (dynamic, (token_scale,))):
        if vector is not None:
            acts = torch.ones((), dtype=torch.bool, device=h.device)
            for factor in factors:
                acts = acts & (torch.as_tensor(factor, device=h.device) != 0)
            h = torch.where(acts[..., None], h + term(vector, *factors, dtype=h.dtype), h)
    return h


def clamp(
    h: Float[Tensor, "*n d"],
    v: Float[Tensor, "*#n d"],
    low: float | Float[Tensor, "*#n"],
    high: float | Float[Tensor, "*#n"],
    strength: float | Float[Tensor, "*#n"] = 1.0,
) -> Float[Tensor, "*n d"]:
    """Move the projection on the unit direction ``v`` towards ``[low, high]`` by the share ``strength``.

    ``h`` is returned bit for bit where the projection is between the bounds. Several clamps are applied one after another.
    """
    kind = wide(h.dtype)
    unit, full = v.to(kind), h.to(kind)
    projection = (full * unit).sum(-1)  # a product and a sum: the bits of a row do not depend on how many rows there are
    below, above = (torch.as_tensor(bound, dtype=kind, device=h.device) for bound in (low, high))
    move = (projection.clamp(below, above) - projection) * torch.as_tensor(strength, dtype=kind, device=h.device)
    return torch.where((move == 0)[..., None], h, (full + move[..., None] * unit).to(h.dtype))


def score(h: Float[Tensor, "*n d"], probe: Float[Tensor, "*#n d"]) -> Float[Tensor, "*n"]:
    """``h.probe`` in float32 at least; the bits of a row do not depend on the other rows."""
    kind = wide(h.dtype)
    return (h.to(kind) * probe.to(kind)).sum(-1)


def squash(
    scores: Float[Tensor, "*n"], threshold: float | Float[Tensor, "*#n"] = 0.0, sharpness: float | Float[Tensor, "*#n"] = 1.0
) -> Float[Tensor, "*n"]:
    """``sigmoid(sharpness * (score - threshold))``; the bits of a row do not depend on the other rows."""
    x = sharpness * (scores - threshold)
    if x.device.type == "cpu":
        # Side by side in memory, eight at a time would be rounded otherwise than what is left over at the end.
        x = torch.stack((x, x), -1)[..., 0]
    return torch.sigmoid(x)


def gate(
    h: Float[Tensor, "*n d"],
    probe: Float[Tensor, "*#n d"],
    threshold: float | Float[Tensor, "*#n"] = 0.0,
    sharpness: float | Float[Tensor, "*#n"] = 1.0,
) -> Float[Tensor, "*n"]:
    """``sigmoid(sharpness * (h.probe - threshold))``, in float32, for float64 activations in float64."""
    return squash(score(h, probe), threshold, sharpness)


def attenuate(h: Float[Tensor, "*n d"], factor: float | Float[Tensor, "*#n"]) -> Float[Tensor, "*n d"]:
    """``h * factor``, row by row; a factor of 0 gives 0 whatever ``h`` holds, a factor of 1 gives ``h`` bit for bit."""
    kind = wide(h.dtype)
    share = torch.as_tensor(factor, dtype=kind, device=h.device)[..., None]
    scaled = torch.where(share == 0, torch.zeros((), dtype=kind, device=h.device), h.to(kind) * share).to(h.dtype)
    return torch.where(share == 1, h, scaled)  # a NaN keeps its bits
