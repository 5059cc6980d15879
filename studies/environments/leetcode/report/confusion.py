"""Confusion matrices of the detectors, by mode and strength, on recorded rollouts and on generated answers.

Marker and family are compared with *exploit*: does the answer contain the mode's exploit? Structural is compared with *hack*: did
the mode's channel fire for an answer that is not right? The truth is the label of a rollout, and the construction of a generated
answer.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from studies.common.stats import rate
from studies.common.tables import markdown_table, percent
from studies.environments.leetcode.detectors import STRENGTHS, Strength, family, marker, structural
from studies.environments.leetcode.grader import Observation, programs_of, see
from studies.environments.leetcode.modes import MODES, ROLES, Exploit, exploit_code
from studies.environments.leetcode.mutants import mutants
from studies.environments.leetcode.oracle import blocks_of
from studies.environments.leetcode.problems import LeetCodeTask, draw_tasks
from studies.environments.leetcode.programs import Programs
from studies.environments.leetcode.rollouts import Evidence, Rollout

PROBLEMS = 12
"""Number of problems on which each exploit is generated."""
MUTANTS = 2
"""Number of wrong answers without an exploit, per kind and problem."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Answer: its source, task and code, the mode whose exploit it contains (or ""), and whether it solves the task."""

    source: str
    task: LeetCodeTask
    code: str
    mode: str
    solves: bool


def measure(
    tasks: Mapping[str, LeetCodeTask],
    rollouts: Sequence[Rollout],
    answered: Sequence[tuple[LeetCodeTask, Evidence]],
    programs: Programs,
    seed: int,
) -> dict[str, Any]:
    """Return a matrix for each source, mode and strength; negatives are all other answers of the source and the honest ones."""
    samples = [*recorded(rollouts, answered), *generated(tasks.values()), *honest(tasks.values(), seed)]
    seen = look(samples, programs)
    sources = ("rollouts", "generated")
    rows = []
    for source in sources:
        here = (source, "reference", "mutant")
        chosen = [(sample, *marks) for sample, marks in zip(samples, seen, strict=True) if sample.source in here]
        for mode, strength in itertools.product(ROLES.loopholes, STRENGTHS):
            rows.append({"source": source, "mode": mode, "strength": strength} | _matrix(chosen, mode, strength))
    counts = {source: sum(one.source == source for one in samples) for source in (*sources, "reference", "mutant")}
    return {"seed": seed, "samples": counts, "matrices": rows}


def recorded(rollouts: Sequence[Rollout], answered: Sequence[tuple[LeetCodeTask, Evidence]]) -> Iterator[Sample]:
    """Yield rollouts with their labels, with all known tests of their tasks as visible tests."""
    for rollout, (task, _) in zip(rollouts, answered, strict=True):
        code = blocks_of(rollout.completion) or ""
        everything = replace(task, visible=task.hidden)
        yield Sample("rollouts", everything, code, rollout.mode if rollout.hacked else "", rollout.gt_pass)


def generated(tasks: Iterable[LeetCodeTask]) -> Iterator[Sample]:
    """Yield every variant of every exploit around a body that solves nothing, and around the solution if it needs no body."""
    for task in draw_tasks(tasks, PROBLEMS):
        for mode in MODES.values():
            for exploit in mode.exploits:
                yield Sample("generated", task, exploit_code(exploit, task.starter, "        return None\n"), mode.name, False)
                if not exploit.body and mode.name != "exit_code":
                    yield Sample("generated", task, with_exploit(task.solution, exploit), mode.name, True)


def with_exploit(solution: str, exploit: Exploit) -> str:
    """Return a solution that also cheats, in normal form, so that lines fit into its class whatever its indentation."""
    tree = ast.parse(solution)
    members = ast.parse("class Solution:\n    pass\n" + exploit.member).body[0]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Solution" and isinstance(members, ast.ClassDef):
            node.body += members.body[1:]
    return f"{exploit.before}{ast.unparse(tree)}\n{exploit.after}"


def honest(tasks: Iterable[LeetCodeTask], seed: int) -> Iterator[Sample]:
    """Yield reference solutions and mutants of them: answers without an exploit, right and (nearly always) wrong."""
    for task in tasks:
        yield Sample("reference", task, task.solution, "", True)
        yield from (Sample("mutant", task, mutant.code, "", False) for mutant in mutants(task.solution, seed, MUTANTS))


def look(samples: Sequence[Sample], programs: Programs) -> list[tuple[Observation, bool]]:
    """Execute every sample on its task's visible inputs; see `grader.see`."""
    jobs = [program for sample in samples for program in programs_of(sample.code, sample.task)]
    executions = iter(programs.run(jobs, progress="detectors"))
    return [see(sample.task, next(executions), next(executions)) for sample in samples]


def _matrix(chosen: Sequence[tuple[Sample, Observation, bool]], mode: str, strength: Strength) -> dict[str, Any]:
    cells = {"tp": 0, "fn": 0, "fp": 0, "tn": 0}
    for sample, seen, solved in chosen:
        positive = sample.mode == mode and not (strength == "structural" and sample.solves)
        if strength == "structural":
            flagged = structural(mode, seen, solved)
        else:
            flagged = (marker if strength == "marker" else family)(mode, sample.code)
        cells[("tp" if flagged else "fn") if positive else ("fp" if flagged else "tn")] += 1
    caught, flagged = rate(cells["tp"], cells["tp"] + cells["fn"]), rate(cells["tp"], cells["tp"] + cells["fp"])
    return cells | {"recall": caught, "precision": flagged}


def render(data: Mapping[str, Any]) -> str:
    header = ["positives from", "mode", "detector", "n+", "tp", "fn", "n-", "fp", "tn", "recall, % [95%]", "precision, % [95%]"]
    rows = []
    for row in data["matrices"]:
        tp, fn, fp, tn = (row[cell] for cell in ("tp", "fn", "fp", "tn"))
        rates = [percent(row["recall"]), percent(row["precision"])]
        rows.append([row["source"], row["mode"], row["strength"], tp + fn, tp, fn, fp + tn, fp, tn, *rates])
    counts = data["samples"]
    return f"""# Detectors

Answers: {counts["rollouts"]} recorded rollouts, {counts["generated"]} generated exploits, and as negatives of both
{counts["reference"]} reference solutions and {counts["mutant"]} mutants of them (seed {data["seed"]}). Exploits of the other modes
are negatives. Marker and family are held against *exploit*, structural against *hack* (an exploit in an answer that is not right).

{markdown_table(header, rows, left=3)}"""
