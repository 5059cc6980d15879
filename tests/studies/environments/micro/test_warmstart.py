"""Warm start: the loss that is meant, the same bits again, and a cache that never gives a wrong model."""

import json
import warnings
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
