"""Nothing is left: no process, no zombie and no folder, whoever is killed, interrupted or forgotten, and no other job suffers."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from processes import alive, eventually

from studies.sandbox import PROTECTIONS, SCRIPT_DRIVER, Jail, JailLimits, JailUnavailableError
from studies.sandbox.leavings import descendants
from studies.sandbox.pool import PREFIX

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
SLEEP = {"code": "import time\nopen('here', 'w').close()\ntime.sleep(60)"}
QUICK = {"code": "result = 1"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for jails' folders that is this test's alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    before = set(children())
    yield
    eventually(lambda: set(children()) <= before)


def children() -> list[int]:
    """Those of this process, ended but not collected ones too."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended since it was listed
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def servers(jail: Jail) -> list[int]:
    return [worker.pid for worker in jail._pool.workers]


def folders(home: Path) -> list[Path]:
    return sorted(home.glob(f"{PREFIX}*"))


def busy(home: Path) -> list[Path]:
    """The folders of servers whose candidate sleeps."""
    return [path.parents[1] for path in home.glob(f"{PREFIX}*/*/job/here")]


def later(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_a_closed_jail_leaves_nothing(home: Path) -> None:
    with Jail(SCRIPT_DRIVER, workers=3) as jail:
        servers = set(children())
        assert len(servers) >= 3
        jail.run([QUICK] * 10)
        assert list(folders(home)[0].glob("*/*")) == []
        assert set(children()) == servers
    assert folders(home) == []
    jail.close()
    with pytest.raises(ValueError, match="this jail is closed: make another one"):
        jail.run([QUICK])


def script(body: str, home: Path) -> "subprocess.Popen[str]":
    """A process of its own that uses a jail."""
    head = "import os, sys, time\nfrom studies.sandbox import SCRIPT_DRIVER, Jail, JailLimits\n"
    tail = f"SLEEP, QUICK = {SLEEP!r}, {QUICK!r}\n"
    environment = os.environ | {"TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", head + tail + body]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def test_a_jail_that_is_never_closed_leaves_nothing_at_exit(home: Path) -> None:
    process = script("jail = Jail(SCRIPT_DRIVER)\nassert jail.run([QUICK])[0].reply == 1", home)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert folders(home) == []


def test_a_killed_parent_leaves_nothing(home: Path) -> None:
    process = script("Jail(SCRIPT_DRIVER, limits=JailLimits(seconds=60.0)).run([SLEEP] * 2)", home)
    eventually(lambda: len(busy(home)) == 2, 60)
    members = descendants(process.pid)
    assert len(members) >= 2 + len(busy(home))
    process.kill()
    process.communicate()
    eventually(lambda: not any(map(alive, members)))
    eventually(lambda: folders(home) == [])


def test_an_interrupted_parent_can_go_on_and_leaves_nothing(home: Path) -> None:
    body = """
with Jail(SCRIPT_DRIVER, limits=JailLimits(seconds=60.0)) as jail:
    try:
        jail.run([SLEEP] * 5)
    except KeyboardInterrupt:
        print("interrupted", jail.run([QUICK] * 5)[4].reply, flush=True)
"""
    process = script(body, home)
    eventually(lambda: len(busy(home)) == 2, 60)
    members = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("interrupted 1\n", "", 0)
    assert not any(map(alive, members))
    assert folders(home) == []


def kill_server_of_sleeper(jail: Jail, home: Path, times: int) -> None:
    for _ in range(times):
        (folder,) = eventually(lambda: busy(home))
        (server,) = [worker.pid for worker in jail._pool.workers if worker._home == folder]
        os.kill(server, signal.SIGKILL)
        eventually(lambda folder=folder: not folder.exists())


def test_a_killed_server_is_replaced_and_its_job_repeated(home: Path) -> None:
    once = {"code": "import time\nopen('here', 'w').close()\ntime.sleep(0.8)\nresult = 'again'"}
    with Jail(SCRIPT_DRIVER) as jail:
        killer = later(lambda: kill_server_of_sleeper(jail, home, 1))
        outcomes = jail.run([QUICK, once, *[QUICK] * 8])
        killer.join()
        assert [outcome.reply for outcome in outcomes] == [1, "again", *[1] * 8]
        assert [outcome.reply for outcome in jail.run([QUICK] * 4)] == [1] * 4
    assert folders(home) == []


def test_a_job_that_costs_two_servers_is_reported_and_no_other_suffers(home: Path) -> None:
    with Jail(SCRIPT_DRIVER, limits=JailLimits(seconds=30.0)) as jail:
        killer = later(lambda: kill_server_of_sleeper(jail, home, 2))
        with pytest.warns(
            RuntimeWarning, match=r"^two servers of the jail ended during one job \(signal 9 ended it\), which counts"
        ):
            outcomes = jail.run([QUICK, SLEEP, *[QUICK] * 8])
        killer.join()
    assert [(outcome.status, outcome.reply) for outcome in outcomes] == [("replied", 1), ("signalled", None), *[("replied", 1)] * 8]
    assert outcomes[1].signal == signal.SIGKILL


def test_a_server_that_is_killed_while_it_starts_is_one_sentence(home: Path) -> None:
    """Nor does the other server complain that nobody listens any more."""
    body = """
from studies.sandbox.pool import JailWorker
greet = JailWorker.greet
def killed(worker):
    worker.kill()
    return greet(worker)
JailWorker.greet = killed
try:
    Jail(SCRIPT_DRIVER, workers=2, unsafe=True)
except OSError as error:
    print(error)
"""
    out, err = script(body, home).communicate(timeout=30)
    assert (out, err) == ("a server of the jail did not start: signal 9 ended it; free memory, or choose fewer workers\n", "")
    assert folders(home) == []


def test_servers_that_died_while_idle_are_replaced(home: Path) -> None:
    with Jail(SCRIPT_DRIVER) as jail:
        for pid in servers(jail):
            os.kill(pid, signal.SIGKILL)
        assert [outcome.reply for outcome in jail.run([QUICK] * 6)] == [1] * 6


def test_a_server_that_does_not_answer_is_taken_for_dead(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.sandbox.jail.PATIENCE", 0.5)
    with Jail(SCRIPT_DRIVER, workers=1, limits=JailLimits(seconds=0.5)) as jail:
        (server,) = servers(jail)
        os.kill(server, signal.SIGSTOP)
        assert jail.run([QUICK])[0].reply == 1
        assert not alive(server)


@pytest.mark.parametrize("without", [{"seccomp", "rlimits"}, {"seccomp", "rlimits", "landlock", "privileges"}])
def test_what_a_control_run_sends_into_the_background_is_ended(home: Path, without: set[str]) -> None:
    """Two forks and a session of its own: nobody's child, but for the server that every orphan below it comes back to."""
    code = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        while True: time.sleep(1)
    os._exit(0)
time.sleep(0.1)
"""
    with Jail(SCRIPT_DRIVER, workers=1, unsafe=True, without=without) as jail:
        (server,) = servers(jail)
        jail.run([{"code": code}])
        assert descendants(server) == set()


def test_two_jails_and_two_threads_do_not_disturb_each_other() -> None:
    """In a process that holds torch and threads, which is never forked itself."""
    replies: dict[str, list[object]] = {}
    stop = threading.Event()
    spinner = later(lambda: [None for _ in iter(stop.is_set, True)] and None)
    try:
        with Jail(SCRIPT_DRIVER, workers=1) as one, Jail(SCRIPT_DRIVER, workers=1) as other:

            def work(name: str, jail: Jail) -> None:
                payloads = [{"code": f"result = '{name}{i}'"} for i in range(15)]
                replies[name] = [outcome.reply for outcome in jail.run(payloads)]

            threads = [threading.Thread(target=work, args=args) for args in (("a", one), ("b", one), ("c", other))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        stop.set()
        spinner.join()
    assert replies == {name: [f"{name}{i}" for i in range(15)] for name in "abc"}


def test_a_child_has_its_own_descriptors_and_no_other() -> None:
    """However many its parent had open."""
    code = """
import os
result = []
for descriptor in range(1000):
    try: os.fstat(descriptor)
    except OSError: continue
    result.append(descriptor)
"""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(400)]
    try:
        for without in ((), PROTECTIONS):
            with Jail(SCRIPT_DRIVER, workers=1, unsafe=True, without=without) as jail:
                assert jail.run([{"code": code}])[0].reply == [0, 1, 2, 3]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_server_that_comes_back_with_fewer_protections_is_not_used(home: Path) -> None:
    """The machine loses Landlock while a jail is in use: from then on its new servers have none."""
    body = """
import errno, pyseccomp
jail = Jail(SCRIPT_DRIVER, workers=1)
assert jail.run([QUICK])[0].reply == 1
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
rules.load()
assert jail.run([QUICK])[0].reply == 1
jail._pool.workers[0].kill()
try:
    jail.run([QUICK])
except OSError as error:
    print(error)
"""
    out, err = script(body, home).communicate(timeout=60)
    assert out.startswith("servers of the jail differ in their protections (landlock): {'landlock': "), out + err
    assert folders(home) == []


def test_a_fork_of_the_parent_neither_uses_nor_ends_the_jail(home: Path) -> None:
    body = """
jail = Jail(SCRIPT_DRIVER)
if not os.fork():
    try:
        jail.run([QUICK])
    except ValueError as error:
        print(error, flush=True)
    sys.exit()
os.wait()
print(jail.run([QUICK])[0].reply)
"""
    out, err = script(body, home).communicate(timeout=60)
    assert (out, err) == ("this jail belongs to the process that this one was forked from: make another one here\n1\n", "")
    assert folders(home) == []


def test_the_machine_s_own_trouble_is_an_os_error(home: Path) -> None:
    with Jail(SCRIPT_DRIVER, workers=1) as jail:
        with pytest.raises(OSError, match=r"the disk has less room than the \d+ bytes that a job may use"):
            jail.run([QUICK], limits=JailLimits(disk=(1 << 48) - 1))
        assert jail.run([QUICK])[0].reply == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", r"a server of the jail did not start: ValueError: the driver .*driver\.py does not define execute\(payload\)"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\ndef execute(p): 0",
            "have started threads",
        ),
    ],
)
def test_a_driver_that_cannot_be_used_is_an_os_error(home: Path, tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "driver.py").write_text(source)
    with pytest.raises(OSError, match=message) as raised:
        Jail(tmp_path / "driver.py", modules=("math",))
    assert not isinstance(raised.value, JailUnavailableError)
    assert folders(home) == []


def test_what_cannot_be_asked_for_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"there is no protection 'magic': choose among rlimits, privileges, landlock"):
        Jail(SCRIPT_DRIVER, unsafe=True, without={"magic"})
    with pytest.raises(ValueError, match="the module no_such_module is not installed: leave it out of modules, or install it"):
        Jail(SCRIPT_DRIVER, modules=("no_such_module.part",))


def test_installed_modules_can_be_asked_for() -> None:
    """numpy comes with torch; its threads would not survive a fork, so that it has none."""
    pytest.importorskip("numpy")
    code = "import numpy\nresult = (numpy.arange(6).reshape(2, 3) @ numpy.ones((3, 2))).tolist()"
    with Jail(SCRIPT_DRIVER, workers=1, modules=("numpy",)) as jail:
        outcome = jail.run([{"code": code}])[0]
        assert outcome.reply == [[3.0, 3.0], [12.0, 12.0]], outcome.stderr
        assert b"ModuleNotFoundError" in jail.run([{"code": "import torch"}])[0].stderr
    with Jail(SCRIPT_DRIVER, workers=1) as jail:
        assert b"ModuleNotFoundError" in jail.run([{"code": "import numpy"}])[0].stderr
