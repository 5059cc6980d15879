"""Whatever stops a run (Ctrl-C, kill -9, a full disk, a damaged file), it says so in a sentence, and going on ends with the
bytes of a run that nothing stopped."""

import errno
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import WARM, tiny_job

import studies.route2.job as job_module
import studies.route2.schedule as schedule
from mi_route2.adapters.store import read_tensors, write_tensors
from studies.loopholes.presets import get_world
from studies.loopholes.runner import SubprocessRunner
from studies.loopholes.world import MicroWorld
from studies.route2.checkpoint import load_checkpoint
from studies.route2.job import (
    CHECKPOINT,
    DEPLOYED,
    EVAL,
    FULL,
    MANIFEST,
    Job,
    build_optimiser,
    build_policy,
    build_route,
    held,
    run_job,
)
from studies.route2.recorder import METRICS, ROLLOUTS, TIMINGS, append, write_json
from studies.route2.schedule import exclusive, run_jobs
from studies.route2.soak import Soak, differences

ROOT = Path(__file__).parents[3]
ARMS = (None, "vanilla", "route2-full")
STEPS = 42  # checkpoints after 20 and 40


def jobs_in(root: Path, cache: Path) -> list[Job]:
    return [tiny_job(root, arm, cache=cache, steps=STEPS) for arm in ARMS]


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
    """What the jobs leave when nothing stops them, and one worker does them all."""
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

    monkeypatch.setattr(schedule, "tqdm", make)
    yield made
    assert mp.active_children() == []


# workers


def test_two_workers_write_the_same_bytes_as_one_and_finished_jobs_need_none(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], bars: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_in(tmp_path, cache)
    assert run_jobs(jobs, 2) == []
    assert contents(jobs) == whole
    monkeypatch.setattr(schedule, "_hire", None)
    assert run_jobs(jobs, 2) == []
    assert [(bar.n, bar.total) for bar in bars["bars"]] == [(1 + 2 * STEPS, 1 + 2 * STEPS)] * 2


def test_a_killed_worker_costs_its_own_job_alone_and_is_reported_in_a_sentence(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], bars: dict[str, Any]
) -> None:
    """Killed between checkpoints. Beside it: a base job that fails takes the arms that start from it along, and says so."""
    jobs = jobs_in(tmp_path, cache)
    broken = [tiny_job(tmp_path, arm, seed=1, cache=cache, steps=STEPS) for arm in (None, "vanilla", "absorb")]
    broken[0].folder.mkdir(parents=True)
    (broken[0].folder / MANIFEST).write_text("{half")
    killed: list[int] = []

    def kill(n: int) -> None:
        if n >= 60 and not killed:
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
    failures = schedule._dispatch([*jobs_in(tmp_path, cache), *others], crew, Bar(1))
    how = "failed: its worker process died (killed by SIGTERM); run the same command again to go on"
    without = " (so 2 runs that would start from it cannot be made)"
    assert failures == [
        f"base at seed 0 {how}{without}",
        f"base at seed 1 {how}{without}",
        "no worker process is left for 3 runs",
    ]
    assert crew == []


# a real command, stopped


def command(out: Path, workers: int) -> list[str]:
    changes = {"steps": STEPS, "prompts": 3, "group": 4, "evaluation_prompts": 4, "pairs": 4, "probe_every": 2, "teachers": 4}
    changes |= {"warm.steps": WARM.steps, "warm.batch": WARM.batch}
    overrides = [f"{name}={value}" for name, value in changes.items()]
    arms = [arm for arm in ARMS if arm is not None]
    text = (
        f"-m studies.route2 run --seeds 1 --workers {workers} --no-report --arms {' '.join(arms)} --override {' '.join(overrides)}"
    )
    return [sys.executable, *text.split(), "--out", str(out)]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9 of the parent"])
def test_a_stopped_command_leaves_no_process_and_goes_on_bit_for_bit(
    tmp_path: Path, cache: Path, whole: dict[str, bytes], how: str
) -> None:
    shutil.copytree(cache, tmp_path / "warmstarts")
    jobs, scratch = jobs_in(tmp_path, tmp_path / "warmstarts"), tmp_path / "scratch"
    scratch.mkdir()
    run = subprocess.Popen(
        command(tmp_path, 2 if how == "Ctrl-C" else 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: any((job.folder / METRICS).exists() for job in jobs) or run.poll() is not None, 60, "no step was logged")
        if how == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to every process
        else:
            run.kill()
        output, errors = run.communicate(timeout=40)
        wait_until(lambda: not alive(run.pid), 20, "a process outlived the run")
    finally:
        if alive(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert not all(job.finished for job in jobs), "stopped too late to test anything"
    if how == "Ctrl-C":
        assert run.returncode == 130, errors
        assert errors.rstrip().endswith("stopped; the same command goes on from the last checkpoints")
        assert list(scratch.iterdir()) == []
        assert not list(tmp_path.glob("**/.*.tmp"))
    assert "Traceback" not in errors + output
    for job in jobs:
        told: list[int] = []
        run_job(job, told.append)
        assert sum(told) == (1 if job.arm is None else STEPS)
    assert contents(jobs) == whole


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see when torch is being imported")
def test_ctrl_c_while_torch_is_imported_leaves_no_traceback() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "studies.route2", "arms"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    wait_until(lambda: "libtorch" in Path(f"/proc/{run.pid}/maps").read_text() or run.poll() is not None, 60, "torch never came")
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert (run.returncode, output, errors) == (130, "", "")


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
    (tmp_path / "arm").mkdir()
    script = (
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "open(sys.argv[2], 'w'); time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-S", "-c", script, str(tmp_path / "arm"), str(ready)])
    try:
        wait_until(ready.exists, 30, "the other process did not start")
        with pytest.raises(ValueError, match="another process is still writing to"), held(tmp_path / "arm", patience=0.1):
            pass
    finally:
        other.kill()
        other.wait()
    with held(tmp_path / "arm", patience=5.0):
        pass


def test_a_finished_folder_is_left_as_it_is_but_for_what_a_kill_left(tmp_path: Path, cache: Path) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache, steps=2)
    run_job(job)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.folder.iterdir()}
    for name in (CHECKPOINT, ".manifest.json.123.tmp"):
        (job.folder / name).write_bytes(b"left behind")
    told: list[int] = []
    assert run_job(job, told.append)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in job.folder.iterdir()} == before
    assert told == [2]


def test_progress_never_passes_its_total(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "CHECKPOINT_EVERY", 2)
    job = tiny_job(tmp_path, "absorb", cache=cache, steps=7)
    for stop_at in (1, 3, 5, 6, 99, 99):
        told: list[int] = []
        whole = run_job(job, told.append, lambda: sum(told) >= stop_at)  # noqa: B023
        assert sum(told) == (7 if whole else stop_at)
    assert job.finished


# a full disk


def fill_up(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Every write of a file called (or to be called) ``victim`` fails when it is to reach the disk."""
    true_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if victim in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A short run, with checkpoints after 2 and 4, on a disk with room."""
    job = tiny_job(tmp_path_factory.mktemp("intact"), "route2-full", cache=cache, steps=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job_module, "CHECKPOINT_EVERY", 2)
        assert run_job(job)
    return job


@pytest.mark.parametrize("victim", [METRICS, ROLLOUTS, CHECKPOINT, TIMINGS, EVAL, FULL, DEPLOYED, MANIFEST])
def test_a_full_disk_leaves_nothing_half_written_and_a_resume_ends_alike(
    tmp_path: Path, cache: Path, intact: Job, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(job_module, "CHECKPOINT_EVERY", 2)
    job = tiny_job(tmp_path, "route2-full", cache=cache, steps=4)
    run_job(job, stop=iter([False, False, False, True]).__next__)  # one checkpoint, and a step after it
    before = {path.name: path.read_bytes() for path in job.folder.iterdir()}
    with monkeypatch.context() as patched:
        fill_up(patched, victim)
        with pytest.raises(OSError, match="No space left on device") as caught:
            run_job(job)
    assert len(str(caught.value).splitlines()) == 1
    left = {path.name: path.read_bytes() for path in job.folder.iterdir()}
    assert not [name for name in left if name.startswith(".")]
    assert left.get(victim) == before.get(victim)
    assert run_job(job)
    assert contents([intact]) == contents([job])


LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_study import tiny_job
from studies.route2.job import run_job
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in map(int, sys.argv[4:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        run_job(tiny_job(Path(sys.argv[2]) / str(limit), "route2-full", cache=Path(sys.argv[3]), steps=42))
    except OSError as error:
        print(str(limit), error)
"""


def test_a_disk_that_really_ends_mid_write(tmp_path: Path, cache: Path, whole: dict[str, bytes]) -> None:
    """The kernel refuses the bytes past a limit: inside the log's first block, or inside the first checkpoint."""
    metrics, size = len(whole[f"route2-full/{METRICS}"]), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limits = {metrics // 10: METRICS, metrics + 5000: CHECKPOINT}
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(ROOT / "tests" / "support"), str(tmp_path), str(cache), *map(str, limits)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    said = dict(line.split(" ", 1) for line in child.stdout.splitlines())
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == size
    for limit, victim in limits.items():
        job = tiny_job(tmp_path / str(limit), "route2-full", cache=cache, steps=STEPS)
        assert victim in said[str(limit)]
        assert "File too large" in said[str(limit)]
        assert not list(job.folder.glob(".*"))
        log = job.folder / METRICS
        assert log.read_bytes() == whole[f"route2-full/{METRICS}"][: log.stat().st_size]
        assert log.read_bytes().endswith(b"\n") or log.stat().st_size == 0
    assert (job.folder / METRICS).stat().st_size > 0  # the log was written, and the checkpoint was not


def test_append_and_write_json_are_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, table = tmp_path / "log", tmp_path / "table.json"
    assert append(log, b"one") == 3
    write_json(table, {"a": 1})
    with monkeypatch.context() as patched:
        fill_up(patched, "")
        with pytest.raises(OSError, match=r"^could not append to .*log: No space left on device$"):
            append(log, b"two")
        with pytest.raises(OSError, match=r"^could not write .*table.json: No space left on device$"):
            write_json(table, {"a": 2})
    assert log.read_bytes() == b"one"
    assert table.read_text() == '{\n  "a": 1\n}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "table.json"]
    assert append(log, b"two") == 6


# a damaged checkpoint


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A run that was stopped after a checkpoint."""
    job = tiny_job(tmp_path_factory.mktemp("stopped"), "route2-grad", cache=cache, steps=4)
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job_module, "CHECKPOINT_EVERY", 2)
        assert not run_job(job, told.append, lambda: sum(told) >= 3)
    return job


@pytest.fixture(scope="module")
def load(stopped: Job) -> Iterator[Callable[[Path], int]]:
    """Loads a checkpoint into the stopped run's policy, and checks that a refusal changes nothing."""
    with SubprocessRunner() as child:
        policy = build_policy(stopped, stopped.cache)
        route = build_route(stopped, MicroWorld(get_world("strong"), child), policy)
        optimiser = build_optimiser(stopped, policy)

        def loads(path: Path) -> int:
            before = {name: t.clone() for name, t in policy.adapters.tensors().items()}
            try:
                return load_checkpoint(path, policy.adapters, optimiser, route, identity=stopped.identity)[0]
            except ValueError:
                assert all(torch.equal(t, before[name]) for name, t in policy.adapters.tensors().items())
                raise

        yield loads


def test_every_flipped_bit_and_every_missing_byte_is_refused(tmp_path: Path, stopped: Job, load: Callable[[Path], int]) -> None:
    good, bad, rng = (stopped.folder / CHECKPOINT).read_bytes(), tmp_path / "bad", random.Random(0)
    header = 8 + int.from_bytes(good[:8], "little")
    offsets = [*range(0, 8), *rng.sample(range(8, header), 150), *rng.sample(range(header, len(good)), 150), len(good) - 1]
    for offset in offsets:
        flipped = bytearray(good)
        flipped[offset] ^= 1 << rng.randrange(8)
        bad.write_bytes(flipped)
        with pytest.raises(ValueError, match="bad"):
            load(bad)
    for length in (0, 1, 8, header - 1, header, len(good) - 1):
        bad.write_bytes(good[:length])
        with pytest.raises(ValueError, match="bad is not a whole safetensors file"):
            load(bad)
    assert load(stopped.folder / CHECKPOINT) == 2


def test_a_checkpoint_whose_values_were_changed_is_refused_for_its_checksum(
    tmp_path: Path, stopped: Job, load: Callable[[Path], int]
) -> None:
    tensors, meta = read_tensors(stopped.folder / CHECKPOINT)
    name = next(name for name in tensors if name.startswith("direction."))
    for changed, header in (
        (tensors | {name: tensors[name] * 2}, meta),
        ({n: t for n, t in tensors.items() if n != name}, meta),
        (tensors, meta | {"step": "21"}),
        (tensors, {k: v for k, v in meta.items() if k != "sha256"}),
    ):
        write_tensors(tmp_path / "changed", changed, header)
        with pytest.raises(ValueError, match="does not match its own checksum; delete that arm's folder"):
            load(tmp_path / "changed")


def test_a_foreign_checkpoint_is_refused_with_the_reason(tmp_path: Path, cache: Path, stopped: Job) -> None:
    other = tiny_job(tmp_path, "route2-act", cache=cache, steps=4)
    other.folder.mkdir(parents=True)
    shutil.copy(stopped.folder / CHECKPOINT, other.folder / CHECKPOINT)
    with pytest.raises(ValueError, match="was written under other settings; choose another --out, or delete that arm's folder"):
        run_job(other)
    write_tensors(other.folder / CHECKPOINT, {"t": torch.zeros(1)}, {"format": "something else"})
    with pytest.raises(ValueError, match="is not a checkpoint of this study"):
        run_job(other)


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path, stopped: Job) -> None:
    job = Job(tmp_path / stopped.root.name, stopped.cache, stopped.settings, stopped.seed, stopped.arm)
    shutil.copytree(stopped.folder, job.folder)
    with (job.folder / METRICS).open("r+b") as log:
        log.truncate(10)
    with pytest.raises(ValueError, match=r"has 10 bytes, but the checkpoint was written after \d+: delete that arm's folder"):
        run_job(job)


# the soak


def test_the_soak_sees_every_difference_but_timings_and_passing_files(tmp_path: Path) -> None:
    for side in ("a", "b"):
        arm = tmp_path / side / "strong-0" / "seed-0" / "vanilla"
        arm.mkdir(parents=True)
        (arm / METRICS).write_text("same")
        (arm / TIMINGS).write_text(side)
        (tmp_path / side / "strong-0" / ".lock").write_text(side)
        (tmp_path / side / "warmstarts").mkdir()
        (tmp_path / side / "warmstarts" / "base").write_text(side)
    assert differences(tmp_path / "a", tmp_path / "b") == []
    (arm / METRICS).write_text("other")
    (arm / CHECKPOINT).write_text("left")
    (arm / ".metrics.tmp").write_text("left")
    (tmp_path / "a" / "strong-0" / "settings.json").write_text("")
    names = ["seed-0/vanilla/.metrics.tmp", f"seed-0/vanilla/{CHECKPOINT}", f"seed-0/vanilla/{METRICS}", "settings.json"]
    assert differences(tmp_path / "a", tmp_path / "b") == [f"strong-0/{name}" for name in names]


def test_a_soak_without_kills_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Soak(kills=0)() == 2
    assert capsys.readouterr().err == "error: kills must be at least 1, not 0\n"
