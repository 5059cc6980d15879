"""Features of a sparse autoencoder or a transcoder at a site, read, edited one at a time, and attributed.

    f = encode(x)        edit:       x + decode(f_new) - decode(f)                     the error x - decode(f) is kept
                         attribute:  (f_clean - f_corrupt) . d score / d f             Marks et al., arXiv:2403.19647
                         error:      (e_clean - e_corrupt) . d score / d x             e = x - decode(f)

For a linear decoder, the effects of all features and of the error add up to attribution patching of the site.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mi_route2.checks import Mask, checked
from mi_route2.hosts.base import Edit, Host, expose, gradients
from mi_route2.patching.attribution import scored
from mi_route2.patching.forwards import Whole
from mi_route2.patching.question import Answers, CleanRun, Given, Metric, Positions, ask, widened
from mi_route2.patching.sweep import record
from mi_route2.sites import Site, precedes


@dataclass(frozen=True)
class FeatureEffect:
    """Estimated effect of one feature at a position (``None``: all of them together), whose token is ``label``."""

    feature: int
    position: int | None
    label: str
    value: float


@dataclass(frozen=True, eq=False, repr=False)
class FeatureEffects:
    """Estimated effects of features.

    Attributes:
        values: Effect of each feature at each position.
        errors: Effect of the part that the dictionary does not reconstruct.
        positions: Positions of the corrupt prompt; ``None`` is all of them together.
        labels: Tokens at the positions.
        clean: Score of the clean run.
        corrupt: Score of the corrupt run.
    """

    values: Float[Tensor, "p f"]
    errors: Float[Tensor, " p"]
    positions: tuple[int | None, ...]
    labels: tuple[str, ...]
    clean: float
    corrupt: float

    @checked
    def top(self, k: int) -> list[FeatureEffect]:
        """Return the ``k`` effects with the largest absolute values, largest first."""
        flat = self.values.flatten()
        chosen = flat.abs().topk(min(k, len(flat))).indices.tolist()
        places = ((*divmod(i, self.values.shape[1]), float(flat[i])) for i in chosen)
        return [FeatureEffect(f, self.positions[p], self.labels[p], value) for p, f, value in places]

    def __repr__(self) -> str:
        best = ", ".join(f"{one.feature} at {one.position} {one.value:+.3g}" for one in self.top(3))
        return f"FeatureEffects({self.values.shape[1]} features, {len(self.positions)} positions: {best})"


@checked
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Dictionary of features at a site.

    Attributes:
        site: Site that ``sae.encode`` reads.
        sae: Any object with ``encode`` and ``decode``, for example of sae-lens, as it is. Values get the dtype and device of its
            parameters.
        output: Site that ``sae.decode`` writes, for a transcoder (``mlp_in`` to ``mlp_out``); otherwise ``None``.

    Raises:
        ValueError: ``output`` comes before ``site``.

    Examples:
        >>> dictionary = Dictionary(Site(8, "resid_pre"), sae)
        >>> with host.hooks(dictionary.edit(1234, to=0.0)):
        ...     ablated = host.logits(tokens)
    """

    site: Site
    sae: Any
    output: Site | None = None

    def __post_init__(self) -> None:
        if self.output is not None and not precedes(self.site, self.output):
            raise ValueError(f"a transcoder cannot read {self.site} and write {self.output}, which comes before it")
        if lacking := [name for name in ("encode", "decode") if not callable(getattr(self.sae, name, None))]:
            raise ValueError(f"this {type(self.sae).__name__} has no {lacking[0]}: give an object with encode(x) and decode(f)")

    @checked
    def read(self, host: Host, tokens: Int[Tensor, "b s"], attention: Mask | None = None) -> Float[Tensor, "b s f"]:
        """Return the features of a forward."""
        with torch.no_grad():
            return self._encode(host.capture([self.site], tokens, attention)[self.site])

    @checked
    def edit(
        self,
        feature: int,
        *,
        to: float | int | Tensor | None = None,
        scale: float | int | Tensor | None = None,
        add: float | int | Tensor | None = None,
    ) -> dict[Site, Edit]:
        """Return edits for ``host.hooks`` that change one feature and keep the error.

        Args:
            feature: Index of the feature.
            to: Its new activation, 0 to ablate it: a number, or a tensor ``[b s]``, for example the feature in another run.
            scale: Factor on its activation, instead.
            add: What its activation gains, instead, also where it is 0.

        Raises:
            ValueError: Not exactly one of ``to``, ``scale`` and ``add``; or, in the forward, a feature that does not exist.
        """
        given = [(name, value) for name, value in (("to", to), ("scale", scale), ("add", add)) if value is not None]
        if len(given) != 1:
            raise ValueError("an edit of a feature needs exactly one of to=, scale= and add=")
        change = partial(self._change, feature, *given[0])
        if self.output is None:
            return {self.site: lambda x: x + change(x).to(x)}
        seen: dict[str, Tensor] = {}
        return {self.site: partial(_see, seen), self.output: lambda y: y + change(seen.pop("input")).to(y)}

    def _encode(self, x: Tensor) -> Tensor:
        parameters: Any = getattr(self.sae, "parameters", None)
        first = None if parameters is None else next(iter(parameters()), None)
        return self.sae.encode(x if first is None else x.to(first.device, first.dtype))

    def _change(self, feature: int, how: str, value: float | Tensor, x: Tensor) -> Tensor:
        features = self._encode(x)
        if not 0 <= feature < features.shape[-1]:
            raise ValueError(f"feature {feature} does not exist: this dictionary has 0..{features.shape[-1] - 1}")
        new, old, given = features.clone(), features[..., feature], torch.as_tensor(value).to(features)
        new[..., feature] = given if how == "to" else given * old if how == "scale" else given + old
        return self.sae.decode(new) - self.sae.decode(features)

    @checked
    @torch.inference_mode(False)
    def attribute(
        self,
        host: Host,
        *,
        clean: Given | CleanRun,
        corrupt: Given,
        positions: Positions = None,
        answer: Answers = None,
        foil: Answers = None,
        metric: Metric = "logit_diff",
        at: int | None = None,
        tokenizer: Any = None,
        together: bool = False,
    ) -> FeatureEffects:
        """Estimate what each feature's clean activation would do in the corrupt run; arguments and errors as in ``attribute``.

        Patch a few of the top features with ``edit(feature, to=...)`` for exact effects.
        """
        question = ask(host, clean, corrupt, positions, metric, answer, foil, at, alpha=1.0, tokenizer=tokenizer, together=together)
        output = self.output or self.site
        pair, exposed = record(Whole(host), question, list(dict.fromkeys([self.site, output]))), dict[Site, Tensor]()
        with scored(host, pair, {output: expose(exposed, output)}) as score:
            slope = gradients(score, [exposed[output]])[0][0, list(question.sources)]
        source, clean_part = self._both(pair.clean.values[self.site])
        here, part = self._both(pair.corrupt.values[self.site])
        weights = torch.autograd.grad((part * slope.to(part)).sum(), here)[0]
        whole = widened(pair.clean.values[output]) - widened(pair.corrupt.values[output])
        error = whole - (widened(clean_part) - widened(part)).detach().to(whole).view_as(whole)
        effects = ((widened(source) - widened(here)) * widened(weights)).detach()
        errors = (error * widened(slope)).flatten(1).sum(1)
        columns = question.columns
        return FeatureEffects(
            _summed(effects, columns).cpu(),
            _summed(errors, columns).cpu(),
            tuple(position for position, _ in columns),
            tuple("all" if position is None else question.corrupt.labels[position] for position, _ in columns),
            *pair.scores,
        )

    def _both(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of a value, as a leaf of a graph, and their decoding, which may use the scale of this encoding."""
        with torch.enable_grad():
            features = self._encode(value).detach().requires_grad_()
            return features, self.sae.decode(features)


def _see(seen: dict[str, Tensor], value: Tensor) -> None:
    seen["input"] = value.clone()  # a module may write into it


def _summed(values: Tensor, columns: Sequence[tuple[int | None, Sequence[int]]]) -> Tensor:
    return torch.stack([values[list(places)].sum(0) for _, places in columns])
