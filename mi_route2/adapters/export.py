"""The deployed model in formats that other libraries read. The quarantine is in none of them.

PEFT: a LoRA folder with scaling ``lora_alpha / r = 1``. At one Linear the kept adapter is

    LoRA   B (A x)             A, B as they are
    SVD    U (dS * (Vh x))     A = Vh, B = U diag(dS): an exact LoRA, without the coordinates where dS is 0

Where q, k and v are rows of one fused module, so are their deltas, and the block form is exact again:

    A = [A_q; A_k; A_v]        B[rows_q, columns_q] = B_q,  and so on        rank = r_q + r_k + r_v

Merged: ``W + B A``, summed in float64 and rounded once, in a checkpoint of transformers.
"""

import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.kept import Kept, SVDKept
from mi_route2.adapters.store import refuse_infinite, whole_folder
from mi_route2.architectures import Architecture, LinearAt, architecture_of, heads
from mi_route2.checks import checked
from mi_route2.sites import fused_rows

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
    """Whether an adapted weight is the embedding too."""
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
