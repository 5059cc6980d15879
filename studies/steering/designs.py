"""The cells of each experiment: pure data from what was fitted, nothing is run here.

sweep       steer along the direction where the gate opens, threshold by gain; clamps; random probes and directions
latency     the same steering, so many tokens after the score that asked for it
quarantine  always on, deleted, or gated token by token by a probe, at every threshold
"""

from collections.abc import Iterator
from typing import Literal

from mi_route2.engine.controllers import ProbePolicy
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from studies.steering.cells import Cell
from studies.steering.fitting import Fitted, Gate
from studies.steering.late import CERTAIN, Late, QuarantineSwitch, saturated
from studies.steering.settings import Settings

ON = "on"
DELETED = "deleted"
CLOSED = "closed"
BEHIND = "closed behind the probe"
WATCH = "watch"


def control() -> Cell:
    """The model as it is, nothing done."""
    return Cell(ON, {"how": ON})


def away(settings: Settings, fitted: Fitted, gain: float, direction: str = "away") -> Steer:
    """``-gain`` distances of the classes along a unit vector, at the study's site."""
    return Steer(Site.parse(settings.site), fitted.directions[direction], -gain * fitted.gap)


def steered(
    settings: Settings, fitted: Fitted, *, probe: str = "probe", quantile: float | None, gain: float, direction: str = "away"
) -> Cell:
    """Steer a generated token where its own score is above the threshold (``None``: every generated token)."""
    gate = fitted.gates[Site.parse(settings.site)][probe]
    threshold = -CERTAIN if quantile is None else gate.thresholds[quantile]
    added = away(settings, fitted, gain, direction)
    monitor = Monitor(gate.site, gate.weight, threshold, settings.sharpness, gates=(), adds=(added,), name=WATCH)
    about = {"how": "steer", "probe": probe, "quantile": quantile, "gain": gain, "direction": direction}
    return Cell(f"steer {probe} {_at(quantile)} {direction} x{gain:g}", about, Steering(monitors=(monitor,)))


def clamped(settings: Settings, fitted: Fitted, quantile: float, strength: float) -> Cell:
    """Keep the projection on the direction at most at a quantile of clean tokens': a gate of its own."""
    clamp = Clamp(
        Site.parse(settings.site), fitted.directions["away"], high=fitted.ceilings[quantile], strength=strength, phase="decode"
    )
    about = {"how": "clamp", "quantile": quantile, "gain": strength}
    return Cell(f"clamp {_at(quantile)} x{strength:g}", about, Steering(clamps=(clamp,)))


def sweep(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """Threshold by gain, then what could have explained it."""
    yield control()
    for quantile in (None, *settings.quantiles):
        for gain in settings.gains:
            yield steered(settings, fitted, quantile=quantile, gain=gain)
    for quantile in settings.quantiles:
        for strength in (1.0, 2.0):
            yield clamped(settings, fitted, quantile, strength)
    yield from controls(settings, fitted)


def controls(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """At the operating threshold, by gain: other probes with the same direction, other directions with the same probe."""
    others = [name for name in fitted.gates[Site.parse(settings.site)] if name != "probe"]
    for gain in settings.gains:
        for probe in others:
            yield steered(settings, fitted, probe=probe, quantile=settings.operating, gain=gain)
        for direction in (name for name in fitted.directions if name != "away"):
            yield steered(settings, fitted, quantile=settings.operating, gain=gain, direction=direction)


def small_sweep(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """On a model that hardly hacks: what steering costs there."""
    yield control()
    for gain in settings.gains:
        yield steered(settings, fitted, quantile=settings.operating, gain=gain)


def latency(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """The gate of the forward itself, and the same decision taken later and later."""
    yield control()
    for gain in settings.late_gains:
        yield steered(settings, fitted, quantile=settings.operating, gain=gain)
        for delay in settings.delays:
            yield delayed(settings, fitted, delay, gain)


def delayed(settings: Settings, fitted: Fitted, delay: int, gain: float, *, shadow: bool = False) -> Cell:
    """A policy without smoothing or hysteresis that routes a request to a held row ``delay`` tokens after the score of a generated
    token; as a ``shadow`` it decides and does nothing."""
    gate = fitted.gates[Site.parse(settings.site)]["probe"]
    name = "shadow" if shadow else f"delay {delay} x{gain:g}"
    threshold, held = gate.thresholds[settings.operating], f"{name} row"
    watch = Monitor(gate.site, gate.weight, threshold, settings.sharpness, gates=(), name=name)
    gain_there = 0.0 if shadow else 1.0
    policy = ProbePolicy(held, threshold, monitor=name, smoothing=1.0, generated=True, gain=gain_there, name=name, keep=1 << 20)
    row = Steering(decode=(away(settings, fitted, gain),))
    about = {"how": "policy", "delay": delay, "gain": gain, "quantile": settings.operating}
    if delay == 1:
        return Cell(name, about, Steering(monitors=(watch,)), sync=(policy,), held={held: row})
    late = Late(policy, delay)
    return Cell(name, about, Steering(monitors=(watch,)), sync=(late,), queues=(late.queue,), held={held: row})


def quarantine(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """The two ends, the saturated gates, and the frontier of every probe and mechanism between them."""
    yield control()
    yield Cell(DELETED, {"how": DELETED}, state="deployed")
    early, site = Site.parse(settings.early), Site.parse(settings.site)
    yield Cell(CLOSED, {"how": CLOSED}, Steering(monitors=(saturated(early, _list(fitted, early)),)))
    yield Cell(BEHIND, {"how": BEHIND}, Steering(monitors=(saturated(site, _list(fitted, site)),)))
    for quantile in settings.quantiles:
        for probe, gate in fitted.gates[site].items():
            yield gated_cell(settings, gate, probe, quantile, "close")
        yield gated_cell(settings, fitted.gates[site]["probe"], "probe", quantile, "open")
        yield gated_cell(settings, fitted.gates[early]["probe"], "probe", quantile, "close", how="early")
        for probe in ("probe", "haar-1"):
            for latch in (False, True):
                yield switched(settings, fitted, probe, quantile, latch=latch)


def untrained(settings: Settings, fitted: Fitted) -> Iterator[Cell]:
    """A quarantine that adds nothing: whatever gates it, nothing may change."""
    yield control()
    yield Cell(DELETED, {"how": DELETED}, state="deployed")
    site = Site.parse(settings.site)
    for mode in ("close", "open"):
        yield gated_cell(settings, fitted.gates[site]["probe"], "probe", settings.operating, mode)


def gated_cell(
    settings: Settings, gate: Gate, probe: str, quantile: float, mode: Literal["close", "open"], *, how: str = "forward"
) -> Cell:
    """Close (or open) the quarantines behind the probe in the forward of the very token that it reads."""
    monitor = Monitor(gate.site, gate.weight, gate.thresholds[quantile], settings.sharpness, gates=(), quarantine=mode, name=WATCH)
    about = {"how": how if mode == "close" else "open", "probe": probe, "quantile": quantile}
    return Cell(f"{about['how']} {probe} {_at(quantile)}", about, Steering(monitors=(monitor,)))


def switched(settings: Settings, fitted: Fitted, probe: str, quantile: float, *, latch: bool) -> Cell:
    """Close all quarantines from the next token on, while the score is above the threshold or (``latch``) for good."""
    gate, early = fitted.gates[Site.parse(settings.site)][probe], Site.parse(settings.early)
    how = "latch" if latch else "next token"
    name = f"{how} {probe} {_at(quantile)}"
    watch = Monitor(gate.site, gate.weight, gate.thresholds[quantile], settings.sharpness, gates=(), name=name)
    switch = QuarantineSwitch(name, name, gate.thresholds[quantile], saturated(early, _list(fitted, early)), latch=latch)
    return Cell(name, {"how": how, "probe": probe, "quantile": quantile}, Steering(monitors=(watch,)), sync=(switch,))


def _list(fitted: Fitted, site: Site) -> list[float]:
    return fitted.gates[site]["probe"].weight.tolist()


def _at(quantile: float | None) -> str:
    return "always" if quantile is None else f"q{quantile:g}"
