"""Forward of any pieces of sequences over a key-value cache of the caller; the engine and the patch sweep are built on this module.

    decoder = Decoder(host)
    logits = decoder(tokens, positions, allowed, cache)            any pieces of any sequences, side by side
    logits = decoder(tokens, positions, allowed, cache, entry=(3, stream))   start at block 3 from the given residual stream

Once per layer, ``cache.update(key, value, layer)`` receives the new keys and values ``[b h t dh]`` and returns all that the queries
may attend to, ``[b h S dh]``, under the mask ``allowed [b 1 t S]``. The caller always supplies the positions, so rows may be at
different positions of different sequences. The host's hooks act as in any other forward.

A model whose class was never compared is compared when the decoder is made: pieces of two random rows must have the logits of whole
forwards. Where that fails (recurrent states, positions that attention counts by itself) the decoder is ``private``: a sequence
runs alone on a cache of transformers, its prompt in one piece. Where that fails too, the model is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mi_route2.adapters.linear import Branch
from mi_route2.architectures import PATTERNS, Architecture, config_of, heads
from mi_route2.hosts.base import LEAK, Host, KeyValues
from mi_route2.rollouts import still
from mi_route2.sites import Site, module_at, refuse_shared

COMPARED = ("Qwen3", "Llama", "GPT2", "MicroGPT")
"""Rows of the table that tests compare with whole forwards, and that no decoder compares again."""

HOSTED = ("torch", "transformer_lens")
STREAM = ("resid_pre", "resid_post")
MASKED = ("sdpa", "eager", "exact")
"""Attention implementations that accept a mask per query; the others would misread such a mask."""


UNLIMITED = 1 << 16
"""Context of a model without a table of positions, in tokens."""
NARROW = {"sliding_window": 3, "attention_chunk_size": 3}
"""Config values under which a model is compared, so that eight tokens reach beyond a window."""


@dataclass(frozen=True)
class Keeping:
    """How a model keeps keys and values: whether ``private``, and else the key-value heads and the wider of key and value.

    ``tuples`` is true if blocks return a tuple.
    """

    private: bool
    heads: int
    width: int
    tuples: bool = False


class Decoder:
    """Callable that runs a host's model over pieces of sequences; see the module.

    Attributes:
        host: The host.
        layers: Number of blocks.
        private: True if each sequence needs a cache of its own, from ``begin``.
        heads: Number of key-value heads.
        width: Size of a head; if keys and values differ, the larger one.
        context: Longest sequence, in tokens.

    Raises:
        ValueError: The host, the architecture or its attention implementation is not supported.
    """

    def __init__(self, host: Host):
        row = host.architecture
        if host.name not in HOSTED:
            raise ValueError(f"a decoder runs on the hosts {' and '.join(HOSTED)}, not on {host.name}: open the same model there")
        if row.name.startswith("TransformerLens native"):
            raise ValueError(f"{row.name} takes no cache: use host.logits")
        self.host = host
        self._native = row.name == "MicroGPT"
        model = self._model = plain_model(host)
        self._blocks, self._config = _block_list(model, row), config_of(model)
        config = self._config
        self._kinds = _attention_kinds(config)
        if (why := self._unmaskable()) is not None:
            raise ValueError(why)
        self.layers = len(self._blocks)
        self.context = int(_first(config, "max_position_embeddings", "n_positions", "context", default=UNLIMITED))
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self._drops = bool(getattr(config, "attention_dropout", 0.0)) or any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
        )
        self._checkpointed = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._stream = (int(_first(config, "hidden_size", "n_embd", "d")),)
        self._shapes: dict[Site, tuple[int, ...]] = {}
        size = int(getattr(config, "head_dim", None) or self._stream[0] // heads(model, "q"))
        self._keeping, self.private = Keeping(False, heads(model, "k"), size), False
        self._keeps = "logits_to_keep" in signature(model.forward).parameters
        if not self.compared:
            known: dict[object, Keeping] = vars(model).setdefault(KEPT, {})
            key = host.name, getattr(config, "_attn_implementation", None)
            self._keeping = known.get(key) or self._compare()
            known[key] = self._keeping
        self.private, self.heads, self.width = self._keeping.private, self._keeping.heads, self._keeping.width

    @property
    def compared(self) -> bool:
        """True if the architecture is one whose decoder tests compare with whole forwards, and all of its layers attend to all."""
        return self.host.architecture.name in COMPARED and set(self._kinds) == {FULL}

    def begin(self) -> Any:
        """Return an empty cache of transformers for one sequence of a ``private`` decoder."""
        from transformers import DynamicCache

        return DynamicCache(config=self._config)  # pyright: ignore[reportArgumentType]

    def _compare(self) -> Keeping:
        """Return how the model keeps keys and values, as pieces of two random rows have the logits of whole forwards."""
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(self.vocabulary, (2, 8), generator=generator).to(self.device)
        with self._narrowed(), still(self._model), torch.no_grad():
            whole, first = self._whole(tokens)
            self._keeping = replace(self._keeping, tuples=isinstance(first, tuple))
            size = float(whole.abs().max())
            most = (LEAK if self.dtype in (torch.float32, torch.float64) else 0.1) * size
            for run in (self._together, self._apart):
                try:
                    found, keeping = run(tokens, first)
                except Exception:  # whatever the code of a model raises for a cache that it does not know
                    continue
                if float((found - whole).abs().max()) <= most:
                    return keeping
        raise ValueError(f"no cache gives this {type(self._model).__name__} the logits of its whole forward: use host.logits")

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        """Context: windows and chunks are of three tokens."""
        usual = {name: size for name in NARROW if (size := getattr(self._config, name, None))}
        try:
            for name in usual:
                setattr(self._config, name, NARROW[name])
            self._kinds = _attention_kinds(self._config)
            yield
        finally:
            for name, size in usual.items():
                setattr(self._config, name, size)
            self._kinds = _attention_kinds(self._config)

    def _whole(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Return the logits of a whole forward, and what the first block returns."""
        outputs: list[Any] = []
        handle = self._blocks[0].register_forward_hook(lambda _m, _a, out: outputs.append(out))
        try:
            return self.host.logits(tokens), outputs[0]
        finally:
            handle.remove()

    def _together(self, tokens: Tensor, first: Any) -> tuple[Tensor, Keeping]:
        """Return the logits of two rows that run side by side at different positions, and enter block 1 at the end."""
        cache, tuples = _Columns(tokens.shape[1]), self._keeping.tuples
        logits = torch.zeros(0)
        for columns in ([range(4), range(4)], [range(4, 7), range(3, 6)], [range(7, 8), range(6, 7)], [range(6, 8), range(6, 8)]):
            positions = torch.tensor([list(row) for row in columns], device=self.device)
            rows = torch.arange(2, device=self.device)[:, None]
            cache.positions = positions
            allowed = (torch.arange(tokens.shape[1], device=self.device) <= positions[..., None])[:, None]
            stream = (first[0] if tuples else first)[rows, positions]
            entry = self._entering(1, stream) if columns[0] == columns[1] != range(4) and self.layers > 1 else nullcontext()
            with entry:
                out = self._run(tokens[rows, positions], positions, allowed, cache, None)
            logits = logits if len(logits) else out.new_zeros(2, tokens.shape[1], out.shape[-1])
            logits[rows, positions] = out
        sizes = {key.shape[1] for pair in cache.pairs.values() for key in pair}
        if len(sizes) != 1 or len(cache.pairs) != self.layers or cache.counted:
            raise ValueError("its layers keep different numbers of heads, or none, or count what they keep")
        width = max(values.shape[3] for pair in cache.pairs.values() for values in pair)
        return logits, replace(self._keeping, heads=sizes.pop(), width=width)

    def _apart(self, tokens: Tensor, _first: Any) -> tuple[Tensor, Keeping]:
        """Return the logits of two rows that run one after the other, on caches of transformers."""
        self.private = True
        rows: list[Tensor] = []
        for row in tokens:
            states, parts = self.begin(), (range(5), range(5, 6), range(6, 7), range(7, 8))
            positions = [torch.tensor([list(part)], device=self.device) for part in parts]
            rows.append(torch.cat([self._run(row[at], at, None, states, None) for at in positions], 1))
        return torch.cat(rows), replace(self._keeping, private=True)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has now."""
        return int(_first(self._config, "vocab_size", "vocab"))

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's blocks, in order."""
        return self._blocks

    @property
    def unembed(self) -> nn.Module:
        """The module that maps the final, normalized residual stream to logits."""
        return module_at(plain_model(self.host), self.host.architecture, self.host.architecture.unembed)

    def __call__(
        self,
        tokens: Int[Tensor, "b t"],
        positions: Int[Tensor, "b t"],
        allowed: Bool[Tensor, "b 1 t S"] | None,
        cache: KeyValues,
        *,
        keep: Int[Tensor, " n"] | None = None,
        entry: tuple[int, Float[Tensor, "b t d"]] | None = None,
    ) -> Float[Tensor, "r n v"]:
        """Return the logits ``[r n v]`` at the columns ``keep`` (``None``: all ``t``); ``r`` is ``b``, or what a hook makes of it.

        Args:
            tokens: Token ids of the pieces.
            positions: Position of each token in its sequence.
            allowed: True where a query may attend to a key. Every query, padding included, must be allowed at least one key (for
                example itself). ``None``: one query attends to all keys, and several, which then begin their sequences, to those up
                to their own; this needs ``unmasked``.
            cache: Receives the new keys and values of each layer, and returns all keys and values.
            keep: Columns of the logits.
            entry: ``(layer, stream)`` skips the blocks before ``layer`` and starts from ``stream``, in the place of their output;
                hooks in the skipped blocks do not fire.

        Raises:
            RuntimeError: As in ``demand_fit``.
            ValueError: ``entry`` names a layer that cannot be entered.
        """
        self.demand_fit()
        if entry is None:
            return self._run(tokens, positions, allowed, cache, keep)
        with self._entering(*entry):
            return self._run(tokens, positions, allowed, cache, keep)

    def demand_fit(self) -> None:
        """Raise ``RuntimeError`` for a model that cannot be run as it is now.

        It is in training mode with dropout or gradient checkpointing, or its dtype, device or attention implementation was changed.
        """
        parameter = next(self._model.parameters())
        if (parameter.dtype, parameter.device) != (self.dtype, self.device):
            raise RuntimeError(
                f"the model is {parameter.dtype} on {parameter.device} now, but keys, values and vectors here are for "
                f"{self.dtype} on {self.device}: change it back, or make a new engine"
            )
        if (why := self._unmaskable()) is not None:
            raise RuntimeError(why)
        if self._drops and any(module.training for module in self._model.modules()):
            raise RuntimeError("the model, or a part of it, is in training mode and drops activations at random: call eval() on it")
        if any(module.gradient_checkpointing and module.training for module in self._checkpointed):
            raise RuntimeError(
                "the model is in training mode with gradient checkpointing, under which its layers take no cache: call eval() on it"
            )

    def shape(self, site: Site) -> tuple[int, ...]:
        """Return the shape of a site's value at one token, from a forward of one token; the result is cached until ``forget``.

        Errors as in ``Host.hooks``, and ``ValueError`` for a site that does not fire.
        """
        if site.layer is not None and site.layer < self.layers and not site.linear and site.point in STREAM:
            return self._stream  # the same in every architecture, so no forward is needed
        if site.point in PATTERNS:
            raise ValueError(f"{site} has another size at every token: read it with host.capture, or edit it with host.hooks")
        if site not in self._shapes:
            try:
                values = self.host.capture([site], torch.zeros((1, 1), dtype=torch.long, device=self.device))
            except RuntimeError as error:
                raise ValueError(
                    f"{site} does not fire in this model as its adapters are switched or merged now, or its modules were replaced"
                ) from error
            self._shapes[site] = tuple(values[site].shape[2:])
        return self._shapes[site]

    def forget(self) -> None:
        """Clear the cached shapes, after a change of the model or its adapters that changes which sites fire."""
        self._shapes.clear()

    def quarantines(self) -> tuple[Site, ...]:
        """Return the site ``quarantine_out`` of every Linear whose quarantine is attached and switched on."""
        return tuple(site for site in self.adapters() if site.point == "quarantine_out")

    def adapters(self) -> tuple[Site, ...]:
        """Return the sites ``kept_out`` and ``quarantine_out`` of every adapter that is attached and switched on."""
        branches = [module for module in self.host.model.modules() if isinstance(module, Branch)]
        points = ("kept_out", "quarantine_out")
        return tuple(
            sorted({Site.parse(f"{branch.site}.{point}") for branch in branches for point in points if point in branch.fires})
        )

    @property
    def unmasked(self) -> bool:
        """True if ``allowed`` may be ``None``."""
        plain = self.compared and not self._native
        return self.private or (plain and self.host.name == "torch" and getattr(self._config, "_attn_implementation", "") == "sdpa")

    @property
    def _bool_mask(self) -> bool:
        return self._native or getattr(self._config, "_attn_implementation", "") == "exact"

    def _unmaskable(self) -> str | None:
        """Return why the model's attention cannot be run; ``None`` if it can."""
        implementation = getattr(self._config, "_attn_implementation", None) or MASKED[0]
        if self._native or implementation in MASKED:
            return None
        return f"a decoder masks each query, which {implementation} cannot: load the model with attn_implementation='sdpa'"

    def _run(self, tokens: Tensor, positions: Tensor, allowed: Tensor | None, cache: KeyValues, keep: Tensor | None) -> Tensor:
        model: Any = self.host.model
        mask = None if allowed is None else self._mask(allowed, positions)
        if self._native:
            out = model(tokens, attention_mask=mask, position_ids=positions, cache=cache)
            return out if keep is None else out[:, keep]
        from mi_route2.hosts.cache import TransformersCache, grouped  # transformers takes seconds to import

        keeps = keep is not None and self.host.name == "torch" and self._keeps
        extra: dict[str, Any] = {"logits_to_keep": keep} if keeps else {}
        if self.host.architecture.positions:
            extra["position_ids"] = positions
        states: Any = cache if self.private else TransformersCache(cache)
        with nullcontext() if self.private else grouped(self._config):
            out = model(
                tokens,
                attention_mask=mask,
                past_key_values=states,
                use_cache=True,
                **extra,
            )
        logits = out if isinstance(out, Tensor) else out.logits
        return logits if keep is None or keeps else logits[:, keep]

    def _mask(self, allowed: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of the model's attention; of several kinds of attention, that of each."""
        masks: dict[str, Tensor] = {}
        for kind, window in self._kinds.items():
            within = allowed & _within(kind, window, positions, allowed.shape[-1])
            masks[kind] = within if self._bool_mask else additive(within, self.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @contextmanager
    def _entering(self, layer: int, stream: Tensor):
        """Context: skip the blocks before ``layer``; the last one of them returns ``stream``."""
        if not 1 <= layer < self.layers:
            raise ValueError(f"entry must be one of the blocks 1..{self.layers - 1}, not {layer}; to enter block 0, give no entry")
        skipped = [self._blocks[i] for i in range(layer)]
        try:
            for i in range(layer):
                self._blocks[i] = _Given(stream, skipped[i], tuples=self._keeping.tuples)
            yield
        finally:
            for i, block in enumerate(skipped):
                self._blocks[i] = block


class _Given(nn.Module):
    """Stand-in for a block: returns the given residual stream. Models read attributes of a block, as its type of attention."""

    def __init__(self, stream: Tensor, block: nn.Module, *, tuples: bool):
        super().__init__()
        self.stream, self.tuples = stream, tuples
        self.of = (block,)  # in a tuple, so that it is no submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of[0], name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor]:
        return (self.stream,) if self.tuples else self.stream


@dataclass
class _Columns:
    """Keys and values of rows that all have the same length, by layer, with what is at ``positions [b t]`` written anew."""

    length: int
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    pairs: dict[int, list[Tensor]] = field(default_factory=dict)
    counted: bool = False
    """True if attention asked how much is kept: it counts positions by itself, which are not those of a row."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        kept = self.pairs.setdefault(layer, [new.new_zeros(*new.shape[:2], self.length, new.shape[3]) for new in (key, value)])
        for old, new in zip(kept, (key, value), strict=True):
            old[torch.arange(len(new), device=new.device)[:, None], :, self.positions] = new.transpose(1, 2)
        return kept[0].clone(), kept[1].clone()


def additive(allowed: Bool[Tensor, "b 1 t S"], dtype: torch.dtype) -> Float[Tensor, "b 1 t S"]:
    """Return the additive attention mask: 0 where ``allowed``, the dtype's lowest number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def plain_model(host: Host) -> nn.Module:
    """Return the model itself, without the bridge around it (and, for the micro model, without ``Inner``)."""
    if host.name != "transformer_lens":
        return host.model
    inner = host.model.get_submodule("original_model")
    return getattr(inner, "inner", inner)


def _block_list(model: nn.Module, row: Architecture) -> nn.ModuleList:
    """Return the model's blocks; ``ValueError`` if two are one module, or one writes its keys and values as another layer."""
    refuse_shared(model, row)
    blocks = module_at(model, row, row.blocks)
    assert isinstance(blocks, nn.ModuleList), type(blocks)
    for layer, block in enumerate(blocks):
        for module in block.modules():
            if (layer_idx := getattr(module, "layer_idx", layer)) != layer:
                raise ValueError(
                    f"the {type(module).__name__} of layer {layer} has layer_idx={layer_idx}, under which it would store its keys "
                    f"and values: set its layer_idx to {layer}"
                )
    return blocks


FULL = "full_attention"
KEPT = "_route2_keeping"
"""Attribute of a model in which the result of a comparison is kept, by host and attention implementation."""


def _attention_kinds(config: Any) -> dict[str, int]:
    """Return the kinds of attention of the layers, each with its window; ``ValueError`` if a row would depend on its batch."""
    if (rope := getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        # Its angles depend on the longest sequence in the batch, so a request would depend on its neighbors.
        raise ValueError(
            f"a decoder does not support the rope type {rope['rope_type']!r}, which depends on the whole batch: use host.logits"
        )
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if getattr(config, "sliding_window", None) else FULL]
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return {kind: int(getattr(config, windows.get(kind, ""), None) or 0) for kind in sorted(set(kinds))}


def _within(kind: str, window: int, positions: Int[Tensor, "b t"], keys: int) -> Tensor:
    """Return True where the attention of a kind reaches from a query's position to a key's, ``[b 1 t S]``."""
    queries, key = positions[:, None, :, None], torch.arange(keys, device=positions.device)
    if kind == "sliding_attention":
        return key > queries - window
    if kind == "chunked_attention":
        return key // window == queries // window
    return torch.ones((), dtype=torch.bool, device=positions.device)


def _first(config: object, *names: str, default: int | None = None) -> Any:
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    if default is not None:
        return default
    raise ValueError(f"the model's config has none of {', '.join(names)}")
