"""The lanes study on a CUDA device: an arm trained there is the CPU's, up to rounding; its symmetry is exact there too."""

from dataclasses import replace

import pytest
import torch
from gpu import DEVICE, NEEDS

from studies.lanes.arms import ARMS, Size
from studies.lanes.config import LanesConfig
from studies.lanes.gradients.paths import decompose
from studies.lanes.model import LanesModel
from studies.lanes.train import Training, train

pytestmark = NEEDS
SIZE = Size(d_model=16, heads=2, mlp=2)
TRAINING = Training(steps=8, batch=4, length=32)
TOKENS = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("precision", "close"), [("float32", 2e-2), ("bf16", 1e-1)])
# On a CPU both sides are the same training, but for the precision: one arm is enough to see that the test itself works.
@pytest.mark.parametrize("name", ["shipped"] if DEVICE == "cpu" else ["sequential", "shipped", "z2", "wide-embeddings"])
def test_an_arm_trained_on_the_device_is_the_cpus(name: str, precision: str, close: float) -> None:
    """Muon's iteration is in bfloat16 on either, so that losses agree to some hundredths of a nat after eight steps."""
    there = replace(TRAINING, device=DEVICE, precision=precision)
    own, found = train(ARMS[name], SIZE, TRAINING, TOKENS, 0), train(ARMS[name], SIZE, there, TOKENS, 0)
    assert {value.device.type for value in found.model.state_dict().values()} == {"cpu"}
    torch.testing.assert_close(found.losses, own.losses, rtol=0, atol=close)


@pytest.mark.parametrize("wiring", ["shipped", "simultaneous", "gauge", "z2", "gptj", "sequential"])
def test_paths_add_up_on_the_device(wiring: str) -> None:
    config = LanesConfig(layers=6, d_model=16, heads=2, wiring=wiring, zero_init=False)
    model = LanesModel(config, torch.Generator().manual_seed(1)).double().to(DEVICE)
    for one in decompose(model, TOKENS[:66].reshape(2, 33).to(DEVICE)):
        whole = one.direct + sum(one.terms.values())
        assert float((whole - one.total).norm()) <= 1e-12 * float(one.total.norm())


def test_lanes_of_z2_that_start_equal_stay_equal_to_the_bit() -> None:
    config = LanesConfig(layers=4, d_model=16, heads=2, lane_start=2, wiring="z2")
    model = LanesModel(config, torch.Generator().manual_seed(0)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        model.loss(TOKENS[step * 64 : step * 64 + 66].reshape(2, 33).to(DEVICE)).backward()
        optimizer.step()
    post = model.post.detach()
    assert not torch.equal(post, torch.ones_like(post))
    assert torch.equal(post[..., 0], post[..., 1])
