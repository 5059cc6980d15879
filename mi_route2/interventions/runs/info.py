"""What is known of a run beside its rows, and of the store as a whole."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mi_route2.sites import Site

_LONGEST_NAME = 256


@dataclass(frozen=True)
class About:
    """Whose activations a run holds: the hash of the weights, the tokens, how many of them are the prompt, and free notes."""

    weights: str
    tokens: tuple[int, ...] = ()
    prompt_length: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """JSON that ``parse`` reads back."""
        own = {"weights": self.weights, "tokens": self.tokens, "prompt_length": self.prompt_length, "meta": self.meta}
        return json.dumps(own, sort_keys=True)

    @staticmethod
    def parse(text: str) -> "About":
        """What ``text`` wrote."""
        own = json.loads(text)
        return About(own["weights"], tuple(own["tokens"]), own["prompt_length"], own["meta"])


@dataclass(frozen=True)
class Kind:
    """What the rows of one site of a run are: their number, their type, and the shape of one of them."""

    rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class RunInfo:
    """A finished run. ``tiers`` names where its rows are: ``memory``, ``disk`` or both; ``nbytes`` counts the rows alone."""

    run: str
    weights: str
    tokens: tuple[int, ...]
    prompt_length: int
    meta: Mapping[str, Any]
    sites: Mapping[Site, Kind]
    nbytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class Stats:
    """The store now, in bytes and runs. ``bytes_read`` and ``evictions`` count from when it was opened."""

    budget: int
    memory_bytes: int
    memory_runs: int
    disk_bytes: int
    disk_runs: int
    writing: int
    leases: int
    evictions: int
    bytes_read: int


def described(run: str, weights: str, tokens: Sequence[int], prompt_length: int | None, meta: Mapping[str, Any] | None) -> About:
    """What a caller says of a new run; ``ValueError`` where it cannot be so, or cannot be kept as JSON."""
    if not 0 < len(run) <= _LONGEST_NAME or not run.isprintable():
        raise ValueError(f"{run[:40]!r} cannot name a run: take 1 to {_LONGEST_NAME} printable characters")
    if not weights:
        raise ValueError(f"run {run!r} needs a hash of the weights that it was captured with: it is of no use with others")
    length = len(tokens) if prompt_length is None else prompt_length
    if not 0 <= length <= len(tokens):
        raise ValueError(f"run {run!r} has a prompt of {length} tokens but {len(tokens)} tokens in all")
    try:
        notes = json.loads(json.dumps(dict(meta or {})))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the meta of run {run!r} cannot be kept as JSON ({error}): give text, numbers, lists and dicts"
        ) from error
    return About(weights, tuple(int(token) for token in tokens), length, notes)
