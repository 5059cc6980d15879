"""MicroGPT: padding and caching change nothing, and the sites that adapters need are where they should be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from studies.environments.micro.model import KVCache, MicroGPT
from studies.environments.micro.settings import MicroConfig

VOCAB, CONTEXT = 11, 16


def make_model(seed: int = 0) -> MicroGPT:
    """A small float64 model with weights large enough that every term of the forward matters."""
    model = MicroGPT(MicroConfig(VOCAB, d=16, layers=2, heads=4, mlp=32, context=CONTEXT), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 1)))
    return model.double().eval()


MODEL = make_model()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [0, 4, 9])
def test_no_token_sees_a_later_one(position: int) -> None:
    before = tokens(2, 10)
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % VOCAB
    changed = (MODEL(before) - MODEL(after)).abs().amax(-1) > 1e-9
    assert not changed[:, :position].any()
    assert changed[:, position:].all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 6), min_size=1, max_size=5).filter(lambda parts: sum(parts) <= CONTEXT))
def test_decoding_in_any_pieces_with_a_cache_equals_one_forward(seed: int, parts: list[int]) -> None:
    ids, cache = tokens(3, sum(parts), seed=seed), KVCache()
    pieces = [MODEL(piece, cache=cache) for piece in ids.split(parts, dim=1)]
    close(torch.cat(pieces, dim=1), MODEL(ids))
    assert cache.length == sum(parts)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 5), st.booleans())
def test_padding_on_either_side_changes_no_real_token(seed: int, lengths: list[int], extra: int, left: bool) -> None:
    width = max(lengths) + extra
    rows = [tokens(1, length, seed=seed + i) for i, length in enumerate(lengths)]
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - row.shape[1], width) if left else slice(0, row.shape[1])
        ids[i, place], mask[i, place] = row[0], True
    logits = MODEL(ids, mask)
    assert torch.isfinite(logits).all()
    for i, row in enumerate(rows):
        close(logits[i, mask[i]], MODEL(row)[0])
    close(MODEL(ids, mask.long()), logits)


def test_gradients_are_finite_and_unchanged_under_left_padding() -> None:
    row = tokens(1, 5)
    padded, mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), row), 1), torch.tensor([[0] * 4 + [1] * 5])
    gradients = []
    for logits in (MODEL(row), MODEL(padded, mask)[:, 4:]):
        MODEL.zero_grad()
        logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in MODEL.parameters() if parameter.grad is not None])
    for plain, other in zip(*gradients, strict=True):
        close(other, plain)


def test_a_cache_and_left_padding_work_together() -> None:
    rows = [tokens(1, 3, seed=1), tokens(1, 5, seed=2)]
    new = tokens(2, 2, seed=3)
    ids = torch.stack((torch.cat((torch.zeros(2, dtype=torch.long), rows[0][0])), rows[1][0]))
    mask, cache = torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), KVCache()
    MODEL(ids, mask, cache)
    logits = MODEL(new, torch.cat((mask, torch.ones(2, 2, dtype=torch.long)), 1), cache)
    for i, row in enumerate(rows):
        close(logits[i], MODEL(torch.cat((row, new[i : i + 1]), 1))[0, -2:])


def test_rows_dropped_from_a_cache_leave_the_others_as_they_were() -> None:
    ids, cache, keep = tokens(4, 6), KVCache(), torch.tensor([True, False, True, False])
    MODEL(ids[:, :5], cache=cache)
    cache.keep(keep)
    close(MODEL(ids[keep, 5:], cache=cache), MODEL(ids[keep])[:, 5:])
