"""The corpus: documents of bytes, split by file.

    corpus = standard_library()              the running Python's own sources and help texts
    corpus = read_folder("texts")            any folder of UTF-8 text
    stream = corpus.stream("train")          tokens: BOS, a document's bytes, BOS, the next one's ...
    for tokens in batches(stream, size=16, length=256, steps=100, generator=g): ...

A token is a byte, 0 to 255, or BOS (256), which starts each document. The encoding of a document does not matter: bytes are read
and predicted unchanged, with line ends and byte order marks, and a limit may cut a character in two.

A document's split depends on its content alone: the first 64 bits of its SHA-256, as a fraction of one. Adding or removing files
changes no other file's split, and copies of a file under other names are in the same split. Files that are almost equal (other line
ends, another license year) may be in different splits.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from tqdm import tqdm

from studies.lanes.config import BOS

SPLITS = ("train", "tune", "test")

_INSTALLED = ("site-packages", "dist-packages", "__pycache__")
_TESTS = ("test", "tests", "idle_test")
_GENERATED = "_sysconfigdata"
_TOPICS = "pydoc_data/topics"


@dataclass(frozen=True)
class Document:
    """A document: its name and its bytes, which are not empty."""

    name: str
    data: bytes = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content alone, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Shares:
    """Expected share of the documents in each split.

    Raises:
        ValueError: Unless all shares are at least 0 and sum to 1.
    """

    train: float = 0.8
    tune: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        parts = [getattr(self, split) for split in SPLITS]
        if not all(part >= 0 for part in parts) or abs(sum(parts) - 1) > 1e-9:
            raise ValueError(f"the shares train, tune and test must be at least 0 and sum to 1: not {', '.join(map(str, parts))}")

    def of(self, digest: str) -> str:
        """Return the split of a document with this SHA-256."""
        place = int(digest[:16], 16) / 2**64
        if place < self.train:
            return "train"
        return "tune" if place < self.train + self.tune else "test"


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their names. ``skipped`` counts the files that were not UTF-8 text, or could not be read."""

    documents: tuple[Document, ...]
    shares: Shares = Shares()
    skipped: int = 0

    @cached_property
    def sha256(self) -> str:
        """Hash of all names, sizes and contents, in order."""
        found = hashlib.sha256()
        for one in self.documents:
            found.update(f"{one.sha256} {len(one.data)} ".encode() + _encoded(one.name) + b"\0")
        return found.hexdigest()

    def split(self, split: str) -> tuple[Document, ...]:
        """Return the documents of a split in the order of their hashes, so that the first few do not all start with "a".

        Raises:
            KeyError: If the split is unknown.
            ValueError: If no document is in the split.
        """
        if split not in SPLITS:
            raise KeyError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
        chosen = [d for d in self.documents if self.shares.of(d.sha256) == split]
        if not chosen:
            shares = ", ".join(f"{name} {getattr(self.shares, name)}" for name in SPLITS)
            raise ValueError(
                f"none of the {len(self.documents)} documents is in the split {split!r}: give more files, or change {shares}"
            )
        return tuple(sorted(chosen, key=lambda d: (d.sha256, _encoded(d.name))))

    def stream(self, split: str, limit_bytes: int | None = None) -> Int64[Tensor, " n"]:
        """Return the documents of a split as tokens; with a limit, the first ``limit_bytes`` bytes (BOS is not counted).

        Takes eight bytes per token; nothing else is copied.

        Raises:
            ValueError: If ``limit_bytes`` is less than 1. Also raises the errors of ``split``.
        """
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}: a stream has at least one byte; None takes the whole split")
        parts = _limited([d.data for d in self.split(split)], limit_bytes)
        arrays = [one for part in parts for one in (np.array([BOS]), np.frombuffer(part, dtype=np.uint8))]
        return torch.from_numpy(np.concatenate(arrays, dtype=np.int64))


def _encoded(name: str) -> bytes:
    """Return a name's bytes; bytes that the file system could not decode are surrogates in the name."""
    return name.encode("utf-8", "surrogateescape")


def _limited(parts: list[bytes], limit: int | None) -> Iterator[bytes]:
    """Yield the first parts, up to ``limit`` bytes in total."""
    left = limit
    for part in parts:
        if left == 0:
            return
        yield part[:left]
        left = None if left is None else left - min(left, len(part))


def batches(
    tokens: Int64[Tensor, " n"], *, size: int, length: int, steps: int, generator: torch.Generator
) -> Iterator[Int64[Tensor, "b s"]]:
    """Return ``steps`` batches of ``size`` windows of ``length + 1`` tokens (inputs and shifted targets): [b s], s = length + 1.

    Each window starts anywhere in the stream, uniformly, so it may cross from one document into the next.

    Raises:
        ValueError: If the stream is shorter than a window, if ``size`` or ``length`` is less than 1, or if ``steps`` is negative.
    """
    if min(size, length) < 1 or steps < 0:
        raise ValueError(f"size {size} and length {length} must be at least 1, and steps {steps} at least 0")
    if len(tokens) < length + 1:
        raise ValueError(
            f"the stream has {len(tokens)} tokens, fewer than a window of {length} + 1: give more text or a smaller length"
        )
    return _draw(tokens.unfold(0, length + 1, 1), size, steps, generator)


def _draw(windows: Int64[Tensor, "n s"], size: int, steps: int, generator: torch.Generator) -> Iterator[Int64[Tensor, "b s"]]:
    for _ in range(steps):
        yield windows[torch.randint(len(windows), (size,), generator=generator)]


def standard_library(shares: Shares = Shares()) -> Corpus:
    """Return the running Python's ``.py`` files and the help texts of ``pydoc_data.topics``, one document each.

    Left out are installed packages, test folders (test, tests, idle_test: half of all bytes, with deliberate errors, and not
    present in every installation), build output (_sysconfigdata), empty files, and topics.py itself, which repeats the texts.

    Raises:
        ValueError: If this Python's library has no folder of sources.
    """
    root = Path(sysconfig.get_path("stdlib"))

    def wanted(path: Path) -> bool:
        return path.suffix == ".py" and not path.name.startswith(_GENERATED) and path != root / f"{_TOPICS}.py"

    files = _files(root, wanted, skip=(*_INSTALLED, *_TESTS))
    documents = [Document(name, data) for name, path in files if (data := _read(path))]
    if not documents:
        raise ValueError(f"this Python has no sources in {root}: give a folder of text files instead")
    return Corpus(_ordered(documents + list(_topics())), shares)


def _topics() -> Iterator[Document]:
    """Yield the help texts; none if the installation lacks the module."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name, text in topics.items():
        if text:
            yield Document(f"{_TOPICS}/{name}", text.encode("utf-8"))


def read_folder(folder: Path | str, shares: Shares = Shares()) -> Corpus:
    """Return every UTF-8 text file below ``folder`` as a document, named by its path from there.

    A file that does not decode, contains a NUL byte, or cannot be read is skipped and counted; empty files and hidden files
    (leading dot) are ignored. Links to folders are not followed.

    Raises:
        ValueError: If the folder does not exist or contains no text.
    """
    root = Path(folder)
    if not root.exists():
        raise ValueError(f"there is no folder {root}: give one with text files in it")
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the folder that contains it")
    documents: list[Document] = []
    skipped = 0
    for name, path in tqdm(list(_files(root, lambda path: True)), desc="reading", unit="file", disable=None, leave=False):
        data = _read(path)
        if data is None or not _is_text(data):
            skipped += 1
        elif data:
            documents.append(Document(name, data))
    if not documents:
        why = f"none of its {skipped} files is UTF-8 text" if skipped else "it has no non-empty file"
        raise ValueError(f"there is no text in {root}: {why}; give a folder of UTF-8 text files")
    return Corpus(_ordered(documents), shares, skipped)


def _ordered(documents: list[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda d: _encoded(d.name)))


def _files(root: Path, wanted: Callable[[Path], bool], skip: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below ``root`` that are not hidden, with their path from there in forward slashes."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skip and not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if wanted(path) and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
