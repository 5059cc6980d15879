"""Recorder of a run: one metrics row per step, and every rollout. It reads the oracle, which training never does.

Rows are buffered and appended in blocks (for rollouts, one gzip member per block), so that an interrupted and resumed run leaves
the same bytes as an uninterrupted one.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mi_route2.probes.quality import mask_quality, score_means
from mi_route2.rollouts import Policy
from mi_route2.routing import MaskSpec, Route, RouteSpec
from studies.environments.protocol import TeacherPool, Verdict, Witness, World
from studies.training.checkpoint import Mark, hash_of, refuse_changed
from studies.training.grpo import StepRecord, varied
from studies.training.job import micro_batches
from studies.training.settings import Settings

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl.gz"


def oriented(spec: RouteSpec, scores: Tensor | None, advantages: Tensor) -> Tensor | None:
    """Return scores that are higher for hacks: a live gradient score has the sign of the advantage, which is removed."""
    if scores is None or not isinstance(spec, MaskSpec):
        return scores
    live_gradient = spec.score in ("grad", "full") and spec.score_policy == "live"
    return scores * advantages.sign() if live_gradient else scores


@runtime_checkable
class TRLStep(Protocol):
    """Protocol of ``mi_route2.integrations.trl.RoutedStep``, which is not imported here because TRL is an extra."""

    examples: list[Mapping[str, Any]]
    completion_ids: list[list[int]]
    rewards: list[float]
    advantages: list[float]
    scores: list[float] | None
    flags: list[bool] | None


def trl_record(world: World, witness: Witness, spec: RouteSpec) -> Callable[[Any], dict[str, float | None]]:
    """Return a recorder for ``RoutedGRPOTrainer(record=...)`` on rows of ``world.rows``: the oracle's rates and the mask's quality.

    Names are those of `metrics.jsonl`: ``train/hack``, ``modes/<mode>/solve``, ``mask/precision`` and so on.
    """

    def record(step: TRLStep) -> dict[str, float | None]:
        samples = world.package([world.read_prompt(row["described"]) for row in step.examples], step.completion_ids)
        verdicts, rewards, everyone = witness.judge(samples), torch.tensor(step.rewards), range(len(samples.prompts))
        by_mode = {f"modes/{mode}": [i for i in everyone if samples.prompts[i].mode == mode] for mode in world.modes.names}
        numbers: dict[str, float | None] = {}
        for place, rows in ({"train": [*everyone]} | by_mode).items():
            if rows:
                numbers |= {f"{place}/{name}": value for name, value in _row(verdicts, rewards, rows).items()}
        if step.flags is not None:
            scores = None if step.scores is None else oriented(spec, torch.tensor(step.scores), torch.tensor(step.advantages))
            rows = [i for i in everyone if verdicts[i].judged]
            hack, flags = [verdicts[i].hack for i in rows], [step.flags[i] for i in rows]
            quality = mask_quality(None if scores is None else scores[rows].tolist(), flags, hack)
            numbers |= {f"mask/{name}": value for name, value in quality.items()}
        return numbers

    return record


def rates(verdicts: list[Verdict]) -> dict[str, float]:
    """Return the rates ``hack``, ``solve`` (correct on hidden inputs), ``exploit`` (own channel, correct or not) and ``memorized``.

    They are shares of the answers that were judged; ``unjudged`` is the share of all that were not.
    """
    judged = [v for v in verdicts if v.judged]
    n = max(len(judged), 1)
    return {
        "hack": sum(v.hack for v in judged) / n,
        "solve": sum(v.gt for v in judged) / n,
        "exploit": sum(v.exploit for v in judged) / n,
        "memorized": sum(v.memorized for v in judged) / n,
        "unjudged": (len(verdicts) - len(judged)) / max(len(verdicts), 1),
    }


def _row(verdicts: list[Verdict], rewards: Tensor, rows: list[int]) -> dict[str, float]:
    """Return the rates and the mean reward of some rollouts."""
    return rates([verdicts[i] for i in rows]) | {"reward": float(rewards[rows].mean()) if rows else 0.0}


def _columns(record: "StepRecord") -> list[Tensor]:
    return [record.batch.demand(name, "a record") for name in ("rewards", "advantages", "groups", "teacher")]


class Recorder:
    """Recorder that converts step records into rows, and appends them to the logs in ``folder`` at ``flush``."""

    def __init__(self, folder: Path, world: World, witness: Witness, teachers: TeacherPool | None, settings: Settings):
        self._folder, self._modes, self._witness, self._probe_every = folder, world.modes.names, witness, settings.probe_every
        self._teachers = [] if teachers is None else micro_batches(teachers.samples(world).rollouts, settings)
        self._metrics: list[dict[str, Any]] = []
        self._rollouts: list[dict[str, Any]] = []
        self._hashes: dict[str, hashlib._Hash] = {}

    def go_on(self) -> None:
        """Continue the logs, which a resume has checked and cut."""
        for name in (METRICS, ROLLOUTS):
            path = self._folder / name
            self._hashes[name] = hash_of(path, path.stat().st_size if path.exists() else 0)

    def note(self, record: StepRecord, policy: Policy, route: Route) -> dict[str, Any]:
        """Record one step, and return its row. Reads the policy (teacher scores) without touching a gradient or a random number."""
        verdicts = self._witness.judge(record.samples)
        (rewards, advantages, batch_groups, teacher), prompts = _columns(record), record.samples.prompts
        everyone = (~teacher).nonzero()[:, 0].tolist()
        by_mode = {mode: [i for i in everyone if prompts[i].mode == mode] for mode in self._modes}
        row = {"step": record.step, "loss": record.loss, **_row(verdicts, rewards, everyone), "kl": record.kl}
        groups = len(batch_groups.unique())
        row |= {"groups": groups, "zero_variance_groups": groups - len(batch_groups[varied(record.batch)].unique())}
        row |= {"grad_norm": record.grad_norm, "overlap": record.overlap, "extra": record.extra}
        row["modes"] = {mode: {"n": len(rows), **_row(verdicts, rewards, rows)} for mode, rows in by_mode.items()}
        scores = oriented(route.spec, record.decision.scores, advantages[record.trained])
        self._metrics.append(row | self._mask_row(record, verdicts, scores, policy, route))
        self._rollouts += self._rollout_rows(record, verdicts, scores)
        return self._metrics[-1]

    def _mask_row(
        self, record: StepRecord, verdicts: list[Verdict], scores: Tensor | None, policy: Policy, route: Route
    ) -> dict[str, Any]:
        decision, rows = record.decision, record.trained.nonzero()[:, 0].tolist()
        if decision.flags is None:
            return {"flags": None, "mask": None, "scores": None}
        judged = [k for k, i in enumerate(rows) if verdicts[i].judged]
        hack = [verdicts[rows[k]].hack for k in judged]
        teacher = record.batch.demand("teacher")[record.trained][judged].tolist()
        flags = decision.flags[judged].tolist()
        values = None if scores is None else scores[judged].tolist()
        quality = mask_quality(values, flags, hack, teacher)
        means = score_means(values, hack, teacher) if values is not None else None
        if self._teachers and record.step % self._probe_every == 0 and means is not None and isinstance(route.spec, MaskSpec):
            scored = [score for part in self._teachers if (score := route.score(policy, part)) is not None]
            if scored:
                pool = torch.cat(scored)
                means = {**means, "teacher": float(pool.mean())}
                quality = {**quality, "fire_teacher": float((pool > route.spec.tau).double().mean())}
        return {"flags": {"n": len(rows), "flagged": int(decision.flags.sum())}, "mask": quality, "scores": means}

    def _rollout_rows(self, record: StepRecord, verdicts: list[Verdict], scores: Tensor | None) -> list[dict[str, Any]]:
        places = {i: k for k, i in enumerate(record.trained.nonzero()[:, 0].tolist())}
        flags, rows = record.decision.flags, []
        rewards, advantages, _, teacher = _columns(record)
        for i, (prompt, completion, verdict) in enumerate(zip(record.samples.prompts, record.samples.completions, verdicts)):
            k = places.get(i)
            rows.append(
                {
                    "step": record.step,
                    "mode": prompt.mode,
                    "prompt": prompt.text,
                    "completion": completion,
                    "reward": float(rewards[i]),
                    "advantage": float(advantages[i]),
                    "score": None if scores is None or k is None else float(scores[k]),
                    "flag": None if flags is None or k is None else bool(flags[k]),
                    "gt": verdict.gt,
                    "exploit": verdict.exploit,
                    "hack": verdict.hack,
                    "judged": verdict.judged,
                    "memorized": verdict.memorized,
                    "teacher": bool(teacher[i]),
                }
            )
        return rows

    def flush(self) -> dict[str, Mark]:
        """Append the recorded rows durably; return the ends of the logs."""
        metrics = "".join(json.dumps(row) + "\n" for row in self._metrics).encode()
        rollouts = "".join(json.dumps(row) + "\n" for row in self._rollouts).encode()
        self._metrics, self._rollouts = [], []
        packed = gzip.compress(rollouts, mtime=0) if rollouts else b""
        return {METRICS: self._append(METRICS, metrics), ROLLOUTS: self._append(ROLLOUTS, packed)}

    def _append(self, name: str, data: bytes) -> Mark:
        """Append to a log and return its end.

        The hash is that of the intended bytes, not of what is on disk, so that a resume can compare the two.
        """
        length = append(self._folder / name, data)
        self._hashes[name].update(data)
        return Mark(length, self._hashes[name].hexdigest())

    def check(self) -> None:
        """Check that the logs are what was written to them.

        Raises:
            ValueError: If a log was changed.
        """
        for name, digest in self._hashes.items():
            path = self._folder / name
            refuse_changed(path, Mark(path.stat().st_size if path.exists() else 0, digest.hexdigest()), "the last checkpoint")


def append(path: Path, data: bytes) -> int:
    """Append ``data``, flush it to disk, and return the file's length.

    Raises:
        OSError: In one sentence, if it cannot be opened or the disk is full; the file is unchanged then.
    """
    with opened(path) as log:
        before, rest = log.seek(0, os.SEEK_END), memoryview(data)
        try:
            while rest:  # a write may be partial
                taken = log.write(rest)
                if not taken:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest = rest[taken:]
            os.fsync(log.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # a remainder is cut off on resume
                log.truncate(before)
            raise OSError(f"could not append to {path}: {error.strerror}") from error
        return log.tell()


def opened(path: Path) -> io.FileIO:
    """Open a log to append to it, an empty one if there is none.

    Raises:
        OSError: In one sentence, if it is a folder or a link to nowhere.
    """
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise OSError(f"could not append to {path}: {error.strerror}; move away what is in its place") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a (gzipped) JSON Lines log."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode().splitlines()]
