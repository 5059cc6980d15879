"""Training batch: everything that the loss and the route may see.

No field comes from the oracle, so a method cannot cheat. ``Privileged`` is the one marked type that carries detector verdicts over
the student's rollouts. Only routes whose spec is ``privileged`` accept it: the oracle bounds and the known-mode filter baseline.
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
    """Rollouts with their training rewards.

    A plain dataclass and not a ``validated`` one, because jaxtyping checks the shapes.

    Attributes:
        rollouts: The rollouts.
        rewards: One reward per rollout.
        advantages: One advantage per rollout.
        groups: Number of the prompt that each rollout answers.
        teacher: True for cached rollouts of known modes (booleans, or 0 and 1).
        old_logprobs: Log-probabilities under the sampling policy, if the loss clips.
        reference_logprobs: Log-probabilities under the base model, if the loss has a KL term.

    Raises:
        ValueError: NaN or infinity, an empty batch, or lengths that differ.

    Examples:
        >>> teacher = torch.zeros(len(rewards), dtype=torch.bool)
        >>> batch = TrainBatch(rollouts, rewards, rewards - rewards.mean(), groups=torch.arange(len(rewards)) // 2, teacher=teacher)
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
            raise ValueError("the batch has no rollouts: skip the step")
        if len(self.rewards) != len(self.rollouts):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.rollouts)} rollouts: give one per rollout")
        for name in ("rewards", "advantages", "old_logprobs", "reference_logprobs"):
            demand_finite(name, given := getattr(self, name))
            if name.endswith("logprobs") and given is not None and given.shape != (size := self.rollouts.tokens.shape):
                raise ValueError(
                    f"{name} is {list(given.shape)} and the tokens {list(size)}: give one per token, 0 if it predicts nothing"
                )

    @checked
    def rows(self, index: Shaped[Tensor, " n"]) -> "TrainBatch":
        """Return the rollouts at ``index``."""

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
    """Detector verdicts over the student's rollouts.

    Attributes:
        own_channel: True if the rollout's own channel fired.
        known_channel: True if the exploit of the known mode is present.
    """

    own_channel: Bool[Tensor, " b"]
    known_channel: Bool[Tensor, " b"]

    def rows(self, index: Tensor) -> "Privileged":
        """Return the verdicts on the rollouts at ``index``, on its device."""
        return Privileged(self.own_channel.to(index.device)[index], self.known_channel.to(index.device)[index])


@checked
def group_advantages(
    rewards: Float[Tensor, " b"], groups: Int[Tensor, " b"], counted: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, " b"]:
    """Return the advantages of Dr.GRPO: ``A = R - mean(R over the group)``.

    Args:
        rewards: Rewards R.
        groups: Number of the group of each rollout.
        counted: Rollouts that count in the mean, all if not given; advantages are 0 in a group without any.

    Raises:
        ValueError: No rollouts, or a reward that is NaN or infinite.
    """
    if not len(rewards):
        raise ValueError("there are no rewards: the batch has no rollouts")
    demand_finite("rewards", rewards)
    weight = torch.ones_like(rewards) if counted is None else counted.to(rewards.dtype)
    _, index = groups.unique(return_inverse=True)
    size = int(index.max()) + 1
    total = rewards.new_zeros(size).index_add_(0, index, rewards * weight)
    count = rewards.new_zeros(size).index_add_(0, index, weight)
    advantage = rewards - (total / count.clamp_min(1))[index]
    return torch.where(count[index] > 0, advantage, torch.zeros_like(advantage))
