"""Clients of the module's server by key; what the first two have registered goes after each test."""

from collections.abc import Iterator

import pytest
from served import ADMIN, ALICE, BOB, Running

from mi_route2.serve.client import PatchStudy


@pytest.fixture
def alice(server: Running) -> Iterator[PatchStudy]:
    with PatchStudy(server.url, ALICE) as one:
        yield one
        one.unsteer()


@pytest.fixture
def bob(server: Running) -> Iterator[PatchStudy]:
    with PatchStudy(server.url, BOB) as one:
        yield one
        one.unsteer()


@pytest.fixture
def admin(server: Running) -> Iterator[PatchStudy]:
    with PatchStudy(server.url, ADMIN) as one:
        yield one
