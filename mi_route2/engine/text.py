"""Text of a token sequence that grows one token at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

SPLIT = "\ufffd"
"""Replacement character, to which a tokenizer decodes the bytes of an unfinished character."""
WAITS = 8
"""Tokens without a new character after which bytes are taken as they are: a character of UTF-8 has at most four bytes."""


class GrowingText:
    """Text of tokens that arrive one by one; each token costs a decoding of the last few tokens only.

    A token is decoded together with the tokens before it, so that spaces, joined pieces and characters of several tokens come out
    as ``tokenizer.decode`` writes them for the whole sequence. ``text`` is what is certain so far.

    Args:
        tokenizer: anything with ``decode(ids)``.
        stop: texts at whose first appearance the text ends. Text that may be the beginning of one is held back.
        prompt: tokens before, of which a tokenizer may leave out a first space, but not that of the word behind them.

    Examples:
        >>> growing = GrowingText(tokenizer)
        >>> pieces = [growing.push(token) for token in ids] + [growing.end()]
        >>> "".join(pieces) == tokenizer.decode(ids)
        True
    """

    def __init__(self, tokenizer: Any, stop: Iterable[str] = (), prompt: Sequence[int] = ()):
        self._decode, self._stop, self._prompt = tokenizer.decode, tuple(stop), prompt
        self._begun = False
        self._ids: list[int] = []
        self._from = self._read = self._ahead = self._grew = 0
        self._whole, self._given = "", 0
        self.stopped = False

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return self._whole[: self._given]

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain now; ``stopped`` is set if a stop text has appeared."""
        if self.stopped:
            return ""
        self._ids.append(token)
        piece = self._unread()
        certain = piece.rstrip(SPLIT)  # what comes before an unfinished character
        if len(certain) > self._ahead:
            self._grew = len(self._ids)
        if certain != piece and len(self._ids) - self._grew < WAITS:
            self._add(certain[self._ahead :])
            self._ahead = max(self._ahead, len(certain))
        else:
            self._finish(piece)
        return self._give(self._withheld())

    def extend(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now, as ``push`` of each would, with as few decodings as possible."""
        if len(tokens) < 2 or self._stop or self.stopped:
            return "".join([self.push(token) for token in tokens])
        self._ids += tokens
        if SPLIT not in (piece := self._unread()):
            self._finish(piece)
            return self._give(0)
        del self._ids[-len(tokens) :]
        half = len(tokens) // 2
        return self.extend(tokens[:half]) + self.extend(tokens[half:])

    def end(self) -> str:
        """Return the text that was held back; no token follows."""
        if not self.stopped and self._read < len(self._ids):
            self._finish(self._unread())
        return self._give(0)

    def _begin(self) -> None:
        """Read the end of the prompt; not when this is made, because a tokenizer may raise."""
        if not self._begun:
            ending = _ending(self._decode, self._prompt)
            self._ids[:0] = ending
            self._read = self._grew = len(ending)
            self._begun, self._prompt = True, ()

    def _unread(self) -> str:
        """Return the text of the tokens whose last character is not finished, or of the last one."""
        self._begin()
        before, after = self._decode(self._ids[self._from : self._read]), self._decode(self._ids[self._from :])
        if not after.startswith(before):  # bytes that are tokens, of which one alone breaks those before
            return self._decode(self._ids[self._read :])
        return after[len(before) :]

    def _finish(self, piece: str) -> None:
        """Add the new characters of ``piece``, and count its tokens as read."""
        self._add(piece[self._ahead :])
        if piece:
            self._from, self._read = self._read, len(self._ids)
        elif not self._decode(2 * self._ids[self._read :]):
            del self._ids[self._read :]  # left out, as special tokens are: behind one alone the next token would lose its space
        self._ahead, self._grew = 0, len(self._ids)

    def _add(self, piece: str) -> None:
        first = max(0, len(self._whole) - max(map(len, self._stop), default=0) + 1)
        self._whole += piece
        places = [place for stop in self._stop if (place := self._whole.find(stop, first)) >= 0]
        if places:
            self._whole, self.stopped = self._whole[: min(places)], True

    def _withheld(self) -> int:
        """Return the length of the longest end of the text that begins a stop text."""
        if self.stopped:
            return 0
        return max((_overlap(self._whole, stop) for stop in self._stop), default=0)

    def _give(self, withheld: int) -> str:
        new = self._whole[self._given : len(self._whole) - withheld]
        self._given += len(new)
        return new


def grown(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ``ids`` behind ``prompt``: that of ``GrowingText``."""
    growing = GrowingText(tokenizer, (), prompt)
    return growing.extend(ids) + growing.end()


def _ending(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt that have text and end with a whole character; none if it has no text."""
    size = WAITS
    while prompt:
        some = list(prompt[-size:])
        for count in range(len(some), max(0, len(some) - 4), -1):  # an unfinished character is left out, and has at most three
            if (text := decode(some[:count])) and not text.endswith(SPLIT):
                return some[:count]
        if size >= len(prompt):
            return some if not decode(some) and decode(2 * some) else []  # a space that is left out, or special tokens
        size *= 2  # of special tokens, or cut within a character of bytes that are tokens
    return []


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``; looked for where its first character is."""
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return len(text) - place if place >= 0 else 0
