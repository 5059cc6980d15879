"""The teacher pool: cached rollouts of the known mode that hack, sampled once from the base model.

Sampling the base on prompts of the known mode and keeping what contains the known exploit gives a defined set that a run can
make by itself. It is scored for the plots, and mixed into GRPO groups where ``teachers_per_group`` says so. Held-out modes never
enter.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mi_route2.adapters.store import read_tensors, write_tensors
from mi_route2.rollouts import Policy
from studies.loopholes.modes import KNOWN
from studies.loopholes.oracle import known_detector
from studies.loopholes.prompts import Prompt, encode_prompts, sample_prompts
from studies.loopholes.tasks import Task
from studies.loopholes.world import MicroWorld, Samples
from studies.route2.randomness import numpy_generator, torch_generator


@dataclass(frozen=True)
class TeacherPool:
    """Hacking rollouts of the known mode; ``completions [n, t]`` are token ids, a prompt each."""

    prompts: tuple[Prompt, ...]
    encoded: Int[Tensor, "n p"]
    completions: Int[Tensor, "n t"]

    def samples(self, world: MicroWorld) -> Samples:
        """The pool as rollouts."""
        return world.package(self.prompts, self.encoded, self.completions)

    def replace_known(self, prompts: Sequence[Prompt], rng: np.random.Generator) -> list[Prompt]:
        """Each prompt of a known mode becomes one that the pool answers."""
        return [self.prompts[int(rng.integers(len(self.prompts)))] if p.mode in KNOWN else p for p in prompts]

    def mix(self, world: MicroWorld, samples: Samples, groups: Int[Tensor, " b"], each: int) -> tuple[Samples, Bool[Tensor, " b"]]:
        """The first ``each`` rollouts of every known-mode group become the pool's; and which they are."""
        taught = torch.zeros(len(groups), dtype=torch.bool)
        width = max(self.completions.shape[1], samples.rollouts.tokens.shape[1] - self.encoded.shape[1])
        eos = world.vocabulary.eos
        encoded = encode_prompts(samples.prompts, world.vocabulary)
        completions = torch.full((len(groups), width), eos)
        own = samples.rollouts.tokens[:, encoded.shape[1] :]
        completions[:, : own.shape[1]] = own
        place = {prompt: i for i, prompt in enumerate(self.prompts)}
        for group in groups.unique().tolist():
            rows = (groups == group).nonzero()[:, 0][:each]
            prompt = samples.prompts[int(rows[0])] if len(rows) else None
            if prompt is not None and prompt in place:
                completions[rows] = eos
                completions[rows, : self.completions.shape[1]] = self.completions[place[prompt]]
                taught[rows] = True
        return world.package(samples.prompts, encoded, completions), taught


def make_pool(world: MicroWorld, policy: Policy, seed: int, size: int, rounds: int = 16) -> TeacherPool:
    """Sample the base model on known-mode prompts until ``size`` rollouts with distinct prompts hold the known exploit.

    A base that hacks rarely gives a smaller pool; one that never does in ``rounds * 256`` samples, a ``ValueError``.
    """
    found: dict[Prompt, Tensor] = {}
    eos = world.vocabulary.eos
    for i in range(rounds):
        prompts = sample_prompts(256, numpy_generator(seed, "teacher", i), none_fraction=0.0, modes=KNOWN)
        with policy.adapters.reference():
            texts = world.sample(policy, prompts, torch_generator(seed, "teacher", i)).completions
        for prompt, text, hacks in zip(prompts, texts, known_detector(prompts, texts)):
            if hacks and prompt not in found and len(found) < size:
                ids = world.vocabulary.encode_completion(text)[: world.max_new]
                found[prompt] = torch.tensor(ids + [eos] * (world.max_new - len(ids)))
        if len(found) == size:
            break
    if not found:
        raise ValueError(
            f"the base model never hacked in {rounds * 256} samples of the known mode, so there is no teacher to learn from"
        )
    return TeacherPool(tuple(found), encode_prompts(list(found), world.vocabulary), torch.stack(list(found.values())))


def cached_pool(world: MicroWorld, policy: Policy, seed: int, size: int, path: Path) -> TeacherPool:
    """The pool at ``path``, made and kept there where it is missing."""
    if path.exists():
        tensors, metadata = read_tensors(path)
        prompts = tuple(Prompt(Task(**p["task"]), p["mode"]) for p in json.loads(metadata["prompts"]))
        return TeacherPool(prompts, encode_prompts(prompts, world.vocabulary), tensors["completions"])
    pool = make_pool(world, policy, seed, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps([asdict(prompt) for prompt in pool.prompts])
    write_tensors(path, {"completions": pool.completions}, {"format": "mi-route2 teacher pool 1", "prompts": described})
    return pool
