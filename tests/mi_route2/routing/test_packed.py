"""Rollouts that run as one row without padding are routed as in the padded layout."""

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, TRANSFORMERS, VOCAB, make_family, move, move_all
from hypothesis import given
from hypothesis import strategies as st
from mask_oracle import CASES, assert_same_gradients, case_id, erase_route, mask_route, run, spec_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BloomConfig, BloomForCausalLM, Gemma3ForCausalLM

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.adapters.gradients import Diagonal, Packed, Packing, Pairs, Written, added, compact
from mi_route2.adapters.tape import Tape
from mi_route2.rollouts import Policy, Rollouts, packed_forward
from mi_route2.routing import MaskRoute, MaskSpec, OpenRoute, OpenSpec, Route, TrainBatch

LENGTHS = (1, 2, 30, 3, 9, 1, 5)
"""Tokens of the completions: a long tail."""
LORA = AdapterSpec(kept="lora", rank=4, quarantine_rank=3)
SVD = AdapterSpec(kept="svd", quarantine_rank=3, fold=True)


def make_policy(spec: AdapterSpec = LORA, name: str = "Qwen3") -> Policy:
    model = make_family(name)
    return Policy(model, move(attach(model, "blocks.*", spec=spec, generator=torch.Generator().manual_seed(0))))


def make_batch(left: bool = False) -> TrainBatch:
    generator, n = torch.Generator().manual_seed(1), len(LENGTHS)
    drawn = [torch.randint(3, VOCAB, (2 + length,), generator=generator).tolist() for length in LENGTHS]
    rollouts = Rollouts.from_lists([row[:2] for row in drawn], [row[2:] for row in drawn], pad=0)
    if left:
        fields = (rollouts.tokens, rollouts.attention, rollouts.completion)
        turned = [[row.roll(32 - 2 - length) for row, length in zip(each, LENGTHS)] for each in fields]
        rollouts = Rollouts(*(torch.stack(rows) for rows in turned))
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    return TrainBatch(rollouts, advantages.abs(), advantages, torch.arange(n) // 3, torch.zeros(n, dtype=torch.bool))


def packed(policy: Policy) -> Policy:
    return replace(policy, forward=packed_forward(policy.model))


def assert_same_step(policy: Policy, route: Route, batch: TrainBatch, micro: int | None = None) -> None:
    whole, one_row = run(policy, route, batch), run(packed(policy), route, batch, micro)
    assert_same_gradients(one_row, whole)
    assert any(bool(g.any()) for g in whole.kept.values())
    for name in ("flags", "scores"):
        before, after = getattr(whole.decision, name), getattr(one_row.decision, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert torch.allclose(before.double(), after.double(), rtol=0, atol=1e-12)
    for name, gradient in whole.decision.unrouted.items():
        assert torch.allclose(one_row.decision.unrouted[name], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_packed_step_is_the_padded_one(case: tuple[str, str, str, str]) -> None:
    policy = make_policy()
    assert_same_step(policy, mask_route(policy, spec_of(case, tau=0.02)), make_batch())


def test_packed_adapters_of_every_kind_micro_batches_left_padding_and_penalties() -> None:
    for spec in (SVD, AdapterSpec(kept="svd", quarantine="shared"), AdapterSpec(kept="lora", rank=4, quarantine="shared")):
        policy = make_policy(spec)
        route = mask_route(policy, MaskSpec(score="grad"), l1=0.5, want_unrouted=True)
        assert_same_step(policy, route, make_batch())
    policy = make_policy(SVD)
    two = MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged", negative_scale=0.3)
    assert_same_step(policy, mask_route(policy, two, l1=0.5), make_batch(left=True), micro=3)
    assert_same_step(policy, OpenRoute(OpenSpec(), l1=0.5), make_batch(left=True), micro=2)
    assert_same_step(policy, erase_route(policy), make_batch())
    by_token = torch.rand(make_batch().rollouts.tokens.shape, generator=torch.Generator().manual_seed(2)) > 0.5
    for through in ("filter", "detach"):
        assert_same_step(policy, MaskRoute.from_flags(by_token, through=through), make_batch())


def test_packed_checkpointing_is_the_same() -> None:
    policy, batch = make_policy(), make_batch()
    route = mask_route(policy, MaskSpec(score="full", unit="rollout", through="detach", tau=0.02))
    plain = run(policy, route, batch)
    for block in policy.model.model.layers:  # pyright: ignore
        block.forward = lambda *a, f=block.forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    one_row = run(packed(policy), route, batch)
    assert_same_gradients(one_row, plain)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_logits_of_a_packed_row_are_those_of_each_rollout_alone(name: str) -> None:
    model, rollouts = make_family(name, attn="exact"), make_batch().rollouts
    found = packed_forward(model)(model, rollouts.tokens, rollouts.attention)
    for row, tokens, real in zip(found, rollouts.tokens, rollouts.attention):
        assert torch.allclose(row[real], model(tokens[real][None]).logits[0], rtol=0, atol=1e-10)
        assert not row[~real].any()


class Leaky(nn.Module):
    """Takes positions, and lets the rollouts of a row see each other."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, position_ids: Tensor, use_cache: bool) -> object:
        return self.inner(tokens, attention_mask=torch.ones_like(tokens), position_ids=position_ids, use_cache=use_cache)


def test_a_model_whose_rollouts_would_see_each_other_is_refused() -> None:
    for model in (Leaky(make_family("Llama")), make_family("MicroGPT")):
        with pytest.raises(ValueError, match="does not keep the rollouts of one row apart"):
            packed_forward(model)


class Ahead(nn.Module):
    """Keeps the rollouts of a row apart, and lets each token see the one behind it in its own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, position_ids: Tensor, use_cache: bool) -> object:
        out = self.inner(tokens, position_ids=position_ids, use_cache=use_cache)
        ahead = torch.where(position_ids[:, 1:] > 0, tokens[:, 1:], 0)
        out.logits[:, :-1] += 0.1 * nn.functional.one_hot(ahead, VOCAB)
        return out


def test_a_model_that_reads_ahead_is_refused_in_a_row_too() -> None:
    config = copy.deepcopy(FAMILIES["Gemma3"])
    config.use_bidirectional_attention = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="has use_bidirectional_attention=True, but it must be causal"):
        packed_forward(Gemma3ForCausalLM(config).eval())  # pyright: ignore[reportArgumentType]
    with torch.no_grad(), pytest.raises(ValueError, match="or is not causal"):
        packed_forward(Ahead(make_family("Llama")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_hides_no_rollouts_that_see_each_other(dtype: torch.dtype) -> None:
    """Bloom has no positions, and its biases by distance leave little to tell by."""
    torch.manual_seed(0)
    model = move_all(BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)), 0.1)
    with pytest.raises(ValueError, match="does not keep the rollouts of one row apart"):
        packed_forward(model.to(dtype).eval())
    packed_forward(make_family("Qwen3", dtype))


def test_a_row_of_another_length_is_refused() -> None:
    real = torch.tensor([[True, True, False], [True, False, False]])
    with pytest.raises(ValueError, match=r"2 rollouts of 3 tokens \(or 3 real tokens in one row\)"):
        Tape(2, 3, real=real).packing(torch.zeros(1, 4, 5))
    for first, second in ((torch.zeros(3, 5), torch.zeros(2, 3, 5)), (torch.zeros(6, 5), torch.zeros(1, 3, 5))):
        tape = Tape(2, 3, real=real)
        assert (tape.packing(first) is None) == (len(first) == 6)
        with pytest.raises(ValueError, match="leave it out of the patterns of attach"):
            tape.packing(second)
    flat = torch.arange(30.0).view(6, 5)
    for shapes in (((6, 5), (1, 6, 5)), ((1, 6, 5), (6, 5))):  # without padding, a Linear that flattens the row is no other layout
        tape = Tape(2, 3, real=torch.ones(2, 3, dtype=torch.bool))
        assert all(torch.equal(tape.rows(flat.view(shape)), flat.view(2, 3, 5)) for shape in shapes)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 2**31))
def test_packed_gradients_are_those_of_the_padded_layout(lengths: list[int], extra: int, seed: int) -> None:
    generator, s = torch.Generator().manual_seed(seed), max(lengths) + extra
    real = torch.arange(s) < torch.tensor(lengths)[:, None]
    packing = Packing(real)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    h, dy, v, by_rollout, by_token = draw(sum(lengths), 5), draw(sum(lengths), 3), draw(3, 5), draw(len(lengths)), draw(*real.shape)
    for kind, out, direction in ((Pairs, dy, v), (Diagonal, h.flip(1), v[0])):
        own, padded = Packed(h, out, packing, kind), kind(packing.padded(h), packing.padded(out))
        for one, other in ((own, padded), (compact(own, scored=True), padded), (added(own, own), added(padded, padded))):
            for name in ("values", "norms", "magnitude"):
                assert torch.allclose(getattr(one, name)(), getattr(other, name)(), rtol=0, atol=1e-10)
            assert torch.allclose(one.inner(direction), other.inner(direction), rtol=0, atol=1e-10)
            assert torch.allclose(one.weighted(by_rollout), other.weighted(by_rollout), rtol=0, atol=1e-10)
            if not isinstance(one, Written) and not isinstance(other, Written):
                assert torch.allclose(one.weighted(by_token), other.weighted(by_token), rtol=0, atol=1e-10)
