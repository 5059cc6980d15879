"""Transfer study: test whether a probe trained on the known mode finds hacks of modes that it never saw.

For every layer and probe: fit on part of the known mode's rollouts, calibrate on a second part, test on a third (the known row)
and on each held-out mode: AUROC with a bootstrap interval over prompts, recall at 1% false positives, Brier, ECE and the
reliability curve. All rollouts of a prompt are in one part, and test prompts of every mode are in no other part. Every row also
has the mean and the 95th percentile of the AUROC of random directions: a number that random directions reach is no finding. This
module uses only rollouts, labels and mode names. A row depends on its own layer, probe and mode, and not on which others are
studied.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.auroc import auroc, auroc_interval, cluster_draws, recall_at_fpr
from mi_route2.probes.calibration import Calibrator, ReliabilityBin, brier, ece, fit_isotonic, fit_platt, reliability
from mi_route2.probes.dataset import Dataset, group_ids, split_groups
from mi_route2.probes.direction import DirectionProbe
from mi_route2.probes.haar import HaarProbeFitter
from mi_route2.probes.lda import LdaFitter
from mi_route2.probes.logistic import LogisticFitter
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.probes.probe import Probe, ProbeFitter, Unit, pool
from mi_route2.validation import AtLeastOne, Natural, validated

__all__ = ["Dataset", "TransferResult", "TransferRow", "TransferSettings", "default_fitters", "transfer"]

FitterFactory = Callable[[str], ProbeFitter]


@validated
class TransferSettings:
    """Settings of a transfer study.

    Attributes:
        known: the training mode.
        levels: score rollouts, single tokens (with their own or their rollout's label), or both.
        calibration: map from scores to probabilities.
        fractions: fractions of the known mode to fit, to calibrate and to test on.
        draws: number of random directions, at least 20.
        bootstraps: number of bootstrap draws.
        bins: number of bins of the reliability curve.
        seed: seed of the splits, of each mode's bootstrap and of each layer's random directions.
    """

    known: str
    levels: Annotated[tuple[Unit, ...], Field(min_length=1, description="a tuple of rollout, token, or both")] = (
        "rollout",
        "token",
    )
    calibration: Literal["platt", "isotonic"] = "platt"
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    draws: Annotated[int, Field(ge=20)] = 20  # fewer have no 95th percentile
    bootstraps: Natural = 1000
    bins: AtLeastOne = 10
    seed: Natural = 0

    def __post_init__(self) -> None:
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels must be given once each, not {', '.join(self.levels)}")


@dataclass(frozen=True)
class TransferRow:
    """Results of one probe at one layer on one mode. Rates are in [0, 1]; AUROCs are None if a class is absent.

    `n`, `n_positive` (with a positive token, if tokens have labels) and `n_groups` count rollouts and prompts; `dropped` counts the
    rollouts whose prompt was in the training or calibration part. `auroc_low` and `auroc_high` are 95% bootstrap bounds.
    `recall_1pct` is the recall at 1% false positives, None where `recall_note` says why, such as too few negatives.
    """

    layer: str
    probe: str
    mode: str
    known: bool
    level: Unit
    n: int
    n_positive: int
    n_groups: int
    dropped: int
    auroc: float | None
    auroc_low: float | None
    auroc_high: float | None
    recall_1pct: float | None
    recall_note: str
    random_mean: float | None
    random_p95: float | None
    random_draws: int
    brier: float
    ece: float
    reliability: list[ReliabilityBin]


@dataclass(frozen=True, eq=False)
class TransferResult:
    """All rows, and the fitted probes as `probes[probe][layer]`."""

    settings: TransferSettings
    rows: list[TransferRow]
    probes: dict[str, dict[str, Probe]]

    def json_rows(self) -> list[dict]:
        """Return the rows as plain JSON values."""
        return [asdict(row) for row in self.rows]

    def jsonl(self) -> str:
        """Return the rows as JSON Lines."""
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.json_rows())


@dataclass(frozen=True, eq=False)
class _Fold:
    """Test rollouts of one mode, and the bootstrap's resamples of their groups (shared by all probes, so paired)."""

    mode: str
    rows: Int[np.ndarray, " n"]
    cluster: Int[np.ndarray, " n"]
    resamples: Int[np.ndarray, "m clusters"]
    dropped: int


class _Activations(NamedTuple):
    """Some rollouts at one layer."""

    h: Float[Tensor, "b s d"]
    mask: Bool[Tensor, "b s"]
    positive: Bool[Tensor, " b"] | Bool[Tensor, "b s"]


def default_fitters(seed: int = 0, c: float = 0.1, unit: Unit = "rollout") -> dict[str, FitterFactory]:
    """Return the three fitters that learn, by name.

    Add a given direction with `{"mine": lambda layer: DirectionFitter(v[layer])}`.
    """
    return {
        "mean_difference": lambda _layer: MeanDifferenceFitter(unit),
        "lda": lambda _layer: LdaFitter("auto", unit),
        "logistic": lambda _layer: LogisticFitter(c, seed, unit),
    }


def transfer(
    dataset: Dataset,
    prompts: Sequence[Hashable] | Shaped[np.ndarray, " n"] | Shaped[Tensor, " n"],
    fitters: Mapping[str, FitterFactory],
    settings: TransferSettings,
    progress: bool = True,
) -> TransferResult:
    """Fit on the known mode and test on every mode.

    Args:
        dataset: rollouts of the known mode and of the others.
        prompts: the prompt of each rollout, or a number of it; all rollouts of a prompt stay on one side of every split.
        fitters: probe name -> layer name -> a new fitter, which gets labels True and False; its probe is of `dataset.positive`.
        settings: see `TransferSettings`.
        progress: show a bar.

    Raises:
        TypeError: one text in place of the list of prompts.
        ValueError: `prompts` of another length or with NaN, a known mode that does not occur or has too few hack or clean prompts,
            a mode without any rollout after shared prompts are dropped, or scores of rollouts from labels of tokens.
    """
    group = group_ids(prompts)
    if len(group) != len(dataset.mode):
        raise ValueError(f"{len(group)} prompts for {len(dataset.mode)} rollouts: give one per rollout.")
    if dataset.is_positive.ndim == 2 and "rollout" in settings.levels:
        raise ValueError("Labels per token have no value for a rollout: pass levels=('token',), or one label per rollout.")
    fit, calibrate, folds = _folds(dataset, group, settings)
    rows: list[TransferRow] = []
    probes: dict[str, dict[str, Probe]] = {name: {} for name in fitters}
    with tqdm(total=len(dataset.hidden) * len(fitters), desc="probes", disable=not progress) as bar:
        for layer in dataset.hidden:
            train, calibration = _batch(dataset, layer, fit), _batch(dataset, layer, calibrate)
            tests = [(fold, _batch(dataset, layer, fold.rows)) for fold in folds]
            # a generator for each layer, so that its control is the same whatever other layers are asked for
            drawn = int(_generator(settings.seed, layer).integers(2**63))
            control = _control(train, tests, settings, torch.Generator().manual_seed(drawn))
            for name, factory in fitters.items():
                probe = probes[name][layer] = _fit(factory(layer), train, dataset)
                for level in settings.levels:
                    calibrator = _calibrator(probe, calibration, level, settings)
                    for fold, batch in tests:
                        mean, p95 = control[fold.mode, level]
                        measured = _measure(probe, calibrator, fold, batch, level, settings)
                        rows.append(TransferRow(layer, name, random_mean=mean, random_p95=p95, **measured))
                bar.update()
    return TransferResult(settings, rows, probes)


def _folds(
    dataset: Dataset, group: Int[np.ndarray, " n"], settings: TransferSettings
) -> tuple[Int[np.ndarray, " _fit"], Int[np.ndarray, " _calibrate"], list[_Fold]]:
    """Return the rollouts to fit on, to calibrate on, and to test on in each mode (the known one first)."""
    mode, positive = np.array(dataset.mode), _rollouts(dataset.is_positive).numpy()
    known = np.flatnonzero(mode == settings.known)
    if not len(known):
        raise ValueError(f"No rollout in mode {settings.known!r}; modes: {', '.join(sorted(set(dataset.mode)))}.")
    rng = np.random.default_rng(settings.seed)
    # groups are numbered in each mode by itself, because another mode may have met them in another order
    fit, calibrate, test = (known[part] for part in split_groups(group_ids(group[known]), positive[known], settings.fractions, rng))
    used = np.union1d(group[fit], group[calibrate])
    folds = []
    for name in [settings.known, *(other for other in dict.fromkeys(dataset.mode) if other != settings.known)]:
        rows = test if name == settings.known else np.flatnonzero(mode == name)
        fresh = rows[~np.isin(group[rows], used)]
        if not len(fresh):
            raise ValueError(f"Every rollout of mode {name!r} shares its prompt with a training rollout.")
        cluster = group_ids(group[fresh])
        resamples = cluster_draws(int(cluster.max()) + 1, settings.bootstraps, _generator(settings.seed, name))
        folds.append(_Fold(name, fresh, cluster, resamples, len(rows) - len(fresh)))
    return fit, calibrate, folds


def _generator(seed: int, name: str) -> np.random.Generator:
    """Return the generator of one layer or mode."""
    return np.random.default_rng([seed, *name.encode()])


def _batch(dataset: Dataset, layer: str, rows: Int[np.ndarray, " n"]) -> _Activations:
    """Return the selected rollouts at one layer."""
    index = torch.from_numpy(rows)
    h = dataset.hidden[layer]
    positive = dataset.is_positive[index].to(h.device)
    return _Activations(h[index.to(h.device)], dataset.mask[index.to(dataset.mask.device)].to(h.device), positive)


def _rollouts(positive: Bool[Tensor, " b"] | Bool[Tensor, "b s"]) -> Bool[Tensor, " b"]:
    """Return whether each rollout is positive; with labels of tokens, whether one of its tokens is."""
    return positive.view(len(positive), -1).any(dim=1)


def _fit(fitter: ProbeFitter, batch: _Activations, dataset: Dataset) -> Probe:
    fitter.update(batch.h, batch.mask, batch.positive)
    probe = fitter.fit()
    return replace(probe, positive=dataset.positive) if isinstance(probe, AffineProbe | DirectionProbe) else probe


def _scores(
    probe: Probe, batch: _Activations, level: Unit
) -> tuple[Float[np.ndarray, " m"], Bool[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Return scores of rollouts or of masked tokens, their labels, and the batch row of each."""
    if level == "rollout":
        scores, owner = probe.score_rollouts(batch.h, batch.mask), torch.arange(len(batch.h), device="cpu")
    else:
        scores, owner = probe.score_tokens(batch.h)[batch.mask], batch.mask.nonzero()[:, 0]
    labels = batch.positive[owner] if batch.positive.ndim == 1 else batch.positive[batch.mask]
    return scores.detach().double().cpu().numpy(), labels.cpu().numpy(), owner.cpu().numpy()


def _control(
    train: _Activations, tests: list[tuple[_Fold, _Activations]], settings: TransferSettings, generator: torch.Generator
) -> dict[tuple[str, Unit], tuple[float | None, float | None]]:
    """Return (mode, level) -> mean and 95th percentile of the random directions' AUROC; None if a class is absent."""
    fitter = HaarProbeFitter(generator)
    fitter.update(train.h, train.mask, train.positive)
    random = [fitter.fit() for _ in range(settings.draws)]
    control: dict[tuple[str, Unit], tuple[float | None, float | None]] = {}
    for fold, batch in tests:
        for level in settings.levels:
            # A direction's score of a rollout is that of its mean, which is taken once and not for each draw.
            read = _pooled(batch) if level == "rollout" else batch
            values = [auroc(*_scores(probe, read, "token")[:2]) for probe in random]
            defined = [value for value in values if value is not None]
            bounds = (float(np.mean(defined)), float(np.quantile(defined, 0.95))) if defined else (None, None)
            control[fold.mode, level] = bounds
    return control


def _pooled(batch: _Activations) -> _Activations:
    """Return the rollouts with one position each, the mean of those in the mask."""
    h = pool(batch.h, batch.mask)[:, None]
    return _Activations(h, torch.ones(h.shape[:2], dtype=torch.bool, device=h.device), batch.positive)


def _calibrator(probe: Probe, batch: _Activations, level: Unit, settings: TransferSettings) -> Calibrator:
    scores, labels, _ = _scores(probe, batch, level)
    return fit_platt(scores, labels) if settings.calibration == "platt" else fit_isotonic(scores, labels)


def _measure(
    probe: Probe, calibrator: Calibrator, fold: _Fold, batch: _Activations, level: Unit, settings: TransferSettings
) -> dict:
    """Return the fields of a row that depend on this probe and fold."""
    scores, labels, owner = _scores(probe, batch, level)
    p = calibrator(scores)
    area = auroc_interval(scores, labels, fold.cluster[owner], fold.resamples)
    recall = recall_at_fpr(scores, labels)
    return {
        "mode": fold.mode,
        "known": fold.mode == settings.known,
        "level": level,
        "n": len(fold.rows),
        "n_positive": int(_rollouts(batch.positive).sum()),
        "n_groups": fold.resamples.shape[1],
        "dropped": fold.dropped,
        "auroc": area.value,
        "auroc_low": area.low,
        "auroc_high": area.high,
        "recall_1pct": recall.value,
        "recall_note": recall.note,
        "random_draws": settings.draws,
        "brier": brier(p, labels),
        "ece": ece(p, labels, settings.bins),
        "reliability": reliability(p, labels, settings.bins),
    }
