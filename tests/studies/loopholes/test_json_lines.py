"""JSON lines are read as they were written, and what cannot be read is named by its line."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.loopholes.json_lines import read_lines

TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\r\n")), max_size=6
)


@given(TEXTS, st.booleans())
def test_every_text_comes_back_whole(texts: list[str], ascii_alone: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_bytes("\n".join(json.dumps(text, ensure_ascii=ascii_alone) for text in texts).encode())
        assert read_lines(file, lambda index, row: (index, row)) == list(enumerate(texts))


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf1\r\n\n  \n"a"\n\n')
    assert read_lines(tmp_path / "rows.jsonl", lambda index, row: (index, row)) == [(0, 1), (3, "a")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{oops", "line 2: this is no JSON (Expecting property name enclosed in double quotes, character 2)"),
        (b"\xe9", "line 2: 'utf-8' codec can't decode byte 0xe9"),
        (b"[" * 100_000, "line 2: this is JSON in too many brackets"),
        (b"3", "line 2: 3 is too many"),
        (b'{"a": 1, "b": {"a": 2, "a": 2}}', "line 2: the name 'a' is there twice in one object"),
        (b'["\\uD83D\\ude00", "\\ud83d x"]', r"line 2: a text holds half a character (\ud83d)"),
        (b'{"\\udead": 1}', r"line 2: a text holds half a character (\udead)"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_or_left_out(tmp_path: Path, line: bytes, sentence: str) -> None:
    def read(_index: int, row: int) -> int:
        if row > 2:
            raise ValueError(f"{row} is too many")
        return row

    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"1\n" + line + b"\n2\n")
    with pytest.raises(ValueError) as caught:
        read_lines(file, read)
    assert str(caught.value).startswith(f"{file}, {sentence}")
    left_out: list[str] = []
    assert read_lines(file, read, left_out) == [1, 2]
    assert left_out == [str(caught.value)]
