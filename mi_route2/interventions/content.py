"""What acts on a token, by content: equal digests mean equal numbers at equal sites, whatever rows and names they have.

Keys and values that were calculated under one content are good for every request with the same, and for no other.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mi_route2.interventions.planner import Acting
from mi_route2.interventions.rows import Rows
from mi_route2.sites import Site


def digest(acting: Acting, rows: Rows, tier: Mapping[Site, Tensor], gain: float, decode: bool) -> bytes:
    """Of all that acts on a prompt token, or a generated one; ``b""`` where nothing does.

    A row's scale, the tier's gain and the monitors that gate something are in it; one that only watches is not.
    """
    row, scale = acting.rows[decode], acting.scales[decode]
    parts = [rows.content(row, decode, scale)]
    dynamic = tier if decode and gain else {}
    for site, values in sorted(dynamic.items()):
        parts.append(f"tier {site} {gain!r} ".encode() + values.cpu().view(torch.uint8).numpy().tobytes())
    line = 2 * row + decode
    static = {site for site, table in rows.tables.items() if line in table.acts} if scale else set()
    for watch in acting.watches:
        monitor = watch.monitor
        gated = {*dynamic, *(static if monitor.gate_rows else ())}
        steers = decode and (monitor.adds or any(monitor.gating(site) for site in gated))
        if steers or (monitor.quarantine is not None and (decode or monitor.prompt)):
            quarantined = " ".join(sorted(map(str, watch.quarantined)))
            parts.append(b"monitor " + monitor.content() + quarantined.encode())
    acts = [hashlib.sha256(part).digest() for part in parts if part]
    return hashlib.sha256(b"".join(acts)).digest() if acts else b""
