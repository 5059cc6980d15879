"""Hashes of weights: every bit and every place counts, on every host, and only for what they are of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, SPECS, make_family, make_tokens, move
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2.adapters import Adapters, export_merged, export_peft, load_adapters, save_adapters, save_pretrained
from mi_route2.adapters.weights import _keys, _sums, checksum
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host

CPU = torch.device("cpu")


def on_device(tensors: dict[str, Tensor]) -> bytes:
    """Return what a CUDA device would compute, on the CPU."""
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


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of one process, whose shards are DTensors as those of many are."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def shard(adapters: Adapters, mesh: Any, **how: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    whole = {*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()}
    fully_shard(adapters.model, mesh=mesh, ignored_params=whole, **how)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_a_sharded_base_has_the_hash_and_the_files_of_the_whole_one(name: str, mesh: Any, tmp_path: Path) -> None:
    """Also of Linears that are fused and transposed; and after a forward, which leaves weights whole and in another type."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    host = hosted(name, "torch")
    adapters = move(host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator()))
    whole, tokens = adapters.base_hash, make_tokens()[0]
    save_adapters(adapters, tmp_path / "whole")
    export_peft(adapters, tmp_path / "lora")
    shard(adapters, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"their hash needs every process: read adapters\.base_hash in all of them"):
        save_adapters(adapters, tmp_path / "sharded")
    load_adapters(adapters, tmp_path / "whole")
    assert adapters.base_hash == whole
    with torch.no_grad():
        host.model(tokens)
        assert next(adapters.model.parameters()).dtype == torch.float32
    save_adapters(adapters, tmp_path / "sharded")
    assert (tmp_path / "sharded").read_bytes() == (tmp_path / "whole").read_bytes()
    assert adapters.base_hash == whole
    for write in (save_pretrained, export_peft):
        write(adapters, tmp_path / write.__name__)
    for file in (tmp_path / "lora").iterdir():
        assert (tmp_path / "export_peft" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(ValueError, match="merge it where the model is whole"):
        export_merged(adapters, tmp_path / "merged")


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_weights_that_are_merged_of_shards_are_the_whole_ones(name: str, mesh: Any) -> None:
    host, tokens = hosted(name, "torch"), make_tokens()[0]
    adapters = move(host.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator()))
    with torch.no_grad(), adapters.merged():
        merged = host.model(tokens).logits
    shard(adapters, mesh)
    with torch.no_grad(), adapters.merged():
        assert torch.equal(host.model(tokens).logits, merged)


@pytest.mark.parametrize("directly", [False, True])
def test_what_is_written_into_a_shard_is_another_base(directly: bool, mesh: Any, tmp_path: Path) -> None:
    adapters = hosted("Llama", "torch").attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator())
    shard(adapters, mesh)
    before = adapters.base_hash
    save_adapters(adapters, tmp_path / "file")
    with torch.no_grad():
        weight: Any = next(p for name, p in adapters.model.named_parameters() if name.endswith("norm.weight"))
        (weight.to_local() if directly else weight).mul_(2)
    with pytest.raises(RuntimeError, match=r"read adapters\.base_hash"):
        save_adapters(adapters, tmp_path / "file")
    assert adapters.base_hash != before
