"""What the model is now: its weights, which adapters are switched on, and whose hooks are on it. Keys and values are good for one
such state alone."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from mi_route2.adapters.routed import RoutedLinear, Switchboard


class ModelState:
    """Notices that weights were written, replaced, or adapters attached or switched, and that others put hooks on the model.

    ``look`` walks the whole model and adds all of its numbers up, which takes about as long as to generate a token: what fused
    optimizers write, and what is written through ``p.data``, torch does not count. ``changed`` only asks the tensors that were
    there at the last ``look`` for the versions that torch does count, and the adapters for their switches.

    ``stale`` are digests of weights that the model had and has not any more.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._tensors: list[Tensor] = []
        self._boards: list[Switchboard] = []
        self._digests: dict[object, str] = {}
        self.stale: set[str] = set()
        self.current: tuple[object, ...] = ()
        self.look()

    def look(self) -> bool:
        """Walks the whole model; ``current`` is what it is now. Whether that is another state than before."""
        before = self.current
        self._walk()
        numbers = hash((tuple(t.data_ptr() for t in self._tensors), totals(self._tensors)))
        self.current = (*self._quick(), numbers, self._hooks())
        if before and (before[0], before[2]) != (self.current[0], numbers):
            self.stale.update(self._digests.values())
            self._digests.clear()
        return self.current != before

    @property
    def changed(self) -> bool:
        """Whether the tensors that were there at the last look were written since, or a switch was moved."""
        return self._quick() != self.current[:2]

    def _walk(self) -> None:
        self._tensors = list(chain(self._model.parameters(), self._model.buffers()))
        self._boards = list({id(m.board): m.board for m in self._model.modules() if isinstance(m, RoutedLinear)}.values())

    def _quick(self) -> tuple[object, ...]:
        versions = sum(t._version for t in self._tensors if not t.is_inference())
        return versions, tuple((board.kept, board.quarantine, board.merged) for board in self._boards)

    def _hooks(self) -> tuple[int, ...]:
        """Of every hook on a module its number, which torch gives once."""
        return tuple(n for m in self._model.modules() for n in (*m._forward_hooks, *m._forward_pre_hooks))

    def digest(self) -> str:
        """SHA-256 of the weights' and buffers' bytes, and of the switches, as they were at the last ``look``."""
        switches = self.current[1]
        if switches not in self._digests:
            self._digests[switches] = self._hashed()
            self.stale.discard(self._digests[switches])
        return self._digests[switches]

    def _hashed(self) -> str:
        data = hashlib.sha256(repr(self.current[1]).encode())
        for name, tensor in self._named():
            data.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            data.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return data.hexdigest()

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return chain(self._model.named_parameters(), self._model.named_buffers())


def totals(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """The sum of each tensor's numbers, in float64 where its device has that."""
    kinds = [torch.float32 if t.device.type == "mps" else torch.float64 for t in tensors]
    sums = [t.detach().sum(dtype=kind) for t, kind in zip(tensors, kinds, strict=True)]
    return tuple(torch.stack([one.to(sums[0].device, kinds[0]) for one in sums]).tolist()) if sums else ()
