"""Requests that cannot run are refused at once, and a request that fails while it runs fails alone."""

from typing import Any

import pytest
import torch
from alone import alone
from engines import finish, right, tiny
from families import VOCAB

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request
from mi_route2.engine.sampling import Sampling
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
    fresh = [Request(PROMPT[count:], ASK) for count in (1, 4)]
    for request, result in zip((*requests, *fresh), engine.generate((*requests, *fresh), progress=False), strict=True):
        right(host, result, request)


# No memory for what comes after the forwards


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
    "truth values for tokens": ({"prompt": (True, False)}, "token ids"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_can_never_be_met_is_refused_at_submission(what: str) -> None:
    fields, says = WRONG[what]
    host = tiny()
    engine = Engine(host, store=store_with(host))
    with pytest.raises((ValueError, KeyError), match=says):
        engine.submit(Request(**({"prompt": PROMPT, "sampling": ASK} | fields)))
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


def test_what_never_will_be_granted_ends() -> None:
    """Rows that configurations hold come back when somebody drops these, which nobody may ever do."""
    host = tiny()
    engine = Engine(host, steering_rows=2, rows=1)
    engine.submit(Request(PROMPT, ASK))
    waiting = engine.submit(steered(0))
    for i in (1, 2):
        engine.steering.hold(f"held {i}", steered(i).steering or Steering())
    shared = engine.submit(steered(1))
    results = finish(engine)
    assert results[waiting].finish == "error"
    assert "held configurations leave it no steering row" in (results[waiting].error or "")
    right(host, results[shared], steered(1))
    engine.steering.drop("held 1")
    right(host, engine.generate([steered(0)], progress=False)[0], steered(0))


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
    kept = {one.data.untyped_storage().data_ptr(): one.data.untyped_storage().nbytes() for one in engine.prefixes._blocks.values()}
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
