"""Actions apply in order, each for itself; what is wrong with one controller is nobody else's matter."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engines import Doing
from stepper import direction, new_state

from mi_route2.engine.controllers import (
    QUEUE,
    STEP,
    UNREAD,
    Action,
    Applied,
    AsyncController,
    ClearOverride,
    ClearTier,
    Controllers,
    Override,
    Rejected,
    SetMonitor,
    SetScale,
    SetTier,
    StepView,
    apply_all,
)
from mi_route2.engine.rules import CONVERSATIONS
from mi_route2.sites import Site
from mi_route2.steering.specs import CLAMPS, Monitor, Steer, Steering

SITE, LATE = Site(0, "resid_post"), Site(1, "resid_post")
V, W = direction(1), direction(2)


def test_actions_of_one_step_apply_in_order():
    state = new_state()
    for request in range(2):
        state.admit(request, Steering(decode=(Steer(SITE, V),)))
    state.hold("other", Steering(decode=(Steer(SITE, W),)))
    actions = [Override(0, "other"), SetScale(0.5, request=0), SetScale(0.25, request=0), Override(1, "other"), ClearOverride(1)]
    assert all(isinstance(outcome, Applied) for outcome in apply_all(state, actions))
    assert (routed := state.routing(0))
    assert (routed.name, state.scale_of(0), state.routing(1)) == ("other", 0.25, None)


def test_a_bad_action_is_counted_with_its_reason_and_the_others_apply():
    state = new_state()
    state.admit(0, None)
    actions = [SetScale(float("nan")), Override(0, "nowhere"), SetTier((Steer(SITE, V),)), Override(99, None)]
    controllers = Controllers([Doing(lambda _view: actions, "script")])
    controllers.after_step(StepView(0), state)
    ledger = controllers.snapshot()
    assert ledger["sources"] == {"script": {"rejected": 3, "applied": 1}}
    reasons = [entry.get("rejected", "") for entry in ledger["recent"]]
    assert [bool(reason) for reason in reasons] == [True, True, False, True]
    assert "finite" in reasons[0]
    assert "cannot be routed to 'nowhere'" in reasons[1]
    assert ledger["recent"][1]["action"] == "Override(request=0, config='nowhere')"
    assert "request 99 is not running: it still waits, or has ended" in reasons[3]
    assert set(state.tier) == {SITE}


def test_a_controller_that_raises_is_explained_and_the_rest_goes_on():
    def breaks(_view: StepView) -> Sequence[Action]:
        raise KeyError("no such thing")

    def breaks_half_way(_view: StepView) -> Iterator[Action]:
        yield SetScale(0.5)
        raise ValueError("half way")

    half: Any = breaks_half_way
    tier = Doing(lambda view: [SetTier((Steer(SITE, V),))] if view.step == 0 else None, "script")
    controllers, state = Controllers([Doing(breaks, "broken"), Doing(half, "half"), tier]), new_state()
    for step in range(2):
        controllers.after_step(StepView(step), state)
    sources = controllers.snapshot()["sources"]
    assert sources == {"broken": {"failed": 2}, "half": {"failed": 2}, "script": {"applied": 1}}
    assert state.gain == 1.0  # of a controller that failed, nothing is done
    assert any("KeyError: 'no such thing'" in entry.get("failed", "") for entry in controllers.ledger.recent)


def test_a_full_queue_drops_what_is_new_and_says_so():
    queue, state = AsyncController("outside"), new_state()
    controllers = Controllers(queues=[queue])
    assert (QUEUE, CONVERSATIONS, CLAMPS, STEP, UNREAD) == (1024, 1024, 4, 0.05, 16), "what the pages say"
    for i in range(QUEUE - 1):
        assert queue.submit(SetScale(float(i)))
    assert not queue.submit(SetScale(5000.0), SetScale(5001.0))  # both or none
    assert queue.submit(SetScale(7.0))
    assert not queue.submit(SetScale(8.0))
    assert queue.submit()
    assert len(queue._queue) == QUEUE
    assert queue.snapshot() == {"waiting": QUEUE, "capacity": QUEUE, "dropped": 3}
    assert len(controllers.before_step(state)) == QUEUE
    assert state.gain == 7.0
    assert controllers.snapshot()["sources"] == {"outside": {"dropped": 3, "applied": QUEUE}}
    assert len(controllers.ledger.recent) == 256  # bounded
    controllers.before_step(state)
    assert controllers.snapshot()["sources"]["outside"]["dropped"] == 3


def test_submitting_is_safe_from_many_threads():
    queue, state = AsyncController(capacity=300), new_state()
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda: taken.extend(queue.submit(SetScale(1.0)) for _ in range(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken.count(True), taken.count(False)) == (300, 500)
    assert len(Controllers(queues=[queue]).before_step(state)) == 300


def test_names_tell_sources_apart():
    with pytest.raises(ValueError, match="two controllers are called 'script'"):
        Controllers([Doing(lambda _view: None, "script")] * 2)


def test_an_override_fails_closed_with_its_monitor():
    """Row and scale are put back to what they were, in whichever order the three came; other requests are not touched."""
    v = V[:16]
    bad = Monitor(SITE, [1.0])
    good = Monitor(SITE, v)
    for batch in (
        [Override(0, "b"), SetScale(0.5, request=0), SetMonitor(bad, 0)],
        [Override(0, "b"), SetMonitor(bad, 0), SetScale(0.5, request=0)],
        [SetMonitor(bad, 0), Override(0, "b"), SetScale(0.5, request=0)],
        [ClearOverride(0), Override(0, "b"), SetMonitor(bad, 0)],
        [SetMonitor(bad, 0), ClearOverride(0), SetScale(1.0, request=0)],  # or the scale of "a" would act on the request's own
    ):
        state = new_state()
        for request in range(2):
            state.admit(request, Steering(base=(Steer(SITE, v),)))
        state.hold("a", Steering(base=(Steer(SITE, 2 * v),)))
        state.hold("b", Steering(base=(Steer(SITE, 3 * v),)))
        apply_all(state, [Override(0, "a"), SetScale(2.0, request=0)])
        state.drop("a")  # it can be put back though its name is gone
        before = state.fingerprint(0, decode=True)
        outcomes = apply_all(state, [*batch, Override(1, "b"), SetMonitor(good, 1)], "test")
        assert state.fingerprint(0, decode=True) == before
        assert (routed := state.routing(0))
        assert (routed.name, routed.spec, state.scale_of(0)) == ("a", Steering(base=(Steer(SITE, 2 * v),)), 2.0)
        assert state.routing(1) is not None
        assert all(isinstance(outcome, Applied) for outcome in outcomes[-2:])
        reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Rejected)]  # what is taken back is told
        assert len(reasons) == len(batch)
        assert [bool("the site has 16" in reason) for reason in reasons] == [isinstance(one, SetMonitor) for one in batch]


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize(
    "steering", [[Override(0, "b"), SetScale(0.5, request=0)], [SetScale(3.0), SetTier([Steer(SITE, V[:16])]), SetScale(0.5)]]
)
def test_what_a_monitor_of_all_was_to_gate_fails_closed_with_it(steering, wanted):
    """In whichever order they came; what came without an override, and what only takes steering away, applies."""
    state = new_state()
    for request in range(3):
        state.admit(request, Steering(base=(Steer(SITE, V[:16]),)))
    state.hold("b", Steering(base=(Steer(SITE, 3 * V[:16]),)))
    apply_all(state, [Override(1, "b"), SetTier([Steer(SITE, -V[:16])]), SetScale(2.0)])
    before = state.fingerprint(0, decode=True)
    batch = [SetMonitor(Monitor(SITE, [1.0])), *steering] if wanted else [*steering, SetMonitor(Monitor(SITE, [1.0]))]
    cleared = Override(1, None) if wanted else ClearOverride(1)
    outcomes = apply_all(state, [*batch, cleared, SetScale(0.25, request=2)], "test")
    assert state.fingerprint(0, decode=True) == before
    assert (state.scale_of(0), state.gain, state.routing(1), state.scale_of(2)) == (1.0, 2.0, None, 0.25)
    reasons = [one.reason for one in outcomes if isinstance(one, Rejected)]
    assert "the site has 16" in reasons.pop(0 if wanted else -1)
    assert reasons == ["SetMonitor(blocks.0.resid_post, request=None) was rejected, and this goes with it"] * len(steering)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("batch", "why"),
    [([Override(0, "calmm"), SetScale(0.5, 0)], "calmm"), ([SetTier([Steer(SITE, [1.0])]), SetScale(0.5)], "has 16")],
)
def test_a_scale_goes_with_the_override_or_tier_that_is_rejected(batch, why, first):
    """It was meant for that one, and would scale the request's own vectors, or the tier before."""
    state = new_state()
    state.admit(0, Steering(base=(Steer(SITE, V[:16]),)))
    state.set_tier([Steer(SITE, W[:16])])
    before = state.fingerprint(0, decode=True)
    outcomes = apply_all(state, batch if first else batch[::-1], "test")
    assert why in " ".join(one.reason for one in outcomes if isinstance(one, Rejected))
    assert (state.fingerprint(0, decode=True), state.scale_of(0), state.gain) == (before, 1.0, 1.0)
    apply_all(state, [SetScale(0.5), ClearTier(), *batch], "test")
    assert (state.tier, state.gain) == ({}, 1.0)  # what was cleared does not come back


def test_sites_that_are_taken_back_between_steps_are_explained_and_end_no_step():
    taken_back = Doing(lambda _view: None, "script")
    controllers = Controllers([taken_back])
    object.__setattr__(taken_back, "wants", None)
    assert controllers.wants(lambda _site: None) == frozenset()
    assert controllers.ledger.counts["script"]["failed"] == 1
    assert "what it wants is no set of sites" in str(controllers.snapshot()["recent"])
