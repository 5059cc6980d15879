"""Speed of the engine: greedy completions of many requests, against transformers' generate.

``steered`` gives every request its own vector in the residual stream. ``exact`` computes each request by itself, so that its bits
do not depend on the others; it and ``one by one`` run eight requests. ``ragged`` prompts have 8 to 56 tokens, which ``generate``
pads on the left.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.models import smollm2
from mi_route2.sites import Site
from mi_route2.steering.specs import Steer, Steering
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side, random_qwen3

ENGINE, STEERED, EXACT = "engine", "engine, steered", "engine, exact"
BATCH, SINGLE = "generate, one batch", "generate, one by one"
RAGGED, PADDED = "engine, ragged prompts", "generate, ragged prompts"
PROMPT, VOCABULARY, FEW = 32, 1024, 8


def random_model(seed: int, layers: int = 12, d: int = 256) -> Any:
    """Return the random decoder of this benchmark, or a smaller one for ``serve``."""
    return random_qwen3(seed, layers=layers, d=d, heads=d // 32, mlp=3 * d, vocab=VOCABULARY, context=512).eval()


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return the engine in four forms and transformers' generate in three."""
    model: Any = smollm2().model if options.smollm2 else random_model(options.seed)
    host = open_host("torch", model)
    count, new = (4, 8) if options.quick else (8, 16) if options.smollm2 else (64, 64)
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(3, VOCABULARY, (count, PROMPT), generator=generator)
    lengths = torch.randint(8, 57, (count,), generator=generator).tolist()
    ragged = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(ragged, batch_first=True, padding_value=0, padding_side="left")
    vectors = torch.randn(count, model.config.hidden_size, generator=generator)
    middle = Site(model.config.num_hidden_layers // 2, "resid_pre")

    def complete(prompts: Sequence[Tensor], steered: bool = False, exact: bool = False) -> None:
        def steering(i: int) -> Steering | None:
            return Steering(base=(Steer(middle, vectors[i], 0.1),)) if steered else None

        sampling = Sampling(max_new=new)
        requests = [Request(tuple(prompt.tolist()), sampling, steering=steering(i)) for i, prompt in enumerate(prompts)]
        engine = Engine(host, exact=exact)
        results = engine.generate(requests, progress=False)
        engine.close()
        assert all(len(result.ids) == new for result in results)

    @torch.no_grad()
    def generate(prompts: Tensor) -> None:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = model.generate(prompts, attention_mask=(prompts > 0).long(), **options)
        assert ids.shape[1] == prompts.shape[1] + new

    def one_by_one() -> None:
        for prompt in prompts[:FEW]:
            generate(prompt[None])

    sides: dict[str, Side] = {
        ENGINE: lambda: complete([*prompts]),
        STEERED: lambda: complete([*prompts], steered=True),
        EXACT: lambda: complete([*prompts[:FEW]], exact=True),
        RAGGED: lambda: complete(ragged),
        PADDED: lambda: generate(padded),
        BATCH: lambda: generate(prompts),
        SINGLE: one_by_one,
    }
    pairs = [(ENGINE, BATCH), (RAGGED, PADDED), (STEERED, ENGINE), (EXACT, SINGLE)]
    return Benchmark(f"{count} requests of {PROMPT} tokens, {new} new tokens each", sides, pairs)
