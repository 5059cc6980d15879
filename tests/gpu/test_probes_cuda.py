"""Probes that are fitted on a CUDA device are the CPU's, up to the rounding of float64."""

from pathlib import Path

import pytest
import torch

from probes.fingerprint import Fingerprint
from probes.store import load_probe, save_probe
from probes.transfer import default_fitters
from tests.support.families import make_batch, make_policy
from tests.support.gpu import DEVICE, NEEDS

pytestmark = NEEDS
FITTERS = default_fitters()
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
"""A logistic fit stops at a tolerance of its own."""


@pytest.mark.parametrize("name", FITTERS)
def test_a_fit_on_the_device_is_the_cpus_and_its_file_loads(name: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    hack = torch.arange(24) % 3 == 0
    h = torch.randn(24, 7, 6, generator=draw, dtype=torch.float64) + 0.5 * hack[:, None, None]
    mask = torch.rand(24, 7, generator=draw) < 0.7
    mask[:, 0] = True
    probes = []
    for device in (DEVICE, "cpu"):
        fitter = FITTERS[name]("layer")
        for part in (slice(12), slice(12, None)):
            fitter.update(h[part].to(device), mask[part].to(device), hack[part].to(device))
        probes.append(fitter.fit())
    own, cpu = probes
    expected, found = cpu.score_rollouts(h, mask), own.score_rollouts(h.to(DEVICE), mask.to(DEVICE))
    assert found.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)
    torch.testing.assert_close(own.score_tokens(h.to(DEVICE)).cpu(), cpu.score_tokens(h), **CLOSE)
    save_probe(tmp_path / "probe", own)
    torch.testing.assert_close(load_probe(tmp_path / "probe")[0].score_rollouts(h, mask), expected, **CLOSE)


def test_fingerprints_are_the_cpus() -> None:
    found = []
    for device in (DEVICE, "cpu"):
        policy, rollouts = make_policy("Qwen3", "lora")[1], make_batch().rollouts
        policy.model.to(device)
        fingerprint = Fingerprint.draw(policy.adapters, 5, torch.Generator().manual_seed(3))
        found.append(fingerprint(policy, rollouts.to(torch.device(device))).cpu())
    torch.testing.assert_close(found[0], found[1], **CLOSE)
