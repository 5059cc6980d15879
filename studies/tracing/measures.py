"""Statistics of effects: means over pairs and seeds, shares of the gap, bootstrap intervals.

    recovered = mean effect / mean gap

Means are over the pairs of a seed first, then over seeds. The gap is the maximum that can be carried: s(hack) - s(honest) into the
honest rollout, and its negative into the hacking one.

The interval is a two-level percentile bootstrap over seeds and the pairs of each, with the same draws for every number of a
contrast. A seed that is drawn twice counts one resample of its pairs twice, which makes intervals wider than two would: by a fifth
where pairs differ far more than seeds. If the gap's own interval contains 0 there is nothing to recover, and ``recovered`` is
``None``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float
from scipy.stats import spearmanr

from mi_route2.validation import read_settings
from studies.common.artifacts import read_part
from studies.common.stats import Summary, summary
from studies.tracing.job import PAIRS, outdated, traced_identity
from studies.tracing.pairs import CONTRASTS, SIDES
from studies.tracing.patching import DELETION, OUT, QUESTION
from studies.tracing.settings import UNTRAINED, TracingSettings
from studies.training.manifest import MANIFEST
from studies.training.settings import Settings as Training

RESAMPLES = 2000
LEAST = 3  # minimum number of values for a rank correlation


class Share(TypedDict):
    """A value with its bootstrap bounds."""

    value: float
    lo: float
    hi: float


@dataclass(frozen=True, eq=False)
class Traces:
    """The content of a tracing folder: contents and effects by ``(arm, seed)``."""

    root: Path
    settings: TracingSettings
    training: Mapping[str, Any]
    contents: Mapping[tuple[str, int], dict[str, Any]]
    effects: Mapping[tuple[str, int], Mapping[str, Float[np.ndarray, " n"]]]
    _draws: dict[tuple[str, str], tuple[np.ndarray, list[np.ndarray]]] = field(default_factory=dict)

    @cached_property
    def arms(self) -> list[str]:
        """The traced arms: ``UNTRAINED`` first, then in the order of the settings."""
        return [arm for arm in (UNTRAINED, *self.settings.arms) if any(arm == traced for traced, _ in self.contents)]

    def seeds(self, arm: str) -> list[int]:
        return sorted(seed for traced, seed in self.contents if traced == arm)

    def cells(self, arm: str) -> list[dict[str, Any]]:
        """Return the arm's cells, as described in its artifacts."""
        return self.contents[arm, self.seeds(arm)[0]]["cells"]

    def per_seed(self, arm: str, key: str) -> list[Float[np.ndarray, " n"]] | None:
        """Return the effects of one kind on each pair, by seed; ``None`` if the arm has none."""
        values = [self.effects[arm, seed].get(key) for seed in self.seeds(arm)]
        return None if any(value is None for value in values) else values  # pyright: ignore[reportReturnType]

    def gaps(self, arm: str, contrast: str, side: str) -> list[Float[np.ndarray, " n"]]:
        """Return the effect that ``other`` needs on each pair of each seed to close the gap, in nats."""
        sign = 1 if side == "honest" else -1
        return [
            sign * (self.effects[arm, seed][f"scores/{contrast}/hack"] - self.effects[arm, seed][f"scores/{contrast}/honest"])
            for seed in self.seeds(arm)
        ]

    def resampled(self, arm: str, contrast: str, values: list[np.ndarray]) -> Float[np.ndarray, " m"]:
        """Return bootstrap means of ``values``, over resampled seeds and their resampled pairs."""
        if (arm, contrast) not in self._draws:
            rng = np.random.default_rng(0)
            # A resample is stored as counts: how often it has each seed, and each pair of that seed.
            seeds = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLES)
            pairs = [rng.multinomial(len(v), np.full(len(v), 1 / len(v)), RESAMPLES) / len(v) for v in values]
            self._draws[arm, contrast] = seeds / len(values), pairs
        seeds, pairs = self._draws[arm, contrast]
        return (seeds * np.stack([counts @ of_seed for counts, of_seed in zip(pairs, values, strict=True)], 1)).sum(1)


def load(root: Path) -> Traces:
    """Read and check a tracing folder.

    Raises:
        ValueError: If it is not a tracing folder, if a file is damaged, was changed, or was made from another run than the one that
            lies beside the study, or if a seed lacks an arm.
    """
    settings = TracingSettings.read(root / "settings.json")
    if root.name != settings.folder:
        raise ValueError(f"the settings in {root} are those of {settings.folder}: do not rename or edit a study folder")
    training = read_settings(Training, root / "training.json", "give a folder of this study")
    if training.digest != settings.training:
        raise ValueError(f"{root} does not match its settings (training.json was changed): run the study again")
    contents, effects = {}, {}
    wanted = {UNTRAINED, *settings.arms}
    for path in sorted(root.glob("seed-*/*.json")):
        if (part := read_part(path)) is None:  # a link to nothing is listed
            continue
        data, tensors = part
        in_place = path.parent.name == f"seed-{data['seed']}" and path.stem == data["arm"]  # a copy under another name is none
        if in_place and data["arm"] in wanted:
            key = data["arm"], int(data["seed"])
            run = root.parent / training.folder / path.parent.name / ("base" if data["arm"] == UNTRAINED else data["arm"])
            another = (run / MANIFEST).exists() and data["identity"] != traced_identity(settings, data["arm"], run)
            if another or outdated(path.with_name(PAIRS), training, key[1], root.parent / "warmstarts"):
                raise ValueError(
                    f"{path} was traced on another run than the one in {run}: run the study again at its seed, which traces it anew"
                )
            for cell in data.get("cells", ()):
                if "lane" in cell:  # its name in folders of before 2026-11-28
                    cell["adapter"] = cell.pop("lane")
            contents[key] = data
            effects[key] = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    seeds = {seed for _, seed in contents}
    if missing := sorted(f"{arm} at seed {seed}" for arm in wanted for seed in seeds if (arm, seed) not in contents):
        raise ValueError(f"{root} lacks {', '.join(missing)}: a run of all its seeds with these arms creates it")
    if not contents:
        raise ValueError(f"{root} contains no traces: give a tracing folder, or run the study")
    return Traces(root, settings, training.as_dict(), contents, effects)


def share(traces: Traces, arm: str, contrast: str, side: str, source: str, cell: str) -> Share | None:
    """Return ``recovered``; ``None`` if the arm has no such effect, or nothing to recover."""
    effects, gaps = traces.per_seed(arm, f"{contrast}/{side}/{source}/{cell}"), traces.gaps(arm, contrast, side)
    whole = traces.resampled(arm, contrast, gaps)
    if effects is None or np.prod(_bounds(whole)) <= 0:  # the gap's interval contains 0: a share of it would mean nothing
        return None
    ratio = traces.resampled(arm, contrast, effects) / whole
    lo, hi = _bounds(ratio)
    value = np.mean([of_seed.mean() for of_seed in effects]) / np.mean([of_seed.mean() for of_seed in gaps])
    return Share(value=float(value) + 0.0, lo=lo + 0.0, hi=hi + 0.0)  # no -0.0


def nats(traces: Traces, arm: str, key: str) -> Summary | None:
    """Return the mean over the pairs of each seed, summarized over seeds; ``None`` if the arm has no such effect."""
    values = traces.per_seed(arm, key)
    return None if values is None else summary([float(of_seed.mean()) + 0.0 for of_seed in values])


def _bounds(values: Float[np.ndarray, " m"]) -> tuple[float, float]:
    lo, hi = np.quantile(values, [0.025, 0.975])
    return float(lo), float(hi)


def rows(traces: Traces) -> list[dict[str, Any]]:
    """Return one row per arm, contrast, direction, source and cell: ``recovered`` and the effect in nats."""
    return [
        {
            "arm": arm,
            "contrast": contrast,
            "into": side,
            "source": source,
            **{name: cell[name] for name in ("where", "adapter")},
            "recovered": share(traces, arm, contrast, side, source, cell["name"]),
            "effect": effect,
        }
        for arm in traces.arms
        for contrast, side, cell, source in product(CONTRASTS, SIDES, traces.cells(arm), _sources(traces, arm))
        if (effect := nats(traces, arm, f"{contrast}/{side}/{source}/{cell['name']}")) is not None
    ]


def _sources(traces: Traces, arm: str) -> list[str]:
    first = traces.effects[arm, traces.seeds(arm)[0]]
    return list(dict.fromkeys(key.split("/")[2] for key in first if not key.startswith("scores/")))


def levels(traces: Traces) -> list[dict[str, Any]]:
    """Return the log-odds of the hack at the decision, in nats, by rollout: unchanged, without quarantine, without adapters."""
    table = []
    for arm, contrast, side in product(traces.arms, CONTRASTS, SIDES):
        scores = traces.per_seed(arm, f"scores/{contrast}/{side}")
        assert scores is not None
        row: dict[str, Any] = {"arm": arm, "contrast": contrast, "rollout": side}
        row["on"] = summary([float(of_seed.mean()) for of_seed in scores])
        for state, adapter in (("deleted", "quarantine_out"), ("base", "both")):
            if (change := _deletion(traces, arm, contrast, side, adapter)) is not None:
                row[state] = summary([float((s + c).mean()) for s, c in zip(scores, change, strict=True)])
        table.append(row)
    return table


def _deletion(traces: Traces, arm: str, contrast: str, side: str, adapter: str) -> list[np.ndarray] | None:
    """Return the effect of zeros in an adapter everywhere; ``both`` is the kept adapter alone if there is no quarantine."""
    effects = traces.per_seed(arm, f"{contrast}/{side}/{DELETION}/all:{adapter}")
    return effects if effects is not None or adapter != "both" else _deletion(traces, arm, contrast, side, "kept_out")


def agreement(traces: Traces) -> list[dict[str, Any]]:
    """Return one row per arm: whether deleting agrees with patching, exactly, in sampled rates, and in the ranks of effects.

    ``spearman`` is over single Linears and adapters: the effect of zeros against that of the honest rollout's values, both patched
    into the hacking rollout, by seed.
    """
    table = []
    for arm in traces.arms:
        contents = [traces.contents[arm, seed] for seed in traces.seeds(arm)]
        checks = {name: max(content["checks"][name] for content in contents) for name in contents[0]["checks"]}
        rates = {
            state: {name: summary([content["rates"][state][name] for content in contents]) for name in values}
            for state, values in contents[0]["rates"].items()
        }
        ranks = {contrast: summary([_rank(traces, arm, seed, contrast) for seed in traces.seeds(arm)]) for contrast in CONTRASTS}
        table.append({"arm": arm, "checks": checks, "rates": rates, "spearman": ranks})
    return table


def points(traces: Traces, arm: str, seed: int, contrast: str) -> list[tuple[str, str, float, float]]:
    """Return, by Linear and adapter, their names and mean effects of zeros and of the honest values in the hacking rollout."""

    def effect(source: str, cell: str) -> float:
        return float(traces.effects[arm, seed][f"{contrast}/hack/{source}/{cell}"].mean())

    single = [cell for cell in traces.cells(arm) if cell["adapter"] in OUT and cell["sites"] == 1]
    return [(cell["where"], cell["adapter"], effect(DELETION, cell["name"]), effect(QUESTION, cell["name"])) for cell in single]


def _rank(traces: Traces, arm: str, seed: int, contrast: str) -> float | None:
    both = np.array([point[2:] for point in points(traces, arm, seed, contrast)])
    if len(both) < LEAST or np.ptp(both, 0).min() == 0:  # equal values have no ranks
        return None
    return float(spearmanr(both).statistic)  # pyright: ignore[reportAttributeAccessIssue]
