"""The parts of a study that take hours: training of the arms, and the tracing of each at each seed. Results are kept.

A tracing loads the arm's adapters, patches them, samples its rates, and writes the result.

<folder>/seed-<n>/pairs.safetensors           the pairs that all arms of the seed use
<folder>/seed-<n>/<arm>.json, .safetensors    checks, rates, and the effect of every patch on every pair
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mi_route2.hosts import Host
from mi_route2.rollouts import Policy
from mi_route2.sites import Site
from mi_route2.tensor_files import read_tensors
from mi_route2.validation import write_json
from studies.common.artifacts import read_part, write_part
from studies.common.seeds import numpy_generator, torch_generator
from studies.common.workers import Executor, demand, exclusive, job_lock, run_each
from studies.environments.micro.world import MicroWorld
from studies.environments.protocol import Witness
from studies.tracing.pairs import BASE, CONTRASTS, SIDES, Pairs, gather, load_pairs, log_odds, save_pairs
from studies.tracing.patching import Patching, Score, cells, every_site, opposite, sites_at, trace
from studies.tracing.rates import rate_states
from studies.tracing.settings import UNTRAINED, TracingSettings
from studies.training.arms import ARMS, get_arms
from studies.training.job import FULL, Job, build_hosted, finished_policy
from studies.training.manifest import read_manifest
from studies.training.run import run_jobs
from studies.training.settings import Settings as Training
from studies.training.worlds import base_file, open_world

PAIRS = "pairs.safetensors"


@dataclass(frozen=True)
class Tracing:
    """One arm at one seed. ``training`` is the arm's finished job; for ``UNTRAINED``, the seed's base job."""

    root: Path
    settings: TracingSettings
    arm: str
    training: Job

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def folder(self) -> Path:
        return self.root / f"seed-{self.seed}"

    @property
    def path(self) -> Path:
        """Path of the JSON file; the tensors' file differs in its suffix."""
        return self.folder / f"{self.arm}.json"

    @property
    def identity(self) -> str:
        return traced_identity(self.settings, self.arm, self.training.folder)

    @property
    def finished(self) -> bool:
        """True if this tracing exists, of this run and of pairs of this base model; ``ValueError`` if it is damaged."""
        part = read_part(self.path)
        return part is not None and part[0]["identity"] == self.identity and not self.outdated

    @property
    def outdated(self) -> bool:
        """True if the seed's pairs are those of a base model that was trained again since."""
        return outdated(self.folder / PAIRS, self.training.settings, self.seed, self.training.cache)


def traced_identity(settings: TracingSettings, arm: str, run: Path) -> str:
    """Return a hash of the settings and of the bytes of the adapters that were trained in a run folder."""
    manifest = read_manifest(run)
    trained = manifest.checksums.get(FULL, "none")
    return hashlib.sha256(json.dumps([settings.digest, manifest.identity, trained, arm]).encode()).hexdigest()


def outdated(pairs: Path, training: Training, seed: int, cache: Path) -> bool:
    """Return True if the file ``pairs`` names another base model than the one in ``cache``; earlier versions named none."""
    written = read_tensors(pairs)[1].get(BASE) if pairs.exists() else None
    base = base_file(training, seed, cache)
    return written is not None and base.exists() and written != _sha256(base)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tracings(root: Path, settings: TracingSettings, jobs: list[Job]) -> list[Tracing]:
    """Return one tracing per job."""
    return [Tracing(root, settings, UNTRAINED if job.arm is None else job.name, job) for job in jobs]


@dataclass(frozen=True)
class SeedTracing:
    """All arms of a seed, which use the same pairs. They are one job."""

    tracings: tuple[Tracing, ...]

    @property
    def name(self) -> str:
        return "tracing"

    @property
    def seed(self) -> int:
        return self.tracings[0].seed

    @property
    def finished(self) -> bool:
        """True if every arm is traced; ``ValueError`` if a tracing is damaged."""
        return False not in [tracing.finished for tracing in self.tracings]  # checks all of them


def seed_tracings(root: Path, settings: TracingSettings, jobs: list[Job]) -> list[SeedTracing]:
    """Return one job per seed."""
    every = tracings(root, settings, jobs)
    seeds = dict.fromkeys(tracing.seed for tracing in every)
    return [SeedTracing(tuple(tracing for tracing in every if tracing.seed == seed)) for seed in seeds]


def train(
    training: Training,
    seeds: list[int],
    arms: tuple[str, ...],
    workers: int,
    out: Path,
    executor: Executor = Executor(),  # noqa: B008 - frozen
) -> list[Job]:
    """Run the unfinished jobs of the base model and of every arm at every seed; return all jobs.

    Raises:
        RuntimeError: If a job failed.
    """
    root = out / training.folder
    jobs = [Job(root, out / "warmstarts", training, seed, arm) for seed in seeds for arm in (None, *get_arms(arms))]
    todo = [job for job in jobs if not job.finished]
    if todo:
        with exclusive(root):
            write_json(root / "settings.json", training.as_dict())
            print(f"{len(todo)} of {len(jobs)} runs are still to be trained, into {root}")
            failures = run_jobs(jobs, workers, executor)
        if failures:
            raise RuntimeError("; ".join(failures))
    return jobs


def trace_jobs(
    root: Path,
    settings: TracingSettings,
    jobs: list[Job],
    workers: int = 1,
    executor: Executor = Executor(),  # noqa: B008 - frozen
    *,
    quiet: bool = False,
) -> None:
    """Trace every job that is not traced yet."""
    todo = [seed for seed in seed_tracings(root, settings, jobs) if not seed.finished]
    demand(run_each(trace_seed, todo, workers=workers, executor=executor, folder=root, what="tracing", quiet=quiet))


def trace_seed(job: SeedTracing) -> None:
    """Trace the arms of a seed that are not traced yet."""
    with job_lock(job.tracings[0].folder), open_world(job.tracings[0].training.settings) as (world, witness):
        assert isinstance(world, MicroWorld)
        for tracing in job.tracings:
            run_tracing(tracing, world, witness)


def run_tracing(tracing: Tracing, world: MicroWorld, witness: Witness) -> None:
    """Trace an arm at a seed unless that is done. The bytes do not depend on when, or after what, it is run."""
    if tracing.finished:
        return
    torch.set_num_threads(1)  # sums in another number of threads have other bytes
    tracing.folder.mkdir(parents=True, exist_ok=True)
    host, policy = traced_policy(tracing.training)
    pairs, counts = _pairs(tracing, world, witness)
    prompts = [p for mode in world.modes.loopholes for p in world.evaluation_prompts(mode, tracing.settings.rated)]
    rates = rate_states(world, witness, host, policy, prompts, tracing.seed)
    score: Score = partial(log_odds, vocabulary=world.vocabulary)
    single = {f"{name}, float32": value for name, value in exactness(host, policy, pairs, score).items()}
    every, sites = cells(policy.adapters), [*every_site(policy.adapters), *sites_at(policy.adapters, "kept_a")]
    tensors, scores = {}, {}
    for contrast in CONTRASTS:
        patching = Patching.of(host, pairs[contrast], score, sites)
        purpose = f"tracing {tracing.arm} {contrast}"
        draws = torch_generator(tracing.seed, purpose), numpy_generator(tracing.seed, purpose)
        effects = trace(patching, every, tracing.settings.draws, *draws)
        tensors |= {f"{contrast}/{side}/{source}/{cell}": effect for (side, source, cell), effect in effects.items()}
        scores |= {f"scores/{contrast}/{side}": patching.scores[side] for side in SIDES}
    # Converted last, because it is converted in place. In float64 a difference beyond rounding would be an error of the algebra.
    policy.model.to(torch.float64)
    exact = {f"{name}, float64": value for name, value in exactness(host, policy, pairs, score).items()}
    data = {
        "identity": tracing.identity,
        "arm": tracing.arm,
        "seed": tracing.seed,
        "counts": counts,
        "pairs": {contrast: len(batch) for contrast, batch in pairs.items()},
        "cells": [{"name": cell.name, "where": cell.place, "adapter": cell.adapter, "sites": len(cell.sites)} for cell in every],
        "checks": single | exact,
        "rates": rates,
    }
    write_part(tracing.path, tracing.identity, data, tensors | scores)


def traced_policy(training: Job) -> tuple[Host, Policy]:
    """Return the trained policy and its host; for a base job, both adapters at initialization, as in an arm with a quarantine."""
    if training.arm is None:  # before training an arm's route has had no effect: only its adapters count
        return build_hosted(replace(training, arm=ARMS["absorb"]), training.cache)
    return finished_policy(training)


def _pairs(tracing: Tracing, world: MicroWorld, witness: Witness) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Return the seed's pairs, from their file or, if there is none of this base model, sampled from it."""
    training, path = tracing.training, tracing.folder / PAIRS
    identity = f"{tracing.settings.digest} {training.settings.digest} {tracing.seed}"
    if tracing.outdated:
        for arm in (UNTRAINED, *ARMS):
            (tracing.folder / f"{arm}.json").unlink(missing_ok=True)
        path.unlink()  # last: until then every arm counts as not traced
    if not path.exists():  # all arms of a seed use the pairs of its base model, so that none chose its own texts
        _, base = build_hosted(replace(training, arm=None), training.cache)
        gathered = gather(world, witness, base, tracing.settings, tracing.seed)
        save_pairs(*gathered, identity, _sha256(base_file(training.settings, training.seed, training.cache)), path)
    return load_pairs(path, identity)


@torch.no_grad()
def exactness(host: Host, policy: Policy, pairs: Mapping[str, Pairs], score: Score) -> dict[str, float]:
    """Return the largest difference, over all pairs, between quantities that are equal in theory.

    zero patch and deletion   logits with zeros at every quarantine_out, and under ``adapters.deployed()``, at every position
    own patch                 score with the run's own values patched at every site
    kept_a and kept_out       score with the other rollout's bottlenecks patched everywhere, and with its kept outputs
    whole stream              score with the other rollout's last residual stream, and that rollout's own score

    Raises:
        ValueError: A difference is NaN.
    """
    adapters, worst = policy.adapters, dict[str, float]()

    def note(name: str, a: Tensor, b: Tensor) -> None:
        apart = float((a - b).abs().max())
        if math.isnan(apart):  # which `max` would take for no difference
            raise ValueError(f"{name!r} cannot be compared, because a logit is NaN or infinite: train the arm again")
        worst[name] = max(worst.get(name, 0.0), apart)

    stream = Site(len(host.model.get_submodule("blocks")) - 1, "resid_post")  # pyright: ignore[reportArgumentType]
    kept_a, kept_out = sites_at(adapters, "kept_a"), sites_at(adapters, "kept_out")
    for pair in pairs.values():
        patching = Patching.of(host, pair, score, [*every_site(adapters), *kept_a, stream])
        for side in SIDES:
            tokens = pair.side(side)
            if adapters.has_quarantine:
                with host.hooks(dict.fromkeys(sites_at(adapters, "quarantine_out"), torch.zeros_like)):
                    patched = host.logits(tokens)
                with adapters.deployed():
                    note("zero patch and deletion", patched, host.logits(tokens))
            unchanged = {site: patching.values[side][site] for site in every_site(adapters)}
            note("own patch", patching.run(side, unchanged), patching.scores[side])
            note("kept_a and kept_out", *(patching.run(side, patching.other(side, sites)) for sites in (kept_a, kept_out)))
            note("whole stream", patching.run(side, patching.other(side, [stream])), patching.scores[opposite(side)])
    return worst
