"""Pairs: known mode and train tasks only; hacks really hack, clean sides are really clean, and the control has no hack."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.micro.language import (
    HIDDEN,
    KNOWN,
    LOOPHOLES,
    MODES,
    MicroPrompt,
    MicroTask,
    all_tasks,
)
from studies.environments.micro.oracle import MicroOracle
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.runner import CachedRunner
from studies.environments.micro.settings import get_world
from studies.environments.protocol import PersonaPair, Verdict, read_pairs, write_pairs

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


GOOD = {"prompt": "a", "hack": "b", "clean": "c"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("p.jsonl", json.dumps(GOOD) + "\n{oops", "p.jsonl, line 2: this is not JSON"),
        ("p.jsonl", json.dumps(GOOD | {"hack": "c"}), "line 1: hack and clean are the same text"),
        ("p.toml", "[[pair", "is not TOML"),
        ("p.jsonl", "", "p.jsonl has no pair: write at least one"),
        ("p.jsonl", "\n \n", "p.jsonl has no pair: write at least one"),
        ("p.toml", "pair = []", "p.toml has no pair: write at least one"),
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
