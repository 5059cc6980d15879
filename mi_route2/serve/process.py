"""A server in a process of its own, as users run it: for the soak, the benchmark, and whoever wants one for a while."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass
class Process:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    log: Path

    @cached_property
    def url(self) -> str:
        """The address that it prints once it listens; ``RuntimeError`` if it did not start."""
        assert self.process.stdout is not None
        _, listens, url = self.process.stdout.readline().strip().rpartition(" is served at ")
        if not listens:
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        return url

    @property
    def seconds(self) -> float:
        """Processor time so far, of user and system."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def seen(self) -> dict[str, int]:
        """Return the resident bytes, open files and threads."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return {"rss": int(lines["VmRSS"].split()[0]) << 10, "files": files, "threads": int(lines["Threads"])}


@contextmanager
def serving(model: str, log: Path, *options: str, **environment: str) -> Iterator[Process]:
    """Run ``python -m mi_route2.serve`` with these options on a free port until the block is left; its log goes to a file.

    A block that has ended the process and waited for it is the judge of how it ended.

    Raises:
        RuntimeError: It did not start, or did not end well by SIGTERM.
    """
    command = [sys.executable, "-m", "mi_route2.serve", "--model", model, "--port", "0", "--threads", "1", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=stream, text=True)
    try:
        yield (server := Process(process, log))
        if process.returncode is None:
            assert server.url  # a signal that comes before would find no handler
            process.send_signal(signal.SIGTERM)
            if (status := process.wait(60)) != 0:
                raise RuntimeError(f"the server ended with status {status}")
    finally:
        process.kill()
        process.wait()
