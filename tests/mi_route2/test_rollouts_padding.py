"""A policy without a host: padding on the left changes no log-probability, whether the model counts positions or is told them."""

import pytest
import torch
from families import FAMILIES, make_family, make_rollouts

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_is_right_padding(name: str) -> None:
    model = make_family(name)
    adapters = attach(model, "blocks.*.mlp.*", spec=AdapterSpec("lora", 2), generator=torch.Generator().manual_seed(0))
    policy = Policy(model, adapters)
    with torch.no_grad():
        sides = {}
        for side in ("left", "right"):
            rollouts = make_rollouts(side=side)
            sides[side] = policy.logprobs(rollouts)[rollouts.predictors]
    assert float(sides["left"].abs().min()) > 0
    torch.testing.assert_close(sides["left"], sides["right"], rtol=0, atol=1e-10)
