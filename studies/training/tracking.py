"""Curves of a run in TensorBoard, Weights & Biases or trackio (optional extras), written by a separate process.

Training never waits for the tracker. A step that the tracker has is not written again, whatever stopped the former start. Curves
bear a mark that is kept in the job's folder: a run that goes on from a checkpoint goes on in its curves, and one that was made
again, after its folder was deleted or without a checkpoint, has another mark and begins fresh ones.
"""

import contextlib
import json
import os
import signal
import struct
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from mi_route2.validation import read_object, write_json
from studies.common.processes import locked, start
from studies.training.job import EVAL, Job
from studies.training.manifest import MANIFEST
from studies.training.recorder import CURVES, METRICS, Follower
from studies.training.settings import TRACKER_NAMES

PROJECT = "mi-route2"
BLOCK = 1 << 15
StepRows = list[tuple[int, dict[str, float]]]
"""Steps in order, with the numbers of each."""


def require(name: str) -> None:
    """Check that a tracker is known and installed.

    Raises:
        ValueError: If it is not.
    """
    if name not in TRACKERS:
        raise ValueError(f"unknown tracker {name!r}: choose from {', '.join(TRACKERS)}, or leave --report-to out")
    package = find_spec(name)
    if package is None or package.origin is None:  # without an origin it is only a folder of that name, such as wandb's own runs
        raise ValueError(
            f"--report-to {name} needs a package that is not installed: pip install '{PROJECT}[{name}]', "
            f"or choose another of {', '.join(TRACKERS)}"
        )


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics row by name (``train/loss``, ``modes/run_tests/hack``); ``None`` values are left out."""
    numbers = {name: value for name, value in _numbers(row, "") if name != "step"}
    return {name if "/" in name else f"train/{name}": value for name, value in numbers.items()}


def evaluated(report: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation: ``eval/deploy/run_tests/hack`` with the quarantine deleted, ``eval/on/...`` with it."""
    modes = report["modes"].items()
    return {
        f"eval/{switched}/{mode}/{rate}": float(value)
        for mode, halves in modes
        for switched, rates in halves.items()
        for rate, value in rates.items()
    }


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else key)
    elif isinstance(value, int | float):
        yield name, float(value)


def curves_name(job: Job) -> str:
    """Return the name of a job's curves: ``vanilla/seed-0``."""
    return f"{job.name}/seed-{job.seed}"


def config(job: Job) -> dict[str, Any]:
    """Return the settings that a tracker shows beside the curves."""
    return {"seed": job.seed, "arm": job.spec, "settings": job.settings.as_dict()}


def marked(job: Job) -> str | None:
    """Return the mark of the curves that a job's run began; ``None`` if it has begun none."""
    path = job.folder / CURVES
    return str(read_object(path, "delete it, and curves begin anew").get("mark")) if path.exists() else None


class Curves(ABC):
    """Curves of one arm at one seed in a tracker, which is opened only if there is a row that it lacks."""

    def __init__(self, job: Job):
        self.job = job
        self.opened: Any = None
        """The library's run or writer."""
        self.finish: Callable[[], object] = lambda: None
        """Writes what is left."""
        self.mark = ""
        """Mark of the run that the rows are of; empty before the first row."""
        self._last: int | None = None

    @staticmethod
    @abstractmethod
    def notice(root: Path) -> str:
        """Return a sentence that says where the curves of a run folder can be seen."""

    @abstractmethod
    def known(self) -> int:
        """Return the highest step that former starts left where it can be read without opening; -1 if none."""

    @abstractmethod
    def open(self) -> int:
        """Fill ``opened`` and ``finish``; return the highest step that the tracker says it has, -1 if none."""

    @abstractmethod
    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Add one row."""

    @final
    @property
    def outdated(self) -> bool:
        """True if the job's run began anew since these curves got a row."""
        return bool(self.mark) and marked(self.job) != self.mark

    @final
    def add(self, rows: StepRows) -> None:
        """Add the rows that the tracker lacks."""
        if self._last is None:
            self.mark = marked(self.job) or uuid.uuid4().hex[:12]
            if marked(self.job) is None:
                write_json(self.job.folder / CURVES, {"mark": self.mark})
            self._last = self.known()
        if self.opened is None and any(step > self._last for step, _ in rows):
            self._last = max(self._last, self.open())
        for step, numbers in rows:
            if step > self._last:
                self.log(step, numbers)
                self._last = step


class TensorBoard(Curves):
    """Event files in the run folder. A row is one event, because a kill could leave half of several."""

    @staticmethod
    def notice(root: Path) -> str:
        return f"curves: tensorboard --logdir {root / 'tensorboard'}"

    @property
    def folder(self) -> Path:
        return self.job.root / "tensorboard" / curves_name(self.job)

    def known(self) -> int:
        """Read the event files, a truncated one to its last complete row; those of a run that was made again since are deleted.

        Raises:
            ValueError: They are of a run under other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        reader = import_module("tensorboard.backend.event_processing.event_accumulator")
        events = reader.EventAccumulator(str(self.folder), {reader.SCALARS: 0})  # 0: all of them
        tags = events.Reload().Tags()
        texts = {
            tag: {event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)} if tag in tags["tensors"] else set()
            for tag in ("identity", "mark")
        }
        if texts["identity"] - {self.job.identity}:
            raise ValueError(f"{self.folder} holds the curves of another run; delete that folder")
        if texts["identity"] and texts["mark"] != {self.mark}:
            for path in self.folder.glob("events.out.tfevents.*"):
                path.unlink()
            return -1
        return max((event.step for tag in tags["scalars"] for event in events.Scalars(tag)), default=-1)

    def open(self) -> int:
        from torch.utils.tensorboard import FileWriter  # needs the extra

        self.opened = FileWriter(str(self.folder))
        self.finish = self.opened.close
        return -1

    def log(self, step: int, numbers: dict[str, float]) -> None:
        row = import_module("tensorboard.compat.proto.summary_pb2").Summary()
        for tag, value in numbers.items():
            row.value.add(tag=tag, simple_value=value)
        if self._last == -1:  # in the first row's event, so that no kill parts them
            text = import_module("tensorboard.plugins.text.summary_v2").text_pb
            row.MergeFrom(text("config", "```json\n" + json.dumps(config(self.job), indent=2) + "\n```"))
            row.MergeFrom(text("identity", self.job.identity))
            row.MergeFrom(text("mark", self.mark))
        self.opened.add_summary(row, step)
        self.opened.flush()


class Wandb(Curves):
    """Runs of wandb: offline, unless ``WANDB_MODE`` says otherwise or the user is logged in.

    ``wandb/ids.json`` in the run folder stores each run's id. The last step is read from wandb's files offline, and from the server
    online.
    """

    @staticmethod
    def notice(root: Path) -> str:
        notice = f"wandb project {PROJECT}, group {root.name}"
        if wandb_mode() == "offline":
            notice += f", kept offline: wandb sync uploads the folders {wandb_folder(root)}/wandb/offline-run-*"
        return notice

    def known(self) -> int:
        files = wandb_folder(self.job.root).glob(f"wandb/offline-run-*-{self._id()}/*.wandb")
        return max((offline_step(path) for path in files), default=-1)

    def _id(self) -> str:
        """Return the run's id; create and store one if it has none."""
        path, key = self.job.root / "wandb" / "ids.json", f"{curves_name(self.job)} {self.job.identity} {self.mark}"
        ids = read_object(path, "delete it, and curves begin anew") if path.exists() else {}
        if key not in ids:
            ids[key] = uuid.uuid4().hex[:12]
            path.parent.mkdir(exist_ok=True)
            write_json(path, ids)
        return ids[key]

    def open(self) -> int:
        wandb = import_module("wandb")
        self.opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=self.job.root.name,
            name=f"{self.job.name} seed {self.job.seed}",
            id=self._id(),
            config=config(self.job),
            dir=str(wandb_folder(self.job.root)),
            mode=wandb_mode(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self.finish = self.opened.finish
        return self.opened.step - 1

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.opened.log(numbers, step=step, commit=True)


def wandb_mode() -> str:
    """Return ``WANDB_MODE``; without it, ``online`` if the user is logged in, otherwise ``offline``."""
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    return "online" if import_module("wandb").login(prompt=False, verify=False) else "offline"


def wandb_folder(root: Path) -> Path:
    """Return the folder in which wandb makes its own folder ``wandb``."""
    return Path(os.environ.get("WANDB_DIR") or root)


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
            row = record.FromString(whole).history.item
            last = max([last, *(int(item.value_json) for item in row if "_step" in (item.key, *item.nested_key))])
        whole = b"" if kind in (1, 4) else whole
    return last


class Trackio(Curves):
    """Runs in trackio's local store (``TRACKIO_DIR``), which is asked for the last step."""

    @staticmethod
    def notice(root: Path) -> str:
        return f"curves: trackio show --project {PROJECT}"

    def known(self) -> int:
        return -1

    def open(self) -> int:
        job = self.job
        self.opened = Context().run(  # in its own context, otherwise it would end the run that was opened before
            import_module("trackio").init,
            project=PROJECT,
            name=f"{job.root.name} {job.name} seed {job.seed} {job.identity[:8]} {self.mark}",
            group=job.root.name,
            config=config(job),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.finish = self.opened.finish
        return self.opened._next_step - 1

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.opened.log(numbers, step=step)


TRACKERS: Mapping[str, type[Curves]] = MappingProxyType(dict(zip(TRACKER_NAMES, (TensorBoard, Wandb, Trackio), strict=True)))


EVERY = 1.0  # seconds between two reads of the files
PATIENCE, HURRY = 60.0, 10.0  # seconds without a message after which a tracker is killed, if the run has ended or was stopped
QUIET, ENDS_ITSELF = 3.0, 3.0  # seconds before the user is told about the wait; seconds to clean up after the last message
LOCKED = 15.0  # seconds to wait for the tracker of an earlier start


class Tracking:
    """Parent's side of the tracker's process: ``link`` to wait on, and ``hear`` to read its messages.

    As a context it ends the process.
    """

    def __init__(self, name: str, jobs: list[Job]):
        self._name = name
        self._process, self.link = start(_serve, name, jobs)
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


def _serve(link: Connection, name: str, jobs: list[Job]) -> None:
    """Run the tracker's process: follow the jobs until any message, or the end, comes through the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:  # banners of libraries would break the terminal's table
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    ending: tuple[str, str | None] = ("end", None)
    try:
        root = jobs[0].root
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".tracking", f"another process is still tracking {root}", LOCKED):  # it may outlive its killed parent
            _send(link, "notice", TRACKERS[name].notice(root))
            _follow(link, [TRACKERS[name](job) for job in jobs])
    except (Exception, SystemExit) as error:  # no error of a tracker may disturb the run
        why = str(error) if isinstance(error, ValueError | OSError) and str(error) else f"{type(error).__name__}: {error}"
        ending = ("end", _stopped(name, " ".join(why.split())))
    _send(link, *ending)


def _send(link: Connection, kind: str, text: str | None) -> None:
    with contextlib.suppress(OSError):  # the parent is gone; remaining rows are still written
        link.send((kind, text))


def _follow(link: Connection, unfinished: list[Curves]) -> None:
    followers = {curves.job: Follower(curves.job.folder / METRICS) for curves in unfinished}
    last_look = False
    try:
        while unfinished and not last_look:
            last_look = link.poll(EVERY)
            for curves in list(unfinished):
                job = curves.job
                if curves.outdated:
                    curves.finish()
                    before, curves = curves, type(curves)(job)
                    unfinished[unfinished.index(before)] = curves
                    followers[job] = Follower(job.folder / METRICS)
                finished = (job.folder / MANIFEST).exists()  # checked before the rows are read, so that no row is missed
                rows: StepRows = [(row["step"], scalars(row)) for row in followers[job].read()]
                if finished:
                    rows.append((job.steps, evaluated(json.loads((job.folder / EVAL).read_text()))))
                if not rows:
                    continue
                curves.add(rows)
                if finished:
                    unfinished.remove(curves)
                    curves.finish()
                _send(link, "alive", None)
    finally:
        for curves in unfinished:
            curves.finish()
            _send(link, "alive", None)
