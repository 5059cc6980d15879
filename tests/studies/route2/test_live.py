"""The live table of a run on the screen of a terminal emulator: it fits, it is right, and it leaves nothing behind."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Parity
from rich.console import Console
from tiny_study import WARM, overrides, tiny_chat, tiny_job

import studies.training.progress as live
import studies.training.schedule as schedule
from studies.environments.chat import make_tiny_model
from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import settings_hash
from studies.training.arms import ARMS, MAIN
from studies.training.job import Job
from studies.training.progress import Bar, JobGrid, Pace, clock, open_display
from studies.training.recorder import METRICS
from studies.training.settings import get_settings

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]


class Terminal:
    """A window of ``width`` by ``height``: what is written to ``file`` shows on its screen."""

    def __init__(self, width: int, height: int):
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=width, height=height, highlight=False)

    def lines(self) -> list[str]:
        """The screen, without the empty lines at its end."""
        self.feed(self.file.getvalue().encode())
        self.file.seek(0)
        self.file.truncate()
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip("\n").split("\n")

    def feed(self, data: bytes) -> None:
        self._stream.feed(data.replace(b"\n", b"\r\n") if b"\r\n" not in data else data)


def log(job: Job, rows: int) -> None:
    """Let the job have a log of that many steps; step i hacks at .i0 and solves at 1."""
    job.folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"step": i, "hack": i / 10, "solve": 1.0}) + "\n" for i in range(rows))
    (job.folder / METRICS).write_text(text)


def jobs_in(root: Path, arms: tuple[str, ...], seeds: int) -> list[Job]:
    return [tiny_job(root, arm, seed=seed, steps=10) for seed in range(seeds) for arm in ("base", *arms)]


def draw(grid: JobGrid) -> None:
    grid._drawn = 0.0
    grid.tick()


# the table


def test_runs_of_two_presets_that_share_a_name_are_two_rows(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / preset, tmp_path, get_settings(preset), 0, ARMS["vanilla"]) for preset in ("strong", "strong-30k")]
    window = Terminal(100, 20)
    grid = JobGrid(jobs, jobs, window.console)
    with grid:
        grid.began(jobs[1])
        draw(grid)
        rows = [line.split() for line in window.lines()[1:3]]
    assert rows == [["vanilla", "(strong)", "0", "waiting", "0/80"], ["vanilla", "(strong-30k)", "0", "running", "0/80"]]


def test_the_table_says_what_each_job_is_at_and_takes_itself_away(tmp_path: Path) -> None:
    base, vanilla, absorb, erase = jobs = jobs_in(tmp_path, ("vanilla", "absorb", "erase"), 1)
    log(vanilla, 6)
    log(erase, 10)
    window = Terminal(100, 20)
    window.feed(b"before\n")
    grid = JobGrid(jobs, [base, vanilla, absorb], window.console)
    with grid:
        draw(grid)
        first = window.lines()
        assert [line.split() for line in first[:6]] == [
            ["before"],
            ["arm", "seed", "step", "hack", "solve", "speed"],
            ["base", "0", "waiting"],
            ["vanilla", "0", "waiting", "0/10", ".50", "1.00"],
            ["absorb", "0", "waiting", "0/10"],
            ["erase", "0", "finished", "10/10", ".90", "1.00"],
        ]
        assert first[6].split() == ["3", "waiting", "1", "finished"]
        assert "10/31 steps" in first[7]
        assert first[7].endswith("ETA -:--:--")
        assert len(first) == 8
        grid.began(base)
        grid.warmed(base, 3)
        draw(grid)
        assert window.lines()[2].split() == ["base", "0", "running", f"3/{base.settings.warm.steps}"]
        grid.moved(base, 1)
        grid.ended(base, None)
        grid.began(vanilla)
        grid.moved(vanilla, 4)  # an earlier start's steps
        draw(grid)
        assert window.lines()[3].split() == ["vanilla", "0", "running", "4/10", ".50", "1.00"]
        log(vanilla, 8)
        grid.moved(vanilla, 4)
        grid.began(absorb)
        time.sleep(0.02)
        draw(grid)
        moved = window.lines()
        assert moved[3].split()[:6] == ["vanilla", "0", "running", "8/10", ".70", "1.00"]
        assert float(moved[3].split()[6].removesuffix("/s")) > 0
        assert "19/31 steps" in moved[7]
        assert "/s  ETA 0:0" in moved[7]
        grid.say("a warning")
        grid.ended(absorb, "absorb at seed 0 failed: it broke")
        draw(grid)
        said = window.lines()
        assert said[:2] == ["before", "a warning"]
        assert said[5].split() == ["absorb", "0", "failed", "0/10"]
        assert said[7] == "absorb at seed 0 failed: it broke"
        assert said[8].split() == ["1", "running", "2", "finished", "1", "failed"]
    assert window.lines() == ["before", "a warning"]
    assert window.screen.cursor.y == 2
    assert not window.screen.cursor.hidden
    assert not window.screen.history.top


def test_arms_by_seeds_where_a_row_for_each_job_does_not_fit(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, ("vanilla", "absorb"), 5)
    log(jobs[1], 3)
    log(jobs[4], 3)
    shown = {}
    for width in (200, 80, 70, 60):
        window = Terminal(width, 12)
        grid = JobGrid(jobs, jobs[4:], window.console)
        with grid:
            grid.began(jobs[4])
            grid.moved(jobs[4], 2)
            draw(grid)
            shown[width] = [" ".join(line.split()) for line in window.lines()]
    assert shown[200][0] == "arm seed 0 seed 1 seed 2 seed 3 seed 4"
    assert shown[200][2] == "vanilla done hack .20 solve 1.00 2/10 hack .20 solve 1.00 - - -"
    assert shown[80][0] == "hack/solve seed 0 seed 1 seed 2 seed 3 seed 4"
    assert shown[80][2] == "vanilla done .20/1.00 2/10 .20/1.00 - - -"
    assert shown[80][4:6] == ["arm seed step hack solve speed", "vanilla 1 running 2/10 .20 1.00"]
    assert shown[60][2] == "vanilla done .20 2/10 .20 - - -"
    assert shown[70][2] in (shown[80][2], shown[60][2])


@given(
    width=st.integers(live.SMALLEST[0], 220),
    height=st.integers(live.SMALLEST[1], 60),
    arms=st.integers(1, len(MAIN)),
    seeds=st.integers(1, 9),
    states=st.lists(st.sampled_from(["waiting", "running", "finished", "failed"]), min_size=1, max_size=20),
)
@settings(max_examples=12)
def test_every_window_is_filled_and_never_overrun(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, arms: int, seeds: int, states: list[str]
) -> None:
    """Nothing scrolls, nothing wraps, the counts and the overall line are always there, and after the end nothing is."""
    root = tmp_path_factory.getbasetemp()
    jobs = jobs_in(root, MAIN[:arms], seeds)
    window = Terminal(width, height)
    grid = JobGrid(jobs, jobs, window.console)
    with grid:
        for job, state in zip(jobs, states):
            if state != "waiting":
                grid.began(job)
                grid.moved(job, 0)
                grid.moved(job, 1)
            if state in ("finished", "failed"):
                grid.ended(job, f"{job.name} at seed {job.seed} failed: " + "why " * 40 if state == "failed" else None)
            draw(grid)
        lines = window.lines()
        assert f"/{sum(map(live.units, jobs))} steps" in lines[-1]
        assert all(f"{states[: len(jobs)].count(state)} {state}" in lines[-2] for state in set(states[: len(jobs)]) - {"waiting"})
        assert len(lines) < height
    assert window.lines() == [""]
    assert not window.screen.history.top


def test_a_window_that_shrinks_gets_less(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, ("vanilla", "absorb", "erase"), 1)
    window = Terminal(100, 20)
    grid = JobGrid(jobs, jobs, window.console)
    grid.began(jobs[1])
    # all jobs; the one that runs; counts and the overall line; the overall line
    for height, rows in ((20, 5 + 2), (8, 5 + 2), (7, 2 + 2), (5, 2 + 2), (4, 2), (3, 2), (2, 1), (1, 1)):
        window.console.height = height
        assert len(window.console.render_lines(grid, pad=False)) == rows


def test_speed_is_a_mean_over_the_last_minute() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.speed() == 0.0
    for second in range(200):
        now[0] = second
        pace.add(3 if second < 100 else 1)
    now[0] = 200.0
    assert pace.speed() == pytest.approx(1.0)
    assert pace.elapsed == 200.0
    now[0] = 300.0
    assert pace.speed() == 0.0
    assert [clock(s) for s in (0.0, 61.9, 3723.0)] == ["0:00:00", "0:01:01", "1:02:03"]


# where there is the bar instead


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_where_there_is_no_terminal_or_no_room_or_no_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_in(tmp_path, ("vanilla",), 1)
    for terminal, size, term, wanted, kind in (
        (True, (100, 30), "xterm", True, JobGrid),
        (False, (100, 30), "xterm", True, Bar),
        (True, (live.SMALLEST[0] - 1, 30), "xterm", True, Bar),
        (True, (100, live.SMALLEST[1] - 1), "xterm", True, Bar),
        (True, (100, 30), "dumb", True, Bar),
        (True, (100, 30), "xterm", False, Bar),
    ):
        monkeypatch.setattr(sys, "stderr", Tty() if terminal else io.StringIO())
        for name, value in zip(("COLUMNS", "LINES", "TERM"), (*map(str, size), term)):
            monkeypatch.setenv(name, value)
        display = open_display(jobs, jobs, live=wanted)
        assert isinstance(display, kind), (terminal, size, term, wanted)
        assert isinstance(open_display(jobs, jobs, quiet=True), Bar)


# workers that wait for nothing that they need not


class Warmed(Bar):
    """A display that keeps which step of its own training a base model had."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.steps: list[tuple[Path, int]] = []

    def warmed(self, job: Job, steps: int) -> None:
        self.steps.append((job.folder, steps))


def test_arms_start_once_the_warm_start_is_there(tmp_path: Path, cache: Path) -> None:
    """While the base job goes on to its evaluation."""
    base, vanilla = [tiny_job(tmp_path, arm, cache=cache) for arm in (None, "vanilla")]
    begun = threading.Event()
    told: list[str] = []

    def first(link: Connection) -> None:
        told.append(link.recv().name)
        link.send(("base", 7))
        link.send(("warm", None))
        told.append(f"the arm began: {begun.wait(20)}")
        link.send(("done", None))

    def second(link: Connection) -> None:
        told.append(link.recv().name)
        begun.set()
        link.send(("done", None))

    ends = [Pipe() for _ in range(2)]
    crew = [schedule._Worker(_Nobody(), near) for near, _ in ends]
    acts = [threading.Thread(target=act, args=(far,)) for act, (_, far) in zip((first, second), ends)]
    for act in acts:
        act.start()
    shown = Warmed([base, vanilla], [], quiet=True)
    assert schedule._Dispatch([base, vanilla], crew, shown).run() == []
    for act in acts:
        act.join()
    assert told == ["base", "vanilla", "the arm began: True"]
    assert shown.steps == [(base.folder, 7)], "otherwise the table stands still while a base model trains"


def test_arms_of_a_chat_model_wait_for_nothing(tmp_path: Path) -> None:
    make_tiny_model(Parity(), tmp_path / "tiny", steps=0, width=32, layers=1, max_new=8, progress=False)
    chosen = tiny_chat(tmp_path / "tiny", prompts=2, group=2, pairs=2, evaluation_prompts=2)
    jobs = [Job(tmp_path, tmp_path, chosen, seed, arm) for seed in (0, 1) for arm in (None, ARMS["vanilla"])]
    began: list[tuple[str, int]] = []

    class Watched(Bar):
        def began(self, job: Job) -> None:
            began.append((job.name, job.seed))

    ends = [Pipe() for _ in range(4)]
    crew = [schedule._Worker(_Nobody(), near) for near, _ in ends]
    for _, far in ends:  # whatever they are given is done
        far.send(("done", None))
    assert schedule._Dispatch(jobs, crew, Watched(jobs, jobs, True)).run() == []
    assert began == [("base", 0), ("base", 1), ("vanilla", 0), ("vanilla", 1)]
    micro = [tiny_job(tmp_path, arm) for arm in (None, "vanilla")]
    began.clear()
    near, far = Pipe()
    far.close()
    failures = schedule._Dispatch(micro, [schedule._Worker(_Nobody(), near)], Watched(micro, micro, True)).run()
    assert began == [("base", 0)]
    assert failures[0].endswith("(so 1 run that would start from it cannot be made)")


class _Nobody(schedule.BaseProcess):
    """A worker that the test plays."""

    def __init__(self) -> None: ...

    @property
    def exitcode(self) -> int:
        return 1

    def join(self, timeout: float | None = None) -> None: ...


# the real command


class Window:
    """A command in a window of its own; what it shows, by a terminal emulator."""

    def __init__(self, command: list[str], width: int, height: int, environment: dict[str, str]):
        self.terminal = Terminal(width, height)
        self.process, self._end = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            os.execve(command[0], command, environment)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, condition: Callable[[str], Any], seconds: float) -> str:
        """Return the screen once that holds of it (or the command has ended)."""
        deadline = time.monotonic() + seconds
        while not condition(self.text()):
            assert time.monotonic() < deadline, self.text()
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.terminal.feed(os.read(self._end, 1 << 16))
                except OSError:  # it has ended
                    break
        return self.text()

    def text(self) -> str:
        return "\n".join(self.terminal.lines())

    def type(self, keys: bytes) -> None:
        os.write(self._end, keys)


def test_a_run_in_a_terminal_shows_its_table_and_warnings_and_ctrl_c_leaves_a_sentence(tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 5000, "warm": replace(WARM, steps=40), "teachers": 0}  # so early it never hacks
    job = tiny_job(tmp_path, "vanilla", **given)
    key = settings_hash(get_world("strong"), job.settings.warm, 0)[:16]
    (tmp_path / "warmstarts").mkdir()
    (tmp_path / "warmstarts" / f"warmstart-strong-0-{key}.safetensors").write_bytes(b"damaged")
    text = "-m studies.route2 run --seeds 1 --workers 1 --no-report --arms vanilla --report-to tensorboard --override"
    command = [sys.executable, *text.split(), *overrides(**given), "--out", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
    run = Window(command, 120, 30, environment)
    try:
        at_work = re.compile(r"running +[1-9]\d*/5000 .*/s\n")
        shown = run.until(lambda text: at_work.search(text) and "curves: tensorboard --logdir" in text, 120)
        assert "is not usable" in shown  # a worker's own warning, above the table
        assert str(job.root / "tensorboard") in "".join(line.rstrip() for line in shown.split("\n"))  # long lines are wrapped
        assert [line.split()[:3] for line in shown.split("\n") if line.startswith("base")] == [["base", "0", "finished"]]
        run.type(b"\x03")
        left = run.until(lambda text: False, 60)
        assert os.waitstatus_to_exitcode(os.waitpid(run.process, 0)[1]) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.process, signal.SIGKILL)
    assert left.split("\n")[-1] == "stopped; the same command goes on from the last checkpoints"
    assert "running" not in left
    assert "ETA" not in left
    assert left.count("curves: ") == 1
    assert not run.terminal.screen.cursor.hidden
