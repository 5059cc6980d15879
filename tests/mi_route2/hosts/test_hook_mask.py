"""A hook at ``hook_mask`` overrules what the route decided, exactly as the written-out policy says, for every kind of mask."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from families import FAMILIES
from families import make_batch as family_batch
from families import make_policy as family_policy
from mask_oracle import (
    CASES,
    SAMPLE,
    FixedFitter,
    _flags,
    _scores,
    assert_same,
    case_id,
    context,
    mask_route,
    plain_loss,
    random_directions,
    run,
    some_channels,
    unflagged_advantages,
)
from tiny_policy import SPECS, make_batch, make_policy
from torch import Tensor
from written_out import WrittenOut, written_out

from mi_route2.hosts.base import Host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.hosts.nnsight import NNsightHost
from mi_route2.hosts.transformer_lens import BridgeHost
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskRoute, MaskSpec, TrainBatch

N = 5
Case = tuple[str, str, str, str]
Hook = Callable[[Tensor], Tensor]


def spec_of(case: Case, **changes: object) -> MaskSpec:
    score, unit, policy, through = case
    settings = {"reinforced_only": False, **changes}
    return MaskSpec(score=score, unit=unit, score_policy=policy, through=through, **settings)  # pyright: ignore[reportArgumentType]


def hosted(spec: str = "lora") -> Policy:
    """The tiny policy, called through the torch host."""
    policy = make_policy(SPECS[spec])
    return TorchHost(policy.model).policy(policy.adapters)


@contextmanager
def overruled(policy: Policy, hooks: Mapping[str, Hook]) -> Iterator[dict[str, int]]:
    """Context: hooks by the name of a site; how often each fired."""
    fired = dict.fromkeys(hooks, 0)

    def torch_hook(site: str) -> Callable[..., Tensor]:
        def hook(_module: object, _args: object, mask: Tensor) -> Tensor:
            fired[site] += 1
            return hooks[site](mask)

        return hook

    with ExitStack() as stack:
        for site in hooks:
            stack.callback(policy.adapters.sites[site].hook_mask.register_forward_hook(torch_hook(site)).remove)
        yield fired


def any_masks(policy: Policy, batch: TrainBatch, token: bool, seed: int = 11) -> dict[str, Tensor]:
    """A random mask a site, ``[b]`` or ``[b, s]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch.rollouts.tokens.shape if token else batch.rollouts.tokens.shape[:1]
    return {site: torch.randint(0, 2, shape, generator=generator).double() for site in policy.adapters.sites}


def by_brute_force(policy: Policy, spec: MaskSpec, batch: TrainBatch, masks: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Kept and quarantine gradients where ``masks`` hold at their sites and the route's own flags elsewhere."""
    sites, shape = list(policy.adapters.sites), batch.rollouts.tokens.shape
    imposed = {site: (mask if mask.ndim == 2 else mask[:, None]).expand(shape) == 0 for site, mask in masks.items()}
    detach = spec.through == "detach"

    def ours(advantages: Tensor, cut: Mapping[str, Tensor] | None, features: bool = False) -> WrittenOut:
        return written_out(policy, batch.rollouts, lambda lp: -(advantages[:, None] * lp).sum() / 50, cut=cut, features=features)

    own = {site: torch.zeros(shape, dtype=torch.bool) for site in sites}
    flags = {**own, **imposed}
    directions = random_directions(policy, spec.score) if spec.needs_direction else None
    if spec.privileged:
        channels = some_channels(shape[0])
        fired = channels.own_channel if spec.score == "own_channel" else channels.known_channel
        own = dict.fromkeys(sites, fired[:, None].expand(shape))
        flags = {**own, **imposed}
    elif directions is not None:
        for _ in range(len(sites) + 1):  # each pass settles one more module from the top
            if spec.score_policy == "live":
                found = ours(batch.advantages, flags if detach else None, features=True)
            else:
                found = written_out(policy, batch.rollouts, lambda lp: -lp.sum(), quarantine=False)
            own = _flags(spec, _scores(policy, spec, directions, batch, found), batch)
            before, flags = flags, {**own, **imposed}
            if all(torch.equal(before[site], flags[site]) for site in sites):
                break
    cut = flags if detach else None
    first = ours(batch.advantages, cut)
    learnt = first
    if spec.kept_advantage == "unflagged":  # from the route's own flags: a hook says what is learnt, not how rewards are counted
        learnt = ours(unflagged_advantages(batch, own[sites[0]][:, 0]), cut)
    kept = {}
    for name, gradient in learnt.gradients.items():
        adapter, _, rest = name.partition(".")
        if adapter == "kept":
            kept[rest] = torch.einsum("bs,bs...->...", (~flags[rest.rpartition(".")[0]]).double(), gradient)
    return kept, first.summed("quarantine")


@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_hooks_at_every_site_overrule_the_route(case: Case) -> None:
    """Random masks everywhere, for every legal combination: what the route thinks itself is then beside the point.

    All are written into one tensor, one after another.
    """
    policy, batch = hosted(), make_batch(N)
    spec = spec_of(case)
    masks = any_masks(policy, batch, case[1] == "token")
    buffer = next(iter(masks.values())).clone()
    with overruled(policy, {site: lambda _, mask=mask: buffer.copy_(mask) for site, mask in masks.items()}) as fired:
        own = run(policy, mask_route(policy, spec), batch)
    assert set(fired.values()) == {1}, "a mask passes its point once"
    assert own.decision.extra["overruled"] == 1.0
    kept, quarantine = by_brute_force(policy, spec, batch, masks)
    assert_same(own.kept, kept)
    assert_same(own.quarantine, quarantine)
    unhooked = run(policy, mask_route(policy, spec), batch)
    assert "overruled" not in unhooked.decision.extra
    assert any(not torch.allclose(own.kept[n], unhooked.kept[n], rtol=1e-3, atol=0) for n in own.kept)


@pytest.mark.parametrize("case", SAMPLE, ids=case_id)
def test_a_hook_at_one_site_overrules_that_site(case: Case) -> None:
    """Others follow their own flags; where those come from gradients under a detached module above, they change with it."""
    policy, batch, site = hosted("svd"), make_batch(N), "blocks.1.attn.v"
    spec = spec_of(case)
    mask = any_masks(policy, batch, case[1] == "token")[site]
    plain = run(policy, mask_route(policy, spec), batch)
    with overruled(policy, {site: lambda _: mask}):
        own = run(policy, mask_route(policy, spec), batch)
    kept, quarantine = by_brute_force(policy, spec, batch, {site: mask})
    assert_same(own.kept, kept)
    assert_same(own.quarantine, quarantine)
    if spec.through == "filter":
        assert all(torch.equal(own.kept[n], plain.kept[n]) for n in own.kept if not n.startswith(site))
        assert all(torch.equal(own.quarantine[n], plain.quarantine[n]) for n in own.quarantine)


@pytest.mark.parametrize(("case", "micro"), [(case, (None, 2)[i % 2]) for i, case in enumerate(SAMPLE)])
def test_a_hook_that_leaves_the_mask_changes_no_bit(case: Case, micro: int | None) -> None:
    policy, batch = hosted("svd-low"), make_batch(N)
    spec = spec_of(case)
    plain = run(policy, mask_route(policy, spec), batch, micro)
    for hook in (lambda mask: mask, lambda mask: mask.clone()):
        with overruled(policy, dict.fromkeys(policy.adapters.sites, hook)) as fired:
            own = run(policy, mask_route(policy, spec), batch, micro)
        assert set(fired.values()) == {1 if micro is None else 3}
        assert all(torch.equal(own.kept[n], plain.kept[n]) for n in plain.kept)
        assert all(torch.equal(own.quarantine[n], plain.quarantine[n]) for n in plain.quarantine)
        assert "overruled" not in own.decision.extra
        assert torch.equal(own.decision.flags, plain.decision.flags)


EARLY = [case for case in CASES if case[1] == "pooled" and (case[2] == "ablated" or case[0] in ("own_channel", "known_channel"))]


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("case", EARLY, ids=case_id)
def test_both_passes_of_two_advantages_are_overruled(case: Case, order: str) -> None:
    """One mask for both: what the second pass does not learn is what the first sends nothing through, whichever runs first."""
    policy, batch = hosted(), make_batch(6)
    spec = spec_of(case, kept_advantage="unflagged", tau=0.0)
    masks = any_masks(policy, batch, False)
    adapters, route = policy.adapters, mask_route(policy, spec)
    with overruled(policy, {site: lambda _, mask=mask: mask for site, mask in masks.items()}) as fired:
        if order == "forward":
            own = run(policy, route, batch)
            kept, quarantine = own.kept, own.quarantine
        else:
            policy.model.zero_grad()
            step = route.begin(policy, batch, context(spec, 6))
            for micro_batch in reversed(step.micro_batches):
                with adapters.recording(micro_batch.tape):
                    plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
            assert step.finish().extra["overruled"] == 1.0
            kept = {n: p.grad.clone() for n, p in adapters.kept_parameters().items()}
            quarantine = {n: p.grad.clone() for n, p in adapters.quarantine_parameters().items()}
    assert set(fired.values()) == {1}
    expected = by_brute_force(policy, spec, batch, masks)
    assert_same(kept, expected[0])
    assert_same(quarantine, expected[1])


def test_a_mask_of_another_shape_is_one_sentence() -> None:
    for case in (("act", "token", "live", "filter"), ("grad", "rollout", "live", "filter"), ("grad", "pooled", "live", "filter")):
        policy, batch = hosted(), make_batch(N)
        with overruled(policy, {"blocks.0.attn.q": lambda mask: mask[:-1]}):
            with pytest.raises(ValueError, match=r"a hook at blocks\.0\.attn\.q\.hook_mask returned a mask of shape \[4"):
                run(policy, mask_route(policy, spec_of(case)), batch)
        with overruled(policy, {"blocks.0.attn.q": lambda mask: 0.0}):  # pyright: ignore[reportArgumentType]
            with pytest.raises(
                ValueError, match=r"a hook at blocks\.0\.attn\.q\.hook_mask returned a float, not a mask of shape \["
            ):
                run(policy, mask_route(policy, spec_of(case)), batch)


def test_half_a_mask_is_half_a_gradient() -> None:
    policy, batch, site = hosted("svd"), make_batch(N), "blocks.0.mlp.up"
    spec = spec_of(("grad", "pooled", "live", "filter"), tau=2.0)
    plain = run(policy, mask_route(policy, spec), batch)
    half = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)  # as of a probe that is trained elsewhere
    with overruled(policy, {site: lambda mask: half * mask}):
        own = run(policy, mask_route(policy, spec), batch)
    assert not any(p.grad.requires_grad for p in policy.adapters.kept_parameters().values() if p.grad is not None)
    assert_same(own.kept, {n: g / 2 if n.startswith(site) else g for n, g in plain.kept.items()}, 1e-14)


# ---- on models of other libraries


KINDS = [
    ("grad", "rollout", "live", "filter"),
    ("act", "pooled", "live", "filter"),
    ("grad", "pooled", "live", "filter"),
    ("full", "pooled", "ablated", "filter"),
    ("own_channel", "pooled", "live", "filter"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_on_every_family_the_kept_gradient_is_the_masked_sum_of_rollouts(name: str) -> None:
    """``sum_b mask_b g_b``, each ``g_b`` from plain autograd of that rollout alone."""
    _, policy = family_policy(name, "lora")
    batch = replace(family_batch(4), advantages=torch.tensor([1.0, -0.5, 0.75, -1.25], dtype=torch.float64))
    alone = [rollout_gradient(policy, batch, b) for b in range(4)]
    masks = any_masks(policy, batch, False)
    for case in KINDS:
        spec = spec_of(case)
        route = MaskRoute(spec, FixedFitter(random_directions(policy, spec.score)) if spec.needs_direction else None)
        route.refresh(policy, 0)
        with overruled(policy, {site: lambda _, mask=mask: mask for site, mask in masks.items()}):
            own = run(policy, route, batch)
        assert own.decision.extra["overruled"] == 1.0
        expected = {n: sum(float(masks[n.rpartition(".")[0]][b]) * alone[b][n] for b in range(4)) for n in own.kept}
        assert_same(own.kept, expected, 1e-11)


def rollout_gradient(policy: Policy, batch: TrainBatch, b: int) -> dict[str, Tensor]:
    one, kept = batch.rows(torch.tensor([b])), policy.adapters.kept_parameters()
    gradients = torch.autograd.grad(plain_loss(policy, one, one.advantages), list(kept.values()))
    return dict(zip(kept, gradients))


# ---- masks that are asked for where no mask is decided


@contextmanager
def asked(host: Host, policy: Policy, how: str) -> Iterator[None]:
    """Context: somebody waits for the mask of one Linear, in the host's own way or in torch's."""
    point = policy.adapters.sites["blocks.1.mlp.up"].hook_mask
    if how == "torch hook":
        with point.register_forward_hook(lambda _module, _args, keep: 0 * keep):
            yield
    elif how == "torch pre-hook":
        with point.register_forward_pre_hook(lambda _module, args: (0 * args[0],)):
            yield
    elif isinstance(host, BridgeHost):
        with host.bridge.hooks(fwd_hooks=[("blocks.1.mlp.in.route.hook_mask", lambda keep, hook: 0 * keep)]):
            yield
    else:
        assert isinstance(host, NNsightHost)
        model = host.envoy
        with model.edit(inplace=True):
            model.transformer.h[1].mlp.c_fc.route.hook_mask.output = 0 * model.transformer.h[1].mlp.c_fc.route.hook_mask.output
        try:
            yield
        finally:
            model.clear_edits()
