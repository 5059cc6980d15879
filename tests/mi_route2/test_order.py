"""The order of sites is an order: on every family and host, of two ordered sites the first fires first."""

from functools import partial
from itertools import combinations

import pytest
import torch
from families import FAMILIES, LAYERS, make_policy, make_tokens
from torch import Tensor

from mi_route2.architectures import ADAPTER_POINTS, LINEARS, POINTS
from mi_route2.hosts import host_class
from mi_route2.hosts.base import Host
from mi_route2.sites import Site, precedes

ALL = [Site(layer, point) for layer in range(LAYERS) for point in POINTS]
ALL += [Site(layer, point, linear) for layer in range(LAYERS) for linear in LINEARS for point in ADAPTER_POINTS]
ALL += [Site(None, point, "unembed") for point in ADAPTER_POINTS]


def there(host: Host) -> list[Site]:
    """The sites that this host's model has."""
    found = []
    for site in ALL:
        try:
            host.address(site)
        except (KeyError, ValueError):
            continue
        found.append(site)
    return found


def note(fired: list[Site], site: Site, _value: Tensor) -> None:
    fired.append(site)


BEFORE = {a: [b for b in ALL if precedes(a, b)] for a in ALL}


@pytest.mark.parametrize(
    ("name", "family"), [*(("torch", family) for family in FAMILIES), ("transformer_lens", "Qwen3"), ("transformer_lens", "GPT2")]
)
def test_sites_fire_in_their_order(family, name):
    host, _ = make_policy(family, "lora", "blocks.*", "unembed", host=host_class(name), dtype=torch.float32)
    sites = there(host)
    for order in (sites, sites[::-1]):  # hooks of one module fire as they were attached: the order must not rest on that
        fired: list[Site] = []
        with torch.no_grad(), host.hooks({site: partial(note, fired, site) for site in order}):
            host.logits(make_tokens()[0])
        place = {site: i for i, site in enumerate(fired)}
        assert len(place) == len(sites)
        assert not [(str(a), str(b)) for a in sites for b in BEFORE[a] if b in place and place[a] > place[b]]


def test_it_is_a_strict_partial_order():
    before = {a: set(BEFORE[a]) for a in ALL}
    for a in ALL:
        assert a not in before[a]
        for b in before[a]:
            assert a not in before[b]
            assert before[b] <= before[a]


def test_only_the_projections_are_left_unordered():
    for a, b in combinations(ALL, 2):
        if b not in BEFORE[a] and a not in BEFORE[b]:
            assert a.layer == b.layer
            assert {a.point, b.point} & {"q", "k", "v"}
            # a Linear's own adapters come before its point
            assert f"attn.{b.point}" != a.linear
            assert f"attn.{a.point}" != b.linear
