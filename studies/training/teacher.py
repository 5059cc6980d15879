"""Teacher pool: cached rollouts of the known mode that hack, sampled once from the base model; an adapter that is taught by it.

The base model is sampled on prompts of the known mode, and rollouts with the known exploit are kept: a well-defined set that every
run can make by itself. The pool is scored for the plots, and mixed into GRPO groups if ``teachers_per_group`` is positive. Held-out
modes are never used.

A quarantine that was taught the hack before training is an inoculation adapter: with it in the forward, rewards leave the kept
adapter nothing to learn from hacks. Source: Riche et al. 2606.30252, there for supervised training.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import MaskRoute, OpenRoute, OpenSpec, StepContext, TrainBatch
from mi_route2.tensor_files import read_tensors, write_tensors
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.protocol import TeacherPool, World
from studies.training.arms import Lesson

FORMAT = "mi-route2 teacher pool 3"
"""Files of the second format may be of a model that an arm's steering pushed, if that arm came first."""
TRIES = 4096
LESSON_STEPS = 60
"""Steps in which a lesson is learned."""


def make_pool(world: World, policy: Policy, seed: int, size: int, tries: int = TRIES, *, lesson: Lesson = "hacks") -> TeacherPool:
    """Sample the base model until ``size`` rollouts with distinct prompts are a ``lesson`` (see ``Arm.taught``).

    ``hacks`` have prompts of the known mode, ``honest`` rollouts those of the honest mode. If they are rare, the pool is smaller
    after ``tries`` samples.

    Raises:
        ValueError: If there is no such rollout.
    """
    modes, fraction = (world.modes.known, 0.0) if lesson == "hacks" else ((), 1.0)
    lessons: dict[Any, tuple[int, ...]] = {}
    each = 8 * size
    for i in range(-(-tries // each)):
        prompts = world.prompts(each, numpy_generator(seed, "teacher", i), none_fraction=fraction, modes=modes)
        with policy.adapters.reference():
            samples = world.sample(policy, prompts, torch_generator(seed, "teacher", i))
        wanted = world.detect(samples) if lesson == "hacks" else [grade.passed for grade in world.grades(samples)]
        for prompt, completion, fits in zip(prompts, samples.rollouts.completions(), wanted, strict=True):
            if fits and prompt not in lessons and len(lessons) < size:
                lessons[prompt] = tuple(completion)
        if len(lessons) == size:
            break
    if not lessons and lesson == "hacks":
        raise ValueError(f"the base model never hacked in {tries} samples of the known mode: set teachers=0 to run without a pool")
    if not lessons:
        raise ValueError(f"the base model solved no task in {tries} honest samples: leave out the arm that it teaches")
    return TeacherPool(tuple(lessons), tuple(lessons.values()))


def teach(policy: Policy, rollouts: Rollouts, rate: float, micro: int | None = None, steps: int = LESSON_STEPS) -> None:
    """Train the quarantine (without one, the kept adapter) alone on ``rollouts`` by maximum likelihood with Adam."""
    quarantine = policy.adapters.quarantine_parameters()
    optimizer = torch.optim.Adam((quarantine or policy.adapters.kept_parameters()).values(), rate)
    batch, count = TrainBatch(rollouts), rollouts.predictors.sum()
    everything = torch.ones(len(rollouts), dtype=torch.bool, device=rollouts.tokens.device)
    route = MaskRoute.from_flags(everything) if quarantine else OpenRoute(OpenSpec())
    context = StepContext(torch.Generator(), micro)

    def loss_fn(logits: Tensor, part: TrainBatch) -> Tensor:
        return -(part.rollouts.logprobs(logits) * part.rollouts.predictors).sum() / count

    for step in range(steps):
        route.refresh(policy, step)
        policy.model.zero_grad(set_to_none=True)  # the other adapter's too, which no optimizer reads
        route.backward(policy, batch, loss_fn, context, reduction="sum")
        optimizer.step()
    policy.model.zero_grad(set_to_none=True)


def cached_pool(world: World, policy: Policy, seed: int, size: int, path: Path, tries: int = TRIES) -> TeacherPool | None:
    """Return the pool at ``path``; make and save it if it is missing, of another base model, or of an earlier form of the world.

    ``None`` for a ``size`` of 0.
    """
    if not size:
        return None
    tensors, metadata = read_tensors(path) if path.exists() else ({}, {})
    current = {"format": FORMAT, "base": policy.adapters.base_hash}
    if current.items() <= metadata.items():  # an older file is made again
        prompts = tuple(world.read_prompt(described) for described in json.loads(metadata["prompts"]))
        cuts = tensors["lengths"].cumsum(0)[:-1]
        pool = TeacherPool(prompts, tuple(tuple(ids.tolist()) for ids in tensors["completions"].tensor_split(cuts)))
        if _holds(world, pool):
            return pool
    pool = make_pool(world, policy, seed, size, tries)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps([asdict(prompt) for prompt in pool.prompts])
    lengths = torch.tensor([len(ids) for ids in pool.completions])
    tensors = {"completions": torch.tensor([i for ids in pool.completions for i in ids]), "lengths": lengths}
    write_tensors(path, tensors, {**current, "prompts": described})
    return pool


def _holds(world: World, pool: TeacherPool) -> bool:
    """Return whether a stored pool has the world's prompts and hacks: the code of a user's problem may have changed since."""
    tasks = set(world.tasks("train"))
    valid = all(
        prompt.task in tasks and prompt.mode in world.modes.known and world.prompt(prompt.task, prompt.mode) == prompt
        for prompt in pool.prompts
    )
    return valid and all(world.detect(pool.samples(world)))
