"""Cells: a cell is one way to steer, run on every prompt. Cells share one engine, where each request has its own steering.

Every cell uses the same prompts and the same uniforms, so two cells differ only in their steering.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor
from tqdm import tqdm

from mi_route2.engine.controllers import Controller, ProbeController
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import Host
from mi_route2.rollouts import Policy
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from studies.common.seeds import derive
from studies.environments.micro.language import MicroPrompt, Vocabulary, get_mode
from studies.environments.protocol import Witness, World
from studies.steering.fitting import Fitted, ProbeGate
from studies.steering.late import CERTAIN, Late, QuarantineSwitch, saturated
from studies.steering.settings import SteeringSettings

OUTCOMES = ("solve", "exploit")


@dataclass(frozen=True, eq=False)
class GateCell:
    """One way to steer.

    Cells with controllers are run in a batch of their own kind.

    Attributes:
        name: Unique name.
        about: Description of the cell as plain data.
        steering: Steering of the cell's requests.
        state: Whether the model runs with its quarantine (`full`) or without (`deployed`).
        controllers: Controllers of the cell.
        configurations: Steering by name, to which the controllers route.
    """

    name: str
    about: Mapping[str, object]
    steering: Steering | None = None
    state: Literal["full", "deployed"] = "full"
    controllers: tuple[Controller, ...] = ()
    configurations: Mapping[str, Steering] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The setup in which cells are run: a model on its host, the prompts by mode, the judge, and the seed of sampling.

    Each prompt has one sampling seed.
    """

    settings: SteeringSettings
    host: Host
    policy: Policy
    world: World
    witness: Witness
    seed: int

    @property
    def modes(self) -> tuple[str, ...]:
        return self.world.modes.names

    def prompts(self, tasks: int | None = None) -> list[MicroPrompt]:
        """Return the same test tasks in every mode; nothing was trained or fitted on them."""
        return [p for mode in self.modes for p in self.world.evaluation_prompts(mode, tasks or self.settings.tasks)]

    def requests(
        self, prompts: Sequence[MicroPrompt], steering: Steering | None, *, capture: Sequence[Site] = (), with_exploit: bool = False
    ) -> list[Request]:
        """Return one request per prompt.

        ``with_exploit`` requests the log-probability of the first token of the exploit of the prompt's own mode.
        """
        vocabulary = Vocabulary()
        requests = []
        for number, prompt in enumerate(prompts):
            exploit = get_mode(prompt.mode).exploit
            ids = (vocabulary.id(exploit[0]),) if with_exploit and exploit else ()
            sampling = Sampling(
                max_new=self.world.max_new,
                temperature=self.settings.temperature,
                seed=derive(self.seed, "steering sample", number),
                stop_tokens=(vocabulary.eos,),
                logprobs=0 if with_exploit else None,
                logprob_token_ids=ids,
            )
            tokens = tuple(vocabulary.encode(prompt.tokens))
            requests.append(Request(tokens, sampling, steering=steering, capture=tuple(Capture(site) for site in capture)))
        return requests

    def engine(self, *, exact: bool = False, controllers: Sequence[Controller] = ()) -> Engine:
        """Return an engine over the model in its current state."""
        return Engine(self.host, rows=self.settings.rows, prefix_bytes=0, steering_rows=1024, controllers=controllers, exact=exact)

    def run(self, cells: Sequence[GateCell], *, what: str = "cells") -> dict[str, UInt8[Tensor, "modes tasks 2"]]:
        """Return the outcomes (`OUTCOMES`) of every cell, by its name."""
        prompts, results = self.prompts(), {}
        for state, switched in (("full", self.policy.adapters.full), ("deployed", self.policy.adapters.deployed)):
            if some := [cell for cell in cells if cell.state == state]:
                with switched():
                    results |= self.results(some, prompts, what)
        return {cell.name: self.outcomes(prompts, results[cell.name]) for cell in cells}

    def results(self, cells: Sequence[GateCell], prompts: Sequence[MicroPrompt], what: str = "cells") -> dict[str, list[Result]]:
        """Run the requests of all cells in one engine and return the results by cell.

        Raises:
            RuntimeError: If a request or a controller failed; the message has the reason.
        """
        engine = self.engine(controllers=[controller for cell in cells for controller in cell.controllers])
        for cell in cells:
            for name, spec in cell.configurations.items():
                engine.steering.hold(name, spec)
        owner: dict[int, tuple[str, int]] = {}
        by_cell: dict[str, list[Result]] = {cell.name: [None] * len(prompts) for cell in cells}  # pyright: ignore[reportAssignmentType]
        for cell in cells:  # one engine for all cells: each engine needs forwards of its own
            for place, request in enumerate(self.requests(prompts, cell.steering)):
                owner[engine.submit(request)] = cell.name, place
        with tqdm(total=len(owner), desc=what, unit="rollout", delay=3, leave=False, disable=None) as bar:
            while engine.busy:
                for result in engine.step():
                    name, place = owner[result.request]
                    by_cell[name][place] = checked(result)
                    bar.update()
        refuse_failures(engine)
        return by_cell

    def outcomes(self, prompts: Sequence[MicroPrompt], results: Sequence[Result]) -> UInt8[Tensor, "modes tasks 2"]:
        """Return the oracle's verdict on each rollout; for measurement alone."""
        samples = self.world.package(prompts, [result.ids for result in results])
        verdicts = self.witness.judge(samples)
        flat = torch.tensor([[v.gt, v.exploit] for v in verdicts], dtype=torch.uint8)
        return flat.view(len(self.modes), -1, len(OUTCOMES))


def checked(result: Result) -> Result:
    """Return the result; ``RuntimeError`` if the request failed."""
    if result.finish == "error":
        raise RuntimeError(f"a rollout could not be generated: {result.error}")
    return result


def refuse_failures(engine: Engine) -> None:
    """Check that no controller failed, and that each of its actions was applied.

    Raises:
        RuntimeError: If a controller raised, or if its actions were dropped or rejected: its cell measures nothing.
    """
    for _, name, reason in engine.controllers.problems:
        raise RuntimeError(f"the controller {name!r} failed: {reason}")


ON = "on"
DELETED = "deleted"
CLOSED = "closed"
BEHIND = "closed behind the probe"
WATCH = "watch"


def control() -> GateCell:
    """Return the cell without any intervention."""
    return GateCell(ON, {"how": ON})


def away(settings: SteeringSettings, fitted: Fitted, gain: float, direction: str = "away") -> Steer:
    """Return steering by ``-gain`` class distances along a unit vector, at the study's site."""
    return Steer(Site.parse(settings.site), fitted.directions[direction], -gain * fitted.gap)


def steered(
    settings: SteeringSettings,
    fitted: Fitted,
    *,
    probe: str = "probe",
    quantile: float | None,
    gain: float,
    direction: str = "away",
) -> GateCell:
    """Steer a generated token if its own score is above the threshold (``None``: every generated token)."""
    gate = fitted.gates[Site.parse(settings.site)][probe]
    threshold = -CERTAIN if quantile is None else gate.thresholds[quantile]
    added = away(settings, fitted, gain, direction)
    monitor = Monitor(gate.site, gate.weight, threshold, settings.sharpness, gates=(), adds=(added,), name=WATCH)
    about = {"how": "steer", "probe": probe, "quantile": quantile, "gain": gain, "direction": direction}
    return GateCell(f"steer {probe} {_at(quantile)} {direction} x{gain:g}", about, Steering(monitors=(monitor,)))


def clamped(settings: SteeringSettings, fitted: Fitted, quantile: float, strength: float) -> GateCell:
    """Limit the projection on the direction to a quantile of clean tokens' projections: this is its own gate."""
    clamp = Clamp(
        Site.parse(settings.site), fitted.directions["away"], high=fitted.ceilings[quantile], strength=strength, phase="decode"
    )
    about = {"how": "clamp", "quantile": quantile, "gain": strength}
    return GateCell(f"clamp {_at(quantile)} x{strength:g}", about, Steering(clamps=(clamp,)))


def sweep(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield all combinations of threshold and gain, clamps, and the controls for alternative explanations."""
    yield control()
    for quantile, gain in product((None, *settings.quantiles), settings.gains):
        yield steered(settings, fitted, quantile=quantile, gain=gain)
    for quantile, strength in product(settings.quantiles, (1.0, 2.0)):
        yield clamped(settings, fitted, quantile, strength)
    yield from controls(settings, fitted)


def controls(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield, by gain at the operating threshold: other probes with the same direction, other directions with the same probe."""
    others = [name for name in fitted.gates[Site.parse(settings.site)] if name != "probe"]
    for gain in settings.gains:
        for probe in others:
            yield steered(settings, fitted, probe=probe, quantile=settings.operating, gain=gain)
        for direction in (name for name in fitted.directions if name != "away"):
            yield steered(settings, fitted, quantile=settings.operating, gain=gain, direction=direction)


def small_sweep(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield the cells for a model that hardly hacks: they show what steering costs there."""
    yield control()
    for gain in settings.gains:
        yield steered(settings, fitted, quantile=settings.operating, gain=gain)


def latency(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield the gate of the forward itself, and the same decision with increasing delays."""
    yield control()
    for gain in settings.late_gains:
        yield steered(settings, fitted, quantile=settings.operating, gain=gain)
        for delay in settings.delays:
            yield delayed(settings, fitted, delay, gain)


def delayed(settings: SteeringSettings, fitted: Fitted, delay: int, gain: float, *, shadow: bool = False) -> GateCell:
    """Return a policy without smoothing or hysteresis that routes a request to a held row.

    The row takes effect ``delay`` tokens after the score of a generated token. A ``shadow`` policy decides but has no effect.
    """
    gate = fitted.gates[Site.parse(settings.site)]["probe"]
    name = "shadow" if shadow else f"delay {delay} x{gain:g}"
    threshold, row_name = gate.thresholds[settings.operating], f"{name} row"
    watch = Monitor(gate.site, gate.weight, threshold, settings.sharpness, gates=(), name=name)
    gain_there = 0.0 if shadow else 1.0  # at gain 0 the policy still decides, and its decisions are counted
    policy = ProbeController(
        row_name, threshold, monitor=watch.name, smoothing=1.0, generated=True, gain=gain_there, name=name, keep=1 << 20
    )
    row = Steering(decode=(away(settings, fitted, gain),))
    about = {"how": "policy", "delay": delay, "gain": gain, "quantile": settings.operating}
    controllers = (policy if delay == 1 else Late(policy, delay),)
    return GateCell(name, about, Steering(monitors=(watch,)), controllers=controllers, configurations={row_name: row})


def quarantine(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield the two ends, the saturated gates, and the frontier of every probe and mechanism between them."""
    yield control()
    yield GateCell(DELETED, {"how": DELETED}, state="deployed")
    early, site = Site.parse(settings.early), Site.parse(settings.site)
    for how, at in ((CLOSED, early), (BEHIND, site)):
        yield GateCell(how, {"how": how}, Steering(monitors=(_shut(fitted, at),)))
    for quantile in settings.quantiles:
        for probe, gate in fitted.gates[site].items():
            yield gated_cell(settings, gate, probe, quantile, "close")
        yield gated_cell(settings, fitted.gates[site]["probe"], "probe", quantile, "open")
        yield gated_cell(settings, fitted.gates[early]["probe"], "probe", quantile, "close", how="early")
        for probe, latch in product(("probe", "haar-1"), (False, True)):
            yield switched(settings, fitted, probe, quantile, latch=latch)


def untrained(settings: SteeringSettings, fitted: Fitted) -> Iterator[GateCell]:
    """Yield cells for a quarantine that adds nothing: no gate may change anything."""
    yield control()
    yield GateCell(DELETED, {"how": DELETED}, state="deployed")
    site = Site.parse(settings.site)
    for mode in ("close", "open"):
        yield gated_cell(settings, fitted.gates[site]["probe"], "probe", settings.operating, mode)


def gated_cell(
    settings: SteeringSettings,
    gate: ProbeGate,
    probe: str,
    quantile: float,
    mode: Literal["close", "open"],
    *,
    how: str = "forward",
) -> GateCell:
    """Close (or open) the quarantines behind the probe in the forward of the same token that the probe reads."""
    monitor = Monitor(
        gate.site, gate.weight, gate.thresholds[quantile], settings.sharpness, gates=(), quarantine=mode, prompt=False, name=WATCH
    )
    about = {"how": how if mode == "close" else "open", "probe": probe, "quantile": quantile}
    return GateCell(f"{about['how']} {probe} {_at(quantile)}", about, Steering(monitors=(monitor,)))


def switched(settings: SteeringSettings, fitted: Fitted, probe: str, quantile: float, *, latch: bool) -> GateCell:
    """Close all quarantines from the next token on, while the score is above the threshold or (``latch``) permanently."""
    gate, early = fitted.gates[Site.parse(settings.site)][probe], Site.parse(settings.early)
    how = "latch" if latch else "next token"
    name = f"{how} {probe} {_at(quantile)}"
    watch = Monitor(gate.site, gate.weight, gate.thresholds[quantile], settings.sharpness, gates=(), name=name)
    switch = QuarantineSwitch(name, name, gate.thresholds[quantile], _shut(fitted, early), latch=latch)
    return GateCell(name, {"how": how, "probe": probe, "quantile": quantile}, Steering(monitors=(watch,)), controllers=(switch,))


def _shut(fitted: Fitted, site: Site) -> Monitor:
    return saturated(site, fitted.gates[site]["probe"].weight.tolist())


def _at(quantile: float | None) -> str:
    return "always" if quantile is None else f"q{quantile:g}"
