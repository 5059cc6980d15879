"""``python -m studies.environments.leetcode report --data DIR --out DIR``: measure the environment on problems and rollouts."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from studies.common.command_line import run_command


@dataclass(frozen=True)
class Report:
    """Measure mutants, rollouts and detectors, and write the counts of each as a Markdown and a JSON table.

    No table contains a text or an answer of a problem.
    """

    data: Annotated[Path, tyro.conf.arg(help="the folder that holds leetcode.jsonl and rollouts.jsonl")]
    out: Annotated[Path, tyro.conf.arg(help="the folder that the tables are written to")]
    problems: Annotated[Path | None, tyro.conf.arg(help="a JSONL file of problems that the rollouts answer, in any layout")] = None
    seed: Annotated[int, tyro.conf.arg(help="draws mutants and new inputs")] = 0
    per_kind: Annotated[int, tyro.conf.arg(help="mutants of each kind and problem, at most")] = 6
    inputs: Annotated[int, tyro.conf.arg(help="new inputs for each problem")] = 60
    workers: Annotated[int, tyro.conf.arg(help="programs that run at a time")] = 2
    unsafe: Annotated[bool, tyro.conf.arg(help="run programs also where the machine lacks a protection of the jail")] = False

    def __call__(self) -> None:
        """Write the report.

        Raises:
            OSError, ValueError: A file cannot be read, or a number is negative.
            JailUnavailableError: Programs cannot be confined.
        """
        if min(self.per_kind, self.inputs) < 0:
            raise ValueError("--per-kind and --inputs are numbers of mutants and inputs: give 0 or more")
        if self.out.exists() and not self.out.is_dir():  # told now, and not when the first table is measured
            raise ValueError(f"{self.out} is a file: give a folder")
        from studies.common.publishing import write_table
        from studies.environments.leetcode.problems import load_tasks, setup_of  # with torch, which ``--help`` need not wait for
        from studies.environments.leetcode.programs import Programs
        from studies.environments.leetcode.report import confusion, mutants, rollouts
        from studies.environments.leetcode.rollouts import load_rollouts, tasks_of

        tasks, recorded = load_tasks(self.data), load_rollouts(self.data)
        left_out: list[str] = []
        known = {} if self.problems is None else load_tasks(self.problems, left_out)
        answered = tasks_of(recorded, known, setup_of(tasks))
        with Programs(self.workers, unsafe=self.unsafe) as programs:
            answered = rollouts.extended(answered, programs, self.seed, self.inputs)
            data = confusion.measure(tasks, recorded, answered, programs, self.seed)
            write_table(self.out, "confusion", data, confusion.render(data))
            data = rollouts.measure(recorded, answered, programs) | {
                "seed": self.seed,
                "inputs": self.inputs,
                "problems_file": self.problems.name if self.problems else None,
                "problems_left_out": len(left_out),
            }
            write_table(self.out, "rollouts", data, rollouts.render(data))
            data = mutants.measure(tasks, programs, self.seed, self.per_kind, self.inputs)
            write_table(self.out, "mutants", data, mutants.render(data))
        print(json.dumps({"out": str(self.out), "tables": ["confusion.md", "rollouts.md", "mutants.md"]}))


def main() -> int:
    return run_command({"report": Report}, "studies.environments.leetcode", None, "starts anew")


if __name__ == "__main__":
    sys.exit(main())
