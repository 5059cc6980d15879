"""Argument checks of the public functions, whose errors are one sentence that names the remedy.

    @checked                                  a function, or a class (which checks its constructor)
    def attach(model: nn.Module, *patterns: str, generator: torch.Generator) -> Adapters: ...

    attach(model, "blocks.*", generator=0)    # TypeError: attach: generator must be a Generator, not the int 0: pass torch.Gen...

Types and shapes are those of the signature, checked by beartype and jaxtyping: axes with the same name have the same length
throughout a call. Internal functions are not checked at run time; the tests check every annotation of the package.
"""

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from operator import index
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
from beartype.vale import Is
from jaxtyping import AbstractArray, Bool, Integer, jaxtyped
from torch import Tensor

Mask = Bool[Tensor, "b s"] | Integer[Tensor, "b s"]
"""Token mask. Hugging Face's masks are int64: ``as_mask`` converts 0 and 1 to booleans."""

_NUMBERS = BeartypeConf(
    hint_overrides=FrozenDict({int: int | np.integer, float: float | int | np.integer | np.floating, bool: bool | np.bool_})
)
"""Accepts numpy scalars as Python numbers, and an integer as a float."""

_REMEDIES: Mapping[str, str] = types.MappingProxyType(
    {
        "Generator": "pass torch.Generator().manual_seed(0)",
        "AdapterSpec": "write AdapterSpec('lora', rank=4)",
        "Adapters": "give what attach(model, ...) or host.attach(...) returned",
        "Host": "open the model with open_host('torch', model), or a checkpoint with load(path)",
        "Module": "load(path) opens a checkpoint as a host, and a host has host.attach(...) and host.policy(...) of its own",
        "Tape": "open the micro-batch's own, as in adapters.recording(micro_batch.tape)",
        "Rollouts": "make them with Rollouts.from_lists(prompts, completions, pad)",
        "Policy": "write Policy(model, adapters), or host.policy(adapters)",
        "TrainBatch": "write TrainBatch(rollouts, rewards, advantages, groups, teacher)",
        "PairBatch": "write PairBatch(hack, clean, 'name of the pairs'), of two Rollouts",
        "MaskSpec": "write MaskSpec(score='act')",
        "OpenSpec": "write OpenSpec()",
        "EraseSpec": "write EraseSpec(k=3)",
        "CanarySpec": "write CanarySpec()",
        "Fitter": "MaskRoute.from_pairs(pairs, spec) and EraseRoute.from_pairs(pairs, spec) make one of pairs",
        "StepContext": "write StepContext(torch.Generator().manual_seed(0))",
        "Request": "write Request((5, 17), Sampling(max_new=8)), and [Request(...), ...] for several",
        "Steer": "write [Steer(Site(3, 'resid_mid'), vector)]",
        "Steering": "write Steering(base=(Steer(Site(3, 'resid_mid'), vector),))",
        "Monitor": "give the Monitor itself, the one that requests carry: a name could be misspelt, and would never be read",
        "TokenSelection": "write TokenSelection('prompt') or TokenSelection(positions=(3, 40))",
        "Site": "write [Site(3, 'resid_mid')], or Site.parse({text!r}) for a name",
        "Callable": "give a function",
    }
)
"""Remedies for the error message, by the name of the expected type."""

_KINDS = ("Bool", "Float", "Integer", "Int")

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
    def hints() -> Mapping[str, tuple[Any, Any]]:  # on the first call, when the names in quoted annotations are defined
        resolved = get_type_hints(fn, include_extras=True)
        return {key: (hint, _whole(hint)) for key, hint in resolved.items() if key in signature.parameters and hint is not Any}

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            missing = re.search(r"missing a required.*'(\w+)'", str(error))
            hint, _ = hints().get(missing[1], (None, None)) if missing else (None, None)
            remedy = _remedy(hint, None) if missing else f": it takes {', '.join(signature.parameters)}"
            raise TypeError(f"{name}: {error}{remedy}") from None
        with jaxtyped("context"):
            for key, (hint, whole) in hints().items():
                if key not in given:
                    continue
                several = signature.parameters[key].kind is inspect.Parameter.VAR_POSITIONAL
                for value in given[key] if several else (given[key],):
                    if not _fits(value, whole):
                        raise _refusal(name, key, hint, value, several, given)
        return fn(*args, **kwargs)

    return call


def _whole(hint: Any) -> Any:
    """Return the type with a check of every entry: beartype looks at one, which in a list it draws from Python's ``random``."""
    origin, entries = get_origin(hint), [_whole(entry) for entry in get_args(hint)]
    if origin in (list, Sequence, Iterable) or (origin is tuple and entries[1:] == [...]):
        # a generator is not read before its time, and a tensor without an axis cannot be read
        return Annotated[origin, Is[lambda each: not isinstance(each, Collection) or _all_fit(each, entries[0])]]
    if origin in (dict, Mapping):
        return Annotated[origin, Is[lambda value: all(all(map(_fits, pair, entries)) for pair in value.items())]]
    if len(_alternatives(hint)) > 1 and any(whole is not entry for whole, entry in zip(entries, get_args(hint), strict=True)):
        return Annotated[object, Is[lambda value: any(_fits(value, entry) for entry in entries)]]
    return hint


def _all_fit(each: Collection[Any], hint: Any) -> bool:
    return getattr(each, "ndim", 1) != 0 and all(_fits(one, hint) for one in each)


def _fits(value: object, hint: Any) -> bool:
    return is_bearable(value, hint, conf=_NUMBERS)


def _refusal(name: str, key: str, hint: Any, value: object, several: bool, given: Mapping[str, object]) -> Exception:
    alternatives = _alternatives(hint)
    arrays = [each for each in alternatives if inspect.isclass(each) and issubclass(each, AbstractArray)]
    chosen = [choice for each in alternatives if get_origin(each) is Literal for choice in get_args(each)]
    sentence = f"{name}: {key} must be {_expected(alternatives)}, not {_told(value)}"
    if several and isinstance(value, list | tuple):
        return TypeError(f"{sentence}: give each as an argument of its own, as in {name.rpartition('.')[2]}(..., *{key})")
    if arrays and isinstance(value, Tensor | np.ndarray):
        return ValueError(f"{sentence}{_of_arrays(arrays, value, given, key)}")
    if chosen and any(type(value) is type(choice) for choice in chosen):
        return ValueError(sentence)
    if arrays:
        # torch reads the first entry of a pandas Series by its label, which rows that were filtered may not have
        make = "torch.tensor(np.asarray(...))" if hasattr(value, "to_numpy") else "torch.tensor(...)"
        return TypeError(f"{sentence}: make it one with {'np.asarray(...)' if arrays[0].array_type is np.ndarray else make}")
    lists = any(get_origin(each) in (list, Sequence) for each in alternatives)
    listed = ": give .tolist() of it" if lists and hasattr(value, "tolist") else ""  # an array's, a tensor's or a pandas Series'
    return TypeError(f"{sentence}{_remedy(hint, value) or listed}")


def _of_arrays(arrays: list[Any], value: Tensor | np.ndarray, given: Mapping[str, object], key: str) -> str:
    """Return the remedy for an array of another kind, shape or dtype."""
    if not any(isinstance(value, array.array_type) for array in arrays):
        return ": give .numpy() of it" if isinstance(value, Tensor) else ": make it one with torch.as_tensor(...)"
    if isinstance(value, arrays[0].array_type) and len(str(arrays[0].dim_str).split()) == value.ndim:
        if any("float" in str(dtype) for dtype in arrays[0].dtypes) and "float" not in str(value.dtype):
            return f": give {'.float()' if isinstance(value, Tensor) else '.astype(float)'} of it"
        if len(arrays) == 1 and arrays[0].dtypes[0] == "bool" and "int" in str(value.dtype):
            return f": write {key} != 0"
    beside = [
        f"{name} is {_shape(other)}" for name, other in given.items() if name != key and isinstance(other, Tensor | np.ndarray)
    ]
    return f", where {', '.join(beside)}" if beside else ""


def _alternatives(hint: Any) -> list[Any]:
    """Return the alternatives of a union, or the type itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _expected(alternatives: list[Any]) -> str:
    words = list(dict.fromkeys(_word(alternative) for alternative in alternatives))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _word(hint: Any) -> str:
    if hint in (None, types.NoneType):
        return "None"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        kind = hint.__name__.partition("[")[0].replace("Integer", "Int").lower()
        noun = "array" if hint.array_type is np.ndarray else "tensor"
        return f"{_a(kind)} {noun} [{' '.join(str(hint.dim_str).split())}]"
    if inspect.isclass(hint) and get_origin(hint) is None:
        return _a(hint.__name__)
    return _a(re.sub(r"(?:\w+\.)+(\w)", r"\1", str(hint)))


def _told(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        noun = "tensor" if isinstance(value, Tensor) else "array"
        return f"{_a(str(value.dtype).removeprefix('torch.'))} {noun} {_shape(value)}"
    if value is None:
        return "None"
    if isinstance(value, dict):  # without the values, whose text may be long or an address
        return f"the dict {{{', '.join(f'{key!r}: {type(each).__name__}' for key, each in value.items()):.60}}}"
    plain = isinstance(value, str | int | float | list | tuple)
    return f"the {type(value).__name__} {' '.join(repr(value).split()):.60}" if plain else _a(type(value).__name__)


def _shape(value: Tensor | np.ndarray) -> str:
    return f"[{' '.join(map(str, value.shape))}]"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeioAEIO" else f"a {noun}"


def _remedy(hint: Any, value: object) -> str:
    several = value if isinstance(value, list | tuple | dict) else ()
    text = next((one for one in (value, *several) if isinstance(one, str)), None)
    for name in re.findall(r"\w+", f"{getattr(hint, '__name__', '')} {hint}"):
        if name in _REMEDIES and (name != "Site" or text is not None or type(value).__name__ == "Site"):
            return f": {_REMEDIES[name].format(text=text or 'blocks.3.resid_mid')}"
    return ""


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


def token_row(name: str, row: object) -> list[int]:
    """Return the token ids of one sequence as a list; ``TypeError`` if ``row`` is not a sequence of whole numbers."""
    if isinstance(row, str):
        raise TypeError(f"{name} is the text {row!r:.40}: encode it with the tokenizer, token ids are whole numbers")
    if not isinstance(row, Iterable):
        raise TypeError(f"{name} is {_told(row)}: give a list for each rollout, as in [[5, 17], [8]]")
    try:
        return [index(one) for one in row]
    except TypeError as error:
        raise TypeError(f"{name} holds a value that is not a whole number: give token ids, as in [[5, 17], [8]]") from error
