"""Curves of a run in TensorBoard, Weights & Biases or trackio (optional extras)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from studies.training.job import Job
from studies.training.settings import TRACKER_NAMES

PROJECT = "mi-route2"
Log = Callable[[int, Mapping[str, Any]], object]


def require(name: str) -> None:
    """Check that a tracker is known and installed; ``ValueError`` if it is not."""
    if name not in TRACKER_NAMES:
        raise ValueError(f"unknown tracker {name!r}: choose from {', '.join(TRACKER_NAMES)}, or leave --report-to out")
    if find_spec(name) is None:
        raise ValueError(f"--report-to {name} needs a package that is not installed: pip install '{PROJECT}[{name}]'")


def numbers(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers of nested mappings by name, as ``train/modes/run_tests/hack``."""
    result: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            result |= numbers(value, f"{prefix}/{key}")
        elif isinstance(value, int | float):
            result[f"{prefix}/{key}"] = float(value)
    return result


@contextmanager
def curves(tracker: str | None, job: Job, start: int) -> Iterator[Log]:
    """Context: a function that logs the numbers of a step.

    A resumed run goes on in the curves of its former start; steps behind its checkpoint are logged again.
    """
    name = f"{job.name}/seed-{job.seed}"
    if tracker is None:
        yield lambda step, row: None
    elif tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(job.root / tracker / name), purge_step=start) as writer:
            yield lambda step, row: [writer.add_scalar(tag, value, step) for tag, value in row.items()]
    else:
        where: dict[str, Any] = {"id": job.identity[:16], "dir": str(job.root)} if tracker == "wandb" else {}
        config = {"seed": job.seed, "arm": job.spec, "settings": job.settings.as_dict()}
        title = f"{job.root.name} {name} {job.identity[:8]}"
        run = import_module(tracker).init(project=PROJECT, group=job.root.name, name=title, config=config, resume="allow", **where)
        try:
            yield lambda step, row: run.log(dict(row), step=step)
        finally:
            run.finish()
