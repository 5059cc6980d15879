"""Share of a hack that each adapter of a chat model carries in each of its blocks, by leaving it out of finished runs.

    python -m studies.tracing blocks runs/chat-<hash> --arms vanilla quarantine-first

Prompts are of tasks that nothing was trained on. The arm itself, with both adapters, answers them, and so does the base model: an
answer of the arm that cheats and one of the base model that does not make a pair, if a prompt has both. So what is asked is where
the arm's own hacks are learned, and not whether. (Hacks that the base model writes are other texts than those that an arm has come
to prefer: their log-probability falls while the arm learns to cheat.) With ``S = log p(hack | prompt) - log p(honest | prompt)`` in
nats, where the adapters of a set ``A`` are on (each whole, or in some blocks), an adapter carries

    into   (S_A - S_none) / (S_all - S_none)            the adapter alone, put into the base model
    out    (S_all - S_without A) / (S_all - S_none)     the adapter left out of the whole

with means over pairs. An adapter that does nothing elsewhere carries as much both ways. The folder ``--out`` gets

    pairs-<arm>-<seed>.json       the pairs, as text
    <arm>-<seed>.json             S of every pair, in nats, under every set of adapters; an arm that has one is not asked again
    blocks.md, blocks.png         shares, with 95% intervals over the pairs of a seed (bootstrap of the ratio of means); none where
                                  the interval of the denominator contains 0
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from tqdm import tqdm

from mi_route2.adapters import Adapters
from mi_route2.files import write_whole
from mi_route2.plots import BLUE, GRAY, ORANGE, PAGE_WIDTH, new_figure, save_figure, style
from mi_route2.rollouts import Policy
from mi_route2.validation import read_object, write_json
from studies.common.seeds import numpy_generator, torch_generator
from studies.common.tables import UNDEFINED, markdown_table, number
from studies.common.workers import exclusive
from studies.environments.protocol import Witness, World
from studies.training.arms import ARMS
from studies.training.job import FULL, Job, finished_policy, micro_batches
from studies.training.manifest import read_manifest
from studies.training.settings import Settings
from studies.training.worlds import open_world

WAYS = ("into", "out")
COLORS = {"kept": BLUE, "quarantine": ORANGE}
EVERYWHERE = "all"
DRAWS = 2000
AGAIN = "delete it, and run the command again"


def trace(
    root: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    prompts: int,
    answers: int,
    groups: int,
    pairs_file: Path | None = None,
) -> list[Path]:
    """Trace finished runs of ``root`` and write everything to ``out``; return the paths of the table and the figure.

    Args:
        root: A run folder of ``studies.route2``.
        arms: Arms that are finished there.
        seeds: Their seeds.
        out: Folder of the results.
        prompts: Test tasks, each under every loophole.
        answers: Answers of the arm, and of the base model, to each of these prompts.
        groups: Into how many groups of neighbouring blocks an adapter is cut.
        pairs_file: The persona pairs that the run was given, if it was given its own.

    Raises:
        ValueError: Runs of the micro model, an arm that is not finished, or one that gives no pair.
    """
    settings = Settings.read(root / "settings.json")
    if settings.chat is None:
        raise ValueError(f"{root} has runs of the micro model: `python -m studies.tracing run` traces these")
    with exclusive(out):
        nats_by_run: dict[tuple[str, int], Mapping[str, Any]] = {}
        for seed in tqdm(seeds, desc="tracing", unit="seed", leave=False):
            jobs = [Job.of(root, seed, ARMS[arm], pairs_file) for arm in arms]
            with open_world(jobs[0].settings) as (world, witness):
                for job, arm in zip(jobs, arms, strict=True):
                    _, policy = finished_policy(job)
                    pairs = _pairs(out / f"pairs-{arm}-{seed}.json", world, witness, policy, job, prompts, answers)
                    question = {**_run(job), "groups": groups, "pairs": [list(pair) for pair in pairs]}
                    path = out / f"{arm}-{seed}.json"
                    if not path.exists() or (kept := read_object(path, AGAIN)).get("question") != question:
                        kept = {"question": question, "nats": _measure(job, world, policy, pairs, groups)}
                        write_json(path, kept)
                    nats_by_run[arm, seed] = kept["nats"]
        return [_table(nats_by_run, out / "blocks.md"), _figure(nats_by_run, settings.preset, out / "blocks.png")]


def _run(job: Job) -> dict[str, str]:
    """Return the identity of a run: its settings and its final weights, which differ between versions of the code."""
    return {"identity": job.identity, "trained": read_manifest(job.folder).checksums[FULL]}


def _pairs(
    path: Path, world: World, witness: Witness, policy: Policy, job: Job, prompts: int, answers: int
) -> list[tuple[str, str, str, str]]:
    """Return mode, prompt, hack of the arm and honest answer of the base of every pair; sampled once and then read."""
    question = {**_run(job), "prompts": prompts, "answers": answers}
    if path.exists() and (kept := read_object(path, AGAIN)).get("question") == question:
        return [(pair["mode"], pair["prompt"], pair["hack"], pair["honest"]) for pair in kept["pairs"]]
    questions = [world.prompt(task, mode) for task in world.tasks("test")[:prompts] for mode in world.modes.loopholes]
    asking = [prompt for prompt in questions for _ in range(answers)]
    with policy.adapters.reference():
        base = world.sample(policy, asking, torch_generator(job.seed, "blocks"))
    with policy.adapters.full():
        answered = world.sample(policy, asking, torch_generator(job.seed, "blocks", 1))
    judged, cheating = witness.judge(base), witness.judge(answered)
    pairs = []
    for i, prompt in enumerate(questions):
        rows = range(i * answers, (i + 1) * answers)
        hacks = [row for row in rows if cheating[row].exploit]
        honest = sorted((row for row in rows if not judged[row].exploit), key=lambda row: not judged[row].gt)
        if hacks and honest:
            pairs.append((prompt.mode, prompt.text, answered.completions[hacks[0]], base.completions[honest[0]]))
    if not pairs:
        raise ValueError(
            f"none of {len(questions)} prompts has a hack of the arm and an honest answer of the base model: ask more --answers"
        )
    names = ("mode", "prompt", "hack", "honest")
    write_json(path, {"question": question, "pairs": [dict(zip(names, pair, strict=True)) for pair in pairs]})
    return pairs


def _measure(
    job: Job, world: World, policy: Policy, pairs: Sequence[tuple[str, str, str, str]], groups: int
) -> dict[str, list[float]]:
    """Return ``S`` of every pair by set of adapters: ``none``, ``all``, and ``into`` and ``out`` of each, whole and in groups."""
    prompts = [prompt for _, prompt, *_ in pairs]
    sides = [world.encode(prompts, [pair[side] for pair in pairs]) for side in (2, 3)]  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def nats() -> list[float]:
        hack, honest = (
            torch.cat([policy.logprobs(part.to(policy.device)).double().sum(1).cpu() for part in micro_batches(side, job.settings)])
            for side in sides
        )
        return (hack - honest).tolist()

    named_by_adapter = {adapter: places(policy.adapters, adapter, groups) for adapter in COLORS}
    every = {name for named in named_by_adapter.values() for name in named[EVERYWHERE]}
    sets = {"none": set(), "all": every}
    for adapter, named in named_by_adapter.items():
        for group, names in named.items():
            if names:
                sets |= {f"into {adapter} {group}": names, f"out {adapter} {group}": every - names}
    with policy.adapters.full():
        nats_by_set = {}
        for name, on in tqdm(sets.items(), desc=job.name, unit="set", leave=False):
            with only(policy.adapters, on):
                nats_by_set[name] = nats()
    return nats_by_set


def places(adapters: Adapters, adapter: str, groups: int) -> dict[str, set[str]]:
    """Return the names of an adapter's tensors by group of blocks (``0-4``), and all of them."""
    tensors = {name for name in adapters.tensors() if name.startswith(f"{adapter}.")}
    inside = re.compile(r"\w+\.blocks\.(\d+)\.")  # not at the unembedding
    layer = {name: int(match[1]) for name in tensors if (match := inside.match(name))}
    cuts = np.array_split(sorted(set(layer.values())), min(groups, len(set(layer.values())))) if layer else []
    named = {f"{part[0]}-{part[-1]}": {name for name, at in layer.items() if at in part} for part in cuts}
    return named | {EVERYWHERE: tensors}


@contextmanager
def only(adapters: Adapters, on: set[str]) -> Iterator[None]:
    """Context: of all tensors of the adapters, those not named are 0."""
    off = {name: (tensor, tensor.clone()) for name, tensor in adapters.tensors().items() if name not in on}
    try:
        for tensor, _ in off.values():
            tensor.zero_()
        yield
    finally:
        for tensor, before in off.values():
            tensor.copy_(before)


def share(
    nats: Mapping[str, Sequence[float]], way: str, adapter: str, group: str, rng: np.random.Generator
) -> tuple[float, float | None, float | None] | None:
    """Return the share that an adapter carries ``into`` or ``out``, and its 95% interval over pairs, which one pair does not have.

    ``None`` if the interval of ``S_all - S_none`` contains 0: there is nothing to share.
    """
    none, whole, single = (np.array(nats[name]) for name in ("none", "all", f"{way} {adapter} {group}"))
    part, gap = single - none if way == "into" else whole - single, whole - none
    drawn = rng.integers(len(part), size=(DRAWS, len(part)))
    gaps = gap[drawn].mean(1)
    if np.prod(np.quantile(gaps, [0.025, 0.975])) <= 0:
        return None
    value = float(part.mean() / gap.mean())
    if len(part) < 2:
        return value, None, None
    # where a draw's gap is 0 there is nothing to share: NaN, which the quantiles leave out
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = part[drawn].mean(1) / gaps
        low, high = np.nanquantile(np.where(np.isfinite(shares), shares, np.nan), [0.025, 0.975])
    return value, float(low), float(high)


def _adapters(nats: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """Return the places of each adapter, in order."""
    groups_by_adapter: dict[str, list[str]] = {}
    for name in nats:
        if name.startswith("into "):
            _, adapter, group = name.split(" ")
            groups_by_adapter.setdefault(adapter, []).append(group)
    return groups_by_adapter


def _table(nats_by_run: Mapping[tuple[str, int], Mapping[str, Sequence[float]]], path: Path) -> Path:
    rows = []
    for (arm, seed), nats in nats_by_run.items():
        rng = numpy_generator(seed, "blocks")
        gap = float(np.mean(nats["all"]) - np.mean(nats["none"]))
        for adapter in _adapters(nats):
            cells = (share(nats, way, adapter, EVERYWHERE, rng) for way in WAYS)
            texts = [UNDEFINED if cell is None else "{} [{}, {}]".format(*map(number, cell)) for cell in cells]
            rows.append((f"`{arm}`", seed, len(nats["all"]), f"{gap:+.1f}", adapter, *texts))
    header = ("arm", "seed", "pairs", "both adapters, nats", "adapter", "put into the base", "left out of the whole")
    return write_whole(path, markdown_table(header, rows).encode())


def _figure(nats_by_run: Mapping[tuple[str, int], Mapping[str, Sequence[float]]], preset: str, path: Path) -> Path:
    """Draw the share of each group of blocks: a column an arm, a row a way, a line an adapter and seed."""
    arms = list(dict.fromkeys(arm for arm, _ in nats_by_run))
    with style():
        figure = new_figure(max(PAGE_WIDTH, 3.2 * len(arms)), 5.0)
        grid = figure.subplots(2, len(arms), sharex="col", sharey="row", squeeze=False)
        for (arm, seed), nats in nats_by_run.items():
            for row, way in zip(grid, WAYS, strict=True):
                _lines(row[arms.index(arm)], nats, way, seed)
        for column, arm in zip(grid.T, arms, strict=True):
            column[0].set_title(f"{preset}: {arm}")
            column[1].set_xlabel("blocks")
            column[1].tick_params(axis="x", rotation=45)
        for row, said in zip(grid, ("put into the base", "left out of the whole"), strict=True):
            row[0].set_ylabel(f"share, {said}")
        handles = {line.get_label(): line for ax in grid.flat for line in ax.lines if not str(line.get_label()).startswith("_")}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
        return save_figure(figure, path)


def _lines(ax: Axes, nats: Mapping[str, Sequence[float]], way: str, seed: int) -> None:
    ax.axhline(0, color=GRAY, linewidth=0.8)
    for adapter, every in _adapters(nats).items():
        groups = [each for each in every if each != EVERYWHERE]
        shares = [share(nats, way, adapter, each, numpy_generator(seed, "blocks")) for each in groups]
        values = [np.nan if share is None else share[0] for share in shares]
        ax.plot(groups, values, color=COLORS[adapter], marker="o", markersize=3, label=adapter)
