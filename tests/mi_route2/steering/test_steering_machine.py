"""Whatever is done in whatever order: rows are counted right, what acts is the sum written out, refusals leave no trace."""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from mi_route2.engine.controllers import (
    Change,
    ClearMonitor,
    Override,
    SetMonitor,
    SetScale,
    SetTier,
)
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering, Vector
from mi_route2.steering.state import SteeringState
from mi_route2.steering.table import TableFullError, row_key

pytestmark = pytest.mark.machine

FIRST, SECOND = Site(0, "resid_post"), Site(1, "resid_post")
D, ROWS = 3, 2
"""Width, and rows: fewer than the specs below need together."""
SEEN = Counter[str]()


def v(seed: int) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OWN = Monitor(FIRST, v(20), 0.1, gate_rows=True, adds=(Steer(SECOND, v(21)),), name="own")
SPECS = (
    None,
    Steering(base=(Steer(FIRST, v(1)),)),
    Steering(prefill=(Steer(FIRST, v(2)),), decode=(Steer(SECOND, v(3), 2.0), Steer(SECOND, v(4)))),
    Steering(base=(Steer(SECOND, v(5)),), clamps=(Clamp(SECOND, v(6), low=-0.2, high=0.2, phase="decode"),)),
    Steering(base=(Steer(FIRST, v(1)),), monitors=(OWN,)),
    Steering(monitors=(OWN,)),
)
CONFIGS = tuple(spec for spec in SPECS[1:4] if spec)
TIERS = ((), (Steer(FIRST, v(10)),), (Steer(SECOND, v(11)), Steer(SECOND, v(12), 0.5)))
MONITORS = (
    Monitor(FIRST, v(30), 0.2, 2.0, name="m"),
    Monitor(FIRST, v(31), -0.1, mode="attenuate", depth=0.5, gates=(SECOND,), gate_rows=True, name="m"),
    Monitor(SECOND, v(32), gates=(), name="n"),
)
BAD: tuple[Change, ...] = (
    SetTier((Steer(FIRST, [1.0]),)),
    SetTier((Steer(FIRST, v(1)), Steer(SECOND, "unknown"))),
    Override(999, None),
    SetScale(math.nan),
    SetScale(math.inf),
    SetScale(-1.0),
    SetScale(1.0, request=999),
    SetScale(1.0, config="unknown"),
    SetScale(1.0, request=0, config="a"),
    SetMonitor(Monitor(FIRST, [1.0])),
    SetMonitor(Monitor(FIRST, v(1), quarantine="close")),
    SetMonitor(MONITORS[0], request=999),
    ClearMonitor("m", request=999),
)
scales, requests = st.sampled_from([0.0, 0.25, 1.0, 2.0]), st.integers(0, 2)


@dataclass
class Known:
    """The oracle's memory of a request."""

    spec: Steering
    resident: bool = True
    override: tuple[str, Steering, list[float]] | None = None
    scale: float = 1.0
    monitors: dict[str, Monitor] = field(default_factory=dict)

    @property
    def needs(self) -> list[Steering]:
        routed = [self.override[1]] if self.override else []
        return [self.spec, *routed]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = SteeringState(lambda site: (D,), rows=ROWS, dtype=torch.float64)
        self.known: dict[int, Known] = {}
        self.ended: dict[int, int] = {}
        self.held: dict[str, Steering] = {}
        self.config_scales: dict[str, list[float]] = {}
        self.tiers: dict[str, tuple[Steer, ...]] = {"base": (), "prefill": (), "decode": ()}
        self.tier: tuple[Steer, ...] = ()
        self.gain = 1.0
        self.monitors: dict[str, Monitor] = {}

    # What the oracle says

    def keys(self) -> Counter[bytes]:
        """Every reference to a row, by its content."""
        found = Counter(row_key(spec) for spec in self.held.values())
        for known in self.known.values():
            found.update(row_key(spec) for spec in known.needs if known.resident)
        found.pop(b"", None)
        return found

    def number(self, slot: int) -> int:
        """Numbers are never used again: a slot that has ended comes back under another."""
        return slot + 3 * self.ended.get(slot, 0)

    def expected(self, known: Known, h: dict[Site, Tensor], generated: bool) -> dict[Site, Tensor]:
        routed = known.override[1] if generated and known.override else known.spec
        scale = known.scale * (known.override[2][0] if known.override else 1.0) if generated else 1.0
        phase = "decode" if generated else "prefill"
        monitors = [*known.spec.monitors, *known.monitors.values(), *self.monitors.values()] if generated else []
        out = {}
        for site in (FIRST, SECOND):
            static = sum(
                (e.values() for t in ("base", phase) for e in (*self.tiers[t], *routed.vectors(t)) if e.site == site), v(0) * 0
            )
            dynamic = sum((e.values() for e in self.tier if generated and e.site == site), v(0) * 0)
            row_gate, token_gate, own = 1.0, 1.0, v(0) * 0
            for monitor in monitors:
                score = h[monitor.site] @ Vector(monitor.probe).data
                g = torch.sigmoid(monitor.sharpness * (score - monitor.threshold))
                factor = g if monitor.mode == "add" else 1 - monitor.depth * g
                later = site >= monitor.site
                if later and (monitor.gates is None or site in monitor.gates):
                    token_gate *= factor
                    row_gate *= factor if monitor.gate_rows else 1.0
                own = own + sum((e.values() * factor for e in monitor.adds if e.site == site), v(0) * 0)
            token = h[site] + static * scale * row_gate + dynamic * self.gain * token_gate + own
            for clamp in routed.clamps:
                if clamp.site == site and clamp.phase in ("both", phase):
                    unit = Vector(clamp.vector).data / Vector(clamp.vector).data.norm()
                    p = token @ unit
                    token = token + clamp.strength * (p.clamp(clamp.low, clamp.high) - p) * unit
            out[site] = token
        return out

    def trace(self) -> tuple[object, ...]:
        """All that can be seen of the state, and every bit of its tables."""
        tables = {site: (table.values.clone(), set(table.acts)) for site, table in self.state.rows.tables.items()}
        contents = [self.state.fingerprint(n, decode=d) for n, k in self.known.items() if k.resident for d in (False, True)]
        rows = {index: (row.refs, row.key) for index, row in self.state.rows.rows.items()}
        return tables, contents, rows, self.state.snapshot(), self.state.sites(), self.state.version

    # What is done

    @initialize(spec=st.sampled_from(SPECS))
    def start(self, spec: Steering | None) -> None:
        self.admit(0, SPECS[2])
        self.hold("a", CONFIGS[0])  # both rows are taken
        self.admit(1, spec)

    @rule(slot=requests, spec=st.sampled_from(SPECS))
    def admit(self, slot: int, spec: Steering | None) -> None:
        number = self.number(slot)
        if number in self.known:
            return
        self.try_admit(number, Known(spec or Steering()))

    @rule(slot=requests)
    def resume(self, slot: int) -> None:
        known = self.known.get(self.number(slot))
        if known is not None and not known.resident:
            self.try_admit(self.number(slot), known)
            SEEN["resumed"] += known.resident

    @rule(slot=requests)
    def preempt_and_resume(self, slot: int) -> None:
        self.preempt(slot)
        self.resume(slot)

    def try_admit(self, number: int, known: Known) -> None:
        needed = {key for spec in known.needs if (key := row_key(spec))}
        free = ROWS - len(self.keys())
        before = self.trace()
        try:
            self.state.admit(number, known.spec)
        except TableFullError:
            SEEN["full at admission"] += 1
            assert len(needed - self.keys().keys()) > free
            assert equal(self.trace(), before)
        else:
            known.resident = True
            self.known[number] = known

    @rule(slot=requests)
    def release(self, slot: int) -> None:
        number = self.number(slot)
        self.state.release(number)
        if self.known.pop(number, None) is not None:
            self.ended[slot] = self.ended.get(slot, 0) + 1

    @rule(slot=requests)
    def preempt(self, slot: int) -> None:
        known = self.known.get(self.number(slot))
        if known is not None and known.resident:
            self.state.preempted(self.number(slot))
            known.resident = False

    @rule(name=st.sampled_from("abcd"), spec=st.sampled_from(CONFIGS))
    def hold(self, name: str, spec: Steering) -> None:
        try:
            self.state.hold(name, spec)
        except TableFullError:
            SEEN["full at hold"] += 1
            assert row_key(spec) not in self.keys()
            assert len(self.keys()) == ROWS
        except ValueError:
            assert name in self.held
        else:
            self.held[name] = spec
            self.config_scales[name] = [1.0]

    @rule(name=st.sampled_from("abcd"))
    def drop(self, name: str) -> None:
        if name in self.held:
            self.state.drop(name)
            del self.held[name]

    @rule(tier=st.sampled_from(["base", "prefill", "decode"]), entries=st.sampled_from(TIERS))
    def set_global(self, tier: str, entries: tuple[Steer, ...]) -> None:
        self.state.set_global(tier, entries)
        self.tiers[tier] = entries

    def do(self, change: Change) -> bool:
        before = self.trace()
        try:
            change.apply(self.state)
        except ValueError:
            assert equal(self.trace(), before)
            return False
        return True

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 2), pick=st.integers(0, 4))
    def override(self, which: int, pick: int) -> None:
        number = sorted(self.known)[which % len(self.known)]
        known = self.known[number]
        names = [None, *sorted(self.held)]
        config = names[pick % len(names)]
        assert self.do(Override(number, config))
        known.override = None if config is None else (config, self.held[config], self.config_scales[config])

    @rule(slot=requests, config=st.sampled_from(["a", "b", "none"]))
    def override_where_it_may_not_go(self, slot: int, config: str) -> None:
        known = self.known.get(self.number(slot))
        if known is None or config not in self.held:
            assert not self.do(Override(self.number(slot), config))

    @rule(slot=requests, scale=scales)
    def scale_request(self, slot: int, scale: float) -> None:
        if self.do(SetScale(scale, request=self.number(slot))):
            self.known[self.number(slot)].scale = scale

    @rule(name=st.sampled_from("ab"), scale=scales)
    def scale_config(self, name: str, scale: float) -> None:
        assert self.do(SetScale(scale, config=name)) == (name in self.held)
        if name in self.held:
            self.config_scales[name][0] = scale

    @rule(scale=scales)
    def scale_tier(self, scale: float) -> None:
        assert self.do(SetScale(scale))
        self.gain = scale

    @rule(entries=st.sampled_from((*TIERS, None)))
    def set_tier(self, entries: tuple[Steer, ...] | None) -> None:
        if entries is None:
            self.state.clear_tier()
        else:
            assert self.do(SetTier(entries))
        self.tier = entries or ()
        self.gain = 1.0 if entries is None else self.gain

    @rule(slot=st.none() | requests, monitor=st.sampled_from((*MONITORS, OWN)))
    def set_monitor(self, slot: int | None, monitor: Monitor) -> None:
        number = None if slot is None else self.number(slot)
        known = None if number is None else self.known.get(number)
        fits = number is None or (known is not None and monitor.name not in [one.name for one in known.spec.monitors])
        assert self.do(SetMonitor(monitor, number)) == fits
        if fits:
            (self.monitors if known is None else known.monitors)[monitor.name] = monitor

    @rule(slot=st.none() | requests, name=st.sampled_from("mn"))
    def clear_monitor(self, slot: int | None, name: str) -> None:
        number = None if slot is None else self.number(slot)
        if self.do(ClearMonitor(name, number)):
            (self.monitors if number is None else self.known[number].monitors).pop(name, None)

    @rule(change=st.sampled_from(BAD))
    def wrong(self, change: Change) -> None:
        assert not self.do(change)

    # What must hold

    @invariant()
    def rows_are_counted(self) -> None:
        keys = self.keys()
        assert self.state.rows.used == len(keys)
        assert {row.key: row.refs for index, row in self.state.rows.rows.items() if index} == keys
        assert set(self.state.requests) == set(self.known)

    @invariant()
    def what_acts_is_the_formula(self) -> None:
        running = [number for number, known in self.known.items() if known.resident]
        if not running:
            return
        h = {site: torch.stack([v(seed + i) for i in range(2)]) for site, seed in ((FIRST, 50), (SECOND, 60))}
        for columns, pieces in (
            ((False, True), [Piece(number, 4, 2, 5) for number in running]),  # one token of the prompt, one generated
            ((True,), [Piece(number, 5, 1, 5) for number in running]),
        ):
            acts = self.state.begin(BatchLayout.of(pieces))
            given = {site: h[site][-len(columns) :] for site in h}
            out = {site: self.state.at(site, given[site].expand(len(running), -1, -1).clone()) for site in (FIRST, SECOND)}
            self.state.end()
            for row, number in enumerate(running):
                for column, generated in enumerate(columns):
                    self.compare(number, {s: given[s][column] for s in h}, {s: out[s][row, column] for s in h}, generated)
            assert acts or not any(self.state.fingerprint(number, decode=True) for number in running)

    def compare(self, number: int, token: dict[Site, Tensor], out: dict[Site, Tensor], generated: bool) -> None:
        wanted = self.expected(self.known[number], token, generated)
        for site in token:
            assert (out[site] - wanted[site]).abs().max() < 1e-12
            if not self.state.fingerprint(number, decode=generated):
                assert torch.equal(out[site], token[site])

    @precondition(lambda self: not self.known and not self.held)
    @invariant()
    def nothing_is_left(self) -> None:
        assert self.state.rows.used == 0
        globals_ = {entry.site for entries in self.tiers.values() for entry in entries}
        watched = {site for one in self.monitors.values() for site in (one.site, *(entry.site for entry in one.adds))}
        assert self.state.sites() == globals_ | {entry.site for entry in self.tier} | watched


def equal(a: object, b: object) -> bool:
    """Equality that looks into tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_whatever_is_done_in_whatever_order() -> None:
    SEEN.clear()
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=35))
    assert min(SEEN[what] for what in ("resumed", "full at admission", "full at hold")) > 0
