"""Speed of vLLM as the sampler of a policy with both adapters, relative to what samples without it.

    python -m studies.benchmarks vllm_sampler [--quick] [--smollm2] [--rounds 15] [--out FILE.json]

A tiny random Qwen3 (4 layers, d = 128) with a LoRA of rank 8 and a quarantine of rank 8 at each Linear of its blocks, 64 prompts of
32 tokens, 64 new tokens each at temperature 1, float32, one thread, one process:

    vLLM           a whole call of ``VllmSampler`` after a step: adapters written and read, completions, four of them checked
    vLLM alone     the same completions under adapters that vLLM has read already, and no check
    study          the study's own sampler: transformers' modules with a cache, all prompts in one batch
    engine         this project's engine, a new one every time
    generate       transformers' ``generate``, all prompts in one batch

With ``--smollm2`` the model is SmolLM2-135M, with 8 prompts and 16 new tokens. vLLM must be installed, see ``docs/vllm.md``.

Sides take turns; a ratio is one of medians of processor time, with a 95% bootstrap interval over rounds. Below 1 is faster.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mi_route2.adapters import AdapterSpec
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.models import smollm2, smollm2_folder
from mi_route2.rollouts import Policy
from mi_route2.vllm import VllmSampler
from mi_route2.vllm.facts import imported
from studies.benchmarks.engine import FEW, NEW, PROMPT, REQUESTS, SHORT, VOCABULARY, random_model
from studies.benchmarks.measurement.paired import PairedRatio, Turn, compared, report, take_turns, timed, timers, token_table
from studies.benchmarks.options import VllmSamplerOptions
from studies.environments.chat import generate

RANK = 8
ROWS = (
    PairedRatio("vLLM", "study"),
    PairedRatio("vLLM", "engine"),
    PairedRatio("vLLM", "generate"),
    PairedRatio("vLLM", "vLLM alone"),
)
NEVER = -1
"""End that no completion has, so that each is of full length."""


class SamplerSides:
    """All sides, each as a call that samples every completion once; ``folder`` is for the tiny model's checkpoint."""

    def __init__(self, seed: int, quick: bool, pretrained: bool, folder: Path):
        self._generator = torch.Generator().manual_seed(seed)
        model: Any = smollm2().model if pretrained else random_model(seed)
        base = smollm2_folder() if pretrained else folder / "base"
        if not pretrained:
            model.save_pretrained(base)
        self.host = open_host("torch", model)
        self.requests, self.new = (4, 8) if quick else (FEW, SHORT) if pretrained else (REQUESTS, NEW)
        drawn = torch.randint(3, VOCABULARY, (self.requests, PROMPT), generator=self._generator)
        self.tokens, self.prompts = drawn, drawn.tolist()
        spec = AdapterSpec("lora", rank=RANK, quarantine_rank=RANK)
        adapters = self.host.attach("blocks.*", spec=spec, generator=self._generator)
        self.policy: Policy = Policy(model, adapters)
        self.move()
        settings = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": self.requests}
        self.sampler = VllmSampler(base, dtype=torch.float32, **settings)
        self._seeds = itertools.count(seed)

    @torch.no_grad()
    def move(self) -> None:
        """Move all adapters, as an optimizer step does."""
        for value in self.policy.adapters.tensors().values():
            value += 1e-3 * torch.randn(value.shape, generator=self._generator)

    def vllm(self) -> None:
        completions = self.sampler(self.policy, self.prompts, max_new=self.new, temperature=1.0, generator=self._generator, ends=())
        assert all(len(ids) == self.new for ids in completions)

    def vllm_unchecked(self) -> None:
        lora = self.sampler._lora
        assert lora is not None
        common = {"max_tokens": self.new, "ignore_eos": True, "detokenize": False}
        params = [imported().SamplingParams(**common, seed=next(self._seeds)) for _ in self.prompts]
        given = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        outputs = lora.llm.generate(given, params, use_tqdm=False, lora_request=lora.request())
        assert all(len(one.outputs[0].token_ids) == self.new for one in outputs)

    def study(self) -> None:
        completions = generate(
            self.policy.model,
            self.prompts,
            max_new=self.new,
            temperature=1.0,
            generator=self._generator,
            ends=(NEVER,),
            pad=0,
            at_once=self.requests,
        )
        assert all(len(ids) == self.new for ids in completions)

    def engine(self) -> None:
        sampling = Sampling(max_new=self.new, temperature=1.0, seed=next(self._seeds))
        engine = Engine(self.host)
        results = engine.generate([Request(tuple(prompt), sampling) for prompt in self.prompts], progress=False)
        engine.close()
        assert all(len(result.ids) == self.new for result in results)

    @torch.no_grad()
    def generate(self) -> None:
        model: Any = self.policy.model
        how = {"do_sample": True, "top_k": 0, "min_new_tokens": self.new, "max_new_tokens": self.new, "pad_token_id": 0}
        ids = model.generate(self.tokens, attention_mask=torch.ones_like(self.tokens), **how)
        assert ids.shape[1] == PROMPT + self.new

    def all(self) -> dict[str, Turn]:
        """Return the sides, each as a call that returns its processor seconds."""

        def whole() -> dict[str, float]:
            self.move()
            return {"vLLM": timed(self.vllm)}

        rest = {"vLLM alone": self.vllm_unchecked, "study": self.study, "engine": self.engine, "generate": self.generate}
        self.vllm()  # starts it
        return {"vLLM": whole, **timers(rest)}


def run(options: VllmSamplerOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    with tempfile.TemporaryDirectory() as folder:
        sides = SamplerSides(options.seed, options.quick, options.smollm2, Path(folder))
        with sides.sampler:
            seconds = take_turns(sides.all(), options.turns, np.random.default_rng(options.seed))
    rng = np.random.default_rng(options.seed)
    results = compared(ROWS, seconds, rng)
    tokens = dict.fromkeys(seconds, sides.requests * sides.new)
    head = f"{options.turns} rounds, {sides.requests} prompts of {PROMPT} tokens, {sides.new} new tokens each, one thread"
    document = {"requests": sides.requests, "new": sides.new, "tokens": tokens, "rows": results, "seconds": seconds}
    report(options, head, token_table(results, seconds, tokens), document)
