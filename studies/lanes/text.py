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
from collections.abc import Iterator
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
class TextCorpus:
    """Documents in the order of their names, and the expected share of them in each of `SPLITS`."""

    documents: tuple[Document, ...]
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)

    @cached_property
    def sha256(self) -> str:
        """Hash of all names, sizes and contents, in order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.sha256} {len(document.data)} ".encode() + _encoded(document.name) + b"\0")
        return digest.hexdigest()

    def split(self, split: str) -> tuple[Document, ...]:
        """Return the documents of a split in the order of their hashes, so that the first few do not all start with "a".

        ``ValueError`` if it has none.
        """
        before = sum(self.shares[: SPLITS.index(split)])
        upper = before + self.shares[SPLITS.index(split)] if split != SPLITS[-1] else 1.0
        chosen = [d for d in self.documents if before <= int(d.sha256[:16], 16) / 2**64 < upper]
        if not chosen:
            raise ValueError(f"none of the {len(self.documents)} documents is in the split {split!r}: give more files")
        return tuple(sorted(chosen, key=lambda d: (d.sha256, _encoded(d.name))))

    def stream(self, split: str, limit_bytes: int | None = None) -> Int64[Tensor, " n"]:
        """Return the documents of a split as tokens; with a limit, the first ``limit_bytes`` bytes (BOS is not counted).

        Takes eight bytes per token; nothing else is copied. Raises the errors of ``split``.
        """
        texts = _limited([d.data for d in self.split(split)], limit_bytes)
        arrays = [array for part in texts for array in (np.array([BOS]), np.frombuffer(part, dtype=np.uint8))]
        return torch.from_numpy(np.concatenate(arrays, dtype=np.int64))


def _encoded(name: str) -> bytes:
    """Return a name's bytes; bytes that the file system could not decode are surrogates in the name."""
    return name.encode("utf-8", "surrogateescape")


def _limited(texts: list[bytes], limit: int | None) -> Iterator[bytes]:
    """Yield the first parts, up to ``limit`` bytes in total."""
    left = limit
    for part in texts:
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
        ValueError: If the stream is shorter than a window.
    """
    if len(tokens) < length + 1:
        raise ValueError(
            f"the stream has {len(tokens)} tokens, fewer than a window of {length} + 1: give more text or a smaller length"
        )
    windows = tokens.unfold(0, length + 1, 1)
    return (windows[torch.randint(len(windows), (size,), generator=generator)] for _ in range(steps))


def standard_library() -> TextCorpus:
    """Return the running Python's ``.py`` files and the help texts of ``pydoc_data.topics``, one document each.

    Left out are installed packages, test folders (test, tests, idle_test: half of all bytes, with deliberate errors, and not
    present in every installation), build output (_sysconfigdata), empty files, and topics.py itself, which repeats the texts.

    Raises:
        ValueError: If this Python's library has no folder of sources.
    """
    root = Path(sysconfig.get_path("stdlib"))

    documents = [
        Document(name, data)
        for name, path in _files(root, skip=(*_INSTALLED, *_TESTS))
        if path.suffix == ".py" and not path.name.startswith(_GENERATED) and name != f"{_TOPICS}.py" and (data := _read(path))
    ]
    if not documents:
        raise ValueError(f"this Python has no sources in {root}: give a folder of text files instead")
    return TextCorpus(_ordered(documents + list(_topics())))


def _topics() -> Iterator[Document]:
    """Yield the help texts; none if the installation lacks the module."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name, text in topics.items():
        if text:
            yield Document(f"{_TOPICS}/{name}", text.encode("utf-8"))


def read_folder(folder: Path) -> TextCorpus:
    """Return every UTF-8 text file below ``folder`` as a document, named by its path from there.

    A file that does not decode, contains a NUL byte, or cannot be read is left out, as are empty and hidden files (leading dot).
    Links to folders are not followed.

    Raises:
        ValueError: If the folder does not exist or contains no text.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give one with text files in it")
    named = [(name, _read(path)) for name, path in tqdm(list(_files(folder)), "reading", unit="file", disable=None, leave=False)]
    documents = [Document(name, data) for name, data in named if data and _is_text(data)]
    if not documents:
        raise ValueError(f"there is no text in {folder}: give a folder of UTF-8 text files")
    return TextCorpus(_ordered(documents))


def _ordered(documents: list[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda d: _encoded(d.name)))


def _files(root: Path, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below ``root`` that are not hidden, with their path from there in forward slashes."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skip and not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if path.is_file():
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
