"""Dr.GRPO with routed gradients: the whole training loop. It does not depend on the arm; arms differ in their route.

The policy is a frozen model with two trained adapters: the kept one, and the quarantine, which is deleted at deployment. Rollouts
are sampled with both, or some groups without the quarantine. The route decides what of a rollout's gradient reaches the kept
adapter. The quarantine learns from all rollouts, so it is the only one that learns from those (ideally the reward hacks) that the
route flags; some routes train it otherwise (``mi_route2.specs``). One step, in the order of this file:

    refresh        the route fits its directions to the current policy
    gather         sample N = prompts * group completions and grade them; advantages within each prompt's group
    varied         choose the groups that have a gradient; under a KL term all have one
    with_anchors   store the log-probabilities that the loss compares with
    update         forward and backward under the route, clipping, one step of Adam

    A_b = R_b - mean(R over the prompt's group)                      no std, no length norm
    loss = -1/(N T) sum_b sum_t min(rho A, clip(rho, 1-eps, 1+eps) A) + beta K3,   rho = exp(logp - logp_old)
    K3 = exp(ref - logp) - (ref - logp) - 1                          ref: adapters off

N rollouts per step and T, the limit on a completion's tokens, are fixed, so that a short or dropped rollout does not change the
weight of the others. ``logp`` is at temperature 1, also if rollouts are sampled at another one. Sources: Liu et al. 2503.20783
(Dr.GRPO); Schulman, "Approximating KL divergence" (K3).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.rollouts import Policy
from mi_route2.routing import Decision, Route, StepContext, TrainBatch, group_advantages
from mi_route2.routing.routes import chunks
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.protocol import Samples, Screen, TeacherPool, TextPrompt, WeakDetector, Witness, World


@runtime_checkable
class Hyperparameters(Protocol):
    """Settings that the loop reads: those of ``settings.Settings`` that are not about a world, a warm start or an evaluation.

    They are no import, so that few modules stand behind the loop.
    """

    @property
    def steps(self) -> int: ...
    @property
    def prompts(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def none_fraction(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def updates_per_batch(self) -> int: ...
    @property
    def clip(self) -> float: ...
    @property
    def kl(self) -> float: ...
    @property
    def max_norm(self) -> float: ...
    @property
    def teachers_per_group(self) -> int: ...

    def micro_batch(self, tokens: int) -> int | None:
        """Return the number of rollouts in a micro-batch; ``None`` for all at once."""
        ...


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step.

    Attributes:
        decision: Decision of the route.
        loss: The loss; the sum of both adapters' losses, if they learn from different advantages.
        kl: Its KL term, before beta; once for every rollout, also if each adapter has a loss.
        grad_norm: Norms of both adapters' gradients before clipping; ``None`` without a gradient.
        extra: Further numbers of the route.
    """

    decision: Decision
    loss: float
    kl: float
    grad_norm: dict[str, float | None]
    extra: dict[str, float]


NO_UPDATE = Update(Decision(), 0.0, 0.0, {"kept": None, "quarantine": None}, {})


@dataclass(frozen=True)
class StepRecord:
    """Record of one step.

    Attributes:
        step: Number of the step, from 0.
        samples: All rollouts, with their texts.
        batch: The same rollouts in the same order, with rewards and advantages.
        trained: Marks the rollouts that were learned from, under a KL term all, else those of groups with reward variance;
            ``decision`` is about these alone.
        decision: Decision of the route in the step's last update.
        overlap: Cosine of the new directions with the former ones; ``None`` if they were not fitted again.
        loss: Loss of the last update; 0 if no group had a gradient.
        kl: Its KL term, before beta; ``None`` if the settings have none.
        grad_norm: Norms of both adapters' gradients before clipping.
        extra: Further numbers of the route.
    """

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


def train(
    world: World,
    witness: Witness,
    policy: Policy,
    route: Route,
    optimizer: torch.optim.AdamW,
    settings: Hyperparameters,
    *,
    seed: int,
    start: int = 0,
    teachers: TeacherPool | None = None,
    penalty: float = 0.0,
    instruct: str = "",
    screen: Screen | None = None,
) -> Iterator[StepRecord]:
    """Run GRPO from step ``start``; yield a record after each step.

    Args:
        world: Source of prompts, completions and rewards.
        witness: The oracle, which only bounds may read.
        policy: Model with both adapters.
        route: Decides what the kept adapter learns.
        optimizer: Adam over both adapters.
        settings: The loop's settings.
        seed: Seed of every draw.
        start: First step; a resumed run has finished those before.
        teachers: Known hacks, which replace some rollouts of their prompts' groups.
        penalty: Taken off the reward of rollouts in which the world's weak detector sees an exploit.
        instruct: A sentence at the end of every prompt; ``ValueError`` for a world whose prompts are no texts.
        screen: Judge of a route with ``score="judge"``.
    """
    for step in range(start, settings.steps):
        # Directions are fitted to the current policy, because as it learns, an old direction loses its meaning.
        overlap = route.refresh(policy, step)
        samples, batch = gather(world, policy, teachers, seed, step, settings, penalty, instruct)
        # A group of equal rewards has advantage 0 everywhere: without a KL term no gradient, so forward and backward are skipped.
        trained = varied(batch) if settings.kl == 0 else torch.ones_like(batch.demand("groups"), dtype=torch.bool)
        index, last = trained.nonzero()[:, 0], NO_UPDATE
        if len(index):
            learned = with_anchors(policy, batch.rows(index), settings)
            # Only bounds may see verdicts on the student's rollouts; a route that is a method raises an error if it gets any.
            verdicts = witness.privileged(samples).rows(index) if route.spec.privileged else None
            scores = None if screen is None else screen(samples.rows(index))
            micro = settings.micro_batch(learned.rollouts.tokens.shape[1])
            for i in range(settings.updates_per_batch):
                # Every draw comes from (seed, purpose, step), so a resumed run repeats an uninterrupted one.
                context = StepContext(torch_generator(seed, f"route {i}", step), micro, verdicts, scores)
                last = update(policy, route, optimizer, learned, context, settings, world.max_new)
        kl = last.kl if settings.kl > 0 else None
        yield StepRecord(step, samples, batch, trained, last.decision, overlap, last.loss, kl, last.grad_norm, last.extra)


def gather(
    world: World,
    policy: Policy,
    teachers: TeacherPool | None,
    seed: int,
    step: int,
    settings: Hyperparameters,
    penalty: float = 0.0,
    instruct: str = "",
) -> tuple[Samples, TrainBatch]:
    """Sample a batch with both adapters and grade it.

    Returns:
        The rollouts with their texts; the same with rewards, less ``penalty`` where the weak detector sees an exploit.
    """
    prompts = world.prompts(settings.prompts, numpy_generator(seed, "prompts", step), settings.none_fraction)
    if teachers is not None:  # known hacks can stand only in groups of their own prompts
        prompts = teachers.replace_known(world, prompts, numpy_generator(seed, "teacher prompts", step))
    if instruct:
        prompts = [instructed(prompt, instruct) for prompt in prompts]
    groups = torch.arange(settings.prompts).repeat_interleave(settings.group)
    with policy.adapters.full():
        repeated = [prompts[int(g)] for g in groups]
        samples = world.sample(policy, repeated, torch_generator(seed, "sample", step), settings.temperature)
    taught = torch.zeros(len(groups), dtype=torch.bool)
    if teachers is not None:
        samples, taught = teachers.mix(world, samples, groups, settings.teachers_per_group)
    device = samples.rollouts.tokens.device
    rewards, groups = world.rewards(samples).to(device), groups.to(device)
    if penalty:
        rewards = rewards - penalty * WeakDetector(world)(samples).to(rewards)
    batch = TrainBatch(samples.rollouts, rewards, group_advantages(rewards, groups), groups, taught.to(device))
    return samples, batch


def instructed(prompt: object, sentence: str) -> TextPrompt:
    """Return a prompt with a sentence behind its text; ``ValueError`` unless it is a text."""
    if not isinstance(prompt, TextPrompt):
        raise ValueError("an arm that instructs needs a chat model, because prompts of the micro world are no texts: give --model")
    return replace(prompt, text=f"{prompt.text} {sentence}")


def varied(batch: TrainBatch) -> Bool[Tensor, " b"]:
    """True for rollouts whose group has more than one reward."""
    advantages, groups = batch.demand("advantages"), batch.demand("groups")
    differing = (advantages.abs() > 1e-9).to(advantages.dtype)
    in_group = torch.zeros(int(groups.max()) + 1, dtype=differing.dtype, device=differing.device)
    return in_group.index_add_(0, groups, differing)[groups] > 0


@torch.no_grad()
def with_anchors(policy: Policy, batch: TrainBatch, settings: Hyperparameters) -> TrainBatch:
    """Add the log-probabilities that updates are clipped and penalized against, if the settings use them."""
    indices = chunks(batch, settings.micro_batch(batch.rollouts.tokens.shape[1]))  # logits of a whole batch may be too many

    def logprobs() -> Tensor:
        return torch.cat([policy.logprobs(batch.rollouts.rows(index)) for index in indices])

    old = logprobs() if settings.updates_per_batch > 1 else None
    reference = None
    if settings.kl > 0:
        with policy.adapters.reference():
            reference = logprobs()
    return replace(batch, old_logprobs=old, reference_logprobs=reference)


def update(
    policy: Policy,
    route: Route,
    optimizer: torch.optim.AdamW,
    batch: TrainBatch,
    context: StepContext,
    settings: Hyperparameters,
    length: int,
) -> Update:
    """Take one optimizer step on ``batch`` under ``route``."""
    adapters, losses, seen = policy.adapters, [], []

    # The denominator of the loss is fixed, so the losses of micro-batches add up to that of the batch.
    def loss_fn(logits: Tensor, part: TrainBatch) -> Tensor:
        loss, kl = objective(logits, part, settings, length)
        # Adapters that learn from different advantages have a loss each, of the same rollouts, whose divergence is one number.
        again = any(part.rollouts is rollouts for rollouts in seen)
        seen.append(part.rollouts)
        losses.append((float(loss.detach()), 0.0 if again else float(kl)))
        return loss

    optimizer.zero_grad(set_to_none=True)
    # The route runs forward and backward, in micro-batches, and decides which gradients reach the kept adapter.
    decision = route.backward(policy, batch, loss_fn, context, reduction="sum")
    norms = clip_gradients(policy, settings.max_norm)
    # A route may report on the update itself: Adam's momentum can bring back what was erased from the gradient.
    before = {site: adapters.scored(site).detach().clone() for site in adapters.sites}
    optimizer.step()
    moved = {site: adapters.scored(site).detach() - value for site, value in before.items()}
    loss, kl = (sum(terms) for terms in zip(*losses))
    return Update(decision, loss, kl, norms, {**decision.extra, **route.after_update(moved)})


def objective(
    logits: Float[Tensor, "b s v"], batch: TrainBatch, settings: Hyperparameters, length: int
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the loss of ``batch`` and its KL term (before beta), both over the fixed denominator; ``length`` is T in tokens."""
    scale = settings.prompts * settings.group * length
    logprobs, advantages, mask = batch.rollouts.logprobs(logits), batch.demand("advantages"), batch.rollouts.predictors
    advantages = advantages[:, None]
    # On the first update of a batch the sampling policy is the current policy: rho is 1, and its gradient is that of logp.
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(surrogate * mask).sum() / scale
    if batch.reference_logprobs is None:
        return loss, loss.new_zeros(())
    gap = (batch.reference_logprobs - logprobs) * mask
    kl = (gap.exp() - gap - 1).sum() / scale
    return loss + settings.kl * kl, kl.detach()


def clip_gradients(policy: Policy, max_norm: float) -> dict[str, float | None]:
    """Clip kept and quarantine gradients separately and return both norms.

    Clipped together, a large quarantine gradient would shrink the kept one.
    """
    norms: dict[str, float | None] = {}
    adapters = {"kept": policy.adapters.kept_parameters(), "quarantine": policy.adapters.quarantine_parameters()}
    for name, parameters in adapters.items():
        with_grad = [p for p in parameters.values() if p.grad is not None]
        norms[name] = float(torch.nn.utils.clip_grad_norm_(with_grad, max_norm)) if with_grad else None
    return norms
