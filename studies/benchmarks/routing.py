"""Cost of routing: a training step under a route, against PEFT's LoRA of the same total rank and against a plain backward.

    loss = -1/(b s) sum_b A_b sum_t log p(token_t)        over completion tokens

All sides share the frozen weights of one decoder with adapters at q, k, v, o, gate, up and down, moved off their initial values.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.models import smollm2
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Directions, MaskRoute, MaskSpec, StepContext, TrainBatch, group_advantages
from mi_route2.routing.directions import Provenance, feature_shapes, units
from studies.benchmarks.paired import Benchmark, BenchmarkOptions, Side, random_qwen3

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, QUARANTINE_RANK = 16, 16
PEFT, FROZEN = "PEFT LoRA", "frozen base"
KEPT = {
    "LoRA": AdapterSpec(kept="lora", rank=RANK, quarantine_rank=QUARANTINE_RANK),
    "SVD": AdapterSpec(rank=RANK, quarantine_rank=QUARANTINE_RANK),
}
MASKS = {
    "gradient flag": MaskSpec(score="grad"),
    "activation flag": MaskSpec(score="act"),
    "full score": MaskSpec(score="full", score_policy="ablated"),
}


class FixedDirections:
    """Fitter that never fits, because the benchmark sets random directions itself."""

    refreshes = False

    def fit(self, policy: Policy, step: int) -> Directions:
        raise RuntimeError("the benchmark never refits")


def build(options: BenchmarkOptions, stack: ExitStack) -> Benchmark:
    """Return the sides: PEFT, the frozen base, and per kept adapter a plain step and one under each mask route."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    b, s = (2, 16) if options.quick else (2, 128) if options.smollm2 else (8, 128)
    if options.smollm2:
        model: Any = smollm2().model
    else:
        layers, d = (2, 32) if options.quick else (6, 512)
        model = random_qwen3(options.seed, layers=layers, d=d, heads=d // 16, mlp=3 * d, vocab=1024, context=s, use_cache=False)
    model = model.train().requires_grad_(False)
    batch = make_batch(model.config.vocab_size, b, s, options.seed)
    sides: dict[str, Side] = {FROZEN: plain(clone(model), batch), PEFT: plain(peft(model, options.seed), batch)}
    pairs = []
    for kept, spec in KEPT.items():
        if options.smollm2 and kept == "SVD":  # decomposing all weights takes minutes
            continue
        side, policy = f"{kept} + quarantine", make_policy(model, spec, options.seed, folder)
        sides[side] = plain(policy, batch)
        pairs += [(side, PEFT)]
        for flag, mask in MASKS.items():
            sides[f"{side}, {flag}"] = routed(policy, batch, mask, options.seed)
            pairs += [(f"{side}, {flag}", side), (f"{side}, {flag}", PEFT)]
    pairs += [(PEFT, FROZEN)]
    shape = f"{model.config.num_hidden_layers} layers, d = {model.config.hidden_size}"
    head = f"{shape}, {b} rollouts of {s} tokens, rank {RANK} + {QUARANTINE_RANK}"
    return Benchmark(head, sides, pairs, memory=not options.smollm2)


def clone(model: Any) -> Any:
    """Return the decoder with its own modules and shared weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def make_policy(model: Any, spec: AdapterSpec, seed: int, cache: Path) -> Policy:
    """Return the decoder with this library's adapters."""
    model, generator = clone(model), torch.Generator().manual_seed(seed)
    count = len(LINEARS) * model.config.num_hidden_layers
    adapters = attach(model, "blocks.*.attn.*", "blocks.*.mlp.*", spec=spec, generator=generator, expect=count, cache_dir=cache)
    move([*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()], generator)
    return Policy(model, adapters, lambda model, tokens, _attention: forward(model, tokens))


def peft(model: Any, seed: int) -> nn.Module:
    """Return the decoder with PEFT's LoRA of the kept and the quarantine's rank together."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(clone(model), LoraConfig(r=RANK + QUARANTINE_RANK, target_modules=list(LINEARS)))
    move([p for p in model.parameters() if p.requires_grad], torch.Generator().manual_seed(seed))
    return model


def move(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Move parameters off their initial values: a factor of 0 would make gradients exactly 0."""
    with torch.no_grad():
        for p in parameters:
            p += 0.01 * torch.randn(p.shape, generator=generator).to(p)


def plain(side: nn.Module | Policy, batch: TrainBatch) -> Side:
    """Return a forward and backward of plain autograd; adapters of this library in ``side`` are not routed."""
    model: Any = side.model if isinstance(side, Policy) else side
    training: Callable[[], Any] = side.adapters.unrouted if isinstance(side, Policy) else nullcontext

    def step() -> None:
        with training():
            loss(forward(model, batch.rollouts.tokens), batch.rollouts, batch.demand("advantages")).backward()
        model.zero_grad(set_to_none=True)

    return step


def routed(policy: Policy, batch: TrainBatch, spec: MaskSpec, seed: int) -> Side:
    """Return a forward and backward under the mask route ``spec`` with random directions, as in training."""
    route = MaskRoute(spec, FixedDirections())
    route.directions = random_directions(policy.adapters, spec, seed)
    context = StepContext(torch.Generator().manual_seed(seed))

    def step() -> None:
        routing = route.begin(policy, batch, context)
        for part in routing.micro_batches:
            with policy.adapters.recording(part.tape):
                rollouts, advantages = part.batch.rollouts, part.advantages
                assert advantages is not None
                loss(policy.forward(policy.model, rollouts.tokens, rollouts.attention), rollouts, advantages).backward()
        routing.finish()
        policy.model.zero_grad(set_to_none=True)

    return step


def random_directions(adapters: Adapters, spec: MaskSpec, seed: int) -> Directions:
    """Return a random unit vector per site, in the space of the spec's features."""
    score: Any = spec.score
    generator = torch.Generator().manual_seed(seed)
    shapes = feature_shapes(adapters, score, adapters.coordinates() if score == "act" else {})
    vectors = units({site: torch.randn(shape, generator=generator) for site, shape in shapes.items()})
    return Directions(vectors, Provenance("haar", score, "none", adapters.base_hash, 0, seed))


def make_batch(vocab: int, b: int, s: int, seed: int) -> TrainBatch:
    """Return rollouts of full length, two per group, half of them rewarded; the first half of the tokens is the prompt."""
    tokens = torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(seed))
    groups, rewards = torch.arange(b) // 2, (torch.arange(b) % 2).float()
    rollouts = Rollouts(tokens, torch.ones(b, s, dtype=torch.bool), (torch.arange(s) >= s // 2).expand(b, s))
    return TrainBatch(rollouts, rewards, group_advantages(rewards, groups), groups, torch.zeros(b, dtype=torch.bool))


def forward(model: Any, tokens: Tensor) -> Tensor:
    """Return logits from embeddings that are a leaf, so that every backward reaches the bottom."""
    embedding = model.get_input_embeddings().weight
    return model(inputs_embeds=nn.functional.embedding(tokens, embedding).detach().requires_grad_()).logits


def loss(logits: Tensor, rollouts: Rollouts, advantages: Tensor) -> Tensor:
    """Return the policy-gradient loss of one batch."""
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, rollouts.tokens[:, 1:, None])[..., 0]
    return -(chosen * rollouts.completion[:, 1:] * advantages[:, None]).sum() / rollouts.tokens.numel()
