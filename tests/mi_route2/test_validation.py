"""Records check every field when they are made, in one sentence; JSON is read strictly."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mi_route2.files import parse_json
from mi_route2.validation import (
    AtLeastOne,
    NonNegative,
    Positive,
    read_lines,
    read_record,
    read_settings,
    replace_fields,
    validated,
)


@validated
class Inner:
    rate: Positive = 1.0
    drop: NonNegative = 0.0


@validated
class Outer:
    steps: AtLeastOne
    inner: Inner = dataclasses.field(default_factory=Inner)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck: choose 12")


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"steps": 0}, "steps must be greater than or equal to 1, not 0"),
        ({"steps": True}, "steps must be a valid integer, not True"),
        ({"steps": 1.5}, "steps must be a valid integer, not 1.5"),
        ({"steps": 1, "inner": {"rate": -1}}, "inner.rate must be greater than 0, not -1"),
        ({"steps": 1, "step": 2}, "unknown setting 'step': did you mean 'steps'? choose from steps, inner, names"),
        ({}, "steps: Field required"),
        ({"steps": 13}, "13 steps bring bad luck: choose 12"),
    ],
)
def test_a_wrong_value_is_one_sentence_also_in_a_file(raw: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read_record(Outer, raw)
    assert str(caught.value) == sentence
    (tmp_path / "x.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError) as caught:
        read_settings(Outer, tmp_path / "x.json", "give another")
    assert str(caught.value) == f"{tmp_path / 'x.json'} does not hold settings of this study ({sentence}); give another"


def test_records_are_frozen_checked_when_replaced_and_read_back() -> None:
    record = Outer(4, Inner(2.0, drop=-0.0), ("a",))
    assert read_record(Outer, json.dumps(dataclasses.asdict(record))) == record
    assert hash(record) == hash(Outer(4, Inner(2.0, drop=0.0), ("a",)))
    assert str(record.inner.drop) == "0.0"
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.steps = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="steps must be greater"):
        dataclasses.replace(record, steps=-1)


def test_words_of_a_command_line_change_records() -> None:
    assert replace_fields(Outer(4), {"steps": "7", "inner.rate": "1e-2", "names": "a_1,b"}) == Outer(7, Inner(0.01), ("a_1", "b"))
    with pytest.raises(ValueError, match=r"inner.rate must be a valid number.*, not 'fast'"):
        replace_fields(Outer(4), {"inner.rate": "fast"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{oops", "this is not JSON (Expecting property name enclosed in double quotes, character 2)"),
        (b"\xe9", "this is not UTF-8 (byte 1)"),
        (b"[" * 100_000, "this JSON is nested too deeply: use fewer levels"),
        (b'{"a": 1, "b": {"a": 2, "a": 2}}', "this JSON has the key 'a' twice in one object: remove one of them"),
        (b"[-1e999]", "this JSON holds -1e999, which is not a finite number: write null for an undefined value"),
    ],
)
def test_json_that_says_two_things_or_none_is_refused(tmp_path: Path, text: bytes, sentence: str) -> None:
    with pytest.raises(ValueError) as alone:
        parse_json(text)
    assert str(alone.value).startswith(sentence)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"1\n" + text + b"\n2\n")
    with pytest.raises(ValueError) as caught:
        read_lines(file, lambda _, row: row)
    assert str(caught.value) == f"{file}, line 2: {alone.value}"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\x85\x0b\r\n")), max_size=6))
def test_every_text_of_json_lines_comes_back_whole(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(json.dumps(text, ensure_ascii=False) for text in texts).encode())
        assert read_lines(file, lambda index, row: (index // 2, row)) == list(enumerate(texts))
