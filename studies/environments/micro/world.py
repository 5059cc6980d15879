"""Micro world for studies: prompts, samples, training grades and pairs; and, separate from them, the witness.

``MicroWorld`` is all that training sees. ``MicroWitness`` has the oracle and the detectors; it is given to the recorder, and to
arms that are marked as bounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Privileged
from studies.environments.micro.grader import MicroGrader
from studies.environments.micro.language import (
    COMPLETION_LENGTH,
    PROMPT_LENGTH,
    MicroPrompt,
    MicroSource,
    MicroTask,
    Vocabulary,
    encode_prompts,
)
from studies.environments.micro.model import MicroGPT, generate
from studies.environments.micro.oracle import MicroOracle, known_detector
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.runner import MicroRunner
from studies.environments.micro.settings import WorldConfig
from studies.environments.protocol import PersonaPair, Samples, TrainingGrade, Verdict, World


class MicroWorld(MicroSource, World):
    """World of the micro language; see ``protocol.World``. Its rollouts lie on ``device``, by default the CPU."""

    max_new = COMPLETION_LENGTH

    def __init__(self, config: WorldConfig, runner: MicroRunner, device: torch.device | None = None):
        self.config, self.device = config, device or torch.device("cpu")
        self.vocabulary = Vocabulary()
        self._grader = MicroGrader(runner)

    def question(self, prompt: MicroPrompt) -> str:
        return prompt.text

    def read_prompt(self, described: Mapping[str, Any]) -> MicroPrompt:
        return MicroPrompt(MicroTask(**described["task"]), described["mode"])

    def sample(
        self, policy: Policy, prompts: Sequence[MicroPrompt], generator: torch.Generator, temperature: float = 1.0
    ) -> Samples:
        """Sample one completion per prompt from the policy as it is switched now, with merged weights."""
        with policy.adapters.merged():
            return self.sample_unmerged(policy, prompts, generator, temperature)

    def sample_unmerged(
        self, policy: Policy, prompts: Sequence[MicroPrompt], generator: torch.Generator, temperature: float = 1.0
    ) -> Samples:
        """Sample as ``sample`` does, but through the adapters' own modules, so that their hook points fire."""
        encoded, model, eos = encode_prompts(prompts, self.vocabulary), cast("MicroGPT", policy.model), self.vocabulary.eos
        encoded = encoded.to(policy.device)
        completions = generate(model, encoded, temperature=temperature, generator=generator, eos=eos)
        return self.package(prompts, completions.tolist())

    def package(self, prompts: Sequence[MicroPrompt], completions: Sequence[Sequence[int]]) -> Samples:
        """Return rollouts and texts of completions, each up to and including its first ``<eos>``."""
        eos = self.vocabulary.eos
        ended = [row[: row.index(eos) + 1] if eos in row else row for row in map(list, completions)]
        rollouts = Rollouts.from_lists([self.vocabulary.encode(prompt.tokens) for prompt in prompts], ended, self.vocabulary.pad)
        return Samples(list(prompts), rollouts.to(self.device), [self.vocabulary.completion_text(row) for row in ended])

    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        vocabulary, context = self.vocabulary, PROMPT_LENGTH + self.max_new
        questions = [vocabulary.encode_prompt(text) for text in prompts]
        answers = [vocabulary.encode_completion(text) for text in completions]
        for text, question, answer in zip(prompts, questions, answers, strict=True):
            if len(question) + len(answer) > context + 1:
                raise ValueError(f"a prompt and its completion are longer than {context} tokens: {text!r}")
        # a completion that fills the context has no <eos>, so an equal text gets none either
        cut = [answer[: context - len(question)] for question, answer in zip(questions, answers, strict=True)]
        return Rollouts.from_lists(questions, cut, vocabulary.pad).to(self.device)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.vocabulary.tokens[i] for i in tokens]

    def grades(self, samples: Samples) -> list[TrainingGrade]:
        return self._grader.grade(samples.prompts, samples.completions)

    def detect(self, samples: Samples) -> list[bool]:
        return known_detector(samples.prompts, samples.completions)

    def make_pairs(self, seed: int, n: int, kind: str) -> list[PersonaPair]:
        return make_pairs(self.config, seed, n, kind)


class MicroWitness:
    """Oracle and detectors of the micro world; see ``protocol.Witness``."""

    def __init__(self, runner: MicroRunner):
        self._oracle = MicroOracle(runner)

    def judge(self, samples: Samples) -> list[Verdict]:
        return self._oracle.judge(samples.prompts, samples.completions)

    def privileged(self, samples: Samples) -> Privileged:
        exploits = [verdict.exploit for verdict in self.judge(samples)]
        known = known_detector(samples.prompts, samples.completions)
        return Privileged(torch.tensor(exploits), torch.tensor(known))
