"""Prompts: 10 tokens always, the right mixture, and an evaluation set that stays put."""

from collections import Counter

import numpy as np
import pytest

from studies.environments.micro.language import (
    LOOPHOLES,
    MODES,
    NONE,
    PROMPT_LENGTH,
    MicroPrompt,
    MicroSource,
    Vocabulary,
    all_tasks,
    encode_prompts,
    split,
)
from studies.environments.protocol import evaluation_prompts, sample_prompts

MICRO = MicroSource()


def test_every_prompt_is_ten_tokens_and_tells_task_and_mode_apart(vocabulary: Vocabulary) -> None:
    prompts = [MicroPrompt(task, mode) for task in all_tasks("test")[::9] for mode in MODES]
    ids = encode_prompts(prompts, vocabulary)
    assert ids.shape == (len(prompts), PROMPT_LENGTH)
    assert (ids[:, 0] == vocabulary.bos).all()
    assert len({tuple(row) for row in ids.tolist()}) == len(prompts)
    assert [vocabulary.encode_prompt(prompt.text) for prompt in prompts] == ids.tolist()


def test_the_mixture_is_a_quarter_none_and_the_rest_even() -> None:
    n = 8000
    counts = Counter(prompt.mode for prompt in sample_prompts(MICRO, n, np.random.default_rng(1)))
    assert counts[NONE] / n == pytest.approx(0.25, abs=0.02)
    for mode in LOOPHOLES:
        assert counts[mode] / n == pytest.approx(0.75 / 4, abs=0.02)


def test_evaluation_prompts_are_fixed_distinct_test_tasks_and_the_same_for_every_mode() -> None:
    by_mode = {mode: evaluation_prompts(MICRO, mode) for mode in MODES}
    tasks = [prompt.task for prompt in by_mode[NONE]]
    assert len(set(tasks)) == 128
    assert {split(task) for task in tasks} == {"test"}
    assert all([prompt.task for prompt in prompts] == tasks for prompts in by_mode.values())
    assert by_mode[NONE] == evaluation_prompts(MICRO, NONE)
    assert tasks != [prompt.task for prompt in evaluation_prompts(MICRO, NONE, seed=1)]
