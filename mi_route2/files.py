"""Atomic writing of files and folders: a temporary neighbor, `fsync`, then a rename."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

REMEDY = "give a path in a folder that can be written and has room"


def write_whole(path: Path, data: bytes, remedy: str = REMEDY) -> Path:
    """Write a file so that a reader never sees half of it, and wait until the disk has it.

    The temporary file ends in ``.tmp`` and starts with a dot; only a kill leaves one behind.

    Args:
        path: The file, replaced if it exists.
        data: Its whole content.
        remedy: What the user can do if it cannot be written.

    Returns:
        ``path``.

    Raises:
        OSError: The folder is missing, read-only or full. An old file is then as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(partial, data)
        partial.replace(path)
    except OSError as error:
        raise unwritten(path, error, remedy) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole_folder(folder: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Context: an empty folder beside ``folder``, which takes its name on a clean exit and is deleted on any other.

    Raises:
        FileExistsError: ``folder`` is a file, or a folder that is not empty and ``overwrite`` is False.
        OSError: It cannot be written. An old folder is then as it was.
    """
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file: give a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"{target} is not empty: choose another folder, or pass overwrite=True to replace all that is in it")
    partial, former = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same process id
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as written:
                    os.fsync(written.fileno())
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)  # left by a kill of a process that had this number
            target.replace(former)
        partial.replace(target)
    except (SafetensorError, OSError) as error:
        raise unwritten(target, error) from error
    finally:
        if former.exists() and not target.exists():
            former.replace(target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def unwritten(path: Path, error: Exception, remedy: str = REMEDY) -> OSError:
    """Return the error for a path that could not be written: one sentence that ends with the system's reason."""
    reason = getattr(error, "strerror", None) or str(error).partition(" at path ")[0].rpartition(": ")[2]  # the last of several
    return OSError(f"could not write {path}, {remedy}: {reason}")
