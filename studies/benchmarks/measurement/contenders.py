"""The sides of the routing benchmark: one decoder, one batch and one loss; adapters and ways to get gradients differ.

    loss = -1/(b s) sum_b A_b sum_t log p(token_t)        over completion tokens; the backward always reaches the embeddings

The decoder is a random Hugging Face Qwen3 with PyTorch's fused attention; nothing is downloaded. Adapters are attached to q, k, v,
o, gate, up, down and moved off their initial values, so that no factor is 0. The sides share the frozen weights.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import (
    Directions,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    Route,
    StepContext,
    TrainBatch,
    group_advantages,
)
from mi_route2.routing.directions import FeatureKind, Provenance, feature_shapes, unit
from mi_route2.routing.routes import RouteStep
from studies.benchmarks.measurement.flops import Size
from studies.benchmarks.measurement.paired import Contender

SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_qwen3(size: Size, seed: int, **more: Any) -> Any:
    """Return a random Qwen3, the same for the same seed. ``more`` are further fields of its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.d,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads if size.kv is None else size.heads * size.kv // size.d,
        head_dim=size.d // size.heads,
        max_position_embeddings=size.tokens,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


class Bench:
    """Builder of the sides of one ``size``, on ``model`` or on a random decoder; SVDs are cached in ``cache_dir`` meanwhile."""

    def __init__(self, size: Size, seed: int, cache_dir: Path, attention: str = "sdpa", model: nn.Module | None = None):
        self.size, self._seed, self._cache_dir = size, seed, cache_dir
        if model is None:  # in eval mode Opacus records nothing; there is no dropout
            model = random_qwen3(size, seed, use_cache=False, attn_implementation=attention).train().requires_grad_(False)
        self._decoder: Any = model
        self.batch = make_batch(size, torch.Generator().manual_seed(seed), next(self._decoder.parameters()).device)

    def embed(self, tokens: Tensor) -> Float[Tensor, "b s d"]:
        """Return the embeddings as a leaf, so that every backward reaches the bottom. Every side starts here."""
        return functional.embedding(tokens, self._decoder.get_input_embeddings().weight).requires_grad_()

    def model(self) -> Any:
        """Return the decoder with its own modules and shared weights."""
        return copy.deepcopy(self._decoder, {id(p): p for p in self._decoder.parameters()})

    def policy(self, spec: AdapterSpec) -> Policy:
        """Return the decoder with this library's adapters."""
        model, generator = self.model(), torch.Generator().manual_seed(self._seed)
        patterns = ("blocks.*.attn.*", "blocks.*.mlp.*")
        count = len(SITES) * self.size.layers
        adapters = attach(model, *patterns, spec=spec, generator=generator, expect=count, cache_dir=self._cache_dir)
        move([*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()], generator)
        return Policy(model, adapters, lambda model, tokens, attention: logits(model, self.embed(tokens)))

    def peft(self, *ranks: int, wide: bool = True) -> nn.Module:
        """Return the decoder with PEFT's LoRA, with adapters of all ``ranks`` active at once; ``wide``: in float32 in any case."""
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            first, *others = (LoraConfig(r=rank, target_modules=list(SITES)) for rank in ranks)
            model: Any = get_peft_model(self.model(), first, adapter_name="0", autocast_adapter_dtype=wide)
            for i, config in enumerate(others, start=1):
                model.add_adapter(str(i), config, autocast_adapter_dtype=wide)
            model.base_model.set_adapter([str(i) for i in range(len(ranks))])
        move([p for p in model.parameters() if p.requires_grad], torch.Generator().manual_seed(self._seed))
        return model

    def plain(self, name: str, side: nn.Module | Policy, work: int) -> Contender:
        """Return a forward and backward of plain autograd; adapters of this library in ``side`` are not routed."""
        model, training = (side.model, side.adapters.unrouted) if isinstance(side, Policy) else (side, nullcontext)

        def step() -> None:
            with training():
                inputs = self.embed(self.batch.rollouts.tokens)
                loss(logits(model, inputs), self.batch.rollouts, self.batch.advantages).backward()

        return Contender(name, work, step, lambda: model.zero_grad(set_to_none=True))

    def routed(self, name: str, policy: Policy, spec: MaskSpec, work: int) -> Contender:
        """Return a forward and backward under the mask route ``spec`` with random directions, as in training."""
        begin = self.route(policy, spec)

        def step() -> None:
            routing = begin()
            self.backward(policy, routing)
            routing.finish()

        return Contender(name, work, step, policy.model.zero_grad)

    def route(self, policy: Policy, spec: MaskSpec | None) -> Callable[[], RouteStep]:
        """Return a function that begins a step under ``spec`` with random directions; ``None`` for no route."""
        route = random_route(spec or OpenSpec(), policy.adapters, self._seed)
        context = StepContext(torch.Generator().manual_seed(self._seed))
        return lambda: route.begin(policy, self.batch, context)

    def whole(self, policy: Policy, spec: MaskSpec, micro: int | None) -> Callable[[], object]:
        """Return a whole step under ``spec`` in one call, in micro-batches."""
        route = random_route(spec, policy.adapters, self._seed)
        context = StepContext(torch.Generator().manual_seed(self._seed), micro=micro)
        size = self.batch.rollouts.tokens.numel()
        return lambda: route.backward(
            policy,
            self.batch,
            lambda out, part: weigh(out, part.rollouts.tokens, part.rollouts.completion, part.advantages) / size,
            context,
        )

    def backward(self, policy: Policy, routing: RouteStep) -> None:
        """Run the forward and backward of every part of a step."""
        for micro_batch in routing.micro_batches:
            with policy.adapters.recording(micro_batch.tape):
                rollouts = micro_batch.batch.rollouts
                loss(policy.forward(policy.model, rollouts.tokens, rollouts.attention), rollouts, micro_batch.advantages).backward()

    def vmap(self, name: str, spec: AdapterSpec, work: int) -> Contender:
        """Return ``torch.func``'s ``vmap(grad)`` over rollouts.

        The step returns the gradients of all adapter parameters, ``[b, *shape]``.
        """
        model: Any = self.policy(spec).model
        model.set_attn_implementation("eager")  # the fused kernel has no batching rule on a CPU, and its loop is slower
        rollouts, advantages = self.batch.rollouts, self.batch.advantages
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def one(parameters: dict[str, Tensor], inputs: Tensor, tokens: Tensor, completion: Tensor, advantage: Tensor) -> Tensor:
            out = torch.func.functional_call(model, parameters, (), {"inputs_embeds": inputs[None]}).logits
            return weigh(out, tokens[None], completion[None], advantage[None]) / rollouts.tokens.numel()

        per_rollout = torch.func.vmap(torch.func.grad(one, argnums=(0, 1)), in_dims=(None, 0, 0, 0, 0))

        def step() -> dict[str, Tensor]:
            inputs = self.embed(rollouts.tokens).detach()
            return per_rollout(trained, inputs, rollouts.tokens, rollouts.completion, advantages)[0]

        return Contender(name, work, step, lambda: None)

    def opacus(self, name: str, model: nn.Module, work: int) -> Contender:
        """Return Opacus's ``grad_sample`` of every parameter of a PEFT LoRA."""
        from opacus import GradSampleModule

        wrapped = GradSampleModule(model, loss_reduction="sum", strict=False)
        return self.plain(name, wrapped, work)


class NoFitter:
    """A fitter that never fits, because the benchmark sets its directions itself."""

    refreshes = False

    def fit(self, policy: Policy, step: int) -> Directions:
        raise RuntimeError("the benchmark never refits")


def random_route(spec: MaskSpec | OpenSpec, adapters: Adapters, seed: int) -> Route:
    """Return the route of a spec, under random directions if it has any."""
    if isinstance(spec, OpenSpec):
        return OpenRoute(spec)
    assert spec.score in ("act", "grad", "full")
    route = MaskRoute(spec, NoFitter())
    route.directions = random_directions(adapters, spec.score, seed)
    return route


def random_directions(adapters: Adapters, kind: FeatureKind, seed: int) -> Directions:
    """Return a random unit vector per site, in the space of ``kind``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = feature_shapes(adapters, kind, adapters.coordinates() if kind == "act" else {})
    vectors = {site: unit(torch.randn(shape, generator=generator)) for site, shape in shapes.items()}
    return Directions(vectors, Provenance("haar", kind, "none", adapters.base_hash, 0, seed))


def make_batch(size: Size, generator: torch.Generator, device: torch.device) -> TrainBatch:
    """Return full-length rollouts, two per group, half of them rewarded."""
    b, s = size.rollouts, size.tokens
    tokens = torch.randint(size.vocab, (b, s), generator=generator)
    completion = (torch.arange(s) >= size.prompt).expand(b, s)
    groups = torch.arange(b, device=device) // 2
    rewards = (torch.arange(b, device=device) % 2).float()
    rollouts = Rollouts(tokens, torch.ones(b, s, dtype=torch.bool), completion).to(device)
    none = torch.zeros(b, dtype=torch.bool, device=device)
    return TrainBatch(rollouts, rewards, group_advantages(rewards, groups), groups, none)


def move(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Move parameters off their initial values: a factor of 0 would make gradients exactly 0."""
    with torch.no_grad():
        for p in parameters:
            p += 0.01 * torch.randn(p.shape, generator=generator).to(p)


def logits(model: nn.Module, inputs: Tensor) -> Float[Tensor, "b s v"]:
    return model(inputs_embeds=inputs).logits


def weigh(out: Float[Tensor, "b s v"], tokens: Tensor, completion: Tensor, advantages: Tensor) -> Tensor:
    """Return ``-sum_b A_b sum_t log p`` over completion tokens."""
    chosen = out[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return -(chosen * completion[:, 1:] * advantages[:, None]).sum()


def loss(out: Tensor, rollouts: Rollouts, advantages: Tensor) -> Tensor:
    return weigh(out, rollouts.tokens, rollouts.completion, advantages) / rollouts.tokens.numel()
