"""Question of a sweep, checked: two prompts and their alignment, the positions to patch, and the metric."""

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

from mi_route2.architectures import config_of
from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.patching.forwards import Whole
from mi_route2.patching.targets import Choice, choose
from mi_route2.rollouts import vocabulary
from mi_route2.runs.store import BEHIND, RunStore, invalid
from mi_route2.sites import Site


@dataclass(frozen=True)
class Alignment:
    """Pairing of positions of two prompts: the first ``prefix`` and the last ``suffix`` tokens correspond.

    Raises:
        ValueError: Prefix and suffix overlap, or do not fit into the prompts.
    """

    clean_length: int
    corrupt_length: int
    prefix: int
    suffix: int

    def __post_init__(self) -> None:
        shorter = min(self.clean_length, self.corrupt_length)
        if min(self.prefix, self.suffix) < 0 or self.prefix + self.suffix > shorter:
            raise ValueError(f"{self} is not possible: prefix and suffix must be parts of both prompts that do not overlap")

    def source(self, position: int) -> int | None:
        """Return the clean position for a corrupt one, ``None`` if it has none; ``ValueError`` outside of the corrupt prompt."""
        if not 0 <= position < self.corrupt_length:
            raise ValueError(f"position {position} is outside the corrupt prompt, which has 0..{self.corrupt_length - 1}")
        if position < self.prefix:
            return position
        if position >= self.corrupt_length - self.suffix:
            return position + self.clean_length - self.corrupt_length
        return None

    @property
    def skipped(self) -> range:
        """Corrupt positions without a clean partner."""
        return range(self.prefix, self.corrupt_length - self.suffix)

    @property
    def summary(self) -> str:
        """Description of the pairing, in one sentence."""
        if self.prefix == self.clean_length == self.corrupt_length:
            return f"equal lengths: each of the {self.prefix} positions is its own partner"
        shift = self.clean_length - self.corrupt_length
        return (
            f"{self.corrupt_length} corrupt tokens on {self.clean_length} clean ones: the first {self.prefix} by identity, the "
            f"last {self.suffix} shifted by {shift:+d}; {len(self.skipped)} corrupt and "
            f"{self.clean_length - self.prefix - self.suffix} clean positions in between have no partner"
        )


def align(clean: Sequence[int] | None, corrupt: Sequence[int], *, clean_length: int | None = None) -> Alignment:
    """Align the tokens of two prompts.

    Args:
        clean: tokens of the clean prompt; ``None`` for a captured run that did not keep them.
        corrupt: tokens of the corrupt prompt.
        clean_length: length of the clean prompt, if its tokens are not known. It must equal that of the corrupt prompt.

    Raises:
        ValueError: An empty prompt, different lengths without the clean tokens, or prompts that share neither beginning nor end.
    """
    length = clean_length if clean is None else len(clean)
    if length is None:
        raise ValueError("give the clean prompt's tokens, or at least their number as clean_length")
    if not length or not len(corrupt):
        raise ValueError(f"a prompt is empty: the clean one has {length} tokens and the corrupt one {len(corrupt)}")
    if length == len(corrupt):  # positions are partners then whatever their tokens are
        return Alignment(length, length, length, 0)
    if clean is None:
        raise ValueError(
            f"the clean run has {length} tokens and the corrupt prompt {len(corrupt)}: give the clean prompt's tokens to align them"
        )
    shorter = min(length, len(corrupt))
    prefix = _common(clean, corrupt, shorter)
    suffix = _common(clean[::-1], corrupt[::-1], shorter - prefix)  # of "a a" and "a a a" a token would count in both
    if not prefix and not suffix:
        raise ValueError(
            f"the clean prompt ({length} tokens) and the corrupt one ({len(corrupt)}) share neither their beginning nor their end: "
            "write prompts that differ in the middle, or that have as many tokens"
        )
    return Alignment(length, len(corrupt), prefix, suffix)


def _common(tokens: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix, at most ``limit``."""
    return next((i for i in range(limit) if tokens[i] != other[i]), limit)


def tokens_of(text: str, part: str, offsets: Sequence[tuple[int, int]], occurrence: int = 0) -> tuple[int, ...]:
    """Return the tokens that overlap ``part`` at its ``occurrence``-th appearance in ``text``, counted from 0.

    ``offsets`` are each token's characters ``[start, end)``; an empty range (a special token) overlaps nothing. Occurrences may
    overlap each other.

    Raises:
        ValueError: ``part`` does not appear that often, or no token covers it.
    """
    if not part:
        raise ValueError("the part is empty: give the characters whose tokens you want")
    starts = [i for i in range(len(text)) if text.startswith(part, i)]
    if not 0 <= occurrence < len(starts):
        raise ValueError(
            f"{part!r} appears in the text {len(starts)} times, so there is no occurrence {occurrence} (they count from 0)"
        )
    low = starts[occurrence]
    indices = tuple(i for i, (a, b) in enumerate(offsets) if a < b and a < low + len(part) and low < b)
    if not indices:
        raise ValueError(f"no token overlaps {part!r} at character {low}: the tokenizer drops these characters")
    return indices


METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType({"logit_diff": ("answer", "foil"), "logprob": ("answer",), "kl": ()})
"""Names of the metrics, and the tokens that each takes."""

Metric = str | Callable[[Tensor], Any]
"""One of ``METRICS``, or a function of a run's logits ``[v]`` at the scored position that returns one number."""

_FUNCTION, _MEAN = "function ", "mean of "
"""Prefixes of a function's name, and of a metric over several pairs; because of the space, no name of ``METRICS`` has them."""


@dataclass(frozen=True)
class Grader:
    """Metric with its tokens, or a ``function`` under its name, ``"function margin"``.

    A file keeps only the name of a function, so a grader that was loaded from a file cannot be called.

    Raises:
        ValueError: An unknown metric, a token that it lacks, or one that it does not take.
    """

    metric: str
    answer: int | None = None
    foil: int | None = None
    function: Callable[[Tensor], Any] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(metric: Metric, answer: int | None, foil: int | None) -> "Grader":
        """Return the grader of a metric as the caller gave it."""
        if not isinstance(metric, str):
            return Grader(_FUNCTION + getattr(metric, "__name__", type(metric).__name__), answer, foil, metric)
        if metric.startswith((_FUNCTION, _MEAN)):
            raise ValueError(f"the metric {metric!r} is only the name of a function, from a saved grid: give the function itself")
        return Grader(metric, answer, foil)

    @staticmethod
    def of_mean(graders: Sequence["Grader"]) -> "Grader":
        """Return the grader of mean scores: that of all pairs, or only a name if their tokens differ."""
        return graders[0] if len(set(graders)) == 1 else Grader(_MEAN + graders[0].metric)

    def __post_init__(self) -> None:
        custom = self.metric.startswith((_FUNCTION, _MEAN))
        if self.metric not in METRICS and not custom:
            raise ValueError(f"unknown metric {self.metric!r}: choose among {', '.join(METRICS)}, or give a function of the logits")
        for name in ("answer", "foil"):
            token, takes = getattr(self, name), not custom and name in METRICS[self.metric]
            if takes != (token is not None):
                raise ValueError(
                    f"the metric {self.metric} {'needs' if takes else 'takes no'} {name}{'' if takes else ': leave it out'}"
                )
        if self.metric == "logit_diff" and self.answer == self.foil:
            raise ValueError(f"answer and foil are the same token {self.answer}: their difference is always 0")

    def check(self, vocabulary: int) -> None:
        """Raise ``ValueError`` for an answer or foil outside of the vocabulary."""
        for name in ("answer", "foil"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < vocabulary:
                raise ValueError(f"the {name} {token} is not a token: the vocabulary is 0..{vocabulary - 1}")

    def __call__(self, logits: Float[Tensor, "n v"], clean: Float[Tensor, " v"]) -> Float[Tensor, " n"]:
        """Return every row's score, in nats or logits; ``clean`` are the clean run's logits."""
        wide = widened(logits)  # the difference of two logits in half precision would lose its digits
        if self.metric.startswith((_FUNCTION, _MEAN)):
            return torch.stack([self._custom(row) for row in wide])
        if self.metric == "logit_diff":
            return wide[:, self.answer] - wide[:, self.foil]
        chances = wide.log_softmax(-1)
        if self.metric == "logprob":
            return chances[:, self.answer]
        target = widened(clean).log_softmax(-1)
        # 0 log 0 = 0, but a clean run of NaN stays NaN, and is refused
        return torch.where(target == -math.inf, 0.0, target.exp() * (target - chances)).sum(-1)

    def _custom(self, logits: Float[Tensor, " v"]) -> Float[Tensor, ""]:
        """Return the function's score of one run; ``ValueError`` if it is not one finite number."""
        if self.function is None:
            raise ValueError(f"the {self.metric} was saved by name only: sweep again with the function itself")
        score = self.function(logits)
        if isinstance(score, Tensor | np.ndarray) and math.prod(score.shape) != 1:
            raise ValueError(
                f"the metric {self.metric} returned a tensor of shape {list(score.shape)}: return one number for a run"
            )
        if isinstance(score, np.ndarray | np.generic) or (isinstance(score, Tensor) and score.is_complex()):
            score = score.item()  # a complex number of Python has no ``float``; torch and numpy drop the imaginary part
        if not isinstance(score, Tensor | SupportsFloat):
            raise ValueError(f"the metric {self.metric} returned a {type(score).__name__}: return one number for a run")
        score = score.reshape(()).to(logits) if isinstance(score, Tensor) else logits.new_tensor(float(score))
        if not score.isfinite():
            raise ValueError(f"the metric {self.metric} returned {score.item()}: a score must be finite")
        return score


def widened(logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """Return the logits in float64, or in float32 on a device without it."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def one_token(answer: Any, tokenizer: Any, name: str) -> int | None:
    """Return a token id as it is, or the id of a text that is exactly one token; ``ValueError`` otherwise."""
    if answer is None:
        return None
    if not isinstance(answer, str):
        try:
            return whole(answer)
        except TypeError as error:
            raise ValueError(f"the {name} {answer!r:.60} is neither a token id nor a text: give one of the two") from error
    if tokenizer is None:
        raise ValueError(f"the {name} {answer!r} is a text, but there is no tokenizer: pass one, or give the token id")
    # tokenizers of transformers can be called, and add special tokens unless told otherwise; others have no such argument
    ids = list(tokenizer.encode(answer, add_special_tokens=False) if callable(tokenizer) else tokenizer.encode(answer))
    if len(ids) != 1:
        raise ValueError(f"the {name} {answer!r} is {len(ids)} tokens {ids}: choose a text of one (a leading space often matters)")
    return int(ids[0])


Given = str | Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class Span:
    """Tokens that overlap ``text`` at its ``occurrence``-th appearance in the corrupt prompt, counted from 0."""

    text: str
    occurrence: int = 0


Positions = None | int | str | Span | Iterable[int | str | Span]
"""Selection of positions: ``None`` is every position, a text is its first ``Span``."""


@dataclass(frozen=True)
class Prompt:
    """Prompt as token ids, with the text of each token, and the whole text if it was given.

    Attributes:
        tokens: Token ids.
        labels: Text of each token; its id if there is no tokenizer.
        text: The whole text, if the prompt was given as text.
        offsets: Characters ``[start, end)`` of each token, if the tokenizer knows them.
    """

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None

    def spans(self, span: Span) -> tuple[int, ...]:
        """Return the positions of ``span``; ``ValueError`` if the prompt was not given as text, or has no character offsets."""
        if self.text is None:
            raise ValueError(
                f"the position {span.text!r} is a text, but the prompt was given as token ids: give the prompt as text"
            )
        if self.offsets is None:
            raise ValueError(f"this tokenizer does not give the characters of a token: give positions of {span.text!r} as numbers")
        return tokens_of(self.text, span.text, self.offsets, span.occurrence)


def read(text: Given, tokenizer: Any, name: str) -> Prompt:
    """Return the prompt called ``name`` in errors, from ids ``[s]`` or ``[1 s]``, or from a text.

    A text is encoded with the tokenizer's usual special tokens.

    Raises:
        ValueError: An empty prompt, a text without a tokenizer, or several prompts at once.
    """
    if isinstance(text, str):
        return _read_text(text, tokenizer, name)
    if isinstance(text, Tensor):
        if text.ndim == 2 and len(text) == 1:
            text = text[0]
        if text.ndim != 1 or text.is_floating_point():
            raise ValueError(f"the {name} prompt must be one row of token ids, not {text.dtype} of shape {list(text.shape)}")
        text = text.tolist()
    try:
        tokens = tuple(map(whole, text))
    except TypeError as error:
        raise ValueError(f"the {name} prompt must be one row of token ids, or a text, not {text!r:.60}") from error
    if not tokens:
        raise ValueError(f"the {name} prompt has no tokens")
    return Prompt(tokens, _labels(tokens, tokenizer))


def _read_text(text: str, tokenizer: Any, name: str) -> Prompt:
    if tokenizer is None:
        raise ValueError(f"the {name} prompt is a text, but there is no tokenizer: pass one, or give token ids")
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


Prompts = Sequence[Any]
"""Several prompts, each as ``Given`` or a ``CleanRun``."""

Answers = None | int | str | Sequence[int | str]
"""A token as an id or a text, or one for each of several pairs of prompts."""


def each_pair(asked: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the arguments of every pair, if ``asked`` are those of several pairs of prompts; ``None`` for one pair.

    Raises:
        ValueError: Numbers of prompts, answers or foils that do not fit.
    """
    several = {name: _several(asked[name]) for name in ("clean", "corrupt")}
    if not any(several.values()):
        return None
    lists = {name: asked[name] for name in several}
    lists |= {name: asked[name] for name in ("answer", "foil") if isinstance(asked.get(name), list | tuple)}
    counts = {name: len(values) if several.get(name, True) else 1 for name, values in lists.items()}
    if not all(several.values()) or len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"several pairs of prompts need as many of each, not {told}: give lists of one length")
    return [{**asked, **dict(zip(lists, values))} for values in zip(*lists.values())]


def _several(prompts: Any) -> bool:
    """Return whether this is a list of prompts, and not one prompt as a list of token ids."""
    if not isinstance(prompts, list | tuple) or not prompts:
        return False
    return isinstance(prompts[0], str | CleanRun | Sequence) or getattr(prompts[0], "ndim", 0) > 0


def named(wanted: Positions) -> bool:
    """Return whether positions are texts or spans alone, which mean the same in prompts of different lengths."""
    parts = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
    return all(isinstance(part, str | Span) for part in parts)


def places(wanted: Positions, prompt: Prompt) -> tuple[int, ...]:
    """Return the selected positions in order, without repetition; ``ValueError`` outside of the prompt, or for none."""
    if wanted is None:
        return tuple(range(len(prompt.tokens)))
    positions: set[int] = set()
    spans: set[Span] = set()  # each is looked for once, because that reads the whole text
    for answer in wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]:
        if isinstance(answer, str | Span):
            if (span := Span(answer) if isinstance(answer, str) else answer) not in spans:
                spans.add(span)
                positions.update(prompt.spans(span))
            continue
        try:
            positions.add(inside(whole(answer), prompt))
        except TypeError as error:
            raise ValueError(f"{answer!r:.60} is not a position: give a number, a text in the prompt, or a Span") from error
    if not positions:
        raise ValueError("no positions: name at least one, or leave them out for all")
    return tuple(sorted(positions))


def whole(number: Any) -> int:
    """Return a whole number; ``TypeError`` for anything else, also for a truth value, because a mask is not a list of numbers."""
    if isinstance(number, bool):
        raise TypeError(f"{number} is a truth value")
    return index(number)


def inside(position: int, prompt: Prompt) -> int:
    """Return ``position``; ``ValueError`` if the prompt does not have it."""
    if not 0 <= position < len(prompt.tokens):
        raise ValueError(
            f"position {position} is outside the corrupt prompt, which has 0..{len(prompt.tokens) - 1}: positions count from 0"
        )
    return position


@checked
@dataclass(frozen=True, eq=False)
class CleanRun:
    """Captured run of a clean prompt.

    Attributes:
        values: Site -> values ``[s ...]`` at every position.
        logits: Logits ``[v]`` at the scored position.
        tokens: The prompt's tokens, with which the run can be aligned with a corrupt prompt of another length.
        weights: Hash of the weights of the capture (``Host.weights_hash``); a sweep with other weights is refused. ``None`` for
            values from another source.
        at: Position of the logits; a sweep that scores another one is refused. ``None`` for the scored position, whichever it is.

    Raises:
        ValueError: No site, or values and tokens of different lengths.
    """

    values: Mapping[Site, Tensor]
    logits: Float[Tensor, " v"]
    tokens: tuple[int, ...] | None = None
    weights: str | None = None
    at: int | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a clean run has values of at least one site: capture it with CleanRun.capture(host, prompt, sites)")
        lengths = {len(value) for value in self.values.values()} | ({len(self.tokens)} if self.tokens is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"all values and tokens of a clean run need the same number of positions, not {sorted(lengths)}")

    @staticmethod
    @checked
    def capture(host: Host, prompt: Given, sites: Choice, tokenizer: Any = None) -> "CleanRun":
        """Run ``prompt`` once, for sweeps over several corrupt prompts; its last token is the scored position.

        Errors as in ``sweep``.
        """
        tokens = read(prompt, tokenizer, "clean").tokens
        refuse_dropout(host)
        _refuse_tokens(host, "clean", tokens)
        chosen = list(dict.fromkeys(target.site for target in choose(host, sites)))
        record = Whole(host).record(tokens, chosen, range(len(tokens)))
        return CleanRun(record.values, record.logits, tokens, host.weights_hash(), len(tokens) - 1)

    @staticmethod
    @checked
    def stored(host: Host, store: RunStore, run: str, sites: Choice) -> "CleanRun":
        """Read the prompt of a stored run, which an engine or ``record`` captured; its last token is the scored position.

        The run needs the values of ``sites`` at every token of its prompt, and ``resid_post`` of the last block at the last token,
        from which a forward over one token makes the logits.

        Raises:
            KeyError: The run, or a value that it needs, is not in the store.
            ValueError: The run is of other weights, knows no tokens, or was steered or patched where its logits are made.

        Examples:
            >>> record(host, host.sites(("resid_pre",)) + [Site(1, "resid_post")], tokens, store=store, runs=["clean"])
            >>> CleanRun.stored(host, store, "clean", "resid_pre").length == tokens.shape[1]
            True
        """
        refuse_dropout(host)
        with store.unchanged():
            about = store.info(run)
            if about.weights != (now := host.weights_hash()):
                raise ValueError(invalid(run, about.weights, now))
            if about.meta.get(BEHIND):
                raise ValueError(
                    f"run {run!r} was steered or patched at resid_post of the last block or behind it, which its values lack, so "
                    "its logits are not known: capture it without that, or give the prompt"
                )
            tokens = about.tokens[: about.prompt_length]
            if not tokens:
                raise ValueError(f"run {run!r} was stored without the tokens of a prompt: give them when you capture it")
            last, final = len(tokens) - 1, Site(len(host.layers()) - 1, "resid_post")
            # the lock of ``unchanged`` is held until all rows are read, or an eviction could come between two sites
            chosen = dict.fromkeys(target.site for target in choose(host, sites))
            values = {site: _rows(store, run, site, range(last + 1)) for site in chosen}
            stream = _rows(store, run, final, [last])
        _refuse_tokens(host, "clean", tokens)
        # The last block's output is replaced, so it does not matter that this forward has one token, or at which position.
        with torch.no_grad(), host.hooks({final: lambda value: stream[:, None].to(value)}):
            logits = host.logits(torch.tensor([tokens[-1:]], device=next(host.model.parameters()).device))
        return CleanRun(values, logits[0, -1], tokens, now, last)

    @property
    def length(self) -> int:
        """Number of positions in the run."""
        return len(next(iter(self.values.values())))


def _rows(store: RunStore, run: str, site: Site, positions: Sequence[int]) -> Tensor:
    try:
        return store.rows(run, site, positions)
    except KeyError as error:
        if run not in store.runs():
            raise
        needed = "every position of the prompt" if len(positions) > 1 else f"position {positions[0]}, of which come the logits"
        raise KeyError(f"{error.args[0]}; a sweep from a stored run needs {site} at {needed}: capture it too") from error


@dataclass(frozen=True)
class Skip:
    """Position that cannot be patched, and the reason."""

    position: int
    why: str


@dataclass(frozen=True, eq=False)
class Question:
    """Checked question of a sweep.

    Attributes:
        corrupt: The prompt that is run.
        clean: The prompt, or captured run, whose values are patched in.
        alignment: Pairing of their positions.
        at: Scored position of the corrupt prompt.
        clean_at: Scored position of the clean prompt.
        positions: Requested positions of the corrupt prompt.
        sources: Position that can be patched -> its clean position.
        skipped: Requested positions that cannot be patched.
        grader: Metric of the scores.
        together: True if all positions are patched at once.
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
        """Cells of a row: the position of each (``None`` for all at once), and the indices of ``sources`` that it patches."""
        every = tuple(range(len(self.sources)))
        return ((None, every),) if self.together else tuple((position, (i,)) for i, position in zip(every, self.sources))


def ask(
    host: Host,
    clean: Given | CleanRun,
    corrupt: Given,
    positions: Positions,
    metric: Metric,
    answer: Answers,
    foil: Answers,
    at: int | None,
    *,
    alpha: float,
    tokenizer: Any,
    together: bool,
) -> Question:
    """Check the arguments of ``sweep`` and return its question; ``ValueError`` for what does not fit, or not this model."""
    refuse_dropout(host)
    run = clean if isinstance(clean, CleanRun) else read(clean, tokenizer, "clean")
    other = read(corrupt, tokenizer, "corrupt")
    length = run.length if isinstance(run, CleanRun) else len(run.tokens)
    alignment = align(run.tokens, other.tokens, clean_length=length)
    if at is None:
        scored, clean_at = len(other.tokens) - 1, length - 1
    else:
        try:
            scored = inside(whole(at), other)
        except TypeError as error:
            raise ValueError(f"at={at!r:.60} is not a position: give a number") from error
        if (partner := alignment.source(scored)) is None:
            raise ValueError(f"position {at} cannot be scored: it has no partner in the clean prompt ({alignment.summary})")
        clean_at = partner
    if isinstance(run, CleanRun) and run.at not in (None, clean_at):
        raise ValueError(
            f"the clean run has the logits at position {run.at}, and position {clean_at} is to be scored: give the clean prompt "
            "itself, or a run with the logits of that position, as CleanRun(run.values, logits, run.tokens)"
        )
    grader = Grader.of(metric, one_token(answer, tokenizer, "answer"), one_token(foil, tokenizer, "foil"))
    chosen = places(positions, other)
    sources, skipped = _partners(chosen, alignment, scored, clean_at)
    question = Question(other, run, alignment, scored, clean_at, chosen, sources, skipped, grader, together)
    _refuse_foreign(host, question, alpha)
    return question


def _partners(chosen: tuple[int, ...], alignment: Alignment, at: int, clean_at: int) -> tuple[dict[int, int], tuple[Skip, ...]]:
    sources: dict[int, int] = {}
    skipped = []
    for position in chosen:
        source = alignment.source(position)
        if source is None:
            skipped.append(Skip(position, "it has no partner in the clean prompt"))
        elif position > at or source > clean_at:
            skipped.append(Skip(position, f"it comes after position {at}, which is scored"))
        else:
            sources[position] = source
    if not sources:
        raise ValueError(f"none of the positions can be patched: position {skipped[0].position}: {skipped[0].why}")
    return sources, tuple(skipped)


def _refuse_foreign(host: Host, question: Question, alpha: float) -> None:
    """Raise ``ValueError`` for prompts that the model cannot read, a clean run of other weights, or an ``alpha`` not finite."""
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} is not a finite number: 1 replaces a value, 0 leaves it unchanged")
    captured = question.clean.weights if isinstance(question.clean, CleanRun) else None
    if captured is not None and captured != (now := host.weights_hash()):
        raise ValueError(
            f"the clean run was captured with weights {captured[:12]}, but the model now has {now[:12]}: capture it again, or give "
            "its values without their hash, as CleanRun(run.values, run.logits, run.tokens)"
        )
    for name, prompt, at in (("clean", question.clean, question.clean_at), ("corrupt", question.corrupt, question.at)):
        _refuse_tokens(host, name, (prompt.tokens or ())[: at + 1])  # nothing after the scored position runs


def _refuse_tokens(host: Host, name: str, tokens: Sequence[int]) -> None:
    """Raise ``ValueError`` for a token that the model lacks, or for more tokens than it takes.

    On a GPU an unknown token or position would end the process with a device-side assertion. Without known sizes, the model raises
    its own error.
    """
    size = vocabulary(host.model) or sys.maxsize
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise ValueError(f"the {name} prompt's {wrong[0]} is not a token: the vocabulary is 0..{size - 1}")
    longest = next((n for key in _CONTEXT if (n := getattr(config_of(host.model), key, None)) is not None), sys.maxsize)
    if len(tokens) > longest:
        raise ValueError(f"the {name} prompt has {len(tokens)} tokens, but the model takes at most {longest}: shorten it")


_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "context")
"""Names of the longest sequence in a model's config."""


def refuse_dropout(host: Host) -> None:
    """Raise ``ValueError`` for a model with active dropout, for which no two runs are comparable."""
    for path, module in host.model.named_modules():
        # attention in transformers keeps its share as a number and hands it to a function
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if module.training and isinstance(share, float) and share > 0:
            raise ValueError(f"{path} has active dropout, because the model is in training mode: call host.model.eval() first")
