"""Steering state of many requests at once, and its application in one forward over a batch of them."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.sites import Site
from mi_route2.steering.plan import Acting, Forward, Layout, Planner, Reading, Readings, SiteStep, Watch, digest, watch_of
from mi_route2.steering.specs import Monitor, Number, Steer, Steering, Vector, VectorLike, looker, term
from mi_route2.steering.table import Full, Rows, row_key, summed


@dataclass
class Living:
    """A request that was admitted and has not ended. ``resident`` is false while it is preempted and holds no rows."""

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
        """All specs that need rows."""
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
        """Return the owner whose last request this was, or ``""``."""
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


__all__ = ["Full", "Reading", "Readings", "SteeringState"]

GLOBAL = "global:"
"""How the names of monitors that watch every request begin in readings."""
PLANS = 128
"""Layouts of single tokens whose plan is kept: in batches of one, as exact ones are, requests take turns."""


class SteeringState:
    """See the module. ``widths`` gives a site's shape behind [b s]: ``(d,)``, by head ``(h, dh)``; what it raises passes through.

    ``rows`` configurations may act at a time. ``quarantine_sites`` are the ``quarantine_out`` that monitors gate by default.
    ``changes`` counts the calls after which something else may act.
    """

    def __init__(
        self,
        widths: Callable[[Site], tuple[int, ...]],
        *,
        rows: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quarantine_sites: tuple[Site, ...] = (),
    ):
        self.rows = Rows(rows, widths, dtype, torch.device(device))
        self.quarantine_sites = tuple(sorted(quarantine_sites))
        self.vectors: dict[str, Vector] = {}
        self.tier: dict[Site, Tensor] = {}
        self.gain = 1.0
        self._requests = Requests(self.rows, self.vectors, self.quarantine_sites)
        self._monitors: dict[str, tuple[Watch, str]] = {}
        self._sites: frozenset[Site] = frozenset()
        self._version = self.changes = 0
        self._contents: dict[tuple[int, bool], bytes] = {}
        self._plans: OrderedDict[tuple[object, ...], tuple[dict[Site, SiteStep], int]] = OrderedDict()
        self._layout: Layout | None = None
        self._forward: Forward | None = None
        self._steps: dict[Site, SiteStep] = {}

    def found(self, quarantine_sites: tuple[Site, ...]) -> None:
        """Set the quarantines that monitors gate from now on, after the model's were switched."""
        self.quarantine_sites = tuple(sorted(quarantine_sites))
        self._requests.quarantine_sites = self.quarantine_sites

    # Vectors and globals

    @checked
    def register(self, name: str, tensor: VectorLike) -> None:
        """Register a vector under a name. Requests admitted before keep the vector that the name had."""
        vector = Vector(tensor)
        if not name or vector.values is None:
            raise ValueError("register a vector of numbers under a name that is not empty")
        self.vectors[name] = vector

    def unregister(self, name: str) -> None:
        """Remove a name; no effect if it is unknown."""
        self.vectors.pop(name, None)

    @checked
    def set_global(self, tier: str, entries: Iterable[Steer]) -> None:
        """Replace a tier (base, prefill, decode) that acts on every request. ``ValueError`` for a vector that does not fit."""
        if tier not in self.rows.globals:
            raise ValueError(f"tier={tier!r} is not one of {', '.join(self.rows.globals)}")
        self.rows.set_global(tier, self._entries(entries))
        self._changed()

    def clear_global(self, tier: str) -> None:
        """Remove a global tier."""
        self.set_global(tier, ())

    def _entries(self, entries: Iterable[Steer]) -> list[Steer]:
        found = [entry.resolved(looker(self.vectors)) for entry in entries]
        self.rows.check_entries(found)
        return found

    # Requests

    def fits(self, spec: Steering | None, *, configs: Mapping[str, Steering] | None = None, request: int | None = None) -> bool:
        """Return whether ``admit`` would find its rows now; ``request`` names a preempted one. ``ValueError`` as there."""
        return self._requests.fits(spec, configs or {}, request)

    def check(self, spec: Steering | None, configs: Mapping[str, Steering] | None = None) -> None:
        """Raise ``ValueError`` if ``admit`` would refuse, now and for as long as the server's own configurations are held."""
        self._requests.check(spec, configs or {})

    def admit(
        self,
        request: int,
        spec: Steering | None,
        *,
        owner: str = "client",
        conversation: str | None = None,
        configs: Mapping[str, Steering] | None = None,
    ) -> None:
        """Take the rows that a request needs, or raise and take none.

        ``configs`` are rows of its own to which it may be overridden, held from now on so that this cannot fail later. A preempted
        request is admitted again with the same spec; its override, scale and monitors are as they were. ``Full`` where rows are
        lacking now, ``ValueError`` where they always will be, for a vector that does not fit and a request that runs already.
        """
        self._requests.admit(request, spec, owner, conversation, configs or {})
        self._changed(request)

    def preempted(self, request: int) -> None:
        """Give the rows back; what was done to the request (override, scale, monitors) waits for it to be admitted again."""
        self._requests.preempted(request)
        self._changed(request)

    def release(self, request: int) -> None:
        """The request has ended, and all that was its own with it; nothing happens for one that was never admitted.

        What an owner held or watched goes with the owner's last request.
        """
        if owner := self._requests.release(request):
            self._monitors = {name: kept for name, kept in self._monitors.items() if kept[1] != owner}
        self._changed(None if owner else request)

    @property
    def requests(self) -> tuple[int, ...]:
        """All requests that were admitted and have not ended, including preempted ones."""
        return tuple(self._requests.living)

    def __contains__(self, request: object) -> bool:
        """Return whether a request was admitted and has not ended."""
        return request in self._requests.living

    def conversation(self, request: int) -> str | None:
        """Return the conversation that a request was admitted with."""
        return self._requests.of(request).conversation

    @checked
    def hold(self, name: str, spec: Steering, *, owner: str = "") -> None:
        """Keep a row under a name, for overrides. The server's own (``owner=""``) stay until ``drop``. Errors as in ``admit``."""
        self._requests.hold(name, spec, owner)
        self._changed()

    def drop(self, name: str) -> None:
        """Forget a held configuration; requests that were overridden to it stay so. ``ValueError`` for an unknown name."""
        self._requests.drop(name)
        self._changed()

    # Dynamic steering

    @checked
    def set_tier(self, entries: Iterable[Steer]) -> None:
        """Replace the dynamic vectors, which act on every generated token, times the tier's gain."""
        found = self._entries(entries)
        summed_up = {site: values.to(self.rows.device, self.rows.kind) for site, values in summed(found).items()}
        self.tier = {site: values for site, values in summed_up.items() if bool(values.any())}
        self._changed()

    def clear_tier(self) -> None:
        """Remove the dynamic vectors and reset the gain to 1."""
        self.tier, self.gain = {}, 1.0
        self._changed()

    def override(self, request: int, config: str | None) -> None:
        """Route the request's generated tokens to another row: one of its own ``configs``, or one that is held.

        ``None`` is its own row, as before any override; it may be said at any time. The scale of the request is not touched.
        """
        self._requests.override(request, config)
        self._changed(request)

    def routing(self, request: int) -> Held | None:
        """Return the configuration to which a request is routed; ``None`` for its own row."""
        return self._requests.of(request).override

    def route(self, request: int, routing: Held | None) -> None:
        """Restore a value of ``routing``, even if its name was dropped since."""
        self._requests.route(request, routing)
        self._changed(request)

    def set_scale(self, scale: Number, *, request: int | None = None, config: str | None = None) -> None:
        """Scale the static vectors of a request's generated tokens, of all that are routed to a held configuration, or the tier
        (neither)."""
        value = _scale(scale)
        if request is not None and config is not None:
            raise ValueError("a scale is of a request, of a configuration, or of the tier: name one of them at most")
        if request is not None:
            self._requests.of(request).scale = value
        elif config is None:
            self.gain = value
        elif (held := self._requests.config(config)).row:
            held.scale = value
        else:
            raise ValueError(f"the configuration {config!r} holds no vectors, so that there is nothing to scale")
        self._forget(request)

    def scale_of(self, request: int) -> float:
        """Return a request's own scale."""
        return self._requests.of(request).scale

    def set_monitor(self, monitor: Monitor, *, request: int | None = None, owner: str = "") -> None:
        """Watch one request, or all; replaces a monitor of this name that was set before, never one of the request's own spec.

        ``ValueError`` for a probe that does not fit, a quarantine that is not there, and a monitor that acts on prompts.
        """
        if monitor.prompt:
            raise ValueError("a monitor that acts on prompts is a part of the request's own steering: nothing dynamic acts there")
        name = GLOBAL + monitor.name if request is None else monitor.name
        watch = watch_of(monitor.resolved(looker(self.vectors)), name, self.rows, self.quarantine_sites)
        if request is None:
            self._monitors[monitor.name] = watch, owner
        else:
            self._requests.watch(request, monitor.name, watch)
        self._changed(request)

    def clear_monitor(self, name: str, *, request: int | None = None) -> None:
        """Take back what ``set_monitor`` did; nothing happens where there is none. A request's own spec stays as it is."""
        if request is None:
            self._monitors.pop(name, None)
        else:
            self._requests.watch(request, name, None)
        self._changed(request)

    # What acts

    def _acting(self, request: int) -> Acting:
        living = self._requests.living.get(request)
        if living is None or not living.resident:
            raise RuntimeError(f"request {request} is in the batch but was not admitted: it would run unsteered")
        routed = living.row if living.routed is None else living.routed
        own, other = self.rows.rows[living.row], self.rows.rows[routed]
        held = 1.0 if living.override is None else living.override.scale
        scales, bands = (1.0, held * living.scale), (own.bands[0], other.bands[1])
        return Acting((living.row, routed), scales, bands, self._watches(living))

    def _watches(self, living: Living) -> tuple[Watch, ...]:
        if not (living.watches or living.dynamic or self._monitors):
            return ()
        return (*living.watches.values(), *living.dynamic.values(), *(watch for watch, _ in self._monitors.values()))

    def sites(self) -> frozenset[Site]:
        """Return the sites that need hooks at present; changes only if ``version`` does."""
        return self._sites

    @property
    def version(self) -> int:
        """Number of changes of ``sites``."""
        return self._version

    def _forget(self, request: int | None) -> None:
        """What was prepared is stale; ``request`` is the only one on which something else acts now, ``None``: all may be."""
        self._plans.clear()
        self.changes += 1
        if request is None:
            self._contents.clear()
        else:
            self._contents.pop((request, False), None)
            self._contents.pop((request, True), None)

    def _changed(self, request: int | None = None) -> None:
        """Invalidate as ``_forget`` does, and recompute the sites that need hooks."""
        self._forget(request)
        everyones = (watch.sites for watch, _ in self._monitors.values())
        found = self.rows.sites().union(self.tier, self._requests.watched, *everyones)
        if found != self._sites:
            self._sites, self._version = frozenset(found), self._version + 1

    def content(self, request: int, *, decode: bool) -> bytes:
        """Digest of all that acts now on a prompt token, or a generated one, of the request; ``b""`` where nothing does.

        Equal for requests on which the same numbers act, whatever rows they have and however their vectors are named.
        """
        found = self._contents.get((request, decode))
        if found is None:
            found = digest(self._acting(request), self.rows, self.tier, self.gain, decode)
            self._contents[request, decode] = found
        return found

    # One forward

    def begin(self, layout: Layout) -> bool:
        """Prepare a forward over ``layout``: whether anything acts or watches in it.

        ``RuntimeError`` for a request that was not admitted. A forward that failed half-way needs no ``end``.
        """
        pieces = layout.pieces
        key = tuple([p.request if p.start >= p.prompt else ~p.request for p in pieces]) if layout.single else None
        plan = None if key is None else self._plans.get(key)
        if plan is None:
            plan = self._planned(layout)
            if key is not None:
                self._plans[key] = plan
                if len(self._plans) > PLANS:
                    self._plans.popitem(last=False)
        self._steps, slots = plan
        self._layout, self._forward = layout, Forward(layout.positions.shape, slots)
        return bool(self._steps)

    def _planned(self, layout: Layout) -> tuple[dict[Site, SiteStep], int]:
        acting = [self._acting(piece.request) for piece in layout.pieces]
        tier = {site: term(values, self.gain, dtype=values.dtype) for site, values in self.tier.items()} if self.gain else {}
        planner = Planner(layout, acting, self.rows.tables, tier)
        return planner.run(), planner.slots

    def at(self, site: Site, h: Tensor) -> Tensor:
        """``h [b s ...]`` at a site of the forward that was begun, as the model goes on with it: ``h`` where nothing acts."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("a steered site fired outside of a forward that was begun: call begin(layout) first")
        step = self._steps.get(site)
        if step is None:
            return h
        forward.fired.add(site)
        return step.run(h, forward)

    def end(self) -> Readings:
        """Return the monitor readings. ``RuntimeError`` if a site with steering to apply did not fire."""
        forward, layout = self._forward, self._layout
        self._forward = self._layout = None
        if forward is None:
            return Readings()
        if len(forward.fired) < len(self._steps):
            silent = ", ".join(str(site) for site in sorted(set(self._steps) - forward.fired))
            raise RuntimeError(f"steering was to act at {silent}, which did not fire: hook every site of sites()")
        return Readings(layout, forward.scores)

    # For people

    def snapshot(self) -> dict[str, Any]:
        """Return the current state as plain data."""
        configs = self._requests.held.items()
        return {
            "rows": {"used": self.rows.used, "capacity": self.rows.capacity},
            "globals": {tier: sorted(map(str, entries)) for tier, entries in self.rows.globals.items()},
            "tier": {"sites": sorted(map(str, self.tier)), "gain": self.gain},
            "configs": {name: {"owner": held.owner, "scale": held.scale} for name, held in configs},
            "monitors": {name: {"site": str(w.monitor.site), "owner": owner} for name, (w, owner) in self._monitors.items()},
            "requests": {
                request: {
                    "override": living.override.name if living.override else None,
                    "scale": living.scale,
                    "monitors": [*living.watches, *living.dynamic],
                    "running": living.resident,
                }
                for request, living in self._requests.living.items()
            },
        }


def _scale(value: Number) -> float:
    if isinstance(value, bool | str) or not 0 <= (number := float(value)) < float("inf"):
        raise ValueError(f"a scale of {value!r:.60} cannot be: give a finite number that is not negative")
    return number
