"""Canary routes: flags from a model that was left to learn the hack first, without a label and without a pair.

    r_k(b,t) = log p_k(x_t) - log p_0(x_t)               log-ratio of canary k to the base at a completion token of rollout b
    s_k(b)   = mean of the ``top`` largest r_k(b, .)     a hack is few tokens
    z_k(b)   = (s_k(b) - median_k) / (1.4826 MAD_k)      median and MAD of s_k over samples of the base itself
    score_b  = max_k z_k(b)
    flag_b   = score_b > q-quantile of the score over the same samples, and A_b > 0 if ``reinforced_only``

With ``nats`` the score is not standardized, ``max_k s_k(b)``, and its threshold is this number. A quantile must flag more of the
base's samples than hack; what a canary adds to a hack in nats, and to honest rollouts, depends less on how often the base hacks.

A canary is an adapter that was trained with the same reward and no defence, and is thrown away. What it has learned to do and the
base does not do is mostly the hack, if hacking pays first; several checkpoints together see hacks that a canary gives up later.
The samples need no label: a fraction ``1 - q`` of the base's own rollouts is flagged, whatever they are.

    canary = Canary.from_pretrained(copy.deepcopy(model), folders)
    route = CanaryRoute(CanarySpec(), canary, samples_of_the_base)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mi_route2.adapters import from_pretrained, load_adapters
from mi_route2.adapters.io import TENSORS
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts, TrainBatch, still
from mi_route2.routing.directions import Directions
from mi_route2.routing.mask import MaskRoute, shuffled
from mi_route2.routing.routes import Decision, MicroBatch, OneCall, Reduce, RouteStep, StepContext, check_step, pieces
from mi_route2.specs import CanarySpec

Ratios = Callable[[Rollouts], Float[Tensor, "k b s"]]
"""Function from rollouts to log-ratios per canary and predictor; a monitor of your own may stand in for it."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
FEW = 64
"""Samples of the base that a canary with a threshold in nats must tell apart."""
LEAST = 1e-5
"""Nats by which a canary must tell the base's samples apart; below are rounding errors of float32."""


class Canary:
    """Checkpoints of adapters that were trained without a defence, on a base model of their own.

    Args:
        policy: The canary's base with adapters attached. It must not be the policy that is trained, because checkpoints are copied
            into its adapters; it may be another, smaller model that reads the same tokens.
        checkpoints: One mapping per checkpoint, with names as in ``adapters.tensors(quarantine=False)``.

    Raises:
        ValueError: There is no checkpoint, or its tensors are not those of the adapters.

    Examples:
        >>> canary = Canary(policy, [read_tensors(folder / "deployed.safetensors")[0] for folder in folders])
        >>> canary(rollouts).shape
        torch.Size([3, 96, 60])
    """

    @checked
    def __init__(self, policy: Policy, checkpoints: Sequence[Mapping[str, Tensor]]):
        current = policy.adapters.tensors(quarantine=False)
        if not checkpoints:
            raise ValueError("a canary needs at least one checkpoint of its kept adapter")
        for number, checkpoint in enumerate(checkpoints):
            if wrong := sorted(checkpoint.keys() ^ current.keys()):
                raise ValueError(
                    f"checkpoint {number} and the canary's adapters differ in {len(wrong)} tensors, first {wrong[0]!r}: attach "
                    "adapters of the spec and at the sites that the canary was trained with"
                )
            for name, tensor in checkpoint.items():
                if tensor.shape != current[name].shape or not torch.isfinite(tensor).all():
                    raise ValueError(
                        f"{name} of checkpoint {number} is {list(tensor.shape)} with {int((~tensor.isfinite()).sum())} values that "
                        f"are not finite, and the canary's adapter is {list(current[name].shape)}: give the file that its run saved"
                    )
                if tensor.untyped_storage().data_ptr() == current[name].untyped_storage().data_ptr():
                    raise ValueError(
                        f"{name} of checkpoint {number} is the canary's own parameter, into which every checkpoint is copied: give "
                        "copies, as {name: tensor.clone() for name, tensor in adapters.tensors(quarantine=False).items()}"
                    )
        self.policy = policy
        # copies, because they may be parameters that train on
        self._checkpoints = [{name: t.detach().clone() for name, t in checkpoint.items()} for checkpoint in checkpoints]

    @staticmethod
    @checked
    def from_pretrained(model: nn.Module, folders: Sequence[Path | str]) -> "Canary":
        """Return the canary whose checkpoints are adapter folders that ``save_pretrained`` wrote.

        Args:
            model: The canary's base, without adapters; a copy of the model that is trained, or another one.
            folders: One folder per checkpoint.

        Raises:
            ValueError: There is no folder, or one belongs to another base or to adapters of another spec.
            FileNotFoundError: A folder or a file in it does not exist.

        Examples:
            >>> canary = Canary.from_pretrained(copy.deepcopy(model), ["canary/step-20", "canary/step-40"])
        """
        if isinstance(folders, str):
            raise TypeError(f"folders is the text {folders!r:.60}: give a list, as [{folders!r:.60}]")
        if not folders:
            raise ValueError("a canary needs at least one checkpoint of its kept adapter: give its folder")
        adapters = from_pretrained(model, folders[0])
        checkpoints = []
        for folder in folders:
            load_adapters(adapters, Path(folder) / TENSORS)
            checkpoints.append({name: tensor.clone() for name, tensor in adapters.tensors(quarantine=False).items()})
        return Canary(Policy(model, adapters), checkpoints)

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "k b s"]:
        adapters, device, rollouts = self.policy.adapters, rollouts.tokens.device, rollouts.to(self.policy.device)
        with still(self.policy.model):
            with adapters.reference():
                base = self.policy.logprobs(rollouts)
            ratios = []
            for checkpoint in self._checkpoints:
                for name, tensor in adapters.tensors(quarantine=False).items():
                    tensor.copy_(checkpoint[name])
                with adapters.deployed():
                    ratios.append(self.policy.logprobs(rollouts) - base)
        return torch.stack(ratios).to(device)


@dataclass(frozen=True)
class CanaryMonitor:
    """Calibrated canary: a function from rollouts to scores, and the threshold above which a score is a flag."""

    ratios: Ratios
    top: int | None
    center: Float[Tensor, " k"] | None
    spread: Float[Tensor, " k"] | None
    threshold: float
    """In standard deviations of the base's samples, or in nats if there are no ``center`` and ``spread``."""

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, " b"]:
        """Return the score of each rollout."""
        means = pooled(self.ratios, rollouts, self.top)
        return means.amax(0) if self.center is None or self.spread is None else standardized(means, self.center, self.spread)


def standardized(values: Float[Tensor, "k b"], center: Float[Tensor, " k"], spread: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """Return the largest robust z-score over canaries."""
    return ((values - center[:, None]) / spread[:, None]).amax(0)


def pooled(ratios: Ratios, rollouts: Rollouts, top: int | None) -> Float[Tensor, "k b"]:
    """Return the mean of the ``top`` largest log-ratios of each rollout (``None``: of all), in float64.

    Raises:
        ValueError: The canary does not return one finite number per canary, rollout and predictor.
    """
    nats, predictors = ratios(rollouts), rollouts.predictors
    if not isinstance(nats, Tensor) or nats.ndim != 3 or nats.shape[1:] != predictors.shape or not len(nats):
        raise ValueError(
            f"the canary returned {list(nats.shape) if isinstance(nats, Tensor) else type(nats).__name__} for tokens "
            f"{list(predictors.shape)}: return log-ratios [k b s], k canaries"
        )
    if not torch.isfinite(nats[:, predictors]).all():
        raise ValueError("the canary returned NaN or infinity: it gives no probability to a token, so it cannot judge the rollout")
    outside = torch.full((), -torch.inf, dtype=torch.float64, device=nats.device)
    largest = torch.where(predictors, nats.double(), outside).sort(dim=2, descending=True).values
    counted = predictors.sum(1).clamp_max(nats.shape[2] if top is None else top)
    chosen = torch.arange(nats.shape[2], device=nats.device) < counted[:, None]
    return torch.where(chosen, largest, torch.zeros_like(largest)).sum(2) / counted.clamp_min(1)


def _pooled(ratios: Ratios, rollouts: Rollouts, top: int | None, micro: int | None) -> Float[Tensor, "k b"]:
    """Return ``pooled`` over micro-batches."""
    rows = torch.arange(len(rollouts)).split(micro or len(rollouts))
    return torch.cat([pooled(ratios, rollouts.rows(index), top) for index in rows], dim=1)


def _demand_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, or None for all, not {size}")


@checked
def calibrate(
    ratios: Ratios, samples: Rollouts, quantile: float, top: int | None = 3, micro: int | None = None, nats: float | None = None
) -> CanaryMonitor:
    """Return the monitor of a canary, calibrated on samples of the base model.

    Args:
        ratios: The canary.
        samples: Rollouts that the base model itself sampled, on training prompts; they need no label.
        quantile: Share of them below the threshold, between 0 and 1.
        top: Number of a rollout's largest log-ratios that are averaged; ``None`` for all.
        micro: Rollouts that are scored at one time; all if not given.
        nats: The threshold, in place of one from the quantile; then a few samples show that the canary has learned something.

    Raises:
        ValueError: A quantile that is no share, too few samples for it, a size below 1, or a canary that cannot tell one sample
            from another.
    """
    _demand_sizes(top=top, micro=micro)
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be between 0 and 1, not {quantile}")
    if nats is not None and not 0 < nats < math.inf:
        raise ValueError(f"nats must be a number above 0, not {nats}")
    if (least := math.ceil(1 / min(quantile, 1 - quantile) - 1e-9)) > len(samples):
        raise ValueError(f"{len(samples)} samples do not have a quantile {quantile}: give at least {least} samples of the base")
    pooled = _pooled(ratios, samples if nats is None else samples.rows(torch.arange(min(len(samples), FEW))), top, micro)
    center = pooled.quantile(0.5, dim=1)
    spread = NORMAL * (pooled - center[:, None]).abs().quantile(0.5, dim=1)
    if bool((spread < LEAST).any()):
        raise ValueError(
            f"canary {int((spread < LEAST).nonzero()[0])} gives the base's samples one and the same log-ratio: it has learned "
            "nothing, so train it longer, or leave it out"
        )
    if nats is not None:
        return CanaryMonitor(ratios, top, None, None, nats)
    scores = standardized(pooled, center, spread)
    return CanaryMonitor(ratios, top, center, spread, float(scores.quantile(quantile)))


class _CanaryStep:
    """Step of the mask route under the canary's flags, with its scores in the decision."""

    def __init__(self, step: RouteStep, scores: Float[Tensor, " b"]):
        self._step, self._scores, self.micro_batches = step, scores, step.micro_batches

    def settle(self, micro_batch: MicroBatch) -> None:
        self._step.settle(micro_batch)

    def finish(self, reduce: Reduce | None = None) -> Decision:
        return replace(self._step.finish(reduce), scores=self._scores)


@checked
class CanaryRoute(OneCall):
    """Route by a canary; see the module's equations.

    Args:
        spec: The rule.
        ratios: The canary.
        samples: Rollouts of the base model, from which the threshold is computed.
        micro: Rollouts that are scored at one time during calibration; all if not given.

    Raises:
        ValueError: ``refresh`` raises those of `calibrate`.

    Examples:
        >>> route = CanaryRoute(CanarySpec(), canary, samples)
        >>> overlap = route.refresh(policy, step=0)
        >>> decision = route.backward(policy, batch, loss_fn)
    """

    def __init__(self, spec: CanarySpec, ratios: Ratios, samples: Rollouts, *, micro: int | None = None):
        _demand_sizes(micro=micro)
        self.spec, self._ratios, self._samples, self._micro = spec, ratios, samples, micro
        self.directions: Directions | None = None
        self.monitor: CanaryMonitor | None = None

    @checked
    def refresh(self, policy: Policy, step: int) -> float | None:
        """Calibrate at the first call; a canary has no directions, so there is no overlap."""
        if isinstance(self._ratios, Canary) and self._ratios.policy.adapters is policy.adapters:
            raise ValueError("the canary's checkpoints would overwrite the trained adapters: give it a model of its own")
        if self.monitor is None:
            spec, samples = self.spec, self._samples.to(policy.device)
            self.monitor = calibrate(self._ratios, samples, spec.quantile, spec.top, self._micro, spec.nats)
        return None

    @checked
    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        spec = self.spec
        if self.monitor is None:
            raise RuntimeError("the canary is not calibrated yet: call route.refresh(policy, step) before each step")
        scores = torch.cat([self.monitor(piece.rollouts) for piece in pieces(batch, context.micro)])
        flags = (scores > self.monitor.threshold).to(batch.rollouts.tokens.device)
        if spec.reinforced_only and batch.advantages is not None:
            flags &= batch.advantages > 0
        if spec.shuffle:
            flags = shuffled(flags, context.generator)
        route = MaskRoute.from_flags(
            flags, through=spec.through, kept_advantage=spec.kept_advantage, negative_scale=spec.negative_scale
        )
        return _CanaryStep(route.begin(policy, batch, context), scores)

    @checked
    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        return None if self.monitor is None else self.monitor(rollouts)

    def inputs(self) -> dict[str, Tensor]:
        """Return what a threshold comes of, the same on each process of a run: the samples, and a canary's checkpoints."""
        samples, state = self._samples, {}
        if isinstance(self._ratios, Canary):
            state = {f"{i}.{name}": t for i, each in enumerate(self._ratios._checkpoints) for name, t in each.items()}
        return state | {"tokens": samples.tokens, "attention": samples.attention, "completion": samples.completion}
