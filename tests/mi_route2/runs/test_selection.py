"""A capture does not depend on how a sequence is cut, and a request that cannot be met is one sentence."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mi_route2.runs.record import SEQUENCE_PARTS, TokenSelection

TOKENS = st.sets(st.integers(0, 4), min_size=1)


def meant(selection: TokenSelection, tokens: list[int], prompt: int) -> list[int]:
    """The definition, one position at a time."""
    part = {
        "all": lambda place: True,
        "prompt": lambda place: place < prompt,
        "generated": lambda place: place >= prompt,
        "last": lambda place: place == prompt - 1,
    }[selection.part]
    named = selection.positions is None
    return [
        place
        for place, token in enumerate(tokens)
        if part(place)
        and (named or place in set(selection.positions))
        and (selection.token_ids is None or token in selection.token_ids)
    ]


CHOICES = st.one_of(
    st.fixed_dictionaries({"part": st.sampled_from(SEQUENCE_PARTS)}),
    st.fixed_dictionaries({"positions": st.lists(st.integers(0, 25), min_size=1, unique=True)}),
).flatmap(lambda choice: st.fixed_dictionaries({k: st.just(v) for k, v in choice.items()}, optional={"token_ids": TOKENS}))


@st.composite
def cut(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    tokens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
    prompt = draw(st.integers(1, len(tokens)))
    inner = draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    return tokens, prompt, [0, *sorted(inner), len(tokens)]


@given(CHOICES, cut())
@example({"part": "last"}, ([1, 2, 3], 2, [0, 1, 2, 3]))
def test_the_same_positions_are_kept_however_a_sequence_is_cut(
    choice: dict[str, Any], sequence: tuple[list[int], int, list[int]]
) -> None:
    selection, (tokens, prompt, edges) = TokenSelection(**choice), sequence
    found = [low + row for low, high in pairwise(edges) for row in selection.rows(tokens[low:high], low, prompt)]
    assert found == selection.rows(tokens, 0, prompt) == meant(selection, tokens, prompt)


@given(CHOICES, st.integers(0, 30))
def test_missing_are_the_positions_that_never_came(choice: dict[str, Any], length: int) -> None:
    selection = TokenSelection(**choice)
    asked = set() if selection.positions is None else set(selection.positions)
    assert set(selection.missing(length)) == asked - set(range(length))
    assert list(selection.missing(length)) == sorted(selection.missing(length))


def test_the_order_of_asking_makes_no_difference() -> None:
    assert TokenSelection(positions=[5, 1], token_ids=[3, 2]) == TokenSelection(positions=(1, 5), token_ids={2, 3})
    assert hash(TokenSelection(positions=[5, 1])) == hash(TokenSelection(positions=range(1, 6, 4)))
    assert TokenSelection(positions=[5, 1]).rows(list(range(9)), 0, 9) == [1, 5]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"part": "middle"}, "part must be .all., .prompt., .generated. or .last."),
        ({"part": "last", "positions": [1]}, "contradict"),
        ({"positions": []}, "positions is empty"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"positions": [3, -1]}, "-1 in positions"),
        ({"token_ids": [-7]}, "-7 in token_ids"),
        ({"positions": [True]}, "True in positions"),
        ({"positions": [2, 7, 2]}, "2 appears twice in positions"),
    ],
)
def test_a_request_that_cannot_be_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        TokenSelection(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("start", "prompt"), [(-1, 1), (0, 0)])
def test_chunks_count_from_0_and_prompts_from_1(start: int, prompt: int) -> None:
    with pytest.raises(ValueError, match="are not valid"):
        TokenSelection().rows([1], start, prompt)
