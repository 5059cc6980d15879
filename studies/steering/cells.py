"""A cell: one way to steer, tried on every prompt. Cells run side by side in one engine, each request with its own steering.

Every cell meets the same prompts and the same uniforms, so that two cells differ in what was done and in nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor
from tqdm import tqdm

from mi_route2.engine.controllers import AsyncController, Controllers, SyncController
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import Host
from mi_route2.rollouts import Policy
from mi_route2.sites import Site
from mi_route2.steering.specs import Steering
from studies.loopholes.base import World
from studies.loopholes.modes import get_mode
from studies.loopholes.prompts import Prompt
from studies.loopholes.protocol import Witness
from studies.loopholes.vocabulary import Vocabulary
from studies.route2.randomness import derive
from studies.steering.settings import Settings

OUTCOMES = ("solve", "exploit")


@dataclass(frozen=True, eq=False)
class Cell:
    """``about`` says in plain data what is done. ``state``: whether the model runs whole or with its quarantine deleted.

    ``sync`` and ``queues`` are the controllers that it needs, ``held`` the configurations that they route to. Cells with
    controllers are run in a batch of their own kind.
    """

    name: str
    about: Mapping[str, object]
    steering: Steering | None = None
    state: Literal["full", "deployed"] = "full"
    sync: tuple[SyncController, ...] = ()
    queues: tuple[AsyncController, ...] = ()
    held: Mapping[str, Steering] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What cells are run on: a model on its host, the prompts by mode, and who judges. One seed of sampling a prompt."""

    settings: Settings
    host: Host
    policy: Policy
    world: World
    witness: Witness
    seed: int

    @property
    def modes(self) -> tuple[str, ...]:
        return self.world.modes.names

    def prompts(self, tasks: int | None = None) -> list[Prompt]:
        """Mode by mode the same test tasks, which nothing was trained on or fitted to."""
        return [p for mode in self.modes for p in self.world.evaluation_prompts(mode, tasks or self.settings.tasks)]

    def requests(
        self, prompts: Sequence[Prompt], steering: Steering | None, *, capture: Sequence[Site] = (), asked: bool = False
    ) -> list[Request]:
        """One request a prompt; ``asked`` wants the log-probability of the first token of the exploit of the prompt's own mode."""
        vocabulary = Vocabulary()
        found = []
        for number, prompt in enumerate(prompts):
            exploit = get_mode(prompt.mode).exploit
            ids = (vocabulary.id(exploit[0]),) if asked and exploit else ()
            sampling = Sampling(
                max_new=self.world.max_new,
                temperature=self.settings.temperature,
                seed=derive(self.seed, "steering sample", number),
                stop_tokens=(vocabulary.eos,),
                logprobs=0 if asked else None,
                logprob_token_ids=ids,
            )
            tokens = tuple(vocabulary.encode(prompt.tokens))
            found.append(Request(tokens, sampling, steering=steering, capture=tuple(Capture(site) for site in capture)))
        return found

    def engine(self, *, exact: bool = False, controllers: Controllers | None = None) -> Engine:
        """An engine over the model as it is switched now."""
        return Engine(self.host, rows=self.settings.rows, prefix_bytes=0, steering_rows=1024, controllers=controllers, exact=exact)

    def run(self, cells: Sequence[Cell], *, what: str = "cells") -> dict[str, UInt8[Tensor, "modes tasks 2"]]:
        """Outcomes (`OUTCOMES`) of every cell, by its name."""
        prompts, found = self.prompts(), {}
        for state in ("full", "deployed"):
            some = [cell for cell in cells if cell.state == state]
            if not some:
                continue
            with self.switched(state):
                results = self.results(some, prompts, what)
            for cell in some:
                found[cell.name] = self.outcomes(prompts, results[cell.name])
        return {cell.name: found[cell.name] for cell in cells}

    def switched(self, state: str):
        """The context in which the model is whole, or without its quarantine."""
        return self.policy.adapters.full() if state == "full" else self.policy.adapters.deployed()

    def results(self, cells: Sequence[Cell], prompts: Sequence[Prompt], what: str = "cells") -> dict[str, list[Result]]:
        """The requests of all cells in one engine, results by cell. ``RuntimeError`` for one that failed, with its reason."""
        sync = [one for cell in cells for one in cell.sync]
        queues = [one for cell in cells for one in cell.queues]
        engine = self.engine(controllers=Controllers(sync, queues))
        for cell in cells:
            for name, spec in cell.held.items():
                engine.steering.hold(name, spec)
        owner: dict[int, tuple[str, int]] = {}
        found: dict[str, list[Result]] = {cell.name: [None] * len(prompts) for cell in cells}  # pyright: ignore[reportAssignmentType]
        for cell in cells:
            for place, request in enumerate(self.requests(prompts, cell.steering)):
                owner[engine.submit(request)] = cell.name, place
        with tqdm(total=len(owner), desc=what, unit="rollout", delay=3, leave=False, disable=None) as bar:
            while engine.busy:
                done = engine.step()
                for result in done:
                    name, place = owner[result.request]
                    found[name][place] = checked(result)
                bar.update(len(done))
        _refuse_failures(engine)
        return found

    def outcomes(self, prompts: Sequence[Prompt], results: Sequence[Result]) -> UInt8[Tensor, "modes tasks 2"]:
        """What the oracle says of each rollout: for measurement alone."""
        samples = self.world.package(prompts, [result.ids for result in results])
        verdicts = self.witness.judge(samples)
        flat = torch.tensor([[v.gt, v.exploit] for v in verdicts], dtype=torch.uint8)
        return flat.view(len(self.modes), -1, len(OUTCOMES))


def checked(result: Result) -> Result:
    """``RuntimeError`` for a request that failed."""
    if result.finish == "error":
        raise RuntimeError(f"a rollout could not be generated: {result.error}")
    return result


def _refuse_failures(engine: Engine) -> None:
    """A controller that raised, or whose actions were dropped, has measured nothing. Actions on ended requests are no failure."""
    for source, counts in engine.controllers.ledger.snapshot()["sources"].items():
        if wrong := [what for what in ("failed", "dropped") if counts.get(what)]:
            recent = [entry for entry in engine.controllers.ledger.recent if wrong[0] in entry]
            raise RuntimeError(f"the controller {source!r} {wrong[0]}: {recent[-1] if recent else counts}")
