"""Attach adapters to a model, switch them, and list their parameters.

adapters = attach(model, "blocks.*.attn.*", "blocks.*.mlp.*", spec=AdapterSpec(), generator=g)
with adapters.deployed():      # quarantine off: the model that ships
with adapters.reference():     # both off: the base model, bit for bit (a free KL reference)
with adapters.recording(tape): # records what the adapters learn from the next forward and backward
with adapters.unrouted():      # both learn from everything, by ordinary autograd

The contexts switch the model for every thread. The one that was entered last counts, and they may be left in any order; a second
thread that enters one is refused (``RuntimeError``).
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from mi_route2.adapters.linear import (
    Branch,
    Kept,
    LoRA,
    Quarantine,
    RoutedLinear,
    SharedQuarantine,
    SVDKept,
    Switchboard,
    refuse_bypass,
)
from mi_route2.adapters.svd import decompose
from mi_route2.adapters.tape import Tape
from mi_route2.adapters.weights import Versions, named, refuse_offloaded, reshard, sharded_modules, weights_hash
from mi_route2.checks import checked
from mi_route2.sites import COMPUTED, UNQUANTIZED, Slot, left_out, matching, no_adapter, slots
from mi_route2.specs import AdapterSpec


class Adapters:
    """All adapters of one model.

    Attributes:
        model: The model.
        modules: Wrapper modules by the path of the module that they wrap.
        sites: Adapters by the name of their logical Linear.
        spec: Their specification.

    Examples:
        >>> with adapters.deployed():  # the quarantine is off
        ...     logits = host.logits(tokens)
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, RoutedLinear],
        board: Switchboard,
        spec: AdapterSpec,
        thawed: list[nn.Parameter],
        linears: dict[str, Slot],
    ):
        self.model, self.modules, self.spec, self._board = model, modules, spec, board
        self._linears = linears  # all logical Linears of the model as they were before attach(), adapted or not
        self.sites = {branch.site: branch for module in modules.values() for branch, _ in module.branches}
        self._thawed = thawed  # what was trainable before attach() froze the model
        self._detached = False
        self._hashed: tuple[Versions, str, bool] | None = None  # weights of the base, their hash, and whether they were sharded
        self._coordinates: tuple[Versions, dict[str, Tensor]] | None = None  # and the weights of which they are
        self.cache_dir: Path | None = None
        """Cache folder for SVDs of the base weights."""
        self.on_detach: list[Callable[[], None]] = []
        """Clean-up functions of the host, which ``detach`` calls."""

    def __repr__(self) -> str:
        rows = [
            f"Adapters of {type(self.model).__name__}: kept {self.spec.kept}, quarantine {self.spec.quarantine}; on: {self.mode}"
        ]
        for site, branch in self.sites.items():
            quarantine = "" if branch.quarantine is None else f", quarantine {branch.quarantine.rank}"
            rows.append(f"  {site} {list(branch.shape)}: rank {branch.kept.rank}{quarantine}")
        return "\n".join(rows)

    def kept_parameters(self) -> dict[str, nn.Parameter]:
        """Return ``{"site.name": parameter}`` of the kept adapter."""
        return {f"{site}.{name}": p for site, m in self.sites.items() for name, p in m.kept.named_parameters()}

    def quarantine_parameters(self) -> dict[str, nn.Parameter]:
        """Return ``{"site.name": parameter}`` of the quarantine; empty if there is none."""
        return {
            f"{site}.{name}": p
            for site, m in self.sites.items()
            if m.quarantine is not None
            for name, p in m.quarantine.named_parameters()
        }

    def scored(self, site: str) -> nn.Parameter:
        """Return the kept factor on which per-rollout gradients are scored: ``dS``, or ``B`` of a LoRA."""
        if site not in self.sites:
            raise no_adapter(site, self.sites)
        kept = self.sites[site].kept
        return getattr(kept, kept.scored)

    @property
    def base_hash(self) -> str:
        """Hash of all parameters and persistent buffers of the base model, whether adapted or not.

        It identifies the base model of a saved adapter or direction. It is computed on each access, and is the same on every host.
        If the base is sharded (FSDP2), it is ``known_hash``.
        """
        if not reshard(self.model):
            self._hashed = None
        return self.known_hash

    @property
    def known_hash(self) -> str:
        """``base_hash``, computed again only if torch counts that a weight was written, cast or replaced since.

        If the base is sharded, all processes must read it together, because they gather the weights, one at a time.
        """
        sharded = reshard(self.model)
        now = Versions(t for _, t, _ in named(self.model, self._linears, adapters=False))
        if self._hashed is None or self._hashed[0] != now:
            self._hashed = now, weights_hash(self.model, self._linears, adapters=False), sharded
        return self._hashed[1]

    def file_hash(self) -> str:
        """Return ``base_hash``, for a file that a single process writes.

        Raises:
            RuntimeError: The base is sharded, and its hash was not read by all processes since a weight changed.
        """
        if not sharded_modules(self.model):
            return self.base_hash
        if self._hashed is None or not self._hashed[2] or not self._hashed[0].unwritten:
            raise RuntimeError(
                "the base weights are sharded, and their hash needs every process: read adapters.base_hash in all of them, then "
                "save in one"
            )
        return self._hashed[1]

    def demand_replicated(self) -> None:
        """Raise ``ValueError`` if FSDP2 shards a parameter of the adapters; all processes must call this."""
        if reshard(self.model) and any(hasattr(p, "full_tensor") for p in self.tensors().values()):
            raise ValueError(
                "the adapters are sharded (DTensor), and the flags of a shard would be wrong without an error: keep them whole, "
                "fully_shard(module, ignored_params={*adapters.kept_parameters().values(), "
                "*adapters.quarantine_parameters().values()})"
            )

    def coordinates(self) -> dict[str, Float[Tensor, "r d_in"]]:
        """Return ``Vh`` of every site's base weight, the coordinates of activation directions.

        These are the adapter's own if the kept adapter is an SVD. A LoRA has none, so all coordinates of the weight are used. They
        are computed once, and again if an adapted base weight was cast, or torch counts that it was written or replaced; all
        processes must call this if the base is sharded.
        """
        reshard(self.model)
        now = Versions(module.weight for module in self.modules.values())
        if self._coordinates is None or self._coordinates[0] != now:
            vectors = {
                site: branch.kept.Vh if isinstance(branch.kept, SVDKept) else decompose(branch.weight, self.cache_dir).Vh
                for site, branch in self.sites.items()
            }
            self._coordinates = now, vectors
        return self._coordinates[1]

    def memory(self) -> dict[str, int]:
        """Return the bytes that the adapters hold, by kind.

        ``kept`` and ``quarantine`` are the trainable parameters, ``factors`` the frozen SVD factors, ``rows`` the output indices of
        fused modules, and ``merged`` the merged weights (only inside of that context). The base's weights are not counted.
        """
        by_kind: dict[str, list[Tensor | None]] = {
            "kept": [*self.kept_parameters().values()],
            "quarantine": [*self.quarantine_parameters().values()],
            "factors": [t for branch in self.sites.values() for t in branch.kept.buffers()],
            "rows": [rows for module in self.modules.values() for _, rows in module.branches],
            "merged": [module.merged_weight for module in self.modules.values()],
        }
        return {group: sum(t.numel() * t.element_size() for t in tensors if t is not None) for group, tensors in by_kind.items()}

    @property
    def detached(self) -> bool:
        """True if the model has its plain Linears back."""
        return self._detached

    @property
    def has_quarantine(self) -> bool:
        return self.spec.quarantine != "none"

    def demand_live(self) -> None:
        """Raise ``RuntimeError`` if a switch or a load would not reach the model (merged weights, or detached adapters)."""
        if self._board.merged:
            raise RuntimeError(
                "merged weights do not follow changes of the adapters: leave merged() before switching, recording or loading"
            )
        if self._detached:
            raise RuntimeError(
                "these adapters were detached from their model: use those that attach() or from_pretrained() returned last"
            )

    @property
    def mode(self) -> Literal["full", "deployed", "reference"]:
        """Name of the context that switches the adapters as they are switched now; without a quarantine never ``full``."""
        if self._board.quarantine and self.has_quarantine:
            return "full"
        return "deployed" if self._board.kept else "reference"

    @contextmanager
    def _switched(self, **changes: object) -> Iterator[None]:
        self.demand_live()
        with self._board.switched(changes):
            yield

    def full(self):
        """Context: kept adapter and quarantine are on."""
        return self._switched(kept=True, quarantine=True)

    def deployed(self):
        """Context: the quarantine is off, as in the deployed model."""
        return self._switched(kept=True, quarantine=False)

    def reference(self):
        """Context: both adapters are off; the output is the base model's, bit for bit."""
        return self._switched(kept=False, quarantine=False)

    def unrouted(self):
        """Context: both adapters learn from every forward by ordinary autograd, without a route.

        Use it to train without a route, and for checks. Outside of this context, a gradient that reaches an adapter from a forward
        without a tape is an error.
        """
        return self._switched(unrouted=True)

    @checked
    @contextmanager
    def recording(self, tape: Tape) -> Iterator[Tape]:
        """Context: ``tape`` records forwards and backwards.

        Raises:
            RuntimeError: Another tape is open, or on a clean exit some site did not run.
        """
        if self._board.tape is not None:
            raise RuntimeError("a tape is already open; close it before opening another")
        with self._switched(tape=tape):
            yield tape
        tape.assert_fired(self.sites, backward=False)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context: each Linear is one merged weight with the adapters that are on now, for fast generation without gradients.

        Raises:
            RuntimeError: A tape is open, or the weights are merged already.
            ValueError: A Linear has hooks of its own, or its class computes more than a matmul.
        """
        if self._board.tape is not None:
            raise RuntimeError("merged weights would bypass the open tape; close it first")
        if self._board.merged:
            raise RuntimeError("these weights are already merged; leave merged() before merging again")
        for path, module in self.modules.items():
            refuse_bypass(path, module.base, module.transposed)
        try:
            for module in self.modules.values():
                module.merge()
            # what was merged stays on, whichever context is left first
            with self._switched(merged=True, kept=self._board.kept, quarantine=self._board.quarantine), torch.no_grad():
                yield
        finally:
            for module in self.modules.values():
                module.unmerge()

    def tensors(self, *, quarantine: bool = True) -> dict[str, Tensor]:
        """Return detached tensors under the names of a saved file: ``kept.<site>.<name>``, ``quarantine.<site>.<name>``."""
        out = {f"kept.{name}": p.detach() for name, p in self.kept_parameters().items()}
        if quarantine:
            out |= {f"quarantine.{name}": p.detach() for name, p in self.quarantine_parameters().items()}
        return out

    def detach(self) -> nn.Module:
        """Put the plain Linears back and return the model as it was before ``attach``, with the same parameters trainable.

        A second call does nothing, because other adapters may be attached by then.
        """
        if self._detached:
            return self.model
        self._detached = True
        for path, module in self.modules.items():
            _replace(self.model, path, module.base)
        for p in self._thawed:
            p.requires_grad_(True)
        for module in _savers(self.model):
            for name in (*_SAVES, _RESIZE):
                vars(module).pop(name, None)
        while self.on_detach:
            self.on_detach.pop()()
        return self.model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, leaf, module)
    if isinstance(parent, nn.TransformerEncoderLayer) and isinstance(module, RoutedLinear):
        # its fast path, which would pass the adapters by, may be switched on again later; torch leaves it alone where a hook waits
        module.register_forward_pre_hook(_refuse_nested)


def _refuse_nested(_module: nn.Module, args: tuple[Any, ...]) -> None:
    if isinstance(args[0], Tensor) and args[0].is_nested:
        raise RuntimeError(
            "torch has packed the batch for its fast path, for which adapters are not made: call "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SAVES, _RESIZE = ("save_pretrained", "push_to_hub"), "resize_token_embeddings"


def _savers(model: nn.Module) -> list[nn.Module]:
    """Return the transformers models in ``model``, and in the model that a bridge wraps."""
    roots = (model, getattr(model, "original_model", model))
    return [module for root in roots for module in root.modules() if hasattr(type(module), "save_pretrained")]


def _refuse_save(*_given: Any, **_named: Any) -> None:
    """Refuse a transformers model's own saving method while adapters are attached."""
    raise RuntimeError(
        "this model has adapters, and transformers could not load a checkpoint with their weight names: use "
        "export_merged(adapters, folder) for a whole checkpoint, export_peft(adapters, folder) for a LoRA, "
        "save_pretrained(adapters, folder) of mi_route2 to continue training, or adapters.detach() for the base only"
    )


def _refuse_resize(*_given: Any, **_named: Any) -> None:
    """Refuse to resize an unembedding while an adapter is attached to it."""
    raise RuntimeError(
        "the unembedding has an adapter, which another vocabulary would not fit: call adapters.detach(), resize, and attach again"
    )


def _kept(slot: Slot, spec: AdapterSpec, generator: torch.Generator, cache_dir: Path | None) -> Kept:
    if spec.kept == "svd":
        return SVDKept(slot.weight, decompose(slot.weight, cache_dir, rank=spec.rank))
    assert spec.rank is not None
    return LoRA(slot.weight, spec.rank, generator)


def _quarantine(slot: Slot, kept: Kept, spec: AdapterSpec, generator: torch.Generator) -> Quarantine | None:
    if spec.quarantine == "none":
        return None
    return SharedQuarantine(kept) if spec.quarantine == "shared" else LoRA(slot.weight, spec.quarantine_rank, generator)


def refuse_twice(model: nn.Module, chosen: dict[str, Slot]) -> None:
    """Raise ``ValueError`` for a selected module with a second name, under which it would run without its adapters."""
    paths = {id(slot.module): slot.path for slot in chosen.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if paths.get(id(module), name) != name:
            raise ValueError(f"{paths[id(module)]} and {name} are one Linear, which would run without adapters under one name")


def _refuse_unfit(model: nn.Module, slot: Slot) -> None:
    """Raise ``ValueError`` for a Linear whose weight is no parameter of its own, or that torch does not call."""
    if "weight" not in slot.module._parameters:
        raise ValueError(f"{slot.name} is a {type(slot.module).__name__} whose weight is computed from others: {COMPUTED}")
    if (dtype := slot.module.get_parameter("weight").dtype) not in _DTYPES:
        raise ValueError(f"{slot.name} is quantized ({dtype}), which merging and SVDs would take for numbers: {UNQUANTIZED}")
    parent = model.get_submodule(slot.path.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(f"{slot.name} would never run: nn.MultiheadAttention multiplies by its weight itself; leave it out")
    if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        raise ValueError(
            f"{slot.name} would not run in eval mode, where the fast path of nn.TransformerEncoderLayer multiplies by its weight "
            "itself: call torch.backends.mha.set_fastpath_enabled(False) before"
        )


def _refuse_model(model: nn.Module) -> None:
    """Raise ``ValueError`` if the model as a whole can have no adapters: it has some, or its weights are elsewhere or apart."""
    if of_peft := [name for name, m in model.named_modules() if type(m).__module__.startswith("peft.tuners.")]:
        raise ValueError(
            f"PEFT has an adapter at {of_peft[0] or 'this model'}, which no file of these adapters would contain: merge it into "
            "the base first (merge_and_unload), and give a plain model"
        )
    if any(isinstance(m, RoutedLinear) for m in model.modules()):
        raise ValueError("this model already has adapters; call adapters.detach() before attaching others")
    refuse_offloaded(model)
    for name, t in chain(model.named_parameters(), model.named_buffers()):
        plain = type(t) in (Tensor, nn.Buffer) or issubclass(type(t), nn.Parameter) or hasattr(t, "full_tensor")  # as of FSDP2
        if not plain:
            raise ValueError(
                f"{name} is a {type(t).__name__}, which is stored otherwise than {t.dtype} (torchao and quanto do so), "
                f"and could not be hashed, saved or merged: {UNQUANTIZED}"
            )
    if len(devices := sorted({str(p.device) for p in model.parameters()})) > 1:
        raise ValueError(
            f"the weights of this model are on {' and '.join(devices)}, and what its modules learn is compared: load it on one "
            "device, or train it sharded with TRL"
        )


@checked
def attach(
    model: nn.Module,
    *patterns: str,
    spec: AdapterSpec | None = None,
    generator: torch.Generator | None = None,
    expect: int | None = None,
    cache_dir: Path | None = None,
    known: dict[str, Slot] | None = None,
    without: Mapping[str, str] | None = None,
) -> Adapters:
    """Freeze ``model`` and attach a kept adapter and a quarantine to every logical Linear that ``patterns`` select.

    While the adapters are attached, a transformers model refuses its own ``save_pretrained`` and ``push_to_hub``, and, with an
    adapter at ``unembed``, ``resize_token_embeddings`` (``RuntimeError``). The model is unchanged after an error.

    Args:
        model: The model.
        *patterns: Globs over the names of logical Linears, as in ``select``.
        spec: Kind and rank of the adapters; ``AdapterSpec()`` if not given.
        generator: Source of the random factors; torch's global one if not given.
        expect: Number of Linears, if it is to be checked.
        cache_dir: Folder that caches SVDs.
        known: The model's logical Linears, if they are not those of ``slots``. A host that passes them guarantees that the model
            calls each of these modules under one name only.
        without: What the blocks have that takes no adapters, if not that of ``left_out``. Where a pattern matches it too, a warning
            names it.

    Raises:
        KeyError: A pattern matches nothing, or only what takes no adapters (experts in one weight, routers).
        ValueError: The count is not ``expect``, the model already has adapters (also of PEFT), the rank does not fit, a Linear or
            another weight is quantized, a Linear has two names or a weight that is computed, torch's own layers pass it by, or
            weights are offloaded.

    Examples:
        >>> adapters = attach(model, "blocks.*.attn.*", spec=AdapterSpec("lora", rank=4), expect=8)
    """
    spec = AdapterSpec() if spec is None else spec
    generator = torch.default_generator if generator is None else generator
    _refuse_model(model)
    linears = slots(model) if known is None else known
    without = left_out(model, linears) if without is None else without
    chosen = matching(linears, *patterns, expect=expect, without=without)
    if known is None:
        refuse_twice(model, chosen)
    if missed := {re.sub(r"\d+", "*", name, count=1) for name in without if any(fnmatchcase(name, p) for p in patterns)}:
        warnings.warn(f"these stay frozen, because they take no adapters: {', '.join(sorted(missed))}", stacklevel=2)
    for slot in chosen.values():
        _refuse_unfit(model, slot)
    board = Switchboard(sites=len(chosen))
    by_path: dict[str, list[tuple[Slot, Branch]]] = {}
    # SVDs of large weights take minutes; for a small model the bar never appears
    for slot in tqdm(chosen.values(), desc="adapters", unit="Linear", delay=3, leave=False, disable=None):
        try:
            kept = _kept(slot, spec, generator, cache_dir)
            branch = Branch(slot, kept, _quarantine(slot, kept, spec, generator), board)
        except (ValueError, torch.linalg.LinAlgError) as error:
            reason = str(error) if isinstance(error, ValueError) else "the weight has no SVD: does it hold NaN or infinity"
            raise ValueError(f"{reason}, {slot.name}") from error
        by_path.setdefault(slot.path, []).append((slot, branch))
    modules = {
        path: RoutedLinear([slot for slot, _ in entries], [branch for _, branch in entries], board)
        for path, entries in by_path.items()
    }
    thawed = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    for path, module in modules.items():
        _replace(model, path, module)
    for module in _savers(model):
        vars(module).update(dict.fromkeys(_SAVES, _refuse_save) | ({_RESIZE: _refuse_resize} if "unembed" in chosen else {}))
    adapters = Adapters(model, modules, board, spec, thawed, linears)
    adapters.cache_dir = cache_dir
    return adapters
