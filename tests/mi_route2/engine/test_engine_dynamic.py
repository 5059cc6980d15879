"""Steering that activations decide, controllers and runs, in the engine: against activations that are edited by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from engines import Doing, table, tiny
from families import SPECS, VOCAB, move
from torch import Tensor

from mi_route2.engine.controllers import (
    Change,
    Override,
    SetScale,
    StepView,
)
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts.base import Host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

ALL = tuple(range(VOCAB))
SITE = Site(1, "resid_pre")
VECTOR = torch.randn(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PROMPT = (5, 9, 12, 33, 7, 21, 4, 18, 40, 11)
OTHER = (8, 3, 44, 17, 29, 6)


def greedy(n: int = 6) -> Sampling:
    return Sampling(max_new=n, logprob_token_ids=ALL)


@torch.no_grad()
def by_hand(host: Host, prompt: Sequence[int], n: int, edits: dict[Site, Callable[[Tensor], Tensor]]) -> Tensor:
    """Log-probabilities at each of ``n`` greedy tokens, by whole forwards under ``edits``."""
    tokens, found = list(prompt), []
    for _ in range(n):
        with host.hooks(edits):
            found.append(host.logits(torch.tensor([tokens]))[0, -1].double().log_softmax(-1))
        tokens.append(int(found[-1].argmax()))
    return torch.stack(found)


def adding(vector: Tensor, first: int, last: int | None = None) -> Callable[[Tensor], Tensor]:
    def edit(h: Tensor) -> Tensor:
        new = h.clone()
        new[:, first:last] += vector.to(h.dtype)
        return new

    return edit


def close(one: Tensor, other: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


class Acts:
    """A controller that says given actions after given tokens of request 0."""

    name = "script"

    def __init__(self, script: dict[int, list[Change]]):
        self.script, self.tokens = script, 0

    def on_step(self, view: StepView) -> Sequence[Change]:
        (mine,) = [one for one in view.requests if one.request == 0] or [None]
        if mine is None or mine.token is None:
            return []
        self.tokens += 1
        return self.script.get(self.tokens - 1, [])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_is_said_after_token_n_changes_token_n_plus_1_and_not_n(after: int) -> None:
    """One step of latency, never token 0; actions of one step apply in their order: an override, then its scale."""
    host = tiny("Qwen3")
    script = {after: [Override(0, "on"), SetScale(0.5, request=0)]}
    engine = Engine(host, controllers=[Acts(script)], chunk=4)
    engine.steering.hold("on", Steering(decode=(Steer(SITE, VECTOR),)))
    mine, beside = engine.generate([Request(PROMPT, greedy()), Request(OTHER, greedy())], progress=False)
    plain = by_hand(host, PROMPT, 6, {SITE: lambda h: h.clone()})
    steered = by_hand(host, PROMPT, 6, {SITE: adding(VECTOR * 0.5, len(PROMPT) + after)})
    close(table(mine), steered)
    close(table(mine)[: after + 1], plain[: after + 1])
    assert float((table(mine)[after + 1] - plain[after + 1]).abs().max()) > 1e-3
    close(table(beside), by_hand(host, OTHER, 6, {SITE: lambda h: h.clone()}))
    assert engine.controllers.applied == {"script": 2}


def test_a_controller_sees_the_values_that_it_wants_at_the_token_that_was_read() -> None:
    host, seen = tiny("Qwen3"), list[tuple[int, Tensor]]()
    looks = Doing(
        lambda view: seen.extend((one.position, one.captured[SITE]) for one in view.requests if one.request == 0),
        wants=frozenset({SITE}),
    )
    engine = Engine(host, controllers=[looks], chunk=4, budget=64)
    (mine, _) = engine.generate([Request(PROMPT, greedy(4)), Request(OTHER, greedy(2))], progress=False)
    whole = host.capture([SITE], torch.tensor([[*PROMPT, *mine.ids]]))[SITE][0]
    assert [position for position, _ in seen] == [3, 7, 9, 10, 11, 12]
    for position, value in seen:
        close(value, whole[position])


def test_a_monitor_gates_by_what_it_reads_in_the_same_forward() -> None:
    """``g`` of each token by hand: detected in block 0, acted on in block 1, by rows and by the dynamic tier."""
    host, early = tiny("Qwen3"), Site(0, "resid_mid")
    monitor = Monitor(early, VECTOR.flip(0), threshold=0.3, sharpness=1.7, gate_rows=True)
    engine = Engine(host, chunk=3)
    engine.steering.set_tier([Steer(SITE, -VECTOR)])
    spec = Steering(decode=(Steer(SITE, VECTOR.roll(3)),), monitors=(monitor,))
    (mine, _) = engine.generate([Request(PROMPT, greedy(), steering=spec), Request(OTHER, greedy())], progress=False)
    gates: list[Tensor] = []

    def read(h: Tensor) -> None:
        gates.append(torch.sigmoid(1.7 * (h @ VECTOR.flip(0) - 0.3)))

    def act(h: Tensor) -> Tensor:
        new = h.clone()
        new[:, len(PROMPT) :] += ((VECTOR.roll(3) - VECTOR) * gates[-1][..., None])[:, len(PROMPT) :]
        return new

    close(table(mine), by_hand(host, PROMPT, 6, {early: read, SITE: act}))  # pyright: ignore[reportArgumentType]


def with_quarantine(dtype: torch.dtype = torch.float64):
    host = tiny("Qwen3", dtype)
    adapters = host.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7))
    return host, move(adapters, 0.3)


def test_a_quarantine_that_is_shut_on_every_token_is_deleted_and_one_that_is_open_is_there() -> None:
    """Saturated gates on prompts too: the deployed model, the full model; on generated tokens alone: by hand."""
    host, adapters = with_quarantine()
    first = Site(0, "resid_pre")
    shut = Monitor(first, VECTOR, threshold=-1e6, quarantine="close", gates=())
    engine = Engine(host)
    requests = [
        Request(PROMPT, greedy(), steering=Steering(monitors=(shut,))),
        Request(PROMPT, greedy(), steering=Steering(monitors=(Monitor(first, VECTOR, 1e6, quarantine="close", gates=()),))),
        Request(PROMPT, greedy(), steering=Steering(monitors=(replace(shut, prompt=False),))),
        Request(PROMPT, greedy()),
    ]
    deleted, idle, generated, plain = map(table, engine.generate(requests, progress=False))
    with adapters.deployed():
        close(deleted, by_hand(host, PROMPT, 6, {SITE: lambda h: h.clone()}))
    close(plain, by_hand(host, PROMPT, 6, {SITE: lambda h: h.clone()}))
    close(idle, plain)

    def zero(h: Tensor) -> Tensor:
        new = h.clone()
        new[:, len(PROMPT) :] = 0
        return new

    close(generated, by_hand(host, PROMPT, 6, dict.fromkeys(engine.decoder.quarantines(), zero)))
    assert float((deleted - plain).abs().max()) > 0.05
    assert float((generated - deleted).abs().max()) > 0.01


def test_a_reading_has_the_gate_that_multiplied_at_its_position() -> None:
    """A saturated probe fires everywhere; on a prompt that the monitor leaves alone, its gate is the one that changes nothing."""
    host, _ = with_quarantine()
    first = Site(0, "resid_pre")
    close_all = Monitor(first, VECTOR, threshold=-1e6, quarantine="close", gates=())
    adds = Monitor(first, VECTOR, threshold=-1e6, adds=(Steer(SITE, VECTOR),), gates=())
    on_prompt = [
        (close_all, 1.0),
        (replace(close_all, prompt=False), 0.0),
        (replace(close_all, quarantine="open", prompt=False), 1.0),
        (adds, 0.0),
        (replace(adds, adds=()), 1.0),  # it only watches
    ]
    asked = [Request(PROMPT, greedy(3), steering=Steering(monitors=(m,)), readings=True) for m, _ in on_prompt]
    for result, (monitor, gate) in zip(Engine(host, chunk=3).generate(asked, progress=False), on_prompt, strict=True):
        gates = [reading[monitor.name].gate for _, reading in sorted(result.readings.items())]
        assert gates == [gate] * len(PROMPT) + [1.0] * 2


def test_steered_tokens_are_found_again_by_those_alone_that_were_steered_alike() -> None:
    """A conversation goes on: its prompt now holds what was generated under dynamic steering, whose blocks are not for others."""
    host = tiny("Qwen3")
    engine = Engine(host, block=4)
    engine.steering.set_tier([Steer(SITE, VECTOR)])
    (first,) = engine.generate([Request(PROMPT, greedy(9))], progress=False)
    longer = (*PROMPT, *first.ids)
    engine.steering.clear_tier()
    (second,) = engine.generate([Request(longer, greedy(3))], progress=False)
    assert second.cached == 8  # two whole blocks of the prompt; the third holds generated, steered tokens
    close(table(second), by_hand(host, longer, 3, {SITE: lambda h: h.clone()}))


def test_a_run_is_kept_and_read_by_a_later_request() -> None:
    host = tiny("Qwen3")
    with RunStore(budget=1 << 20) as store:
        engine = Engine(host, store=store, chunk=4)
        keep = (Capture(SITE, TokenSelection("prompt")), Capture(Site(0, "z"), TokenSelection("generated")))
        (kept,) = engine.generate([Request(PROMPT, greedy(4), capture=keep, run="clean")], progress=False)
        whole = host.capture([SITE, Site(0, "z")], torch.tensor([[*PROMPT, *kept.ids]]))
        assert kept.captured == {}
        assert store.positions("clean", SITE) == list(range(len(PROMPT)))
        close(store.rows("clean", SITE, range(len(PROMPT))), whole[SITE][0, : len(PROMPT)])
        close(store.rows("clean", Site(0, "z"), [11, 10]), whole[Site(0, "z")][0, [11, 10]])
        assert store.info("clean").tokens == (*PROMPT, *kept.ids)
        patch = (Patch(SITE, 2, FromRun("clean", 2)), Patch(SITE, 4, FromRun("clean", 9)))
        (patched,) = engine.generate([Request(OTHER, greedy(3), patch=patch)], progress=False)

        def put(h: Tensor) -> Tensor:
            new = h.clone()
            new[:, 2], new[:, 4] = whole[SITE][0, 2], whole[SITE][0, 9]
            return new

        close(table(patched), by_hand(host, OTHER, 3, {SITE: put}))


def test_a_patch_with_itself_or_of_no_share_changes_no_bit() -> None:
    host, _ = with_quarantine(torch.float32)
    sites = [SITE, Site(0, "z"), Site(1, "kept_a", "mlp.down"), Site(0, "quarantine_out", "attn.q")]
    engine = Engine(host, exact=True)
    (plain,) = engine.generate([Request(PROMPT, greedy(4), capture=tuple(map(Capture, sites)))], progress=False)
    rows = {site: plain.captured[site].rows for site in sites}
    itself = tuple(Patch(site, i, rows[site][i]) for site in sites for i in range(len(rows[site])))
    nothing = tuple(Patch(site, i, 7 * rows[site][i] + 1, 0.0) for site in sites for i in range(len(rows[site])))
    for patches in (itself, nothing):
        (found,) = engine.generate([Request(PROMPT, greedy(4), patch=patches)], progress=False)
        assert torch.equal(table(found), table(plain))


def test_an_override_of_a_preempted_request_acts_when_it_goes_on() -> None:
    """Also if its configuration was dropped meanwhile."""
    host = tiny("Qwen3")
    engine = Engine(host, steering_rows=2)
    number = engine.submit(Request(PROMPT, greedy(4), steering=Steering(decode=(Steer(SITE, VECTOR),))))
    engine.step()
    engine.preempt(number)
    engine.steering.hold("calm", Steering(decode=(Steer(SITE, VECTOR, 2.0),)))
    engine.steering.override(number, "calm")
    engine.steering.drop("calm")
    (result,) = [one for _ in range(6) for one in engine.step()]
    close(table(result), by_hand(host, PROMPT, 4, {SITE: adding(2 * VECTOR, len(PROMPT))}))
