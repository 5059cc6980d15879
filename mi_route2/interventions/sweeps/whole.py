"""Cells as whole forwards through ``host.logits``, many in a batch: for every host and architecture."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.hosts.base import Edit, Host
from mi_route2.hosts.decoder import Decoder
from mi_route2.interventions.sweeps.forwards import Forwards, Record, Row, selecting, writing
from mi_route2.interventions.sweeps.plan import Costs, Group
from mi_route2.interventions.sweeps.resumed import Resumed
from mi_route2.interventions.sweeps.targets import Target
from mi_route2.sites import Site

_TOKENS = {"cpu": 2**11}
_MANY, _ROOM = 2**17, 2**27
"""Tokens of a forward (on an accelerator), and logits that it may hold."""


class Whole:
    """See the module. ``tokens`` run whole; nothing is kept between forwards."""

    name = "whole"

    def __init__(self, host: Host):
        self.host, self._device = host, next(host.model.parameters()).device
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._vocabulary = 1

    def record(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        values: dict[Site, Tensor] = {}
        index = torch.tensor(places, device=self._device)
        with torch.no_grad(), self.host.hooks({site: selecting(values, site, index) for site in sites}):
            logits = self.host.logits(torch.tensor([list(tokens)], device=self._device))
        return Record(values, logits[0, -1])

    def start(self, tokens: Sequence[int], sites: Sequence[Site], places: Sequence[int]) -> Record:
        found = self.record(tokens, sites, places)
        self._tokens, self._vocabulary = torch.tensor(tokens, device=self._device), len(found.logits)
        return found

    def place(self, target: Target, position: int) -> tuple[int, int]:
        return 0, 0

    def costs(self) -> Costs:
        """Groups as large as there is room for: a forward costs the same whatever is put in."""
        length = len(self._tokens)
        most = min(_TOKENS.get(self._device.type, _MANY), _ROOM // self._vocabulary)
        return Costs(layers=1, length=length, column=1.0, mlp=0.0, pair=0.0, unembed=0.0, overhead=1.0, most=max(most, length))

    def run(self, group: Group, rows: Sequence[Row]) -> Float[Tensor, "n v"]:
        return self.under(writing(rows, 0, len(self._tokens)), len(rows))

    def under(self, edits: Mapping[Site, Edit], n: int) -> Float[Tensor, "n v"]:
        """The logits behind the last token of the run that was started, ``n`` times over, under ``edits``."""
        with torch.no_grad(), self.host.hooks(edits):
            return self.host.logits(self._tokens.expand(n, -1))[:, -1]


def forwards(host: Host, how: str = "auto") -> Forwards:
    """``resumed``, ``whole``, or by itself (``auto``) the first that the host can. ``ValueError`` for another name."""
    if how not in ("auto", "resumed", "whole"):
        raise ValueError(f"unknown forwards {how!r}: choose among auto, resumed, whole")
    if how == "whole":
        return Whole(host)
    try:
        return Resumed(Decoder(host))
    except ValueError:  # a decoder says so of what it does not take
        if how == "resumed":
            raise
        return Whole(host)
