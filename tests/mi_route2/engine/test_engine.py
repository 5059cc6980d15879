"""The engine against whole forwards of one request: in any company, cut anywhere, put back or not, a prefix found or none."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from alone import alone
from decoders import make_decoder
from engines import Letters, finish, table
from families import FAMILIES, SPECS, VOCAB, make_family, move
from transformers import AutoModelForCausalLM, LlamaConfig

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.hosts.decoder import COMPARED, Decoder
from mi_route2.patching.patches import Patch
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

HOSTS = ("torch", "transformer_lens")
POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "q", "k", "v", "z", "mlp_in", "mlp_out")
ADAPTED = [Site(1, point, linear) for linear in ("attn.q", "mlp.down") for point in ("kept_a", "kept_out", "quarantine_out")]
ALL = tuple(range(VOCAB))


def make(family: str, host: str = "torch", adapters: bool = False) -> tuple[Host, float]:
    """A tiny model on a host, and how near its numbers are to be: a bridge's float64 attention is float32 inside."""
    made = open_host(host, make_family(family, torch.float64 if host == "torch" else torch.float32))
    if adapters:
        move(made.attach("blocks.1.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.2)
    return made, 1e-10 if host == "torch" else 2e-5


def prompts(n: int, seed: int = 0, shortest: int = 3, longest: int = 20) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    return [tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def greedy(n: int = 6) -> Sampling:
    return Sampling(max_new=n, logprob_token_ids=ALL)


def random(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(result: Result, host: Host, request: Request, close: float, *sites: Site) -> None:
    truth = alone(host, request, *sites)
    assert (result.finish, result.error, result.unfired) == ("length", None, [])
    assert result.ids == truth.ids
    torch.testing.assert_close(table(result), truth.logits.double().log_softmax(-1), rtol=0, atol=close)
    for site, captured in result.captured.items():
        assert list(captured.positions) == list(range(len(request.prompt) + request.sampling.max_new - 1))
        torch.testing.assert_close(captured.rows, truth.values[site], rtol=0, atol=close)


@pytest.mark.parametrize(("family", "host"), list(product(COMPARED, HOSTS)))
def test_the_shape_that_is_known_of_a_site_is_the_one_that_a_forward_shows(family: str, host: str) -> None:
    made, _ = make(family, host)
    decoder, tokens = Decoder(made), torch.tensor([[3, 4]])
    for site in [Site(layer, point) for layer in range(decoder.layers) for point in ("resid_pre", "resid_mid", "resid_post", "z")]:
        assert decoder.shape(site) == tuple(made.capture([site], tokens)[site].shape[2:])
    with pytest.raises((KeyError, ValueError)):
        decoder.shape(Site(decoder.layers, "resid_pre"))


@pytest.mark.parametrize(("family", "host"), list(product(COMPARED, HOSTS)))
def test_a_request_in_company_is_what_it_is_alone(family: str, host: str) -> None:
    """Ragged prompts in few rows, cut small, and put back for want of room: every number is that of whole forwards."""
    made, close = make(family, host)
    engine = Engine(made, rows=3, budget=8, chunk=5, room=40, block=4)
    requests = [Request(prompt, greedy(3 + i % 4)) for i, prompt in enumerate(prompts(7))]
    results = engine.generate(requests, progress=False)
    for request, result in zip(requests, results, strict=True):
        check(result, made, request, close)
    assert sum(result.preemptions for result in results) > 0  # or this has shown less than it says


EVERY_SITE = [
    pytest.param(*case, marks=() if case == ("Qwen3", "torch") else pytest.mark.matrix) for case in product(COMPARED, ["torch"])
]


@pytest.mark.parametrize(
    ("family", "host"), [*EVERY_SITE, *(pytest.param(name, HOSTS[1], marks=pytest.mark.matrix) for name in ("Qwen3", "MicroGPT"))]
)
def test_every_site_is_captured_patched_and_steered_as_by_hand(family: str, host: str) -> None:
    """Each point in turn: a request is as by hand, whatever its neighbours do at the point, and they as they are without it."""
    made, close = make(family, host, adapters=True)
    engine = Engine(made, rows=3, budget=9, chunk=6, block=4)
    first, second, third = prompts(3, seed=1, shortest=7, longest=12)
    for number, site in enumerate([*(Site(1, point) for point in POINTS), *ADAPTED]):
        shape = engine.decoder.shape(site)
        size = torch.Size(shape).numel()
        mask = (torch.arange(size) % 2).double().reshape(shape)
        places = {2: 1.0, 5: 0.5, len(first) + 1: 1.0}
        patches = tuple(Patch(site, place, random(shape, number + place), alpha) for place, alpha in places.items())
        requests = [
            Request(first, greedy(3), patch=(*patches, Patch(site, 3, random(shape, 99), mask)), capture=(Capture(site),)),
            Request(second, greedy(3), capture=(Capture(site),)),
            Request(
                third,
                greedy(3),
                steering=Steering(
                    base=(Steer(site, random((size,), 1), 0.5),),
                    prefill=(Steer(site, random((size,), 2)),),
                    decode=(Steer(site, random((size,), 3), -1.0),),
                ),
                capture=(Capture(site),),
            ),
        ]
        for request, result in zip(requests, engine.generate(requests, progress=False), strict=True):
            check(result, made, request, close, site)


def test_what_is_captured_can_be_patched_in_and_makes_the_other_run() -> None:
    """A whole stream replaced: the corrupt run with the clean one's block inputs is the clean run."""
    made, close = make("Qwen3")
    engine = Engine(made)
    clean, corrupt = prompts(2, seed=3, shortest=9, longest=9)
    site = Site(0, "resid_pre")
    (kept,) = engine.generate([Request(clean, greedy(1), capture=(Capture(site, TokenSelection("prompt")),))], progress=False)
    rows = kept.captured[site].rows
    patches = tuple(Patch(site, i, rows[i]) for i in range(len(clean)))
    requests = [Request(clean, greedy(1)), Request(corrupt, greedy(1), patch=patches)]
    plain, replaced = map(table, engine.generate(requests, progress=False))
    torch.testing.assert_close(replaced, plain, rtol=0, atol=close)


EXACT: dict[str, dict[str, int]] = {
    "alone": {},
    "chunks": {"rows": 8, "chunk": 8, "budget": 16},
    "one row": {"rows": 1},
    "little room": {"rows": 4, "room": 44},
    "no prefixes": {"prefix_bytes": 0},
}


def exactly(made: Host, requests: list[Request], together: bool = True, **sizes: int) -> list[torch.Tensor]:
    engine = Engine(made, exact=True, **{"block": 8, **sizes})
    groups = [requests] if together else [[request] for request in requests]
    found = [result for group in groups for result in engine.generate(group, progress=False)]
    return list(map(table, found))


@pytest.mark.parametrize("how", [*EXACT, "neighbours are patched and steered"])
@pytest.mark.parametrize("family", ["Qwen3", "MicroGPT"])
def test_exact_has_the_same_bits_in_any_company_and_any_cut(family: str, how: str) -> None:
    made = open_host("torch", make_family(family, torch.float32))
    shared = prompts(1, seed=8, shortest=19, longest=19)[0]
    mine = [Request(prompt, greedy(5)) for prompt in (*prompts(3, seed=2, longest=24), shared, (*shared[:17], 4, 5))]
    truth = exactly(made, mine, together=False, rows=1)
    site = Site(1, "resid_pre")
    others = [
        Request(shared, greedy(5), patch=(Patch(site, 3, random((16,))),)),
        Request(shared, greedy(5), steering=Steering(base=(Steer(site, random((16,))),))),
        Request(prompts(1, seed=9)[0], greedy(5), patch=(Patch(site, 1, torch.full((16,), 1e12)),)),
    ]
    found = exactly(made, [*others, *mine])[3:] if how not in EXACT else exactly(made, mine, **EXACT[how])
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)


def test_exact_has_the_same_bits_whatever_neighbors_do_at_the_unembedding() -> None:
    """Its adapters are read and written at every column of a prompt, and a product of many rows rounds otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**{**FAMILIES["Llama"].to_diff_dict(), "hidden_size": 64, "vocab_size": 1000})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    made = open_host("torch", model)
    move(made.attach("unembed", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)), 0.2)
    prompt, ask = tuple(range(3, 27)), Sampling(max_new=2, logprob_token_ids=tuple(range(1000)))
    steering = Steering(base=(Steer(Site(None, "kept_a", "unembed"), random((4,))),))
    (truth,) = exactly(made, [Request(prompt, ask)])
    assert torch.equal(exactly(made, [Request(prompt[1:], ask, steering=steering), Request(prompt, ask)])[1], truth)


def test_a_preempted_request_goes_on_as_if_nothing_had_been() -> None:
    made = open_host("torch", make_family("Llama", torch.float32))
    vector = Steering(decode=(Steer(Site(1, "resid_pre"), random((16,))),))
    patch = (Patch(Site(0, "mlp_out"), 22, random((16,))),)
    requests = [Request(prompt, greedy(12), patch=patch, steering=vector) for prompt in prompts(2, shortest=14, longest=18)]
    truth = exactly(made, requests)
    engine = Engine(made, exact=True, block=8)
    numbers = [engine.submit(request) for request in requests]
    found: dict[int, Result] = {}
    for step in range(200):
        if not engine.busy:
            break
        found |= {result.request: result for result in engine.step()}
        if step % 3 == 1 and numbers[0] not in found:
            engine.preempt(numbers[0])
    assert found[numbers[0]].preemptions >= 3
    for number, other in zip(numbers, truth, strict=True):
        assert torch.equal(table(found[number]), other)


def fresh(made: Host, request: Request, **sizes: int) -> torch.Tensor:
    return table(Engine(made, **sizes).generate([request], progress=False)[0])


@pytest.mark.parametrize("exact", [False, True])
def test_a_patched_request_does_not_poison_the_prefix_cache(exact: bool) -> None:
    """With three whole blocks: who comes after a patched or steered one is as in a fresh engine; what is clean is shared."""
    made = open_host("torch", make_family("Qwen3", torch.float32))
    prompt = prompts(1, seed=4, shortest=27, longest=27)[0]
    site, vector = Site(0, "resid_post"), random((16,), 6)
    kinds: dict[str, Callable[[], Request]] = {
        "plain": lambda: Request(prompt, greedy(3)),
        "patched late": lambda: Request(prompt, greedy(3), patch=(Patch(site, 17, vector),)),
        "patched otherwise": lambda: Request(prompt, greedy(3), patch=(Patch(site, 17, -vector),)),
        "half patched": lambda: Request(prompt, greedy(3), patch=(Patch(site, 17, vector, 0.5),)),
        "steered": lambda: Request(prompt, greedy(3), steering=Steering(prefill=(Steer(site, vector),))),
        "steered more": lambda: Request(prompt, greedy(3), steering=Steering(prefill=(Steer(site, vector, 2.0),))),
        "steered late": lambda: Request(prompt, greedy(3), steering=Steering(decode=(Steer(site, vector),))),
    }
    sizes = {"block": 8, "exact": exact}
    truth = {name: fresh(made, kind(), **sizes) for name, kind in kinds.items()}
    gaps = [float((truth[a] - truth[b]).abs().max()) for a in truth for b in truth if a < b and (a, b) != ("plain", "steered late")]
    assert min(gap for gap in gaps) > 1e-3 or torch.equal(truth["plain"][:1], truth["steered late"][:1])
    cached = {"plain": 24, "patched late": 16, "patched otherwise": 16, "half patched": 16, "steered": 0, "steered more": 0}
    for order in (list(kinds), list(reversed(kinds))):
        engine, seen = Engine(made, **sizes), set()
        for name in (*order, *order):
            (result,) = engine.generate([kinds[name]()], progress=False)
            if exact:
                assert torch.equal(table(result), truth[name]), name
            torch.testing.assert_close(table(result), truth[name], rtol=0, atol=1e-5)
            if name in seen:
                assert result.cached == 24, name  # its like ran before, under whatever name
            elif "plain" in seen:
                assert result.cached == cached.get(name, 24), name
            seen.add(name)


def test_captured_positions_are_computed_also_where_a_prefix_is_held() -> None:
    made, close = make("Qwen3")
    engine = Engine(made, block=4)
    prompt = prompts(1, shortest=15, longest=15)[0]
    engine.generate([Request(prompt, greedy(2))], progress=False)
    site = Site(1, "z")
    late = Request(prompt, greedy(2), capture=(Capture(site, TokenSelection(positions=(9, 15))),))
    (result,) = engine.generate([late], progress=False)
    assert result.cached == 8
    assert result.captured[site].positions == (9, 15)
    truth = alone(made, late, site).values[site][[9, 15]]
    torch.testing.assert_close(result.captured[site].rows, truth, rtol=0, atol=close)


def test_not_a_number_stays_where_it_arose() -> None:
    """A request whose activations overflow fails with a sentence; neighbours, and who has its row after it, are as ever."""
    made = open_host("torch", make_family("Qwen3", torch.float32))
    huge = torch.full((16,), 3e38)  # the sum of two is beyond float32
    bad = Request(prompts(1, seed=6)[0], greedy(4), patch=tuple(Patch(Site(0, at), 1, huge) for at in ("resid_mid", "mlp_out")))
    others = [Request(prompt, greedy(4)) for prompt in prompts(5, seed=7)]
    truth = [fresh(made, request) for request in others]
    engine = Engine(made, rows=2)
    failed, *found = engine.generate([bad, *others], progress=False)
    assert failed.finish == "error"
    assert failed.error is not None
    assert "not finite" in failed.error
    for result, other in zip(found, truth, strict=True):
        torch.testing.assert_close(table(result), other, rtol=0, atol=1e-5)


def test_other_weights_or_switches_are_another_model() -> None:
    """Between requests blocks are forgotten; under running ones it is an error, not another model half way."""
    made = open_host("torch", make_family("Qwen3", torch.float32))
    adapters = move(made.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.3)
    request = Request(prompts(1, shortest=20, longest=20)[0], greedy(3))
    engine = Engine(made, block=4)
    seen = []
    for change in (None, "deployed", None, "weights", None):
        if change == "weights":
            with torch.no_grad():
                next(iter(adapters.kept_parameters().values())).add_(0.5)
        with adapters.deployed() if change == "deployed" else torch.no_grad():
            (result,) = engine.generate([request], progress=False)
            torch.testing.assert_close(table(result), fresh(made, request), rtol=0, atol=1e-5)
        seen.append(result.cached)
    assert seen == [0, 0, 0, 0, 16]
    engine.submit(request)
    engine.step()
    with adapters.deployed(), pytest.raises(RuntimeError, match="changed while 1 request"):
        engine.step()
    engine.close()


def test_an_early_end_says_what_never_fired() -> None:
    made, _ = make("Qwen3")
    prompt = prompts(1)[0]
    stop = alone(made, Request(prompt, greedy(3))).ids[1]
    end = len(prompt) + 6
    request = Request(
        prompt,
        Sampling(max_new=8, stop_tokens=(stop,)),
        patch=(Patch(Site(0, "v"), end, torch.zeros(8)),),
        capture=(Capture(Site(1, "z"), TokenSelection(positions=(1, end))),),
    )
    (result,) = Engine(made).generate([request], progress=False)
    assert result.finish == "stop"
    assert result.ids[-1] == stop
    assert len(result.ids) <= 2
    assert result.unfired == [f"patch at blocks.0.v, position {end}", f"capture at blocks.1.z, position {end}"]


def test_hosts_and_architectures_that_have_no_decoder_say_so() -> None:
    with pytest.raises(ValueError, match="not on nnsight"):
        Engine(open_host("nnsight", make_family("Qwen3")))
    model = make_decoder("Qwen2")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (0.1 * hidden_states.cumsum(1), None)
    with pytest.raises(ValueError, match="no cache gives this Qwen2ForCausalLM the logits of its whole forward"):
        Engine(open_host("torch", model))


def test_a_model_that_drops_at_random_is_not_run() -> None:
    made, _ = make("GPT2")
    drops = next(module for module in made.model.modules() if isinstance(module, torch.nn.Dropout))
    made.model.train()
    Engine(made).generate([Request((3, 4), greedy(1))], progress=False)  # its dropout is 0
    drops.p = 0.1
    with pytest.raises(RuntimeError, match=r"call eval\(\) on it"):
        Engine(made).generate([Request((3, 4), greedy(1))], progress=False)
    made.model.eval()
    engine = Engine(made)
    drops.train()
    with pytest.raises(RuntimeError, match="a part of it, is in training mode"):
        engine.submit(Request((3, 4), greedy(1)))


def test_a_stop_text_ends_a_request_also_across_tokens_and_is_not_in_its_text() -> None:
    made, _ = make("Qwen3")
    prompt = prompts(1)[0]
    whole = Letters().decode(alone(made, Request(prompt, greedy(8))).ids)
    engine = Engine(made, tokenizer=Letters())
    cut, free = engine.generate(
        [Request(prompt, Sampling(max_new=8, stop=("~~", whole[2:4]))), Request(prompt, Sampling(max_new=8))], progress=False
    )
    end = whole.find(whole[2:4])
    assert (cut.finish, cut.text, len(cut.ids)) == ("stop", whole[:end], end + 2)
    assert (free.finish, free.text) == ("length", whole)


def test_without_a_seed_each_request_draws_its_own_and_says_which() -> None:
    """And an engine with a generator draws the same seeds again."""
    made, _ = make("MicroGPT")
    request = Request(prompts(1)[0], Sampling(max_new=12, temperature=3.0))
    first, second = Engine(made).generate([request, request], progress=False)
    assert first.seed != second.seed
    assert first.ids != second.ids
    for one in (first, second):
        assert one.seed is not None
        assert one.seed < 2**53  # JavaScript reads no larger one exactly
        given = Request(request.prompt, replace(request.sampling, seed=one.seed))
        (again,) = Engine(made).generate([given], progress=False)
        assert (again.ids, again.seed) == (one.ids, one.seed)
    many = Engine(made).generate([replace(request, sampling=Sampling(max_new=1, temperature=1.0))] * 50, progress=False)
    assert 2**40 < max(one.seed or 0 for one in many) < 2**53
    drawn = [Engine(made, generator=torch.Generator().manual_seed(5)).generate([request], progress=False)[0].seed for _ in "ab"]
    assert drawn[0] == drawn[1]


def test_log_probabilities_are_those_of_the_whole_vocabulary_whatever_is_drawn() -> None:
    made, close = make("Llama")
    prompt = prompts(1)[0]
    how = Sampling(max_new=5, temperature=1.3, top_k=4, seed=11, logprobs=3, logprob_token_ids=(7, 2))
    (result,) = Engine(made).generate([Request(prompt, how)], progress=False)
    with torch.no_grad():
        logits = made.logits(torch.tensor([[*prompt, *result.ids[:-1]]]))[0, len(prompt) - 1 :]
    truth = logits.log_softmax(-1)
    for i, token in enumerate(result.tokens):
        assert token.token in truth[i].topk(4).indices
        best = truth[i].topk(3)
        assert list(token.top) == best.indices.tolist()
        found = torch.tensor([token.logprob, *token.top.values(), *token.requested], dtype=torch.float64)
        torch.testing.assert_close(found, torch.cat([truth[i, [token.token]], best.values, truth[i, [7, 2]]]), rtol=0, atol=close)


@pytest.mark.parametrize("exact", [False, True])
def test_log_probabilities_of_a_prompt_are_those_of_every_token(exact: bool) -> None:
    """In pieces, beside other requests, and though the prefix is known."""
    made, close = make("Llama")
    engine, prompt = Engine(made, chunk=4, block=4, exact=exact), prompts(1)[0] * 2
    asked = Request(prompt, Sampling(max_new=2, prompt_logprobs=2))
    plain, *found = engine.generate([Request(prompt, Sampling(max_new=2)), asked, asked], progress=False)
    found += engine.generate([asked], progress=False)
    with torch.no_grad():
        truth = made.logits(torch.tensor([prompt]))[0].log_softmax(-1)
    assert plain.prompt_logprobs == []
    for result in found:
        assert [token.token for token in result.prompt_logprobs] == list(prompt[1:])
        got = torch.tensor([[one.logprob, *one.top.values()] for one in result.prompt_logprobs], dtype=torch.float64)
        own = truth[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(got, torch.cat([own[:, None], truth[:-1].topk(2).values], 1), rtol=0, atol=close)


def test_the_likeliest_of_equal_tokens_are_the_first_as_the_greedy_choice_is() -> None:
    host = open_host("torch", make_family("Llama", torch.float32))
    unembed = host.model.get_parameter("lm_head.weight")
    with torch.no_grad():
        unembed[VOCAB // 2 :] = unembed[: VOCAB // 2]  # every logit is there twice, as many are in bfloat16
    (result,) = Engine(host).generate([Request(prompts(1)[0], Sampling(max_new=4, logprobs=3))], progress=False)
    for token in result.tokens:
        first, second, third = token.top
        assert (first, second) == (token.token, token.token + VOCAB // 2)
        assert third < VOCAB // 2
        assert list(token.top.values()) == sorted(token.top.values(), reverse=True)


def test_higher_priority_takes_the_row_of_a_lower_one_which_ends_as_ever() -> None:
    made, close = make("Qwen3")
    low, high = (Request(prompt, greedy(6), priority=i) for i, prompt in enumerate(prompts(2, seed=5)))
    engine = Engine(made, rows=1)
    engine.submit(low)
    engine.step()
    engine.step()
    engine.submit(high)
    results = list(finish(engine).values())
    assert [result.request for result in results] == [1, 0]
    assert results[1].preemptions == 1
    check(results[0], made, high, close)
    check(results[1], made, low, close)


@pytest.mark.parametrize("closed", [False, True])
def test_norms_at_adapters_are_those_of_what_is_captured_there_before_a_gate(closed: bool) -> None:
    host, close = make("MicroGPT", adapters=True)
    sites = tuple(Site(1, point, linear) for linear in ("attn.q", "mlp.down") for point in ("kept_out", "quarantine_out"))
    gate = Monitor(Site(0, "resid_pre"), torch.zeros(16), threshold=-1e6, gates=(), quarantine="close", prompt=True)
    captures = tuple(Capture(site, TokenSelection("all")) for site in sites)
    steering = Steering(monitors=(gate,)) if closed else None
    asked = Request(prompts(1)[0], greedy(4), norms=sites, capture=captures, steering=steering)
    (result,) = Engine(host, chunk=5).generate([asked])
    assert list(result.norms) == list(range(len(asked.prompt) + 3))
    for site in sites:
        lengths = torch.tensor([each[site] for each in result.norms.values()], dtype=torch.float64)
        torch.testing.assert_close(lengths, result.captured[site].rows.norm(dim=-1), rtol=1e-6, atol=close)
        assert lengths.min() > 1e-3
