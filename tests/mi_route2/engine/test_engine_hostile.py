"""Faults that would be silent, and requests that would harm others."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import finish, table, tiny
from families import SPECS, VOCAB, make_family, move

from mi_route2.adapters import Adapters
from mi_route2.engine.engine import Engine
from mi_route2.engine.forward import Work
from mi_route2.engine.request import Capture, Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.patching.patches import FromRun, Patch, resolve
from mi_route2.patching.sweep import prepare
from mi_route2.runs import RunStore
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering, patch

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


READER = Request(PROMPT, ASK, patch=(Patch(SITE, 2, FromRun("clean", 2)),))


def test_what_depends_on_a_model_goes_with_it() -> None:
    """In-place writes are seen; writes through ``data`` after ``model_changed``; neither amid a request."""
    host, adapters = adapted()
    engine = Engine(host, store=RunStore(), block=4)
    generated(engine, Request(PROMPT, ASK, capture=(Capture(SITE),), run="clean"))
    with adapters.deployed():
        assert engine.generate([READER], progress=False)[0].finish == "length"  # another switch is no other weight
    weight = host.model.get_parameter("model.layers.0.mlp.down_proj.base.weight")
    old = weight.detach().clone()
    with torch.no_grad():
        weight[:] = old.roll(1, 0)
    sentence = r"run 'clean' is invalid: it was captured with weights \w{12}, and the model now has \w{12}; capture it again$"
    with pytest.raises(ValueError, match=sentence):
        engine.generate([READER], progress=False)
    assert far(*generated(engine, Request(PROMPT, ASK)), *generated(Engine(host), Request(PROMPT, ASK))) < CLOSE
    weight.data[:] = old
    engine.submit(Request(PROMPT, ASK))
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests run or wait"):
        engine.model_changed()
    finish(engine)
    engine.model_changed()
    assert engine.generate([READER], progress=False)[0].finish == "length"
    assert far(*generated(engine, Request(PROMPT, ASK)), *generated(Engine(host), Request(PROMPT, ASK))) < CLOSE
    engine.submit(Request(PROMPT, ASK))
    engine.step()
    with adapters.deployed(), pytest.raises(RuntimeError, match="the model changed while 1 requests ran"):
        engine.step()
    engine.close()


def test_an_interrupt_in_a_step_ends_the_requests_that_ran_in_it_and_nothing_else() -> None:
    host, _ = adapted()
    engine = Engine(host, rows=1)
    first, second = engine.submit(Request(PROMPT, ASK)), engine.submit(Request(PROMPT, ASK))
    engine.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = Decoder(host).blocks[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    handle.remove()
    results = finish(engine)
    assert (results[first].finish, len(results[first].ids)) == ("cancelled", 1)
    assert far(table(results[second]), *generated(Engine(host), Request(PROMPT, ASK))) < CLOSE


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


@pytest.mark.parametrize("when", ["on its way", "amid its prompt", "at its end", "before it runs"])
def test_a_store_that_ends_a_run_ends_that_request_alone(when: str, tmp_path: Path) -> None:
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
        shutil.rmtree(tmp_path)
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


# Inference mode, adapters that are attached anew, names of vectors


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
