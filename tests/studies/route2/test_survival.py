"""A run outlives what its machine does to it (kills, short writes, a full disk, damaged files): it ends with the bytes of an
undisturbed run, or says in a sentence why it cannot."""

import errno
import io
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import Parity
from tiny_study import FEW, tiny_chat, tiny_job

import studies.training.run as run_module
from mi_route2.adapters import Adapters
from mi_route2.rollouts import Policy
from mi_route2.routing import Route
from mi_route2.tensor_files import read_tensors, write_tensors
from studies.environments.chat import make_tiny_model
from studies.training.build import build_optimizer, build_route
from studies.training.checkpoint import CHECKPOINT, PREVIOUS, read_checkpoint, resume, save_checkpoint
from studies.training.job import DEPLOYED, EVAL, FULL, Job, build_policy
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, ROLLOUTS, TIMINGS, append
from studies.training.run import run_job
from studies.training.worlds import open_world
from tests.soak.__main__ import Soak
from tests.soak.points import BETWEEN, GENERATION, LOGS, RESULTS, RESUME, SHARES, WRITE
from tests.soak.soak import ENOUGH, Tally, deck
from tests.soak.starts import differences
from tests.soak.trials import FAULTS, SoakError, Stop

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
FROM_PREVIOUS = r"; going on from checkpoint.previous.safetensors, after 2 steps$"


def files(job: Job) -> dict[str, bytes]:
    """Every file of the job's folder by name, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(job.folder.iterdir())}


def contents(job: Job) -> dict[str, bytes]:
    """The same but for the timings."""
    return {name: data for name, data in files(job).items() if name != TIMINGS}


def run_on(job: Job, steps: int | None = None, told: Callable[[int], None] = lambda n: None) -> bool:
    """Run ``job``, or ``steps`` steps of it, with a checkpoint every second step. ``told`` hears of finished steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "CHECKPOINT_EVERY", 2)
        left = iter([False] * steps) if steps is not None else None
        return run_job(job, told, lambda: left is not None and next(left, True))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """A short run on a disk with room, with checkpoints after 2, 4 and 6."""
    job = tiny_job(tmp_path_factory.mktemp("intact"), "route2-full", cache=cache, steps=6, adapt=FEW)
    assert run_on(job)
    return job


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Job:
    """The same run, stopped after 5 steps: the newest checkpoint is of 4, the previous one of 2."""
    job = tiny_job(tmp_path_factory.mktemp("late"), "route2-full", cache=cache, steps=6, adapt=FEW)
    assert not run_on(job, 5)
    assert sorted(contents(job)) == [PREVIOUS, CHECKPOINT, METRICS, ROLLOUTS]
    return job


@pytest.fixture
def stopped(tmp_path: Path, late: Job) -> Job:
    """A copy of ``late``, to be damaged."""
    job = replace(late, root=tmp_path / late.root.name)
    shutil.copytree(late.root, job.root)
    return job


# a full disk


def fill_up(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Every write of a file called (or to be called) ``victim`` fails when it is to reach the disk."""
    true_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if victim in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("victim", [METRICS, ROLLOUTS, CHECKPOINT, TIMINGS, EVAL, FULL, DEPLOYED, MANIFEST])
def test_a_full_disk_leaves_nothing_half_written_and_a_resume_ends_alike(
    stopped: Job, intact: Job, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    before = files(stopped)
    with monkeypatch.context() as patched:
        fill_up(patched, victim)
        with pytest.raises(OSError, match=rf"^could not (cut|append to|write) .*{victim}.*: No space left on device$"):
            run_on(stopped)
    left = files(stopped)
    assert not [name for name in left if name.startswith(".")]
    if victim in (METRICS, ROLLOUTS):  # cut back to the checkpoint, and no further
        assert before[victim].startswith(left[victim])
    else:
        assert left.get(victim) == before.get(victim)
    assert run_on(stopped)
    assert contents(intact) == contents(stopped)


def test_adapters_that_are_not_finite_take_no_good_checkpoint_with_them(
    stopped: Job, intact: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: (stopped.folder / name).read_bytes() for name in (PREVIOUS, CHECKPOINT)}

    def broken(folder: Path, adapters: Adapters, *given: Any, **named: Any) -> None:
        with torch.no_grad():
            next(iter(adapters.quarantine_parameters().values()))[0, 0] = float("nan")
        save_checkpoint(folder, adapters, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "save_checkpoint", broken)
        with pytest.raises(ValueError, match=r"^quarantine\..* holds values that are not finite: nothing was written$"):
            run_on(stopped)
    assert {name: (stopped.folder / name).read_bytes() for name in (PREVIOUS, CHECKPOINT)} == before
    assert run_on(stopped)
    assert contents(intact) == contents(stopped)


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product((METRICS, ROLLOUTS, TIMINGS), ("folder", "link")), (PREVIOUS, "folder")]
)
def test_what_is_in_the_place_of_a_file_is_told_before_training(tmp_path: Path, cache: Path, name: str, kind: str) -> None:
    job = tiny_job(tmp_path, "vanilla", cache=cache, steps=1)
    job.folder.mkdir(parents=True)
    place = job.folder / name
    place.mkdir() if kind == "folder" else place.symlink_to(tmp_path / "gone" / name)
    told: list[int] = []
    with pytest.raises(OSError, match=rf"{name}.*; move away what is in its place$"):
        run_on(job, told=told.append)
    assert told == []


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Context: the kernel lets no file of this process grow beyond ``size`` bytes."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_a_disk_that_really_ends_mid_write(tmp_path: Path, cache: Path, intact: Job) -> None:
    """The kernel takes the bytes up to a limit and refuses the rest: of the pairs, of the log's first block, of a checkpoint."""
    whole = contents(intact)
    limits = {500: "pairs-hack.toml", lines(intact.folder / METRICS, 2) - 1: METRICS, len(whole[METRICS]) + 5000: CHECKPOINT}
    for limit, victim in limits.items():
        job = tiny_job(tmp_path / str(limit), "route2-full", cache=cache, steps=6, adapt=FEW)
        with pytest.raises(OSError, match="File too large") as caught, file_limit(limit):
            run_on(job)
        assert victim in str(caught.value)
        assert not list(job.folder.glob(".*"))
        log = contents(job).get(METRICS, b"")
        assert log == whole[METRICS][: len(log)]
        assert log.endswith(b"\n") or not log
        assert run_on(job)
        assert contents(job) == whole


# writes that take a part


@pytest.mark.parametrize("most", [1, 2, 7])
def test_an_append_goes_on_where_the_system_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    taken: list[int] = []

    class Sparing(io.FileIO):
        def write(self, data: Any) -> int:
            taken.append(super().write(memoryview(data)[:most]))
            return taken[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering=-1: Sparing(path, mode))
        assert append(tmp_path / "log", b"twelve bytes") == 12
    assert (tmp_path / "log").read_bytes() == b"twelve bytes"
    assert len(taken) == -(-12 // most)


def test_an_append_to_a_file_that_takes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(io.FileIO):
        def write(self, data: Any) -> int:
            return 0

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: Stuck(path, mode))
    with pytest.raises(OSError, match=r"^could not append to .*log: Input/output error$"):
        append(tmp_path / "log", b"data")


SPARING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>
ssize_t write(int file, const void *data, size_t size) {
  static ssize_t (*real)(int, const void *, size_t);
  struct stat is;
  if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
  if (size > 1000 && fstat(file, &is) == 0 && S_ISREG(is.st_mode)) size = 1000;
  return real(file, data, size);
}
"""
PROBE = "import os, sys; print(os.write(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), bytes(5000)))"
WHOLE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_study import FEW, tiny_chat, tiny_job
import studies.training.run as j
j.CHECKPOINT_EVERY = 2
j.run_job(tiny_job(Path(sys.argv[2]), "route2-full", cache=Path(sys.argv[3]), steps=6, adapt=FEW))
"""


def child(*args: object, **environment: str) -> str:
    """Run a Python of its own; what it printed."""
    command, own = [sys.executable, *map(str, args)], {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux's LD_PRELOAD")
def test_a_system_that_takes_a_thousand_bytes_at_a_time_changes_nothing(tmp_path: Path, cache: Path, intact: Job) -> None:
    """Every write of every library: logs, JSON, and safetensors' own."""
    (tmp_path / "sparing.c").write_text(SPARING)
    library = tmp_path / "sparing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "sparing.c", "-ldl"], check=True)
    assert child("-c", PROBE, tmp_path / "probe", LD_PRELOAD=str(library)) == "1000\n"
    child("-c", WHOLE, ROOT / "tests" / "support", tmp_path, cache, LD_PRELOAD=str(library))
    job = tiny_job(tmp_path, "route2-full", cache=cache, steps=6, adapt=FEW)
    assert job.finished
    assert contents(job) == contents(intact)


# a damaged checkpoint


@pytest.fixture(scope="module")
def parts(late: Job) -> tuple[Policy, torch.optim.AdamW, Route]:
    """A policy, an optimiser and a route that the late run's checkpoints fit."""
    with open_world(late.settings) as (world, _):
        policy = build_policy(late, late.cache)
        return policy, build_optimizer(late, policy), build_route(late, world, policy)


@pytest.fixture
def load(parts: tuple[Policy, torch.optim.AdamW, Route], late: Job) -> Callable[[Path], int]:
    return lambda path: read_checkpoint(path, parts[0].adapters, identity=late.identity).step


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Path]:
    """Checkpoints that are whole, and not this run's."""
    folder = tmp_path_factory.mktemp("foreign")
    other = tiny_job(folder, "route2-act", cache=cache, steps=6)
    assert not run_on(other, 3)
    write_tensors(folder / "text", {"t": torch.zeros(1)}, {"format": "something else"})
    return {"settings": other.folder / CHECKPOINT, "format": folder / "text"}


DAMAGES: dict[str, tuple[Callable[[Path, dict[str, Path]], object], str]] = {
    "truncated": (lambda path, _: os.truncate(path, 1000), r"checkpoint.safetensors is not a complete safetensors file \(.*\)"),
    "emptied": (lambda path, _: os.truncate(path, 0), r"checkpoint.safetensors is not a complete safetensors file \(.*\)"),
    "changed": (lambda path, _: flip(path), "checkpoint.safetensors is damaged: its content does not match its own checksum"),
    "of another run": (
        lambda path, foreign: shutil.copy(foreign["settings"], path), "checkpoint.safetensors was written under other settings"
    ),
    "of another program": (
        lambda path, foreign: shutil.copy(foreign["format"], path),
        "checkpoint.safetensors is not a checkpoint of this study .format 'something else', expected 'mi-route2 checkpoint 3'.",
    ),
    "ahead of its log": (
        lambda path, _: os.truncate(path.parent / METRICS, lines(path.parent / METRICS, 3)),
        r"metrics.jsonl has \d+ bytes, but checkpoint.safetensors was written after \d+",
    ),
    "with a changed log": (
        lambda path, _: flip(path.parent / METRICS, lines(path.parent / METRICS, 4) - 40),
        r"metrics.jsonl was changed: its first \d+ bytes are not those after which checkpoint.safetensors was written",
    ),
    "with changed rollouts": (
        lambda path, _: flip(path.parent / ROLLOUTS),
        r"rollouts.jsonl.gz was changed: its first \d+ bytes are not those after which checkpoint.safetensors was written",
    ),
}  # fmt: skip


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def lines(path: Path, n: int) -> int:
    """The length of a file's first ``n`` lines."""
    return sum(map(len, path.read_bytes().splitlines(keepends=True)[:n]))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_newest_checkpoint_that_is_no_good_is_reported_and_the_previous_one_used(
    stopped: Job, intact: Job, foreign: dict[str, Path], how: str
) -> None:
    damage, reason = DAMAGES[how]
    damage(stopped.folder / CHECKPOINT, foreign)
    told: list[int] = []
    with pytest.warns(UserWarning, match=reason + FROM_PREVIOUS) as warned:
        assert run_on(stopped, told=told.append)
    assert len(warned) == 1
    assert told[0] == 2
    assert contents(stopped) == contents(intact)


def test_a_log_that_is_changed_while_the_run_goes_on_gets_no_manifest(stopped: Job) -> None:
    def change(step: int) -> None:
        if step == 4:  # what the resume tells first: the checkpoint's own steps
            flip(stopped.folder / METRICS, 40)

    with pytest.raises(
        ValueError, match=r"metrics.jsonl was changed: its first \d+ bytes are not those after which the last checkpoint"
    ):
        run_on(stopped, told=change)
    assert not (stopped.folder / MANIFEST).exists()
    with pytest.raises(ValueError, match=r"metrics.jsonl was changed: .*; .*metrics.jsonl was changed: .* to start anew$"):
        run_on(stopped)


def goes_on_in_silence(stopped: Job, intact: Job) -> None:
    """From the checkpoint after two steps, and to the bytes of ``intact``."""
    told: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_on(stopped, told=told.append)
    assert told[0] == 2
    assert contents(stopped) == contents(intact)


def test_without_a_newest_checkpoint_the_previous_one_is_used_in_silence(stopped: Job, intact: Job) -> None:
    """As a kill between the two renames leaves it."""
    (stopped.folder / CHECKPOINT).unlink()
    goes_on_in_silence(stopped, intact)


def test_a_refused_checkpoint_never_takes_the_place_of_a_good_one(stopped: Job, intact: Job) -> None:
    """The next checkpoint after a refusal fails between its renames; what is left is good."""
    flip(stopped.folder / CHECKPOINT)
    renames: list[str] = []
    true = Path.replace

    def replacing(path: Path, target: Path) -> Path:
        renames.append(target.name)
        if renames.count(CHECKPOINT) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(path, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "replace", replacing)
        with pytest.warns(UserWarning, match=FROM_PREVIOUS):
            with pytest.raises(OSError, match=r"^could not write .*/checkpoint.safetensors: No space left on device$"):
                run_on(stopped)
    assert renames.count(PREVIOUS) == 1
    goes_on_in_silence(stopped, intact)


@pytest.mark.parametrize("only", [False, True])
def test_where_no_checkpoint_is_good_a_sentence_says_so_and_nothing_is_touched(stopped: Job, only: bool) -> None:
    flip(stopped.folder / CHECKPOINT)
    if only:
        (stopped.folder / PREVIOUS).unlink()
    else:
        os.truncate(stopped.folder / PREVIOUS, 1000)
    before = files(stopped)
    with pytest.raises(ValueError, match="is damaged: its content does not match its own checksum") as caught:
        run_job(stopped)
    said = str(caught.value)
    assert said.endswith("; choose another --out, or delete that arm's folder to start anew")
    assert (PREVIOUS in said) == (not only)
    assert len(said.splitlines()) == 1
    assert files(stopped) == before


def test_a_checkpoint_on_other_base_weights_or_adapters_is_refused(
    late: Job, parts: tuple[Policy, torch.optim.AdamW, Route], load: Callable[[Path], int], cache: Path
) -> None:
    narrower = build_policy(tiny_job(late.root, "route2-full", cache=cache, steps=6, adapt=FEW, kept_rank=2), cache)
    with pytest.raises(ValueError, match=r"does not fit the model's adapters, first in adapter\.kept\.blocks\.1"):
        read_checkpoint(late.folder / CHECKPOINT, narrower.adapters, identity=late.identity)
    weight = next(iter(parts[0].adapters.sites.values())).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"was written on other base weights \(hash [0-9a-f]{32}, not [0-9a-f]{32}\)$"):
        load(late.folder / CHECKPOINT)
    weight.data.copy_(before)
    assert load(late.folder / CHECKPOINT) == 4


def test_a_checkpoint_is_put_back_where_the_model_is(late: Job, cache: Path) -> None:
    """On the device of each parameter, whatever the file was read onto."""
    with open_world(late.settings) as (world, _):
        policy = build_policy(late, cache)
        optimiser, route = build_optimizer(late, policy), build_route(late, world, policy)
    checkpoint = read_checkpoint(late.folder / CHECKPOINT, policy.adapters, identity=late.identity)
    policy.model.to("meta")
    checkpoint.restore(policy.adapters, optimiser, route)
    moments = [state[key] for state in optimiser.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * sum(name.startswith("optimiser.step.") for name in checkpoint.tensors) > 0
    assert route.directions is not None
    assert {t.device.type for t in (*moments, *route.directions.vectors.values())} == {"meta"}
    assert {state["step"].device.type for state in optimiser.state.values()} == {"cpu"}


def test_with_no_checkpoint_a_run_begins_anew_and_its_logs_are_empty(
    stopped: Job, parts: tuple[Policy, torch.optim.AdamW, Route]
) -> None:
    for name in (CHECKPOINT, PREVIOUS):
        (stopped.folder / name).unlink()
    policy, optimiser, route = parts
    assert resume(stopped.folder, policy.adapters, optimiser, route, identity=stopped.identity, logs=(METRICS, "none")) == 0
    assert (stopped.folder / METRICS).read_bytes() == b""
    assert not (stopped.folder / "none").exists()


def test_a_checkpoint_cuts_no_file_but_the_runs_own_logs(stopped: Job, parts: tuple[Policy, torch.optim.AdamW, Route]) -> None:
    (stopped.folder / PREVIOUS).unlink(missing_ok=True)
    (other := stopped.folder.parent / "other").write_text("not a log")
    tensors, meta = read_tensors(stopped.folder / CHECKPOINT)
    logs = json.loads(meta["logs"]) | {"../other": 0}
    write_tensors(stopped.folder / CHECKPOINT, tensors, meta | {"logs": json.dumps(logs)})
    policy, optimiser, route = parts
    with pytest.raises(ValueError, match=r"is of the logs metrics.jsonl, rollouts.jsonl.gz, ../other, not of"):
        resume(stopped.folder, policy.adapters, optimiser, route, identity=stopped.identity, logs=(METRICS, ROLLOUTS))
    assert other.read_text() == "not a log"


# the manifest


def test_the_manifest_says_what_made_the_run(intact: Job) -> None:
    manifest = json.loads((intact.folder / MANIFEST).read_text())
    assert manifest["versions"].keys() == {"python", "torch", "numpy", "mi-route2"}
    assert manifest["versions"]["numpy"] == np.__version__
    assert manifest["versions"]["python"] == platform.python_version()
    assert manifest["platform"].keys() == {"system", "machine", "instructions", "processor"}
    assert manifest["platform"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert (manifest["seed"], manifest["settings_hash"]) == (0, intact.settings.digest)
    assert manifest["checksums"].keys() == {METRICS, ROLLOUTS, EVAL, FULL, DEPLOYED}
    assert not {"host", "precision", "pairs_sha256"} & manifest.keys()


def test_the_manifest_names_what_is_unusual(tmp_path: Path, cache: Path, intact: Job) -> None:
    pairs = intact.root / "seed-0" / "pairs-hack.toml"
    job = replace(tiny_job(tmp_path, "vanilla", cache=cache, steps=1, precision="float64"), pairs=pairs)
    assert run_job(job)
    manifest = json.loads((job.folder / MANIFEST).read_text())
    assert manifest["precision"] == "float64"
    assert manifest["pairs_sha256"] == job.pairs_hash
    assert "host" not in manifest


# the soak


def test_the_soak_sees_every_difference_but_timings_and_passing_files(tmp_path: Path) -> None:
    for side in ("a", "b"):
        arm = tmp_path / side / "seed-0" / "vanilla"
        arm.mkdir(parents=True)
        (arm / METRICS).write_text("same")
        (arm / TIMINGS).write_text(side)
        (tmp_path / side / ".lock").write_text(side)
    assert differences(tmp_path / "a", tmp_path / "b") == []
    (arm / METRICS).write_text("other")
    (arm / CHECKPOINT).write_text("left")
    (arm / ".metrics.tmp").write_text("left")
    (tmp_path / "a" / "settings.json").write_text("")
    names = ["seed-0/vanilla/.metrics.tmp", f"seed-0/vanilla/{CHECKPOINT}", f"seed-0/vanilla/{METRICS}", "settings.json"]
    assert differences(tmp_path / "a", tmp_path / "b") == names


@pytest.mark.parametrize("kills", [1, 9, 10, 57, 100, 250])
def test_kills_cover_every_class_of_moments(kills: int) -> None:
    counts = Counter(deck(kills))
    assert counts.total() == kills
    assert len(counts) == min(kills, len(SHARES))
    if kills >= 100:
        assert min(counts[WRITE], counts[BETWEEN]) >= 20


def test_a_soak_without_kills_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Soak(kills=0)() == 2
    assert capsys.readouterr().err == "error: kills must be at least 1 and commands at least 0, not 0 and 12\n"


def test_a_soak_whose_file_could_not_be_written_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tests.soak.soak.scratch_folder")
    for out in (tmp_path, tmp_path / "none" / "soak.json"):
        assert Soak(out=out)() == 2


def test_the_table_counts_kills_and_faults_apart() -> None:
    good = [Stop(WRITE, "byte 3 of x", "erase", True, True), Stop(FAULTS[0], "byte 1 of y", "erase", True, True)]
    text = str(Tally(good, seconds=2.0))
    assert "| inside a checkpoint write |     1 |       1 |                         1 |" in text
    assert text.endswith("soak passed: 1 kills and 1 faults in 2 s")
    bad = Tally([*good, Stop(WRITE, "byte 4 of x", "erase", True, False)], ["a run differs in x"], ["without full disks: no"])
    assert "| inside a checkpoint write |     2 |       2 |                         1 |" in str(bad)
    assert str(bad).endswith("soak failed: 2 kills and 1 faults in 0 s; without full disks: no\na run differs in x")


def test_a_soak_goes_on_after_a_failure_and_stops_after_many() -> None:
    def wrong() -> None:
        raise SoakError("a run differs")

    tally = Tally()
    assert tally.attempt(lambda: 3) == 3
    for _ in range(ENOUGH - 1):
        assert tally.attempt(wrong) is None
    with pytest.raises(SoakError, match="a run differs"):
        tally.attempt(wrong)
    assert tally.failures == ["a run differs"] * ENOUGH


def test_ten_kills_of_every_class_and_the_faults(tmp_path: Path) -> None:
    """The soak itself: jobs that SIGKILL ends in generation, before an update, inside of writes, and so on."""
    out = tmp_path / "soak.json"
    assert "soak passed: 10 kills and " in child("-m", "tests.soak", "--kills", 10, "--commands", 0, "--out", out)
    counts = Counter(stop["where"] for stop in json.loads(out.read_text())["stops"])
    assert {where: n for where, n in counts.items() if where in SHARES} == {**dict.fromkeys(SHARES, 1), WRITE: 2}
    assert {FAULTS[0], FAULTS[2]} <= counts.keys()


TRIALS = """
import json, os, random, sys, tempfile
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
scratch = Path(sys.argv[3])
tempfile.tempdir = str(scratch)
import torch
import tqdm
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0  # no thread that watches bars
import studies.training.checkpoint as checkpoint
import tests.soak.trials
import tests.soak.soak  # what a job loads late is there before the forks
from studies.training.arms import ARMS
from studies.training.job import Job
from studies.training.settings import Settings
from tests.soak.trials import Reference, SoakError, Trials
import transformers.models.qwen3.modeling_qwen3
assert len(os.listdir("/proc/self/task")) == 1  # a fork has no thread but the one that forks
tests.soak.trials.TRIES = 3
for name, (cache, every, asked) in json.loads(sys.argv[4]).items():
    settings = Settings.read(scratch / f"{name}.json")
    reference = Reference.of(Job(scratch / name / "run", Path(cache), settings, 0, ARMS["route2-full"]), every)
    for i, (sabotage, kills) in enumerate(asked):
        sound = dict(vars(checkpoint))
        exec(sabotage)
        trials = Trials([reference], scratch / name / str(i), random.Random(0), every)
        try:
            for targets in kills:
                if targets == ["damaged"]:
                    trials.damaged("cut short")
                else:
                    assert not trials.killed(targets), targets
            print(json.dumps([name, [stop.where for stop in trials.stops]]))
        except SoakError as error:
            print(json.dumps([name, str(error)]))
        vars(checkpoint).update(sound)
"""


KILLS = [[LOGS], [BETWEEN], [WRITE], [RESULTS]]
SABOTAGE = {
    "checkpoint.cut = lambda log, length: None": (KILLS, "a run differs in seed-0/route2-full/manifest.json, "),
    "checkpoint._named = lambda adapters: {}": (KILLS, "a run differs in seed-0/route2-full/adapters.safetensors, "),
    "checkpoint.read_checkpoint = None": (KILLS, "a run did not go on"),
    "checkpoint.PREVIOUS = checkpoint.CHECKPOINT": ([["damaged"]], "no run was stopped with two checkpoints behind it"),
}
"""What is broken, at which kills that is found at the latest, and how."""


MICRO, CHATS = "micro", "chat"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, cache: Path, intact: Job) -> dict[str, list[Any]]:
    """What one process, whose forks are killed, said of its trials: of each the stops, or what went wrong.

    Of runs of ``intact``, each under a sabotage; and of a run on a chat model, whose resume is right.
    """
    folder = tmp_path_factory.mktemp("trials")
    make_tiny_model(Parity(), folder / "tiny", steps=8, width=32, layers=2, batch=8, max_new=16, progress=False)
    settings = tiny_chat(folder / "tiny", evaluation_prompts=4)
    asked = {
        MICRO: (str(cache), 2, [(sabotage, kills) for sabotage, (kills, _) in SABOTAGE.items()]),
        CHATS: (str(folder / "cache"), 1, [("", [[WRITE, RESUME], [GENERATION]])]),
    }
    (scratch := folder / "scratch").mkdir()
    for name, of in {MICRO: intact.settings, CHATS: settings}.items():
        (scratch / f"{name}.json").write_text(json.dumps(of.as_dict()))
    where = (ROOT / "tests" / "support", ROOT / "docs" / "examples", scratch)
    said = child("-c", TRIALS, *where, json.dumps(asked), TOKENIZERS_PARALLELISM="false").splitlines()
    trials: dict[str, list[Any]] = {name: [] for name in asked}
    for name, one in map(json.loads, said):
        trials[name].append(one)
    return trials


def test_the_soak_fails_where_a_resume_is_wrong(told: dict[str, list[Any]]) -> None:
    """And passes where it is right: the test above."""
    for text, (_, found) in zip(told[MICRO], SABOTAGE.values(), strict=True):
        assert found in text


def test_a_killed_run_on_a_chat_model_ends_alike(told: dict[str, list[Any]]) -> None:
    assert told[CHATS] == [[WRITE, RESUME, GENERATION]]


def test_a_steered_run_that_is_stopped_before_a_step_or_was_killed_after_the_last_ends(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, "preventative-2-random", cache=cache)
    assert not run_on(job, 0)
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            run_on(job)
    assert run_on(job)


def killed(*_given: object) -> None:
    raise KeyboardInterrupt
