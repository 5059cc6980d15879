"""Run ``python -m studies.sandbox check`` to test this machine's protections, or ``run FILE`` to run a script in the jail."""

import json
import sys
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from studies.sandbox.checks import CHECKS, DRIVER, honest_program_works, run_checks
from studies.sandbox.jail import Jail
from studies.sandbox.limits import PROTECTIONS, JailLimits


@dataclass(frozen=True)
class CheckJail:
    """Test each protection on this machine: alone, it must stop an action that works without protections.

    The exit status is 1 if a protection is missing or does not stop its action.
    """

    def __call__(self) -> int:
        with Jail(DRIVER, workers=1, unsafe=True) as jail:
            print("protection  here")
            for name in PROTECTIONS:
                print(f"{name:10}  {'yes' if name in jail.protections else 'MISSING'}")
            honest = honest_program_works(jail)
            complete = jail.protections == frozenset(PROTECTIONS)
        width = max(len(check.what) for check in CHECKS)
        print(f"\n{'protection':10}  {'action':{width}}  under it alone  under none")
        for finding in run_checks():
            fine = finding.stopped and finding.works
            complete = complete and fine
            inside, outside = "stopped" if finding.stopped else "WORKS", "works" if finding.works else "STOPPED"
            print(f"{finding.check.protection:10}  {finding.check.what:{width}}  {inside:14}  {outside}")
        print(f"\nan honest program {'works' if honest else 'FAILS'} under all of them")
        print("untrusted code can be confined here" if complete and honest else "untrusted code cannot be confined here")
        return 0 if complete and honest else 1


@dataclass(frozen=True)
class RunScript:
    """Run one script in the jail and print its outcome; the exit status is the script's, or 1 if it did not end by itself."""

    file: Annotated[Path, tyro.conf.Positional]
    """the script"""
    seconds: float = 5.0
    """limit of wall-clock time"""
    memory: int = 512
    """limit of memory in MiB"""
    unsafe: bool = False
    """run it even if this machine lacks a protection"""

    def __call__(self) -> int:
        if not self.file.is_file():
            raise ValueError(f"there is no script at {self.file}: give a file of Python code")
        try:
            with tokenize.open(self.file) as script:  # by its byte order mark or its coding line, as Python reads it
                code = script.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.file} cannot be read as Python ({error}): save it as UTF-8") from error
        limits = JailLimits(seconds=self.seconds, cpu_seconds=self.seconds, memory=self.memory << 20)
        with Jail(DRIVER, workers=1, limits=limits, unsafe=self.unsafe) as jail:
            (outcome,) = jail.run([{"code": code, "name": self.file.name}])
        sys.stdout.buffer.write(outcome.stdout)
        sys.stdout.flush()
        sys.stderr.buffer.write(outcome.stderr)
        print(f"{outcome.status} after {outcome.seconds:.3f} s, {outcome.peak_memory >> 20} MiB", file=sys.stderr)
        if outcome.signal is not None:
            print(f"signal: {outcome.signal}", file=sys.stderr)
        if outcome.reply is not None:
            print(f"result: {json.dumps(outcome.reply)}", file=sys.stderr)
        for name, data in outcome.files.items():
            print(f"file: {name}, {len(data)} bytes", file=sys.stderr)
        return 1 if outcome.exit_code is None else outcome.exit_code


COMMANDS: dict[str, Callable[..., CheckJail | RunScript]] = {"check": CheckJail, "run": RunScript}


def main() -> int:
    try:
        return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m studies.sandbox", description=__doc__)()
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
