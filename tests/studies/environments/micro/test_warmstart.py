"""Warm start: the loss that is meant, the same bits again, and a cache that never gives a wrong model."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from studies.environments.micro import warmstart
from studies.environments.micro.corpus import sample_documents
from studies.environments.micro.language import PROMPT_LENGTH, Vocabulary
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig, WarmStartConfig, get_world
from studies.environments.micro.warmstart import completion_loss, settings_hash, train, warm_start

STRONG = get_world("strong")
TINY = WarmStartConfig(steps=4, batch=8, model=MicroConfig(d=16, layers=1, heads=2, mlp=16))


def same(first: MicroGPT, second: MicroGPT) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def cached(tmp_path: Path) -> tuple[MicroGPT, Path]:
    model = warm_start(STRONG, TINY, 0, tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    return model, path


def test_the_loss_is_the_mean_over_completion_tokens_with_the_first_eos(vocabulary: Vocabulary) -> None:
    model = MicroGPT(TINY.model, torch.Generator().manual_seed(0)).double()
    documents = sample_documents(STRONG, 40, np.random.default_rng(0), vocabulary)
    terms = []
    for row in documents:
        end = row.tolist().index(vocabulary.eos)
        logp = model(row[None, :end])[0].log_softmax(-1)
        terms += [-logp[i - 1, row[i]] for i in range(PROMPT_LENGTH, end + 1)]
    torch.testing.assert_close(completion_loss(model, documents, vocabulary.eos), torch.stack(terms).mean(), rtol=0, atol=1e-12)


def test_training_learns_the_form_of_documents_in_fifty_small_steps(vocabulary: Vocabulary) -> None:
    model = train(STRONG, WarmStartConfig(steps=50, batch=16), 0, progress=False)
    loss = completion_loss(model, sample_documents(STRONG, 64, np.random.default_rng(1), vocabulary), vocabulary.eos)
    assert loss.item() < 1.0 < math.log(len(vocabulary))


def test_the_seed_decides_the_model() -> None:
    first, again, other = (train(STRONG, TINY, seed, progress=False) for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    config = WarmStartConfig(steps=100, warmup=10)
    rates = [config.rate(step) for step in range(100)]
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert 0 < rates[-1] < 1e-3


def test_a_cache_hit_is_the_same_bits_and_trains_nothing(cached: tuple[MicroGPT, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = cached
    monkeypatch.setattr(warmstart, "train", lambda *_: pytest.fail("trained although the model was cached"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = warm_start(STRONG, TINY, 0, path.parent, progress=False)
    assert same(model, again)
    assert not again.training
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_same_model_is_always_the_same_file(cached: tuple[MicroGPT, Path]) -> None:
    """safetensors draws the order of several entries of metadata anew for each file."""
    model, path = cached
    found = set()
    for _ in range(12):
        warmstart._save(model, path, settings_hash(STRONG, TINY, 0))
        found.add(path.read_bytes())
    assert len(found) == 1


def without_a_tensor(data: bytes) -> bytes:
    tensors = load(data)
    del tensors["embed.weight"]
    entries = json.dumps({"settings": settings_hash(STRONG, TINY, 0), "sha256": ""})
    return save(tensors, {warmstart.HEADER: entries})


DAMAGES = {
    "truncated": lambda data: data[:-100],
    "another bit": lambda data: data[:-50] + bytes([data[-50] ^ 1]) + data[-49:],
    "empty": lambda data: b"",
    "no metadata": lambda data: save(load(data)),
    "odd metadata": lambda data: save(load(data), {warmstart.HEADER: "17"}),
    "a tensor less": without_a_tensor,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_trained_again_and_replaced(cached: tuple[MicroGPT, Path], damage: str) -> None:
    model, path = cached
    whole = load(path.read_bytes())
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"not usable .* training it again"):
        again = warm_start(STRONG, TINY, 0, path.parent, progress=False)
    assert same(model, again)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(path.read_bytes()).items())


def test_a_file_of_other_settings_is_refused_even_under_the_right_name(cached: tuple[MicroGPT, Path], tmp_path: Path) -> None:
    _, path = cached
    other = warm_start(STRONG, TINY, 1, tmp_path / "other", progress=False)
    (wrong,) = (tmp_path / "other").iterdir()
    path.write_bytes(wrong.read_bytes())
    with pytest.warns(UserWarning, match="other settings"):
        again = warm_start(STRONG, TINY, 0, path.parent, progress=False)
    assert not same(other, again)


def test_every_setting_changes_the_hash() -> None:
    variants = [
        (STRONG, TINY, 0),
        (STRONG, TINY, 1),
        (STRONG, replace(TINY, steps=5), 0),
        (STRONG, replace(TINY, lr=1e-3), 0),
        (STRONG, replace(TINY, model=replace(TINY.model, layers=2)), 0),
        (replace(STRONG, trace=0.7), TINY, 0),
        (get_world("weak"), TINY, 0),
    ]
    assert len({settings_hash(*variant) for variant in variants}) == len(variants)


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="vocab=66"):
        warm_start(STRONG, replace(TINY, model=MicroConfig(vocab=10)), 0, None)


def test_a_folder_in_the_place_of_a_cached_model_is_told(tmp_path: Path) -> None:
    (tmp_path / f"warmstart-strong-0-{settings_hash(STRONG, TINY, 0)[:16]}.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"\.safetensors is a folder in the place of a cached base model: move it away"):
        warm_start(STRONG, TINY, 0, tmp_path, progress=False)
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        replace(TINY, steps=0)
