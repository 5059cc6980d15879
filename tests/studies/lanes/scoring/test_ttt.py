"""Score-first test-time training: what is scored was never trained on, rate 0 is no training, and the model comes back."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_reader import tiny_reader, tiny_stream
from torch import nn

from studies.lanes.scoring.bpb import bpb, score
from studies.lanes.scoring.ttt import TTTSettings, adapt, best, sweep, trained

pytestmark = pytest.mark.study

TINY = TTTSettings(rate=0.1, epochs=2, window=16, stride=8, chunk=32, batch=3, train_batch=1)


class Watched(nn.Module):
    """Notes for each forward whether gradients were on and what was read; token values are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seen = nn.Embedding(257, 257, dtype=torch.float64), []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.is_grad_enabled(), tokens.clone()))
        return self.embed(tokens)


def test_a_target_is_trained_only_after_a_forward_without_gradients_read_up_to_it() -> None:
    """Seen from the model: tokens are their own positions, so each forward says where in the stream it was."""
    model = Watched()
    adapt(model, torch.arange(200), TINY)
    trained_targets = [int(tokens.max()) + 1 for gradients, tokens in model.seen if gradients]
    assert sorted(set(trained_targets)) == [*range(16, 193, 16)]
    assert len(trained_targets) == 2 * 12
    scored = trained_to = 0
    for gradients, tokens in model.seen:
        if gradients:
            trained_to = max(trained_to, int(tokens.max()) + 1)
            assert trained_to <= scored
        else:
            assert scored >= trained_to  # nothing that is still to be scored was trained on
            scored = max(scored, int(tokens.max()) + 1)
    assert scored == 199


@pytest.mark.parametrize("changes", [{"rate": 0.0}, {"scope": "none"}, {"rate": 0.0, "scope": "controls"}])
def test_rate_0_and_scope_none_are_the_plain_evaluation_bit_for_bit(changes: dict) -> None:
    tokens, settings = tiny_stream(110), replace(TINY, **changes)
    run = adapt(tiny_reader(), tokens, replace(settings, batch=1))
    plain = score(tiny_reader(), tokens, window=16, stride=8, batch=1)
    assert torch.equal(run.nll, plain)
    assert run.bpb == bpb(plain, tokens)
    torch.testing.assert_close(adapt(tiny_reader(), tokens, settings).nll, plain, rtol=0, atol=1e-12)


def by_hand(model: nn.Module, tokens: torch.Tensor, settings: TTTSettings, names: set[str]) -> torch.Tensor:
    """The protocol of the module's text, with momentum, clipping and the cosine written out; one sequence a step."""
    moving = {name: own for name, own in model.named_parameters() if name in names}
    buffers = {name: torch.zeros_like(own) for name, own in moving.items()}
    n = len(tokens) - 1
    chunks, nll = math.ceil(n / settings.chunk), torch.zeros(len(tokens), dtype=torch.float64)
    for c in range(chunks):
        first, end = c * settings.chunk, min((c + 1) * settings.chunk, n)
        for p in range(first, end):
            behind = 0 if p < settings.window else (p - settings.window) // settings.stride + 1
            start = min(behind * settings.stride, max(n - settings.window, 0))
            nll[p + 1] = -model(tokens[None, start : p + 1])[0, -1].detach().log_softmax(0)[tokens[p + 1]]
        if c == chunks - 1:
            break
        rate = settings.rate * 0.5 * (1 + math.cos(math.pi * c / (chunks - 1)))
        for start in [*range(first, end, settings.window)] * settings.epochs:
            targets = tokens[start + 1 : start + settings.window + 1]
            log_probs = model(tokens[None, start : start + settings.window])[0].log_softmax(-1)
            costs = -log_probs[range(len(targets)), targets][targets != 256]
            gradients = torch.autograd.grad(costs.mean(), list(moving.values()))
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            with torch.no_grad():
                for (name, own), g in zip(moving.items(), gradients, strict=True):
                    buffers[name] = settings.momentum * buffers[name] + g * min(1.0, settings.clip / (norm + 1e-6))
                    own -= rate * buffers[name]
    return nll


@pytest.mark.parametrize(("scope", "clip"), [("all", 0.5), ("all", 100.0), ("controls", 0.05)])
def test_a_run_is_the_written_out_one(scope: str, clip: float) -> None:
    """Clipped at every step, at none, and at controls alone."""
    tokens, settings = tiny_stream(105), replace(TINY, scope=scope, clip=clip)
    found = adapt(tiny_reader(), tokens, settings)
    names = set(trained(tiny_reader(), scope))
    torch.testing.assert_close(found.nll, by_hand(tiny_reader(), tokens, settings, names), rtol=0, atol=1e-10)
    plain = score(tiny_reader(), tokens, window=16, stride=8)
    torch.testing.assert_close(found.nll[:33], plain[:33], rtol=0, atol=1e-12)
    assert (found.nll[33:] - plain[33:]).abs().min() > 0


@pytest.mark.parametrize("scope", ["all", "controls", "none"])
def test_nothing_outside_the_scope_moves(scope: str) -> None:
    model, moved = tiny_reader(), set()
    before = {name: own.detach().clone() for name, own in model.named_parameters()}

    def look(_log_probs: torch.Tensor, _positions: torch.Tensor) -> None:
        moved.update(name for name, own in model.named_parameters() if not torch.equal(own, before[name]))

    adapt(model, tiny_stream(100), replace(TINY, scope=scope), watch=look)
    # Lane 0 is not read out, so what the last block alone would write into it has no gradient.
    assert moved == set(trained(model, scope))


class StopError(Exception):
    pass


@pytest.mark.parametrize("scope", ["all", "controls"])
@pytest.mark.parametrize("stops", [False, True])
def test_the_model_comes_back_bit_for_bit(scope: str, stops: bool) -> None:
    model = tiny_reader()
    model.post.requires_grad_(False)
    model.train()
    model.blocks[0].eval()
    for own in model.parameters():
        own.grad = torch.ones_like(own)
    before = [(own, own.detach().clone(), own.requires_grad, own.grad) for own in model.parameters()]
    modes = [module.training for module in model.modules()]

    def stop_late(_log_probs: torch.Tensor, positions: torch.Tensor) -> None:
        if stops and int(positions[0]) > 64:
            raise StopError

    if stops:
        with pytest.raises(StopError):
            adapt(model, tiny_stream(150), replace(TINY, scope=scope), watch=stop_late)
    else:
        adapt(model, tiny_stream(150), replace(TINY, scope=scope), watch=stop_late)
    for (own, value, required, gradient), now in zip(before, model.parameters(), strict=True):
        assert now is own
        assert torch.equal(own, value)
        assert own.requires_grad == required
        assert own.grad is gradient
        assert (gradient == 1).all()
    assert [module.training for module in model.modules()] == modes


def test_a_run_that_diverges_costs_infinitely_much_and_is_no_error() -> None:
    model, tokens = tiny_reader(), tiny_stream(150)
    before = [own.detach().clone() for own in model.parameters()]
    run = adapt(model, tokens, replace(TINY, rate=1e308))
    assert run.diverged
    assert run.bpb == math.inf
    assert torch.equal(run.nll[:33], adapt(model, tokens, TINY).nll[:33])
    assert run.nll[-1] == math.inf
    assert all(torch.equal(own, value) for own, value in zip(model.parameters(), before, strict=True))


def test_a_sweep_finds_each_scopes_best_rate() -> None:
    model, tokens = tiny_reader(), tiny_stream(110)
    found = sweep(model, tokens, TINY, {"all": (0.001, 0.05, 1e308), "controls": (0.01, 0.1)})
    assert [(row.scope, row.rate) for row in found] == [
        ("all", 0.001),
        ("all", 0.05),
        ("all", 1e308),
        ("controls", 0.01),
        ("controls", 0.1),
    ]
    plain = adapt(model, tokens, replace(TINY, scope="none")).bpb
    for row in found:
        assert row.bpb == adapt(model, tokens, replace(TINY, scope=row.scope, rate=row.rate)).bpb
        assert row.gain == plain - row.bpb
    assert found[2].bpb == math.inf
    assert best(found, "all").rate == 0.05
    assert best(found, "all").gain > 0
