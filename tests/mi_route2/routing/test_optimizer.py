"""The optimiser is torch's AdamW where nothing is routed, and its own equations where something is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mi_route2.routing.optimizer import RoutedAdamW, uncompiled


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in [(3,), (2, 4), (5, 1)]]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [10.0 ** (step % 5 - 3) * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters()]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.999), (0.5, 0.0)])
def test_unrouted_it_is_torchs_adamw(betas: tuple[float, float], weight_decay: float) -> None:
    own, other = parameters(), parameters()
    settings = {"betas": betas, "eps": 1e-7, "weight_decay": weight_decay}
    groups = [[{"params": ps[:1], "lr": 0.03}, {"params": ps[1:]}] for ps in (own, other)]
    routed, plain = RoutedAdamW(groups[0], lr=0.01, **settings), torch.optim.AdamW(groups[1], lr=0.01, **settings)
    for step in range(20):
        for p, q, g in zip(own, other, gradients(step)):
            p.grad, q.grad = (None, None) if step == 4 and p.shape == (3,) else (g.clone(), g.clone())
        routed.step(unrouted=None if step % 2 else {})
        plain.step()
    for p, q in zip(own, other):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.1, "fused": True}),
        (torch.optim.Adam, {"lr": 0.03}),
        (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9}),
    ],
)
def test_uncompiled_an_optimizer_of_torch_takes_the_same_steps_to_the_last_bit(
    kind: type[torch.optim.Optimizer], settings: dict[str, object]
) -> None:
    """Under a schedule, and from its own saved state."""
    sides = []
    for made in (kind, uncompiled(kind)):
        own = parameters()
        optimizer = made(own, **settings)
        for half in range(2):
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for step in range(5):
                optimizer.zero_grad()
                for p, g in zip(own, gradients(10 * half + step)):
                    p.grad = g.clone()
                optimizer.step()
                schedule.step()
            saved, optimizer = optimizer.state_dict(), made(own, **settings)
            optimizer.load_state_dict(saved)
        sides.append(own)
    assert all(torch.equal(p, q) and not torch.equal(p, r) for p, q, r in zip(*sides, parameters()))


@given(betas=st.sampled_from([(0.9, 0.99), (0.0, 0.9)]), weight_decay=st.sampled_from([0.0, 0.05]), which=st.integers(0, 7))
def test_with_unrouted_second_moments_it_is_the_written_loop(betas: tuple[float, float], weight_decay: float, which: int) -> None:
    """``which`` says, as bits, for which parameters an unrouted gradient is given."""
    own, hand = parameters(), [p.detach().clone() for p in parameters()]
    lr, eps, (b1, b2) = 0.02, 1e-8, betas
    optimizer = RoutedAdamW([{"params": own}], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    m, v = [torch.zeros_like(p) for p in hand], [torch.zeros_like(p) for p in hand]
    for step in range(8):
        routed, unrouted = gradients(step), gradients(step + 50)
        for p, g in zip(own, routed):
            p.grad = g.clone()
        optimizer.step(unrouted={p: u for i, (p, u) in enumerate(zip(own, unrouted)) if which >> i & 1})
        for i, g in enumerate(routed):
            u = unrouted[i] if which >> i & 1 else g
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * u**2
            mhat, vhat = m[i] / (1 - b1 ** (step + 1)), v[i] / (1 - b2 ** (step + 1))
            hand[i] = hand[i] * (1 - lr * weight_decay) - lr * mhat / (vhat.sqrt() + eps)
    for p, h in zip(own, hand):
        assert torch.allclose(p, h, rtol=1e-11, atol=1e-12)


def test_a_flagged_batch_takes_a_smaller_step_and_not_a_rescaled_one() -> None:
    """The purpose of the option: if routing leaves a tenth of a gradient, plain Adam steps as far as ever."""
    steps = {}
    for name in ("routed", "unrouted"):
        p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        p.grad = torch.full_like(p, 0.1)
        RoutedAdamW([{"params": [p]}], lr=1.0).step(unrouted={p: torch.ones_like(p)} if name == "unrouted" else None)
        steps[name] = float(p.detach().abs().max())
    assert steps["routed"] == pytest.approx(1.0, rel=1e-6)
    assert steps["unrouted"] == pytest.approx(0.1, rel=1e-6)


def test_state_dict_goes_on_bit_for_bit() -> None:
    def train(optimizer: RoutedAdamW, own: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            for p, g in zip(own, gradients(step)):
                p.grad = g.clone()
            optimizer.step(unrouted=dict(zip(own, gradients(step + 9))))

    whole, cut = parameters(), parameters()
    train(RoutedAdamW([{"params": whole}], lr=0.01), whole, range(9))
    first = RoutedAdamW([{"params": cut}], lr=0.01)
    train(first, cut, range(4))
    second = RoutedAdamW([{"params": cut}], lr=0.5)
    second.load_state_dict(first.state_dict())
    train(second, cut, range(4, 9))
    assert all(torch.equal(p, q) for p, q in zip(whole, cut))


BAD = [{"lr": -1.0}, {"eps": 0.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}]
BAD += [{name: value} for name in ("lr", "eps", "weight_decay") for value in (math.nan, math.inf)] + [{"betas": (0.9, math.nan)}]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_settings_that_are_none_are_refused_for_all_and_for_a_group(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not valid settings of AdamW"):
        RoutedAdamW([{"params": parameters()}], **{"lr": 0.1, **bad})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="not valid settings of AdamW"):
        RoutedAdamW([{"params": parameters(), **bad}], lr=0.1)
