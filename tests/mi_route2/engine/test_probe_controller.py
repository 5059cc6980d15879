"""The ready-made controller is its equations, speaks only when something changes, and as a shadow changes nothing."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepper import Stepper, direction, new_host, new_state

from mi_route2.engine.controllers import (
    STEP,
    Change,
    Controllers,
    Override,
    ProbeController,
    RequestView,
    SetScale,
    StepView,
)
from mi_route2.sites import Site
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import Monitor, Steer, Steering

SITE, LATE = Site(0, "resid_post"), Site(1, "resid_post")


def seen(step: int, score: float, request: int = 0, **given) -> StepView:
    readings = {"m": MonitorReading(score, 0.5)}
    fields = {"position": step, "token": 1, "logprob": -1.0, "readings": readings} | given
    return StepView(step, (RequestView(request, **fields),), {request})


def fed(controller: ProbeController, scores: Sequence[float]) -> list[list[Change]]:
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
    controller = ProbeController("c", 1.0, hysteresis, monitor="m", gain=gain, proportional=proportional, smoothing=smoothing)
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
            assert answers[n] == [Override(0, None), SetScale(1.0, 0)]
        elif abs(wanted - said) >= STEP * gain + 1e-9:
            assert (others, scales) == ([Override(0, "c")], [pytest.approx(wanted)])
        elif abs(wanted - said) < STEP * gain - 1e-9:
            assert answers[n] == []
        said = next(iter(scales), said) if engaged else 0.0


def test_the_score_of_a_prompts_last_token_is_left_out_where_it_is_told_so():
    """Thresholds that were set on generated tokens say nothing of it; position 4 is the last one of a prompt of 5."""
    for generated, expected in ((True, []), (False, [Override(0, "c"), SetScale(1.0, 0)])):
        controller = ProbeController("c", 1.0, monitor="m", generated=generated)
        assert controller.on_step(seen(0, 3.0, position=4, prompt=5)) == expected
    controller = ProbeController("c", 1.0, monitor="m", generated=True)
    assert controller.on_step(seen(1, 3.0, position=5, prompt=5)) == [Override(0, "c"), SetScale(1.0, 0)]


def test_a_shadow_decides_alike_and_says_nothing():
    scores = [0.0, 2.0, 2.0, 0.0, 0.0, 5.0]
    shadow, acting = (ProbeController("c", 1.0, 0.2, monitor="m", gain=gain, smoothing=0.5) for gain in (0.0, 1.0))
    assert not any(fed(shadow, scores))
    assert any(fed(acting, scores))
    assert [one[:4] for one in shadow.decisions] == [one[:4] for one in acting.decisions]
    assert {one.gain for one in shadow.decisions} == {0.0}


def test_prompts_do_not_count_however_they_are_cut():
    controller = ProbeController("c", 1.0, monitor="m")
    for step in range(5):
        assert not controller.on_step(seen(step, 100.0, token=None))
    assert not controller.follows
    assert controller.on_step(seen(5, 2.0))


def test_a_score_that_is_no_number_or_not_there_is_passed_over():
    controller = ProbeController("c", 1.0, monitor="m")
    for score in (float("nan"), float("inf")):
        assert not controller.on_step(seen(0, score))
    assert not controller.on_step(seen(0, 5.0, readings={}))
    assert not controller.follows


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"monitor": "m", "gain": -1.0}, "hysteresis and gain not negative"),
        ({"monitor": "m", "hysteresis": float("nan")}, "finite"),
        ({"monitor": "m", "proportional": True}, "give one above 0"),
        ({"monitor": "m", "smoothing": 0.0}, "between 0 and 1"),
    ],
)
def test_a_controller_that_cannot_be_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        ProbeController("c", 1.0, **given)


def test_a_monitor_that_is_set_on_every_request_is_read_too():
    """Its readings come under a name of their own kind, so that no request's own monitor stands in for it."""
    host, state = new_host(), new_state()
    watch = Monitor(SITE, direction(1), gates=(), name="m")
    state.hold("c", Steering(decode=(Steer(LATE, direction(2)),)))
    state.set_monitor(watch)
    for request in range(3):
        state.admit(request, None)
    controller = ProbeController("c", -1e6, monitor="m")
    stepper = Stepper(host, state, Controllers([controller])).run(2)
    assert all("m" not in view.readings for view in stepper.views[0].requests)
    assert {one.request for one in controller.decisions if one.engaged} == {0, 1, 2}


def test_on_a_model_it_steers_from_the_token_after_its_decision():
    host, probe, config = new_host(), direction(1), Steering(decode=(Steer(LATE, direction(2)),))
    monitor = Monitor(SITE, probe, gates=(), name="m")

    def run(gain: float, threshold: float) -> tuple[Stepper, ProbeController]:
        controller, state = ProbeController("c", threshold, gain=gain, smoothing=1.0, monitor="m"), new_state()
        state.hold("c", config)
        for request in range(3):
            state.admit(request, Steering(monitors=(monitor,)))
        return Stepper(host, state, Controllers([controller])).run(6), controller

    shadow, watched = run(0.0, 0.0)
    scores = torch.tensor([[r.readings["m"].score for r in view.requests] for view in shadow.views])
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
