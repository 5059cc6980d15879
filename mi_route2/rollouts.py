"""Batch of rollouts, the policy that computes their log-probabilities, and the batch that a loss and a route see.

Position ``t`` *predicts* token ``t + 1``. The predictors of a completion run from the last prompt token to the last but one token
of the completion: activations are pooled and log-probabilities are read at these positions.

``TrainBatch`` is everything that the loss and the route may see. No field comes from the oracle, so a method cannot cheat.
``Privileged`` is the one marked type that carries detector verdicts over the student's rollouts. Only routes whose spec is
``privileged`` accept it: the oracle bounds and the known-mode filter baseline.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.gradients import wide
from mi_route2.architectures import CAUSAL, architecture_of, config_of, unwrapped
from mi_route2.checks import Mask, as_mask, checked, demand_finite, token_row

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]


@checked
@dataclass(frozen=True)
class Rollouts:
    """Batch of token sequences with two masks: real tokens (``attention``) and completion tokens (``completion``).

    Masks of 0 and 1, as tokenizers return them, are converted to booleans. jaxtyping checks the shapes, so this is a plain
    dataclass and not a ``validated`` one.

    Raises:
        ValueError: A mask has other numbers, or a completion token lies on padding, or follows it (a rollout without a prompt, or
            padding between prompt and completion).

    Examples:
        >>> rollouts = Rollouts.from_lists([[3, 4], [5]], [[7, 8], [9]], pad=0)
        >>> rollouts.tokens.shape
        torch.Size([2, 4])
    """

    tokens: Int[Tensor, "b s"]
    attention: Mask
    completion: Mask

    def __post_init__(self) -> None:
        for name in ("attention", "completion"):
            object.__setattr__(self, name, as_mask(name, getattr(self, name)))
        if bool((self.completion & ~self.attention).any()):
            raise ValueError("a completion token lies on padding: completion must be a subset of attention")
        if not self.tokens.shape[1]:
            raise ValueError("the rollouts have no tokens: a rollout needs at least one prompt token and one of a completion")
        if bool(self.completion[:, 0].any()):
            raise ValueError("the first token has no predictor: a rollout needs at least one prompt token")
        if bool((follows := self.predictors & ~self.attention).any()):
            raise ValueError(
                f"in rollout {int(follows.nonzero()[0, 0])} a completion follows padding, from which its first token would be "
                "predicted: put the padding left of the prompt or right of the completion, and give each rollout a prompt"
            )

    @property
    def predictors(self) -> Bool[Tensor, "b s"]:
        """Mask of the positions that predict a completion token."""
        shifted = torch.zeros_like(self.completion)
        shifted[:, :-1] = self.completion[:, 1:]
        return shifted

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @checked
    def logprobs(self, logits: Float[Tensor, "b s v"]) -> Float[Tensor, "b s"]:
        """Return the log-probability of token ``t + 1`` at position ``t`` under ``logits``; 0 if ``t`` is not a predictor."""
        if logits.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"logits are {list(logits.shape)} and the tokens {list(self.tokens.shape)}: give the logits of these rollouts"
            )
        logits = logits[:, :-1].to(wide(logits.dtype))
        tokens = self.tokens.clone() if self.tokens.is_inference() else self.tokens  # of inference mode no backward saves them
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        chosen = torch.nn.functional.pad(chosen, (0, 1))
        # torch.where and not a product, because -inf on padding times 0 would be NaN
        return torch.where(self.predictors, chosen, torch.zeros_like(chosen))

    def completions(self) -> list[list[int]]:
        """Return the token ids of each completion."""
        return [row[mask].tolist() for row, mask in zip(self.tokens, self.completion)]

    def to(self, device: torch.device) -> "Rollouts":
        """Return a copy on ``device``."""
        return Rollouts(self.tokens.to(device), self.attention.to(device), self.completion.to(device))

    @checked
    def rows(self, index: Shaped[Tensor, " n"]) -> "Rollouts":
        """Return the rollouts at ``index`` (integers or a boolean mask)."""
        demand_rows(index, len(self))
        return Rollouts(self.tokens[index], self.attention[index], self.completion[index])

    @staticmethod
    @checked
    def from_lists(prompts: Collection[Any], completions: Collection[Any], pad: int) -> "Rollouts":
        """Build right-padded rollouts from lists of token ids.

        Args:
            prompts: One non-empty list of token ids per rollout.
            completions: One non-empty list of token ids per rollout.
            pad: Token id of the padding.

        Raises:
            ValueError: Different numbers of prompts and completions, no rollout at all, or an empty prompt or completion.
            TypeError: A row is not a list of whole numbers.
        """
        if len(prompts) != len(completions) or not len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: give one each per rollout, at least one")
        rows = [(token_row("a prompt", p), token_row("a completion", c)) for p, c in zip(prompts, completions)]
        if empty := [row for row, (_, c) in enumerate(rows) if not c]:
            raise ValueError(f"rollout {empty[0]} has no completion token: there is nothing to learn from, leave it out")
        width = max(len(p) + len(c) for p, c in rows)
        tokens = torch.full((len(rows), width), pad)
        attention = torch.zeros(len(rows), width, dtype=torch.bool)
        completion = torch.zeros_like(attention)
        for row, (p, c) in enumerate(rows):
            tokens[row, : len(p) + len(c)] = torch.tensor([*p, *c])
            attention[row, : len(p) + len(c)] = True
            completion[row, len(p) : len(p) + len(c)] = True
        return Rollouts(tokens, attention, completion)


def demand_rows(index: Tensor, count: int) -> None:
    """Raise ``IndexError`` if ``index`` does not select among ``count`` rollouts."""
    if index.dtype == torch.bool:
        fits = len(index) == count
    else:
        fits = not index.is_floating_point() and not bool(((index < -count) | (index >= count)).any())
    if not fits:
        raise IndexError(f"index chooses among {count} rollouts: give whole numbers of 0..{count - 1}, or a boolean for each")


def vocabulary(model: nn.Module) -> int | None:
    """Return the model's vocabulary size; ``None`` if its config does not state it."""
    config = config_of(model)
    sizes = (getattr(config, name, None) for name in ("vocab_size", "d_vocab", "vocab"))
    return next((size for size in sizes if isinstance(size, int)), None)


def demand_tokens(model: nn.Module, tokens: Tensor, attention: Tensor | None = None) -> None:
    """Raise ``ValueError`` for a token id that the model lacks, padding included, of a type for no embedding, or without a place.

    On a GPU such an id, or a place behind the table of learned positions, would end the process with a device-side assertion.
    """
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token ids are {tokens.dtype}, which no embedding takes: give .long() of them")
    size = vocabulary(model)
    if size is not None and bool((wrong := (tokens < 0) | (tokens >= size)).any()):
        token = tokens[wrong][0].item()
        raise ValueError(f"{token} is not a token of this model, which padding must be too: the vocabulary is 0..{size - 1}")
    plain = getattr(model, "original_model", model)  # a bridge has no row
    row = architecture_of(plain)
    if row is None or row.table is None or tokens.shape[1] <= (learned := getattr(config_of(plain), row.table)):
        return
    if (longest := tokens.shape[1] if attention is None else int(attention.sum(1).max())) > learned:
        raise ValueError(f"a row has {longest} tokens, and this model learned positions for {learned}: shorten it")


def positions(model: nn.Module, attention: Bool[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Return the position of each real token among the real ones; 0 on padding.

    Raises:
        ValueError: Padding stands between the tokens of a row, and the model has a sliding window that would count it.
    """
    if (reach := _counted(config_of(model))) is not None:
        column = torch.arange(attention.shape[1], device=attention.device)
        first, last = torch.where(attention, column, attention.shape[1]).amin(1), torch.where(attention, column, -1).amax(1)
        span = (last - first + 1).clamp_min(0)
        if bool((wrong := (span > reach) & (span > attention.sum(1))).any()):
            raise ValueError(
                f"row {int(wrong.nonzero()[0])} has padding between its tokens, which layers of this model would count as tokens "
                f"(they read {reach or 'no fixed number'} of columns): put the padding on one side"
            )
    return (attention.long().cumsum(1) - 1).clamp_min(0)


def _counted(config: Any) -> int | None:
    """Return the number of columns from which on a layer counts padding between tokens; ``None`` if all attend to all tokens."""
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"]) - {"full_attention"}
    reaches = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found = [getattr(config, reaches[layer], None) if layer in reaches else 0 for layer in layers]  # a recurrent state counts all
    return min((reach for reach in found if isinstance(reach, int)), default=None)


def demand_own_angles(model: nn.Module, attention: Bool[Tensor, "b s"]) -> None:
    """Raise ``ValueError`` for padded rows that would have other rotary angles than alone, because of the longest row."""
    config: Any = config_of(model)
    rope = getattr(config, "rope_parameters", None) or {}
    every = (rope, *(angles for angles in rope.values() if isinstance(angles, Mapping)))  # Gemma 3 has some for each kind of layer
    if not (by_length := [angles for angles in every if angles.get("rope_type") in ("longrope", "dynamic")]):
        return
    lengths = attention.sum(1)
    longest = attention.shape[1] if right_padded(attention) else int(lengths.max())  # right padding is run without a mask
    for angles in by_length:
        rope_type = angles["rope_type"]
        limit = angles["original_max_position_embeddings"] if rope_type == "longrope" else config.max_position_embeddings
        other = lengths <= limit if rope_type == "longrope" else lengths != longest
        if longest > limit and bool((wrong := other & (lengths > 0)).any()):
            raise ValueError(
                f"the rope type {rope_type!r} takes its angles from the longest row if it has more than {limit} tokens, so "
                f"a row of {int(lengths[wrong][0])} tokens would have other values in this batch than alone: run it without padding"
            )


def demand_causal(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model whose config says that tokens attend to later ones."""
    for key, usual in CAUSAL.items():
        if (value := getattr(config_of(model), key, None)) not in (None, *usual):
            raise ValueError(f"this {type(model).__name__} has {key}={value!r}, but it must be causal: padding would leak")


def right_padded(attention: Bool[Tensor, "b s"]) -> bool:
    """Return True if no padding stands left of a token."""
    return bool((attention[:, 1:] <= attention[:, :-1]).all())


def call_with_mask(model: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
    """Return the logits of a causal model that takes ``attention_mask`` and returns a tensor or an object with ``.logits``.

    Under right padding no mask is passed, because no real token attends to later ones: a model may then take its causal fast path,
    and padding cannot leak in. Under left padding a model without a row that takes ``position_ids`` is given those that
    transformers' ``generate`` gives it.

    Raises:
        ValueError: The model is not causal, its rotary angles would depend on the padding, or it returns no logits.
    """
    demand_causal(model)
    demand_own_angles(model, attention)
    if right_padded(attention):
        out = model(tokens)
    else:
        row = architecture_of(model)
        takes = "position_ids" in inspect.signature(unwrapped(model).forward).parameters if row is None else row.positions  # pyright: ignore[reportAttributeAccessIssue]
        # a model that derives its positions itself would count the padding too
        places = {"position_ids": positions(model, attention)} if takes else {}
        out = model(tokens, attention_mask=attention.long() if places else attention, **places)
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if logits is None:
        raise ValueError(
            f"{type(model).__name__} returns a {type(out).__name__} without logits: load the model with its head for language "
            "modeling, or give Policy a forward that returns them"
        )
    return logits


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Context: nothing is dropped at random, so that two passes differ by what is switched alone."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@checked
@dataclass(frozen=True)
class Policy:
    """Model with its adapters, and the function that calls it.

    Attributes:
        model: The model to train.
        adapters: Its attached adapters.
        forward: ``forward(model, tokens, attention) -> logits [b s v]``. Padding and later tokens must not change the logits of a
            token, which is not checked: a model of no known architecture is safe with right padding if it is causal.

    Raises:
        ValueError: The adapters stand on another model.

    Examples:
        >>> policy = Policy(model, attach(model, "blocks.*"))
        >>> logits = policy.logits(rollouts)
    """

    model: nn.Module
    adapters: Adapters
    forward: Forward = call_with_mask

    def __post_init__(self) -> None:
        inside = set(map(id, self.model.modules()))
        if not self.adapters.detached and not all(id(module) in inside for module in self.adapters.modules.values()):
            raise ValueError(
                "these adapters stand on another model, so no switch of them would reach this one: give the model that attach(...) "
                "was given, or deepcopy(policy) for a copy of both"
            )

    @property
    def device(self) -> torch.device:
        """Device of the model, where batches must lie; contrast pairs and samples are moved to it."""
        return next(self.model.parameters()).device

    @checked
    def logits(self, rollouts: Rollouts) -> Float[Tensor, "b s v"]:
        """Return next-token logits ``[b s v]``.

        Raises:
            ValueError: A token that the model lacks.
        """
        demand_tokens(self.model, rollouts.tokens, rollouts.attention)
        return self.forward(self.model, rollouts.tokens, rollouts.attention)

    @checked
    def logprobs(self, rollouts: Rollouts) -> Float[Tensor, "b s"]:
        """Return the log-probability of token ``t + 1`` at position ``t``; 0 if ``t`` is not a predictor."""
        return rollouts.logprobs(self.logits(rollouts))


@checked
@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with what a loss and a route need of them: in reinforcement learning rewards and advantages, else nothing.

    A plain dataclass and not a ``validated`` one, because jaxtyping checks the shapes.

    Attributes:
        rollouts: The rollouts; demonstrations in supervised training.
        rewards: One reward per rollout.
        advantages: One advantage per rollout; without them a rule with ``reinforced_only`` counts every rollout as reinforced.
        groups: Number of the prompt that each rollout answers.
        teacher: True for cached rollouts of known modes (booleans, or 0 and 1).
        old_logprobs: Log-probabilities under the sampling policy, if the loss clips.
        reference_logprobs: Log-probabilities under the base model, if the loss has a KL term.

    Raises:
        ValueError: NaN or infinity, an empty batch, or lengths that differ.

    Examples:
        >>> batch = TrainBatch(rollouts, rewards, rewards - rewards.mean(), groups=torch.arange(len(rewards)) // 2)
        >>> demonstrations = TrainBatch(rollouts)
    """

    rollouts: Rollouts
    rewards: Float[Tensor, " b"] | None = None
    advantages: Float[Tensor, " b"] | None = None
    groups: Int[Tensor, " b"] | None = None
    teacher: Bool[Tensor, " b"] | Integer[Tensor, " b"] | None = None
    old_logprobs: Float[Tensor, "b s"] | None = None
    reference_logprobs: Float[Tensor, "b s"] | None = None

    def __post_init__(self) -> None:
        if self.teacher is not None:
            object.__setattr__(self, "teacher", as_mask("teacher", self.teacher))
        for name in ("rewards", "advantages", "groups", "teacher"):
            if (values := getattr(self, name)) is not None and len(values) != len(self.rollouts):
                raise ValueError(f"{len(values)} {name} for {len(self.rollouts)} rollouts: give one per rollout")
        if not len(self.rollouts):
            raise ValueError("the batch has no rollouts: skip the step")
        for name in ("rewards", "advantages", "old_logprobs", "reference_logprobs"):
            demand_finite(name, tensor := getattr(self, name))
            if name.endswith("logprobs") and tensor is not None and tensor.shape != (size := self.rollouts.tokens.shape):
                raise ValueError(
                    f"{name} is {list(tensor.shape)} and the tokens {list(size)}: give one per token, 0 if it predicts nothing"
                )

    def demand(self, name: str, what: str = "this loss") -> Tensor:
        """Return ``rewards`` or another field that a batch may lack; ``ValueError`` if ``what`` needs it and it is missing."""
        if (values := getattr(self, name)) is None:
            raise ValueError(f"{what} needs the {name} of the rollouts: give them, TrainBatch(rollouts, {name}=...)")
        return values

    @checked
    def rows(self, index: Shaped[Tensor, " n"]) -> "TrainBatch":
        """Return the rollouts at ``index``."""
        rollouts = self.rollouts.rows(index)
        return replace(self, rollouts=rollouts, **{name: t[index] for name, t in vars(self).items() if isinstance(t, Tensor)})


@checked
@dataclass(frozen=True)
class Privileged:
    """Detector verdicts over the student's rollouts (booleans, or 0 and 1).

    Attributes:
        own_channel: True if the rollout's own channel fired.
        known_channel: True if the exploit of the known mode is present.

    Raises:
        ValueError: A verdict is another number.
    """

    own_channel: Bool[Tensor, " b"] | Integer[Tensor, " b"]
    known_channel: Bool[Tensor, " b"] | Integer[Tensor, " b"]

    def __post_init__(self) -> None:
        for name in ("own_channel", "known_channel"):
            object.__setattr__(self, name, as_mask(name, getattr(self, name)))

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
    raw, rewards = rewards, rewards.to("cpu", wide(rewards.dtype))  # a count in bfloat16 ends at 256, and a GPU adds in any order
    weight = torch.ones_like(rewards) if counted is None else counted.to(rewards)
    _, index = groups.cpu().unique(return_inverse=True)
    size = int(index.max()) + 1
    total = rewards.new_zeros(size).index_add_(0, index, rewards * weight)
    count = rewards.new_zeros(size).index_add_(0, index, weight)
    mean = total / count.clamp_min(1)
    # A mean of equal rewards may round, and of that rest Adam would make a whole step, and its sign a flag.
    low, high = (
        rewards.new_full((size,), worst).scatter_reduce_(0, index, torch.where(weight > 0, rewards, worst), how)
        for worst, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    advantage = rewards - torch.where(low == high, low, mean)[index]
    return torch.where(count[index] > 0, advantage, torch.zeros_like(advantage)).to(raw)
