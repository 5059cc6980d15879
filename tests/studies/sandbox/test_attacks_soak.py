"""Hundreds of honest programs pass, and hundreds of grades of honest programs and attacks leave nothing behind."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from studies.sandbox import DEFAULT_MODULES, Jail, JailUnavailableError
from tests.attacks.canary import own_mark
from tests.attacks.honest import EPILOGUES, PROLOGUES, Honest, programs
from tests.attacks.naive import strict
from tests.attacks.soak import Soak, Tally, _new_outside, _orphans_come_home, _outside, _scratch, soak
from tests.attacks.suite import DRIVER
from tests.attacks.table import descendants

pytestmark = pytest.mark.process


def or_skip(make: Callable):
    try:
        return make()
    except (JailUnavailableError, ImportError) as error:
        pytest.skip(f"no jail on this machine: {error}")


def test_no_honest_program_fails_out_of_300() -> None:
    """Of every kind, with every prologue and epilogue; ``make soak`` grades ten thousand."""
    drawn = programs(300, random.Random(1))
    assert len({each.name for each in drawn}) >= 25
    with or_skip(lambda: Jail(DRIVER, modules=DEFAULT_MODULES)) as jail:
        outcomes = jail.run([{"program": each.code, "names": {}, "calls": {}, "inputs": each.inputs} for each in drawn])
    wrong = [
        (each.name, outcome) for each, outcome in zip(drawn, outcomes, strict=True) if not strict(outcome.reply, each.expected)
    ]
    assert not wrong, wrong[:3]
    assert sum(bool(outcome.stdout) for outcome in outcomes) > 60
    assert sum(bool(outcome.stderr) for outcome in outcomes) > 60


def test_honest_programs_differ() -> None:
    drawn = programs(1000, random.Random(1))
    assert len({(each.code, repr(each.inputs)) for each in drawn}) > 950
    assert len({each.name for each in drawn}) >= 25
    for around in (*PROLOGUES, *EPILOGUES):
        assert sum(around in each.code for each in drawn) > 100
    assert programs(5, random.Random(1)) == drawn[:5]


def test_300_grades_leave_nothing_behind() -> None:
    began = _outside()
    tally = or_skip(lambda: soak(300))
    assert (tally.passed, tally.failed, tally.left) == ([], [], [])
    assert tally.grades == 300
    assert tally.attacks >= 60
    assert tally.verdict.startswith("soak passed: 300 grades, ")
    assert not _new_outside(began)


def test_orphans_are_seen() -> None:
    before = descendants(os.getpid())
    with _orphans_come_home():
        code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n"
        code += "    os.close(1)\n    time.sleep(60)\n"
        run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        orphan = int(run.stdout)
        assert descendants(os.getpid()) - before == {orphan}
        os.kill(orphan, 9)
        os.waitpid(orphan, 0)
    assert descendants(os.getpid()) <= before


def test_files_are_seen() -> None:
    before = _outside()
    with _scratch() as scratch:
        assert Path(tempfile.mkdtemp()).parent == scratch
    assert tempfile.gettempdir() != str(scratch)
    litter = Path("/tmp") / (own_mark() + "00000000")
    litter.write_text("")
    assert str(litter) in _outside() - before
    litter.unlink()
    assert not _new_outside(before)


def test_a_queue_of_system_v_is_seen() -> None:
    before = _outside()
    made = subprocess.run(["ipcmk", "-Q"], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("no System V queues on this machine")
    try:
        assert len(_outside() - before) >= 1
    finally:
        subprocess.run(["ipcrm", "-q", made.stdout.split()[-1]], check=True)
    deadline = time.monotonic() + 5
    while _outside() - before and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_verdict_names_what_went_wrong() -> None:
    tally = Tally(grades=10, attacks=4, passed=["kernel/bpf"], failed=["coins", "coins"], left=["process 7"])
    assert tally.verdict == (
        "soak failed: 10 grades, 4 of them attacks; 1 attacks succeeded, 2 honest programs failed, 1 processes and files left"
        "; passed: kernel/bpf; failed: coins; left: process 7"
    )
    assert Tally(grades=10).verdict.startswith("soak passed: 10 grades, 0 of them attacks; 0 attacks succeeded, ")


def test_an_honest_program_that_is_wrong_is_noticed() -> None:
    (one,) = programs(1, random.Random(0))
    wrong = Honest(one.name, one.code, one.inputs, ("other", *one.expected[1:]))
    with or_skip(lambda: Jail(DRIVER, workers=1)) as jail:
        (outcome,) = jail.run([{"program": one.code, "names": {}, "calls": {}, "inputs": one.inputs}])
    assert strict(outcome.reply, one.expected)
    assert not strict(outcome.reply, wrong.expected)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert Soak(grades=0)() == 2
    assert capsys.readouterr().err == "error: grades must be at least 1, not 0\n"
    code = Soak(grades=20, workers=1)()
    said = capsys.readouterr()
    if said.err.startswith("error: "):
        pytest.skip(said.err)
    assert code == 0
    assert said.out.startswith("soak passed: 20 grades, ")
