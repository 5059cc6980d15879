"""What is asked, once it is checked: two prompts and their alignment, the positions to patch, and how a run is graded.

Activation patching puts the clean run's values into the corrupt run and asks how much of the clean behaviour comes back (Meng et
al. 2022, "Locating and Editing Factual Associations in GPT", causal tracing; Zhang and Nanda 2024, "Towards Best Practices of
Activation Patching"). All of that is about one corrupt prompt here, and one position that is scored.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.checks import checked
from mi_route2.hosts.base import Host
from mi_route2.interventions.sweeps.alignment import Alignment, align
from mi_route2.interventions.sweeps.grading import Grader, one_token
from mi_route2.interventions.sweeps.prompts import Given, Positions, Prompt, inside, places, read
from mi_route2.interventions.sweeps.targets import Choice, choose
from mi_route2.interventions.sweeps.whole import Whole
from mi_route2.rollouts import vocabulary
from mi_route2.sites import Site


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
    metric: str = "logit_diff",
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
    grader = Grader(metric, one_token(answer, tokenizer, "answer"), one_token(foil, tokenizer, "foil"))
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
