"""Per-rollout gradients are exact inside one backward: against torch.func in float64, at zero and away from it."""

from dataclasses import replace

import pytest
import torch
from tiny_policy import SPECS, make_batch, make_policy, per_rollout_gradients, policy_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mi_route2.adapters import AdapterSpec, Tape
from mi_route2.adapters.gradients import DiagonalGrad, FactorGradient, MatrixGrad, compact, exact
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskRoute, MaskSpec, OpenRoute, OpenSpec, StepContext
from mi_route2.routing.directions import GradientReader

EXACT = {"rtol": 0.0, "atol": 1e-12}


class Recorder:
    """A gate that learns everything and notes each rollout's gradient."""

    detach = False

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor:
        self.seen[f"{site}.{factor}"] = pair.values()
        return pair.weighted(torch.ones(pair.h.shape[0], dtype=pair.h.dtype))

    def called(self, site: str, point: object) -> None:
        return None

    def mask(self, site: str) -> Tensor:
        raise AssertionError


def record(policy: Policy, left: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = make_batch(left=left)
    kept, quarantine = Recorder(), Recorder()
    with policy.adapters.recording(Tape(*batch.rollouts.tokens.shape, kept=kept, quarantine=quarantine)):
        policy_loss(policy, batch, batch.advantages).backward()
    return kept.seen, quarantine.seen


@pytest.mark.parametrize("scale", [0.0, 0.1])
@pytest.mark.parametrize("left", [False, True])
def test_every_rollouts_gradient_equals_its_own_backward(spec: AdapterSpec, scale: float, left: bool) -> None:
    policy = make_policy(spec, scale=scale)
    seen = dict(zip(("kept", "quarantine"), record(policy, left)))
    oracle = per_rollout_gradients(policy, make_batch(left=left))
    assert {f"{adapter}.{name}" for adapter, own in seen.items() for name in own} == oracle.keys()
    for name, g in oracle.items():
        adapter, own_name = name.split(".", 1)
        assert torch.allclose(seen[adapter][own_name], g, **EXACT), name
    for name, p in policy.adapters.kept_parameters().items():
        assert torch.allclose(p.grad, oracle[f"kept.{name}"].sum(0), **EXACT)  # pyright: ignore


def test_against_vmap_of_torch_func_at_zero() -> None:
    """An oracle that shares no code with the backward: ``vmap(grad)`` of a functional call."""
    policy = make_policy(SPECS["svd"], scale=0.0)
    batch = make_batch()
    kept, _ = record(policy)
    parameters = dict(policy.model.named_parameters())
    adapters = {k: v.detach() for k, v in parameters.items() if k.endswith(".dS")}

    def loss(theta: dict[str, Tensor], tokens: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
        logits = torch.func.functional_call(policy.model, theta, (tokens[None],))
        logp = logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return -(advantage * torch.where(mask[:-1], logp, torch.zeros_like(logp))).sum() / 50

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))
    oracle = per_sample(adapters, batch.rollouts.tokens, batch.rollouts.predictors, batch.advantages)
    for name, g in oracle.items():
        site = name.removesuffix(".route.kept.dS")
        assert g.abs().max() > 0
        assert torch.allclose(kept[f"{site}.dS"], g, **EXACT), name


def test_the_gate_form_agrees_where_it_is_defined() -> None:
    """The divide-out gate ``c.grad / dS`` is an oracle away from 0 and has no answer at 0."""
    policy = make_policy(SPECS["svd"])
    kept, _ = record(policy)
    batch = make_batch()
    gates: dict[str, Tensor] = {}
    originals = {}
    for site, module in policy.adapters.sites.items():
        gates[site] = torch.ones(len(batch.rollouts), 1, module.kept.dS.numel(), dtype=torch.float64, requires_grad=True)

        def gated(x: Tensor, tape: object, gate: object, s: str, point: object, kept: object = module.kept) -> Tensor:
            return (kept.bottleneck(x) * kept.dS * gates[s]) @ kept.U.mT  # pyright: ignore

        originals[site] = module.kept.forward
        module.kept.forward = gated
    with policy.adapters.unrouted():
        policy_loss(policy, batch, batch.advantages).backward()
    for site, gate in gates.items():
        dS = policy.adapters.sites[site].kept.dS.detach()
        sure = dS.abs() > 1e-6
        assert torch.allclose((gate.grad[:, 0] / dS)[:, sure], kept[f"{site}.dS"][:, sure], rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 5, 4, 9), (3, 5, 9, 4), (4, 30, 3, 3), (2, 2, 40, 30)])
def test_contractions_equal_the_written_gradient(shape: tuple[int, int, int, int]) -> None:
    b, s, i, o = shape
    g = torch.Generator().manual_seed(sum(shape))
    h, dy = (torch.randn(b, s, w, generator=g, dtype=torch.float64) for w in (i, o))
    v, w = torch.randn(o, i, generator=g, dtype=torch.float64), torch.randn(b, generator=g, dtype=torch.float64)
    pair, written = MatrixGrad(h, dy), torch.einsum("bso,bsi->boi", dy, h)
    for held in (pair, compact(pair)):
        assert torch.allclose(held.inner(v), (written * v).sum((1, 2)), **EXACT)
        assert torch.allclose(held.norms(), written.flatten(1).norm(dim=1), **EXACT)
        assert torch.allclose(held.weighted(w), torch.einsum("b,boi->oi", w, written), **EXACT)
    token = torch.randn(b, s, generator=g, dtype=torch.float64)
    assert torch.allclose(pair.weighted(token), torch.einsum("bs,bso,bsi->oi", token, dy, h), **EXACT)
    diagonal = DiagonalGrad(h, h.flip(1))
    assert torch.allclose(diagonal.weighted(token), torch.einsum("bs,bsi,bsi->i", token, h, h.flip(1)), **EXACT)


def test_flattened_rows_are_read_by_the_stated_layout() -> None:
    tape = Tape(2, 3)
    rows = torch.arange(12.0).view(6, 2)
    assert torch.equal(tape.rows(rows), rows.view(2, 3, 2))
    with pytest.raises(ValueError, match="2 rollouts of 3 tokens"):
        tape.rows(torch.zeros(3, 2, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(spec: AdapterSpec, reentrant: bool) -> None:
    batch = make_batch()
    flags = torch.tensor([True, False, True, False, False, True])

    def run(policy: Policy) -> dict[str, Tensor]:
        route = MaskRoute.from_flags(flags)
        step = route.begin(policy, batch, StepContext(torch.Generator()))
        for micro_batch in step.micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                policy_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
        step.finish()
        return {n: p.grad.clone() for n, p in policy.adapters.kept_parameters().items()}  # pyright: ignore

    plain = run(make_policy(spec))
    policy = make_policy(spec)
    policy.model.embed.requires_grad_(True)  # a reentrant checkpoint needs an input that requires grad
    for block in policy.model.blocks:  # pyright: ignore
        block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=reentrant)
    checkpointed = run(policy)
    for name, g in plain.items():
        assert torch.equal(g, checkpointed[name]), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_outside_the_context_under_checkpointing_is_an_error(reentrant: bool) -> None:
    """The recomputed forward would not see the tape: either torch or ``finish`` says so, never silence."""
    policy = make_policy(SPECS["lora"])
    policy.model.embed.requires_grad_(True)  # pyright: ignore
    batch = make_batch()
    for block in policy.model.blocks:  # pyright: ignore
        block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=reentrant)
    step = MaskRoute(MaskSpec(score="none"), None).begin(policy, batch, StepContext(torch.Generator()))
    with policy.adapters.recording(step.micro_batches[0].tape):
        loss = policy_loss(policy, batch, batch.advantages)

    def late() -> None:
        loss.backward()
        step.finish()

    with pytest.raises(RuntimeError):
        late()


def test_l1_gradient_is_that_of_the_written_penalty(spec: AdapterSpec) -> None:
    batch = make_batch()
    policy = make_policy(spec)
    for branch in policy.adapters.sites.values():
        branch.hook_quarantine.register_forward_hook(lambda m, a, y: y.mul_(1))  # which may write in place
    step = OpenRoute(OpenSpec(), l1=0.7).begin(policy, batch, StepContext(torch.Generator(), micro=2))
    for micro_batch in step.micro_batches:
        with policy.adapters.recording(micro_batch.tape):
            policy_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
    own = {n: p.grad.clone() for n, p in policy.adapters.quarantine_parameters().items()}  # pyright: ignore

    oracle = make_policy(spec)
    penalties: list[Tensor] = []
    real = batch.rollouts.attention[..., None]

    def penalize(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        penalties.append((module.forward(args[0].detach(), *args[1:]) * real).abs().mean())

    for module in oracle.adapters.sites.values():
        module.quarantine.register_forward_hook(penalize)  # pyright: ignore
    with oracle.adapters.unrouted():
        loss = policy_loss(oracle, batch, batch.advantages)
        (loss + 0.7 * torch.stack(penalties).mean()).backward()
    for name, p in oracle.adapters.quarantine_parameters().items():
        assert torch.allclose(own[name], p.grad, rtol=0, atol=1e-12), name


def test_l1_does_not_read_padding() -> None:
    """Other tokens under the padding change no gradient, to the last bit."""
    grads = []
    for fill in (0, 7):
        policy, batch = make_policy(SPECS["lora"]), make_batch()
        tokens = torch.where(batch.rollouts.attention, batch.rollouts.tokens, fill)
        batch = replace(batch, rollouts=replace(batch.rollouts, tokens=tokens))
        step = OpenRoute(OpenSpec(), l1=0.7).begin(policy, batch, StepContext(torch.Generator()))
        with policy.adapters.recording(step.micro_batches[0].tape):
            policy_loss(policy, batch, batch.advantages).backward()
        grads.append([p.grad for p in policy.adapters.quarantine_parameters().values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_reading_touches_no_gradient() -> None:
    policy = make_policy(SPECS["lora"])
    batch = make_batch()
    with policy.adapters.deployed(), policy.adapters.recording(Tape(*batch.rollouts.tokens.shape, kept=GradientReader())):
        policy_loss(policy, batch, batch.advantages).backward()
    assert all(p.grad is None for p in policy.adapters.kept_parameters().values())
    assert all(p.grad is None for p in policy.adapters.quarantine_parameters().values())


def test_products_are_exact_inside_and_their_setting_is_back_afterwards() -> None:
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        with exact():
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before
