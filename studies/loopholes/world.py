"""The micro world as a study meets it: prompts, samples, training grades, pairs; and, apart from them, the witness.

``MicroWorld`` is all that training sees. ``Witness`` holds the oracle and the detectors; it belongs to the recorder, and to the
arms that are marked as bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import PairBatch, Privileged
from studies.loopholes.grader import TrainingGrade, TrainingGrader
from studies.loopholes.oracle import Oracle, Verdict, known_detector
from studies.loopholes.pairs import Pair, make_pairs, pairs_hash
from studies.loopholes.presets import WorldConfig
from studies.loopholes.prompts import Prompt, encode_prompts, sample_prompts
from studies.loopholes.runner import Runner
from studies.loopholes.sampling import generate
from studies.loopholes.vocabulary import COMPLETION_LENGTH, Vocabulary


@dataclass(frozen=True)
class Samples:
    """Completions of prompts: the rollouts that a policy is trained on and the texts that graders read."""

    prompts: list[Prompt]
    rollouts: Rollouts
    completions: list[str]


class MicroWorld:
    """Prompts in, samples and rewards out. ``max_new`` is the fixed length that losses are divided by."""

    max_new = COMPLETION_LENGTH

    def __init__(self, config: WorldConfig, runner: Runner):
        self.config = config
        self.vocabulary = Vocabulary()
        self._grader = TrainingGrader(runner)

    def prompts(self, n: int, rng: np.random.Generator, none_fraction: float) -> list[Prompt]:
        """``n`` prompts of training tasks."""
        return sample_prompts(n, rng, none_fraction)

    def sample(self, policy: Policy, prompts: Sequence[Prompt], generator: torch.Generator, temperature: float = 1.0) -> Samples:
        """One completion a prompt from the policy as it is switched now, by merged weights."""
        encoded = encode_prompts(prompts, self.vocabulary)
        with policy.adapters.merged():
            completions = generate(
                policy.model,  # pyright: ignore[reportArgumentType]
                encoded,
                temperature=temperature,
                generator=generator,
                eos=self.vocabulary.eos,
            )
        return self.package(prompts, encoded, completions)

    def package(self, prompts: Sequence[Prompt], encoded: Int[Tensor, "b p"], completions: Int[Tensor, "b n"]) -> Samples:
        """Rollouts (each completion up to and with its first ``<eos>``) and texts."""
        ended = (completions == self.vocabulary.eos).cumsum(1)
        real: Bool[Tensor, "b n"] = (ended - (completions == self.vocabulary.eos).long()) == 0
        width = int(real.sum(1).max())
        tokens = torch.cat((encoded, completions[:, :width]), dim=1)
        prompt = torch.ones_like(encoded, dtype=torch.bool)
        rollouts = Rollouts(
            tokens, torch.cat((prompt, real[:, :width]), dim=1), torch.cat((torch.zeros_like(prompt), real[:, :width]), dim=1)
        )
        return Samples(list(prompts), rollouts, [self.vocabulary.completion_text(row) for row in completions])

    def grades(self, samples: Samples) -> list[TrainingGrade]:
        """What the foolable training grader says."""
        return self._grader.grade(samples.prompts, samples.completions)

    def rewards(self, samples: Samples) -> Float[Tensor, " b"]:
        """What the foolable training grader pays."""
        return torch.tensor([grade.reward for grade in self.grades(samples)])

    def make_pairs(self, seed: int, n: int, kind: str) -> list[Pair]:
        """``n`` persona pairs of the known mode (``hack``), or pairs without a hack contrast (``nonhack``)."""
        return make_pairs(self.config, seed, n, kind)

    def encode_pairs(self, pairs: Sequence[Pair]) -> PairBatch:
        """The two sides of the pairs as aligned batches."""
        prompts = [self.vocabulary.encode_prompt(pair.prompt) for pair in pairs]

        def side(texts: list[str]) -> Rollouts:
            return Rollouts.from_lists(prompts, [self.vocabulary.encode_completion(t) for t in texts], self.vocabulary.pad)

        return PairBatch(side([p.hack for p in pairs]), side([p.clean for p in pairs]), pairs_hash(pairs))


class Witness:
    """The oracle and the detectors: for records, and for arms that are marked as bounds. Never handed to a method."""

    def __init__(self, runner: Runner):
        self._oracle = Oracle(runner)

    def judge(self, samples: Samples) -> list[Verdict]:
        """What really happened, on hidden inputs."""
        return self._oracle.judge(samples.prompts, samples.completions)

    def privileged(self, samples: Samples) -> Privileged:
        """The marked type that a bound's route reads."""
        own = [verdict.exploit for verdict in self.judge(samples)]
        known = known_detector(samples.prompts, samples.completions)
        return Privileged(torch.tensor(own), torch.tensor(known))
