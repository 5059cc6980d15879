"""Steering state of many requests at once, and its application in one forward over a batch of them."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import float_info
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.sites import Site
from mi_route2.steering.banks import Span, VectorBanks
from mi_route2.steering.plan import (
    Acting,
    BatchLayout,
    CompiledMonitor,
    ForwardState,
    Piece,
    Planner,
    Readings,
    SiteStep,
    digest,
    requarantined,
    watch_of,
)
from mi_route2.steering.specs import (
    GLOBAL,
    UNSTEERED,
    ZEROS,
    Monitor,
    Number,
    Steer,
    Steering,
    Vector,
    VectorLike,
    looker,
    plain,
    summed,
    term,
    wide,
)
from mi_route2.steering.table import SteeringRows, row_key


@dataclass
class ActiveRequest:
    """Request that was admitted and has not ended. ``resident`` is False while it is preempted and holds no rows."""

    requested: Steering
    spec: Steering
    watches: dict[str, CompiledMonitor]
    override: "NamedConfig | None" = None
    scale: float = 1.0
    dynamic: dict[str, CompiledMonitor] = field(default_factory=dict)
    resident: bool = False
    row: int = 0
    routed: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows that it holds while it is resident; 0 is the row without steering."""
        return self.row, *(() if self.routed is None else (self.routed,))

    @property
    def specs(self) -> list[Steering]:
        """All specs that need rows."""
        return [self.spec, *([self.override.spec] if self.override else ())]


@dataclass(eq=False)
class NamedConfig:
    """Configuration stored under a name, as a target of overrides.

    ``scale`` applies to the requests that are routed to it, and not to others that share its row.
    """

    name: str
    spec: Steering
    row: int = 0
    scale: float = 1.0


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


PLANS = 128
"""Number of cached plans of single-token layouts; exact mode needs several, because requests run in turn in batches of one."""


class SteeringState:
    """Steering state of many requests at once.

    Args:
        widths: returns the shape of a site's value without [b s]: ``(d,)``, or ``(h, dh)`` for sites with heads; its errors
            propagate.
        rows: number of configurations that may act at a time.
        dtype: dtype of the model's activations.
        device: device of the model.
        adapter_sites: the ``quarantine_out`` sites, which monitors gate by default, and the ``kept_out`` sites, which they may
            gate by name.
        tokens: number of tokens of the largest forward, in which ``banks`` add the vectors of requests without monitors; 0: ``at``
            adds all vectors.

    ``changes`` counts the calls after which the steering may differ.
    """

    def __init__(
        self,
        widths: Callable[[Site], tuple[int, ...]],
        *,
        rows: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        adapter_sites: tuple[Site, ...] = (),
        tokens: int = 0,
    ):
        device = torch.device(device)
        self.banks = VectorBanks(2 * (rows + 1), tokens, wide(dtype), device) if tokens else None
        self.rows = SteeringRows(rows, widths, dtype, device, self.banks)
        self.adapter_sites = tuple(sorted(adapter_sites))
        self.vectors: dict[str, Vector] = {}
        self.tier: dict[Site, Tensor] = {}
        self.gain = 1.0
        self._active: dict[int, ActiveRequest] = {}
        self._watched: Counter[Site] = Counter()
        """Number of monitors of resident requests, by the site at which they read or act."""
        self._configs: dict[str, NamedConfig] = {}
        self._monitors: dict[str, CompiledMonitor] = {}
        self._sites: frozenset[Site] = frozenset()
        self._version = self.changes = 0
        self._fingerprints: dict[tuple[int, bool], bytes] = {}
        self._plans: OrderedDict[tuple[object, ...], tuple[dict[Site, SiteStep], int]] = OrderedDict()
        self._layout: BatchLayout | None = None
        self._forward: ForwardState | None = None
        self._steps: dict[Site, SiteStep] = {}

    def set_adapter_sites(self, adapter_sites: tuple[Site, ...]) -> None:
        """Set the sites of the quarantines, after the model's adapters were switched or attached anew.

        Monitors that gate every quarantine gate these. One that has none left stays as it was, at sites that do not fire.
        """
        self.adapter_sites = tuple(sorted(adapter_sites))
        for active in self._active.values():
            self._count(active, -1)
            for of in (active.watches, active.dynamic):
                of |= {name: requarantined(watch, self.adapter_sites) for name, watch in of.items()}
            self._count(active, 1)
        self._monitors = {name: requarantined(watch, self.adapter_sites) for name, watch in self._monitors.items()}
        self._changed()

    def refit(self) -> None:
        """Raise ``ValueError`` if what is held or acts on all requests does not fit its sites any more.

        Sites of adapters that were attached anew may have another width or not exist; errors for these propagate.
        """
        watches = list(self._monitors.values())
        for site in {*self.rows.sites(), *self.tier}.union(*(watch.sites for watch in watches)):
            self.rows.widths(site)  # raises an error for a site that is not there
        for config in self._configs.values():
            self.rows.check(config.spec)
        sums = (*self.rows.globals.values(), self.tier, *(watch.adds for watch in watches))
        for site, values in (pair for each in sums for pair in each.items()):
            self.rows.demand_width(site, Vector(values), "the vector")
        for watch in watches:
            self.rows.demand_width(watch.monitor.site, Vector(watch.monitor.probe), "the probe")

    # Vectors and globals

    @checked
    def register(self, name: str, tensor: VectorLike) -> None:
        """Register a vector under a name. Requests that were admitted before keep the previous vector of that name."""
        vector = Vector(tensor)
        if not name or vector.values is None:
            raise ValueError("register a vector of numbers under a name that is not empty")
        if name == ZEROS:
            raise ValueError(f"the name {ZEROS!r} stands for zeros in a patch: register this vector under another name")
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
        resolved = [entry.resolved(looker(self.vectors)) for entry in entries]
        self.rows.check_entries(resolved)
        return resolved

    # Requests

    def check(self, spec: Steering | None) -> None:
        """Raise ``ValueError`` if ``admit`` must refuse for ever; no rows are taken."""
        resolved = self._resolved(spec)
        for monitor in resolved.monitors:
            watch_of(monitor, monitor.name, self.rows, self.adapter_sites)
        if row_key(resolved) and not self.rows.capacity:
            raise ValueError("there are no steering rows: raise rows, or leave the vectors out")

    def _resolved(self, spec: Steering | None) -> Steering:
        resolved = (spec or UNSTEERED).resolved(looker(self.vectors))
        self.rows.check(resolved)
        return resolved

    def admit(self, request: int, spec: Steering | None) -> None:
        """Admit a request and take its rows; after an error no rows are taken.

        A preempted request is admitted again with the same spec and keeps its override, scale and monitors.

        Raises:
            TableFullError: Too few rows are free now.
            ValueError: The rows can never suffice, a vector does not fit, or the request already runs.
        """
        active = self._active.get(request)
        if active is None:
            resolved = self._resolved(spec)
            self.rows.demand([resolved])  # before the monitors are compiled, as a waiting request comes here in every step
            monitors = {
                monitor.name: watch_of(monitor, monitor.name, self.rows, self.adapter_sites) for monitor in resolved.monitors
            }
            active = ActiveRequest(spec or UNSTEERED, resolved, monitors)
        elif active.resident:
            raise ValueError(f"request {request} already runs: give each request a new number")
        elif (spec or UNSTEERED) != active.requested:
            raise ValueError(f"request {request} was preempted and now has another steering: admit it with the same one")
        self.rows.demand(active.specs)
        active.row, *routed = [self.rows.acquire(spec) for spec in active.specs]
        active.routed = routed[0] if routed else None
        active.resident = True
        self._count(active, 1)
        self._active[request] = active
        self._changed(request)

    def preempted(self, request: int) -> None:
        """Release the rows of a preempted request; its override, scale and monitors are kept until it is admitted again."""
        self._give_back(self._of(request))
        self._changed(request)

    def release(self, request: int) -> None:
        """Remove a request that has ended, with everything of its own; no effect if it was never admitted."""
        active = self._active.pop(request, None)
        if active is not None:
            self._give_back(active)
        self._changed(request)

    def _give_back(self, active: ActiveRequest) -> None:
        if active.resident:
            for row in active.rows:
                self.rows.release(row)
            self._count(active, -1)
        active.row, active.routed, active.resident = 0, None, False

    def _count(self, active: ActiveRequest, step: int) -> None:
        """Count the monitors of a request in (1) or out (-1), if it is resident."""
        for watch in (*active.watches.values(), *active.dynamic.values()) if active.resident else ():
            for site in watch.sites:
                self._watched[site] += step
                if not self._watched[site]:
                    del self._watched[site]

    @property
    def requests(self) -> tuple[int, ...]:
        """All requests that were admitted and have not ended, including preempted ones."""
        return tuple(self._active)

    def __contains__(self, request: object) -> bool:
        """Return whether a request was admitted and has not ended."""
        whole = isinstance(request, int | np.integer) and not isinstance(request, bool)  # True would be request 1
        return whole and request in self._active

    def _of(self, request: int) -> ActiveRequest:
        if request not in self:
            raise ValueError(f"request {request} is not running: it still waits, or has ended")
        return self._active[request]

    @checked
    def hold(self, name: str, spec: Steering) -> None:
        """Hold a configuration under a name, for overrides, until ``drop``; errors as in ``admit``."""
        if not name:
            raise ValueError("the configuration needs a name, to which overrides refer")
        if name in self._configs:
            raise ValueError(f"a configuration is already held as {name!r}: drop it first, or use another name")
        if spec.monitors:
            raise ValueError(f"the configuration {name!r} has monitors: give them in the request's own steering")
        resolved = self._resolved(spec)
        self.rows.demand([resolved])
        self._configs[name] = NamedConfig(name, resolved, self.rows.acquire(resolved))
        self._changed()

    @property
    def configurations(self) -> tuple[str, ...]:
        """Names of the held configurations."""
        return tuple(self._configs)

    def drop(self, name: str) -> None:
        """Drop a held configuration; overrides to it stay in effect. ``ValueError`` for an unknown name."""
        self.rows.release(self._config(name).row)
        del self._configs[name]
        self._changed()

    def _config(self, name: str) -> NamedConfig:
        if name not in self._configs:
            raise ValueError(f"no configuration is held as {name!r}; there are: {_listed(self._configs)}")
        return self._configs[name]

    # Dynamic steering

    @checked
    def set_tier(self, entries: Iterable[Steer]) -> None:
        """Replace the dynamic vectors, which act on every generated token, times the tier's gain."""
        resolved = self._entries(entries)
        summed_up = {site: values.to(self.rows.device, self.rows.dtype) for site, values in summed(resolved).items()}
        self.tier = {site: values for site, values in summed_up.items() if bool(values.any())}
        if self.banks is not None:
            self.banks.set_tier(self.tier)
        self._changed()

    def clear_tier(self) -> None:
        """Remove the dynamic vectors and reset the gain to 1."""
        self.gain = 1.0
        self.set_tier(())

    def override(self, request: int, config: str | None) -> None:
        """Route the request's generated tokens to a held configuration, or (``None``) to its own row; its scale is unchanged."""
        active = self._of(request)
        target = None if config is None else self._config(config)
        if active.resident:
            before, active.routed = active.routed, None if target is None else self.rows.acquire(target.spec)  # its row exists
            if before is not None:
                self.rows.release(before)
        active.override = target
        self._changed(request)

    def set_scale(self, scale: Number, *, request: int | None = None, config: str | None = None) -> None:
        """Set the scale of a request's static vectors, of a held configuration, or (if neither is given) of the tier.

        Only generated tokens are scaled.
        """
        value = _scale(scale)
        if request is not None and config is not None:
            raise ValueError("a scale belongs to a request, a configuration or the tier: name at most one of them")
        if request is not None:
            self._of(request).scale = value
        elif config is None:
            self.gain = value
        elif (target := self._config(config)).spec.base or target.spec.decode:
            target.scale = value
        else:
            raise ValueError(f"the configuration {config!r} holds no vectors for generated tokens, so there is nothing to scale")
        self._forget(request)

    @checked
    def set_monitor(self, monitor: Monitor, *, request: int | None = None) -> None:
        """Set a monitor on one request, or on all; it replaces a monitor of the same name that was set before.

        Raises:
            ValueError: The name is that of a monitor in the request's own spec, the probe does not fit, the quarantine does not
                exist, or the monitor acts on prompts.
        """
        if monitor.prompt:
            raise ValueError(
                f"the monitor {monitor.name!r} gates a quarantine on prompts too, which only a request's own steering can: give "
                "prompt=False, or the monitor with the request"
            )
        name = GLOBAL + monitor.name if request is None else monitor.name
        monitor = monitor.resolved(looker(self.vectors))
        watch = watch_of(monitor, name, self.rows, self.adapter_sites)
        if request is None:
            self._monitors[monitor.name] = watch
        elif monitor.name in self._of(request).watches:
            raise ValueError(f"request {request} already has its own monitor {monitor.name!r}: give this one another name")
        else:
            self._set_dynamic(request, monitor.name, watch)
        self._changed(request)

    def _set_dynamic(self, request: int, name: str, watch: CompiledMonitor | None) -> None:
        """Replace a monitor that was set on a request, or (``None``) remove it."""
        active = self._of(request)
        self._count(active, -1)
        if watch is not None:
            active.dynamic[name] = watch
        else:
            active.dynamic.pop(name, None)
        self._count(active, 1)

    @checked
    def set_threshold(self, request: int, name: str, threshold: Number) -> None:
        """Move the threshold of a request's monitor from its next token on; ``ValueError`` if it has no monitor of this name."""
        active = self._of(request)
        of = active.watches if name in active.watches else active.dynamic
        if name not in of:
            known = _listed({**active.watches, **active.dynamic})
            raise ValueError(f"request {request} has no monitor {name!r}; there are: {known}")
        of[name] = replace(of[name], monitor=replace(of[name].monitor, threshold=threshold))
        self._changed(request)

    def clear_monitor(self, name: str, *, request: int | None = None) -> None:
        """Remove a monitor that ``set_monitor`` set; no effect if there is none. Monitors of a request's own spec stay."""
        if request is None:
            self._monitors.pop(name, None)
        else:
            self._set_dynamic(request, name, None)
        self._changed(request)

    # Current steering

    @property
    def shared(self) -> bool:
        """True if something acts, or watches, on requests without steering of their own."""
        return bool(self.tier or self._monitors or any(self.rows.globals.values()))

    def _acting(self, request: int) -> Acting:
        active = self._active.get(request)
        if active is None or not active.resident:
            raise RuntimeError(f"request {request} is in the batch but was not admitted: it would run unsteered")
        routed = active.row if active.routed is None else active.routed
        prompt_row, decode_row = self.rows.rows[active.row], self.rows.rows[routed]
        config_scale = 1.0 if active.override is None else active.override.scale
        # an override and a scale act on generated tokens only
        scales, bands = (1.0, config_scale * active.scale), (prompt_row.bands[0], decode_row.bands[1])
        watches = self._watches(active)
        return Acting((active.row, routed), scales, bands, watches, banked=self.banks is not None and not watches)

    def _watches(self, active: ActiveRequest) -> tuple[CompiledMonitor, ...]:
        if not (active.watches or active.dynamic or self._monitors):
            return ()
        return (*active.watches.values(), *active.dynamic.values(), *self._monitors.values())

    def sites(self) -> frozenset[Site]:
        """Return the sites that need hooks at present; changes only if ``version`` does."""
        return self._sites

    @property
    def version(self) -> int:
        """Number of changes of ``sites``."""
        return self._version

    def _forget(self, request: int | None) -> None:
        """Invalidate prepared plans, and the digests of ``request`` (``None``: of all requests)."""
        self._plans.clear()
        self.changes += 1
        if request is None:
            self._fingerprints.clear()
        else:
            self._fingerprints.pop((request, False), None)
            self._fingerprints.pop((request, True), None)

    def _changed(self, request: int | None = None) -> None:
        """Invalidate as ``_forget`` does, and recompute the sites that need hooks."""
        self._forget(request)
        everyones = (watch.sites for watch in self._monitors.values())
        sites = self.rows.sites().union(self.tier, self._watched, *everyones)
        if sites != self._sites:
            self._sites, self._version = frozenset(sites), self._version + 1

    def fingerprint(self, request: int, *, decode: bool) -> bytes:
        """Return a digest of all steering of the request's prompt tokens, or generated ones; ``b""`` if nothing acts.

        It is equal for requests with the same numbers, whatever their rows and the names of their vectors.
        """
        fingerprint = self._fingerprints.get((request, decode))
        if fingerprint is None:
            fingerprint = digest(self._acting(request), self.rows, self.tier, self.gain, decode)
            self._fingerprints[request, decode] = fingerprint
        return fingerprint

    def prompt_sites(self, request: int) -> set[Site]:
        """Return the sites at which something changes the request's prompt tokens."""
        acting = self._acting(request)
        static = {site for site, table in self.rows.tables.items() if 2 * acting.rows[0] in table.acts}
        closed = (watch.quarantined for watch in acting.watches if watch.monitor.prompt)
        return static.union(acting.bands[0], *closed)

    # One forward

    def begin(self, layout: BatchLayout) -> bool:
        """Prepare a forward over ``layout``; return True if anything is steered or monitored in it.

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
        self._layout, self._forward = layout, ForwardState(layout.positions.shape, slots)
        return bool(self._steps)

    def fill(self, pieces: Iterable[tuple[Piece, int]]) -> None:
        """Fill the buffers of ``banks`` for a forward in which the tokens of each piece begin at an index."""
        spans: list[Span] = []
        for piece, first in pieces:
            acting, phases = self._acting(piece.request), piece.phases(first)
            for decode, here in enumerate(phases if acting.banked else ()):
                spans.append((here, 2 * acting.rows[decode] + decode, acting.scales[decode], self.gain * decode))
        if self.banks is not None:
            self.banks.fill(spans)

    @property
    def acting(self) -> Collection[Site]:
        """The sites at which something is steered or monitored in the forward that was begun last."""
        return self._steps.keys()

    def _planned(self, layout: BatchLayout) -> tuple[dict[Site, SiteStep], int]:
        acting = [self._acting(piece.request) for piece in layout.pieces]
        tier = {site: term(values, self.gain, dtype=values.dtype) for site, values in self.tier.items()} if self.gain else {}
        planner = Planner(layout, acting, self.rows.tables, tier)
        return planner.run(), planner.slots

    def at(self, site: Site, h: Tensor) -> Tensor:
        """Return the steered ``h [b s ...]`` at a site of the current forward; ``h`` itself if nothing acts."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("a steered site fired outside of a prepared forward: call begin(layout) first")
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
            raise RuntimeError(f"steering acts at {silent}, which did not fire: hook every site of sites()")
        return Readings(layout, forward.scores)

    # Inspection

    def snapshot(self) -> dict[str, Any]:
        """Return the current state as plain data."""
        return {
            "rows": {"used": self.rows.used, "capacity": self.rows.capacity},
            "globals": {tier: sorted(map(str, entries)) for tier, entries in self.rows.globals.items()},
            "tier": {"sites": sorted(map(str, self.tier)), "gain": self.gain},
            "configs": {name: {"scale": config.scale} for name, config in self._configs.items()},
            "monitors": {name: {"site": str(watch.monitor.site)} for name, watch in self._monitors.items()},
            "requests": {
                request: {
                    "override": active.override.name if active.override else None,
                    "scale": active.scale,
                    "monitors": [*active.watches, *active.dynamic],
                    "running": active.resident,
                }
                for request, active in self._active.items()
            },
        }


def _scale(value: Number) -> float:
    number = plain(value)
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= float_info.max:
        return float(number)
    excerpt = " ".join(repr(value).split())
    raise ValueError(f"a scale of {excerpt:.60} is not valid: give a finite number that is not negative")
