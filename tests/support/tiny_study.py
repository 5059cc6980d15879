"""A study small enough for tests: a short warm start, few steps, few rollouts; everything else is the real thing."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from studies.environments.micro import warmstart
from studies.environments.micro.settings import WarmStartConfig, get_world
from studies.environments.micro.warmstart import cached_at, warm_start
from studies.training.arms import ARMS, Arm
from studies.training.job import Job
from studies.training.recorder import Recorder
from studies.training.run import run_job
from studies.training.settings import CHAT, ChatModel, Settings, changes, get_settings
from studies.training.worlds import weights_hash

if TYPE_CHECKING:  # children of tests import this module, and have no need of pytest
    import pytest

WARM = WarmStartConfig(steps=120, batch=32, lr=8e-3)
FEW = ("blocks.1.mlp.*",)
"""Modules with adapters where files and processes are tested, and not what is in them: a step takes half of its time."""


def tiny_settings(**given: Any) -> Settings:
    small = replace(
        get_settings("strong"), warm=WARM, steps=4, prompts=3, group=4, evaluation_prompts=4, pairs=4, probe_every=2, teachers=4
    )
    return replace(small, **given)


def overrides(**given: Any) -> list[str]:
    """Return what makes ``tiny_settings`` of the usual ones, in the syntax of ``--override``."""
    return changes(tiny_settings(**given).as_dict(), get_settings("strong").as_dict())


def tiny_chat(folder: Path, device: str = "cpu", **given: Any) -> Settings:
    """Settings of a study of some steps on a tiny chat model and the problem Parity."""
    chat = ChatModel(str(folder), weights_hash(folder), max_new=10, token_budget=1 << 20, device=device)
    usual: dict[str, Any] = {
        "world": "parity:Parity", "chat": chat, "steps": 4, "prompts": 4, "group": 6, "kept_rank": 4, "kept_lr": 3e-3,
        "quarantine_rank": 4, "quarantine_lr": 1e-3, "pairs": 4, "teachers": 2, "evaluation_prompts": 6, "probe_every": 2,
    }  # fmt: skip
    return replace(CHAT, **(usual | given))


def tiny_job(root: Path, arm: str | Arm | None = "route2-grad", seed: int = 0, cache: Path | None = None, **given: Any) -> Job:
    elsewhere = {name: given.pop(name) for name in ("host", "precision", "device") if name in given}
    settings = tiny_settings(**given)
    chosen = None if arm == "base" else ARMS[arm] if isinstance(arm, str) else arm
    return Job(root / settings.folder, cache or root / "cache", settings, seed, chosen, **elsewhere)


def made_once(factory: "pytest.TempPathFactory", name: str, make: Callable[[Path], object]) -> Path:
    """Return a copy of the folder that ``make`` fills: one of pytest's workers fills it, and each has a copy of its own."""
    base = factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}-made"
    whole = made.with_suffix(".whole")
    with FileLock(made.with_suffix(".lock"), timeout=300):
        if not whole.exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            make(made)
            whole.touch()
    return shutil.copytree(made, factory.mktemp(name), dirs_exist_ok=True)


def train_base_again(training: Settings, cache: Path) -> None:
    """Give the cached base model of seed 0 other weights, as other code does: its settings, and the name of its file, stay."""
    made_of = get_world(training.world), training.warm, 0, cache
    base = warm_start(*made_of, progress=False)
    with torch.no_grad():
        base.unembed.weight *= 1.1
    warmstart._save(base, *cached_at(*made_of))


class StopError(BaseException):
    """Stops a run as Ctrl-C does."""


def run_until(job: Job, steps: int) -> None:
    """Run a job, and stop it after some steps."""
    note, left = Recorder.note, [steps]

    def noted(recorder: Recorder, *given: Any) -> Any:
        if not left[0]:
            raise StopError
        left[0] -= 1
        return note(recorder, *given)

    Recorder.note = noted
    try:
        run_job(job)
    except StopError:
        return
    finally:
        Recorder.note = note
    raise AssertionError("the run was not stopped")
