"""Route, lessons, steering and optimizer of an arm, as the main loop takes them.

An arm is data (``arms.Arm``); each function here turns some of its fields into what ``grpo.train`` takes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mi_route2.architectures import config_of
from mi_route2.hosts import Host, open_host
from mi_route2.probes.probe import pool
from mi_route2.rollouts import Policy
from mi_route2.routing import (
    CanarySpec,
    EraseRoute,
    EraseSpec,
    HaarFitter,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    PersonaFitter,
    Route,
    TopKFitter,
)
from mi_route2.routing.canary import Canary, CanaryRoute
from mi_route2.routing.directions import Fitter
from mi_route2.sites import Site
from studies.common.seeds import derive, numpy_generator, torch_generator
from studies.environments.chat import ChatTokenizer
from studies.environments.judge import LMJudge
from studies.environments.protocol import Samples, TeacherPool, World
from studies.training.job import DEPLOYED, Job, build_hosted, build_pairs, load_trained
from studies.training.teacher import make_pool, teach


def build_route(job: Job, world: World, policy: Policy) -> Route:
    """Return the arm's route, with its fitter."""
    arm = job.arm
    assert arm is not None
    match arm.route:
        case MaskSpec() as spec:
            return build_mask(job, world, spec)
        case EraseSpec() as spec:
            fitter = TopKFitter("grad", build_pairs(job, world, "hack"), k=spec.k)
            return EraseRoute(spec, random_instead(job, spec, fitter))
        case CanarySpec() as spec:
            samples = base_samples(world, policy, job.drawn, job.settings.none_fraction).rollouts
            return CanaryRoute(spec, build_canary(job), samples, micro=job.settings.micro_batch(samples.tokens.shape[1]))
        case OpenSpec() as spec:
            return OpenRoute(spec, arm.l1)


def build_mask(job: Job, world: World, spec: MaskSpec) -> MaskRoute:
    """Return a mask route; its direction is fitted to the pairs, if its score is a projection on one."""
    arm = job.arm
    assert arm is not None
    fitter = None
    if spec.score in ("act", "grad", "full"):
        fitter = random_instead(job, spec, PersonaFitter("persona", spec.score, build_pairs(job, world, "hack")))
    return MaskRoute(spec, fitter, l1=arm.l1)


def random_instead(job: Job, spec: MaskSpec | EraseSpec, fitter: Fitter) -> Fitter:
    """Return ``fitter``, or for the control ``haar`` one of random directions in the space of its own."""
    return HaarFitter(fitter, derive(job.seed, "haar", spec.draw)) if spec.fitter == "haar" else fitter


def build_screen(job: Job, policy: Policy) -> LMJudge | None:
    """Return the judge of an arm that asks one: the policy's own base model.

    Raises:
        ValueError: The run has no chat model.
    """
    arm, chat = job.arm, job.settings.chat
    assert arm is not None
    if not isinstance(arm.route, MaskSpec) or arm.route.score != "judge":
        return None
    if chat is None:
        raise ValueError("an arm that asks a judge needs a chat model, because a micro model cannot read a question: give --model")
    config: Any = config_of(policy.model)
    context = config.max_position_embeddings
    return LMJudge(policy, ChatTokenizer(chat.path, ""), context=context, budget=chat.token_budget, at_once=chat.at_once)


CALIBRATION = 512
"""Samples of the base model from which a canary's threshold is computed."""


def base_samples(world: World, policy: Policy, seed: int, none_fraction: float) -> Samples:
    """Return samples of the base model on training prompts, without grades or verdicts."""
    prompts = world.prompts(CALIBRATION, numpy_generator(seed, "calibration"), none_fraction)
    with policy.adapters.reference():
        return world.sample(policy, prompts, torch_generator(seed, "calibration"), 1.0)


def build_canary(job: Job) -> Canary:
    """Return the arm's canary, on a model of its own.

    Raises:
        ValueError: A checkpoint is not finished, its weights were changed, or its base model was trained again.
    """
    assert job.arm is not None
    if missing := [canary.name for canary in job.canaries if not canary.finished]:
        raise ValueError(
            f"{job.name} needs the canaries {', '.join(missing)} of seed {job.seed} first: `run` trains them before it"
        )
    _, policy = build_hosted(job.canaries[0], job.cache)
    checkpoints = []
    for canary in job.canaries:
        load_trained(policy.adapters, canary, DEPLOYED)
        if job.arm.rotated:
            rotate(map(policy.adapters.scored, policy.adapters.sites), torch_generator(job.seed, f"rotate {canary.name}"))
        checkpoints.append({name: tensor.clone() for name, tensor in policy.adapters.tensors(quarantine=False).items()})
    return Canary(policy, checkpoints)


@torch.no_grad()
def rotate(factors: Iterable[Tensor], generator: torch.Generator) -> None:
    """Rotate the output of each factor by a random orthogonal matrix: the same norms and singular values, another direction."""
    for factor in factors:
        factor.copy_(orthogonal(len(factor), generator).to(factor.device) @ factor.double())


def orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Return a uniformly distributed orthogonal matrix of float64."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()  # the signs make the distribution uniform


def learn_lesson(job: Job, world: World, policy: Policy, teachers: TeacherPool | None) -> None:
    """Teach the quarantine (without one, the kept adapter) what the arm says, before training.

    Raises:
        ValueError: The lesson needs a teacher pool, and the settings have none.
    """
    arm, settings = job.arm, job.settings
    assert arm is not None
    if arm.taught is None:
        return
    if teachers is None:
        raise ValueError(f"{job.name} needs a teacher pool: set teachers to a positive number")
    pool = (
        teachers if arm.taught == "hacks" else make_pool(world, policy, job.seed, settings.teachers, job.tries, lesson=arm.taught)
    )
    rollouts = pool.samples(world).rollouts
    teach(policy, rollouts, settings.quarantine_lr, settings.micro_batch(rollouts.tokens.shape[1]))


@torch.no_grad()
def forget_quarantine(policy: Policy, optimizer: torch.optim.AdamW) -> None:
    """Make the quarantine add nothing, as it did at the start, and forget its moments, which would lead it back at once."""
    for name, p in policy.adapters.quarantine_parameters().items():
        if name.endswith(".B"):
            p.zero_()
        optimizer.state.pop(p, None)


@contextmanager
def steered(job: Job, world: World, host: Host, policy: Policy) -> Iterator[None]:
    """Context of training: every forward of the model runs under the arm's preventative steering, if it has any."""
    arm = job.arm
    assert arm is not None
    if not arm.steering:
        yield
        return
    layers, pairs = host.layers(), build_pairs(job, world, "hack")
    site = Site(layers[len(layers) // 2], "resid_post")
    with torch.no_grad(), policy.adapters.reference():
        hack, clean = (
            pool(host.capture([site], side.tokens, side.attention)[site], side.predictors) for side in (pairs.hack, pairs.clean)
        )
    vector = (hack - clean).mean(dim=0)
    push = arm.steering * vector
    # A hook on the modules themselves: the model samples by itself, and nnsight's edits are in its traces alone.
    modules = open_host("torch", policy.model) if job.host == "nnsight" else host
    with modules.hooks({site: lambda h: h + push.to(h)}):
        # A hook has to fire, and a run that is resumed after its last step, or stopped before one, has no forward of its own.
        with torch.no_grad(), policy.adapters.reference():
            modules.logits(pairs.hack.tokens[:1])
        yield


def build_optimizer(job: Job, policy: Policy) -> torch.optim.AdamW:
    arm, settings = job.arm, job.settings
    assert arm is not None
    groups: list[dict[str, object]] = [{"params": list(policy.adapters.kept_parameters().values()), "lr": settings.kept_lr}]
    if policy.adapters.has_quarantine:
        # In a shared basis the quarantine has the same coordinates as the kept adapter, so it has the same learning rate.
        rate = settings.kept_lr if arm.quarantine == "shared" else settings.quarantine_lr
        rate *= arm.quarantine_lr_scale
        groups.append({"params": list(policy.adapters.quarantine_parameters().values()), "lr": rate})
    return torch.optim.AdamW(groups, lr=settings.kept_lr, betas=settings.betas, weight_decay=0.0)
