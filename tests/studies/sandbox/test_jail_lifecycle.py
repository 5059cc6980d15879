"""Nothing is left: no process, no zombie and no folder, whoever is killed, interrupted or forgotten, and no other job suffers."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import alive, eventually

from studies.sandbox import PROTECTIONS, Jail, JailLimits, JailOutcome, JailUnavailableError
from studies.sandbox.checks import DRIVER
from studies.sandbox.leavings import clear, descendants
from studies.sandbox.pool import PREFIX, Worker

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
    with Jail(DRIVER, workers=3) as jail:
        servers = set(children())
        assert len(servers) >= 3
        jail.run([QUICK] * 10)
        places = list(folders(home)[0].glob("*/job"))
        assert len(places) >= 1
        assert not any(list(place.iterdir()) for place in places)
        assert set(children()) == servers
    assert folders(home) == []
    jail.close()
    with pytest.raises(ValueError, match="this jail is closed: make another one"):
        jail.run([QUICK])


def test_a_forgotten_jail_leaves_nothing(home: Path) -> None:
    before = set(children())
    jail = Jail(DRIVER)
    assert len(set(children()) - before) == 2
    del jail
    gc.collect()
    assert set(children()) == before
    assert folders(home) == []


def script(body: str, home: Path) -> "subprocess.Popen[str]":
    """A process of its own that uses a jail."""
    head = "import os, sys, time\nfrom studies.sandbox import Jail, JailLimits\nfrom studies.sandbox.checks import DRIVER\n"
    tail = f"SLEEP, QUICK = {SLEEP!r}, {QUICK!r}\n"
    environment = os.environ | {"TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", head + tail + body]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def test_a_jail_that_is_never_closed_leaves_nothing_at_exit(home: Path) -> None:
    process = script("jail = Jail(DRIVER)\nassert jail.run([QUICK])[0].reply == 1", home)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert folders(home) == []


@pytest.mark.parametrize("jobs", ["[SLEEP] * 2", "[QUICK, SLEEP, QUICK]", "[]"])
def test_a_killed_parent_leaves_nothing(home: Path, jobs: str) -> None:
    process = script(
        f"jail = Jail(DRIVER, limits=JailLimits(seconds=60.0))\nprint('up', flush=True)\njail.run({jobs})\ntime.sleep(60)", home
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    eventually(lambda: len(busy(home)) == jobs.count("SLEEP") * (2 if "2" in jobs else 1))
    members = descendants(process.pid)
    assert len(members) >= 2 + len(busy(home))
    process.kill()
    process.communicate()
    eventually(lambda: not any(map(alive, members)))
    eventually(lambda: folders(home) == [])


def test_an_interrupted_parent_can_go_on_and_leaves_nothing(home: Path) -> None:
    body = """
with Jail(DRIVER, limits=JailLimits(seconds=60.0)) as jail:
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


def test_an_interrupt_of_the_whole_terminal_leaves_nothing(home: Path) -> None:
    """Ctrl-C goes to a process group, in which no server is."""
    process = script("os.setpgid(0, 0)\nJail(DRIVER, limits=JailLimits(seconds=60.0)).run([SLEEP] * 2)", home)
    eventually(lambda: len(busy(home)) == 2, 60)
    members = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert err.endswith("KeyboardInterrupt\n")
    eventually(lambda: not any(map(alive, members)))
    assert folders(home) == []


def kill_server_of_sleeper(jail: Jail, home: Path, times: int) -> None:
    for _ in range(times):
        (folder,) = eventually(lambda: busy(home))
        (server,) = [worker.pid for worker in jail._pool.workers if worker._home == folder]
        os.kill(server, signal.SIGKILL)
        eventually(lambda folder=folder: not folder.exists())


def test_a_killed_server_is_replaced_and_its_job_repeated(home: Path) -> None:
    once = {"code": "import time\nopen('here', 'w').close()\ntime.sleep(0.8)\nresult = 'again'"}
    with Jail(DRIVER) as jail:
        killer = later(lambda: kill_server_of_sleeper(jail, home, 1))
        outcomes = jail.run([QUICK, once, *[QUICK] * 8])
        killer.join()
        assert [outcome.reply for outcome in outcomes] == [1, "again", *[1] * 8]
        assert [outcome.reply for outcome in jail.run([QUICK] * 4)] == [1] * 4
    assert folders(home) == []


def test_a_job_that_costs_two_servers_is_reported_and_no_other_suffers(home: Path) -> None:
    with Jail(DRIVER, limits=JailLimits(seconds=30.0)) as jail:
        killer = later(lambda: kill_server_of_sleeper(jail, home, 2))
        outcomes = jail.run([QUICK, SLEEP, *[QUICK] * 8])
        killer.join()
    assert [(outcome.status, outcome.reply) for outcome in outcomes] == [("replied", 1), ("signalled", None), *[("replied", 1)] * 8]
    assert outcomes[1].signal == signal.SIGKILL


def test_servers_that_died_while_idle_are_replaced(home: Path) -> None:
    with Jail(DRIVER) as jail:
        for pid in servers(jail):
            os.kill(pid, signal.SIGKILL)
        assert [outcome.reply for outcome in jail.run([QUICK] * 6)] == [1] * 6


def test_a_job_that_never_started_is_given_to_another_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers are stopped, so that a job reaches each of them unread, and are killed once it has."""
    send = Worker.send
    with Jail(DRIVER) as jail:
        doomed = servers(jail)
        for pid in doomed:
            os.kill(pid, signal.SIGSTOP)

        def send_and_kill(worker: Worker, *job: Any) -> None:
            send(worker, *job)
            if worker.pid in doomed:
                os.kill(worker.pid, signal.SIGKILL)

        monkeypatch.setattr(Worker, "send", send_and_kill)
        assert [(outcome.status, outcome.reply) for outcome in jail.run([QUICK])] == [("replied", 1)]
        assert not any(map(alive, doomed))


def test_a_job_that_no_server_starts_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server that it is handed to dies before it reads the job: that comes to an end."""
    send = Worker.send

    def stop_send_and_kill(worker: Worker, *job: Any) -> None:
        os.kill(worker.pid, signal.SIGSTOP)
        send(worker, *job)
        os.kill(worker.pid, signal.SIGKILL)

    with Jail(DRIVER, workers=1) as jail:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "send", stop_send_and_kill)
            (outcome,) = jail.run([QUICK])
        assert (outcome.status, outcome.signal) == ("signalled", signal.SIGKILL)
        assert jail.run([QUICK])[0].reply == 1


def test_a_server_that_does_not_answer_is_taken_for_dead(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.sandbox.jail.PATIENCE", 0.5)
    with Jail(DRIVER, workers=1, limits=JailLimits(seconds=0.5)) as jail:
        (server,) = servers(jail)
        os.kill(server, signal.SIGSTOP)
        assert jail.run([QUICK])[0].reply == 1
        assert not alive(server)


def test_the_kernel_ends_a_busy_job_whose_server_is_stopped(home: Path) -> None:
    outcomes: list[JailOutcome] = []
    with Jail(DRIVER, workers=1, limits=JailLimits(seconds=60.0, cpu_seconds=0.5)) as jail:
        (server,) = servers(jail)
        code = "import os, time\nopen('here', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\nwhile True: pass"
        thread = later(lambda: outcomes.extend(jail.run([{"code": code}])))
        eventually(lambda: busy(home))
        os.kill(server, signal.SIGSTOP)
        (busy(home)[0] / "job" / "go").touch()  # so that no watch sees it work
        eventually(lambda: not any(map(alive, descendants(server))), 30.0)
        os.kill(server, signal.SIGCONT)
        thread.join()
    (outcome,) = outcomes
    assert outcome.status == "cpu", outcome
    assert 0.7 < outcome.cpu_seconds < 3.0, "the watch ended it, or nobody did"


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
    with Jail(DRIVER, workers=1, unsafe=True, without=without) as jail:
        (server,) = servers(jail)
        jail.run([{"code": code}])
        assert descendants(server) == set()


def test_a_control_run_without_a_watchdog_ends_what_it_left_when_it_is_closed(home: Path) -> None:
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(60)"
    with Jail(DRIVER, workers=1, unsafe=True, without=PROTECTIONS) as jail:
        (server,) = servers(jail)
        assert jail.run([{"code": code}])[0].status == "replied"
        left = descendants(server)
        assert len(left) == 1
        assert jail.run([QUICK])[0].reply == 1
    assert not any(map(alive, left))


def test_a_fork_bomb_of_a_control_run_is_ended() -> None:
    with Jail(DRIVER, workers=1, unsafe=True, without={"seccomp"}, limits=JailLimits(seconds=0.5)) as jail:
        assert jail.run([{"code": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"}])[0].status == "timeout"
        assert jail.run([QUICK])[0].reply == 1


def test_folders_within_folders_are_removed_however_deep_they_are(tmp_path: Path) -> None:
    """Deeper than a path may be long; permissions and links do not matter."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    os.symlink(outside, folder / "link")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(50):
        os.mkdir("d" * 200, dir_fd=here)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(os.open("f", os.O_CREAT, dir_fd=here))
        os.symlink(outside, "l", dir_fd=here)
        os.close(here)
        here = inner
    os.fchmod(here, 0)
    os.close(here)
    clear(str(folder))
    assert list(folder.iterdir()) == []
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_two_jails_and_two_threads_do_not_disturb_each_other() -> None:
    """In a process that holds torch and threads, which is never forked itself."""
    replies: dict[str, list[object]] = {}
    stop = threading.Event()
    spinner = later(lambda: [None for _ in iter(stop.is_set, True)] and None)
    try:
        with Jail(DRIVER, workers=1) as one, Jail(DRIVER, workers=1) as other:

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
            with Jail(DRIVER, workers=1, unsafe=True, without=without) as jail:
                assert jail.run([{"code": code}])[0].reply == [0, 1, 2, 3]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_closing_waits_for_the_run_of_another_thread(home: Path) -> None:
    replies: list[object] = []
    jail = Jail(DRIVER, workers=1)
    slow = {"code": "import time\nopen('here', 'w').close()\ntime.sleep(0.3)\nresult = 1"}
    thread = later(lambda: replies.extend(outcome.reply for outcome in jail.run([slow] * 2)))
    eventually(lambda: busy(home))
    jail.close()
    thread.join()
    assert replies == [1, 1]
    assert folders(home) == []


def test_a_server_that_comes_back_with_fewer_protections_is_not_used(home: Path) -> None:
    """The machine loses Landlock while a jail is in use: from then on its new servers have none."""
    body = """
import errno, pyseccomp
jail = Jail(DRIVER, workers=1)
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


def test_a_jail_outlives_the_thread_that_made_it() -> None:
    made: list[Jail] = []
    later(lambda: made.append(Jail(DRIVER, workers=1))).join()
    with made[0] as jail:
        assert jail.run([QUICK])[0].reply == 1


def test_a_fork_of_the_parent_neither_uses_nor_ends_the_jail(home: Path) -> None:
    body = """
jail = Jail(DRIVER)
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


def test_folders_of_jails_that_were_killed_altogether_are_swept(home: Path) -> None:
    """Nobody holds them and they are not new; others are left alone."""
    old, new, foreign, odd = (home / name for name in (f"{PREFIX}old", f"{PREFIX}new", "other", f"{PREFIX}odd"))
    for folder in (old, new, foreign):
        (folder / "0" / "job").mkdir(parents=True)
    (odd / "thesis").mkdir(parents=True)
    for folder in (old, foreign, odd):
        os.utime(folder, (0, 0))
    with Jail(DRIVER, workers=1) as jail:
        assert not old.exists()
        assert new.exists()
        assert foreign.exists()
        assert odd.exists()
        (used,) = set(folders(home)) - {new, odd}
        os.utime(used, (0, 0))
        with Jail(DRIVER, workers=1):
            assert used.exists()
        assert jail.run([QUICK])[0].reply == 1


def test_the_machine_s_own_trouble_is_an_os_error(home: Path) -> None:
    with Jail(DRIVER, workers=1) as jail:
        with pytest.raises(OSError, match=r"the disk has less room than the \d+ bytes that a job may use"):
            jail.run([QUICK], limits=JailLimits(disk=(1 << 48) - 1))
        assert jail.run([QUICK])[0].reply == 1


SMALL_DISK = '''
"""Two servers on a scratch disk of 12 MiB and 200 files, which every other job fills between two looks of its watchdog."""
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
folder, fill = sys.argv[1:]
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=12m,nr_inodes=200,mode=777"):
    sys.exit(77)
from studies.sandbox import Jail, JailLimits
from studies.sandbox.checks import DRIVER
with Jail(DRIVER, limits=JailLimits(seconds=10.0)) as jail:
    outcomes = jail.run([{"code": fill}, {"code": "result = 1"}] * 10)
    again = jail.run([{"code": "open('f', 'w').write('x')\\nresult = 1"}] * 4)
    with open(os.path.join(folder, "another's"), "wb") as file:
        file.write(bytes(10 << 20))
    try:
        jail.run([{"code": "result = 1"}] * 2, limits=JailLimits(seconds=0.3))
    except OSError as error:
        trouble = str(error)
    os.unlink(os.path.join(folder, "another's"))
    after = jail.run([{"code": "result = 1"}] * 2)
print(json.dumps([[outcome.status for outcome in outcomes], [outcome.reply for outcome in again + after], trouble]))
'''
FILL = """
import time
try:
    for i in range(10**6):
        open(str(i), "wb", buffering=0).write(bytes({}))
except OSError:
    time.sleep(2)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize("size", [1 << 20, 0], ids=["bytes", "names"])
def test_a_full_scratch_disk_is_the_failure_of_the_job_that_filled_it(home: Path, size: int) -> None:
    environment = os.environ | {"TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SMALL_DISK, str(home), FILL.format(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("this machine does not let root mount")
    assert done.returncode == 0, done.stderr
    statuses, again, trouble = json.loads(done.stdout)
    assert statuses[1::2] == ["replied"] * 10
    assert "disk" in statuses[::2]
    assert again == [1] * 6
    assert "the disk has less room than the 4194304 bytes that a job may use" in trouble


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", r"a server of the jail did not start: ValueError: the driver .*driver\.py does not define execute\(payload\)"),
        ("def execute(:", "a server of the jail did not start: SyntaxError"),
        ("import numpy", "a server of the jail did not start: ModuleNotFoundError: No module named 'numpy'"),
        ("import os; os._exit(3)", "a server of the jail did not start: exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "a server of the jail did not start: signal 9"),
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


def test_what_cannot_be_asked_for_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"there is no protection 'magic': choose among rlimits, privileges, landlock, seccomp, watchdog, reply"
    ):
        Jail(DRIVER, unsafe=True, without={"magic"})
    with pytest.raises(ValueError, match=r"leaving off landlock, seccomp is for control runs: say unsafe=True as well"):
        Jail(DRIVER, without={"seccomp", "landlock"})
    with pytest.raises(ValueError, match="workers = 0 can do no job: choose at least 1"):
        Jail(DRIVER, workers=0)
    with pytest.raises(ValueError, match=r"there is no driver .*none\.py: name a Python file that defines execute"):
        Jail(tmp_path / "none.py")
    with pytest.raises(ValueError, match="the module no_such_module is not installed: leave it out of modules, or install it"):
        Jail(DRIVER, modules=("no_such_module.part",))


def test_payloads_are_json(home: Path) -> None:
    with Jail(DRIVER, workers=1) as jail:
        with pytest.raises(TypeError):
            jail.run([{"code": object()}])
        with pytest.raises(ValueError):
            jail.run([{"code": float("nan")}])


def test_a_named_run_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Jail(DRIVER, workers=1) as jail:
        jail.run([QUICK] * 3, progress="grading")
        assert "grading" in capsys.readouterr().err
        jail.run([QUICK] * 3)
        assert capsys.readouterr().err == ""


def test_installed_modules_can_be_asked_for() -> None:
    """numpy comes with torch; its threads would not survive a fork, so that it has none."""
    pytest.importorskip("numpy")
    code = "import numpy\nresult = (numpy.arange(6).reshape(2, 3) @ numpy.ones((3, 2))).tolist()"
    with Jail(DRIVER, workers=1, modules=("numpy",)) as jail:
        outcome = jail.run([{"code": code}])[0]
        assert outcome.reply == [[3.0, 3.0], [12.0, 12.0]], outcome.stderr
        assert b"ModuleNotFoundError" in jail.run([{"code": "import torch"}])[0].stderr
    with Jail(DRIVER, workers=1) as jail:
        assert b"ModuleNotFoundError" in jail.run([{"code": "import numpy"}])[0].stderr
