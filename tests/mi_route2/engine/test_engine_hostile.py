"""Faults that would be silent, and requests that would harm others."""

import itertools
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from operator import imul
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from engines import Doing, Letters, finish, followed, table, tiny
from families import SPECS, VOCAB, make_family, move
from torch.nn.modules.module import register_module_forward_pre_hook

from mi_route2.adapters import Adapters
from mi_route2.engine.cache import Slots, View
from mi_route2.engine.controllers import Action, Controllers, SetTier, StepView
from mi_route2.engine.engine import Engine
from mi_route2.engine.forward import Runner, Work
from mi_route2.engine.request import Capture, EngineRequest, Request, Result
from mi_route2.engine.residents import Residents
from mi_route2.engine.sampling import Sampling
from mi_route2.engine.scheduler import Scheduler
from mi_route2.engine.text import GrowingText
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching.patches import FromRun, Patch, resolve
from mi_route2.patching.sweep import prepare
from mi_route2.runs import RunStore, disk
from mi_route2.runs.record import record
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering, patch
from mi_route2.steering.state import SteeringState
from mi_route2.steering.table import SteeringRows

PROMPT, ASK = tuple(range(3, 23)), Sampling(max_new=3, logprob_token_ids=tuple(range(VOCAB)))
SITE, QUARANTINE = Site(1, "resid_pre"), Site(1, "quarantine_out", "mlp.down")
VECTOR = torch.randn(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CLOSE = 1e-10


def attached(host: Host, *patterns: str, kind: str = "lora", seed: int = 7, **spec: int) -> Adapters:
    """Adapters that were moved off their init; at every Linear of the blocks, if not at ``patterns``."""
    generator = torch.Generator().manual_seed(seed)
    return move(host.attach(*(patterns or ("blocks.*",)), spec=replace(SPECS[kind], **spec), generator=generator), 0.2)


def adapted(dtype: torch.dtype = torch.float64, *patterns: str, name: str = "torch") -> tuple[Host, Adapters]:
    host = tiny("Qwen3", dtype, name)
    return host, attached(host, *patterns) if patterns else attached(host, kind="svd-low")


def generated(engine: Engine, *requests: Request) -> list[torch.Tensor]:
    return [table(result) for result in engine.generate(requests, progress=False)]


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


# What a model is, while requests run


def part(host: Host, name: str) -> Any:
    return host.model.get_submodule(f"model.{name}")


def put(of: Any, name: str, value: Any) -> Callable[[], object]:
    """Set an attribute; return what undoes it."""
    if name == "forward" and not isinstance(of, type):
        setattr(of, name, value)
        return lambda: delattr(of, name)
    old = getattr(of, name)
    setattr(of, name, value)
    return lambda: setattr(of, name, old)


def doubled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: 2 * forward(*given)


Change = Callable[[Host], Callable[[], object]]
MLP = "layers.0.mlp"
CODE: dict[str, Change] = {
    "a forward": lambda host: put(part(host, MLP), "forward", doubled(part(host, MLP).forward)),
    "a class": lambda host: put(
        part(host, MLP), "__class__", type("Doubled", (kind := type(part(host, MLP)),), {"forward": doubled(kind.forward)})
    ),
    "the forward of the class": lambda host: put(kind := type(part(host, MLP)), "forward", doubled(kind.forward)),
    "a number": lambda host: put(part(host, "layers.0.input_layernorm"), "variance_epsilon", 1.0),
}
CHANGES: dict[str, tuple[Change, str]] = {
    "a hook": (lambda host: part(host, "layers.0").register_forward_hook(lambda _module, _args, out: 2 * out).remove, "hooks"),
    "a global hook": (lambda _host: register_module_forward_pre_hook(lambda _module, args: args).remove, "torch's global hooks"),
    "a buffer": (
        lambda host: put(part(host, "rotary_emb"), "inv_freq", 2 * part(host, "rotary_emb").inv_freq),
        "the tree of modules and tensors",
    ),
    "a module": (lambda host: put(part(host, MLP), "act_fn", torch.nn.Identity()), "the tree of modules and tensors"),
    "a parameter": (
        lambda host: put(part(host, "norm"), "weight", torch.nn.Parameter(3 * part(host, "norm").weight)),
        "the tree of modules and tensors",
    ),
    **{name: (change, "a module's class, forward, scale or setting") for name, change in CODE.items()},
}


@pytest.mark.parametrize("what", CODE)
def test_a_forward_a_class_or_a_number_that_changes_between_requests_leaves_nothing_of_before(what: str) -> None:
    """Keys and values of the cache belong to the code and the settings that computed them, as to the weights."""
    host, _ = adapted()
    engine = Engine(host, block=4, chunk=8)
    before = generated(engine, Request(PROMPT, ASK))[0]
    undo = CODE[what](host)
    found, truth = generated(engine, Request(PROMPT, ASK))[0], generated(Engine(host), Request(PROMPT, ASK))[0]
    assert far(found, truth) < CLOSE < 0.01 < far(truth, before)
    undo()
    assert far(generated(engine, Request(PROMPT, ASK))[0], before) < CLOSE


@pytest.mark.parametrize("what", CHANGES)
def test_a_hook_a_buffer_or_a_module_that_changes_while_a_request_runs_leaves_nothing_in_the_prefix_cache(what: str) -> None:
    """The change is an error that names it, and later requests get nothing that was computed under it."""
    (change, changed), (host, _) = CHANGES[what], adapted()
    truth = generated(Engine(host), Request(PROMPT, ASK))[0]
    engine = Engine(host, block=4, chunk=8)
    number = engine.submit(Request(PROMPT, ASK))
    engine.step()
    undo = change(host)
    try:
        with pytest.raises(RuntimeError, match=rf"the model changed while 1 requests ran \({changed}\): let them end before"):
            engine.step()
    finally:
        undo()
    engine.cancel(number)
    assert far(generated(engine, Request(PROMPT, ASK))[0], truth) < CLOSE


@pytest.mark.parametrize("name", ["torch", "transformer_lens"])
def test_engines_of_one_host_take_turns_and_leave_no_hook_between_steps(name: str) -> None:
    """The hooks of one engine are no change of the other's model, nor of a sweep's."""
    host, _ = adapted(name=name)
    requests = [Request(PROMPT, ASK, capture=(Capture(SITE),)), Request(PROMPT, ASK, capture=(Capture(QUARANTINE),))]
    truth = [generated(Engine(host), one)[0] for one in requests]
    sweep = prepare(host, clean=PROMPT, corrupt=PROMPT[::-1], sites=SITE, answer=3, foil=4)
    engines = [Engine(host, block=4, chunk=8) for _ in requests]
    for engine, one in zip(engines, requests, strict=True):
        engine.submit(one)
    cells, results = sweep.run(), []
    while any(engine.busy for engine in engines):
        results += [one for engine in engines for one in engine.step()]
        next(cells, None)
    for found, expected in zip(results, truth, strict=True):
        assert far(table(found), expected) < (CLOSE if name == "torch" else 1e-5)  # the bridge's softmax is float32


# What names a block


@pytest.mark.parametrize("alphas", [(1, 0), (0, 1), (1, 2)])
def test_whole_numbers_for_a_share_are_told_apart(alphas: tuple[int, int]) -> None:
    """A block that was computed under one share is never found under another, and 1 and 1.0 are one."""
    host, _ = adapted()
    first, second = (Request(PROMPT, ASK, patch=(Patch(SITE, 2, VECTOR, alpha),)) for alpha in alphas)
    engine = Engine(host, block=4)
    generated(engine, first)
    (found,) = generated(engine, second)
    (alone,) = generated(Engine(host), second)
    assert far(found, alone) < CLOSE
    (same,) = engine.generate([Request(PROMPT, ASK, patch=(Patch(SITE, 2, VECTOR, float(alphas[1])),))], progress=False)
    assert same.cached == 16


def swapped(weight: torch.Tensor, dim: int) -> None:
    weight.data[:] = weight.data.roll(1, dim)


WRITES: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "one number": ("model.layers.0.mlp.down_proj.base.weight", lambda weight: weight.data[0, 0].add_(3.0)),
    "rows permuted": ("model.layers.0.mlp.down_proj.base.weight", lambda weight: swapped(weight, 0)),
    "columns permuted": ("model.layers.0.mlp.down_proj.base.weight", lambda weight: swapped(weight, 1)),
    "embeddings of tokens exchanged": ("model.embed_tokens.weight", lambda weight: swapped(weight, 0)),
    "an adapter": ("model.layers.0.mlp.down_proj.route.kept.dS", lambda weight: swapped(weight, 0)),
}


@pytest.mark.parametrize("how", ["fused optimizer", *WRITES])
def test_writes_that_torch_does_not_count_are_seen_between_requests(how: str) -> None:
    host, _ = adapted(torch.float32)
    name, write = WRITES.get(how, WRITES["one number"])
    weight = host.model.get_parameter(name).requires_grad_()
    engine = Engine(host, block=4)
    (old,) = generated(engine, Request(PROMPT, ASK))
    before = weight._version
    if how == "fused optimizer":
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.3, fused=True).step()
    else:
        write(weight)
    assert weight._version == before  # or this shows nothing
    (found,) = generated(engine, Request(PROMPT, ASK))
    assert torch.equal(found, generated(Engine(host), Request(PROMPT, ASK))[0])
    assert far(found, old) > 1e-3


def test_the_values_of_a_request_are_of_one_run_that_another_thread_captures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read, begun = RunStore(), RunStore.rows, threading.Event()
    engine = Engine(tiny(), store=store)

    def write(value: float) -> None:
        with store.writing("source", weights=engine.host.weights_hash()) as writer:
            writer.append(SITE, [0, 1], torch.full((2, 16), value, dtype=torch.float64))

    def again() -> None:
        begun.wait(10)
        store.drop("source")
        write(2.0)

    def slowly(*asked: Any) -> torch.Tensor:
        rows = read(*asked)
        begun.set()
        other.join(0.3)
        return rows

    write(1.0)
    monkeypatch.setattr(RunStore, "rows", slowly)
    other = threading.Thread(target=again)
    other.start()
    number = engine.submit(Request(PROMPT, ASK, patch=tuple(Patch(SITE, i, FromRun("source", i)) for i in (0, 1))))
    assert [float(patch.source[0]) for patch in engine._sequences[number].patches] == [1.0, 1.0]
    other.join()
    engine.close()


READER = Request(PROMPT, ASK, patch=(Patch(SITE, 2, FromRun("clean", 2)),))


@pytest.mark.parametrize("how", WRITES)
def test_they_are_an_error_within_as_many_steps_as_there_are_tensors_where_requests_never_end(how: str) -> None:
    host, _ = adapted(torch.float32)
    name, write = WRITES[how]
    weight, tensors = host.model.get_parameter(name), len([*host.model.parameters(), *host.model.buffers()])
    engine, lengths = Engine(host, block=4), itertools.cycle((3, 8, 5))
    running = [engine.submit(Request(PROMPT, Sampling(max_new=next(lengths)))) for _ in range(3)]

    def steps(count: int) -> None:
        for _ in range(count):
            for result in engine.step():
                running.remove(result.request)
                assert running  # the engine is never idle
                running.append(engine.submit(Request(PROMPT, Sampling(max_new=next(lengths)))))

    steps(tensors + 3)  # nothing is found where nothing was written
    write(weight)
    with pytest.raises(RuntimeError, match=r"changed while 3 requests ran \((weights|the bytes of [^)]+)\)"):
        steps(tensors + 1)
    with pytest.raises(RuntimeError, match="changed while"):
        engine.step()  # it stays an error
    engine.close()
    (found,) = generated(engine, Request(PROMPT, ASK))
    assert torch.equal(found, generated(Engine(host), Request(PROMPT, ASK))[0])


def test_prefixes_are_dropped_that_were_computed_by_other_weights_before_the_old_ones_were_put_back() -> None:
    host, _ = adapted(torch.float32)
    weight, tensors = host.model.get_parameter("model.layers.0.mlp.down_proj.base.weight"), len([*host.model.parameters()])
    engine, old = Engine(host, block=4), weight.detach().clone()

    def steps() -> None:
        for _ in range(tensors + 10):
            engine.submit(Request(PROMPT, Sampling(max_new=3)))
            engine.step()

    engine.submit(Request(PROMPT[:2], Sampling(max_new=3)))
    weight.data.mul_(3.0)
    with pytest.raises(RuntimeError, match="changed while"):
        steps()
    weight.data[:] = old
    assert len(engine.prefixes)
    engine.close()
    (found,) = generated(engine, Request(PROMPT, ASK))
    assert torch.equal(found, generated(Engine(host), Request(PROMPT, ASK))[0])


def test_a_run_of_weights_that_are_gone_is_no_source() -> None:
    """Neither another switch of the adapters nor the old weights put back are other weights."""
    host, adapters = adapted()
    engine = Engine(host, store=RunStore())
    generated(engine, Request(PROMPT, ASK, capture=(Capture(SITE),), run="clean"))
    for switched in (adapters.deployed, adapters.merged):
        with switched():
            assert engine.generate([READER], progress=False)[0].finish == "length"
    weight = host.model.get_parameter("model.embed_tokens.weight")
    old = weight.detach().clone()
    weight.data[:] = old.roll(1, 0)
    sentence = r"run 'clean' is invalid: it was captured with weights \w{12}, and the model now has \w{12}; capture it again$"
    with pytest.raises(ValueError, match=sentence):
        engine.generate([READER], progress=False)
    weight.data[:] = old
    assert engine.generate([READER], progress=False)[0].finish == "length"


@pytest.mark.parametrize("writer", ["an engine", "record"])
def test_a_run_on_the_disk_outlives_the_process_and_not_its_weights(writer: str, tmp_path: Path) -> None:
    """Another host of the same weights may read it. A hash that somebody made up is that of no model."""
    host, _ = adapted()
    with RunStore(folder=tmp_path) as store:
        if writer == "record":
            record(host, [SITE], torch.tensor([PROMPT]), store=store, runs=["clean"])
        else:
            generated(Engine(host, store=store), Request(PROMPT, ASK, capture=(Capture(SITE),), run="clean"))
        with store.writing("foreign", weights="3f9a") as foreign:
            foreign.append(SITE, [2], VECTOR[None])
    adapter = "layers.0.mlp.down_proj.route.kept.dS"
    for change, readable in ((None, True), ("host", True), ("embed_tokens.weight", False), (adapter, False)):
        host, _ = adapted(name="transformer_lens" if change == "host" else "torch")
        if change not in (None, "host"):
            swapped(host.model.get_parameter(f"model.{change}"), 0)
        with RunStore(folder=tmp_path) as store:
            engine = Engine(host, store=store)
            if readable:
                assert engine.generate([READER], progress=False)[0].finish == "length"
            else:
                with pytest.raises(ValueError, match="run 'clean' is invalid"):
                    engine.submit(READER)
            with pytest.raises(ValueError, match="captured with weights 3f9a"):
                engine.submit(replace(READER, patch=(Patch(SITE, 2, FromRun("foreign", 2)),)))


# Sites that are not there


def test_what_does_not_fire_as_the_adapters_are_switched_is_refused_and_harms_nobody() -> None:
    host, adapters = adapted()
    engine = Engine(host)
    whole = generated(engine, Request(PROMPT, ASK, capture=(Capture(QUARANTINE),)))
    closing = Steering(monitors=(Monitor(Site(0, "resid_pre"), VECTOR, quarantine="close"),))
    with adapters.deployed():
        plain = engine.submit(Request(PROMPT, ASK))
        for asked in (
            Request(PROMPT, ASK, capture=(Capture(QUARANTINE),)),
            Request(PROMPT, ASK, patch=(Patch(QUARANTINE, 2, "zeros"),)),
            Request(PROMPT, ASK, steering=Steering(base=(Steer(QUARANTINE, VECTOR),))),
        ):
            with pytest.raises(ValueError, match=r"mlp\.down\.quarantine_out does not fire in this model as its adapters"):
                engine.submit(asked)
        with pytest.raises(ValueError, match="close a quarantine that does not exist"):
            engine.submit(Request(PROMPT, ASK, steering=closing))
        (deleted,) = [one for _ in range(3) for one in engine.step()]
        assert deleted.request == plain
        assert far(table(deleted), generated(Engine(host), Request(PROMPT, ASK))[0]) < CLOSE
    found, gated = generated(engine, Request(PROMPT, ASK, capture=(Capture(QUARANTINE),)), Request(PROMPT, ASK, steering=closing))
    assert far(found, whole[0]) < CLOSE < far(gated, whole[0])  # and all of it is back with the quarantine


def test_what_is_to_act_on_everybody_and_does_not_fire_is_said_when_a_request_comes() -> None:
    host, adapters = adapted()
    for set_up in (
        lambda state: state.set_global("decode", [Steer(QUARANTINE, VECTOR)]),
        lambda state: state.set_monitor(Monitor(Site(0, "resid_pre"), VECTOR, quarantine="close")),
        lambda state: state.set_tier([Steer(QUARANTINE, VECTOR)]),
    ):
        engine = Engine(host)
        set_up(engine.steering)
        assert engine.generate([Request(PROMPT, ASK)], progress=False)[0].finish == "length"
        with adapters.deployed():
            for _ in range(2):
                with pytest.raises(ValueError, match="does not fire in this model as its adapters are switched"):
                    engine.submit(Request(PROMPT, ASK))
        assert engine.generate([Request(PROMPT, ASK)], progress=False)[0].finish == "length"


def test_the_unembeddings_adapters_are_captured_patched_and_steered_at_every_position() -> None:
    """Prompts of several lengths in one forward, whose logits are asked for at their last tokens alone."""
    host, _ = adapted(torch.float64, "unembed", "blocks.*.mlp.*")
    site, first, second = Site(None, "kept_a", "unembed"), PROMPT[:5], PROMPT[5:8]
    source = torch.arange(4.0, dtype=torch.float64)
    requests = [
        Request(first, ASK, patch=(Patch(site, 2, source), Patch(site, 4, source)), capture=(Capture(site),)),
        Request(second, ASK, steering=Steering(base=(Steer(site, source),)), capture=(Capture(site),)),
    ]
    results = Engine(host).generate(requests, progress=False)
    for result, request in zip(results, requests, strict=True):
        tokens = torch.tensor([[*request.prompt, *result.ids[:-1]]])
        assert far(result.captured[site].rows, host.capture([site], tokens)[site][0]) < CLOSE

        def edit(h: torch.Tensor, request: Request = request) -> torch.Tensor:
            h = h.clone() if request.patch else h + source
            for one in request.patch:
                h[:, one.position] = source
            return h

        with torch.no_grad(), host.hooks({site: edit}):
            truth = host.logits(tokens)[0, len(request.prompt) - 1 :].log_softmax(-1)
        assert far(table(result), truth) < CLOSE


def test_angles_that_depend_on_the_longest_neighbor_are_refused() -> None:
    model = make_family("Llama")
    config: Any = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "longrope"}
    with pytest.raises(ValueError, match="depends on the whole batch"):
        Decoder(open_host("torch", model))


def test_attention_that_takes_no_mask_of_single_queries_is_refused() -> None:
    model = make_family("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        Decoder(open_host("torch", model))


# Whom a request may harm


def test_a_buffer_that_is_written_again_changes_no_patch() -> None:
    host, _ = adapted()
    engine, buffer, shares = Engine(host, block=4), VECTOR.clone(), torch.ones(16, dtype=torch.float64)
    mine = engine.submit(Request(PROMPT, ASK, patch=(Patch(SITE, 2, buffer, shares),)))
    buffer.zero_()
    shares.zero_()
    (result,) = [one for _ in range(3) for one in engine.step()]
    assert result.request == mine
    (fresh,) = generated(Engine(host), Request(PROMPT, ASK, patch=(Patch(SITE, 2, VECTOR),)))
    assert far(table(result), fresh) < CLOSE


def test_a_controller_that_pauses_the_engine_ends_a_generate_and_not_the_process() -> None:
    host, _ = adapted()
    pausing = Doing(lambda view: engine.pause("keep") if view.step == 1 else None)
    engine = Engine(host, controllers=Controllers([pausing]))
    with pytest.raises(RuntimeError, match="paused"):
        engine.generate([Request(PROMPT, ASK)], progress=False)
    engine.resume()
    assert not engine.busy


@pytest.mark.parametrize("asks", ["step", "generate"])
def test_a_controller_that_begins_a_step_within_a_step_is_told_so_and_no_request_gets_too_many_tokens(asks: str) -> None:
    def judge(_view: StepView) -> None:
        engine.step() if asks == "step" else engine.generate([Request(PROMPT[:2], Sampling(max_new=1))], progress=False)

    host, _ = adapted()
    engine = Engine(host, controllers=Controllers([Doing(judge)]))
    asked = [Request(PROMPT, Sampling(max_new=n, temperature=n % 2, seed=1)) for n in (1, 2, 5)]
    results = engine.generate(asked, progress=False)
    assert [(one.finish, len(one.ids)) for one in results] == [("length", 1), ("length", 2), ("length", 5)]
    assert "submit" in str(engine.controllers.snapshot()["recent"][-1]["failed"])
    assert [one.ids for one in results] == [one.ids for one in Engine(host).generate(asked, progress=False)]
    assert not engine.busy


def test_a_controller_may_cancel_a_request_that_ends_in_this_very_step() -> None:
    def cancel(view: StepView) -> None:
        for one in view.requests:
            engine.cancel(one.request)

    host, _ = adapted()
    engine = Engine(host, controllers=Controllers([Doing(cancel)]))
    results = engine.generate([Request(PROMPT, Sampling(max_new=1)), Request(PROMPT, ASK)], progress=False)
    assert [(one.finish, len(one.ids)) for one in results] == [("cancelled", 1), ("cancelled", 1)]


@pytest.mark.parametrize("when", ["on its way", "amid its prompt", "at its end", "without memory", "before it runs"])
def test_a_store_that_ends_a_run_ends_that_request_alone(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalidated on its way (while notes are to be added to it), no disk when it is to be written, closed before it begins."""
    host, _ = adapted()
    store = RunStore(folder=tmp_path)
    engine = Engine(host, rows=1 if when == "before it runs" else 8, chunk=2 if when == "amid its prompt" else 256, store=store)
    beside = engine.submit(Request(PROMPT, ASK))
    behind = Steering(base=(Steer(Site(engine.decoder.layers - 1, "resid_post"), VECTOR),))
    steered = Request(PROMPT, Sampling(max_new=2), capture=(Capture(SITE),), run="x", steering=behind)
    writing = engine.submit(steered)
    results = {one.request: one for one in engine.step()}
    if when == "at its end":
        shutil.rmtree(tmp_path / "shards")
    elif when == "without memory":
        monkeypatch.setattr(disk, "save", lambda *_, **__: bytes(1 << 60))
    elif when != "before it runs":
        store.invalidate("other")
        engine.submit(Request(PROMPT, ASK))
    else:
        store.close()
    results |= finish(engine)
    assert results[writing].finish == "error"
    assert results[writing].error
    assert far(table(results[beside]), generated(Engine(host), Request(PROMPT, ASK))[0]) < CLOSE
    assert engine.steering.snapshot()["requests"] == {}


def test_generate_leaves_nothing_where_one_is_refused_and_keeps_what_others_are_owed() -> None:
    host, _ = adapted()
    engine = Engine(host, store=RunStore())
    mine = engine.submit(Request(PROMPT, ASK))
    good = Request(PROMPT, ASK, capture=(Capture(SITE),), run="clean")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([good, Request((VOCAB,), ASK)], progress=False)
    assert [one.finish for one in engine.generate([good], progress=False)] == ["length"]
    assert [one.request for one in engine.step()] == [mine]
    assert not engine.busy


def test_a_name_is_one_vector_for_patches_and_for_steering() -> None:
    host, _ = adapted()
    engine = Engine(host, vectors={"v": VECTOR})
    engine.steering.register("v", 2 * VECTOR)
    engine.steering.register("w", VECTOR)
    for name, vector in (("v", 2 * VECTOR), ("w", VECTOR)):
        by_name, inline = (Request(PROMPT, ASK, patch=(Patch(SITE, 2, source),)) for source in (name, vector))
        assert far(*generated(engine, by_name, inline)) < CLOSE


# Numbers


@pytest.mark.parametrize("alpha", [0.1, torch.full((16,), 0.1)])
def test_a_share_is_not_rounded_to_half_precision(alpha: float | torch.Tensor) -> None:
    """0.1 in bfloat16 is off by a thousandth, which a value of 1000 shows."""
    source, h = 1000 * torch.ones(16, dtype=torch.bfloat16), torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    (one,) = resolve([Patch(SITE, 2, source, alpha)], lambda _site: (16,), dtype=torch.bfloat16)
    found = Work(patches=[(0, 2, one)]).put(h)
    assert torch.equal(found[0, 2], patch(h[0, 2], source, alpha))
    assert float(found[0, 2, 0]) == 100.0


# What a new user writes

_WRONG = """
import numpy as np
import torch
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.engine.controllers import AsyncController, Controllers, Override, SetMonitor, apply_all
from mi_route2.hosts import open_host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs.record import TokenSelection
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from mi_route2.sites import Site
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig

config = MicroConfig(vocab=50, d=16, layers=2, heads=4, mlp=24, context=64)
host = open_host("torch", MicroGPT(config, torch.Generator().manual_seed(0)).eval())
P, A, S, V = (3, 4, 5), Sampling(max_new=3), Site(1, "resid_pre"), torch.zeros(16)
wrong = [
    lambda: Request("hi", A), lambda: Request(3, A), lambda: Request((3.0,), A), lambda: Request(torch.tensor([[3, 4]]), A),
    lambda: Request((-1,), A), lambda: Request(P, 16), lambda: Request(P, A, patch=Patch(S, 2, V)),
    lambda: Request(P, A, capture=Capture(S)), lambda: Request(P, A, capture=(S,)),
    lambda: Request(P, A, steering=Steer(S, V)), lambda: Request(P, A, steering=Steering(base=Steer(S, V))),
    lambda: Request(P, A, priority=None), lambda: Request(P, A, rules=({"when": "always"},)),
    lambda: Sampling(stop="END"), lambda: Sampling(stop_tokens=5), lambda: Sampling(max_new=2.5), lambda: Sampling(max_new=None),
    lambda: Sampling(temperature="hot"), lambda: Sampling(logprob_token_ids=5), lambda: Sampling(top_k=1.5),
    lambda: Sampling(temperature=float("nan")), lambda: Sampling(logprobs="all"),
    lambda: Patch("blocks.1.resid_pre", 2, V), lambda: Patch(S, 2.5, V), lambda: Patch(S, 2, [0.0] * 16),
    lambda: Patch(S, 2, V * float("nan")), lambda: Patch(S, 2, torch.tensor([1.0, float("-inf")])),
    lambda: Patch(S, 2, V, alpha=[1.0]), lambda: Patch(S, 2, V, alpha=float("nan")), lambda: Steer("blocks.1.resid_pre", V),
    lambda: Clamp("z", V, low=0.0), lambda: Monitor("z", V), lambda: Capture("z"), lambda: Monitor(S, V, adds=Steer(S, V)),
    lambda: Request(P, A, patch=(Patch(Site(9, "resid_pre"), 2, V),)),
]
for number, make in enumerate(wrong):
    engine = Engine(host)
    try:
        engine.submit(make())
    except (ValueError, KeyError) as error:
        text = str(error.args[0])
        assert "\\n" not in text and 15 < len(text) < 250 and " " in text, (number, text)
        assert not engine.busy, number
    else:
        raise AssertionError(f"number {number} was taken")
assert Engine(host).generate([Request([3, 4], A), Request(torch.tensor([3, 4]), A)])[0].finish == "length"

for row in ([3, 5], np.array([3, 5]), torch.tensor([3, 5]), [np.int64(3), torch.tensor(5)], range(3, 6, 2), iter((3, 5))):
    assert Request(row).prompt == (3, 5) and {type(token) for token in Request((*P, np.int64(7))).prompt} == {int}
assert set(Sampling(stop_tokens={3, 5}).stop_tokens) == {3, 5}
for rows in (np.array([5, 3]), torch.tensor([5, 3]), [np.int32(5), 3], {3, 5}):
    assert TokenSelection(positions=rows).positions == (3, 5) and TokenSelection(token_ids=rows).token_ids == {3, 5}

class Plain:
    name = "plain"
    def on_step(self, view):
        return ()

def plain(**given):
    made = Plain()
    vars(made).update(given)
    return made

class Later(Plain):
    async def on_step(self, view):
        return ()

no_ids = "prompt is one row of token ids, as (5, 17), not"
refused = [
    *((lambda row=row: Request(row), no_ids) for row in (b"abc", bytearray(b"a"), {17, 5}, {5: 1}, [torch.tensor(True)], None)),
    *((lambda row=row: Request(row), no_ids) for row in ([np.True_], np.array([True]), np.array([[3]]), 2.5, [[3, 4]])),
    *((lambda rows=rows: TokenSelection(positions=rows), "whole number") for rows in (b"ab", "ab", {3: 1}, np.array([True]))),
    *((lambda rows=rows: TokenSelection(positions=rows), "whole number") for rows in (np.array(3), np.array([0.5]))),
    *((lambda rows=rows: TokenSelection(positions=rows), "whole number") for rows in (torch.tensor([[3]]), 3)),
    (lambda: Controllers(AsyncController()), "sync is a list of controllers, not one AsyncController"),
    (lambda: Controllers(Plain()), "write Controllers(sync=[controller])"),
    (lambda: Controllers(queues=AsyncController()), "queues is a list of controllers, not one AsyncController"),
    (lambda: Controllers([AsyncController()]), "give it in queues"),
    (lambda: Controllers(queues=[Plain()]), "queues take an AsyncController, not one Plain"),
    (lambda: Controllers([Plain]), "an object, not the class Plain: write Plain(...)"),
    (lambda: Controllers([object()]), "give it on_step(view)"),
    (lambda: Controllers([plain(name=5)]), "the name of Plain is 5"),
    (lambda: Controllers([Later()]), "is async, and no loop runs it"),
    (lambda: Controllers([plain(wants=None)]), "'plain' wants None: give a set of sites"),
    (lambda: Controllers([plain(wants=S)]), "give a set of sites"),
    (lambda: Controllers([plain(wants=iter([S]))]), "give a set of sites"),
    (lambda: Controllers([plain(wants="blocks.0.resid_pre")]), "give a set of sites"),
    (lambda: Engine(host, controllers=Controllers([plain(name="rules")])), "'rules', which is the name of the engine's own"),
    (lambda: Engine(host, controllers=Controllers(queues=[AsyncController("rules")])), "which is the name of the engine's own"),
    (lambda: AsyncController(capacity=0), "capacity = 0 is not valid"),
    (lambda: AsyncController(capacity=True), "capacity = True is not valid"),
]
for number, (make, says) in enumerate(refused):
    try:
        make()
    except (TypeError, ValueError) as error:
        assert says in str(error) and "\\n" not in str(error) and len(str(error)) < 250, (number, str(error))
    else:
        raise AssertionError(f"refusal {number} did not come: {says}")

# an override fails closed with its monitor, whatever kind of whole number names the request; what is no number names none
for given, fine in ((0, True), (np.int64(0), True), (np.uint8(0), True), *((one, False) for one in (False, 0.0, "0", [0], None)),
                    (torch.tensor(0), False), (np.bool_(False), False), (np.float64(0), False)):
    state = Engine(host).steering
    state.admit(0, None)
    state.hold("b", Steering(base=(Steer(S, V + 1),)))
    outcomes = apply_all(state, [Override(given, "b"), SetMonitor(Monitor(S, [1.0]), 0 if given is None else given)])
    assert [type(one).__name__ for one in outcomes] == ["Rejected", "Rejected"], (given, outcomes)
    assert ("goes with it" if fine else "is not running") in outcomes[0].reason, outcomes
    assert state.routing(0) is None, given
    assert (type(apply_all(state, [Override(given, "b")])[0]).__name__ == "Applied") == fine
"""


def test_what_a_new_user_gets_wrong_is_one_sentence_and_never_reaches_a_step() -> None:
    """In a process of its own: here every call's types are checked before."""
    root = Path(__file__).parents[3]
    found = subprocess.run([sys.executable, "-c", _WRONG], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr


# Padding, and hooks that hold numbers of their own


@pytest.mark.parametrize("family", ["MicroGPT", "Qwen3"])
def test_a_shorter_piece_writes_no_padding_behind_the_end_of_its_row(family: str) -> None:
    """The last piece of a prompt that fills its row, beside a longer one: an index out of range would end a CUDA process."""
    host = open_host("torch", make_family(family, torch.float64))
    long = tuple(i % VOCAB for i in range(Decoder(host).context))
    asked = [Request(prompt, replace(ASK, max_new=1)) for prompt in (long, long[24:48])]
    truth = [host.logits(torch.tensor([one.prompt]))[0, -1].detach().log_softmax(-1) for one in asked]
    forwards: list[int] = []
    counting = Decoder(host).blocks[0].register_forward_pre_hook(lambda _module, args: forwards.append(len(args[0])))
    engine = Engine(host, chunk=len(long) - 16)
    engine.submit(asked[0])
    engine.step()
    engine.submit(asked[1])
    results = engine.step()
    counting.remove()
    assert forwards == [1, 2]  # no forward failed and was repeated for each of its requests
    for result, wanted in zip(results, truth, strict=True):
        assert far(table(result)[0], wanted) < CLOSE


@pytest.mark.parametrize(
    ("name", "where"), [("torch", "hook"), ("torch", "module"), ("torch", "class"), ("transformer_lens", "hook")]
)
def test_nothing_is_reused_under_a_function_that_may_hold_numbers_of_its_own(name: str, where: str) -> None:
    """A hook, or a forward that was put on a module or a class, whose vector changes between two requests: torch counts nothing."""
    host = open_host(name, make_family("Qwen3", torch.float64))
    vector = VECTOR.clone()
    engine = Engine(host, block=4)
    before = generated(engine, Request(PROMPT, ASK))[0]
    block: Any = Decoder(host).blocks[0]
    site = Site(0, "mlp_out")
    owner: Any = type(block.mlp) if where == "class" else block.mlp
    usual = owner.forward

    def adds(*args: Any, **kwargs: Any) -> torch.Tensor:
        return usual(*args, **kwargs) + vector * float(where != "class" or args[0] is block.mlp)

    with host.hooks({site: lambda h: h + vector}) if where == "hook" else nullcontext():
        if where != "hook":
            owner.forward = adds
        for _ in range(2):
            found, anew = (generated(one, Request(PROMPT, ASK))[0] for one in (engine, Engine(host, block=4)))
            assert far(found, anew) < CLOSE
            assert far(found, before) > 0.01
            vector.mul_(-3)
    if where == "module":
        del block.mlp.forward
    elif where == "class":
        owner.forward = usual
    hits = engine.prefixes.hits
    assert far(generated(engine, Request(PROMPT, ASK))[0], before) < CLOSE
    assert far(generated(engine, Request(PROMPT, ASK))[0], before) < CLOSE
    assert engine.prefixes.hits > hits  # and without them it is used again


class Pushed(torch.nn.Module):
    """A wrapper of a user's own, whose vector torch does not count."""

    def __init__(self, inner: torch.nn.Module, vector: torch.Tensor):
        super().__init__()
        self.inner, self.vector = inner, vector

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.vector


def wrapped(host: Host) -> list[Callable[[], object]]:
    """Wrap an MLP; return changes of the wrapper's vector."""
    layer: Any = host.model.get_submodule("model.layers.0")
    layer.mlp = wrapper = Pushed(layer.mlp, VECTOR.clone())
    return [lambda: wrapper.vector.mul_(-3), lambda: setattr(wrapper, "vector", 2 * VECTOR)]


def tuned(host: Host) -> list[Callable[[], object]]:
    """Inject two adapters of PEFT; return switches and scales of these."""
    model: Any = host.model
    spec = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    tuner = peft.get_peft_model(model, spec)
    tuner.add_adapter("other", spec)
    tuner.double().eval()
    switches: Any = tuner.base_model
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    return [
        switches.disable_adapter_layers,
        switches.enable_adapter_layers,
        lambda: switches.set_adapter("other"),
        lambda: layer.set_scale("other", 3.0),
        lambda: setattr(layer, "scaling", {name: 0.5 * scale for name, scale in layer.scaling.items()}),
        lambda: layer.scaling.update(other=np.float64(2.0)),
        lambda: layer.scaling.update(other=imul(layer.scaling["other"], 2.0)),  # in place if it is a tensor
    ]


@pytest.mark.parametrize("given", [wrapped, tuned])
def test_nothing_is_reused_under_a_module_of_others_that_may_hold_numbers_of_its_own(
    given: Callable[[Host], list[Callable[[], object]]],
) -> None:
    host = tiny("Qwen3")
    changes = given(host)
    engine = Engine(host, block=4)
    last = generated(engine, Request(PROMPT, ASK))[0]
    for change in changes:
        change()
        found, anew = (generated(one, Request(PROMPT, ASK))[0] for one in (engine, Engine(host, block=4)))
        assert far(found, anew) < CLOSE
        assert far(found, last) > 1e-3
        last = found


@pytest.mark.parametrize("switch", [0, 2, 3, 4, 5, 6])
def test_a_switch_or_scale_of_peft_while_a_request_or_a_sweep_runs_is_an_error(switch: int) -> None:
    """Scales may be numbers of numpy or torch, and the dict of them may be another one."""
    host = tiny("Qwen3")
    changes = tuned(host)
    layer: Any = host.model.get_submodule("model.layers.0.self_attn.q_proj")
    layer.scaling["other"] = {5: np.float64(1.5), 6: torch.tensor(1.5)}.get(switch, 1.5)
    engine = Engine(host)
    engine.submit(Request(PROMPT, ASK))
    engine.step()
    planned = prepare(host, clean=[3, 4, 5], corrupt=[6, 4, 7], sites="resid_pre", answer=3, foil=4)
    changes[switch]()
    with pytest.raises(RuntimeError, match="the model changed while 1 requests"):
        engine.step()
    with pytest.raises(RuntimeError, match="have changed since this sweep was prepared"):
        planned.grid(progress=False)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_model_that_takes_no_cache_is_refused(name: str) -> None:
    """Transformers takes the cache away from layers that checkpoint; a model without dropout says nothing of it."""
    host = open_host("torch", make_family(name, torch.float64))
    host.model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue]
    host.model.train()
    with pytest.raises(RuntimeError, match=r"gradient checkpointing.*call eval"):
        Engine(host).submit(Request((3, 4, 5), Sampling(max_new=2)))
    host.model.eval()
    assert Engine(host).generate([Request((3, 4, 5), Sampling(max_new=2))], progress=False)[0].finish == "length"


def test_a_prefix_of_autocast_is_not_reused_without_it() -> None:
    engine = Engine(open_host("torch", make_family("Qwen3", torch.float32)), block=4)
    request = Request(tuple(range(3, 20)), Sampling(max_new=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.generate([request], progress=False)
        assert engine.generate([request], progress=False)[0].cached > 0
    assert engine.generate([request], progress=False)[0].cached == 0


def forget(_view: StepView) -> list[Action]:
    """A tier whose entry stands where a list of entries belongs (the checks of this suite would not let it be made)."""
    action = object.__new__(SetTier)
    object.__setattr__(action, "entries", Steer(Site(0, "resid_post"), torch.ones(16)))
    return [action]


@pytest.mark.parametrize("sampling", [Sampling(max_new=3), Sampling(max_new=3, temperature=1.0, seed=1)])
def test_an_action_that_cannot_be_read_is_rejected_and_no_request_outlives_its_length(sampling: Sampling) -> None:
    engine = Engine(tiny("Qwen3"), controllers=Controllers([Doing(forget)]))
    (result,) = engine.generate([Request((3, 4, 5), sampling)], progress=False)
    assert (result.finish, len(result.tokens)) == ("length", 3)
    assert engine.controllers.ledger.counts["doing"]["rejected"] == 3


@pytest.mark.parametrize("runs", [False, True])
def test_a_generate_that_is_withdrawn_ends_nothing_that_an_owner_held_before(runs: bool) -> None:
    """As if its requests had never been submitted; but an owner whose own last request ended meanwhile is gone."""
    host, _ = adapted()
    engine, calm = Engine(host), Steering(decode=(Steer(SITE, VECTOR),))
    if runs:
        engine.submit(Request(PROMPT, Sampling(max_new=1), owner="alice"))
    engine.steering.hold("calm", calm, owner="alice")

    def several():
        yield Request(PROMPT, ASK, owner="alice")
        engine.step()
        yield Request((VOCAB,))

    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate(several(), progress=False)
    assert list(engine.steering.snapshot()["configs"]) == ([] if runs else ["calm"])
    engine.generate([Request(PROMPT, ASK, owner="alice")], progress=False)
    assert not engine.steering.snapshot()["configs"]


def test_an_owner_stays_as_long_as_requests_of_its_wait_and_no_longer() -> None:
    host, prompt = tiny("Qwen3"), tuple(range(3, 12))
    site, last = Site(0, "resid_post"), Sampling(max_new=3, logprobs=5)
    found = {}
    for rows in (2, 1):
        engine = Engine(host, rows=rows)
        always = Monitor(site, torch.zeros(16), threshold=-1e6, gates=(), adds=(Steer(site, torch.ones(16), 4.0),), name="m")
        engine.steering.set_monitor(always, owner="alice")
        requests = [Request(prompt, Sampling(max_new=2), owner="alice"), Request(prompt[:5], last, owner="alice")]
        found[rows] = [t.logprob for t in engine.generate(requests, progress=False)[1].tokens]
        assert not engine.steering.snapshot()["monitors"]
    assert found[1] == pytest.approx(found[2], abs=1e-9)
    engine.submit(Request(prompt, Sampling(max_new=3), owner="bob"))
    engine.step()
    waiting = engine.submit(Request(prompt, last, owner="alice"))
    engine.steering.hold("calm", Steering(decode=(Steer(site, torch.ones(16)),)), owner="alice")
    engine.cancel(waiting)
    assert not engine.steering.snapshot()["configs"]


def test_a_site_that_is_off_ends_the_request_that_reads_it_alone() -> None:
    host = tiny("Qwen3")
    adapters = attached(host)
    engine, site = Engine(host), Site(1, "quarantine_out", "mlp.down")
    reads = engine.submit(Request((3, 4, 5), Sampling(max_new=4), capture=(Capture(site),)))
    engine.submit(Request((6, 7), Sampling(max_new=4)))
    engine.step()
    engine.pause("keep")
    with adapters.deployed():
        engine.resume()
        ended = finish(engine)
    assert [ended[number].finish for number in sorted(ended)] == ["error", "length"]
    assert min(ended) == reads


def test_a_mode_of_pause_that_does_not_exist_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="mode"):
        Engine(tiny("Qwen3")).pause("kept")  # pyright: ignore[reportArgumentType]


# Inference mode, adapters that are attached anew, names of vectors


def scenario(host: Host, where: set[str]) -> list[torch.Tensor]:
    """Requests that are submitted, steered, preempted, cancelled and paused; what ``where`` names runs in inference mode."""
    engine = Engine(host, rows=2, block=4, chunk=8)

    def mode(what: str) -> torch.inference_mode:
        return torch.inference_mode(what in where)

    long, found = Sampling(max_new=40, logprob_token_ids=ASK.logprob_token_ids), []
    with mode("set"):
        engine.steering.register("v", VECTOR)
        engine.steering.set_global("decode", [Steer(SITE, "v")])
        engine.steering.set_tier([Steer(SITE, "v", 0.5)])
        engine.steering.set_monitor(Monitor(SITE, "v", name="m"))
        engine.steering.hold("c", Steering(base=(Steer(SITE, "v", 2.0),)))
    with mode("submit"):
        first = engine.submit(Request(PROMPT, ASK, steering=Steering(base=(Steer(SITE, "v"),))))
        patched = engine.submit(Request(PROMPT[:7], ASK, patch=(Patch(SITE, 2, "v"),), capture=(Capture(SITE),)))
        ends = engine.submit(Request(PROMPT, long, priority=-1))
    with mode("step"):
        engine.step()
    with mode("preempt"):
        engine.preempt(first)
    results = {one.request: one for _ in range(2) for one in engine.step()}
    with mode("pause"):
        engine.pause("keep")
        engine.resume()
    for step in range(20):
        with mode("every second step" if step % 2 else ""):
            results |= {one.request: one for one in engine.step()}
        if step == 16:
            with mode("cancel"):
                engine.cancel(ends)
    assert results[ends].finish == "cancelled"
    assert results[ends].ids
    engine.steering.set_global("decode", [Steer(SITE, -VECTOR)])
    engine.steering.set_tier([Steer(SITE, VECTOR, 0.25)])
    (last,) = engine.generate([Request(PROMPT, ASK)], progress=False)
    assert results[patched].captured[SITE].rows.shape[0] == 7 + ASK.max_new - 1
    found = [results[first], results[patched], last]
    return [table(one) for one in found]


@pytest.mark.parametrize("where", [{"set"}, {"step"}, {"submit", "preempt", "pause", "cancel", "every second step"}])
def test_inference_mode_may_be_on_for_any_part_of_the_engines_life(where: set[str]) -> None:
    """Tensors made in inference mode cannot be written outside of it, and the engine writes those that it has made."""
    host = tiny()
    for found, plain in zip(scenario(host, where), scenario(host, set()), strict=True):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("name", ["torch", "transformer_lens"])
def test_a_model_of_known_code_runs_in_inference_mode_of_which_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture may be trained on, and the model too; somebody else's hook gets tensors on which it may train, and no gradients."""

    seen: list[torch.Tensor] = []
    keeping = Doing(
        lambda view: seen.extend(value for one in view.requests for value in one.captured.values()),
        wants=frozenset({SITE, Site(0, "z")}),
    )
    host, adapters = adapted(torch.float32, name=name)
    engine = Engine(host, chunk=8, block=4, controllers=Controllers([keeping]))
    update, modes = View.update, set[bool]()
    monkeypatch.setattr(View, "update", lambda *given: modes.add(torch.is_inference_mode_enabled()) or update(*given))
    steering = Steering(base=(Steer(SITE, VECTOR.float()),), monitors=(Monitor(SITE, VECTOR.float(), name="m"),))
    asked = Request(PROMPT, ASK, capture=(Capture(SITE), Capture(QUARANTINE)), steering=steering, norms=(SITE,), readings=True)
    (known,) = engine.generate([asked], progress=False)
    assert modes == {True}
    modes.clear()
    kept: list[torch.Tensor] = []
    with Decoder(host).blocks[0].register_forward_hook(lambda _module, _args, out: kept.append(out)):
        (watched,) = engine.generate([asked], progress=False)
    assert modes == {False}
    assert kept
    assert not any(one.requires_grad or one.is_inference() for one in kept)
    assert torch.equal(table(known), table(watched))  # to the bit
    assert seen
    for rows in (*(captured.rows for one in (known, watched) for captured in one.captured.values()), *seen):
        weight = torch.ones(rows.shape, requires_grad=True)
        (weight * rows).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, rows)
    with adapters.unrouted():
        host.logits(torch.tensor([PROMPT])).sum().backward()
    assert all(p.grad is not None for p in adapters.kept_parameters().values())


@pytest.mark.parametrize("set_on", ["all", "a request that is kept"])
def test_a_monitor_of_every_quarantine_gates_those_that_are_attached_anew(set_on: str) -> None:
    """Set while only one block had adapters: oracle is a monitor that is set after both have them."""
    host = tiny("Qwen3")
    closes = Monitor(Site(0, "resid_pre"), torch.zeros(16), threshold=-1e6, quarantine="close", prompt=set_on != "all", name="off")
    own = Steering(monitors=(closes,)) if set_on != "all" else None
    prompt = PROMPT

    adapters, engine = attached(host, "blocks.1.*", kind="svd-low"), Engine(host)
    if set_on == "all":
        engine.steering.set_monitor(closes)
        generated(engine, Request(PROMPT, ASK))
        adapters.detach()
        attached(host, kind="svd-low", seed=8)
        (found,) = generated(engine, Request(PROMPT, ASK))
    else:
        engine.submit(Request(PROMPT, replace(ASK, max_new=4), steering=own))
        engine.step()
        engine.pause("keep")
        adapters.detach()
        attached(host, kind="svd-low", seed=8)
        engine.resume()
        (kept,) = [one for _ in range(6) for one in engine.step()]
        prompt, found = (*PROMPT, kept.ids[0]), table(kept)[1:]  # the first token is of the model before
    anew = Engine(host)
    if set_on == "all":
        anew.steering.set_monitor(closes)
    (truth,) = generated(anew, Request(prompt, ASK, steering=own))
    assert far(found, truth) < CLOSE
    assert far(truth, generated(Engine(host), Request(prompt, ASK))[0]) > 1e-3


def test_what_does_not_fit_adapters_of_another_rank_is_a_sentence_and_not_a_sum() -> None:
    """A vector for rank 1 would be added to every one of four dimensions."""
    host = tiny("Qwen3")
    site, one = Site(1, "kept_a", "mlp.down"), torch.ones(1, dtype=torch.float64)

    def attach(rank: int) -> Adapters:
        return attached(host, "blocks.1.mlp.down", rank=rank)

    for set_up in (
        lambda state: state.set_global("base", [Steer(site, one)]),
        lambda state: state.set_tier([Steer(site, one)]),
        lambda state: state.set_monitor(Monitor(site, one)),
        lambda state: state.set_monitor(Monitor(Site(0, "resid_pre"), VECTOR, adds=(Steer(site, one),))),
        lambda state: state.hold("c", Steering(base=(Steer(site, one),))),
    ):
        adapters, engine = attach(1), Engine(host)
        set_up(engine.steering)
        generated(engine, Request(PROMPT, ASK))
        adapters.detach()
        adapters = attach(4)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"at blocks\.1\.mlp\.down\.kept_a has 1 numbers, but the site has 4"):
                engine.submit(Request(PROMPT, ASK))
        adapters.detach()
    adapters, engine = attach(1), Engine(host, rows=2)
    steering = Steering(base=(Steer(site, one),))
    wrong = [Request(PROMPT, ASK, patch=(Patch(site, 2, one),)), *(Request(PROMPT, ASK, steering=steering) for _ in range(2))]
    numbers = [engine.submit(request) for request in (*wrong, Request(PROMPT, ASK))]
    engine.step()
    engine.pause("keep")
    adapters.detach()
    attach(4)
    engine.resume()
    results = finish(engine)
    for number in numbers[:3]:
        assert results[number].finish == "error"
        assert "kept_a" in (results[number].error or "")
    assert far(table(results[numbers[3]]), generated(Engine(host), Request(PROMPT, ASK))[0]) < CLOSE


def test_a_named_vector_of_another_shape_than_the_site_is_refused_in_a_patch_as_everywhere() -> None:
    host = tiny("Qwen3")
    site = Site(0, "k")
    shape = Decoder(host).shape(site)
    right = torch.arange(8.0, dtype=torch.float64).reshape(shape)
    engine = Engine(host, vectors={"right": right, "flat": right.flatten(), "row": right.reshape(1, -1), "turned": right.T})
    truth = generated(engine, Request(PROMPT, ASK, patch=(Patch(site, 2, right),)))[0]
    for name in ("right", "flat", "row"):
        assert far(generated(engine, Request(PROMPT, ASK, patch=(Patch(site, 2, name),)))[0], truth) < CLOSE
    with pytest.raises(ValueError, match=r"has shape \[4, 2\], but the site has \[2, 4\]"):
        engine.submit(Request(PROMPT, ASK, patch=(Patch(site, 2, "turned"),)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("forward", [1, 2, 3, 4])
def test_an_interrupt_in_a_forward_loses_nothing_of_what_a_step_has_computed(forward: int, exact: bool, monkeypatch: Any) -> None:
    """Of two forwards of a step the second is interrupted, as by Ctrl-C: both requests go on to the same tokens."""
    host = tiny()
    monitor = Steering(monitors=(Monitor(SITE, VECTOR, name="m"),))
    requests = [Request(PROMPT, ASK), Request(PROMPT[:9], ASK, capture=(Capture(SITE),), readings=True, steering=monitor)]
    truth = [Engine(host, exact=True).generate([one], progress=False)[0] for one in requests]
    kind: Any = type(Decoder(host).blocks[1])
    usual, count = kind.forward, -100

    def interrupted(self: Any, *args: Any, **given: Any) -> Any:
        nonlocal count
        count += self is Decoder(host).blocks[1]
        if count == forward and self is Decoder(host).blocks[1]:
            raise KeyboardInterrupt
        return usual(self, *args, **given)

    monkeypatch.setattr(kind, "forward", interrupted)
    engine = Engine(host, exact=exact)
    numbers = [engine.submit(requests[0])]
    engine.step()
    numbers.append(engine.submit(requests[1]))
    count = 0
    results, _, interrupts = followed(engine)
    assert interrupts == 1
    for number, wanted in zip(numbers, truth, strict=True):
        assert far(table(results[number]), table(wanted)) < CLOSE
        found, right = ({at: set(read) for at, read in one.readings.items()} for one in (results[number], wanted))
        assert found == right
    assert results[numbers[1]].captured[SITE].positions == truth[1].captured[SITE].positions


class Interrupting:
    """A tokenizer that is interrupted at its fifth text: at the second of three first tokens, of three texts each."""

    def __init__(self) -> None:
        self.texts = 0

    def decode(self, ids: list[int]) -> str:
        self.texts += 1
        if self.texts == 5:
            raise KeyboardInterrupt
        return "a" * len(ids)


@pytest.mark.parametrize("call", [2, 3])
def test_an_interrupt_while_values_are_stored_stores_none_of_them_twice(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of three requests is run again: the first ones had their values already, in memory and in a run."""
    host, store = tiny(), RunStore()
    engine, usual, calls = Engine(host, store=store), EngineRequest.keep, 0

    def keep(self: EngineRequest, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        usual(self, *args)

    monkeypatch.setattr(EngineRequest, "keep", keep)
    numbers = [engine.submit(Request(PROMPT, ASK, capture=(Capture(SITE),), run=run)) for run in (None, "run", None)]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    found = {one.request: one for _ in range(3) for one in engine.step()}
    assert [(found[one].finish, found[one].error) for one in numbers] == [("length", None)] * 3
    first, _, last = (found[one] for one in numbers)
    positions = list(range(len(PROMPT) + ASK.max_new - 1))
    assert list(first.captured[SITE].positions) == list(last.captured[SITE].positions) == positions
    assert store.positions("run", SITE) == positions
    assert far(first.captured[SITE].rows, last.captured[SITE].rows) < CLOSE
    assert far(first.captured[SITE].rows, store.rows("run", SITE, positions)) < CLOSE


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Workers of a test run ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interruptible() -> tuple[list[Result], list[int], int]:
    """Run four requests of every kind step by step; return their results, the run's positions, and the number of interrupts."""
    store = RunStore()
    steering = Steering(decode=(Steer(SITE, VECTOR),), monitors=(Monitor(SITE, VECTOR, name="m"),))
    sampled = replace(ASK, temperature=1.0, seed=3, stop=("never",))
    engine = Engine(tiny(), rows=2, block=4, chunk=8, budget=16, store=store, tokenizer=Letters())
    numbers = [
        engine.submit(Request(PROMPT, ASK)),
        engine.submit(Request(PROMPT[:9], sampled, capture=(Capture(SITE),), readings=True, steering=steering)),
        engine.submit(Request(PROMPT[:5], ASK, capture=(Capture(SITE),), run="run", priority=1)),
        engine.submit(Request(PROMPT[:7], replace(ASK, stop_tokens=tuple(range(0, VOCAB, 2))))),
    ]
    results, told, interrupts = followed(engine)
    assert told == {number: results[number].ids for number in numbers}
    assert not any(engine.resources.values())
    assert not engine.steering.requests
    return [results[number] for number in numbers], store.positions("run", SITE), interrupts


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[Result], list[int], int]:
    return interruptible()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("of", "name"),
    [
        (Scheduler, "plan"), (Slots, "take"), (Slots, "free"),
        (SteeringRows, "effective"), (SteeringRows, "release"), (SteeringState, "admit"),
        (EngineRequest, "lowest_capture"), (EngineRequest, "note"), (EngineRequest, "settle"), (Residents, "publish"),
        (GrowingText, "push"), (Letters, "decode"), (Engine, "_tell"),
    ],
)  # fmt: skip
def test_ctrl_c_anywhere_in_a_step_comes_after_it_and_loses_nothing(
    of: Any, name: str, uninterrupted: tuple[list[Result], list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on after it, to the same tokens, texts, readings, captures, run and events as without it."""
    usual, calls = getattr(of, name), 0

    def interrupted(*args: Any, **given: Any) -> Any:
        nonlocal calls
        result, calls = usual(*args, **given), calls + 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(of, name, interrupted)
    (found, positions, interrupts), (truth, right, _) = interruptible(), uninterrupted
    assert (positions, interrupts) == (right, 1)
    for one, wanted in zip(found, truth, strict=True):
        assert (one.finish, one.ids, one.text) == (wanted.finish, wanted.ids, wanted.text)
        assert list(one.readings) == list(wanted.readings)
        for token, same in zip(one.tokens, wanted.tokens, strict=True):
            assert token.asked == pytest.approx(same.asked, rel=0, abs=CLOSE)
        assert [rows.positions for rows in one.captured.values()] == [rows.positions for rows in wanted.captured.values()]


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_does_not_wait_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, usual, forwards = Engine(tiny()), Runner.run, 0

    def hung(*args: Any, **given: Any) -> Any:
        nonlocal forwards
        forwards += 1
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return usual(*args, **given)

    monkeypatch.setattr(Runner, "run", hung)
    engine.submit(Request(PROMPT, ASK))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (forwards, engine.tokens) == (1, 0)


def test_an_interrupt_between_the_tokens_of_a_step_leaves_nobody_who_waits_for_ever() -> None:
    engine = Engine(tiny(), tokenizer=Interrupting())
    for prompt in (PROMPT, PROMPT[:4], PROMPT[:5]):
        engine.submit(Request(prompt, replace(ASK, stop=("never",))))
    results, _, interrupts = followed(engine)
    assert interrupts == 1
    assert sorted(one.finish or "" for one in results.values()) == ["error", "length", "length"]
    assert all(len(one.ids) <= ASK.max_new for one in results.values())
    assert [one.error for one in results.values() if one.error] == ["the step that made its next token was interrupted"]
    assert set(engine.resources.values()) - {engine.resources["slot_bytes"]} <= {0}


def test_a_stop_token_before_an_interrupt_ends_its_request_and_every_token_is_told() -> None:
    host = tiny()
    stop = Engine(host).generate([Request(PROMPT, ASK)], progress=False)[0].ids[0]
    engine = Engine(host, tokenizer=Interrupting())
    numbers = [engine.submit(Request(PROMPT, replace(ASK, stop_tokens=(stop,))))]
    numbers += [engine.submit(Request(prompt, replace(ASK, stop=("never",)))) for prompt in (PROMPT[:4], PROMPT[:5], PROMPT[:6])]
    results, told, _ = followed(engine)
    assert (results[numbers[0]].finish, results[numbers[0]].ids) == ("stop", [stop])
    assert told == {number: results[number].ids for number in numbers}


def test_what_is_set_after_adapters_were_attached_is_compared_with_them_before_any_request_comes() -> None:
    host = tiny("Qwen3")
    engine, site = Engine(host), Site(1, "kept_a", "mlp.down")
    engine.steering.register("v", VECTOR)
    closes = Monitor(Site(0, "resid_pre"), torch.zeros(16), threshold=-1e6, quarantine="close", name="off")
    with pytest.raises(ValueError, match="close a quarantine that does not exist"):
        engine.steering.set_monitor(closes)
    for rank in (2, 4):
        adapters = attached(host, rank=rank)
        engine.steering.set_monitor(closes)
        engine.steering.set_global("base", [Steer(site, torch.ones(rank))])
        assert len(generated(engine, Request(PROMPT, ASK))) == 1
        engine.steering.clear_global("base")
        adapters.detach()
    assert set(engine.steering.vectors) == {"v"}
    with pytest.raises((ValueError, KeyError), match="no adapter at"):
        engine.submit(Request(PROMPT, ASK))
    engine.steering.clear_monitor("off")
    assert len(generated(engine, Request(PROMPT, ASK))) == 1


@pytest.mark.parametrize("acts_on", ["all", "one"])
def test_kept_requests_go_on_without_a_quarantine_that_is_gone_only_where_nothing_gates_it(acts_on: str) -> None:
    host = tiny("Qwen3")
    adapters = attached(host)
    closes = Monitor(Site(0, "resid_pre"), VECTOR, quarantine="close", name="off")
    engine = Engine(host)
    if acts_on == "all":
        engine.steering.set_monitor(closes)
    gated = engine.submit(Request(PROMPT, ASK, steering=Steering(monitors=(closes,)) if acts_on == "one" else None))
    plain = engine.submit(Request(PROMPT[:5], ASK))
    engine.step()
    engine.pause("keep")
    adapters.detach()
    if acts_on == "all":
        with pytest.raises((ValueError, KeyError), match="no adapter at"):
            engine.resume()
        assert engine.paused
        engine.steering.clear_monitor("off")
    engine.resume()
    results = finish(engine)
    assert results[gated].finish == ("error" if acts_on == "one" else "length")
    assert "no adapter at" in (results[gated].error or "no adapter at")
    after = (*PROMPT[:5], results[plain].ids[0])
    assert far(table(results[plain])[1:], generated(Engine(host), Request(after, replace(ASK, max_new=2)))[0]) < CLOSE


def test_what_is_set_in_a_pause_is_compared_with_the_adapters_that_were_attached_in_it() -> None:
    """And the requests that were kept are computed anew, although the engine has seen the change before ``resume``."""
    host = tiny("Qwen3")
    engine, site = Engine(host, block=4), Site(1, "kept_a", "mlp.down")
    kept = engine.submit(Request(PROMPT, ASK))
    engine.step()
    engine.pause("keep")
    attached(host)
    engine.steering.set_global("base", [Steer(site, torch.ones(4))])
    late = engine.submit(Request(PROMPT[:7], ASK))
    engine.resume()
    results = finish(engine)
    anew = Engine(host)
    anew.steering.set_global("base", [Steer(site, torch.ones(4))])
    after = Request((*PROMPT, results[kept].ids[0]), replace(ASK, max_new=2))
    truth = generated(anew, after, Request(PROMPT[:7], ASK))
    assert far(table(results[kept])[1:], truth[0]) < CLOSE
    assert far(table(results[late]), truth[1]) < CLOSE


# What a model is, between requests


def test_a_model_of_another_type_is_refused_in_one_sentence() -> None:
    host = tiny("Llama")
    engine = Engine(host)
    engine.generate([Request(PROMPT, ASK)], progress=False)
    host.model.to(torch.float32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"is torch.float32 on cpu now, .* torch.float64 on cpu: .* make a new engine"):
            engine.generate([Request(PROMPT, Sampling(max_new=1))], progress=False)
    host.model.to(torch.float64)
    assert table(engine.generate([Request(PROMPT, ASK)], progress=False)[0]).isfinite().all()


@pytest.mark.parametrize("size", [VOCAB - 10, VOCAB + 10])
def test_a_vocabulary_that_was_resized_is_that_of_now(size: int) -> None:
    host = tiny("Llama")
    engine = Engine(host)
    engine.submit(Request(PROMPT, ASK))
    engine.close()
    host.model.resize_token_embeddings(size, mean_resizing=False)
    prompt = (*PROMPT, size - 1)
    own = generated(engine, Request(prompt, Sampling(max_new=1, logprob_token_ids=tuple(range(size)))))[0]
    assert far(own[0], host.logits(torch.tensor([prompt]))[0, -1].log_softmax(-1).detach()) < CLOSE
    for wrong in (Request((size,)), Request((3,), Sampling(logprob_token_ids=(size,)))):
        with pytest.raises(ValueError, match=f"{size}"):
            engine.submit(wrong)


def test_attention_that_was_exchanged_is_that_of_now_or_refused() -> None:
    host: Any = tiny("Llama")
    engine = Engine(host, block=4)
    request = Request(PROMPT, Sampling(max_new=4, logprob_token_ids=tuple(range(VOCAB))))
    for kind in ("exact", "eager", "sdpa"):
        host.model.set_attn_implementation(kind)
        (result,) = engine.generate([request], progress=False)
        whole = host.logits(torch.tensor([[*PROMPT, *result.ids]]))[0, len(PROMPT) - 1 : -1].log_softmax(-1).detach()
        assert far(table(result), whole) < (1e-5 if kind == "eager" else CLOSE), kind
        assert result.cached == 0, kind
    host.model.set_attn_implementation("flex_attention")
    with pytest.raises(RuntimeError, match="flex_attention cannot: load the model with attn_implementation='sdpa'"):
        engine.submit(request)
