"""A run that was stopped, killed, or met a full disk or damaged files ends with the bytes of an undisturbed run, or refuses to."""

import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import eventually
from tiny_study import FEW, overrides, tiny_job

import studies.training.run as run_module
from mi_route2.adapters import Adapters
from mi_route2.rollouts import Policy
from mi_route2.routing import Route
from mi_route2.tensor_files import write_tensors
from studies.common.workers import Executor, exclusive, job_lock
from studies.training.build import build_optimizer, build_route
from studies.training.checkpoint import CHECKPOINT, PREVIOUS, read_checkpoint, resume, save_checkpoint
from studies.training.job import EVAL, FULL, Job, build_policy
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, ROLLOUTS, Recorder, append, read_rows
from studies.training.run import run_job, run_jobs
from studies.training.worlds import open_world

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
STEPS = 6
FROM_PREVIOUS = r"; going on from checkpoint.previous.safetensors, after 2 steps$"


Parts = tuple[Policy, torch.optim.AdamW, Route]


class StopError(BaseException):
    """Stops a run as Ctrl-C does."""


def contents(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(job.folder.iterdir())}


def run_on(job: Job, stop: int | None = None, watch: Callable[[int], object] = lambda step: None, **given: Any) -> list[int]:
    """Run the job with a checkpoint every second step; return the steps that ran. Before step ``stop``, it is stopped."""
    note, steps = Recorder.note, []

    def noted(recorder: Recorder, record: Any, *rest: Any) -> Any:
        if record.step == stop:
            raise StopError
        watch(record.step)
        steps.append(record.step)
        return note(recorder, record, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "CHECKPOINT_EVERY", 2)
        patched.setattr(Recorder, "note", noted)
        if stop is None:
            run_job(job, **given)
        else:
            with pytest.raises(StopError):
                run_job(job, **given)
    return steps


def job_in(root: Path, cache: Path, arm: str | None = "route2-full", **given: Any) -> Job:
    return tiny_job(root, arm, cache=cache, **({"steps": STEPS, "adapt": FEW} | given))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    job = job_in(tmp_path_factory.mktemp("intact"), cache)
    run_on(job)
    return job


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """The same run, stopped after 5 steps: the newest checkpoint is of 4, the previous one of 2."""
    job = job_in(tmp_path_factory.mktemp("late"), cache)
    run_on(job, 5)
    assert sorted(contents(job)) == [PREVIOUS, CHECKPOINT, METRICS, ROLLOUTS]
    return job


@pytest.fixture
def stopped(tmp_path: Path, late: Job) -> Job:
    """A copy of ``late``, to be damaged."""
    shutil.copytree(late.root, tmp_path / late.root.name)
    return replace(late, root=tmp_path / late.root.name)


@pytest.fixture(scope="module")
def parts(late: Job) -> Parts:
    """A policy, an optimizer and a route that the late run's checkpoints fit."""
    with open_world(late.settings) as (world, _):
        policy = build_policy(late, late.cache)
        return policy, build_optimizer(late, policy), build_route(late, world, policy)


# stopped and killed


def test_a_run_that_is_stopped_at_any_step_goes_on_from_its_last_checkpoint(tmp_path: Path, cache: Path) -> None:
    whole, broken = (job_in(tmp_path / name, cache, "route2-act") for name in ("whole", "broken"))
    run_on(whole)
    ran = [run_on(broken, stop) for stop in (1, 3, 4, 5)]
    assert ran == [[0], [0, 1, 2], [2, 3], [4]]
    assert run_on(broken) == [4, 5]
    assert contents(broken) == contents(whole)
    assert run_on(broken) == []  # a finished run is not made again


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import studies.training.run as run_module
from tiny_study import FEW, tiny_job
run_module.CHECKPOINT_EVERY = 1
run_module.run_job(tiny_job(Path(sys.argv[2]), "route2-full", cache=Path(sys.argv[3]), steps=6, adapt=FEW))
"""


def test_a_run_that_is_killed_at_drawn_moments_ends_alike(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = (job_in(tmp_path / name, cache) for name in ("whole", "killed"))
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "CHECKPOINT_EVERY", 1)
        run_job(whole)
    command = [sys.executable, "-c", CHILD, str(ROOT / "tests/support"), str(tmp_path / "killed"), str(cache)]
    rng, kills = random.Random(0), 0
    for _ in range(20):
        run = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        before = (killed.folder / CHECKPOINT).stat().st_mtime_ns if (killed.folder / CHECKPOINT).exists() else 0
        while run.poll() is None and not (
            (killed.folder / CHECKPOINT).exists() and (killed.folder / CHECKPOINT).stat().st_mtime_ns > before
        ):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))  # a step of a fast machine
        if run.poll() is not None:
            break
        os.killpg(run.pid, signal.SIGKILL)
        kills += run.wait() == -signal.SIGKILL
    else:
        run_job(killed)
    assert kills >= 1
    assert contents(killed) == contents(whole)


# several runs


def test_two_workers_and_submitit_write_the_same_bytes_as_one(tmp_path: Path, cache: Path) -> None:
    by_way: dict[str, list[dict[str, bytes]]] = {}
    for way, workers, place in (("one", 1, "local"), ("two", 2, "local"), ("submitit", 1, "submitit")):
        jobs = [job_in(tmp_path / way, cache, arm, steps=2) for arm in ("base", "route2-act")]
        assert run_jobs(jobs, workers, Executor(executor=place), quiet=True) == []  # pyright: ignore[reportArgumentType]
        by_way[way] = [contents(job) for job in jobs]
    assert by_way["one"] == by_way["two"] == by_way["submitit"]
    times = [(job.folder / MANIFEST).stat().st_mtime_ns for job in jobs]
    assert run_jobs(jobs, 2, quiet=True) == []
    assert [(job.folder / MANIFEST).stat().st_mtime_ns for job in jobs] == times


def test_a_failure_costs_what_starts_from_it_and_nothing_else(tmp_path: Path, cache: Path) -> None:
    jobs = [job_in(tmp_path, cache, arm, seed=seed, steps=2) for seed in (0, 1) for arm in ("base", "vanilla")]
    (jobs[0].folder / EVAL).mkdir(parents=True)  # what is in its place cannot be overwritten
    failures = run_jobs([*jobs, replace(jobs[2], seed=2)], 2, quiet=True)
    assert [failure.partition(":")[0] for failure in failures][-1] == "vanilla at seed 0 cannot start"
    assert failures[0].startswith("base at seed 0 failed: could not write")
    assert len(failures) == 2
    assert [job.finished for job in jobs] == [False, False, True, True]


def test_a_stopped_command_leaves_no_process_and_goes_on(tmp_path: Path, cache: Path) -> None:
    shutil.copytree(cache, tmp_path / "warmstarts")
    jobs = [job_in(tmp_path, tmp_path / "warmstarts", arm, steps=12) for arm in ("base", "vanilla", "absorb")]
    options = ["--seeds", "1", "--workers", "2", "--no-report", "--arms", "vanilla", "absorb", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "studies.route2", "run", *options, "--override", *overrides(steps=12, adapt=FEW)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    try:
        eventually(lambda: run.poll() is not None or all((job.folder / METRICS).exists() for job in jobs[1:]), 200)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to every process
        _, errors = run.communicate(timeout=40)
        eventually(lambda: not _group_lives(run.pid))
    finally:
        if _group_lives(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert "Traceback" not in errors
    assert run.returncode == 130, errors
    assert errors.rstrip().endswith("stopped; the same command goes on from the last checkpoints")
    assert not all(job.finished for job in jobs)
    whole = [replace(job, root=tmp_path / "whole" / job.root.name) for job in jobs]
    for job in (*jobs, *whole):
        run_job(job)
    assert [contents(job) for job in jobs] == [contents(job) for job in whole]


LEAVING = """
import multiprocessing.util, sys, time
from pathlib import Path
from studies.common.workers import Executor, run_each

def work(name):
    Path(multiprocessing.util.get_temp_dir(), name).touch()
    time.sleep(60)

if __name__ == "__main__":
    run_each(work, ["a", "b"], workers=2, executor=Executor(), folder=Path(), what="", quiet=True)
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "a killed parent"])
def test_a_stopped_command_leaves_no_temporary_folder_of_its_workers(tmp_path: Path, how: str) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "leaving.py")], stderr=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    try:
        eventually(lambda: sorted(path.name for path in folder.rglob("[ab]")) == ["a", "b"], 60)
        if how == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)
        else:
            run.kill()
        run.wait(20)
        eventually(lambda: not _group_lives(run.pid))
        assert list(folder.iterdir()) == []
    finally:
        if _group_lives(run.pid):
            os.killpg(run.pid, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    child = "import sys, time; from pathlib import Path; import studies.common.workers as w\n"
    child += "with w.exclusive(Path(sys.argv[1])), w.job_lock(Path(sys.argv[1]) / 'job'): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", child, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another process is writing to"), exclusive(tmp_path):
        pass
    with pytest.raises(ValueError, match="another process is still writing to"), job_lock(tmp_path / "job", patience=0.1):
        pass
    holder.kill()
    holder.wait()
    with exclusive(tmp_path), job_lock(tmp_path / "job"):  # a lock ends with its process
        pass


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another --out"), exclusive(tmp_path / "file" / "below"):
        pass


def test_curves_of_a_resumed_run_have_every_step_once(tmp_path: Path, cache: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job = job_in(tmp_path, cache, "vanilla", steps=4)
    run_on(job, 3, report_to="tensorboard")
    run_on(job, report_to="tensorboard")
    events = reader.EventAccumulator(str(job.root / "tensorboard/vanilla/seed-0"))
    scalars = events.Reload().Scalars("train/loss")
    assert [event.step for event in scalars] == [0, 1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx([row["loss"] for row in read_rows(job.folder / METRICS)])
    assert any(tag.startswith("eval/") for tag in events.Tags()["scalars"])


# full disks and damaged files


@pytest.mark.parametrize("victim", [METRICS, CHECKPOINT, FULL, MANIFEST])
def test_a_full_disk_leaves_nothing_half_written(stopped: Job, intact: Job, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    before, true_fsync = contents(stopped), os.fsync

    def fsync(descriptor: int) -> None:
        if victim in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match=rf"^could not (cut|append to|write) .*{victim}.*: No space left on device$"):
            run_on(stopped)
    left = contents(stopped)
    assert not [name for name in left if name.startswith(".")]
    assert before[METRICS].startswith(left[METRICS]) if victim == METRICS else left.get(victim) == before.get(victim)
    run_on(stopped)
    assert contents(intact) == contents(stopped)


def test_adapters_that_are_not_finite_replace_no_checkpoint(stopped: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(stopped)

    def broken(folder: Path, adapters: Adapters, *given: Any, **named: Any) -> None:
        with torch.no_grad():
            next(iter(adapters.quarantine_parameters().values()))[0, 0] = float("nan")
        save_checkpoint(folder, adapters, *given, **named)

    monkeypatch.setattr(run_module, "save_checkpoint", broken)
    with pytest.raises(ValueError, match=r"^quarantine\..* holds values that are not finite: nothing was written$"):
        run_on(stopped)
    assert {name: contents(stopped)[name] for name in (PREVIOUS, CHECKPOINT)} == {n: before[n] for n in (PREVIOUS, CHECKPOINT)}


@pytest.mark.parametrize("most", [1, 5])
def test_an_append_goes_on_where_the_system_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    class Sparing(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:most])

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering=-1: Sparing(path, mode))
        assert append(tmp_path / "log", b"twelve bytes") == 12
    assert (tmp_path / "log").read_bytes() == b"twelve bytes"


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def of_another_program(path: Path) -> None:
    write_tensors(path, {"t": torch.zeros(1)}, {"format": "something else"})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 1000), r"checkpoint.safetensors is not a complete safetensors file \(.*\)"),
    "changed": (flip, "checkpoint.safetensors is damaged: its content does not match its own checksum"),
    "of another program": (of_another_program, "checkpoint.safetensors is not a checkpoint of this study .*"),
    "ahead of its log": (
        lambda path: os.truncate(path.parent / METRICS, sum(map(len, (path.parent / METRICS).read_bytes().splitlines(True)[:3]))),
        r"metrics.jsonl has \d+ bytes, but checkpoint.safetensors was written after \d+",
    ),
    "with changed rollouts": (
        lambda path: flip(path.parent / ROLLOUTS),
        r"rollouts.jsonl.gz was changed: its first \d+ bytes are not those after which checkpoint.safetensors was written",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_the_previous_checkpoint_is_used_if_the_newest_one_is_no_good(stopped: Job, intact: Job, how: str) -> None:
    damage, reason = DAMAGES[how]
    damage(stopped.folder / CHECKPOINT)
    with pytest.warns(UserWarning, match=reason + FROM_PREVIOUS):
        assert run_on(stopped) == [2, 3, 4, 5]
    assert contents(stopped) == contents(intact)


def test_without_a_good_checkpoint_nothing_is_touched(stopped: Job) -> None:
    flip(stopped.folder / CHECKPOINT)
    os.truncate(stopped.folder / PREVIOUS, 1000)
    before = contents(stopped)
    with pytest.raises(ValueError, match=r"is damaged: .*; choose another --out, or delete that arm's folder to start anew$"):
        run_job(stopped)
    assert contents(stopped) == before


def test_a_log_that_is_changed_during_a_run_gets_no_manifest(stopped: Job) -> None:
    with pytest.raises(ValueError, match=r"metrics.jsonl was changed: its first \d+ bytes are not those"):
        run_on(stopped, watch=lambda step: flip(stopped.folder / METRICS, 40) if step == 4 else None)
    assert not (stopped.folder / MANIFEST).exists()


def test_a_checkpoint_on_other_base_weights_or_adapters_is_refused(late: Job, parts: Parts, cache: Path) -> None:
    narrower = build_policy(job_in(late.root, cache, kept_rank=2), cache)
    with pytest.raises(ValueError, match=r"does not fit the model's adapters, first in adapter\.kept\.blocks\.1"):
        read_checkpoint(late.folder / CHECKPOINT, narrower.adapters, identity=late.identity)
    with pytest.raises(ValueError, match="was written under other settings"):
        read_checkpoint(late.folder / CHECKPOINT, parts[0].adapters, identity="other")
    weight = next(iter(build_policy(late, cache).adapters.sites.values())).weight
    assert weight is not next(iter(parts[0].adapters.sites.values())).weight
    other = build_policy(late, cache)
    with torch.no_grad():
        next(iter(other.adapters.sites.values())).weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"was written on other base weights \(hash [0-9a-f]{32}, not [0-9a-f]{32}\)$"):
        read_checkpoint(late.folder / CHECKPOINT, other.adapters, identity=late.identity)


def test_without_a_checkpoint_a_run_begins_anew_with_empty_logs(stopped: Job, parts: Parts) -> None:
    for name in (CHECKPOINT, PREVIOUS):
        (stopped.folder / name).unlink()
    policy, optimizer, route = parts
    assert resume(stopped.folder, policy.adapters, optimizer, route, identity=stopped.identity, logs=(METRICS,)) == 0
    assert (stopped.folder / METRICS).read_bytes() == b""
