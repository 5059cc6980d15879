"""The sides of the hosts benchmark: one model, one set of adapters and sites to read; the library that runs the hooks differs.

The bare side reads with ``register_forward_hook``, the others through their host. Weights are shared; adapter parameters are drawn
alike and moved off their initial values.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.huggingface import tap_of
from mi_route2.models import smollm2
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec
from mi_route2.sites import Site
from studies.benchmarks.measurement.contenders import SITES, Bench, move
from studies.benchmarks.measurement.flops import MICRO, Size
from studies.benchmarks.measurement.paired import Contender

BARE, EAGER = "torch hooks", "torch hooks, eager"
TORCH, BRIDGE, NNSIGHT = "TorchHost", "BridgeHost", "NNsightHost"
FORWARD, STEP, TOKEN = "forward", "routed step", "generated token"
SIDES, TASKS = (BARE, EAGER, TORCH, BRIDGE, NNSIGHT), (FORWARD, STEP, TOKEN)

NEW = 16
"""Number of generated tokens, if the context has room for them."""

Seen = dict[Site, list[Tensor]]
Generate = Callable[[Tensor, int], tuple[Tensor, Seen]]


@dataclass(frozen=True)
class Setting:
    """A named size. A turn is ``calls`` forwards or steps, so that it is long enough for the clock."""

    name: str
    size: Size
    calls: int
    pretrained: bool = False
    """True for SmolLM2-135M, whose size this is; otherwise the model is a random Qwen3."""

    @property
    def new(self) -> int:
        """Number of tokens that a generation adds to its prompts."""
        return min(NEW, self.size.tokens - self.size.prompt)


SETTINGS = (
    Setting("small", Size(layers=4, d=128, heads=4, mlp=512, rollouts=4, tokens=32, prompt=8, kept_rank=16, quarantine_rank=4), 4),
    Setting("larger", Size(), 1),
)
QUICK = (Setting("tiny", MICRO, 1),)
SMOLLM2 = (
    Setting(
        "SmolLM2-135M",
        Size(layers=30, d=576, heads=9, mlp=1536, vocab=49152, rollouts=2, tokens=64, kept_rank=16, quarantine_rank=4),
        1,
        pretrained=True,
    ),
)


@dataclass(frozen=True)
class Side:
    """A model with adapters and a way to read its sites; ``generate`` is the library's own, and reads during generation."""

    name: str
    policy: Policy
    reading: Callable[[], AbstractContextManager[Seen]]
    generate: Generate


class HostBench:
    """Builder of the sides of one setting, and of their turns. The frozen weights are shared."""

    def __init__(self, setting: Setting, seed: int, cache_dir: Path):
        self.setting, self._seed, self._cache_dir = setting, seed, cache_dir
        model = smollm2().model.requires_grad_(False) if setting.pretrained else None
        self._bench = Bench(setting.size, seed, cache_dir, model=model)
        self.batch = self._bench.batch
        layers = range(setting.size.layers)
        self.sites = [Site(0, "kept_a", "attn.q"), *(Site(layer, "resid_post") for layer in layers)]  # in the forward's order

    def build(self, name: str) -> Side:
        """Return the side called ``name``, one of ``SIDES``."""
        if name in (BARE, EAGER):
            return self._bare(name)
        model = self._model("sdpa")
        host: Any = traced(model) if name == NNSIGHT else open_host("torch" if name == TORCH else "transformer_lens", model)
        policy = host.policy(self._attach(host.attach))

        def reading() -> AbstractContextManager[Seen]:
            return self._reading(host)

        if name == NNSIGHT:
            return Side(name, policy, reading, lambda prompt, new: self._generate_in_a_trace(host, prompt, new))
        told = for_the_bridge if name == BRIDGE else for_transformers
        return Side(name, policy, reading, generating(policy, reading, told))

    def contender(self, task: str, side: Side) -> Contender:
        """Return a turn of ``task`` by ``side``; its step returns the result of the last call, and the values read in it."""
        rollouts, calls = self.batch.rollouts, self.setting.calls
        routed = self._bench.routed(side.name, side.policy, MaskSpec(score="grad"), 0)

        def forward() -> tuple[Tensor, Seen]:
            with torch.no_grad(), side.reading() as seen:
                return side.policy.forward(side.policy.model, rollouts.tokens, rollouts.attention), seen

        def step() -> Seen:
            with side.reading() as seen:
                routed.step()
            return seen

        def token() -> tuple[Tensor, Seen]:
            return side.generate(rollouts.tokens[:, : self.setting.size.prompt], self.setting.new)

        once = {FORWARD: forward, STEP: step, TOKEN: token}[task]

        def turn() -> object:
            return [once() for _ in range(1 if task == TOKEN else calls)][-1]

        return Contender(f"{task}: {side.name}", 0, turn, side.policy.model.zero_grad)

    def units(self, task: str) -> int:
        """Return the divisor of a turn's time: new tokens, or calls."""
        return self.setting.new if task == TOKEN else self.setting.calls

    def _model(self, attention: str) -> Any:
        model = self._bench.model().eval()
        model.set_attn_implementation(attention)
        return model

    def _attach(self, attaching: Callable[..., Adapters]) -> Adapters:
        size, generator = self.setting.size, torch.Generator().manual_seed(self._seed)
        spec = AdapterSpec(rank=size.kept_rank, quarantine_rank=size.quarantine_rank)
        count = len(SITES) * size.layers
        adapters = attaching("blocks.*", spec=spec, generator=generator, expect=count, cache_dir=self._cache_dir)
        move([*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()], generator)
        return adapters

    def _bare(self, name: str) -> Side:
        model = self._model("eager" if name == EAGER else "sdpa")
        adapters = self._attach(lambda *patterns, **given: attach(model, *patterns, **given))
        policy = Policy(model, adapters, lambda model, tokens, _attention: model(tokens, use_cache=False).logits)
        modules = {site: adapters.sites[site.slot].hook_kept_a for site in self.sites if site.linear}
        modules |= {site: model.model.layers[site.layer] for site in self.sites if not site.linear}

        @contextmanager
        def reading() -> Iterator[Seen]:
            seen: Seen = {site: [] for site in self.sites}
            handles = [listen(modules[site], values) for site, values in seen.items()]
            try:
                yield seen
            finally:
                for handle in handles:
                    handle.remove()

        return Side(name, policy, reading, generating(policy, reading, for_transformers))

    @contextmanager
    def _reading(self, host: Host) -> Iterator[Seen]:
        seen: Seen = {site: [] for site in self.sites}
        with host.hooks({site: keeping(values) for site, values in seen.items()}):
            yield seen

    def _generate_in_a_trace(self, host: Any, prompt: Tensor, new: int) -> tuple[Tensor, Seen]:
        envoys = {site: host.envoy.get(tap_of(host.model, host.architecture, site).path) for site in self.sites}
        seen: Seen = {site: [] for site in self.sites}
        with torch.no_grad(), host.envoy.generate(prompt, **for_transformers(prompt, new)) as tracer:
            for _ in tracer.iter[:new]:
                for site, envoy in envoys.items():
                    seen[site].append(envoy.output)
            tokens = tracer.result.save()
        return tokens, seen


def listen(module: nn.Module, values: list[Tensor]) -> RemovableHandle:
    """Register a bare hook that keeps the module's output."""
    return module.register_forward_hook(lambda _module, _args, output: values.append(output.detach()))


def keeping(values: list[Tensor]) -> Callable[[Tensor], None]:
    """Return an edit that keeps the value."""
    return lambda value: values.append(value.detach())


Told = Callable[[Tensor, int], dict[str, Any]]
"""Arguments of a library's ``generate`` for a prompt and a number of tokens: greedy, exactly that many tokens, with a cache."""


def for_transformers(prompt: Tensor, new: int) -> dict[str, Any]:
    exactly = {"max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return {"attention_mask": torch.ones_like(prompt), "do_sample": False, "use_cache": True, **exactly}


def for_the_bridge(_prompt: Tensor, new: int) -> dict[str, Any]:
    exactly = {"max_new_tokens": new, "stop_at_eos": False, "return_type": "tokens", "verbose": False}
    return {"do_sample": False, "use_past_kv_cache": True, **exactly}


def generating(policy: Policy, reading: Callable[[], AbstractContextManager[Seen]], told: Told) -> Generate:
    """Return the model's own ``generate`` with hooks open."""
    model: Any = policy.model

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, Seen]:
        with torch.no_grad(), reading() as seen:
            return model.generate(prompt, **told(prompt, new)), seen

    return generate


def traced(model: nn.Module) -> Host:
    """Return the nnsight host of a model, with a one-word tokenizer.

    nnsight's ``generate`` requires a tokenizer even for token inputs.
    """
    from nnsight import TransformersModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from mi_route2.hosts.nnsight import NNsightHost

    words = Tokenizer(WordLevel({"w": 0}, unk_token="w"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w", unk_token="w")
    return NNsightHost(TransformersModel(model, tokenizer=tokenizer))
