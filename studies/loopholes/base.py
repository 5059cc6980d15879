"""A world: what training, evaluation and probes ask of a problem. Its abstract methods are the problem's, the others are final."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import PairBatch
from studies.loopholes.pair_files import pairs_hash
from studies.loopholes.protocol import Modes, Pair, Samples, Split, TrainingGrade
from studies.loopholes.streams import evaluation_prompts, sample_prompts


class World(ABC):
    """All that training sees: nothing here knows a verdict. ``max_new`` is the fixed length that losses are divided by."""

    modes: Modes
    max_new: int

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Any]:
        """The tasks of a split, in a fixed order; no task is in both."""

    @abstractmethod
    def prompt(self, task: Any, mode: str) -> Any:
        """The task under a mode: a ``protocol.Prompt``."""

    @abstractmethod
    def read_prompt(self, described: Mapping[str, Any]) -> Any:
        """The prompt that ``dataclasses.asdict`` described."""

    @abstractmethod
    def sample(self, policy: Policy, prompts: Sequence[Any], generator: torch.Generator, temperature: float = 1.0) -> Samples:
        """One completion a prompt from the policy as it is switched now."""

    @abstractmethod
    def package(self, prompts: Sequence[Any], completions: Sequence[Sequence[int]]) -> Samples:
        """Rollouts and texts of completions that are given as token ids, each with its end where it has one."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        """Rollouts of texts. ``ValueError`` for a text that the world's model cannot read."""

    @abstractmethod
    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as text, one by one."""

    @abstractmethod
    def grades(self, samples: Samples) -> list[TrainingGrade]:
        """What the foolable training grader says."""

    @abstractmethod
    def detect(self, samples: Samples) -> list[bool]:
        """The weak detector of the known modes: it reads text and executes nothing."""

    @abstractmethod
    def make_pairs(self, seed: int, n: int, kind: str) -> list[Pair]:
        """``n`` persona pairs of the known modes (``hack``), or pairs without a hack contrast (``nonhack``)."""

    @final
    def prompts(self, n: int, rng: np.random.Generator, none_fraction: float, modes: Sequence[str] | None = None) -> list[Any]:
        """``n`` prompts of training tasks; see ``streams.sample_prompts``."""
        return sample_prompts(self, n, rng, none_fraction, modes=modes)

    @final
    def evaluation_prompts(self, mode: str, n: int) -> list[Any]:
        """``n`` prompts of one mode over distinct test tasks, the same at every call."""
        return evaluation_prompts(self, mode, n)

    @final
    def rewards(self, samples: Samples) -> Float[Tensor, " b"]:
        """What the foolable training grader pays."""
        return torch.tensor([grade.reward for grade in self.grades(samples)])

    @final
    def encode_pairs(self, pairs: Sequence[Pair]) -> PairBatch:
        """The two sides of the pairs as aligned batches."""
        prompts = [pair.prompt for pair in pairs]
        hack, clean = (self.encode(prompts, [getattr(pair, side) for pair in pairs]) for side in ("hack", "clean"))
        return PairBatch(hack, clean, pairs_hash(pairs))
