"""The server under load: readers that do not read, and everything that the soak does, for some seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import metrics, running, sent, until

from mi_route2.serve.client import PatchStudy
from mi_route2.serve.options import Limits
from mi_route2.serve.soak import FIRST, Soak, Tally, judge
from mi_route2.serve.soak_model import model

pytestmark = pytest.mark.process


def test_a_reader_that_does_not_read_is_cancelled_and_stalls_nobody() -> None:
    with running(model(), limits=Limits(backlog=8, capture_bytes=1 << 30)) as server, PatchStudy(server.url) as study:
        assert server.http.get("/v1/study").json()["heads"] == 4  # of queries; there are two of keys and values
        ids = [*range(FIRST, FIRST + 256)] * 16  # of 80,000 bytes for each token, so that the system's buffers are full soon
        lazy: dict[str, Any] = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True, "logprob_token_ids": ids, "stream": True}

        def others_go_on() -> bool:  # ten tokens are much fewer than the reader's thousand
            chunks = study.stream("abc", max_tokens=10, ignore_eos=True)
            assert len([i for chunk in chunks for i in chunk["mi_route2"]["token_ids"]]) == 10
            return server.server.owner.slow > 0

        with sent(server, json.dumps(lazy).encode()) as connection:
            until(others_go_on, 60)
            until(lambda: not server.server.owner.snapshot["running"], 60)
            assert metrics(server)["slow_readers_total"] == 1
            told = b""
            while b"[DONE]" not in told:  # whoever reads at last is told the reason
                piece = connection.recv(1 << 20)
                assert piece
                told = told[-4096:] + piece
            assert b"so it was cancelled: read faster" in told


def test_a_soak_of_seconds_passes_and_writes_what_it_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # of six clients with this seed one reads slowly at first, the others complete, stream, leave, sweep and send what is no request
    assert Soak(minutes=0.03, clients=6, seed=29798, out=tmp_path / "soak.json")() == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["failures"] == []
    assert found["compared"] > 0
    assert {"slow", "complete", "stream", "leave", "sweep", "malformed"} <= found["counts"].keys()
    assert not any(found["left"].values())
    assert {"slots", "patch_slots", "steering_rows", "running"} <= found["left"].keys()
    assert "soak passed" in capsys.readouterr().out
    assert Soak(minutes=0.0)() == 2


def test_a_soak_whose_file_could_not_be_written_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Soak, "_run")
    for out in (tmp_path, tmp_path / "none" / "soak.json"):
        assert Soak(out=out)() == 2


@pytest.mark.parametrize(
    ("load", "leak", "fails"),
    [
        pytest.param(lambda i: 200, 0, False, id="flat"),
        pytest.param(lambda i: 200 if i < 220 else 800, 0, False, id="four times the load from minute 37"),
        pytest.param(lambda i: 1200 if i == 190 else 200, 0, False, id="a burst that the allocator remembers"),
        pytest.param(lambda i: 100 + 800 * (i % 2), 0, False, id="a load that goes up and down"),
        pytest.param(lambda i: 200, 2000, True, id="a leak"),
        pytest.param(lambda i: 200 if i < 220 else 800, 2000, True, id="a leak, and four times the load"),
        pytest.param(lambda i: 1200 if i == 190 else 200, 2000, True, id="a leak, and a burst"),
    ],
)
def test_a_soak_tells_a_leak_from_a_high_water_mark(load: Callable[[int], int], leak: int, fails: bool) -> None:
    tally, answers, most = Tally(), 0, 0
    for i in range(360):
        answers, most = answers + load(i), max(most, load(i))
        rss = (512 << 20) + leak * answers + most * (256 << 10)
        tally.samples.append({"second": 10.0 * i, "answers": answers, "rss": rss, "files": 14, "threads": 7})
    judge(tally, {"files": 14, "threads": 7}, minutes=60.0)
    assert len(tally.failures) == fails
    assert all("memory grew steadily" in one for one in tally.failures)
