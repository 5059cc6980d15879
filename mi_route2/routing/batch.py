"""What may reach the loss and the route. No field here comes from the oracle; that is the no-cheat rule made structural.

``Privileged`` is the one marked type that carries detector verdicts over the student's rollouts. Only routes whose spec says
``privileged`` accept it: the oracle bounds and the known-mode filter baseline.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor

from mi_route2.checks import as_mask, checked, demand_finite
from mi_route2.rollouts import Rollouts


@checked
@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with their training rewards. ``groups`` numbers the prompt that each rollout answers.

    ``old_logprobs`` are the sampling policy's (for the clip), ``reference_logprobs`` the base model's (for the KL), each if the
    loss asks for it; ``teacher`` marks cached rollouts of known modes, in booleans or 0 and 1. Plain, not ``validated``: shapes are
    jaxtyping's to check. ``ValueError`` for NaN and infinity, an empty batch and
    lengths that differ.
    """

    rollouts: Rollouts
    rewards: Float[Tensor, " b"]
    advantages: Float[Tensor, " b"]
    groups: Int[Tensor, " b"]
    teacher: Bool[Tensor, " b"] | Integer[Tensor, " b"]
    old_logprobs: Float[Tensor, "b s"] | None = None
    reference_logprobs: Float[Tensor, "b s"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "teacher", as_mask("teacher", self.teacher))
        if not len(self.rewards):
            raise ValueError("a batch without rollouts has no rollouts to learn from: leave the step out")
        if len(self.rewards) != len(self.rollouts):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.rollouts)} rollouts: give one a rollout")
        for name in ("rewards", "advantages", "old_logprobs", "reference_logprobs"):
            demand_finite(name, given := getattr(self, name))
            if name.endswith("logprobs") and given is not None and given.shape != (size := self.rollouts.tokens.shape):
                raise ValueError(
                    f"{name} is {list(given.shape)} and the tokens {list(size)}: give one a token, 0 where none is predicted"
                )

    @checked
    def rows(self, index: Shaped[Tensor, " n"]) -> "TrainBatch":
        """The rollouts at ``index``."""

        def take(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[index]

        return TrainBatch(
            self.rollouts.rows(index),
            self.rewards[index],
            self.advantages[index],
            self.groups[index],
            self.teacher[index],
            take(self.old_logprobs),
            take(self.reference_logprobs),
        )


@dataclass(frozen=True)
class Privileged:
    """Detector verdicts over the student's rollouts: the rollout's own channel fired; the known mode's exploit is present."""

    own_channel: Bool[Tensor, " b"]
    known_channel: Bool[Tensor, " b"]

    def rows(self, index: Tensor) -> "Privileged":
        """The verdicts on the rollouts at ``index``, on its device."""
        return Privileged(self.own_channel.to(index.device)[index], self.known_channel.to(index.device)[index])


@checked
def group_advantages(
    rewards: Float[Tensor, " b"], groups: Int[Tensor, " b"], counted: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, " b"]:
    """Dr.GRPO: ``A = R - mean(R over the group)``, the mean over ``counted`` rollouts only; 0 where none is counted."""
    if not len(rewards):
        raise ValueError("no rewards, no advantages: there are no rollouts in this batch")
    demand_finite("rewards", rewards)
    weight = torch.ones_like(rewards) if counted is None else counted.to(rewards.dtype)
    _, index = groups.unique(return_inverse=True)
    size = int(index.max()) + 1
    total = rewards.new_zeros(size).index_add_(0, index, rewards * weight)
    count = rewards.new_zeros(size).index_add_(0, index, weight)
    advantage = rewards - (total / count.clamp_min(1))[index]
    return torch.where(count[index] > 0, advantage, torch.zeros_like(advantage))
