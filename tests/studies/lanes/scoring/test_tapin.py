"""Tap-In's hints are those of the rule, tried place by place; nothing of the future is in them; no text makes them slow."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from studies.lanes.config import BOS
from studies.lanes.scoring.tapin import Hints, find_hints
from studies.lanes.scoring.tapin_index import automaton

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
