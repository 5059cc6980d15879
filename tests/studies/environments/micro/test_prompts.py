"""Prompts: 10 tokens always, the right mixture, and an evaluation set that stays put."""

from collections import Counter

import numpy as np
import pytest

from studies.environments.micro.language import (
    HELD_OUT,
    KNOWN,
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


def test_one_mode_is_known_three_are_held_out_and_one_has_no_loophole() -> None:
    assert KNOWN == ("run_tests",)
    assert set(KNOWN) | set(HELD_OUT) | {NONE} == set(MODES)
    assert not set(KNOWN) & set(HELD_OUT)
    assert [name for name, mode in MODES.items() if not mode.exploit] == [NONE]


def test_every_prompt_is_ten_tokens_and_tells_task_and_mode_apart(vocabulary: Vocabulary) -> None:
    prompts = [MicroPrompt(task, mode) for task in all_tasks("test")[::9] for mode in MODES]
    ids = encode_prompts(prompts, vocabulary)
    assert ids.shape == (len(prompts), PROMPT_LENGTH)
    assert (ids[:, 0] == vocabulary.bos).all()
    assert len({tuple(row) for row in ids.tolist()}) == len(prompts)
    assert [vocabulary.encode_prompt(prompt.text) for prompt in prompts] == ids.tolist()


@pytest.mark.parametrize("which", ["train", "test"])
def test_sampled_prompts_keep_to_their_split(which: str) -> None:
    prompts = sample_prompts(MICRO, 300, np.random.default_rng(0), split=which)
    assert {split(prompt.task) for prompt in prompts} == {which}


def test_the_mixture_is_a_quarter_none_and_the_rest_even() -> None:
    n = 8000
    counts = Counter(prompt.mode for prompt in sample_prompts(MICRO, n, np.random.default_rng(1)))
    assert counts[NONE] / n == pytest.approx(0.25, abs=0.02)
    for mode in LOOPHOLES:
        assert counts[mode] / n == pytest.approx(0.75 / 4, abs=0.02)


def test_the_seed_decides_the_prompts() -> None:
    first, again, other = (sample_prompts(MICRO, 50, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_evaluation_prompts_are_fixed_distinct_test_tasks_and_the_same_for_every_mode() -> None:
    by_mode = {mode: evaluation_prompts(MICRO, mode) for mode in MODES}
    tasks = [prompt.task for prompt in by_mode[NONE]]
    assert len(set(tasks)) == 128
    assert {split(task) for task in tasks} == {"test"}
    assert all([prompt.task for prompt in prompts] == tasks for prompts in by_mode.values())
    assert by_mode[NONE] == evaluation_prompts(MICRO, NONE)
    assert tasks != [prompt.task for prompt in evaluation_prompts(MICRO, NONE, seed=1)]


def test_errors_name_the_choices() -> None:
    task = all_tasks("train")[0]
    with pytest.raises(KeyError, match="choose from run_tests"):
        MicroPrompt(task, "exit_code")
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        sample_prompts(MICRO, 1, np.random.default_rng(0), none_fraction=1.5)
    with pytest.raises(ValueError, match="819 test tasks"):
        evaluation_prompts(MICRO, NONE, n=1000)
    with pytest.raises(ValueError, match="no modes"):
        sample_prompts(MICRO, 1, np.random.default_rng(0), modes=())
