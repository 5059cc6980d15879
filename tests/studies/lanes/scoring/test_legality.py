"""The audit passes what is legal and finds each way of cheating: it is the instrument, so these are its controls."""

from collections.abc import Callable

import pytest
import torch
from hinted import changed_scores, mixed_scores
from legality import Leak, audit
from tiny_reader import tiny_reader, tiny_stream
from torch import nn

from studies.lanes.scoring.bpb import score, score_windows, window_starts
from studies.lanes.scoring.ttt import TTTSettings, adapt, borrowed, plan_chunks, train_chunk

pytestmark = pytest.mark.study

TINY = TTTSettings(rate=0.1, epochs=1, window=16, stride=8, chunk=16, batch=4, train_batch=1)
TOKENS = tiny_stream(45)
AFTER = (0, 7, 15, 16, 17, 31, 32, 43)  # ends of windows and chunks, and what lies beside them


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def slide(tokens: torch.Tensor) -> torch.Tensor:
    return score(tiny_reader(), tokens, window=16, stride=8)


def scored_first(tokens: torch.Tensor) -> torch.Tensor:
    return adapt(tiny_reader(), tokens, TINY).nll


LETTERS = 11
FEW = torch.arange(45) * 7 % 10


def bigram() -> nn.Embedding:
    """Logits of the next of eleven letters from the last one: small enough to add up every distribution of a stream."""
    table = nn.Embedding(LETTERS, LETTERS, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.randn(LETTERS, LETTERS, generator=generator(), dtype=torch.float64))
    return table


def scored_first_few(tokens: torch.Tensor) -> torch.Tensor:
    return adapt(bigram(), tokens, TINY).nll


def trained_first(tokens: torch.Tensor) -> torch.Tensor:
    """Illegal: each chunk is scored after it was trained on."""
    model, nll = tiny_reader(), torch.zeros(len(tokens), dtype=torch.float64)
    with borrowed(model, "all") as chosen:
        optimiser = torch.optim.SGD(chosen, 0.1, 0.9)
        for plan in plan_chunks(len(tokens) - 1, TINY):
            if plan.sequences:
                train_chunk(model, tokens, plan, optimiser, TINY)
            score_windows(model, tokens, plan.windows, nll)
    return nll


def peeking(tokens: torch.Tensor) -> torch.Tensor:
    """Illegal: the score of a token depends on the one behind it."""
    nll = slide(tokens)
    nll[1:-1] += 1e-9 * tokens[2:]
    return nll


def repeating(early: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mix in what followed the last time that this token was read. `early` (illegal): a pair is known before it was predicted."""

    def scorer(tokens: torch.Tensor) -> torch.Tensor:
        follows: dict[int, int] = {}

        def mix(log_probs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            p = log_probs.exp()
            for row, at in zip(p, positions.tolist(), strict=True):
                if early:
                    follows[int(tokens[at])] = int(tokens[at + 1])
                if (hint := follows.get(int(tokens[at]))) is not None:
                    row *= 0.9
                    row[hint] += 0.1
                follows[int(tokens[at])] = int(tokens[at + 1])
            return p.log()

        return changed_scores(lambda watch: score(bigram(), tokens, window=16, stride=8, watch=watch), tokens, mix)

    return scorer


@pytest.mark.parametrize("scorer", [slide, scored_first])
def test_what_is_legal_passes(scorer: Callable) -> None:
    assert audit(scorer, TOKENS, after=AFTER, generator=generator()).legal


def test_tap_in_on_top_of_training_is_legal() -> None:
    """The study's own hints, mixed into a model that learns as it reads."""
    pytest.importorskip("numba")
    from studies.lanes.scoring.tapin import Mixing, find_hints

    few = torch.where(torch.arange(45) % 13 == 0, 5, FEW)

    def tapped(tokens: torch.Tensor) -> torch.Tensor:
        hints = find_hints(tokens, TINY.window, window_starts(len(tokens), TINY.window, TINY.stride))
        run = lambda watch: adapt(bigram(), tokens, TINY, watch=watch)  # noqa: E731
        return mixed_scores(run, tokens, hints, Mixing())

    assert (tapped(few) != scored_first_few(few)).sum() > 5
    found = audit(tapped, few, after=(16, 23, 40), targets=(25, 32), generator=generator(), vocabulary=LETTERS)
    assert found.legal
    assert found.masses == pytest.approx(dict.fromkeys(found.masses, 1.0), abs=1e-12)


def test_training_before_scoring_is_found() -> None:
    """The first position of the first chunk is the first that knows what it should not; the last chunk is not trained."""
    found = audit(trained_first, TOKENS, after=AFTER, generator=generator())
    assert not found.legal
    # Behind 16, the end of chunk 0, chunk 1 was trained too late for positions up to 16, and too early for its own.
    assert [leak.after for leak in found.leaks] == [7, 15, 17, 31]
    assert [leak.position for leak in found.leaks] == [1, 1, 17, 17]


def test_a_look_at_the_next_token_is_found_at_the_position_that_took_it() -> None:
    found = audit(peeking, TOKENS, after=(7, 20), generator=generator())
    assert found.leaks == (Leak(7, 7), Leak(20, 20))


def test_a_pair_that_is_indexed_before_it_is_predicted_is_found_by_its_mass() -> None:
    """No change of the future tells: the score of a token may depend on that token. Its probabilities add up to far more than 1."""
    found = audit(repeating(early=True), FEW, after=AFTER, targets=(20,), generator=generator(), vocabulary=LETTERS)
    assert found.leaks == ()
    assert found.overfull == (20,)
    assert not found.legal
    assert found.masses[20] == pytest.approx(0.9 + LETTERS * 0.1, abs=1e-12)
