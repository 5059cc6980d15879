"""Forward of any pieces of sequences over a key-value cache of the caller; the engine and the patch sweep are built on this module.

    decoder = Decoder(host)
    logits = decoder(tokens, positions, allowed, cache)            any pieces of any sequences, side by side
    logits = decoder(tokens, positions, allowed, cache, entry=(3, stream))   start at block 3 from the given residual stream

Once per layer, ``cache.update(key, value, layer)`` receives the new keys and values ``[b h t dh]`` and returns all that the queries
may attend to, ``[b h S dh]``, under the mask ``allowed [b 1 t S]``. The caller always supplies the positions, so rows may be at
different positions of different sequences. The host's hooks act as in any other forward.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mi_route2.adapters.linear import Branch
from mi_route2.architectures import Architecture, config_of, heads
from mi_route2.hosts.base import Host, KeyValues
from mi_route2.sites import Site, module_at, refuse_shared

DECODERS: Mapping[str, str] = MappingProxyType(
    {"Qwen3": "transformers", "Llama": "transformers", "GPT2": "transformers", "MicroGPT": "own"}
)
"""Supported architectures, and the kind of cache that each takes. The others mask some layers differently (sliding windows, caps)
or were never compared with a plain forward."""

HOSTED = ("torch", "transformer_lens")
STREAM = ("resid_pre", "resid_post")
MASKED = ("sdpa", "eager", "exact")
"""Attention implementations that accept a mask per query; the others would misread such a mask."""


class Decoder:
    """Callable that runs a host's model over pieces of sequences; see the module.

    Attributes:
        host: The host.
        layers: Number of blocks.
        heads: Number of key-value heads.
        width: Size of a head.
        context: Longest sequence, in tokens.

    Raises:
        ValueError: The host, the architecture or its attention implementation is not supported.
    """

    def __init__(self, host: Host):
        row = host.architecture
        if host.name not in HOSTED:
            raise ValueError(f"a decoder runs on the hosts {' and '.join(HOSTED)}, not on {host.name}: open the same model there")
        if row.name not in DECODERS:
            raise ValueError(f"a decoder runs {', '.join(DECODERS)}, not {row.name}: use host.logits")
        self.host = host
        self._native = DECODERS[row.name] == "own"
        model = self._model = plain_model(host)
        self._blocks, self._config = _block_list(model, row), config_of(model)
        config = self._config
        _refuse_windows(config)
        if (why := self._unmaskable()) is not None:
            raise ValueError(why)
        self.layers = len(self._blocks)
        self.heads = heads(model, "k")
        self.width = int(getattr(config, "head_dim", None) or _first(config, "hidden_size", "n_embd", "d") // heads(model, "q"))
        self.context = int(_first(config, "max_position_embeddings", "n_positions", "context"))
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self._drops = bool(getattr(config, "attention_dropout", 0.0)) or any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
        )
        self._checkpointed = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._stream = (int(_first(config, "hidden_size", "n_embd", "d")),)
        self._shapes: dict[Site, tuple[int, ...]] = {}

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
    ) -> Float[Tensor, "b n v"]:
        """Return the logits ``[b n v]`` at the columns ``keep`` (``None``: all ``t``).

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
        return not self._native and self.host.name == "torch" and getattr(self._config, "_attn_implementation", "") == "sdpa"

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
        mask = allowed if self._bool_mask or allowed is None else additive(allowed, self.dtype)
        if self._native:
            out = model(tokens, attention_mask=mask, position_ids=positions, cache=cache)
            return out if keep is None else out[:, keep]
        from mi_route2.hosts.cache import TransformersCache, grouped  # transformers takes seconds to import

        extra = {} if keep is None or self.host.name != "torch" else {"logits_to_keep": keep}
        with grouped(self._config):
            out = model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=TransformersCache(cache),
                use_cache=True,
                **extra,
            )
        logits = out if isinstance(out, Tensor) else out.logits
        return logits if keep is None or extra else logits[:, keep]

    @contextmanager
    def _entering(self, layer: int, stream: Tensor):
        """Context: skip the blocks before ``layer``; the last one of them returns ``stream``."""
        if not 1 <= layer < self.layers:
            raise ValueError(f"entry must be one of the blocks 1..{self.layers - 1}, not {layer}; to enter block 0, give no entry")
        skipped = [self._blocks[i] for i in range(layer)]
        try:
            for i in range(layer):
                self._blocks[i] = _Given(stream)
            yield
        finally:
            for i, block in enumerate(skipped):
                self._blocks[i] = block


class _Given(nn.Module):
    """Stand-in for a block: returns the given residual stream."""

    def __init__(self, stream: Tensor):
        super().__init__()
        self.stream = stream

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.stream


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


def _refuse_windows(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"a decoder runs full attention only, but this model has {', '.join(sorted(kinds))}: use host.logits")
    if (rope := getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        # Its angles depend on the longest sequence in the batch, so a request would depend on its neighbors.
        raise ValueError(
            f"a decoder does not support the rope type {rope['rope_type']!r}, which depends on the whole batch: use host.logits"
        )


def _first(config: object, *names: str) -> Any:
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    raise ValueError(f"the model's config has none of {', '.join(names)}")
