"""Sliding bits per byte: each prediction once, from the tokens before it, and BOS for nothing."""

import itertools
import math

import pytest
import torch
from hinted import changed_scores
from hypothesis import given
from hypothesis import strategies as st
from tiny_reader import tiny_reader, tiny_stream

from studies.lanes.config import BOS
from studies.lanes.scoring.bpb import PRIOR, bpb, byte_targets, plan_windows, score, table_bpb, window_starts

pytestmark = pytest.mark.study

SIZES = st.integers(1, 40).flatmap(lambda window: st.tuples(st.just(window), st.integers(1, window)))


@given(st.integers(0, 200), SIZES)
def test_windows_score_each_prediction_once_and_have_one_length(n: int, sizes: tuple[int, int]) -> None:
    window, stride = sizes
    plan = plan_windows(n, window, stride)
    assert [p for one in plan for p in range(one.score_from, one.end)] == list(range(n))
    assert {one.end - one.start for one in plan} <= {min(window, n)}
    for one in plan[1:]:
        assert 0 < one.start <= one.score_from
        assert one.score_from - one.start >= window - stride  # what a prediction reads before its own window's new text
        assert one.end - one.score_from <= stride
    assert all(one.end - one.score_from == stride for one in plan[1:-1])


@given(st.integers(2, 200), SIZES)
def test_every_position_has_the_start_of_the_window_that_scores_it(n: int, sizes: tuple[int, int]) -> None:
    starts = window_starts(n, *sizes).tolist()
    for one in plan_windows(n - 1, *sizes):
        assert set(starts[one.score_from : one.end]) == {one.start}
    assert len(starts) == n
    assert starts[-1] == starts[-2] + 1


def one_by_one(model: torch.nn.Module, tokens: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """Every token from a forward of its own, over the context that the module's text promises."""
    nll = torch.zeros(len(tokens), dtype=torch.float64)
    n = len(tokens) - 1
    for p in range(n):
        behind = 0 if p < window else (p - window) // stride + 1
        start = min(behind * stride, max(n - window, 0))
        with torch.no_grad():
            logits = model(tokens[None, start : p + 1])[0, -1]
        nll[p + 1] = logits.logsumexp(0) - logits[tokens[p + 1]]
    return nll


@pytest.mark.parametrize("length", [1, 2, 9, 17, 18, 60, 61])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_sliding_is_one_forward_a_token(length: int, batch: int) -> None:
    model, tokens = tiny_reader(), tiny_stream(length)
    expected = one_by_one(model, tokens, 16, 5)
    found = score(model, tokens, window=16, stride=5, batch=batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.dtype == torch.float64
    assert length == 1 or found[1:].min() > 0


def test_only_predicted_bytes_count() -> None:
    tokens = torch.tensor([BOS, 97, BOS, 98, 99])
    nll = torch.tensor([7.0, 1.0, 100.0, 2.0, 3.0]).double() * math.log(2)
    assert byte_targets(tokens).tolist() == [False, True, False, True, True]
    assert bpb(nll, tokens) == pytest.approx(2, abs=1e-12)
    assert bpb(nll[1:], tokens[1:]) == pytest.approx(2.5, abs=1e-12)  # nothing predicts the first of an excerpt


def test_a_watch_sees_each_position_once_in_order_with_its_own_distribution() -> None:
    model, tokens = tiny_reader(), tiny_stream(61)
    seen: list[torch.Tensor] = []

    def half_uniform(log_probs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append(positions)
        assert log_probs.exp().sum(-1).sub(1).abs().max() < 1e-12
        return (0.5 * log_probs.exp() + 0.5 / 257).log()

    plain = score(model, tokens, window=16, stride=5, batch=4)
    mixed = changed_scores(lambda watch: score(model, tokens, window=16, stride=5, batch=4, watch=watch), tokens, half_uniform)
    assert torch.cat(seen).tolist() == list(range(60))
    expected = -(0.5 * (-plain[1:]).exp() + 0.5 / 257).log()
    torch.testing.assert_close(mixed[1:], expected, rtol=0, atol=1e-12)


def test_counted_tables_are_the_counts_written_out() -> None:
    train, text = [BOS, 1, 2, 1, 2, 3, BOS, 2, 1, 1], [BOS, 1, 2, 9, BOS, 2, 1]
    pairs = [(a, b) for a, b in itertools.pairwise(train) if b != BOS]
    single = lambda b: (sum(own == b for _, own in pairs) + 1) / (len(pairs) + 256)  # noqa: E731
    expected = {"unigram": 0.0, "bigram": 0.0}
    scored = [(a, b) for a, b in itertools.pairwise(text) if b != BOS]
    for a, b in scored:
        n = sum(own == a for own, _ in pairs)
        given = (pairs.count((a, b)) + PRIOR * single(b)) / (n + PRIOR)
        expected["unigram"] -= math.log2(single(b)) / len(scored)
        expected["bigram"] -= math.log2(given) / len(scored)
    assert table_bpb(torch.tensor(train), torch.tensor(text)) == pytest.approx(expected)
