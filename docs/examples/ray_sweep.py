"""A sweep through Ray: each arm at a seed is a task on one processor, and an arm waits for its seed's base job.

    python docs/examples/ray_sweep.py runs --preset strong --seeds 3 --arms vanilla route2-full --override steps=80

The folders are those of ``python -m studies.route2 run``, byte for byte, and its other commands read them. ``out`` is a folder that
all machines share; ``ray.init`` joins the cluster of ``RAY_ADDRESS``, or starts one here. A task whose machine is lost is run again
and goes on at its last checkpoint.
"""

from pathlib import Path
from typing import Annotated

import ray
import tyro

from mi_route2.validation import write_json
from studies.common.command_line import read_seeds
from studies.common.processes import exclusive
from studies.training.arms import get_arms
from studies.training.cluster import run_queued
from studies.training.job import Job
from studies.training.settings import get_settings, override


@ray.remote(num_cpus=1, max_retries=-1)  # a lost machine is no failure; what a job raises is
def run(job: Job, *_awaited: None) -> None:
    run_queued(job)


def sweep(
    out: tyro.conf.Positional[Path],
    preset: str = "strong",
    seeds: str = "3",
    arms: tuple[str, ...] = ("vanilla", "route2-full"),
    changes: Annotated[tuple[str, ...], tyro.conf.arg(name="override")] = (),
) -> None:
    settings = override(get_settings(preset), changes)
    out = out.absolute()  # tasks run in folders of Ray's
    root = out / settings.folder
    with exclusive(root), ray.init():
        write_json(root / "settings.json", settings.as_dict())
        waiting = list[ray.ObjectRef]()
        for seed in read_seeds(seeds):
            base = run.remote(Job(root, out / "warmstarts", settings, seed, None))
            waiting += [base, *(run.remote(Job(root, out / "warmstarts", settings, seed, arm), base) for arm in get_arms(arms))]
        ray.get(waiting)


if __name__ == "__main__":
    tyro.cli(sweep)
