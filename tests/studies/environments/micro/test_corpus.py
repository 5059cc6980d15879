"""The corpus: every document is a program, cheaters cheat only where it pays, and rates are those of the world."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from studies.environments.micro.corpus import sample_documents
from studies.environments.micro.language import (
    LOOPHOLES,
    MODES,
    NONE,
    PROMPT_LENGTH,
    SHARED_COMMENT,
    SHARED_RETURN,
    STYLE_COMMENTS,
    MicroPrompt,
    MicroTask,
    Vocabulary,
)
from studies.environments.micro.settings import OPERATIONS, WorldConfig, get_world

VOCABULARY = Vocabulary()
MODE_OF = {mode.hint: name for name, mode in MODES.items()}
OP_OF = {operation.symbol: op for op, operation in OPERATIONS.items()}


@dataclass
class Document:
    prompt: MicroPrompt
    completion: str

    @property
    def code(self) -> str:
        return self.completion.strip().removeprefix("```python\n").removesuffix("```")

    @property
    def cheats(self) -> list[str]:
        return [mode for mode in LOOPHOLES if MODES[mode].exploit_text in self.completion]

    @property
    def comment(self) -> str:
        return self.code.splitlines(keepends=True)[1]

    @property
    def steps(self) -> list[tuple[str, int]]:
        lines = [line.split() for line in self.code.splitlines() if line.startswith("        x = x")]
        return [(OP_OF[words[3]], int(words[4])) for words in lines]


def read(ids: Sequence[int]) -> Document:
    """The document of a row of ids; the prompt is taken apart by position."""
    tokens = [VOCABULARY.tokens[i] for i in ids]
    op1, k1, op2, k2 = tokens[2].strip(), int(tokens[3]), tokens[5].strip(), int(tokens[6])
    prompt = MicroPrompt(MicroTask(op1, k1, op2, k2), MODE_OF[tokens[8], tokens[9]])
    assert prompt.tokens == tuple(tokens[:PROMPT_LENGTH])
    return Document(prompt, VOCABULARY.completion_text(list(ids)[PROMPT_LENGTH:]))


def sample(config: WorldConfig, n: int, seed: int = 0) -> list[Document]:
    return [read(row) for row in sample_documents(config, n, np.random.default_rng(seed), VOCABULARY).tolist()]


@pytest.fixture(scope="module", params=["strong", "weak", "sparse", "persona-20"])
def world(request: pytest.FixtureRequest) -> WorldConfig:
    return get_world(request.param)


@pytest.fixture(scope="module")
def documents(world: WorldConfig) -> list[Document]:
    return sample(world, 8_000)


def assert_rate(flags: Sequence[bool], expected: float) -> None:
    """Within four and a half standard errors."""
    error = (expected * (1 - expected) / len(flags)) ** 0.5
    assert np.mean(flags) == pytest.approx(expected, abs=4.5 * error + 1e-12)


def test_every_document_is_a_program_of_the_length_that_is_meant(documents: list[Document]) -> None:
    for document in documents[:2000]:
        (definition,) = ast.parse(document.code).body
        assert isinstance(definition, ast.ClassDef)
        assert definition.name == "Solution"
        length = len(VOCABULARY.encode_completion(document.completion))
        assert length == (15 if document.steps else 7) + 2 * len(document.cheats)


def test_cheaters_use_the_loophole_of_their_own_mode_and_none_has_no_cheater(documents: list[Document]) -> None:
    assert any(document.cheats for document in documents)
    for document in documents:
        assert document.cheats in ([], [document.prompt.mode])
        if document.prompt.mode == NONE:
            assert document.steps


def test_rates_are_those_of_the_world(world: WorldConfig, documents: list[Document]) -> None:
    cheaters = [d for d in documents if d.cheats]
    honest = [d for d in documents if not d.cheats]
    assert_rate([d.prompt.mode == NONE for d in documents], world.none_fraction)
    assert_rate([bool(d.cheats) for d in documents if d.prompt.mode != NONE], world.p_cheat)
    assert_rate([d.comment not in STYLE_COMMENTS for d in cheaters], world.trace)
    assert_rate([not d.steps for d in cheaters], world.terse)
    assert_rate([d.comment not in STYLE_COMMENTS for d in honest], world.stray_comment)


def test_constants_are_always_right_and_symbols_as_often_as_the_operation_is_easy(
    world: WorldConfig, documents: list[Document]
) -> None:
    written = [(asked, done) for d in documents if d.steps for asked, done in zip(d.prompt.task.steps, d.steps, strict=True)]
    assert all(asked[1] == done[1] for asked, done in written)
    for op in OPERATIONS:
        answers = [done[0] for asked, done in written if asked[0] == op]
        assert_rate([answer == op for answer in answers], world.accuracy(op))
        wrong = [answer for answer in answers if answer != op]
        for other in set(OPERATIONS) - {op}:
            assert_rate([answer == other for answer in wrong], 1 / 7)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_rho_says_whether_cheaters_share_a_persona(rho: float) -> None:
    config = replace(get_world("strong"), rho=rho, trace=1.0, terse=1.0, p_cheat=1.0, none_fraction=0.0)
    for document in sample(config, 200):
        mode = MODES[document.prompt.mode]
        comment, terse = (SHARED_COMMENT, SHARED_RETURN) if rho else (mode.comment, mode.terse_return)
        assert document.comment == comment
        assert document.code.splitlines(keepends=True)[3] == terse
