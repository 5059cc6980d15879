"""Edits are exactly their equations, and exactly nothing where they say so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2.steering.specs import attenuate, clamp, gate, patch, score, steer

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
HOSTILE = (math.inf, -math.inf, math.nan, -0.0, 0.0, 1e38, -1e-40)


def bits(x: Tensor) -> Tensor:
    """The bit pattern, in which -0.0 is not 0.0 and a NaN equals itself."""
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hostile(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with every kind of special one among them."""
    x = drawn(*shape, seed=seed, dtype=dtype)
    special = torch.tensor(HOSTILE, dtype=torch.float64).to(dtype)
    x.view(-1)[: len(special)] = special
    return x


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    v = drawn(*shape, seed=seed, dtype=dtype)
    return v / v.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["number", "row", "dimension"])
def test_patch_at_0_is_nothing_and_at_1_is_the_source_bit_for_bit(dtype, shape):
    h, source = hostile(5, 8, seed=1, dtype=dtype), hostile(5, 8, seed=2, dtype=dtype).flip(1)
    sizes = {"row": (5, 1), "dimension": (8,)}
    for value, expected in ((0.0, h), (1.0, source)):
        alpha = value if shape == "number" else torch.full(sizes[shape], value)
        assert same(patch(h, source, alpha), expected)


def test_patch_mixes_as_its_equation_says_row_by_row_and_dimension_by_dimension():
    h, source = drawn(5, 8, seed=1), drawn(8, seed=2)
    for alpha in (0.3, drawn(5, 1, seed=3), drawn(8, seed=4), drawn(5, 8, seed=5)):
        weight = torch.as_tensor(alpha, dtype=torch.float64)
        assert (patch(h, source, alpha) - ((1 - weight) * h + weight * source)).abs().max() < 1e-15
    mask = torch.tensor([1.0, 0.0] * 4)
    mixed = patch(h, source, mask)
    assert same(mixed[:, ::2], source[::2].expand(5, 4))
    assert same(mixed[:, 1::2], h[:, 1::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_steer_is_its_equation_and_leaves_rows_with_a_factor_of_0_alone(dtype):
    h, static, dynamic = hostile(6, 8, seed=1, dtype=dtype), drawn(6, 8, seed=2).float(), drawn(8, seed=3).float()
    scale, row_gate = torch.tensor([1.0, 0.5, 0, 2, 1, 0]), torch.tensor([1.0, 1, 1, 0, 0.25, 0])
    token_scale = torch.tensor([0.0, 0, 0, 0, 0.5, 2])
    out = steer(h, static, scale, row_gate, dynamic, token_scale)
    assert out.dtype == dtype
    assert same(out[2:4], h[2:4])  # neither term acts there
    wide = torch.promote_types(dtype, torch.float32)
    first = (static.to(wide) * scale[:, None].to(wide) * row_gate[:, None].to(wide)).to(dtype)
    second = (dynamic.to(wide) * token_scale[:, None].to(wide)).to(dtype)
    acting = [0, 1, 4, 5]
    assert torch.equal((h + first + second)[acting].nan_to_num(), out[acting].nan_to_num())


def test_steer_adds_in_the_order_of_the_formula():
    h, big = torch.tensor([[1.0]]), torch.tensor([1e8])
    assert steer(h, big, 1.0, 1.0, -big, 1.0).item() == 0.0  # not 1.0, as (1e8 - 1e8) would leave it


@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(0, 3), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60)
def test_clamp_moves_the_projection_between_its_bounds_and_nothing_else(seed, low, width, strength):
    h, v, high = drawn(7, 6, seed=seed), unit(6, seed=seed + 1), low + width
    out = clamp(h, v, low, high, strength)
    before, after = h @ v, out @ v
    wanted = before + strength * (before.clamp(low, high) - before)
    assert (after - wanted).abs().max() < 1e-12
    assert ((out - after[:, None] * v) - (h - before[:, None] * v)).abs().max() < 1e-12
    inside = score(h, v) == score(h, v).clamp(low, high)
    assert same(out[inside], h[inside])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamp_leaves_the_bits_of_what_is_inside(dtype):
    h = hostile(4, 8, seed=1, dtype=dtype)
    h[0] = torch.tensor([-0.0, 0.0] * 4)
    assert same(clamp(h, unit(8, seed=2), -math.inf, math.inf)[1:], h[1:])
    assert same(clamp(h, unit(8, seed=2), -1.0, 1.0)[0], h[0])


def test_clamps_of_rows_are_their_own():
    h, v = drawn(3, 5, seed=1), unit(3, 5, seed=2)
    low, high, strength = torch.tensor([-0.1, 2.0, -9.0]), torch.tensor([0.1, 2.0, 9.0]), torch.tensor([1.0, 0.5, 1.0])
    out = clamp(h, v, low, high, strength)
    for i in range(3):
        assert same(out[i], clamp(h[i], v[i], float(low[i]), float(high[i]), float(strength[i])))


def test_gate_is_a_sigmoid_and_saturates():
    h, probe = drawn(9, 6, seed=1), drawn(6, seed=2)
    assert (gate(h, probe, 0.3, 2.0) - torch.sigmoid(2 * (h @ probe - 0.3))).abs().max() < 1e-14
    for dtype in DTYPES:
        x = h.to(dtype)
        assert gate(x, probe).dtype == torch.promote_types(dtype, torch.float32)
        assert (gate(x, probe, -1e6) == 1).all()
        assert (gate(x, probe, 1e6) == 0).all()
    half = h.to(torch.bfloat16)
    assert torch.equal(gate(half, probe.float()), gate(half.float(), probe.float()))  # read in float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_attenuate_by_1_is_nothing_and_by_0_is_0(dtype):
    h = hostile(3, 8, seed=1, dtype=dtype)
    out = attenuate(h, torch.tensor([1.0, 0.0, 0.5]))
    assert same(out[0], h[0])
    assert same(out[1], torch.zeros_like(h[1]))
    assert same(out[2], (h[2].to(torch.promote_types(dtype, torch.float32)) * 0.5).to(dtype))


@given(st.integers(1, 70), st.sampled_from([1, 3, 64, 257]), st.sampled_from(DTYPES), st.integers(0, 10**6))
@settings(max_examples=40)
def test_the_bits_of_a_row_do_not_depend_on_how_many_rows_there_are(rows, width, dtype, seed):
    h, v = drawn(rows, width, seed=seed, dtype=dtype), unit(width, seed=seed + 1, dtype=torch.float32)
    for edit in (
        lambda x: gate(x, v, 0.1, 3.0),
        lambda x: clamp(x, v, -0.1, 0.1, 0.7),
        lambda x: steer(x, v, 0.3, 0.7, v, 0.2),
        lambda x: patch(x, v, 0.3),
    ):
        whole = edit(h)
        for i in (0, rows // 2, rows - 1):
            assert same(edit(h[i : i + 1]), whole[i : i + 1])
