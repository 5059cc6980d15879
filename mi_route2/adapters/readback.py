"""Files that were written are read by the library that others read them with, and must compute what was trained.

    |logits_read - logits|  <=  LOSS |logits - logits_base|        over random tokens, beyond rounding

A module that the reader takes for another one, a weight that two modules share, or a model that multiplies by a weight itself would
otherwise ship another model than the one that was evaluated.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.weights import sharded_modules
from mi_route2.architectures import WRAPPED

LOSS = 0.02
"""Share of what the adapters change by which the model that is read may differ."""
ROUNDING = 64
"""Units in the last place of the largest logit that do not count."""


def can_be_read(model: nn.Module) -> bool:
    """Return True for a whole transformers model in its own layout; a bridge and a sharded model cannot be built anew here."""
    bridged = any(path.rpartition(".")[2] == WRAPPED for path, _ in model.named_modules())
    return hasattr(model, "get_input_embeddings") and hasattr(model, "config") and not bridged and not sharded_modules(model)


def demand_peft_reads(adapters: Adapters, model: nn.Module, paths: Iterable[str], folder: Path, *, full: bool) -> None:
    """Raise ``ValueError`` if peft reads a folder as other adapters than those of ``model``; nothing is checked without peft."""
    if find_spec("peft") is None or not can_be_read(model):
        return
    peft = import_module("peft")
    trained = {p: p.requires_grad for p in model.parameters()}
    base: Any = copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})  # weights are shared
    for module in base.modules():  # a trainer's wrapper of a forward would run the model itself, and not its copy
        vars(module).pop("forward", None)
    for path in paths:
        base.set_submodule(path, base.get_submodule(path).base)
    try:
        try:
            with _own_random_numbers(model):
                read = peft.PeftModel.from_pretrained(base, str(folder))
        except ValueError as error:  # of a module that peft does not adapt, as the out_proj of Mamba
            raise RuntimeError(str(error)) from error
        _demand(adapters, lambda tokens: read(input_ids=tokens).logits, "peft's LoRA", "export_merged", full=full)
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"peft cannot read what was written ({_line(error)}): use export_merged") from error
    finally:
        for p, trains in trained.items():
            p.requires_grad_(trains)  # peft freezes the base


def demand_transformers_reads(adapters: Adapters, folder: Path) -> None:
    """Raise ``ValueError`` if transformers reads a merged checkpoint as another model than the deployed one."""
    if not can_be_read(adapters.model):
        return
    parameter = next(adapters.model.parameters())
    with _own_random_numbers(adapters.model):
        read: Any = type(adapters.model).from_pretrained(str(folder), dtype=parameter.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    read.eval().to(parameter.device)
    for name in ("_attn_implementation", "_experts_implementation"):  # no file holds which kernels a model runs
        if hasattr(adapters.model.config, name):
            setattr(read.config, name, getattr(adapters.model.config, name))
    _demand(adapters, lambda tokens: read(input_ids=tokens).logits, "the merged checkpoint", "export_peft", full=False)


def _own_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Context: what a reader draws for weights that it then replaces is not missing in the run that goes on."""
    return torch.random.fork_rng([p.device for p in [next(model.parameters())] if p.device.type == "cuda"])


@torch.no_grad()
def _demand(adapters: Adapters, read: Callable[[Tensor], Float[Tensor, "b s v"]], what: str, other: str, *, full: bool) -> None:
    model: Any = adapters.model
    weight = model.get_input_embeddings().weight
    tokens = torch.randint(weight.shape[0], (2, 8), generator=torch.Generator().manual_seed(0)).to(weight.device)
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False

    def logits(context: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        with context():
            return type(model).forward(model, input_ids=tokens).logits.double()  # without a trainer's wrapper

    try:
        ours, base = logits(adapters.full if full else adapters.deployed), logits(adapters.reference)
    finally:
        for module in training:
            module.training = True
    miss, effect = float((read(tokens).double() - ours).abs().max()), float((ours - base).abs().max())
    if not miss <= LOSS * effect + ROUNDING * torch.finfo(weight.dtype).eps * float(ours.abs().max()):
        raise ValueError(
            f"{what} is not what was trained: its logits are {miss:.2g} off, where the adapters change them by {effect:.2g}. "
            f"Nothing was written: use {other}, or verify=False to write it all the same"
        )


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
