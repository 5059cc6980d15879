"""Probes over training: what the same probes see in several arms of a run folder, over its seeds.

    python -m studies.route2 watch runs/persona-20-dbae6649 --arms vanilla-10 vanilla-20 vanilla-40 vanilla --seeds 352-359

    <preset>-watch.json   of the deployed model, per arm, layer and probe the value of each seed: AUROC in the known mode and over
                          the held-out ones (a seed's mean is over those with both hacks and clean rollouts), their random band,
                          expected calibration error
    <preset>-watch.md     the means as one table
    <preset>-watch.png    AUROC over the held-out modes against the step at which the run was stopped

Every policy is probed by fresh probes, fitted on its own rollouts of the known mode, except for ``direction``, which knows the ten
pairs alone. A seed whose policy hacks too rarely or too often for a fit is left out, and counted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mi_route2.files import write_whole
from mi_route2.plots import BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, PURPLE, new_figure, save_figure, style
from mi_route2.validation import read_object
from studies.common.publishing import compact, update_showing
from studies.common.stats import Summary, mean, summary
from studies.common.tables import interval, markdown_table, number, write_texts
from studies.common.workers import Executor, run_each
from studies.route2.probing import GRADIENT, probe
from studies.route2.report.figures import draw_means
from studies.route2.report.load import read_report
from studies.route2.report.measures import stopped_after
from studies.training.job import Job
from studies.training.manifest import read_manifest

EACH = "held out: "
"""Beginning of the columns of single held-out modes."""
STYLES = {"direction": (ORANGE, "v"), "mean_difference": (GREEN, "P"), "lda": (PURPLE, "^"), "logistic": (BLUE, "o")}
AGAIN = "delete it, and run `python -m studies.route2 watch` again"


@dataclass(frozen=True)
class ProbedJob:
    """One policy to probe: a finished job, rollouts a mode, and where its numbers go."""

    job: Job
    per_mode: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.job.name}-{self.job.seed}.json"

    @property
    def label(self) -> dict[str, Any]:
        """Everything that the numbers depend on: the settings, and the files of the run, which may have been made again."""
        trained = read_manifest(self.job.folder).checksums if self.job.finished else None
        return {"identity": self.job.identity, "trained": trained, "per_mode": self.per_mode}

    @property
    def numbers(self) -> dict[str, dict[str, float | None]] | None:
        """The numbers by layer and probe, from the file; ``None`` if there is none of these settings, or one of means alone."""
        if not self.path.exists():
            return None
        stored = read_object(self.path, AGAIN)
        known = stored.get("modes") is not None and all(stored.get(name) == value for name, value in self.label.items())
        return stored["probes"] if known else None


def measure(part: ProbedJob) -> None:
    """Probe one policy and write its numbers; there are none if nothing can be fitted to it."""
    probed = probe(part.job, part.per_mode, False, ("rollout",))
    rows = [row for row in probed.rows() if row["state"] == "deploy"]
    probes: dict[str, dict[str, float | None]] = {}
    for layer, name in dict.fromkeys((row["layer"], row["probe"]) for row in rows):
        same = [row for row in rows if (row["layer"], row["probe"]) == (layer, name)]
        # probes are fitted on the first of the known modes
        held_out = [row for row in same if row["mode"] in probed.modes.held_out]
        probes[f"{layer} {name}"] = {
            "known": next(row["auroc"] for row in same if row["known"]),
            "held": mean([row["auroc"] for row in held_out]),
            "random": mean([row["random_p95"] for row in held_out]),
            "ece": mean([row["ece"] for row in held_out]),
            **{f"{EACH}{row['mode']}": row["auroc"] for row in held_out},
        }
    part.folder.mkdir(parents=True, exist_ok=True)
    record = part.label | {"modes": probed.modes.held_out, "probes": probes}
    write_whole(part.path, json.dumps(record, allow_nan=False).encode())


@dataclass(frozen=True)
class Watch:
    """Content of watch.json: ``values[arm][layer and probe][column]`` by seed; ``None`` if nothing could be fitted.

    Files of earlier versions have no columns of single modes.
    """

    preset: str
    per_mode: int
    seeds: tuple[int, ...]
    values: Mapping[str, Mapping[str, Mapping[str, list[float | None]]]]

    @staticmethod
    def read(path: Path) -> "Watch":
        """Read what ``write_watch`` wrote; errors are those of `read_report`."""
        return read_report(Watch, path, AGAIN)

    def summary(self, arm: str, probe: str, column: str) -> Summary:
        return summary(self.values[arm][probe][column])

    def modes(self, arm: str, probe: str) -> str:
        """Return of how many held-out modes the means of single seeds are; empty if of all, or if the file does not tell."""
        columns = self.values[arm][probe]
        each = [column for name, column in columns.items() if name.startswith(EACH)]
        counts = [sum(value is not None for value in seed) for seed in zip(*each) if any(value is not None for value in seed)]
        least, most = min(counts, default=len(each)), max(counts, default=len(each))
        if least == len(each):
            return ""
        return f"{least if least == most else f'{least} to {most}'} of {len(each)} modes"


def write_watch(jobs: Sequence[Job], per_mode: int, workers: int, to: Path) -> list[Path]:
    """Probe finished jobs of one run folder, as far as that is still to be done, and write the report into ``to``.

    Raises:
        ValueError: A job is not finished, or no policy hacks at times.
    """
    probed = [ProbedJob(job, per_mode, job.root / "watch") for job in jobs]
    left = [part for part in probed if part.numbers is None]
    if lost := run_each(measure, left, workers=workers, executor=Executor(), folder=to, what="probing"):
        raise RuntimeError("; ".join(reason for _, reason in lost))
    arms, seeds = list(dict.fromkeys(job.name for job in jobs)), list(dict.fromkeys(job.seed for job in jobs))
    numbers = {(part.job.name, part.job.seed): part.numbers or {} for part in probed}
    if not any(numbers.values()):
        raise ValueError(f"no policy of {', '.join(arms)} hacks at times: choose other arms or seeds, or a larger --per-mode")
    probes = sorted({name for measured in numbers.values() for name in measured}, key=_order)
    columns = list(dict.fromkeys(column for measured in numbers.values() for one in measured.values() for column in one))
    values = {
        arm: {
            name: {column: [numbers[arm, seed].get(name, {}).get(column) for seed in seeds] for column in columns}
            for name in probes
        }
        for arm in arms
    }
    watch = Watch(jobs[0].settings.preset, per_mode, tuple(seeds), values)
    to.mkdir(parents=True, exist_ok=True)
    stem = f"{watch.preset}-watch"
    written = write_texts(to, {f"{stem}.json": compact(asdict(watch)), f"{stem}.md": table(watch)})
    written.append(figure(watch, to / f"{stem}.png"))
    return [*written, *update_showing(to)]


def _order(name: str) -> tuple[bool, str, int]:
    """Order layers by name with fingerprints last, and the probes of a layer as ``STYLES`` does."""
    layer, _, kind = name.partition(" ")
    return layer == GRADIENT, layer, list(STYLES).index(kind)


def shown(watch: Watch) -> dict[str, list[str]]:
    """Return the layers that are shown with their probes: the residual stream after the last block, and fingerprints."""
    every = next(iter(watch.values.values()))
    blocks = [int(match[1]) for name in every if (match := re.match(r"blocks\.(\d+) ", name))]
    layers = [f"blocks.{max(blocks)}"] * bool(blocks) + [GRADIENT]
    return {layer: [name for name in every if name.startswith(f"{layer} ")] for layer in layers}


def table(watch: Watch) -> str:
    """Return the means as a table: per arm AUROC in the known mode and over the held-out ones, and ECE in the last arm."""
    arms, body = list(watch.values), []
    for layer, probes in shown(watch).items():
        for name in probes:
            cells: list[str] = []
            for arm in arms:
                cells += [number(watch.summary(arm, name, "known")["mean"]), interval(watch.summary(arm, name, "held"))]
            body.append([layer, name.partition(" ")[2], *cells, number(watch.summary(arms[-1], name, "ece")["mean"])])
        for name in probes[:1]:  # random directions are the same for all of them
            bands = [["", number(watch.summary(arm, name, "random")["mean"])] for arm in arms]
            body.append([layer, "random, 95th percentile", *(cell for band in bands for cell in band), ""])
    header = ["layer", "probe"]
    for arm in arms:
        first = next(iter(shown(watch).values()))[0]  # all probes are tested on the same rollouts
        n, n_held_out = (watch.summary(arm, first, column)["n"] for column in ("known", "held"))
        told = ("held out", "" if n_held_out == n else f"n {n_held_out}", watch.modes(arm, first))
        header += [f"{arm}, n {n}: known", ", ".join(word for word in told if word)]
    return markdown_table([*header, f"{arms[-1]}: ECE, held out"], body, left=2)


def figure(watch: Watch, path: Path) -> Path:
    """Draw AUROC over held-out modes against the step at which the arm was stopped; bars are intervals over seeds."""
    arms, layers = list(watch.values), shown(watch)
    ordinary = all(stopped_after(arm) != arm for arm in arms)
    with style():
        drawn = new_figure(PAGE_WIDTH, 3.4)
        for ax, (layer, probes) in zip(np.atleast_1d(drawn.subplots(1, len(layers), sharey=True)), layers.items(), strict=True):
            for name in probes:
                kind = name.partition(" ")[2]
                color, marker = STYLES[kind]
                means = [watch.summary(arm, name, "held") for arm in arms]
                draw_means(ax, np.arange(len(arms)), means, color=color, marker=marker, markersize=4, linewidth=0.8, label=kind)
            band = np.array([watch.summary(arm, probes[0], "random")["mean"] for arm in arms], dtype=float)
            place = range(len(arms)) if len(arms) > 1 else (-0.4, 0.4)  # a line over one place has no length
            ax.plot(place, np.resize(band, len(place)), color=GRAY, linestyle=":", label="random, 95th percentile")
            labels = [f"{stopped_after(arm) if ordinary else arm}\n{watch.modes(arm, probes[0])}".strip() for arm in arms]
            ax.set_xticks(range(len(arms)), labels)
            ax.set_title(f"{watch.preset}, {'fingerprints' if layer == GRADIENT else f'stream after {layer}'}")
            ax.set_xlabel("steps of ordinary training" if ordinary else "arm")
        ax.set_ylim(top=1.02)  # a shared axis, as low as the lowest bar
        drawn.axes[0].set_ylabel("AUROC, held-out modes")
        drawn.axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return save_figure(drawn, path)
