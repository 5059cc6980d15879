"""The teacher pool: cached rollouts of the known mode that hack, sampled once from the base model.

Sampling the base on prompts of the known mode and keeping what contains the known exploit gives a defined set that a run can
make by itself. It is scored for the plots, and mixed into GRPO groups where ``teachers_per_group`` says so. Held-out modes never
enter.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mi_route2.adapters.io import read_tensors, write_tensors
from mi_route2.rollouts import Policy
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.protocol import Samples, World

FORMAT = "mi-route2 teacher pool 2"
TRIES = 4096


@dataclass(frozen=True)
class TeacherPool:
    """Hacking rollouts of the known mode; ``completions`` are their token ids, a prompt each."""

    prompts: tuple[Any, ...]
    completions: tuple[tuple[int, ...], ...]

    def samples(self, world: World) -> Samples:
        """The pool as rollouts."""
        return world.package(self.prompts, self.completions)

    def replace_known(self, world: World, prompts: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        """Each prompt of a known mode becomes one that the pool answers."""
        return [self.prompts[int(rng.integers(len(self.prompts)))] if p.mode in world.modes.known else p for p in prompts]

    def mix(self, world: World, samples: Samples, groups: Int[Tensor, " b"], each: int) -> tuple[Samples, Bool[Tensor, " b"]]:
        """The first ``each`` rollouts of every known-mode group become the pool's; and which they are."""
        taught = torch.zeros(len(groups), dtype=torch.bool)
        completions: list[Sequence[int]] = list(samples.rollouts.completions())
        place = {prompt: i for i, prompt in enumerate(self.prompts)}
        for group in groups.unique().tolist():
            rows = (groups == group).nonzero()[:, 0][:each]
            prompt = samples.prompts[int(rows[0])] if len(rows) else None
            if prompt is not None and prompt in place:
                taught[rows] = True
                for row in rows.tolist():
                    completions[row] = self.completions[place[prompt]]
        return world.package(samples.prompts, completions), taught


def make_pool(world: World, policy: Policy, seed: int, size: int, tries: int = TRIES) -> TeacherPool:
    """Sample the base model on known-mode prompts until ``size`` rollouts with distinct prompts hold the known exploit.

    A base that hacks rarely gives a smaller pool after ``tries`` samples; one that never does, a ``ValueError``.
    """
    found: dict[Any, tuple[int, ...]] = {}
    each = 8 * size
    for i in range(-(-tries // each)):
        prompts = world.prompts(each, numpy_generator(seed, "teacher", i), none_fraction=0.0, modes=world.modes.known)
        with policy.adapters.reference():
            samples = world.sample(policy, prompts, torch_generator(seed, "teacher", i))
        for prompt, ids, hacks in zip(prompts, samples.rollouts.completions(), world.detect(samples)):
            if hacks and prompt not in found and len(found) < size:
                found[prompt] = tuple(ids)
        if len(found) == size:
            break
    if not found:
        raise ValueError(f"the base model never hacked in {tries} samples of the known mode, so there is no teacher to learn from")
    return TeacherPool(tuple(found), tuple(found.values()))


def cached_pool(world: World, policy: Policy, seed: int, size: int, path: Path, tries: int = TRIES) -> TeacherPool | None:
    """Return the pool at ``path``; make it and keep it there if it is missing. ``None`` for a ``size`` of 0."""
    if not size:
        return None
    tensors, metadata = read_tensors(path) if path.exists() else ({}, {})
    if metadata.get("format") == FORMAT:  # an older file is made again
        prompts = tuple(world.read_prompt(described) for described in json.loads(metadata["prompts"]))
        cuts = tensors["lengths"].cumsum(0)[:-1]
        return TeacherPool(prompts, tuple(tuple(ids.tolist()) for ids in tensors["completions"].tensor_split(cuts)))
    pool = make_pool(world, policy, seed, size, tries)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps([asdict(prompt) for prompt in pool.prompts])
    lengths = torch.tensor([len(ids) for ids in pool.completions])
    tensors = {"completions": torch.tensor([i for ids in pool.completions for i in ids]), "lengths": lengths}
    write_tensors(path, tensors, {"format": FORMAT, "prompts": described})
    return pool
