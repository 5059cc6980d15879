"""Mixing: the weight is the formula's, p' is a distribution, and the targets' entries are those of the whole."""

import math

import pytest
import torch
from hinted import mix
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from studies.lanes.scoring.tapin import Hints, Mixing, mixed_nll

pytestmark = pytest.mark.study

V = 11


def hints_of(*rows: tuple[int, int, int, bool]) -> Hints:
    token, length, votes, cross = zip(*rows)
    return Hints(torch.tensor(token), torch.tensor(length), torch.tensor(votes), torch.tensor(cross))


hint = st.one_of(
    st.just((-1, 0, 0, False)), st.tuples(st.integers(0, V - 1), st.integers(3, 100), st.integers(1, 5000), st.booleans())
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Hints, Mixing]:
    """Logits of any spread, hints, and weights up to one."""
    rows = draw(st.lists(hint, min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(len(rows), V, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 1.0, 30.0, 300.0]))
    return logits, hints_of(*rows), Mixing(most=draw(st.sampled_from([0.0, 0.5, 0.99])))


def test_the_weight_is_the_formulas() -> None:
    for length, votes, cross in ((3, 1, False), (3, 1, True), (10, 4, False), (7, 2, True), (100, 1, False), (100, 9, True)):
        base = 0.12 if cross else 0.02
        expected = min(0.5, base * (1 + 0.15 * (length - 3)) * (1 + 0.2 * math.log(votes)))
        assert Mixing().weights(hints_of((0, length, votes, cross))).item() == pytest.approx(expected, rel=1e-14)
    plain = Mixing().weights(hints_of((5, 3, 1, False), (5, 3, 1, True), (5, 100, 1, True), (-1, 0, 0, False)))
    torch.testing.assert_close(plain, torch.tensor([0.02, 0.12, 0.5, 0.0], dtype=torch.float64), rtol=1e-14, atol=0)


@given(cases())
def test_it_moves_probability_as_the_equation_says(case: tuple[Tensor, Hints, Mixing]) -> None:
    """p' = (1 - w) p, p'(c) += w, in plain probabilities."""
    logits, hints, mixing = case
    mixed = mix(logits, hints, mixing).exp()
    assert (mixed.sum(-1) - 1).abs().max() < 1e-12
    for row, p, found, w in zip(range(len(hints)), logits.softmax(-1), mixed, mixing.weights(hints).tolist()):
        c = int(hints.token[row])
        if c < 0:
            torch.testing.assert_close(found, p, rtol=1e-11, atol=1e-300)
        else:
            expected = (1 - w) * p
            expected[c] += w
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-300)


@given(cases(), st.data())
def test_the_targets_entries_are_those_of_the_whole(case: tuple[Tensor, Hints, Mixing], data: st.DataObject) -> None:
    logits, hints, mixing = case
    n = len(hints)
    targets = torch.tensor(data.draw(st.lists(st.integers(0, V - 1), min_size=n, max_size=n)))
    targets = torch.where(torch.arange(n) % 2 == 0, hints.token.clamp(min=0), targets)
    whole = -mix(logits, hints, mixing).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(mixed_nll(logits, targets, hints, mixing), whole, rtol=1e-12, atol=1e-13)


def test_a_wrong_hint_costs_the_logarithm_of_what_it_takes_and_a_right_one_saves_the_model_that_knew_nothing() -> None:
    logits = torch.full((1, V), -1000.0, dtype=torch.float64)
    logits[0, 0] = 0.0
    hint = hints_of((3, 3, 1, True))
    wrong, right = (mixed_nll(logits, torch.tensor([target]), hint, Mixing()).item() for target in (0, 3))
    assert wrong == pytest.approx(-math.log(0.88), rel=1e-12)
    assert right == pytest.approx(-math.log(0.12), rel=1e-12)


def test_what_cannot_be_is_a_sentence() -> None:
    for wrong in ({"most": 1.0}, {"within": -0.1}, {"most": float("nan")}, {"cross": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Mixing(**wrong)
    with pytest.raises(ValueError, match="2 hints for 3 positions"):
        mixed_nll(torch.zeros(3, V), torch.zeros(3, dtype=torch.int64), hints_of((1, 3, 1, False), (1, 3, 1, False)), Mixing())
