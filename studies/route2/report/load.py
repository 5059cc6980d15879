"""Strict reader of a study's run folders: finished runs are checked, unfinished ones listed, missing files reported.

    root/settings.json                      settings that all arms share
    root/modes.json                         the modes by role, unless they are the micro world's
    root/seed-<n>/<arm>/manifest.json       status, arm_spec (role, baseline, same_rule_filter, ablation), checksums
    root/seed-<n>/<arm>/metrics.jsonl       one row per training step (`base` is not trained: empty, or no file)
    root/seed-<n>/<arm>/eval.json           rates per mode with the quarantine on and deleted

An arm's role is in its manifest; no arm name is special here, except for `base`, `vanilla` and `absorb`, to which the definitions
of leakage and of the paired differences refer.
"""

import gzip
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from mi_route2.validation import parse_object, read_lines, read_object, read_record
from studies.common.command_line import named
from studies.environments.micro.language import MICRO_MODES
from studies.environments.protocol import Modes
from studies.training.manifest import MANIFEST, REMEDY, read_manifest, unusual_entries, verify
from studies.training.settings import Settings
from studies.training.worlds import MODES

T = TypeVar("T")
BASE, VANILLA, ABSORB = "base", "vanilla", "absorb"
ROLES = ("method", "baseline", "control", "bound")
RATES = ("hack", "solve", "exploit", "format")
READ = ("metrics.jsonl", "eval.json")  # the files beside the manifest that the report needs


@dataclass(frozen=True)
class ArmSpec:
    """Facts about an arm that the report needs, the same on every seed.

    Attributes:
        role: "method" | "baseline" | "control" | "bound".
        baseline: The arm of which it is a variation.
        same_rule_filter: For a route, the arm with its flags and no quarantine.
        ablation: The group in which it is an ablation.
    """

    role: str
    baseline: str | None = None
    same_rule_filter: str | None = None
    ablation: str | None = None


@dataclass(frozen=True)
class FinishedRun:
    """One finished arm on one seed.

    `metrics` are the rows of the training log; `modes[mode]["on" | "deploy"][rate]` are in [0, 1]; `unusual` is what differs from
    the usual pairs and backend; `definition` is the whole arm, without its line for tables.
    """

    arm: str
    seed: int
    folder: Path
    spec: ArmSpec
    settings_hash: str
    metrics: list[dict[str, Any]]
    modes: dict[str, dict[str, dict[str, float]]]
    unusual: dict[str, str] = field(default_factory=dict)
    definition: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of training steps in the log; 0 if nothing was trained."""
        return len(self.metrics)


@dataclass(frozen=True)
class RunSet:
    """All finished runs of one root folder, and the names (`seed-1/absorb`) of unfinished folders."""

    root: Path
    settings: dict[str, Any]
    runs: dict[tuple[str, int], FinishedRun]
    unfinished: tuple[str, ...] = ()
    specs: dict[str, ArmSpec] = field(default_factory=dict)
    modes: Modes = MICRO_MODES

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed with a finished run, ascending."""
        return tuple(sorted({seed for _, seed in self.runs}))

    def of(self, arm: str) -> dict[int, FinishedRun]:
        """Return the arm's finished runs by seed, ascending; empty for an arm without any."""
        return {seed: self.runs[arm, seed] for seed in self.seeds if (arm, seed) in self.runs}


def load_runs(root: Path, only: Collection[int] | None = None) -> RunSet:
    """Load every finished run under `root`, or those of some seeds.

    Raises:
        ValueError: In one sentence that names the file and the remedy: no such folder, no finished run, a missing or malformed
            file, a wrong checksum, runs of different settings, or an arm that differs between seeds.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the run folder, runs/<preset>-<hash>")
    root = named(root)
    settings = Settings.read(root / "settings.json")
    if settings.chat is None and (root / MODES).exists():
        raise ValueError(f"{root / MODES} is not of this study: the micro world's modes have no file, so delete it")
    modes = MICRO_MODES if settings.chat is None else read_modes(root)
    runs: dict[tuple[str, int], FinishedRun] = {}
    unfinished: list[str] = []
    for seed, folder in _arm_folders(root):
        if only is not None and seed not in only:
            continue
        run = _load_run(folder, seed, modes)
        if run is None:
            unfinished.append(f"seed-{seed}/{folder.name}")
        else:
            runs[run.arm, seed] = run
    if not runs:
        waiting = f" (unfinished: {', '.join(unfinished)})" if unfinished else ""
        raise ValueError(f"{root} holds no finished run{waiting}: `python -m studies.route2 run` makes and resumes them")
    specs = _agreed_specs(runs)
    if (run_hash := next(iter(runs.values())).settings_hash) != settings.digest:
        raise ValueError(
            f"{root / 'settings.json'} was changed: its hash is {settings.digest[:8]}, but its runs have {run_hash[:8]}; " + REMEDY
        )
    return RunSet(root, settings.as_dict(), runs, tuple(unfinished), specs, modes)


def read_modes(root: Path) -> Modes:
    """Return the modes of a chat model's run folder; ``ValueError`` in one sentence if its file is missing or broken."""
    described = read_object(root / MODES, REMEDY)
    try:
        return read_record(Modes, described)
    except ValueError as error:
        raise ValueError(f"{root / MODES} has no valid modes ({error}): {REMEDY}") from error


def read_report(kind: type[T], path: Path, remedy: str) -> T:
    """Read a report, the fields of ``kind`` in a JSON file; ``ValueError`` in one sentence if the file is not of that kind."""
    stored = read_object(path, remedy)
    try:
        values = {each.name: stored[each.name] for each in fields(kind)}  # pyright: ignore[reportArgumentType]
        return kind(**{name: tuple(value) if name in ("seeds", "modes") else value for name, value in values.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks {error}: {remedy}") from error


def read_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder's rollouts.jsonl.gz, in order.

    Raises:
        ValueError: In one sentence, if the file is missing or broken, or does not match the checksum in the manifest (an unfinished
            run has none).
    """
    path = folder / "rollouts.jsonl.gz"
    if path.exists() and (folder / MANIFEST).exists():
        sums = read_manifest(folder).checksums
        _verify(folder, {path.name: sums[path.name]} if path.name in sums else {})
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [parse_object(line) for line in file]
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: show needs the rollouts of the run") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        finished = (folder / MANIFEST).exists()
        remedy = f"delete {folder} and run this arm again" if finished else "run the command again that began it"
        raise ValueError(f"cannot read {path} ({error}): {remedy}") from error


def _arm_folders(root: Path) -> Iterator[tuple[int, Path]]:
    seeds = {int(match[1]): path for path in root.iterdir() if (match := re.fullmatch(r"seed-(0|[1-9][0-9]*)", path.name))}
    for seed in sorted(seeds):
        for folder in sorted(seeds[seed].iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                yield seed, folder


def _load_run(folder: Path, seed: int, modes: Modes) -> FinishedRun | None:
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    if manifest.status != "finished":
        return None
    path = folder / MANIFEST
    if (manifest.arm, manifest.seed) != (folder.name, seed):
        raise ValueError(f"{path} is the manifest of another run: it is in seed-{seed}/{folder.name}")
    _verify(folder, manifest.checksums)
    log = folder / "metrics.jsonl"
    return FinishedRun(
        arm=folder.name,
        seed=seed,
        folder=folder,
        spec=_arm_spec(manifest.arm_spec, path),
        settings_hash=manifest.settings_hash,
        unusual=unusual_entries(manifest),
        definition={name: value for name, value in manifest.arm_spec.items() if name != "about"},
        metrics=[] if folder.name == BASE and not log.exists() else _read_rows(log),
        modes=_evaluation(folder / "eval.json", modes.names),
    )


def _arm_spec(spec: dict[str, Any], path: Path) -> ArmSpec:
    role = spec.get("role")
    if role not in ROLES:
        raise ValueError(f"{path}: the role of an arm is one of {', '.join(ROLES)}, not {role!r}")
    return ArmSpec(role, spec.get("baseline"), spec.get("same_rule_filter"), spec.get("ablation"))


def _verify(folder: Path, checksums: dict[str, str]) -> None:
    """Check the files that exist; large files (weights, rollouts) may be missing in a copy of a study."""
    verify(folder, {name: sum_ for name, sum_ in checksums.items() if name in READ or (folder / name).exists()})


def _evaluation(path: Path, names: tuple[str, ...]) -> dict[str, dict[str, dict[str, float]]]:
    modes = read_object(path, f"delete {path.parent} and run this arm again").get("modes", {})
    missing = [mode for mode in names if mode not in modes]
    if missing:
        raise ValueError(
            f"{path} has no mode {', '.join(missing)}, and an evaluation has {', '.join(names)}: delete {path.parent} and run this "
            "arm again"
        )
    return {mode: {state: _rates(modes[mode], state, mode, path) for state in ("on", "deploy")} for mode in names}


def _rates(mode: dict[str, Any], state: str, name: str, path: Path) -> dict[str, float]:
    rates = {}
    for rate in RATES:
        value = mode.get(state, {}).get(rate)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{path}: {name}.{state}.{rate} must be a rate in [0, 1], not {value!r}")
        rates[rate] = float(value)
    return rates


def _agreed_specs(runs: dict[tuple[str, int], FinishedRun]) -> dict[str, ArmSpec]:
    first = next(iter(runs.values()))
    specs: dict[str, ArmSpec] = {}
    definitions: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        if run.settings_hash != first.settings_hash:
            raise ValueError(f"{run.folder} and {first.folder} have different settings: arms compare under one hash only")
        if run.unusual != first.unusual:
            raise ValueError(
                f"{run.folder} and {first.folder} were run with different pairs or backends ({run.unusual} and "
                f"{first.unusual}): give each an --out of its own"
            )
        specs[run.arm] = run.spec
        if definitions.setdefault(run.arm, run.definition) != run.definition:
            raise ValueError(f"arm {run.arm} is defined differently on seed {run.seed}: run it again on every seed")
    return specs


def _read_rows(log: Path) -> list[dict[str, Any]]:
    def read(_: int, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise ValueError("this is not a JSON object")
        return row

    try:
        return read_lines(log, read)
    except FileNotFoundError:
        raise ValueError(f"{log} is missing: a finished run folder has it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}: delete {log.parent} and run this arm again") from error
