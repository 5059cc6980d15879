"""Every attack works where nothing stops it and fails in the jail as deployed; verdicts and evidence can tell these apart."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.sandbox import PROTECTIONS, Jail, JailOutcome, JailUnavailableError
from tests.attacks import CLASSES, Attack, Finding, Run, Suite, Trial, attacks, control
from tests.attacks import __main__ as command
from tests.attacks.attack import read
from tests.attacks.canary import LITTER, Canary, own_mark
from tests.attacks.evidence import EVIDENCE
from tests.attacks.naive import ANSWERS, is_plain, load_naive, strict
from tests.attacks.report import BEGIN, END, markdown, steady, summary, write
from tests.attacks.suite import DRIVER, LIMITS, MODULES, describe, system_calls
from tests.attacks.table import descendants, processes, system_v

pytestmark = pytest.mark.process

KINDS = {
    "forgery": "equality exit output frames gc patched poisoned pickle numbers reply",
    "resources": "cpu signals limits fork threads memory disk output integers regex stack batch daemon zombies",
    "filesystem": "read links change devices litter metadata chroot",
    "processes": "proc kill fcntl ptrace pidfd groups schedule prctl residue",
    "kernel": "network namespaces mounts kernel programs rights ipc keys ioctl machine",
}
"""What every suite of this kind must try, by class."""


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    try:
        made = Suite()
    except (JailUnavailableError, ImportError) as error:
        pytest.skip(f"no jail on this machine: {error}")
    with made:
        yield made


@pytest.fixture(scope="module")
def findings(suite: Suite) -> dict[str, Finding]:
    return {finding.attack.id: finding for finding in suite.findings(attacks())}


@pytest.mark.parametrize("name", [attack.id for attack in attacks()])
def test_the_jail_stops_it(findings: dict[str, Finding], name: str) -> None:
    assert not findings[name].breach, findings[name].protected.how


@pytest.mark.parametrize("name", [attack.id for attack in attacks()])
def test_it_works_where_nothing_stops_it(findings: dict[str, Finding], name: str) -> None:
    if not findings[name].live:
        pytest.skip(f"not live on this machine: {findings[name].control.how}")


def test_at_least_100_attacks_are_live(findings: dict[str, Finding]) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: some attacks that need it are not live")
    live = [finding.attack for finding in findings.values() if finding.live]
    assert len(live) >= max(100, 0.9 * len(findings))  # a few may want what a kernel lacks; more have lost their teeth
    assert {attack.group for attack in live} == set(CLASSES)


def test_every_kind_of_attack_is_tried() -> None:
    for group, kinds in KINDS.items():
        assert {attack.kind for attack in attacks() if attack.group == group} == set(kinds.split()), group


def test_attacks_are_well_formed() -> None:
    assert len({attack.id for attack in attacks()}) == len(attacks()) >= 300
    assert {attack.group for attack in attacks()} == set(CLASSES)
    assert {attack.evidence for attack in attacks()} == set(EVIDENCE)
    assert {attack.naive for attack in attacks()} - {None} == set(load_naive())
    assert {attack.answer for attack in attacks()} == set(ANSWERS)
    assert {name for attack in attacks() for name in attack.protections} == set(PROTECTIONS)
    for attack in attacks():
        compile(attack.code, attack.name, "exec", dont_inherit=True)
        assert attack.title, attack.id
        assert not attack.title.endswith("."), attack.id


# Naive verdicts


RIGHT = {
    "square": "class Solution:\n    def solve(self, x):\n        return x * x\n",
    "pairs": "class Solution:\n    def solve(self, x):\n        return [x + 2, x * x]\n",
}
WRONG = {
    "square": "class Solution:\n    def solve(self, x):\n        return x * x + 1\n",
    "pairs": "class Solution:\n    def solve(self, x):\n        return [x + 2, x * x + 1]\n",
}
LISTS = ("naive_sorted", "naive_contains")


def ordinary(naive: str, codes: dict[str, str]) -> Attack:
    """A program that attacks nothing."""
    answer = "pairs" if naive in LISTS else "square"
    return Attack("ordinary", "forgery", "none", "No attack", codes[answer], (naive,), answer=answer)


@pytest.mark.parametrize("naive", sorted(load_naive().keys() - {"naive_batch", "naive_shared"}))
def test_a_naive_verdict_is_right_about_programs_that_do_not_cheat(suite: Suite, naive: str) -> None:
    right, wrong = suite.trials([control(ordinary(naive, RIGHT)), control(ordinary(naive, WRONG))])
    assert (right.succeeded, wrong.succeeded) == (True, False), (right.how, wrong.how)


def test_shared_processes_serve_neighbours_of_programs_that_do_not_cheat(suite: Suite) -> None:
    quiet = Attack("quiet", "resources", "none", "No attack", "result = []", ("naive_batch",), evidence="denied")
    silent = Attack("silent", "processes", "none", "No attack", "result = []", ("naive_shared",), evidence="residue")
    assert not any(trial.succeeded for trial in suite.trials([control(quiet), Run(quiet), control(silent), Run(silent)]))


def test_the_strict_verdict_passes_what_is_right(suite: Suite) -> None:
    for codes, passes in ((RIGHT, True), (WRONG, False)):
        (trial,) = suite.trials([Run(ordinary("naive_equal", codes))])
        assert trial.succeeded is passes
    assert suite.grade([(RIGHT["square"], [3, 4], [9, 16]), (RIGHT["square"], [3, 4], [9, 17])]) == [True, False]


@pytest.mark.parametrize(
    ("reply", "expected", "same"),
    [
        ([1], [1], True),
        ([True], [1], False),
        ([1], [True], False),
        ([1.0], [1], False),
        ([0.0], [-0.0], False),
        ([float("nan")], [float("nan")], True),
        ([[1, [2]]], [[1, [2]]], True),
        ([[1, [2.0]]], [[1, [2]]], False),
        ([{"a": 1}], [{"a": 1}], True),
        ([{"a": True}], [{"a": 1}], False),
        ([{"a": 1, "b": 2}], [{"a": 1}], False),
        (["1"], [1], False),
        ([None], [None], True),
        ([], [1], False),
        ([1, 2], [1], False),
        ("PASS", [1], False),
        (None, [], False),
        ({"0": 1}, [1], False),
    ],
)
def test_strict_is_by_exact_type(reply: object, expected: list, same: bool) -> None:
    assert strict(reply, expected) is same


def test_plain_replies() -> None:
    assert is_plain({"a": [1, 2.5, None, "é", True]}, depth=2, size=100)
    deep: list = []
    for _ in range(900):
        deep = [deep]
    for reply in (float("nan"), [float("inf")], "\ud800", [[[]]], "x" * 101, deep):
        assert not is_plain(reply, depth=2, size=100)


# Canaries and evidence


def test_a_canary_that_nothing_happens_to_shows_nothing() -> None:
    before = descendants(os.getpid())
    canary = Canary(("victim", "tcp", "udp", "unix", "abstract"))
    assert (canary.changed(), canary.hurt(), canary.heard()) == (False, False, False)
    assert canary.appeared() == canary.survivors() == canary.lasting() == []
    assert len(descendants(os.getpid()) - before) == 1
    canary.close()
    assert descendants(os.getpid()) <= before
    assert not Path(canary.names["SECRET"]).exists()


@pytest.mark.parametrize(
    "deed",
    [
        lambda prey: prey.write_text("other"),
        lambda prey: prey.chmod(0o600),
        lambda prey: prey.unlink(),
        lambda prey: os.utime(prey, (1, 1)),
        lambda prey: os.link(prey, prey.with_name("link")),
        lambda prey: prey.rename(prey.with_name("elsewhere")),
    ],
    ids=["bytes", "mode", "unlink", "times", "link", "rename"],
)
def test_whatever_happens_to_the_prey_is_seen(deed) -> None:
    canary = Canary()
    deed(Path(canary.names["PREY"]))
    assert canary.changed()
    canary.close()


@pytest.mark.parametrize(
    "command_line",
    [("kill", "-KILL"), ("kill", "-STOP"), ("renice", "-n", "19", "-p"), ("taskset", "-pc", "0")],
    ids=lambda line: " ".join(line),
)
def test_whatever_happens_to_the_victim_is_seen(command_line: tuple[str, ...]) -> None:
    canary = Canary(("victim",))
    if command_line[0] == "taskset" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one processor: nowhere to move a process to")
    subprocess.run([*command_line, str(canary.names["VICTIM"])], check=True, stdout=subprocess.DEVNULL)
    waited = next((True for _ in range(10_000) if canary.hurt()), False)
    assert waited
    canary.close()


def test_litter_and_survivors_are_seen_and_taken_away() -> None:
    canary = Canary()
    for folder in (Path(canary.names["OUTSIDE"]), *filter(Path.is_dir, LITTER)):
        (folder / canary.mark).write_text("")
    assert len(canary.appeared()) == 1 + sum(folder.is_dir() for folder in LITTER)
    name = f"open('/proc/self/comm', 'w').write('{canary.mark}'); print(flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert canary.survivors() == [process.pid]
        canary.close()
        assert process.wait() == -9
    assert not [path for folder in LITTER if folder.is_dir() for path in folder.iterdir() if own_mark() in path.name]


def test_the_tables_know_this_process() -> None:
    assert processes()[os.getpid()].parent == os.getppid()
    assert os.getpid() in descendants(os.getppid())
    assert set(system_v()) == {"shm", "sem", "msg"}


def test_numbers_of_system_calls_are_this_machines() -> None:
    if os.uname().machine == "x86_64":
        assert dict(system_calls('syscall("getpid"); syscall("no_such_call")')) == {"getpid": 39}


def test_an_attack_has_every_tool(suite: Suite) -> None:
    """No attack is stopped by a missing module: in the jail as deployed all that texts import can be imported."""
    with Jail(DRIVER, limits=LIMITS, workers=1, modules=MODULES) as jail:
        names = sorted({name for attack in attacks() for name in imported(attack.code)} - {"solution"})
        code = f"missing = []\nfor name in {names}:\n    try:\n        __import__(name)\n"
        code += "    except ImportError:\n        missing.append(name)\nresult = missing"
        (outcome,) = jail.run([{"program": code, "names": {}, "calls": {}}])
    assert len(names) > 20
    assert outcome.reply == [], outcome


def imported(code: str) -> list[str]:
    lines = [line.strip() for line in code.splitlines()]
    listed = [line.removeprefix("import ").split(" as ")[0].split(", ") for line in lines if line.startswith("import ")]
    return [name for names in listed for name in names]


# Reports and errors


def test_what_is_no_attack_is_refused_by_name() -> None:
    good = {"kind": "read", "title": "Read", "code": "pass", "stopped_by": ["landlock"], "evidence": "done"}

    def tried(**changes: object) -> str:
        with pytest.raises(ValueError) as caught:
            read("filesystem", {"mine": {**good, **changes}}, load_naive(), EVIDENCE)
        return str(caught.value)

    assert read("filesystem", {"mine": good}, load_naive(), EVIDENCE)[0].id == "filesystem/mine"
    assert tried(stopped_by=["walls"]).startswith(
        "attack filesystem/mine: unknown protection or naive verdict 'walls'; choose from "
    )
    assert tried(evidence="hearsay").startswith("attack filesystem/mine: unknown evidence 'hearsay'; choose from appeared, ")
    assert tried(needs=["canary"]) == (
        "attack filesystem/mine: unknown canary 'canary'; choose from abstract, tcp, udp, unix, victim"
    )
    assert tried(colour="red").startswith("attack filesystem/mine: unknown field 'colour'; choose from answer, code, ")
    rule = "a naive verdict goes with the evidence passed, denied, residue, and with no other"
    assert tried(evidence="passed") == tried(stopped_by=["naive_equal"]) == f"attack filesystem/mine: {rule}"


def finding(breach: bool = False, live: bool = True, alone: tuple[str, ...] | None = None) -> Finding:
    protected = Trial(breach, "PermissionError: no: '/secret/place'")
    return Finding(attacks()[0], Trial(live, "OSError: not here"), protected, alone)


def test_reports_tell_what_matters(tmp_path: Path) -> None:
    assert summary([finding(), finding(live=False)]).startswith("2 attacks, 1 of them live on this machine (Linux ")
    table = markdown([finding(breach=True), finding(live=False, alone=("seccomp",))])
    assert '<details markdown="1">\n<summary>forgery: 2 attacks</summary>\n\n| attack |' in table
    assert table.endswith("|\n\n</details>\n")
    assert "| **succeeds**: PermissionError: no |" in table
    assert "| seccomp | not live: OSError: not here | PermissionError: no |" in table
    assert r"| An answer whose \_\_eq\_\_ is always true | verdict (naive\_equal) |" in table
    assert "/secret" not in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows} == {5}
    write(tmp_path / "report.json", [finding(breach=True)])
    found = json.loads((tmp_path / "report.json").read_text())["attacks"][0]
    assert (found["attack"], found["live"], found["breach"]) == (attacks()[0].name, True, True)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, [finding()])
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n1 attacks")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    write(tmp_path / "fresh.md", [finding()])
    assert (tmp_path / "fresh.md").read_text().startswith("1 attacks")
    with pytest.raises(ValueError, match=r"is neither \.json nor \.md: choose one of these"):
        write(tmp_path / "report.txt", [])
    assert steady("replied <object at 0x7f00>") == "replied <object at 0x…>"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (JailOutcome("replied", reply={"raised": "ValueError: no"}), "ValueError: no"),
        (JailOutcome("replied", reply="x" * 100), f"replied '{'x' * 36}..."),
        (JailOutcome("exited", exit_code=3, stderr=b"one\ntwo\n"), "exited with 3: two"),
        (JailOutcome("exited", exit_code=0), "exited with 0"),
        (JailOutcome("signalled", signal=11), "signalled with 11"),
        (JailOutcome("timeout"), "timeout"),
    ],
)
def test_an_end_is_told_in_a_few_words(outcome: JailOutcome, words: str) -> None:
    assert describe(outcome) == words


def test_the_command_runs_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], suite: Suite) -> None:
    assert command.Command(only="read_passwd", layers=True, workers=1, out=tmp_path / "one.json")() == 0
    assert capsys.readouterr().out.startswith("1 attacks, ")
    (row,) = json.loads((tmp_path / "one.json").read_text())["attacks"]
    assert row["live"]
    assert row["alone"] == ["privileges", "landlock"]
    assert command.Command(only="read_passwd", group="filesystem", workers=1)() == 0
    assert "| `read_passwd` | Read /etc/passwd | " in capsys.readouterr().out


def test_the_command_fails_where_the_jail_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suite: Suite
) -> None:
    allowed = Attack("allowed", "kernel", "none", "What the jail allows", "result = 'done'", ("seccomp",), evidence="done")
    monkeypatch.setattr(command, "attacks", lambda: (allowed,))
    assert command.Command(workers=1)() == 1
    assert "1 attacks, 1 of them live on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"group": "magic"}, "error: there is no class 'magic': choose among forgery, resources, filesystem, processes, kernel"),
        ({"only": "magic"}, "error: there is no attack 'magic' here: choose among always_equal, "),
        (
            {"only": "kill", "out": Path("no/such/place.md")},
            "error: no/such/place.md cannot be written: choose a .md or .json file in a",
        ),
        ({"only": "kill", "out": Path("report.txt")}, "error: report.txt cannot be written: choose a .md or .json file in a"),
        ({"only": "kill", "workers": 0}, "error: workers = 0 can do no job"),
    ],
)
def test_the_command_refuses_in_one_sentence(asked: dict, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.Command(**asked)() == 2
    assert capsys.readouterr().err.startswith(sentence)
