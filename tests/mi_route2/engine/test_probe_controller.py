"""The ready-made controller is its equations, speaks only when something changes, and as a shadow changes nothing."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepper import Stepper, direction, new_host, new_state

from mi_route2.engine.controllers import (
    STEP,
    UNREAD,
    Action,
    ClearOverride,
    Controllers,
    Override,
    ProbeController,
    RequestView,
    SetScale,
    StepView,
)
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from mi_route2.steering.state import Reading

SITE, LATE = Site(0, "resid_post"), Site(1, "resid_post")
WATCH = Monitor(SITE, [1.0], gates=(), name="m")


def seen(step: int, score: float, request: int = 0, **given) -> StepView:
    readings = {"m": Reading(score, 0.5)}
    fields = {"position": step, "token": 1, "logprob": -1.0, "readings": readings} | given
    return StepView(step, (RequestView(request, **fields),))


def fed(controller: ProbeController, scores: Sequence[float]) -> list[list[Action]]:
    return [controller.on_step(seen(step, score)) for step, score in enumerate(scores)]


@given(
    st.lists(st.floats(-2, 4), min_size=1, max_size=30),
    st.floats(0.1, 1.5),
    st.sampled_from([0.5, 2.0]),
    st.booleans(),
    st.sampled_from([0.25, 1.0]),
)
@settings(max_examples=40)
def test_it_is_its_equations(scores, hysteresis, gain, proportional, smoothing):
    controller = ProbeController("c", 1.0, hysteresis, monitor=WATCH, gain=gain, proportional=proportional, smoothing=smoothing)
    answers = fed(controller, scores)
    e, engaged, said = scores[0], False, 0.0
    for n, score in enumerate(scores):
        e = e if n == 0 else (1 - smoothing) * e + smoothing * score
        was, engaged = engaged, e >= (1.0 - hysteresis if engaged else 1.0)
        share = min(max((e - (1.0 - hysteresis)) / hysteresis, 0.0), 1.0) if proportional else 1.0
        wanted = gain * share if engaged else 0.0
        scales = [action.scale for action in answers[n] if isinstance(action, SetScale)]
        others = [action for action in answers[n] if not isinstance(action, SetScale)]
        if engaged and not was:
            assert (others, scales) == ([Override(0, "c")], [pytest.approx(wanted)])
        elif was and not engaged:
            assert answers[n] == [ClearOverride(0), SetScale(1.0, 0)]
        elif abs(wanted - said) >= STEP * gain + 1e-9:
            assert (others, scales) == ([Override(0, "c")], [pytest.approx(wanted)])
        elif abs(wanted - said) < STEP * gain - 1e-9:
            assert answers[n] == []
        said = next(iter(scales), said) if engaged else 0.0


@pytest.mark.parametrize("unit", [1e-3, 0.02, 1.0, 64.0])
def test_a_gain_in_another_unit_is_sent_at_the_same_scores(unit: float) -> None:
    """A vector twice as long with half the gain is the same steering."""
    scores = [1.0, 1.3, 1.5, 0.8, 0.9, 0.6, 0.7, 1.2]
    answers = fed(ProbeController("c", 1.0, 0.5, monitor=WATCH, gain=unit, proportional=True, smoothing=1.0), scores)
    sent = [[action.scale / unit for action in one if isinstance(action, SetScale)] for one in answers]
    assert sent == [[pytest.approx(1.0)], [], [], [pytest.approx(0.6)], [pytest.approx(0.8)], [pytest.approx(0.2)],
                    [pytest.approx(0.4)], [pytest.approx(1.0)]]  # fmt: skip


def test_the_score_of_a_prompts_last_token_is_left_out_where_it_is_told_so():
    """Thresholds that were set on generated tokens say nothing of it; position 4 is the last one of a prompt of 5."""
    for generated, expected in ((True, []), (False, [Override(0, "c"), SetScale(1.0, 0)])):
        controller = ProbeController("c", 1.0, monitor=WATCH, generated=generated)
        assert controller.on_step(seen(0, 3.0, position=4, prompt=5)) == expected
    controller = ProbeController("c", 1.0, monitor=WATCH, generated=True)
    assert controller.on_step(seen(1, 3.0, position=5, prompt=5)) == [Override(0, "c"), SetScale(1.0, 0)]


def test_a_gain_that_is_set_to_0_takes_back_what_it_did():
    """At the next token, read or not; a request that the controller has not engaged is left alone."""
    back = [ClearOverride(0), SetScale(1.0, 0)]
    for proportional, unread in ((False, False), (True, False), (True, True)):
        controller = ProbeController("c", 1.0, 0.5, monitor=WATCH, proportional=proportional, smoothing=1.0)
        controller.on_step(seen(0, 0.0, request=1))
        assert controller.on_step(seen(0, 2.0)) == [Override(0, "c"), SetScale(1.0, 0)]
        controller.gain = 0.0
        assert controller.steers((), 0)  # until it has put the request back
        assert not controller.steers(("m",), 1)
        if unread:
            answers = [controller.on_step(seen(step, 0.0, readings={})) for step in range(UNREAD + 1)]
            assert answers == [[]] * UNREAD + [back]
        else:
            assert fed(controller, [2.0, 2.0]) == [back, []]
            assert [one[2:] for one in controller.decisions] == [(True, 2.0, 1.0), (True, 2.0, 0.0)]
        assert not controller.on_step(seen(9, 2.0, request=1))
        assert not controller.steers((), 0)
    controller.gain = 0.5
    assert controller.on_step(seen(10, 2.0, request=1)) == [Override(1, "c"), SetScale(0.5, 1)]


def test_a_shadow_decides_alike_and_says_nothing():
    scores = [0.0, 2.0, 2.0, 0.0, 0.0, 5.0]
    shadow, acting = (ProbeController("c", 1.0, 0.2, monitor=WATCH, gain=gain, smoothing=0.5) for gain in (0.0, 1.0))
    assert not any(fed(shadow, scores))
    assert any(fed(acting, scores))
    assert [one[:4] for one in shadow.decisions] == [one[:4] for one in acting.decisions]
    assert {one.gain for one in shadow.decisions} == {0.0}


def test_prompts_do_not_count_however_they_are_cut():
    controller = ProbeController("c", 1.0, monitor=WATCH)
    for step in range(5):
        assert not controller.on_step(seen(step, 100.0, token=None))
    assert not controller.follows
    assert controller.on_step(seen(5, 2.0))


def test_what_is_not_read_any_more_is_put_back_and_what_has_ended_is_forgotten():
    controller = ProbeController("c", 1.0, monitor=WATCH)
    for request in (0, 7, 8):
        assert controller.on_step(seen(0, 2.0, request=request))
    for step in range(1, UNREAD + 1):  # its monitor was removed
        assert not controller.on_step(seen(step, 0.0, request=7, readings={}))
    assert controller.on_step(seen(UNREAD + 1, 0.0, request=7, readings={})) == [ClearOverride(7), SetScale(1.0, 7)]
    assert set(controller.follows) == {0, 8}
    assert not controller.on_step(StepView(UNREAD + 2, (), unfinished=(0, 1)))  # 8 was cancelled while it waited
    assert set(controller.follows) == {0}
    controller.on_step(seen(UNREAD + 3, 0.0, finished=True))
    assert not controller.follows


def test_a_score_that_is_no_number_or_not_there_is_passed_over():
    controller = ProbeController("c", 1.0, monitor=WATCH)
    for score in (float("nan"), float("inf")):
        assert not controller.on_step(seen(0, score))
    assert not controller.on_step(seen(0, 5.0, readings={}))
    assert not controller.follows


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give monitor, or site and probe"),
        ({"monitor": WATCH, "site": SITE, "probe": [1.0]}, "give monitor, or site and probe"),
        ({"site": SITE}, "give monitor, or site and probe"),
        ({"monitor": WATCH, "gain": -1.0}, "hysteresis and gain not negative"),
        ({"monitor": WATCH, "hysteresis": float("nan")}, "finite"),
        ({"monitor": WATCH, "proportional": True}, "give one above 0"),
        ({"monitor": WATCH, "smoothing": 0.0}, "between 0 and 1"),
        ({"site": SITE, "probe": "later"}, "the controller's probe is the name 'later': give its numbers"),
    ],
)
def test_a_controller_that_cannot_be_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        ProbeController("c", 1.0, **given)


def test_a_name_is_refused_since_no_request_may_carry_such_a_monitor():
    """All monitors are known when requests come: a misspelt name could only be silent."""
    with pytest.raises(TypeError, match="monitor must be a Monitor or None, not the str 'hakc': give the Monitor itself"):
        ProbeController("c", 1.0, monitor="hakc")


def test_a_monitor_that_is_set_on_every_request_is_read_too():
    """Its readings come under a name of their own kind, so that no request's own monitor stands in for it."""
    host, state = new_host(), new_state()
    watch = Monitor(SITE, direction(1), gates=(), name="m")
    state.hold("c", Steering(decode=(Steer(LATE, direction(2)),)))
    state.set_monitor(watch)
    for request in range(3):
        state.admit(request, None)
    controller = ProbeController("c", -1e6, monitor=watch)
    stepper = Stepper(host, state, Controllers([controller])).run(2)
    assert all("m" not in view.readings for view in stepper.views[0].requests)
    assert {one.request for one in controller.decisions if one.engaged} == {0, 1, 2}


@pytest.mark.parametrize("when", ["never", "dropped"])
def test_a_configuration_that_is_not_held_leaves_the_requests_own_vectors_alone(when):
    """Whatever the gain becomes; where it was dropped after the request engaged, it stays in effect and its gain follows.

    What was rejected is no decision, and the request is engaged once there is such a configuration.
    """
    state, probe = new_state(), direction(1)
    watch = Monitor(SITE, probe, gates=(), name="m")
    controller = ProbeController("c", -1.0, 4.0, monitor=watch, gain=2.0, proportional=True, smoothing=1.0)
    if when == "dropped":
        state.hold("c", Steering(decode=(Steer(LATE, direction(2)),)))
    state.admit(0, Steering(decode=(Steer(LATE, direction(3)),), monitors=(watch,)))
    before, controllers = state.fingerprint(0, decode=True), Controllers([controller])
    for step, score in enumerate((0.5, -2.0, -3.0)):
        controllers.after_step(seen(step, score), state)
        if when == "never":
            assert state.fingerprint(0, decode=True) == before
            assert not controller.decisions
            assert not controller.follows[0].engaged
        else:
            assert (state.routing(0).name, state.scale_of(0)) == ("c", controller.decisions[-1].gain)
            if step == 0:
                state.drop("c")
    if when == "never":
        state.hold("c", Steering(decode=(Steer(LATE, direction(2)),)))
        controllers.after_step(seen(3, -0.5), state)
        assert (state.routing(0).name, state.scale_of(0)) == ("c", 2.0)
        assert [one.step for one in controller.decisions] == [3]
        return
    assert [one.gain for one in controller.decisions] == [2.0, 1.5, 1.0]


@pytest.mark.parametrize("captured", [False, True])
def test_on_a_model_it_steers_from_the_token_after_its_decision(captured):
    host, probe, config = new_host(), direction(1), Steering(decode=(Steer(LATE, direction(2)),))
    monitor = Monitor(SITE, probe, gates=(), name="m")

    def run(gain: float, threshold: float) -> tuple[Stepper, ProbeController]:
        source = {"site": SITE, "probe": probe} if captured else {"monitor": monitor}
        controller, state = ProbeController("c", threshold, gain=gain, smoothing=1.0, **source), new_state()
        state.hold("c", config)
        for request in range(3):
            state.admit(request, Steering(monitors=() if captured else (monitor,)))
        return Stepper(host, state, Controllers([controller])).run(6), controller

    shadow, watched = run(0.0, 0.0)
    scores = torch.tensor(
        [[float(r.captured[SITE] @ probe) if captured else r.readings["m"].score for r in view.requests] for view in shadow.views]
    )
    threshold = float(scores.max(0).values.min()) - 1e-6  # each request engages at some step, and not all at the first
    steered, controller = run(1.0, threshold)
    plain = run(0.0, threshold)[0]
    for request in range(3):
        flips = [one for one in controller.decisions if one.request == request]
        first = int((scores[:, request] >= threshold).nonzero()[0])
        assert flips[0].step == first
        for n in range(6):
            if n <= first:
                assert torch.equal(steered.logits[n][request], plain.logits[n][request])
        if first < 5:
            assert not torch.equal(steered.logits[first + 1][request], plain.logits[first + 1][request])
    assert watched.decisions
