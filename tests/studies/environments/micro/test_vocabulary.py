"""The vocabulary: 66 tokens, and text and ids that are each other's inverse."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.environments.micro.language import BOS, EOS, Vocabulary

VOCABULARY = Vocabulary()
any_ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40)


def test_there_are_66_distinct_tokens_and_eos_pads() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY.tokens)) == 66
    assert VOCABULARY.pad == VOCABULARY.eos == VOCABULARY.id(EOS)
    assert VOCABULARY.bos == VOCABULARY.id(BOS)


@given(any_ids)
def test_any_ids_survive_the_way_through_text(ids: list[int]) -> None:
    assert VOCABULARY.encode(VOCABULARY.decode(ids)) == ids
    assert VOCABULARY.decode(torch.tensor(ids, dtype=torch.long)) == VOCABULARY.decode(ids)


@given(any_ids)
def test_a_completion_ends_at_its_first_eos(ids: list[int]) -> None:
    text = VOCABULARY.completion_text([*ids, VOCABULARY.eos, 5, 6])
    assert EOS not in text
    assert VOCABULARY.decode(ids).startswith(text)
    if VOCABULARY.eos not in ids:
        assert text == VOCABULARY.decode(ids)


def test_prompts_open_with_bos_and_completions_close_with_eos() -> None:
    assert VOCABULARY.encode_prompt(" add 2") == VOCABULARY.encode([BOS, " add", " 2"])
    assert VOCABULARY.encode_completion(" + 2") == VOCABULARY.encode([" +", " 2", EOS])
