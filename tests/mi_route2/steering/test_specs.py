"""Specs refuse what cannot be, in a sentence, and are named by what they hold."""

import math
from dataclasses import replace

import pytest
import torch

from mi_route2.patching.patches import FromRun, Patch
from mi_route2.sites import Site
from mi_route2.steering.specs import CLAMPS, Clamp, Monitor, Steer, Steering, Vector, looker

EARLY, SITE, LATE = Site(0, "resid_pre"), Site(1, "resid_mid"), Site(1, "resid_post")
QUARANTINE = Site(1, "quarantine_out", "mlp.down")
V = [1.0, -2.0, 0.5]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Vector([1.0, math.nan]), "finite"),
        (lambda: Vector(torch.zeros(2, 2, 2)), "1-D"),
        (lambda: Vector(["a"]), "a list of numbers or a name"),
        (lambda: Patch(SITE, 2, torch.tensor([1.0, math.nan])), "the source of a patch holds NaN or infinity"),
        (lambda: Vector("later").data, "is not resolved"),
        (lambda: Steer(SITE, V, math.inf), "scale must be a finite number, not inf"),
        (lambda: FromRun("run", -1), "position must be greater than or equal to 0"),
        (lambda: Clamp(SITE, V), "no bound"),
        (lambda: Clamp(SITE, V, low=2, high=1), "low must be the smaller"),
        (lambda: Clamp(SITE, V, low=1, value=2), "a value and bounds"),
        (lambda: Monitor(SITE, V, mode="subtract"), "mode must be 'add' or 'attenuate'"),
        (lambda: Monitor(SITE, V, adds=(Steer(EARLY, V),)), "cannot gate blocks.0.resid_pre"),
        (lambda: Monitor(Site(1, "q"), V, gates=(Site(1, "kept_out", "attn.k"),)), "on some models"),
        (lambda: Monitor(SITE, V, quarantine="close", quarantined=(LATE,)), "is not the output of an adapter"),
        (lambda: Monitor(SITE, V, prompt=True), "gates no quarantine"),
        (lambda: Monitor(SITE, V, depth=0.5), "only mode='attenuate' uses"),
        (lambda: Monitor(SITE, V, name="global:m"), "'global:m' is read as the monitor 'm' of all requests"),
        (lambda: Steering(clamps=(Clamp(SITE, V, low=0),) * (CLAMPS + 1)), f"at most {CLAMPS}"),
        (lambda: Steering(monitors=(Monitor(SITE, V), Monitor(SITE, [1.0]))), "two monitors"),
        (lambda: Steering(base=(Steer(SITE, "later"),)).fingerprint(), "'later' is not resolved"),
        (lambda: looker({"here": Vector(V)})("there"), "there are: here"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says.replace("[", r"\[")) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_site_takes_as_many_clamps_in_each_phase():
    own = tuple(Clamp(SITE, V, low=0, phase=phase) for phase in ("prefill", "decode") for _ in range(CLAMPS))
    assert len(Steering(clamps=own).clamps) == 2 * CLAMPS


def test_vectors_are_copies_and_equal_by_content():
    given = torch.tensor(V)
    vector = Vector(given)
    given[0] = 9
    assert vector == Vector(V) == Vector(torch.tensor(V).view(1, 3))
    assert hash(vector) == hash(Vector(V))
    assert vector != Vector(given)
    assert Vector(V) != Vector("V")
    assert Vector(torch.tensor(V, dtype=torch.bfloat16)).data.dtype == torch.float32
    assert Vector(torch.tensor(V, dtype=torch.float64)).data.dtype == torch.float64


def test_a_clamps_direction_is_of_length_one_whatever_its_scale():
    for factor in (1.0, 1e-30, 1e30):
        unit = Clamp(SITE, torch.tensor(V, dtype=torch.float64) * factor, value=1.0).unit()
        assert abs(float(unit.norm()) - 1) < 1e-15
        assert (unit - torch.tensor(V).double() / torch.tensor(V).double().norm()).abs().max() < 1e-15


FULL = Steering(
    base=(Steer(SITE, V),),
    prefill=(Steer(SITE, V),),
    decode=(Steer(SITE, V),),
    clamps=(Clamp(SITE, V, low=0.0, high=1.0),),
    monitors=(Monitor(SITE, V, mode="attenuate", quarantine="close", adds=(Steer(LATE, V),)),),
)
OTHERS = [
    replace(FULL, base=()),
    replace(FULL, base=FULL.base * 2),
    replace(FULL, prefill=(), decode=FULL.decode * 2),
    replace(FULL, decode=(Steer(SITE, V, 2.0),)),
    replace(FULL, decode=(Steer(LATE, V),)),
    replace(FULL, decode=(Steer(SITE, [1.0, -2.0, 0.25]),)),
    *(replace(FULL, clamps=(replace(FULL.clamps[0], **change),)) for change in (
        {"low": 0.5}, {"high": 2.0}, {"strength": 0.5}, {"phase": "decode"}, {"site": LATE}, {"vector": Vector([1.0, 0, 0])},
    )),
    *(replace(FULL, monitors=(replace(FULL.monitors[0], **change),)) for change in (
        {"threshold": 1.0}, {"sharpness": 2.0}, {"mode": "add"}, {"gates": ()}, {"gate_rows": True}, {"quarantine": "open"},
        {"quarantined": (QUARANTINE,)}, {"adds": ()}, {"depth": 0.5}, {"prompt": False}, {"probe": Vector([1.0, 0, 0])},
        {"site": Site(1, "mlp_in")},
    )),
]  # fmt: skip


def test_content_tells_apart_whatever_acts_otherwise():
    contents = [spec.fingerprint() for spec in (FULL, *OTHERS)]
    assert len(set(contents)) == len(contents)


def test_content_is_of_numbers_not_of_names():
    named = Steering(base=(Steer(SITE, "v"),), monitors=(Monitor(SITE, "v", name="one"),))
    direct = Steering(base=(Steer(SITE, V),), monitors=(Monitor(SITE, V, name="two"),))
    assert named.resolved(looker({"v": Vector(V)})).fingerprint() == direct.fingerprint()
    assert named.resolved(looker({"v": Vector(V[::-1])})).fingerprint() != direct.fingerprint()
