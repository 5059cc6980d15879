"""Read activations at named submodules during a forward pass, without changing it.

    with capture(model, {"blocks.0": "output", "blocks.1.attn.q": "input"}) as cache:
        model(tokens)
    cache["blocks.0"]            # the tensor, detached
    cache.calls("blocks.0")      # every call in order, if a module runs more than once

A requested hook that does not fire is an error and not an empty result, because a renamed module, a fused kernel or a skipped
branch would otherwise go unnoticed. The hooks return None, so the model's values are unchanged, and they are removed even after an
error inside the block.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mi_route2.checks import checked
from mi_route2.sites import nearest

SIDES = ("input", "output")


class Cache:
    """Captured activations: module name -> one detached tensor per call, in call order. Filled while the block runs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._calls: dict[str, list[Tensor]] = {name: [] for name in names}

    def names(self) -> tuple[str, ...]:
        """Return the requested names, in the order requested."""
        return tuple(self._calls)

    def calls(self, name: str) -> tuple[Tensor, ...]:
        """Return every value seen at `name`, in call order. KeyError if `name` was not requested."""
        if name not in self._calls:
            raise KeyError(f"{name!r} was not captured; captured names: {', '.join(self._calls)}.")
        return tuple(self._calls[name])

    def __getitem__(self, name: str) -> Tensor:
        """Return the one value seen at `name`. ValueError unless the module ran exactly once."""
        calls = self.calls(name)
        if len(calls) != 1:
            raise ValueError(f"{name!r} ran {len(calls)} times; read cache.calls({name!r}) for the list.")
        return calls[0]

    def __contains__(self, name: object) -> bool:
        return name in self._calls

    def append(self, name: str, value: Tensor) -> None:
        """Record one more call. Called by the hooks."""
        self._calls[name].append(value)


@checked
@contextmanager
def capture(
    model: nn.Module, sites: Mapping[str, str], *, once: bool = False, pristine: bool = True, copy: bool = True
) -> Iterator[Cache]:
    """Capture one side of each named submodule while the block runs.

    Args:
        model: any module; names are those of `model.named_modules()` ("" is the model itself).
        sites: name -> "input" or "output". The input is the first positional tensor (if all arguments are passed by keyword:
            `hidden_states`, or the only tensor); if the output is a tuple, its first element is captured.
        once: require that every module runs exactly once in the block (a loop or a checkpoint's recomputation is an error).
        pristine: True captures before the hooks that the module already has (a steer, a patch) act; False captures after them.
        copy: True keeps a copy, which later in-place writes cannot change. False keeps a view, which takes less memory but may
            change.

    Yields:
        Cache of detached tensors; shapes and dtypes are the module's own.

    Raises:
        KeyError: a name that the model lacks (the nearest names are listed); raised before any hook is attached.
        ValueError: an unknown side, no site at all, a value that is not a tensor, or on exit a module that did not run (`once`: not
            exactly once). Errors raised inside the block propagate unchanged.
    """
    modules = _resolve(model, sites)
    cache = Cache(tuple(sites))
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(_attach(module, name, sites[name], cache, pristine, copy).remove)
        yield cache
    _demand_fired(cache, once)


def _resolve(model: nn.Module, sites: Mapping[str, str]) -> dict[str, nn.Module]:
    """Check names and sides, and return name -> module for every site."""
    if not sites:
        raise ValueError("Nothing to capture: give at least one module name, as {name: 'input' or 'output'}.")
    for name, side in sites.items():
        if side not in SIDES:
            raise ValueError(f"Side {side!r} of {name!r} is not one of {', '.join(SIDES)}.")
    known = dict(model.named_modules(remove_duplicate=False))
    for name in sites:
        if name not in known:
            raise KeyError(f"no module {name!r} in {type(model).__name__}; the nearest names: {nearest(name, list(known))}")
    return {name: known[name] for name in sites}


def _attach(module: nn.Module, name: str, side: str, cache: Cache, pristine: bool, copy: bool):
    """Attach one reading hook and return the handle that removes it."""

    def keep(value: Tensor) -> None:
        value = value.detach()
        cache.append(name, value.clone() if copy else value)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(_tensor_in(name, args, kwargs))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        keep(_tensor_out(name, output))

    if side == "input":
        return module.register_forward_pre_hook(before, prepend=pristine, with_kwargs=True)
    return module.register_forward_hook(after, prepend=pristine)


def _tensor_in(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the activation among a call's arguments."""
    if args:
        if isinstance(args[0], Tensor):
            return args[0]
        raise ValueError(f"The first argument of {name!r} is a {type(args[0]).__name__}, not a tensor.")
    tensors = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
    if "hidden_states" in tensors:
        return tensors["hidden_states"]
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    raise ValueError(
        f"{name!r} was called by keyword with tensors {sorted(tensors)}: it is not clear which one is its input; "
        "capture the output of the module before it."
    )


def _tensor_out(name: str, output: Any) -> Tensor:
    """Return the activation in a call's output: the tensor itself, or the first element of a tuple or list."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        return first
    raise ValueError(f"The output of {name!r} is a {type(output).__name__}, not a tensor or a tuple that starts with one.")


def _demand_fired(cache: Cache, once: bool) -> None:
    """Raise ValueError for modules that did not run, or that did not run exactly once if `once`."""
    counts = {name: len(cache.calls(name)) for name in cache.names()}
    if silent := [name for name, count in counts.items() if count == 0]:
        raise ValueError(f"These modules did not run inside the capture: {', '.join(silent)}.")
    if once and (several := [f"{name} ({count} times)" for name, count in counts.items() if count > 1]):
        raise ValueError(f"These modules ran more than once inside the capture: {', '.join(several)}.")
