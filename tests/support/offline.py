"""Nothing may reach a network, whether or not there is one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def unreached() -> Iterator[None]:
    """Context: names are not resolved and nothing is connected; ``AssertionError`` at its end if anything tried, also in vain."""
    tried: list[Any] = []

    def refuse(*given: Any, **_named: Any) -> Any:
        tried.append(given[-2:])
        raise OSError(f"there is no network here for {given[-2:]}")

    with mock.patch.object(socket.socket, "connect", refuse), mock.patch("socket.getaddrinfo", refuse):
        yield
    assert tried == [], f"a network was asked for: {tried}"
