"""What a sweep asks, once it is checked: two prompts and their alignment, the positions to patch, and how a run is graded."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType
from typing import Any, SupportsFloat

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.patching.forwards import Whole
from mi_route2.patching.targets import Choice, choose
from mi_route2.rollouts import vocabulary
from mi_route2.sites import Site


@dataclass(frozen=True)
class Alignment:
    """The first ``prefix`` and the last ``suffix`` tokens of two prompts are partners. ``ValueError`` where these do not fit."""

    clean_length: int
    corrupt_length: int
    prefix: int
    suffix: int

    def __post_init__(self) -> None:
        shorter = min(self.clean_length, self.corrupt_length)
        if min(self.prefix, self.suffix) < 0 or self.prefix + self.suffix > shorter:
            raise ValueError(f"{self} cannot be: prefix and suffix are parts of both prompts, apart from each other")

    def source(self, position: int) -> int | None:
        """The clean position for a corrupt one, ``None`` where it has none. ``ValueError`` outside of the corrupt prompt."""
        if not 0 <= position < self.corrupt_length:
            raise ValueError(f"position {position} is outside the corrupt prompt, which has 0..{self.corrupt_length - 1}")
        if position < self.prefix:
            return position
        if position >= self.corrupt_length - self.suffix:
            return position + self.clean_length - self.corrupt_length
        return None

    @property
    def skipped(self) -> range:
        """Corrupt positions without a partner."""
        return range(self.prefix, self.corrupt_length - self.suffix)

    @property
    def summary(self) -> str:
        """What is paired with what, in a sentence."""
        if self.prefix == self.clean_length == self.corrupt_length:
            return f"equal lengths: each of the {self.prefix} positions is its own partner"
        shift = self.clean_length - self.corrupt_length
        return (
            f"{self.corrupt_length} corrupt tokens on {self.clean_length} clean ones: the first {self.prefix} by identity, the "
            f"last {self.suffix} shifted by {shift:+d}; {len(self.skipped)} corrupt and "
            f"{self.clean_length - self.prefix - self.suffix} clean positions in between have no partner"
        )


def align(clean: Sequence[int] | None, corrupt: Sequence[int], *, clean_length: int | None = None) -> Alignment:
    """The alignment of two prompts' tokens.

    Without the clean tokens (a captured run that did not keep them) its ``clean_length`` must be the corrupt prompt's, else
    ``ValueError``. ``ValueError`` for an empty prompt, and for prompts that share neither their beginning nor their end.
    """
    length = clean_length if clean is None else len(clean)
    if length is None:
        raise ValueError("give the clean prompt's tokens, or at least their number as clean_length")
    if not length or not len(corrupt):
        raise ValueError(f"a prompt is empty: the clean one has {length} tokens and the corrupt one {len(corrupt)}")
    if length == len(corrupt):
        return Alignment(length, length, length, 0)
    if clean is None:
        raise ValueError(
            f"the clean run has {length} tokens and the corrupt prompt {len(corrupt)}: give the clean prompt's tokens to align them"
        )
    shorter = min(length, len(corrupt))
    prefix = _common(clean, corrupt, shorter)
    suffix = _common(clean[::-1], corrupt[::-1], shorter - prefix)
    if not prefix and not suffix:
        raise ValueError(
            f"the clean prompt ({length} tokens) and the corrupt one ({len(corrupt)}) share neither their beginning nor their end: "
            "write prompts that differ in the middle, or that have as many tokens"
        )
    return Alignment(length, len(corrupt), prefix, suffix)


def _common(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are equal, from the front."""
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def tokens_of(text: str, part: str, offsets: Sequence[tuple[int, int]], occurrence: int = 0) -> tuple[int, ...]:
    """The tokens that overlap ``part`` where it stands in ``text`` for the ``occurrence``-th time, counted from 0.

    ``offsets`` are each token's characters ``[start, end)``; an empty one (a special token) overlaps nothing. Occurrences may
    overlap each other. ``ValueError`` where ``part`` does not stand there so often, or no token is there.
    """
    if not part:
        raise ValueError("the part is empty: give the characters whose tokens are meant")
    starts = [i for i in range(len(text)) if text.startswith(part, i)]
    if not 0 <= occurrence < len(starts):
        raise ValueError(
            f"{part!r} stands in the text {len(starts)} times, so there is no occurrence {occurrence} (they count from 0)"
        )
    low = starts[occurrence]
    found = tuple(i for i, (a, b) in enumerate(offsets) if a < b and a < low + len(part) and low < b)
    if not found:
        raise ValueError(f"no token overlaps {part!r} at character {low}: the tokenizer drops these characters")
    return found


METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType({"logit_diff": ("answer", "foil"), "logprob": ("answer",), "kl": ()})
"""Every metric, and the tokens that it takes."""

Metric = str | Callable[[Tensor], Any]
"""One of ``METRICS``, or a function of a run's logits ``[v]`` at the scored position that returns one number."""

_FUNCTION = "function "
"""What stands in front of a function's name: with its space no name of ``METRICS`` can be mistaken for a function's."""


@dataclass(frozen=True)
class Grader:
    """A metric with its tokens, or a ``function`` under its name, ``"function margin"``.

    A file keeps only the name of a function, so a grader that was loaded cannot be called. ``ValueError`` for an unknown metric,
    and where it lacks a token or was given one too many.
    """

    metric: str
    answer: int | None = None
    foil: int | None = None
    function: Callable[[Tensor], Any] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(metric: Metric, answer: int | None, foil: int | None) -> "Grader":
        """The grader of a metric as a caller gives it."""
        if not isinstance(metric, str):
            return Grader(_FUNCTION + getattr(metric, "__name__", type(metric).__name__), answer, foil, metric)
        if metric.startswith(_FUNCTION):
            raise ValueError(f"the metric {metric!r} is a name that a grid keeps: give the function itself")
        return Grader(metric, answer, foil)

    def __post_init__(self) -> None:
        own = self.metric.startswith(_FUNCTION)
        if self.metric not in METRICS and not own:
            raise ValueError(f"unknown metric {self.metric!r}: choose among {', '.join(METRICS)}, or give a function of the logits")
        for name in ("answer", "foil"):
            token, takes = getattr(self, name), not own and name in METRICS[self.metric]
            if takes != (token is not None):
                raise ValueError(
                    f"the metric {self.metric} {'needs' if takes else 'takes no'} {name}{'' if takes else ': leave it out'}"
                )
        if self.metric == "logit_diff" and self.answer == self.foil:
            raise ValueError(f"answer and foil are the same token {self.answer}: their difference is always 0")

    def check(self, vocabulary: int) -> None:
        """``ValueError`` for a token that is not in the vocabulary."""
        for name in ("answer", "foil"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < vocabulary:
                raise ValueError(f"the {name} {token} is no token: the vocabulary has 0..{vocabulary - 1}")

    def __call__(self, logits: Float[Tensor, "n v"], clean: Float[Tensor, " v"]) -> Float[Tensor, " n"]:
        """Every row's score, in nats or logits. ``clean`` are the clean run's logits."""
        wide = widened(logits)
        if self.metric.startswith(_FUNCTION):
            return torch.stack([self._own(row) for row in wide])
        if self.metric == "logit_diff":
            return wide[:, self.answer] - wide[:, self.foil]
        chances = wide.log_softmax(-1)
        if self.metric == "logprob":
            return chances[:, self.answer]
        target = widened(clean).log_softmax(-1)
        return torch.where(target.isfinite(), target.exp() * (target - chances), 0.0).sum(-1)  # a token of no chance adds nothing

    def _own(self, logits: Float[Tensor, " v"]) -> Float[Tensor, ""]:
        """The function's score of one run; ``ValueError`` where that is not one finite number."""
        if self.function is None:
            raise ValueError(f"the {self.metric} was kept as only the name: sweep again with the function itself")
        score = self.function(logits)
        if isinstance(score, Tensor) and score.numel() != 1:
            raise ValueError(
                f"the metric {self.metric} returned a tensor of shape {list(score.shape)}: return one number for a run"
            )
        if not isinstance(score, Tensor | SupportsFloat):
            raise ValueError(f"the metric {self.metric} returned a {type(score).__name__}: return one number for a run")
        score = score.reshape(()).to(logits) if isinstance(score, Tensor) else logits.new_tensor(float(score))
        if not score.isfinite():
            raise ValueError(f"the metric {self.metric} returned {score.item()}: a score must be finite")
        return score


def widened(logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """In float64, or float32 on a device without it."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def one_token(given: int | str | None, tokenizer: Any, name: str) -> int | None:
    """The id of ``given``: itself, or a text that the tokenizer makes exactly one token of. ``ValueError`` otherwise."""
    if given is None or isinstance(given, int):
        return given
    if not isinstance(given, str):
        raise ValueError(f"the {name} {given!r:.60} is neither a token's id nor a text: give one of the two")
    if tokenizer is None:
        raise ValueError(f"the {name} {given!r} is a text, and there is no tokenizer: pass one, or give the token's id")
    ids = list(tokenizer.encode(given, add_special_tokens=False) if callable(tokenizer) else tokenizer.encode(given))
    if len(ids) != 1:
        raise ValueError(f"the {name} {given!r} is {len(ids)} tokens {ids}: choose a text of one (a leading space often matters)")
    return int(ids[0])


Given = str | Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class Span:
    """The tokens that overlap ``text`` where it stands in the corrupt prompt for the ``occurrence``-th time, counted from 0."""

    text: str
    occurrence: int = 0


Positions = None | int | str | Span | Iterable[int | str | Span]
"""``None`` is every position; a text is its first ``Span``."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text of each (its number where there is no tokenizer), and the whole text where it was given as one."""

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None

    def spans(self, span: Span) -> tuple[int, ...]:
        """The positions of ``span``; ``ValueError`` where the prompt is no text, or its tokenizer does not know characters."""
        if self.text is None:
            raise ValueError(
                f"the position {span.text!r} is a text, but the prompt was given as token ids: give the prompt as text"
            )
        if self.offsets is None:
            raise ValueError(
                f"this tokenizer does not say which characters a token has: give positions of {span.text!r} as numbers"
            )
        return tokens_of(self.text, span.text, self.offsets, span.occurrence)


def read(given: Given, tokenizer: Any, name: str) -> Prompt:
    """The prompt called ``name`` in errors: ids ``[s]`` or ``[1 s]``, or a text, which the tokenizer begins as it always does.

    ``ValueError`` for an empty prompt, for a text without a tokenizer, and for several prompts at once.
    """
    if isinstance(given, str):
        return _read_text(given, tokenizer, name)
    if isinstance(given, Tensor):
        if given.ndim == 2 and len(given) == 1:
            given = given[0]
        if given.ndim != 1 or given.is_floating_point():
            raise ValueError(f"the {name} prompt is one row of token ids, not {given.dtype} of shape {list(given.shape)}")
        given = given.tolist()
    try:
        tokens = tuple(map(index, given))
    except TypeError as error:
        raise ValueError(f"the {name} prompt is one row of token ids, or a text, not {given!r:.60}") from error
    if not tokens:
        raise ValueError(f"the {name} prompt has no tokens")
    return Prompt(tokens, _labels(tokens, tokenizer))


def _read_text(text: str, tokenizer: Any, name: str) -> Prompt:
    if tokenizer is None:
        raise ValueError(f"the {name} prompt is a text, and there is no tokenizer: pass one, or give token ids")
    offsets = None
    if not callable(tokenizer):
        tokens = tokenizer.encode(text)
    elif getattr(tokenizer, "is_fast", False):
        encoded: Any = tokenizer(text, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], tuple((int(a), int(b)) for a, b in encoded["offset_mapping"])
    else:
        encoded = tokenizer(text)
        tokens = encoded["input_ids"]
    if not len(tokens):
        raise ValueError(f"the {name} prompt has no tokens")
    ids = tuple(int(token) for token in tokens)
    return Prompt(ids, _labels(ids, tokenizer), text, offsets)


def _labels(tokens: tuple[int, ...], tokenizer: Any) -> tuple[str, ...]:
    return tuple(str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in tokens)


def places(given: Positions, prompt: Prompt) -> tuple[int, ...]:
    """The positions that are meant, in order, each once. ``ValueError`` outside of the prompt, and for none at all."""
    if given is None:
        return tuple(range(len(prompt.tokens)))
    found: set[int] = set()
    for one in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        if isinstance(one, str | Span):
            found.update(prompt.spans(Span(one) if isinstance(one, str) else one))
            continue
        try:
            found.add(inside(index(one), prompt))
        except TypeError as error:
            raise ValueError(f"{one!r:.60} is no position: give a number, a text that stands there, or a Span") from error
    if not found:
        raise ValueError("no positions: name at least one, or leave them out for all")
    return tuple(sorted(found))


def inside(position: int, prompt: Prompt) -> int:
    """``position``, where the prompt has it."""
    if not 0 <= position < len(prompt.tokens):
        raise ValueError(
            f"position {position} is outside the corrupt prompt, which has 0..{len(prompt.tokens) - 1}: positions count from 0"
        )
    return position


@dataclass(frozen=True, eq=False)
class CleanRun:
    """A run that was captured before: ``values`` [s ...] at every position, and the ``logits`` behind the one that is scored.

    With the prompt's ``tokens`` it can be aligned with a corrupt prompt of another length. ``weights`` is the hash of those that it
    was captured with (``Host.weights_hash``): a sweep over others refuses it. Values from elsewhere have ``None``.
    """

    values: Mapping[Site, Tensor]
    logits: Float[Tensor, " v"]
    tokens: tuple[int, ...] | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        lengths = {len(value) for value in self.values.values()} | ({len(self.tokens)} if self.tokens is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"a clean run has one number of positions, not {sorted(lengths)}")

    @staticmethod
    @checked
    def capture(host: Host, prompt: Given, sites: Choice, tokenizer: Any = None) -> "CleanRun":
        """Runs ``prompt`` once, for sweeps over several corrupt ones; what it is scored by stands behind its last token."""
        tokens = read(prompt, tokenizer, "clean").tokens
        chosen = list(dict.fromkeys(target.site for target in choose(host, sites)))
        found = Whole(host).record(tokens, chosen, range(len(tokens)))
        return CleanRun(found.values, found.logits, tokens, host.weights_hash())

    @property
    def length(self) -> int:
        """Positions of the run."""
        return len(next(iter(self.values.values())))


@dataclass(frozen=True)
class Skip:
    """A position that cannot be patched, and why."""

    position: int
    why: str


@dataclass(frozen=True, eq=False)
class Question:
    """``at`` is the position that is scored in the corrupt prompt, ``clean_at`` in the clean one.

    ``sources`` has the clean position of every position that can be patched; the others are ``skipped``.
    """

    corrupt: Prompt
    clean: Prompt | CleanRun
    alignment: Alignment
    at: int
    clean_at: int
    positions: tuple[int, ...]
    sources: Mapping[int, int]
    skipped: tuple[Skip, ...]
    grader: Grader
    together: bool

    @property
    def columns(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """What is patched in one cell: the column's position (``None`` for all at once), and the places among ``sources``."""
        every = tuple(range(len(self.sources)))
        return ((None, every),) if self.together else tuple((position, (i,)) for i, position in zip(every, self.sources))


def ask(
    clean: Given | CleanRun,
    corrupt: Given,
    *,
    positions: Positions = None,
    metric: Metric = "logit_diff",
    answer: int | str | None = None,
    foil: int | str | None = None,
    at: int | None = None,
    tokenizer: Any = None,
    together: bool = False,
) -> Question:
    """The question that ``sweep`` was asked; ``ValueError`` for whatever cannot be answered."""
    one = clean if isinstance(clean, CleanRun) else read(clean, tokenizer, "clean")
    other = read(corrupt, tokenizer, "corrupt")
    length = one.length if isinstance(one, CleanRun) else len(one.tokens)
    alignment = align(one.tokens, other.tokens, clean_length=length)
    if at is None:
        scored, clean_at = len(other.tokens) - 1, length - 1
    else:
        scored, partner = inside(at, other), alignment.source(at)
        if partner is None:
            raise ValueError(f"position {at} cannot be scored: it has no partner in the clean prompt ({alignment.summary})")
        clean_at = partner
    grader = Grader.of(metric, one_token(answer, tokenizer, "answer"), one_token(foil, tokenizer, "foil"))
    chosen = places(positions, other)
    sources, skipped = _partners(chosen, alignment, scored, clean_at)
    return Question(other, one, alignment, scored, clean_at, chosen, sources, skipped, grader, together)


def _partners(chosen: tuple[int, ...], alignment: Alignment, at: int, clean_at: int) -> tuple[dict[int, int], tuple[Skip, ...]]:
    sources: dict[int, int] = {}
    skipped = []
    for position in chosen:
        source = alignment.source(position)
        if source is None:
            skipped.append(Skip(position, "it has no partner in the clean prompt"))
        elif position > at or source > clean_at:
            skipped.append(Skip(position, f"it stands behind position {at}, which is scored"))
        else:
            sources[position] = source
    if not sources:
        raise ValueError(f"none of the positions can be patched: position {skipped[0].position}: {skipped[0].why}")
    return sources, tuple(skipped)


def refuse_foreign(host: Host, question: Question, alpha: float) -> None:
    """``ValueError`` for a token that the model does not have, which a device would answer with its end, for a clean run of other
    weights, and for an ``alpha`` that is not finite."""
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} is no share: 1 replaces a value, 0 leaves it")
    captured = question.clean.weights if isinstance(question.clean, CleanRun) else None
    if captured is not None and captured != (now := host.weights_hash()):
        raise ValueError(
            f"the clean run was captured with weights {captured[:12]}, and the model now has {now[:12]}: capture it again, or give "
            "its values without their hash, as CleanRun(run.values, run.logits, run.tokens)"
        )
    size = vocabulary(host.model) or sys.maxsize  # whoever does not say has its own errors
    for name, prompt in (("clean", question.clean), ("corrupt", question.corrupt)):
        if wrong := [token for token in prompt.tokens or () if not 0 <= token < size]:
            raise ValueError(f"the {name} prompt's {wrong[0]} is no token: the vocabulary has 0..{size - 1}")


def refuse_dropout(host: Host) -> None:
    """``ValueError`` for a model that drops activations at random, where no two runs are comparable."""
    for path, module in host.model.named_modules():
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if module.training and isinstance(share, float) and share > 0:
            raise ValueError(f"{path} drops activations at random while the model is in training: call host.model.eval() first")
