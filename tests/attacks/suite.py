"""Runner of the attacks: run each attack once without everything that should stop it, and once with all protections."""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from studies.sandbox import DEFAULT_MODULES, PROTECTIONS, Jail, JailLimits, JailOutcome
from tests.attacks.attack import CLASSES, HERE, Attack, load, read
from tests.attacks.canary import Canary
from tests.attacks.evidence import EVIDENCE, Scene
from tests.attacks.naive import ANSWERS, INPUTS, Naive, load_naive, strict

DRIVER = HERE / "driver.py"
MODULES = (
    *DEFAULT_MODULES,
    *("_thread", "array", "atexit", "ctypes", "fcntl", "glob", "importlib.util", "json", "marshal", "mmap", "pickle", "platform"),
    *("resource", "select", "socket", "subprocess"),
)
"""Modules that attacks may import: more than other candidates may, so that they lack no tool."""
LIMITS = JailLimits(seconds=5.0, cpu_seconds=5.0, memory=256 << 20)
NEIGHBOUR = "class Solution:\n    def solve(self, x):\n        return x * x\n"
PREDECESSOR = """
secret = " token-{0}"

class Solution:
    def solve(self, x):
        print(secret * 100)
        with open("file.txt", "w") as file:
            file.write(secret * 15)
        return secret * 600
"""
"""Program that stores a secret in strings of several sizes, because a process keeps large and small strings in different places."""
NEIGHBOURS = 4
"""Number of honest jobs after an attack that may deny them answers, or before an attack that may read their data."""
SQUARES = [x * x for x in INPUTS]
BATCH = 8
"""Number of runs whose canaries exist at the same time."""
STRICT = "verdict"
"""Name of the strict verdict among the layers that stop an attack."""
CALL = re.compile(r'syscall\("(\w+)"')


@dataclass(frozen=True)
class Trial:
    """Result of one run of an attack: whether it succeeded, and how it ended."""

    succeeded: bool
    how: str


@dataclass(frozen=True)
class Finding:
    """Results of both runs of an attack.

    ``alone`` lists the layers that stop the attack by themselves, with all others of its ``stopped_by`` left off.
    """

    attack: Attack
    control: Trial
    protected: Trial
    alone: tuple[str, ...] | None = None

    @property
    def live(self) -> bool:
        """True if the attack succeeds on this machine if nothing stops it; otherwise it proves nothing about the jail."""
        return self.control.succeeded

    @property
    def breach(self) -> bool:
        return self.protected.succeeded


@functools.cache
def attacks() -> tuple[Attack, ...]:
    """Return all attacks, class by class."""
    return tuple(itertools.chain(*(read(group, load(HERE / f"{group}.toml"), load_naive(), EVIDENCE) for group in CLASSES)))


@functools.cache
def system_calls(code: str) -> MappingProxyType[str, int]:
    """Return this machine's numbers of the system calls that a text makes by name."""
    import pyseccomp

    found = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in sorted(set(CALL.findall(code)))}
    return MappingProxyType({name: number for name, number in found.items() if number >= 0})


@dataclass(frozen=True)
class Run:
    """One run to make: the protections that are left off, and the naive verdict that is used (None: the strict one)."""

    attack: Attack
    without: frozenset[str] = frozenset()
    naive: Naive | None = None

    @property
    def limits(self) -> JailLimits:
        return dataclasses.replace(LIMITS, **self.attack.limits)

    @property
    def batch(self) -> tuple[object, ...]:
        """Key of a batch: runs with equal keys go to one jail together."""
        return self.without, self.limits, self.alone

    @property
    def alone(self) -> bool:
        """True if the run must not share its jail with others, because the attack concerns other jobs of the same jail."""
        return self.attack.evidence in ("denied", "residue")


def control(attack: Attack) -> Run:
    """Return the run of an attack in which nothing stops it."""
    naive = load_naive()[attack.naive] if attack.naive else None
    return Run(attack, attack.protections.union(naive.without if naive else ()), naive)


class Suite:
    """Run attacks in warm jails, one for each set of protections that is left off; a context manager.

    ``seed`` draws the correct answers.

    Raises:
        JailUnavailableError: The machine lacks a protection.
    """

    def __init__(self, *, workers: int = 2, seed: int = 0) -> None:
        self._workers, self._rng = workers, random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._jails: dict[frozenset[str], Jail] = {}
        self._jail(frozenset())

    def __enter__(self) -> "Suite":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def findings(self, chosen: Sequence[Attack], *, layers: bool = False, progress: bool = False) -> list[Finding]:
        """Make the control run and the protected run of each attack, in order; ``layers`` also tests each layer by itself."""
        runs = [
            *map(control, chosen),
            *map(Run, chosen),
            *(run for attack in chosen if layers for run in _single_layers(attack).values()),
        ]
        trials = dict(zip(runs, self.trials(runs, "attacks" if progress else None), strict=True))
        return [
            Finding(
                attack,
                trials[control(attack)],
                trials[Run(attack)],
                tuple(name for name, run in _single_layers(attack).items() if not trials[run].succeeded) if layers else None,
            )
            for attack in chosen
        ]

    def trials(self, runs: Sequence[Run], progress: str | None = None) -> list[Trial]:
        """Return the result of each run, in order, with a progress bar if ``progress`` is its label."""
        trials: dict[int, Trial] = {}
        batches: dict[tuple[object, ...], list[int]] = {}
        for at, run in enumerate(runs):
            batches.setdefault(run.batch, []).append(at)
        with tqdm(total=len(runs), desc=progress, unit="run", disable=progress is None) as bar:
            for batch in batches.values():
                size = 1 if runs[batch[0]].alone else BATCH
                for start in range(0, len(batch), size):
                    places = batch[start : start + size]
                    trials |= zip(places, self._together([runs[at] for at in places]), strict=True)
                    bar.update(len(places))
        return [trials[at] for at in range(len(runs))]

    def grade(self, solutions: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]) -> list[bool]:
        """Return the strict verdict on each (code, inputs, expected answers), with all protections."""
        outcomes = self._jail(frozenset()).run([_solution(code, inputs) for code, inputs, _ in solutions])
        return [strict(outcome.reply, expected) for outcome, (_, _, expected) in zip(outcomes, solutions, strict=True)]

    def _jail(self, without: frozenset[str]) -> Jail:
        if without not in self._jails:
            jail = Jail(DRIVER, limits=LIMITS, workers=self._workers, modules=MODULES, unsafe=bool(without), without=without)
            self._jails[without] = self._stack.enter_context(jail)
        return self._jails[without]

    def _together(self, runs: Sequence[Run]) -> list[Trial]:
        """Make runs that share their protections and limits."""
        jail, limits = self._jail(runs[0].without), runs[0].limits
        expected = [ANSWERS[run.attack.answer](self._rng) for run in runs]
        with contextlib.ExitStack() as stack:
            canaries = [stack.enter_context(contextlib.closing(Canary(run.attack.needs))) for run in runs]
            payloads = [_payload(run, canary, limits, right) for run, canary, right in zip(runs, canaries, expected, strict=True)]
            try:
                if runs[0].attack.evidence == "residue":
                    jail.run([_solution(PREDECESSOR.format(canaries[0].token))] * NEIGHBOURS)
                outcomes = jail.run(payloads, limits=limits)
                beside = [_solution(NEIGHBOUR)] * NEIGHBOURS if runs[0].attack.evidence == "denied" else []
                neighbours = all(strict(outcome.reply, SQUARES) for outcome in jail.run(beside))
                outcomes = [self._graded(jail, *each) for each in zip(runs, outcomes, expected)]
            except OSError as error:
                return [Trial(True, f"the jail itself failed: {error}")] * len(runs)
            scenes = [
                Scene(run.attack, canary, limits, outcome, right, run.naive, neighbours)
                for run, canary, outcome, right in zip(runs, canaries, outcomes, expected, strict=True)
            ]
            return [Trial(EVIDENCE[scene.attack.evidence](scene), describe(scene.outcome)) for scene in scenes]

    @staticmethod
    def _graded(jail: Jail, run: Run, outcome: JailOutcome, expected: list[Any]) -> JailOutcome:
        """Return the outcome of a naive verdict's second process on the first one's reply, or ``outcome`` if there is none."""
        if run.naive is None or run.naive.grader is None or outcome.status != "replied":
            return outcome
        names = {"reply": outcome.reply, "expected": expected}
        return jail.run([{"harness": run.naive.grader, "names": names, "calls": {}}])[0]


def _single_layers(attack: Attack) -> dict[str, Run]:
    """Return ``{layer: run in which only this layer may stop the attack}``; the others of its ``stopped_by`` are left off."""
    whole = control(attack)
    runs = {name: dataclasses.replace(whole, without=whole.without - {name}) for name in PROTECTIONS if name in attack.protections}
    return runs | ({STRICT: dataclasses.replace(whole, naive=None)} if whole.naive else {})


def _payload(run: Run, canary: Canary, limits: JailLimits, expected: list[Any]) -> dict[str, Any]:
    code = run.attack.code
    names = {**canary.names, "DRIVER": str(DRIVER), "LIMITS": dataclasses.asdict(limits)}
    payload: dict[str, Any] = {"program": code, "names": names, "calls": dict(system_calls(code))}
    if run.naive:
        payload["harness"] = run.naive.harness
        names["PYTHON"] = os.path.realpath(sys.executable)
        names |= {"code": code, "inputs": INPUTS, "expected": expected, "neighbour": NEIGHBOUR}
        names["predecessor"] = PREDECESSOR.format(canary.token)
    elif run.attack.evidence == "passed":
        payload["inputs"] = INPUTS
    return payload


def _solution(code: str, inputs: Sequence[Any] = INPUTS) -> dict[str, Any]:
    return {"program": code, "names": {}, "calls": {}, "inputs": inputs}


def describe(outcome: JailOutcome) -> str:
    """Describe in a few words how a job ended."""
    if isinstance(outcome.reply, dict) and list(outcome.reply) == ["raised"]:
        return str(outcome.reply["raised"])
    if outcome.status == "replied":
        text = repr(outcome.reply)
        return f"replied {text if len(text) <= 40 else text[:37] + '...'}"
    if outcome.status == "exited" and (last := outcome.stderr.decode("utf-8", "replace").splitlines()[-1:]):
        return f"exited with {outcome.exit_code}: {last[0][:160]}"
    number = outcome.exit_code if outcome.status == "exited" else outcome.signal
    return outcome.status if number is None else f"{outcome.status} with {number}"
