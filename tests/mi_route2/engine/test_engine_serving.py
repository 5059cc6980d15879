"""The engine under a server: events, readings of every token, limits, texts."""

from itertools import pairwise

import pytest
import torch
from engines import finish, right, tiny
from families import VOCAB
from hypothesis import assume, given
from hypothesis import strategies as st

from mi_route2.engine import Capture, Engine, QueueFullError, Request, Sampling
from mi_route2.engine.cache import Slots
from mi_route2.engine.text import SPLIT, WAITS, GrowingText, grown
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steering

SITE, PROMPT = Site(1, "resid_pre"), tuple(range(3, 15))
DRAW = torch.Generator().manual_seed(2)
PROBE, VECTOR = torch.randn(16, generator=DRAW, dtype=torch.float64), torch.randn(16, generator=DRAW, dtype=torch.float64)
MONITOR = Monitor(SITE, PROBE, sharpness=2.0, gates=(), name="probe")
ASK = Sampling(max_new=4, logprob_token_ids=tuple(range(VOCAB)))


# Events and readings


@pytest.mark.parametrize("exact", [False, True])
def test_events_are_the_tokens_and_readings_of_the_result_and_readings_those_of_captured_values(exact: bool) -> None:
    """In chunks, with preemption, beside others, and with the prompt in the prefix cache."""
    host = tiny()
    engine = Engine(host, chunk=5, rows=3, block=4, exact=exact)
    engine.generate([Request(PROMPT, Sampling(max_new=1))])
    asked = Request(
        PROMPT,
        ASK,
        steering=Steering(monitors=(MONITOR,)),
        readings=True,
        norms=(SITE,),
        capture=(Capture(SITE, TokenSelection("all")),),
    )
    number, other = engine.submit(asked), engine.submit(Request(PROMPT[:5], ASK))
    tokens, readings, norms, results = [], {}, {}, {}
    for step in range(40):
        results |= {one.request: one for one in engine.step()}
        for event in engine.events:
            if event.request == number:
                tokens += [event.token] if event.token else []
                assert not readings.keys() & event.readings.keys()
                readings |= event.readings
                norms |= event.norms
        if step == 1:
            engine.preempt(number)
        if not engine.busy:
            break
    result = results[number]
    assert [token.token for token in tokens] == result.ids
    assert (readings, norms) == (result.readings, result.norms)
    assert results[other].readings == {}
    values = result.captured[SITE].rows
    assert list(readings) == list(norms) == list(result.captured[SITE].positions) == list(range(len(PROMPT) + 3))
    scores = torch.tensor([one["probe"].score for one in readings.values()], dtype=torch.float64)
    gates = torch.tensor([one["probe"].gate for one in readings.values()], dtype=torch.float64)
    torch.testing.assert_close(scores, values @ PROBE, rtol=0, atol=1e-10)
    torch.testing.assert_close(gates, torch.sigmoid(2.0 * (values @ PROBE)), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.tensor([one[SITE] for one in norms.values()]).double(), values.norm(dim=-1), rtol=1e-6, atol=0)


# Limits


def test_a_full_queue_refuses_and_takes_requests_again_later() -> None:
    engine = Engine(tiny(), rows=1, queue=2)
    numbers = [engine.submit(Request(PROMPT, ASK)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.submit(Request(PROMPT, ASK))
    engine.step()
    numbers.append(engine.submit(Request(PROMPT, ASK)))
    assert sorted(finish(engine)) == numbers


def test_memory_follows_the_tokens_in_use_and_one_long_request_lengthens_no_other() -> None:
    """With rows of 4, 16 and 64 positions: what is computed stays right while requests outgrow their rows."""
    host = tiny()
    engine = Engine(host, rows=8, block=4, prefix_bytes=0)
    slots = Slots(2, 8, engine.decoder.heads, engine.decoder.width, most=64, dtype=torch.float64, start=4)
    engine._residents.slots = engine._runner.slots = slots
    requests = [
        Request(PROMPT[: 1 + i], Sampling(max_new=2 + 7 * (i % 5), logprob_token_ids=ASK.logprob_token_ids)) for i in range(8)
    ]
    numbers = [engine.submit(one) for one in (Request(PROMPT[:2], Sampling(max_new=60, stop_tokens=tuple(range(50)))), *requests)]
    engine.step()
    assert 0 < slots.bytes <= 8 * 8 * slots.cost(4)
    results = finish(engine)
    assert slots.bytes == 0
    for number, request in zip(numbers[1:], requests, strict=True):
        right(host, results[number], request)


def test_a_request_that_cannot_fit_is_refused_by_bytes_and_others_wait_for_room() -> None:
    host = tiny()
    row = Engine(host)._residents.slots.cost(1)
    engine = Engine(host, rows=4, slot_bytes=2 * row)
    numbers = [engine.submit(Request(PROMPT[i % 4 :], ASK)) for i in range(40)]
    order, most = [], 0
    while engine.busy:
        assert len(engine.scheduler.running) <= 2
        order += [one.request for one in engine.step()]
        most = max(most, engine.resources["slot_bytes"])
    assert order == numbers
    assert row <= most <= 4 * row  # a shelf may have more rows than are in use, but none for requests that only wait
    with pytest.raises(ValueError, match="bytes of keys and values, but the engine may hold"):
        Engine(host, slot_bytes=row - 1).submit(Request(PROMPT, ASK))


# Who comes first


"""Rules that need a second steering row."""


# Pauses


# Text that grows


class Bytes:
    """A tokenizer whose tokens are pieces of UTF-8 of one to three bytes."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def cut(raw: bytes, data: st.DataObject) -> Bytes:
    """A tokenizer of pieces of ``raw``, in order."""
    cuts = [0]
    while cuts[-1] < len(raw):
        cuts.append(min(len(raw), cuts[-1] + data.draw(st.integers(1, 3))))
    return Bytes([raw[a:b] for a, b in pairwise(cuts)])


def until(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first appearance of a stop text."""
    return text[: min((text.find(one) for one in stop if one in text), default=len(text))]


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.data())
def test_the_pieces_of_a_text_that_grows_are_the_text(text: str, data: st.DataObject) -> None:
    tokenizer = cut(text.encode(), data)
    growing = GrowingText(tokenizer)
    left, pieces = list(range(len(tokenizer.pieces))), []
    while left:
        count = data.draw(st.integers(1, 12))
        pieces.append(growing.push(left[0]) if count == 1 else growing.extend(left[:count]))
        del left[:count]
    assert "".join(pieces) == growing.text
    assert text.startswith(growing.text)
    assert "".join(pieces) + growing.end() == text == growing.text


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", " ", "stop", "st", "op"]), max_size=20),
    st.sampled_from([("stop",), ("ab", "ba b"), ("aa",)]),
)
def test_nothing_of_a_stop_text_is_ever_shown(words: list[str], stop: tuple[str, ...]) -> None:
    tokenizer = Bytes([word.encode() for word in words])
    growing, together, shown = GrowingText(tokenizer, stop), GrowingText(tokenizer, stop), ""
    at_once, expected = together.extend(range(len(words))) + together.end(), until("".join(words), stop)
    for i in range(len(words)):
        shown += growing.push(i)
        assert expected.startswith(shown)
        assert growing.stopped == any(one in "".join(words[: i + 1]) for one in stop)
        assert shown == expected or not growing.stopped
    assert shown + growing.end() == expected == at_once


class Spaced:
    """A tokenizer that leaves special tokens out, and of a text the space that its first word has, as SentencePiece does."""

    words = ("", " a", " b", "c", " ", "END")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


@given(st.lists(st.integers(0, 5), max_size=12), st.sampled_from([(), ("a END",), ("c b", " a a")]))
def test_a_word_behind_a_special_token_keeps_its_space(ids: list[int], stop: tuple[str, ...]) -> None:
    tokenizer, growing = Spaced(), GrowingText(Spaced(), stop)
    whole = tokenizer.decode(ids)
    expected = until(whole, stop)
    assert "".join(map(growing.push, ids)) + growing.end() == growing.text == expected
    together = GrowingText(tokenizer, stop)
    assert together.extend(ids) + together.end() == expected


@given(
    st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=12),
    st.sampled_from([(), (" a",), ("c b", " a a"), ("é",)]), st.booleans(),
)  # fmt: skip
def test_a_text_is_what_that_of_its_prompt_grows_by(prompt: list[int], ids: list[int], stop: tuple[str, ...], spaced: bool) -> None:
    """Oracle: the text of all tokens behind that of the prompt, which ends with a whole character."""
    pieces = [b"", b" a", b" b", b"c", b" ", b"END", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"<s>"]
    tokenizer = Bytes(pieces)
    if spaced:
        plain = tokenizer.decode
        tokenizer.decode = lambda some: plain(some).removeprefix(" ")
    before = tokenizer.decode(prompt)
    assume(not before.endswith(SPLIT))
    whole = tokenizer.decode([*prompt, *ids])[len(before) :]
    expected = until(whole, stop)
    growing, together = GrowingText(tokenizer, stop, prompt), GrowingText(tokenizer, stop, prompt)
    assert "".join(map(growing.push, ids)) + growing.end() == growing.text == expected
    assert together.extend(ids) + together.end() == expected
    assert grown(tokenizer, prompt, ids) == whole


def test_a_text_of_bytes_is_not_changed_by_its_prompt_and_a_long_prompt_costs_a_few_tokens() -> None:
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], "😀".encode()]
    for prompt in ([1], [0, 1], [3, 1], [0, 2], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]):
        for ids in ([2, 0], [0], [2], [1, 2, 3], []):
            growing = GrowingText(Bytes(pieces), (), prompt)
            assert "".join(map(growing.push, ids)) + growing.end() == Bytes(pieces).decode(ids) == grown(Bytes(pieces), prompt, ids)
    tokenizer = Bytes([b"x"] * 10)
    growing = GrowingText(tokenizer, ("never",), [0] * 10_000)
    growing.push(1)
    grown(tokenizer, [0] * 10_000, [1])
    assert tokenizer.decoded < 100


class Fallback:
    """A tokenizer of bytes of which a row is text only if all of it is, as those are that SentencePiece falls back to."""

    def decode(self, ids: list[int]) -> str:
        raw = bytes(ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return SPLIT * len(raw)


@given(st.text("é語😀a", max_size=5), st.text("é語😀a", max_size=5), st.integers(0, 3), st.data())
def test_an_unfinished_character_does_not_break_those_before_it(before: str, text: str, cut: int, data: st.DataObject) -> None:
    """However a stream groups its tokens."""
    raw = list(text.encode())[: len(text.encode()) - cut]
    whole = bytes(raw).decode(errors="ignore")
    expected = whole + SPLIT * (len(raw) - len(whole.encode()))
    growing, left, pieces = GrowingText(Fallback(), (), list(before.encode())), raw, []
    while left:
        count = data.draw(st.integers(0, 6))
        pieces.append(growing.extend(left[:count]))
        left = left[count:]
    assert "".join(pieces) + growing.end() == expected == grown(Fallback(), list(before.encode()), raw)


def test_a_result_continues_its_prompt_and_a_stop_text_may_begin_with_its_first_space() -> None:
    host, tokenizer = tiny(), Bytes([b" w%d" % i for i in range(VOCAB)])
    plain = tokenizer.decode
    tokenizer.decode = lambda some: plain(some).removeprefix(" ")
    (found,) = Engine(host, tokenizer=tokenizer).generate([Request(PROMPT, Sampling(max_new=3))], progress=False)
    assert found.text == plain(found.ids)
    stop = (f" w{found.ids[0]}",)
    (stopped,) = Engine(host, tokenizer=tokenizer).generate([Request(PROMPT, Sampling(max_new=3, stop=stop))], progress=False)
    assert (stopped.text, stopped.finish, len(stopped.ids)) == ("", "stop", 1)


def test_each_token_costs_a_decoding_of_a_few_and_bytes_that_are_no_text_come_out() -> None:
    tokenizer = Bytes([b"x"] * 400)
    growing = GrowingText(tokenizer, ("never",))
    for i in range(400):
        growing.push(i)
    assert tokenizer.decoded <= 4 * 400
    tokenizer.decoded, growing = 0, GrowingText(tokenizer)
    for i in range(0, 400, 8):
        growing.extend(range(i, i + 8))
    assert tokenizer.decoded <= 4 * 400
    for first in (b"x", b""):
        silent = Bytes([first, *[b""] * 400])
        growing = GrowingText(silent)
        for i in range(401):
            growing.push(i)
        assert silent.decoded <= 5 * 401
    broken = Bytes([b"\xff"] * 100)
    growing = GrowingText(broken)
    assert "".join(growing.push(i) for i in range(100)).count(SPLIT) >= 90
    assert broken.decoded <= 100 * 40


def test_the_engine_decodes_a_few_tokens_for_each_that_it_generates() -> None:
    tokenizer = Bytes([b"x"] * VOCAB)
    engine = Engine(tiny(), tokenizer=tokenizer)
    engine.submit(Request(PROMPT, Sampling(max_new=40, stop=("never",))))
    finish(engine)
    assert 40 <= tokenizer.decoded <= 4 * 40 + 40 + 5 * WAITS  # and the whole text at the end, behind the prompt's last tokens


@given(
    st.lists(st.sampled_from(["a", "b", "é", "€", "😀"]), min_size=1, max_size=8),
    st.sampled_from([("b",), ("ab", "é"), ("a€",), (SPLIT,)]),
    st.data(),
)
def test_a_text_stops_where_its_whole_text_does_wherever_its_tokens_cut_its_characters(
    letters: list[str], stop: tuple[str, ...], data: st.DataObject
) -> None:
    """Oracle: the shortest row of tokens whose text has a stop text outside of an unfinished last character."""
    raw = "".join(letters).encode()
    tokenizer = cut(raw[: data.draw(st.integers(1, len(raw)))], data)
    growing, shown = GrowingText(tokenizer, stop), ""
    for n in range(1, len(tokenizer.pieces) + 1):
        shown += growing.push(n - 1)
        certain = tokenizer.decode(list(range(n))).rstrip(SPLIT)
        assert growing.stopped == any(one in certain for one in stop)
        if growing.stopped:
            break
    shown += growing.end()
    whole = tokenizer.decode(list(range(n)))
    assert growing.stopped == any(one in whole for one in stop)
    assert shown == growing.text == until(whole, stop)


@pytest.mark.parametrize("stop", [(), ("😀é",)])
def test_characters_come_out_whole_however_many_tokens_in_a_row_end_within_one(stop: tuple[str, ...]) -> None:
    text = "b" + "😀€é" * 20
    raw = text.encode()
    places = [0, *(place for place in range(2, len(raw)) if raw[place] & 0xC0 == 0x80 and raw[place - 1] & 0xC0 == 0xC0), len(raw)]
    tokenizer = Bytes([raw[a:b] for a, b in pairwise(places)])
    assert all(tokenizer.decode([i]).endswith(SPLIT) for i in range(len(places) - 2))
    growing = GrowingText(tokenizer, stop)
    assert "".join(growing.push(i) for i in range(len(places) - 1)) + growing.end() == text


class Cut:
    """A tokenizer whose odd tokens are a stop text with the first byte of a character behind it."""

    def decode(self, ids: list[int]) -> str:
        return b"".join(b"END\xe2" if i % 2 else b"a." for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("ends", ["length", "a stop token", "cancelled"])
def test_a_stop_text_before_an_unfinished_character_ends_the_text_whatever_ends_the_request(ends: str) -> None:
    host = tiny()
    (plain,) = Engine(host).generate([Request(PROMPT, Sampling(max_new=12))], progress=False)
    first = next(i for i, token in enumerate(plain.ids) if token % 2)
    (found,) = Engine(host, tokenizer=Cut()).generate([Request(PROMPT, Sampling(max_new=first + 1, stop=("END",)))], progress=False)
    assert (found.finish, found.text, found.ids) == ("stop", "a." * first, plain.ids[: first + 1])
    # a stop text that is the unfinished character itself appears when no token follows
    engine = Engine(host, tokenizer=Cut())
    stops = (plain.ids[first],) if ends == "a stop token" else ()
    most = first + 1 if ends == "length" else 12
    number = engine.submit(Request(PROMPT, Sampling(max_new=most, stop=(SPLIT,), stop_tokens=stops)))
    while engine.busy and len(engine._requests[number].result.tokens) <= first:
        results = engine.step()
        if results:
            break
    else:
        results = []
    if ends == "cancelled":
        engine.cancel(number)
    (result,) = results or engine.step()
    assert result.finish == {"length": "stop", "a stop token": "stop", "cancelled": "cancelled"}[ends]
    expected = Cut().decode(result.ids)
    assert result.text == (expected[: expected.index(SPLIT)] if SPLIT in expected else expected)
