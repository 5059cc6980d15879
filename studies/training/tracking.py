"""Curves of a run in TensorBoard, Weights & Biases or trackio (optional extras), written by a separate process.

Training never waits for the tracker.
"""

import contextlib
import json
import os
import signal
import struct
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextvars import Context
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from mi_route2.validation import read_object, write_json
from studies.common.processes import locked, start
from studies.training.progress import Follower, Tracked, evaluated, scalars
from studies.training.settings import TRACKER_NAMES

PROJECT = "mi-route2"
BLOCK = 1 << 15
Rows = list[tuple[int, dict[str, float]]]
"""Steps in order, with the numbers of each."""


@runtime_checkable
class Log(Protocol):
    """One arm at one seed in a tracker. ``last`` is the highest step that it has, -1 if none."""

    last: int

    def add(self, rows: Rows) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """Protocol of trackers. ``notice`` is a sentence that says where the curves can be seen."""

    notice: str

    def open(self, run: Tracked) -> Log: ...


def require(name: str) -> None:
    """Check that a tracker is known and installed.

    Raises:
        ValueError: If it is not.
    """
    if name not in TRACKERS:
        raise ValueError(f"unknown tracker {name!r}: choose from {', '.join(TRACKERS)}, or leave --report-to out")
    found = find_spec(name)
    if found is None or found.origin is None:  # without an origin it is only a folder of that name, such as wandb's own runs
        raise ValueError(
            f"--report-to {name} needs a package that is not installed: pip install '{PROJECT}[{name}]', "
            f"or choose another of {', '.join(TRACKERS)}"
        )


class TensorBoard:
    """Tracker that writes event files in the run folder. A row is one event; existing rows are read back from the files."""

    def __init__(self, root: Path):
        self._folder = root / "tensorboard"
        self.notice = f"curves: tensorboard --logdir {self._folder}"

    def open(self, run: Tracked) -> Log:
        return _Events(self._folder / run.key, run)


class _Events:
    def __init__(self, folder: Path, run: Tracked):
        self._folder, self._run = folder, run
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._tensor = import_module("tensorboard.util.tensor_util").make_tensor_proto
        self._writer: Any = None
        self.last, self._identity = self._read()
        if self._identity not in (None, run.identity):
            raise ValueError(f"{folder} holds the curves of another run; delete that folder")

    def _read(self) -> tuple[int, str | None]:
        """Return the last step and the identity that earlier starts wrote; a truncated file ends at its last complete record."""
        loader = import_module("tensorboard.backend.event_processing.event_file_loader").LegacyEventFileLoader
        last, identity = -1, None
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in loader(str(path)).Load():
                texts = {v.tag: v.tensor.string_val[0].decode() for v in event.summary.value if v.tensor.string_val}
                identity = texts.get("identity", identity)
                if event.summary.value and not texts:
                    last = max(last, event.step)
        return last, identity

    def _open(self) -> Any:
        writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(self._folder))
        if self._identity is None:
            config = "```json\n" + json.dumps(self._run.config, indent=2) + "\n```"
            writer.add_event(self._made(0, [self._text("config", config), self._text("identity", self._run.identity)]))
        return writer

    def _text(self, tag: str, text: str) -> Any:
        return self._summary.Value(tag=tag, metadata={"plugin_data": {"plugin_name": "text"}}, tensor=self._tensor([text]))

    def _made(self, step: int, values: list[Any]) -> Any:
        return self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))

    def add(self, rows: Rows) -> None:
        self._writer = self._writer or self._open()
        for step, numbers in rows:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            self._writer.add_event(self._made(step, values))
            self.last = step
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """Tracker for wandb: offline, unless ``WANDB_MODE`` says otherwise or the user is logged in.

    ``wandb/ids.json`` in the run folder stores each run's id. The last step is read from wandb's files offline, and from the server
    online.
    """

    def __init__(self, root: Path):
        self._wandb, self._root, self._ids = import_module("wandb"), root, root / "wandb" / "ids.json"
        self._mode = None if "WANDB_MODE" in os.environ else self._usual()
        self._place = Path(os.environ.get("WANDB_DIR") or root)
        self.notice = f"wandb project {PROJECT}, group {root.name}"
        if (self._mode or os.environ["WANDB_MODE"]) == "offline":
            self.notice += f", kept offline: wandb sync uploads the folders {self._place}/wandb/offline-run-*"

    def _usual(self) -> str:
        return "online" if self._wandb.login(prompt=False, verify=False) else "offline"

    def _id(self, run: Tracked) -> str:
        """Return the run's id; create and store one if it has none."""
        known = read_object(self._ids, "delete it, and curves begin anew") if self._ids.exists() else {}
        key = f"{run.key} {run.identity}"
        if key not in known:
            self._ids.parent.mkdir(exist_ok=True)
            write_json(self._ids, known | {key: uuid.uuid4().hex[:12]})
            return self._id(run)
        return known[key]

    def open(self, run: Tracked) -> Log:
        identifier = self._id(run)
        files = self._place.glob(f"wandb/offline-run-*-{identifier}/*.wandb")
        return _WandbLog(lambda: self._begin(run, identifier), max((offline_step(path) for path in files), default=-1))

    def _begin(self, run: Tracked, identifier: str) -> Any:
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=self._root.name,
            name=f"{run.arm} seed {run.seed}",
            id=identifier,
            config=run.config,
            dir=str(self._place),
            mode=self._mode,
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )


class _WandbLog:
    def __init__(self, begin: Callable[[], Any], last: int):
        self.last, self._begin, self._run = last, begin, None
        self._start = 0

    def add(self, rows: Rows) -> None:
        if self._run is None:
            self._run = self._begin()
            self._start = self._run.step
        for step, numbers in rows:
            if step >= self._start:
                self._run.log(numbers, step=step, commit=True)
            self.last = step

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def offline_step(path: Path) -> int:
    """Return the last step in a file that wandb wrote offline, -1 if none.

    The format is LevelDB's log: after a header of seven bytes, blocks of 32 KiB with pieces of records; before each piece a
    checksum, its length and its kind (1 whole, 2 first, 3 middle, 4 last). A truncated file ends at its last complete record.
    """
    record, last, whole = import_module("wandb.proto.wandb_internal_pb2").Record, -1, b""
    data, at = path.read_bytes(), 7
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        room = BLOCK - at % BLOCK
        if room < 7 or kind == 0:  # unused bytes at the end of a block
            at += room
            continue
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4) and at <= len(data):
            found = record.FromString(whole)
            last = max([last, *(int(item.value_json) for item in found.history.item if "_step" in (item.key, *item.nested_key))])
        whole = b"" if kind in (1, 4) else whole
    return last


class Trackio:
    """Tracker for trackio's local store (``TRACKIO_DIR``), which is queried for the last step."""

    def __init__(self, root: Path):
        self._trackio, self._group = import_module("trackio"), root.name
        self.notice = f"curves: trackio show --project {PROJECT}"

    def open(self, run: Tracked) -> Log:
        opened = Context().run(  # in its own context, otherwise it would end the run that was opened before
            self._trackio.init,
            project=PROJECT,
            name=f"{self._group} {run.arm} seed {run.seed} {run.identity[:8]}",
            group=self._group,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return _TrackioLog(opened)


class _TrackioLog:
    def __init__(self, run: Any):
        self._run, self.last = run, run._next_step - 1

    def add(self, rows: Rows) -> None:
        for step, numbers in rows:
            self._run.log(numbers, step=step)
            self.last = step

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = MappingProxyType(
    dict(zip(TRACKER_NAMES, (TensorBoard, Wandb, Trackio), strict=True))
)


EVERY = 1.0  # seconds between two reads of the files
PATIENCE, HURRY = 60.0, 10.0  # seconds without a message after which a tracker is killed, if the run has ended or was stopped
QUIET, ENDS_ITSELF = 3.0, 3.0  # seconds before the user is told about the wait; seconds to clean up after the last message
LOCKED = 15.0  # seconds to wait for the tracker of an earlier start


class Tracking:
    """Parent's side of the tracker's process: ``link`` to wait on, and ``hear`` to read its messages.

    As a context it ends the process.
    """

    def __init__(self, name: str, runs: list[Tracked]):
        self._name = name
        self._process, self.link = start(_serve, name, runs)
        self._ended = False

    def __enter__(self) -> "Tracking":
        return self

    def hear(self) -> list[str]:
        """Return the tracker's messages to the user so far, without waiting. After its end, the link is closed."""
        said: list[str] = []
        try:
            while not self.link.closed and self.link.poll():
                kind, text = self.link.recv()
                self._ended |= kind == "end"
                said += [text] if text else []
        except (EOFError, ConnectionError):
            self.link.close()
            if not self._ended:
                said.append(_stopped(self._name, "its process died"))
        return said

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait while the tracker makes progress, then kill it."""
        patience = PATIENCE if kind is None else HURRY
        try:
            with contextlib.suppress(OSError):
                self.link.send(None)
            if not self.link.closed and not self.link.poll(min(QUIET, patience)):
                _tell(f"{self._name} takes the last rows (this ends after {patience:.0f} s without a sign of life)")
            while not self.link.closed:
                if not self.link.poll(patience):
                    _tell(_stopped(self._name, f"it gave no sign of life for {patience:.0f} s"))
                    break
                for text in self.hear():
                    _tell(text)
            self._process.join(ENDS_ITSELF)
        finally:
            self._process.kill()
            self._process.join()
            self.link.close()


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _stopped(name: str, why: str) -> str:
    return f"warning: {name} stopped ({why}); metrics.jsonl has every row, and the same command adds to {name} what it lacks"


def _serve(link: Connection, name: str, runs: list[Tracked]) -> None:
    """Run the tracker's process: follow the runs until any message, or the end, comes through the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:  # banners of libraries would break the terminal's table
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    ending: tuple[str, str | None] = ("end", None)
    try:
        root = runs[0].root
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".tracking", f"another process is still tracking {root}", LOCKED):  # it may outlive its killed parent
            tracker = TRACKERS[name](root)
            _send(link, "notice", tracker.notice)
            _follow(link, tracker, runs)
    except (Exception, SystemExit) as error:  # no error of a tracker may disturb the run
        why = str(error) if isinstance(error, ValueError | OSError) and str(error) else f"{type(error).__name__}: {error}"
        ending = ("end", _stopped(name, " ".join(why.split())))
    _send(link, *ending)


def _send(link: Connection, kind: str, text: str | None) -> None:
    with contextlib.suppress(OSError):  # the parent is gone; remaining rows are still written
        link.send((kind, text))


def _follow(link: Connection, tracker: Tracker, runs: list[Tracked]) -> None:
    followers = {run.key: Follower(run.metrics) for run in runs}
    logs: dict[str, Log] = {}
    left, last_look = list(runs), False
    try:
        while left and not last_look:
            last_look = link.poll(EVERY)
            for run in list(left):
                finished = run.manifest.exists()  # checked before the rows are read, so that no row is missed
                rows: Rows = [(row["step"], scalars(row)) for row in followers[run.key].read()]
                if finished:
                    rows.append((run.steps, evaluated(json.loads(run.evaluation.read_text()))))
                if not rows:
                    continue
                log = logs.get(run.key) or logs.setdefault(run.key, tracker.open(run))
                if new := [row for row in rows if row[0] > log.last]:
                    log.add(new)
                if finished:
                    logs.pop(run.key).close()
                    left.remove(run)
                _send(link, "alive", None)
    finally:
        for log in logs.values():
            log.close()
            _send(link, "alive", None)
