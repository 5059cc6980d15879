"""Files that are whole or absent, and are read strictly. Those of tensors are in ``mi_route2.tensor_files``.

Writing is atomic: a temporary neighbor, `fsync`, then a rename. JSON is read without repeated keys, NaN and numbers beyond the
range of floats.
"""

import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

SHOWN = 60  # characters of a refused value
_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
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
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # process numbers repeat on other machines
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


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_folder(folder: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Context: an empty folder beside ``folder``, which takes its name on a clean exit and is deleted on any other.

    Raises:
        FileExistsError: ``folder`` is a file, or not empty, if ``overwrite`` is False or the current folder is in it.
        OSError: It cannot be written, or without ``overwrite`` another process wrote it since. An old folder is then as it was.
    """
    target = Path(folder).resolve()
    leftovers = [
        left
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.old")
        if re.fullmatch(r"\.\d+\.old", left.name.removeprefix(f".{target.name}"))  # and not those of a longer name
    ]
    for left in leftovers:  # of a process that was killed between two renames, or after both
        if not target.exists():
            left.rename(target)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file: give a folder")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            remedy = "choose another folder, or pass overwrite=True to replace all that is in it"
            raise FileExistsError(f"{target} is not empty: {remedy}")
        with suppress(FileNotFoundError):  # of a current folder that is deleted
            if Path.cwd().is_relative_to(target):  # as "", of a variable that is not set
                raise FileExistsError(f"{target} is the current folder, or holds it, with all that is in it: choose another folder")
    partial, former = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same process id
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as written:
                    os.fsync(written.fileno())
        if overwrite and target.exists():  # without it, what was put there since the look above makes the rename fail
            shutil.rmtree(former, ignore_errors=True)  # left by a kill of a process that had this number
            target.replace(former)
        partial.replace(target)
        for left in leftovers:
            shutil.rmtree(left, ignore_errors=True)
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


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text strictly.

    Raises:
        ValueError: In one sentence, for text that is not UTF-8 or not JSON, a repeated key, a number beyond the range of floats,
            NaN, or an unpaired surrogate escape (which UTF-8 cannot hold).
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(text):  # an unpaired surrogate, or a pair, which encodes without an error
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 (byte {error.start + 1})") from error
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"this JSON holds half a character (\\u{half:04x}): write the whole pair of escapes") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"character {error.colno}"
        raise ValueError(f"this is not JSON ({error.msg}, {place})") from error
    except RecursionError as error:
        raise ValueError("this JSON is nested too deeply: use fewer levels") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, inner in pairs:
        if name in value:
            raise ValueError(f"this JSON has the key {shortened(name)} twice in one object: remove one of them")
        value[name] = inner
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"this JSON holds {constant}, which is not a finite number: write null for an undefined value")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits[:SHOWN])


def shortened(value: object) -> str:
    """Return a value as an error message shows it, cut to ``SHOWN`` characters."""
    text = f"{value}" if isinstance(value, float) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
