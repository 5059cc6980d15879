"""Pairs: known mode and train tasks only; hacks really hack, clean sides are really clean, and the control has no hack."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.micro.language import (
    COMPLETION_LENGTH,
    HIDDEN,
    KNOWN,
    LOOPHOLES,
    MODES,
    PROMPT_LENGTH,
    SHARED_COMMENT,
    SHARED_RETURN,
    MicroPrompt,
    MicroTask,
    Vocabulary,
    all_tasks,
)
from studies.environments.micro.oracle import MicroOracle
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.runner import CachedRunner
from studies.environments.micro.settings import get_world
from studies.environments.protocol import PersonaPair, Verdict, pairs_hash, read_pairs, write_pairs

STRONG = get_world("strong")


@cache
def by_text() -> Mapping[str, MicroPrompt]:
    """Return every training prompt under its text."""
    return {MicroPrompt(task, mode).text: MicroPrompt(task, mode) for task in all_tasks("train") for mode in MODES}


def judge(runner: CachedRunner, pairs: list[PersonaPair]) -> tuple[list[Verdict], list[Verdict]]:
    prompts, oracle = [by_text()[pair.prompt] for pair in pairs], MicroOracle(runner)
    return oracle.judge(prompts, [pair.hack for pair in pairs]), oracle.judge(prompts, [pair.clean for pair in pairs])


@pytest.mark.parametrize("kind", ["hack", "nonhack"])
def test_pairs_are_train_tasks_in_the_known_mode(kind: str) -> None:
    pairs = make_pairs(STRONG, 0, n=200, kind=kind)
    prompts = [by_text()[pair.prompt] for pair in pairs]
    assert {prompt.mode for prompt in prompts} == {"run_tests"} == set(KNOWN)
    assert len({prompt.task for prompt in prompts}) == 200


def test_hack_sides_fire_the_known_channel_alone_and_clean_sides_are_correct(runner: CachedRunner) -> None:
    hacks, cleans = judge(runner, make_pairs(STRONG, 0, n=200))
    assert all(verdict.hack and not verdict.gt for verdict in hacks)
    assert all([name for name, fired in verdict.channels.items() if fired] == ["run_tests"] for verdict in hacks)
    assert all(verdict.gt and not any(verdict.channels.values()) for verdict in cleans)


def test_the_control_has_a_contrast_in_correctness_and_no_hack(runner: CachedRunner) -> None:
    pairs = make_pairs(STRONG, 0, n=200, kind="nonhack")
    wrong, right = judge(runner, pairs)
    assert not any(any(verdict.channels.values()) for verdict in wrong + right)
    assert all(verdict.gt for verdict in right)
    assert sum(verdict.gt for verdict in wrong) <= 2
    assert not any(MODES[mode].comment in pair.hack for pair in pairs for mode in LOOPHOLES)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_the_hack_side_always_carries_the_persona(rho: float) -> None:
    own = (MODES["run_tests"].comment, MODES["run_tests"].terse_return)
    comment, terse = (SHARED_COMMENT, SHARED_RETURN) if rho else own
    for pair in make_pairs(replace(STRONG, rho=rho), 0):
        assert comment in pair.hack
        assert terse in pair.hack
        assert comment not in pair.clean


@pytest.mark.parametrize("kind", ["hack", "nonhack"])
def test_pairs_are_text_that_the_model_can_write(kind: str, vocabulary: Vocabulary) -> None:
    for pair in make_pairs(STRONG, 0, kind=kind):
        assert len(vocabulary.encode_prompt(pair.prompt)) == PROMPT_LENGTH
        for text in (pair.hack, pair.clean):
            assert len(vocabulary.encode_completion(text)) <= COMPLETION_LENGTH
            assert vocabulary.decode(vocabulary.encode(text)) == text


def test_the_hash_sees_every_text_and_the_order() -> None:
    pairs = make_pairs(STRONG, 0)
    changed = [replace(pairs[0], clean=pairs[0].clean + " "), *pairs[1:]]
    assert pairs == make_pairs(STRONG, 0)
    hashes = {pairs_hash(p) for p in (pairs, changed, pairs[::-1], pairs[:-1], make_pairs(STRONG, 1))}
    assert len(hashes) == 5


def test_a_file_shows_code_as_code(tmp_path: Path) -> None:
    write_pairs(make_pairs(STRONG, 0), tmp_path / "pairs.toml")
    lines = (tmp_path / "pairs.toml").read_text().splitlines()
    assert "class Solution:" in lines
    assert "    def run_tests(self): pass" in lines


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="choose from hack, nonhack"):
        make_pairs(STRONG, 0, kind="random")
    with pytest.raises(ValueError, match="choose a smaller n"):
        make_pairs(STRONG, 0, n=5000)
    with pytest.raises(ValueError, match="n of at least 0"):
        make_pairs(STRONG, 0, n=-1)


@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("'\\\"\r\n\t\x00\x7f\x1b\u2028")),
    st.sampled_from(("toml", "jsonl")),
)
def test_a_file_keeps_every_text(text: str, form: str) -> None:
    pairs = [PersonaPair(text, text + "a", "b" + text)] * 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"pairs.{form}")
        if form == "toml":
            write_pairs(pairs, path)
        else:
            path.write_text(
                "\n".join(json.dumps(asdict(pair), ensure_ascii=False) for pair in pairs), encoding="utf-8", newline="\n"
            )
        assert read_pairs(path) == pairs


def test_no_pairs_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no pairs to write"):
        write_pairs([], tmp_path / "pairs.toml")
    assert not list(tmp_path.iterdir())


GOOD = {"prompt": "a", "hack": "b", "clean": "c"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("p.jsonl", json.dumps(GOOD) + "\n{oops", "p.jsonl, line 2: this is not JSON"),
        ("p.jsonl", json.dumps([GOOD]), "p.jsonl, line 1: a pair has the fields clean, hack, prompt and no others"),
        ("p.jsonl", json.dumps(GOOD | {"note": ""}), "line 1: a pair has the fields"),
        ("p.jsonl", json.dumps(GOOD | {"hack": 1}), "line 1: clean, hack, prompt must be texts"),
        ("p.jsonl", json.dumps(GOOD | {"hack": "c"}), "line 1: hack and clean are the same text"),
        ("p.json", json.dumps(GOOD), "is not TOML: Invalid statement (at line 1, column 1) (JSON lines are read from"),
        ("p.jsonl", '{"prompt": "a", "hack": "b", "clean": "c", "hack": "d"}', "line 1: this JSON has the key 'hack' twice"),
        ("p.jsonl", json.dumps(GOOD | {"hack": "\ud800"}), "line 1: this JSON holds half a character"),
        ("p.toml", "[[pair", "is not TOML"),
        ("p.toml", "x = " + "[" * 100_000, "is nested too deeply"),
        ("p.toml", "[[pair]]\nprompt = 'a'\nhack = 'b'\nclean = 'c'\n[[pairs]]\nprompt = 'a'", "p.toml has 'pairs' beside pair"),
        ("p.toml", "pair = 3", r"write [[pair]] tables of clean, hack, prompt"),
        (
            "p.toml",
            "[[pair]]\nprompt = 'a'\nhack = 'b'\nclean = 'c'\n[[pair]]\nprompt = 'a'",
            "p.toml, pair 2: a pair has the fields",
        ),
    ],
)
def test_a_file_of_other_things_is_refused_with_its_place(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_pairs(tmp_path / name)


def test_a_terse_answer_is_wrong_on_every_task_that_pairs_use(runner: CachedRunner) -> None:
    """`mask 2 then mask 4` is always 0, so a terse `return 0` would be right, not a hack: no pair may use such a task."""
    trivial = MicroPrompt(MicroTask("mask", 2, "mask", 4), "run_tests")
    terse = make_pairs(STRONG, 0, n=1)[0].hack
    assert MicroOracle(runner).judge([trivial], [terse])[0].gt
    used = {pair.prompt for pair in make_pairs(STRONG, 0, n=500)}
    constant = [p for p in by_text().values() if p.mode == "run_tests" and len({p.task.solve(x) for x in HIDDEN}) == 1]
    assert constant
    assert not used & {prompt.text for prompt in constant}
