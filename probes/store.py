"""Probes, steering and fitted routes as folders that the Hugging Face Hub shows and stores. No pickle.

    README.md          model card: library_name, tags, base_model, site, positive and quality as YAML, then how to load it
    config.json        format, kind, settings, card
    model.safetensors  the vectors, with a checksum

    affine     weight [d], bias [1]          settings: positive
    direction  direction [d]                 settings: positive, score
    steering   one tensor per vector         settings: the steering, with a vector's name in place of its numbers
    mask       the directions of a route     settings: its spec and l1; the quarantine adapter is not part of it
    erase      the same                      settings: its spec

A folder that differs from this is refused with the reason, so what loads is what was saved.
"""

from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.files import whole_folder
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.direction import DirectionProbe
from mi_route2.routing import EraseRoute, MaskRoute
from mi_route2.routing.directions import Directions, KnownFitter
from mi_route2.specs import EraseSpec, MaskSpec
from mi_route2.steering.specs import Steering, plain_spec, steering_of
from mi_route2.tensor_files import read_tensors, write_tensors
from mi_route2.validation import read_object, read_record, validated, write_json

FORMAT = "mi-route2 folder 1"
CARD, CONFIG, TENSORS = "README.md", "config.json", "model.safetensors"
TITLES = {
    "affine": "Affine probe", "direction": "Direction probe", "steering": "Steering", "mask": "Mask route", "erase": "Erase route",
}  # fmt: skip
DAMAGED = "download the folder again, or write it with save_pretrained"
Saved = AffineProbe | DirectionProbe | Steering | MaskRoute | EraseRoute


@validated
class Card:
    """What a model card says about a probe, a steering or a route.

    Attributes:
        base_model: the model whose activations or gradients it reads, by its name on the Hub.
        site: where a probe reads, as ``"blocks.3.resid_post"``; steering and routes name their own sites.
        quality: numbers by name, such as those of a `TransferRow`; ``None`` if undefined.
        note: free text, such as the source of the labels.
    """

    base_model: str
    site: str = ""
    quality: dict[str, float | None] = field(default_factory=dict)
    note: str = ""


@checked
def save_pretrained(artifact: Saved, folder: Path | str, card: Card, *, overwrite: bool = False) -> None:
    """Write a probe, a steering or a fitted route as a folder, atomically.

    Args:
        artifact: the probe, the steering, or the route, which needs directions.
        folder: the folder.
        card: what its model card says.
        overwrite: replace the content of a folder that is not empty.

    Raises:
        ValueError: a probe without a site, a route without directions, or steering with vectors by name.
        OSError: the folder is not empty, or cannot be written.

    Examples:
        >>> save_pretrained(probe, "hack-probe", Card("HuggingFaceTB/SmolLM2-135M", "blocks.3.resid_post", {"auroc": 0.9}))
    """
    described = _described(artifact, card)
    with whole_folder(folder, overwrite=overwrite) as partial:
        _write(partial, artifact, card, *described)


@checked
def push_to_hub(artifact: Saved, repo_id: str, card: Card) -> str:
    """Upload what `save_pretrained` writes to a model repository, which is created if it does not exist; return its address.

    The endpoint and the token are huggingface_hub's (``HF_ENDPOINT``, ``HF_TOKEN``). Create a private repository beforehand.

    Raises:
        ValueError: as `save_pretrained`, a name that no repository can have, or a card that the Hub refuses.
        OSError: the Hub refuses, or cannot be reached.
    """
    described, api = _described(artifact, card), HfApi()
    with TemporaryDirectory() as temporary:
        _write(Path(temporary), artifact, card, *described)
        try:
            address = api.create_repo(repo_id, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=temporary, commit_message=f"Upload {described[0]}")
        except (HfHubHTTPError, OSError) as error:
            raise _refused(repo_id, error, "log in with `hf auth login`, or choose a repository of yours") from error
        except ValueError as error:  # of several lines
            raise ValueError(f"{repo_id} is not uploaded: {' '.join(str(error).split())}") from error
    return str(address)


@checked
def from_pretrained(source: Path | str) -> tuple[Saved, Card]:
    """Return the artifact and the card of a folder, or of a repository on the Hub; a route has its directions and no quarantine.

    Args:
        source: a folder that `save_pretrained` wrote, or the name of a repository, owner/name.

    Raises:
        ValueError: any other folder; the message names the fault.
        OSError: there is no such folder or repository.

    Examples:
        >>> probe, card = from_pretrained("hack-probe")
        >>> probe.score_rollouts(host.capture([site], tokens, attention)[site], mask)
    """
    folder = Path(source)
    if not folder.is_dir():
        if isinstance(source, Path):  # a path is never looked up on the Hub
            raise FileNotFoundError(f"{source} is no folder: give one that save_pretrained wrote")
        try:
            folder = Path(snapshot_download(str(source), allow_patterns=[CARD, CONFIG, TENSORS]))
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise _refused(source, error, "give a folder, or owner/name of a repository that you can read") from error
    path, raw = folder / TENSORS, read_object(folder / CONFIG, DAMAGED)
    if raw.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG}: format {raw.get('format')!r}, expected {FORMAT!r}.")
    try:
        kind, settings, card = raw["kind"], raw["settings"], read_record(Card, raw["card"])
        if kind in ("mask", "erase"):
            return _route(kind, dict(settings), path), card
        tensors, _ = read_tensors(path)
        artifact = steering_of(settings, tensors.pop) if kind == "steering" else _probe(kind, settings, tensors)
        if tensors:
            raise ValueError(f"{TENSORS} holds {sorted(tensors)}, which the settings do not name")
        return artifact, card
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder} is not what save_pretrained writes ({error}): {DAMAGED}") from error


def _described(artifact: Saved, card: Card) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return kind, settings and tensors of an artifact; those of a route are written by its directions."""
    if isinstance(artifact, AffineProbe | DirectionProbe) and not card.site:
        raise ValueError("A probe reads one site: give it to the card, as in Card(base_model, site='blocks.3.resid_post').")
    if isinstance(artifact, AffineProbe):
        bias = torch.tensor([artifact.bias], dtype=torch.float64, device="cpu")
        return "affine", {"positive": artifact.positive}, {"weight": artifact.weight.double(), "bias": bias}
    if isinstance(artifact, DirectionProbe):
        return "direction", {"positive": artifact.positive, "score": artifact.score}, {"direction": artifact.direction.double()}
    if isinstance(artifact, Steering):
        tensors: dict[str, Tensor] = {}

        def pack(values: Tensor) -> str:
            tensors[name := f"vector.{len(tensors)}"] = values.clone()  # safetensors refuses one tensor under two names
            return name

        return "steering", plain_spec(artifact, pack), tensors
    if artifact.directions is None:
        raise ValueError("This route has no directions to save: call route.refresh(policy, step) first.")
    extra = {"l1": artifact.l1} if isinstance(artifact, MaskRoute) else {}
    return "mask" if extra else "erase", {"spec": asdict(artifact.spec), **extra}, {}


def _write(folder: Path, artifact: Saved, card: Card, kind: str, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    if isinstance(artifact, MaskRoute | EraseRoute):
        assert artifact.directions is not None
        artifact.directions.save(folder / TENSORS)
        sites, positive = sorted(artifact.directions.vectors), "hack"
    else:
        write_tensors(folder / TENSORS, tensors, {"format": FORMAT})
        sites = _sites(settings) if kind == "steering" else [card.site]
        positive = settings.get("positive")
    write_json(folder / CONFIG, {"format": FORMAT, "kind": kind, "settings": settings, "card": asdict(card)})
    data = ModelCardData(
        library_name="mi-route2",
        tags=["mi-route2", "interpretability", "reward-hacking", kind],
        base_model=card.base_model,
        site=sites[0] if len(sites) == 1 else sites,
        positive=positive,
        quality=card.quality or None,
    )
    rises = "" if positive is None else f" Its score rises for the label `{positive!r}`."
    body = (
        f"# {TITLES[kind]} of {card.base_model}\n\nAt {', '.join(f'`{site}`' for site in sites)}.{rises}\n\n{card.note}\n\n"
        "```python\nfrom mi_route2.probes.store import from_pretrained\n\n"
        'artifact, card = from_pretrained("path or owner/name")\n```\n'
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(folder / CARD)


def _sites(plain: object) -> list[str]:
    """Return the sites that a plain steering names, in order."""
    if isinstance(plain, Mapping):
        inner = [site for value in plain.values() for site in _sites(value)]
        return sorted({*inner, *([plain["site"]] if "site" in plain else [])})
    return sorted({site for each in plain for site in _sites(each)}) if isinstance(plain, list) else []


def _probe(kind: str, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> AffineProbe | DirectionProbe:
    if kind == "affine":
        return AffineProbe(tensors.pop("weight"), float(tensors.pop("bias")), **settings)
    if kind == "direction":
        return DirectionProbe(tensors.pop("direction"), **settings)
    raise ValueError(f"kind {kind!r} is not one of {', '.join(TITLES)}")


def _route(kind: str, settings: dict[str, Any], path: Path) -> MaskRoute | EraseRoute:
    directions, spec = Directions.load(path), settings.pop("spec")
    if kind == "mask":
        route = MaskRoute(read_record(MaskSpec, spec), KnownFitter(directions), **settings)
    else:
        route = EraseRoute(read_record(EraseSpec, spec), KnownFitter(directions), **settings)
    route.directions = directions
    return route


def _refused(source: Path | str, error: Exception, remedy: str) -> OSError:
    """Return the error of the Hub as one line."""
    cause = error.__cause__ or error
    reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
    return OSError(f"{source} is no folder here, and {constants.ENDPOINT} answers: {reason} ({remedy})")
