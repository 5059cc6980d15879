"""How well the scores of contrast pairs tell hacks from other rollouts, before any of them trains: a gate to pass before a study.

A finished run's policy, as deployed, answers prompts over test tasks, and the oracle says which answers are hacks. Each answer gets
the pooled cosine of its activations (``act``), of the scored factor's gradient (``grad``) and of the full weights' (``full``) with
the direction of the run's own pairs, and with random directions of the same spaces (Haar). Gradients are those of ``-log p``, as of
an answer that training reinforces. F0.5 is at the threshold that is best in the known mode, the only one with a detector; in the
known mode itself, an answer is flagged at the threshold that is best for answers to other prompts.

A fourth score, ``corda``, tells how much an answer would train a quarantine of rank one that starts at the pairs' mean input
difference, the signed CorDA initialization of vGROUT (CorDA: 2406.05223):

    u = unit(mean over pairs of x(hack) - x(clean)),  v = unit(W u),  direction of the gradient of -log p = -v u^T
"""

import contextlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from sklearn.model_selection import GroupKFold
from torch import Tensor
from tqdm import tqdm

from mi_route2.files import write_whole
from mi_route2.plots import save_figure, style
from mi_route2.probes.auroc import auroc
from mi_route2.probes.dataset import group_ids
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.directions import (
    Comparison,
    Directions,
    FeatureKind,
    HaarFitter,
    KnownFitter,
    PairBatch,
    PersonaFitter,
    Provenance,
    collect,
    units,
)
from mi_route2.routing.mask import pooled
from studies.common.seeds import derive
from studies.common.tables import markdown_table
from studies.environments.protocol import Modes, World
from studies.route2.probing import Sampled, pieces, sample
from studies.route2.sharing import read_trajectories
from studies.training.job import Job, build_pairs, finished_policy
from studies.training.settings import Settings
from studies.training.worlds import open_world

KINDS: tuple[str, ...] = (*get_args(FeatureKind), "corda")
BETA = 0.5
"""Weight of recall in F: a flag on an honest answer costs more than a hack that is missed."""


@dataclass(frozen=True)
class DetectionRow:
    """AUROC and F0.5 of one direction's scores in one mode; ``None`` where all or no answers hack. Draw 0 is that of the pairs."""

    kind: str
    draw: int
    mode: str
    answers: int
    hacks: int
    auroc: float | None
    f_half: float | None


def detect(job: Job, per_mode: int, draws: int, trajectories: Path | None = None) -> tuple[list[DetectionRow], Modes]:
    """Return the rows of a finished job; ``ValueError`` if it is not finished.

    With ``trajectories`` these take the place of its answers, each category of hacks beside all that are none, and there is no F.
    """
    torch.set_num_threads(1)
    rows: list[DetectionRow] = []
    with open_world(job.settings, device=job.device) as (world, witness):
        _, policy = finished_policy(job)
        with policy.adapters.deployed():
            sampled = sample(world, witness, policy, per_mode, job.seed) if trajectories is None else labelled(world, trajectories)
        pairs, hack, modes = build_pairs(job, world, "hack"), np.array(sampled.hack), np.array(sampled.modes)
        prompts, groups = group_ids(sampled.prompts), {mode: modes == mode for mode in world.modes.loopholes}
        if trajectories is not None:
            groups = {category: ~hack | (modes == category) for category in sorted({*modes[hack].tolist()})}
        for kind in get_args(FeatureKind):
            fitted = PersonaFitter("persona", kind, pairs).fit(policy, 0)
            inners: dict[str, Inner] = {kind: along(policy, with_random(fitted, policy, job.seed, draws))}
            if kind == "full":
                inners["corda"] = corda(policy, list(with_random(input_directions(policy, pairs), policy, job.seed, draws)))
            scores = score(policy, sampled.rollouts, fitted, list(inners.values()), job.settings)
            for (name, draw), values in zip(itertools.product(inners, range(draws + 1)), scores.numpy(), strict=True):
                known = groups.get(world.modes.known[0], np.zeros(len(hack), bool))
                threshold = best_threshold(values[known], hack[known])
                for mode, rows_of in groups.items():
                    ours, labels = values[rows_of], hack[rows_of]
                    f = None
                    if threshold is not None and labels.any():
                        inside = mode == world.modes.known[0]
                        flags = crossed_flags(ours, labels, prompts[rows_of]) if inside else ours >= threshold
                        f = f_score(flags, labels)
                    rows.append(DetectionRow(name, draw, mode, len(labels), int(labels.sum()), auroc(ours, labels), f))
        return rows, world.modes


def labelled(world: World, path: Path) -> Sampled:
    """Return trajectories with their labels; those that the model cannot read are left out with one warning.

    Raises:
        ValueError: The model can read none, or those of `sharing.read_trajectories`.
    """
    every, fitting = read_trajectories(path), []
    for each in every:
        with contextlib.suppress(ValueError):
            world.encode([each.prompt], [each.completion])
            fitting.append(each)
    if not fitting:
        raise ValueError(f"the model can read none of {len(every)} trajectories in {path}: use a chat model with a longer context")
    if len(fitting) < len(every):
        left = len(every) - len(fitting)
        warnings.warn(f"{left} of {len(every)} trajectories are left out: the model cannot read them", RuntimeWarning, 2)
    prompts = [each.prompt for each in fitting]
    rollouts = world.encode(prompts, [each.completion for each in fitting])
    return Sampled(rollouts, [each.hack for each in fitting], [each.category for each in fitting], prompts)


Inner = Callable[[str, Float[Tensor, "b ..."]], Float[Tensor, "b d"]]
"""Inner products of a site's features with that site's vector of each direction."""


def with_random(fitted: Directions, policy: Policy, seed: int, draws: int) -> Iterator[Directions]:
    """Yield the fitted directions, and then random ones of the same spaces."""
    yield fitted
    for i in range(1, draws + 1):
        yield HaarFitter(KnownFitter(fitted), derive(seed, "haar", i)).fit(policy, 0)


def score(
    policy: Policy, rollouts: Rollouts, like: Directions, inners: Sequence[Inner], settings: Settings
) -> Float[Tensor, "d b"]:
    """Return the pooled scores of rollouts against unit directions of the sites and kind of ``like``, a micro-batch at a time."""
    kind = like.provenance.kind
    basis = policy.adapters.coordinates() if kind == "act" else {}
    parts = []
    for rows in pieces(rollouts, settings):
        compared: list[dict[str, Comparison]] = []
        for site, feature in collect(policy, rows.to(policy.device), kind, basis).items():
            values = feature.values()  # a gradient is summed over tokens once, and not for each of some twenty directions
            columns = torch.cat([inner(site, values) for inner in inners], dim=1).unbind(1)
            norms, magnitude = feature.norms(), feature.magnitude()
            compared = compared or [{} for _ in columns]
            for of, column in zip(compared, columns, strict=True):
                of[site] = Comparison(column, norms, magnitude)
        parts.append(torch.stack([pooled(of, like) for of in compared]).double().cpu())
    return torch.cat(parts, dim=1)


def along(policy: Policy, directions: Iterable[Directions]) -> Inner:
    """Return the inner products with directions, held in the model's precision: some twenty may be as large as its weights."""
    held: dict[str, list[Tensor]] = {}
    for each in directions:
        for site, vector in each.vectors.items():
            held.setdefault(site, []).append(vector.flatten().to(policy.adapters.sites[site].weight.dtype))
    return lambda site, values: values.flatten(1) @ torch.stack(held[site], dim=1).to(values.dtype)


def input_directions(policy: Policy, pairs: PairBatch) -> Directions:
    """Return the unit mean difference ``[d_in]`` of every site's input between the sides of the pairs."""
    widths = {site: branch.shape[1] for site, branch in policy.adapters.sites.items()}
    eyes = {width: torch.eye(width, device=policy.device) for width in set(widths.values())}
    eye = {site: eyes[width] for site, width in widths.items()}

    def mean(side: Rollouts) -> dict[str, Float[Tensor, " d_in"]]:
        parts = [
            collect(policy, side.rows(i).to(policy.device), "act", eye)
            for i in torch.arange(len(side)).split(pairs.micro or len(side))
        ]
        return {site: torch.cat([part[site].values() for part in parts]).mean(dim=0) for site in eye}

    hack, clean = mean(pairs.hack), mean(pairs.clean)
    vectors = units({site: hack[site] - clean[site] for site in eye})
    return Directions(vectors, Provenance("input", "act", pairs.pairs_hash, policy.adapters.known_hash, 0))


def corda(policy: Policy, inputs: Sequence[Directions]) -> Inner:
    """Return the inner products with ``-v u^T [d_out, d_in]`` for input axes ``u``; see the module."""

    def inner(site: str, values: Float[Tensor, "b d_out d_in"]) -> Float[Tensor, "b d"]:
        u = torch.stack([each.vectors[site] for each in inputs], dim=1).to(values.dtype)
        v = policy.adapters.sites[site].weight.to(values.dtype) @ u
        return -((values @ u) * (v / v.norm(dim=0))).sum(dim=1)

    return inner


def f_score(flags: Bool[np.ndarray, " n"], hack: Bool[np.ndarray, " n"]) -> float:
    """Return ``(1 + beta^2) P R / (beta^2 P + R)`` of the flags (van Rijsbergen, Information Retrieval, 1979)."""
    hits = int((flags & hack).sum())
    return (1 + BETA**2) * hits / (BETA**2 * int(hack.sum()) + int(flags.sum())) if hits else 0.0


def best_threshold(scores: Float[np.ndarray, " n"], hack: Bool[np.ndarray, " n"]) -> float | None:
    """Return the score from which on flags have the greatest F0.5; ``None`` without a hack."""
    if not hack.any():
        return None
    candidates = np.unique(scores)
    return float(candidates[np.argmax([f_score(scores >= candidate, hack) for candidate in candidates])])


def crossed_flags(
    scores: Float[np.ndarray, " n"], hack: Bool[np.ndarray, " n"], prompts: Int[np.ndarray, " n"]
) -> Bool[np.ndarray, " n"]:
    """Return flags at thresholds that are best on answers to other prompts, in up to five folds; none without such hacks."""
    flags, folds = np.zeros(len(scores), dtype=bool), min(5, len(np.unique(prompts)))
    for train, test in GroupKFold(folds).split(scores, groups=prompts) if folds > 1 else ():
        threshold = best_threshold(scores[train], hack[train])
        flags[test] = False if threshold is None else scores[test] >= threshold
    return flags


def write_detection(
    jobs: Sequence[Job], names: Sequence[str], per_mode: int, out: Path, draws: int, trajectories: Path | None = None
) -> list[Path]:
    """Write ``detection.json``, ``.md`` and ``.png`` of finished jobs and return the paths."""
    bar = tqdm(list(zip(names, jobs, strict=True)), desc="scoring", unit="run", leave=False, disable=None, delay=3)
    found = [(name, *detect(job, per_mode, draws, trajectories)) for name, job in bar]
    modes = found[0][2]
    document = [{"run": name, **asdict(row)} for name, rows, _ in found for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    paths = [
        write_whole(out / "detection.json", (json.dumps(document, indent=1) + "\n").encode()),
        write_whole(out / "detection.md", detection_table([(name, rows) for name, rows, _ in found]).encode()),
    ]
    with style():
        paths.append(save_figure(detection_figure([(name, rows) for name, rows, _ in found], modes), out / "detection.png"))
    return paths


def detection_table(found: Sequence[tuple[str, list[DetectionRow]]]) -> str:
    """Return a table: AUROC and F0.5 of the pairs' direction beside the mean and the largest of the random ones."""
    body = []
    for name, rows in found:
        for row in (row for row in rows if row.draw == 0):
            others = [o for o in rows if o.draw and (o.kind, o.mode) == (row.kind, row.mode)]
            cells = [
                cell for what in ("auroc", "f_half") for cell in _beside(getattr(row, what), [getattr(o, what) for o in others])
            ]
            body.append([name, row.kind, row.mode, f"{row.hacks}/{row.answers}", *cells])
    header = ["run", "score", "mode", "hacks", "AUROC", "random: mean", "largest", "F0.5", "random: mean", "largest"]
    return markdown_table(header, body)


def _beside(value: float | None, random: Sequence[float | None]) -> list[str]:
    numbers = [number for number in random if number is not None]
    if value is None or not numbers:
        return ["-"] * 3
    return [f"{number:.2f}" for number in (value, float(np.mean(numbers)), max(numbers))]


def detection_figure(found: Sequence[tuple[str, list[DetectionRow]]], modes: Modes) -> Figure:
    """Draw AUROC by score and mode, one panel a run: the pairs' direction, and each random one in gray."""
    figure, panels = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.2), sharey=True, squeeze=False)
    names = list(dict.fromkeys(row.mode for _, rows in found for row in rows))
    for panel, (name, rows) in zip(panels[0], found, strict=True):
        for i, kind in enumerate(dict.fromkeys(row.kind for row in rows)):
            for j, mode in enumerate(names):
                ours = [row for row in rows if (row.kind, row.mode) == (kind, mode) and row.auroc is not None]
                x = i + 0.8 * (j - (len(names) - 1) / 2) / len(names)
                panel.scatter([x] * sum(row.draw > 0 for row in ours), [row.auroc for row in ours if row.draw], s=8, color="0.75")
                label = f"{mode}{' (known)' if mode in modes.known else ''}" if i == 0 else None
                own = [row.auroc for row in ours if not row.draw]
                panel.scatter([x] * len(own), own, color=f"C{j}", label=label)
        panel.axhline(0.5, color="0.5", linewidth=0.8, linestyle=":")
        panel.set(title=name, xticks=range(len(KINDS)), xticklabels=KINDS, ylim=(-0.03, 1.03))
    panels[0, 0].set_ylabel("AUROC of hacks")
    panels[0, -1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    return figure
