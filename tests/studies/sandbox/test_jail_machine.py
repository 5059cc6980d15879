"""On machines that lack something the jail says so or does what it can; as nobody it holds as it does as root; its tools run."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from studies.sandbox import PROTECTIONS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]

REFUSE = '''
"""A process, and all that it starts, on a kernel that refuses a system call, by a filter of its own."""
import errno, json, runpy, sys
import pyseccomp

def refuse(error, call, *conditions):
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    rules.add_rule(pyseccomp.ERRNO(getattr(errno, error)), call, *(pyseccomp.Arg(*condition) for condition in conditions))
    rules.load()
'''
LACKING = f"""{REFUSE}
from studies.sandbox import SCRIPT_DRIVER as DRIVER, Jail
refuse(*json.loads(sys.argv[1]))
try:
    Jail(DRIVER, workers=1).close()
    print("complete")
except OSError as refusal:
    print(type(refusal).__name__, refusal)
with Jail(DRIVER, workers=1, unsafe=True) as jail:
    print(json.dumps(sorted(jail.protections)))
    print(jail.run([{{"code": "result = open('f', 'w').write('done') == 4"}}])[0].reply)
    look = "import os\\nresult = [os.path.exists(p) for p in ('/', '/etc', '/etc/passwd')]"
    print(json.dumps(jail.run([{{"code": look}}])[0].reply))
"""

EQUAL, NOT_EQUAL = 4, 1
PR_SET_SECCOMP = 22


def run(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False)


def on_a_machine_that_refuses(error: str, call: str, *conditions: tuple[int, int, int], user: str = "me") -> list[str]:
    command = [sys.executable, "-B", "-c", LACKING, json.dumps([error, call, *conditions])]
    done = run(as_nobody(command) if user == "nobody" else command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("refused", "protection"),
    [
        (("ENOSYS", "landlock_create_ruleset"), "landlock"),
        (("EPERM", "landlock_restrict_self"), "landlock"),
        (("EINVAL", "prctl", (0, EQUAL, PR_SET_SECCOMP)), "seccomp"),
        (("EPERM", "capset"), "privileges"),
        (("EPERM", "prlimit64", (2, NOT_EQUAL, 0)), "rlimits"),
    ],
)
def test_a_machine_that_lacks_a_protection_is_told_so(refused: tuple, protection: str) -> None:
    refusal, protections, honest, _ = on_a_machine_that_refuses(*refused)
    assert re.match(rf"JailUnavailableError this machine cannot confine untrusted code \({protection}: ", refusal)
    assert refusal.endswith("unsafe=True runs it anyway")
    assert json.loads(protections) == sorted(set(PROTECTIONS) - {protection})
    assert honest == "True"


NO_PIDFD = f"""{REFUSE}
from studies.sandbox import SCRIPT_DRIVER, Jail
refuse(sys.argv[1], "pidfd_open")
try:
    Jail(SCRIPT_DRIVER, workers=2, unsafe=True)
except OSError as refusal:
    print(refusal)
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_a_machine_without_pidfd_open_is_told_so(error: str) -> None:
    done = run([sys.executable, "-B", "-c", NO_PIDFD, error])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"a server of the jail did not start: this system has no pidfd_open, .*: use Linux 5\.3 or later\n", done.stdout
    )


# as nobody ----------------------------------------------------------------------------------------------------------------------

AS_NOBODY = '''
"""Becomes nobody for good and runs a command. What it needs to read is mounted where folders that are closed to others hide it."""
import ctypes, os, pathlib, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, data):
    if libc.mount(os.fsencode(source), os.fsencode(target), kind, flags, data):
        raise OSError(ctypes.get_errno(), "mount")
NEWNS, BIND, MOVE, PRIVATE = 0x20000, 4096, 8192, 0x44000
needed, command = sys.argv[1].split(":"), sys.argv[2:]
if libc.unshare(NEWNS):
    sys.exit(77)
try:
    mount("none", "/", None, PRIVATE, None)
    hidden = {}
    for path in map(pathlib.Path, dict.fromkeys(needed)):
        closed = [folder for folder in path.parents[::-1] if not folder.stat().st_mode & 1]
        if closed:
            kept = tempfile.mkdtemp()
            mount(path, kept, None, BIND, None)
            hidden[path] = (closed[0], kept)
    for folder in {folder for folder, _ in hidden.values()}:
        mount("tmpfs", folder, b"tmpfs", 0, b"mode=755")
    for path, (_, kept) in hidden.items():
        path.mkdir(parents=True)
        mount(kept, path, None, MOVE, None)
        os.rmdir(kept)
except OSError:
    sys.exit(77)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.execv(command[0], command)
'''


def as_nobody(command: list[str]) -> list[str]:
    needed = {sys.base_prefix, sys.prefix, str(ROOT)}
    return [sys.executable, "-c", AS_NOBODY, ":".join(sorted(needed)), *command]


@pytest.fixture
def _nobody() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody; who is not root runs all of these tests unprivileged anyway")
    done = run(as_nobody([sys.executable, "-c", "import os; print(os.getuid())"]))
    if done.stdout != "65534\n":
        pytest.skip(f"this machine does not let root mount, or nobody read the interpreter: {done.stderr[-200:]}")


PYTEST = f"""{REFUSE}
import pytest
if sys.argv[1] == "no namespaces":
    refuse("EPERM", "unshare")
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.usefixtures("_nobody")
@pytest.mark.parametrize("machine", ["namespaces", "no namespaces"])
def test_everything_holds_for_a_user_without_privileges(machine: str) -> None:
    """The tests of the jail itself, by nobody, with and without a root of its own.

    Left out are those that only take time.
    """
    tests = str(Path(__file__).with_name("test_jail.py"))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        options = f"-q -p no:cacheprovider --noconftest -o addopts=--import-mode=importlib --basetemp {folder}/t".split()
        chosen = ["-k", "not hung and not statuses", tests]
        done = run(as_nobody([sys.executable, "-B", "-c", PYTEST, machine, *options, *chosen]), TMPDIR=folder, HOME=folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert re.search(r"\d\d passed, 1 skipped", done.stdout)
        assert list(Path(folder).glob("studies-jail-*")) == []


@pytest.mark.usefixtures("_nobody")
def test_where_nobody_gets_no_root_of_its_own_paths_cannot_be_asked_about() -> None:
    """As on machines that forbid user namespaces: the filter takes over what the folder for a root would hide."""
    complete, protections, honest, seen = on_a_machine_that_refuses("EPERM", "unshare", user="nobody")
    assert complete == "complete"
    assert json.loads(protections) == sorted(PROTECTIONS)
    assert honest == "True"
    assert json.loads(seen) == [False, False, False]
