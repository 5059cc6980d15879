"""Disk tier of the run store: shards of finished runs in ``shards/``, and their index in ``index.sqlite``."""

import fcntl
import hashlib
import itertools
import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from jaxtyping import Int, Shaped
from safetensors.torch import save
from torch import Tensor

from mi_route2.files import unwritten, write_whole
from mi_route2.runs.rows import DTYPES, About, Kind
from mi_route2.sites import Site

REMEMBERED = 4096


class Removals:
    """Reasons, by run id, why runs no longer exist. The oldest are forgotten first."""

    def __init__(self, reasons: Mapping[str, str]):
        self._reasons = dict(reasons)

    def put(self, reasons: Mapping[str, str]) -> None:
        """Record the reasons for which runs were removed."""
        for run, reason in reasons.items():
            self._reasons.pop(run, None)
            self._reasons[run] = reason
        for run in list(self._reasons)[: max(0, len(self._reasons) - REMEMBERED)] if reasons else ():
            del self._reasons[run]

    def forget(self, run: str) -> None:
        """Forget a run that exists again."""
        self._reasons.pop(run, None)

    def why(self, run: str) -> str | None:
        """Return the reason; ``None`` if the run is unknown."""
        return self._reasons.get(run)


def dropped(run: str) -> str:
    """Return the reason for a run that was deleted on request."""
    return f"run {run!r} was dropped"


def evicted(run: str, nbytes: int, budget: int) -> str:
    """Return the reason for a run that was evicted because memory was full."""
    return (
        f"run {run!r} of {nbytes} bytes was evicted, the least recently used of a memory of {budget} bytes: raise the budget, give "
        "the store a folder, or lease the run as long as it is needed"
    )


def invalid(run: str, old: str, new: str) -> str:
    """Return the reason for a run that a change of the weights invalidated."""
    return f"run {run!r} is invalid: it was captured with weights {old[:12]}, and the model now has {new[:12]}; capture it again"


DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Stored:
    """Rows of one site in the shard of number ``shard``, whose file has ``size`` bytes."""

    run: str
    site: Site
    shard: int
    size: int
    positions: Int[Tensor, " n"]
    kind: Kind
    sha256: str


def seal(run: str, site: Site, positions: Int[Tensor, " n"], rows: Shaped[Tensor, " n *row"]) -> str:
    """Return the SHA-256 of a tensor of a shard, with its run, site, dtype, shape and positions."""
    header = json.dumps([run, str(site), str(rows.dtype), list(rows.shape)])
    hasher = hashlib.sha256(header.encode())
    for tensor in (positions, rows):
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def write_shard(path: Path, shard: int, run: str, sites: Mapping[Site, tuple[Tensor, Tensor]]) -> list[Stored]:
    """Write positions and rows by site; ``OSError`` names the file if the disk is full, and leaves no file.

    The bytes are made in memory and written here, because a failed write of safetensors leaves temporary files of unknown names.
    """
    data = save({str(site): rows for site, (_, rows) in sites.items()}, metadata={"run": run})
    write_whole(path, data, f"make room there, or give the store another folder (nothing of run {run!r} is kept)")
    stored = []
    for site, (positions, rows) in sites.items():
        kind = Kind(len(rows), rows.dtype, tuple(rows.shape[1:]))
        stored.append(Stored(run, site, shard, len(data), positions, kind, seal(run, site, positions, rows)))
    return stored


def read_shard(path: Path, stored: Stored) -> Tensor:
    """Return the rows ``[n, ...]`` of one site; ``FileNotFoundError`` if the file is missing, ``ValueError`` if it is damaged."""
    kind = stored.kind
    # Not by safetensors, which maps the file into memory: one that is written over while it is read would end the process.
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != stored.size:
            raise damaged(path, stored, f"it has {size} bytes, not {stored.size}")
        try:
            # a damaged header may give any length or place: never more is read than the file has
            length = int.from_bytes(file.read(8), "little")
            start, stop = json.loads(file.read(min(length, size)))[str(stored.site)]["data_offsets"]
            if not 0 <= start <= stop <= size:
                raise ValueError
            file.seek(8 + length + start)
            data = bytearray(file.read(stop - start))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise damaged(path, stored, f"its header does not give the place of {stored.site}") from error
    if len(data) != kind.nbytes:
        raise damaged(path, stored, f"its {stored.site} has {len(data)} bytes, not {kind.nbytes}")
    flat = torch.frombuffer(data, dtype=kind.dtype) if data else torch.empty(0, dtype=kind.dtype, device="cpu")
    rows = flat.view(kind.rows, *kind.shape)
    if seal(stored.run, stored.site, stored.positions, rows) != stored.sha256:
        raise damaged(path, stored, f"the checksum of {stored.site} does not match")
    return rows


def damaged(path: Path, stored: Stored, why: str) -> ValueError:
    """Return the error for a damaged file, with the reason and the remedy."""
    return ValueError(f"{path} is damaged ({why}): drop run {stored.run!r} and capture it again")


_APPLICATION, _VERSION = 0x52325253, 1
_SCHEMA = f"""
BEGIN;
CREATE TABLE runs (run TEXT PRIMARY KEY, weights TEXT NOT NULL, about TEXT NOT NULL, sha256 TEXT NOT NULL);
CREATE TABLE shards (shard INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, size INTEGER NOT NULL);
CREATE TABLE tensors (
    shard INTEGER NOT NULL REFERENCES shards ON DELETE CASCADE,
    run TEXT NOT NULL, site TEXT NOT NULL, positions BLOB NOT NULL,
    dtype TEXT NOT NULL, shape TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (run, site, shard)
) WITHOUT ROWID;
CREATE INDEX shards_of_run ON shards (run);
CREATE INDEX tensors_of_shard ON tensors (shard);
CREATE TABLE gone (number INTEGER PRIMARY KEY, run TEXT UNIQUE NOT NULL, reason TEXT NOT NULL);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_FILE = re.compile(r"(\d{12})\.safetensors|\.\d{12}\.safetensors\.(?:[0-9a-f]+\.)?tmp")


class Disk:
    """Folder of runs. All methods except for ``write`` and ``load`` are for one thread at a time."""

    def __init__(self, folder: Path):
        self.folder = folder = folder.absolute()  # the store stays there if the process goes to another folder
        self._shards, self._index, self._process = folder / "shards", folder / "index.sqlite", os.getpid()
        try:
            self._shards.mkdir(parents=True, exist_ok=True)
            self._lock = _only_here(folder)
        except OSError as error:
            raise OSError(f"cannot keep runs in {folder} ({error.strerror}): choose another folder") from error
        try:
            self._db = self._opened()
            self._numbers = itertools.count(self._tidy())
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Release the lock on the folder."""
        self._db.close()
        if os.getpid() == self._process and not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a fork, as a worker of a data loader, would hold on to it, and may not end it
        self._lock.close()

    def write(self, run: str, sites: Mapping[Site, tuple[Tensor, Tensor]]) -> list[Stored]:
        """Write positions and rows by site into a new shard, which ``commit`` adds to the index; from any thread."""
        self._demand_own()
        shard = next(self._numbers)
        return write_shard(self._path(shard), shard, run, sites)

    def load(self, stored: Stored) -> Tensor:
        """Return the checked rows of one site of a shard; from any thread."""
        return read_shard(self._path(stored.shard), stored)

    def discard(self, shards: Iterable[int]) -> None:
        """Delete files that are not in the index; files that cannot be deleted now are deleted at the next opening."""
        for shard in shards if os.getpid() == self._process else ():
            with suppress(OSError):
                self._path(shard).unlink(missing_ok=True)

    def commit(self, run: str, about: About, stored: Sequence[Stored]) -> None:
        """Add a finished run to the index in one transaction."""
        self._demand_own()
        text = about.text()
        try:
            sync = os.open(self._shards, os.O_RDONLY)
            try:
                os.fsync(sync)  # the directory entries of the shards must be on disk before the index
            finally:
                os.close(sync)
        except OSError as error:
            raise unwritten(self._shards, error, f"give the store another folder (nothing of run {run!r} is kept)") from error
        with self._explained(), self._db as db:
            db.execute("DELETE FROM gone WHERE run = ?", (run,))
            db.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", (run, about.weights, text, _sealed(run, text)))
            db.executemany("INSERT INTO shards VALUES (?, ?, ?)", sorted({(s.shard, run, s.size) for s in stored}))
            db.executemany("INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?)", [_row(each) for each in stored])

    def remove(self, reasons: Mapping[str, str]) -> None:
        """Remove runs and record the reasons, also on a full disk."""
        self._demand_own()
        shards = [shard for run in reasons for (shard,) in self._ask("SELECT shard FROM shards WHERE run = ?", run)]
        with self._explained():
            # On a full disk, where removing is the way to make room, SQLite's log is emptied, to be written from its beginning. If
            # the index lacks room even for that, the files go first; if they are not enough, the runs read as damaged.
            for make_room in (self._empty_log, lambda: self.discard(shards), None):
                try:
                    self._unlist(reasons)
                    break
                except sqlite3.OperationalError as error:
                    full = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
                    if make_room is None or not full:
                        raise
                    make_room()
        # After the index: files that a crash leaves here belong to no run, and the next opening deletes them.
        self.discard(shards)

    def _demand_own(self) -> None:
        """Raise ``RuntimeError`` in a fork of the store's process, which would number its shards as that one does."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.folder} is of a store of process {self._process}, of which this one is a fork: write there, or open a "
                "store of this process on a folder of its own"
            )

    def _unlist(self, reasons: Mapping[str, str]) -> None:
        with self._db as db:
            db.executemany("DELETE FROM runs WHERE run = ?", [(run,) for run in reasons])
            db.executemany("INSERT OR REPLACE INTO gone (run, reason) VALUES (?, ?)", list(reasons.items()))
            db.execute("DELETE FROM gone WHERE number <= (SELECT max(number) FROM gone) - ?", (REMEMBERED,))

    def _empty_log(self) -> None:
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def removals(self) -> dict[str, str]:
        """Return the reasons for which runs no longer exist, oldest first."""
        return dict(self._ask("SELECT run, reason FROM gone ORDER BY number"))

    def runs(self) -> dict[str, str]:
        """Return every run and its weights hash, oldest first."""
        return dict(self._ask("SELECT run, weights FROM runs ORDER BY rowid"))

    def about(self, run: str) -> About | None:
        """Return the description of a run; ``None`` if it is not here."""
        rows = self._ask("SELECT about, sha256 FROM runs WHERE run = ?", run)
        if not rows:
            return None
        text, sha256 = rows[0]
        if _sealed(run, text) != sha256:
            raise ValueError(f"{self._index} is damaged (what it says of run {run!r}): drop the run and capture it again")
        return About.parse(text)

    def keeps(self, run: str) -> bool:
        """Return whether a run is here, also if its description is damaged."""
        return bool(self._ask("SELECT 1 FROM runs WHERE run = ?", run))

    def kinds(self, run: str) -> dict[Site, Kind]:
        """Return the count, dtype and row shape of a run at each of its sites."""
        query = "SELECT site, dtype, shape, sum(length(positions)) / 8 FROM tensors WHERE run = ? GROUP BY site ORDER BY min(shard)"
        rows = self._ask(query, run)
        with self._parsing():
            return {Site.parse(site): _kind(n, dtype, shape) for site, dtype, shape, n in rows}

    def stored(self, run: str, site: Site) -> list[Stored]:
        """Return the tensors that hold a site of a run, in the order of writing; empty if the run or its site is not here."""
        query = """SELECT shard, coalesce(size, -1), CAST(positions AS BLOB), dtype, shape, sha256
                   FROM tensors LEFT JOIN shards USING (shard) WHERE tensors.run = ? AND site = ? ORDER BY shard"""
        rows = self._ask(query, run, str(site))
        with self._parsing():
            stored = [
                Stored(run, site, shard, size, _positions(blob), _kind(len(blob) // 8, dtype, shape), sha256)
                for shard, size, blob, dtype, shape, sha256 in rows
            ]
            # checksums are of what is read: without this, a row of one shard would be rounded to the type of another
            kinds = {(one.kind.dtype, one.kind.shape) for one in stored}
            if len(kinds) > 1 or any(one.kind.nbytes > one.size for one in stored):
                raise ValueError(f"the shards of run {run!r} do not fit what it says of {site}")
        return stored

    def has(self, shard: int) -> bool:
        """Return whether the index knows a shard."""
        return bool(self._ask("SELECT 1 FROM shards WHERE shard = ?", shard))

    def lost(self, stored: Stored) -> ValueError:
        """Return the error for a shard whose file is missing."""
        return damaged(self._path(stored.shard), stored, "the file is missing")

    def size(self) -> tuple[int, int]:
        """Return the bytes of the shards and the number of runs."""
        return self._ask("SELECT coalesce(sum(size), 0), (SELECT count(*) FROM runs) FROM shards")[0]

    def _path(self, shard: int) -> Path:
        return self._shards / f"{shard:012d}.safetensors"

    def _opened(self) -> sqlite3.Connection:
        # SQLite takes an empty file for a new index, and with a new index all shards would be deleted as leftovers.
        lost = "empty" if self._index.exists() else "missing"
        if not (self._index.exists() and self._index.stat().st_size) and any(self._shards.iterdir()):
            raise ValueError(
                f"{self._shards} holds files but {self._index.name} beside it is {lost}: restore the index, or give the store an "
                "empty folder (with an older index, the files of later runs are deleted)"
            )
        with self._explained():
            db = sqlite3.connect(self._index, check_same_thread=False)
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                if any(self._shards.iterdir()):
                    db.close()
                    raise sqlite3.DatabaseError("it holds no tables")
                db.executescript(_SCHEMA)
            ours = (_APPLICATION, _VERSION)
            if (header := tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))) != ours:
                db.close()
                raise ValueError(
                    f"{self._index} is not an index of runs of this version ({header}, not {ours}): choose another folder"
                )
            # not before: the mode is written into the file, which may be that of somebody else
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                db.execute(f"PRAGMA {setting}")
            if (state := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(" ".join(state.split()))
        return db

    def _tidy(self) -> int:
        """Delete the leftovers of a killed process; return the first free shard number."""
        known = {shard for (shard,) in self._ask("SELECT shard FROM shards")}
        for path in self._shards.iterdir():
            if (match := _FILE.fullmatch(path.name)) and (match[1] is None or int(match[1]) not in known):
                path.unlink()
        return max(known, default=0) + 1

    def _ask(self, query: str, *values: str | int) -> list[tuple]:
        with self._explained():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context: convert SQLite's errors into errors of one sentence."""
        try:
            yield
        except sqlite3.OperationalError as error:
            # a text that is not UTF-8, which has no code, or tables that are not as they were made
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR:
                raise self._damaged(error) from error
            raise OSError(f"could not use {self._index} ({error}): make room there, or give the store another folder") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter of a message that quotes the file
            raise self._damaged(error) from error

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        """Context: convert errors of parsing the index into an error that says that the index is damaged."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, why: Exception) -> ValueError:
        told = " ".join(str(why).split())  # SQLite quotes a table's definition, in several lines
        return ValueError(f"{self._index} is damaged ({told}): delete {self.folder} and capture its runs again")


def _only_here(folder: Path) -> IO[str]:
    """Lock a folder; ``RuntimeError`` if another process holds the lock."""
    handle = (folder / "lock").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise RuntimeError(f"{folder} is open in another run store: close that one, or give this one its own folder") from error
    return handle


def _sealed(run: str, text: str) -> str:
    return hashlib.sha256(f"{run}\n{text}".encode()).hexdigest()


def _row(each: Stored) -> tuple[int, str, str, bytes, str, str, str]:
    dtype, shape = str(each.kind.dtype).removeprefix("torch."), "x".join(map(str, each.kind.shape))
    return each.shard, each.run, str(each.site), each.positions.numpy().tobytes(), dtype, shape, each.sha256


def _kind(rows: int, dtype: str, shape: str) -> Kind:
    sizes = tuple(int(n) for n in shape.split("x") if n)
    if min(sizes, default=0) < 0:
        raise ValueError(f"a shape of {shape}")
    return Kind(rows, DTYPE_NAMES[dtype], sizes)


def _positions(blob: bytes) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.int64)
