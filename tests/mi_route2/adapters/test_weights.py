"""Hashes of weights: every bit and every place counts, on every host, and only for what they are of."""

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, SPECS, make_family, move
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2.adapters.weights import _keys, _sums, checksum
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host

CPU = torch.device("cpu")


def on_device(tensors: dict[str, Tensor]) -> bytes:
    """What a CUDA device would compute, here."""
    return b"".join(_sums(t, KEYS).numpy().tobytes() for t in tensors.values())


KEYS = _keys(CPU)[:, :7]  # parts of 7 words


@pytest.mark.parametrize("read", [checksum, on_device])
@settings(max_examples=50)
@given(data=st.data(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]))
def test_every_bit_and_every_place_counts(read: Any, data: st.DataObject, dtype: torch.dtype) -> None:
    """A flipped bit, two numbers exchanged (which keeps every sum), and two signs."""
    n = data.draw(st.integers(2, 40))
    numbers = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))).to(dtype)
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    exchanged, negated, flipped = numbers.clone(), numbers.clone(), numbers.clone()
    exchanged[[i, j]] = numbers[[j, i]]
    if dtype != torch.bool:
        negated[[i, j]] = -numbers[[i, j]]
    raw = flipped.view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    before = read({"w": numbers})
    for changed in (exchanged, negated, flipped):
        same = numbers.view(torch.uint8).tolist() == changed.view(torch.uint8).tolist()
        assert (read({"w": changed}) == before) == same


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(2, 6)
    others = [{"v": zeros}, {"w": zeros.view(3, 4)}, {"w": zeros.int()}, {"w": zeros[:1], "v": zeros[1:]}]
    assert len({checksum(tensors) for tensors in [{"w": zeros}, *others]}) == 5
    assert checksum({"w": zeros.mT.contiguous().mT}) == checksum({"w": zeros})


@settings(max_examples=50)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_the_sums_of_a_device_are_those_of_the_equation(words: list[int]) -> None:
    t, keys = torch.tensor(words, dtype=torch.int32), KEYS.tolist()
    parts = [words[start : start + 7] for start in range(0, len(words) or 1, 7)]
    expected = [[sum(k * x for k, x in zip(row, part)) % 2**64 for row in keys] for part in parts]
    assert _sums(t, KEYS).numpy().astype(np.uint64).tolist() == expected


def hosted(name: str, host: str) -> Host:
    return open_host(host, make_family(name, attn="eager"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_base_is_one_on_every_host_with_and_without_adapters(name: str) -> None:
    hosts = {kind: hosted(name, kind) for kind in ("torch", "nnsight", "transformer_lens")}
    bare = {kind: host.weights_hash() for kind, host in hosts.items()}
    assert len(set(bare.values())) == 1
    draw = lambda: torch.Generator().manual_seed(7)  # noqa: E731
    adapters = {kind: host.attach("blocks.*.attn.[qv]", spec=SPECS["lora"], generator=draw()) for kind, host in hosts.items()}
    assert {one.base_hash for one in adapters.values()} == set(bare.values())
    fresh = {host.weights_hash() for host in hosts.values()}
    for one in adapters.values():
        move(one)
    moved = {host.weights_hash() for host in hosts.values()}
    assert len(fresh | moved | set(bare.values())) == 3, "adapters count, and what they hold"
    assert {one.base_hash for one in adapters.values()} == set(bare.values()), "they are no part of the base"
    for kind, one in adapters.items():
        one.detach()
        assert hosts[kind].weights_hash() == bare[kind]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_the_base_counts_wherever_the_adapters_are(name: str) -> None:
    """Embeddings, norms, biases, the MLP and the unembedding, with adapters at two Linears of attention: one last bit."""
    host = hosted(name, "torch")
    adapters = host.attach("blocks.*.attn.[qv]", spec=SPECS["lora"], generator=torch.Generator())
    ours = {id(t) for t in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values())}
    seen = {adapters.base_hash}
    base = [p for p in host.model.parameters() if id(p) not in ours]
    for p in base:
        p.data.view(-1).view(torch.int64)[-1] ^= 1
        seen.add(adapters.base_hash)
    assert len(seen) == len(base) + 1
