"""Controllers: their changes apply in order, and their errors end no request."""

import pytest
import torch
from engines import Doing, tiny
from stepper import direction, new_state

from mi_route2.engine import Engine, Request, Sampling
from mi_route2.engine.controllers import ClearMonitor, Controllers, Override, SetMonitor, SetScale, SetTier, StepView
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

SITE = Site(0, "resid_pre")
MONITOR = Monitor(SITE, direction(1), gates=(), name="m")


def test_changes_apply_in_order_up_to_the_first_that_is_invalid() -> None:
    state = new_state()
    state.admit(0, None)
    state.hold("on", Steering(decode=(Steer(SITE, direction(2)),)))
    wrong = SetMonitor(Monitor(SITE, torch.zeros(3, dtype=torch.float64), name="short"), 0)
    first = Doing(lambda _view: [SetScale(0.5, 0), SetTier((Steer(SITE, direction(3)),)), wrong, Override(0, "on")], name="first")
    second = Doing(lambda _view: [SetMonitor(MONITOR, 0), SetMonitor(MONITOR), ClearMonitor("m", 0)], name="second")
    controllers = Controllers([first, second])
    controllers.after_step(StepView(7), state)
    request = state.snapshot()["requests"][0]
    assert (request["scale"], request["override"], request["monitors"]) == (0.5, None, [])
    assert list(state.tier) == [SITE]
    assert list(state.snapshot()["monitors"]) == ["m"]
    assert controllers.applied == {"first": 2, "second": 3}
    ((step, name, reason),) = controllers.problems
    assert (step, name) == (7, "first")
    assert "the probe at blocks.0.resid_pre has 3 numbers" in reason


def test_a_controller_that_raises_is_recorded_and_ends_no_request() -> None:
    def fails(_view: StepView) -> None:
        raise KeyError("gone")

    engine = Engine(tiny(), controllers=[Doing(fails)])
    (result,) = engine.generate([Request((3, 4, 5), Sampling(max_new=3))], progress=False)
    assert result.finish == "length"
    assert [reason for *_, reason in engine.controllers.problems] == ["KeyError: 'gone'"] * 3


def test_what_is_no_controller_is_refused() -> None:
    with pytest.raises(ValueError, match="two controllers are called 'doing'"):
        Controllers([Doing(lambda _view: None), Doing(lambda _view: None)])
    with pytest.raises(KeyError, match="its layers are"):
        Engine(tiny(), controllers=[Doing(lambda _view: None, wants=frozenset({Site(9, "resid_pre")}))])
