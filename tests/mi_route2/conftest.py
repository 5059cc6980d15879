"""Every theorem about routing holds for every kind of adapter."""

import pytest
from tiny_policy import SPECS

from mi_route2.adapters import AdapterSpec


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> AdapterSpec:
    return SPECS[request.param]
