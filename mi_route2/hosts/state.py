"""What the model is now: its weights, which adapters are switched on, and whose hooks are on it. Keys and values are good for one
such state alone."""

from torch import Tensor

from mi_route2.adapters.linear import RoutedLinear, Switchboard
from mi_route2.adapters.weights import checksum
from mi_route2.hosts.base import Host


class ModelState:
    """Notices that weights were written, replaced, or adapters attached or switched, and that others put hooks on the model.

    ``look`` walks the whole model and reads all of its bytes (9 GB/s on one core, .05 s for 125M float32 weights): what fused
    optimizers write, and what is written through ``p.data``, torch does not count. ``changed`` only asks the tensors that were
    there at the last ``look`` for the versions that torch does count, and the adapters for their switches.
    """

    def __init__(self, host: Host):
        self._host = host
        self._tensors: list[Tensor] = []
        self._boards: list[Switchboard] = []
        self._weights: str | None = None
        self.current: tuple[object, ...] = ()
        self.look()

    def look(self) -> bool:
        """Walks the whole model; ``current`` is what it is now. Whether that is another state than before."""
        before = self.current
        model = self._host.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._tensors = list(named.values())
        self._boards = list({id(m.board): m.board for m in model.modules() if isinstance(m, RoutedLinear)}.values())
        self.current = (*self._quick(), checksum(named), self._hooks())
        if before and before[2] != self.current[2]:
            self._weights = None
        return self.current != before

    @property
    def changed(self) -> bool:
        """Whether the tensors that were there at the last look were written since, or a switch was moved."""
        return self._quick() != self.current[:2]

    def weights(self) -> str:
        """``Host.weights_hash``, computed once for all that a ``look`` found unchanged."""
        if self._weights is None:
            self._weights = self._host.weights_hash()
        return self._weights

    def _quick(self) -> tuple[object, ...]:
        versions = sum(t._version for t in self._tensors if not t.is_inference())
        return versions, tuple((board.kept, board.quarantine, board.merged) for board in self._boards)

    def _hooks(self) -> tuple[int, ...]:
        """Of every hook on a module its number, which torch gives once."""
        return tuple(n for m in self._host.model.modules() for n in (*m._forward_hooks, *m._forward_pre_hooks))
