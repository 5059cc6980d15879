"""``python -m studies.environments.leetcode report --data DIR --out DIR``: measure the environment on problems and rollouts."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


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


def report(options: Report) -> None:
    """Write the report.

    Raises:
        OSError, ValueError: A file cannot be read, or a number is negative.
        JailUnavailableError: Programs cannot be confined.
    """
    if min(options.per_kind, options.inputs) < 0:
        raise ValueError("--per-kind and --inputs are numbers of mutants and inputs: give 0 or more")
    if options.out.exists() and not options.out.is_dir():  # told now, and not when the first table is measured
        raise ValueError(f"{options.out} is a file: give a folder")
    from studies.common.publishing import write_table
    from studies.environments.leetcode.problems import load_tasks, setup_of  # with torch, which ``--help`` need not wait for
    from studies.environments.leetcode.programs import Programs
    from studies.environments.leetcode.report import confusion, mutants, rollouts
    from studies.environments.leetcode.rollouts import load_rollouts, tasks_of

    tasks = load_tasks(options.data)
    recorded = load_rollouts(options.data)
    left_out: list[str] = []
    known = {} if options.problems is None else load_tasks(options.problems, left_out)
    answered = tasks_of(recorded, known, setup_of(tasks))
    with Programs(options.workers, unsafe=options.unsafe) as programs:
        answered = rollouts.extended(answered, programs, options.seed, options.inputs)
        data = confusion.measure(tasks, recorded, answered, programs, options.seed)
        write_table(options.out, "confusion", data, confusion.render(data))
        data = rollouts.measure(recorded, answered, programs)
        data |= {"seed": options.seed, "inputs": options.inputs} | {
            "problems_file": options.problems.name if options.problems else None,
            "problems_left_out": len(left_out),
        }
        write_table(options.out, "rollouts", data, rollouts.render(data))
        data = mutants.measure(tasks, programs, options.seed, options.per_kind, options.inputs)
        write_table(options.out, "mutants", data, mutants.render(data))
    print(json.dumps({"out": str(options.out), "tables": ["confusion.md", "rollouts.md", "mutants.md"]}))


def main() -> int:
    options = tyro.extras.subcommand_cli_from_dict({"report": Report}, prog="python -m studies.environments.leetcode")
    try:
        report(options)
    except KeyboardInterrupt:
        print("\nstopped; the same command starts anew", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
