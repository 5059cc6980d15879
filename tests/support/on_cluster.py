"""submitit's local executor as a cluster, and the signal with which a cluster takes a machine away from a job."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from studies.common.cluster import Cluster

HERE = Cluster(kind="local", hours=0.5)


def tasks(folder: Path) -> list[int]:
    """Return the processes of submitit that hold a job's folder, by the lock beside it."""
    return [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit() and _holds(process, folder)]


def _holds(process: Path, folder: Path) -> bool:
    try:
        return b"submitit.core._submit" in (process / "cmdline").read_bytes() and any(
            link.readlink() == folder.with_name(f".{folder.name}.lock") for link in (process / "fd").iterdir()
        )
    except OSError:
        return False


@contextmanager
def preempted(folder: Path, file: str) -> Iterator[list[int]]:
    """Context: the job's machine is taken away, as Slurm does, when the job has written ``file``.

    Yields the inode that the file had then, once for every process that was hit.
    """
    seen: list[int] = []

    def hunt() -> None:
        while not (folder / file).exists():
            time.sleep(0.01)
        for process in tasks(folder):
            os.kill(process, signal.SIGUSR2)
            seen.append((folder / file).stat().st_ino)

    threading.Thread(target=hunt, daemon=True).start()
    yield seen
