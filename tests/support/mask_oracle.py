"""A mask route by brute force from the written-out policy: features written down, flags, gradients.

It follows the definitions and takes no short cut: every feature is a tensor with one entry a token or rollout, cosines are taken of
those, and flags that depend on what is detached above are iterated from the top module down until nothing changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from sample import covering
from torch import Tensor
from written_out import WrittenOut, written_out

from mi_route2.rollouts import Policy
from mi_route2.routing import Directions, EraseRoute, EraseSpec, MaskRoute, MaskSpec, Privileged, RouteSpec, StepContext, TrainBatch
from mi_route2.routing.directions import Provenance
from mi_route2.routing.routes import Decision, Route
from mi_route2.specs import LEGAL

CASES = [(*key, through) for key, allowed in LEGAL.items() if key[0] != "judge" for through in sorted(allowed)]
"""Every legal (score, unit, score_policy, through) but those of a judge, whose scores come with the step."""

METHODS = [case for case in CASES if case[0] in ("act", "grad", "full")]

SAMPLE = [CASES[i] for i in sorted(covering(CASES))]
"""Cases that have every pair of settings that any case has: for theorems beside the one that runs them all."""

METHOD_SAMPLE = [METHODS[i] for i in sorted(covering(METHODS))]


Case = tuple[str, str, str, str]


def case_id(case: tuple[str, ...]) -> str:
    return "-".join(case)


def spec_of(case: Case, **changes: object) -> MaskSpec:
    score, unit, policy, through = case
    return MaskSpec(score=score, unit=unit, score_policy=policy, through=through, **changes)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class FixedFitter:
    """Directions drawn once: theorems about routing hold for any direction."""

    directions: Directions
    refreshes: bool = False

    def fit(self, policy: Policy, step: int) -> Directions:
        return self.directions


def random_directions(policy: Policy, kind: str, seed: int = 5) -> Directions:
    """A random unit vector in each site's space of ``kind`` features."""
    generator = torch.Generator().manual_seed(seed)
    basis, vectors = policy.adapters.coordinates() if kind == "act" else {}, {}
    for site, module in policy.adapters.sites.items():
        shape = {"grad": policy.adapters.scored(site).shape, "full": module.weight.shape}.get(kind) or basis[site].shape[:1]
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        vectors[site] = (draw / draw.norm()).to(module.weight.device, policy.adapters.scored(site).dtype)
    return Directions(vectors, Provenance("random", kind, "none", policy.adapters.base_hash, 0, seed))  # pyright: ignore[reportArgumentType]


def mask_route(policy: Policy, spec: MaskSpec, **options: object) -> MaskRoute:
    """The route on random directions, refreshed once."""
    fitter = FixedFitter(random_directions(policy, spec.score)) if spec.needs_direction else None
    route = MaskRoute(spec, fitter, **options)  # pyright: ignore[reportArgumentType]
    route.refresh(policy, 0)
    return route


def frame(k: int, d: int, seed: int) -> Tensor:
    """``k`` orthonormal rows ``[k d]``."""
    draw = torch.randn(d, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draw).Q.mT.contiguous()


def axes(policy: Policy, k: int) -> Directions:
    """Random orthonormal axes in the space of each scored factor."""
    flat = random_directions(policy, "grad")
    vectors = {s: frame(k, v.numel(), i).view(k, *v.shape).to(v) for i, (s, v) in enumerate(flat.vectors.items())}
    return replace(flat, vectors=vectors)


def erase_route(policy: Policy, dispose: str = "drop", k: int = 1) -> EraseRoute:
    """An erase route on random axes, refreshed once."""
    route = EraseRoute(EraseSpec(dispose=dispose), FixedFitter(axes(policy, k)))  # pyright: ignore[reportArgumentType]
    route.refresh(policy, 0)
    return route


def some_channels(n: int) -> Privileged:
    """Verdicts for a bound: own channel on about half of the rollouts, the known one on some of those."""
    own = torch.arange(n) % 2 == 0
    return Privileged(own, own & (torch.arange(n) % 3 != 0))


@dataclass(frozen=True)
class Run:
    kept: dict[str, Tensor]
    quarantine: dict[str, Tensor]
    decision: Decision


def plain_loss(policy: Policy, batch: TrainBatch, advantages: Tensor) -> Tensor:
    return -(advantages[:, None] * policy.logprobs(batch.rollouts)).sum() / 50


def context(spec: RouteSpec, n: int, micro: int | None = None, seed: int = 3, device: str = "cpu") -> StepContext:
    verdicts = None
    if spec.privileged:
        channels = some_channels(n)
        verdicts = Privileged(channels.own_channel.to(device), channels.known_channel.to(device))
    return StepContext(torch.Generator().manual_seed(seed), micro, verdicts)


def run(
    policy: Policy, route: Route, batch: TrainBatch, micro: int | None = None, seed: int = 3, scores: Tensor | None = None
) -> Run:
    """One step under the route from cleared gradients; copies of what is in ``.grad`` afterwards (0 where nothing arrived)."""
    adapters = policy.adapters
    policy.model.zero_grad(set_to_none=True)
    told = replace(context(route.spec, len(batch.rollouts), micro, seed, str(batch.advantages.device)), scores=scores)
    step = route.begin(policy, batch, told)
    for micro_batch in step.micro_batches:
        with adapters.recording(micro_batch.tape):
            plain_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
    decision = step.finish()

    def grads(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters.items()}

    return Run(grads(adapters.kept_parameters()), grads(adapters.quarantine_parameters()), decision)


def assert_same(own: Mapping[str, Tensor], oracle: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    """Equal to ``tolerance`` of each tensor's largest entry. Gradients here are 1e-5 to 1e-2, so this is under 1e-12 outright."""
    assert own.keys() == oracle.keys()
    for name, expected in oracle.items():
        gap, size = float((own[name] - expected).abs().max()), float(expected.abs().max())
        assert gap <= tolerance * size + 1e-16, f"{name}: off by {gap:.1e} where the largest is {size:.1e}"


def assert_same_gradients(own: Run, oracle: "Run | Oracle") -> None:
    """``assert_same`` of both adapters."""
    assert_same(own.kept, oracle.kept)
    assert_same(own.quarantine, oracle.quarantine)


def unit_cosine(features: Tensor, v: Tensor) -> Tensor:
    """Cosine of each row with ``v``; 0 for a row that is 0."""
    inner, size = (features * v).flatten(1).sum(1), features.flatten(1).norm(dim=1) * v.norm()
    return torch.where(size > 0, inner / size.clamp_min(1e-300), 0.0)


def _scores(policy: Policy, spec: MaskSpec, directions: Directions, batch: TrainBatch, written: WrittenOut) -> dict[str, Tensor]:
    """``[b]`` a site, or ``[b, s]`` for token flags."""
    predictors, basis, out = batch.rollouts.predictors, policy.adapters.coordinates(), {}
    for site, v in directions.vectors.items():
        if spec.score == "act":
            a = written.inputs[site] @ basis[site].T
            if spec.unit == "token":
                out[site] = unit_cosine(a.flatten(0, 1), v).view(predictors.shape)
            else:
                mean = torch.stack([row[real].mean(0) for row, real in zip(a, predictors)])
                out[site] = unit_cosine(mean, v)
            continue
        scored = policy.adapters.sites[site].kept.scored
        name = f"kept.{site}.{scored}" if spec.score == "grad" else f"W.{site}"
        out[site] = unit_cosine(written.gradients[name].sum(1), v)
    if spec.unit == "pooled":
        mean = torch.stack(list(out.values())).mean(0)
        out = dict.fromkeys(out, mean)
    return out


def _flags(spec: MaskSpec, scores: Mapping[str, Tensor], batch: TrainBatch) -> dict[str, Tensor]:
    """``[b, s]`` a site."""
    shape, reinforced, out = batch.rollouts.tokens.shape, batch.advantages > 0, {}
    for site, score in scores.items():
        over = score > spec.tau
        over = over & batch.rollouts.attention if over.ndim == 2 else over[:, None].expand(shape)
        out[site] = over & reinforced[:, None] if spec.reinforced_only else over
    return out


@dataclass(frozen=True)
class Oracle:
    flags: dict[str, Tensor]
    scores: dict[str, Tensor]
    kept: dict[str, Tensor]
    quarantine: dict[str, Tensor]


def unflagged_advantages(batch: TrainBatch, flags: Tensor) -> Tensor:
    """``R - mean(R over the unflagged of the group)``, 0 for the flagged, rollout by rollout."""
    out = torch.zeros_like(batch.advantages)
    for b in range(len(out)):
        group = [c for c in range(len(out)) if batch.groups[c] == batch.groups[b] and not flags[c]]
        if not flags[b]:
            out[b] = batch.rewards[b] - sum(batch.rewards[c] for c in group) / len(group)
    return out


def oracle(policy: Policy, spec: MaskSpec, directions: Directions | None, batch: TrainBatch) -> Oracle:
    """Flags and gradients by the definitions. Shuffled flags are not its business."""
    sites, shape = list(policy.adapters.sites), batch.rollouts.tokens.shape

    def ours(advantages: Tensor, cut: Mapping[str, Tensor] | None, features: bool = False) -> WrittenOut:
        return written_out(policy, batch.rollouts, lambda lp: -(advantages[:, None] * lp).sum() / 50, cut=cut, features=features)

    flags = {site: torch.zeros(shape, dtype=torch.bool) for site in sites}
    scores: dict[str, Tensor] = {}
    detach = spec.through == "detach"
    if spec.privileged:
        channels = some_channels(shape[0])
        fired = channels.own_channel if spec.score == "own_channel" else channels.known_channel
        scores = {site: torch.where(fired, spec.tau + 1.0, spec.tau - 1.0) for site in sites}
        flags = _flags(spec, scores, batch)
    elif directions is not None:
        for _ in range(len(sites) + 1):  # each pass settles one more module from the top
            if spec.score_policy == "live":
                features = ours(batch.advantages, flags if detach else None, features=True)
            else:
                features = written_out(policy, batch.rollouts, lambda lp: -lp.sum(), quarantine=False)
            scores = _scores(policy, spec, directions, batch, features)
            before, flags = flags, _flags(spec, scores, batch)
            if all(torch.equal(before[site], flags[site]) for site in sites):
                break
    cut = flags if detach else None
    own = ours(batch.advantages, cut)
    learnt, advantages = own, batch.advantages
    if spec.kept_advantage == "unflagged":
        advantages = unflagged_advantages(batch, flags[sites[0]][:, 0])
        learnt = ours(advantages, cut)
    scale = torch.where(advantages < 0, torch.tensor(spec.negative_scale, dtype=torch.float64), 1.0)
    kept = {}
    for name, gradient in learnt.gradients.items():
        adapter, _, rest = name.partition(".")
        if adapter == "kept":
            weights = scale[:, None] * ~flags[rest.rpartition(".")[0]]
            kept[rest] = torch.einsum("bs,bs...->...", weights, gradient)
    return Oracle(flags, scores, kept, own.summed("quarantine"))
