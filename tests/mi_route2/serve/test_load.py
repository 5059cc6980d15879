"""The server under load: a reader that does not read."""

import json
from typing import Any

import pytest
from served import PROMPT, metrics, random_micro, running, sent, until

from mi_route2.serve.client import PatchStudy
from mi_route2.serve.options import ServerLimits

pytestmark = pytest.mark.process


def test_a_reader_that_does_not_read_is_cancelled_and_stalls_nobody() -> None:
    with running(random_micro(context=2048), limits=ServerLimits(backlog=8)) as server, PatchStudy(server.url) as study:
        ids = [*range(50)] * 80  # of 80,000 bytes for each token, so that the system's buffers are full soon
        lazy: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "logprob_token_ids": ids, "stream": True}

        def others_go_on() -> bool:  # ten tokens are much fewer than the reader's thousand
            chunks = study.stream(PROMPT, max_tokens=10, ignore_eos=True)
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
