"""The engine on every class of decoder: a mix of requests has the logits of whole forwards over each request alone."""

import pytest
import torch
from alone import alone
from decoders import DECODERS, make_decoder
from engines import finish, table
from families import make_family  # noqa: F401  (registers the attention "exact")
from served import running

from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.hosts import Host, open_host
from mi_route2.patching import sweep
from mi_route2.patching.patches import Patch
from mi_route2.serve.models import Served
from mi_route2.sites import Site
from mi_route2.steering.specs import Steer, Steering
from studies.environments.micro.served import MicroTokenizer

PRIVATE = ("Qwen3Next", "Llama4", "Bloom")
"""Recurrent states; attention that counts positions by what its cache holds; biases that a mask per query does not have."""

NEAR = {"Qwen3Next": 1e-6, "Bloom": 1e-8, "Llama4": 1e-8}
"""Classes whose recurrence, softmax or norm is computed in float32, whatever the model's dtype."""

every = pytest.mark.parametrize("name", DECODERS)


def opened(name: str, kind: str = "torch") -> Host:
    model = make_decoder(name)
    if name == "Gemma2":
        model.config._attn_implementation = "exact"  # transformers' eager softmax is float32
    return open_host(kind, model)


def mix(host: Host, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    width = host.capture([Site(0, "resid_pre")], torch.tensor([[3]]))[Site(0, "resid_pre")].shape[-1]
    vectors = torch.randn(2, width, generator=generator, dtype=torch.float64)
    last = host.layers()[-1]
    requests: list[Request] = []
    for i, length in enumerate(torch.randint(1, 14, (5,), generator=generator).tolist()):
        prompt = tuple(torch.randint(3, 60, (length,), generator=generator).tolist())
        requests.append(
            Request(
                prompt,
                Sampling(max_new=4 + i, logprob_token_ids=tuple(range(64))),
                patch=(Patch(Site(last, "attn_out"), length // 2, vectors[0], 0.5),) if i % 2 else (),
                steering=Steering(base=(Steer(Site(last, "resid_pre"), vectors[1]),)) if i % 3 else None,
                capture=(Capture(Site(0, "resid_post")),),
            )
        )
    return requests


def check(host: Host, near: float, **options: object) -> Engine:
    engine = Engine(host, rows=3, chunk=3, budget=8, block=4, **options)  # pyright: ignore[reportArgumentType]
    requests = mix(host, 5)
    for _ in range(2):  # the second time with a cache of prefixes
        for request, result in zip(requests, engine.generate(requests, progress=False), strict=True):
            site = Site(0, "resid_post")
            truth = alone(host, request, site)
            torch.testing.assert_close(table(result), truth.logits.log_softmax(-1), rtol=near, atol=near)
            rows = result.captured[site]
            torch.testing.assert_close(rows.rows, truth.values[site][list(rows.positions)], rtol=near, atol=near)
    return engine


@every
def test_a_mix_of_requests_is_each_alone(name: str) -> None:
    engine = check(opened(name), NEAR.get(name, 1e-13))
    assert engine.decoder.private == (name in PRIVATE)


def test_windows_of_a_class_in_the_table_are_kept() -> None:
    """Full attention and a window of eight in one model: a mask for each."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    host = open_host("torch", make_decoder("Qwen3", **windows))
    engine = check(host, 1e-13)
    assert not engine.decoder.private
    assert not engine.decoder.compared


@pytest.mark.parametrize("name", ["Qwen2", "GptOss", "DeepseekV3", "Qwen3Next"])
def test_so_it_is_on_transformer_lens(name: str) -> None:
    check(opened(name, "transformer_lens"), 1e-6)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in PRIVATE])
def test_a_sweep_that_resumes_is_one_of_whole_forwards(name: str) -> None:
    host = opened(name)
    sites = [str(site) for site in host.sites()]
    prompts = {"clean": (3, 9, 4, 7, 12, 5, 8, 11, 3, 20), "corrupt": (3, 10, 4, 7, 13, 5, 8, 11, 3, 21)}
    grids = [
        sweep(host, **prompts, sites=sites, answer=5, metric="logprob", how=how, progress=False) for how in ("resumed", "whole")
    ]
    torch.testing.assert_close(*(torch.as_tensor(grid.values) for grid in grids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_preempted_request_of_a_private_decoder_goes_on(name: str) -> None:
    host = opened(name)
    engine = Engine(host, rows=2)
    request = mix(host, 5)[1]
    number = engine.submit(request)
    engine.step()
    engine.preempt(number)
    results = finish(engine)
    assert results[number].preemptions == 1
    truth = alone(host, request).logits.log_softmax(-1)
    torch.testing.assert_close(table(results[number]), truth, rtol=0, atol=NEAR.get(name, 1e-13))
    assert engine.resources["slots"] == engine.resources["slot_bytes"] == 0


@pytest.mark.parametrize("name", ["Qwen2", "GptOss", "DeepseekV3", "Qwen3Next"])
def test_it_is_served_and_swept_over_http(name: str) -> None:
    host = opened(name)
    (request,) = mix(host, 5)[:1]
    clean, corrupt, site = [3, 9, 4, 7], [3, 10, 4, 7], Site(3, "resid_pre") if name == "Qwen3Next" else Site(1, "resid_pre")
    grid = sweep(host, clean=clean, corrupt=corrupt, sites=site, answer=5, metric="logprob", progress=False)
    with running(Served(name, host, MicroTokenizer())) as server:
        body = {"prompt": list(request.prompt), "max_tokens": 4, "logprobs": 1, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body).json()
        asked = {"clean": clean, "corrupt": corrupt, "sites": [str(site)], "answer": 5, "metric": "logprob"}
        swept = server.http.post("/v1/patch_sweep", json=asked).json()
    truth = alone(host, request).logits.log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"]).double(), truth.max(-1).values[:4], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(torch.tensor(swept["grid"]["values"]).double(), torch.as_tensor(grid.values), rtol=0, atol=1e-6)
