"""Argument checks of the public functions, whose errors are one sentence.

    @checked                                  a function, or a class (which checks its constructor)
    def attach(model: nn.Module, *patterns: str, generator: torch.Generator) -> Adapters: ...

    attach(model, "blocks.*", generator=0)    # TypeError: attach: generator must be Generator, not the int 0

Types and shapes are those of the signature, checked by beartype and jaxtyping: axes with the same name have the same length
throughout a call. Internal functions are not checked at run time; the tests check every annotation of the package.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from operator import index
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch

if "beartype" not in sys.modules and (nnsight := sys.modules.get("nnsight")) and "save" in vars(object):
    # nnsight gives every object a method `save`, which has no hash; beartype's import hashes what `object` has.
    nnsight._c.unmount("save")
    try:
        importlib.import_module("beartype")
    finally:
        nnsight._c.mount(nnsight.save, "save")
from beartype import BeartypeConf, FrozenDict
from beartype.door import is_bearable
from jaxtyping import Bool, Integer, jaxtyped
from torch import Tensor

Mask = Bool[Tensor, "b s"] | Integer[Tensor, "b s"]
"""Token mask. Hugging Face's masks are int64: ``as_mask`` converts 0 and 1 to booleans."""

_NUMBERS = BeartypeConf(
    hint_overrides=FrozenDict({int: int | np.integer, float: float | int | np.integer | np.floating, bool: bool | np.bool_})
)
"""Accepts numpy scalars as Python numbers, and an integer as a float."""

F = TypeVar("F", bound=Callable[..., Any])


def checked(public: F) -> F:
    """Check the arguments of ``public``, a function or a class, on every call.

    Raises (on a call):
        ValueError: A tensor or array has another shape or dtype, or a text is none of the valid choices.
        TypeError: Any other argument that does not fit the signature.
    """
    if not isinstance(public, type):
        return _guarded(public, public.__qualname__.removesuffix(".__init__"))  # pyright: ignore[reportReturnType]
    init = _guarded(public.__init__, public.__name__)
    init.__no_type_check__ = True  # jaxtyping's import hook would repeat this check, with an error of many lines
    public.__init__ = init
    return public  # pyright: ignore[reportReturnType]


def _guarded(fn: Callable[..., Any], name: str) -> Any:
    signature = inspect.signature(fn)

    @cache
    def hints() -> Mapping[str, Any]:  # on the first call, when the names in quoted annotations are defined
        resolved = get_type_hints(fn, include_extras=True)
        return {key: hint for key, hint in resolved.items() if key in signature.parameters and hint is not Any}

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}: it takes {', '.join(signature.parameters)}") from None
        with jaxtyped("context"):
            for key, hint in hints().items():
                several = signature.parameters[key].kind is inspect.Parameter.VAR_POSITIONAL
                for value in () if key not in arguments else arguments[key] if several else (arguments[key],):
                    if not is_bearable(value, hint, conf=_NUMBERS):
                        raise _refusal(f"{name}: {key}", hint, value)
        return fn(*args, **kwargs)

    return call


def _refusal(name: str, hint: Any, value: object) -> Exception:
    expected = re.sub(r"(?:\w+\.)+(\w)", r"\1", hint.__name__ if inspect.isclass(hint) else str(hint))
    array = isinstance(value, Tensor | np.ndarray) and ("[Tensor" in expected or "[ndarray" in expected)
    wrong_value = array or (isinstance(value, str) and "Literal[" in expected)
    return (ValueError if wrong_value else TypeError)(f"{name} must be {expected}, not {_described(value)}")


def _described(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    plain = isinstance(value, str | int | float | list | tuple)
    return f"the {type(value).__name__} {' '.join(repr(value).split()):.60}" if plain else type(value).__name__


def as_mask(name: str, mask: Tensor) -> Tensor:
    """Return ``mask`` as booleans; ``ValueError`` if it has a number other than 0 and 1."""
    if mask.dtype == torch.bool:
        return mask
    if bool((wrong := (mask != 0) & (mask != 1)).any()):
        value = mask[wrong][0].item()
        raise ValueError(f"{name} holds {value}, but a mask has only 0 and 1: write {name} != 0 if that is what you mean")
    return mask == 1


def demand_finite(name: str, values: Tensor | None) -> None:
    """Raise ``ValueError`` if ``values`` has NaN or infinity."""
    if values is not None and bool((wrong := ~torch.isfinite(values)).any()):
        raise ValueError(
            f"{name} holds {values[wrong][0].item()} in row {int(wrong.nonzero()[0, 0])}: "
            "leave such rollouts out, or correct the code that computed the number"
        )


def on_host(values: Sequence[Tensor]) -> list[Any]:
    """Return numbers of one device, each in a tensor of its own, as Python's; the host waits once for all of them."""
    return torch.stack([*values]).tolist() if values else []


def all_finite(tensors: Mapping[Any, Tensor]) -> bool:
    """Return whether no tensor has NaN or infinity; the host waits once for all of them, if they are on one device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for t in tensors.values():
        by_device.setdefault(t.device, []).append(t.isfinite().all())
    return all(all(on_host(flags)) for flags in by_device.values())


def token_row(name: str, row: object) -> list[int]:
    """Return the token ids of one sequence as a list; ``TypeError`` if ``row`` is not a sequence of whole numbers."""
    if isinstance(row, str):
        raise TypeError(f"{name} is the text {row!r:.40}: encode it with the tokenizer, token ids are whole numbers")
    if not isinstance(row, Iterable):
        raise TypeError(f"{name} is {_described(row)}: give a list for each rollout, as in [[5, 17], [8]]")
    try:
        return [index(text) for text in row]
    except TypeError as error:
        raise TypeError(f"{name} holds a value that is not a whole number: give token ids, as in [[5, 17], [8]]") from error
