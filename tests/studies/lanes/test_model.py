"""The model against the study's equations written out, its schedule against lists, its hook points against what fires."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_reader import byte_rows as draw
from tiny_reader import moved_model
from torch import Tensor
from torch.nn import functional

from studies.lanes.config import BOS, STARTS, WIRINGS, LanesConfig, Loop, order_of, plan
from studies.lanes.model import BIASED_HEAD, LanesModel

TINY = LanesConfig(layers=6, d_model=8, heads=2, mlp=2, lane_start=4, zero_init=False)
LOOPED = replace(TINY, loop=Loop(1, 2, 1), loop_embeddings=True, head_bias=True)
TWO = [name for name, wiring in WIRINGS.items() if wiring.lanes == 2]


# ---- the table of wirings


# ---- the schedule


def test_the_looped_schedule_is_the_one_of_the_record() -> None:
    order = order_of(11, Loop(3, 5, 2))
    assert order == (0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10)
    steps = plan(11, 8, Loop(3, 5, 2))
    assert len(steps) == 17
    assert [step.source for step in steps] == [None] * 8 + [7, 6, 5, 4, 3, 2, 1, 0, None]
    assert [step.skip for step in steps] == [None] * 8 + [0, 1, 2, 3, 4, 5, 6, 7, None]
    assert [step.entry for step in steps] == [None] * 3 + [0, None, None, 1, None, None, 2] + [None] * 7
    assert [step.loop_pass for step in steps] == [None] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [None] * 5
    assert [step.parallel for step in steps] == [False] * 14 + [True] * 3


# ---- the forward, written out


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class WrittenOut:
    """The equations with the weights of a model: complex numbers turn positions, softmax by the book, skips on a stack."""

    def __init__(self, model: LanesModel, order: list[int]):
        self.p, self.c, self.order = dict(model.named_parameters()), model.config, order

    def attention(self, i: int, x: Tensor, entry: int | None) -> Tensor:
        heads, length = self.c.heads, x.shape[1]
        q, k, v = (
            (x @ self.p[f"blocks.{i}.attn.{name}.weight"].T).reshape(len(x), length, heads, -1).transpose(1, 2) for name in "qkv"
        )
        if entry is not None and self.c.head_bias:
            k = k.clone()
            k[:, BIASED_HEAD % heads] += self.p["head_bias"][entry]
        half = q.shape[-1] // 2
        angles = torch.arange(length).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (rms(q), rms(k)))
        gain = self.p[f"blocks.{i}.attn.q_gain"][:, None, None]
        scores = gain * torch.einsum("bhsd,bhtd->bhst", q, k.conj()).real / math.sqrt(2 * half)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.p[f"blocks.{i}.attn_scale"] * (mixed @ self.p[f"blocks.{i}.attn.o.weight"].T)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        hidden = (x @ self.p[f"blocks.{i}.mlp.up.weight"].T).clamp(min=0) ** 2
        return self.p[f"blocks.{i}.mlp_scale"] * (hidden @ self.p[f"blocks.{i}.mlp.down.weight"].T)

    def read(self, i: int, x: Tensor) -> Tensor:
        mix = self.p[f"blocks.{i}.mix"]
        return rms(mix[0] * x + mix[1] * self.x0) / math.sqrt(i + 1)

    def lanes(self, i: int, l0: Tensor, l1: Tensor, entry: int | None) -> tuple[Tensor, Tensor]:
        name, post = self.c.wiring, self.p["post"][i]
        ar, mr = self.p["resid"][i]
        if name in ("shipped", "simultaneous"):
            a, m = self.attention(i, self.read(i, l0), entry), self.mlp(i, self.read(i, l1))
        else:
            mean = (self.read(i, l0) + self.read(i, l1)) / 2 if name == "z2" else self.read(i, (l0 + l1) / 2)
            a, m = self.attention(i, mean, entry), self.mlp(i, mean)
        if name == "simultaneous":
            return ar * l0 + post[0, 0] * a + post[1, 0] * m, mr * l1 + post[0, 1] * a + post[1, 1] * m
        l0, l1 = ar * l0 + post[0, 0] * a, ar * l1 + post[0, 1] * a
        return mr * l0 + post[1, 0] * m, mr * l1 + post[1, 1] * m

    def single(self, i: int, x: Tensor, entry: int | None, behind_fork: bool) -> Tensor:
        a = self.attention(i, self.read(i, x), entry)
        if self.c.wiring == "gptj" and behind_fork:
            return x + a + self.mlp(i, self.read(i, x))
        x = x + a
        return x + self.mlp(i, self.read(i, x))

    def logits(self, tokens: Tensor) -> Tensor:
        self.x0 = x = rms(self.p["embed.weight"][tokens])
        stack, skips, passes, half = [], 0, 0, len(self.order) // 2
        pair = None
        for k, i in enumerate(self.order):
            behind = i >= self.c.lane_start and self.c.wiring != "sequential"
            if behind and pair is None and self.c.wiring in TWO:
                pair = (x, x)
            if k >= half and stack and (self.c.skips_in_fork or not behind):
                skip, gate = self.p["skip_weight"][skips] * stack.pop(), self.p["skip_gate"][skips].sigmoid()
                skips += 1
                if pair is None:
                    x = gate * x + (1 - gate) * skip
                elif self.c.wiring in ("shipped", "simultaneous"):
                    pair = (gate * pair[0] + (1 - gate) * skip, pair[1])
                else:
                    pair = (gate * pair[0] + (1 - gate) * skip, gate * pair[1] + (1 - gate) * skip)
            entry = None
            if self.c.loop is not None and i == self.c.loop.start:
                entry, passes = passes, passes + 1
                x = x + self.p["loop_embed"][entry]
            if pair is None:
                x = self.single(i, x, entry, behind)
            else:
                pair = self.lanes(i, *pair, entry)
            if k < half:
                stack.append(x)
        out = rms(x) if pair is None else self.out(*pair)
        return 30 * torch.tanh(out @ self.p["embed.weight"].T / 30)

    def out(self, l0: Tensor, l1: Tensor) -> Tensor:
        return {"gauge": rms((l0 + l1) / 2), "z2": (rms(l0) + rms(l1)) / 2}.get(self.c.wiring, rms(l1))


@pytest.mark.parametrize("in_fork", [True, False])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_every_wiring_is_its_equations(wiring: str, looped: bool, in_fork: bool) -> None:
    config = replace(LOOPED if looped else TINY, wiring=wiring, skips_in_fork=in_fork)
    model = moved_model(config)
    order = [0, 1, 2, 1, 2, 3, 4, 5] if looped else [0, 1, 2, 3, 4, 5]
    expected = WrittenOut(model, order).logits(draw())
    assert torch.allclose(model(draw()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wiring", TWO)
def test_lanes_of_equal_weight_are_the_gptj_block(wiring: str) -> None:
    """post = 1, resid = 1, mix = (1, 0) and no skip in the fork: both lanes are the stream of the parallel block."""
    config = replace(TINY, skips_in_fork=False)
    lanes, block = (moved_model(replace(config, wiring=name), moved=0.0) for name in (wiring, "gptj"))
    with torch.no_grad():
        lanes.resid.fill_(1.0)
    assert torch.allclose(lanes(draw()), block(draw()), rtol=0, atol=1e-12)
    with torch.no_grad():
        lanes.post[-1, 0, 1] = 1.1
    assert not torch.allclose(lanes(draw()), block(draw()), rtol=0, atol=1e-12)


# ---- hook points


# ---- what any language model owes


@pytest.mark.parametrize("wiring", WIRINGS)
def test_later_tokens_and_other_rows_change_nothing(wiring: str) -> None:
    model, tokens = moved_model(replace(LOOPED, wiring=wiring)), draw(3)
    logits = model(tokens)
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % BOS
    assert torch.allclose(model(later)[:, :5], logits[:, :5], rtol=0, atol=1e-13)
    assert not torch.allclose(model(later)[:, 5], logits[:, 5], rtol=0, atol=1e-6)
    for row, expected in zip(tokens, logits, strict=True):
        assert torch.allclose(model(row[None])[0], expected, rtol=0, atol=1e-13)


def test_the_loss_counts_bytes_alone() -> None:
    model, tokens = moved_model(TINY), draw()
    tokens[0, 4], tokens[1, 0] = BOS, BOS
    nll = -model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    counted = torch.ones(2, 8, dtype=torch.bool)
    counted[0, 3] = False
    assert torch.allclose(model.loss(tokens), nll[counted].mean(), rtol=0, atol=1e-14)
    assert torch.isclose(functional.cross_entropy(model(tokens[1:, :-1])[0], tokens[1, 1:]), model.loss(tokens[1:]), atol=1e-14)


# ---- the record of a model


@pytest.mark.parametrize("start", STARTS)
def test_routing_starts_where_the_config_says_and_is_trained_where_it_says(start: str) -> None:
    model = LanesModel(replace(TINY, start=start, learned=False), torch.Generator().manual_seed(0))
    routing = STARTS[start]
    expected = torch.tensor((routing.attn, routing.mlp)).expand(6, 2, 2)
    assert torch.equal(model.post, expected)
    assert torch.allclose(model.resid, torch.full((6, 2), 1.1**0.5))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"post", "resid"}
    assert all(p.requires_grad for p in LanesModel(TINY, torch.Generator().manual_seed(0)).parameters())
