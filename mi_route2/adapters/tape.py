"""One recorded pass: what the adapters may learn from it, and what is read off on the way.

A ``Tape`` is made for one forward and backward over a known layout ``[b, s]``. It carries a ``Lane`` for the kept adapter and
one for the quarantine: a lane sees each factor's per-rollout gradient inside the backward and answers with the gradient that
the parameter receives. Readers watch the input of every site in the forward, or the pair (input, gradient at the output) in
the backward. The layout is stated by whoever makes the tape and is never guessed from a tensor's shape: ``[b * s, d]`` read as
rollouts would flag tokens.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from mi_route2.adapters.gradients import FactorGradient, Pairs
from mi_route2.checks import checked


@runtime_checkable
class Lane(Protocol):
    """Decides what the factors of one adapter learn in one pass."""

    detach: bool
    """Whether what is flagged (weight 0) also sends no gradient through the adapter to its input."""

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> Tensor | None:
        """The gradient of the factor; ``None`` where it is assigned after the backward."""
        ...

    def weights(self, site: str) -> Tensor:
        """``[b]`` or ``[b, s]``, 0 where flagged at this site; asked for only where ``detach`` is set."""
        ...

    def decide(self, site: str) -> None:
        """Told in the forward, once the site's input was read: what is decided by then may be settled now."""
        ...


class LearnNothing:
    """A lane under which an adapter stays in the forward and learns nothing; what ``like`` flags sends nothing through it."""

    def __init__(self, like: Lane | None = None):
        self.detach, self._like = like is not None, like

    def gradient(self, site: str, factor: str, pair: object) -> None:
        return None

    def decide(self, site: str) -> None:
        if self._like is not None:
            self._like.decide(site)

    def weights(self, site: str) -> Tensor:
        if self._like is None:
            raise RuntimeError(f"a lane that blocks nothing has no weights (asked at {site})")
        return self._like.weights(site)


@runtime_checkable
class InputReader(Protocol):
    """Sees ``x [b, s, d_in]`` at every site in the forward, detached."""

    def read(self, site: str, x: Tensor) -> None: ...


@runtime_checkable
class OutputReader(Protocol):
    """Sees the pair (x, dL/dy) at every site in the backward: the full-weight gradient of each rollout."""

    def read(self, site: str, pair: Pairs) -> None: ...


@checked
class Tape:
    """The state of one forward and backward: layout, lanes and readers.

    ``kept`` and ``quarantine`` are lanes; ``None`` leaves that adapter to ordinary autograd. ``l1`` adds
    ``l1 * mean |quarantine output|``, averaged over sites, to the loss by its exact gradient; positions that ``real`` marks
    False (padding) count as 0 in that mean.
    """

    def __init__(
        self,
        rollouts: int,
        tokens: int,
        *,
        kept: Lane | None = None,
        quarantine: Lane | None = None,
        inputs: InputReader | None = None,
        outputs: OutputReader | None = None,
        l1: float = 0.0,
        real: Bool[Tensor, "b s"] | None = None,
    ):
        if rollouts < 1 or tokens < 1:
            raise ValueError(f"a tape needs at least one rollout and one token, not [{rollouts}, {tokens}]")
        if l1 < 0:
            raise ValueError(f"l1 is a penalty and must be at least 0, not {l1}")
        self.rollouts, self.tokens = rollouts, tokens
        self.kept, self.quarantine = kept, quarantine
        self.inputs, self.outputs, self.l1, self.real = inputs, outputs, l1, real
        self._forward: dict[str, Callable[[Tensor], Tensor] | None] = {}
        self._backward: set[str] = set()

    def rows(self, t: Tensor) -> Tensor:
        """``[b, s, d]`` of a tensor that a Linear saw as ``[b, s, d]`` or ``[b * s, d]``; ``ValueError`` otherwise."""
        if t.shape[:-1] == (self.rollouts, self.tokens):
            return t
        if t.shape[:-1] == (self.rollouts * self.tokens,):
            return t.view(self.rollouts, self.tokens, t.shape[-1])
        raise ValueError(
            f"this tape was made for {self.rollouts} rollouts of {self.tokens} tokens, but a Linear saw {tuple(t.shape)}; "
            "give the tape the layout of the batch that the model runs"
        )

    def saw_forward(self, site: str, mask: Callable[[Tensor], Tensor] | None = None) -> None:
        """``mask`` is the site's point for masks, where hooks may overrule them."""
        self._forward[site] = mask

    def mask(self, site: str, keep: Tensor) -> Tensor:
        """``keep`` (1 learn, 0 flagged) after the hooks at the site's mask point; ``ValueError`` where they give no such mask."""
        point = self._forward.get(site)
        new = keep if point is None else point(keep)
        if not isinstance(new, Tensor) or new.shape != keep.shape:
            got = f"a mask of shape {list(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
            raise ValueError(f"a hook at {site}.hook_mask returned {got}, not a mask of shape {list(keep.shape)}")
        return new

    def saw_backward(self, site: str) -> None:
        self._backward.add(site)

    def assert_fired(self, sites: Iterable[str], *, backward: bool) -> None:
        """Raise ``RuntimeError`` naming each site that did not run in the forward (or report in the backward)."""
        missing = [site for site in sites if site not in (self._backward if backward else self._forward)]
        if missing:
            what = "report a gradient" if backward else "run"
            raise RuntimeError(
                f"these adapters did not {what} while the tape was open: {', '.join(missing)}; run forward and backward "
                "inside the context (under checkpointing the backward runs the forward again)"
            )
