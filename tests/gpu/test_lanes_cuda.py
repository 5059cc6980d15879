"""The lanes study on a CUDA device: an arm trained there is the CPU's, up to rounding; its symmetry is exact there too."""

import pytest
import torch
from gpu import DEVICE, NEEDS

from studies.lanes.config import LanesConfig
from studies.lanes.gradients.paths import decompose
from studies.lanes.model import LanesModel

pytestmark = [pytest.mark.gpu, NEEDS]
TOKENS = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))


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
