"""Jobs of a cluster, on submitit's local executor: preempted or not, they end with the bytes of a run on this machine."""

import filecmp
import importlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_cluster import HERE, preempted, tasks
from tiny_study import FEW, tiny_job

from studies.common import cluster
from studies.common.cluster import Cluster, Executor, run_each
from studies.route2.cli import main
from studies.training import cluster as training
from studies.training.checkpoint import CHECKPOINT
from studies.training.cluster import run_queued, run_submitted
from studies.training.job import DEPLOYED, EVAL, FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, ROLLOUTS, TIMINGS
from studies.training.run import run_job

pytestmark = [pytest.mark.study, pytest.mark.process]


def jobs_in(root: Path, *arms: str, cache: Path, steps: int = 40) -> list[Job]:
    """A checkpoint is written after 20 steps."""
    return [tiny_job(root, arm, cache=cache, steps=steps, adapt=FEW) for arm in ("base", *arms)]


def test_a_preempted_sweep_ends_with_the_same_bytes(tmp_path: Path, cache: Path) -> None:
    here, there = (jobs_in(tmp_path / place, "route2-grad", cache=cache) for place in ("here", "there"))
    with preempted(there[1].folder, CHECKPOINT) as seen:
        assert run_submitted(there, HERE, quiet=True) == []
    assert len(seen) == 1
    for job, other in zip(here, there, strict=True):
        assert run_job(job)
        names = [EVAL, MANIFEST] if job.arm is None else [EVAL, MANIFEST, METRICS, ROLLOUTS, FULL, DEPLOYED]
        assert filecmp.cmpfiles(job.folder, other.folder, names, shallow=False) == (names, [], [])
    spans = [json.loads(line) for line in (there[1].folder / TIMINGS).read_text().splitlines()]
    assert [span["from"] for span in spans][-1] == 20, "it went on at its checkpoint"
    assert run_submitted(there, HERE, quiet=True) == [], "what is finished is not submitted again"


def test_an_error_that_comes_of_the_preemption_is_no_failure(tmp_path: Path) -> None:
    """safetensors, for one, turns the exit that the signal raises in the middle of a read into an error about the file."""

    def work(job: Path) -> None:
        if job.exists():
            return
        job.touch()
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(10)
        except SystemExit as error:
            raise ValueError(f"{job} is not a complete file") from error

    run_each(work, [tmp_path / "job"], [], "work", workers=1, cluster=HERE, folder=tmp_path, quiet=True)


def test_a_failed_base_job_takes_its_arms_along_and_says_why(tmp_path: Path, cache: Path) -> None:
    jobs = jobs_in(tmp_path, "vanilla", cache=cache)
    jobs[0].folder.mkdir(parents=True)
    (jobs[0].folder / "manifest.json").write_text("{}")
    (failure,) = run_submitted(jobs, HERE, quiet=True)
    assert failure.startswith("base at seed 0 failed: ")
    assert "manifest.json" in failure
    assert "Traceback" not in failure
    assert not jobs[1].folder.exists()


def test_ctrl_c_takes_the_jobs_out_of_the_queue(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache, steps=4000)

    def interrupted(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(seconds)
        if (job.folder / METRICS).exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(training.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_submitted([job], HERE, quiet=True)
    monkeypatch.undo()
    until = time.monotonic() + 20
    while tasks(job.folder):
        assert time.monotonic() < until, "the job still runs"
        time.sleep(0.1)


SLURM = {
    "srun": "",
    "sbatch": r"""
id=$(( $(ls | grep -c ^script) + 7 )); cp "$1" script-$id; echo $# > arguments-$id
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$1")
if [ "$last" ]; then seq -f "${id}_%g" 0 $last; else echo $id; fi >> queue
echo Submitted batch job $id
""",
    "squeue": "test ! -e down && cat queue",
    "scancel": 'echo "$1" >> cancelled',
}
"""A Slurm without accounting, whose jobs never start: what its commands do in the folder of the cluster.

``sbatch`` keeps the script that it was given, and queues every job of an array.
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "queue").touch()
    for name, script in SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name, seconds in {"LOOKS": 0.05, "ASKS": 0.1, "GRACE": 0.6}.items():
        monkeypatch.setattr(cluster, name, seconds)
    monkeypatch.setattr(training, "LOOKS", 0.05)
    return folder


def meanwhile(slurm: Path, jobs: int, seconds: float, change: Callable[[], object]) -> None:
    """Once the queue has as many jobs, and some seconds later, change it; this returns at once."""

    def wait() -> None:
        while len((slurm / "queue").read_text().split()) < jobs:
            time.sleep(0.01)
        time.sleep(seconds)
        change()

    threading.Thread(target=wait, daemon=True).start()


def test_slurm_is_told_what_waits_for_what_and_when_to_take_a_job_back(slurm: Path, tmp_path: Path, cache: Path) -> None:
    """The options of the scripts that ``sbatch`` gets: a seed's base job, and its arms as an array that waits for it."""
    jobs = jobs_in(tmp_path / "runs", "vanilla", "route2-grad", cache=cache)
    meanwhile(slurm, 3, 0.3, lambda: (slurm / "queue").write_text(""))
    given = Executor("slurm", "cpu", hours=0.5, memory=1.5, slurm=("account=me", "cpus-per-task=2", "comment=a=b")).cluster()
    assert given is not None
    assert given.options["comment"] == "a=b"
    run_submitted(jobs, given, quiet=True)
    base, arms = (
        dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", (slurm / f"script-{number}").read_text(), re.M)) for number in (7, 8)
    )
    assert {(slurm / f"arguments-{number}").read_text() for number in (7, 8)} == {"1\n"}  # the script, and no option
    assert not (slurm / "script-9").exists()
    for one in (base, arms):
        assert one["signal"] == "USR2@120"
        assert one["requeue"] == ""
        assert one["open-mode"] == "append"
        assert one["kill-on-invalid-dep"] == "yes"
        assert (one["time"], one["mem"], one["cpus-per-task"], one["nodes"]) == ("30", "1536MB", "2", "1")
        assert (one["partition"], one["account"], one["comment"]) == ("cpu", "me", "a=b")
    assert not {"array", "dependency"} & base.keys()
    assert arms["dependency"] == "afterok:7"
    assert arms["array"] == "0-1%2"


COMMANDS = {
    "route2": "studies.route2.cli run --seeds 1 --arms vanilla",
    "lanes": "studies.lanes.cli run --seeds 1",
    "tracing": "studies.tracing.cli run --seeds 1 --arms vanilla",
    "steering": "studies.steering.cli run --seeds 1",
}


@pytest.mark.parametrize("study", COMMANDS)
def test_a_command_gives_its_jobs_to_slurm(study: str, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained on this machine; what left the queue without a result is told as failed."""
    module, *arguments = COMMANDS[study].split()
    monkeypatch.setattr(
        "sys.argv", [study, *arguments, "--out", str(tmp_path / "runs"), "--executor", "slurm", "--partition", "cpu"]
    )
    meanwhile(slurm, 1, 1.0, lambda: (slurm / "queue").write_text(""))
    assert importlib.import_module(module).main() != 0
    assert "#SBATCH --partition=cpu\n" in (slurm / "script-7").read_text()
    assert not [*(tmp_path / "runs").glob("**/*.safetensors")]


@pytest.mark.parametrize("before", ["the queue knows it", "Slurm does not answer"])
def test_a_job_that_the_queue_does_not_know_any_more_has_failed(before: str, slurm: Path, tmp_path: Path, cache: Path) -> None:
    """Not before, however long it takes; and what waited for it is taken out of the queue."""
    jobs = jobs_in(tmp_path / "runs", "vanilla", cache=cache)
    changed: list[float] = []

    def kill() -> None:
        if before == "Slurm does not answer":
            (slurm / "down").touch()
            time.sleep(0.5)  # an answer that had begun would be read from an empty queue
        (slurm / "queue").write_text("7\n8\n" if before == "the queue knows it" else "")
        time.sleep(1.5)
        changed.append(time.monotonic())
        (slurm / "queue").write_text("8\n")
        (slurm / "down").unlink(missing_ok=True)

    meanwhile(slurm, 2, 0.0, kill)
    (failure,) = run_submitted(jobs, Cluster(), quiet=True)
    assert time.monotonic() >= changed[0] + 0.6
    log = tmp_path / "runs" / jobs[0].root.name / "cluster" / "7" / "7_0_log.err"
    assert failure == (
        f"base at seed 0 failed: its job ended without a result (Slurm's queue does not know it any more): see {log}; "
        "run the same command again to go on (so 1 run that would start from it cannot be made)"
    )
    assert (slurm / "cancelled").read_text().split() == ["7", "8"]


def test_a_job_that_left_the_queue_with_its_files_complete_has_not_failed(slurm: Path, tmp_path: Path, cache: Path) -> None:
    (job,) = jobs_in(tmp_path / "runs", cache=cache)

    def work() -> None:
        run_queued(job)
        (slurm / "queue").write_text("")

    meanwhile(slurm, 0, 0.0, work)
    assert run_submitted([job], Cluster(), quiet=True) == []


def test_a_base_model_is_made_with_one_thread_wherever_it_is_made(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start's bits depend on the number of threads, and a cluster that binds no job to its core offers all of them."""
    seen: list[int] = []

    def make(*given: Any, make: Callable[..., Any] = training.base_model, **named: Any) -> Any:
        seen.append(torch.get_num_threads())
        return make(*given, **named)

    monkeypatch.setattr(training, "base_model", make)
    torch.set_num_threads(2)
    try:
        run_queued(tiny_job(tmp_path, "base", cache=cache))
    finally:
        torch.set_num_threads(1)
    assert seen == [1]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hours": 0.05}, "too short: a job is told 120 s before"),
        ({"hours": float("inf")}, "inf hours are no time limit"),
        ({"memory": 0.0}, "0 GB of memory are none"),
        ({"memory": float("inf")}, "inf GB of memory are none that a machine has"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(given: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cluster(**given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--executor slurm", "there is no Slurm here (no srun)"),
        ("--executor slurm --slurm account", "'account' is no option of sbatch: write NAME=VALUE"),
        ("--executor slurm --slurm qos=low account=", "'account=' is no option of sbatch: write NAME=VALUE"),
        ("--executor slurm --slurm =me", "'=me' is no option of sbatch: write NAME=VALUE"),
        ("--executor slurm --slurm account=me account=you", "--slurm gives account twice: remove one of them"),
        ("--executor slurm --slurm cpus-per-task=2 cpus_per_task=3", "--slurm gives cpus_per_task twice: remove one of them"),
        ("--executor slurm --slurm chdir=/home/me", "chdir would move the jobs away from the files of this command: leave it out"),
        ("--executor slurm --report-to tensorboard", "leave it out with --executor slurm"),
        ("--executor slurm --hours 0.01", "0.01 hours are too short"),
        ("--partition cpu", "options of a cluster: add --executor slurm"),
        ("--hours 9", "options of a cluster: add --executor slurm"),
    ],
)
def test_what_cannot_be_queued_is_one_sentence_and_writes_nothing(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["route2", "run", "--out", str(tmp_path / "runs"), *arguments.split()])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert list(tmp_path.iterdir()) == []
