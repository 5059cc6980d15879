"""A tiny transformer in float64 with adapters, ragged rollouts, and a loss: what every theorem about routing needs."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import TrainBatch
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig

VOCAB = 13
SPECS = {
    "svd": AdapterSpec(kept="svd", quarantine_rank=3),
    "svd-low": AdapterSpec(kept="svd", rank=5, quarantine_rank=3),
    "lora": AdapterSpec(kept="lora", rank=4, quarantine_rank=3),
    "lora-shared": AdapterSpec(kept="lora", rank=4, quarantine="shared"),
    "svd-shared": AdapterSpec(kept="svd", quarantine="shared"),
}


def make_model(dtype: torch.dtype = torch.float64) -> MicroGPT:
    config = MicroConfig(vocab=VOCAB, d=16, layers=2, heads=2, mlp=40, context=24)
    return MicroGPT(config, torch.Generator().manual_seed(0)).to(dtype)


def make_policy(spec: AdapterSpec, *, scale: float = 0.1, dtype: torch.dtype = torch.float64, seed: int = 1) -> Policy:
    """Adapters with every parameter moved off its init by ``scale`` (0 leaves the init)."""
    model = make_model(dtype)
    generator = torch.Generator().manual_seed(seed)
    adapters = attach(model, "blocks.*", spec=spec, generator=generator, expect=12)
    with torch.no_grad():
        for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
            p += scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return Policy(model, adapters)


def named_policy(name: str, scale: float = 0.1) -> Policy:
    return make_policy(SPECS[name], scale=scale)


def make_rollouts(n: int = 6, seed: int = 2, left: bool = False) -> Rollouts:
    """Prompts of 4 tokens and completions of 3 to 9."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, VOCAB, (n, 4), generator=generator).tolist()
    lengths = torch.randint(3, 10, (n,), generator=generator).tolist()
    completions = [torch.randint(1, VOCAB, (k,), generator=generator).tolist() for k in lengths]
    rollouts = Rollouts.from_lists(prompts, completions, pad=0)
    if not left:
        return rollouts

    def turn(t: Tensor) -> Tensor:
        rows = zip(t, rollouts.attention.sum(1).tolist())
        return torch.stack([row.roll(t.shape[1] - int(k)) for row, k in rows])

    return Rollouts(turn(rollouts.tokens), turn(rollouts.attention), turn(rollouts.completion))


def make_batch(n: int = 6, seed: int = 2, left: bool = False) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed + 100)
    rewards = torch.randint(0, 5, (n,), generator=generator).double() / 4
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    return TrainBatch(make_rollouts(n, seed, left), rewards, advantages, torch.arange(n) // 2, torch.zeros(n, dtype=torch.bool))


def checkpoint_blocks(policy: Policy, reentrant: bool) -> None:
    """Run every block under a checkpoint of torch's."""
    policy.model.embed.requires_grad_(True)  # a reentrant one needs an input that requires grad
    for block in policy.model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=reentrant)


def policy_loss(policy: Policy, batch: TrainBatch, advantages: Tensor) -> Tensor:
    """``-sum_b A_b sum_t log p``, over one fixed denominator."""
    return -(advantages[:, None] * policy.logprobs(batch.rollouts)).sum() / 50


def per_rollout_gradients(policy: Policy, batch: TrainBatch) -> dict[str, Tensor]:
    """The oracle: plain autograd, one rollout at a time, ``[b, *shape]`` for each ``kept.`` or ``quarantine.`` parameter."""
    parameters = {f"kept.{n}": p for n, p in policy.adapters.kept_parameters().items()}
    parameters |= {f"quarantine.{n}": p for n, p in policy.adapters.quarantine_parameters().items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for b in range(len(batch.rollouts)):
        one = batch.rows(torch.tensor([b]))
        grads = torch.autograd.grad(policy_loss(policy, one, one.advantages), list(parameters.values()), allow_unused=True)
        for name, p, g in zip(parameters, parameters.values(), grads):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(r) for name, r in rows.items()}
