"""The jail: data comes back in order whatever a job does, limits hold, honest programs work, every layer does its part."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.sandbox import DEFAULT_MODULES, Jail, JailLimits, JailOutcome

pytestmark = pytest.mark.process

DRIVER = """
def execute(payload):
    if "echo" in payload:
        return payload["echo"]
    namespace = {"__name__": "candidate"}
    exec(compile(payload["code"], "<candidate>", "exec", dont_inherit=True), namespace)
    return namespace.get("result")
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jail") / "driver.py"
    path.write_text(DRIVER)
    return path


@pytest.fixture(scope="module")
def jail(driver: Path) -> Iterator[Jail]:
    with Jail(driver) as jail:
        yield jail


def run(jail: Jail, code: str, **limits: Any) -> JailOutcome:
    (outcome,) = jail.run([{"code": code}], limits=JailLimits(**limits))
    return outcome


# data ---------------------------------------------------------------------------------------------------------------------------


def test_what_the_driver_returns_comes_back_in_order(jail: Jail) -> None:
    values = [None, True, 0, -7, 2**200, 0.1, 1e308, "", "a\nb\x00\x1f é \U0001f600", [], {}, [1, [2, {"k": None}]], "x" * 100_000]
    outcomes = jail.run([{"echo": value} for value in values * 3])
    assert [outcome.reply for outcome in outcomes] == values * 3
    assert {(o.status, o.exit_code, o.signal, o.stdout, o.stderr, o.truncated) for o in outcomes} == {
        ("replied", 0, None, b"", b"", False)
    }
    assert all(type(a.reply) is type(b) for a, b in zip(outcomes, values * 3, strict=True))
    assert all(outcome.cpu_seconds > 0 and 0 < outcome.seconds < 5 and outcome.peak_memory > MIB for outcome in outcomes)
    assert jail.run([]) == []


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "signal"),
    [
        ("pass", "replied", 0, None),
        ("raise SystemExit(3)", "exited", 3, None),
        ("raise SystemExit('no')", "exited", 1, None),
        ("raise ValueError", "exited", 1, None),
        ("result = object()", "exited", 1, None),
        ("import os\nos._exit(0)", "exited", 0, None),
        ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(1)", "signalled", None, 14),
        ("while True: pass", "cpu", None, None),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "cpu", None, None),
        ("import time\ntime.sleep(60)", "timeout", None, None),
        ("while True: print('x' * 100)", "output", None, None),
        ("import os\nwhile True: os.write(3, b'x' * 100)", "output", None, None),
        ("result = 'x' * 2_000_000", "output", None, None),
        ("for i in range(65): open(str(i), 'w').close()", "disk", None, None),
        ("for i in range(5): open(str(i), 'wb').write(bytes(1_000_000))", "disk", None, None),
    ],
)
def test_statuses(jail: Jail, code: str, status: str, exit_code: int | None, signal: int | None) -> None:
    outcome = run(jail, code, cpu_seconds=0.3, seconds=5.0 if status == "cpu" else 1.5)
    assert (outcome.status, outcome.exit_code, outcome.signal) == (status, exit_code, signal)
    assert outcome.reply is None


def test_output_is_what_reached_the_descriptors(jail: Jail) -> None:
    code = (
        "import os, sys\nprint('a', flush=True)\nos.write(1, b'b\\xff\\n')\nprint('c', file=sys.stderr)\nsys.__stdout__.write('d')"
    )
    outcome = run(jail, code)
    assert (outcome.stdout, outcome.stderr) == (b"a\nb\xff\nd", b"c\n")
    last_words = run(jail, "print('before')\nraise SystemExit(1)")
    assert last_words.stdout == b"before\n"
    unreadable = run(jail, "import sys, os\nsys.stdout = None\nos.write(1, b'still')")
    assert (unreadable.status, unreadable.stdout) == ("replied", b"still")
    nothing = run(jail, "import os\nos.close(1)\nos.close(2)\nresult = 1")
    assert (nothing.status, nothing.reply) == ("replied", 1)


@pytest.mark.parametrize("size", [0, 99, 100, 101, 300_000])
def test_output_is_cut_at_its_limit(jail: Jail, size: int) -> None:
    outcome = run(jail, f"import sys\nsys.stdout.write('x' * {size})\nsys.stderr.write('y' * 100)", output=100)
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("replied", b"x" * min(size, 100), b"y" * 100)
    assert outcome.truncated == (size > 100)


def test_files_come_back_as_far_as_they_are_within_limits(jail: Jail) -> None:
    code = "for n, s in (('b', 3), ('a', 0), ('c\\n', 1), ('é', 5)): open(n, 'wb').write(b'x' * s)\nopen(b'\\xff', 'w').close()"
    outcome = run(jail, code)
    assert list(outcome.files.items()) == [("a", b""), ("b", b"xxx"), ("é", b"xxxxx")]
    fill = "import time\nfor name in 'ab': open(name, 'wb').write(bytes(250))\ntime.sleep(0.06)\nresult = True"
    assert run(jail, fill, files=2, disk=500).status == "replied"  # and the watchdog looked in between
    too_large = run(jail, "open('small', 'w').write('s')\nopen('z', 'wb').write(bytes(1000))", disk=500)
    assert (too_large.status, dict(too_large.files)) == ("disk", {"small": b"s"})
    with pytest.raises(TypeError):
        outcome.files["a"] = b""  # pyright: ignore[reportIndexIssue]


def test_every_job_finds_an_empty_folder_and_no_trace(jail: Jail) -> None:
    leave = """
import sys, builtins, math
open("mark", "w").write("x")
sys.modules["mark"] = builtins.mark = math.mark = 1
"""
    look = """
import os, sys, builtins, math
result = [os.listdir("."), "mark" in sys.modules, hasattr(builtins, "mark"), hasattr(math, "mark")]
"""
    outcomes = jail.run([{"code": leave}] * 4 + [{"code": look}] * 4)
    assert [outcome.reply for outcome in outcomes[4:]] == [[[], False, False, False]] * 4


# forged replies -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "reply"),
    [
        (b'{"passed": true}\n', {"passed": True}),
        (b"NaN\n", None),
        (b"1", None),
        (b"1\n2\n", None),
        (b"1\n\n", None),
        (b"\n", None),
        (b"1\n+1\n", None),
        (b"-it failed\n", None),
        (b'{"serial": 1}\n{"serial": 2}\n', None),
        (b"[" * 100_000 + b"\n", None),
        (b"", None),
    ],
)
def test_a_forged_reply_is_data_or_nothing(jail: Jail, written: bytes, reply: Any) -> None:
    outcome, following = jail.run([{"code": f"import os\nos.write(3, {written!r})\nos._exit(0)"}, {"echo": "next"}])
    assert outcome.status == ("exited" if reply is None else "replied")
    assert (outcome.reply, outcome.exit_code) == (reply, 0)
    assert (following.status, following.reply) == ("replied", "next")


def test_a_job_cannot_write_the_next_one_s_reply(driver: Path) -> None:
    """One server, so that the jobs follow each other; whatever is left in a pipe goes with its job."""
    with Jail(driver, workers=1) as jail:
        forged = b'{"serial": 1, "status": "replied"}\n' * 3 + b"x" * 1000
        outcomes = jail.run(
            [{"code": f"import os\nfor fd in range(64):\n try: os.write(fd, {forged!r})\n except OSError: 0"}, {"echo": 5}] * 3
        )
    assert [outcome.reply for outcome in outcomes] == [None, 5] * 3


# limits -------------------------------------------------------------------------------------------------------------------------


def test_memory_above_the_idle_child_s_is_what_a_job_gets(jail: Jail) -> None:
    code = "try:\n    result = len(b'x' * {})\nexcept MemoryError:\n    result = 'MemoryError'"
    assert run(jail, code.format(200 * MIB)).reply == 200 * MIB
    assert run(jail, code.format(520 * MIB)).reply == "MemoryError"
    assert run(jail, code.format(60 * MIB), memory=64 * MIB).reply == 60 * MIB
    assert run(jail, code.format(68 * MIB), memory=64 * MIB).reply == "MemoryError"
    assert run(jail, "x = b'x' * (200 << 20)").peak_memory > 200 * MIB


def test_files_without_a_name_count(jail: Jail) -> None:
    code = """
import os, time
held = []
for i in range(5):
    held.append(open(str(i), "wb", buffering=0))
    held[-1].write(bytes(1_000_000))
    os.unlink(str(i))
time.sleep(60)
"""
    assert run(jail, code, seconds=3.0).status == "disk"


def test_hung_jobs_delay_the_others_by_no_more_than_their_own_limit(driver: Path) -> None:
    """Three of forty hang on two servers. The quick ones tell when they ran, by the machine's clock."""
    quick, hung = {"code": "import time\nresult = time.monotonic()"}, {"code": "while True: pass"}
    payloads: list[dict[str, str]] = [quick] * 40
    for index in (0, 7, 8):
        payloads[index] = hung
    with Jail(driver, limits=JailLimits(seconds=1.0, cpu_seconds=60.0)) as jail:
        jail.run([quick] * 2)
        start = time.monotonic()
        outcomes = jail.run(payloads)
        took = time.monotonic() - start
    assert [index for index, outcome in enumerate(outcomes) if outcome.status == "timeout"] == [0, 7, 8]
    assert all(outcome.status == "replied" for index, outcome in enumerate(outcomes) if index not in (0, 7, 8))
    times = [outcome.reply - start for outcome in outcomes if outcome.status == "replied"]
    assert max(times[:6]) < 1.0  # while the first one hung, the other server went on
    assert took < 3 * 1.0 + 2.0


# what a candidate can do --------------------------------------------------------------------------------------------------------

HONEST = """
# strptime
import datetime
result = datetime.datetime.strptime("2024-02-29", "%Y-%m-%d").day == 29
# recursion
import sys
sys.setrecursionlimit(10**6)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
result = f(100_000) == 100_000
# recursion through C
import sys, functools
sys.setrecursionlimit(10**6)
@functools.cache
def f(n): return 0 if n == 0 else 1 + f(n - 1)
result = f(20_000) == 20_000
# endless recursion
def f(): f()
try: f()
except RecursionError: result = True
# big numbers
import math
result = math.factorial(5000) % 10 == 0 and 7 ** 100_000 > 0
# threads are there to import
import threading, queue
with threading.Lock(): result = queue.Queue().empty() and not threading.Event().wait(0.01)
# printing
import pprint
pprint.pprint({"a": [1] * 50})
print("é", 1, sep="|", end="!")
result = True
# files
import os, pathlib
with open("a", "w") as f: f.write("x")
os.rename("a", "b")
result = pathlib.Path("b").read_text() == "x" and os.listdir() == ["b"] and not os.remove("b")
# temporary files
import tempfile
with tempfile.NamedTemporaryFile("w+") as f, tempfile.TemporaryFile() as g:
    f.write("x"); f.seek(0); g.write(b"y")
    result = f.read() == "x"
# tests
import unittest
class T(unittest.TestCase):
    def test(self): self.assertTrue(1)
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()
# dataclasses
from dataclasses import dataclass
import typing
@dataclass
class A:
    x: typing.Optional[int] = None
result = A() == A(None)
# garbage
import gc
class A: pass
for _ in range(10_000):
    a = A(); a.a = a
result = gc.collect() >= 0
# no input
try: input()
except EOFError: result = True
# its own alarm
import signal
def h(*_): raise TimeoutError
signal.signal(signal.SIGALRM, h)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True: pass
except TimeoutError: result = True
# processors
import os
result = os.cpu_count() != 0 and len(os.sched_getaffinity(0)) > 0
"""


def read_programs(text: str) -> dict[str, str]:
    """Name -> program, of a text in which a program begins with its name."""
    parts = text.lstrip("\n").removeprefix("# ").split("\n# ")
    return {name: code for name, _, code in (part.partition("\n") for part in parts)}


def test_honest_programs_work(jail: Jail) -> None:
    programs = read_programs(HONEST)
    assert len(programs) == 15
    programs["modules"] = f"import importlib\nfor name in {DEFAULT_MODULES!r}: importlib.import_module(name)\nresult = True"
    outcomes = dict(zip(programs, jail.run([{"code": code} for code in programs.values()]), strict=True))
    assert {name: o.stderr.decode() or o.status for name, o in outcomes.items() if o.reply is not True} == {}


def test_only_modules_on_the_list_can_be_imported(jail: Jail) -> None:
    names = ["subprocess", "socket", "ctypes", "landlockpy", "studies.sandbox.child"]
    path = "import sys, os\nsys.path.append(os.path.dirname(os.__file__))\nimport subprocess"
    outcomes = jail.run([{"code": code} for code in (*(f"import {name}" for name in names), path)])
    assert all(b"ModuleNotFoundError" in outcome.stderr for outcome in outcomes)


def test_jobs_at_once_do_not_see_each_other(jail: Jail) -> None:
    write = "import os, time\nopen('secret', 'w').write('s')\nopen('seen', 'w').write(os.getcwd())\ntime.sleep(0.7)\nresult = True"
    look = """
import os, time
time.sleep(0.3)
found = []
for start in ('.', '..', '../..', '/', '/tmp'):
    for step in ('', '0/job', '1/job', 'job', '../1/job', '../0/job', '../2/job'):
        try:
            found += os.listdir(os.path.join(start, step))
        except OSError:
            pass
result = found"""
    first, second = jail.run([{"code": write}, {"code": look}])
    assert first.reply is True
    assert "secret" not in second.reply


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to drop")
def test_root_becomes_nobody_in_a_root_of_its_own(driver: Path) -> None:
    look = "import os\nresult = [os.getresuid(), os.getresgid(), os.getgroups(), os.getcwd(), os.listdir('/')]"
    with Jail(driver) as jail:
        for outcome in jail.run([{"code": look}] * 4):
            uids, gids, groups, folder, entries = outcome.reply
            assert len({*uids, *gids}) == 1
            assert 0 not in uids
            assert (groups, folder, entries) == ([], "/", [])
        busy = "import os, time\ntime.sleep(0.3)\nresult = os.getuid()"
        assert len({outcome.reply for outcome in jail.run([{"code": busy}] * 2)}) == 2  # strangers to each other
