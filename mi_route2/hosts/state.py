"""Fingerprint of a model's state: its weights, the switches of its adapters, and hooks on its modules.

Cached keys and values are valid for one such state only.
"""

from torch import Tensor

from mi_route2.adapters.linear import RoutedLinear, Switchboard
from mi_route2.adapters.weights import checksum
from mi_route2.hosts.base import Host


class ModelState:
    """Detector of changes to a model: weights written or replaced, adapters attached or switched, hooks registered by others.

    ``look`` walks the whole model and reads all of its bytes (9 GB/s on one core, .05 s for 125M float32 weights), because torch's
    version counters miss the writes of fused optimizers and writes through ``p.data``. ``changed`` is a quick check of the version
    counters of the tensors of the last ``look``, and of the adapters' switches.
    """

    def __init__(self, host: Host):
        self._host = host
        self._tensors: list[Tensor] = []
        self._boards: list[Switchboard] = []
        self._weights: str | None = None
        self.current: tuple[object, ...] = ()
        self.look()

    def look(self) -> bool:
        """Walk the whole model and update ``current``; return True if the state differs from the previous one."""
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
        """True if since the last ``look`` torch counted a write, a parameter was replaced or added, or a switch was changed."""
        return self._quick() != self.current[:2]

    def weights(self) -> str:
        """Return ``Host.weights_hash``, cached until a ``look`` finds other weights."""
        if self._weights is None:
            self._weights = self._host.weights_hash()
        return self._weights

    def _quick(self) -> tuple[object, ...]:
        versions = sum(t._version for t in self._tensors if not t.is_inference())
        places = tuple(map(id, self._host.model.parameters()))  # a parameter that was replaced has a version of its own
        return (versions, places), tuple((board.kept, board.quarantine, board.merged) for board in self._boards)

    def _hooks(self) -> tuple[int, ...]:
        """Return the ids of all module hooks; torch never reuses an id."""
        return tuple(n for m in self._host.model.modules() for n in (*m._forward_hooks, *m._forward_pre_hooks))
