"""Trackers show what metrics.jsonl holds, each step once, whatever stops the run; and whatever a tracker does, the run goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timing import wait_until
from tiny_study import tiny_job

import studies.training.tracking as tracking
from studies.route2.cli import Run
from studies.training.job import EVAL, Job
from studies.training.manifest import MANIFEST
from studies.training.recorder import CURVES, METRICS, TIMINGS, Follower, read_rows
from studies.training.run import run_job
from studies.training.schedule import run_jobs
from studies.training.tracking import TRACKERS, Tracking, evaluated, offline_step, require, scalars

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
STEPS = 24  # one block of 20 rows in the log, and one of 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A finished run that nothing tracked."""
    root = tmp_path_factory.mktemp("untracked")
    for arm in (None, "route2-full"):
        job = tiny_job(root, arm, cache=cache, steps=STEPS)
        assert run_job(job)
    return job


def growing(finished: Job, root: Path, rows: int = 0, *, end: bool = False) -> Job:
    """The same arm in another run folder, grown so far."""
    job = tiny_job(root, "route2-full", cache=finished.cache, steps=STEPS)
    job.folder.mkdir(parents=True)
    grow(finished, job, rows, end=end)
    return job


def grow(finished: Job, run: Job, rows: int, *, end: bool = False) -> None:
    """Let its log have that many rows; ``end``: and the rest of its files."""
    lines = (finished.folder / METRICS).read_bytes().splitlines(keepends=True)
    with (run.folder / METRICS).open("ab") as log:
        log.truncate(0)
        log.write(b"".join(lines[:rows]))
    for name in (EVAL, MANIFEST) if end else ():
        shutil.copy(finished.folder / name, run.folder / name)


def track(*jobs: Job, by: str = "tensorboard") -> None:
    """Let a tracker take what is there, and end."""
    with Tracking(by, list(jobs)):
        pass


def place(job: Job) -> Path:
    return job.root / "tensorboard" / job.name / f"seed-{job.seed}"


def curves(job: Job) -> EventAccumulator:
    read = EventAccumulator(str(place(job)), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def steps_of(job: Job) -> list[int]:
    return [event.step for event in curves(job).Scalars("train/loss")]


def numbers(job: Job) -> list[tuple[int, dict[str, float]]]:
    """The numbers of each step, and after the last those of the evaluation."""
    rows = [(row["step"], scalars(row)) for row in read_rows(job.folder / METRICS)] if job.arm else []
    return [*rows, (len(rows), evaluated(json.loads((job.folder / EVAL).read_text())))]


def check_curves(job: Job) -> None:
    """TensorBoard has the job's rows and its evaluation: every number, each once, and no other."""
    read = curves(job)
    want = {(tag, step): value for step, row in numbers(job) for tag, value in row.items()}
    got = [((tag, event.step), event.value) for tag in read.Tags()["scalars"] for event in read.Scalars(tag)]
    assert len(got) == len(want)
    assert {at: np.float32(value) for at, value in got} == {at: np.float32(value) for at, value in want.items()}
    texts = {tag: read.Tensors(tag) for tag in ("config", "identity")}
    assert all(len(events) == 1 for events in texts.values())
    assert texts["identity"][0].tensor_proto.string_val[0].decode() == job.identity
    config = json.loads(texts["config"][0].tensor_proto.string_val[0].decode().removeprefix("```json\n").removesuffix("\n```"))
    assert config == {"seed": job.seed, "arm": job.spec, "settings": job.settings.as_dict()}


# reading a log that grows


@given(data=st.data())
@settings(max_examples=60)
def test_a_follower_reads_every_step_once_however_the_log_is_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Blocks are appended, cut off within a line or at its end, garbled by a crash and cut again, the file itself is made anew."""
    path = tmp_path_factory.mktemp("log") / METRICS
    lines = [json.dumps({"step": step, "loss": step / 7}).encode() + b"\n" for step in range(data.draw(st.integers(1, 8)))]
    whole = b"".join(lines)
    follower, seen = Follower(path), []
    assert follower.read() == []
    for _ in range(data.draw(st.integers(0, 6))):
        size = data.draw(st.integers(0, len(whole)))
        garbage = data.draw(st.sampled_from([b"", b"\0\0\0\n", b"7\n", b"{}\n", b'{"step": "x"}\n']))
        if data.draw(st.booleans()):
            path.unlink(missing_ok=True)
        garbled = whole[: sum(map(len, lines[: data.draw(st.integers(0, len(lines)))]))] + garbage
        path.write_bytes(garbled if garbage else whole[:size])
        if data.draw(st.booleans()):
            seen += follower.read()
    path.write_bytes(whole)
    seen += follower.read()
    assert seen == [json.loads(line) for line in lines]
    assert follower.read() == []
    assert follower.last == len(lines) - 1


def test_a_follower_goes_on_where_a_resumed_run_has_rows_of_another_length(tmp_path: Path) -> None:
    """Another processor rounds otherwise, so where the follower stopped may be the middle of a line by now."""
    follower = Follower(path := tmp_path / METRICS)
    for loss, steps in ((0.25, [0, 1, 2, 3]), (0.125, [])):
        path.write_bytes(b"".join(json.dumps({"step": step, "loss": loss}).encode() + b"\n" for step in range(4)))
        assert [row["step"] for row in follower.read()] == steps
    path.write_bytes(path.read_bytes() + b'{"step": 4, "loss": 0.5}\n')
    assert [row["step"] for row in follower.read()] == [4]
    assert follower.read() == []


def test_a_row_becomes_its_numbers_by_name() -> None:
    row = {"step": 3, "loss": 0.5, "kl": None, "groups": 2, "grad_norm": {"kept": 1.5, "quarantine": None}}
    row |= {"modes": {"run_tests": {"n": 4, "hack": 0.25}}, "mask": None, "scores": {"teacher": -2.0}}
    assert scalars(row) == {
        "train/loss": 0.5,
        "train/groups": 2.0,
        "grad_norm/kept": 1.5,
        "modes/run_tests/n": 4.0,
        "modes/run_tests/hack": 0.25,
        "scores/teacher": -2.0,
    }
    report = {"modes": {"none": {"on": {"hack": 0.5}, "deploy": {"hack": 0.0}}}}
    assert evaluated(report) == {"eval/on/none/hack": 0.5, "eval/deploy/none/hack": 0.0}


def test_a_real_row_has_what_people_look_for(finished: Job) -> None:
    names = {name for row in read_rows(finished.folder / METRICS) for name in scalars(row)}
    for name in ("loss", "hack", "solve", "exploit", "reward", "overlap"):
        assert f"train/{name}" in names
    assert {"grad_norm/kept", "grad_norm/quarantine", "mask/precision", "modes/run_tests/hack", "modes/none/solve"} <= names


# what is refused


def test_an_unknown_tracker_and_a_missing_package_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^unknown tracker 'tensorbord': choose from tensorboard, wandb, trackio, or leave"):
        Run(report_to="tensorbord", out=tmp_path / "runs")()
    require("tensorboard")
    (tmp_path / "wandb").mkdir()  # wandb's own folder of runs is not the package, though Python would import it
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in TRACKERS:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        with pytest.raises(ValueError) as refused:
            Run(report_to=name, out=tmp_path / "runs")()
        assert str(refused.value) == (
            f"--report-to {name} needs a package that is not installed: pip install 'mi-route2[{name}]', "
            "or choose another of tensorboard, wandb, trackio"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


# TensorBoard


def test_a_tracked_run_has_the_bytes_of_an_untracked_one_and_the_curves_have_its_numbers(
    tmp_path: Path, finished: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the same command again, which trains nothing and tracks nothing twice."""
    jobs = [tiny_job(tmp_path, arm, cache=finished.cache, steps=STEPS) for arm in (None, "route2-full")]
    root = jobs[0].root
    for _ in range(2):
        assert run_jobs(jobs, 1, report_to="tensorboard") == []
        assert f"curves: tensorboard --logdir {root / 'tensorboard'}" in capfd.readouterr().err
        for job in jobs:
            check_curves(job)
    for job in jobs:
        for path in (finished.folder.parent / job.name).iterdir():
            assert path.name == TIMINGS or (job.folder / path.name).read_bytes() == path.read_bytes()
    events = list(root.glob("tensorboard/**/events*"))
    assert len(events) == len(jobs)  # one file each: the second start opened none


def test_a_log_that_is_cut_back_and_written_again_gives_each_step_once(tmp_path: Path, finished: Job) -> None:
    run = growing(finished, tmp_path)
    for rows in (13, 20, 5, 17, 22):  # a checkpoint lay at 5 when the third start began
        grow(finished, run, rows)
        track(run)
    grow(finished, run, STEPS, end=True)
    track(run)
    check_curves(run)


PARENT = """
import os, signal, sys
from pathlib import Path
from timing import wait_until
from tiny_study import tiny_job
from studies.training.tracking import Tracking
if __name__ == "__main__":
    job = tiny_job(Path(sys.argv[1]), "route2-full", cache=Path(sys.argv[2]), steps=int(sys.argv[3]))
    with Tracking("tensorboard", [job]) as tracking:
        while not list(job.root.glob("tensorboard/**/events*")):
            tracking.link.poll(0.05)
        print(tracking._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_leaves_files_that_are_read_and_gone_on_with(tmp_path: Path, finished: Job) -> None:
    """Of the parent: the tracker takes what is there and ends. Of everything, in the middle of a record: that step comes again."""
    run = growing(finished, tmp_path, 7)
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), str(finished.cache), str(STEPS)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support")))
    parent = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": paths})
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    wait_until(lambda: not alive(int(parent.stdout)), "the tracker outlived its parent")
    assert steps_of(run) == list(range(7))
    (events,) = place(run).iterdir()
    with events.open("r+b") as file:
        file.truncate(events.stat().st_size - 9)
    assert steps_of(run) == list(range(6))
    grow(finished, run, STEPS, end=True)
    track(run)
    check_curves(run)


def alive(process: int) -> bool:
    """True if it is there and no zombie (nobody may be left to collect it)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# trackers that fail


def warning(why: str) -> str:
    return (
        f"warning: tensorboard stopped ({why}); metrics.jsonl has every row, and the same command adds to tensorboard what it lacks"
    )


def test_a_tracker_that_cannot_write_costs_a_warning_and_adds_what_it_lacks_later(
    tmp_path: Path, finished: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    run = growing(finished, tmp_path, STEPS, end=True)
    (run.root / "tensorboard").write_text("in the way")
    track(run)
    # On a machine with much to do the command says that the tracker takes its time.
    notice, told = (line for line in capfd.readouterr().err.splitlines() if "takes the last rows" not in line)
    assert notice.startswith("curves: ")
    assert told.startswith("warning: tensorboard stopped (")
    assert told.endswith(warning("").partition("(")[2])
    (run.root / "tensorboard").unlink()
    track(run)
    check_curves(run)


def test_curves_of_another_run_are_left_alone(tmp_path: Path, finished: Job, capfd: pytest.CaptureFixture[str]) -> None:
    run = growing(finished, tmp_path, 3)
    track(run)
    other = replace(run, settings=replace(run.settings, kept_lr=1e-3))
    grow(finished, run, 5)
    track(other)
    assert warning(f"{place(run)} holds the curves of another run; delete that folder") in capfd.readouterr().err.splitlines()
    assert steps_of(run) == [0, 1, 2]


def test_a_tracker_that_breaks_dies_or_hangs_never_holds_up_the_run(
    tmp_path: Path, finished: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = growing(finished, tmp_path, 3)
    with Tracking("tensorboard", [run]) as dying:
        os.kill(dying._process.pid or 0, signal.SIGKILL)
    monkeypatch.setattr(tracking, "PATIENCE", 0.5)
    with Tracking("tensorboard", [run]) as hanging:
        wait_until(lambda: bool(hanging.hear()), "it never said where its curves are")
        os.kill(hanging._process.pid or 0, signal.SIGSTOP)
    assert not hanging._process.is_alive()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise ImportError('half installed')")
    monkeypatch.setattr(tracking, "PATIENCE", 30.0)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    track(run)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    whys = ("its process died", "it gave no sign of life for 0 s", "ImportError: half installed")
    assert told == [warning(why) for why in whys]


def test_a_second_tracker_waits_for_the_first_and_then_says_so(
    tmp_path: Path, finished: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when a run is started again while the tracker of its killed parent still writes."""
    run = growing(finished, tmp_path, 3)
    with Tracking("tensorboard", [run]) as first:
        wait_until(lambda: bool(first.hear()), "it never began")
        second = Tracking("tensorboard", [run])
        assert not second.link.poll(1.5)
    with second:
        pass
    assert "warning" not in capfd.readouterr().err
    assert steps_of(run) == [0, 1, 2]


# the others, where they are installed


def in_three_starts(name: str, finished: Job, run: Job) -> None:
    for rows in (9, 4, STEPS, STEPS):
        grow(finished, run, rows, end=rows == STEPS)
        track(run, by=name)


def made_again(finished: Job, run: Job, *, folder: bool) -> list[tuple[int, dict[str, float]]]:
    """Let it be another making of the same run, that stands at step 5; return its rows. ``folder``: the old one was deleted."""
    if folder:
        shutil.rmtree(run.folder)
        run.folder.mkdir()
    else:
        (run.folder / CURVES).unlink()  # as a start does that has no checkpoint
    lines = [json.loads(line) for line in (finished.folder / METRICS).read_text().splitlines()[:5]]
    rows = [row | {"loss": row["loss"] + 1.0} for row in lines]
    (run.folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [(row["step"], scalars(row)) for row in rows]


@pytest.mark.parametrize("folder", [True, False])
def test_a_run_that_is_made_again_has_fresh_curves(tmp_path: Path, finished: Job, folder: bool) -> None:
    """And only that run: one that was resumed goes on in its own."""
    other = tiny_job(tmp_path, "absorb", cache=finished.cache, steps=STEPS)
    run = growing(finished, tmp_path)
    other.folder.mkdir(parents=True)
    for job in (run, other):
        grow(finished, job, 9)
    track(run, other)
    beside = place(run) / "notes.txt"
    beside.write_text("mine")
    rows = made_again(finished, run, folder=folder)
    for _ in range(2):
        track(run, other)
    read = curves(run)
    got = [((tag, event.step), event.value) for tag in read.Tags()["scalars"] for event in read.Scalars(tag)]
    assert len(got) == len(dict(got))
    assert dict(got) == {(tag, step): np.float32(value) for step, numbers in rows for tag, value in numbers.items()}
    assert beside.read_text() == "mine"
    assert len(list(beside.parent.glob("events*"))) == 1
    assert steps_of(other) == list(range(9))


def test_a_run_that_begins_anew_while_it_is_tracked_has_fresh_curves(tmp_path: Path, finished: Job) -> None:
    """The tracker has read what an earlier start left, before the run began without a checkpoint."""
    run = growing(finished, tmp_path, 9)
    with Tracking("tensorboard", [run]):
        wait_until(lambda: (run.folder / CURVES).exists() and bool(list(place(run).glob("events*"))), "it never began")
        rows = made_again(finished, run, folder=False)
    losses = [(event.step, event.value) for event in curves(run).Scalars("train/loss")]
    assert losses == [(step, np.float32(numbers["train/loss"])) for step, numbers in rows]


def test_a_start_without_a_checkpoint_ends_the_curves_before_it_and_a_resumed_one_keeps_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.training.run.CHECKPOINT_EVERY", 2)
    job = tiny_job(tmp_path, "vanilla", cache=cache, steps=3)
    job.folder.mkdir(parents=True)
    mark, steps = job.folder / CURVES, list[int]()
    mark.write_text("{}")
    assert not run_job(job, steps.append, lambda: sum(steps) >= 2)
    assert not mark.exists()
    mark.write_text("{}")
    assert run_job(job)
    assert mark.exists()


def wandb_records(data: bytes) -> list[bytes]:
    """The whole records of a LevelDB log, block by block."""
    records, pieces = [], b""
    for start in range(0, len(data), 1 << 15):
        block = data[start : start + (1 << 15)][0 if start else 7 :]
        while len(block) >= 7 and block[6]:
            size, kind = int.from_bytes(block[4:6], "little"), block[6]
            if len(block) < 7 + size:
                return records
            pieces, block = pieces + block[7 : 7 + size], block[7 + size :]
            if kind in (1, 4):
                records.append(pieces)
                pieces = b""
    return records


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_each_row_once(tmp_path: Path, finished: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = growing(finished, tmp_path)
    in_three_starts("wandb", finished, run)
    files = sorted(run.root.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # the starts that had something new
    assert [offline_step(path) for path in files] == [8, STEPS]
    records = [Record.FromString(data) for path in files for data in wandb_records(path.read_bytes())]
    history = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["_step"], {k: v for k, v in row.items() if not k.startswith("_")}) for row in history] == numbers(run)
    (record,) = {(r.run.run_id, r.run.project, r.run.run_group, r.run.display_name) for r in records if r.HasField("run")}
    assert record[1:] == ("mi-route2", run.root.name, "route2-full seed 0")
    whole = files[1].read_bytes()
    for length in range(7, len(whole), 997):
        files[1].write_bytes(whole[:length])
        seen = [Record.FromString(data) for data in wandb_records(whole[:length])]
        steps = [int(item.value_json) for r in seen for item in r.history.item if list(item.nested_key) == ["_step"]]
        assert offline_step(files[1]) == max(steps, default=-1)


def test_in_wandb_a_run_that_is_made_again_is_another(tmp_path: Path, finished: Job) -> None:
    run = growing(finished, tmp_path)
    ids = []
    for mark in ("first", "second", "first"):
        shown = tracking.Wandb(run)
        shown.mark = mark
        ids.append(shown._id())
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_each_row_once(tmp_path: Path, finished: Job) -> None:
    run = growing(finished, tmp_path)
    script = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "(run,) = S.get_run_records('mi-route2')\nprint(json.dumps(S.get_logs('mi-route2', run['name'], run_id=run['id'])))"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRACKIO_DIR", str(tmp_path / "store"))
        in_three_starts("trackio", finished, run)
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [(log.pop("step"), log.pop("timestamp") and log) for log in json.loads(told)] == numbers(run)
