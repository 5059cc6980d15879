"""Longest earlier match at every position of a stream, in linear time for any text: compiled loops for ``tapin``.

Walking a chain of all earlier positions of a token takes longer the more repetitive the text is: one byte repeated n times costs n
squared. Two other structures find the same matches, and the earliest of the longest, exactly.

Within a window of W tokens, ``runs`` holds for every distance d < W how many tokens up to t agree with those d before them. One
comparison per distance updates it from t to t + 1 (a run grows by one or ends), over contiguous memory, for any text.

In the part of a document that has left the window, which only grows, a suffix automaton (Blumer et al. 1985) is used: a state
represents all substrings that end at the same positions, and stores the first of these. The longest suffix of the query that occurs
is updated along with it: it grows by at most one token per step, also while the text grows by one token per step. The total cost is
an amortized constant per token.

Votes need no search either: the number of candidates that offer c after the last three tokens is a count of four-grams.
"""

from typing import NamedTuple, no_type_check

import numpy as np

try:
    from numba import njit
except ImportError as error:
    raise ImportError("Tap-In's matcher is compiled by numba: pip install 'mi-route2[lanes]'") from error

LEAST = 3
"""Minimum number of tokens in which a candidate agrees with the query."""

_BLOCK = 128
_HASH = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number

# Columns of the states and of the edges, and positions in the counts.
_LENGTH, _LINK, _FIRST, _HEAD = 0, 1, 2, 3
_SOURCE, _SYMBOL, _TARGET, _AFTER = 0, 1, 2, 3
_STATES, _EDGES, _LAST, _MASK = 0, 1, 2, 3


class Automaton(NamedTuple):
    """Arrays of a suffix automaton. State 0 is the root. Edges are found by a hash table, and by a list per state for copies."""

    states: np.ndarray
    """[2 n + 2, 4]: length of the longest string, suffix link, first position at which the strings end, first edge."""
    edges: np.ndarray
    """[3 n + 4, 4]: source, symbol, target, the source's next edge."""
    table: np.ndarray
    """[slots]: edge numbers, -1 if empty."""
    counts: np.ndarray
    """[4]: number of states, number of edges, last state, and mask of the slots in use."""


def automaton(size: int) -> Automaton:
    """Allocate an automaton for a text of ``size`` tokens: about 100 bytes per token, of which the system commits what is used."""
    states, edges = (np.empty((rows, 4), dtype=np.int32) for rows in (2 * size + 2, 3 * size + 4))
    return Automaton(states, edges, np.empty(table_size(size), dtype=np.int32), np.zeros(4, dtype=np.int64))


def table_size(size: int) -> int:
    """Return the slots of the hash table for a text of ``size`` tokens: a power of two, filled to at most two thirds."""
    return 1 << (9 * size // 2 + 8).bit_length()


@njit
@no_type_check
def _clear(a, slots):
    """Reset to the automaton of the empty text, with a table of ``slots`` slots (a power of two)."""
    for slot in range(slots):
        a.table[slot] = -1
    a.counts[_STATES], a.counts[_EDGES], a.counts[_LAST], a.counts[_MASK] = 0, 0, 0, slots - 1
    _state(a, 0, -1, -1)


@njit
@no_type_check
def _slot(a, state, symbol):
    """Return the slot of the edge in the table, or the slot into which it would be inserted."""
    key = (np.int64(state) * 65536 + np.int64(symbol)) * _HASH
    slot = (key ^ (key >> 29)) & a.counts[_MASK]
    while True:
        edge = a.table[slot]
        if edge < 0 or (a.edges[edge, _SOURCE] == state and a.edges[edge, _SYMBOL] == symbol):
            return slot
        slot = (slot + 1) & a.counts[_MASK]


@njit
@no_type_check
def _connect(a, slot, state, symbol, target):
    """Insert a new edge into an empty slot."""
    edge = a.counts[_EDGES]
    a.counts[_EDGES] = edge + 1
    a.edges[edge, _SOURCE], a.edges[edge, _SYMBOL], a.edges[edge, _TARGET] = state, symbol, target
    a.edges[edge, _AFTER], a.states[state, _HEAD] = a.states[state, _HEAD], edge
    a.table[slot] = edge


@njit
@no_type_check
def _state(a, length, link, first):
    """Add a state without edges and return it."""
    state = a.counts[_STATES]
    a.counts[_STATES] = state + 1
    a.states[state, _LENGTH], a.states[state, _LINK], a.states[state, _FIRST], a.states[state, _HEAD] = length, link, first, -1
    return state


@njit
@no_type_check
def _append(a, symbol, position):
    """Append one token to the text; it is at ``position`` of the stream."""
    at = a.counts[_LAST]
    new = _state(a, a.states[at, _LENGTH] + 1, 0, position)
    a.counts[_LAST] = new
    slot = _slot(a, at, symbol)
    while a.table[slot] < 0:
        _connect(a, slot, at, symbol, new)
        at = np.int64(a.states[at, _LINK])
        if at < 0:
            return
        slot = _slot(a, at, symbol)
    old = np.int64(a.edges[a.table[slot], _TARGET])
    if a.states[at, _LENGTH] + 1 == a.states[old, _LENGTH]:
        a.states[new, _LINK] = old
        return
    copy = _state(a, a.states[at, _LENGTH] + 1, a.states[old, _LINK], a.states[old, _FIRST])
    edge = a.states[old, _HEAD]
    while edge >= 0:
        also = np.int64(a.edges[edge, _SYMBOL])
        _connect(a, _slot(a, copy, also), copy, also, np.int64(a.edges[edge, _TARGET]))
        edge = a.edges[edge, _AFTER]
    while at >= 0:
        slot = _slot(a, at, symbol)
        if a.table[slot] < 0 or a.edges[a.table[slot], _TARGET] != old:
            break
        a.edges[a.table[slot], _TARGET] = copy
        at = np.int64(a.states[at, _LINK])
    a.states[old, _LINK] = copy
    a.states[new, _LINK] = copy


@njit
@no_type_check
def _settle(a, state, length):
    """Return the state of the suffix of this length of a state's strings."""
    while a.states[state, _LINK] >= 0 and a.states[a.states[state, _LINK], _LENGTH] >= length:
        state = np.int64(a.states[state, _LINK])
    return state


@njit
@no_type_check
def _advance(a, state, length, symbol, most):
    """Return state and length of the longest suffix of (current match + ``symbol``) that occurs, at most ``most`` long."""
    slot = _slot(a, state, symbol)
    while a.table[slot] < 0:
        state = np.int64(a.states[state, _LINK])
        if state < 0:
            return np.int64(0), np.int64(0)
        length = np.int64(a.states[state, _LENGTH])
        slot = _slot(a, state, symbol)
    length = min(length + 1, most)
    return _settle(a, np.int64(a.edges[a.table[slot], _TARGET]), length), length


@njit
@no_type_check
def _extend_runs(runs, before, symbol, most):
    """Update ``runs[j]``: how many tokens, up to ``most``, agree backwards from position j of ``before`` [W] and from ``symbol``.

    ``symbol`` follows ``before``. These loops run over whole slices of short numbers, so that the compiler vectorizes them.
    """
    limit, sought = np.uint16(most), np.uint16(symbol)
    for j in range(len(runs)):
        grown = np.uint16(min(np.uint16(runs[j] + np.uint16(1)), limit))
        runs[j] = grown if before[j] == sought else np.uint16(0)


@njit
@no_type_check
def _highest(runs, cut):
    """Return the longest run; with ``cut`` a run is limited to the number of tokens up to its position."""
    best = np.uint16(0)
    for j in range(len(runs)):
        run = min(runs[j], np.uint16(j + 1)) if cut else runs[j]
        best = run if run > best else best
    return best


@njit
@no_type_check
def _longest_run(runs, low, most):
    """Return the longest run from position ``low`` on, cut off before it, and its position; the earliest of equals.

    (0, -1) if there is none. The last position is t - 1: what follows it is the query's own last token.
    """
    end = len(runs) - 1
    edge = min(low + most, end)
    best, at = _highest(runs[low:edge], True), low
    for j in range(edge, end, _BLOCK):
        highest = _highest(runs[j : min(j + _BLOCK, end)], False)
        if highest > best:
            best, at = highest, j
    if best < LEAST:
        return np.int64(0), np.int64(-1)
    while min(np.int64(runs[at]), at - low + 1) != best:
        at += 1
    return np.int64(best), np.int64(at)


@njit
@no_type_check
def match(padded, grams, starts, documents, slots, most, a, runs, count, token, length, votes, cross):
    """Fill ``token``, ``length``, ``votes`` and ``cross`` [n] with the winner at every position; ``token`` is -1 without one.

    ``padded`` [window + n] is the stream after ``window`` symbols that are in no text. ``grams`` [n]: a number for the four-gram of
    which position p is the third token. ``starts`` [n]: the first position of the window that scores a position. ``documents`` [n]:
    the start of a position's document; ``slots`` [n], at these starts: table slots for the part of the document that leaves the
    window. ``runs`` [window] and ``count`` [n] are work arrays of zeros.
    """
    window = len(runs)
    low, high = 2, 2  # counted candidates within the window: low <= p < high
    document, lost = 0, 2  # counted candidates outside of the window: document + 2 <= p < lost
    state, suffix = np.int64(0), np.int64(0)
    for t in range(len(starts)):
        symbol = np.int64(padded[window + t])
        if documents[t] == t:
            for p in range(document + 2, lost):
                count[grams[p]] -= 1
            document, lost, state, suffix = t, t + 2, np.int64(0), np.int64(0)
            _clear(a, slots[t])
        left = t - window - 1  # the latest position whose next token has left the window too
        if left >= document:
            _append(a, np.int64(padded[window + left]), left)
            if left >= document + 2:
                count[grams[left]] += 1
                lost = left + 1
            state = _settle(a, state, suffix)
            state, suffix = _advance(a, state, suffix, symbol, min(most, t - starts[t] + 1))
        while high <= t - 2:
            count[grams[high]] += 1
            high += 1
        while low < min(starts[t] + 2, high):
            count[grams[low]] -= 1
            low += 1
        _extend_runs(runs, padded[t : t + window], symbol, most)
        longest, j = _longest_run(runs, starts[t] - (t - window), most)
        p = t - window + j
        cross[t] = suffix >= LEAST and suffix > longest
        if cross[t]:
            longest, p = suffix, np.int64(a.states[state, _FIRST])
        token[t], length[t], votes[t] = -1, 0, 0
        if longest >= LEAST:
            token[t], length[t], votes[t] = padded[window + p + 1], longest, count[grams[p]]
