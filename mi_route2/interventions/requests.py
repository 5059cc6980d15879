"""Who is steered: the requests that run, the rows that they hold, and configurations that are kept under a name.

A row is taken when a request is admitted and given back when it ends or is preempted. What needs a row later (an override) points
at one that is held already, so that it cannot fail for want of one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mi_route2.interventions.buffers import Watch, watch_of
from mi_route2.interventions.rows import Full, Rows, row_key
from mi_route2.interventions.specs import Steering, Vector, looker
from mi_route2.sites import Site


@dataclass
class Living:
    """A request that was admitted and has not ended. ``resident`` is false while it is preempted: then it holds no rows."""

    asked: Steering
    spec: Steering
    configs: Mapping[str, Steering]
    owner: str
    conversation: str | None
    watches: dict[str, Watch]
    override: "Held | None" = None
    scale: float = 1.0
    dynamic: dict[str, Watch] = field(default_factory=dict)
    resident: bool = False
    row: int = 0
    alternatives: tuple[int, ...] = ()
    routed: int | None = None

    @property
    def specs(self) -> list[Steering]:
        """All that it needs rows for."""
        return [self.spec, *self.configs.values(), *([self.override.spec] if self.override else ())]


@dataclass(eq=False)
class Held:
    """A configuration under a name, for overrides to point at. ``scale`` is that of the requests which are routed to it, and of no
    other that shares its row."""

    name: str
    spec: Steering
    row: int = 0
    owner: str = ""
    scale: float = 1.0


class Requests:
    """See the module; errors are those of ``SteeringState``, whose methods these are without what they change there."""

    def __init__(self, rows: Rows, vectors: Mapping[str, Vector], quarantine_sites: tuple[Site, ...]):
        self.rows, self._vectors, self.quarantine_sites = rows, vectors, quarantine_sites
        self.living: dict[int, Living] = {}
        self.watched: Counter[Site] = Counter()
        """Where monitors of single requests that run read and act, and how many do."""
        self.held: dict[str, Held] = {}

    def of(self, request: int) -> Living:
        if request not in self.living:
            raise ValueError(f"request {request} is not running: it has ended, or was never admitted")
        return self.living[request]

    def config(self, name: str) -> Held:
        if name not in self.held:
            raise ValueError(f"no configuration is held as {name!r}; there are: {_listed(self.held)}")
        return self.held[name]

    def _resolved(self, spec: Steering | None) -> Steering:
        found = (spec or Steering()).resolved(looker(self._vectors))
        self.rows.check(found)
        return found

    def _row(self, name: str, spec: Steering) -> Steering:
        if spec.monitors:
            raise ValueError(f"the configuration {name!r} has monitors: they belong to a request, not to a row")
        return self._resolved(spec)

    def fits(self, spec: Steering | None, configs: Mapping[str, Steering], request: int | None) -> bool:
        again = self.living.get(request) if request is not None else None
        specs = again.specs if again else [self._resolved(spec), *(self._row(*named) for named in configs.items())]
        try:
            self.rows.demand(specs)
        except Full:
            return False
        return True

    def check(self, spec: Steering | None, configs: Mapping[str, Steering]) -> None:
        """``ValueError`` for what ``admit`` would refuse for as long as the server's configurations are held; takes nothing."""
        own = self._resolved(spec)
        for monitor in own.monitors:
            watch_of(monitor, monitor.name, self.rows, self.quarantine_sites)
        specs = [own, *(self._row(*named) for named in configs.items())]
        try:
            self.rows.demand(specs)
        except Full:
            needed = {row_key(one) for one in specs} - {b""}
            server = {name: held for name, held in self.held.items() if not held.owner}
            others = {held.row: name for name, held in server.items() if held.row and row_key(held.spec) not in needed}
            capacity = self.rows.capacity
            if len(needed) > capacity - len(others):
                names = ", ".join(others.values())
                raise ValueError(
                    f"{len(others)} of {capacity} steering rows are held by configurations ({names}): drop one, or raise rows"
                ) from None

    def admit(
        self, request: int, spec: Steering | None, owner: str, conversation: str | None, configs: Mapping[str, Steering]
    ) -> None:
        living = self.living.get(request)
        if living is None:
            own = self._resolved(spec)
            rows = {name: self._row(name, config) for name, config in configs.items()}
            watches = {monitor.name: watch_of(monitor, monitor.name, self.rows, self.quarantine_sites) for monitor in own.monitors}
            living = Living(spec or Steering(), own, rows, owner, conversation, watches)
        elif living.resident:
            raise ValueError(f"request {request} runs already: a request has one number, which is never used again")
        elif (spec or Steering()) != living.asked:
            raise ValueError(f"request {request} was preempted and comes back with another steering: admit it with its own")
        self.rows.demand(living.specs)
        living.row = self.rows.acquire(living.spec)
        living.alternatives = tuple(self.rows.acquire(config) for config in living.configs.values())
        living.routed = self.rows.acquire(living.override.spec) if living.override else None
        living.resident = True
        self._count(living, 1)
        self.living[request] = living

    def preempted(self, request: int) -> None:
        self._give_back(self.of(request))

    def release(self, request: int) -> str:
        """The owner whose last request this was, or ``""``."""
        if (living := self.living.pop(request, None)) is None:
            return ""
        self._give_back(living)
        if not living.owner or any(other.owner == living.owner for other in self.living.values()):
            return ""
        for name in [name for name, held in self.held.items() if held.owner == living.owner]:
            self.drop(name)
        return living.owner

    def _give_back(self, living: Living) -> None:
        if living.resident:
            for row in (living.row, *living.alternatives, *(() if living.routed is None else (living.routed,))):
                self.rows.release(row)
            self._count(living, -1)
        living.row, living.alternatives, living.routed, living.resident = 0, (), None, False

    def watch(self, request: int, name: str, watch: Watch | None) -> None:
        """Replace a monitor that was set on a request, or (``None``) take it off. ``ValueError`` for a name of its own spec."""
        living = self.of(request)
        if watch is not None and name in living.watches:
            raise ValueError(f"request {request} brought a monitor {name!r} of its own: give this one another name")
        if living.resident:
            self._count(living, -1)
        if watch is not None:
            living.dynamic[name] = watch
        else:
            living.dynamic.pop(name, None)
        if living.resident:
            self._count(living, 1)

    def _count(self, living: Living, one: int) -> None:
        for watch in (*living.watches.values(), *living.dynamic.values()):
            for site in watch.sites:
                self.watched[site] += one
                if not self.watched[site]:
                    del self.watched[site]

    def hold(self, name: str, spec: Steering, owner: str) -> None:
        if not name:
            raise ValueError("give the configuration a name, for overrides to point at")
        if name in self.held:
            raise ValueError(f"a configuration is held as {name!r} already: drop it first, or take another name")
        found = self._row(name, spec)
        self.rows.demand([found])
        self.held[name] = Held(name, found, self.rows.acquire(found), owner)

    def drop(self, name: str) -> None:
        self.rows.release(self.config(name).row)
        del self.held[name]

    def override(self, request: int, config: str | None) -> None:
        known = {name: Held(name, spec) for name, spec in self.of(request).configs.items()}
        known = self.held | known
        if config is not None and config not in known:
            raise ValueError(f"request {request} cannot be routed to {config!r}; there are: {_listed(known)}")
        self.route(request, None if config is None else known[config])

    def route(self, request: int, target: Held | None) -> None:
        living = self.of(request)
        before = living.routed
        if living.resident:
            living.routed = None if target is None else self.rows.acquire(target.spec)  # held already: this cannot be Full
            if before is not None:
                self.rows.release(before)
        living.override = target


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"
