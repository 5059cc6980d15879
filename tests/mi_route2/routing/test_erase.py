"""Erase takes the hack-ward component out of the kept gradient, and nothing else; the additive form gives it to the quarantine."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mask_oracle import FixedFitter, assert_same, axes, frame, random_directions, run
from mask_oracle import erase_route as erase_route_of
from tiny_policy import SPECS, make_batch, make_policy

from mi_route2.routing import EraseRoute, EraseSpec, OpenRoute, OpenSpec, StepContext
from mi_route2.routing.routes import hack_component


@given(d=st.integers(1, 12), k=st.integers(0, 4), seed=st.integers(0, 200))
def test_what_is_left_has_no_hackward_part_and_lost_nothing_else(d: int, k: int, seed: int) -> None:
    k = min(k, d)
    axes = frame(k, d, seed)
    g = torch.randn(d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    part = hack_component(g, axes)
    left = g - part
    along_g, along_left = axes @ g, axes @ left
    assert (along_left <= 1e-12).all()
    assert torch.allclose(along_left[along_g < 0], along_g[along_g < 0], rtol=0, atol=1e-12), "an opposite-signed part was lost"
    outside = torch.eye(d, dtype=torch.float64) - axes.T @ axes
    assert torch.allclose(outside @ left, outside @ g, rtol=0, atol=1e-12), "the complement was touched"
    assert torch.allclose(hack_component(left, axes), torch.zeros_like(g), rtol=0, atol=1e-12)
    assert torch.equal(hack_component(torch.zeros_like(g), axes), torch.zeros_like(g))


erase_route = partial(erase_route_of, k=3)


@pytest.mark.parametrize("name", ["svd", "svd-low", "lora"])
def test_erase_in_a_step(name: str) -> None:
    policy, batch = make_policy(SPECS[name]), make_batch(6)
    plain = run(policy, OpenRoute(OpenSpec()), batch).kept
    own = run(policy, erase_route(policy), batch)
    removed = total = 0.0
    for site, v in axes(policy, 3).vectors.items():
        scored = f"{site}.{policy.adapters.sites[site].kept.scored}"
        along = [float((a * plain[scored]).sum()) for a in v]
        part = sum((max(c, 0.0) * a for c, a in zip(along, v)), torch.zeros_like(plain[scored]))
        assert torch.allclose(own.kept[scored], plain[scored] - part, rtol=0, atol=1e-14)
        removed, total = removed + float(part.square().sum()), total + float(plain[scored].square().sum())
        if name == "lora":
            assert torch.equal(own.kept[f"{site}.A"], plain[f"{site}.A"]), "erase acts on B alone"
    assert own.decision.extra["removed"] == pytest.approx((removed / total) ** 0.5, rel=1e-10)
    assert 0 < own.decision.extra["removed"] < 1
    assert not any(g.any() for g in own.quarantine.values())


@pytest.mark.parametrize("name", ["svd-shared", "lora-shared"])
def test_the_additive_form_moves_the_part_and_keeps_the_sum(name: str) -> None:
    policy, batch = make_policy(SPECS[name]), make_batch(6)
    plain = run(policy, OpenRoute(OpenSpec()), batch).kept
    dropped = run(policy, erase_route(policy), batch).kept
    own = run(policy, erase_route(policy, "quarantine"), batch)
    assert_same(own.kept, dropped)
    assert any(g.any() for g in own.quarantine.values())
    for site in policy.adapters.sites:
        scored = f"{site}.{policy.adapters.sites[site].kept.scored}"
        shared = own.quarantine[f"{site}.shared"]
        assert torch.allclose(shared, plain[scored] - own.kept[scored], rtol=0, atol=1e-16)
        assert torch.allclose(shared + own.kept[scored], plain[scored], rtol=0, atol=1e-16)


def test_a_frozen_quarantine_gets_no_part() -> None:
    """A gradient would let an optimizer change it."""
    policy, batch = make_policy(SPECS["svd-shared"]), make_batch(6)
    frozen, *others = policy.adapters.quarantine_parameters().values()
    frozen.requires_grad_(False)
    erase_route(policy, "quarantine").backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits))
    assert frozen.grad is None
    assert all(p.grad is not None for p in others)


def test_the_additive_form_needs_a_shared_basis() -> None:
    for name in ("svd", "lora"):
        policy = make_policy(SPECS[name])
        with pytest.raises(ValueError, match="quarantine='shared'"):
            run(policy, erase_route(policy, "quarantine"), make_batch(6))


def test_nothing_is_removed_from_a_gradient_of_zero() -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    idle = run(policy, erase_route(policy), replace(batch, advantages=torch.zeros_like(batch.advantages)))
    assert idle.decision.extra["removed"] == 0.0


def test_sites_without_axes_are_left_alone() -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    plain = run(policy, OpenRoute(OpenSpec()), batch).kept
    empty = axes(policy, 2)
    bare = {s: v[:0] if ".attn." in s else v for s, v in empty.vectors.items()}
    route = EraseRoute(EraseSpec(), FixedFitter(replace(empty, vectors=bare)))
    route.refresh(policy, 0)
    own = run(policy, route, batch).kept
    touched = [name for name, g in plain.items() if not torch.equal(own[name], g)]
    assert touched
    assert not any(".attn." in name for name in touched)


def test_the_update_residual_by_hand() -> None:
    """A step ``-g`` that points hack-ward leaks all of it, a step along ``+v`` (away: the update is minus the gradient) nothing."""
    policy = make_policy(SPECS["svd"])
    route = erase_route(policy, k=1)
    towards = {s: -2 * v[0] for s, v in route.directions.vectors.items()}
    assert route.after_update(towards)["update_residual"] == pytest.approx(1.0)
    assert route.after_update({s: -d for s, d in towards.items()})["update_residual"] == pytest.approx(0.0, abs=1e-12)
    assert route.after_update({s: 0 * d for s, d in towards.items()})["update_residual"] == 0.0
    draws = {
        s: torch.randn(v[0].shape, generator=torch.Generator().manual_seed(i), dtype=v.dtype)
        for i, (s, v) in enumerate(route.directions.vectors.items())
    }
    leaked = sum(max(-float(route.directions.vectors[s][0] @ d), 0.0) ** 2 for s, d in draws.items())
    total = sum(float(d @ d) for d in draws.values())
    assert route.after_update(draws)["update_residual"] == pytest.approx((leaked / total) ** 0.5, rel=1e-10)


def test_momentum_leaks_what_the_gradient_lost() -> None:
    """Why the residual is reported: after plain steps, an erased gradient still moves hack-ward through Adam's first moment."""
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    optimizer = torch.optim.AdamW([{"params": list(policy.adapters.kept_parameters().values())}], lr=1e-3)
    for _ in range(3):
        run(policy, OpenRoute(OpenSpec()), batch)
        optimizer.step()
    before = {s: policy.adapters.scored(s).detach().clone() for s in policy.adapters.sites}
    route = erase_route(policy)
    run(policy, route, batch)
    optimizer.step()
    moved = {s: policy.adapters.scored(s).detach() - v for s, v in before.items()}
    assert route.after_update(moved)["update_residual"] > 0.05


def test_misuse_is_an_error() -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    with pytest.raises(ValueError, match="k must be greater than or equal to 1"):
        EraseSpec(k=0)
    fresh = EraseRoute(EraseSpec(), FixedFitter(axes(policy, 3)))
    with pytest.raises(RuntimeError, match="refresh"):
        fresh.begin(policy, batch, StepContext(torch.Generator()))
    with pytest.raises(ValueError, match="'act'"):
        EraseRoute(EraseSpec(), FixedFitter(random_directions(policy, "act"))).refresh(policy, 0)


def test_what_cannot_be_erased_into_is_refused_before_the_step() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch()
    with pytest.raises(ValueError, match=r"needs the shared-basis quarantine"):
        erase_route(policy, "quarantine").begin(policy, batch, StepContext(torch.Generator()))
