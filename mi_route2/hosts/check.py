"""What a model offers, and three checks on random tokens that it offers it rightly; ``mi-route2 check`` prints them."""

import warnings

import torch
from torch import nn

from mi_route2.adapters import AdapterSpec
from mi_route2.architectures import EXPERT_POINTS, POINTS
from mi_route2.found import adds_up
from mi_route2.hosts.base import Host, demand_padding_unread
from mi_route2.hosts.decoder import Decoder
from mi_route2.rollouts import vocabulary
from mi_route2.sites import Site


def check_report(host: Host, model: nn.Module) -> str:
    """Return where the sites of a model are, and what three checks found.

    Args:
        host: The host.
        model: The model in it.

    Raises:
        ValueError: A check fails; the message names it.

    Examples:
        >>> print(check_report(host, host.model))
    """
    row, layers = host.architecture, host.layers()
    lines = [
        f"{type(model).__name__}: {len(layers)} blocks at {row.blocks}, {'found in the model' if row.found else 'in the table'}"
    ]
    names = sorted({name.split(".", 2)[2] for name in host.linears() if name.startswith("blocks.")})
    lines.append(f"Linears for adapters: {', '.join(names)}, unembed")
    if frozen := dict.fromkeys(f"{name.split('.', 2)[2]} ({kind})" for name, kind in host.left_out().items()):
        lines.append(f"without adapters: {', '.join(frozen)}")
    lines.append("points of the blocks:")
    for point in (*POINTS, *(EXPERT_POINTS if "router" in row.points else ())):
        found = [site for site in host.sites() if site.point == point]
        why = row.points[point]
        there = f"{host.address(found[0])} ({len(found)} layers)" if found else f"none: {why}"
        lines.append(f"  {point:10} {there}")
    _demand_sums(host, model)
    lines.append("parts sum to the residual stream: yes")
    _demand_zero_adapters(host, model)
    lines.append("adapters that are zero change no bit: yes")
    demand_padding_unread(model)
    lines.append("padding on either side changes no logit: yes")
    lines.append(f"engine: {_engine(host)}")
    return "\n".join(lines)


def _engine(host: Host) -> str:
    try:
        return "each request on a cache of its own" if Decoder(host).private else "requests share forwards"
    except ValueError as error:
        return f"none: {error}"


def _tokens(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    return torch.randint(vocabulary(model) or 2, (2, 6), generator=torch.Generator().manual_seed(2)).to(device)


def _demand_sums(host: Host, model: nn.Module) -> None:
    cache = host.capture(host.sites(), _tokens(model))
    for layer in host.layers():
        for whole, before, part in (("resid_mid", "resid_pre", "attn_out"), ("resid_post", "resid_mid", "mlp_out")):
            sites = [Site(layer, point) for point in (whole, before, part)]
            if all(site in cache for site in sites) and not adds_up(cache[sites[0]], cache[sites[1]], 1.0, cache[sites[2]]):
                raise ValueError(f"layer {layer}: {whole} is not {before} + {part}")


def _demand_zero_adapters(host: Host, model: nn.Module) -> None:
    tokens = _tokens(model)
    with torch.no_grad():
        before = host.logits(tokens)
        with warnings.catch_warnings(action="ignore"):  # the report names what takes no adapters
            adapters = host.attach("blocks.*", spec=AdapterSpec("lora", rank=1, quarantine_rank=1), generator=torch.Generator())
        try:
            after = host.logits(tokens)
        finally:
            adapters.detach()
    if not torch.equal(before, after):
        raise ValueError("adapters that are zero change the logits: the model multiplies by a weight without calling its Linear")
