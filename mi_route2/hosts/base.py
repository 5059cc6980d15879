"""Host interface, and the methods that all hosts share.

    host.attach("blocks.*.attn.*", spec=spec, generator=g)      the same adapters, parameters and file on every host
    host.capture([Site(0, "resid_mid")], tokens)                {site: tensor}, in one shape on every host
    with host.hooks({Site(1, "q"): edit}): host.logits(tokens)  read (return None) or write (return a tensor)
    logits, cache = host.run_with_cache(tokens)                 TransformerLens's words and hook names, on every host
    host.run_with_hooks(tokens, [("blocks.1.attn.hook_q", edit)])

Values have the shapes that ``architectures.POINTS`` states: queries, keys, values and ``z`` have a head axis, ``[b s h dh]``. A
requested hook that does not fire is an error that names its site.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.linear import Branch, RoutedLinear
from mi_route2.adapters.weights import weights_hash
from mi_route2.architectures import (
    ADAPTER_HOOKS,
    ADAPTER_POINTS,
    ATTENTION_POINTS,
    BRIDGE_LINEARS,
    BRIDGE_POINTS,
    EXPERT_POINTS,
    HEADED,
    LENS_POINTS,
    POINTS,
    Architecture,
    architecture_of,
    config_of,
)
from mi_route2.checks import Mask, as_mask, checked
from mi_route2.found import found_row
from mi_route2.rollouts import (
    Policy,
    call_with_mask,
    demand_causal,
    demand_own_angles,
    demand_tokens,
    positions,
    right_padded,
    still,
    vocabulary,
)
from mi_route2.sites import Site, Slot, demand_site, left_out, nearest, no_adapter, refuse_shared, slots

Edit = Callable[[Tensor], Tensor | None]
"""Function of a site's value: returns ``None`` to read only, or the tensor that replaces the value."""


Entering = Callable[[], AbstractContextManager[None]]
"""Function that begins a context."""

Names = Site | str | Iterable[Site | str] | Callable[[str], bool]
"""Selection of sites: a ``Site``, a point of all layers (``"resid_pre"``), a name or glob of this project (``"blocks.*.z"``) or of
TransformerLens (``"blocks.0.attn.hook_z"``), several of these, or a function that returns True for the names that are selected."""


@dataclass(frozen=True)
class Hook:
    """Argument ``hook`` of a hook function, as in TransformerLens.

    Attributes:
        name: TransformerLens's name of the hook point.
        site: The site.
    """

    name: str
    site: Site

    def layer(self) -> int:
        """Return the layer of the block; ``ValueError`` for the unembedding."""
        if self.site.layer is None:
            raise ValueError(f"{self.site} has no layer")
        return self.site.layer


class ActivationCache(Mapping[Site, Tensor]):
    """Activations of one forward by ``Site``; names work as keys too: ``cache["blocks.0.attn.hook_z"]``, ``cache["z", 0]``."""

    def __init__(
        self, values: Mapping[Site, Tensor], names: Mapping[str, Site], slopes: Mapping[Site, Tensor] = MappingProxyType({})
    ):
        self._values, self._names, self._slopes = values, names, slopes

    @property
    def gradients(self) -> "ActivationCache":
        """Gradients of the ``loss`` of ``run_with_cache`` at the same sites; ``ValueError`` if it was given none."""
        if self._slopes.keys() != self._values.keys():
            raise ValueError("this cache has no gradients: call run_with_cache(tokens, loss=function of the logits)")
        return ActivationCache(self._slopes, self._names)

    def __getitem__(self, key: Site | str | tuple[str, int]) -> Tensor:
        try:
            site = self._names[key] if isinstance(key, str) else Site(key[1], key[0]) if isinstance(key, tuple) else key
            return self._values[site]
        except KeyError as error:
            name = ".".join(map(str, ("blocks", *key[::-1]))) if isinstance(key, tuple) else str(key)
            raise KeyError(f"no value at {name!r} in this cache: the nearest are {nearest(name, list(self._names))}") from error

    def __iter__(self) -> Iterator[Site]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        some = [f"{site} {list(value.shape)}" for site, value in [*self._values.items()][:4]]
        return f"ActivationCache of {len(self)} sites: {', '.join(some)}{', ...' if len(self) > len(some) else ''}"


class Host(ABC):
    """Model whose sites can be hooked.

    A subclass implements how its library calls the model, the name of each site, and how hooks are installed. The other methods are
    shared and defined here.

    Examples:
        >>> logits, cache = host.run_with_cache(tokens, names="resid_post")
        >>> cache["resid_post", 1].shape
        torch.Size([2, 7, 16])
    """

    name: str
    model: nn.Module
    architecture: Architecture

    @checked
    def logits(self, tokens: Int[Tensor, "b s"], attention: Mask | None = None) -> Float[Tensor, "b s v"]:
        """Return next-token logits ``[b s v]``; padding may be on either side, and positions count real tokens only.

        Args:
            tokens: Token ids.
            attention: Mask of real tokens, boolean or 0 and 1 as a tokenizer returns it; ``None`` if there is no padding.

        Raises:
            ValueError: No tokens, a token that the model lacks, a row longer than GPT-2's table of positions, or padding between
                tokens that a sliding window would count.
        """
        if not tokens.numel():
            raise ValueError(f"tokens are {list(tokens.shape)}: give at least one sequence of at least one token")
        mask = None if attention is None else as_mask("attention", attention)
        demand_tokens(self.model, tokens, mask)
        return self._logits(tokens, mask)

    @abstractmethod
    def _logits(self, tokens: Int[Tensor, "b s"], attention: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s v"]:
        """Implement ``logits``; the arguments are already checked."""

    @abstractmethod
    def address(self, site: Site) -> str:
        """Return the site's name in this host's library; ``ValueError`` says why the host or the architecture lacks it."""

    @checked
    def hooks(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        """Context: every forward through this host runs under ``edits``.

        It can be entered again, and within itself, where the edits act once more.

        Raises:
            ValueError: A key is not a ``Site``, or the host or the architecture lacks its point.
            KeyError: The model lacks the layer or the adapter.
            TypeError: An edit is not a function.
            RuntimeError: On a clean exit, if a hook did not fire.
        """
        for site, edit in edits.items():
            demand_site(site, "a hook")
            if not callable(edit):
                raise TypeError(f"the edit of {site} is a {type(edit).__name__}: give a function of the site's value")
        return _Reentrant(self._prepared(edits))

    def fused(self) -> AbstractContextManager[None]:
        """Context: attention that a library takes apart for its hooks runs in one piece, if no hook could tell.

        A hook that is put on inside of the context may not fire.
        """
        return nullcontext()

    @abstractmethod
    def _prepared(self, edits: Mapping[Site, Edit]) -> Entering:
        """Return a function that returns the context of ``hooks``; the arguments are already checked."""

    @checked
    def attach(
        self,
        *patterns: str,
        spec: AdapterSpec | None = None,
        generator: torch.Generator | None = None,
        expect: int | None = None,
        cache_dir: Path | None = None,
    ) -> Adapters:
        """Attach adapters to the logical Linears that ``patterns`` select; arguments and errors as in ``mi_route2.attach``."""
        adapters = attach(
            self.model,
            *patterns,
            spec=spec,
            generator=generator,
            expect=expect,
            cache_dir=cache_dir,
            known=self._linears(patterns),
            without=self.left_out(),
        )
        return self._listed(adapters)

    def linears(self) -> dict[str, Slot]:
        """Return every logical Linear of the model by name, with or without adapters."""
        return slots(self.model)

    def left_out(self) -> dict[str, str]:
        """Return the modules of the blocks that have a weight and take no adapters, ``blocks.3.mlp.experts``, and their classes."""
        return left_out(self.model, self.linears())

    def weights_hash(self) -> str:
        """Return a hash of all weights by content, including those of attached adapters.

        The hash is the same on every host and does not depend on which adapters are switched on. ``RunStore.writing`` and
        ``invalidate`` use it to identify the model of a captured run.
        """
        return weights_hash(self.model, self.linears(), adapters=True)

    def _linears(self, patterns: tuple[str, ...]) -> dict[str, Slot] | None:
        """Return the model's logical Linears (``None``: those of ``slots``); refuse ``patterns`` that this host cannot serve."""
        return None

    def _listed(self, adapters: Adapters) -> Adapters:
        """Return ``adapters`` after the host's library was told about their points."""
        return adapters

    @checked
    def policy(self, adapters: Adapters) -> Policy:
        """Return the model with its adapters, called through this host. A deep copy of the policy calls a copy of the host."""
        return Policy(self.model, adapters, self._forward)

    def _forward(self, _model: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
        return self._logits(tokens, attention)

    def hook_names(self, site: Site) -> tuple[str, ...]:
        """Return the names of a site on every host: this project's name, then those of TransformerLens and its bridge."""
        row = self.architecture
        if site.point in ADAPTER_POINTS:
            linear = site.linear if site.layer is None else {**BRIDGE_LINEARS, **row.bridge_linears}[site.linear]
            lens = [f"{linear}.{ADAPTER_HOOKS[site.point]}"]
        else:
            hooks = LENS_POINTS.get(site.point), {**BRIDGE_POINTS, **row.bridge_points}.get(site.point)
            lens = [hook for hook in hooks if hook is not None and " " not in hook]  # an entry with a space is no hook but a reason
        return (str(site), *(name if site.layer is None else f"blocks.{site.layer}.{name}" for name in lens))

    def sites(self) -> list[Site]:
        """Return every site of the model by layer, then those of attached adapters that are switched on now.

        Points inside of attention (``scores``, ``pattern``, ``result``) are not among them: select these by name.
        """
        branches = [module for module in self.model.modules() if isinstance(module, Branch)]
        of_adapters = [Site.parse(f"{b.site}.{point}") for b in branches for point in ADAPTER_POINTS if point in b.fires]
        return self._existing(*POINTS, *EXPERT_POINTS) + of_adapters

    def _existing(self, *points: str) -> list[Site]:
        """Return the sites at ``points`` of all layers that this architecture has on this host."""
        existing: list[Site] = []
        for site in (Site(layer, point) for layer in self.layers() for point in points):
            try:
                self.address(site)
            except ValueError:
                continue
            existing.append(site)
        return existing

    def layers(self) -> range:
        """Return the layer indices of the model's blocks."""
        return range(1 + max((int(name.split(".")[1]) for name in self.linears() if name.startswith("blocks.")), default=-1))

    @checked
    def find(self, name: str, known: Sequence[Site] | None = None) -> list[Site]:
        """Return the sites, among ``known`` or all, that ``name`` selects (see ``Names``); ``KeyError`` with the nearest names."""
        known = self.sites() if known is None else known
        chosen = self._matching(name, known) or self._matching(name, self._existing(*ATTENTION_POINTS))
        if not chosen:
            if (point := name.rpartition(".")[2]) in {*POINTS, *EXPERT_POINTS, *ATTENTION_POINTS}:
                self.address(Site(0, point))  # raises an error that says why this architecture lacks the point
            if name.rpartition(".")[2] in ADAPTER_POINTS and not any(isinstance(m, Branch) for m in self.model.modules()):
                raise no_adapter(name, ())
            names = dict.fromkeys(
                [*(site.point for site in known), *(suffix for site in known for suffix in self.hook_names(site))]
            )
            raise KeyError(f"no site matches {name!r}: the nearest are {nearest(name, [*names])}")
        return chosen

    def _matching(self, name: str, known: Sequence[Site]) -> list[Site]:
        chosen = [site for site in known if name == site.point or fnmatchcase(str(site), name)]
        # this project's names first, because a glob over adapters' points also matches the bridge's hooks at the same Linear
        return chosen or [site for site in known if any(fnmatchcase(lens, name) for lens in self.hook_names(site))]

    def _named(self, names: Names | None) -> list[Site]:
        if isinstance(names, Site):
            return [names]
        if isinstance(names, str):
            return self.find(names)
        known = self.sites()
        if names is None:
            return known
        if callable(names):
            for some in (known, self._existing(*ATTENTION_POINTS)):
                if selected := [site for site in some if any(map(names, self.hook_names(site)))]:
                    return selected
            raise KeyError(f"the function selects no site: site names look like {', '.join(self.hook_names(known[0]))}")
        selected = [site for name in names for site in (self.find(name, known) if isinstance(name, str) else [name])]
        return list(dict.fromkeys(selected))

    @checked
    def run_with_cache(
        self,
        tokens: Int[Tensor, "b s"],
        attention: Mask | None = None,
        names: Names | None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Float[Tensor, "b s v"], ActivationCache]:
        """Return the logits ``[b s v]``, and detached activations at the sites that ``names`` selects (``None``: all of ``sites``).

        ``cache[Site(0, "z")]``, ``cache["blocks.0.attn.hook_z"]`` and ``cache["z", 0]`` are the same value. As in TransformerLens,
        the logits have a graph unless gradients are off. ``attention`` and errors as in ``logits``; ``KeyError`` for an unknown
        name.

        Args:
            tokens: Token ids.
            attention: Mask of real tokens.
            names: Selection of sites.
            loss: Function of the logits that returns one number. ``cache.gradients`` then has its gradient at each site; the
                logits are detached, and the parameters' ``.grad`` unchanged. ``ValueError`` if it has no gradient.

        Examples:
            >>> _, cache = host.run_with_cache(tokens, names="z", loss=lambda logits: logits[:, -1, 3].sum())
            >>> cache.gradients["z", 0].shape == cache["z", 0].shape
            True
        """
        sites, values, slopes = self._named(names), dict[Site, Tensor](), dict[Site, Tensor]()
        if loss is None:
            with self.hooks({site: reader(values, site) for site in sites}):
                logits = self.logits(tokens, attention)
        else:
            graph = torch.inference_mode(False), torch.enable_grad()
            with graph[0], graph[1], self.hooks({site: expose(values, site) for site in sites}):
                logits = self.logits(tokens, attention)
                score = loss(logits)
                if not isinstance(score, Tensor) or score.numel() != 1 or not score.requires_grad:
                    raise ValueError("loss returned no number with a gradient: compute one number with torch from the logits")
                slopes = dict(zip(values, gradients(score.sum(), [*values.values()])))
            values, logits = {site: value.detach() for site, value in values.items()}, logits.detach()
        return logits, ActivationCache(values, {name: site for site in values for name in self.hook_names(site)}, slopes)

    @checked
    def generate_with_cache(
        self,
        tokens: Int[Tensor, "b s"],
        max_new: int,
        names: Names | None = None,
        *,
        attention: Mask | None = None,
        temperature: float | int = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, "b t"], ActivationCache]:
        """Continue each row by ``max_new`` tokens; return prompts with completions, and the activations at all of their positions.

        Each token costs a forward of the whole sequence, so that edits of an open ``hooks`` see what they see in any forward. The
        activations come from one more, over the completed sequence. ``Engine`` generates long completions faster.

        Args:
            tokens: Prompts.
            max_new: Number of new tokens in every row; an end-of-text token does not end it.
            names: Selection of sites, as in ``run_with_cache``.
            attention: Mask of real tokens; padding stands on the left.
            temperature: 0 takes the most likely token.
            generator: Draws the tokens, if ``temperature`` is not 0.

        Raises:
            ValueError: No new token, padding on the right, a negative temperature, or one without a generator.

        Examples:
            >>> completed, cache = host.generate_with_cache(tokens, 5, "resid_post")
        """
        mask = None if attention is None else as_mask("attention", attention)
        if max_new < 1 or temperature < 0 or (temperature > 0) != (generator is not None):
            raise ValueError(
                f"max_new={max_new}, temperature={temperature}: generate at least one token, with temperature 0 and no generator, "
                "or with a positive temperature and a generator"
            )
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("padding stands behind a prompt, where its completion would follow: pad on the left")
        with torch.no_grad():
            for _ in range(max_new):
                logits = self.logits(tokens, mask)[:, -1]
                new = logits.argmax(-1, keepdim=True)
                if generator is not None:
                    chances = (logits.to(generator.device, torch.float32) / temperature).softmax(-1)
                    new = torch.multinomial(chances, 1, generator=generator)
                tokens = torch.cat([tokens, new.to(tokens)], 1)
                mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
            return tokens, self.run_with_cache(tokens, mask, names)[1]

    @checked
    def run_with_hooks(
        self, tokens: Int[Tensor, "b s"], hooks: Iterable[Any], attention: Mask | None = None
    ) -> Float[Tensor, "b s v"]:
        """Return the logits ``[b s v]`` of a forward under ``hooks``.

        Each hook is a pair of ``Names`` and a function of the value, or of ``(value, hook)`` as in TransformerLens. A function
        returns ``None`` to read, or a tensor that replaces the value; functions at one site run in the order given. Errors as in
        ``hooks``.
        """
        edits: dict[Site, list[Edit]] = {}
        for pair in hooks:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
                raise TypeError(f"a hook is a name and a function, as in ('blocks.0.attn.hook_z', edit), not {pair!r:.60}")
            names, function = pair
            for site in self._named(names):
                edits.setdefault(site, []).append(self._edit(site, function))
        with self.hooks({site: partial(one_after_another, some) for site, some in edits.items()}):
            return self.logits(tokens, attention)

    def _edit(self, site: Site, function: Callable[..., Any]) -> Edit:
        try:
            parameters = inspect.signature(function).parameters
            # a function around one of TransformerLens's may pass everything on; a module or a compiled function would choke on it
            passes_on = inspect.isfunction(function) and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            takes_hook = passes_on or "hook" in parameters
        except ValueError:  # functions written in C have no signature, for example torch.zeros_like
            takes_hook = False
        if not takes_hook:
            return function
        return partial(function, hook=Hook(self.hook_names(site)[1], site))

    @checked
    def capture(self, sites: Iterable[Site], tokens: Int[Tensor, "b s"], attention: Mask | None = None) -> dict[Site, Tensor]:
        """Return the activations at ``sites``, without gradients; see ``run_with_cache``."""
        chosen = list(sites)
        for site in chosen:
            demand_site(site, "a hook")
        with torch.no_grad():
            return dict(self.run_with_cache(tokens, attention, chosen)[1])


def known_architecture(model: nn.Module) -> Architecture:
    """Return the model's row of ``ARCHITECTURES``.

    Raises:
        ValueError: An unknown architecture, a model that is not causal, or layers that share a module.
    """
    row = architecture_of(model) or found_row(model)
    demand_causal(model)
    refuse_shared(model, row)
    if row.found:
        demand_padding_unread(model)
    return row


LEAK = 1e-4
"""Share of the largest logit by which padding may change one: some layers compute in float32 whatever the model's dtype."""


@torch.no_grad()
def demand_padding_unread(model: nn.Module) -> None:
    """Raise ``ValueError`` if a row of random tokens has other logits beside a longer one, padded on either side, than alone.

    Eager attention in float64 gives NaN under left padding, which hosts refuse when they meet it.
    """
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    nan = dtype == torch.float64 and getattr(config_of(model), "_attn_implementation", None) == "eager"
    size = vocabulary(model) or 2
    long = torch.randint(size, (1, 6), generator=torch.Generator().manual_seed(1)).to(device)
    with still(model):
        alone = call_with_mask(model, long[:, :4], torch.ones(1, 4, dtype=torch.bool, device=device))
        for side, first in (("right", 0), *((("left", 2),) if not nan else ())):
            attention = torch.ones(2, 6, dtype=torch.bool, device=device)
            attention[1] = (torch.arange(6, device=device) >= first) & (torch.arange(6, device=device) < first + 4)
            tokens = torch.cat([long, torch.zeros_like(long)])
            tokens[1, first : first + 4] = long[0, :4]
            found = call_with_mask(model, tokens, attention)[1:, first : first + 4]
            miss, scale = float((found - alone).abs().max()), float(alone.abs().max())
            if not miss <= (LEAK if dtype in (torch.float32, torch.float64) else 0.1) * scale:
                raise ValueError(
                    f"padding on the {side} changes the logits of this {type(model).__name__} by {miss:.1g} of {scale:.1g}, so "
                    "that rollouts of a batch would depend on each other"
                )


def split_heads(site: Site, value: Tensor, count: int) -> Tensor:
    """Reshape ``[b s h*dh]`` to ``[b s h dh]`` if the point has a head axis."""
    return value.unflatten(-1, (count, -1)) if site.point in HEADED and value.ndim == 3 else value


def forward_keywords(
    model: nn.Module, row: Architecture, attention: Bool[Tensor, "b s"] | None, refuse_left: Callable[[Tensor], None]
) -> dict[str, Any]:
    """Return a model's keyword arguments; the mask is passed only if padding stands left of a real token.

    Raises:
        ValueError: ``refuse_left`` does for such padding, or the rotary angles or a sliding window would depend on padding.
    """
    extra: dict[str, Any] = {"use_cache": False} if row.positions else {}
    if attention is not None:
        demand_own_angles(model, attention)
    if attention is None or right_padded(attention):
        return extra
    refuse_left(attention)
    if row.positions:
        extra["position_ids"] = positions(model, attention)
    return extra | {"attention_mask": attention.long()}


class _Reentrant(AbstractContextManager[None]):
    """Context that can be entered again, also within itself: ``enter`` begins a new one each time."""

    def __init__(self, enter: Entering):
        self._enter = enter
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._enter()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class Fired:
    """Record of which requested sites fired."""

    def __init__(self, sites: Iterable[Site]):
        self._silent = dict.fromkeys(sites)

    def saw(self, site: Site) -> None:
        self._silent.pop(site, None)

    def demand(self, address: Callable[[Site], str]) -> None:
        """Raise ``RuntimeError`` naming each site whose hook did not fire."""
        if self._silent:
            names = ", ".join(f"{site} ({address(site)})" for site in self._silent)
            raise RuntimeError(
                f"these hooks did not fire: {names}; run the forward inside the context, through the host's own model"
                + (_COMPILED if compiled_anything() else "")
            )


_COMPILED = (
    ". torch.compile has compiled graphs in this process, and a compiled graph ignores hooks that are registered later: set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False before compiling"
)


def compiled_anything() -> bool:
    """Return whether ``torch.compile`` traced anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def answered(site: Site, edit: Edit, value: Tensor) -> Tensor | None:
    """Call ``edit`` on ``value`` and return the replacement; ``None`` if the edit only read.

    A value on which the edit called ``retain_grad`` or ``register_hook`` is returned itself, because it may be a view or a copy of
    the model's tensor that would otherwise get no gradient.

    Raises:
        ValueError: The replacement does not fit, or the edit wrote into the value in place and returned ``None``. Whether such a
            write takes effect depends on the site. (In inference mode torch counts no writes, so they are not detected.)
    """
    writes = None if value.is_inference() else value._version
    new = edit(value)
    if new is not None:
        new = fitting(site, value, new)
        # what is masked stays so: a query that attends to later tokens would be another model's
        return new if site.point != "scores" else torch.where(value < torch.finfo(value.dtype).min / 2, value, new)
    if writes is not None and value._version != writes:
        raise ValueError(f"the edit of {site} wrote into its value in place and returned None: return the tensor to go on with")
    return value if value.retains_grad or value._backward_hooks else None


def fitting(site: Site, value: Tensor, new: object) -> Tensor:
    """Return ``new``, the replacement that an edit returned; ``ValueError`` if it is no real tensor of the shape of ``value``."""
    if not isinstance(new, Tensor):
        raise ValueError(f"the edit of {site} returned a {type(new).__name__}: return None to read only, or a tensor to write")
    if new.shape != value.shape:
        raise ValueError(f"the edit of {site} returned a tensor of shape {list(new.shape)}, but the site has {list(value.shape)}")
    if new.is_complex() or new.dtype == torch.bool:  # torch would drop the imaginary parts
        raise ValueError(f"the edit of {site} returned a tensor of {new.dtype}: return real numbers")
    return new


def whole_stream(edits: Mapping[Site, Edit]) -> dict[Site, Edit]:
    """Wrap the edits of ``resid_mid`` so that they change the residual stream itself, and not only the input of the MLP's norm.

    The norm receives the same tensor to which the block later adds the MLP output, so the wrapper overwrites that tensor in place.
    The stream is then what the edit returned, bit for bit in any precision. The alternative, to add the difference after the block,
    would round, considerably in half precision. The edit receives a copy, so a value that the edit keeps does not change.
    """
    return {site: _overwriting(site, edit) if site.point == "resid_mid" else edit for site, edit in edits.items()}


def _overwriting(site: Site, edit: Edit) -> Edit:
    def overwrite(x: Tensor) -> Tensor | None:
        new = answered(site, edit, x.clone())
        return None if new is None else x.copy_(new)

    return overwrite


def one_after_another(edits: Sequence[Edit], value: Tensor) -> Tensor | None:
    """Apply several edits to one value in order; ``None`` if all of them only read."""
    wrote = False
    for edit in edits:
        if (new := edit(value)) is not None:
            value, wrote = new, True
    return value if wrote else None


def expose(into: dict[Any, Tensor], key: Any, *first: Edit) -> Edit:
    """Return an edit that keeps the value, after the edits ``first``, for a gradient of what reads it at its site."""
    return partial(one_after_another, [*first, partial(_expose, into, key)])


def _expose(into: dict[Any, Tensor], key: Any, value: Tensor) -> Tensor:
    # Copies, because another module may read the same tensor, and the next one may write into it; a frozen model has no graph here.
    into[key] = value.clone() if value.requires_grad else value.detach().requires_grad_()
    return into[key].clone()


def gradients(score: Tensor, values: Sequence[Tensor], *, keep: bool = False) -> list[Tensor]:
    """Return ``d score / d value``; the graph is kept for more of them if ``keep``."""
    # not ``backward``, which would add to the parameters' ``.grad``; a value that the score does not depend on has no slope
    slopes = torch.autograd.grad(score, values, allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(value) if slope is None else slope for value, slope in zip(values, slopes)]


def reader(into: dict[Site, Tensor], site: Site) -> Edit:
    """Return an edit that stores a detached copy of the value and changes nothing."""

    def keep(value: Tensor) -> None:
        into[site] = value.detach().clone()

    return keep


@runtime_checkable
class KeyValues(Protocol):
    """Cache of keys and values of the sequences in a forward, by layer."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Store new keys and values ``[b h t dh]`` and return all that the queries may attend to, ``[b h S dh]``."""
        ...


_VERSION = attrgetter("_version")


class ModelVersion:
    """Version of a model's numbers: torch's counters of in-place writes, and the switches of routed adapters.

    Not seen are writes through ``p.data``, by fused optimizers and from numpy; and changes of hooks, of settings such as scales, of
    code, and of other libraries' adapters.
    """

    def __init__(self, host: Host):
        self._host = host
        self._tensors: list[Tensor] = []
        self._weights: str | None = None
        self.current: tuple[object, ...] = ()
        self.look()

    def look(self) -> bool:
        """Walk the model and update ``current``; return True if it is another version than before."""
        before, tensors = self.current, self._tensors  # kept alive, so that no new tensor has the id of one that was removed
        model = self._host.model
        self._tensors = [t for t in chain(model.parameters(), model.buffers()) if not t.is_inference()]
        self._boards = list({id(m.board): m.board for m in model.modules() if isinstance(m, RoutedLinear)}.values())
        self.current = self._now()
        del tensors
        if self.current != before:
            self.forget()
        return self.current != before

    def forget(self) -> None:
        """Compute the hash of the weights anew, which changed unseen."""
        self._weights = None

    @property
    def changed(self) -> bool:
        """True if a tensor of the last ``look`` was written to since, or an adapter was switched."""
        return self._now() != self.current

    def weights(self) -> str:
        """Return ``Host.weights_hash``, computed once for each version."""
        if self._weights is None:
            self._weights = self._host.weights_hash()
        return self._weights

    def _now(self) -> tuple[object, ...]:
        switches = tuple((board.kept, board.quarantine) for board in self._boards)
        return tuple(map(id, self._tensors)), sum(map(_VERSION, self._tensors)), switches


def forward_hooks(modules: Iterable[nn.Module]) -> Iterator[object]:
    """Yield the forward hooks of ``modules``, and torch's global ones."""
    for m in modules:
        yield from (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    yield from (*every_module._global_forward_hooks.values(), *every_module._global_forward_pre_hooks.values())


def of_libraries(hook: object) -> bool:
    """Return whether a library has put the hook on its own modules: a bridge, or transformers at the first cached run."""
    return str(getattr(hook, "__module__", "")).startswith(("transformer_lens.model_bridge.", "transformers."))
