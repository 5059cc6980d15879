"""Addresses in a model: ``Site`` is a point of a layer, ``Slot`` is a logical Linear; both can be selected by name.

    Site.parse("blocks.3.resid_mid")         Site(3, "kept_a", "mlp.down")
    select(model, "blocks.*.attn.q", expect=2)

A pattern that selects nothing is an error that lists the nearest names.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import total_ordering
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mi_route2.architectures import (
    ADAPTER_POINTS,
    ARCHITECTURES,
    ATTENTION_POINTS,
    EXPERT_POINTS,
    LINEARS,
    POINTS,
    WRAPPED,
    Architecture,
    LinearAt,
    architecture_of,
    heads,
    unwrapped,
)
from mi_route2.checks import checked
from mi_route2.found import NotFoundError, found_row

UNQUANTIZED = "load the base model in bfloat16 or float32, without quantization_config"
COMPUTED = (
    "make it permanent before, with remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove of "
    "torch.nn.utils"
)
_SITE = re.compile(r"blocks\.(0|[1-9][0-9]*)\.(?:(\w+\.\w+)\.)?(\w+)")
_UNEMBED = re.compile(r"unembed\.(\w+)")
_POINTS = (*POINTS, *ATTENTION_POINTS, *EXPERT_POINTS, *ADAPTER_POINTS)
_LINEARS = (*LINEARS, "unembed")


def no_adapter(site: str, known: Collection[str]) -> KeyError:
    """Return the ``KeyError`` for a point of an adapter that is not attached."""
    hint = f"the nearest are {nearest(site, list(known))}" if known else "attach them first, with host.attach(...)"
    return KeyError(f"no adapter at {site!r}: {hint}")


def nearest(name: str, known: list[str], n: int = 5) -> str:
    """Return the ``n`` known names closest to ``name``, as text for an error message."""
    close = difflib.get_close_matches(name, known, n=n, cutoff=0.0)
    return ", ".join(close) if close else "none at all"


@total_ordering
@checked
@dataclass(frozen=True)
class Site:
    """Point of a layer, for example ``Site(3, "resid_mid")``.

    The points of adapters also need ``linear``, the logical Linear of the adapters: ``Site(3, "kept_a", "mlp.down")``. The
    unembedding has no layer: ``Site(None, "kept_a", "unembed")``. Sites sort by layer, with the unembedding last.

    Raises:
        KeyError: The point or the Linear is unknown.
        ValueError: ``linear`` is missing or not allowed at this point, or the layer is negative or does not fit.

    Examples:
        >>> str(Site(3, "kept_a", "mlp.down"))
        'blocks.3.mlp.down.kept_a'
        >>> Site.parse("blocks.3.resid_mid") == Site(3, "resid_mid")
        True
    """

    layer: int | None
    point: str
    linear: str = ""

    def __post_init__(self) -> None:
        for name, known, what in ((self.point, _POINTS, "a point"), (self.linear or "unembed", _LINEARS, "a logical Linear")):
            if name not in known:
                raise KeyError(f"{name!r} is not {what}: the nearest are {nearest(name, list(known))}; all: {', '.join(known)}")
        if (self.point in ADAPTER_POINTS) != bool(self.linear):
            raise ValueError(
                f"{self.point!r} is a point of {'the adapters at one Linear: name it' if not self.linear else 'a block'}, "
                "as in Site(3, 'kept_a', 'mlp.down') and Site(3, 'resid_mid')"
            )
        if (self.layer is None) != (self.linear == "unembed"):
            raise ValueError(f"layer {self.layer!r} does not fit {self.linear or self.point!r}: only the unembedding has no layer")
        if self.layer is not None and (isinstance(self.layer, bool) or self.layer < 0):
            raise ValueError(
                f"layer {self.layer} does not exist: layers count from 0, and negative numbers do not count from the last one"
            )

    def __lt__(self, other: object) -> bool:
        return self._place < other._place if isinstance(other, Site) else NotImplemented

    @property
    def _place(self) -> tuple[bool, int, str, str]:
        return self.layer is None, self.layer or 0, self.linear, self.point

    @property
    def slot(self) -> str:
        """Name of the logical Linear of an adapter point, for example ``blocks.3.mlp.down``."""
        return self.linear if self.layer is None else f"blocks.{self.layer}.{self.linear}"

    def __str__(self) -> str:
        return f"{self.slot}.{self.point}" if self.linear else f"blocks.{self.layer}.{self.point}"

    @staticmethod
    @checked
    def parse(text: str) -> "Site":
        """Return the site whose ``str`` is ``text``; ``ValueError`` for a text of another form."""
        if match := _SITE.fullmatch(text):
            return Site(int(match[1]), match[3], match[2] or "")
        if match := _UNEMBED.fullmatch(text):
            return Site(None, match[1], "unembed")
        raise ValueError(f"{text!r} is not a site: write blocks.3.resid_mid, blocks.3.mlp.down.kept_a or unembed.kept_a")


def demand_site(site: object, what: str) -> None:
    """Raise ``ValueError`` if ``site`` is not a ``Site``."""
    if not isinstance(site, Site):
        raise ValueError(f"{what} needs a Site, as Site(3, 'resid_pre') or Site.parse('blocks.3.resid_pre'), not {site!r:.60}")


@dataclass(frozen=True)
class Slot:
    """Logical Linear of a model.

    Attributes:
        name: For example ``blocks.3.attn.q``.
        path: Path of the module.
        module: The module.
        rows: The outputs that belong to this Linear, if the module is fused; otherwise ``None``.
        transposed: True if the weight is stored ``[d_in d_out]``.
    """

    name: str
    path: str
    module: nn.Module
    rows: Int[Tensor, " d_out"] | None = None
    transposed: bool = False

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """Weight ``[d_out d_in]`` as an ``nn.Linear`` would store it; a view unless the module is fused or its weight sharded."""
        return self.part(whole(self.module.get_parameter("weight")))

    @property
    def shape(self) -> tuple[int, int]:
        """``d_out`` and ``d_in``; unlike ``weight``, one process alone may ask for it if the weight is sharded."""
        sides = self.module.get_parameter("weight").shape
        d_out, d_in = sides[::-1] if self.transposed else sides
        return d_out if self.rows is None else len(self.rows), d_in

    def part(self, t: Tensor) -> Tensor:
        """Return the part of the module's weight or bias ``t`` that belongs to this Linear."""
        t = t.mT if self.transposed and t.ndim == 2 else t
        return t if self.rows is None else t[self.rows.to(t.device)]


def whole(t: Tensor) -> Tensor:
    """Return ``t``, gathered from all processes if it is sharded (a ``DTensor``); then each of them must call this."""
    gather = getattr(t, "full_tensor", None)
    return t if gather is None else gather()


def fused_rows(at: LinearAt, width: int, queries: int, groups: int) -> Int[Tensor, " d_out"] | None:
    """Return the outputs of a fused module of ``width`` outputs that belong to a part; ``None`` if it is not fused.

    ``queries`` and ``groups`` are the numbers of query heads and of key-value heads.
    """
    if at.fused is None:
        return None
    part, count, how = at.fused
    index = torch.arange(width)
    if how == "thirds":
        rows = index.view(count, -1)[part]
    elif how == "per head":
        rows = index.view(queries, count, -1)[:, part].flatten()
    elif how == "sizes":
        head = width // (queries + 2 * groups)
        rows = index.split([queries * head, groups * head, groups * head])[part]
    else:
        grouped = index.view(groups, queries // groups + 2, -1)
        rows = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])[part].flatten()
    return rows.clone()  # a view would keep the whole index in memory


def fused_width(at: LinearAt, part: int, queries: int, groups: int) -> int:
    """Return the number of outputs of the module of which a logical Linear of ``part`` outputs is a part."""
    if at.fused is None:
        return part
    if at.fused[2] in ("sizes", "grouped"):
        return part // (groups if at.fused[0] else queries) * (queries + 2 * groups)
    return part * at.fused[1]


def module_at(model: nn.Module, architecture: Architecture, path: str) -> nn.Module:
    """Return the module at ``path``; ``ValueError`` if the module tree is not that of the architecture's row."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"this {type(model).__name__} has no module {path!r}, which the row {architecture.name!r} of architectures.py names: "
            "its tree was changed (a wrapper, or TransformerLens's bridge), or another version of the library built it"
        ) from error


def block_paths(model: nn.Module, architecture: Architecture) -> list[str]:
    """Return the module path of every block; ``ValueError`` if two layers are one module, which has one set of hooks for both."""
    blocks = module_at(model, architecture, architecture.blocks)._modules.items()
    _refuse_shared(model, ((f"layer {layer}", block and block._modules.get(WRAPPED, block)) for layer, block in blocks))
    return [f"{architecture.blocks}.{layer}" for layer, _ in blocks]


def refuse_shared(model: nn.Module, architecture: Architecture) -> None:
    """Raise ``ValueError`` if one module stands at two places at which sites are read: its values would be those of either."""
    points = {at.path for at in architecture.points.values() if not isinstance(at, str) and not at.linear}
    suffixes = sorted((points | {at.path for at in architecture.linears.values()}) - {""})
    paths = [f"{block}.{suffix}" for block in block_paths(model, architecture) for suffix in suffixes]
    _refuse_shared(model, ((path, part_at(model, path)) for path in (*paths, architecture.unembed)))


def part_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at ``path``; ``None`` if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:  # a booted bridge has other paths
        return None


def _refuse_shared(model: nn.Module, modules: Iterable[tuple[str, nn.Module | None]]) -> None:
    places: dict[int, str] = {}
    for place, module in modules:
        if module is not None and (first := places.setdefault(id(module), place)) != place:
            raise ValueError(
                f"{first} and {place} of this {type(model).__name__} are one {type(module).__name__}, so a site of one would be a "
                "site of both: give each a module of its own (their parameters may be tied)"
            )


def slot_at(model: nn.Module, architecture: Architecture, layer: int | None, linear: str) -> Slot:
    """Return the logical Linear ``linear`` of a block, or the unembedding (``None``, ``"unembed"``)."""
    if layer is None:
        name, at, path = linear, LinearAt(architecture.unembed), architecture.unembed
    else:
        name, at = f"blocks.{layer}.{linear}", architecture.linears[linear]
        path = f"{architecture.blocks}.{layer}.{at.path}"
    module = module_at(model, architecture, path)
    try:
        weight = module.get_parameter("weight")
    except AttributeError as error:
        computed = getattr(module, "weight", None) is not None
        why = f"whose weight is computed from others: {COMPUTED}" if computed else f"without a weight: {UNQUANTIZED}"
        raise ValueError(f"{name} is a {type(module).__name__} {why}") from error
    width = weight.shape[1 if at.transposed else 0]
    rows = None if at.fused is None else fused_rows(at, width, heads(model, "q"), heads(model, "k"))
    return Slot(name, path, module, rows, at.transposed)


def refuse_booted(model: nn.Module) -> None:
    """Raise ``ValueError`` for a TransformerLens bridge, or a model inside one, whose forward runs other modules than its tree."""
    if any(path.rpartition(".")[2] == WRAPPED for path, _ in model.named_modules()):
        raise ValueError(
            "this model is a TransformerLens bridge, or one was booted around it and runs other modules: use "
            "host = open_host('transformer_lens', bridge), then host.attach(...) or from_pretrained(host, folder)"
        )


def slots(model: nn.Module) -> dict[str, Slot]:
    """Return every logical Linear by name, in the order of the forward.

    A model of no known architecture has its ``nn.Linear`` modules under their own dotted names.

    Raises:
        ValueError: A known architecture whose module tree was changed, or whose layers share a module, or a model that a
            TransformerLens bridge, ``torch.compile`` or DDP wraps.
    """
    refuse_booted(model)
    if unwrapped(model) is not model:
        raise ValueError(
            f"a {type(model).__name__} is a wrapper: attach adapters to the model in it, before or after it is wrapped"
        )
    if (row := architecture_of(model)) is None:
        try:
            row = found_row(model)
        except NotFoundError:  # any model of torch can have adapters
            return {name: Slot(name, name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    refuse_shared(model, row)
    layers = range(len(block_paths(model, row)))
    in_blocks = [
        slot_at(model, row, layer, linear)
        for layer in layers
        for linear, at in row.linears.items()
        if not row.found or part_at(model, f"{row.blocks}.{layer}.{at.path}") is not None
    ]
    return {slot.name: slot for slot in (*in_blocks, slot_at(model, row, None, "unembed"))}


def left_out(model: nn.Module, known: Mapping[str, Slot]) -> dict[str, str]:
    """Return the modules of the blocks that have a weight and take no adapters, ``blocks.3.mlp.experts``, and their classes."""
    row = architecture_of(model)
    if row is None:
        return {}
    stack, found = module_at(model, row, row.blocks), {}
    taken = {id(slot.module) for slot in known.values()}
    # a bridge splits a fused module into Linears of its own
    fused = {at.path for at in row.linears.values() if at.fused is not None}
    joint = (part_at(block, path) for block in stack.children() for path in fused)
    taken |= {id(module) for part in joint if part is not None for module in part.modules()}
    for path, module in stack.named_modules():
        if id(module) in taken or all(p.ndim < 2 for p in module.parameters(recurse=False)):
            continue
        layer, first, *rest = (name for name in path.split(".") if name != WRAPPED)
        room = "attn" if "attn" in first or "attention" in first else "mlp"
        found[".".join(("blocks", layer, room, *rest))] = type(module).__name__
    return found


def _refuse_left_out(pattern: str, known: Mapping[str, Slot], without: Mapping[str, str]) -> None:
    if meant := [f"{name.split('.', 2)[2]} ({kind})" for name, kind in without.items() if fnmatchcase(name, pattern)]:
        takes = sorted({name.split(".", 2)[2] for name in known if name.startswith("blocks.")})
        raise KeyError(
            f"{pattern!r} matches only what takes no adapters: {', '.join(dict.fromkeys(meant))}; the Linears that do are "
            f"{', '.join(takes)}"
        )


def renamed(pattern: str, known: Mapping[str, object]) -> str:
    """Return a sentence with this project's name for a module name of transformers or PEFT; empty for any other text."""
    if pattern == "all-linear":
        return "for every Linear of the blocks write 'blocks.*'"
    module, layer = pattern.rpartition(".")[2], re.search(r"\.([0-9]+)\.", pattern)
    every = [pair for row in ARCHITECTURES.values() for pair in row.linears.items()]
    linears = {linear for linear, at in every if at.path.rpartition(".")[2] == module}
    names = {f"blocks.{layer[1] if layer else '*'}.{linear}" for linear in linears}
    names |= {"unembed" for row in ARCHITECTURES.values() if row.unembed == module} | {f"*.{module}"}
    fitting = sorted(name for name in names if any(fnmatchcase(site, name) for site in known))
    return f"Linears have the same names in all known architectures: write {' or '.join(map(repr, fitting))}" if fitting else ""


def matching(
    known: dict[str, Slot], *patterns: str, expect: int | None = None, without: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Slot]:
    """Select from slots that were already listed; see ``select``. ``without`` is what the model has beside them (``left_out``)."""
    if not patterns:
        raise ValueError("give at least one pattern, for example 'blocks.*.attn.*'")
    if not known:
        raise KeyError("this model has no nn.Linear to which an adapter could be attached")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            _refuse_left_out(pattern, known, without)
            meant = renamed(pattern, known) or f"the nearest names are: {nearest(pattern, list(known))}"
            raise KeyError(f"no Linear matches {pattern!r}; {meant}")
    chosen = {name: slot for name, slot in known.items() if any(fnmatchcase(name, p) for p in patterns)}
    if expect is not None and len(chosen) != expect:
        raise ValueError(f"{patterns} selected {len(chosen)} Linears, not {expect}: {', '.join(chosen)}")
    return chosen


@checked
def select(model: nn.Module, *patterns: str, expect: int | None = None) -> dict[str, Slot]:
    """Return the logical Linears whose name matches at least one of the glob ``patterns``.

    Args:
        model: The model.
        *patterns: Globs over names such as ``blocks.3.attn.q``; each must match at least one Linear.
        expect: The total number of Linears, if it is to be checked.

    Raises:
        KeyError: A pattern matches nothing; the nearest names are listed.
        ValueError: The total is not ``expect``.

    Examples:
        >>> queries = select(model, "blocks.*.attn.q", expect=2)
    """
    return matching(slots(model), *patterns, expect=expect)


_POINT_STAGE = {
    "resid_pre": 0, "attn_in": 1, "q": 2, "k": 2, "v": 2, "scores": 3, "pattern": 4, "z": 5, "result": 7, "attn_out": 8,
    "resid_mid": 9, "mlp_in": 10, "router": 11, "mlp_out": 13, "resid_post": 14,
}  # fmt: skip
_LINEAR_STAGE = {"attn.q": 2, "attn.k": 2, "attn.v": 2, "attn.o": 6, "mlp.gate": 11, "mlp.up": 11, "mlp.down": 12}
_ADAPTER = tuple(ADAPTER_POINTS)


def _stage(site: Site) -> int:
    return _LINEAR_STAGE[site.linear] if site.linear else _POINT_STAGE[site.point]


def precedes(first: Site, then: Site) -> bool:
    """Return whether ``first`` fires before ``then`` in every forward, on every host and architecture."""
    if first.layer is None or then.layer is None:
        both = first.layer is None and then.layer is None
        return _ADAPTER.index(first.point) < _ADAPTER.index(then.point) if both else first.layer is not None
    if first.layer != then.layer:
        return first.layer < then.layer
    if _stage(first) != _stage(then):
        return _stage(first) < _stage(then)
    if not first.linear:
        return False  # q, k and v, or a Linear's adapters and another Linear's point, may run in either order
    linear, other = LINEARS.index(first.linear), LINEARS.index(then.linear or f"attn.{then.point}")
    if not then.linear:
        return linear <= other
    return (linear, _ADAPTER.index(first.point)) < (other, _ADAPTER.index(then.point))
