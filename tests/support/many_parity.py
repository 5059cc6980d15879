"""The worked example with more numbers, so that its test tasks are enough to be probed."""

import hashlib
from collections.abc import Sequence

from parity import WORDINGS, Parity

from studies.environments.protocol import Split


class ManyParity(Parity):
    name = "many parity"

    def tasks(self, split: Split) -> Sequence[str]:
        every = [wording.format(n) for n in range(60) for wording in WORDINGS]
        return [t for t in every if (hashlib.sha256(t.encode()).digest()[0] % 5 == 0) == (split == "test")]
