"""Adapters on disk: safetensors with the spec in the header, checked on load; the deployed file holds no quarantine tensor.

    save_adapters(adapters, "a.safetensors")          one file, into adapters that stand already: load_adapters
    save_pretrained(adapters, "folder")               with a readable config beside it, attached in one step: from_pretrained

Names are logical Linears, so a file from one host loads on every other. The header carries a SHA-256 of the tensors and of the
rest of the header: one flipped bit is an error, not another model. What was read is a copy: the file may change afterwards.
"""

import dataclasses
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters, AdapterSpec, attach
from mi_route2.adapters.kept import SVDKept
from mi_route2.checks import checked
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
    """Write a safetensors file whole or not at all (a temporary file in the same folder, then a rename), with its checksum.

    The metadata goes into one header entry, as JSON: with several, safetensors orders them at random and the same content
    would give other bytes.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    header = {**metadata, CHECKSUM: digest(tensors, metadata)}
    data = save(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata={HEADER: json.dumps(header, sort_keys=True)}
    )
    try:
        write_synced(partial, data)  # what safetensors leaves behind when a write of its own fails has other names
        partial.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unwritten(path: Path, error: Exception) -> OSError:
    reason = getattr(error, "strerror", None) or str(error).partition(" at path ")[0].rpartition(": ")[2]  # the last of several
    return OSError(f"could not write {path}, give a path in a folder that can be written and has room: {reason}")


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


@contextmanager
def whole_folder(folder: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Context: an empty folder beside ``folder``, which takes its name on a clean exit and is gone on any other.

    ``FileExistsError`` where ``folder`` is a file, or a folder with something in it: ``overwrite=True`` replaces all of that.
    """
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file: give a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"{target} is not empty: choose another folder, or pass overwrite=True to replace all that is in it")
    partial, former = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(partial, ignore_errors=True)  # a process of the same number, killed long ago
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as written:
                    os.fsync(written.fileno())
        if target.exists():
            target.replace(former)
        partial.replace(target)
    except (SafetensorError, OSError) as error:
        raise _unwritten(target, error) from error
    finally:
        if former.exists() and not target.exists():
            former.replace(target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


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
