"""A host's model called piece by piece, over keys and values that the caller keeps: what an engine and a sweep are built on.

    decoder = Decoder(host)
    logits = decoder(tokens, positions, allowed, cache)            any pieces of any sequences, side by side
    logits = decoder(tokens, positions, allowed, cache, entry=(3, stream))   enter at block 3 with its residual stream given

``cache.update(key, value, layer)`` is called once a layer with the new keys and values ``[b h t dh]`` and answers with all that
the queries may read, ``[b h S dh]``; ``allowed [b 1 t S]`` says which. The model is told positions and never counts them itself, so
rows may be at different places of different sequences. The hosts' hooks act in it as in any forward.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mi_route2.adapters.linear import Branch
from mi_route2.architectures import Architecture, config_of
from mi_route2.hosts.base import Host, KeyValues
from mi_route2.sites import Site, module_at

DECODERS: Mapping[str, str] = MappingProxyType(
    {"Qwen3": "transformers", "Llama": "transformers", "GPT2": "transformers", "MicroGPT": "own"}
)
"""Architectures that can be called so, and whose cache they take. The others mask some layers otherwise (windows of sliding
attention, caps) or have not been compared piece by piece."""

HOSTED = ("torch", "transformer_lens")
STREAM = ("resid_pre", "resid_post")
MASKED = ("sdpa", "eager", "exact")
"""Attentions of transformers that take a mask of every query; the others would take it for something else."""


class Decoder:
    """See the module. ``ValueError`` for a host or an architecture that cannot be called so.

    ``layers``, ``heads`` (of keys and values), ``width`` (of a head), ``context`` (tokens) and ``vocabulary`` are its sizes.
    """

    def __init__(self, host: Host):
        row = host.architecture
        if host.name not in HOSTED:
            raise ValueError(f"a decoder runs on the hosts {' and '.join(HOSTED)}, not on {host.name}: open the same model there")
        if row.name not in DECODERS:
            raise ValueError(f"a decoder runs {', '.join(DECODERS)}, not {row.name}: its layers are not masked alike")
        self.host = host
        self._own = DECODERS[row.name] == "own"
        model = self._model = _plain(host)
        self._blocks, self._config = _block_list(model, row), config_of(model)
        config = self._config
        _refuse_windows(config)
        if (kind := getattr(config, "_attn_implementation", None) or MASKED[0]) not in MASKED and not self._own:
            raise ValueError(f"a decoder masks each query, which {kind} cannot: load the model with attn_implementation='sdpa'")
        self.layers = len(self._blocks)
        self.heads, self.width = _sizes(config)
        self.context = int(_first(config, "max_position_embeddings", "n_positions", "context"))
        self.vocabulary = int(_first(config, "vocab_size", "vocab"))
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self._drops = bool(getattr(config, "attention_dropout", 0.0)) or any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
        )
        self._stream = (int(_first(config, "hidden_size", "n_embd", "d")),)
        self._shapes: dict[Site, tuple[int, ...]] = {}
        self._bool_mask = self._own or getattr(config, "_attn_implementation", "") == "exact"

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's blocks, in order."""
        return self._blocks

    @property
    def unembed(self) -> nn.Module:
        """What makes logits of the last stream, once that is normalised."""
        return module_at(_plain(self.host), self.host.architecture, self.host.architecture.unembed)

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
        """Logits at the columns ``keep`` (all ``t`` where it is ``None``).

        Every query must be allowed some key, padding too: it may read itself. ``None`` allows everything, where ``unmasked``.
        ``entry = (layer, stream)`` leaves out the blocks before ``layer`` and goes on with ``stream``, which stands for what they
        would have given; hooks there do not fire.
        ``RuntimeError`` for a model that drops activations in training mode.
        """
        self.refuse_dropout()
        if entry is None:
            return self._run(tokens, positions, allowed, cache, keep)
        with self._entering(*entry):
            return self._run(tokens, positions, allowed, cache, keep)

    def refuse_dropout(self) -> None:
        """``RuntimeError`` for a model that drops activations in training mode."""
        if self._drops and self._model.training:
            raise RuntimeError("the model is in training mode and drops activations at random: call eval() on it")

    def shape(self, site: Site) -> tuple[int, ...]:
        """The shape of a site's value at one token, as a forward shows it; errors as of ``Host.hooks``, and ``ValueError`` for a
        site that does not fire. What was seen is remembered until ``forget``."""
        if site.layer is not None and site.layer < self.layers and not site.linear and site.point in STREAM:
            return self._stream  # there in every architecture: no forward has to tell
        if site not in self._shapes:
            try:
                found = self.host.capture([site], torch.zeros((1, 1), dtype=torch.long, device=self.device))
            except RuntimeError as error:
                raise ValueError(f"{site} does not fire in this model as its adapters are switched or merged now") from error
            self._shapes[site] = tuple(found[site].shape[2:])
        return self._shapes[site]

    def forget(self) -> None:
        """The model was changed: sites may fire that did not, and the other way round."""
        self._shapes.clear()

    def quarantines(self) -> tuple[Site, ...]:
        """``quarantine_out`` of every Linear whose quarantine is attached and switched on."""
        branches = [module for module in self.host.model.modules() if isinstance(module, Branch)]
        return tuple(sorted({Site.parse(f"{one.site}.quarantine_out") for one in branches if "quarantine_out" in one.fires}))

    @property
    def unmasked(self) -> bool:
        """Whether ``allowed`` may be ``None``."""
        return not self._own and self.host.name == "torch" and getattr(self._config, "_attn_implementation", "") == "sdpa"

    def _run(self, tokens: Tensor, positions: Tensor, allowed: Tensor | None, cache: KeyValues, keep: Tensor | None) -> Tensor:
        model: Any = self.host.model
        mask = allowed if self._bool_mask or allowed is None else additive(allowed, self.dtype)
        if self._own:
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
        """The blocks before ``layer`` are out; the last of them hands on ``stream``."""
        if not 1 <= layer < self.layers:
            raise ValueError(f"one can enter at the blocks 1..{self.layers - 1}, not at {layer}; block 0 is entered by its tokens")
        held = [self._blocks[i] for i in range(layer)]
        try:
            for i in range(layer):
                self._blocks[i] = _Given(stream)
            yield
        finally:
            for i, block in enumerate(held):
                self._blocks[i] = block


class _Given(nn.Module):
    """Stands in a block's place and gives what it would have given."""

    def __init__(self, stream: Tensor):
        super().__init__()
        self.stream = stream

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.stream


def additive(allowed: Bool[Tensor, "b 1 t S"], dtype: torch.dtype) -> Float[Tensor, "b 1 t S"]:
    """0 where ``allowed``, the type's lowest number elsewhere: what attention adds to its scores."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _plain(host: Host) -> nn.Module:
    """The model itself, which a bridge wraps (and the micro model once more)."""
    if host.name == "torch":
        return host.model
    inner = host.model.get_submodule("original_model")
    return getattr(inner, "inner", inner)


def _block_list(model: nn.Module, row: Architecture) -> nn.ModuleList:
    blocks = module_at(model, row, row.blocks)
    assert isinstance(blocks, nn.ModuleList), type(blocks)
    return blocks


def _refuse_windows(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"a decoder runs full attention alone, and this model has {', '.join(sorted(kinds))}: use host.logits")
    if (rope := getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        # Its angles are those of the longest sequence of a batch: a request would depend on its neighbours.
        raise ValueError(
            f"a decoder cannot turn positions by {rope['rope_type']!r}, which looks at the whole batch: use host.logits"
        )


def _first(config: object, *names: str) -> Any:
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ValueError(f"the model's config gives none of {', '.join(names)}")


def _sizes(config: object) -> tuple[int, int]:
    """Heads of keys and values, and a head's width."""
    heads = int(_first(config, "num_attention_heads", "n_head", "heads"))
    width = getattr(config, "head_dim", None) or int(_first(config, "hidden_size", "n_embd", "d")) // heads
    return int(getattr(config, "num_key_value_heads", None) or heads), int(width)
