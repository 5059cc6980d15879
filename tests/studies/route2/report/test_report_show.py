"""The rollout page: hostile text stays text, every number is in a title, nothing is loaded, the same rows give the same bytes."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_study import rollouts

from studies.route2.report.show import SCRIPT, escape, scale_of, token_class, verdict, write_page

pytestmark = pytest.mark.study

ROWS = rollouts(0)
HOSTILE = "</pre></article><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u202e\x00\ud800 --> ]]>"


def annotate(rows: Sequence[Any]) -> list[dict[str, Any]]:
    tokens = [re.findall(r"\s*\S+\n?", row["completion"]) for row in rows]
    return [
        {
            "tokens": each,
            "score": [0.1 * i for i in range(len(each))],
            "kept": [-0.5 + 0.25 * i for i in range(len(each))],
            "quarantine": [1.0] * len(each),
        }
        for each in tokens
    ]


class Reader(HTMLParser):
    """Elements, attributes and text of a page, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.completions: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)
        if tag == "pre" and dict(attrs)["class"] == "completion":
            self.completions.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open and "span" in self.open and "i" not in self.open:
            self.completions[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_shows_every_rollout_with_what_the_filters_need(tmp_path: Path) -> None:
    page = _read(write_page(ROWS, annotate, tmp_path / "page.html", "a run"))
    articles = page.all("article")
    assert [each["data-step"] for each in articles] == [str(row["step"]) for row in ROWS]
    assert [each["data-verdict"] for each in articles] == [verdict(row) for row in ROWS]
    assert [each["data-flag"] for each in articles][:3] == ["flagged", "none", "flagged"]
    assert articles[5]["data-author"] == "teacher"
    assert page.completions == [row["completion"] for row in ROWS]
    assert {each["name"] for each in page.all("select")} == {"mode", "flag", "verdict", "author", "lens"}


def test_every_token_has_its_numbers_in_a_title(tmp_path: Path) -> None:
    page = _read(write_page(ROWS[:1], annotate, tmp_path / "page.html", "a run"))
    titles = [each["title"] for each in page.all("span") if (each.get("title") or "").startswith("token ")]
    assert len(titles) == len(annotate(ROWS[:1])[0]["tokens"])
    assert titles[2] == "token 2: score +0.200, kept +0.000, quarantine +1.000"


def test_hostile_text_stays_text_wherever_it_stands(tmp_path: Path) -> None:
    row = ROWS[0] | {"prompt": HOSTILE, "completion": HOSTILE, "mode": HOSTILE, "step": 3}
    path = write_page([row], annotate, tmp_path / "page.html", HOSTILE)
    page, text = _read(path), path.read_text(encoding="utf-8")
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.all("article")[0]["data-mode"] == HOSTILE.replace("\u202e", "\\u202e").replace("\x00", "\\u0000").replace(
        "\ud800", "\\ud800"
    )
    assert "\u202e" not in text
    assert "\x00" not in text


@given(st.text())
def test_escaping_leaves_nothing_to_markup_and_is_valid_utf8(text: str) -> None:
    escaped = escape(text)
    assert not set("<>\"'") & set(escaped)
    escaped.encode("utf-8")  # a lone surrogate would raise
    if text.isascii() and text.isprintable():
        reader = Reader()
        reader.open += ["pre", "span"]
        reader.completions.append("")
        reader.feed(escaped)
        reader.close()
        assert reader.completions[0] == text


def test_the_page_is_self_contained_and_runs_only_its_own_script(tmp_path: Path) -> None:
    path = write_page(ROWS, annotate, tmp_path / "page.html", "a run")
    page, text = _read(path), path.read_text()
    assert not any("src" in attributes or "href" in attributes for _, attributes in page.elements)
    assert "url(" not in text
    policy = next(each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)
    assert f"<script>{SCRIPT}</script>" in text
    assert "innerHTML" not in SCRIPT


def test_an_arm_without_probe_or_quarantine_still_has_a_page(tmp_path: Path) -> None:
    def bare(rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [each | {"score": None, "quarantine": None} for each in annotate(rows)]

    path = write_page(ROWS, bare, tmp_path / "page.html", "vanilla")
    assert '<body class="lens-k">' in path.read_text()
    assert "score none, kept -0.500, quarantine none" in path.read_text()


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write_page(ROWS, annotate, tmp_path / f"{name}.html", "a run") for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_what_does_not_fit_is_refused_in_a_sentence_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match="no rollout to show"):
        write_page([], annotate, path, "a run")
    cut = {key: value for key, value in ROWS[1].items() if key not in ("flag", "advantage")}
    with pytest.raises(ValueError, match="rollout 1 has no advantage, flag"):
        write_page([ROWS[0], cut], annotate, path, "a run")
    with pytest.raises(ValueError, match="1 annotations for 2 rollouts"):
        write_page(ROWS[:2], lambda rows: annotate(rows)[:1], path, "a run")
    with pytest.raises(ValueError, match="rollout 0 has 1 kept for"):
        write_page(ROWS[:1], lambda rows: [annotate(rows)[0] | {"kept": [0.0]}], path, "a run")
    with pytest.raises(ValueError, match="no array 'kept'"):
        write_page(ROWS[:1], lambda rows: [annotate(rows)[0] | {"kept": None}], path, "a run")
    assert not path.exists()


def test_annotate_is_called_in_order_with_every_row_once(tmp_path: Path) -> None:
    rows = [ROWS[0] | {"step": i} for i in range(150)]
    seen: list[int] = []

    def recording(chunk: Sequence[Any]) -> list[dict[str, Any]]:
        seen.extend(row["step"] for row in chunk)
        return annotate(chunk)

    write_page(rows, recording, tmp_path / "page.html", "a run")
    assert seen == list(range(150))


@given(st.floats(-5, 5), st.floats(0.01, 5))
def test_a_tokens_class_has_the_sign_of_its_value_and_mirrors(value: float, scale: float) -> None:
    own, mirrored = token_class("k", value, scale), token_class("k", -value, scale)
    assert own.replace("p", "n") == mirrored.replace("p", "n")
    if own:
        assert own[1] == ("p" if value > 0 else "n")
        assert own[2] == str(min(4, round(abs(value) / scale * 4)))
    else:
        assert abs(value) <= scale / 8


def test_one_extreme_or_undefined_token_does_not_set_the_scale() -> None:
    assert scale_of([0.1] * 99 + [50.0, float("nan"), float("-inf")]) == 0.1
    assert scale_of([]) == 0.0
    assert token_class("s", float("nan"), 1.0) == ""
    assert token_class("s", None, 1.0) == ""
