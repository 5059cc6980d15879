"""Cases that a route gets right or refuses: rounding, shared modules, two backwards, flags of one's own, wrong input."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from mask_oracle import (
    CASES,
    SAMPLE,
    Case,
    FixedFitter,
    assert_same,
    case_id,
    context,
    erase_route,
    mask_route,
    plain_loss,
    random_directions,
    run,
    unit_cosine,
)
from mask_oracle import spec_of as spec_of_case
from tiny_policy import SPECS, VOCAB, checkpoint_blocks, make_batch, make_policy, per_rollout_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from written_out import written_out

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import (
    Directions,
    EraseRoute,
    EraseSpec,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    PairBatch,
    PersonaFitter,
    Privileged,
    Route,
    StepContext,
    TopKFitter,
    TrainBatch,
)
from mi_route2.routing.directions import collect
from mi_route2.routing.mask import token_scores

N = 6
spec_of = partial(spec_of_case, reinforced_only=False)
LIVE = [case for case in CASES if case[2] == "live" and case[0] in ("act", "grad", "full")]


# ---- rounding is no feature


def short(n: int, seed: int = 3) -> Rollouts:
    """One prompt token, one completion token: attention is to one token, so q and k have no gradient."""
    tokens = torch.randint(1, VOCAB, (n, 2), generator=torch.Generator().manual_seed(seed))
    return Rollouts(tokens, torch.ones(n, 2, dtype=torch.bool), torch.tensor([[False, True]]).expand(n, 2).clone())


def padded(rollouts: Rollouts, extra: int) -> Rollouts:
    return Rollouts(*(nn.functional.pad(t, (0, extra)) for t in (rollouts.tokens, rollouts.attention, rollouts.completion)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["svd", "lora"])
@pytest.mark.parametrize("kind", ["grad", "full"])
def test_a_score_does_not_depend_on_padding_or_company_where_a_gradient_is_rounding(
    kind: str, name: str, dtype: torch.dtype
) -> None:
    policy = make_policy(SPECS[name], dtype=dtype)
    route, rollouts = mask_route(policy, MaskSpec(score=kind)), short(5)  # pyright: ignore[reportArgumentType]
    for seed in range(3, 30):  # which draws leave rounding errors where 0 belongs depends on the processor's kernels
        rollouts = short(5, seed)
        features = collect(policy, rollouts, kind, {})  # pyright: ignore[reportArgumentType]
        if any(f.values().any() for site, f in features.items() if site.endswith(("attn.q", "attn.k"))):
            break
    else:
        pytest.skip("on this machine gradients that are 0 in theory are exactly 0: there is no rounding to tell apart")
    whole, tolerance = route.score(policy, rollouts), 200 * torch.finfo(dtype).eps
    real = [site for site in features if not site.endswith(("attn.q", "attn.k"))]
    cosines = [unit_cosine(features[site].values(), route.directions.vectors[site]) for site in real]
    assert torch.allclose(whole, torch.stack(cosines).sum(0) / len(features), rtol=0, atol=tolerance)
    for b in range(5):
        one = rollouts.rows(torch.tensor([b]))
        for other in (one, padded(one, 3), one.rows(torch.tensor([0, 0, 0])), padded(rollouts, 1).rows(torch.tensor([b, 0]))):
            assert float((route.score(policy, other)[0] - whole[b]).abs()) < tolerance


@pytest.mark.parametrize("kind", ["grad", "full"])
def test_no_direction_is_fitted_to_rounding(kind: str) -> None:
    policy = make_policy(SPECS["lora"])
    with pytest.raises(ValueError, match=r"no direction \(blocks\.0\.attn\.q\).*only rounding errors remain"):
        PersonaFitter("p", kind, PairBatch(short(4), short(4, seed=4), "short"), refreshes=False).fit(policy, 0)  # pyright: ignore
    if kind == "grad":
        axes = TopKFitter("grad", PairBatch(short(4), short(4, seed=4), "short"), noise_quantile=0.0).fit(policy, 0).vectors
        assert {site for site, v in axes.items() if not len(v)} == {s for s in axes if s.endswith(("attn.q", "attn.k"))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["act", "grad", "full"])
def test_pairs_that_cancel_have_no_direction(kind: str, dtype: torch.dtype) -> None:
    """Both sides hold the same rollouts in another order: their mean contrast is rounding, which depends on the order."""
    policy, hack = make_policy(SPECS["lora"], dtype=dtype), make_batch(7).rollouts
    pairs = PairBatch(hack, hack.rows(torch.arange(7).roll(1)), "turned")
    with pytest.raises(ValueError, match=r"no direction \(blocks\.0\.attn\.q\): are the hack.*the same \(in another order"):
        PersonaFitter("p", kind, pairs).fit(policy, 0)  # pyright: ignore[reportArgumentType]
    one_less = PairBatch(hack, hack.rows(torch.tensor([6, 0, 1, 2, 3, 4, 4])), "almost")
    assert PersonaFitter("p", kind, one_less).fit(policy, 0).vectors  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_score_has_no_unit(dtype: torch.dtype) -> None:
    """Ordinary scores have the bits of torch's cosine; activations in any unit have the same score, and rounding has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, 16, generator=generator, dtype=torch.float64).to(dtype)
    Q = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64)).Q
    Vh, v = Q[:8].to(dtype), nn.functional.normalize(torch.randn(8, generator=generator, dtype=torch.float64), dim=0).to(dtype)
    predictors = torch.rand(5, 9, generator=generator) > 0.2
    wide = torch.promote_types(dtype, torch.float32)
    a = torch.where(predictors[..., None], x, 0).to(wide) @ Vh.to(wide).mT
    plain = torch.where(predictors, nn.functional.cosine_similarity(a, v.to(wide).expand_as(a), dim=-1), -1)
    scores = token_scores(x, predictors, Vh, v)
    assert torch.equal(scores, plain)
    for unit in (1e-12, 1e12, 1e-30, 1e30):
        assert torch.allclose(token_scores(x * unit, predictors, Vh, v), scores, rtol=0, atol=64 * torch.finfo(dtype).eps)
    assert torch.equal(token_scores(2.0**-90 * x, predictors, Vh, v), scores)
    if dtype != torch.bfloat16:  # its rows are orthogonal to a hundredth only
        outside = (x.double() @ Q[8:].mT @ Q[8:]).to(dtype)
        assert not token_scores(outside, predictors, Vh, v)[predictors].any()


# ---- one Linear called twice


def looped(policy: Policy, checkpointing: bool | None = None) -> Policy:
    """Both blocks run twice, as in a recurrent model; ``checkpointing`` says whether it is reentrant."""
    for block in policy.model.blocks:  # pyright: ignore
        block.forward = _twice(block.forward, checkpointing)
    if checkpointing is not None:
        policy.model.embed.requires_grad_(True)  # pyright: ignore
    return policy


def _twice(forward: Callable[..., Tensor], reentrant: bool | None) -> Callable[..., Tensor]:
    def again(x: Tensor, *rest: object) -> Tensor:
        for _ in range(2):
            x = forward(x, *rest) if reentrant is None else checkpoint(forward, x, *rest, use_reentrant=reentrant)
        return x

    return again


def by_hand(policy: Policy, batch: TrainBatch, kind: str, live: bool) -> dict[str, Tensor]:
    """Per site ``[b, ...]``: hooks on the base Linear give every call's input and gradient, one rollout at a time."""
    rows: dict[str, list[Tensor]] = {site: [] for site in policy.adapters.sites}
    for b in range(len(batch.rollouts)):
        one = batch.rows(torch.tensor([b]))
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {site: [] for site in rows}
        handles = [
            policy.model.get_submodule(site).register_forward_hook(
                lambda m, a, y, site=site, calls=calls: calls[site].append((a[0], y)) or y.retain_grad()
            )
            for site in rows
        ]
        with policy.adapters.unrouted(), policy.adapters.full() if live else policy.adapters.deployed():
            logprobs = policy.logprobs(one.rollouts).sum(1)
            loss = -(one.advantages * logprobs).sum() / 50 if live else -logprobs.sum()
            scored = [policy.adapters.scored(site) for site in rows]
            grads = torch.autograd.grad(loss, scored, retain_graph=True)
            loss.backward()
        for handle in handles:
            handle.remove()
        at = one.rollouts.predictors[0]
        for (site, row), g in zip(rows.items(), grads):
            if kind == "grad":
                row.append(g)
            elif kind == "full":
                row.append(sum(y.grad[0].T @ x[0].detach() for x, y in calls[site]))  # pyright: ignore
            else:
                basis = policy.adapters.sites[site].kept.Vh  # pyright: ignore
                row.append(torch.stack([(x[0].detach()[at] @ basis.T).mean(0) for x, _ in calls[site]]).mean(0))  # pyright: ignore
    policy.model.zero_grad(set_to_none=True)
    return {site: torch.stack(row) for site, row in rows.items()}


POOLED = [c for c in CASES if c[0] in ("act", "grad", "full") and (c[1] == "pooled" or c[2] == "ablated")]


@pytest.mark.parametrize(
    ("case", "checkpointing"),
    [*((c, None) for c in POOLED), *((c, i % 2 == 0) for i, c in enumerate(POOLED) if c[3] == "filter")],
    ids=str,
)
def test_a_linear_that_runs_twice_is_scored_and_filtered_as_its_sum(case: Case, checkpointing: bool | None) -> None:
    plain, batch = looped(make_policy(SPECS["svd"])), make_batch(N)
    spec = spec_of(case)
    route = mask_route(plain, spec)
    features = by_hand(plain, batch, case[0], case[2] == "live")
    scores = {site: unit_cosine(f, route.directions.vectors[site]) for site, f in features.items()}
    mean = torch.stack(list(scores.values())).mean(0)
    middle = float(mean.sort().values[N // 2 - 1 : N // 2 + 1].mean())
    flags = {site: (mean if case[1] == "pooled" else scores[site]) > middle for site in scores}
    policy = looped(make_policy(SPECS["svd"]), checkpointing)
    own = run(policy, mask_route(policy, replace(spec, tau=middle)), batch)
    assert torch.allclose(own.decision.scores, mean, rtol=0, atol=1e-10)
    if case[1] == "pooled":
        assert torch.equal(own.decision.flags, mean > middle)
    if case[3] == "filter":
        alone = per_rollout_gradients(plain, batch)
        expected = {n: torch.einsum("b,b...->...", (~flags[n[:-3]]).double(), alone[f"kept.{n}"]) for n in own.kept}
        assert_same(own.kept, expected)
        assert_same(own.quarantine, {n[11:]: g.sum(0) for n, g in alone.items() if n.startswith("quarantine.")})


@pytest.mark.parametrize("case", [c for c in LIVE if c[1] != "pooled"], ids=case_id)
def test_a_module_that_runs_twice_has_no_live_flag_of_its_own(case: Case) -> None:
    policy, batch = looped(make_policy(SPECS["lora"])), make_batch(N)
    with pytest.raises(RuntimeError, match=r"runs twice in one forward, so .*use unit='pooled'"):
        run(policy, mask_route(policy, spec_of(case)), batch)


# ---- one backward a tape


def losses(policy: Policy, batch: TrainBatch) -> list[Tensor]:
    logprobs = policy.logprobs(batch.rollouts)
    return [-(batch.advantages[:, None] * logprobs).sum() / 50, 0.3 * logprobs.square().sum() / 50]


@pytest.mark.parametrize("forwards", ["one forward", "a forward each"])
@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_two_backwards_under_one_tape_are_refused(case: Case, forwards: str) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    route = mask_route(policy, spec_of(case))
    step = route.begin(policy, batch, context(route.spec, N))
    with policy.adapters.recording(step.micro_batches[0].tape):
        first, second = losses(policy, batch)
        first.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one forward and one backward per tape"):
            (losses(policy, batch)[1] if forwards == "a forward each" else second).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_backwards_are_refused_under_checkpointing_too(reentrant: bool) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    checkpoint_blocks(policy, reentrant)
    step = mask_route(policy, MaskSpec(unit="rollout")).begin(policy, batch, context(MaskSpec(), N))
    with policy.adapters.recording(step.micro_batches[0].tape):
        first, second = losses(policy, batch)
        first.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one forward and one backward per tape"):
            second.backward()


# ---- finish


def open_routes(policy: Policy) -> dict[str, Route]:
    early = MaskRoute.from_flags(torch.zeros(N, dtype=torch.bool))
    return {"open": OpenRoute(OpenSpec()), "erase": erase_route(policy), "mask": mask_route(policy, MaskSpec()), "early": early}


@pytest.mark.parametrize("kind", ["open", "erase", "mask", "early"])
def test_finish_without_a_backward_says_so_and_can_be_called_after_it(kind: str) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    route = open_routes(policy)[kind]
    expected = run(policy, route, batch)
    policy.model.zero_grad(set_to_none=True)
    step = route.begin(policy, batch, context(route.spec, N))
    with policy.adapters.recording(step.micro_batches[0].tape):
        loss = plain_loss(policy, batch, batch.advantages)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="did not report a gradient"):
                step.finish()
        loss.backward()
    step.finish()
    assert_same({n: p.grad for n, p in policy.adapters.kept_parameters().items()}, expected.kept)  # pyright: ignore
    with pytest.raises(RuntimeError, match="already called"):
        step.finish()


# ---- masks that are asked for


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_flags_say_what_a_hook_decided(case: Case, ndim: int) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    chosen = torch.tensor([True, False, False, True, False, True])
    sites = list(policy.adapters.sites)[: 7 if ndim == 1 else 5]  # the majority of twelve modules, or not

    def at(_module: object, _args: object, keep: Tensor) -> Tensor:
        own = (~chosen).to(keep.dtype)
        return own if keep.ndim == 1 else own[:, None].expand_as(keep).clone()

    handles = [policy.adapters.sites[site].hook_mask.register_forward_hook(at) for site in sites]
    spec = replace(spec_of(case), tau=2.0) if case[0] in ("act", "grad", "full") else MaskSpec(score="none", through=case[3])  # pyright: ignore
    own = run(policy, mask_route(policy, spec), batch).decision
    for handle in handles:
        handle.remove()
    assert torch.equal(own.flags, chosen & (ndim == 1))


# ---- flags of one's own


@pytest.mark.parametrize("through", ["filter", "detach"])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("micro", [None, 4])
def test_a_route_from_flags_is_the_written_out_policy_under_them(through: str, token: bool, micro: int | None) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    shape = batch.rollouts.tokens.shape
    flags = torch.rand(shape if token else shape[:1], generator=torch.Generator().manual_seed(1)) < 0.4
    wide = flags if token else flags[:, None].expand(shape)
    cut = dict.fromkeys(policy.adapters.sites, wide) if through == "detach" else None
    expected = written_out(policy, batch.rollouts, lambda lp: -(batch.advantages[:, None] * lp).sum() / 50, cut=cut)
    own_kept = {n[5:]: g for n, g in expected.gradients.items() if n.startswith("kept.")}
    kept = {n: torch.einsum("bs,bs...->...", (~wide).double(), g) for n, g in own_kept.items()}
    for given in (flags, lambda seen: flags):
        own = run(policy, MaskRoute.from_flags(given, through=through), batch, micro)  # pyright: ignore[reportArgumentType]
        assert_same(own.kept, kept)
        assert_same(own.quarantine, expected.summed("quarantine"))
        if not token:
            assert torch.equal(own.decision.flags, flags)


def test_a_function_of_flags_sees_the_batch_and_no_verdict() -> None:
    policy, batch, seen = make_policy(SPECS["svd"]), make_batch(N), []

    def longest(given: TrainBatch) -> Tensor:
        seen.append(given)
        return given.rollouts.completion.sum(1) > 6

    route = MaskRoute.from_flags(longest, negative_scale=0.3)
    own = run(policy, route, batch)
    assert seen == [batch]
    assert torch.equal(own.decision.flags, longest(batch))
    with pytest.raises(TypeError, match="must not see"):
        route.begin(policy, batch, StepContext(torch.Generator(), privileged=Privileged(own.decision.flags, own.decision.flags)))


# ---- a band of clean rollouts


# ---- wrong input

BAD: dict[str, tuple[Callable[[TrainBatch], object], str]] = {
    "flags as a list": (lambda b: [True] * N, "not a list"),
    "flags as floats": (lambda b: torch.zeros(N), "not of torch.float32"),
    "flags as integers": (lambda b: torch.zeros(N, dtype=torch.long), "not of torch.int64"),
    "too few flags": (lambda b: torch.zeros(N - 1, dtype=torch.bool), r"shape \[5\]: give one per rollout, \[6\]"),
    "flags of other tokens": (lambda b: torch.zeros(N, 2, dtype=torch.bool), r"shape \[6, 2\]: give one per rollout, \[6\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_flags_that_do_not_fit_are_one_sentence(what: str) -> None:
    policy, (flags, sentence) = make_policy(SPECS["svd"]), BAD[what]
    with pytest.raises(ValueError, match=sentence):
        MaskRoute.from_flags(flags).begin(policy, make_batch(N), context(MaskSpec(), N))  # pyright: ignore[reportArgumentType]


# ---- directions that somebody set


def changed(directions: Directions, how: str, kind: str) -> Directions:
    first, *_ = directions.vectors
    v = directions.vectors[first]
    other = {"nan": torch.full_like(v, torch.nan), "shape": v[..., :-1]}
    if how in other:
        return replace(directions, vectors={**directions.vectors, first: other[how]})
    if how == "missing site":
        return replace(directions, vectors={site: v for site, v in directions.vectors.items() if site != first})
    if how == "foreign site":
        return replace(directions, vectors={**directions.vectors, "blocks.9.attn.q": v})
    given = {"kind": {"kind": "act" if kind != "act" else "grad"}, "base": {"base_hash": "1f"}}[how]
    return replace(directions, provenance=replace(directions.provenance, **given))


SENTENCES = {
    "kind": "this route needs directions of",
    "base": "belong to base weights '1f', but this policy has",
    "missing site": "a direction without an adapter, or the reverse, at blocks.0.attn.q: set",
    "foreign site": r"a direction without an adapter, or the reverse, at blocks\.9\.attn\.q: set",
    "shape": r"at blocks.0.attn.q is \[",
    "nan": "or not finite",
}


@pytest.mark.parametrize("how", SENTENCES)
@pytest.mark.parametrize("kind", ["act", "grad", "full", "erase"])
def test_directions_that_somebody_set_are_those_of_the_policy_or_one_sentence(kind: str, how: str) -> None:
    policy, batch = make_policy(SPECS["svd"]), make_batch(N)
    fitted = random_directions(policy, "grad" if kind == "erase" else kind)
    fitter = FixedFitter(fitted)
    route = EraseRoute(EraseSpec(), fitter) if kind == "erase" else MaskRoute(MaskSpec(score=kind), fitter)  # pyright: ignore
    fits = fitted if kind != "erase" else replace(fitted, vectors={site: v[None] for site, v in fitted.vectors.items()})
    route.directions = fits
    run(policy, route, batch)
    route.directions = changed(fits, how, kind)
    with pytest.raises(ValueError, match=SENTENCES[how]):
        route.begin(policy, batch, context(route.spec, N))
    if kind != "erase":
        with pytest.raises(ValueError, match=SENTENCES[how]):
            route.score(policy, batch.rollouts)


# ---- numbers and gradients that are none of a step's


def two_steps(
    policy: Policy, route: Route, cleared: bool, reduce: bool, halves: tuple[TrainBatch, TrainBatch]
) -> dict[str, Tensor]:
    """A step on each half, with or without ``zero_grad`` between; the kept gradients afterwards."""

    def twice(gradients: Sequence[Tensor]) -> None:
        for g in gradients:
            g.mul_(2)  # two ranks with the same rollouts

    policy.model.zero_grad()
    for i, half in enumerate(halves):
        if i and cleared:
            policy.model.zero_grad(set_to_none=False)
        step = route.begin(policy, half, context(route.spec, N))
        for micro_batch in step.micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
        step.finish(twice if reduce else None)
    return {n: p.grad.clone() for n, p in policy.adapters.kept_parameters().items() if p.grad is not None}


@pytest.mark.parametrize(("kind", "reduce"), [("erase", False), ("erase", True), ("open", True), ("live", True), ("early", True)])
def test_gradients_from_before_the_step_are_not_reduced_or_erased_again(kind: str, reduce: bool) -> None:
    """They would be summed over ranks a second time, and lose their component; without them a step is what its oracle says."""
    policy = make_policy(SPECS["svd"])
    flags = torch.arange(N) % 2 == 0
    route = MaskRoute.from_flags(flags) if kind == "early" else open_routes(policy)["mask" if kind == "live" else kind]
    halves = make_batch(N, seed=1), make_batch(N, seed=2)
    with pytest.raises(RuntimeError, match=r"already had gradients when this step began.*call zero_grad\(\) before begin\(\)"):
        two_steps(policy, route, cleared=False, reduce=reduce, halves=halves)
    expected = {n: (2 if reduce else 1) * g for n, g in run(policy, OpenRoute(OpenSpec()), halves[1]).kept.items()}
    if kind == "erase":
        for site, (v,) in route.directions.vectors.items():
            name = next(n for n in expected if policy.adapters.kept_parameters()[n] is policy.adapters.scored(site))
            expected[name] = expected[name] - max(float((expected[name] * v).sum()), 0.0) * v
    elif kind != "open":
        expected = {n: 2 * g for n, g in run(policy, route, halves[1]).kept.items()}
    assert_same(two_steps(policy, route, cleared=True, reduce=reduce, halves=halves), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("through", ["filter", "detach"])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("name", ["svd", "lora"])
def test_a_flagged_rollout_that_is_not_finite_teaches_the_kept_adapter_nothing(
    name: str, token: bool, through: str, bad: float
) -> None:
    policy, batch = make_policy(SPECS[name]), make_batch(N)

    def broken(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        return torch.where((torch.arange(len(out)) == 0)[:, None, None], bad, out) if len(out) == N else out

    policy.model.blocks[0].register_forward_hook(broken)  # pyright: ignore
    flags = torch.arange(N) == 0
    given = flags[:, None].expand(batch.rollouts.tokens.shape) if token else flags
    own = run(policy, MaskRoute.from_flags(given, through=through), batch)  # pyright: ignore[reportArgumentType]
    assert_same(own.kept, run(policy, MaskRoute.from_flags(torch.zeros(N - 1) > 0), batch.rows(torch.arange(1, N))).kept)


@pytest.mark.parametrize("case", LIVE, ids=case_id)
def test_a_penalty_on_the_quarantine_reaches_no_score_and_no_kept_gradient(case: Case) -> None:
    policy, batch = make_policy(SPECS["lora"]), make_batch(N)
    own, without = (run(policy, mask_route(policy, spec_of(case), l1=l1), batch) for l1 in (50.0, 0.0))
    assert torch.equal(own.decision.scores, without.decision.scores)  # pyright: ignore[reportArgumentType]
    assert torch.equal(own.decision.flags, without.decision.flags)  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(own.kept[name], gradient) for name, gradient in without.kept.items())
    assert any(not torch.equal(own.quarantine[name], gradient) for name, gradient in without.quarantine.items())
