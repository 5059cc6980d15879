"""The server as a command: its log, its signals, its models."""

import hmac
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import PROMPT

from mi_route2.serve.auth import ApiError, Keys
from mi_route2.serve.client import PatchStudy

KEY = "key-of-alice-for-these-tests"


@contextmanager
def command(folder: Path, *given: str, model: str = "tests.support.served:random_micro") -> Iterator[tuple[subprocess.Popen, str]]:
    """Run the server as a user does; its process and address. What it writes to stderr is in ``folder / "log"``."""
    line = [sys.executable, "-m", "mi_route2.serve", "--model", model, "--port", "0", "--threads", "1", *given]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(line, env={**os.environ, "MI_ROUTE2_KEY": KEY}, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        said = process.stdout.readline()
        assert " is served at " in said, (folder / "log").read_text()
        yield process, said.split()[-1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
@pytest.mark.parametrize("prompts", [False, True])
def test_each_line_of_the_log_is_json_and_has_prompts_only_if_asked(prompts: bool, tmp_path: Path) -> None:
    with command(tmp_path, *["--log-prompts"] * prompts) as (process, url):
        with PatchStudy(url, KEY) as study:
            study.complete(PROMPT, max_tokens=3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    (line,) = (line for line in lines if line.get("path") == "/v1/completions")
    assert line["status"] == 200
    assert line["tokens"] == 3
    assert line["time"]
    assert line.get("prompt") == (PROMPT if prompts else None)
    assert ("task" in text) == prompts
    assert KEY not in text


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys([(f"{i}-a-key-that-is-long", False) for i in range(3)])
    calls: list[bool] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        calls.append(compare(a, b))
        return calls[-1]

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert keys.client("Bearer 0-a-key-that-is-long")
    assert calls == [True, False, False]
    calls.clear()
    with pytest.raises(ApiError):
        keys.client("Bearer nobodys")
    assert calls == [False, False, False]


@pytest.mark.process
def test_ctrl_c_lets_a_stream_end(tmp_path: Path) -> None:
    with command(tmp_path) as (process, url), PatchStudy(url, KEY) as study:
        chunks = study.stream(PROMPT, max_tokens=20, ignore_eos=True)
        first = next(chunks)
        process.send_signal(signal.SIGINT)
        rest = list(chunks)
        assert sum(len(one["mi_route2"]["token_ids"]) for one in (first, *rest)) == 20
        assert process.wait(20) == 130
