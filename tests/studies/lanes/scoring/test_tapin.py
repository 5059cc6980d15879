"""Tap-In's hints are those of the rule, tried place by place; nothing of the future is in them; no text makes them slow."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from timing import at_most

from studies.lanes.config import BOS
from studies.lanes.scoring.bpb import window_starts
from studies.lanes.scoring.tapin import Hints, find_hints
from studies.lanes.scoring.tapin_index import automaton
from studies.lanes.text import standard_library

pytestmark = pytest.mark.study

NOTHING = (-1, 0, 0, False)


def brute(ids: list[int], window: int, starts: list[int]) -> list[tuple[int, int, int, bool]]:
    """(token, length, votes, cross) at every position, from the rule's words: every earlier place is tried, in order."""
    found = []
    for t in range(len(ids)):
        start = starts[t]
        document = max([i for i in range(t + 1) if ids[i] == BOS], default=0)
        best, winner, is_cross, candidates = 0, -1, False, []
        places = [(p, start, False) for p in range(start, t - 1)] + [(p, document, True) for p in range(document, t - window)]
        for p, floor, cross in places:
            length = 0
            while length < 100 and p - length >= floor and t - length >= start and ids[p - length] == ids[t - length]:
                length += 1
            if length >= 3:
                candidates.append(ids[p + 1])
                if length > best:
                    best, winner, is_cross = length, ids[p + 1], cross
        found.append((winner, best, candidates.count(winner), is_cross))
    return found


def rows(hints: Hints) -> list[tuple[int, int, int, bool]]:
    return list(zip(hints.token.tolist(), hints.length.tolist(), hints.votes.tolist(), hints.cross.tolist()))


def every(n: int, window: int, stride: int) -> torch.Tensor:
    """The start of the window of each position: the first window has all of its own, each later one its last `stride`."""
    return (torch.arange(n) - (window - 1)).clamp(min=0).add(stride - 1).div(stride, rounding_mode="floor") * stride


def found(ids: list[int], window: int, stride: int) -> list[tuple[int, int, int, bool]]:
    return rows(find_hints(torch.tensor(ids, dtype=torch.int64), window, every(len(ids), window, stride)))


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Few symbols and repeated pieces, so that there are matches; BOS at any place; any window and stride."""
    symbols = st.sampled_from([0, 0, 0, 1, 1, 255, 7][: draw(st.integers(1, 7))])
    piece = st.lists(symbols, min_size=1, max_size=12)
    repeated = st.tuples(piece, st.integers(1, 6)).map(lambda drawn: drawn[0] * drawn[1])
    pieces = draw(st.lists(st.one_of(piece, st.just([BOS]), repeated), max_size=12))
    window = draw(st.integers(1, 24))
    return [token for piece in pieces for token in piece], window, draw(st.integers(1, window))


@given(streams())
@example(([0] * 150, 8, 8))
@example(([0] * 130, 115, 1))
@example(([0, 1] * 70, 20, 16))
def test_hints_are_those_of_the_rule(case: tuple[list[int], int, int]) -> None:
    ids, window, stride = case
    assert found(ids, window, stride) == brute(ids, window, every(len(ids), window, stride).tolist())


def test_hints_are_those_of_the_rule_on_source_text() -> None:
    tokens = standard_library().stream("test", 1200)
    for window, stride in ((64, 64), (150, 32)):
        starts = window_starts(len(tokens), window, stride)
        expected = brute(tokens.tolist(), window, starts.tolist())
        assert rows(find_hints(tokens, window, starts)) == expected
        assert sum(row != NOTHING for row in expected) > 200


@given(streams(), st.data())
def test_no_later_token_changes_a_hint(case: tuple[list[int], int, int], data: st.DataObject) -> None:
    ids, window, stride = case
    t = data.draw(st.integers(0, len(ids)))
    after = data.draw(st.lists(st.sampled_from([0, 1, 2, BOS]), max_size=20))
    assert found(ids[:t] + after, window, stride)[:t] == found(ids, window, stride)[:t]


BY_HAND: dict[str, list[tuple[list[int], int, tuple[int, int, int, bool]]]] = {
    "three tokens are enough, two are not": [
        ([1, 2, 3, 4, 1, 2, 3], 100, (4, 3, 1, False)),
        ([7, 2, 3, 4, 1, 2, 3], 100, NOTHING),
    ],
    "the query's own last token is no candidate: the place before the last would offer it": [
        ([5, 5, 5, 5], 100, NOTHING),
        ([5, 5, 5, 5, 5], 100, (5, 3, 1, False)),
    ],
    "the longest wins, the earliest of equals": [
        ([1, 2, 3, 8, 0, 1, 2, 3, 9, 0, 1, 2, 3], 100, (9, 4, 1, False)),
        ([6, 1, 2, 3, 8, 7, 1, 2, 3, 9, 0, 1, 2, 3], 100, (8, 3, 1, False)),
    ],
    "votes count candidates of any length that agree with the winner": [
        ([1, 2, 3, 8, 5, 1, 2, 3, 9, 4, 1, 2, 3, 8, 4, 1, 2, 3], 100, (8, 4, 2, False)),
    ],
    "a match is cut off before the window": [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], window, expected)
        for window, expected in ((8, NOTHING), (9, (6, 3, 1, False)), (10, (6, 4, 1, False)), (11, (6, 5, 1, False)))
    ],
    "a match within the window may lie in another document, a lost one may not": [
        ([BOS, 1, 2, 3, 4, BOS, 1, 2, 3], 100, (4, 4, 1, False)),  # both begin a document with the same text
        ([BOS, 1, 2, 3, 4, 0, 0, 0, 0, BOS, 1, 2, 3], 4, NOTHING),
        ([BOS, 1, 2, 3, 4, 0, 0, 0, 0, 7, 1, 2, 3], 4, (4, 3, 1, True)),
    ],
    "lost text begins where a place and the next have left": [  # the offered 4 must lie as many tokens back as a window has
        ([BOS, 1, 2, 3, 4, 20, 21, 22, 1, 2, 3], 7, NOTHING),
        ([BOS, 1, 2, 3, 4, 20, 21, 22, 23, 1, 2, 3], 7, (4, 3, 1, True)),
        ([BOS, 1, 2, 3, 4, 20, 21, 22, 1, 2, 3], 8, NOTHING),  # neither in the window nor lost: its first token has left
    ],
    "a lost match must be strictly longer": [
        ([BOS, 1, 2, 3, 8, 30, 31, 32, 33, 34, 1, 2, 3, 9, 1, 2, 3], 9, (9, 3, 1, False)),
        ([BOS, 5, 1, 2, 3, 8, 30, 31, 32, 1, 2, 3, 9, 5, 1, 2, 3], 9, (8, 4, 1, True)),
        ([BOS, 5, 1, 2, 3, 8, 30, 31, 32, 1, 2, 3, 8, 5, 1, 2, 3], 9, (8, 4, 2, True)),
    ],
    "the query of a lost match lies in the window": [
        ([BOS, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], window, expected)
        for window, expected in ((5, (6, 5, 1, True)), (4, (6, 4, 1, True)), (2, NOTHING))
    ],
}
"""Rule -> streams, windows (of 100 tokens: all is within), and the hint at the end; every position ends a window of its own."""


@pytest.mark.parametrize("rule", BY_HAND)
def test_hints_are_those_that_one_finds_by_hand(rule: str) -> None:
    for ids, window, expected in BY_HAND[rule]:
        assert found(ids, window, 1)[-1] == expected, (ids, window)


def test_a_document_that_starts_after_the_window_has_no_lost_text() -> None:
    """Also not that of the document in which the window starts."""
    ids = [BOS, 1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9, BOS, 1, 2, 3]
    assert found(ids, 8, 4)[-1] == NOTHING


def test_a_match_counts_up_to_a_hundred_tokens() -> None:
    text = list(range(150))
    ids = [*text, 200, *text]
    assert [row[1] for row in found(ids, 400, 1)[151:]] == [0, 0, *range(3, 100), *[100] * 51]
    assert [row[1] for row in found([BOS, *ids], 140, 1)[152:]] == [0, 0, *range(3, 100), *[100] * 51]
    assert found([BOS, *ids], 140, 1)[-1] == (200, 100, 1, True)


def test_other_windows_may_be_given() -> None:
    ids = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    starts = torch.tensor([0, 0, 0, 0, 0, 0, 0, 3, 3, 5, 5])
    assert rows(find_hints(ids, 8, starts)) == brute(ids.tolist(), 8, starts.tolist())


def test_what_cannot_be_is_a_sentence() -> None:
    ids = torch.arange(6)
    for starts in ([0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [-1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match="0 to 3 tokens before"):
            find_hints(ids, 4, torch.tensor(starts))
    with pytest.raises(ValueError, match="tokens must be from 0"):
        find_hints(ids - 1, 64, torch.zeros(6, dtype=torch.int64))


def test_hints_are_taken_by_place() -> None:
    hints = find_hints(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]), 100, torch.zeros(8, dtype=torch.int64))
    assert len(hints) == 8
    assert (hints.token[6], hints.length[6], hints.votes[6], hints.cross[6]) == (4, 3, 1, False)
    assert (hints.token[5], hints.length[5], hints.votes[5], hints.cross[5]) == (-1, 0, 0, False)
    assert hints.offered.tolist() == [False] * 6 + [True] * 2
    assert rows(hints.at(slice(6, 8))) == rows(hints)[6:]
    assert rows(hints.at(torch.tensor([7, 6]))) == rows(hints)[:5:-1]
    assert len(find_hints(torch.zeros(0, dtype=torch.int64), 100, torch.zeros(0, dtype=torch.int64))) == 0


def test_the_automaton_has_room_for_the_worst_texts() -> None:
    """a b b b ... has the most states, a b b ... b c the most edges; a stream of documents uses the room again and again."""
    for n in (1, 2, 3, 50):
        for tail in ([], [2]):
            ids = [0, *[1] * n, *tail]
            assert found(ids * 3, 1, 1) == brute(ids * 3, 1, list(range(3 * len(ids))))
            documents = [BOS, *ids] * 5
            assert found(documents, 2, 1) == brute(documents, 2, every(len(documents), 2, 1).tolist())
    room = automaton(10)
    assert (len(room.states), len(room.edges)) == (22, 34)
    assert len(room.table) >= 1.5 * len(room.edges)


@pytest.mark.parametrize("text", ["sources", "one byte", "two bytes"])
def test_it_is_fast_on_any_text(text: str) -> None:
    """At least 1e5 tokens a second on one core; a walk over all places of a token would take minutes on the last two."""
    n = 200_000
    tokens = {
        "sources": standard_library().stream("train", n)[:n],
        "one byte": torch.zeros(n, dtype=torch.int64),
        "two bytes": torch.arange(n) % 2,
    }[text]
    find_hints(tokens[:100], 256, window_starts(100, 256, 64))
    starts = window_starts(n, 256, 64)
    with at_most(n / 1e5):
        hints = find_hints(tokens, 256, starts)
    assert hints.offered[1000:].double().mean() > 0.5
