"""A route does not depend on how the batch was cut, padded or flattened on its way through the model."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from mask_oracle import (
    CASES,
    METHOD_SAMPLE,
    METHODS,
    SAMPLE,
    Case,
    assert_same,
    assert_same_gradients,
    case_id,
    context,
    erase_route,
    mask_route,
    plain_loss,
    run,
)
from mask_oracle import spec_of as spec_of_case
from tiny_policy import SPECS, VOCAB, checkpoint_blocks, make_batch, make_policy
from torch import Tensor, nn

from mi_route2.rollouts import Policy
from mi_route2.routing import (
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    Route,
    StepContext,
    TrainBatch,
)
from mi_route2.routing.mask import MaskGate

N = 7
spec_of = partial(spec_of_case, reinforced_only=False)


def assert_same_step(policy: Policy, route: Route, one: TrainBatch, other: TrainBatch, micro: int | None = None) -> None:
    whole, cut = run(policy, route, one), run(policy, route, other, micro)
    assert_same_gradients(cut, whole)
    for name in ("flags", "scores"):
        before, after = getattr(whole.decision, name), getattr(cut.decision, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert torch.allclose(before.double(), after.double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "micro"),
    [*((case, 3) for case in SAMPLE), *((case, 2) for case in CASES[::5])],
    ids=lambda value: str(value) if isinstance(value, int) else case_id(value),
)
def test_accumulated_equals_one_batch(case: Case, micro: int) -> None:
    """For the quarantine too: an earlier form lost it to a ``zero_grad`` in between."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    assert_same_step(policy, mask_route(policy, spec_of(case)), batch, batch, micro)


@pytest.mark.parametrize("micro", [1, 3])
def test_accumulated_equals_one_batch_under_two_advantages(micro: int) -> None:
    policy, batch = make_policy(SPECS["svd"]), replace(make_batch(N), groups=torch.arange(N) // 4)
    route = mask_route(policy, spec_of(("full", "pooled", "ablated", "filter"), kept_advantage="unflagged", negative_scale=0.3))
    assert_same_step(policy, route, batch, batch, micro)


@pytest.mark.parametrize("micro", [2, 3])
@pytest.mark.parametrize("kind", ["absorb", "absorb with L1", "erase", "additive"])
def test_accumulated_equals_one_batch_without_a_mask(kind: str, micro: int) -> None:
    policy = make_policy(SPECS["svd-shared" if kind == "additive" else "svd"])
    route: Route = OpenRoute(OpenSpec(), l1=0.5 if kind == "absorb with L1" else 0.0)
    if kind in ("erase", "additive"):
        route = erase_route(policy, "quarantine" if kind == "additive" else "drop", k=2)
    batch = make_batch(N)
    assert_same_step(policy, route, batch, batch, micro)
    extra = run(policy, route, batch).decision.extra
    assert run(policy, route, batch, micro).decision.extra == pytest.approx(extra, rel=1e-10)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("two_advantages", [False, True])
def test_a_masked_quarantine_pays_the_l1_penalty_once(two_advantages: bool, micro: int | None) -> None:
    """The same quarantine gradient as without a mask, in whatever parts the step runs."""
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    early = MaskSpec(score="act", score_policy="ablated", kept_advantage="unflagged") if two_advantages else MaskSpec()
    own = run(policy, mask_route(policy, early, l1=0.5), batch, micro)
    assert_same(own.quarantine, run(policy, OpenRoute(OpenSpec(), l1=0.5), batch).quarantine)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("score", ["grad", "full"])
def test_a_settled_part_holds_no_gradients_and_changes_no_bit(score: Any, shuffle: bool) -> None:
    """Shuffled flags need the other parts, so that such a part holds its gradients until the step is finished."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = mask_route(policy, MaskSpec(score=score, shuffle=shuffle))
    found = []
    for settled in (False, True):
        policy.model.zero_grad(set_to_none=True)
        step = route.begin(policy, batch, StepContext(torch.Generator().manual_seed(0), micro=2))
        for micro_batch in step.micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
            if settled:
                step.settle(micro_batch)
                assert isinstance(micro_batch.tape.kept, MaskGate)
                assert bool(micro_batch.tape.kept.waiting) == shuffle
        decision = step.finish()
        found.append([decision.scores, decision.flags, *(p.grad for p in policy.adapters.kept_parameters().values())])
    assert all(torch.equal(before, after) for before, after in zip(*found))


def test_shuffled_flags_are_permuted_over_the_batch_and_not_within_micro_batches() -> None:
    """Within micro-batches of one rollout a shuffle would change nothing, and the control would be the method."""
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    for case in [c for c in CASES if c[1] == "pooled" and c[3] == "filter" and (c[0] != "act" or c[2] == "ablated")]:
        assert_same_step(policy, mask_route(policy, spec_of(case, shuffle=True)), batch, batch, 1)


def test_shuffled_flags_that_are_known_a_micro_batch_at_a_time_are_refused() -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    route = mask_route(policy, spec_of(("act", "pooled", "live", "filter"), shuffle=True))
    run(policy, route, batch, micro=N)
    with pytest.raises(ValueError, match="micro=None"):
        run(policy, route, batch, micro=3)


@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_padding_on_either_side_is_the_same(case: Case) -> None:
    policy = make_policy(SPECS["lora"])
    assert_same_step(policy, mask_route(policy, spec_of(case)), make_batch(N), make_batch(N, left=True))


@pytest.mark.parametrize(
    ("case", "left"),
    [*((case, False) for case in METHOD_SAMPLE), *((case, True) for case in METHODS[::3])],
    ids=lambda value: str(value) if isinstance(value, bool) else case_id(value),
)
def test_what_lies_in_the_padding_changes_nothing(case: Case, left: bool) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N, left=left)
    tokens = torch.randint(0, VOCAB, batch.rollouts.tokens.shape, generator=torch.Generator().manual_seed(7))
    tokens = torch.where(batch.rollouts.attention, batch.rollouts.tokens, tokens)
    assert not torch.equal(tokens, batch.rollouts.tokens)
    garbage = replace(batch, rollouts=replace(batch.rollouts, tokens=tokens))
    assert_same_step(policy, mask_route(policy, spec_of(case)), batch, garbage)


class Flattened(nn.Module):
    """Hands its Linear ``[b * s, d]``, as several model families do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def flatten(policy: Policy) -> None:
    for site in list(policy.adapters.sites)[::2]:
        parent, _, leaf = site.rpartition(".")
        owner = policy.model.get_submodule(parent)
        setattr(owner, leaf, Flattened(getattr(owner, leaf)))


@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_a_model_that_flattens_tokens_is_routed_by_rollouts(case: Case) -> None:
    spec, batch = spec_of(case), make_batch(N)
    plain, flat = make_policy(SPECS["lora"]), make_policy(SPECS["lora"])
    flatten(flat)
    one, other = run(plain, mask_route(plain, spec), batch), run(flat, mask_route(flat, spec), batch)
    assert_same_gradients(other, one)
    assert torch.equal(other.decision.flags, one.decision.flags)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", [c for c in METHODS if c[2] == "live"], ids=case_id)
def test_gradient_checkpointing_changes_nothing(case: Case, reentrant: bool) -> None:
    """The forward runs twice, readers read twice, gates are asked once."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = mask_route(policy, spec_of(case))
    plain = run(policy, route, batch)
    checkpoint_blocks(policy, reentrant)
    own = run(policy, route, batch)
    assert_same_gradients(own, plain)
    assert torch.equal(own.decision.flags, plain.decision.flags)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("case", METHODS[::2], ids=case_id)
def test_autocast_is_a_rounding(case: Case, inside: bool) -> None:
    """A float32 model under bfloat16 autocast, with the backward inside the context or, as torch advises, outside."""
    policy, batch = make_policy(SPECS["lora"], dtype=torch.float32), make_batch(N)
    with policy.adapters.unrouted():
        batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    route = mask_route(policy, replace(spec_of(case), tau=2.0))
    plain = run(policy, route, batch)
    policy.model.zero_grad(set_to_none=True)
    step = route.begin(policy, batch, context(route.spec, N))
    for micro_batch in step.micro_batches:
        with policy.adapters.recording(micro_batch.tape):
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain_loss(policy, micro_batch.batch, micro_batch.advantages)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
    step.finish()
    for name, p in policy.adapters.kept_parameters().items():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert (p.grad - plain.kept[name]).norm() < 0.1 * plain.kept[name].norm()


@pytest.mark.parametrize("kind", ["grad", "two advantages", "open", "erase"])
def test_a_part_that_was_not_run_is_an_error(kind: str) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    two = MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged")
    route: Route = mask_route(policy, two if kind == "two advantages" else MaskSpec())
    if kind in ("open", "erase"):
        route = OpenRoute(OpenSpec()) if kind == "open" else erase_route(policy)
    for skipped in range(len(route.begin(policy, batch, context(route.spec, N, micro=4)).micro_batches)):
        step = route.begin(policy, batch, context(route.spec, N, micro=4))
        for i, micro_batch in enumerate(step.micro_batches):
            if i != skipped:
                with policy.adapters.recording(micro_batch.tape):
                    plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
        with pytest.raises(RuntimeError, match=r"did not (report a gradient|run)"):
            step.finish()


def test_a_site_that_reports_nothing_in_the_backward_is_named() -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    block = policy.model.blocks[1].mlp  # pyright: ignore
    plain = block.forward
    block.forward = lambda x: plain(x).detach()  # it runs, but the loss does not depend on it
    with pytest.raises(RuntimeError, match=r"did not report a gradient.*blocks\.1\.mlp\.up"):
        run(policy, mask_route(policy, MaskSpec()), batch)


@pytest.mark.parametrize("score", ["grad", "none"])
def test_gradients_add_to_what_is_there(score: str) -> None:
    """As autograd's own do: a step on top of another's gradients is their sum."""
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = mask_route(policy, MaskSpec(score=score))  # pyright: ignore[reportArgumentType]
    single = run(policy, route, batch)
    assert isinstance(route, MaskRoute)
    step = route.begin(policy, batch, context(route.spec, N))
    for micro_batch in step.micro_batches:
        with policy.adapters.recording(micro_batch.tape):
            plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
    step.finish()
    assert_same({n: p.grad for n, p in policy.adapters.kept_parameters().items()}, {n: 2 * g for n, g in single.kept.items()})  # pyright: ignore
