"""Save, load and export adapters: safetensors with a checked header, a PEFT folder, or a merged checkpoint.

The deployed form contains no quarantine in any of these formats.
"""

import copy
import dataclasses
import glob
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters, attach
from mi_route2.adapters.linear import Branch, Kept, LoRA, Quarantine, SVDKept, refuse_more
from mi_route2.adapters.readback import demand_peft_reads, demand_transformers_reads
from mi_route2.adapters.weights import sharded_modules
from mi_route2.architectures import Architecture, LinearAt, architecture_of, heads
from mi_route2.checks import checked
from mi_route2.files import parse_json, whole_folder
from mi_route2.sites import fused_rows, fused_width
from mi_route2.specs import AdapterSpec
from mi_route2.tensor_files import read_tensors, refuse_infinite, write_tensors
from mi_route2.validation import read_record

Which = Literal["full", "deployed"]
FORMAT = "mi-route2 adapters 3"
CONFIG, TENSORS = "route2_config.json", "route2_adapters.safetensors"
_KEYS = ("format", "which", "spec", "base_hash")
BASES = "bases"
"""Entry of the header: ``{site: SVDKept.basis()}``."""
TURNED = 0.05
"""Difference of two fingerprints of ``SVDKept.basis`` from which on singular vectors are others."""


@runtime_checkable
class Attaches(Protocol):
    """Protocol of objects with an ``attach`` method, such as hosts."""

    def attach(self, *patterns: Any, **options: Any) -> Adapters: ...


@checked
def save_adapters(adapters: Adapters, path: Path | str, which: Which = "full") -> None:
    """Save the kept adapter, with the quarantine (``full``) or without it (``deployed``).

    Raises:
        ValueError: A value is not finite, which ``load_adapters`` refuses; an old file is as it was.

    Examples:
        >>> save_adapters(adapters, folder / "checkpoint.safetensors")
    """
    write_tensors(Path(path), *_content(adapters, which))


def _content(adapters: Adapters, which: Which) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the header of a file; ``ValueError`` if a value is not finite."""
    tensors = adapters.tensors(quarantine=which == "full")
    refuse_infinite(tensors)
    header = {"format": FORMAT, "which": which, "spec": json.dumps(asdict(adapters.spec)), "base_hash": adapters.file_hash()}
    return tensors, header | ({BASES: json.dumps(written)} if (written := bases(adapters)) else {})


@checked
def load_adapters(adapters: Adapters, path: Path | str, *, any_base: bool = False, unchecked: bool = False) -> None:
    """Copy a saved file into ``adapters``; a deployed file leaves the quarantine unchanged.

    Nothing is changed unless everything fits.

    Args:
        adapters: Attached adapters.
        path: File that ``save_adapters`` wrote, or the one in a folder that ``save_pretrained`` wrote.
        any_base: Allow other base weights and another dtype (which is converted), for a base in another dtype or trained further.
        unchecked: Allow a file without a checksum.

    Raises:
        ValueError: The file was changed or has no checksum, or differs from ``adapters`` in its spec, its base weights (anywhere in
            the model), its singular vectors, its dtype, or a name or shape, or holds a value that is not finite. The message says
            what differs.
        RuntimeError: The weights are merged, or the adapters are detached.

    Examples:
        >>> save_adapters(adapters, folder / "checkpoint.safetensors")
        >>> load_adapters(adapters, folder / "checkpoint.safetensors")
    """
    path = Path(path)
    adapters.demand_live()
    stored, metadata, spec = _read(path, unchecked=unchecked)
    deployed = metadata["which"] == "deployed"  # which does not restrict the quarantine
    for name, value in asdict(spec).items():
        if value != getattr(adapters.spec, name) and not (deployed and name.startswith("quarantine")):
            raise ValueError(
                f"{path} holds adapters with {name}={value!r}, but these have {name}={getattr(adapters.spec, name)!r}: attach with "
                "the file's spec, or use from_pretrained, which does"
            )
    targets = adapters.tensors(quarantine=not deployed)
    if missing := sorted(targets.keys() - stored.keys()):
        raise ValueError(f"{path} lacks {len(missing)} adapter tensors that the model has, first {missing[0]!r}")
    if foreign := sorted(stored.keys() - targets.keys()):
        raise ValueError(f"{path} holds {len(foreign)} tensors that the model does not have, first {foreign[0]!r}")
    if not any_base and metadata["base_hash"] != adapters.base_hash:
        raise ValueError(
            f"{path} was trained on other base weights (hash {metadata['base_hash']}, this model's is {adapters.base_hash}); "
            "load that base model, or pass any_base=True if the difference is intended"
        )
    if not any_base and BASES in metadata:
        _refuse_other_bases(path, parse_json(metadata[BASES]), bases(adapters))
    for name, tensor in stored.items():
        _refuse_misfit(path, name, tensor, targets[name], any_base)
    for name, tensor in stored.items():
        targets[name].copy_(tensor)


def _read(path: Path, *, unchecked: bool = False) -> tuple[dict[str, Tensor], dict[str, str], AdapterSpec]:
    """Return the tensors, the header and the spec of an adapter file; ``ValueError`` if it is none."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file in it, {TENSORS}, or attach and load it with from_pretrained")
    stored, metadata = read_tensors(path, unchecked=unchecked)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not an adapter file (format {metadata.get('format')!r}, expected {FORMAT!r})")
    if wrong := sorted((metadata.keys() - {BASES}) ^ {*_KEYS}):
        raise ValueError(f"the header of {path} lacks or adds {wrong[0]!r}; delete the file and write it again")
    if metadata["which"] not in ("full", "deployed"):
        raise ValueError(f"which={metadata['which']!r} is neither 'full' nor 'deployed'")
    try:
        return stored, metadata, read_record(AdapterSpec, metadata["spec"])
    except ValueError as error:
        raise ValueError(f"{path} has no valid adapter spec in its header ({error}); delete it and write it again") from error


def _refuse_misfit(path: Path, name: str, tensor: Tensor, target: Tensor, any_base: bool) -> None:
    if tensor.shape != target.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} in {path}, but {tuple(target.shape)} in the model")
    if tensor.dtype != target.dtype and not (any_base and tensor.is_floating_point()):
        raise ValueError(
            f"{name} is {tensor.dtype} in {path}, but {target.dtype} in the model; load the base in the type that it was trained "
            "in, or pass any_base=True to convert"
        )
    if not torch.isfinite(tensor.to(target.dtype)).all():  # as it is copied: a float64 may be beyond float32
        raise ValueError(f"{name} in {path} holds values that are not finite in {target.dtype}")


@checked
def save_pretrained(adapters: Adapters, folder: Path | str, which: Which = "deployed", *, overwrite: bool = False) -> None:
    """Write the adapters as a folder: the safetensors file, and ``route2_config.json``, which repeats its header for people.

    Args:
        adapters: Attached adapters.
        folder: Folder to write.
        which: ``deployed`` leaves the quarantine out, ``full`` includes it.
        overwrite: Replace the content of a folder that is not empty.

    Raises:
        ValueError: A value is not finite.
        FileExistsError: The folder is not empty.
        OSError: The disk is full; nothing is written then.

    Examples:
        >>> save_pretrained(adapters, folder / "adapters")
    """
    tensors, metadata = _content(adapters, which)
    with whole_folder(folder, overwrite=overwrite) as partial:
        write_tensors(partial / TENSORS, tensors, metadata)
        base = str(getattr(getattr(adapters.model, "config", None), "_name_or_path", ""))
        config = {**metadata, "spec": asdict(adapters.spec), "sites": list(adapters.sites), "base": base}
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def bases(adapters: Adapters) -> dict[str, float]:
    """Return a fingerprint of the singular vectors of each ``dS``, which a weight with equal singular values does not determine."""
    return {site: branch.kept.basis() for site, branch in adapters.sites.items() if isinstance(branch.kept, SVDKept)}


@checked
def from_pretrained(
    model: nn.Module | Attaches, folder: Path | str, *, any_base: bool = False, cache_dir: Path | None = None
) -> Adapters:
    """Attach the adapters in a folder that ``save_pretrained`` wrote, to a torch model or to any host.

    A deployed folder gives adapters without a quarantine. The model is unchanged after an error.

    Args:
        model: A torch model, or a host.
        folder: The folder.
        any_base: As in ``load_adapters``.
        cache_dir: Folder that caches SVDs, as in ``attach``: for an SVD kept adapter the folder holds ``dS`` only, and ``U`` and
            ``Vh`` are computed from the base weights.

    Raises:
        ValueError: As in ``load_adapters``, or the singular vectors computed here differ from those where the folder was written.
        FileNotFoundError: The folder or a file in it does not exist.
        KeyError: The model lacks a site.

    Examples:
        >>> save_pretrained(adapters, folder / "adapters")
        >>> again = from_pretrained(copy.deepcopy(base), folder / "adapters")
    """
    tensors, metadata, spec = read_folder(Path(folder))
    if metadata["which"] == "deployed":
        spec = dataclasses.replace(spec, quarantine="none")
    patterns = [glob.escape(site) for site in dict.fromkeys(name.partition(".")[2].rpartition(".")[0] for name in tensors)]
    # Every random factor is replaced by the file's values, so the generator's seed does not matter.
    options: dict[str, Any] = {"spec": spec, "generator": torch.Generator().manual_seed(0), "cache_dir": cache_dir}
    on = attach(model, *patterns, **options) if isinstance(model, nn.Module) else model.attach(*patterns, **options)
    try:
        load_adapters(on, Path(folder) / TENSORS, any_base=any_base)
    except BaseException:
        on.detach()
        raise
    return on


def _refuse_other_bases(path: Path, written: Any, here: dict[str, float]) -> None:
    """Raise ``ValueError`` if ``path`` says other fingerprints of singular vectors, ``written``, than computed now, ``here``."""
    if not isinstance(written, dict) or written.keys() != here.keys():
        raise ValueError(f"{path} was changed: its {BASES} are not those of its sites")
    for site, value in written.items():
        if not isinstance(value, float) or not abs(value - here[site]) < TURNED:
            raise ValueError(
                f"the singular vectors of {site} differ from those where {path} was written: its weight was cast after training, "
                "or has equal singular values, so that they depend on the LAPACK library; pass a cache_dir with the SVDs from "
                "there, or export it there"
            )


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str], AdapterSpec]:
    """Return the tensors, the header and the spec in a folder that ``save_pretrained`` wrote."""
    if not (folder / TENSORS).is_file():
        of_peft = (folder / "adapter_config.json").exists()
        hint = "; it is a PEFT adapter, which peft.PeftModel.from_pretrained loads" if of_peft else ""
        raise FileNotFoundError(f"{folder} has no {TENSORS}, so save_pretrained did not write it{hint}")
    return _read(folder / TENSORS)


PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
PEFT_WARNING = "HOLDS_THE_QUARANTINE.txt"
_WARNING = (
    "This LoRA is the kept adapter and the quarantine in one, for sampling while training. Do not ship it:\n"
    "export_peft without which='full' writes the adapter that is deployed.\n"
)


def factors(kept: Kept, quarantine: Quarantine | None = None) -> tuple[Float[Tensor, "r d_in"], Float[Tensor, "d_out r"]]:
    """Return ``A`` and ``B`` such that ``B A`` is the weight that ``kept`` and ``quarantine`` add, in their training dtype.

    For an SVD these are the coordinates with nonzero ``dS`` (the first one if all are 0, because a LoRA has at least rank 1).
    """
    if isinstance(quarantine, LoRA):
        A, B = factors(kept)
        return torch.cat([A, quarantine.A.detach().to(A)]), torch.cat([B, quarantine.B.detach().to(B)], dim=1)
    shared = 0 if quarantine is None else quarantine.shared.detach()
    if not isinstance(kept, SVDKept):
        return kept.A.detach(), kept.B.detach() + shared
    dS = kept.dS.detach() + shared
    moved = dS.nonzero()[:, 0] if bool(dS.any()) else torch.zeros(1, dtype=torch.long, device=dS.device)
    return kept.Vh[moved].to(dS.dtype), kept.U[:, moved].to(dS.dtype) * dS[moved]


@dataclass
class AdaptedModule:
    """Module of the torch tree with ``width`` outputs, and the adapters on rows of its outputs (``None``: all)."""

    width: int
    transposed: bool
    branches: list[tuple[Branch, Tensor | None]] = field(default_factory=list)

    def block(self, full: bool = False) -> tuple[Float[Tensor, "r d_in"], Float[Tensor, "width r"]]:
        """Return ``A`` and ``B`` of all branches together, without the quarantines unless ``full``."""
        pairs = [factors(branch.kept, branch.quarantine if full else None) for branch, _ in self.branches]
        if self.branches[0][1] is None:
            return pairs[0]
        A = torch.cat([a for a, _ in pairs])
        B, start = A.new_zeros(self.width, A.shape[0]), 0
        for (_, rows), (a, b) in zip(self.branches, pairs):
            assert rows is not None
            B[rows.to(B.device), start : start + a.shape[0]] = b
            start += a.shape[0]
        return A, B


def _torch_model(model: nn.Module) -> nn.Module:
    """Return the model inside a bridge (``original_model``), if that is the one whose class has a row."""
    for name in ("original_model", "inner"):
        wrapped = getattr(model, name, None)
        if architecture_of(model) is None and isinstance(wrapped, nn.Module):
            model = wrapped
    return model


def places(adapters: Adapters) -> dict[str, AdaptedModule]:
    """Return every adapted module by its path in the Hugging Face (or plain torch) tree, independent of the host."""
    model = _torch_model(adapters.model)
    row = architecture_of(model)
    if row is None:  # the Linears of a torch model without a row are named by their paths
        return {path: AdaptedModule(module.out_features, False, module.branches) for path, module in adapters.modules.items()}
    by_path: dict[str, AdaptedModule] = {}
    for site, branch in adapters.sites.items():
        path, at = _path(row, site)
        counts = (heads(model, "q"), heads(model, "k")) if at.fused else (1, 1)
        width = fused_width(at, branch.shape[0], *counts)
        place = by_path.setdefault(path, AdaptedModule(width, at.transposed))
        place.branches.append((branch, fused_rows(at, width, *counts)))
    return by_path


def _path(row: Architecture, site: str) -> tuple[str, LinearAt]:
    if site == "unembed":
        return row.unembed, LinearAt(row.unembed)
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", site)
    assert layer is not None, site
    at = row.linears[layer[2]]
    return f"{row.blocks}.{layer[1]}.{at.path}", at


def _names(paths: Iterable[Path]) -> set[str]:
    """Return the tensor names in the written files, read back from disk."""
    names: set[str] = set()
    for path in paths:
        with safe_open(path, framework="pt") as handle:
            names |= set(handle.keys())
    return names


def _refuse_adapters(names: set[str]) -> None:
    """Raise ``RuntimeError`` if a merged checkpoint holds a tensor of an adapter."""
    for name in sorted(names):
        if any(part in ("kept", "quarantine", "base") or part.split("_")[0] == "route" for part in name.split(".")):
            raise RuntimeError(f"the written checkpoint holds {name!r}, which does not belong to the base model")


@checked
def export_peft(
    adapters: Adapters, folder: Path | str, *, which: Which = "deployed", overwrite: bool = False, verify: bool = True
) -> None:
    """Write the kept adapter as a LoRA that ``peft.PeftModel.from_pretrained(base, folder)`` loads.

    peft itself is not needed. The logits of that model equal those of ``adapters.deployed()`` up to rounding, on any base of the
    same architecture and from any host. If ranks differ by module, they are written as ``rank_pattern``. A full-rank SVD becomes a
    LoRA of full rank without the coordinates with ``dS = 0``.

    With ``which="full"`` the LoRA is kept adapter and quarantine in one, ``[B | B_q] [A; A_q]``, for an engine that samples from
    the policy in training. A file in the folder warns that it holds the quarantine.

    If the unembedding is tied to the embedding and has an adapter, do not merge that LoRA: peft's ``merge_and_unload`` would add it
    to the embedding too. ``export_merged`` unties them.

    Args:
        adapters: Attached adapters.
        folder: Folder to write.
        which: ``deployed``: the kept adapter alone; ``full``: both, never to be shipped.
        overwrite: Replace the content of a folder that is not empty.
        verify: Read the folder with peft, if it is installed, and compare logits before anything is kept; takes seconds.

    Raises:
        ValueError: A value is not finite, ``which`` is neither, or peft reads other adapters than were trained.
        FileExistsError: The folder is not empty.
        OSError: The disk is full; nothing is written then.

    Examples:
        >>> export_peft(adapters, folder / "lora")
    """
    full = which == "full"
    refuse_infinite(adapters.tensors(quarantine=full))
    by_path = places(adapters)
    tensors, ranks = {}, {}
    for path, place in by_path.items():
        A, B = place.block(full)
        ranks[path] = A.shape[0]
        tensors[f"base_model.model.{path}.lora_A.weight"] = A.cpu().contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = B.cpu().contiguous()
    model = _torch_model(adapters.model)
    with whole_folder(folder, overwrite=overwrite) as partial:
        save_file(tensors, partial / PEFT_TENSORS, metadata={"format": "pt"})
        config = _peft_config(model, ranks, any(place.transposed for place in by_path.values()))
        (partial / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if (written := _names([partial / PEFT_TENSORS])) != tensors.keys():
            raise RuntimeError(f"the written file does not hold the kept adapter's tensors: {sorted(written ^ tensors.keys())}")
        if verify:
            demand_peft_reads(adapters, model, by_path, partial, full=full)
        if full and adapters.has_quarantine:
            (partial / PEFT_WARNING).write_text(_WARNING, encoding="utf-8")


def _peft_config(model: nn.Module, ranks: dict[str, int], transposed: bool) -> dict[str, Any]:
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: rank for path, rank in ranks.items() if rank != usual}
    # peft gives a module the first entry that its path ends with, which may be another module's
    caught = [path for path in ranks if any(path.endswith(f".{other}") for other in others)]
    others = {path: ranks[path] for path in (*sorted(caught, key=len, reverse=True), *others)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", "") or None,
        "target_modules": list(ranks),
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


@torch.no_grad()
def _merged(adapters: Adapters) -> dict[str, Tensor]:
    """Return the model's state dict with the kept adapters added to the weights; unadapted tensors are shared, not copied."""
    state = dict(adapters.model.state_dict())
    for path, place in places(adapters).items():
        base = adapters.modules[path].base
        for name in [name for name in state if name.startswith(f"{path}.")]:
            del state[name]
        state |= {f"{path}.{name}": t for name, t in base.state_dict().items()}
        A, B = place.block()
        delta = B.to(torch.float64) @ A.to(torch.float64)
        weight = state[f"{path}.weight"]
        state[f"{path}.weight"] = (weight + (delta.mT if place.transposed else delta)).to(weight.dtype)
        refuse_infinite({f"{path}.weight in {weight.dtype}": state[f"{path}.weight"]})  # the sum may be beyond float16
    first: dict[tuple[int, torch.Size], str] = {}
    for name, t in state.items():  # transformers writes a weight of two modules under one name, unless the class ties them
        if first.setdefault((t.data_ptr(), t.shape), name) != name:
            state[name] = t.clone()
    return state


def _tied(adapters: Adapters) -> bool:
    """Return whether an adapted weight is also the embedding."""
    embedding = adapters.model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return any(module.weight is embedding for module in adapters.modules.values())


@checked
def export_merged(
    adapters: Adapters, folder: Path | str, *, tokenizer: Any = None, overwrite: bool = False, verify: bool = True
) -> None:
    """Write the deployed weights, ``W`` plus the kept adapter, as a checkpoint that ``AutoModelForCausalLM`` loads.

    The model itself is unchanged. If the unembedding has an adapter and is tied to the embedding, the checkpoint stores them as two
    matrices (``tie_word_embeddings=False``) with a ``UserWarning``, because the adapter was trained on the unembedding only.

    Args:
        adapters: Attached adapters.
        folder: Folder to write.
        tokenizer: Tokenizer to save in the same folder, if given.
        overwrite: Replace the content of a folder that is not empty.
        verify: Read the checkpoint with transformers and compare logits before anything is kept; takes the memory of the model.

    Raises:
        ValueError: A value is not finite, the model is not a transformers model in its own layout, a Linear with adapters computes
            more than a matmul, or transformers reads another model than was trained.
        FileExistsError: The folder is not empty.
        OSError: The disk is full; nothing is written then.

    Examples:
        >>> export_merged(adapters, folder / "merged")
    """
    refuse_infinite(adapters.tensors(quarantine=False))
    model: Any = adapters.model
    if sharded_modules(model):
        raise ValueError(
            "the base weights are sharded: write the adapter alone with export_peft, and merge it where the model is whole, with "
            "from_pretrained and export_merged"
        )
    if not hasattr(type(model), "save_pretrained") or adapters.modules.keys() != places(adapters).keys():
        raise ValueError(
            f"a {type(model).__name__} cannot be written as a transformers checkpoint: attach or load the adapters on the "
            "transformers model itself (the torch host) and export from there, or use export_peft"
        )
    for path, module in adapters.modules.items():
        refuse_more(path, module.base, module.transposed)
    config = copy.deepcopy(model.config)
    if _tied(adapters):
        config.tie_word_embeddings = False
        warnings.warn(
            "the unembedding has an adapter and shares its weight with the embedding: the checkpoint stores two matrices, with "
            "tie_word_embeddings=False, so that the embedding is that of the base",
            stacklevel=2,
        )
    with torch.device("meta"):  # allocates no memory and draws no random numbers
        shell = type(model)(config)
    shell.load_state_dict(_merged(adapters), assign=True)
    shell.tie_weights()
    if hasattr(model, "generation_config"):  # a model without a head has none
        shell.generation_config = copy.deepcopy(model.generation_config)
    with whole_folder(folder, overwrite=overwrite) as partial:
        shell.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _refuse_adapters(_names(partial.glob("*.safetensors")))
        if verify:
            demand_transformers_reads(adapters, partial)
