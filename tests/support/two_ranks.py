"""Two ranks of a data-parallel step, for tests/mi_route2/routing/test_distributed.py: a half of the batch each.

two_ranks.py OUT      writes OUT/rank-<r>.safetensors: every case's gradients after finish(reduce=...)
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mask_oracle import plain_loss
from safetensors.torch import save_file
from tiny_policy import SPECS, make_batch, make_policy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec, Route, StepContext, TrainBatch
from mi_route2.routing.routes import sum_over_ranks

HALVES = (torch.arange(0, 3), torch.arange(3, 8))
"""Unequal on purpose: a mean over ranks would be wrong."""


def cases(policy: Policy) -> dict[str, Route]:
    """The routes of every case, by name."""
    from mask_oracle import FixedFitter, mask_route, random_directions

    from mi_route2.routing import Directions, EraseRoute, EraseSpec, OpenRoute, OpenSpec

    out: dict[str, Route] = {"open": OpenRoute(OpenSpec())}
    for score in ("act", "grad", "full"):
        for score_policy in ("live", "ablated"):
            spec = MaskSpec(score=score, score_policy=score_policy, negative_scale=0.3)  # pyright: ignore[reportArgumentType]
            out[f"{score}-{score_policy}"] = mask_route(policy, spec)
    out["grad-rollout"] = mask_route(policy, MaskSpec(score="grad", unit="rollout", through="detach"))
    flat = random_directions(policy, "grad")
    stacked = Directions({site: v[None] for site, v in flat.vectors.items()}, flat.provenance)
    dispose = "quarantine" if policy.adapters.spec.quarantine == "shared" else "drop"
    out["erase"] = EraseRoute(EraseSpec(dispose=dispose), FixedFitter(stacked))
    for route in out.values():
        route.refresh(policy, 0)
    return out


def grads(policy: Policy) -> dict[str, Tensor]:
    named = {f"kept.{n}": p for n, p in policy.adapters.kept_parameters().items()}
    named |= {f"quarantine.{n}": p for n, p in policy.adapters.quarantine_parameters().items()}
    return {n: p.grad.clone() for n, p in named.items() if p.grad is not None and p.grad.any()}


def routed(policy: Policy, route: Route, batch: TrainBatch, reduced: bool, micro: int | None = 2) -> dict[str, Tensor]:
    """One step; gradients by name."""
    policy.model.zero_grad(set_to_none=True)
    step = route.begin(policy, batch, StepContext(torch.Generator().manual_seed(0), micro=micro))
    for micro_batch in step.micro_batches:
        with policy.adapters.recording(micro_batch.tape):
            plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
    step.finish(sum_over_ranks if reduced else None)
    return grads(policy)


def under_ddp(policy: Policy, route: Route, batch: TrainBatch, world: int) -> dict[str, Tensor]:
    """One step through DDP's own reducer, which takes the mean over ranks: the loss is scaled by their number."""
    policy.model.zero_grad(set_to_none=True)
    wrapped = Policy(DistributedDataParallel(policy.model), policy.adapters)  # pyright: ignore[reportArgumentType]
    step = route.begin(policy, batch, StepContext(torch.Generator().manual_seed(0)))
    (micro_batch,) = step.micro_batches
    with policy.adapters.recording(micro_batch.tape):
        (world * plain_loss(wrapped, micro_batch.batch, micro_batch.advantages)).backward()
    step.finish()
    return grads(policy)


def sharded(policy: Policy) -> Policy:
    """Shard the base over the ranks, block by block, and leave the adapters whole."""
    whole = {*policy.adapters.kept_parameters().values(), *policy.adapters.quarantine_parameters().values()}
    for module in (*policy.model.get_submodule("blocks"), policy.model):  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(module, ignored_params=whole)
    return policy


def main(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=len(HALVES))
    results = {}
    for name in ("svd", "lora-shared"):
        policy = make_policy(SPECS[name])
        half = make_batch(8).rows(HALVES[rank])
        for case, route in cases(policy).items():
            for key, g in routed(policy, route, half, reduced=True).items():
                results[f"{name}/{case}/{key}"] = g
            if case.endswith("-rollout"):
                for key, g in under_ddp(policy, route, half, dist.get_world_size()).items():
                    results[f"{name}/{case}-ddp/{key}"] = g
        policy = sharded(make_policy(SPECS[name]))
        for case, route in cases(policy).items():
            # one forward each, because a forward gathers weights from all ranks
            for key, g in routed(policy, route, half, reduced=True, micro=None).items():
                results[f"{name}/{case}-fsdp/{key}"] = g
    save_file({n: t.contiguous() for n, t in results.items()}, out / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(main, (Path(sys.argv[1]),), len(HALVES), start_method="fork")  # each would import for seconds
