"""Modes of the adapters, and limits of the server. Nothing here needs torch or a web framework."""

from typing import Literal

from mi_route2.validation import AtLeastOne, Natural, validated

Mode = Literal["full", "deployed", "reference"]


@validated
class ServerLimits:
    """Limits of the server.

    Attributes:
        rows: Requests that run at once.
        queue: Requests that may wait.
        sweeps: Sweeps at once.
        cells: Cells of one sweep.
        max_body: Bytes of a body.
        backlog: Steps that a stream may wait for its reader.
        store: Bytes of captured runs.
        prefix_bytes: Bytes of the prefix cache; 0 switches it off.
        slot_bytes: Bytes of keys and values that running requests may reserve; if none are given, an eighth of the free memory on a
            CPU, from 256 MiB to 8 GiB, and any number elsewhere.
    """

    rows: AtLeastOne = 64
    queue: AtLeastOne = 1024
    sweeps: AtLeastOne = 4
    cells: AtLeastOne = 200_000
    max_body: AtLeastOne = 16 << 20
    backlog: AtLeastOne = 1024
    store: AtLeastOne = 256 << 20
    prefix_bytes: Natural = 256 << 20
    slot_bytes: AtLeastOne | None = None
