"""Nothing may reach a network, whether or not there is one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def unreached() -> Iterator[None]:
    """Context: nothing but this machine is looked up or reached; ``AssertionError`` at its end if anything tried, also in vain."""
    tried: list[Any] = []

    def refuse(*given: Any, **_named: Any) -> Any:
        tried.append(given[-2:])
        raise OSError(f"there is no network here for {given[-2:]}")

    def guarded(function: Any, at: int) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            host = given[at][0] if isinstance(given[at], tuple) else given[at]
            return function(*given, **named) if host == "127.0.0.1" else refuse(*given)

        return call

    connect, resolve = guarded(socket.socket.connect, 1), guarded(socket.getaddrinfo, 0)
    with mock.patch.object(socket.socket, "connect", connect), mock.patch("socket.getaddrinfo", resolve):
        yield
    assert tried == [], f"a network was asked for: {tried}"
