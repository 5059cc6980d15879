"""The same requests on vLLM and on our own engine: equal log-probabilities, captures and readings, and neighbours untouched.

The budget of 64 tokens a step cuts prompts, and mixes their pieces with generated tokens. The second model has room for so few
keys and values that requests are preempted.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vllm_split import plain, requests

from mi_route2 import AdapterSpec, export_peft, open_host
from mi_route2.engine import Capture, Engine, Request, Result, Sampling
from mi_route2.engine.controllers import (
    Change,
    ClearMonitor,
    Controller,
    Override,
    ProbeController,
    SetMonitor,
    SetScale,
    SetTier,
    StepView,
)
from mi_route2.patching.patches import Patch
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from mi_route2.vllm import VllmEngine, launch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests in an environment of its own", allow_module_level=True)

VOCAB, LAYERS, WIDTH, HEADS, KV, HEAD = 50, 3, 64, 4, 2, 32
CLOSE = 2e-5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[PretrainedConfig, int]] = {
    "Qwen3": (Qwen3Config(**SIZES), 1 << 27),
    "Llama": (LlamaConfig(**SIZES, attention_bias=False), 12 * LAYERS * 2 * KV * HEAD * 32 * 4),  # room for 12 blocks of 32 tokens
    "Qwen2": (Qwen2Config(**SIZES | {"num_attention_heads": 2}), 1 << 27),
    "Mistral": (MistralConfig(**SIZES, sliding_window=None), 1 << 27),
    "Qwen3Moe": (Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), 1 << 27),
}
PROMPT = tuple(range(3, 43))
FULL = Sampling(max_new=5, logprobs=VOCAB)
MID = Site(1, "resid_mid")


class Pair:
    """The same model on vLLM and on our own engine."""

    def __init__(self, name: str, folder: Path):
        config, room = MODELS[name]
        generator = torch.Generator().manual_seed(5)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for value in model.parameters():
                value += 0.1 * torch.randn(value.shape, generator=generator)
        model.save_pretrained(folder)
        settings = {"max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        self.theirs: VllmEngine = launch(folder, dtype="float32", kv_cache_memory_bytes=room, **settings)
        self.tight = room < 1 << 27
        self.ours = Engine(open_host("torch", model), prefix_bytes=0)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Run the requests on vLLM; check the results against those of our engine."""
        found = self.theirs.generate(requests)
        for ours, theirs in zip(self.ours.generate(requests, progress=False), found, strict=True):
            assert theirs.error is None
            assert (theirs.ids, theirs.finish, theirs.unfired) == (ours.ids, ours.finish, ours.unfired)
            assert gap(theirs, ours) <= CLOSE
            assert theirs.captured.keys() == ours.captured.keys()
            for site, captured in ours.captured.items():
                assert theirs.captured[site].positions == captured.positions
                assert (theirs.captured[site].rows - captured.rows).abs().max() <= CLOSE
            assert theirs.readings.keys() == ours.readings.keys()
            for position, readings in ours.readings.items():
                assert theirs.readings[position].keys() == readings.keys()
                for monitor, reading in readings.items():
                    assert theirs.readings[position][monitor] == pytest.approx(reading, abs=1e-4)
        return found

    @property
    def points(self) -> tuple[str, ...]:
        return tuple(self.theirs.facts.points)

    def at(self, point: str, seed: int = 0) -> torch.Tensor:
        """A value in the shape of a point."""
        return row(*self.theirs.facts.shape(Site(1, point)), seed=seed)

    def forget(self) -> None:
        """Empty vLLM's prefix cache."""
        assert self.theirs.llm.reset_prefix_cache()


def gap(one: Result, other: Result) -> float:
    """The largest difference of log-probabilities over all tokens of the vocabulary."""
    assert len(one.tokens) == len(other.tokens)
    return max(abs(a.top[token] - b.top[token]) for a, b in zip(one.tokens, other.tokens) for token in range(VOCAB))


def row(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stop(*_given: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def test_patches_and_vectors_at_every_point_equal_those_of_our_engine(pair: Pair) -> None:
    """One step holds patched, steered and plain requests, in pieces of prompts and in generated tokens."""
    plain = Request(PROMPT, FULL)
    patched = [
        Request(
            PROMPT,
            FULL,
            patch=(Patch(Site(layer, point), 20, pair.at(point)), Patch(Site(layer, point), 41, pair.at(point, 1), 0.5)),
        )
        for point in pair.points
        for layer in (0, LAYERS - 2)
    ]
    steered = [
        Request(
            PROMPT,
            FULL,
            steering=Steering(
                base=(Steer(Site(1, point), pair.at(point), 0.5),), decode=(Steer(Site(1, point), pair.at(point, 1)),)
            ),
        )
        for point in pair.points
    ]
    found = pair.run([plain, *patched, *steered])
    for request, result in zip([*patched, *steered], found[1:]):
        assert gap(result, found[0]) > 1e-3, request  # it acts


def test_a_neighbor_of_an_intervention_keeps_its_bits(pair: Pair) -> None:
    """The same batch twice, in which only the others' interventions differ."""
    plain = Request(PROMPT, FULL)
    push = Steering(base=(Steer(MID, row(WIDTH), 3.0),), monitors=(Monitor(Site(0, "mlp_out"), row(WIDTH), gate_rows=True),))
    others = [
        Request(PROMPT[::-1], FULL, patch=tuple(Patch(Site(1, point), 5, pair.at(point)) for point in pair.points)),
        Request(PROMPT[::-1], FULL, steering=push, capture=(Capture(MID),)),
    ]
    pair.forget()
    with_them = pair.run([others[0], plain, others[1]])
    pair.forget()
    without = pair.run([Request(PROMPT[::-1], FULL), plain, Request(PROMPT[::-1], FULL, capture=(Capture(MID),))])
    assert gap(with_them[1], without[1]) == 0.0
    assert gap(with_them[0], without[0]) > 1e-3
    assert gap(with_them[2], without[2]) > 1e-3


LONG = tuple(3 + i % 40 for i in range(90))
"""Two full blocks of 32 tokens and a part of a third."""
INTERVENED = {
    "patch": Request(LONG, FULL, patch=(Patch(Site(0, "resid_pre"), 3, row(WIDTH) * 3),)),
    "vector": Request(LONG, FULL, steering=Steering(base=(Steer(Site(0, "resid_mid"), row(WIDTH)),))),
    "clamp": Request(LONG, FULL, steering=Steering(clamps=(Clamp(Site(0, "resid_mid"), row(WIDTH), value=3.0),))),
}


@pytest.mark.parametrize("first", INTERVENED)
def test_a_cached_prefix_is_never_that_of_another_intervention(pair: Pair, first: str) -> None:
    """Each request runs after all others have left their blocks; a request of equal content finds its own."""
    plain = Request(LONG, FULL)
    pair.forget()
    pair.run([INTERVENED[first]])
    after = pair.run([plain])[0]
    assert after.cached == 0
    again, others = pair.run([INTERVENED[first]])[0], [pair.run([INTERVENED[name]])[0] for name in INTERVENED if name != first]
    assert again.cached == 64
    assert [one.cached for one in others] == [0, 0]
    assert pair.run([plain])[0].cached == 64


EARLY = Site(0, "resid_mid")
WATCHED = Steering(decode=(Steer(MID, row(WIDTH)),), monitors=(Monitor(EARLY, row(WIDTH, seed=2), 0.3, gate_rows=True),))
ON_A_PREFIX = {  # fields of a request -> tokens that it may take from a prefix that one of equal content left
    "nothing": ({}, 64),
    "vector": ({"steering": Steering(base=(Steer(EARLY, row(WIDTH)),))}, 64),
    "prefill": ({"steering": Steering(prefill=(Steer(EARLY, row(WIDTH)),))}, 64),
    "gated": ({"steering": WATCHED}, 64),
    "readings": ({"steering": WATCHED, "readings": True}, 0),
    "captured": ({"capture": (Capture(EARLY, TokenSelection(positions=(5, 91))),)}, 0),
    "captured later": ({"capture": (Capture(EARLY, TokenSelection("generated")),)}, 64),
}


@pytest.mark.parametrize("kind", ON_A_PREFIX)
def test_a_prefix_of_another_prompt_changes_no_number(pair: Pair, kind: str) -> None:
    """Two prompts share 90 tokens. What is read or captured at a cached position is computed anew, and none is missing."""
    fields, cached = ON_A_PREFIX[kind]
    one, other = (Request((*LONG, *tail), FULL, **fields) for tail in ((7, 8), (9, 10)))
    pair.forget()
    alone = pair.run([other])[0]
    pair.forget()
    pair.run([one])
    behind = pair.run([other])[0]
    assert (alone.cached, behind.cached) == (0, cached)
    assert gap(alone, behind) <= CLOSE
    assert len(behind.readings) == (96 if "readings" in fields else 0)
    assert pair.run([Request((*LONG, 9, 10), FULL)])[0].cached == (0 if "steering" in fields else 64)


def test_an_interrupted_call_leaves_no_request_and_no_prefix(pair: Pair) -> None:
    """vLLM offers the blocks of a step as prefixes before it runs the step, which Ctrl-C may end half-way."""
    pair.forget()
    engine = pair.theirs.llm.llm_engine
    model = pair.theirs.llm.collective_rpc(lambda worker: worker)[0].model_runner.get_model()
    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        pair.theirs.generate([Request(LONG, FULL), Request(LONG, FULL, steering=Steering(base=(Steer(MID, row(WIDTH)),)))])
    handle.remove()
    assert not engine.has_unfinished_requests()
    for cached in (0, 64):
        assert pair.run([Request(LONG, FULL)])[0].cached == cached


def test_captures_equal_those_of_our_engine_even_if_the_prefix_is_cached(pair: Pair) -> None:
    selections = [
        TokenSelection(),
        TokenSelection("prompt"),
        TokenSelection("generated"),
        TokenSelection("last"),
        TokenSelection(positions=(0, 31, 40, 42)),
        TokenSelection(token_ids=(5, 9)),
    ]
    requests = [
        Request(LONG, FULL, capture=tuple(Capture(Site(i % LAYERS, point), one) for i, point in enumerate(pair.points)))
        for one in selections[:4]
    ]
    requests += [Request(PROMPT, FULL, capture=(Capture(MID, one), Capture(Site(2, "z"), one))) for one in selections[4:]]
    patch = Patch(MID, 20, row(WIDTH))
    requests.append(
        Request(PROMPT, FULL, capture=(Capture(MID), Capture(Site(1, "mlp_out"))), patch=(patch,))
    )  # pristine at its own site
    pair.run([Request(LONG, FULL), Request(PROMPT, FULL)])
    found = pair.run(requests)
    assert len(found[0].captured) == len(pair.points)
    assert not pair.theirs.llm.collective_rpc("mi_route2_collect", args=([],))[0]


def test_monitors_gate_in_the_same_forward_and_read_as_in_our_engine(pair: Pair) -> None:
    early, late = Site(0, "resid_mid"), Site(2, "attn_out")
    push = (Steer(late, row(WIDTH)), Steer(early, row(WIDTH, seed=1)))
    steerings = [
        Steering(base=push, monitors=(Monitor(early, row(WIDTH, seed=2), 0.3, 2.0, gate_rows=True),)),
        Steering(base=push, monitors=(Monitor(early, row(WIDTH, seed=2), 0.3, 2.0, "attenuate", gate_rows=True, depth=0.7),)),
        Steering(
            decode=push[:1], monitors=(Monitor(early, row(WIDTH, seed=3), gates=(late,), gate_rows=True), Monitor(late, row(WIDTH)))
        ),
        Steering(
            monitors=(Monitor(MID, row(WIDTH, seed=4), sharpness=0.5, adds=(Steer(MID, row(WIDTH)), Steer(late, row(WIDTH)))),)
        ),
        Steering(base=push, monitors=(Monitor(Site(1, "z"), pair.at("z"), gate_rows=True, gates=(late,)),)),
    ]
    found = pair.run([Request(PROMPT, FULL), *(Request(PROMPT, FULL, steering=one, readings=True) for one in steerings)])
    for one in found[1:]:
        assert gap(one, found[0]) > 1e-3
        assert list(one.readings) == list(range(len(PROMPT) + 4))


def test_an_intervention_that_is_too_strong_is_an_error_of_its_own_request(pair: Pair) -> None:
    strong = Request(
        PROMPT,
        FULL,
        steering=Steering(base=(Steer(Site(0, "resid_pre"), torch.full((WIDTH,), 3e38)), Steer(MID, torch.full((WIDTH,), 3e38)))),
    )
    plain = Request(PROMPT, FULL)
    found = pair.theirs.generate([strong, plain])
    assert found[0].finish == "error"
    assert "not finite: is an intervention too strong?" in (found[0].error or "")
    assert found[1].finish == "length"
    pair.run([plain])


class Follower:
    """Scales a request by what is read at its last token, and from request 0's third token on gives all requests a vector.

    Every other step it also routes request 1 to what is held, and puts a monitor on request 2.
    """

    name, wants = "follower", frozenset({EARLY})

    def __init__(self, everyone: bool = True):
        self.everyone, self.seen = everyone, dict[tuple[int, int], tuple[int | None, float, float]]()

    def on_step(self, view: StepView) -> list[Change]:
        changes: list[Change] = []
        for one in view.requests:
            number, at = one.request % 2**32, one.position - one.prompt
            score = float(one.captured[EARLY] @ row(WIDTH, seed=9))
            reading = one.readings["watch"].score if "watch" in one.readings else 0.0
            if at >= -1:
                self.seen[number, at] = one.token, score, reading
            if at < -1 or one.finished:
                continue
            changes.append(SetScale(abs(score + reading) / 4, one.request))
            if number == 0 and at == 1 and self.everyone:
                changes.append(SetTier((Steer(MID, row(WIDTH, seed=5)),)))
            if number == 1:
                changes.append(Override(one.request, "held" if at % 2 else None))
            if number == 2:
                adds = Monitor(EARLY, row(WIDTH, seed=6), adds=(Steer(MID, row(WIDTH, seed=7)),), name="added")
                changes.append(SetMonitor(adds, one.request) if at % 2 else ClearMonitor("added", one.request))
        return changes


def steered_by(pair: Pair, requests: Sequence[Request], ours: Controller, theirs: Controller) -> list[tuple[Result, Result]]:
    """Run requests on both engines under equal controllers."""
    own = Engine(pair.ours.host, controllers=[ours], prefix_bytes=0)
    other = VllmEngine(pair.theirs.llm, controllers=[theirs])
    for engine in (own, other):
        engine.steering.hold("held", Steering(decode=(Steer(MID, row(WIDTH, seed=8)),)))
    found = list(zip(own.generate(requests, progress=False), other.generate(requests), strict=True))
    other.steering.drop("held")
    other.steering.clear_tier()
    assert (list(own.controllers.problems), list(other.controllers.problems)) == ([], [])
    return found


WATCH = Monitor(EARLY, row(WIDTH, seed=2), name="watch")


def test_controllers_steer_the_next_token_by_the_last_one_as_in_our_engine(pair: Pair) -> None:
    """A probe that engages and lets go, and a controller of everything; a request without steering is in the batch."""
    short, long = PROMPT[:12], Sampling(max_new=9, logprobs=VOCAB)
    push = Steering(decode=(Steer(MID, row(WIDTH, seed=1)),), monitors=(WATCH,))
    batch = [
        Request(short, long, steering=push, readings=True),
        Request(short[::-1], long),
        Request(short[1:], long, steering=push),
    ]
    batch.append(Request(short[2:], long))
    plain = pair.ours.generate(batch, progress=False)
    probes = [ProbeController("held", 0.0, 0.5, monitor="watch", smoothing=0.7, proportional=True) for _ in range(2)]
    followers = [Follower() for _ in range(2)]
    for controllers in (probes, followers):
        found = steered_by(pair, batch, *controllers)
        for own, other in found:
            assert (own.ids, own.finish, other.error) == (other.ids, other.finish, None)
            assert gap(own, other) <= CLOSE
        assert found[0][0].readings.keys() == found[0][1].readings.keys()
        assert gap(found[0][0], plain[0]) > 1e-3
    assert gap(found[3][1], plain[3]) > 1e-3
    assert probes[0].decisions
    for own, other in zip(probes[0].decisions, probes[1].decisions, strict=True):
        assert (own.step, own.request, own.engaged) == (other.step, other.request % 2**32, other.engaged)
        assert (own.score, own.gain) == pytest.approx((other.score, other.gain), abs=1e-4)
    assert followers[0].seen.keys() == followers[1].seen.keys()
    for place, (token, *numbers) in followers[0].seen.items():
        assert followers[1].seen[place][0] == token
        assert followers[1].seen[place][1:] == pytest.approx(numbers, abs=1e-4)


def test_a_recording_of_a_site_replays_every_step_with_its_bits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made before any request and padded, as a graph would be; scales, a tier and overrides come later."""
    worker = pair.theirs.llm.collective_rpc("mi_route2_interventions")[0]
    worker.steering.banks.lines(MID, WIDTH)
    run, equal = worker._edited, []
    recorded = make_fx(partial(run, MID))(*torch.zeros(2, 64, WIDTH))

    def edited(site: Site, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        new = run(site, hidden, residual)
        if site == MID and residual is not None:
            replayed = recorded(*(torch.cat([one, torch.ones(64 - len(one), WIDTH)]) for one in (hidden, residual)))
            equal.extend(torch.equal(one, torch.cat([real, torch.ones(64 - len(real), WIDTH)])) for one, real in zip(replayed, new))
        return new

    monkeypatch.setattr(worker, "_edited", edited)
    push = Steering(base=(Steer(MID, row(WIDTH, seed=1)),))
    requests = [Request(PROMPT[i:12], FULL, steering=push) for i in range(2)]
    for own, other in steered_by(pair, requests, Follower(), Follower()):
        assert gap(own, other) <= CLOSE
    assert equal == [True] * len(equal) != []


def test_a_request_that_is_preempted_after_its_steering_changed_is_an_error(pair: Pair) -> None:
    """vLLM computes its tokens anew, under one steering. A preempted request whose steering never changed keeps its numbers."""
    push, long = Steering(decode=(Steer(MID, row(WIDTH, seed=1)),)), Sampling(max_new=60, logprobs=VOCAB)
    requests = [Request(PROMPT[i:], long, steering=push) for i in range(6)]
    for changing in (True, False):
        ours, theirs = (Follower(everyone=False) for _ in range(2))
        if not changing:
            ours.on_step = theirs.on_step = lambda view: []
        found = steered_by(pair, requests, ours, theirs)
        failed = [other for _, other in found if other.error is not None]
        assert bool(failed) == (changing and pair.tight)
        assert all("preempted after a change of its steering" in (one.error or "") for one in failed)
        for own, other in found:
            assert other.error or gap(own, other) <= CLOSE


def too_strong() -> list[Request]:
    """Requests that leave keys and values that are not finite, from layer 1 on."""
    large, mid = torch.full((WIDTH,), 3e38), Site(0, "resid_mid")
    step = Steering(base=(Steer(Site(0, "resid_pre"), large), Steer(mid, large)))
    patch = (Patch(mid, 3, large), Patch(Site(0, "mlp_out"), 3, large))
    return [Request(PROMPT, Sampling(max_new=30), steering=step), Request(PROMPT, Sampling(max_new=30), patch=patch)]


def test_requests_that_get_the_blocks_of_one_that_was_too_strong_keep_their_numbers(pair: Pair) -> None:
    """The kernel multiplies what lies behind a request's last token in its block by 0, which makes NaN of NaN."""
    strong = too_strong()
    plain = [Request(PROMPT[i:], FULL) for i in range(len(PROMPT))]
    for _ in range(2):
        # more requests than run at once, so that blocks change hands within the call
        found = pair.theirs.generate([*(strong * 8), *plain])
        assert [one.finish for one in found] == ["error"] * 16 + ["length"] * len(plain)
        for ours, theirs in zip(pair.ours.generate(plain, progress=False), found[16:], strict=True):
            assert gap(theirs, ours) <= CLOSE
        # a prefix that is not finite stays so: it is the other's own error as well
        assert [one.finish for one in pair.theirs.generate(strong)] == ["error", "error"]
        pair.run(plain)


def test_two_tensor_parallel_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Each rank holds the whole residual stream, and edits it alike; heads are split, and are refused."""
    model = AutoModelForCausalLM.from_config(MODELS["Qwen3"][0]).float().eval()
    model.save_pretrained(tmp_path / "base")
    support = Path(__file__).parents[2] / "support"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(support.parents[1]), str(support)]), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = subprocess.run(
        [sys.executable, str(support / "vllm_split.py"), str(tmp_path / "base"), str(tmp_path / "out.json")],
        env=env, capture_output=True, text=True, check=False, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "out.json").read_text())
    truth = Engine(open_host("torch", model), prefix_bytes=0).generate(requests(WIDTH, VOCAB), progress=False)
    for own, other in zip((plain(one, VOCAB) for one in truth), found, strict=True):
        assert (other["error"], other["ids"]) == (None, own["ids"])
        for numbers in ("tops", "rows", "readings"):
            ours, theirs = torch.tensor(own[numbers]), torch.tensor(other[numbers])
            assert ours.shape == theirs.shape
            assert torch.allclose(ours, theirs, atol=1e-4)
    assert found[0]["tops"] != found[1]["tops"]


def test_kept_adapter_and_quarantine_run_as_one_lora_and_a_folder_written_again_is_read_again(tmp_path: Path) -> None:
    """Full, deployed and base model, with interventions in each; a LoRA under an old number or name would be stale."""
    config, room = MODELS["Qwen3"]
    host = open_host("torch", AutoModelForCausalLM.from_config(config).float().eval())
    host.model.save_pretrained(tmp_path / "base")
    spec, generator = AdapterSpec("lora", rank=5, quarantine_rank=3), torch.Generator().manual_seed(3)
    adapters = host.attach("blocks.*", spec=spec, generator=generator, expect=7 * LAYERS)
    folders = {which: tmp_path / which for which in ("full", "deployed")}

    def move() -> None:
        with torch.no_grad():
            for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
                p += 0.1 * torch.randn(p.shape, generator=generator)
        for which, folder in folders.items():
            export_peft(adapters, folder, which=which, overwrite=True)

    move()
    # Room for LoRAs that were read before, and prefixes of whole blocks: what could be stale is there.
    settings = {"max_cpu_loras": 4, "block_size": 32, "max_model_len": 256, "kv_cache_memory_bytes": room}
    torch.manual_seed(4)
    theirs = launch(tmp_path / "base", adapters=folders, dtype="float32", **settings)
    assert torch.initial_seed() == 4
    requests = [
        Request(PROMPT, FULL, capture=(Capture(MID),)),
        Request(PROMPT, FULL, patch=(Patch(Site(1, "q"), 20, row(HEADS, HEAD)),)),
        Request(PROMPT, FULL, steering=Steering(base=(Steer(MID, row(WIDTH), 2.0),))),
    ]

    def ours(mode: Callable[[], AbstractContextManager[None]]) -> list[Result]:
        with mode():
            return Engine(host, prefix_bytes=0).generate(requests, progress=False)

    before: list[Result] = []
    for turn in range(2):
        found = {name: theirs.generate(requests, adapters=name) for name in ("full", "deployed", None)}
        for name, mode in {"full": nullcontext, "deployed": adapters.deployed, None: adapters.reference}.items():
            expected = ours(mode)
            for own, other in zip(found[name], expected, strict=True):
                assert gap(own, other) <= CLOSE
            assert (found[name][0].captured[MID].rows - expected[0].captured[MID].rows).abs().max() <= CLOSE
        assert gap(found["full"][0], found["deployed"][0]) > 0.1 < gap(found["deployed"][0], found[None][0])
        if turn:
            assert gap(found["full"][0], before[0]) > 0.1
        before = found["full"]
        move()
    # one more engine on the same vLLM, which has read a LoRA of this name from this folder, and has its prefixes
    another = VllmEngine(theirs.llm, adapters=folders)
    assert gap(another.generate(requests, adapters="full")[0], ours(nullcontext)[0]) <= CLOSE
    with pytest.raises(KeyError, match="no LoRA is called 'kept'; there are: full, deployed"):
        theirs.generate(requests, adapters="kept")
