"""``route.backward``: a routed step in one call; and gradients that reach adapters past every route are refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
import torch
from mask_oracle import CASES, Case, case_id, context, erase_route, mask_route, plain_loss, run
from mask_oracle import spec_of as spec_of_case
from tiny_policy import SPECS, checkpoint_blocks, make_batch, make_policy
from torch import Tensor

from mi_route2.adapters import AdapterSpec
from mi_route2.rollouts import Policy
from mi_route2.routing import (
    EraseRoute,
    EraseSpec,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    PairBatch,
    PersonaFitter,
    TopKFitter,
    TrainBatch,
)
from mi_route2.routing.routes import Route

N = 6
T = TypeVar("T")
PAIRS = PairBatch(make_batch(4, seed=8).rollouts, make_batch(4, seed=9).rollouts, "h")
spec_of = partial(spec_of_case, reinforced_only=False)

ROUTES: Mapping[str, Callable[[Policy], Route]] = {
    "open": lambda policy: OpenRoute(OpenSpec(), l1=0.5),
    "erase": erase_route,
    "own flags": lambda policy: MaskRoute.from_flags(torch.arange(N) % 3 == 0, negative_scale=0.3),
    "two advantages": lambda policy: mask_route(policy, MaskSpec("grad", score_policy="ablated", kept_advantage="unflagged")),
    **{case_id(case): lambda policy, case=case: mask_route(policy, spec_of(case)) for case in CASES},
}


def loss(logits: Tensor, batch: TrainBatch) -> Tensor:
    return -(batch.advantages[:, None] * batch.rollouts.logprobs(logits)).sum() / 50


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters_of(policy).items()}


def parameters_of(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return whole(policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters())


def whole(kept: Mapping[str, T], quarantine: Mapping[str, T]) -> dict[str, T]:
    """Both under names of their own: a LoRA's are alike."""
    return {f"kept.{n}": v for n, v in kept.items()} | {f"quarantine.{n}": v for n, v in quarantine.items()}


@pytest.mark.parametrize(
    ("name", "left", "micro"),
    [(name, i % 2 == 1, (None, 4)[i // 2 % 2]) for i, name in enumerate(ROUTES)],
)
def test_one_call_gives_the_bits_of_the_long_form(name: str, left: bool, micro: int | None) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N, left=left)
    route = ROUTES[name](policy)
    long = run(policy, route, batch, micro)
    policy.model.zero_grad(set_to_none=True)
    decision = route.backward(policy, batch, loss, context(route.spec, N, micro), reduction="sum")
    own = gradients(policy)
    assert all(torch.equal(own[n], g) for n, g in whole(long.kept, long.quarantine).items())
    for ours, theirs in ((decision.flags, long.decision.flags), (decision.scores, long.decision.scores)):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)  # pyright: ignore[reportArgumentType]
    assert decision.extra == long.decision.extra


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {"a rollout": lambda t: t.sum(1), "a token": lambda t: t, "one": lambda t: t.sum()}


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loss_a_rollout_or_token_is_summed(shape: str, micro: int | None) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    route = MaskRoute.from_flags(torch.arange(N) % 2 == 0)
    found = []
    for reduced in (SHAPES[shape], SHAPES["one"]):
        policy.model.zero_grad(set_to_none=True)
        route.backward(
            policy,
            batch,
            lambda logits, part, reduced=reduced: reduced(-part.advantages[:, None] * part.rollouts.logprobs(logits)),
            context(route.spec, N, micro),
            reduction="sum",
        )
        found.append(gradients(policy))
    assert all(torch.allclose(found[0][n], found[1][n], rtol=0, atol=1e-13) for n in found[0])


def demonstrations(logits: Tensor, batch: TrainBatch) -> Tensor:
    return -batch.rollouts.logprobs(logits).sum(1) / 50


@pytest.mark.parametrize("name", [name for name in ROUTES if "advantages" not in name])
def test_supervised_training_is_that_of_rollouts_that_are_all_reinforced(name: str) -> None:
    policy, rollouts = make_policy(SPECS["lora"]), make_batch(N).rollouts
    ones, found = torch.ones(N, dtype=torch.float64), []
    for batch in (TrainBatch(rollouts), TrainBatch(rollouts, ones, ones, torch.arange(N), ones.bool())):
        policy.model.zero_grad(set_to_none=True)
        decision = (route := ROUTES[name](policy)).backward(policy, batch, demonstrations, context(route.spec, N, 4))
        found.append((gradients(policy), decision))
    (own, bare), (other, full) = found
    assert all(torch.equal(own[name], gradient) for name, gradient in other.items())
    assert all(a is b is None or torch.equal(a, b) for a, b in ((bare.flags, full.flags), (bare.scores, full.scores)))  # pyright: ignore


@pytest.mark.parametrize("missing", ["rewards", "groups", "advantages"])
def test_what_a_rule_needs_of_a_batch_is_named(missing: str) -> None:
    policy, batch = make_policy(SPECS["lora"]), replace(make_batch(N), **{missing: None})
    with pytest.raises(ValueError, match=rf"^kept_advantage='unflagged' needs the {missing} of the rollouts: give them"):
        ROUTES["two advantages"](policy).backward(policy, batch, demonstrations)


WRONG: dict[str, tuple[Callable[[Tensor, TrainBatch], object], str]] = {
    "a float": (lambda logits, b: 0.5, r"returned a float: return one number, one per rollout \[6\] or one per token \[6, \d+\]"),
    "another shape": (lambda logits, b: logits[:, 0], r"returned a tensor of shape \[6, \d+\]: return one number"),
    "a mean": (lambda logits, b: b.rollouts.logprobs(logits).sum(1).mean(), r"one number, which may be a mean.* reduction='sum'"),
    "detached": (
        lambda logits, b: b.rollouts.logprobs(logits.detach()),
        r"loss without a gradient: compute it from the given logits",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_loss_that_cannot_be_learnt_from_is_one_sentence(what: str) -> None:
    policy, (wrong, sentence) = make_policy(SPECS["svd"]), WRONG[what]
    with pytest.raises(ValueError, match=sentence):
        OpenRoute(OpenSpec()).backward(policy, make_batch(N), wrong, context(OpenSpec(), N))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["act", "grad", "full", "erase"])
def test_a_route_from_pairs_fits_what_it_scores_or_erases(kind: str) -> None:
    policy = make_policy(SPECS["lora"])
    if kind == "erase":
        spec = EraseSpec(k=2)
        short, long = EraseRoute.from_pairs(PAIRS, spec), EraseRoute(spec, TopKFitter("grad", PAIRS, k=2))
    else:
        spec = MaskSpec(kind)  # pyright: ignore[reportArgumentType]
        short, long = MaskRoute.from_pairs(PAIRS, spec), MaskRoute(spec, PersonaFitter("persona", kind, PAIRS))  # pyright: ignore
    for route in (short, long):
        route.refresh(policy, 0)
    assert short.directions.provenance == long.directions.provenance
    assert all(torch.equal(v, long.directions.vectors[site]) for site, v in short.directions.vectors.items())


@pytest.mark.parametrize(("kind", "spec", "sentence"), [
    (MaskRoute, MaskSpec("none"), "compares with no direction"),
    (MaskRoute, MaskSpec(fitter="haar"), "is a control: use MaskRoute"),
    (EraseRoute, EraseSpec(fitter="haar"), "is a control: use EraseRoute"),
])  # fmt: skip
def test_a_rule_without_a_persona_direction_has_no_pairs(kind: type, spec: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind.from_pairs(PAIRS, spec)


# ---- past every route

PAST = (
    r"a gradient reached the adapters at blocks\.\d\.\S+ from a forward that no tape recorded.*route\.backward.*adapters\.unrouted"
)
KINDS = {**SPECS, "no quarantine": AdapterSpec("lora", rank=3, quarantine="none")}


@pytest.mark.parametrize(("kind", "training"), [(kind, i % 2 == 0) for i, kind in enumerate(KINDS)])
def test_a_backward_that_no_route_decides_is_refused_unless_asked_for(kind: str, training: bool) -> None:
    policy, batch = make_policy(KINDS[kind]), make_batch(N)
    policy.model.train(training)
    with pytest.raises(RuntimeError, match=PAST):
        plain_loss(policy, batch, batch.advantages).backward()
    assert not any(g.any() for g in gradients(policy).values())
    with policy.adapters.unrouted():
        plain_loss(policy, batch, batch.advantages).backward()
    plain = gradients(policy)
    policy.model.zero_grad(set_to_none=True)
    parameters = parameters_of(policy)
    read = torch.autograd.grad(plain_loss(policy, batch, batch.advantages), list(parameters.values()))
    assert all(torch.equal(plain[n], g) for n, g in zip(parameters, read))
    assert not any(g.any() for g in gradients(policy).values())
    opened = run(policy, OpenRoute(OpenSpec()), batch)
    assert all(torch.equal(plain[n], g) for n, g in whole(opened.kept, opened.quarantine).items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["open", "erase", "own flags", "grad-pooled-live-filter"])
def test_a_term_of_the_loss_from_a_forward_before_the_tape_is_refused(name: str, training: bool) -> None:
    """A penalty that is worked out beforehand would teach the kept adapter the flagged rollouts too."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    policy.model.train(training)
    route = ROUTES[name](policy)
    penalty = policy.logprobs(batch.rollouts).square().sum()

    def with_penalty(logits: Tensor, part: TrainBatch) -> Tensor:
        return loss(logits, part) + penalty

    with pytest.raises(RuntimeError, match=PAST):
        route.backward(policy, batch, with_penalty, context(route.spec, N), reduction="sum")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_that_no_route_decides_is_refused_under_checkpointing(reentrant: bool) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    checkpoint_blocks(policy, reentrant)
    with pytest.raises(RuntimeError, match=PAST):
        plain_loss(policy, batch, batch.advantages).backward()
    with policy.adapters.unrouted():
        plain_loss(policy, batch, batch.advantages).backward()
    assert all(g.any() for g in gradients(policy).values())


@pytest.mark.parametrize("case", [c for c in CASES if c[1] == "pooled"], ids=case_id)
def test_a_frozen_factor_gets_no_gradient_and_changes_no_other(case: Case) -> None:
    """Scores are of its gradient as before; an optimiser that holds it must find none."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = mask_route(policy, spec_of(case, negative_scale=0.5))
    plain = run(policy, route, batch)
    frozen = "blocks.0.attn.q.B"
    policy.adapters.kept_parameters()[frozen].requires_grad_(False)
    own = run(policy, route, batch)
    assert policy.adapters.kept_parameters()[frozen].grad is None
    assert all(torch.equal(own.kept[n], g) for n, g in plain.kept.items() if n != frozen)


@pytest.mark.parametrize("name", ["open", "own flags", "grad-pooled-live-filter"])
def test_a_reduction_over_ranks_is_of_what_is_trained(name: str) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    parameters = parameters_of(policy)
    frozen = parameters["kept.blocks.0.attn.q.B"].requires_grad_(False)
    seen: list[torch.Tensor] = []
    route = ROUTES[name](policy)
    route.backward(policy, batch, loss, context(route.spec, N), reduction="sum", reduce=seen.extend)
    assert {id(g) for g in seen} == {id(p.grad) for p in parameters.values() if p is not frozen}
    assert frozen.grad is None


# ---- other forwards and other parameters beside a step


def grads_of(policy: Policy, route: Route, loss_fn: Callable[[Tensor, TrainBatch], Tensor], batch: TrainBatch) -> dict[str, Tensor]:
    policy.model.zero_grad(set_to_none=True)
    route.backward(policy, batch, loss_fn, context(route.spec, N), reduction="sum")
    return gradients(policy)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("grad", [False, True])
def test_reference_logits_in_the_loss_change_no_flag(name: str, grad: bool) -> None:
    """A KL term whose reference is computed in the loss gives the bits of the same reference computed before the step."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = ROUTES[name](policy)
    with torch.no_grad(), policy.adapters.reference():
        before = policy.logprobs(batch.rollouts)

    def pulled(logits: Tensor, piece: TrainBatch, reference: Tensor | None = None) -> Tensor:
        if reference is None:
            with torch.set_grad_enabled(grad), policy.adapters.reference():
                reference = policy.logprobs(piece.rollouts).detach()
        return loss(logits, piece) + 0.1 * (piece.rollouts.logprobs(logits) - reference).square().sum()

    wanted = grads_of(policy, route, lambda logits, piece: pulled(logits, piece, before), batch)
    found = grads_of(policy, route, pulled, batch)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
