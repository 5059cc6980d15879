"""Whatever stops a command or a worker (Ctrl-C, kill -9), it says so in a sentence, and going on ends with the bytes of a run that
nothing stopped."""

import errno
import fcntl
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from timing import wait_until
from tiny_study import FEW, overrides, sleep, tell, tiny_job

import studies.training.progress as live
import studies.training.run as run_module
import studies.training.schedule as schedule
from studies.common.processes import exclusive, job_lock, start
from studies.training.checkpoint import CHECKPOINT, PREVIOUS
from studies.training.job import Job
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, TIMINGS
from studies.training.run import run_job
from studies.training.schedule import run_jobs

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
ARMS = (None, "vanilla", "route2-full")
STEPS = 22  # a checkpoint after 20


def jobs_in(root: Path, cache: Path) -> list[Job]:
    return [tiny_job(root, arm, cache=cache, steps=STEPS, adapt=FEW) for arm in ARMS]


def contents(jobs: list[Job]) -> dict[str, bytes]:
    """Every file of the jobs' folders by name, hidden ones too, but for the timings."""
    return {
        f"{job.name}/{path.name}": path.read_bytes()
        for job in jobs
        for path in sorted(job.folder.iterdir())
        if path.name != TIMINGS
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, bytes]:
    """Return the files of the jobs if nothing stops them, and one worker does them all."""
    jobs = jobs_in(tmp_path_factory.mktemp("whole"), cache)
    assert run_jobs(jobs, 1, quiet=True) == []
    return contents(jobs)


class Bar:
    """Stands in for tqdm: adds up, and calls ``tap`` with what it has."""

    def __init__(self, total: int, initial: int = 0, tap: Callable[[int], None] = lambda n: None):
        self.total, self.n, self._tap = total, initial, tap

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_postfix_str(self, text: str) -> None: ...

    def update(self, n: int) -> None:
        self.n += n
        self._tap(self.n)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The bars that ``run_jobs`` made; put a ``tap`` in to watch the next one."""
    made: dict[str, Any] = {"bars": [], "tap": lambda n: None}

    def make(total: int, initial: int, **_: object) -> Bar:
        made["bars"].append(Bar(total, initial, made["tap"]))
        return made["bars"][-1]

    monkeypatch.setattr(live, "tqdm", make)
    yield made
    assert mp.active_children() == []


# workers


@pytest.fixture
def new_server() -> None:
    """No server is there: the first worker of the test starts one, which later tests go on with."""
    forkserver._forkserver._stop()


@pytest.fixture
def another_server(new_server: None) -> Iterator[None]:
    """The workers of a test are forks of a server of its own, which has the environment of the test and ends with it."""
    yield
    forkserver._forkserver._stop()


def new_worker() -> dict[str, Any]:
    """Return a new worker's report of itself."""
    process, link = start(tell)
    with link:
        said = link.recv()
    process.join()
    assert process.exitcode == 0
    return said


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux alone")


@LINUX
@pytest.mark.usefixtures("new_server")
def test_workers_are_forks_of_one_server_that_has_one_thread_and_have_what_their_parent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changed since the server started; they have imported torch before they begin, and Ctrl-C is the parent's."""
    before = new_worker()
    monkeypatch.setenv("NEW", "of today")
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, tmp_path])  # a Path there names no folder, and is no error
    monkeypatch.chdir(tmp_path)
    after = new_worker()
    assert before["parent"] == after["parent"] != os.getpid()
    assert (after["environment"], after["path"], after["folder"]) == (dict(os.environ), sys.path, str(tmp_path))
    for one in (before, after):
        assert len(list(Path(f"/proc/{one['parent']}/task").iterdir())) == 1
        assert not one["interrupted"]
        assert one["seconds"] < 0.5


def test_two_workers_write_the_same_bytes_as_one_and_finished_jobs_need_none(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], bars: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_in(tmp_path, cache)
    assert run_jobs(jobs, 2) == []
    assert contents(jobs) == whole
    monkeypatch.setattr(schedule, "_hire", None)
    assert run_jobs(jobs, 2) == []
    assert [(bar.n, bar.total) for bar in bars["bars"]] == [(1 + 2 * STEPS, 1 + 2 * STEPS)] * 2


@LINUX
def test_a_killed_server_costs_no_run_and_the_next_start_makes_another(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], bars: dict[str, Any]
) -> None:
    server, killed = new_worker()["parent"], list[int]()
    assert server != os.getpid()

    def kill(n: int) -> None:
        if n >= 10 and not killed:
            killed.append(server)
            os.kill(server, signal.SIGKILL)

    bars["tap"], jobs = kill, jobs_in(tmp_path, cache)
    assert run_jobs(jobs, 2) == []
    assert contents(jobs) == whole
    assert killed
    assert new_worker()["parent"] not in (server, os.getpid())


@LINUX
def test_a_worker_whose_server_was_killed_is_ended() -> None:
    """The server is what tells its client that a fork has ended."""
    process, link = start(sleep)
    with link:
        os.kill(link.recv(), signal.SIGKILL)
        process.join(0.2)
        assert process.is_alive()
        process.kill()
        process.join(5.0)
        assert not process.is_alive()
        with pytest.raises(EOFError):
            link.recv()


TOLD = """
import os
from plain import tell
from studies.common.processes import start
process, link = start(tell)
print(link.recv() == os.getpid())
process.join()
"""


def told_by_a_worker(folder: Path, tell: str, **environment: str) -> bool:
    """Return whether a worker that begins with no import, and runs ``tell``, says the id of the process that started it."""
    (folder / "plain.py").write_text(f"import atexit, os\n\n\ndef tell(link):\n    {tell}\n")
    paths = os.pathsep.join(map(str, (ROOT, folder)))
    command, own = [sys.executable, "-c", TOLD], {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout == "True\n"


@LINUX
def test_where_no_socket_can_be_made_workers_are_processes_of_their_own(tmp_path: Path) -> None:
    """The path of a socket has at most 107 bytes, and its folder is in TMPDIR."""
    (deep := tmp_path / ("long-" * 25)).mkdir()
    assert told_by_a_worker(tmp_path, "link.send(os.getppid())", TMPDIR=str(deep))


@LINUX
def test_a_fork_that_imports_what_the_server_did_not_is_not_taken_for_the_server(tmp_path: Path) -> None:
    """From Python 3.13 on, a fork runs at its end what atexit has."""
    assert not told_by_a_worker(tmp_path, "atexit._run_exitfuncs() or link.send(os.getppid())")


def test_a_killed_worker_costs_its_own_job_alone_and_is_reported_in_a_sentence(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], bars: dict[str, Any]
) -> None:
    """Killed between checkpoints. Beside it: a base job that fails takes the arms that start from it along, and says so."""
    jobs = jobs_in(tmp_path, cache)
    broken = [tiny_job(tmp_path, arm, seed=1, cache=cache, steps=STEPS, adapt=FEW) for arm in (None, "vanilla", "absorb")]
    broken[0].folder.mkdir(parents=True)
    (broken[0].folder / MANIFEST).write_text("{half")
    killed: list[int] = []

    def kill(n: int) -> None:
        # Both workers are at an arm by then, so that whichever dies takes one along.
        if n >= 3 and not killed and all(job.folder.exists() and not job.finished for job in jobs[1:]):
            killed.append(mp.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    bars["tap"] = kill
    failures = run_jobs([*jobs, *broken], 2)
    assert len(killed) == 1
    base, lost = failures
    assert base.startswith("base at seed 1 failed: ")
    assert "is damaged" in base
    assert base.endswith(" (so 2 runs that would start from it cannot be made)")
    assert lost.endswith("failed: its worker process died (killed by SIGKILL, out of memory?); run the same command again to go on")
    finished = [job for job in jobs if job.finished]
    assert len(finished) == 2  # base, and the arm of the other worker
    assert not any((job.folder / MANIFEST).exists() for job in broken[1:])
    again: list[int] = []
    for job in jobs:
        run_job(job, again.append)
    assert sum(again) == 1 + 2 * STEPS
    assert contents(jobs) == whole


class Dead(mp.Process):
    """A process that has been killed."""

    @property
    def exitcode(self) -> int:
        return -signal.SIGTERM

    def join(self, timeout: float | None = None) -> None: ...


def test_with_no_worker_left_the_rest_is_counted(tmp_path: Path, cache: Path) -> None:
    ends = [mp.Pipe() for _ in range(2)]
    crew = [schedule._Worker(Dead(), near) for near, _ in ends]
    for _, far in ends:
        far.close()
    others = [tiny_job(tmp_path, arm, seed=seed, cache=cache) for seed in (1, 2) for arm in (None, "vanilla", "absorb")]
    jobs = [*jobs_in(tmp_path, cache), *others]
    failures = schedule._Dispatch(jobs, crew, live.open_display(jobs, jobs, quiet=True)).run()
    how = "failed: its worker process died (killed by SIGTERM); run the same command again to go on"
    without = " (so 2 runs that would start from it cannot be made)"
    assert failures == [f"base at seed 0 {how}{without}", f"base at seed 1 {how}{without}", "no worker process is left for 3 runs"]
    assert crew == []


# a real command, stopped


def command(out: Path, workers: int, *, steps: int = STEPS, arms: tuple[str | None, ...] = ARMS, report: bool = False) -> list[str]:
    written, names = "--report" if report else "--no-report", [arm for arm in arms if arm is not None]
    options = ["--seeds", "1", "--workers", str(workers), written, "--arms", *names, "--out", str(out)]
    return [sys.executable, "-m", "studies.route2", "run", *options, "--override", *overrides(steps=steps, adapt=FEW)]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files whose path is as short as a user's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9 of the parent"])
def test_a_stopped_command_leaves_no_process_and_goes_on_bit_for_bit(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], how: str, scratch: Path
) -> None:
    shutil.copytree(cache, tmp_path / "warmstarts")
    jobs = jobs_in(tmp_path, tmp_path / "warmstarts")
    run = subprocess.Popen(
        command(tmp_path, 2 if how == "Ctrl-C" else 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        # torch keeps a folder in TMPDIR that is its own, and not a run's to take away
        env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "OMP_NUM_THREADS": "1"},
    )
    try:
        started = [job.folder / METRICS for job in jobs]
        wait_until(lambda: any(path.exists() for path in started) or run.poll() is not None, "no step was logged", 300)
        if how == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to every process
        else:
            run.kill()
        output, errors = run.communicate(timeout=40)
        wait_until(lambda: not alive(run.pid), "a process outlived the run")
    finally:
        if alive(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert not all(job.finished for job in jobs), "stopped too late to test anything"
    if how == "Ctrl-C":
        assert run.returncode == 130, errors
        assert errors.rstrip().endswith("stopped; the same command goes on from the last checkpoints")
        assert not list(tmp_path.glob("**/.*.tmp"))
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in errors + output
    for job in jobs:
        told: list[int] = []
        run_job(job, told.append)
        assert sum(told) == (1 if job.arm is None else STEPS)
    assert contents(jobs) == whole


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see when torch is being imported")
def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    line = command(tmp_path, 1, steps=2, arms=("vanilla",))
    run = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    maps = Path(f"/proc/{run.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text() or run.poll() is not None, "torch never came", 300)
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert (run.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_run_in_a_locale_without_the_signs_of_its_table_ends_well(tmp_path: Path, cache: Path) -> None:
    """Everything is done by then; an error would send a user off to look for what went wrong."""
    for arm in (None, "vanilla"):
        run_job(tiny_job(tmp_path, arm, cache=cache, steps=2, adapt=FEW))
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    line = command(tmp_path, 1, steps=2, arms=("vanilla",), report=True)
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, **ascii_alone}, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    table = next(tmp_path.glob("*/table.md")).read_text(encoding="utf-8")
    assert not table.isascii(), "nothing is tested where no sign is lacking"
    assert table.encode("ascii", "replace") in done.stdout


# one folder, one writer


def test_a_second_process_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"):
        with pytest.raises(ValueError, match=r"^another process is writing to .*; wait for it, or choose another --out$"):
            with exclusive(tmp_path / "run"):
                pass
    with exclusive(tmp_path / "run"):
        pass


def test_a_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^cannot write to .* \(Not a directory\): choose another --out$"):
        with exclusive(tmp_path / "file" / "run"):
            pass


def test_a_worker_that_outlived_its_parent_is_waited_for(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = (
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)\n"
        "open(sys.argv[2], 'w'); time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-S", "-c", script, str(tmp_path / ".arm.lock"), str(ready)])
    try:
        wait_until(ready.exists, "the other process did not start")
        with pytest.raises(ValueError, match="another process is still writing to"), job_lock(tmp_path / "arm", patience=0.1):
            pass
    finally:
        other.kill()
        other.wait()
    with job_lock(tmp_path / "arm", patience=5.0):
        pass


def test_a_filesystem_without_locks_is_said_and_other_trouble_with_a_lock_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answering(number: int) -> Callable[[int, int], None]:
        def flock(_handle: int, _how: int) -> None:
            raise OSError(number, os.strerror(number))

        return flock

    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
        monkeypatch.setattr(fcntl, "flock", answering(number))
        for keep in (exclusive, job_lock):
            with pytest.warns(UserWarning, match=r"has no locks .*: another process could write there"):
                with keep(tmp_path / "run"):
                    pass
    monkeypatch.setattr(fcntl, "flock", answering(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), job_lock(tmp_path / "run"):
        pass


def test_a_worker_s_warning_is_shown_as_a_sentence(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the place in our code and the line there, which tell a user nothing."""
    monkeypatch.setattr(run_module, "CHECKPOINT_EVERY", 2)
    job, told = tiny_job(tmp_path, "absorb", cache=cache, steps=6, adapt=FEW), []
    assert not run_job(job, told.append, lambda: sum(told) >= 5)
    (job.folder / CHECKPOINT).write_bytes(b"")
    said: list[str] = []
    monkeypatch.setattr(live.Bar, "say", lambda _, text: said.append(text))
    assert run_jobs([job], 1, quiet=True) == []
    (warning,) = said
    assert warning.startswith(f"warning: {job.folder / CHECKPOINT} is not a complete safetensors file")
    assert warning.endswith("going on from checkpoint.previous.safetensors, after 2 steps")


def test_a_finished_folder_is_left_as_it_is_but_for_what_a_kill_left(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache, steps=2)
    run_job(job)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.folder.iterdir()}
    for name in (CHECKPOINT, PREVIOUS, ".manifest.json.123.tmp", ".tmpAb3xYz"):  # the last is what safetensors leaves
        (job.folder / name).write_bytes(b"left behind")
    told: list[int] = []
    assert run_job(job, told.append)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.folder.iterdir()} == before
    assert told == [2]


def test_progress_never_passes_its_total(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CHECKPOINT_EVERY", 2)
    job = tiny_job(tmp_path, "absorb", cache=cache, steps=7, adapt=FEW)
    for stop_at in (1, 3, 5, 6, 99, 99):
        told: list[int] = []
        whole = run_job(job, told.append, lambda: sum(told) >= stop_at)  # noqa: B023
        assert sum(told) == (7 if whole else stop_at)
    assert job.finished


@pytest.mark.usefixtures("another_server")
def test_a_worker_is_one_thread_from_its_first_step_and_says_how_far_its_base_model_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start has other bits under other thread counts: a worker's must be those of ``cache``, which one thread made."""
    told: list[int] = []

    class Watched(live.Bar):
        def warmed(self, job: Job, steps: int) -> None:
            told.append(steps)

    monkeypatch.setattr(schedule, "open_display", lambda jobs, todo, **_: Watched(jobs, todo, True))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)  # torch takes the smaller of the two: with 1 here nothing would be tested
    job = tiny_job(tmp_path, "base")
    assert run_jobs([job], 1, quiet=True) == []
    assert told == list(range(10, job.settings.warm.steps + 1, 10))
    (made,) = job.cache.glob("warmstart-*.safetensors")
    assert made.read_bytes() == (cache / made.name).read_bytes()
