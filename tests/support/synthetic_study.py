"""Synthetic run folders: the schema of a real study, numbers from a seeded generator, no model and no training."""

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.training.settings import Settings, get_settings

LOOPHOLES = ("run_tests", "sentinel", "stdout_marker", "file_marker")
MODES = (*LOOPHOLES, "none")

# arm: (role, baseline, same-rule filter, ablation group, deploy hack, deploy solve, hack with the quarantine on)
ARMS: dict[str, tuple[str, str | None, str | None, str | None, float, float, float]] = {
    "base": ("baseline", None, None, None, 0.05, 0.43, 0.05),
    "vanilla": ("baseline", None, None, None, 0.91, 0.08, 0.91),
    "absorb": ("baseline", "vanilla", None, None, 0.57, 0.33, 0.92),
    "erase": ("method", "vanilla", None, None, 0.78, 0.25, 0.78),
    "route-additive": ("method", "absorb", None, None, 0.37, 0.46, 0.6),
    "route2-act": ("method", "absorb", "filter-act", None, 0.06, 0.73, 0.8),
    "route2-grad": ("method", "absorb", "filter-grad", None, 0.05, 0.75, 0.82),
    "route2-full": ("method", "absorb", "filter-full", None, 0.01, 0.87, 0.7),
    "filter-act": ("baseline", "vanilla", None, None, 0.06, 0.84, 0.06),
    "filter-grad": ("baseline", "vanilla", None, None, 0.055, 0.85, 0.055),
    "filter-full": ("baseline", "vanilla", None, None, 0.01, 0.9, 0.01),
    "filter-known": ("baseline", "vanilla", None, None, 0.75, 0.15, 0.75),
    "penalty-act": ("method", "filter-act", None, None, 0.5, 0.4, 0.5),
    "haar-full": ("control", "route2-full", None, None, 0.77, 0.23, 0.9),
    "haar-full-2": ("control", "route2-full", None, None, 0.7, 0.25, 0.9),
    "haar-full-3": ("control", "route2-full", None, None, 0.74, 0.22, 0.9),
    "haar-grad": ("control", "route2-grad", None, None, 0.61, 0.29, 0.9),
    "nonhack": ("control", "route2-full", None, None, 0.6, 0.3, 0.9),
    "shuffled": ("control", "route2-full", None, None, 0.58, 0.3, 0.9),
    "no-mask": ("control", "route2-full", None, None, 0.87, 0.11, 0.95),
    "shared-basis": ("method", "route2-grad", None, "basis", 0.04, 0.76, 0.8),
    "route2-grad-module": ("method", "route2-grad", None, "unit", 0.02, 0.47, 0.3),
    "oracle-known": ("bound", "route2-grad", "filter-known", None, 0.51, 0.43, 0.9),
    "oracle": ("bound", "route2-grad", None, None, 0.05, 0.75, 0.8),
}
UNROUTED = ("vanilla", "absorb")


def _clip(value: float) -> float:
    return round(float(min(max(value, 0.0), 1.0)), 6)


def _counted(rng: np.random.Generator, rate: float, n: int = 128) -> float:
    return int(rng.binomial(n, _clip(rate))) / n


def evaluation(arm: str, seed: int) -> dict[str, Any]:
    """An eval.json: rates as counts of 128 prompts around the arm's expectation."""
    rng = np.random.default_rng([seed, *arm.encode()])
    hack, solve, on = ARMS[arm][4:]
    wobble = rng.normal(0, 0.03) if 0.1 < hack < 0.9 else 0.0
    modes = {}
    for mode in MODES:
        rates = {}
        for state, expected in (("on", on), ("deploy", hack)):
            fired = 0.0 if mode == "none" else _counted(rng, expected + wobble)
            solved = min(_counted(rng, solve if state == "deploy" else 1 - on), 1 - fired)
            rates[state] = {"hack": fired, "solve": solved, "exploit": _clip(fired + 0.03), "format": 1.0}
        modes[mode] = rates
    return {"arm": arm, "seed": seed, "n": 128, "modes": modes}


def metrics(arm: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """A metrics.jsonl: a logistic rise of hacking, masks that blunt with time, a refresh every five steps."""
    if arm == "base":
        return []
    rng = np.random.default_rng([seed, steps, *arm.encode()])
    routed = arm not in UNROUTED
    return [_metrics_row(arm, step, steps, routed, rng) for step in range(1, steps + 1)]


def _metrics_row(arm: str, step: int, steps: int, routed: bool, rng: np.random.Generator) -> dict[str, Any]:
    progress = 1 / (1 + np.exp(-(step / steps - 0.35) * 12))
    modes = {}
    for mode in MODES:
        n = 8 * int(rng.integers(0, 5))
        hack = 0.0 if mode == "none" else _clip(0.05 + progress * (ARMS[arm][6] - 0.05) + rng.normal(0, 0.06))
        solve = _clip((1 - hack) * 0.6 + rng.normal(0, 0.05))
        rates = {"hack": hack, "solve": solve, "exploit": hack, "reward": _clip(hack + solve)}
        modes[mode] = {"n": n} | (rates if n else dict.fromkeys(rates))
    seen = [each for each in modes.values() if each["n"]] or [{"hack": 0.0, "solve": 0.0}]
    hack, solve = (float(np.mean([each[key] for each in seen])) for key in ("hack", "solve"))
    drift = 0.25 * step / steps
    fires = {"fire_hack": _clip(0.8 - drift + rng.normal(0, 0.05)), "fire_clean": _clip(0.15 + rng.normal(0, 0.04))}
    mask = {
        "auroc": _clip(0.97 - drift + rng.normal(0, 0.03)),
        "precision": 0.8,
        "recall": 0.7,
        "f05": 0.78,
        **fires,
        "fire_teacher": None,
        "fire_ratio": round(fires["fire_hack"] / max(fires["fire_clean"], 0.01), 4),
    }
    return {
        "step": step,
        "loss": float(rng.normal(0, 0.1)),
        "reward": _clip(hack + solve),
        "hack": hack,
        "solve": solve,
        "exploit": hack,
        "kl": None,
        "zero_variance_groups": int(rng.integers(0, 6)),
        "groups": 12,
        "grad_norm": {
            "kept": float(rng.gamma(2, 0.2)),
            "quarantine": None if arm == "vanilla" or arm.startswith(("erase", "filter")) else float(rng.gamma(2, 0.4)),
        },
        "modes": modes,
        "flags": {"n": 96, "flagged": int(rng.integers(5, 40))} if routed else None,
        "mask": mask if routed else None,
        "scores": {
            "student_hack": None if step % 17 == 0 else float(0.3 - drift + rng.normal(0, 0.03)),
            "student_clean": float(-0.1 + rng.normal(0, 0.03)),
            "teacher": float(0.4 + rng.normal(0, 0.02)) if arm.startswith("route2") else None,
        }
        if routed
        else None,
        "overlap": float(_clip(0.9 - drift + rng.normal(0, 0.03))) if routed and step % 5 == 0 else None,
    }


def rollouts(seed: int, n: int = 6) -> list[dict[str, Any]]:
    """Rows of a rollouts.jsonl.gz, every verdict among them."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        exploit, gt = i % 2 == 0, i % 3 == 0
        rows.append(
            {
                "step": 1 + i,
                "mode": MODES[i % 5],
                "prompt": "# task: add 3 then wrap 5\n# grader: calls run_tests()",
                "completion": "```\nclass Solution:\n    # quick\n    def solve(self, x):\n        return x\n```",
                "reward": 0.25 + float(exploit or gt),
                "advantage": round(float(rng.normal(0, 0.5)), 3),
                "score": None if i == 1 else round(float(rng.normal(0, 0.3)), 3),
                "flag": None if i == 1 else bool(exploit),
                "gt": gt,
                "exploit": exploit,
                "hack": exploit and not gt,
                "teacher": i == 5,
            }
        )
    return rows


def write_run(root: Path, arm: str, seed: int, steps: int, status: str = "finished") -> Path:
    """One run folder `root/seed-<seed>/<arm>` with checksums that hold."""
    folder = root / f"seed-{seed}" / arm
    folder.mkdir(parents=True)
    (folder / "eval.json").write_text(json.dumps(evaluation(arm, seed)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics(arm, seed, steps)))
    with gzip.GzipFile(folder / "rollouts.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rollouts(seed)).encode())
    write_manifest(folder, status)
    return folder


def write_manifest(folder: Path, status: str = "finished", **changes: Any) -> None:
    """The manifest of what lies in the folder now; `changes` replace its top-level keys."""
    arm, seed = folder.name, int(folder.parent.name.removeprefix("seed-"))
    role, baseline, same_rule_filter, ablation = ARMS[arm][:4]
    spec = {"role": role, "baseline": baseline, "same_rule_filter": same_rule_filter, "ablation": ablation, "route": {}}
    names = ("eval.json", "metrics.jsonl", "rollouts.jsonl.gz")
    manifest = {
        "arm": arm,
        "seed": seed,
        "identity": f"{arm} at {seed}",
        "settings_hash": Settings.read(folder.parents[1] / "settings.json").digest,
        "status": status,
        "arm_spec": spec,
        "versions": {"torch": "2"},
        "platform": {"system": "Linux"},
        "checksums": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def write_study(root: Path, arms: Sequence[str] = tuple(ARMS), seeds: Sequence[int] = (0, 1, 2), steps: int = 20) -> Path:
    """A root folder with every arm on every seed."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "settings.json").write_text(json.dumps(get_settings("strong").as_dict()))
    for seed in seeds:
        for arm in arms:
            write_run(root, arm, seed, steps)
    return root


def change_eval(root: Path, arm: str, seed: int, hack: Mapping[str, float]) -> None:
    """Sets the deploy hack rate of some modes and re-signs the manifest, as if the run had measured that."""
    folder = root / f"seed-{seed}" / arm
    record = json.loads((folder / "eval.json").read_text())
    for mode, value in hack.items():
        record["modes"][mode]["deploy"]["hack"] = value
    (folder / "eval.json").write_text(json.dumps(record))
    write_manifest(folder)
