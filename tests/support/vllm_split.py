"""Requests on vLLM with two tensor-parallel ranks; tests/mi_route2/vllm/test_parity.py runs this, since ranks are forked.

python vllm_split.py BASE OUT      writes OUT: log-probabilities, captures and readings
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mi_route2.engine import Capture, Request, Result, Sampling
from mi_route2.patching.patches import Patch
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from mi_route2.vllm import VllmEngine, launch


def requests(width: int, vocabulary: int) -> list[Request]:
    """Return plain, steered, gated and patched requests with captures, in one batch."""
    early, late = Site(0, "resid_mid"), Site(1, "mlp_out")
    one, other = torch.randn(2, width, generator=torch.Generator().manual_seed(4))
    full, prompt, capture = Sampling(max_new=5, logprobs=vocabulary), tuple(range(3, 43)), (Capture(Site(2, "resid_post")),)
    push = (Steer(early, one), Steer(late, other, 2.0))
    gate = Monitor(Site(0, "attn_out"), other, gates=(late,), gate_rows=True)
    steerings = [Steering(base=push, clamps=(Clamp(late, one, value=1.0),)), Steering(decode=push, monitors=(gate,))]
    steered = [Request(prompt, full, steering=each, capture=capture, readings=True) for each in steerings]
    return [Request(prompt, full, capture=capture), *steered, Request(prompt, full, patch=(Patch(early, 7, one),), capture=capture)]


def plain(result: Result, vocabulary: int) -> dict[str, Any]:
    """Return the numbers of a result."""
    tops = [[token.top[i] for i in range(vocabulary)] for token in result.tokens]
    rows = [captured.rows.tolist() for captured in result.captured.values()]
    readings = [list(reading) for each in result.readings.values() for reading in each.values()]
    return {"error": result.error, "ids": result.ids, "tops": tops, "rows": rows, "readings": readings}


if __name__ == "__main__":
    sizes = {"max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    engine = launch(sys.argv[1], dtype="float32", tensor_parallel_size=2, kv_cache_memory_bytes=1 << 26, **sizes)
    facts = engine.facts
    results = [plain(one, facts.vocabulary) for one in engine.generate(requests(facts.width, facts.vocabulary))]
    with pytest.raises(ValueError, match=r"blocks\.0\.q is split among 2 ranks: set tensor_parallel_size=1"):
        engine.generate([Request((3, 4), capture=(Capture(Site(0, "q")),))])
    with pytest.raises(ValueError, match="launch it on one rank"):
        VllmEngine(engine.llm, controllers=())
    Path(sys.argv[2]).write_text(json.dumps(results))
    engine.llm.llm_engine.engine_core.shutdown()
