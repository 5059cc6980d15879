"""The mask route against a written-out policy: flags, kept gradient and quarantine gradient for every legal combination."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_oracle import (
    CASES,
    METHOD_SAMPLE,
    Case,
    FixedFitter,
    assert_same,
    assert_same_gradients,
    case_id,
    context,
    mask_route,
    oracle,
    random_directions,
    run,
    spec_of,
)
from tiny_policy import SPECS, make_batch, make_policy, named_policy, per_rollout_gradients

from mi_route2.adapters.gradients import DenseGrad, rounding
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskRoute, MaskSpec, TrainBatch
from mi_route2.routing.directions import compare
from mi_route2.routing.mask import cosine
from mi_route2.specs import LEGAL, PRIVILEGED, Score, ScorePolicy, Through, Unit

N = 8


def plain_gradient(policy: Policy, batch: TrainBatch, adapter: str) -> dict[str, torch.Tensor]:
    """The sum of plain autograd's gradients, one rollout at a time."""
    rows = per_rollout_gradients(policy, batch)
    return {name.removeprefix(f"{adapter}."): g.sum(0) for name, g in rows.items() if name.startswith(f"{adapter}.")}


def mixed(policy: Policy, spec: MaskSpec, batch: TrainBatch) -> MaskSpec:
    """``spec`` with tau in the middle of the batch's scores: activations of a batch resemble each other, so 0 flags all or none."""
    if not spec.needs_direction:
        return spec
    scores = torch.cat(list(oracle(policy, spec, random_directions(policy, spec.score), batch).scores.values()))
    ordered = (scores[batch.rollouts.predictors.repeat(12, 1)] if scores.ndim == 2 else scores).unique()
    middle = len(ordered) // 2
    return replace(spec, tau=float(ordered[middle - 1 : middle + 1].mean()))


def summarized(flags: dict[str, torch.Tensor], spec: MaskSpec, predictors: torch.Tensor) -> torch.Tensor:
    """``Decision.flags`` by its definition: the majority over modules of the rollout's flag, or of its share of flagged tokens."""
    shares = [(f & predictors).sum(1) / predictors.sum(1) if spec.unit == "token" else f[:, 0].double() for f in flags.values()]
    return torch.stack(shares).mean(0) > 0.5


def averaged(scores: dict[str, torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """``Decision.scores`` by its definition: the mean over modules, and over predictors where there is a score a token."""
    per_site = list(scores.values())
    if per_site[0].ndim == 2:
        per_site = [torch.stack([row[real].mean() for row, real in zip(s, batch.rollouts.predictors)]) for s in per_site]
    return torch.stack(per_site).mean(0)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *itertools.product(["svd", "lora"], CASES),
        *itertools.product(["svd-low", "svd-shared", "lora-shared"], CASES[::5]),
    ],
    ids=lambda value: value if isinstance(value, str) else case_id(value),
)
def test_every_legal_combination_equals_the_written_out_policy(name: str, case: Case) -> None:
    policy, batch = named_policy(name), make_batch(N)
    spec = mixed(policy, spec_of(case, reinforced_only=False), batch)
    route = mask_route(policy, spec)
    own, expected = run(policy, route, batch), oracle(policy, spec, route.directions, batch)
    assert_same_gradients(own, expected)
    assert torch.equal(own.decision.flags, summarized(expected.flags, spec, batch.rollouts.predictors))
    if spec.needs_direction:
        assert torch.allclose(own.decision.scores, averaged(expected.scores, batch), rtol=0, atol=1e-10)
    if spec.score != "none":
        flagged = torch.stack(list(expected.flags.values()))
        assert flagged.any(), "nothing was flagged, so this theorem was not put to the test"
        assert not flagged.all()


EARLY = [case for case in CASES if case[0] not in ("grad", "full") or case[2] == "ablated"]
"""Rules whose flags are known before the backward."""


@pytest.mark.parametrize("case", [case for case in EARLY if case[1] == "pooled" or case[3] == "detach"], ids=case_id)
@pytest.mark.parametrize("name", ["svd", "lora", "svd-shared", "lora-shared"])
def test_a_step_is_the_four_lines_that_open_the_module(name: str, case: Case) -> None:
    policy, batch = named_policy(name), make_batch(N)
    route = mask_route(policy, mixed(policy, spec_of(case, reinforced_only=False), batch))
    masks = dict[str, torch.Tensor]()
    points = {branch.hook_mask: site for site, branch in policy.adapters.sites.items()}
    handles = [p.register_forward_hook(lambda p, args, mask: masks.update({points[p]: mask.clone()})) for p in points]
    own = run(policy, route, batch)
    for handle in handles:
        handle.remove()
    kept, quarantine = policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters()
    flags = {site: mask == 0 for site, mask in masks.items()}

    def per_rollout() -> torch.Tensor:
        return -(batch.advantages[:, None] * policy.logprobs(batch.rollouts)).sum(1) / 50

    with policy.adapters.unrouted():
        if case[3] == "filter":
            L, flag = per_rollout(), next(iter(flags.values()))
            expected = torch.autograd.grad((L * ~flag).sum(), list(kept.values()), retain_graph=True)
            expected += torch.autograd.grad(L.sum(), list(quarantine.values()))
        else:
            for site, branch in policy.adapters.sites.items():
                flag = flags[site].view(N, -1, 1)
                handles.append(branch.hook_kept.register_forward_hook(lambda p, x, y, flag=flag: torch.where(flag, y.detach(), y)))
            expected = torch.autograd.grad(per_rollout().sum(), [*kept.values(), *quarantine.values()])
    assert_same(own.kept, dict(zip(kept, expected)))
    assert_same(own.quarantine, dict(zip(quarantine, expected[len(kept) :])))
    assert case[0] == "none" or any(flag.any() and not flag.all() for flag in flags.values())


@pytest.mark.matrix
@settings(max_examples=20)
@given(
    case=st.sampled_from(CASES),
    tau=st.sampled_from([-0.1, 0.0, 0.02, 0.3]),
    reinforced=st.booleans(),
    negative=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    unflagged=st.booleans(),
    left=st.booleans(),
    micro=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 50),
)
def test_settings_combine(
    case: Case,
    tau: float,
    reinforced: bool,
    negative: float,
    unflagged: bool,
    left: bool,
    micro: int | None,
    seed: int,
) -> None:
    """tau, reinforced_only, negative_scale, kept_advantage, padding side and micro-batches, in any combination that is legal."""
    early = case[1] == "pooled" and (case[2] == "ablated" or case[0] in (*PRIVILEGED, "none"))
    changes = {"tau": tau, "reinforced_only": reinforced, "negative_scale": negative}
    spec = spec_of(case, kept_advantage="unflagged" if unflagged and early else "own", **changes)
    policy, batch = make_policy(SPECS["svd"], seed=seed), make_batch(6, seed=seed, left=left)
    route = mask_route(policy, spec)
    own, expected = run(policy, route, batch, micro), oracle(policy, spec, route.directions, batch)
    assert_same_gradients(own, expected)


@pytest.mark.parametrize("through", ["filter", "detach"])
@pytest.mark.parametrize("name", ["svd", "lora"])
@pytest.mark.parametrize("quarantine", ["lora", "none"])
def test_the_unflagged_advantage_is_two_losses(name: str, quarantine: str, through: str) -> None:
    """The kept adapter learns ``R - mean(R over the unflagged)``, the quarantine the ordinary advantage, each exactly."""
    policy = make_policy(replace(SPECS[name], quarantine=quarantine))  # pyright: ignore[reportArgumentType]
    batch = replace(make_batch(N), groups=torch.arange(N) // 4)
    spec = spec_of(("full", "pooled", "ablated", through), kept_advantage="unflagged", negative_scale=0.3, reinforced_only=False)
    route = mask_route(policy, spec)
    own, expected = run(policy, route, batch), oracle(policy, spec, route.directions, batch)
    assert 0 < int(own.decision.flags.sum()) < N
    assert_same_gradients(own, expected)
    assert bool(own.quarantine) == (quarantine != "none")


@pytest.mark.parametrize("through", ["filter", "detach"])
@pytest.mark.parametrize("name", ["svd", "lora"])
def test_the_kept_adapter_s_own_backward_is_left_out_where_all_are_flagged(name: str, through: str) -> None:
    """Half of the micro-batches are flagged whole. With a hook at a mask, which might overrule it, each has its two backwards."""
    batch, flags, seen = replace(make_batch(N), groups=torch.arange(N) // 4), torch.arange(N) < 4, []
    found = []
    for hook in (False, True):
        policy = make_policy(SPECS[name])
        route = MaskRoute.from_flags(flags, through=through, kept_advantage="unflagged", negative_scale=0.3)  # pyright: ignore[reportArgumentType]
        branches = policy.adapters.sites.values() if hook else []
        handles = [branch.hook_mask.register_forward_hook(lambda *a: seen.append(a[2])) for branch in branches]
        micro_batches = len(route.begin(policy, batch, context(route.spec, N, 2)).micro_batches)
        found.append((micro_batches, run(policy, route, batch, 2)))
        for handle in handles:
            handle.remove()
    (few, own), (all_parts, expected) = found
    assert (few, all_parts) == (6, 8)
    assert len(seen) == 4 * len(make_policy(SPECS[name]).adapters.sites)
    for mine, theirs in ((own.kept, expected.kept), (own.quarantine, expected.quarantine)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert torch.equal(own.decision.flags, expected.decision.flags)
    policy = make_policy(SPECS[name])
    run(policy, MaskRoute.from_flags(torch.ones(N, dtype=torch.bool), kept_advantage="unflagged"), batch)
    kept = [p.grad for p in policy.adapters.kept_parameters().values() if p.requires_grad]
    assert all(g is not None and not g.any() for g in kept), "an optimizer would not count this step"


@pytest.mark.parametrize("name", ["lora", "svd"])
@pytest.mark.parametrize("case", METHOD_SAMPLE, ids=case_id)
def test_r1_flagged_only_leaves_exactly_zero_and_unflagged_leaves_both(case: Case, name: str) -> None:
    """R1, for token flags too, which lie on the prompt as well."""
    policy, batch = named_policy(name), make_batch(6)
    all_flagged = mask_route(policy, spec_of(case, tau=-2.0, reinforced_only=False))
    everything = run(policy, all_flagged, batch)
    nothing = run(policy, mask_route(policy, spec_of(case, tau=2.0, reinforced_only=False)), batch)
    assert everything.decision.flags.all()
    assert not nothing.decision.flags.any()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in everything.kept.values())
    assert all(g.any() for g in everything.quarantine.values())
    assert all(g.any() for g in nothing.quarantine.values())
    assert_same(nothing.kept, plain_gradient(policy, batch, "kept"))


def test_r1_holds_from_init(spec: object) -> None:
    """At B = 0 the gradient of A_q is 0 by algebra; after one step it is not, and the kept adapter is still at its init."""
    policy, batch = make_policy(spec, scale=0.0), make_batch(6)  # pyright: ignore[reportArgumentType]
    route = mask_route(policy, spec_of(("grad", "pooled", "live", "filter"), tau=-2.0, reinforced_only=False))
    before = {n: p.detach().clone() for n, p in policy.adapters.kept_parameters().items()}
    for step in range(2):
        own = run(policy, route, batch)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in own.kept.values())
        assert all(bool(g.any()) == (step == 1 or not n.endswith(".A")) for n, g in own.quarantine.items())
        with torch.no_grad():
            for name, p in policy.adapters.quarantine_parameters().items():
                p -= own.quarantine[name]
            for name, p in policy.adapters.kept_parameters().items():
                p -= own.kept[name]
    assert all(torch.equal(p, before[n]) for n, p in policy.adapters.kept_parameters().items())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_mask_does_not_change_the_forward(case: Case) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(6)
    plain = policy.logprobs(batch.rollouts)
    for tau in (-2.0, 0.0):
        route = mask_route(policy, spec_of(case, tau=tau))
        for micro_batch in route.begin(policy, batch, context(route.spec, 6)).micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                assert torch.equal(policy.logprobs(micro_batch.batch.rollouts), plain)


def test_score_outside_training_is_the_ablated_pooled_score() -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(6)
    for kind in ("act", "grad", "full"):
        spec = spec_of((kind, "pooled", "ablated", "filter"))
        route = mask_route(policy, spec)
        expected = oracle(policy, spec, route.directions, batch).scores["blocks.0.attn.q"]
        assert torch.allclose(route.score(policy, batch.rollouts), expected, rtol=0, atol=1e-10)


def test_the_table_of_combinations_is_the_whole_truth() -> None:
    """Every combination outside the table is refused with a sentence that says what to do; every one inside is accepted."""
    refused = 0
    for case in itertools.product(get_args(Score), get_args(Unit), get_args(ScorePolicy), get_args(Through)):
        score, unit, policy, through = case
        if through in LEGAL.get((score, unit, policy), frozenset()):
            spec_of(case, tau=0.5)
            continue
        refused += 1
        with pytest.raises(ValueError, match=r"is no rule: choose "):
            spec_of(case)
    assert refused == 7 * 3 * 2 * 2 - len(CASES) - 2


@pytest.mark.parametrize("through", ["filter", "detach"])
@pytest.mark.parametrize("unflagged", [False, True])
def test_scores_of_a_judge_are_compared_with_tau_and_flag_as_given_flags_do(through: Through, unflagged: bool) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(6)
    kept = {"kept_advantage": "unflagged" if unflagged else "own", "negative_scale": 0.3, "through": through}
    scores = torch.tensor([0.9, 0.5, 0.6, 0.1, 0.55, 0.51], dtype=torch.float64)
    flags = (scores > 0.5) & (batch.demand("advantages") > 0)
    assert 0 < int(flags.sum()) < int((scores > 0.5).sum())
    judged = MaskRoute(MaskSpec(score="judge", tau=0.5, **kept), None)  # pyright: ignore[reportArgumentType]
    for micro in (None, 4):
        own = run(policy, judged, batch, micro, scores=scores)
        given = run(policy, MaskRoute.from_flags(flags, **kept), batch, micro)  # pyright: ignore[reportArgumentType]
        assert_same(own.kept | own.quarantine, given.kept | given.quarantine, tolerance=0)
        assert torch.equal(own.decision.flags, flags)
        assert torch.equal(own.decision.scores, scores)
    for wrong, sentence in ((None, "needs the scores of a judge"), (scores[:2], "2 scores, but the batch has 6")):
        with pytest.raises(ValueError, match=sentence):
            judged.begin(policy, batch, replace(context(judged.spec, 6), scores=wrong))
    with pytest.raises(ValueError, match=r"tau=0.0 flags all or none"):
        MaskSpec(score="judge")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kept_advantage": "unflagged"}, "before the loss"),
        ({"negative_scale": -0.1}, "greater than or equal to 0"),
        ({"refresh_every": -1}, "greater than or equal to 0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MaskSpec(**changes)  # pyright: ignore[reportArgumentType]


def test_a_missing_fitter_or_direction_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a fitter"):
        MaskRoute(MaskSpec(), None)
    policy, batch = make_policy(SPECS["svd"]), make_batch(6)
    route = MaskRoute(MaskSpec(), FixedFitter(random_directions(policy, "grad")))
    with pytest.raises(RuntimeError, match="refresh"):
        route.begin(policy, batch, context(route.spec, 6))


def test_a_feature_of_zero_is_not_flagged_and_not_nan() -> None:
    features = DenseGrad(torch.tensor([[0.0, 0.0], [3.0, 4.0], [-1e-20, 0.0]], dtype=torch.float64))
    inner, norms, magnitude = compare(features, v := torch.tensor([1.0, 0.0], dtype=torch.float64))
    scores = cosine(inner, norms, v.norm(), rounding([magnitude]))
    assert torch.allclose(scores, torch.tensor([0.0, 0.6, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("case", METHOD_SAMPLE, ids=case_id)
def test_zero_advantages_leave_zeros_and_no_nan(case: Case) -> None:
    policy = make_policy(SPECS["lora"])
    batch = replace(make_batch(6), advantages=torch.zeros(6, dtype=torch.float64))
    for reinforced in (True, False):
        own = run(policy, mask_route(policy, spec_of(case, reinforced_only=reinforced)), batch)
        for g in [*own.kept.values(), *own.quarantine.values()]:
            assert torch.equal(g, torch.zeros_like(g))
        assert torch.isfinite(own.decision.scores).all()
        if reinforced:
            assert not own.decision.flags.any()


@pytest.mark.parametrize("case", [c for c in CASES if c[1] == "pooled" and c[0] != "none"], ids=case_id)
def test_shuffle_permutes_after_the_gate(case: Case) -> None:
    """The count is that of the real flags, the place is not: over draws, unreinforced rollouts are flagged too."""
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    spec = mixed(policy, spec_of(case), batch)
    real = run(policy, mask_route(policy, spec), batch).decision.flags
    route = mask_route(policy, replace(spec, shuffle=True))
    draws = torch.stack([run(policy, route, batch, seed=seed).decision.flags for seed in range(6)])
    assert 0 < int(real.sum()) < N
    assert (draws.sum(1) == real.sum()).all()
    assert draws[:, batch.advantages <= 0].any()
    assert not torch.equal(draws[0], draws[1]) or not torch.equal(draws[0], draws[2])
