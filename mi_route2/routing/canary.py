"""Canary routes: flags from a model that was left to learn the hack first, without a label and without a pair.

    r_k(b,t) = log p_k(x_t) - log p_0(x_t)               log-ratio of canary k to the base at a completion token of rollout b
    s_k(b)   = mean of the ``top`` largest r_k(b, .)     a hack is few tokens
    z_k(b)   = (s_k(b) - median_k) / (1.4826 MAD_k)      median and MAD of s_k over samples of the base itself
    score_b  = max_k z_k(b)
    flag_b   = score_b > q-quantile of the score over the same samples, and A_b > 0 if ``reinforced_only``

With ``nats`` the score is not standardized, ``max_k s_k(b)``, and its threshold is this number. A quantile must flag more of the
base's samples than hack; what a canary adds to a hack in nats, and to honest rollouts, depends less on how often the base hacks.

With ``relative_to="run"`` a canary is compared with the policy that is trained, its quarantine deleted, in place of the base:

    r_k(b,t) = log p_k(x_t) - log p_0(x_t) - (log p_run(x_t) - log p_run0(x_t))       run0: the base of the run, usually 0 itself

Median, MAD and threshold are those at the start, where the run is its base. Honest skill that run and canary both gain then raises
no score, so a lower quantile, for a base that hacks often, does not drop honest rollouts for long.

The canary can be the run's own quarantine. With ``first`` it learns alone in the first steps, from what is sampled with it, and is
frozen then: the rest is sampled without it, and the kept adapter alone learns from that, but for the flagged. With ``decoys`` both
learn all along, the quarantine from a share of the groups, the decoys, and the kept adapter from the others:

    r_k(b,t) = log p_{run + q_k}(x_t) - log p_run(x_t)    q_k: the quarantine now, and as it was after the steps ``snapshots``

A quarantine that learns first and alone may be kept from what the base can do already, its honest skill, by the base's surprisal:

    u(b)     = mean of the ``top`` largest -log p_0(x_t) of rollout b
    A_b      = 0 in the ``first`` steps if A_b > 0 and u(b) <= ``surprisal``-quantile of u over samples of the base

A canary is an adapter that was trained with the same reward and no defence, and is thrown away. What it has learned to do and the
base does not do is mostly the hack, if hacking pays first; several checkpoints together see hacks that a canary gives up later.
The samples need no label: a fraction ``1 - q`` of the base's own rollouts is flagged, whatever they are.

    canary = Canary.from_pretrained(copy.deepcopy(model), folders)
    route = CanaryRoute(CanarySpec(), canary, samples_of_the_base)
    rule = CanarySpec(quantile=0.85, first=30, surprisal=0.5, snapshots=(10, 20))
    of_itself = CanaryRoute(rule, None, samples_of_the_base)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mi_route2.adapters import Adapters, from_pretrained, load_adapters
from mi_route2.adapters.io import TENSORS
from mi_route2.adapters.weights import sharded_modules
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
        adapters, given, rollouts = self.policy.adapters, rollouts.tokens.device, rollouts.to(self.policy.device)
        with still(self.policy.model):
            with adapters.reference():
                base = self.policy.logprobs(rollouts)
            ratios = []
            for checkpoint in self._checkpoints:
                for name, tensor in adapters.tensors(quarantine=False).items():
                    tensor.copy_(checkpoint[name])
                with adapters.deployed():
                    ratios.append(self.policy.logprobs(rollouts) - base)
        return torch.stack(ratios).to(given)


@torch.no_grad()
def drift(policy: Policy, rollouts: Rollouts) -> Float[Tensor, "b s"]:
    """Return the log-ratio of ``policy`` without its quarantine to its base."""
    with still(policy.model):
        # not ``policy.logprobs``, which may be at the temperature of a trainer, as a canary's are not
        with policy.adapters.deployed():
            deployed = rollouts.logprobs(policy.logits(rollouts))
        with policy.adapters.reference():
            return deployed - rollouts.logprobs(policy.logits(rollouts))


def surprisal(policy: Policy) -> Ratios:
    """Return a function that computes each token's surprisal ``-log p_0`` under the policy's base, in the form of one canary.

    Examples:
        >>> route = CanaryRoute(CanarySpec(), surprisal(policy), samples)  # a control: no canary, only what is rare is flagged
    """

    @torch.no_grad()
    def ratios(rollouts: Rollouts) -> Float[Tensor, "k b s"]:
        with still(policy.model), policy.adapters.reference():
            return -policy.logprobs(rollouts)[None]

    return ratios


def quarantine_ratios(
    policy: Policy, snapshots: Sequence[Mapping[str, Tensor]] = (), turns: Mapping[str, Tensor] | None = None
) -> Ratios:
    """Return the log-ratio of ``policy`` with its quarantine to the same without it: the run's own quarantine as its canary.

    Args:
        policy: The policy.
        snapshots: The quarantine as it was before, by parameter; each is one more canary, before the quarantine of now.
        turns: Control: orthogonal matrices by parameter, by which each quarantine is multiplied.

    Raises:
        ValueError: The policy has no quarantine.
    """
    if not policy.adapters.has_quarantine:
        raise ValueError("the run's own quarantine can only be its canary if it has one: attach with quarantine='lora'")
    parameters, turned = policy.adapters.quarantine_parameters(), turns or {}
    others = bool(snapshots or turned)  # else nothing is written: a graph may hold the parameters

    @torch.no_grad()
    def ratios(rollouts: Rollouts) -> Float[Tensor, "k b s"]:
        now = {name: p.clone() for name, p in parameters.items()}
        log_ratios = []
        with still(policy.model):
            with policy.adapters.deployed():
                deployed = policy.logprobs(rollouts)
            try:
                for quarantine in (*snapshots, now):
                    if others:
                        _write(parameters, {name: turned[name] @ t if name in turned else t for name, t in quarantine.items()})
                    with policy.adapters.full():
                        log_ratios.append(policy.logprobs(rollouts) - deployed)
            finally:
                if others:
                    _write(parameters, now)
        return torch.stack(log_ratios)

    return ratios


@torch.no_grad()
def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


@dataclass(frozen=True)
class CanaryMonitor:
    """Calibrated canary: a function from rollouts to scores, and the threshold above which a score is a flag."""

    ratios: Ratios
    top: int | None
    center: Float[Tensor, " k"] | None
    spread: Float[Tensor, " k"] | None
    threshold: float
    """In standard deviations of the base's samples, or in nats if there are no ``center`` and ``spread``."""

    def __call__(self, rollouts: Rollouts, less: Float[Tensor, "b s"] | None = None) -> Float[Tensor, " b"]:
        """Return the score of each rollout; ``less`` is subtracted from every canary's log-ratios."""
        ratios = self.ratios if less is None else lambda of: self.ratios(of) - less
        means = pooled(ratios, rollouts, self.top)
        return means.amax(0) if self.center is None or self.spread is None else standardized(means, self.center, self.spread)


def standardized(values: Float[Tensor, "k b"], center: Float[Tensor, " k"], spread: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """Return the largest robust z-score over canaries."""
    return ((values - center[:, None]) / spread[:, None]).amax(0)


def pooled(ratios: Ratios, rollouts: Rollouts, top: int | None) -> Float[Tensor, "k b"]:
    """Return the mean of the ``top`` largest log-ratios of each rollout (``None``: of all), in float64.

    Raises:
        ValueError: The canary does not return one finite number per canary, rollout and predictor.
    """
    given, predictors = ratios(rollouts), rollouts.predictors
    if not isinstance(given, Tensor) or given.ndim != 3 or given.shape[1:] != predictors.shape or not len(given):
        raise ValueError(
            f"the canary returned {list(given.shape) if isinstance(given, Tensor) else type(given).__name__} for tokens "
            f"{list(predictors.shape)}: return log-ratios [k b s], k canaries"
        )
    if not torch.isfinite(given[:, predictors]).all():
        raise ValueError("the canary returned NaN or infinity: it gives no probability to a token, so it cannot judge the rollout")
    outside = torch.full((), -torch.inf, dtype=torch.float64, device=given.device)
    largest = torch.where(predictors, given.double(), outside).sort(dim=2, descending=True).values
    counted = predictors.sum(1).clamp_max(given.shape[2] if top is None else top)
    chosen = torch.arange(given.shape[2], device=given.device) < counted[:, None]
    return torch.where(chosen, largest, torch.zeros_like(largest)).sum(2) / counted.clamp_min(1)


def _pooled(ratios: Ratios, rollouts: Rollouts, top: int | None, micro: int | None) -> Float[Tensor, "k b"]:
    """Return ``pooled`` over micro-batches."""
    rows = torch.arange(len(rollouts)).split(micro or len(rollouts))
    return torch.cat([pooled(ratios, rollouts.rows(index), top) for index in rows], dim=1)


def _demand_enough(samples: Rollouts, quantile: float) -> None:
    if (least := math.ceil(1 / min(quantile, 1 - quantile) - 1e-9)) > len(samples):
        raise ValueError(f"{len(samples)} samples do not have a quantile {quantile}: give at least {least} samples of the base")


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
    _demand_enough(samples, quantile)
    given = _pooled(ratios, samples if nats is None else samples.rows(torch.arange(min(len(samples), FEW))), top, micro)
    center = given.quantile(0.5, dim=1)
    spread = NORMAL * (given - center[:, None]).abs().quantile(0.5, dim=1)
    if bool((spread < LEAST).any()):
        raise NothingLearnedError(
            f"canary {int((spread < LEAST).nonzero()[0])} gives the base's samples one and the same log-ratio: it has learned "
            "nothing, so train it longer, or leave it out"
        )
    if nats is not None:
        return CanaryMonitor(ratios, top, None, None, nats)
    scores = standardized(given, center, spread)
    return CanaryMonitor(ratios, top, center, spread, float(scores.quantile(quantile)))


class NothingLearnedError(ValueError):
    """Error for a canary that gives all samples of the base one and the same log-ratio."""


class _CanaryStep:
    """Step of the mask route under the canary's flags, with its scores in the decision, and on decoys (not ``free``) its flags."""

    def __init__(self, step: RouteStep, scores: Float[Tensor, " b"] | None, flags: Bool[Tensor, " b"], free: Bool[Tensor, " b"]):
        self._step, self._scores, self._flags, self._free, self.micro_batches = step, scores, flags, free, step.micro_batches

    def settle(self, micro_batch: MicroBatch) -> None:
        self._step.settle(micro_batch)

    def finish(self, reduce: Reduce | None = None) -> Decision:
        decision = self._step.finish(reduce)
        assert decision.flags is not None  # after hooks at ``hook_mask``
        return replace(decision, scores=self._scores, flags=torch.where(self._free, decision.flags, self._flags))


def _unbound(rollouts: Rollouts) -> Tensor:
    raise AssertionError("the run's own quarantine is that of the policy which is scored")


@checked
class CanaryRoute(OneCall):
    """Route by a canary; see the module's equations.

    Args:
        spec: The rule.
        ratios: The canary; ``None`` for the policy's own quarantine.
        samples: Rollouts of the base model, from which the threshold is computed.
        micro: Rollouts that are scored at one time during calibration; all if not given.
        turns: Control: see ``quarantine_ratios``.

    Raises:
        ValueError: ``refresh`` raises those of `calibrate`.

    Examples:
        >>> route = CanaryRoute(CanarySpec(), canary, samples)
        >>> overlap = route.refresh(policy, step=0)
        >>> decision = route.backward(policy, batch, loss_fn)
    """

    def __init__(
        self,
        spec: CanarySpec,
        ratios: Ratios | None,
        samples: Rollouts,
        *,
        micro: int | None = None,
        turns: Mapping[str, Tensor] | None = None,
    ):
        _demand_sizes(micro=micro)
        if spec.in_one_run and ratios is not None:
            raise ValueError(
                "decoys and first train the run's own quarantine, which is then the canary: leave the canary out, or these"
            )
        if turns and ratios is not None:
            raise ValueError("turns are of the run's own quarantine: turn the canary's checkpoints yourself, or leave turns out")
        self._turns = turns
        self.spec, self._ratios, self._samples, self._micro = spec, ratios, samples, micro
        self.directions: Directions | None = None
        self.monitor: CanaryMonitor | None = None
        self.snapshots: list[dict[str, Tensor]] = []
        self._known: float | None = None
        """Surprisal up to which a success teaches a quarantine that learns first nothing."""

    @checked
    def refresh(self, policy: Policy, step: int) -> float | None:
        """Calibrate at the first call, and again if a refresh is due; a canary has no directions, so there is no overlap.

        A quarantine that learns from decoys is calibrated after the first step, and flags nothing until it has learned something;
        one that learns first, when it is frozen. Only at step 0 is an earlier run's calibration forgotten.
        A resumed run has the same calibration again if its canary does not change; for the run's own quarantine, store ``state()``.
        """
        if self._ratios is None and self.spec.relative_to == "run":
            raise ValueError("the run's own quarantine is compared relative to the run already: leave relative_to out")
        ratios = self._own(policy) if self._ratios is None else self._ratios
        if isinstance(ratios, Canary) and ratios.policy.adapters is policy.adapters:
            raise ValueError("the canary's checkpoints would overwrite the trained adapters: give it a model of its own")
        every, snapped = self.spec.refresh_every, step in self.spec.snapshots
        if self._ratios is None and not step:  # another run of the same route, whose quarantine is another
            self.monitor, self.snapshots, self._known = None, [], None
        if step < self.spec.first:
            _demand_enough(self._samples, self.spec.quantile)  # now, and not when it judges
            if self.spec.surprisal and self._known is None:
                samples = self._samples.to(policy.device)
                given = _pooled(surprisal(policy), samples, self.spec.top, self._micro)[0]
                self._known = float(given.quantile(self.spec.surprisal))
            if snapped:
                self._keep(policy)
            return None
        if self.spec.first and len(self.snapshots) < len(self.spec.snapshots):
            raise RuntimeError(
                f"{len(self.snapshots)} of the quarantine's snapshots after steps {self.spec.snapshots} are there: call "
                "route.refresh(policy, step) before each step, and in a run that goes on route.load_state(policy, state)"
            )
        if (self.spec.decoys and not step) or not (self.monitor is None or (every and step % every == 0) or snapped):
            return None
        try:
            self.monitor = self._calibrated(policy, ratios)
            if snapped:
                self._keep(policy)
                self.monitor = self._calibrated(policy, self._own(policy))
        except NothingLearnedError:
            if not self.spec.decoys:
                raise
            self.monitor = None
        return None

    def _keep(self, policy: Policy) -> None:
        self.snapshots.append({name: p.detach().clone() for name, p in policy.adapters.quarantine_parameters().items()})

    def _own(self, policy: Policy) -> Ratios:
        return quarantine_ratios(policy, tuple(self.snapshots), self._turns)

    def _calibrated(self, policy: Policy, ratios: Ratios) -> CanaryMonitor:
        spec = self.spec
        return calibrate(ratios, self._samples.to(policy.device), spec.quantile, spec.top, self._micro, spec.nats)

    @checked
    def begin(self, policy: Policy, batch: TrainBatch, context: StepContext) -> RouteStep:
        check_step(self.spec, batch, context)
        spec, sampled_without, scores = self.spec, context.clean, None
        if spec.in_one_run and sampled_without is None:
            raise ValueError("decoys and first need StepContext.clean: mark the rollouts that were sampled without the quarantine")
        without = None if sampled_without is None or not spec.in_one_run else sampled_without.to(batch.advantages.device)
        if self.monitor is None and not spec.decoys and (without is None or bool(without.any())):
            raise RuntimeError("the canary is not calibrated yet: call route.refresh(policy, step) before each step")
        if spec.surprisal and without is not None and not bool(without.any()):
            batch = self._lessons(policy, batch, context)
        flags = torch.zeros_like(batch.advantages, dtype=torch.bool)
        # A flag on a decoy changes nothing, nor does one on what is not reinforced if only that is flagged.
        free = torch.ones_like(flags) if without is None else without
        judged = batch.advantages > 0 if spec.reinforced_only else torch.ones_like(flags)
        # All processes of a sharded model need as many forwards of it, however many rollouts each has to judge.
        sparing = spec.sparing and not sharded_modules(policy.model)
        index = (judged & free if sparing else torch.ones_like(flags)).nonzero()[:, 0]
        if self.monitor is not None and len(index):
            judging = pieces(batch.rows(index), context.micro)
            judged_scores = torch.cat([self._scored(self.monitor, policy, piece.rollouts) for piece in judging])
            flags[index] = (judged_scores > self.monitor.threshold).to(flags.device)
            flags, scores = flags & judged, None if spec.sparing else judged_scores
        if spec.shuffle:
            flags[free] = shuffled(flags[free], context.generator)
        given = flags if without is None else flags | ~without
        route = MaskRoute.from_flags(
            given, through=spec.through, kept_advantage=spec.kept_advantage, negative_scale=spec.negative_scale
        )
        return _CanaryStep(route.begin(policy, batch, context), scores, flags, free)

    def _lessons(self, policy: Policy, batch: TrainBatch, context: StepContext) -> TrainBatch:
        """Return the batch of a step in which the quarantine learns alone, from no success that does not surprise the base."""
        if self._known is None:
            raise RuntimeError("what surprises the base is not known yet: call route.refresh(policy, step) before each step")
        successes = (batch.advantages > 0).nonzero()[:, 0]
        read = torch.arange(len(batch.rollouts)).to(successes) if sharded_modules(policy.model) else successes  # as in ``begin``
        if not len(read):
            return batch
        given = torch.full_like(batch.advantages, torch.inf, dtype=torch.float64)
        given[read] = _pooled(surprisal(policy), batch.rollouts.rows(read), self.spec.top, context.micro)[0].to(given)
        plain = given[successes] <= self._known
        if self.spec.random_lessons:
            plain = shuffled(plain, context.generator)
        advantages = batch.advantages.clone()
        advantages[successes[plain]] = 0
        return replace(batch, advantages=advantages)

    @checked
    def score(self, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"] | None:
        return None if self.monitor is None else self._scored(self.monitor, policy, rollouts)

    def _scored(self, monitor: CanaryMonitor, policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"]:
        if self._ratios is None:  # this policy's quarantine, and not that of one which it is a copy of
            monitor = replace(monitor, ratios=self._own(policy))
        return monitor(rollouts, drift(policy, rollouts) if self.spec.relative_to == "run" else None)

    def inputs(self) -> dict[str, Tensor]:
        """Return what a threshold comes of, the same on each process of a run: the samples, and a canary's checkpoints."""
        samples, given = self._samples, {}
        if isinstance(self._ratios, Canary):
            given = {f"{i}.{name}": t for i, one in enumerate(self._ratios._checkpoints) for name, t in one.items()}
        return given | {"tokens": samples.tokens, "attention": samples.attention, "completion": samples.completion}

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs besides the policy: of the run's own quarantine, its snapshots and calibration."""
        if self._ratios is not None:
            return {}
        tensors = {f"snapshot.{i}.{name}": t for i, one in enumerate(self.snapshots) for name, t in one.items()}
        if (monitor := self.monitor) is not None:
            if monitor.center is not None and monitor.spread is not None:
                tensors |= {"center": monitor.center, "spread": monitor.spread}
            tensors["threshold"] = torch.tensor(monitor.threshold, dtype=torch.float64)
        return tensors

    def load_state(self, policy: Policy | Adapters, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``state()`` returned."""
        adapters = policy if isinstance(policy, Adapters) else policy.adapters
        parameters, snapshots = adapters.quarantine_parameters(), {}
        for name, tensor in tensors.items():
            if name.startswith("snapshot."):
                _, number, parameter = name.split(".", 2)
                snapshots.setdefault(int(number), {})[parameter] = tensor.to(parameters[parameter], copy=True)
        self.snapshots, self.monitor = [snapshots[number] for number in sorted(snapshots)], None
        if "threshold" in tensors:
            device, given = next(iter(parameters.values())).device, (tensors.get(name) for name in ("center", "spread"))
            center, spread = (None if tensor is None else tensor.to(device, copy=True) for tensor in given)
            self.monitor = CanaryMonitor(_unbound, self.spec.top, center, spread, float(tensors["threshold"]))
