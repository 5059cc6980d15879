"""Cost of the jail: grades per second by warm servers, by a fresh process per grade, and by servers without confinement.

    python -m studies.benchmarks jail [--quick] [--rounds 15] [--out FILE.json]

Every side runs the same small grades, two at a time, and takes turns with the others:

    warm servers             `Jail` with all of its protections
    warm, unconfined         the same without any protection: the price of a fork and of returning data
    fresh process, confined  an interpreter started for each grade, which imports the same modules and confines itself

Compared is the processor time of all processes that take part, so that other work on the machine is not counted. Grades per second
are by wall-clock time, and lower on a busy machine. Folders are in memory if /dev/shm exists: no disk is measured.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from studies.benchmarks.measurement.paired import PairedRatio, PairedRatioResult, compared, machine, report, take_turns
from studies.benchmarks.options import JailOptions
from studies.common.tables import markdown_table
from studies.sandbox import DEFAULT_MODULES, PROTECTIONS, Jail, Limits, filters
from studies.sandbox.checks import DRIVER
from studies.sandbox.jail import search_paths
from studies.sandbox.leavings import descendants
from studies.sandbox.pool import ENVIRONMENT, SERVER
from studies.sandbox.wire import read_reply

WARM, OPEN, FRESH = "warm servers", "warm, unconfined", "fresh process, confined"
WORKERS = 2
ROWS = (PairedRatio(WARM, FRESH), PairedRatio(WARM, OPEN))

GRADE = {
    "code": """
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return [seen[target - x], i]
            seen[x] = i
result = [Solution().twoSum(list(range(n)), 2 * n - 3) for n in (2, 10, 100)]
"""
}
REPLY = [[0, 1], [8, 9], [98, 99]]

PEER = """
import json, os, runpy, sys
os.dup2(2, 3)  # taken: it is the reply's
config, folder = json.loads(sys.argv[1]), sys.argv[2]
server = runpy.run_path(config["server"])
_, execute, private = server["prepare"](config)
child, limits = sys.modules["studies.sandbox.child"], sys.modules["studies.sandbox.limits"]
programs = {True: child.make_program(bytes.fromhex(config["program"]))}
how = child.Confinement(frozenset(limits.KERNEL_PROTECTIONS), programs, config["identity"], True, os.getppid())
payload = memoryview(sys.stdin.buffer.read())
rules = child.make_rules(folder)
task = child.Task(folder, (1, 2, 1), child.make_bounds(how, limits.Limits(), child.address_space()), rules, payload)
child.live(how, task, child.Driver(execute, frozenset(private)))
"""


class FreshProcess:
    """A confined interpreter for every grade. It needs a root of its own for the child: as root, or by a user namespace."""

    def __init__(self) -> None:
        self._identity = 65534 if os.geteuid() == 0 else None
        search = search_paths(["landlockpy"])
        config = {"modules": DEFAULT_MODULES, "driver": str(DRIVER), "search": [], "server_search": search, "server": str(SERVER)}
        config |= {"library": str(SERVER.parent), "program": filters.program(True).hex(), "identity": self._identity}
        self._command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", PEER, json.dumps(config)]

    def run(self, payload: dict[str, str]) -> Any:
        """Return the reply; ``OSError`` if there is none."""
        with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
            if self._identity is not None:
                os.chown(folder, self._identity, self._identity)
            text = json.dumps(payload).encode()
            done = subprocess.run(
                [*self._command, folder], input=text, capture_output=True, env=ENVIRONMENT, timeout=60, check=False
            )
            try:
                return read_reply(done.stdout[1:], Limits().reply)
            except ValueError as error:
                raise OSError(f"a fresh process gave no reply: {done.stdout[:200]!r} {done.stderr[-200:]!r}") from error


@contextmanager
def folders_in_memory() -> Iterator[None]:
    """Context: temporary folders are in /dev/shm, if it exists."""
    before, shared = tempfile.tempdir, "/dev/shm"
    tempfile.tempdir = shared if os.access(shared, os.W_OK) else before
    try:
        yield
    finally:
        tempfile.tempdir = before


def sides(stack: ExitStack) -> dict[str, Callable[[int], list[Any]]]:
    """Return name -> a function that runs a number of grades and returns their replies."""
    warm = stack.enter_context(Jail(DRIVER, workers=WORKERS))
    unconfined = stack.enter_context(Jail(DRIVER, workers=WORKERS, unsafe=True, without=PROTECTIONS))
    threads = stack.enter_context(ThreadPoolExecutor(WORKERS))
    fresh = FreshProcess()
    return {
        WARM: lambda grades: [outcome.reply for outcome in warm.run([GRADE] * grades)],
        OPEN: lambda grades: [outcome.reply for outcome in unconfined.run([GRADE] * grades)],
        FRESH: lambda grades: list(threads.map(fresh.run, [GRADE] * grades)),
    }


def processor_seconds() -> float:
    """Return the processor seconds of this process and all its descendants, by the system's ticks.

    The time of a process that has ended is counted by its parent.
    """
    used = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return used


RATE = "grades/s: "


def measure(grades: dict[str, int], rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Return, of every side and round, the processor seconds of a grade, and under ``RATE`` grades per second on the clock."""
    with folders_in_memory(), ExitStack() as stack:
        run = sides(stack)

        def turn(name: str) -> dict[str, float]:
            count, start, used = grades[name], time.perf_counter(), processor_seconds()
            replies = run[name](count)
            took, used = time.perf_counter() - start, processor_seconds() - used
            assert replies == [REPLY] * count, replies
            return {name: used / count, RATE + name: count / took}

        return take_turns({name: partial(turn, name) for name in grades}, rounds, rng)


def table(results: list[PairedRatioResult], measured: dict[str, list[float]]) -> str:
    """Return a Markdown table: medians of both sides, and the ratio of processor times with its 95% bootstrap interval."""

    def cells(name: str) -> tuple[str, str, str]:
        return name, f"{median(measured[RATE + name]):.0f}", f"{1000 * median(measured[name]):.1f} ms"

    header = ("what", "grades/s", "processor", "against", "grades/s", "processor", "ratio", "95%")
    return markdown_table(header, [(*cells(r.over), *cells(r.under), *r.time.cells()) for r in results])


def run(options: JailOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    grades = {WARM: 10, OPEN: 10, FRESH: 2} if options.quick else {WARM: 200, OPEN: 200, FRESH: 20}
    measured = measure(grades, options.turns, np.random.default_rng(options.seed))
    results = compared(ROWS, measured, np.random.default_rng(options.seed))
    head = f"{options.turns} rounds, {WORKERS} workers, {os.cpu_count()} processors"
    by_side = {name: {"rates": measured[RATE + name], "seconds": measured[name]} for name in grades}
    document = {"machine": machine() | {"processors": os.cpu_count()}, "grades": grades, "rows": results, "sides": by_side}
    report(options, head, table(results, measured), document)
