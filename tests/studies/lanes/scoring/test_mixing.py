"""Mixing: the weight is the formula's, p' is a distribution, and the targets' entries are those of the whole."""

import pytest
import torch
from hinted import mix
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from studies.lanes.scoring.tapin import Hints, Mixing

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
