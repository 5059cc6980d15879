"""The jail: data comes back in order whatever a job does, limits hold, honest programs work, every layer does its part."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.sandbox import DEFAULT_MODULES, PROTECTIONS, Jail, JailLimits, JailOutcome

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
        ("raise SystemExit", "exited", 0, None),
        ("raise SystemExit(3)", "exited", 3, None),
        ("raise SystemExit('no')", "exited", 1, None),
        ("raise ValueError", "exited", 1, None),
        ("raise KeyboardInterrupt", "exited", 1, None),
        ("result = object()", "exited", 1, None),
        ("result = float('nan')", "exited", 1, None),
        ("import os\nos._exit(0)", "exited", 0, None),
        ("import os\nos._exit(77)", "exited", 77, None),
        ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(1)", "signalled", None, 14),
        ("while True: pass", "cpu", None, None),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "cpu", None, None),
        ("import time\ntime.sleep(60)", "timeout", None, None),
        ("while True: print('x' * 100)", "output", None, None),
        ("import os\nwhile True: os.write(2, b'x' * 100)", "output", None, None),
        ("import os\nwhile True: os.write(3, b'x' * 100)", "output", None, None),
        ("result = 'x' * 2_000_000", "output", None, None),
        ("for i in range(65): open(str(i), 'w').close()", "disk", None, None),
        ("for i in range(5): open(str(i), 'wb').write(bytes(1_000_000))", "disk", None, None),
        ("import time\nfor i in range(65): open(str(i), 'w').close()\ntime.sleep(60)", "disk", None, None),
    ],
)
def test_statuses(jail: Jail, code: str, status: str, exit_code: int | None, signal: int | None) -> None:
    outcome = run(jail, code, cpu_seconds=0.3, seconds=5.0 if status == "cpu" else 1.5)
    assert (outcome.status, outcome.exit_code, outcome.signal) == (status, exit_code, signal)
    assert outcome.reply is None


def test_what_is_raised_is_told_on_stderr(jail: Jail) -> None:
    assert run(jail, "def f(): raise ValueError('why')\nf()").stderr.endswith(b"line 1, in f\nValueError: why\n")
    assert run(jail, "raise SystemExit('no \\ud800')").stderr == b"no \\ud800\n"
    hostile = "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E"
    assert run(jail, hostile).status == "exited"


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


@pytest.mark.parametrize("disk", [disk for disk in ("/tmp", "/dev/shm") if os.access(disk, os.W_OK)])
def test_a_folder_does_not_tell_how_much_was_in_it_before(driver: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ext4 an emptied folder is as large as before, and tmpfs numbers the entries of a folder: one job's word to the next."""
    ask = """
import os
folder = os.open(".", os.O_RDONLY)
result = [os.fstat(folder).st_size]
for i in range(200): open(str(i).zfill(200), "w").close()
with os.scandir(folder) as entries:
    next(entries)  # reads as many entries as fit a buffer
    result.append(os.lseek(folder, 0, os.SEEK_CUR))
for i in range(200): os.unlink(str(i).zfill(200))
"""
    monkeypatch.setattr(tempfile, "tempdir", disk)
    with Jail(driver, workers=1, limits=JailLimits(files=300)) as own:
        before, after = own.run([{"code": ask}] * 2)
        assert len(before.reply) == 2
        assert after.reply == before.reply


PLACE_IN_LINE = """
import os, resource, sys, threading
here = os.fstat(os.open(".", os.O_RDONLY))
result = [
    [getattr(here, name) for name in sorted(dir(here)) if name.startswith("st_") and name[3:8] not in ("ctime", "atime", "ino")],
    [os.getpid(), os.getppid(), os.getpgrp(), os.getuid(), os.getgid(), os.umask(0), os.getcwd(), os.listdir()],
    [threading.get_native_id(), threading.main_thread().native_id, threading.get_ident()],
    [sys.argv, sys.orig_argv, dict(os.environ), sorted(sys.modules)],
    [resource.getrlimit(number) for number in range(resource.RLIM_NLIMITS if hasattr(resource, "RLIM_NLIMITS") else 16)],
    [sys.getrecursionlimit(), sys.getswitchinterval()],
    [os.dup(0), os.lseek(0, 0, os.SEEK_CUR)],
]
"""
NOISE = """
import os, sys, time
sys.stdout.write("x" * 60_000)
for i in range(30): open(str(i), "w").write("y" * 20_000)
for i in range(30): os.unlink(str(i))
result = "z" * 900_000 + {pad!r}
"""


def test_a_job_cannot_tell_its_place_in_line(driver: Path) -> None:
    """Nor what others before it did: what it can ask about its process, folder and limits is the same for all of a server."""
    ask, noise = {"code": PLACE_IN_LINE}, {"code": NOISE.format(pad="p" * 300_000)}
    with Jail(driver, workers=1, modules=(*DEFAULT_MODULES, "resource"), limits=JailLimits(reply=2 * MIB)) as own:
        outcomes = own.run([ask, ask, noise, noise, ask, noise, ask])
    replies = [outcomes[i].reply for i in (0, 1, 4, 6)]
    assert replies[0] is not None, outcomes[0].stderr
    assert [len(outcomes[i].reply) for i in (2, 3, 5)] == [1_200_000] * 3
    assert replies[1:] == replies[:1] * 3


COUNTS = """
import builtins, gc, sys
things = [*range(-5, 257), *vars(builtins).values(), *sys.modules.values()]
result = [sys.getallocatedblocks(), len(gc.get_objects()), gc.get_count(), gc.get_stats(), gc.get_freeze_count(), gc.isenabled()]
result += [sys.getrefcount(thing) for thing in things if thing is not None]
"""


def test_a_job_cannot_count_those_before_it(driver: Path) -> None:
    """By what Python keeps count of. A block of memory more or less is chance, and None is held by whatever is about."""
    others = ["result = 1"] * 20 + [NOISE.format(pad="p"), "raise ValueError", "import os\nos.write(1, b'x' * 5_000_000)"]
    codes = [COUNTS, COUNTS, *others, COUNTS, *others, COUNTS]
    with Jail(driver, workers=1) as own:
        replies = [outcome.reply for outcome, code in zip(own.run([{"code": c} for c in codes]), codes) if code == COUNTS]
    blocks = [reply.pop(0) for reply in replies]
    assert max(blocks) - min(blocks) <= 4  # it was three to seven a job
    assert replies == replies[:1] * 4


def test_a_folder_s_last_change_is_the_job_s_own_beginning(driver: Path) -> None:
    """Nobody can set it, but it tells no more than the clock if it is later than everything that an earlier job did. The time of
    its birth, which is before that, cannot be had."""
    look = {
        "code": """
import ctypes, os, sys, time
s, x = os.fstat(os.open(".", os.O_RDONLY)), ctypes.create_string_buffer(256)
ctypes.CDLL(None).statx(-100, b".", 0, 0x800, x)
result = [s.st_ctime, s.st_atime, time.time(), int.from_bytes(x.raw[:4], sys.byteorder) & 0x800]
"""
    }
    wait = {"code": "import os, time\nopen('f', 'w').close()\nos.unlink('f')\ntime.sleep(0.3)\nresult = time.time()"}
    with Jail(driver, workers=1, modules=(*DEFAULT_MODULES, "ctypes")) as own:
        before, after = (outcome.reply for outcome in own.run([wait, look]))
    changed, read, now, born = after
    assert not born
    assert before - 0.02 <= changed <= now  # file systems may use a coarse clock
    assert read == 0 or changed <= read <= now  # the watchdog looks into it


@pytest.mark.parametrize("flag", ["O_SYNC", "O_DSYNC", "O_RSYNC", "O_DIRECT"])
def test_no_write_waits_for_the_disk(jail: Jail, flag: str) -> None:
    """The disk is everyone's."""
    code = f"import os\ntry:\n    os.open('f', os.O_CREAT | os.O_WRONLY | os.{flag})\nexcept OSError as e:\n    result = e.errno"
    assert run(jail, code).reply == errno.EPERM


def test_the_machine_has_no_name(jail: Jail) -> None:
    assert run(jail, "import os\nresult = list(os.uname())").reply == ["Linux", "jail", "", "", os.uname().machine]


SEARCH = """
import gc, sys, types
def reachable():
    todo = [sys, dict(sys.modules), gc.get_objects()]
    frame = sys._getframe()
    while frame is not None:
        todo += [frame, dict(frame.f_locals), frame.f_globals, frame.f_code]
        frame = frame.f_back
    seen = {}
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        todo += gc.get_referents(thing)
        if isinstance(thing, types.CodeType):
            todo += [thing.co_filename, thing.co_consts, thing.co_names]
        if isinstance(thing, memoryview):
            todo.append(thing.obj)
    return seen.values()
table = bytes(byte ^ 0x5A for byte in range(256))
found = {}
for thing in list(reachable()):
    if isinstance(thing, int) and type(thing) is not bool and abs(thing) < 1 << 64:
        thing = str(thing)
    elif isinstance(thing, (str, bytes, bytearray)) and len(thing) < 100_000:
        thing = thing if isinstance(thing, str) else bytes(thing).decode("latin-1")
    else:
        continue
    disguised = thing.encode("utf-8", "replace").translate(table)
    for name, (whole, masked) in MASKED.items():
        if disguised == masked if whole else masked in disguised:
            found.setdefault(name, thing[:200])
result = found
"""


def test_nothing_that_a_program_can_reach_tells_of_its_server(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every string and number within reach of the frames above it, the modules and the collector. What is looked for is disguised,
    so that it is not found in the program itself; that the program's own name is found shows that the search can find."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Jail(driver, workers=1) as own:
        secrets = {
            "the project": (False, str(Path(__file__).parents[3])),
            "the driver": (False, str(driver.parent)),
            "the scratch folder": (False, str(tmp_path)),
            "the interpreter": (True, sys.executable),
            "the host": (True, os.uname().nodename),
            "the kernel": (True, os.uname().release),
            "the parent": (True, str(os.getpid())),
            "the server": (True, str(own._pool.workers[0].pid)),
            "the program": (True, "<candidate>"),
        }
        masked = {name: (whole, bytes(byte ^ 0x5A for byte in text.encode())) for name, (whole, text) in secrets.items()}
        outcome = run(own, f"MASKED = {masked!r}\n{SEARCH}")
        # A process id may be the number of a character in somebody's table too: then a program that no jail started has it as well.
        chance = f"import stringprep, {', '.join(DEFAULT_MODULES)}\nMASKED = {masked!r}\n{SEARCH}\nprint(*found, sep=chr(10))"
        done = subprocess.run([sys.executable, "-I", "-c", chance], capture_output=True, text=True, check=True)
    common = {"the parent", "the server"} & set(done.stdout.splitlines())
    reply = {name: told for name, told in outcome.reply.items() if name not in common}
    assert reply == {"the program": "<candidate>"}, outcome.stderr


def test_a_program_does_the_same_on_every_server(jail: Jail) -> None:
    outcomes = jail.run([{"code": "result = [hash('a'), list({str(i) for i in range(50)})]"}] * 20)
    assert len({json.dumps(outcome.reply) for outcome in outcomes}) == 1


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


def test_a_forged_reply_spoils_the_driver_s_own(jail: Jail) -> None:
    assert run(jail, "import os\nos.write(3, b'true\\n')\nresult = 1").reply is None
    assert run(jail, "import os\nos.write(3, b'true\\n')\nos._exit(1)").reply is None
    assert run(jail, "import os\nos.close(3)\nresult = 1").status == "exited"


def test_a_job_cannot_write_the_next_one_s_reply(driver: Path) -> None:
    """One server, so that the jobs follow each other; whatever is left in a pipe goes with its job."""
    with Jail(driver, workers=1) as jail:
        forged = b'{"serial": 1, "status": "replied"}\n' * 3 + b"x" * 1000
        outcomes = jail.run(
            [{"code": f"import os\nfor fd in range(64):\n try: os.write(fd, {forged!r})\n except OSError: 0"}, {"echo": 5}] * 3
        )
    assert [outcome.reply for outcome in outcomes] == [None, 5] * 3


def test_no_job_waits_for_the_reply_of_another_to_be_read(jail: Jail) -> None:
    """Four jobs of two servers run before the first reply is read, and then no more; replies are read one at a time, in order."""
    ticks: list[None] = []
    reading, most, read_before, unread = [0], [0], [], []

    def read(payload: Any, outcome: JailOutcome) -> Any:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        if payload["echo"] == 0:  # any of the others may have ended, and been read, before it
            start, wanted = time.monotonic(), min(4, 8 - len(read_before))
            while len(ticks) - len(read_before) < wanted:
                assert time.monotonic() - start < 60, "the other jobs waited"
                time.sleep(0.01)
            time.sleep(0.1)
            unread.append(len(ticks) - len(read_before) - wanted)
        read_before.append(payload)
        reading[0] -= 1
        return payload["echo"], outcome.reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("studies.sandbox.jail.progress_bar", lambda label, total: contextlib.nullcontext(lambda: ticks.append(None)))
        assert jail.run([{"echo": i} for i in range(8)], read=read) == [(i, i) for i in range(8)]
    assert most == [1]
    assert unread == [0], "fewer ran, or more, than four of those that were left"


def test_what_a_reader_raises_is_raised(jail: Jail) -> None:
    def read(payload: Any, outcome: JailOutcome) -> Any:
        raise LookupError(payload["echo"])

    with pytest.raises(LookupError, match="7"):
        jail.run([{"echo": 7}, {"echo": 8}], read=read)
    assert jail.run([{"echo": 9}])[0].reply == 9


# limits -------------------------------------------------------------------------------------------------------------------------


def test_wall_clock_ends_a_sleeping_job(jail: Jail) -> None:
    outcome = run(jail, "import time\nprint('began', flush=True)\ntime.sleep(60)", seconds=1.0)
    assert (outcome.status, outcome.stdout) == ("timeout", b"began\n")
    assert 1.0 <= outcome.seconds < 3.0


def test_processor_time_ends_a_busy_job(jail: Jail) -> None:
    outcome = run(jail, "while True: pass", cpu_seconds=0.2, seconds=20.0)
    assert outcome.status == "cpu"
    assert 0.2 <= outcome.cpu_seconds < 0.7


def test_a_job_is_charged_what_it_used_and_not_whole_ticks(jail: Jail) -> None:
    """The kernel charges a whole tick to the process it meets: beside ones that sleep and wake, .5 s of use can be 1 s of ticks."""
    neighbour = """
import time
while True:
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end: pass
    time.sleep(0.001)
"""
    code = "import time\nwhile time.process_time() < .95: pass\nresult = 1"
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", neighbour]))
            stack.callback(process.kill)
        outcome = run(jail, code, cpu_seconds=1.0, seconds=60.0)
    assert (outcome.status, outcome.reply) == ("replied", 1), outcome


def test_memory_above_the_idle_child_s_is_what_a_job_gets(jail: Jail) -> None:
    code = "try:\n    result = len(b'x' * {})\nexcept MemoryError:\n    result = 'MemoryError'"
    assert run(jail, code.format(200 * MIB)).reply == 200 * MIB
    assert run(jail, code.format(520 * MIB)).reply == "MemoryError"
    assert run(jail, code.format(60 * MIB), memory=64 * MIB).reply == 60 * MIB
    assert run(jail, code.format(68 * MIB), memory=64 * MIB).reply == "MemoryError"
    assert run(jail, "x = b'x' * (200 << 20)").peak_memory > 200 * MIB


def test_a_file_has_a_largest_size(jail: Jail) -> None:
    code = """
open("f", "wb", buffering=0).write(bytes(1001))
try: open("f", "ab", buffering=0).write(b"x")
except OSError as error: result = error.errno
"""
    outcome = run(jail, code, file_size=1000)
    assert outcome.reply == errno.EFBIG
    assert len(outcome.files["f"]) == 1000


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


def test_descriptors_are_few(jail: Jail) -> None:
    assert run(jail, "import os\ntry:\n    while True: n = os.dup(0)\nexcept OSError: result = n").reply == 63


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
# codecs
names = "ascii latin-1 utf-16 utf-32 cp1252 utf-8-sig idna punycode".split()
result = all("a".encode(name).decode(name) == "a" for name in names)
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
with open("a", "w") as f: f.write("x"); f.flush(); os.fsync(f.fileno())
os.rename("a", "b")
result = pathlib.Path("b").read_text() == "x" and os.listdir() == ["b"] and not os.remove("b")
# temporary files
import tempfile
with tempfile.NamedTemporaryFile("w+") as f, tempfile.TemporaryFile() as g:
    f.write("x"); f.seek(0); g.write(b"y")
    result = f.read() == "x"
# clocks
import time, timeit
time.sleep(0.001)
result = timeit.timeit("1", number=10) >= 0 and time.perf_counter() > 0
# chance
import random, secrets
result = random.Random(1).random() == 0.13436424411240122 and len(secrets.token_hex()) == 64
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
# a tree of nodes
import collections, heapq, bisect, itertools, functools, operator, string, re, copy, json, decimal, fractions, statistics
class Node:
    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right
def total(node): return node.value + total(node.left) + total(node.right) if node else 0
result = total(copy.deepcopy(Node(1, Node(2), Node(3)))) == 6
"""


def read_programs(text: str) -> dict[str, str]:
    """Name -> program, of a text in which a program begins with its name."""
    parts = text.lstrip("\n").removeprefix("# ").split("\n# ")
    return {name: code for name, _, code in (part.partition("\n") for part in parts)}


def test_honest_programs_work(jail: Jail) -> None:
    programs = read_programs(HONEST)
    assert len(programs) == 19
    programs["modules"] = f"import importlib\nfor name in {DEFAULT_MODULES!r}: importlib.import_module(name)\nresult = True"
    outcomes = dict(zip(programs, jail.run([{"code": code} for code in programs.values()]), strict=True))
    assert {name: o.stderr.decode() or o.status for name, o in outcomes.items() if o.reply is not True} == {}


REFUSED = {
    "thread": ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
    "fork": ("import os\nos.fork()", "PermissionError"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "OSError"),
    "kill": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "own group": ("import os\nos.killpg(0, 9)", "PermissionError"),
    "folder": ("import os\nos.mkdir('d')", "PermissionError"),
    "link": ("import os\nos.symlink('/', 'l')", "PermissionError"),
    "permissions": ("import os\nos.chmod('.', 0)", "PermissionError"),
    "outside": ("open('/etc/passwd')", "OSError"),
    "above": (
        "open('../x', 'w').close()\nopen('/x')\nresult = 1\nimport os\nassert os.listdir('..') == ['x'], 1\nraise OSError",
        "OSError",
    ),
    "proc": ("open('/proc/self/mem')", "OSError"),
    "other modules": ("import subprocess", "ModuleNotFoundError"),
    "sockets": ("import socket", "ModuleNotFoundError"),
    "foreign functions": ("import ctypes", "ModuleNotFoundError"),
    "the server's modules": ("import landlockpy", "ModuleNotFoundError"),
    "the jail": ("import studies.sandbox.child", "ModuleNotFoundError"),
    "files by path": ("import sys, os\nsys.path.append(os.path.dirname(os.__file__))\nimport subprocess", "ModuleNotFoundError"),
    "stdin": ("import sys\nraise EOFError(sys.stdin.read())", "EOFError"),
}


def test_what_is_refused(jail: Jail) -> None:
    template = "try:\n    {}\nexcept Exception as e:\n    result = [c.__name__ for c in type(e).__mro__]"
    payloads = [{"code": template.format(code.replace("\n", "\n    "))} for code, _ in REFUSED.values()]
    outcomes = jail.run(payloads)
    assert [
        name for name, (_, error), outcome in zip(REFUSED, REFUSED.values(), outcomes) if error not in (outcome.reply or [])
    ] == []


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
    status = "result = {l.split(':')[0]: l.split()[1] for l in open('/proc/self/status') if l[:3] in ('Cap', 'NoN', 'Sec')}"
    with Jail(driver, workers=1, unsafe=True, without=set(PROTECTIONS) - {"privileges"}) as jail:
        assert run(jail, "import os\nresult = os.listdir('/')").reply == []
    with Jail(driver, workers=1, unsafe=True, without={"privileges", "landlock"}) as jail:
        assert int(run(jail, status).reply["CapEff"], 16) > 0
        assert run(jail, "result = int(open('/proc/self/oom_score_adj').read())").reply == 1000  # before its server, and all others


LOOK_INTO_MEMORY = """
table = bytes(byte ^ 0x5A for byte in range(256))
found = [0] * len(MASKED)
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in list(maps):
        span, rights = line.split()[:2]
        if rights.startswith('rw'):
            start, end = (int(number, 16) for number in span.split('-'))
            memory.seek(start)
            try:
                content = memory.read(end - start)
            except OSError:
                continue
            for i, masked in enumerate(MASKED):
                found[i] += content.translate(table).count(masked)
result = found
"""


def test_what_earlier_jobs_wrote_is_not_in_the_memory_that_a_job_inherits(driver: Path) -> None:
    """With all off that keeps a child from reading its memory. What is looked for is disguised, so that no copy of it is found; a
    mark that the job itself was sent shows that the search finds what is there."""
    marks = [os.urandom(12).hex().encode() for _ in range(2)]
    masked = [bytes(byte ^ 0x5A for byte in mark) for mark in marks]
    leave = f"""
import os
mark = "{marks[0].decode()}" * 6_000  # more than is kept of the output, and than the first buffer of a reply holds
for descriptor in (1, 2): os.write(descriptor, mark.encode())
for name in "fgh": open(name, "w").write(mark[:24_000])
result = mark
"""
    look = f"MASKED = {masked!r}\n{LOOK_INTO_MEMORY}# {marks[1].decode()}"
    with Jail(driver, workers=1, unsafe=True, without={"landlock", "privileges", "seccomp", "rlimits"}) as jail:
        left = jail.run([{"code": leave}] * 3)
        mark = marks[0] * 6_000
        assert [(o.stdout, o.stderr, o.files["f"], o.reply) for o in left] == [
            (mark[: 64 << 10], mark[: 64 << 10], mark[:24_000], mark.decode())
        ] * 3
        earlier, own = run(jail, look).reply
    assert own > 0
    assert earlier == 0
