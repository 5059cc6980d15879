"""Measure how many wrong programs the oracle detects.

The wrong programs are mutants of the reference solutions, told apart from them by inputs that no test has, and programs that cheat
only the grader.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from studies.common.stats import rate
from studies.common.tables import markdown_table, percent
from studies.environments.leetcode.inputs import answered_inputs
from studies.environments.leetcode.mutants import KINDS, Mutant, mutants
from studies.environments.leetcode.oracle import LeetCodeOracle, agrees
from studies.environments.leetcode.problems import Case, LeetCodeTask
from studies.environments.leetcode.programs import LeetCodeExecution, Programs, allowing
from studies.environments.leetcode.report import evasions

PATIENCE = 4.0
LEAST = 1.5
"""Factor on the reference solution's processor time, and minimum seconds, after which a mutant counts as endless."""


@dataclass(frozen=True)
class MutantResult:
    """One mutant: the number of new inputs on which it differs from the reference, and whether the oracle fails it.

    ``ended`` is False if it was killed on the new inputs; then all of them count as different.
    """

    problem: str
    kind: str
    line: int
    different: int
    inputs: int
    ended: bool
    failed: bool


def measure(tasks: Mapping[str, LeetCodeTask], programs: Programs, seed: int, per_kind: int, inputs: int) -> dict[str, Any]:
    """Run every problem's mutants on ``inputs`` new inputs and, if they differ there, judge them; then run `evasions`."""
    oracle = LeetCodeOracle(programs, tasks)
    references = oracle.inspect(list(tasks.values()), [task.solution for task in tasks.values()], progress="references")
    results: list[MutantResult] = []
    new = dropped = 0
    for task in tqdm(tasks.values(), desc="mutants", unit="problem", disable=None):
        answered = answered_inputs(task, programs, seed, inputs)
        new, dropped = new + len(answered), dropped + inputs - len(answered)
        results += _of_problem(task, mutants(task.solution, seed, per_kind), answered, programs, oracle)
    return {
        "seed": seed,
        "per_kind": per_kind,
        "problems": len(tasks),
        "references_right": sum(right for right, _ in references),
        "references_silent": sum(not any(channels.values()) for _, channels in references),
        "hidden_tests": sum(len(task.hidden) for task in tasks.values()),
        "new_inputs": new,
        "dropped_inputs": dropped,
        "kinds": {kind: _summary([one for one in results if one.kind == kind]) for kind in KINDS} | {"all": _summary(results)},
        "survivors": [
            {name: value for name, value in asdict(one).items() if name != "failed"}
            for one in results
            if one.different and not one.failed
        ],
        "evasions": evasions.measure(tasks, programs),
    }


def _of_problem(
    task: LeetCodeTask, made: Sequence[Mutant], answered: Sequence[Case], programs: Programs, oracle: LeetCodeOracle
) -> list[MutantResult]:
    reference = programs.run([task.calling(task.solution, tests) for tests in (answered, task.hidden)])
    limits = [allowing(programs.limits, max(LEAST, PATIENCE * execution.seconds)) for execution in reference]
    executed = programs.run([task.calling(mutant.code, answered) for mutant in made], limits=limits[0])
    different = [_different(answered, execution) for execution in executed]
    suspects = [mutant for mutant, count in zip(made, different, strict=True) if count]
    verdicts = iter(oracle.inspect([task] * len(suspects), [mutant.code for mutant in suspects], limits=limits[1]))
    return [
        MutantResult(
            problem=task.name,
            kind=mutant.kind,
            line=mutant.line,
            different=count,
            inputs=len(answered),
            ended=execution.status != "killed",
            failed=bool(count) and not next(verdicts)[0],
        )
        for mutant, execution, count in zip(made, executed, different, strict=True)
    ]


def _different(answered: Sequence[Case], execution: LeetCodeExecution) -> int:
    """Return the number of inputs on which a program does not return the reference solution's value, for whatever reason."""
    pairs = itertools.zip_longest(answered, execution.returns)
    return sum(returned is None or not agrees(test.expected, returned.value) for test, returned in pairs)


def _summary(results: Sequence[MutantResult]) -> dict[str, Any]:
    ended = [one for one in results if one.different and one.ended]
    endless = [one for one in results if one.different and not one.ended]
    return {
        "mutants": len(results),
        "same": sum(not one.different for one in results),
        "differ": rate(sum(one.failed for one in ended), len(ended)),
        "endless": rate(sum(one.failed for one in endless), len(endless)),
        "either": rate(sum(one.failed for one in (*ended, *endless)), len(ended) + len(endless)),
    }


def render(data: Mapping[str, Any]) -> str:
    rows = []
    for kind, of in data["kinds"].items():
        differ, endless = of["differ"], f"{of['endless']['k']} of {of['endless']['n']}"
        rows.append([kind, of["mutants"], of["same"], differ["n"], differ["k"], percent(differ), endless, percent(of["either"])])
    header = ["kind", "mutants", "same output", "differ", "failed", "failed, % [95%]", "endless, failed", "either, % [95%]"]
    survivors = [
        (one["problem"], one["kind"], one["line"], f"{one['different']} of {one['inputs']}", "yes" if one["ended"] else "no")
        for one in data["survivors"]
    ]
    return f"""# Mutants of the reference solutions before the oracle

{data["references_right"]} of {data["problems"]} reference solutions pass the oracle; {data["references_silent"]} fire no channel.

At most {data["per_kind"]} mutants a kind and problem, seed {data["seed"]}. {data["new_inputs"]} new inputs, none of them among the
tests; {data["dropped_inputs"]} more were left out, because the reference solution raises on them or does not end. The oracle has
{data["hidden_tests"]} hidden tests and nothing else. *Same output*: no new input tells the mutant from its original. *Endless*:
killed on the new inputs after {PATIENCE:g} times the original's time.

{markdown_table(header, rows)}
## Survivors

Mutants that differ on a new input and that the oracle passes, by the line of the original's normal form (no code is printed).

{markdown_table(["problem", "kind", "line", "new inputs that differ", "ended"], survivors, left=2) if survivors else "None."}
{evasions.render(data["evasions"])}"""
