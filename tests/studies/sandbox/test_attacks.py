"""Attacks fail in the jail and work without the layer that stops them; the filter refuses every call that it does not list."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyseccomp
import pytest

from studies.sandbox import DEFAULT_MODULES, SCRIPT_DRIVER, Jail, JailLimits, filters

pytestmark = pytest.mark.process

MODULES = (*DEFAULT_MODULES, "ctypes", "socket")
LIMITS = JailLimits(seconds=1.0, memory=256 << 20)
SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return libc.syscall(ctypes.c_long(number), *words), ctypes.get_errno()
"""


@dataclass(frozen=True)
class Attack:
    """Code that sets ``result`` to True if it succeeds, and the protections without which it does."""

    layer: str
    code: str
    without: frozenset[str]


ATTACKS = {
    "read a file": Attack("filesystem", "result = open({secret!r}).read() == 'secret'", frozenset({"landlock", "privileges"})),
    "write a file": Attack(
        "filesystem", "result = open({outside!r} + '/mark', 'w').write('x') == 1", frozenset({"landlock", "privileges"})
    ),
    "leave a folder": Attack("filesystem", "import os\nos.mkdir('d')\nresult = True", frozenset({"landlock", "seccomp"})),
    "fork": Attack("processes", "import os\nif not os.fork(): os._exit(0)\nresult = True", frozenset({"seccomp", "rlimits"})),
    "signal the server": Attack(
        "processes",
        "import os\nos.kill(os.getppid(), 0)\nresult = True",
        frozenset({"seccomp", "landlock", "privileges"}),
    ),
    "connect": Attack(
        "network",
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 0.5).close()\nresult = True",
        frozenset({"seccomp", "landlock"}),
    ),
    "take memory": Attack("resources", "result = len(bytes(400 << 20)) > 0", frozenset({"rlimits"})),
    "write a large file": Attack("resources", "result = open('f', 'wb').write(bytes(2 << 20)) > 0", frozenset({"rlimits"})),
    "sleep": Attack("resources", "import time\ntime.sleep(1.5)\nresult = True", frozenset({"watchdog"})),
    "leave many files": Attack(
        "resources", "for i in range(100): open(str(i), 'w').close()\nresult = True", frozenset({"watchdog"})
    ),
    "make a file without a name": Attack("kernel", SYSCALL + "result = call({memfd}, b'name', 0)[0] >= 0", frozenset({"seccomp"})),
    "keep a way to more privileges": Attack(
        "kernel", "result = 'NoNewPrivs:\\t0' in open('/proc/self/status').read()", frozenset({"privileges", "landlock", "seccomp"})
    ),
}


@pytest.fixture(scope="module")
def jail() -> Iterator[Jail]:
    with Jail(SCRIPT_DRIVER, limits=LIMITS, workers=1, modules=MODULES) as jail:
        yield jail


def succeeds(jail: Jail, code: str) -> bool:
    (outcome,) = jail.run([{"code": code}])
    return outcome.status == "replied" and outcome.reply is True


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_in_the_jail_and_works_without_its_layer(jail: Jail, name: str, tmp_path: Path) -> None:
    attack, secret = ATTACKS[name], tmp_path / "secret"
    secret.write_text("secret")
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        memfd = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "memfd_create")
        code = attack.code
        for key, value in (("secret", repr(str(secret))), ("outside", repr(str(tmp_path))), ("port", listener.getsockname()[1])):
            code = code.replace(f"{{{key}!r}}", str(value)).replace(f"{{{key}}}", str(value))
        code = code.replace("{memfd}", str(memfd))
        assert not succeeds(jail, code)
        with Jail(SCRIPT_DRIVER, limits=LIMITS, workers=1, modules=MODULES, unsafe=True, without=attack.without) as control:
            assert succeeds(control, code)
    assert {each.layer for each in ATTACKS.values()} == {"filesystem", "network", "processes", "resources", "kernel"}


CHEAT = """
class Answer:
    def __eq__(self, other): return True
def solve(x): return Answer()
"""


@pytest.mark.parametrize(
    "cheat", [CHEAT, "import os\ndef solve(x):\n    os.write(3, b'true\\n')\n    os._exit(0)"], ids=["equal", "reply"]
)
def test_a_verdict_is_forged_where_the_candidate_lives_and_not_in_the_parent(jail: Jail, cheat: str) -> None:
    (expected,) = os.urandom(1)
    codes = [f"{cheat}\nresult = solve(3) == {expected}", f"{cheat}\nresult = solve(3)"]
    in_the_child, answer = (outcome.reply for outcome in jail.run([{"code": code} for code in codes]))
    in_the_parent = type(answer) is int and answer == expected
    assert (in_the_child, in_the_parent) == (True, False)


# system calls -------------------------------------------------------------------------------------------------------------------

PLAIN = {name for names in filters.PLAIN.values() for name in names.split()}
FORBIDDEN: dict[str, tuple[Any, ...]] = {
    "mmap": (0, 4096, 4, 0x22, -1, 0),
    "mprotect": (0, 4096, 4),
    "madvise": (0, 4096, 100),
    "futex": (0, 6, 0),
    "openat": (-100, b".", 0x200000),
    "unlinkat": (-100, b"d", 0x200),
    "renameat2": (-100, b"a", -100, b"b", 4),
    "fcntl": (0, 8, 1),
    "ioctl": (0, 0x5401, 0),
    "prlimit64": (1, 0),
    "sched_getaffinity": (1, 8, 0),
    "clock_gettime": (-6, 0),
    "clock_getres": (-6, 0),
    "clock_nanosleep": (-6, 0, 0, 0),
}
"""Conditional calls with arguments that break their condition; ``newfstatat`` is a lookup where children have their own root."""


def number(name: str) -> int:
    return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)


def test_every_system_call_that_is_not_listed_is_refused(jail: Jail) -> None:
    """All numbers up to 600, with zeros for arguments: the filter refuses before the kernel reads them."""
    listed = {number(name) for name in (*PLAIN, *filters.CONDITIONAL, *filters.LOOKUPS)}
    before_the_filter = {335, 336} if os.uname().machine == "x86_64" else set()  # uretprobe and uprobe, which kill their caller
    rest = sorted(set(range(600)) - listed - before_the_filter)
    (outcome,) = jail.run([{"code": f"{SYSCALL}\nresult = [n for n in {rest} if call(n, 0, 0, 0, 0, 0, 0) != (-1, 1)]"}])
    assert (outcome.status, outcome.reply) == ("replied", []), outcome
    never = "fork execve socket kill ptrace mount bpf io_uring_setup fsync statx"
    assert set(map(number, never.split())) <= set(rest)


def test_conditional_calls_are_refused_unless_their_condition_holds(jail: Jail) -> None:
    assert set(FORBIDDEN) == set(filters.CONDITIONAL) - set(filters.LOOKUPS)
    calls = [(number(name), *arguments) for name, arguments in FORBIDDEN.items()]
    (outcome,) = jail.run([{"code": f"{SYSCALL}\nresult = [call(*each)[1] for each in {calls!r}]"}])
    assert outcome.reply == [1] * len(calls), outcome


def test_without_the_filter_the_kernel_answers() -> None:
    harmless = [number(name) for name in ("getpgid", "sysinfo", "getpriority", "sync", "capget")]
    with Jail(SCRIPT_DRIVER, workers=1, modules=MODULES, unsafe=True, without={"seccomp"}) as control:
        (outcome,) = control.run([{"code": f"{SYSCALL}\nresult = [call(n, 0, 0, 0)[1] for n in {harmless}]"}])
    assert 1 not in outcome.reply
