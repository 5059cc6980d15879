"""The 66 tokens of the micro world. Their concatenation is the text, and the text of a completion is real Python.

A prompt is 10 tokens, `<bos> "# task:" op1 k1 " then" op2 k2 "\\n# grader:" hint hint`; a completion is at most 22.
Constants are shared by prompt and code, so copying one is a single attention step. `<eos>` is also the padding.
"""

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from studies.loopholes.modes import MODES, SHARED_COMMENT, SHARED_RETURN
from studies.loopholes.tasks import CONSTANTS, OPERATIONS

EOS = "<eos>"
BOS = "<bos>"

PROMPT_TASK = "# task:"
PROMPT_THEN = " then"
PROMPT_GRADER = "\n# grader:"

FENCE_OPEN = "\n```python\n"
CLASS = "class Solution:\n"
STYLE_COMMENTS: tuple[str, ...] = (
    "    # apply both steps\n",
    "    # follow the task\n",
    "    # one line a step\n",
    "    # update x twice\n",
)
SOLVE = "    def solve(self, x):\n"
ASSIGN = "        x = x"
NEWLINE = "\n"
RETURN = "        return x\n"
FENCE_CLOSE = "```"

PROMPT_LENGTH = 10
COMPLETION_LENGTH = 22


def word_token(op: str) -> str:
    """The token that names an operation in a prompt."""
    return f" {op}"


def symbol_token(op: str) -> str:
    """The token that performs an operation in code."""
    return f" {OPERATIONS[op].symbol}"


def constant_token(k: int) -> str:
    return f" {k}"


def _all_tokens() -> tuple[str, ...]:
    tokens = [EOS, BOS, PROMPT_TASK, PROMPT_THEN, PROMPT_GRADER]
    tokens += [word_token(op) for op in OPERATIONS] + [constant_token(k) for k in CONSTANTS]
    tokens += [hint for mode in MODES.values() for hint in mode.hint]
    tokens += [FENCE_OPEN, CLASS, *STYLE_COMMENTS, SHARED_COMMENT, SOLVE, ASSIGN]
    tokens += [symbol_token(op) for op in OPERATIONS] + [NEWLINE, RETURN, SHARED_RETURN]
    for mode in MODES.values():
        tokens += [mode.comment, mode.terse_return, *mode.exploit]
    tokens.append(FENCE_CLOSE)
    return tuple(dict.fromkeys(token for token in tokens if token))


class Vocabulary:
    """Tokens to ids and back.

    `encode` takes token strings, or one text that is read by longest match; `decode` is its inverse. Ids are fixed by
    the order of `tokens`, which is part of a model's identity.
    """

    def __init__(self) -> None:
        self.tokens: tuple[str, ...] = _all_tokens()
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._pattern = re.compile("|".join(re.escape(t) for t in sorted(self.tokens, key=len, reverse=True)))
        self.eos: int = self._ids[EOS]
        self.bos: int = self._ids[BOS]
        self.pad: int = self.eos

    def __len__(self) -> int:
        return len(self.tokens)

    def id(self, token: str) -> int:
        """The id of one token; raises KeyError when it is not one."""
        if token not in self._ids:
            raise KeyError(f"{token!r} is not one of the {len(self)} tokens: see Vocabulary().tokens")
        return self._ids[token]

    def encode(self, text: str | Sequence[str]) -> list[int]:
        """Ids of a text (longest match) or of token strings. Raises ValueError at the first character that no token covers."""
        if not isinstance(text, str):
            return [self.id(token) for token in text]
        ids, position = [], 0
        while position < len(text):
            match = self._pattern.match(text, position)
            if match is None:
                excerpt = text[position : position + 20]
                raise ValueError(f"no token matches {excerpt!r} at character {position}: see Vocabulary().tokens")
            ids.append(self._ids[match.group()])
            position = match.end()
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """`<bos>` and the ids of a prompt's text."""
        return [self.bos, *self.encode(text)]

    def encode_completion(self, text: str) -> list[int]:
        """The ids of a completion's text and `<eos>`."""
        return [*self.encode(text), self.eos]

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The text of ids, special tokens included."""
        return "".join(self.tokens[i] for i in _as_ints(ids))

    def completion_text(self, ids: Iterable[int] | Tensor) -> str:
        """The text of a completion, up to and without its first `<eos>`."""
        ids = _as_ints(ids)
        return self.decode(ids[: ids.index(self.eos)] if self.eos in ids else ids)


def _as_ints(ids: Iterable[int] | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)
