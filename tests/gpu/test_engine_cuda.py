"""The engine's theorems on a CUDA device, in float32 and bfloat16."""

import copy
from itertools import product

import pytest
import torch
from families import FAMILIES, SPECS, VOCAB, make_family, make_tokens, move
from gpu import DEVICE, NEEDS
from torch import Tensor
from transformers import AutoModelForCausalLM

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import COMPARED
from mi_route2.patching.patches import Patch
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

pytestmark = [pytest.mark.gpu, NEEDS]
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.3}
"""Largest difference of a log-probability between a request in company and whole forwards of it alone."""
DTYPES = [torch.float32, torch.bfloat16]
SITE = Site(1, "resid_pre")
VECTOR = torch.randn(16, generator=torch.Generator().manual_seed(1))


def on_device(family: str, dtype: torch.dtype, host: str = "torch") -> Host:
    made = open_host(host, make_family(family, dtype).to(DEVICE))
    move(made.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.2)
    return made


def prompts(n: int = 5) -> list[tuple[int, ...]]:
    tokens, attention = make_tokens(n, longest=20)
    return [tuple(row[real].tolist()) for row, real in zip(tokens, attention, strict=True)]


def asked(n: int = 5) -> Sampling:
    return Sampling(max_new=n, logprob_token_ids=tuple(range(VOCAB)))


def table(result: Result) -> Tensor:
    assert result.finish == "length", result.error
    return torch.tensor([token.requested for token in result.tokens])


@torch.no_grad()
def forced(host: Host, request: Request, result: Result) -> Tensor:
    """Log-probabilities at the generated tokens in one whole forward over the tokens that the engine chose."""
    tokens = torch.tensor([[*request.prompt, *result.ids[:-1]]], device=DEVICE)
    return host.logits(tokens)[0, len(request.prompt) - 1 :].float().log_softmax(-1).cpu()


@pytest.mark.parametrize(("family", "host", "dtype"), list(product(COMPARED, ("torch", "transformer_lens"), DTYPES)))
def test_a_request_in_company_is_what_it_is_alone(family: str, host: str, dtype: torch.dtype) -> None:
    made = on_device(family, dtype, host)
    requests = [Request(prompt, asked()) for prompt in prompts()]
    results = Engine(made, rows=3, budget=8, chunk=5, room=50, block=4).generate(requests, progress=False)
    for request, result in zip(requests, results, strict=True):
        torch.testing.assert_close(table(result), forced(made, request, result), rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize(("family", "dtype"), list(product(COMPARED, DTYPES)))
def test_exact_has_the_same_bits_in_any_company_any_cut_and_with_a_prefix(family: str, dtype: torch.dtype) -> None:
    made = on_device(family, dtype)
    mine = [Request(prompt, asked()) for prompt in prompts()]
    truth = [table(Engine(made, rows=1, block=8, exact=True).generate([one], progress=False)[0]) for one in mine]
    loud = Steering(decode=(Steer(SITE, VECTOR, 5.0),), monitors=(Monitor(SITE, VECTOR, quarantine="close"),))
    others = [Request(mine[0].prompt, asked(), steering=loud), Request(mine[0].prompt, asked(), patch=(Patch(SITE, 1, VECTOR),))]
    engine = Engine(made, rows=8, chunk=8, budget=16, block=8, exact=True)
    for _ in range(2):  # the second time over prefixes that were found
        found = engine.generate([*others, *mine], progress=False)
        assert all(torch.equal(table(one), two) for one, two in zip(found[2:], truth, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_has_the_same_bits_in_a_vocabulary_of_a_real_model(dtype: torch.dtype) -> None:
    """The sum of a long row is split by its address on a GPU, and rows of an odd length begin at other addresses."""
    config = copy.deepcopy(FAMILIES["Qwen3"])
    config.vocab_size = 50257
    torch.manual_seed(0)
    made = open_host("torch", AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval())
    given = [Request(p, Sampling(max_new=6, temperature=1.5, seed=i, logprobs=20)) for i, p in enumerate(prompts())]
    alone = [Engine(made, exact=True).generate([one], progress=False)[0] for one in given]
    assert [one.tokens for one in Engine(made, exact=True).generate(given, progress=False)] == [one.tokens for one in alone]


@pytest.mark.parametrize("dtype", DTYPES)
def test_captures_are_the_hosts_and_a_patch_with_itself_changes_nothing(dtype: torch.dtype) -> None:
    made = on_device("Qwen3", dtype)
    sites = [Site(0, "z"), SITE, Site(1, "kept_a", "mlp.down")]
    prompt = prompts(1)[0]
    engine = Engine(made, exact=True)
    keep = tuple(Capture(site) for site in sites)
    (plain,) = engine.generate([Request(prompt, asked(3), capture=keep)], progress=False)
    whole = made.capture(sites, torch.tensor([[*prompt, *plain.ids[:-1]]], device=DEVICE))
    patches = []
    for site in sites:
        rows = plain.captured[site].rows
        torch.testing.assert_close(rows.float(), whole[site][0].float(), rtol=0.1, atol=CLOSE[dtype])
        patches += [Patch(site, i, rows[i]) for i in range(len(rows))]
    (same,) = engine.generate([Request(prompt, asked(3), patch=tuple(patches))], progress=False)
    assert torch.equal(table(same), table(plain))


def test_saturated_gates_are_the_deleted_quarantine_and_the_whole_model() -> None:
    made = open_host("torch", make_family("Qwen3", torch.float32).to(DEVICE))
    adapters = move(made.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.3)
    prompt = prompts(1)[0]
    gates = [Monitor(Site(0, "resid_pre"), VECTOR, t, quarantine="close", prompt=True, gates=()) for t in (-1e6, 1e6)]
    requests = [Request(prompt, asked(), steering=Steering(monitors=(gate,))) for gate in gates]
    shut, whole = Engine(made).generate(requests, progress=False)
    (plain,) = Engine(made).generate([Request(prompt, asked())], progress=False)
    with adapters.deployed():
        (deleted,) = Engine(made).generate([Request(prompt, asked())], progress=False)
    torch.testing.assert_close(table(shut), table(deleted), rtol=0, atol=CLOSE[torch.float32])
    torch.testing.assert_close(table(whole), table(plain), rtol=0, atol=CLOSE[torch.float32])
    assert float((table(plain) - table(deleted)).abs().max()) > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_permuted_weights_are_seen_on_the_device(dtype: torch.dtype) -> None:
    """A write that torch does not count, and that keeps every sum."""
    made, prompt = on_device("Qwen3", dtype), prompts(1)[0]
    engine = Engine(made, block=4)
    engine.generate([Request(prompt, asked())], progress=False)
    weight = next(p for name, p in made.model.named_parameters() if name.endswith("embed_tokens.weight"))
    weight.data[:] = weight.data.roll(1, 0)
    (found,) = engine.generate([Request(prompt, asked())], progress=False)
    assert found.cached == 0
    assert torch.equal(table(found), table(Engine(made).generate([Request(prompt, asked())], progress=False)[0]))
