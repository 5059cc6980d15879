"""Steering that activations decide, controllers, runs and rules, in the engine: against activations that are edited by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import Doing, finish, table, tiny
from families import SPECS, VOCAB, move
from torch import Tensor

from mi_route2.engine.controllers import (
    Action,
    AsyncController,
    ClearOverride,
    Controllers,
    Override,
    ProbeController,
    SetScale,
    SetTier,
    StepView,
)
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request
from mi_route2.engine.rules import Probe, Rule, parse_rules
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts.base import Host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from mi_route2.steering.table import Full

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

    def __init__(self, script: dict[int, list[Action]]):
        self.script, self.tokens = script, 0

    def on_step(self, view: StepView) -> Sequence[Action]:
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
    engine = Engine(host, controllers=Controllers([Acts(script)]), chunk=4)
    engine.steering.hold("on", Steering(decode=(Steer(SITE, VECTOR),)))
    mine, beside = engine.generate([Request(PROMPT, greedy()), Request(OTHER, greedy())], progress=False)
    plain = by_hand(host, PROMPT, 6, {SITE: lambda h: h.clone()})
    steered = by_hand(host, PROMPT, 6, {SITE: adding(VECTOR * 0.5, len(PROMPT) + after)})
    close(table(mine), steered)
    close(table(mine)[: after + 1], plain[: after + 1])
    assert float((table(mine)[after + 1] - plain[after + 1]).abs().max()) > 1e-3
    close(table(beside), by_hand(host, OTHER, 6, {SITE: lambda h: h.clone()}))
    assert engine.controllers.ledger.snapshot()


@pytest.mark.parametrize("attenuates", [True, False])
def test_no_controller_undoes_a_rule(attenuates: bool) -> None:
    """Of another request, the same actions apply."""
    probe = {"probe": {"site": str(SITE), "vector": VECTOR.tolist(), "threshold": -1e6}}
    add = {"add": [{"site": str(SITE), "vector": VECTOR.tolist()}]}
    rule = {"when": probe, "scope": "rest_of_request", "apply": {"attenuate": 0.25} if attenuates else add}
    undoing: list[Action] = [SetScale(1.0, request=0)] if attenuates else [ClearOverride(0), Override(0, "other")]
    tables = []
    for script, rules in (({}, [rule]), ({1: undoing}, [rule]), ({1: undoing}, [])):
        engine = Engine(tiny("Qwen3"), controllers=Controllers([Acts(script)]))
        engine.steering.hold("other", Steering())
        own = Steering(decode=(Steer(SITE, VECTOR),))
        (result,) = engine.generate([Request(PROMPT, greedy(), steering=own, rules=parse_rules(rules))], progress=False)
        counts = engine.controllers.ledger.snapshot()["sources"].get("script", {})
        assert counts.get("rejected", 0) == (len(script and undoing) if rules else 0), counts
        tables.append(table(result))
    close(tables[0], tables[1])
    assert float((tables[0][2] - tables[2][2]).abs().max()) > 1e-3
    queue = AsyncController()
    engine = Engine(tiny("Qwen3"), controllers=Controllers(queues=[queue]))
    number = engine.submit(Request(PROMPT, greedy(), rules=parse_rules([rule])))
    engine.step()
    queue.submit(SetScale(0.5, request=number) if attenuates else ClearOverride(number))
    engine.step()
    assert engine.controllers.snapshot()["sources"][queue.name] == {"rejected": 1}
    with pytest.raises(ValueError, match=f"of request {number}, and would be undone: send it without that rule"):
        _ = engine.steering.set_scale(1.0, request=number) if attenuates else engine.steering.override(number, None)
    engine.close()


def test_a_controller_sees_the_values_that_it_wants_at_the_token_that_was_read() -> None:
    host, seen = tiny("Qwen3"), list[tuple[int, Tensor]]()
    looks = Doing(
        lambda view: seen.extend((one.position, one.captured[SITE]) for one in view.requests if one.request == 0),
        wants=frozenset({SITE}),
    )
    engine = Engine(host, controllers=Controllers([looks]), chunk=4, budget=64)
    (mine, _) = engine.generate([Request(PROMPT, greedy(4)), Request(OTHER, greedy(2))], progress=False)
    whole = host.capture([SITE], torch.tensor([[*PROMPT, *mine.ids]]))[SITE][0]
    assert [position for position, _ in seen] == [3, 7, 9, 10, 11, 12]
    for position, value in seen:
        close(value, whole[position])


def test_what_is_queued_from_another_thread_applies_at_the_next_step() -> None:
    host, queue = tiny("Qwen3"), AsyncController()
    engine = Engine(host, controllers=Controllers(queues=[queue]))
    number = engine.submit(Request(PROMPT, greedy()))
    engine.step()
    engine.step()  # two tokens are out; the next forward reads the second of them
    assert queue.submit(SetTier((Steer(SITE, VECTOR),)), SetScale(2.0))
    close(table(finish(engine)[number]), by_hand(host, PROMPT, 6, {SITE: adding(2 * VECTOR, len(PROMPT) + 1)}))


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
    shut = Monitor(first, VECTOR, threshold=-1e6, quarantine="close", prompt=True, gates=())
    engine = Engine(host)
    requests = [
        Request(PROMPT, greedy(), steering=Steering(monitors=(shut,))),
        Request(PROMPT, greedy(), steering=Steering(monitors=(Monitor(first, VECTOR, 1e6, quarantine="close", gates=()),))),
        Request(PROMPT, greedy(), steering=Steering(monitors=(Monitor(first, VECTOR, -1e6, quarantine="close", gates=()),))),
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


def test_rules_on_a_request_act_as_the_steering_that_they_say() -> None:
    host = tiny("Qwen3")
    add = (Steer(SITE, VECTOR),)
    probe = {"when": {"probe": {"site": "blocks.0.resid_pre", "vector": VECTOR.tolist(), "threshold": -1e6}}}
    apply = {"apply": {"add": [{"site": str(SITE), "vector": VECTOR.tolist()}]}}
    start = Site(0, "resid_pre")
    streams = host.capture([start], torch.tensor([PROMPT]))[start][0]
    threshold = float((streams[1:] @ streams[0]).max()) + 1e-3
    assert float(streams[0] @ streams[0]) > threshold  # of the prompt, its first token alone fires
    within = Rule("rest_of_request", Probe(start, streams[0], threshold), add)
    engine = Engine(host, chunk=4)
    requests = [
        Request(PROMPT, greedy(), rules=(within,)),
        Request(PROMPT, greedy(), rules=(Rule("rest_of_request", add=add),)),
        Request(PROMPT, greedy(), rules=parse_rules([{"scope": "rest_of_request", **probe, **apply}])),
        Request(PROMPT, greedy(), rules=parse_rules([{"scope": "this_token", **probe, **apply}])),
        Request(PROMPT, greedy()),
    ]
    never, always, later, at_once, plain = map(table, engine.generate(requests, progress=False))
    steered = by_hand(host, PROMPT, 6, {SITE: adding(VECTOR, len(PROMPT))})
    for found in (always, at_once, later):
        close(found, steered, 1e-6)  # a list of numbers is read as float32
    for found in (never, plain):
        close(found, by_hand(host, PROMPT, 6, {SITE: lambda h: h.clone()}))


def test_a_request_keeps_its_vector_also_where_its_conversation_holds_the_rule_with_a_newer_one() -> None:
    """An urgent request overtakes it after the name was registered anew; later requests have the newer vector."""
    host = tiny("Qwen3")
    engine, rule = Engine(host, rows=1), Rule("rest_of_conversation", add=(Steer(SITE, "v"),))
    engine.steering.register("v", VECTOR)
    engine.submit(Request((3, 4, 5), greedy(3)))
    engine.step()
    first = engine.submit(Request(PROMPT, greedy(3), rules=(rule,), conversation="c"))
    engine.steering.register("v", -3 * VECTOR)
    second = engine.submit(Request(PROMPT, greedy(3), rules=(rule,), conversation="c", priority=1))
    found = finish(engine)
    (later,) = engine.generate([Request(PROMPT, greedy(3), conversation="c")], progress=False)
    for result, vector in ((found[second], -3 * VECTOR), (found[first], VECTOR), (later, -3 * VECTOR)):
        close(table(result), by_hand(host, PROMPT, 3, {SITE: adding(vector, len(PROMPT))}))


def policy(name: str = "policy", **given: Any) -> ProbeController:
    return ProbeController("c", -1e6, name=name, **({"monitor": Monitor(SITE, VECTOR, gates=(), name="m")} | given))


LATER = {"when": Probe(SITE, VECTOR, -1e6), "scope": "rest_of_request"}
SWITCHES: dict[str, Rule] = {
    "attenuates throughout": Rule("rest_of_request", attenuate=0.5),
    "attenuates later": Rule(**LATER, attenuate=0.5),
    "adds later": Rule(**LATER, add=(Steer(SITE, VECTOR),)),
}


@pytest.mark.parametrize("reads", ["its own monitor", "a monitor of all", "a site"])
@pytest.mark.parametrize("what", [*SWITCHES, "a second policy", "the conversation"])
def test_a_request_is_scaled_and_routed_by_one_hand(what: str, reads: str) -> None:
    """A rule and a policy would each overwrite the scale and the row that the other has set."""
    source = {"monitor": None, "site": SITE, "probe": VECTOR} if reads == "a site" else {}
    acting = [policy(**source), *([policy("second", **source)] if what == "a second policy" else [])]
    engine = Engine(tiny("Qwen3"), controllers=Controllers(acting))
    engine.steering.hold("c", Steering(decode=(Steer(SITE, VECTOR),)))
    watch = Monitor(SITE, VECTOR, gates=(), name="m")
    own = Steering(monitors=(watch,)) if reads == "its own monitor" else Steering()
    if what == "the conversation":  # a request without the monitor makes it attenuate
        engine.controllers.sync.remove(acting[0])
        engine.generate([Request(OTHER, greedy(1), rules=(Rule("rest_of_conversation", attenuate=0.5),), conversation="c")])
        engine.controllers.sync.append(acting[0])
    if reads == "a monitor of all":
        engine.steering.set_monitor(watch)
    rules = (SWITCHES[what],) if what in SWITCHES else ()
    request = Request(PROMPT, greedy(), steering=own, rules=rules, conversation="c" if what == "the conversation" else None)
    with pytest.raises(ValueError, match="would both set the scale and the row of this request") as error:
        engine.submit(request)
    assert "'policy'" in str(error.value)
    assert (engine.busy, engine.steering.requests) == (False, ())
    if what in SWITCHES:
        now = Rule("this_token", LATER["when"], (Steer(SITE, VECTOR),)), Rule("this_token", LATER["when"], attenuate=0.5)
        fine = *now, Rule("rest_of_request", add=(Steer(SITE, VECTOR),))
        engine.check(replace(request, rules=fine))  # none is switched between steps
    if reads == "its own monitor":
        engine.check(replace(request, steering=Steering()))  # the policy does not read it
    for one in acting:
        one.gain = 0.0
    engine.check(request)  # a shadow changes nothing


def test_a_policy_reads_no_other_monitor_of_its_monitors_name() -> None:
    """A monitor is called by its site by default, and two probes at one site have other scores."""
    own, other = (Monitor(SITE, probe, gates=()) for probe in ("mine", [*VECTOR[:-1], 5.0]))
    engine = Engine(tiny("Qwen3"), vectors={"mine": VECTOR}, controllers=Controllers([policy(gain=0.0, monitor=own)]))
    message = f"the controller 'policy' would read the monitor '{SITE}', which has another site or probe than its own"
    for asked in (other, replace(other, probe=VECTOR, site=Site(0, "resid_mid"), name=str(SITE))):
        with pytest.raises(ValueError, match=message):
            engine.submit(Request(PROMPT, greedy(), steering=Steering(monitors=(asked,))))
        with pytest.raises(ValueError, match=message):
            engine.steering.set_monitor(asked)
    assert (engine.busy, engine.steering.monitors) == (False, ())
    nameless = Engine(tiny("Qwen3"), controllers=Controllers([policy(monitor=own)]))  # where "mine" is not registered yet
    with pytest.raises(ValueError, match=message):
        nameless.check(Request(PROMPT, greedy(), steering=Steering(monitors=(other,))))
    for same in (own, replace(own, probe=VECTOR, threshold=2.0), replace(other, name="other")):
        engine.check(Request(PROMPT, greedy(), steering=Steering(monitors=(same,))))
        engine.steering.set_monitor(same)


def test_a_policy_that_would_route_to_what_is_not_held_refuses_the_requests_that_it_reads() -> None:
    """Each of its overrides would be rejected, and the run one without steering."""
    engine = Engine(tiny("Qwen3"), controllers=Controllers([policy()]))
    monitor = Monitor(SITE, VECTOR, gates=(), name="m")
    watched = Request(PROMPT, greedy(), steering=Steering(monitors=(monitor,)))
    engine.steering.hold("C", Steering(decode=(Steer(SITE, VECTOR),)))
    with pytest.raises(ValueError, match=r"'policy' would route a request to 'c', which is not held; there are: C\. Call"):
        engine.submit(watched)
    engine.submit(Request(PROMPT, greedy()))  # which it does not read
    with pytest.raises(ValueError, match="would route a request to 'c', which is not held"):
        engine.steering.set_monitor(monitor)
    engine.steering.hold("c", Steering(decode=(Steer(SITE, VECTOR),)))
    engine.check(watched)
    engine.steering.set_monitor(monitor)


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


@pytest.mark.parametrize("urgent", [10, 40])
def test_a_policy_follows_a_request_through_any_preemption(urgent: int) -> None:
    """Bit for bit as the request alone, however many steps it waits."""
    host, found = tiny("Qwen3"), []
    for preempted in (False, True):
        acting = ProbeController("c", 0.0, 3.0, site=SITE, probe=VECTOR, smoothing=0.3)
        engine = Engine(host, rows=1, exact=True, controllers=Controllers([acting]))
        engine.steering.hold("c", Steering(decode=(Steer(SITE, VECTOR, 6.0),)))
        number = engine.submit(Request(PROMPT, greedy(12)))
        for _ in range(5):
            engine.step()
        if preempted:
            engine.submit(Request(OTHER, Sampling(max_new=urgent), priority=5))
        results = finish(engine)
        assert bool(results[number].preemptions) == preempted
        assert any(one.engaged and one.request == number for one in acting.decisions)
        found.append(table(results[number]))
        assert not acting.follows
        cancelled = engine.submit(Request(PROMPT, greedy(12)))
        engine.step()
        engine.cancel(cancelled)
        engine.generate([Request(PROMPT, greedy(1))], progress=False)
        assert not acting.follows
    assert torch.equal(*found)


@pytest.mark.parametrize("probe", [torch.ones(1), torch.ones(5), torch.ones(2, 8)])
def test_a_policys_probe_that_does_not_fit_its_site_is_refused(probe: Tensor) -> None:
    with pytest.raises(ValueError, match=r"the probe of 'policy' at blocks\.1\.resid_pre has"):
        Engine(tiny("Qwen3"), controllers=Controllers([ProbeController("c", 0.0, site=SITE, probe=probe)]))


def test_a_policy_reads_by_head_as_its_probe_is_written() -> None:
    host, site, probe = tiny("Qwen3"), Site(0, "k"), torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    with pytest.raises(ValueError, match=r"has the shape \[4, 2\], but the site has \[2, 4\]"):
        Engine(host, controllers=Controllers([ProbeController("c", 0.0, site=site, probe=probe.T)]))
    acting = ProbeController("c", -1e6, gain=0.0, site=site, probe=probe)
    Engine(host, controllers=Controllers([acting])).generate([Request(PROMPT, greedy(2))], progress=False)
    row = host.capture([site], torch.tensor([PROMPT]))[site][0, -1]
    assert acting.decisions[0].score == pytest.approx(float((row * probe).sum()), abs=1e-10)


@pytest.mark.parametrize("on", ["the request", "all"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("what", [*SWITCHES, "a second policy"])
def test_a_monitor_that_is_set_later_gives_no_request_a_second_hand(what: str, waits: bool, on: str) -> None:
    """The monitor is refused, and the request goes on as if nobody had tried; others may have it."""
    site = {"monitor": None, "site": SITE, "probe": VECTOR}
    acting = [policy(), *([policy("second", **site)] if what == "a second policy" else [])]
    watch = Monitor(SITE, VECTOR, gates=(), name="m")
    found = []
    for tried in (False, True):
        engine = Engine(tiny("Qwen3"), rows=1, controllers=Controllers([] if not tried else acting))
        engine.steering.hold("c", Steering(decode=(Steer(SITE, 9 * VECTOR),)))
        if waits:
            engine.submit(Request(OTHER, greedy(2)))
        rules = (SWITCHES[what],) if what in SWITCHES else ()
        number = engine.submit(Request(PROMPT, greedy(4), rules=rules))
        engine.step()
        if tried and (on == "all" or not waits):
            with pytest.raises(ValueError, match=r"the controller '(policy|second)' would read this monitor on request [01],"):
                engine.steering.set_monitor(watch, request=None if on == "all" else number)
            engine.steering.set_monitor(replace(watch, name="other"), request=None if on == "all" else number)
        found.append(finish(engine)[number])
        engine.steering.set_monitor(watch)
    if what in SWITCHES:
        close(*map(table, found))


def test_a_rule_that_attenuates_by_nothing_leaves_the_scale_to_a_policy() -> None:
    """Which may stand beside it; its gain would else be rejected, and what it engages act in full."""
    engine = Engine(tiny("Qwen3"), controllers=Controllers([policy(gain=0.5)]))
    engine.steering.hold("c", Steering(decode=(Steer(SITE, VECTOR),)))
    watched = Steering(monitors=(Monitor(SITE, VECTOR, gates=(), name="m"),))
    number = engine.submit(Request(PROMPT, greedy(4), steering=watched, rules=(Rule("rest_of_request", attenuate=1.0),)))
    engine.step()
    assert engine.steering.scale_of(number) == 0.5


@pytest.mark.parametrize("on", ["the request", "all"])
def test_a_request_has_one_policy_until_the_former_one_has_put_it_back(on: str) -> None:
    """Which it does some tokens after its monitor is gone: it would take away what the other one has set by then."""
    watches = [Monitor(SITE, VECTOR, gates=(), name=name) for name in ("m", "n")]
    acting = [policy("former"), policy("later", monitor=watches[1])]
    engine = Engine(tiny("Qwen3"), controllers=Controllers(acting))
    engine.steering.hold("c", Steering(decode=(Steer(SITE, VECTOR),)))
    number = engine.submit(Request(PROMPT, greedy(40)))
    to = None if on == "all" else number
    engine.step()
    engine.steering.set_monitor(watches[0], request=to)
    engine.step()
    engine.steering.clear_monitor("m", request=to)
    with pytest.raises(ValueError, match="the controller 'later' would read this monitor on request 0, whose scale and row"):
        engine.steering.set_monitor(watches[1], request=to)
    engine.steering.set_monitor(watches[0], request=to)  # its own, again
    engine.steering.clear_monitor("m", request=to)
    while engine.steering.routing(number) is not None:
        engine.step()
    engine.steering.set_monitor(watches[1], request=to)
    engine.step()
    assert [one.engaged for one in acting[1].decisions] == [True]


HALVING = Request(PROMPT, greedy(2), rules=(Rule("rest_of_conversation", attenuate=0.5),), conversation="c")


def test_a_generate_that_is_withdrawn_leaves_no_rule_in_its_conversation() -> None:
    host = tiny("Qwen3")
    engine = Engine(host)
    later = Request(PROMPT, greedy(3), steering=Steering(decode=(Steer(SITE, VECTOR),)), conversation="c")

    def several():
        yield HALVING
        engine.step()
        yield Request((VOCAB,))

    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate(several(), progress=False)
    close(table(engine.generate([later], progress=False)[0]), by_hand(host, PROMPT, 3, {SITE: adding(VECTOR, len(PROMPT))}))
    engine.generate([HALVING], progress=False)
    half = by_hand(host, PROMPT, 3, {SITE: adding(0.5 * VECTOR, len(PROMPT))})
    close(table(engine.generate([later], progress=False)[0]), half)


def test_a_request_that_fails_before_it_runs_leaves_no_rule_in_its_conversation() -> None:
    host, store = tiny("Qwen3"), RunStore()
    engine = Engine(host, store=store)
    engine.submit(replace(HALVING, run="run", capture=(Capture(SITE),)))
    with store.writing("run", weights="w"):
        (failed,) = engine.step()
    assert (failed.finish, failed.ids) == ("error", [])
    later = Request(PROMPT, greedy(3), steering=Steering(decode=(Steer(SITE, VECTOR),)), conversation="c")
    (result,) = engine.generate([later], progress=False)
    close(table(result), by_hand(host, PROMPT, 3, {SITE: adding(VECTOR, len(PROMPT))}))


def test_an_override_of_a_preempted_request_never_ends_it() -> None:
    host = tiny("Qwen3")
    own, calm = Steering(decode=(Steer(SITE, VECTOR),)), Steering(decode=(Steer(SITE, VECTOR, 2.0),))
    for rows, holds in ((1, False), (2, True)):
        engine = Engine(host, steering_rows=rows)
        number = engine.submit(Request(PROMPT, greedy(4), steering=own))
        engine.step()
        engine.preempt(number)
        if holds:
            engine.steering.hold("calm", calm)
            engine.steering.override(number, "calm")
            engine.steering.drop("calm")
        with pytest.raises(Full, match=f"would take a steering row that request {number} needs again"):
            engine.steering.hold("other", Steering(decode=(Steer(SITE, VECTOR, 3.0),)))
        (result,) = [one for _ in range(6) for one in engine.step()]
        first = {SITE: adding(VECTOR, len(PROMPT))}
        if not holds:
            close(table(result), by_hand(host, PROMPT, 4, first))
        assert result.finish == "length"
