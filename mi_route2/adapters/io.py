"""Adapters on disk and in other libraries' formats: safetensors with the spec in the header, checked on load; a PEFT folder; a
merged checkpoint. What is deployed holds no quarantine in any of them.
"""

import copy
import dataclasses
import glob
import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters, AdapterSpec, attach
from mi_route2.adapters.linear import Kept, SVDKept
from mi_route2.architectures import Architecture, LinearAt, architecture_of, heads
from mi_route2.checks import checked
from mi_route2.files import whole_folder, write_whole
from mi_route2.sites import fused_rows
from mi_route2.validation import parse_json, read_record

HEADER = "mi-route2"
CHECKSUM = "checksum"
Which = Literal["full", "deployed"]
FORMAT = "mi-route2 adapters 3"
_NARROW = "mi-route2 adapters 2"  # its base_hash covers the adapted weights alone
CONFIG, TENSORS = "route2_config.json", "route2_adapters.safetensors"
_KEYS = ("format", "which", "spec", "base_hash")
BASES = "bases"
"""Entry of the config: ``{site: SVDKept.basis()}``."""
_CONFIG_KEYS = (*_KEYS, "sites", "base", "sha256", BASES)
_TURNED = 0.05


@runtime_checkable
class Attaches(Protocol):
    """What a host has in common with a torch model here: adapters can be attached to it, as by ``attach``."""

    def attach(self, *patterns: Any, **given: Any) -> Adapters: ...


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of the metadata and of every tensor's name, type, shape and bytes."""
    found = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        found.update(t.view(-1).view(torch.uint8).numpy().data)  # a view: tensors may be large
    return found.hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all, with its checksum.

    The metadata goes into one header entry, as JSON: with several, safetensors orders them at random and the same content
    would give other bytes.
    """
    header = {**metadata, CHECKSUM: digest(tensors, metadata)}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # bytes first: what safetensors leaves behind when a write of its own fails has other names
    write_whole(path, save(plain, metadata={HEADER: json.dumps(header, sort_keys=True)}))


def read_tensors(path: Path, *, unchecked: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the header's metadata; ``ValueError`` with a sentence where the file is not whole or was changed.

    So is one without a checksum, unless it is ``unchecked``: then nobody knows what happened to it since it was written.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            header = parse_json((handle.metadata() or {}).get(HEADER, "{}"))
            # copies: what safetensors gives is mapped, and changes with the file after it was checked
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); delete it and write it again") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is no JSON object; delete it and write it again")
    checksum = header.pop(CHECKSUM, None)
    if checksum is None and not unchecked:
        raise ValueError(
            f"{path} has no checksum, so that no change of it would be seen: write it again, or pass unchecked=True to "
            "load_adapters, Directions.load or load_probe"
        )
    if checksum is not None and checksum != digest(tensors, header):
        raise ValueError(f"{path} is damaged: its content does not match its own checksum; delete it and write it again")
    return tensors, header


@checked
def save_adapters(adapters: Adapters, path: Path | str, which: Which = "full") -> None:
    """Save the kept adapter, with the quarantine (``full``) or without it (``deployed``)."""
    write_tensors(Path(path), adapters.tensors(quarantine=_which(which) == "full"), _metadata(adapters, which))


def _which(which: str) -> str:
    if which not in ("full", "deployed"):
        raise ValueError(f"which={which!r} is neither 'full' nor 'deployed'")
    return which


def _metadata(adapters: Adapters, which: str) -> dict[str, str]:
    return {"format": FORMAT, "which": which, "spec": json.dumps(asdict(adapters.spec)), "base_hash": adapters.base_hash}


@checked
def load_adapters(adapters: Adapters, path: Path | str, *, any_base: bool = False, unchecked: bool = False) -> None:
    """Copy a saved file into ``adapters``; a deployed file zeroes nothing but leaves the quarantine as it is.

    ``ValueError`` says what differs: a changed byte, a file without a checksum (``unchecked=True`` allows it), adapters of another
    spec, other base weights anywhere in the model or another type of number (``any_base=True`` allows both, for a base in another
    dtype or trained further, and converts), a missing or foreign name, a shape, or a value that is not finite. Nothing is changed
    unless everything fits.
    """
    path = Path(path)
    adapters.demand_live()
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file in it, {TENSORS}, or attach and load it whole with from_pretrained")
    found, metadata = read_tensors(path, unchecked=unchecked)
    if metadata.get("format") not in (FORMAT, _NARROW):
        raise ValueError(f"{path} is not a file of adapters (format {metadata.get('format')!r}, expected {FORMAT!r})")
    if unknown := sorted(metadata.keys() - set(_KEYS)):
        raise ValueError(f"{path} has the unknown entry {unknown[0]!r} in its header; delete it and write it again")
    _refuse_other_spec(path, metadata, adapters.spec)
    own = adapters.tensors(quarantine=_which(metadata.get("which", "full")) == "full")
    if missing := sorted(own.keys() - found.keys()):
        raise ValueError(f"{path} lacks {len(missing)} adapter tensors that the model has, first {missing[0]!r}")
    if foreign := sorted(found.keys() - own.keys()):
        raise ValueError(f"{path} holds {len(foreign)} tensors that the model has no place for, first {foreign[0]!r}")
    if not any_base and metadata["format"] == _NARROW:
        raise ValueError(
            f"{path} was written by an earlier version, and names no more of its base than the adapted weights: if this is its "
            "base, pass any_base=True, and save it again"
        )
    if not any_base and metadata.get("base_hash") != adapters.base_hash:
        raise ValueError(
            f"{path} was trained on other base weights (hash {metadata.get('base_hash')}, this model's is {adapters.base_hash}); "
            "load that base model, or pass any_base=True if the difference is meant"
        )
    for name, tensor in found.items():
        _refuse_misfit(path, name, tensor, own[name], any_base)
    for name, tensor in found.items():
        own[name].copy_(tensor)


def _refuse_other_spec(path: Path, metadata: Mapping[str, str], here: AdapterSpec) -> None:
    """``fold`` changes no number that is saved, and a deployed file says nothing of a quarantine."""
    try:
        written = AdapterSpec(**json.loads(metadata.get("spec", "null")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say of which spec its adapters are ({error}); delete it and write it again") from error
    free = {"fold"} | ({"quarantine", "quarantine_rank"} if metadata.get("which") == "deployed" else set())
    for name, value in asdict(written).items():
        if name not in free and value != getattr(here, name):
            raise ValueError(
                f"{path} holds adapters of {name}={value!r}, but these are of {name}={getattr(here, name)!r}: attach with the "
                "file's spec, or take from_pretrained, which does"
            )


def _refuse_misfit(path: Path, name: str, tensor: Tensor, own: Tensor, any_base: bool) -> None:
    if tensor.shape != own.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} in {path}, but {tuple(own.shape)} in the model")
    if tensor.dtype != own.dtype and not (any_base and tensor.is_floating_point()):
        raise ValueError(
            f"{name} is {tensor.dtype} in {path}, but {own.dtype} in the model; load the base in the type that it was trained in, "
            "or pass any_base=True to convert"
        )
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} in {path} holds values that are not finite")


@checked
def save_pretrained(adapters: Adapters, folder: Path | str, which: Which = "deployed", *, overwrite: bool = False) -> None:
    """Write the adapters as a folder: ``route2_config.json`` (what stands where, on which base) and the safetensors file.

    ``deployed`` leaves the quarantine out. ``ValueError`` for values that are not finite, ``FileExistsError`` for a folder that
    holds something (``overwrite=True`` replaces it), ``OSError`` where the disk is full: then nothing was written.
    """
    tensors = adapters.tensors(quarantine=_which(which) == "full")
    refuse_infinite(tensors)
    metadata = _metadata(adapters, which)
    with whole_folder(folder, overwrite=overwrite) as partial:
        write_tensors(partial / TENSORS, tensors, metadata)
        base = str(getattr(getattr(adapters.model, "config", None), "_name_or_path", ""))
        config = {**metadata, "spec": asdict(adapters.spec), "sites": list(adapters.sites), "base": base}
        config["sha256"] = _sha256(partial / TENSORS)
        config[BASES] = bases(adapters)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def bases(adapters: Adapters) -> dict[str, float]:
    """Which singular vectors ``dS`` stands on: the weights alone do not say it where singular values are equal."""
    return {site: branch.kept.basis() for site, branch in adapters.sites.items() if isinstance(branch.kept, SVDKept)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_infinite(tensors: Mapping[str, Tensor]) -> None:
    """``ValueError`` naming the first tensor with a value that is not finite."""
    for name, t in tensors.items():
        if not torch.isfinite(t).all():
            raise ValueError(f"{name} holds values that are not finite: nothing was written")


@checked
def from_pretrained(
    model: nn.Module | Attaches, folder: Path | str, *, any_base: bool = False, cache_dir: Path | None = None
) -> Adapters:
    """Attach what ``save_pretrained`` wrote to a torch model or to any host, in one step.

    A deployed folder gives adapters without a quarantine. ``cache_dir`` keeps SVDs, as in ``attach``: an SVD kept adapter saves
    ``dS`` alone, and ``U`` and ``Vh`` come from the base weights. Errors as in ``load_adapters``, and ``ValueError`` where those
    vectors come out otherwise than where the folder was written, ``FileNotFoundError`` for what is not there, ``KeyError`` for a
    site that the model lacks; the model is then as it was.
    """
    folder = Path(folder)
    config = read_config(folder)
    spec = _spec(folder / CONFIG, config)
    if _which(config["which"]) == "deployed":
        spec = dataclasses.replace(spec, quarantine="none")
    patterns = [glob.escape(site) for site in config["sites"]]
    # Every random factor is replaced by what the file holds, so the generator's seed is of no account.
    given: dict[str, Any] = {"spec": spec, "generator": torch.Generator().manual_seed(0), "cache_dir": cache_dir}
    on = attach(model, *patterns, **given) if isinstance(model, nn.Module) else model.attach(*patterns, **given)
    try:
        load_adapters(on, folder / TENSORS, any_base=any_base)
        if not any_base:
            _refuse_other_bases(folder, config[BASES], bases(on))
    except BaseException:
        on.detach()
        raise
    return on


def _refuse_other_bases(folder: Path, written: Any, here: dict[str, float]) -> None:
    """``written`` is what the config says."""
    if not isinstance(written, dict) or written.keys() != here.keys():
        raise ValueError(f"{folder / CONFIG} was changed: its {BASES} are not those of its sites")
    for site, value in written.items():
        if not isinstance(value, float) or not abs(value - here[site]) < _TURNED:
            raise ValueError(
                f"the singular vectors of {site} are others here than where {folder} was written: its weight has equal singular "
                "values, and each LAPACK then chooses its own; pass a cache_dir with the SVDs from there, or export it there"
            )


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give one that save_pretrained wrote")
    path, tensors = folder / CONFIG, folder / TENSORS
    if not path.is_file():
        of_peft = (folder / "adapter_config.json").exists()
        hint = "; it is a PEFT adapter, which peft.PeftModel.from_pretrained loads" if of_peft else ""
        raise FileNotFoundError(f"{folder} has no {CONFIG}, so save_pretrained did not write it{hint}")
    if not tensors.is_file():
        raise FileNotFoundError(f"{folder} has no {TENSORS}: copy the folder again, whole")
    try:
        config = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again, whole") from error
    known = config.get("format") if isinstance(config, dict) else None
    if known not in (FORMAT, _NARROW):
        raise ValueError(f"{path} is of the unknown format {known!r}: this version reads {FORMAT!r}")
    if differing := sorted((config.keys() ^ set(_CONFIG_KEYS)) - ({BASES} if known == _NARROW else set())):
        raise ValueError(f"{path} should hold exactly {', '.join(_CONFIG_KEYS)}, and differs in {', '.join(differing)}")
    if _sha256(tensors) != config["sha256"]:
        raise ValueError(f"{tensors} is damaged: its checksum is not the one in {CONFIG}; copy the folder again, whole")
    _refuse_other_config(path, config, tensors)
    return config


def _refuse_other_config(path: Path, config: dict[str, Any], tensors: Path) -> None:
    """What the config says beside the tensor file must be what that file says itself."""
    names, inside = read_tensors(tensors)
    for key, said in {**config, "spec": json.dumps(config["spec"])}.items():
        if key in _KEYS and inside.get(key) != said:
            raise ValueError(f"{path} was changed: its {key} is {said!r}, but {inside.get(key)!r} in {TENSORS}")
    sites = sorted({name.partition(".")[2].rpartition(".")[0] for name in names})
    if not isinstance(config["sites"], list) or sorted(config["sites"]) != sites:
        raise ValueError(f"{path} was changed: its sites are {config['sites']}, but {sites} in {TENSORS}")


def _spec(path: Path, config: dict[str, Any]) -> AdapterSpec:
    try:
        return read_record(AdapterSpec, config["spec"])
    except ValueError as error:  # a field that this version does not have
        raise ValueError(f"{path} describes adapters that this version does not know ({error})") from error


PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"


def factors(kept: Kept) -> tuple[Float[Tensor, "r d_in"], Float[Tensor, "d_out r"]]:
    """``A`` and ``B`` with ``B A`` the weight that ``kept`` adds, in the type that it is trained in.

    Of an SVD, the coordinates where ``dS`` is not 0 (the first one, where all are: a LoRA has at least rank 1).
    """
    if not isinstance(kept, SVDKept):
        return kept.A.detach(), kept.B.detach()
    dS = kept.dS.detach()
    moved = dS.nonzero()[:, 0] if bool(dS.any()) else torch.zeros(1, dtype=torch.long, device=dS.device)
    return kept.Vh[moved].to(dS.dtype), kept.U[:, moved].to(dS.dtype) * dS[moved]


@dataclass(frozen=True)
class Part:
    """The kept adapter of one logical Linear, on ``rows`` of a module's outputs (``None``: all)."""

    site: str
    kept: Kept
    rows: Tensor | None


@dataclass
class Place:
    """A module of the torch tree, ``width`` outputs wide, and what is added to it."""

    width: int
    transposed: bool
    parts: list[Part] = field(default_factory=list)

    def block(self) -> tuple[Float[Tensor, "r d_in"], Float[Tensor, "width r"]]:
        """``A`` and ``B`` of all parts together."""
        found = [factors(part.kept) for part in self.parts]
        if self.parts[0].rows is None:
            return found[0]
        A = torch.cat([a for a, _ in found])
        B = A.new_zeros(self.width, A.shape[0])
        start = 0
        for part, (a, b) in zip(self.parts, found):
            assert part.rows is not None
            B[part.rows.to(B.device), start : start + a.shape[0]] = b
            start += a.shape[0]
        return A, B


def _torch_model(model: nn.Module) -> nn.Module:
    """The model inside a host's own (``original_model`` of a bridge), where that is the one with a row."""
    for name in ("original_model", "inner"):
        held = getattr(model, name, None)
        if architecture_of(model) is None and isinstance(held, nn.Module):
            model = held
    return model


def places(adapters: Adapters) -> dict[str, Place]:
    """Every adapted module of the Hugging Face (or plain torch) tree by its path, whichever host the adapters are on."""
    model = _torch_model(adapters.model)
    row = architecture_of(model)
    found: dict[str, Place] = {}
    if row is None:  # a torch model without a row: its Linears are called by their paths
        for path, module in adapters.modules.items():
            parts = [Part(branch.site, branch.kept, rows) for branch, rows in module.branches]
            found[path] = Place(module.out_features, False, parts)
        return found
    for site, branch in adapters.sites.items():
        path, at = _path(row, site)
        width = branch.weight.shape[0] * (at.fused[1] if at.fused else 1)
        place = found.setdefault(path, Place(width, at.transposed))
        place.parts.append(Part(site, branch.kept, fused_rows(at, width, heads(model, "q") if at.fused else 1)))
    return found


def _path(row: Architecture, site: str) -> tuple[str, LinearAt]:
    if site == "unembed":
        return row.unembed, LinearAt(row.unembed)
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", site)
    assert layer is not None, site
    at = row.linears[layer[2]]
    return f"{row.blocks}.{layer[1]}.{at.path}", at


def _refuse_infinite(adapters: Adapters) -> None:
    refuse_infinite(adapters.tensors(quarantine=False))


def _names(paths: Iterable[Path]) -> set[str]:
    """The tensor list of written files, read back from the disk."""
    names: set[str] = set()
    for path in paths:
        with safe_open(path, framework="pt") as handle:
            names |= set(handle.keys())
    return names


def _refuse_adapters(names: set[str]) -> None:
    """A merged checkpoint has no module of ours: least of all the quarantine."""
    for name in sorted(names):
        if any(part in ("kept", "quarantine", "base") or part.split("_")[0] == "route" for part in name.split(".")):
            raise RuntimeError(f"the written checkpoint holds {name!r}, which is not the base model's")


@checked
def export_peft(adapters: Adapters, folder: Path | str, *, overwrite: bool = False) -> None:
    """Write the kept adapter as a LoRA that ``peft.PeftModel.from_pretrained(base, folder)`` loads. peft itself is not needed.

    Its logits are those of ``adapters.deployed()`` up to rounding, on any base of the architecture that the adapters stand on,
    and from any host. Ranks differ by module where the adapters' do (``rank_pattern``). A full-rank SVD becomes a LoRA of full
    rank; coordinates with ``dS = 0`` are left out.

    Where the unembedding is tied to the embedding and has an adapter, keep that LoRA unmerged: peft's ``merge_and_unload`` would
    write it into the embedding too. ``export_merged`` unties them.

    ``ValueError`` for values that are not finite, ``FileExistsError`` for a folder that holds something (``overwrite=True``
    replaces it), ``OSError`` where the disk is full: then nothing was written.
    """
    _refuse_infinite(adapters)
    found = places(adapters)
    tensors, ranks = {}, {}
    for path, place in found.items():
        A, B = place.block()
        ranks[path] = A.shape[0]
        tensors[f"base_model.model.{path}.lora_A.weight"] = A.cpu().contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = B.cpu().contiguous()
    model = _torch_model(adapters.model)
    with whole_folder(folder, overwrite=overwrite) as partial:
        save_file(tensors, partial / PEFT_TENSORS, metadata={"format": "pt"})
        config = _peft_config(model, ranks, any(place.transposed for place in found.values()))
        (partial / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if (written := _names([partial / PEFT_TENSORS])) != tensors.keys():
            raise RuntimeError(f"the written file holds other tensors than the kept adapter's: {sorted(written ^ tensors.keys())}")


def _peft_config(model: nn.Module, ranks: dict[str, int], transposed: bool) -> dict[str, Any]:
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: rank for path, rank in ranks.items() if rank != usual}
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
    """The model's state without adapters, the kept ones added to the weights; whatever is not adapted is shared, not copied."""
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
    return state


def _tied(adapters: Adapters) -> bool:
    """Return whether an adapted weight is also the embedding."""
    embedding = adapters.model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return any(module.weight is embedding for module in adapters.modules.values())


@checked
def export_merged(adapters: Adapters, folder: Path | str, *, tokenizer: Any = None, overwrite: bool = False) -> None:
    """Write the deployed weights, ``W`` plus the kept adapter, as a checkpoint that ``AutoModelForCausalLM`` loads.

    The model itself stays as it is. ``tokenizer`` is saved along where it is given. Where the unembedding has an adapter and is
    tied to the embedding, the checkpoint holds the two apart (``tie_word_embeddings=False``, one matrix more) and a
    ``UserWarning`` says so: the adapter was trained on what the model says, not on what it reads.

    ``ValueError`` for values that are not finite and for what is no transformers model in its own layout; else as ``export_peft``.
    """
    _refuse_infinite(adapters)
    model: Any = adapters.model
    if not hasattr(type(model), "save_pretrained") or adapters.modules.keys() != places(adapters).keys():
        raise ValueError(
            f"a {type(model).__name__} has no checkpoint of transformers: attach or load the adapters to the transformers model on "
            "the torch host and export from there, or use export_peft"
        )
    config = copy.deepcopy(model.config)
    if _tied(adapters):
        config.tie_word_embeddings = False
        warnings.warn(
            "the unembedding has an adapter and shares its weight with the embedding: the checkpoint holds them apart, with "
            "tie_word_embeddings=False, so that the embedding stays the base's",
            stacklevel=2,
        )
    with torch.device("meta"):  # no memory, and no random numbers drawn
        shell = type(model)(config)
    shell.load_state_dict(_merged(adapters), assign=True)
    shell.tie_weights()
    shell.generation_config = copy.deepcopy(model.generation_config)
    with whole_folder(folder, overwrite=overwrite) as partial:
        shell.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _refuse_adapters(_names(partial.glob("*.safetensors")))
