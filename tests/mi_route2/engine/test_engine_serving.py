"""The engine under a server: events, readings of every token, limits, fair shares, pauses around a change of weights."""

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from alone import alone
from engines import finish, right, table, tiny
from families import FAMILIES, VOCAB
from hypothesis import assume, given
from hypothesis import strategies as st

from mi_route2.engine import Capture, Engine, QueueFullError, Request, Sampling
from mi_route2.engine.cache import Slots
from mi_route2.engine.rules import Probe, Rule
from mi_route2.engine.scheduler import Shares
from mi_route2.engine.text import SPLIT, WAITS, GrowingText, grown
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection, record
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from studies.environments.micro.model import MicroGPT

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


def test_events_of_others_during_a_generate_come_with_the_next_step() -> None:
    engine = Engine(tiny())
    number, tokens, results = engine.submit(Request(PROMPT, ASK)), [], {}
    for step in range(10):
        results |= {one.request: one for one in engine.step()}
        tokens += [event.token for event in engine.events if event.request == number]
        if step == 0:
            engine.generate([Request(PROMPT[:4], Sampling(max_new=2))], progress=False)
    assert [token.token for token in tokens if token] == results[number].ids


def test_requests_with_different_salts_share_no_prefix_and_equal_ones_do() -> None:
    engine = Engine(tiny(), block=4)
    for salt, hit in (("a", 0), ("b", 0), ("a", 8), ("", 0), ("b", 8)):
        (result,) = engine.generate([Request(PROMPT, Sampling(max_new=1), salt=salt)])
        assert result.cached == hit, salt


# Limits


def test_a_full_queue_refuses_and_takes_requests_again_later() -> None:
    engine = Engine(tiny(), rows=1, queue=2)
    numbers = [engine.submit(Request(PROMPT, ASK)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.submit(Request(PROMPT, ASK))
    engine.step()
    numbers.append(engine.submit(Request(PROMPT, ASK)))
    assert sorted(finish(engine)) == numbers


def test_a_deadline_ends_a_request_that_runs_or_waits_and_no_other() -> None:
    host = tiny()
    engine, long = Engine(host, rows=2), Sampling(max_new=12)
    free = Request(PROMPT, ASK)
    late = [engine.submit(one) for one in (Request(PROMPT, long, deadline=0.02), free, Request(PROMPT, long, deadline=0.02))]
    early = {result.request: result for result in engine.step()}  # on a busy machine the deadline may have passed by now
    time.sleep(0.03)
    results = early | finish(engine)
    for number in (late[0], late[2]):
        assert results[number].finish == "error"
        assert "deadline of 0.02 s has passed" in (results[number].error or "")
    right(host, results[late[1]], free)
    assert not engine.scheduler.running
    assert not engine._deadlines
    with pytest.raises(ValueError, match="deadline"):
        Request(PROMPT, deadline=0.0)


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_a_deadline_passes_in_a_pause_too(mode: Any) -> None:
    engine = Engine(tiny())
    if mode == "finish":
        engine.pause(mode)
    number, other = engine.submit(Request(PROMPT, ASK, deadline=60.0)), engine.submit(Request(PROMPT, ASK))
    if mode == "keep":
        engine.step()
        engine.pause(mode)
    assert not engine.busy
    engine._deadlines = dict.fromkeys(engine._deadlines, 0.0)
    assert engine.busy
    (result,) = engine.step()
    assert (result.request, "deadline of 60 s has passed" in (result.error or "")) == (number, True)
    assert not engine.busy
    engine.resume()
    assert finish(engine)[other].finish == "length"


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


class Queue:
    """Requests of owners in a row of one, and in which order they ended."""

    def __init__(self, **given: Any):
        self.engine, self.owners = Engine(tiny(), rows=1, **given), {}

    def submit(self, owner: str, count: int, max_new: int = 4, **given: Any) -> list[int]:
        request = Request(PROMPT[:3], Sampling(max_new=max_new), owner=owner, **given)
        numbers = [self.engine.submit(request) for _ in range(count)]
        self.owners |= dict.fromkeys(numbers, owner)
        return numbers

    def order(self) -> str:
        return "".join(self.owners[number] for number in finish(self.engine, 1000))


def test_owners_that_wait_take_turns_and_one_owner_is_served_in_order() -> None:
    queue = Queue()
    for owner, count in (("a", 5), ("b", 2), ("c", 1)):
        queue.submit(owner, count)
    assert queue.order() == "abcabaaa"
    engine = Engine(tiny(), rows=1)
    numbers = [engine.submit(Request(PROMPT[: 2 + i % 5], Sampling(max_new=1 + i % 3))) for i in range(8)]
    assert list(finish(engine)) == numbers


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=1, max_size=60))
def test_while_two_owners_wait_neither_gets_more_than_its_share_and_one_request(asked: list[tuple[str, int]]) -> None:
    """The bound of start-time fair queueing: the tokens of two owners that both wait differ by at most a request of each."""
    shares = Shares()
    queue = sorted((shares.turn(owner, i, tokens), i, owner, tokens) for i, (owner, tokens) in enumerate(asked))
    given_to = dict.fromkeys("abc", 0)
    left = {owner: sum(one == owner for *_, one, _ in queue) for owner in "abc"}
    longest = {owner: max((tokens for one, tokens in asked if one == owner), default=0) for owner in "abc"}
    for *_, owner, tokens in queue:
        waiting = [one for one in "abc" if left[one]]
        for one in waiting:
            for other in waiting:
                assert given_to[one] - given_to[other] <= longest[one] + longest[other]
        given_to[owner] += tokens
        left[owner] -= 1


def test_an_owner_that_comes_late_has_no_claim_on_the_time_before() -> None:
    shares = Shares()
    turns = [shares.turn("a", i, 10) for i in range(5)]
    for i in range(3):
        shares.served("a", i)
    assert turns == [0, 10, 20, 30, 40]
    assert [shares.turn("b", i, 10) for i in (5, 6)] == [20, 30]


def test_a_low_priority_does_not_wait_for_ever() -> None:
    def steps(patience: int | None) -> int | None:
        engine = Engine(tiny(), rows=1, patience=patience)
        low = engine.submit(Request(PROMPT[:3], Sampling(max_new=2), priority=0))
        for step in range(60):
            while len(engine.scheduler.waiting) < 3:
                engine.submit(Request(PROMPT[:3], Sampling(max_new=2), priority=3))
            if low in [one.request for one in engine.step()]:
                return step
        return None

    assert steps(None) is None
    found = steps(5)
    assert found is not None
    assert 15 <= found <= 25


@pytest.mark.parametrize("patience", [1, 8])
def test_requests_of_one_priority_never_preempt_each_other_however_long_they_wait(patience: int) -> None:
    """Otherwise all of a long queue would be begun, and keep its keys and values, before any of it has ended."""
    engine = Engine(tiny(), rows=2, patience=patience)
    numbers = [engine.submit(Request(PROMPT[:3], Sampling(max_new=20))) for _ in range(12)]
    results = finish(engine, 300)
    assert list(results) == numbers
    assert sum(result.preemptions for result in results.values()) == 0


def test_what_waits_for_its_turn_by_patience_preempts_nobody_whom_it_could_not_preempt_before() -> None:
    engine = Engine(tiny(), rows=1, patience=2)
    urgent = [engine.submit(Request(PROMPT[:3], Sampling(max_new=15), priority=3)) for _ in range(3)]
    low = engine.submit(Request(PROMPT[:3], Sampling(max_new=2)))
    lower = engine.submit(Request(PROMPT[:3], Sampling(max_new=2), priority=-1))
    results = finish(engine, 300)
    assert list(results) == [urgent[0], low, lower, *urgent[1:]]
    assert not any(result.preemptions for result in results.values())


def test_an_owner_that_comes_late_gets_its_share_beside_many_requests_that_have_waited_for_long() -> None:
    queue = Queue(patience=8)
    queue.submit("a", 20)
    for _ in range(12):
        queue.engine.step()
    queue.submit("b", 4)
    assert queue.order()[:8] == "babababa"


def test_an_urgent_request_moves_none_of_its_owners_others_ahead_of_newcomers() -> None:
    queue = Queue(patience=None)
    queue.submit("a", 8)
    queue.submit("a", 1, priority=1)
    queue.engine.step()
    queue.submit("b", 4)
    assert queue.order() == "aababababaaaa"


def test_many_requests_of_low_priority_cost_an_owner_no_turn_at_a_high_one() -> None:
    queue = Queue(patience=None)
    queue.submit("a", 8)
    queue.submit("b", 4, priority=1)
    queue.submit("a", 2, priority=1)
    assert queue.order() == "bababb" + "a" * 8


@pytest.mark.parametrize(("stays", "order"), [(0, "abbab"), (5, "abbab"), (9, "abbab"), (None, "babb")])
def test_cancelled_requests_cost_those_behind_them_no_turn(stays: int | None, order: str) -> None:
    queue = Queue(patience=None)
    numbers = queue.submit("a", 10, max_new=40)
    queue.submit("b", 3, max_new=40)
    if stays is not None:
        del numbers[stays]
    for number in numbers:
        queue.engine.cancel(number)
    queue.submit("a", 1, max_new=40)
    queue.owners |= dict.fromkeys(numbers, "")
    assert queue.order() == order


def long_host() -> Host:
    return open_host("torch", MicroGPT(replace(FAMILIES["MicroGPT"], context=1024), torch.Generator().manual_seed(0)))


def steered(engine: Engine, owner: str, scale: float, most: int, **given: Any) -> int:
    steering = Steering(base=(Steer(SITE, VECTOR, scale),)) if scale else None
    return engine.submit(Request(PROMPT[:3], Sampling(max_new=most), owner=owner, steering=steering, **given))


SWITCHED = (Rule("next_step", Probe(SITE, PROBE), add=(Steer(SITE, VECTOR, 0.4),)),)
"""Rules that need a second steering row."""


def waited_for(engine: Engine, number: int, most: int = 100) -> int:
    """Return the steps until a request has ended."""
    for steps in range(1, most):
        if any(result.request == number for result in engine.step()):
            return steps
    raise AssertionError(f"request {number} has not ended after {most} steps")


@pytest.mark.parametrize("scarce", ["rows", "slot_bytes", "steering_rows"])
def test_an_owner_that_comes_late_does_not_wait_for_the_end_of_what_others_run(scarce: str) -> None:
    """Beside it runs a request that lacks nothing which is scarce, and that makes way for nobody."""
    host = tiny()
    limit = {"rows": 64, scarce: 4 * Engine(host)._residents.slots.cost(52) if scarce == "slot_bytes" else 4}
    engine = Engine(host, block=4, **limit)

    def asked(scale: float, most: int, owner: str) -> Request:
        steering = Steering(base=(Steer(SITE, VECTOR, scale),)) if scarce == "steering_rows" else None
        return Request(PROMPT[:3], replace(ASK, max_new=most), owner=owner, steering=steering)

    long = [asked(0.1 * (1 + i), 50, "a") for i in range(9)]
    numbers = [engine.submit(request) for request in long]
    for _ in range(5):
        engine.step()
    assert engine.resources["slots"] == 4
    if scarce == "steering_rows":
        long.append(Request(PROMPT[:3], replace(ASK, max_new=48), owner="a"))
        numbers.append(engine.submit(long[-1]))
    for i in range(3):  # one after the other, each begun when the one before has ended
        assert waited_for(engine, engine.submit(asked(-0.1 * (1 + i), 3, "b"))) <= 6
    results = finish(engine, 1000)
    assert [number for number in results if number not in numbers[9:]][:4] == numbers[:4]  # whoever made way is the next to go on
    assert sorted(results) == numbers
    assert sum(result.preemptions for result in results.values()) == 3
    assert not any(results[number].preemptions for number in numbers[9:])
    for number, request in zip(numbers, long, strict=True):
        right(host, results[number], request)


@pytest.mark.parametrize("scarce", ["slot_bytes", "steering_rows"])
def test_no_newcomer_of_a_lower_priority_keeps_an_urgent_request_from_making_way(scarce: str) -> None:
    """Its owner runs something, but of a lower priority; the newcomer's owner runs nothing."""
    limit = {"slot_bytes": Engine(tiny())._residents.slots.cost(52)} if scarce == "slot_bytes" else {"steering_rows": 1}
    engine = Engine(tiny(), block=4, **limit)
    low = steered(engine, "a", 0.1, 50)
    for _ in range(3):
        engine.step()
    urgent, newcomer = steered(engine, "a", 0.2, 50, priority=5), steered(engine, "b", 0.3, 50)
    results = finish(engine, 400)
    assert next(iter(results)) == urgent
    assert results[low].preemptions >= 1
    assert results[newcomer].finish == "length"


def test_who_waits_behind_a_request_for_several_steering_rows_takes_none_back_from_others() -> None:
    """Whoever made way would get its row again in the next step, because those before it wait for more."""
    engine = Engine(tiny(), block=4, steering_rows=2)
    long = [steered(engine, "a", 0.1 * (1 + i), 50) for i in range(2)]
    for _ in range(3):
        engine.step()
    several, one = steered(engine, "b", 0.3, 3, rules=SWITCHED), steered(engine, "c", 0.5, 3)
    results = finish(engine)
    assert [results[number].preemptions for number in (*long, several, one)] == [0, 0, 0, 0]
    assert list(results) == [*long, several, one]


def test_way_is_made_for_who_lacks_a_steering_row_also_if_all_rows_were_taken_since_it_was_asked() -> None:
    """When it was asked its owner ran something, and when that had ended the other owner's next requests came first."""
    engine = Engine(long_host(), rows=3, steering_rows=1)
    steered(engine, "a", 0.1, 100)
    other = steered(engine, "b", 0.0, 400)
    engine.step()
    late = steered(engine, "b", 0.2, 3)
    engine.step()
    for _ in range(2):
        steered(engine, "a", 0.0, 80)
    engine.step()
    engine.cancel(other)
    assert waited_for(engine, late) <= 6


@pytest.mark.parametrize("lower", [False, True])
def test_nobody_makes_way_who_gives_back_only_a_row_that_the_other_one_shares(lower: bool) -> None:
    """It would take that row back in every second step, and the other one would go on waiting."""
    engine = Engine(tiny(), block=4, steering_rows=2)
    long = [steered(engine, "a", 0.1, 50, priority=int(lower)), steered(engine, "a", 0.3, 50)]
    engine.step()
    several = steered(engine, "b", 0.3, 3, rules=SWITCHED, priority=int(lower))
    results = finish(engine)
    assert [results[number].preemptions for number in (long[0], several)] == [1, 0]
    assert results[long[1]].preemptions <= int(lower)  # once, for the one that had made way
    assert next(iter(results)) == several


def test_nobody_makes_way_for_who_would_lack_another_row_then() -> None:
    """When it was asked that row was free, and then a preempted request took it back."""
    engine = Engine(tiny(), block=4, steering_rows=2)
    numbers = [steered(engine, "a", 0.1, 30, priority=1), steered(engine, "a", 0.2, 50)]
    engine.step()
    numbers.append(steered(engine, "a", 0.3, 3, rules=SWITCHED, priority=1))
    engine.step()
    engine.preempt(numbers[1])
    results = finish(engine)
    assert [results[number].preemptions for number in numbers] == [0, 2, 0]  # and once when the other one has ended


@pytest.mark.parametrize("lower", [False, True])
def test_a_key_that_waits_for_several_rows_keeps_none_from_an_owner_who_runs_nothing(lower: bool) -> None:
    engine = Engine(tiny(), block=4, steering_rows=2)
    long = [steered(engine, "a", 0.1, 50), steered(engine, "a", 0.2, 50, priority=-int(lower))]
    engine.step()
    for _ in range(4):  # so that its next requests come after those of the other owner
        used = steered(engine, "b", 0.0, 50)
        engine.step()
        engine.cancel(used)
    several = steered(engine, "a", 0.3, 3, rules=SWITCHED)
    engine.step()
    for i in range(3):
        assert waited_for(engine, steered(engine, "b", 0.5 + 0.1 * i, 3)) <= 6
    results = finish(engine)
    assert sorted(results) == [*long, several]
    assert results[long[0]].preemptions + results[long[1]].preemptions <= 3 + int(lower)


def test_who_made_way_gives_a_row_also_if_more_urgent_requests_take_all_others_first() -> None:
    """One of them had lacked a patch slot, so that nobody made way for it."""
    engine = Engine(tiny(), block=4, rows=5, steering_rows=1, patch_slots=1)
    patch = (Patch(SITE, 2, VECTOR),)
    engine.submit(Request(PROMPT[:3], Sampling(max_new=2), priority=2, patch=patch))
    steered(engine, "a", 0.1, 50)
    steered(engine, "a", 0.0, 50)
    engine.step()
    engine.submit(Request(PROMPT[:3], Sampling(max_new=50), priority=2, patch=patch))
    late = steered(engine, "b", 0.2, 3, priority=1)
    engine.step()
    for _ in range(3):
        steered(engine, "c", 0.0, 50, priority=2)
    assert waited_for(engine, late) <= 6


@pytest.mark.parametrize("priority", [0, 5])
def test_requests_that_share_a_row_one_after_the_other_keep_nobody_waiting_for_ever(priority: int) -> None:
    engine = Engine(tiny(), block=4, steering_rows=1, patience=8)
    steered(engine, "a", 0.1, 12)
    engine.step()
    late, ended, step = steered(engine, "b", 0.2, 3, priority=priority), set[int](), 0
    while late not in ended and step < 150:
        if step % 4 == 0:
            steered(engine, "a", 0.1, 12)
        ended |= {result.request for result in engine.step()}
        step += 1
    assert late in ended


def test_what_a_request_brings_is_not_checked_at_every_step_in_which_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may bring hundreds of vectors, and hundreds of requests may wait."""
    engine = Engine(tiny(), block=4, steering_rows=1)
    steered(engine, "a", 0.1, 50)
    engine.step()
    rows, checked = engine._steering.rows, list[Steering]()
    late, check = steered(engine, "a", 0.2, 3), rows.check
    monkeypatch.setattr(rows, "check", lambda spec: (checked.append(spec), check(spec)))
    del checked[:]
    for _ in range(32):
        engine.step()
    assert len(checked) <= 4
    assert finish(engine)[late].finish == "length"


def test_who_waits_for_a_patch_slot_and_needs_no_steering_row_keeps_none_from_others() -> None:
    engine = Engine(tiny(), block=4, steering_rows=1, patch_slots=1)
    patch = (Patch(SITE, 2, VECTOR),)
    engine.submit(Request(PROMPT[:3], Sampling(max_new=50), patch=patch))
    engine.step()
    engine.submit(Request(PROMPT[:3], Sampling(max_new=3), patch=patch, steering=Steering(monitors=(MONITOR,))))
    assert waited_for(engine, steered(engine, "client", 0.2, 3)) <= 6


def test_of_many_alike_that_wait_for_a_row_one_is_compared_with_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(tiny(), rows=2), list[object]()
    for _ in range(200):
        engine.submit(Request(PROMPT[:3], Sampling(max_new=20)))
    engine.step()
    victim = engine.scheduler._victim
    monkeypatch.setattr(engine.scheduler, "_victim", lambda *given: (asked.append(given), victim(*given))[1])
    engine.step()
    assert len(asked) <= 2


def test_who_asked_for_more_than_it_used_gets_one_row_for_one_preemption_and_costs_newcomers_no_turn() -> None:
    """Its turn is far behind all that the other owner has queued, none of which may be begun in its place."""
    engine = Engine(long_host(), rows=4)
    owners: dict[int, str] = {}

    def submit(owner: str, most: int, count: int = 1) -> list[int]:
        numbers = [engine.submit(Request(PROMPT[:3], Sampling(max_new=most), owner=owner)) for _ in range(count)]
        owners.update(dict.fromkeys(numbers, owner))
        return numbers

    (large,) = submit("b", 600)
    engine.step()
    submit("a", 12, 20)
    for _ in range(3):
        engine.step()
    engine.cancel(large)
    results = {one.request: one for one in engine.step()}
    (late,) = submit("b", 3)
    for _ in range(4):
        results |= {one.request: one for one in engine.step()}
    assert results[late].finish == "length"
    submit("c", 12, 6)
    results |= finish(engine, 1000)
    assert sum(one.preemptions for one in results.values()) == 2  # for b's and for the first of c's
    ended = [owners[number] for number in results if owners[number] != "b"]
    assert abs(ended[:12].count("a") - ended[:12].count("c")) <= 4  # the rows


def test_an_owner_that_runs_something_takes_no_row_from_others() -> None:
    engine = Engine(tiny(), rows=3)
    for owner in "aab" + "bbbb":
        engine.submit(Request(PROMPT[:3], Sampling(max_new=20), owner=owner))
    assert not any(result.preemptions for result in finish(engine, 300).values())


# Pauses


def changed(host: Host) -> None:
    with torch.no_grad():
        for p in host.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7), dtype=p.dtype))


@pytest.mark.parametrize("mode", ["abort", "finish", "keep"])
def test_weights_change_during_a_pause_and_every_result_is_of_one_model(mode: Any) -> None:
    host = tiny()
    engine = Engine(host, rows=2, block=4)
    requests = [Request(PROMPT[i:], ASK, steering=Steering(base=(Steer(SITE, VECTOR, 0.5),)) if i else None) for i in range(3)]
    before = [alone(host, request).logits.log_softmax(-1) for request in requests]
    numbers = [engine.submit(request) for request in requests]
    engine.step()
    engine.step()
    engine.pause(mode)
    if mode == "finish":
        with pytest.raises(RuntimeError, match="still running"):
            engine.resume()
    late = engine.submit(requests[0])
    results = finish(engine)
    assert late not in results
    changed(host)
    engine.resume()
    results |= finish(engine)
    right(host, results[late], requests[0])
    for number, request, truth in zip(numbers, requests, before, strict=True):
        result = results[number]
        if mode == "abort":
            assert result.finish == "cancelled"
        elif mode == "finish":
            torch.testing.assert_close(table(result), truth, rtol=0, atol=1e-10)
        else:  # tokens from before, which the new weights then read
            longer = Request((*request.prompt, *result.ids[:-1]), Sampling(max_new=1), steering=request.steering)
            found = torch.tensor(result.tokens[-1].asked, dtype=torch.float64)
            torch.testing.assert_close(found, alone(host, longer).logits[0].log_softmax(-1), rtol=0, atol=1e-10)


def test_a_pause_without_a_change_keeps_what_was_computed() -> None:
    host = tiny()
    engine = Engine(host, rows=2, block=4)
    request = Request(PROMPT, ASK, capture=(Capture(SITE, TokenSelection("all")),))
    number = engine.submit(request)
    engine.step()
    engine.pause("keep")
    assert not engine.busy
    with pytest.raises(RuntimeError, match="paused already"):
        engine.pause()
    with pytest.raises(RuntimeError, match="is paused"):
        engine.generate([request])
    engine.resume()
    result = finish(engine)[number]
    right(host, result, request)
    assert result.captured[SITE].positions == tuple(range(len(PROMPT) + 3))
    with pytest.raises(RuntimeError, match="not paused"):
        engine.resume()


def test_kept_requests_that_hold_values_of_the_weights_before_end_with_the_reason() -> None:
    host, store = tiny(), RunStore()
    engine = Engine(host, rows=4, block=4, store=store)
    engine.generate([Request(PROMPT, Sampling(max_new=1), capture=(Capture(SITE),), run="before")])
    writes = Request(PROMPT, ASK, capture=(Capture(SITE),), run="mixed")
    reads = Request(PROMPT, ASK, patch=(Patch(SITE, 13, FromRun("before", 3)),))
    captures = Request(PROMPT, ASK, capture=(Capture(SITE, TokenSelection("all")),))
    numbers = [engine.submit(one) for one in (writes, reads, captures)]
    engine.step()
    engine.step()
    engine.pause("keep")
    changed(host)
    engine.resume()
    results = finish(engine)
    for number in numbers[:2]:
        assert "weights were changed while it ran" in (results[number].error or "")
    assert list(store.runs()) == ["before"]
    result = results[numbers[2]]
    whole = Request((*PROMPT, *result.ids[:-1]), Sampling(max_new=1))
    torch.testing.assert_close(result.captured[SITE].rows, alone(host, whole, SITE).values[SITE], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["finish", "keep"])
def test_a_run_of_the_new_weights_can_be_read_by_who_comes_in_the_pause(mode: Any) -> None:
    """A request that read the weights of before, in the same pause, ends with the reason."""
    host, store = tiny(), RunStore()
    engine = Engine(host, rows=2, block=4, store=store)
    record(host, [SITE], torch.tensor([PROMPT]), store=store, runs=["old"])
    engine.submit(Request(PROMPT, ASK))
    engine.step()
    engine.pause(mode)
    finish(engine)
    reads = {run: Request(PROMPT, ASK, patch=(Patch(SITE, 5, FromRun(run, 3)),)) for run in ("old", "new")}
    stale = engine.submit(reads["old"])
    changed(host)
    record(host, [SITE], torch.tensor([PROMPT]), store=store, runs=["new"])
    fresh = engine.submit(reads["new"])
    with pytest.raises(ValueError, match="run 'old' is invalid"):
        engine.submit(reads["old"])
    engine.resume()
    results = finish(engine)
    assert "weights were changed while it ran" in (results[stale].error or "")
    value = store.rows("new", SITE, [3])[0]
    right(host, results[fresh], replace(reads["new"], patch=(Patch(SITE, 5, value),)))


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


@pytest.mark.parametrize("ends", ["length", "a stop token", "cancelled", "deadline"])
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
    number = engine.submit(Request(PROMPT, Sampling(max_new=most, stop=(SPLIT,), stop_tokens=stops), deadline=60.0))
    while engine.busy and len(engine.partial(number).tokens) <= first:
        results = engine.step()
        if results:
            break
    else:
        results = []
    if ends == "cancelled":
        engine.cancel(number)
    elif ends == "deadline":
        engine._deadlines = dict.fromkeys(engine._deadlines, 0.0)
    (result,) = results or engine.step()
    assert result.finish == {"length": "stop", "a stop token": "stop", "cancelled": "cancelled", "deadline": "error"}[ends]
    expected = Cut().decode(result.ids)
    assert result.text == (expected[: expected.index(SPLIT)] if SPLIT in expected else expected)
