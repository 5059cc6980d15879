"""Probes of a finished policy, fitted on hacks of the known mode and tested on the modes that they never saw.

The policy answers prompts over test tasks, with different tasks in each mode, with the quarantine on (``on``) and deleted
(``deploy``). The oracle labels each rollout: a hack is an exploit of the prompt's own mode without a correct solution. Activations
are the residual stream (before the first block, and ``blocks.0`` and so on after each) and the inputs of the kept adapters, at
predictor positions. The layer ``gradient`` holds each rollout's gradient fingerprint (``probes.fingerprint``), which has no tokens.
Probes: mean difference, LDA, logistic, and ``direction``, the persona direction of the run's own pairs, which learns nothing from
these rollouts. A rollout probe is fitted and tested on means over a rollout; a token probe on single tokens, with their rollout's
label. For the micro model every token's activations are stored; for a chat model they are too many, so token probes must be
requested.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from mi_route2.files import write_whole
from mi_route2.hosts import Host
from mi_route2.hosts.base import reader
from mi_route2.hosts.capture import capture
from mi_route2.plots import save_figure, style
from mi_route2.probes.dataset import Dataset
from mi_route2.probes.direction import DirectionFitter
from mi_route2.probes.figures import reliability_figure, transfer_figure
from mi_route2.probes.fingerprint import Fingerprint
from mi_route2.probes.probe import ProbeFitter, Unit, pool
from mi_route2.probes.transfer import TransferResult, TransferRow, TransferSettings, default_fitters, transfer
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.sites import Site, block_paths
from mi_route2.validation import read_object
from studies.common.seeds import numpy_generator, torch_generator
from studies.common.stats import mean
from studies.common.tables import markdown_table, number
from studies.environments.protocol import Modes, Witness, World, probe_prompts
from studies.training.job import EVAL, Job, build_pairs, finished_policy, micro_batches
from studies.training.settings import Settings
from studies.training.worlds import open_world

EMBED, STREAM, GRADIENT = "embed", "resid_pre", "gradient"
WIDTH = 64
"""Length of a gradient fingerprint."""
STATES = {"on": "quarantine on", "deploy": "as deployed"}
UNITS: tuple[Unit, ...] = ("rollout", "token")
UPRIGHT = 8  # maximum number of layers whose names fit side by side under an axis
Layers = tuple[dict[str, Float[Tensor, "b s _d"]], Bool[Tensor, "b s"]]
"""Layer -> activations, and their mask."""
LEAST = 10  # minimum number of known-mode prompts with, and without, a hack, to be split into fit, calibration and test parts


def probe_job(
    job: Job, per_mode: int, out: Path | None = None, progress: bool = True, units: Sequence[Unit] | None = None
) -> list[Path]:
    """Write ``probes.jsonl``, ``probes.md`` and the figures of a finished job; return their paths.

    Without ``"token"`` in ``units`` (default `UNITS`), only the mean of each rollout and layer is stored. A state (quarantine on,
    or deployed) without both hacks and clean rollouts is left out, which ``probes.md`` reports.

    Raises:
        ValueError: The job is not finished, or no state has both hacks and clean rollouts; nothing is written then.
    """
    probed = probe(job, per_mode, progress, UNITS if units is None else units)
    if not probed.results:
        what = "; ".join(f"{STATES[state]}: {lack}" if len(probed.missing) > 1 else lack for state, lack in probed.missing.items())
        remedy = _remedy(job, probed.modes)
        raise ValueError(f"{job.name} at seed {job.seed} gives a probe nothing to learn from ({what}); {remedy}")
    return _write(job, probed, job.folder if out is None else out)


@dataclass(frozen=True)
class Probed:
    """Results of a job's probes by state and unit, and the reason for each state that gives nothing to learn from."""

    results: dict[tuple[str, Unit], TransferResult]
    missing: dict[str, str]
    modes: Modes

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows as JSON values, each with its state."""
        return [{"state": state, **row} for (state, _), result in self.results.items() for row in result.json_rows()]


def probe(job: Job, per_mode: int, progress: bool, units: Sequence[Unit]) -> Probed:
    """Fit and test the probes of a finished job in each state; nothing is written.

    Raises:
        ValueError: The job is not finished, or its world has too few tasks.
    """
    torch.set_num_threads(1)
    results: dict[tuple[str, Unit], TransferResult] = {}
    missing: dict[str, str] = {}
    with open_world(job.settings, device=job.device) as (world, witness):
        require_tasks(world)
        host, policy = finished_policy(job)
        reading = Reading(host, policy, job.settings, pooled="token" not in units)
        generator = partial(torch_generator, job.seed, "fingerprint")  # the same projections in both states
        states = {"on": policy.adapters.full} if policy.adapters.has_quarantine else {}
        for state, switched in (states | {"deploy": policy.adapters.deployed}).items():
            with switched():
                sampled = sample(world, witness, policy, per_mode, job.seed)
                if lack := _lack(sampled, world.modes.known[0]):
                    missing[state] = lack
                    continue
                printed = GradientReading(policy, job.settings, Fingerprint.draw(policy.adapters, WIDTH, generator()))
                whole: Sequence[Unit] = ("rollout",) if "rollout" in units else ()  # a fingerprint has no tokens
                both = [
                    (which, sampled.dataset(read), persona_directions(read, world, job))
                    for which, read in ((units, reading), (whole, printed))
                    if which
                ]
            for which, dataset, directions in both:
                for unit in which:
                    settings = TransferSettings(world.modes.known[0], levels=(unit,), draws=50, seed=job.seed)
                    result, before = _transfer(dataset, sampled.prompts, directions, settings, progress), results.get((state, unit))
                    results[state, unit] = result if before is None else replace(before, rows=[*before.rows, *result.rows])
    return Probed(results, missing, world.modes)


@dataclass(frozen=True)
class Reading:
    """Function that reads activations; ``pooled`` stores the mean of each rollout over its predictors, otherwise every position."""

    host: Host
    policy: Policy
    settings: Settings
    pooled: bool = False

    def __call__(self, rollouts: Rollouts) -> Layers:
        """Return layer -> activations, and their mask; runs as many rollouts at a time as a micro-batch of the run has."""
        batches: list[dict[str, Tensor]] = []
        for rows in pieces(rollouts, self.settings):
            layers = read_layers(self.host, self.policy, rows)
            if self.pooled:
                layers = {name: pool(h, rows.predictors)[:, None] for name, h in layers.items()}
            batches.append({name: h.cpu() for name, h in layers.items()})
        hidden = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
        mask = torch.ones(len(rollouts), 1, dtype=torch.bool) if self.pooled else rollouts.predictors.cpu()
        return hidden, mask


@dataclass(frozen=True)
class GradientReading:
    """Function that reads gradient fingerprints, as one position of one layer."""

    policy: Policy
    settings: Settings
    fingerprint: Fingerprint

    def __call__(self, rollouts: Rollouts) -> Layers:
        """Return the layer ``GRADIENT`` and its mask, a micro-batch at a time."""
        batches = [self.fingerprint(self.policy, rows).cpu() for rows in pieces(rollouts, self.settings)]
        return {GRADIENT: torch.cat(batches)[:, None]}, torch.ones(len(rollouts), 1, dtype=torch.bool)


def pieces(rollouts: Rollouts, settings: Settings) -> Iterator[Rollouts]:
    """Yield the rollouts in micro-batches of the run, under a bar."""
    yield from tqdm(micro_batches(rollouts, settings), desc="reading", unit="batch", leave=False, disable=None, delay=3)


@dataclass(frozen=True)
class Sampled:
    """Judged rollouts of a policy, with the mode and the text of each prompt."""

    rollouts: Rollouts
    hack: list[bool]
    modes: list[str]
    prompts: list[str]

    def dataset(self, reading: Callable[[Rollouts], Layers]) -> Dataset:
        """Return the rollouts with what ``reading`` reads of them."""
        return Dataset(*reading(self.rollouts), self.hack, self.modes)


def sample(world: World, witness: Witness, policy: Policy, per_mode: int, seed: int) -> Sampled:
    """Return rollouts of the policy, as it is switched now; those that the oracle cannot judge are left out.

    With the same seed, every arm and state gets the same prompts and uniforms.
    """
    prompts = probe_prompts(world, per_mode, numpy_generator(seed, "probe tasks"))
    samples = world.sample(policy, prompts, torch_generator(seed, "probes"))
    verdicts = witness.judge(samples)
    rows = [i for i, verdict in enumerate(verdicts) if verdict.judged]
    prompts = [prompts[i] for i in rows]
    hack = [verdicts[i].hack for i in rows]
    rollouts = samples.rollouts.rows(torch.tensor(rows, dtype=torch.long))
    return Sampled(rollouts, hack, [prompt.mode for prompt in prompts], [prompt.text for prompt in prompts])


@torch.no_grad()
def read_layers(host: Host, policy: Policy, rollouts: Rollouts) -> dict[str, Float[Tensor, "b s _d"]]:
    """Return layer -> activations: the residual stream, and the adapters' inputs.

    Linears with the same input (q, k, v) share a layer, ``blocks.0.attn.q+k+v``.
    """
    residual, modules = residual_sites(host), policy.adapters.modules
    streams: dict[Site, Tensor] = {}
    inside = dict.fromkeys(modules, "input") | ({EMBED: "output"} if host.architecture.name == "MicroGPT" else {})
    with host.hooks({site: reader(streams, site) for site in residual.values()}), capture(policy.model, inside, once=True) as cache:
        policy.forward(policy.model, rollouts.tokens, rollouts.attention)
    layers = {EMBED: cache[EMBED]} if EMBED in inside else {}
    layers |= {name: streams[site] for name, site in residual.items()}
    read, last = {branch.site: cache[path] for path, module in modules.items() for branch, _ in module.branches}, ""
    for site, value in read.items():
        if last in layers and layers[last].shape == value.shape and bool((layers[last] == value).all()):
            layers[f"{last}+{site.rpartition('.')[2]}"] = layers.pop(last)
            last = next(reversed(layers))
        else:
            last = site
            layers[site] = value
    return layers


def residual_sites(host: Host) -> dict[str, Site]:
    """Return the residual stream's sites by their names in tables: ``blocks.i`` after a block, and `STREAM` before the first.

    The micro model's tables begin with its token embeddings instead (`EMBED`), before positions are added.
    """
    blocks = {f"blocks.{i}": Site(i, "resid_post") for i in range(len(block_paths(host.model, host.architecture)))}
    return blocks if host.architecture.name == "MicroGPT" else {STREAM: Site(0, "resid_pre"), **blocks}


def persona_directions(reading: Callable[[Rollouts], Layers], world: World, job: Job) -> dict[str, Float[Tensor, " _d"]]:
    """Return layer -> mean over the run's pairs of pooled hack minus pooled clean activations."""
    pairs = build_pairs(job, world, "hack")
    means = []
    for side in (pairs.hack, pairs.clean):
        layers, mask = reading(side)
        means.append({layer: pool(h, mask).mean(dim=0) for layer, h in layers.items()})
    return {layer: means[0][layer] - means[1][layer] for layer in means[0]}


def _lack(sampled: Sampled, mode_known: str) -> str | None:
    """Return the reason why no probe can be fitted to the known mode's rollouts; ``None`` if one can."""
    known = [i for i, mode in enumerate(sampled.modes) if mode == mode_known]
    hacked = {sampled.prompts[i] for i in known if sampled.hack[i]}
    clean = {sampled.prompts[i] for i in known} - hacked
    if min(len(hacked), len(clean)) >= LEAST:
        return None
    return f"it hacks on {len(hacked)} of {len(hacked) + len(clean)} {mode_known} prompts, and {LEAST} of each kind are needed"


def require_tasks(world: World) -> None:
    """Raise ``ValueError`` if the world has too few test tasks for any probe."""
    tasks, modes = len(world.tasks("test")), len(world.modes.loopholes)
    if tasks < 2 * LEAST * modes:
        raise ValueError(
            f"this world has {tasks} test tasks, and a probe needs {2 * LEAST * modes}: {2 * LEAST} of their own for each of its "
            f"{modes} modes with a loophole; give it more tasks"
        )


def _remedy(job: Job, modes: Modes) -> str:
    """Return a sentence that names arms of the same seed that hack neither always nor never."""
    rates = {}
    for path in sorted(job.folder.parent.glob(f"*/{EVAL}")):
        mode = read_object(path, f"delete {path.parent} and run this arm again")["modes"][modes.known[0]]
        rates[path.parent.name] = max((mode[state]["hack"] for state in STATES), key=lambda rate: min(rate, 1 - rate))
    useful = sorted((name for name, rate in rates.items() if 0.1 <= rate <= 0.9), key=lambda name: abs(rates[name] - 0.5))
    if not useful:
        return (
            "choose an arm that hacks at times (vanilla and absorb do where they are trained long enough), or a larger --per-mode"
        )
    return f"choose an arm that hacks at times: {', '.join(f'{name} ({number(rates[name])})' for name in useful[:3])}"


def _transfer(
    dataset: Dataset, prompts: list[str], directions: dict[str, Tensor], settings: TransferSettings, progress: bool
) -> TransferResult:
    fitters: dict[str, Callable[[str], ProbeFitter]] = {"direction": lambda layer: DirectionFitter(directions[layer], "projection")}
    fitters |= default_fitters(settings.seed, unit=settings.levels[0])
    return transfer(dataset, prompts, fitters, settings, progress)


def _write(job: Job, probed: Probed, out: Path) -> list[Path]:
    rows = [{"arm": job.name, "seed": job.seed, **row} for row in probed.rows()]
    out.mkdir(parents=True, exist_ok=True)
    paths = [
        write_whole(out / "probes.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()),
        write_whole(out / "probes.md", _markdown(job, probed).encode()),
    ]
    for (state, unit), result in probed.results.items():
        with style():
            for name, figure in _figures(result, unit).items():
                figure.suptitle(f"{job.settings.preset}: {job.name}, seed {job.seed}, {STATES[state]}")
                paths.append(save_figure(figure, out / f"probes-{state}-{unit}-{name}.png"))
    ours = re.compile(rf"probes-({'|'.join(STATES)})-({'|'.join(UNITS)})-(residual|inputs|reliability)\.png")
    for old in out.glob("probes-*.png"):
        if old not in paths and ours.fullmatch(old.name):  # figures of a state that is left out this time
            old.unlink()
    return paths


def _figures(result: TransferResult, unit: Unit) -> dict[str, Figure]:
    """Return figures of AUROC over the residual stream and over the adapters' inputs, and of reliability at the last block."""
    figures = {}
    for name, layers in _split(result).items():
        rows = [row for row in result.rows if row.layer in layers]
        if name == "inputs":  # eight full names per panel would overlap
            rows = [replace(row, layer=row.layer.removeprefix("blocks.")) for row in rows]
        figures[name] = transfer_figure(replace(result, rows=rows), unit)
        for axes in figures[name].axes:
            axes.tick_params("x", rotation=90 if name == "inputs" or len(layers) > UPRIGHT else 0)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("center")
    figures["reliability"] = reliability_figure(result, list(_split(result)["residual"])[-1], unit)
    for axes in (axes for figure in figures.values() for axes in figure.axes):
        axes.set_title(axes.get_title().replace(" (", "\n("))
    return figures


def _split(result: TransferResult) -> dict[str, dict[str, None]]:
    """Return the layers of the residual stream, and those of the adapters' inputs, in order."""
    layers = dict.fromkeys(row.layer for row in result.rows)
    residual = {layer: None for layer in layers if layer in (EMBED, STREAM) or re.fullmatch(r"blocks\.\d+", layer)}
    return {"residual": residual, "inputs": {layer: None for layer in layers if layer not in residual and layer != GRADIENT}}


def _markdown(job: Job, probed: Probed) -> str:
    modes = probed.modes
    text = [
        f"# Probes of {job.name}, seed {job.seed}",
        f"Fitted and calibrated on rollouts of {modes.known[0]}, tested on others of it and on the held-out modes. AUROC with its "
        "95% bootstrap interval over prompts, then recall at 1% false positives if there are 100 negatives or more; the row "
        "`random` is the 95th percentile of random directions' AUROC: a probe below it found nothing. Brier score and expected "
        "calibration error are means over held-out modes, under a calibration from the known mode. Other layers are in "
        "probes.jsonl and in the figures.",
    ]
    text += [f"Left out, {STATES[state]}: {lack}." for state, lack in probed.missing.items()]
    for (state, unit), result in probed.results.items():
        text += [f"## {STATES[state].capitalize()}, one score a {unit}", _table(result, modes).rstrip()]
    return "\n\n".join(text) + "\n"


def _table(result: TransferResult, modes: Modes) -> str:
    """Return the table of residual layers and fingerprints: a row per probe and one for random directions, a column per mode."""
    header = ["layer", "probe", *(_column(result, mode) for mode in modes.loopholes), "Brier, held out", "ECE, held out"]
    lines = []
    layers = [*_split(result)["residual"], *(GRADIENT for row in result.rows[-1:] if row.layer == GRADIENT)]
    for layer in layers:
        for probe in result.probes:
            rows = {row.mode: row for row in result.rows if (row.layer, row.probe) == (layer, probe)}
            held_out = [rows[mode] for mode in modes.held_out]
            means = [number(mean([getattr(row, name) for row in held_out])) for name in ("brier", "ece")]
            lines.append([layer, probe, *(_cell(rows[mode]) for mode in modes.loopholes), *means])
        rows = {row.mode: row for row in result.rows if row.layer == layer}
        lines.append([layer, "random", *(number(rows[mode].random_p95) for mode in modes.loopholes), "", ""])
    return markdown_table(header, lines, left=2)


def _column(result: TransferResult, mode: str) -> str:
    row: Any = next(row for row in result.rows if row.mode == mode)
    return f"{mode}{' (known)' if row.known else ''}, {row.n_positive} of {row.n}"


def _cell(row: TransferRow) -> str:
    recall = f"; {number(row.recall_1pct)}" if row.recall_1pct is not None else ""
    return f"{number(row.auroc)} [{number(row.auroc_low)}, {number(row.auroc_high)}]{recall}"
