"""Cost of the jail: a grade by its warm servers, against a fresh Python process without a jail, and against servers without one.

Compared is the processor time of all processes that take part.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side
from studies.sandbox import PROTECTIONS, SCRIPT_DRIVER, Jail
from studies.sandbox.leavings import descendants

JAILED, OPEN, CHILD = "jail", "servers without protections", "fresh child without a jail"
WORKERS = 2
CODE = """
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return [seen[target - x], i]
            seen[x] = i
result = [Solution().twoSum(list(range(n)), 2 * n - 3) for n in (2, 10, 100)]
"""
REPLY = [[0, 1], [8, 9], [98, 99]]


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return a number of grades by each side."""
    grades = 4 if options.quick else 50
    jailed = stack.enter_context(Jail(SCRIPT_DRIVER, workers=WORKERS))
    unconfined = stack.enter_context(Jail(SCRIPT_DRIVER, workers=WORKERS, unsafe=True, without=PROTECTIONS))

    def served(jail: Jail) -> float:
        began = processor_seconds()
        replies: list[Any] = [outcome.reply for outcome in jail.run([{"code": CODE}] * grades)]
        assert replies == [REPLY] * grades, replies
        return processor_seconds() - began

    def child() -> float:
        began = processor_seconds()
        for _ in range(grades):
            command = [sys.executable, "-I", "-c", f"{CODE}\nprint(result)"]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(REPLY)
        return processor_seconds() - began

    sides: dict[str, Side] = {JAILED: lambda: served(jailed), OPEN: lambda: served(unconfined), CHILD: child}
    return Benchmark(f"{grades} grades a turn, {WORKERS} workers", sides, [(JAILED, CHILD), (JAILED, OPEN)])


def processor_seconds() -> float:
    """Return the processor seconds of this process and all its descendants; an ended process is counted by its parent."""
    used = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return used
