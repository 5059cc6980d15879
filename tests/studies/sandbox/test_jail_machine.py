"""On machines that lack something the jail says so or does what it can; as nobody it holds as it does as root; its tools run."""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from studies.sandbox import PROTECTIONS, Jail, JailUnavailableError, filters
from studies.sandbox.checks import CHECKS, DRIVER

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
from studies.sandbox import Jail
from studies.sandbox.checks import DRIVER, honest_program_works
refuse(*json.loads(sys.argv[1]))
try:
    Jail(DRIVER, workers=1).close()
    print("complete")
except OSError as refusal:
    print(type(refusal).__name__, refusal)
with Jail(DRIVER, workers=1, unsafe=True) as jail:
    print(json.dumps(sorted(jail.protections)))
    print(honest_program_works(jail))
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
    ("refused", "protection", "need"),
    [
        (
            ("ENOSYS", "landlock_create_ruleset"),
            "landlock",
            r"Landlock \(Linux 5\.13 or newer with landlock among its security modules\)",
        ),
        (("EOPNOTSUPP", "landlock_create_ruleset"), "landlock", "Landlock"),
        (("EPERM", "landlock_restrict_self"), "landlock", "Landlock"),
        (("EINVAL", "prctl", (0, EQUAL, PR_SET_SECCOMP)), "seccomp", r"seccomp filters \(libseccomp 2\.5 or newer, and a kernel"),
        (("EPERM", "capset"), "privileges", "the right to give up privileges"),
        (("EPERM", "prlimit64", (2, NOT_EQUAL, 0)), "rlimits", "resource limits that it may lower"),
    ],
)
def test_a_machine_that_lacks_a_protection_is_told_so(refused: tuple, protection: str, need: str) -> None:
    refusal, protections, honest, _ = on_a_machine_that_refuses(*refused)
    assert re.match(f"JailUnavailableError untrusted code cannot be confined on this machine, which lacks {need}", refusal)
    assert refusal.endswith("unsafe=True runs it all the same")
    assert json.loads(protections) == sorted(set(PROTECTIONS) - {protection})
    assert honest == "True"


def test_a_machine_without_pidfds_cannot_run_servers() -> None:
    done = run([sys.executable, "-B", "-c", LACKING, json.dumps(["ENOSYS", "pidfd_open"])])
    assert done.stdout.splitlines()[0].startswith("OSError a server of the jail did not start: ")
    assert "OSError: a server of the jail did not start" in done.stderr


def test_a_machine_without_libseccomp_is_told_so() -> None:
    code = """
import ctypes.util
find = ctypes.util.find_library
ctypes.util.find_library = lambda name: None if name == "seccomp" else find(name)
from studies.sandbox import Jail
from studies.sandbox.checks import DRIVER
try: Jail(DRIVER)
except OSError as error: print(error)
with Jail(DRIVER, unsafe=True) as jail: print("seccomp" in jail.protections)
"""
    refusal, seccomp = run([sys.executable, "-c", code]).stdout.splitlines()
    assert "which lacks seccomp filters" in refusal
    assert "Unable to find libseccomp" in refusal
    assert seccomp == "False"


def test_an_installation_without_landlockpy_is_told_so() -> None:
    """Without installed packages at all."""
    code = "from studies.sandbox import Jail\nfrom studies.sandbox.checks import DRIVER\nJail(DRIVER, unsafe=True)"
    done = run([sys.executable, "-S", "-c", code], PYTHONPATH=str(ROOT))
    assert done.stderr.splitlines()[-1].endswith(
        "JailUnavailableError: the jail needs the package landlockpy, which is not installed"
    )


def test_elsewhere_than_on_linux_there_is_no_jail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(JailUnavailableError, match="the jail needs Linux, and this is plan9"):
        Jail(DRIVER, unsafe=True)


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

    Left out are those that only take time, and one that burns it on how the kernel charges time, which is the same for every user.
    """
    tests = str(Path(__file__).with_name("test_jail.py"))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        options = f"-q -p no:cacheprovider --noconftest -o addopts=--import-mode=importlib --basetemp {folder}/t".split()
        chosen = ["-k", "not hung and not statuses and not whole_ticks", tests]
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


# the filter ---------------------------------------------------------------------------------------------------------------------


def test_what_the_filter_allows_is_a_list_without_doubles() -> None:
    plain = [name for names in filters.PLAIN.values() for name in names.split()]
    named = [*plain, *filters.ANSWERED, *filters.CONDITIONAL]
    assert len(named) == len(set(named))
    assert not set(plain) & set(filters.LOOKUPS)
    never = (
        "clone clone3 fork vfork execve execveat socket socketpair connect kill tkill tgkill ptrace pidfd_open mount unshare bpf "
        "io_uring_setup memfd_create chmod link symlink mkdir prctl"
    )
    assert not {*named, *filters.LOOKUPS} & set(never.split())


def test_programs_are_made_of_whole_instructions_and_differ() -> None:
    with_lookups, without = filters.program(True), filters.program(False)
    assert with_lookups != without
    assert len(with_lookups) % 8 == len(without) % 8 == 0
    assert ctypes.sizeof(ctypes.c_uint64) * 50 < len(without) < 8 * 4096


# tools --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["me", "nobody"])
def test_every_protection_stops_something_by_itself_that_works_without_it(user: str, request: pytest.FixtureRequest) -> None:
    if user == "nobody":
        request.getfixturevalue("_nobody")
    command = [sys.executable, "-B", "-m", "studies.sandbox", "check"]
    done = run(as_nobody(command) if user == "nobody" else command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert lines[1:7] == [[name, "yes"] for name in PROTECTIONS]
    assert lines[9:19] == [[check.protection, check.what, "stopped", "works"] for check in CHECKS]
    assert {check.protection for check in CHECKS} == set(PROTECTIONS)
    assert done.stdout.endswith("untrusted code can be confined here\n")


def test_check_fails_where_a_protection_is_missing() -> None:
    code = 'refuse("ENOSYS", "landlock_create_ruleset")\nrunpy.run_module("studies.sandbox", run_name="__main__")'
    done = run([sys.executable, "-c", f"{REFUSE}\n{code}", "check"])
    assert done.returncode == 1, done.stderr
    assert "landlock    MISSING" in done.stdout
    assert done.stdout.endswith("untrusted code cannot be confined here\n")


def test_a_script_can_be_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"

    def tried(code: str, *options: str, encoding: str = "utf-8") -> "subprocess.CompletedProcess[str]":
        script.write_text(code, encoding=encoding)
        return run([sys.executable, "-m", "studies.sandbox", "run", str(script), *options])

    done = tried("import sys\nprint('out')\nopen('f', 'w').write('xyz')\nresult = [1]\n")
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert re.fullmatch(r"replied after 0\.\d+ s, \d+ MiB\nresult: \[1\]\nfile: f, 3 bytes\n", done.stderr)
    for encoding, first in (("utf-8-sig", ""), ("latin-1", "# coding: latin-1\n")):  # as Python reads it
        assert "result: 1\n" in tried(f"{first}result = len('\u00e9')\n", encoding=encoding).stderr
    unread = tried("x = '\u00e9'\n", encoding="latin-1")
    assert (unread.returncode, "script.py cannot be read" in unread.stderr) == (2, True), unread.stderr
    assert tried("raise SystemExit(7)").returncode == 7
    hung = tried("while True: pass", "--seconds", "0.3")
    assert hung.returncode == 1
    assert hung.stderr.startswith(("timeout after", "cpu after"))
    missing = run([sys.executable, "-m", "studies.sandbox", "run", str(tmp_path / "none.py")])
    assert (missing.returncode, missing.stderr.startswith("error: ")) == (2, True)
