"""Dr.GRPO with routed gradients: the whole loop. It knows no arm; what differs between arms is the route that it is given.

    A_b = R_b - mean(R over the prompt's group)                      no std, no length norm
    loss = -1/(N T) sum_b sum_t min(rho A, clip(rho, 1-eps, 1+eps) A) + beta K3,   rho = exp(logp - logp_old)
    K3 = exp(ref - logp) - (ref - logp) - 1                          ref: adapters off

N rollouts a step and T the longest completion are fixed, so that a short or dropped rollout does not make the others louder.
Sources: Liu et al. 2503.20783 (Dr.GRPO); Schulman, "Approximating KL divergence" (K3).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.rollouts import Policy
from mi_route2.routing import Decision, Route, StepContext, TrainBatch, group_advantages
from mi_route2.routing.optimizer import RoutedAdamW
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.protocol import Samples, Witness, World
from studies.route2.settings import Settings
from studies.route2.teacher import TeacherPool


@dataclass(frozen=True)
class StepRecord:
    """One step for the recorder. ``samples`` and ``batch`` are aligned; ``trained`` marks groups with reward variance."""

    step: int
    samples: Samples
    batch: TrainBatch
    trained: Bool[Tensor, " b"]
    decision: Decision
    overlap: float | None
    loss: float
    kl: float | None
    grad_norm: dict[str, float | None]
    extra: dict[str, float]


def objective(policy: Policy, batch: TrainBatch, advantages: Tensor, settings: Settings, length: int) -> tuple[Tensor, Tensor]:
    """The loss of ``batch`` and, apart, its KL term (before beta); both over the fixed denominator. ``length``: T, in tokens."""
    scale = settings.prompts * settings.group * length
    logprobs = policy.logprobs(batch.rollouts)
    mask = batch.rollouts.predictors
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    loss = -(surrogate * mask).sum() / scale
    if batch.reference_logprobs is None:
        return loss, loss.new_zeros(())
    gap = (batch.reference_logprobs - logprobs) * mask
    kl = (gap.exp() - gap - 1).sum() / scale
    return loss + settings.kl * kl, kl.detach()


@torch.no_grad()
def with_anchors(policy: Policy, batch: TrainBatch, settings: Settings) -> TrainBatch:
    """The log-probabilities that later updates are clipped and penalised against, where the settings use them."""
    old = policy.logprobs(batch.rollouts) if settings.updates_per_batch > 1 else None
    reference = None
    if settings.kl > 0:
        with policy.adapters.reference():
            reference = policy.logprobs(batch.rollouts)
    return replace(batch, old_logprobs=old, reference_logprobs=reference)


def clip_gradients(policy: Policy, max_norm: float, unrouted: Iterable[Tensor] = ()) -> dict[str, float | None]:
    """Clip kept and quarantine gradients apart: a loud quarantine must not quiet the kept adapter. Returns both norms.

    ``unrouted`` gradients, which Adam's second moment reads in place of the kept ones, are scaled as those are.
    """
    norms: dict[str, float | None] = {}
    lanes = {"kept": policy.adapters.kept_parameters(), "quarantine": policy.adapters.quarantine_parameters()}
    for lane, parameters in lanes.items():
        with_grad = [p for p in parameters.values() if p.grad is not None]
        norms[lane] = float(torch.nn.utils.clip_grad_norm_(with_grad, max_norm)) if with_grad else None
    scale = max_norm / ((norms["kept"] or 0.0) + 1e-6)  # as clip_grad_norm_ has it
    for gradient in unrouted:
        gradient.mul_(min(1.0, scale))
    return norms


def update(
    policy: Policy, route: Route, optimiser: RoutedAdamW, batch: TrainBatch, context: StepContext, settings: Settings, length: int
) -> tuple[Decision, float, float, dict[str, float | None], dict[str, float]]:
    """One optimiser step on ``batch`` under ``route``."""
    adapters = policy.adapters
    optimiser.zero_grad(set_to_none=True)
    step, loss, kl = route.begin(policy, batch, context), 0.0, 0.0
    for part in step.parts:
        with adapters.recording(part.tape):
            part_loss, part_kl = objective(policy, part.batch, part.advantages, settings, length)
            part_loss.backward()
        loss, kl = loss + float(part_loss.detach()), kl + float(part_kl)
    decision = step.finish()
    norms = clip_gradients(policy, settings.max_norm, decision.unrouted.values())
    before = {site: adapters.scored(site).detach().clone() for site in adapters.sites}
    kept = adapters.kept_parameters()
    optimiser.step(unrouted={kept[name]: g for name, g in decision.unrouted.items()} or None)
    moved = {site: adapters.scored(site).detach() - value for site, value in before.items()}
    return decision, loss, kl, norms, {**decision.extra, **route.after_update(moved)}


def gather(
    world: World,
    policy: Policy,
    teachers: TeacherPool | None,
    seed: int,
    step: int,
    settings: Settings,
    none_fraction: float,
) -> tuple[Samples, TrainBatch]:
    """Prompts, samples from the policy with both adapters in, training rewards, and the batch that they make."""
    prompts = world.prompts(settings.prompts, numpy_generator(seed, "prompts", step), none_fraction)
    if teachers is not None:
        prompts = teachers.replace_known(world, prompts, numpy_generator(seed, "teacher prompts", step))
    groups = torch.arange(settings.prompts).repeat_interleave(settings.group)
    with policy.adapters.full():
        samples = world.sample(
            policy, [prompts[int(g)] for g in groups], torch_generator(seed, "sample", step), settings.temperature
        )
    taught = torch.zeros(len(groups), dtype=torch.bool)
    if teachers is not None:
        samples, taught = teachers.mix(world, samples, groups, settings.teachers_per_group)
    device = samples.rollouts.tokens.device
    rewards, groups = world.rewards(samples).to(device), groups.to(device)
    return samples, TrainBatch(samples.rollouts, rewards, group_advantages(rewards, groups), groups, taught.to(device))


def train(
    world: World,
    witness: Witness,
    policy: Policy,
    route: Route,
    optimiser: RoutedAdamW,
    settings: Settings,
    *,
    seed: int,
    start: int = 0,
    none_fraction: float | None = None,
    teachers: TeacherPool | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[StepRecord]:
    """GRPO from step ``start``; yields a record after each step. Groups of one reward teach nothing and are skipped."""
    fraction = settings.none_fraction if none_fraction is None else none_fraction
    for step in range(start, settings.steps):
        if stop():
            return
        overlap = route.refresh(policy, step)
        samples, batch = gather(world, policy, teachers, seed, step, settings, fraction)
        trained = varied(batch)
        rows = trained.nonzero()[:, 0]
        decision, loss, kl, extra = Decision(), 0.0, 0.0, {}
        norms: dict[str, float | None] = {"kept": None, "quarantine": None}
        if len(rows):
            learnt = with_anchors(policy, batch.rows(rows), settings)
            verdicts = witness.privileged(samples) if route.spec.privileged else None
            verdicts = None if verdicts is None else verdicts.rows(rows)
            for i in range(settings.updates_per_batch):
                generator = torch_generator(seed, f"route {i}", step)
                context = StepContext(generator, settings.micro_batch(learnt.rollouts), verdicts)
                decision, loss, kl, norms, extra = update(policy, route, optimiser, learnt, context, settings, world.max_new)
        yield StepRecord(step, samples, batch, trained, decision, overlap, loss, kl if settings.kl > 0 else None, norms, extra)


def varied(batch: TrainBatch) -> Bool[Tensor, " b"]:
    """Rollouts whose group holds more than one reward."""
    moved: Float[Tensor, " b"] = (batch.advantages.abs() > 1e-9).to(batch.rewards.dtype)
    per_group = torch.zeros(int(batch.groups.max()) + 1, dtype=moved.dtype, device=moved.device).index_add_(0, batch.groups, moved)
    return per_group[batch.groups] > 0
