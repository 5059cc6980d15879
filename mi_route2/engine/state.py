"""What the model is now: its weights, and which adapters are switched on. Keys and values are good for one such state alone."""

import hashlib
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from mi_route2.adapters.routed import RoutedLinear, Switchboard


class ModelState:
    """Notices that weights were written, replaced, or adapters attached or switched.

    ``changed`` asks the tensors that were there at the last ``look`` for the versions that torch counts, and the adapters for their
    switches; ``look`` walks the whole model. A write through ``p.data`` is counted by neither.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._tensors: list[Tensor] = []
        self._boards: list[Switchboard] = []
        self.current: tuple[object, ...] = ()
        self.look()

    def look(self) -> bool:
        """Walks the whole model; ``current`` is what it is now. Whether that is another state than before."""
        before = self.current
        self._walk()
        self.current = (*self._quick(), hash(tuple(t.data_ptr() for t in self._tensors)))
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

    def digest(self) -> str:
        """SHA-256 of the weights' and buffers' bytes, and of the switches."""
        data = hashlib.sha256(repr(self.current[1]).encode())
        for name, tensor in self._named():
            data.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            data.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return data.hexdigest()

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return chain(self._model.named_parameters(), self._model.named_buffers())
