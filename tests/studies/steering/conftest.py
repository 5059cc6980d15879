"""One tiny study for all of this folder."""

import pytest
import torch
from tiny_steering import TINY, Made

from studies.steering.cells import Bench
from studies.steering.study import run_study
from studies.training.job import finished_policy
from studies.training.worlds import open_world


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("steering")
    return Made(out, TINY, run_study(TINY, [0], out, workers=1, quiet=True))


@pytest.fixture(scope="module")
def bench(made: Made):
    """The quarantine of a policy that was trained for two steps, enlarged so that it matters what becomes of it."""
    job = made.job("absorb")
    host, policy = finished_policy(job.run)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.adapters.quarantine_parameters().values():
            p.add_(0.15 * torch.randn(p.shape, generator=generator))
    with open_world(made.settings.run) as (world, witness):
        yield Bench(made.settings, host, policy, world, witness, 0)
