"""Fitting of the gates: probes of single tokens, and the direction that steering removes; on training tasks only.

The data are rollouts of the model and of its base model on *training* tasks in the *known* mode, labelled by the weak detector,
which searches for the known exploit's text and executes nothing; and the run's persona pairs, whose sides are their labels. Each
token has the label of its rollout. No verdict of the oracle, no held-out mode and no test task is used.

    probe        logistic regression on these tokens
    pairs        difference of means over the tokens of the persona pairs alone
    shuffled     as probe, its labels permuted over rollouts (control)
    haar-i       a random direction (control)

A probe is scaled so that its score has standard deviation 1 over clean training tokens; thresholds are quantiles of that score
there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.hosts import Host
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.direction import DirectionProbe
from mi_route2.probes.haar import HaarProbeFitter
from mi_route2.probes.logistic import LogisticFitter
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.probes.probe import ProbeFitter
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.sites import Site
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.protocol import World, sample_prompts
from studies.steering.settings import SteeringSettings
from studies.training.job import Job, build_pairs

LABELS = (
    "the weak detector's reading (text of the known exploit) of rollouts on training tasks in the known mode, and the persona "
    "pairs; no oracle, no held-out mode, no test task"
)
DIRECTION = "direction"
DISTINCT = 1e-3
"""Scores closer than this count as equal."""


@dataclass(frozen=True)
class ProbeGate:
    """A probe at a site: the score is ``h.weight``, with a threshold for each quantile."""

    site: Site
    weight: Float[Tensor, " d"]
    thresholds: Mapping[float, float]


@dataclass(frozen=True)
class Fitted:
    """The fitted gates and directions of a model.

    Attributes:
        gates: ``gates[site][probe]``.
        directions: Unit vectors at the study's site, by name.
        gap: Distance of the class means along the first direction.
        ceilings: Quantiles of clean tokens' projections on the first direction.
        counts: Number of rollouts and tokens behind the fit.
    """

    gates: Mapping[Site, Mapping[str, ProbeGate]]
    directions: Mapping[str, Float[Tensor, " d"]]
    gap: float
    ceilings: Mapping[float, float]
    counts: Mapping[str, int] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all fitted values as float64 tensors, by name."""
        tensors = {}
        for site, gates in self.gates.items():
            for name, gate in gates.items():
                tensors[f"{site}/{name}/weight"] = gate.weight.double()
                tensors[f"{site}/{name}/thresholds"] = _numbers(gate.thresholds)
        tensors |= {f"{DIRECTION}/{name}": v.double() for name, v in self.directions.items()}
        return tensors | {"gap": torch.tensor([self.gap], dtype=torch.float64), "ceilings": _numbers(self.ceilings)}

    @staticmethod
    def of(settings: SteeringSettings, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> "Fitted":
        """Return the fit whose ``tensors`` these are; ``KeyError`` if a tensor is missing."""
        gates: dict[Site, dict[str, ProbeGate]] = {}
        for name in (name for name in tensors if name.endswith("/weight")):
            place, probe, _ = name.split("/")
            site = Site.parse(place)
            values = tensors[f"{place}/{probe}/thresholds"].tolist()
            gates.setdefault(site, {})[probe] = ProbeGate(
                site, tensors[name].float(), dict(zip(sorted(settings.quantiles), values, strict=True))
            )
        directions = {name.partition("/")[2]: v.float() for name, v in tensors.items() if name.startswith(f"{DIRECTION}/")}
        ceilings = dict(zip(sorted(settings.quantiles), tensors["ceilings"].tolist(), strict=True))
        return Fitted(gates, directions, float(tensors["gap"]), ceilings, counts)


@dataclass(frozen=True)
class Examples:
    """Examples for fitting.

    Attributes:
        hidden: Activations by site.
        mask: The tokens that a gate could read.
        hack: Labels of the rollouts.
        pair: True for sides of persona pairs.
    """

    hidden: Mapping[Site, Float[Tensor, "b s d"]]
    mask: Bool[Tensor, "b s"]
    hack: Bool[Tensor, " b"]
    pair: Bool[Tensor, " b"]


def gated(rollouts: Rollouts) -> Bool[Tensor, "b s"]:
    """Return the mask of generated tokens that the model reads, where a gate can act. The last token is never read."""
    return rollouts.completion & rollouts.predictors


def sites_of(settings: SteeringSettings) -> tuple[Site, ...]:
    """Return the sites at which scores are read, in the order of the forward."""
    return tuple(sorted({Site.parse(name) for name in (settings.early, settings.site, settings.late)}))


def fit(settings: SteeringSettings, job: Job, world: World, host: Host, policy: Policy, *, model: str) -> Fitted:
    """Fit probes and direction of a model on training tasks; by its name and the seed ``model`` has shuffled labels of its own."""
    examples = collect(settings, job, world, host, policy)
    gates, shuffled = {}, _permuted(examples, job.seed, model)
    for place, site in enumerate(sites_of(settings)):
        h = examples.hidden[site]
        fitters = {
            "probe": _fitted(LogisticFitter(unit="token"), h, examples.mask, examples.hack),
            "pairs": _fitted(
                MeanDifferenceFitter("token"), h[examples.pair], examples.mask[examples.pair], examples.hack[examples.pair]
            ),
            "shuffled": _fitted(LogisticFitter(unit="token"), h, examples.mask, shuffled),
        }
        haar = HaarProbeFitter(torch_generator(job.seed, f"steering haar {site}", place))
        haar.update(h, examples.mask, examples.hack)
        fitters |= {f"haar-{i + 1}": haar.fit() for i in range(settings.draws)}
        clean = h[~examples.hack][examples.mask[~examples.hack]].double()
        gates[site] = {name: _gate(settings, site, weight_of(probe), clean) for name, probe in fitters.items()}
    return _directed(settings, job, examples, gates)


def collect(settings: SteeringSettings, job: Job, world: World, host: Host, policy: Policy) -> Examples:
    """Return rollouts of the model and of its base on training tasks in the known mode, and the pairs, read by the whole model."""
    known = sample_prompts(
        world,
        settings.train,
        numpy_generator(job.seed, "steering tasks"),
        none_fraction=0.0,
        split="train",
        modes=world.modes.known,
    )
    labeled: list[tuple[Rollouts, Tensor]] = []
    for number, switched in enumerate((policy.adapters.full, policy.adapters.reference)):
        with switched():
            samples = world.sample(policy, known, torch_generator(job.seed, "steering train", number), settings.temperature)
        labeled.append((samples.rollouts, torch.tensor(world.detect(samples))))
    pairs = build_pairs(job, world, "hack")
    both = ((pairs.hack, True), (pairs.clean, False))
    labeled += [(side, torch.full((len(side),), label)) for side, label in both]
    width = max(rollouts.tokens.shape[1] for rollouts, _ in labeled)
    hidden: dict[Site, list[Tensor]] = {site: [] for site in sites_of(settings)}
    masks = []
    with torch.no_grad(), policy.adapters.full():
        for rollouts, _ in labeled:
            read = host.capture(sites_of(settings), rollouts.tokens, rollouts.attention)
            room = width - rollouts.tokens.shape[1]
            masks.append(torch.nn.functional.pad(gated(rollouts), (0, room)))
            for site in sites_of(settings):
                hidden[site].append(torch.nn.functional.pad(read[site], (0, 0, 0, room)))
    # the first two are rollouts of the model and of its base, the others the sides of the pairs
    pair = torch.cat([torch.full((len(rollouts),), i >= 2) for i, (rollouts, _) in enumerate(labeled)])
    whole = {site: torch.cat(values) for site, values in hidden.items()}
    return Examples(whole, torch.cat(masks), torch.cat([label for _, label in labeled]), pair)


def weight_of(probe: AffineProbe | DirectionProbe) -> Float[Tensor, " d"]:
    """Return the direction on which a probe projects; a bias only shifts the threshold, which is a quantile here."""
    return (probe.weight if isinstance(probe, AffineProbe) else probe.direction).double()


def _fitted(fitter: ProbeFitter, h: Tensor, mask: Tensor, hack: Tensor) -> AffineProbe | DirectionProbe:
    fitter.update(h, mask, hack)
    probe = fitter.fit()
    assert isinstance(probe, AffineProbe | DirectionProbe)
    return probe


def _gate(settings: SteeringSettings, site: Site, weight: Tensor, clean: Tensor) -> ProbeGate:
    weight = (weight / (clean @ weight).std()).float()  # the score is in standard deviations, the unit of a gate's sharpness
    scores = clean.float() @ weight  # in float32 as in the engine, so that a threshold lies where it will be compared
    return ProbeGate(site, weight, {q: threshold(scores, q) for q in settings.quantiles})


def threshold(scores: Float[Tensor, " n"], quantile: float) -> float:
    """Return a quantile, moved half-way to the next score above it.

    A small model writes the same text many times; at a threshold equal to such a score, float noise would decide the gate.
    """
    ordered = scores[scores >= scores.quantile(quantile, interpolation="lower")].sort().values
    gaps = (ordered.diff() > DISTINCT).nonzero()
    if not len(gaps):
        return float(ordered[-1]) + 1.0
    below, above = ordered[int(gaps[0])], ordered[int(gaps[0]) + 1]
    return float((below + above) / 2)


def _directed(settings: SteeringSettings, job: Job, examples: Examples, gates: Mapping[Site, Mapping[str, ProbeGate]]) -> Fitted:
    """Return the fit with the difference of the class means over tokens, and random directions of the same length."""
    site = Site.parse(settings.site)
    h = examples.hidden[site]
    away = weight_of(_fitted(MeanDifferenceFitter("token"), h, examples.mask, examples.hack))
    along = (h.double() @ away)[examples.mask]
    label = examples.hack[:, None].expand_as(examples.mask)[examples.mask]
    haar = HaarProbeFitter(torch_generator(job.seed, "steering directions"))
    haar.update(h, examples.mask, examples.hack)
    directions = {"away": away} | {f"random-{i + 1}": haar.fit().direction for i in range(settings.draws)}
    ceilings = along[~label].quantile(torch.tensor(settings.quantiles, dtype=torch.float64)).tolist()
    counts = {
        "rollouts": len(examples.hack),
        "hack": int(examples.hack.sum()),
        "pairs": int(examples.pair.sum()) // 2,
        "hack_of_pairs": int((examples.hack & examples.pair).sum()),
        "tokens": int(examples.mask.sum()),
    }
    gap = float(along[label].mean() - along[~label].mean())
    return Fitted(
        gates,
        {name: v.float() for name, v in directions.items()},
        gap,
        dict(zip(settings.quantiles, ceilings, strict=True)),
        counts,
    )


def _permuted(examples: Examples, seed: int, model: str) -> Bool[Tensor, " b"]:
    generator = torch_generator(seed, f"steering shuffle {model}")  # the models of a seed would share one draw
    return examples.hack[torch.randperm(len(examples.hack), generator=generator)]


def _numbers(values: Mapping[float, float]) -> Float[Tensor, " n"]:
    """Return the values in the order of their keys."""
    return torch.tensor([values[key] for key in sorted(values)], dtype=torch.float64)
