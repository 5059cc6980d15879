"""Curves of a run in TensorBoard, Weights & Biases or trackio, by a process that training does not know.

The tracker's process reads the files that the workers write. Training never waits for it: a tracker that fails costs a warning, and
``metrics.jsonl`` has every row in any case. When the run ends, or its parent dies, it takes what is left and closes its logs.
"""

import contextlib
import json
import os
import signal
import sys
from multiprocessing.connection import Connection

from studies.route2.follow import Follower, Tracked, evaluated, scalars
from studies.route2.processes import locked, start
from studies.route2.trackers import TRACKERS, Log, Rows, Tracker

EVERY = 1.0  # seconds between two looks at the files
PATIENCE, HURRY = 60.0, 10.0  # seconds without a sign of life that end a tracker once the run has ended, or was stopped
QUIET, ENDS_ITSELF = 3.0, 3.0  # seconds before the user is told of the wait; seconds to tidy up after the last word
LOCKED = 15.0  # seconds to wait for an earlier start's tracker


class Tracking:
    """The parent's side: ``link`` to wait on, ``hear`` what came down it. A ``with`` block ends the process."""

    def __init__(self, name: str, runs: list[Tracked]):
        self._name = name
        self._process, self.link = start(_serve, name, runs)
        self._ended = False

    def __enter__(self) -> "Tracking":
        return self

    def hear(self) -> list[str]:
        """What the tracker has to say to the user by now; never waits. After its end, the link is closed."""
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
        """Let it finish while it gets on; then kill it."""
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
    """The tracker's process: follow the runs until something, or the end, comes down the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nowhere:  # banners would run into the terminal's table
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    ending: tuple[str, str | None] = ("end", None)
    try:
        root = runs[0].root
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".tracking", f"another process is still tracking {root}", LOCKED):  # one that outlived its killed parent
            tracker = TRACKERS[name](root)
            _send(link, "notice", tracker.notice)
            _follow(link, tracker, runs)
    except (Exception, SystemExit) as error:  # whatever a tracker does, it is no reason to disturb the run
        why = str(error) if isinstance(error, ValueError | OSError) and str(error) else f"{type(error).__name__}: {error}"
        ending = ("end", _stopped(name, " ".join(why.split())))
    _send(link, *ending)


def _send(link: Connection, kind: str, text: str | None) -> None:
    with contextlib.suppress(OSError):  # the parent is gone; what is left is still written
        link.send((kind, text))


def _follow(link: Connection, tracker: Tracker, runs: list[Tracked]) -> None:
    followers = {run.key: Follower(run.metrics) for run in runs}
    logs: dict[str, Log] = {}
    left, last_look = list(runs), False
    try:
        while left and not last_look:
            last_look = link.poll(EVERY)
            for run in list(left):
                finished = run.manifest.exists()  # asked first: the rows that are read then are all
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
