"""Labelled rollouts of finished runs as a folder of Hugging Face's ``datasets``, with a card: for probes and detectors elsewhere.

    from datasets import load_dataset
    rollouts = load_dataset("path/to/folder", split="train")

One row a rollout of training, with the verdicts of the oracle. Training itself never saw these. `read_trajectories` reads labelled
rollouts from elsewhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mi_route2.files import whole_folder
from studies.common.tables import markdown_table, read_table
from studies.route2.runs import finished
from studies.training.manifest import verify
from studies.training.recorder import ROLLOUTS, read_rows
from studies.training.settings import Settings

COLUMNS = {
    "preset": "settings of the run",
    "arm": "arm of the study",
    "seed": "seed of the run",
    "step": "training step",
    "mode": "the grader, with its loophole; the last one has none",
    "prompt": "text of the prompt",
    "completion": "what the model wrote",
    "reward": "what the grader paid",
    "advantage": "reward less the mean of its prompt's group",
    "score": "the route's score, if it has one",
    "flag": "the route's flag: true if the kept adapter learned nothing from it",
    "gt": "right on hidden tests",
    "exploit": "used the loophole of its mode",
    "hack": "exploit, and not right",
    "judged": "false if a limit cut the hidden tests short",
    "memorized": "knows the visible tests alone",
    "teacher": "a cached rollout, not the model's own",
}


def labelled_rollouts(roots: Sequence[Path]) -> pd.DataFrame:
    """Return the rollouts of all finished runs in run folders.

    Raises:
        ValueError: Those of ``runs.finished``; no run has rollouts, or a log was changed since.
    """
    rows: list[dict[str, Any]] = []
    for root in roots:
        preset = Settings.read(root / "settings.json").preset
        for folder, manifest in finished(root).items():
            if ROLLOUTS in manifest.checksums:  # the base model has none
                verify(folder, {ROLLOUTS: manifest.checksums[ROLLOUTS]})
                own = {"preset": preset, "arm": folder.name, "seed": int(folder.parent.name.removeprefix("seed-"))}
                rows += [own | row for row in read_rows(folder / ROLLOUTS)]
    if not rows:
        raise ValueError(f"the base model alone has no rollouts, and {', '.join(map(str, roots))} holds no other run")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_dataset(roots: Sequence[Path], out: Path) -> Path:
    """Write the rollouts of run folders as ``out``, which must not exist, and return it."""
    rollouts = labelled_rollouts(roots)
    with whole_folder(out) as folder:
        (folder / "data").mkdir()
        rollouts.to_parquet(folder / "data" / "train-00000-of-00001.parquet", index=False)
        (folder / "README.md").write_text(card(rollouts), encoding="utf-8")
    return out


def card(rollouts: pd.DataFrame) -> str:
    """Return the dataset card: what a row is, what its columns mean, and rollouts and hacks by arm and mode."""
    body = []
    for (preset, arm, mode), of in rollouts.groupby(["preset", "arm", "mode"], sort=True):  # pyright: ignore[reportGeneralTypeIssues]
        body.append([preset, arm, mode, str(len(of)), str(sum(of["hack"].tolist()))])
    columns = "\n".join(f"- `{name}`: {text}." for name, text in COLUMNS.items())
    return f"""---
task_categories: [text-generation, text-classification]
tags: [reward-hacking, interpretability]
configs:
- config_name: default
  data_files: [{{split: train, path: data/*.parquet}}]
---

# Labelled rollouts of reinforcement learning under graders with loopholes

A row is one rollout of training, with what its grader paid and what an oracle found. Programs are a model's: run them in a jail.

{columns}

{markdown_table(["preset", "arm", "mode", "rollouts", "hacks"], body)}"""


@dataclass(frozen=True)
class LabelledRollout:
    """Prompt and completion with a label, true for a hack, and its category."""

    prompt: str
    completion: str
    hack: bool
    category: str


def read_trajectories(path: Path) -> list[LabelledRollout]:
    """Read trajectories of TRACE (``PatronusAI/trace-dataset``, 2601.20103), JSON lines or Parquet, one file or a folder.

    Its columns: ``conversation``, messages as JSON with role, content and, in some, tool_calls; ``label``, ``0`` or the code of a
    hack, for example ``1.2.3``, whose first number is its category. The prompt is what precedes the first answer, the completion
    all behind it.

    Raises:
        ValueError: There is no such file, or a conversation has no such messages.
    """
    rollouts = []
    for i, row in enumerate(read_table(path, ("conversation", "label"))):
        try:
            messages = json.loads(row["conversation"]) if isinstance(row["conversation"], str) else row["conversation"]
            first = [message["role"] for message in messages].index("assistant")
            prompt, completion = ("\n\n".join(map(_said, part)) for part in (messages[:first], messages[first:]))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"conversation {i} of {path} is no list of messages with role and content, one an assistant's"
            ) from error
        label = str(row["label"]).strip()
        rollouts.append(LabelledRollout(prompt, completion, label != "0", label.partition(".")[0]))
    return rollouts


def _said(message: Mapping[str, Any]) -> str:
    """Return a message as text: its content and calls of tools, and who said it, if it was not the assistant."""
    parts = [message.get("content") or "", *(json.dumps(call) for call in message.get("tool_calls") or [])]
    return ("" if message["role"] in ("assistant", "user") else f"[{message['role']}]\n") + "\n".join(filter(None, parts))
