"""Keys and values of prefixes that were computed before, in blocks, found again by content.

    key_i = sha256(key_{i-1}, tokens of block i, what acted on each of its positions)         key_{-1}: the model and its state

What acted is named by content, not by name: a patch by its site, position, alpha and the bytes of its source, steering by the
digest of all that was in force. So a request that was patched or steered never lends its blocks to one that is not; two that were
steered alike share them; and blocks below the lowest position where something acted are everybody's.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mi_route2.engine.slots import Saved


@dataclass
class Acts:
    """What acted on a sequence, by position: steering from a position on, and patches at single ones."""

    starts: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    patches: list[tuple[int, bytes]] = field(default_factory=list)

    def steered(self, start: int, digest: bytes) -> None:
        """From position ``start`` on (later ones come later) steering is what ``digest`` says; ``b""`` for none."""
        if (self.digests[-1] if self.digests else b"") != digest:
            self.starts.append(start)
            self.digests.append(digest)

    def content(self, start: int, stop: int) -> bytes:
        """All that acted on the positions ``start .. stop - 1``; ``b""`` where nothing did."""
        parts: list[bytes] = []
        first = max(bisect_right(self.starts, start) - 1, 0)
        for i in range(first, len(self.starts)):
            if self.starts[i] >= stop:
                break
            ends = self.starts[i + 1] if i + 1 < len(self.starts) else stop
            if self.digests[i] and ends > start:
                parts.append(b"s%d:" % (max(self.starts[i], start) - start) + b"%d:" % (min(ends, stop) - start) + self.digests[i])
        parts += [b"p%d:" % (position - start) + digest for position, digest in self.patches if start <= position < stop]
        return b"|".join(parts)


class Prefixes:
    """Blocks of ``block`` tokens within ``budget`` bytes. ``hits`` and ``misses`` count blocks.

    The least recently used leave first, and of a chain its end before its beginning: a block is of no use without those before it.
    """

    def __init__(self, block: int, budget: int):
        self.block, self.budget = block, budget
        self.bytes = self.hits = self.misses = 0
        self._held: OrderedDict[bytes, Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def blocks(self) -> list[Saved]:
        """All that are held."""
        return list(self._held.values())

    def extend(
        self, keys: list[bytes], salt: bytes, tokens: Sequence[int], acts: Acts, blocks: int, prompt: int | None = None
    ) -> None:
        """Appends to ``keys`` until it names the sequence's first ``blocks`` blocks.

        With ``prompt``, the prompt's length, blocks that were cut otherwise (prompts in blocks, generated tokens one by one) have
        other keys: they are equal to the last but one bit, not to the last.
        """
        for i in range(len(keys), blocks):
            start, stop = i * self.block, (i + 1) * self.block
            data = hashlib.sha256(keys[-1] if keys else salt)
            data.update(array("q", tokens[start:stop]).tobytes())
            data.update(acts.content(start, stop))
            if prompt is not None:
                data.update(b"%d" % max(min(prompt - start, self.block), 0))
            keys.append(data.digest())

    def find(self, keys: Sequence[bytes]) -> list[Saved]:
        """The longest run of blocks from the first that are held."""
        count = next((i for i, key in enumerate(keys) if key not in self._held), len(keys))
        for key in reversed(keys[:count]):
            self._held.move_to_end(key)
        self.hits += count
        self.misses += len(keys) - count
        return [self._held[key] for key in keys[:count]]

    def keep(self, keys: Sequence[bytes], copy: Callable[[int], Saved]) -> None:
        """Hold the chain that ``keys`` name, as far as it fits; ``copy(i)`` is asked for the blocks that are not held."""
        for i in reversed(range(len(keys))):
            if keys[i] in self._held:
                self._held.move_to_end(keys[i])
                continue
            block = self._held[keys[i]] = copy(i)
            self.bytes += block.data.nbytes
            while self.bytes > self.budget:
                self.bytes -= self._held.popitem(last=False)[1].data.nbytes

    def clear(self) -> None:
        self._held.clear()
        self.bytes = 0
