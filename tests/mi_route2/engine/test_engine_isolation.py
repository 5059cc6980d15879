"""Requests that cannot run are refused at once, and a request that fails while it runs fails alone."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from alone import alone
from engines import Doing, finish, followed, right, tiny
from families import VOCAB

from mi_route2.engine import engine as engine_module
from mi_route2.engine.cache import Slots
from mi_route2.engine.controllers import Controllers
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request
from mi_route2.engine.rules import Probe, Rule
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import state as state_module
from mi_route2.hosts.base import Host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

SITE, PROMPT = Site(1, "resid_pre"), tuple(range(3, 15))
ASK = Sampling(max_new=4, logprob_token_ids=tuple(range(VOCAB)))
VECTORS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def steered(number: int, **others: Any) -> Request:
    return Request(PROMPT, ASK, steering=Steering(base=(Steer(SITE, VECTORS[number]),)), **others)


# A forward that fails


@pytest.mark.parametrize("exact", [False, True])
def test_a_forward_that_fails_ends_the_requests_that_were_in_it_and_no_others(exact: bool) -> None:
    """Two decode while the prompt of a third runs out of memory in the same step: the third has the reason, the two go on."""
    host = tiny()
    engine, limit = Engine(host, exact=exact, block=4, prefix_bytes=0), 8

    def short_of_memory(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] > limit // (4 if exact else 1):
            raise RuntimeError("out of memory")

    others = [Request(PROMPT[:2], ASK), Request(PROMPT[4:6], ASK)]
    handle = host.model.get_submodule("blocks.0").register_forward_pre_hook(short_of_memory)
    try:
        numbers = [engine.submit(one) for one in others]
        engine.step()
        large = engine.submit(Request(PROMPT, ASK, capture=(Capture(SITE),)))
        results = finish(engine)
    finally:
        handle.remove()
    assert (results[large].finish, results[large].tokens) == ("error", [])
    assert "out of memory" in (results[large].error or "")
    assert engine.last_error == results[large].error
    for number, request in zip(numbers, others, strict=True):
        right(host, results[number], request)
    assert (engine.steering.requests, engine.busy) == ((), False)
    again = engine.generate([Request(PROMPT, ASK)], progress=False)[0]
    right(host, again, Request(PROMPT, ASK))


def test_the_request_that_makes_a_forward_fail_ends_alone_in_any_company() -> None:
    """Three prompts of one length share a forward, which the second of them makes impossible."""
    host = tiny()
    requests = [Request(PROMPT[i : i + 5], ASK, capture=(Capture(SITE),)) for i in range(3)]

    embedding = next(module for module in host.model.modules() if isinstance(module, torch.nn.Embedding))

    def refuse_tokens(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if any(row[:5] == list(requests[1].prompt) for row in args[0].tolist()):
            raise ValueError("a device\ndoes not like this one")

    handle = embedding.register_forward_pre_hook(refuse_tokens)
    try:
        found = Engine(host).generate(requests, progress=False)
    finally:
        handle.remove()
    assert found[1].error == "a forward of this request failed with ValueError: a device does not like this one"
    assert found[1].captured == {}
    for i in (0, 2):
        right(host, found[i], requests[i])
        truth = host.capture([SITE], torch.tensor([[*requests[i].prompt, *found[i].ids[:-1]]]))[SITE][0]
        torch.testing.assert_close(found[i].captured[SITE].rows, truth, rtol=0, atol=1e-10)


def test_a_tokenizer_that_fails_on_a_text_ends_that_request_alone() -> None:
    host = tiny()
    first = alone(host, Request(PROMPT, ASK)).ids[0]
    assert alone(host, Request(PROMPT[:3], ASK)).ids.count(first) == 0  # or this shows nothing

    class Partial:
        def decode(self, ids: list[int]) -> str:
            if first in ids:
                raise KeyError(first)
            return "a" * len(ids)

    asked = Sampling(max_new=4, stop=("never",), logprob_token_ids=ASK.logprob_token_ids)
    for how in (asked, ASK):
        failed, fine = Engine(host, tokenizer=Partial()).generate([Request(PROMPT, how), Request(PROMPT[:3], how)], progress=False)
        assert failed.finish == "error"
        assert "the tokenizer's decoding of what was generated failed with KeyError" in (failed.error or "")
        right(host, fine, Request(PROMPT[:3], how))


def test_a_controller_that_wants_what_is_not_there_is_explained_and_ends_nobody() -> None:
    seen: list[set[Site]] = []
    wanting = Doing(
        lambda view: seen.extend(set(one.captured) for one in view.requests), wants=frozenset({Site(9, "resid_pre"), SITE})
    )
    host = tiny()
    engine = Engine(host, controllers=Controllers([wanting]))
    (found,) = engine.generate([Request(PROMPT, ASK)], progress=False)
    right(host, found, Request(PROMPT, ASK))
    assert seen
    assert all(one == {SITE} for one in seen)
    assert "outside the model" in str(engine.controllers.snapshot()["recent"])


@pytest.mark.parametrize("grows", [False, True])
def test_a_request_for_whose_row_there_is_no_memory_ends_alone(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its admission, or when it has grown beyond its row; what it had reserved is free again."""
    host = tiny()
    engine = Engine(host, patch_slots=1, steering_rows=1, slot_bytes=1 << 30)
    model = engine.decoder
    slots = Slots(model.layers, 64, model.heads, model.width, most=64, dtype=torch.float64, start=16)  # two shelves: 16 and 64
    engine._residents.slots = engine._runner.slots = slots
    asked = replace(steered(0), sampling=Sampling(max_new=30 if grows else 4), patch=(Patch(SITE, 2, VECTORS[0]),))
    short = Request(PROMPT[:3], ASK)
    neighbor, other = engine.submit(short), engine.submit(asked)  # both wait, but there is memory for the first one alone
    resize, full = slots._resize, int(grows)

    def without_memory(shelf: int, rows: int) -> None:
        if rows > slots._shelves[shelf].shape[2] and (shelf == 1 if grows else rows > 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(shelf, rows)

    monkeypatch.setattr(slots, "_resize", without_memory)
    results = finish(engine)
    assert results[other].finish == "error"
    assert "no memory for its keys and values" in (results[other].error or "")
    assert len(results[other].tokens) == 5 * full
    right(host, results[neighbor], short)
    assert (engine._residents._reserved, slots.used, engine.steering.requests) == (0, 0, ())
    monkeypatch.undo()
    again = replace(asked, sampling=ASK)
    right(host, engine.generate([again], progress=False)[0], again)


def full(slots: Slots, method: str, caller: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make a copy of keys and values fail whenever ``caller`` asks for it; the list says that it was asked for."""
    real, asked = getattr(slots, method), list[bool]()

    def without_memory(*args: int) -> object:
        if sys._getframe(1).f_code.co_name == caller:
            asked.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    monkeypatch.setattr(slots, method, without_memory)
    return asked


@pytest.mark.parametrize("by", ["priority", "preempt", "pause"])
def test_a_preempted_request_for_whose_copy_there_is_no_memory_ends_alone(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tiny()
    engine = Engine(host, rows=2, prefix_bytes=0)
    first, urgent = Request(PROMPT, ASK), Request(PROMPT[2:], ASK, priority=1)
    beside = steered(1, priority=1)
    preempted, other = engine.submit(first), engine.submit(beside)
    results = {one.request: one for one in engine.step()}
    asked = full(engine._residents.slots, "save", "put_back", monkeypatch)
    if by == "preempt":
        engine.preempt(preempted)
    elif by == "pause":
        engine.pause("keep")
        engine.resume()
    last = engine.submit(urgent)
    results |= finish(engine)
    assert asked
    for number in (preempted, other) if by == "pause" else (preempted,):
        assert "no memory for its keys and values" in (results[number].error or "")
        assert len(results[number].tokens) == 1
    if by != "pause":
        right(host, results[other], beside)
    right(host, results[last], urgent)
    assert (engine._residents._reserved, engine._residents.slots.used, engine.steering.requests) == (0, 0, ())
    monkeypatch.undo()
    right(host, engine.generate([first], progress=False)[0], first)


def test_a_request_that_no_memory_could_keep_goes_on_under_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix whose keys and values are computed anew in any case."""
    host = tiny()
    engine, asked = Engine(host), Request(PROMPT, Sampling(max_new=1, logprob_token_ids=ASK.logprob_token_ids))
    number = engine.submit(Request(PROMPT, ASK))
    engine.step()
    full(engine._residents.slots, "save", "put_back", monkeypatch)
    engine.pause("keep")
    with torch.no_grad():
        next(host.model.parameters()).mul_(1.1)
    engine.resume()
    result = finish(engine)[number]
    assert result.finish == "length", result.error
    longer = replace(asked, prompt=(*PROMPT, *result.ids[:3]))
    torch.testing.assert_close(result.tokens[3].asked, engine.generate([longer], progress=False)[0].tokens[0].asked)


def test_a_prefix_that_no_memory_can_keep_costs_no_request_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its end either: a request of one token has one."""
    host = tiny()
    engine = Engine(host, block=4)
    asked = full(engine._residents.slots, "save", "<lambda>", monkeypatch)
    requests = [Request(PROMPT, replace(ASK, max_new=1)), Request(PROMPT[1:], ASK)]
    for request in (*requests, *requests):
        (result,) = engine.generate([request], progress=False)
        right(host, result, request)
    assert asked
    assert (len(engine.prefixes), engine.prefixes.bytes) == (0, 0)


def test_rows_that_no_memory_can_move_together_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    host = tiny()
    engine = Engine(host)
    asked = full(engine._residents.slots, "_resize", "free", monkeypatch)
    requests = [Request(PROMPT[i:], replace(ASK, max_new=2 + (i == 7) * 4)) for i in range(8)]
    for _ in range(2):
        for request, result in zip(requests, engine.generate(requests, progress=False), strict=True):
            right(host, result, request)
    assert asked
    assert (engine._residents._reserved, engine._residents.slots.used) == (0, 0)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "MicroGPT"])
def test_a_token_that_is_not_a_number_harms_only_those_who_have_it(family: str) -> None:
    """Token 0, with which shorter pieces used to be padded: its keys and values lie behind theirs, and 0 times NaN is NaN."""
    host = tiny(family)
    embedding = next(module for module in host.model.modules() if isinstance(module, torch.nn.Embedding))
    unembed = next(module for name, module in host.model.named_modules() if name.endswith(("lm_head", "unembed")))
    unembed.weight = torch.nn.Parameter(embedding.weight.detach().clone())  # tied to it in some families
    with torch.no_grad():
        embedding.weight[0] = float("nan")
    engine = Engine(host, block=4)
    engine.generate([Request((*PROMPT, 1), ASK)], progress=False)
    requests = [Request((*PROMPT, *range(20, 20 + count)), ASK) for count in (9, 5)]
    fresh = [Request(PROMPT[count:], ASK, salt="other") for count in (1, 4)]
    for request, result in zip((*requests, *fresh), engine.generate((*requests, *fresh), progress=False), strict=True):
        right(host, result, request)


# No memory for what comes after the forwards


def failing(name: str, caller: str, fails: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, of: Any = torch) -> list[bool]:
    """Make ``of.name`` run out of memory whenever ``caller`` calls it with what ``fails`` says; the list says how often it did."""
    real, asked = getattr(of, name), list[bool]()

    def without_memory(*args: Any, **given: Any) -> Any:
        if sys._getframe(1).f_code.co_name == caller and fails(*args):
            asked.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **given)

    monkeypatch.setattr(of, name, without_memory)
    return asked


@pytest.mark.parametrize("lacks", ["all at once", "the choice", "log-probabilities"])
def test_a_token_for_which_there_is_no_memory_ends_its_request_alone(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three in one step: the first one stops at its first token, and the others have one each."""
    host = tiny()
    large, beside = Request(PROMPT, replace(ASK, max_new=3)), Request(PROMPT[2:], ASK)
    stops = Request(PROMPT[4:], replace(ASK, stop_tokens=tuple(alone(host, Request(PROMPT[4:], ASK)).ids[:1])))
    engine = Engine(host)
    name, fails = {
        "all at once": ("choose", lambda _logits, how, _uniforms: len(how) > 1),
        "the choice": ("choose", lambda _logits, how, _uniforms: len(how) > 1 or how[0].max_new == 3),
        "log-probabilities": ("_detailed", lambda _token, _logits, how: how.max_new == 3),
    }[lacks]
    asked = failing(name, "_append", fails, monkeypatch, engine_module)
    numbers = [engine.submit(one) for one in (stops, large, beside)]
    results, told, _ = followed(engine)
    assert asked
    first, second, third = (results[number] for number in numbers)
    assert (first.finish, len(first.ids)) == ("stop", 1)
    right(host, third, beside)
    if lacks == "all at once":
        right(host, second, large)
    else:
        assert "failed with OutOfMemoryError: CUDA out of memory" in (second.error or "")
    assert told == {number: results[number].ids for number in numbers}
    assert (engine.busy, engine._residents._reserved, engine._residents.slots.used) == (False, 0, 0)


def test_logits_that_no_memory_can_hold_together_end_those_who_needed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lose nothing of a prompt of which a piece was computed in the same step."""
    host = tiny()
    monitor = Steering(monitors=(Monitor(SITE, VECTORS[0], name="m"),))
    long = Request(PROMPT, ASK, readings=True, norms=(SITE,), steering=monitor)
    engine = Engine(host, chunk=5)
    decoding = engine.submit(Request(PROMPT[:3], ASK))
    engine.step()
    numbers = engine.submit(long), engine.submit(Request(PROMPT[:4], ASK))
    asked = failing("cat", "_run", lambda *_: len(asked) < 1, monkeypatch)
    results = finish(engine)
    assert asked
    assert [results[number].finish for number in (decoding, *numbers)] == ["error", "length", "error"]
    assert "OutOfMemoryError: CUDA out of memory" in (engine.last_error or "")
    found = results[numbers[0]]
    right(host, found, long)
    assert list(found.readings) == list(found.norms) == list(range(len(PROMPT) + ASK.max_new - 1))


def test_a_look_for_changes_for_which_there_is_no_memory_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device it takes some: were it an error, that of no request, all of them would end."""
    host = tiny()
    engine, request = Engine(host), Request(PROMPT, ASK)
    asked = failing("checksums", "glance", lambda *_: len(asked) < 2, monkeypatch, state_module)
    (found,) = engine.generate([request], progress=False)
    right(host, found, request)
    assert len(asked) == 2


def test_captures_that_no_memory_can_hold_in_one_piece_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = tiny()
    engine = Engine(host)
    captures, beside = Request(PROMPT, ASK, capture=(Capture(SITE),)), Request(PROMPT[2:], ASK)
    numbers = engine.submit(captures), engine.submit(beside)
    asked = failing("cat", "settle", lambda *_: len(asked) < 1, monkeypatch)
    results = finish(engine)
    first, second = (results[number] for number in numbers)
    assert (asked, first.finish, first.captured) == ([True], "error", {})
    assert "no memory for its captured values" in (first.error or "")
    assert len(first.ids) == ASK.max_new
    right(host, second, beside)


def test_controllers_see_a_step_for_whose_log_probabilities_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule would miss its token, and the request would go on without it."""
    seen: list[tuple[int | None, float | None]] = []
    host, seeing = tiny(), Doing(lambda view: seen.extend((one.token, one.logprob) for one in view.requests))
    engine = Engine(host, controllers=Controllers([seeing]))
    asked = failing("log_softmax", "_logprobs", lambda *_: len(asked) < 1, monkeypatch, torch.Tensor)
    request = Request(PROMPT, ASK)
    (found,) = engine.generate([request], progress=False)
    right(host, found, request)
    assert asked
    assert [token for token, _ in seen] == found.ids
    assert [logprob is None for _, logprob in seen] == [True, False, False, False]


@pytest.mark.parametrize("table", [0, 1])
def test_a_request_for_whose_steering_there_is_no_memory_leaves_no_half_of_it(table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one with equal steering would find a row that holds nothing, or a part, and run on without a word."""
    host, calls = tiny(), count()
    engine = Engine(host, steering_rows=2)
    rule = Rule("rest_of_request", Probe(SITE, VECTORS[1], threshold=1e9), (Steer(Site(0, "resid_pre"), VECTORS[2]),))
    request = replace(steered(0), rules=(rule,))  # one row, and another for when the rule holds
    asked = failing("zeros", "_store", lambda *_: next(calls) == table, monkeypatch)
    (failed,) = engine.generate([request], progress=False)
    assert (asked, failed.error, engine.resources["steering_rows"]) == ([True], "CUDA out of memory", 0)
    right(host, engine.generate([request], progress=False)[0], steered(0))


# What is refused when it comes


def store_with(host: Host) -> RunStore:
    store = RunStore()
    Engine(host, store=store).generate([Request(PROMPT, ASK, capture=(Capture(SITE),), run="there")], progress=False)
    with store.writing("foreign", weights="3f9a") as writer:
        writer.append(SITE, [0], VECTORS[:1])
    return store


def patched(source: Any, alpha: Any = 1.0) -> dict[str, Any]:
    return {"patch": (Patch(SITE, 2, source, alpha),)}


CLOSING = Steering(monitors=(Monitor(SITE, VECTORS[0], quarantine="close"),))
NOWHERE, SHORT = (Rule("rest_of_request", add=(Steer(SITE, vector),)) for vector in ("nowhere", [1.0]))
CAPTURE, BEHIND = (Capture(SITE),), (Capture(SITE, TokenSelection(positions=(40,))),)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two patches in one place": ({"patch": (Patch(SITE, 2, "zeros"),) * 2}, "two patches are at"),
    "a source of another shape": (patched(torch.zeros(3)), "has shape"),
    "a share of another shape": (patched("zeros", torch.ones(3)), "has shape"),
    "an unknown vector to patch": (patched("nowhere"), "no vector 'nowhere'"),
    "an unknown run": (patched(FromRun("gone", 2)), "no run 'gone'"),
    "a position that a run has not": (patched(FromRun("there", 99)), "position 99"),
    "a site that a run has not": (patched(FromRun("there", 2, Site(0, "z"))), "has no rows at blocks.0.z"),
    "a run of other weights": (patched(FromRun("foreign", 0)), "captured with weights"),
    "a run that is there": ({"capture": CAPTURE, "run": "there"}, "there is already a run 'there'"),
    "a quarantine that is not there": ({"steering": CLOSING}, "a quarantine that does not exist"),
    "a rule for no conversation": (
        {"rules": (Rule("rest_of_conversation", attenuate=0.5),)},
        "for the rest of the conversation needs a conversation",
    ),
    "a rule with an unknown vector": ({"rules": (NOWHERE,)}, "no vector is registered as 'nowhere'"),
    "a rule of another shape": ({"rules": (SHORT,)}, "has 1 numbers, but the site has 16"),
    "a stop token that is none": ({"sampling": Sampling(stop_tokens=(3, VOCAB))}, f"token {VOCAB} is outside the vocabulary"),
    "a run without a name": ({"capture": CAPTURE, "run": ""}, "'' cannot name a run"),
    "a name that no run may have": ({"capture": CAPTURE, "run": "a\nb"}, "cannot name a run"),
    "no prompt": ({"prompt": ()}, "the prompt is empty"),
    "a token that is none": ({"prompt": (3, VOCAB)}, f"token {VOCAB} is outside the vocabulary: its ids are 0..{VOCAB - 1}"),
    "too many tokens": ({"prompt": (3,) * 60, "sampling": Sampling(max_new=6)}, "need 65 positions, but the context has 64"),
    "a patch behind the end": ({"prompt": (3, 4), "sampling": Sampling(max_new=1), **patched("zeros")}, r"computes 0\.\.1$"),
    "a capture behind the end": ({"prompt": (3, 4), "capture": BEHIND}, r"computes 0\.\.4$"),
    "two captures": ({"capture": CAPTURE * 2}, "two captures name"),
    "a stop text without a tokenizer": ({"sampling": Sampling(stop=("x",))}, "stop texts need a tokenizer"),
    "a layer that is not there": ({"capture": (Capture(Site(7, "z")),)}, r"outside the model: its layers are 0\.\.1"),
    "too many patches": ({"patch": (Patch(SITE, 1, "zeros"),) * 9}, "limit of 8"),
    "truth values for tokens": ({"prompt": (True, False)}, "token ids"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_can_never_be_met_is_refused_at_submission(what: str) -> None:
    fields, says = WRONG[what]
    host = tiny()
    engine = Engine(host, store=store_with(host), patch_slots=8)
    for told in (engine.submit, engine.check):
        with pytest.raises((ValueError, KeyError), match=says):
            told(Request(**({"prompt": PROMPT, "sampling": ASK} | fields)))
    assert not engine.busy
    assert (engine.steering.requests, engine.steering.snapshot()["rows"]["used"]) == ((), 0)


def test_two_requests_that_would_write_one_run_are_refused_at_submission() -> None:
    engine = Engine(tiny(), store=RunStore(), rows=1)
    writing = Request(PROMPT, ASK, capture=(Capture(SITE),), run="clean")
    engine.submit(writing)
    with pytest.raises(ValueError, match="another request of the engine already writes run 'clean'"):
        engine.submit(writing)
    with pytest.raises(ValueError, match="without a run store"):
        Engine(tiny()).submit(writing)
    assert [one.finish for one in finish(engine).values()] == ["length"]


def test_names_mean_what_they_meant_at_submission() -> None:
    """The second request waits for the row of the first; meanwhile its vector is registered anew and its run dropped."""
    host = tiny()
    store = store_with(host)
    engine = Engine(host, rows=1, store=store, vectors={"v": VECTORS[0]})
    source = store.rows("there", SITE, [3])[0]
    engine.submit(Request(PROMPT, ASK))
    waiting = engine.submit(
        Request(
            PROMPT,
            ASK,
            patch=(Patch(SITE, 2, "v"), Patch(SITE, 4, FromRun("there", 3))),
            steering=Steering(decode=(Steer(SITE, "v"),)),
        )
    )
    engine.steering.register("v", VECTORS[5])
    store.drop("there")
    results = finish(engine)
    meant = Request(
        PROMPT,
        ASK,
        patch=(Patch(SITE, 2, VECTORS[0]), Patch(SITE, 4, source)),
        steering=Steering(decode=(Steer(SITE, VECTORS[0]),)),
    )
    right(host, results[waiting], meant)


# Who waits for whom


def test_a_request_that_waits_for_a_steering_row_stops_nobody_who_needs_none() -> None:
    host = tiny()
    engine = Engine(host, steering_rows=1)
    long = engine.submit(Request(PROMPT, Sampling(max_new=40), steering=steered(0).steering))
    engine.step()
    waits, plain, shares = (engine.submit(one) for one in (steered(1), Request(PROMPT, ASK), steered(0)))
    first = {one.request: one for _ in range(8) for one in engine.step()}
    results = first | finish(engine)
    assert first.keys() == {plain, shares}
    assert list(results)[2:] == [long, waits]
    for number, request in ((waits, steered(1)), (plain, Request(PROMPT, ASK)), (shares, steered(0))):
        right(host, results[number], request)


def test_a_request_that_waits_for_a_patch_slot_stops_nobody_who_needs_none_and_is_not_overtaken() -> None:
    host = tiny()
    engine = Engine(host, patch_slots=2)
    patched = [Request(PROMPT, ASK, patch=(Patch(SITE, 2, VECTORS[i]),)) for i in range(2)]
    both = Request(PROMPT, ASK, patch=(Patch(SITE, 2, VECTORS[0]), Patch(SITE, 3, VECTORS[1])))
    order = [patched[0], both, patched[1], Request(PROMPT, ASK)]
    numbers = [engine.submit(one) for one in order]
    results = finish(engine)
    done = list(results)
    assert done.index(numbers[3]) < done.index(numbers[1]) < done.index(numbers[2])  # nobody takes the slot of who came first
    for number, request in zip(numbers, order, strict=True):
        right(host, results[number], request)


def test_what_can_never_be_granted_is_refused_and_what_never_will_be_any_more_ends() -> None:
    """Rows that configurations hold come back when somebody drops these, which nobody may ever do."""
    host = tiny()
    engine = Engine(host, steering_rows=2, rows=1)
    engine.submit(Request(PROMPT, ASK))
    waiting = engine.submit(steered(0))
    for i in (1, 2):
        engine.steering.hold(f"held {i}", steered(i).steering or Steering())
    with pytest.raises(ValueError, match=r"2 of 2 steering rows are held by configurations \(held 1, held 2\): drop one"):
        engine.submit(steered(3))
    shared = engine.submit(steered(1))
    results = finish(engine)
    assert results[waiting].finish == "error"
    assert "are held by configurations" in (results[waiting].error or "")
    right(host, results[shared], steered(1))
    engine.steering.drop("held 1")
    right(host, engine.generate([steered(0)], progress=False)[0], steered(0))


@pytest.mark.parametrize("steers", [False, True])
def test_a_request_that_lacks_what_a_preempted_one_keeps_waits_for_it(steers: bool) -> None:
    """The more urgent request takes the only row, but the patch slot stays with the request that was preempted."""
    host = tiny()
    engine = Engine(host, rows=1, patch_slots=1)
    patched, urgent = (
        replace(steered(i) if steers else Request(PROMPT, ASK), patch=(Patch(SITE, 2, VECTORS[i]),), priority=i) for i in range(2)
    )
    first = engine.submit(patched)
    engine.step()
    second = engine.submit(urgent)
    results = finish(engine)
    right(host, results[first], patched)
    right(host, results[second], urgent)


# Whose configuration it is


def test_the_scale_of_a_held_configuration_is_no_matter_of_a_request_with_the_same_numbers() -> None:
    host = tiny()
    config = Steering(decode=(Steer(SITE, VECTORS[0]),))
    engine = Engine(host, block=4)
    engine.steering.hold("mine", config)
    engine.steering.hold("theirs", config)
    own, routed, other = (engine.submit(Request(PROMPT, ASK, steering=one)) for one in (config, None, None))
    results = {one.request: one for one in engine.step()}
    engine.steering.override(routed, "mine")
    engine.steering.override(other, "theirs")
    engine.steering.set_scale(3.0, config="mine")
    results |= finish(engine)

    def scaled(scale: float) -> Request:
        return Request(PROMPT, ASK, steering=Steering(decode=(Steer(SITE, VECTORS[0], scale),)))

    for number, scale in ((own, 1.0), (routed, 3.0), (other, 1.0)):
        right(host, results[number], scaled(scale))
    assert engine.steering.snapshot()["configs"]["theirs"]["scale"] == 1.0


# The prefix cache


def test_a_prefix_that_is_longer_than_the_cache_is_found_as_far_as_it_fits() -> None:
    host = tiny()
    engine = Engine(host, block=1)
    (whole,) = engine.generate([Request(PROMPT, ASK)], progress=False)
    assert whole.cached == 0
    size = engine.prefixes.bytes // len(engine.prefixes)
    engine = Engine(host, block=1, prefix_bytes=10 * size)
    for cached in (0, 10, 10):
        (found,) = engine.generate([Request(PROMPT, ASK)], progress=False)
        assert found.cached == cached
        right(host, found, Request(PROMPT, ASK))
    assert engine.prefixes.bytes == 10 * size


def test_what_the_cache_counts_is_what_it_keeps() -> None:
    """A block that is left of a long prompt keeps no memory of the others."""
    engine = Engine(tiny(), block=2)
    engine.generate([Request(PROMPT, ASK)], progress=False)
    engine.prefixes.budget = 2 * engine.prefixes.bytes // len(engine.prefixes)
    engine.generate([Request(PROMPT[::-1], ASK)], progress=False)
    kept = {one.data.untyped_storage().data_ptr(): one.data.untyped_storage().nbytes() for one in engine.prefixes.blocks()}
    assert sum(kept.values()) == engine.prefixes.bytes <= engine.prefixes.budget


def test_a_capture_of_which_no_token_came_is_named() -> None:
    engine = Engine(tiny())
    absent = next(token for token in range(VOCAB) if token not in PROMPT)
    keep = (
        Capture(SITE, TokenSelection("generated")),
        Capture(Site(0, "z"), TokenSelection("prompt", token_ids={absent})),
        Capture(Site(1, "z")),
    )
    (found,) = engine.generate([Request(PROMPT, Sampling(max_new=1), capture=keep)], progress=False)
    assert list(found.captured) == [Site(1, "z")]
    assert found.unfired == [f"capture at {site}, of which no token came" for site in (SITE, Site(0, "z"))]


@pytest.mark.parametrize("scale", [True, float("nan"), -1.0])
def test_what_is_no_scale_is_refused(scale: Any) -> None:
    engine = Engine(tiny())
    with pytest.raises(ValueError, match="give a finite number that is not negative"):
        engine.steering.set_scale(scale)
    assert engine.steering.gain == 1.0
