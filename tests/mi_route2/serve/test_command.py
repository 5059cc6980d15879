"""The server as a command: its log and its signals."""

import json
import signal
from pathlib import Path

import pytest
from served import PROMPT, TOKEN

from mi_route2.serve.client import PatchStudy
from studies.benchmarks.serve import serving

MODEL = "tests.support.served:random_micro"


@pytest.mark.process
@pytest.mark.parametrize(("end", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_a_stream_end_and_the_log_has_a_line_for_each_request(
    tmp_path: Path, end: signal.Signals, status: int
) -> None:
    with serving(MODEL, tmp_path / "log", MI_ROUTE2_TOKEN=TOKEN) as server, PatchStudy(server.url, TOKEN) as study:
        assert server.url.startswith("http://127.0.0.1:")
        study.complete(PROMPT, max_tokens=3, ignore_eos=True)
        chunks = study.stream(PROMPT, max_tokens=20, ignore_eos=True)
        first = next(chunks)
        server.process.send_signal(end)
        rest = list(chunks)
        assert sum(len(one["mi_route2"]["token_ids"]) for one in (first, *rest)) == 20
        assert server.process.wait(20) == status
    text = (tmp_path / "log").read_text()
    line = next(json.loads(line[line.index("{") :]) for line in text.splitlines() if "/v1/completions" in line)
    assert (line["status"], line["tokens"]) == (200, 3)
    assert "task" not in text
    assert TOKEN not in text
