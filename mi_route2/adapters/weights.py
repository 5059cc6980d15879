"""Hashes of a model's weights by content and position.

    checksum(tensors)                computed on each tensor's device: detects changes within a process
    weights_hash(model, linears)     the same on every host and device: identifies the model of adapters or activations

Both are XXH3 of 128 bits, which reads 9 GB/s on one core: .05 s for 125M float32 weights. It is not cryptographic: it does not
resist somebody who constructs two models with one hash. ``checksum`` does not copy tensors from a CUDA device, but sums them there
over words ``x_i`` of at most 32 bits, with fixed random keys ``k_i`` of 64 bits:

    sum_i k_i x_i  (mod 2^64),  twice,  for every 2^22 words

Two different contents have the same pair of sums with a probability below 2^-64.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import xxhash
from jaxtyping import Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mi_route2.adapters.linear import Branch, RoutedLinear
from mi_route2.architectures import WRAPPED
from mi_route2.sites import Slot, whole

_WORDS = 1 << 22
_FUSED_COPY = "qkv"  # a bridge keeps the fused module under this name after copying its parts, and never calls it
_WRAPPERS = (WRAPPED, "inner", "_checkpoint_wrapped_module", "_orig_mod")
"""Names of modules that others are put into: by a bridge, by FSDP's checkpointing and by ``torch.compile``."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the tensors' names, types, shapes and bytes; see ``checksums``."""
    hasher = xxhash.xxh3_128()
    for entry in checksums(tensors).values():
        hasher.update(entry)
    return hasher.hexdigest()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return a hash of each tensor's name, type, shape and bytes.

    It can be compared within this process only, while the tensors stay on their devices.
    """
    keys = {device: _keys(device) for device in {t.device for t in tensors.values()} if device.type == "cuda"}
    sums = {name: _sums(t, keys[t.device]) for name, t in tensors.items() if t.is_cuda}  # start all before waiting for the first
    by_name = {}
    for name, t in tensors.items():
        digest = sums[name].cpu().numpy().tobytes() if name in sums else _data_hash(t)
        by_name[name] = f"{name} {t.dtype} {list(t.shape)};".encode() + digest
    return by_name


def weights_hash(model: nn.Module, linears: Mapping[str, Slot], *, adapters: bool) -> str:
    """Return a hash of every parameter and persistent buffer of ``model``, under names that are independent of the host.

    Sharded tensors are gathered one at a time, so that all processes must call this.

    Args:
        model: a torch model, or a bridge around one.
        linears: all of its logical Linears by name.
        adapters: True to include attached adapters, False for the base only.
    """
    hasher, seen = xxhash.xxh3_128(), {}
    refuse_offloaded(model)
    for name, tensor, part in sorted(named(model, linears, adapters=adapters), key=lambda entry: entry[0]):
        t = part(whole(tensor))
        hasher.update(f"{name} {t.dtype} {list(t.shape)};".encode())
        if t is not tensor or not isinstance(t, nn.Parameter):
            hasher.update(_data_hash(t))
            continue
        if id(t) not in seen:  # a tied weight is read once; ids are unique because the model keeps its tensors alive
            seen[id(t)] = _data_hash(t)
        hasher.update(seen[id(t)])
    return hasher.hexdigest()


def refuse_offloaded(model: nn.Module) -> None:
    """Raise ``ValueError`` if a weight is elsewhere until its module runs; its place on ``meta`` multiplies without an error."""
    if (name := next((name for name, p in model.named_parameters() if p.is_meta), None)) is not None:
        raise ValueError(
            f"{name} is not in memory (on the device meta): load the model without offloading to the CPU or disk, for example with "
            'from_pretrained(..., device_map={"": "cuda"}) or on the CPU alone'
        )


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` whose parameters FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported nothing is sharded, and its import takes time
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> bool:
    """Return whether FSDP2 shards ``model``, with every weight in shards: after a forward it leaves some whole, in another type.

    All processes must call this, or some would gather weights in the next forward that others still have.
    """
    modules = sharded_modules(model)
    for module in modules:
        module.reshard()  # pyright: ignore[reportCallIssue]
    return bool(modules)


class Versions:
    """Tensors, how often torch counts that each was written, and their memory; equal if they are the same and nothing was written.

    (``model.to(dtype)`` gives a parameter other memory with other numbers, and counts no write.)
    """

    def __init__(self, tensors: Iterable[Tensor]):
        # the tensors are kept, so that no other one can have their ids
        self._seen = [(t, _version(t), t.dtype, _memory(t)) for t in tensors]

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy holds, which is equal to none: torch counts the writes of copied tensors from 0 again."""
        return {"_seen": [(t, -1, dtype, None) for t, _, dtype, _ in self._seen]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Versions) and self._ids == other._ids

    @property
    def _ids(self) -> list[tuple[object, ...]]:
        return [(id(t), version, dtype, memory and memory.cdata) for t, version, dtype, memory in self._seen]

    @property
    def unwritten(self) -> bool:
        """True if none of the tensors was written since."""
        return self == Versions(t for t, *_ in self._seen)


def _data_hash(t: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _keys(device: torch.device) -> Int[Tensor, "2 n"]:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (2, _WORDS), generator=generator, device=device)


def _sums(t: Tensor, keys: Int[Tensor, "2 n"]) -> Int[Tensor, "parts 2"]:
    """Return the pair of sums of the module's equation for every 2^22 words."""
    word = {1: torch.uint8, 2: torch.int16}.get(t.element_size(), torch.int32)
    words = t.detach().contiguous().view(-1).view(word)
    return torch.stack([(keys[:, : len(part)] * part).sum(dim=1) for part in words.split(keys.shape[1])])


def _version(t: Tensor) -> int:
    if t.is_inference():
        return 0
    local = getattr(t, "to_local", None)  # the shard of a DTensor counts what is written to it directly
    return t._version + (0 if local is None else local()._version)


def _memory(t: Tensor) -> StorageWeakRef | None:
    """Return a reference to the memory of ``t`` that does not keep it; ``None`` for a DTensor, which has none of its own."""
    return None if hasattr(t, "to_local") else StorageWeakRef(t.untyped_storage())


Entry = tuple[str, Tensor, Callable[[Tensor], Tensor]]
"""Name of a tensor, the tensor of the model that holds it, and the function that takes it from there."""


def named(model: nn.Module, linears: Mapping[str, Slot], *, adapters: bool) -> Iterator[Entry]:
    """Yield every tensor that counts, with its name; Linears are named by site, because hosts fuse and wrap them differently."""
    done: set[int] = set()
    for site, slot in linears.items():
        module = slot.module.base if isinstance(slot.module, RoutedLinear) else slot.module
        known = id(module) in done  # as another part of a fused Linear
        done.add(id(module))
        for name in ("weight", "bias"):  # a bridge adds a zero buffer to Linears without a bias
            if (tensor := module._parameters.get(name)) is not None:
                yield f"{site}.{name}", tensor, slot.part
        if not known:  # what a subclass or a parametrization computes the weight or the output from
            rest = ((name, t) for name, t in _tensors(module) if name not in ("weight", "bias"))
            children = (entry for name, child in _children(module, done) for entry in _others(child, f"{name}.", done, adapters))
            yield from ((f"{site}.{name}", t, lambda t: t) for name, t in (*rest, *children))
    others = _others(getattr(model, "original_model", model), "", done, adapters)
    yield from ((name, t, lambda t: t) for name, t in others)


def _others(module: nn.Module, path: str, done: set[int], adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``module`` outside of the modules that are ``done``."""
    done.add(id(module))
    if isinstance(module, Branch):
        yield from ((f"{module.site}.route.{name}", t) for name, t in module.state_dict().items() if adapters)
        return
    if WRAPPED in module._modules and (copied := module._modules.get(_FUSED_COPY)) is not None:
        done |= {id(module) for module in copied.modules()}
    yield from ((f"{path}{name}", t) for name, t in _tensors(module))
    for name, child in _children(module, done):
        yield from _others(child, path if name in _WRAPPERS else f"{path}{name}.", done, adapters)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of ``module`` alone."""
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and name not in module._non_persistent_buffers_set:
            yield name, t


def _children(module: nn.Module, done: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None and id(child) not in done:
            yield name, child
