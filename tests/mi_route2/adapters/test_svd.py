"""The SVD coordinates of a weight: LAPACK's, the randomised ones of a large weight, and the cache of both."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from mi_route2.adapters.svd import SVD, TOLERANCE, decompose, randomized_svd, weight_hash

FACTORS = ("U", "S", "Vh")
LARGE = 1024


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def basis(d: int, k: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, k, generator=rng(seed), dtype=torch.float64)).Q


def built(d_out: int, d_in: int, spectrum: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``(W, U, V)`` of a weight whose singular values are ``spectrum`` by construction."""
    U, V = basis(d_out, len(spectrum), seed), basis(d_in, len(spectrum), seed + 1000)
    return (U * spectrum) @ V.T, U, V


def power(k: int, exponent: float) -> Tensor:
    return torch.arange(1, k + 1, dtype=torch.float64) ** exponent


def large(dtype: torch.dtype = torch.float64, exponent: float = -2.0, k: int = 40, d_in: int = LARGE) -> Tensor:
    return built(LARGE, d_in, power(k, exponent))[0].to(dtype)


def equal(a: SVD, b: SVD) -> bool:
    if (a.residual is None) != (b.residual is None) or any(getattr(a, n).dtype != getattr(b, n).dtype for n in FACTORS):
        return False
    same = all(torch.equal(getattr(a, name), getattr(b, name)) for name in FACTORS)
    return same and (a.residual is None or b.residual is None or torch.equal(a.residual, b.residual))


def sine(V: Tensor, W: Tensor) -> float:
    """The largest sine of a principal angle between two column spaces of one dimension."""
    return torch.linalg.matrix_norm(W - V @ (V.T @ W), ord=2).item()


def never(*args: object, **kwargs: object) -> None:
    pytest.fail("this must not compute")


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "svd", never)
    monkeypatch.setattr(torch.linalg, "qr", never)


# ---- the whole SVD


@given(d_out=st.integers(1, 12), d_in=st.integers(1, 12), seed=st.integers(0, 99), rank_one=st.booleans())
def test_decompose_is_a_signed_svd_of_any_shape(d_out: int, d_in: int, seed: int, rank_one: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_out, d_in, generator=generator, dtype=torch.float64)
    if rank_one:
        weight = weight[:, :1] @ weight[:1]
    svd, r = decompose(weight), min(d_out, d_in)
    eye = torch.eye(r, dtype=torch.float64)
    assert svd.U.shape == (d_out, r)
    assert svd.Vh.shape == (r, d_in)
    assert torch.allclose(svd.U @ svd.S.diag() @ svd.Vh, weight, rtol=0, atol=1e-12)
    assert torch.allclose(svd.U.T @ svd.U, eye, rtol=0, atol=1e-12)
    assert torch.allclose(svd.Vh @ svd.Vh.T, eye, rtol=0, atol=1e-12)
    assert (svd.S[:-1] >= svd.S[1:]).all()
    peak = svd.Vh.abs().argmax(dim=1)
    assert (svd.Vh[torch.arange(r), peak] > 0).all()
    top = svd.top(1)
    assert torch.equal(top.U, svd.U[:, :1])
    assert torch.equal(top.Vh, svd.Vh[:1])


def test_ranks_outside_the_weight_are_refused() -> None:
    svd = decompose(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    for rank in (0, 5, -1):
        with pytest.raises(ValueError, match=r"outside 1\.\.4"):
            svd.top(rank)


def test_a_weight_that_is_not_finite_is_refused_and_nothing_is_cached(tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    for number in (math.nan, -math.inf):
        weight[1, 2] = number
        with pytest.raises(ValueError, match="a weight of 3x4 holds NaN or infinity, so it has no SVD: load the base model again"):
            decompose(weight, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_hit_is_the_miss_bit_for_bit(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    miss = decompose(weight, tmp_path / "new" / "folder")
    forbid_work(monkeypatch)
    assert equal(decompose(weight, tmp_path / "new" / "folder"), miss)
    assert {t.dtype for t in (miss.U, miss.S, miss.Vh)} == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_the_hash_tells_shape_type_and_content_apart() -> None:
    w = torch.zeros(4, 6)
    variants = [w, w.view(6, 4), w.double(), w.index_fill(0, torch.tensor([1]), 1e-30), w.bfloat16()]
    assert len({weight_hash(v) for v in variants}) == len(variants)
    assert weight_hash(torch.arange(6.0).view(2, 3)) != weight_hash(torch.arange(6.0).view(3, 2).mT)
    assert weight_hash(torch.arange(6.0).view(3, 2).mT) == weight_hash(torch.arange(6.0).view(3, 2).mT.contiguous())


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "no S", "other shape", "flipped", "nan", "other weight"])
def test_a_damaged_cache_file_is_computed_anew_and_replaced(damage: str, tmp_path: Path) -> None:
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sound = decompose(weight, tmp_path)
    (path,) = tmp_path.iterdir()
    data, tensors = path.read_bytes(), load_file(path)
    match damage:
        case "no S":
            del tensors["S"]
        case "other shape":
            tensors["U"] = tensors["U"][:, :3].clone()
        case "flipped":
            tensors["Vh"][2, 4] += 0.1
        case "nan":
            tensors["S"][1] = float("nan")
        case "other weight":
            other = decompose(weight.flip(0) * 2)
            tensors = {"U": other.U, "S": other.S, "Vh": other.Vh}
    save_file(tensors, path)
    if damage in ("empty", "truncated", "garbage"):
        path.write_bytes({"empty": b"", "truncated": data[:-5], "garbage": b"\xff" * 64}[damage])
    again = decompose(weight, tmp_path)
    assert torch.equal(again.U, sound.U)
    assert torch.equal(again.Vh, sound.Vh)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@given(d_out=st.integers(1, 12), d_in=st.integers(1, 12), seed=st.integers(0, 99), data=st.data())
def test_a_rank_cuts_the_whole_svd_of_a_small_weight_bit_for_bit(d_out: int, d_in: int, seed: int, data: st.DataObject) -> None:
    weight = torch.randn(d_out, d_in, generator=rng(seed))
    rank = data.draw(st.integers(1, min(d_out, d_in)))
    assert equal(decompose(weight, rank=rank), decompose(weight).top(rank))


def test_the_randomized_svd_stands_in_for_few_coordinates_of_large_weights_only() -> None:
    whole = large(torch.float32)
    for weight, rank, exact in ((whole[:-1], 4, True), (whole, 129, True), (whole, 128, False), (whole, 1, False)):
        svd = decompose(weight, rank=rank)
        assert (svd.residual is None) == exact, (tuple(weight.shape), rank)
        assert (svd.error == 0) == exact
        assert svd.S.shape == (rank,)
        if exact:
            U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
            assert torch.equal(svd.S, S[:rank])
            assert torch.equal(svd.Vh.abs(), Vh[:rank].abs())
            assert torch.equal(svd.U.abs(), U[:, :rank].abs())


# ---- a few leading coordinates


@given(
    d_out=st.integers(2, 40),
    d_in=st.integers(2, 40),
    exponent=st.floats(-3, 0),
    iterations=st.integers(0, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_what_the_residual_says_holds(
    d_out: int, d_in: int, exponent: float, iterations: int, seed: int, data: st.DataObject
) -> None:
    k = min(d_out, d_in)
    weight, _, _ = built(d_out, d_in, power(k, exponent), seed)
    rank = data.draw(st.integers(1, k))
    svd = randomized_svd(weight, rank, rng(seed), oversampling=1, iterations=iterations)
    U, S, V = svd.U, svd.S, svd.Vh.T
    for Q in (U, V):
        assert torch.allclose(Q.T @ Q, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(U.T @ weight, S[:, None] * V.T, rtol=0, atol=1e-12)
    R = weight @ V - U * S
    assert torch.allclose(svd.residual, R.norm(dim=0), rtol=0, atol=1e-12)
    assert svd.error == pytest.approx((R.norm() / S.norm()).item(), abs=1e-12)
    # exact triplets of W - R Vh, and so Weyl's bound on each singular value
    nearby = weight - R @ V.T
    assert torch.allclose(nearby @ V, U * S, rtol=0, atol=1e-12)
    assert torch.allclose(nearby.T @ U, V * S, rtol=0, atol=1e-12)
    true = torch.linalg.svdvals(weight)
    assert ((S[:, None] - true).abs().amin(dim=1) <= R.norm(dim=0) + 1e-12).all()
    # what the leading r hold between them, from below and from above
    ratio = (true[:rank].norm() / S.norm()).item()
    assert ratio >= (1 + svd.error**2) ** 0.5 - 1e-12
    rest = nearby - (U * S) @ V.T
    if torch.linalg.matrix_norm(rest, ord=2) <= S[-1]:  # no leading direction was missed
        assert ratio <= 1 + svd.error + 1e-12


@pytest.mark.parametrize(("d_out", "d_in"), [(160, 240), (240, 160), (200, 200)])
@pytest.mark.parametrize("exponent", [-0.5, -1.0, -2.0])
def test_values_and_subspaces_are_those_of_the_whole_svd(d_out: int, d_in: int, exponent: float) -> None:
    rank, spectrum = 12, power(min(d_out, d_in), exponent)
    weight, U, V = built(d_out, d_in, spectrum)
    svd, whole = randomized_svd(weight, rank, rng()), decompose(weight).top(rank)
    bound = {-0.5: 1e-2, -1.0: 1e-4, -2.0: 1e-7}[exponent]
    assert svd.error < bound
    assert torch.allclose(svd.S, whole.S, rtol=bound**2, atol=0), "values are second order in the error"
    assert torch.allclose(whole.S, spectrum[:rank], rtol=1e-12, atol=0)
    # Wedin: the angle of either subspace is at most |R| over the gap at the cut
    gap = (svd.S[-1] - spectrum[rank]).item()
    R = weight @ svd.Vh.T - svd.U * svd.S
    wedin = torch.linalg.matrix_norm(R, ord=2).item() / gap
    assert wedin < 0.5
    for ours, theirs, made in ((svd.U, whole.U, U), (svd.Vh.T, whole.Vh.T, V)):
        assert sine(theirs, made[:, :rank]) < 1e-11
        assert sine(theirs, ours) <= wedin + 1e-12
    assert torch.allclose(svd.Vh[:4], whole.Vh[:4], rtol=0, atol=bound), "one by one and with their signs"
    assert torch.allclose(svd.U[:, :4], whole.U[:, :4], rtol=0, atol=bound)


def test_the_weight_alone_decides_the_result() -> None:
    weight, other = large(), large(exponent=-1.0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = decompose(weight, rank=6)
    assert torch.equal(torch.get_rng_state(), before), "it draws from no generator but its own"
    torch.manual_seed(2)
    assert equal(decompose(weight, rank=6), first)
    assert equal(decompose(weight.T.contiguous().T, rank=6), first)
    direct = randomized_svd(weight, 6, rng(int(weight_hash(weight)[:15], 16)))
    assert equal(direct, first)
    assert not equal(randomized_svd(other, 6, rng(0)), randomized_svd(other, 6, rng(1))), "a generator that is not read"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_type_is_decomposed_in_float32_at_least(dtype: torch.dtype) -> None:
    weight = large(dtype, d_in=1100)
    svd = decompose(weight, rank=6)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    U, S, Vh = torch.linalg.svd(weight.double(), full_matrices=False)
    bound = 1e-9 if dtype == torch.float64 else 1e-4
    assert {svd.U.dtype, svd.S.dtype, svd.Vh.dtype, svd.residual.dtype} == {wide}
    assert torch.allclose(svd.S.double(), S[:6], rtol=bound, atol=0)
    peak = svd.Vh.abs().argmax(dim=1)
    assert (svd.Vh[torch.arange(6), peak] > 0).all()
    sign = (svd.Vh.double() * Vh[:6]).sum(dim=1).sign()
    assert torch.allclose(svd.Vh.double(), Vh[:6] * sign[:, None], rtol=0, atol=bound)
    assert torch.allclose(svd.U.double(), U[:, :6] * sign, rtol=0, atol=bound)


def test_a_cut_keeps_the_residual_of_what_is_left() -> None:
    weight, _, _ = built(60, 80, power(60, -0.5))
    svd = randomized_svd(weight, 9, rng(), iterations=1)
    cut = svd.top(4)
    R = weight @ cut.Vh.T - cut.U * cut.S
    assert torch.allclose(cut.residual, R.norm(dim=0), rtol=0, atol=1e-12)
    assert 0 < cut.error < svd.error
    assert cut.error == pytest.approx((R.norm() / cut.S.norm()).item(), abs=1e-12)


def test_an_error_over_the_tolerance_is_said_and_one_under_it_is_not(tmp_path: Path) -> None:
    noise = torch.randn(LARGE, LARGE, generator=rng())
    sentence = r"the leading 4 singular vectors of a 1024x1024 weight have an error of \d\.\d%, over 1%.*full SVD"
    for _ in range(2):  # a result from the cache is no better
        with pytest.warns(UserWarning, match=sentence):
            svd = decompose(noise, tmp_path, rank=4)
        assert svd.error > TOLERANCE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 < decompose(large(), rank=4).error < TOLERANCE
        decompose(noise, tmp_path)  # what the sentence advises
        assert decompose(noise, tmp_path, rank=4).error == 0


# ---- the cache


def test_every_rank_has_a_file_of_its_own_and_the_whole_svd_serves_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = large(torch.float32)
    ranks = {rank: decompose(weight, tmp_path, rank=rank) for rank in (3, 6)}
    assert len(list(tmp_path.iterdir())) == 2
    assert equal(decompose(weight, tmp_path, rank=3), ranks[3])
    whole = decompose(weight, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert whole.S.shape == (LARGE,)
    forbid_work(monkeypatch)
    for rank in (3, 6, 50, 500, LARGE):
        served = decompose(weight, tmp_path, rank=rank)
        assert equal(served, whole.top(rank))
        assert served.error == 0


# ---- progress
