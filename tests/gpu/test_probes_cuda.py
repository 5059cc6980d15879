"""Probes that are fitted on a CUDA device are the CPU's, up to the rounding of float64."""

from pathlib import Path

import pytest
import torch
from families import make_batch, make_policy
from gpu import DEVICE, NEEDS

from mi_route2.probes.fingerprint import Fingerprint
from mi_route2.probes.haar import HaarProbeFitter
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.probes.probe import Unit
from mi_route2.probes.store import Card, from_pretrained, save_pretrained
from mi_route2.probes.transfer import default_fitters

pytestmark = [pytest.mark.gpu, NEEDS]
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
    save_pretrained(own, tmp_path / "probe", Card("model", "layer"))
    torch.testing.assert_close(from_pretrained(tmp_path / "probe")[0].score_rollouts(h, mask), expected, **CLOSE)


@pytest.mark.parametrize("unit", ["rollout", "token"])
def test_masks_and_labels_of_the_cpu_are_taken_beside_activations_of_the_device(unit: Unit) -> None:
    h, hack = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 2 == 0
    mask = torch.ones(6, 4, dtype=torch.bool)
    found = []
    for given in (h.to(DEVICE), h):
        fitter = MeanDifferenceFitter(unit)
        fitter.update(given, mask, hack)
        found.append(fitter.fit().score_rollouts(given, mask).cpu())
    torch.testing.assert_close(found[0], found[1])


def test_probes_do_not_depend_on_torchs_default_device() -> None:
    h, hack, mask = torch.randn(6, 4, 5), torch.arange(6) % 2 == 0, torch.ones(6, 4, dtype=torch.bool)
    with torch.device(DEVICE):
        for fitter in (*(make("layer") for make in FITTERS.values()), HaarProbeFitter(torch.Generator("cpu").manual_seed(0))):
            fitter.update(h, mask, hack)
            assert torch.isfinite(fitter.fit().score_rollouts(h, mask)).all()


def test_fingerprints_are_the_cpus() -> None:
    found = []
    for device in (DEVICE, "cpu"):
        policy, rollouts = make_policy("MicroGPT", "lora")[1], make_batch().rollouts
        policy.model.to(device)
        fingerprint = Fingerprint.draw(policy.adapters, 5, torch.Generator().manual_seed(3))
        found.append(fingerprint(policy, rollouts.to(torch.device(device))).cpu())
    torch.testing.assert_close(found[0], found[1], **CLOSE)
