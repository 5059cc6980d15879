"""R5: nothing that the oracle or a detector says about the student's rollouts can reach a method's loss or route."""

import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from mask_oracle import CASES, METHODS, case_id, erase_route, mask_route, run, spec_of
from tiny_policy import SPECS, make_batch, make_policy

from mi_route2.rollouts import Rollouts
from mi_route2.routing import (
    EraseSpec,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    Privileged,
    Route,
    StepContext,
    TrainBatch,
    group_advantages,
)
from mi_route2.routing.routes import MicroBatch


def reachable(kind: type, seen: dict[str, set[type]] | None = None) -> dict[str, set[type]]:
    """Every field name and type that a dataclass reaches, through its fields' own dataclasses and unions."""
    seen = {} if seen is None else seen
    for name, hint in typing.get_type_hints(kind).items():
        for inner in typing.get_args(hint) or (hint,):
            if inner in seen.setdefault(name, set()):
                continue
            seen[name].add(inner)
            if is_dataclass(inner):
                reachable(typing.cast(type, inner), seen)
    return seen


def test_what_reaches_the_loss_and_the_route_has_no_oracle_field() -> None:
    """The names are written down here: a new field has to be argued for in this test."""
    allowed = {"rollouts", "tokens", "attention", "completion", "rewards", "advantages", "groups", "teacher"}
    allowed |= {"old_logprobs", "reference_logprobs"}
    found = reachable(TrainBatch)
    assert found.keys() == allowed
    assert not any(Privileged in kinds for kinds in found.values())
    assert {f.name for f in fields(Rollouts)} <= allowed
    assert {f.name for f in fields(MicroBatch)} == {"batch", "tape", "advantages"}
    assert {f.name for f in fields(Privileged)} == {"own_channel", "known_channel"}


def routes() -> dict[str, Callable[[object], Route]]:
    def of(spec: MaskSpec) -> Callable[[object], Route]:
        return lambda policy: mask_route(policy, spec)  # pyright: ignore[reportArgumentType]

    out = {case_id(c): of(spec_of(c)) for c in METHODS if c[3] == "filter"}
    out["no mask"] = of(MaskSpec(score="none"))
    out["open"] = lambda policy: OpenRoute(OpenSpec())
    out["erase"] = erase_route
    return out


ROUTES = routes()


@pytest.mark.parametrize("name", ROUTES)
def test_a_method_that_is_shown_verdicts_refuses_whatever_they_say(name: str) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    route = ROUTES[name](policy)
    route.refresh(policy, 0)
    assert not route.spec.privileged
    for verdicts in (torch.zeros(6).bool(), torch.ones(6).bool()):
        with pytest.raises(TypeError, match="must not see"):
            route.begin(policy, batch, StepContext(torch.Generator(), privileged=Privileged(verdicts, verdicts)))


@pytest.mark.parametrize("score", ["own_channel", "known_channel"])
def test_a_bound_needs_verdicts_and_reads_its_own(score: str) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    route = mask_route(policy, MaskSpec(score=score))  # pyright: ignore[reportArgumentType]
    assert route.spec.privileged
    with pytest.raises(ValueError, match=r"StepContext\.privileged"):
        route.begin(policy, batch, StepContext(torch.Generator()))
    own, known = torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 0, 0, 1]).bool()
    step = route.begin(policy, batch, StepContext(torch.Generator(), privileged=Privileged(own, known)))
    expected = (own if score == "own_channel" else known) & (batch.advantages > 0)
    assert torch.equal(step.micro_batches[0].tape.kept.known, expected)  # pyright: ignore


def test_only_channel_scores_are_privileged() -> None:
    for case in CASES:
        assert spec_of(case).privileged == case[0].endswith("_channel")
    assert not EraseSpec().privileged
    assert not OpenSpec().privileged


def test_rewards_reach_a_method_through_its_advantages_alone() -> None:
    """With the kept advantage 'own', rewards, groups and the teacher mark change no gradient: no label is read on the side."""
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    scrambled = replace(batch, rewards=batch.rewards.flip(0) + 7, groups=torch.zeros(6, dtype=torch.long), teacher=~batch.teacher)
    for case in METHODS:
        route = mask_route(policy, spec_of(case))
        one, other = run(policy, route, batch), run(policy, route, scrambled)
        assert all(torch.equal(g, other.kept[n]) for n, g in one.kept.items())
        assert all(torch.equal(g, other.quarantine[n]) for n, g in one.quarantine.items())


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 3.0, 9.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 7, 2, 2, 4])
    assert torch.allclose(group_advantages(rewards, groups), torch.tensor([0.0, -1, 1, 1, -1, 0], dtype=torch.float64))
    counted = torch.tensor([True, True, False, False, False, True])
    own = group_advantages(rewards, groups, counted)
    assert torch.allclose(own, torch.tensor([0.5, -0.5, 1.5, 0, 0, 0], dtype=torch.float64))
    assert torch.equal(group_advantages(rewards, groups, torch.zeros(6).bool()), torch.zeros(6, dtype=torch.float64))
