"""One tiny study for all of this folder."""

from pathlib import Path

import pytest
import torch
from tiny_steering import TINY, Made
from tiny_study import made_once

from studies.steering.cells import Bench
from studies.steering.study import run_study
from studies.training.job import finished_policy
from studies.training.worlds import open_world


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def run(out: Path) -> None:
        report = run_study(TINY, [0], out, workers=1, quiet=True)
        (out / "report").write_text("\n".join(str(path.relative_to(out)) for path in report))

    out = made_once(tmp_path_factory, "steering", run)
    return Made(out, TINY, [out / name for name in (out / "report").read_text().splitlines()])


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
