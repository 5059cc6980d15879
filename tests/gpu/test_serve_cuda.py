"""A server of a model on a CUDA device answers what a server of the same model on the CPU does."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from gpu import DEVICE, NEEDS
from served import OTHER, PROMPT, random_micro, running

from mi_route2.serve.client import PatchStudy
from mi_route2.tensor_files import unpack

pytestmark = [pytest.mark.gpu, NEEDS]
SITE = "blocks.1.resid_pre"
FIRMLY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
CLOSE = 2e-4


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PatchStudy, PatchStudy]]:
    """Clients of the same model: on the device, and on the CPU."""
    with ExitStack() as open_ones:
        urls = [open_ones.enter_context(running(random_micro(context=64, device=device))).url for device in (DEVICE, "cpu")]
        own, cpu = (open_ones.enter_context(PatchStudy(url)) for url in urls)
        yield own, cpu


def test_completions_are_the_cpus(both: tuple[PatchStudy, PatchStudy]) -> None:
    """Greedy ones, and drawn ones: a request's own generator draws on the CPU."""
    for given in ({}, {"temperature": 1.0, "seed": 5}):
        own, cpu = (study.complete(PROMPT, **FIRMLY | given)["choices"][0] for study in both)
        assert own["text"] == cpu["text"]
        assert own["logprobs"]["token_logprobs"] == pytest.approx(cpu["logprobs"]["token_logprobs"], abs=CLOSE)


def test_a_stream_is_the_completion(both: tuple[PatchStudy, PatchStudy]) -> None:
    own, _ = both
    text = "".join(piece["choices"][0]["text"] for piece in own.stream(PROMPT, **FIRMLY) if piece["choices"])
    assert text == own.complete(PROMPT, **FIRMLY)["choices"][0]["text"]


def test_steering_and_captures_are_the_cpus(both: tuple[PatchStudy, PatchStudy]) -> None:
    own, cpu = both
    plain = own.complete(PROMPT, **FIRMLY)["choices"][0]["logprobs"]["token_logprobs"]
    found = []
    for study in (own, cpu):
        capture = [{"site": SITE, "part": "all"}]
        answer = study.complete(PROMPT, steering_vectors={SITE: "push"}, capture=capture, **FIRMLY)["choices"][0]
        captured = answer["mi_route2"]["captured"][SITE]
        found.append((captured["positions"], unpack(captured["rows"]), answer["logprobs"]["token_logprobs"]))
    (positions, values, logprobs), (expected_at, expected, theirs) = found
    assert positions == expected_at
    torch.testing.assert_close(values, expected, rtol=0, atol=CLOSE)
    assert logprobs == pytest.approx(theirs, abs=CLOSE)
    assert max(abs(a - b) for a, b in zip(logprobs, plain)) > 10 * CLOSE


def test_a_sweep_is_the_cpus(both: tuple[PatchStudy, PatchStudy]) -> None:
    own, cpu = (study.sweep(PROMPT, OTHER, answer=3, foil=4) for study in both)
    assert own.clean == pytest.approx(cpu.clean, abs=CLOSE)
    torch.testing.assert_close(torch.as_tensor(own.values), torch.as_tensor(cpu.values), rtol=0, atol=10 * CLOSE)
