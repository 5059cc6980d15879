"""Theorems of every probe, and of each kind."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.auroc import auroc
from mi_route2.probes.direction import DirectionFitter, DirectionProbe
from mi_route2.probes.haar import HaarProbeFitter
from mi_route2.probes.lda import LdaFitter
from mi_route2.probes.logistic import LogisticFitter
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.probes.probe import Probe, ProbeFitter, examples, pool
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Vector, gate

B, S, D = 40, 6, 5
LEARNT = {"mean_difference": MeanDifferenceFitter, "lda": LdaFitter, "logistic": LogisticFitter}


def batch(seed: int = 0, shift: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian activations; hacks are moved along the first axis."""
    g = torch.Generator().manual_seed(seed)
    positive = torch.arange(B) % 2 == 0
    h = torch.randn(B, S, D, generator=g, dtype=torch.float64)
    h[..., 0] += shift * positive[:, None]
    length = torch.randint(1, S + 1, (B,), generator=g)
    mask = torch.arange(S) < length[:, None]
    return h.to(dtype), mask, positive


def pairs_as_rollouts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Examples [n d] as rollouts of one token."""
    return x[:, None], torch.ones(len(x), 1, dtype=torch.bool)


def every_fitter() -> dict[str, ProbeFitter]:
    v = torch.arange(1.0, D + 1)
    return {
        "cosine": DirectionFitter(v),
        "projection": DirectionFitter(v, "projection"),
        "haar": HaarProbeFitter(torch.Generator().manual_seed(3)),
        **{name: kind() for name, kind in LEARNT.items()},
        **{f"{name}-token": kind(unit="token") for name, kind in LEARNT.items()},
    }


def trained(fitter: Any, h: Tensor, mask: Tensor, positive: Tensor) -> Any:
    """The probe of one batch."""
    fitter.update(h, mask, positive)
    return fitter.fit()


def fitted(name: str) -> Probe:
    return trained(every_fitter()[name], *batch())


def direction_of(probe: Probe) -> Tensor:
    assert isinstance(probe, AffineProbe)
    return probe.weight / probe.weight.norm()


NAMES = sorted(every_fitter())


@pytest.mark.parametrize("name", NAMES)
def test_the_score_of_a_rollout_is_the_token_score_of_its_mean(name):
    h, mask, _ = batch(1)
    probe = fitted(name)
    assert isinstance(probe, Probe)
    mean = torch.stack([h[b, mask[b]].mean(0) for b in range(B)])
    torch.testing.assert_close(probe.score_rollouts(h, mask), probe.score_tokens(mean[:, None])[:, 0])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cosine"])
def test_the_score_of_a_rollout_is_the_mean_of_its_tokens_scores_unless_it_is_a_cosine(name):
    h, mask, _ = batch(1)
    probe = fitted(name)
    tokens = probe.score_tokens(h)
    expected = torch.stack([tokens[b, mask[b]].mean() for b in range(B)])
    torch.testing.assert_close(probe.score_rollouts(h, mask), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_padding_never_leaks_into_fit_or_score(name, garbage):
    h, mask, positive = batch()
    dirty = torch.where(mask[..., None], h, garbage)
    clean, other = (trained(every_fitter()[name], given, mask, positive) for given in (h, dirty))
    assert torch.equal(clean.score_rollouts(h, mask), other.score_rollouts(dirty, mask))
    assert torch.equal(clean.score_tokens(h)[mask], other.score_tokens(dirty)[mask])


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_activations_are_pooled_and_scored_in_float32(name):
    h, mask, _ = batch(1, dtype=torch.bfloat16)
    probe = fitted(name)
    scores = probe.score_rollouts(h, mask)
    assert scores.dtype == probe.score_tokens(h).dtype == torch.float32
    torch.testing.assert_close(scores, probe.score_rollouts(h.double(), mask).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_mean_of_a_constant_activation_is_that_activation_to_the_last_bit(dtype):
    """Otherwise the rounding of a mean tells how long a rollout was, and a scaler makes unit variance of it."""
    length = torch.arange(1, 100)
    mask = torch.arange(100) < length[:, None]
    constant = torch.tensor([0.1, -3.3, 1e4, 1 / 7, 0.0, 6e-5], dtype=dtype)
    pooled = pool(constant.expand(*mask.shape, -1), mask)
    assert torch.equal(pooled, constant.to(pooled).expand_as(pooled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LEARNT.values())
def test_a_layer_that_never_varies_separates_nothing_though_hacks_are_longer(kind, dtype):
    positive = torch.arange(B) % 3 == 0
    mask = torch.arange(100) < torch.where(positive, 77, 30)[:, None]
    h = torch.tensor([0.1, -3.3, 1e4 / 3, 1 / 7, 1.7], dtype=dtype).expand(B, 100, D)
    if kind is MeanDifferenceFitter:
        with pytest.raises(ValueError, match="not zero"):
            trained(kind(), h, mask, positive)
    else:
        assert auroc(trained(kind(), h, mask, positive).score_rollouts(h, mask).double().numpy(), positive.numpy()) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_has_the_same_bits_alone_and_in_company_and_with_any_padding(dtype):
    g = torch.Generator().manual_seed(0)
    for s, d in ((1, 1), (3, 5), (17, 8), (40, 33), (150, 3)):
        h = torch.randn(6, s, d, generator=g).to(dtype)
        mask = torch.rand(6, s, generator=g) < 0.7
        mask[:, 0] = True
        whole = pool(h, mask)
        for row in range(6):
            padded = torch.full((2, s + 30, d), math.nan, dtype=dtype)
            place = torch.zeros(2, s + 30, dtype=torch.bool)
            place[1, 0] = True
            padded[1, 0] = 1.0
            padded[0, 11 : 11 + s], place[0, 11 : 11 + s] = h[row], mask[row]
            assert torch.equal(pool(padded, place)[0], whole[row])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_the_same_score_alone_and_in_any_batch_to_the_last_bit(dtype, threads):
    """A matrix product rounds by the shape of the batch, and equal activations would no longer tie."""
    before, g = torch.get_num_threads(), torch.Generator().manual_seed(0)
    torch.set_num_threads(threads)
    try:
        for d in (1, 2, 5, 17, 100, 257, 40_000):
            v = torch.randn(d, generator=g, dtype=torch.float64)
            probes = (AffineProbe(v, 0.1), DirectionFitter(v).fit(), DirectionFitter(v, "projection").fit())
            for b, s in ((1, 2), (3, 5), (7, 1)) if d < 40_000 else ((2, 1),):
                h = torch.randn(b, s, d, generator=g).to(dtype)
                strided = h.transpose(0, 1).contiguous().transpose(0, 1)
                for probe in probes:
                    scores = probe.score_tokens(h)
                    assert torch.equal(probe.score_tokens(strided), scores)
                    for i, j in {(0, 0), (b - 1, s - 1), (b // 2, s // 2)}:
                        alone = probe.score_tokens(h[i : i + 1, j : j + 1].clone())[0, 0]
                        assert torch.equal(alone, scores[i, j])
                        assert torch.equal(
                            probe.score_rollouts(h[i : i + 1, j : j + 1], torch.ones(1, 1, dtype=torch.bool))[0], alone
                        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e12])
def test_the_cosine_of_a_mean_that_cancels_is_zero_and_not_that_of_its_rounding(dtype, size):
    """The features that do not cancel, however small, are all that it is read from."""
    g = torch.Generator().manual_seed(0)
    half = size * torch.randn(64, 7, D, generator=g, dtype=torch.float64).to(dtype)
    order = torch.randperm(14, generator=g)
    h = torch.cat([half, -half], dim=1)[:, order]
    probe, mask = DirectionFitter(torch.arange(1.0, D + 1)).fit(), torch.ones(64, 14, dtype=torch.bool)
    assert torch.equal(probe.score_rollouts(h, mask), torch.zeros(64, dtype=dtype))
    h[..., 0] = 1e-9 * size
    torch.testing.assert_close(probe.score_rollouts(h, mask), probe.direction[0].to(dtype).expand(64))


@pytest.mark.parametrize("name", NAMES)
def test_another_width_is_refused(name):
    with pytest.raises(ValueError, match="features"):
        fitted(name).score_tokens(torch.zeros(2, 3, D + 1))


def test_a_rollout_without_predictor_positions_is_refused():
    h, mask, _ = batch()
    mask[3] = False
    with pytest.raises(ValueError, match=r"\[3\]"):
        pool(h, mask)
    with pytest.raises(ValueError, match=r"mask must be .*, not a Tensor of torch.bool and shape \[40, 6\]"):
        pool(h[:, 1:], torch.ones_like(mask))  # of sequences with one token more


@pytest.mark.parametrize("kind", LEARNT.values())
def test_a_fit_needs_both_classes_and_finite_activations(kind):
    h, mask, positive = batch()
    with pytest.raises(ValueError, match="positive and negative"):
        kind().fit()
    with pytest.raises(ValueError, match="positive and negative"):
        trained(kind(), h, mask, torch.ones_like(positive))
    h[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        kind().update(h, mask, positive)


@pytest.mark.parametrize("kind", [LogisticFitter, LdaFitter])
def test_activations_whose_squares_no_float_holds_are_refused(kind):
    """They gave a probe of zeros, which ranks nothing, or an error about NaN."""
    x, positive, _ = isotropic(0)
    for size in (0.9e-150, 1.1e150):
        with pytest.raises(ValueError, match="whose square no float64 holds: give activations in another unit"):
            trained(kind(), *pairs_as_rollouts(x / x.abs().max() * size), positive)


@pytest.mark.parametrize("kind", LEARNT.values())
def test_batches_and_one_update_fit_the_same_probe(kind):
    h, mask, positive = batch()
    whole, parts = trained(kind(), h, mask, positive), kind()
    for rows in (slice(0, 7), slice(7, 8), slice(8, None)):
        with torch.inference_mode(rows.start == 0):
            parts.update(h[rows], mask[rows], positive[rows])
    torch.testing.assert_close(whole.weight, parts.fit().weight, rtol=1e-10, atol=1e-12)
    assert whole.bias == pytest.approx(parts.fit().bias, rel=1e-10)


@pytest.mark.parametrize("kind", LEARNT.values())
def test_a_fitted_probe_does_not_change_when_its_fitter_learns_more(kind):
    fitter = kind()
    probe = trained(fitter, *batch())
    weight, bias = probe.weight.clone(), probe.bias
    assert not torch.allclose(trained(fitter, *batch(seed=5, shift=-9.0)).weight, weight)
    assert torch.equal(probe.weight, weight)
    assert probe.bias == bias


# Fisher's direction -------------------------------------------------------------------------------------------------


def isotropic(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two classes mu +- e_i: their sample covariance is a multiple of the identity, exactly; and mu_1 - mu_0."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(2, D, generator=g, dtype=torch.float64)
    steps = torch.cat([torch.eye(D), -torch.eye(D)]).double()
    x = torch.cat([means[0] + steps, means[1] + steps])
    return x, torch.arange(4 * D) >= 2 * D, means[1] - means[0]


@pytest.mark.parametrize("seed", range(3))
def test_mean_difference_is_fishers_direction_and_threshold_for_isotropic_covariance(seed):
    x, positive, difference = isotropic(seed)
    a, b = (trained(fitter, *pairs_as_rollouts(x), positive) for fitter in (MeanDifferenceFitter(), LdaFitter(shrinkage=None)))
    torch.testing.assert_close(direction_of(a), difference / difference.norm())
    torch.testing.assert_close(direction_of(a), direction_of(b))
    assert a.bias / float(a.weight.norm()) == pytest.approx(b.bias / float(b.weight.norm()))


def test_lda_is_the_inverse_covariance_times_the_mean_difference():
    h, mask, positive = batch()
    lda, mean_difference = (trained(fitter, h, mask, positive) for fitter in (LdaFitter(shrinkage=None), MeanDifferenceFitter()))
    x, y = examples(h, mask, positive, "rollout")
    covariance = (x[y].T.cov(correction=0) + x[~y].T.cov(correction=0)) / 2
    expected = torch.linalg.solve(covariance, x[y].mean(0) - x[~y].mean(0))
    torch.testing.assert_close(lda.weight, expected, rtol=1e-8, atol=1e-8)
    # The covariance here is not isotropic: the two probes differ, so the theorem above says something.
    assert not torch.allclose(direction_of(lda), direction_of(mean_difference), atol=1e-3)


def test_full_shrinkage_turns_lda_into_mean_difference():
    h, mask, positive = batch()
    lda, mean_difference = (trained(fitter, h, mask, positive) for fitter in (LdaFitter(shrinkage=1.0), MeanDifferenceFitter()))
    torch.testing.assert_close(direction_of(lda), direction_of(mean_difference))


def test_the_mean_difference_threshold_is_half_way_between_the_means():
    h, mask, positive = batch()
    probe = trained(MeanDifferenceFitter(), h, mask, positive)
    x, y = examples(h, mask, positive, "rollout")
    middle = (x[y].mean(0) + x[~y].mean(0)) / 2
    assert float(probe.score_tokens(middle[None, None])) == pytest.approx(0, abs=1e-12)
    assert float(probe.score_tokens(x[y].mean(0)[None, None])) > 0


@pytest.mark.parametrize("kind", [MeanDifferenceFitter, LdaFitter])
def test_repeating_one_class_does_not_move_threshold_or_direction(kind):
    """Equal priors: the hack rate of the training set is no information about the next mode's."""
    x, positive, _ = isotropic(0)
    a = trained(kind(), *pairs_as_rollouts(x), positive)
    x, positive = torch.cat([x, x[positive], x[positive]]), torch.cat([positive, positive[positive], positive[positive]])
    b = trained(kind(), *pairs_as_rollouts(x), positive)
    torch.testing.assert_close(direction_of(a), direction_of(b), rtol=1e-6, atol=1e-6)
    assert a.bias / float(a.weight.norm()) == pytest.approx(b.bias / float(b.weight.norm()), rel=1e-6)


@pytest.mark.parametrize("unit", ["rollout", "token"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e12])
def test_the_same_activations_in_another_order_are_no_direction_though_their_sums_cancel(unit, size):
    x = size * torch.randn(40, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hacks = torch.cat([x, -x])  # a mean of 0, up to rounding
    clean = hacks[torch.randperm(80, generator=torch.Generator().manual_seed(1))]
    fitter = MeanDifferenceFitter(unit)
    for side, label in ((hacks, True), (clean, False)):
        h = side.reshape(20, 4, D) if unit == "token" else side[:, None]
        fitter.update(h, torch.ones(h.shape[:2], dtype=torch.bool), torch.full((len(h),), label))
    with pytest.raises(ValueError, match="not zero"):
        fitter.fit()
    hacks[:, 0] += 1e-9 * size  # and what is small but more than rounding stays one
    probe = trained(MeanDifferenceFitter(), *pairs_as_rollouts(torch.cat([hacks, clean])), torch.arange(160) < 80)
    assert float(direction_of(probe)[0]) == 1.0


@pytest.mark.parametrize("shrinkage", [None, 0.0])
def test_lda_is_refused_where_the_covariance_has_no_say_in_the_classes_difference(shrinkage):
    """A feature that is constant inside both classes separates them best of all, and least squares would leave it out."""
    h, mask, positive = batch()
    h[..., 0] = positive[:, None].double()
    with pytest.raises(ValueError, match=r"singular.*shrinkage='auto'.*MeanDifferenceFitter"):
        trained(LdaFitter(shrinkage), h, mask, positive)
    assert auroc(trained(LdaFitter(0.1), h, mask, positive).score_rollouts(h, mask).numpy(), positive.numpy()) == 1.0


def test_lda_of_classes_that_are_one_point_each_is_refused():
    """No covariance at all, with any shrinkage; the means differ, and a weight of 0 would say that they do not."""
    h, mask, positive = batch()
    h[:] = positive[:, None, None].double()
    for shrinkage in ("auto", None, 1.0):
        with pytest.raises(ValueError, match=rf"shrinkage={shrinkage!r}.*MeanDifferenceFitter") as refused:
            trained(LdaFitter(shrinkage), h, mask, positive)
        assert ("choose shrinkage" in str(refused.value)) == (shrinkage is None)  # no remedy that is in use already


def test_an_affine_probe_is_a_monitor_whose_threshold_is_the_bias_negated():
    probe, h = fitted("logistic"), batch(1)[0]
    assert isinstance(probe, AffineProbe)
    monitor = Monitor(Site(0, "resid_post"), probe.weight, threshold=-probe.bias)  # as the page on steering has it
    found = gate(h, Vector(monitor.probe).data, monitor.threshold, monitor.sharpness)
    torch.testing.assert_close(found, probe.score_tokens(h).sigmoid())


def test_lda_of_two_examples_a_class_needs_a_shrinkage_in_numbers():
    """Ledoit and Wolf's estimate is 0 there, so that 'auto' leaves the covariance singular."""
    h, mask, positive = batch()
    rows = torch.cat([(positive == label).nonzero()[:2, 0] for label in (True, False)])
    few = h[rows], mask[rows], positive[rows]
    with pytest.raises(ValueError, match="choose a number above 0 in its place if a class has two examples, or use Mean"):
        trained(LdaFitter("auto"), *few)
    assert auroc(trained(LdaFitter(0.5), *few).score_rollouts(h[rows], mask[rows]).numpy(), positive[rows].numpy()) == 1.0


def test_lda_of_activations_that_never_vary_knows_nothing_and_is_no_error():
    """The first layer may hold one vector at every place; means of it differ by rounding alone."""
    _, mask, positive = batch()
    h = torch.tensor([0.1, -3.3, 1e6, 1 / 7, 0.0], dtype=torch.float64).expand(B, S, D)
    assert float(trained(LdaFitter(), h, mask, positive).score_rollouts(h, mask).abs().max()) < 1e-3


# Logistic -----------------------------------------------------------------------------------------------------------


def test_logistic_separates_separable_data():
    h, mask, positive = batch(shift=30.0)
    scores = trained(LogisticFitter(c=10.0), h, mask, positive).score_rollouts(h, mask).numpy()
    assert auroc(scores, positive.numpy()) == 1.0
    assert ((scores > 0) == positive.numpy()).all()


def test_logistic_is_at_the_optimum_of_its_stated_objective():
    """The gradient of |u|^2/2 + C sum omega log(1 + exp(-y s)) vanishes there, in standardised coordinates."""
    h, mask, positive = batch()
    few = positive & (torch.arange(B) < 20)  # unbalanced
    probe = trained(LogisticFitter(c=0.7), h, mask, few)
    x, y = examples(h, mask, few, "rollout")
    mean, sd = x.mean(0), x.std(0, correction=0)
    z = (x - mean) / sd
    u = (probe.weight * sd).requires_grad_()
    e = (torch.tensor(probe.bias, dtype=torch.float64) + probe.weight @ mean).requires_grad_()
    omega = torch.where(y, B / (2 * y.sum()), B / (2 * (~y).sum()))
    sign = torch.where(y, 1.0, -1.0)
    objective = u.square().sum() / 2 + 0.7 * (omega * torch.nn.functional.softplus(-sign * (z @ u + e))).sum()
    objective.backward()
    assert float(u.grad.abs().max()) < 5e-3
    assert float(e.grad.abs()) < 5e-3


def test_logistic_ignores_the_units_of_each_feature_and_the_seed():
    h, mask, positive = batch()
    scale = torch.tensor([1.0, 100.0, 0.01, 3.0, 7.0], dtype=torch.float64)
    plain, other = trained(LogisticFitter(), h, mask, positive), h * scale - 4
    found = trained(LogisticFitter(), other, mask, positive).score_rollouts(other, mask)
    torch.testing.assert_close(found, plain.score_rollouts(h, mask), rtol=1e-4, atol=1e-4)
    assert torch.equal(plain.weight, trained(LogisticFitter(seed=9), h, mask, positive).weight)


def test_more_regularization_means_a_shorter_weight():
    norms = [float(trained(LogisticFitter(c=c), *batch()).weight.norm()) for c in (0.01, 0.1, 1.0)]
    assert norms == sorted(norms)
    assert norms[0] < 0.7 * norms[2]
    with pytest.raises(ValueError, match="positive"):
        LogisticFitter(c=0.0)


# Directions and the control -----------------------------------------------------------------------------------------


@given(st.floats(1e-300, 1e300))
@settings(max_examples=50, deadline=None)
def test_a_direction_probe_is_invariant_to_positive_rescaling_of_its_vector(scale):
    h, mask, _ = batch()
    v = torch.randn(D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for score in ("cosine", "projection"):
        a, b = DirectionFitter(v, score).fit(), DirectionFitter(scale * v, score).fit()
        torch.testing.assert_close(a.score_rollouts(h, mask), b.score_rollouts(h, mask))
        torch.testing.assert_close(DirectionFitter(-v, score).fit().score_tokens(h), -a.score_tokens(h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cosine_is_one_of_any_activation_that_is_not_zero(dtype):
    """Squares of what is very small vanish, and those of what is very large overflow."""
    v, h = torch.ones(D, dtype=torch.float64), batch(dtype=dtype)[0]
    probe, tiny = DirectionFitter(v).fit(), torch.finfo(dtype).tiny
    expected = probe.score_tokens(h)
    torch.testing.assert_close(expected, h @ probe.direction.to(dtype) / h.norm(dim=-1))
    for power in (-120, -90, 90, 120):
        torch.testing.assert_close(probe.score_tokens(h * 2.0**power), expected, rtol=1e-6, atol=1e-6)
    for least in (tiny, 2 * tiny, tiny / 4, torch.finfo(dtype).max / 8):
        assert float(probe.score_tokens(torch.full((1, 1, D), least, dtype=dtype))) == pytest.approx(1, rel=1e-6)


@given(st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_a_cosine_is_invariant_to_the_size_of_the_activation_and_a_projection_proportional(scale):
    h, _, _ = batch()
    v = torch.ones(D, dtype=torch.float64)
    cosine, projection = DirectionFitter(v).fit(), DirectionFitter(v, "projection").fit()
    torch.testing.assert_close(cosine.score_tokens(scale * h), cosine.score_tokens(h))
    torch.testing.assert_close(projection.score_tokens(scale * h), scale * projection.score_tokens(h))
    assert float(cosine.score_tokens(h).abs().max()) <= 1 + 1e-12
    assert float(cosine.score_tokens(v[None, None])) == pytest.approx(1)
    assert float(cosine.score_tokens(torch.zeros(1, 1, D))) == 0


@pytest.mark.parametrize("vector", [torch.zeros(D), torch.full((D,), math.nan), torch.full((D,), math.inf)])
def test_a_vector_without_a_direction_is_refused(vector):
    with pytest.raises(ValueError, match="finite and not zero"):
        DirectionFitter(vector)
    with pytest.raises(ValueError, match="unit vector"):
        DirectionProbe(vector)


def test_random_directions_are_haar_and_their_auroc_is_centered_on_a_half():
    """Whatever the data: here strongly anisotropic, with the hacks far along the large axis."""
    h, mask, positive = batch(shift=6.0)
    fitter = HaarProbeFitter(torch.Generator().manual_seed(0))
    fitter.update(h, mask, positive)
    draws = [fitter.fit() for _ in range(400)]
    v = torch.stack([probe.direction for probe in draws])
    torch.testing.assert_close(v.norm(dim=1), torch.ones(400, dtype=torch.float64))
    torch.testing.assert_close(v.T @ v / 400, torch.eye(D).double() / D, atol=0.04, rtol=0)
    areas = np.array([auroc(probe.score_rollouts(h, mask).numpy(), positive.numpy()) for probe in draws])
    assert abs(areas.mean() - 0.5) < 4 * areas.std() / math.sqrt(400)
    assert np.quantile(areas, 0.95) > 0.9  # why the mean alone is no control


def test_the_control_sees_no_labels_and_repeats_with_its_generator():
    h, mask, positive = batch()
    a, b = HaarProbeFitter(torch.Generator().manual_seed(1)), HaarProbeFitter(torch.Generator().manual_seed(1))
    a.update(h, mask, positive)
    b.update(h * 3, mask, ~positive)
    first = a.fit().direction
    assert torch.equal(first, b.fit().direction)
    assert not torch.equal(first, a.fit().direction)  # the next draw is another
    with pytest.raises(ValueError, match="update"):
        HaarProbeFitter(torch.Generator()).fit()
    with pytest.raises(ValueError, match="features before"):
        a.update(torch.zeros(B, S, D + 1), mask, positive)


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("unit", ["rollout", "token"])
def test_a_fitter_keeps_what_it_was_given_however_its_caller_goes_on(name, unit):
    """Activations and labels are written into the same tensors batch after batch."""
    h, mask, positive = batch()
    plain, reused = trained(LEARNT[name](unit=unit), h, mask, positive), LEARNT[name](unit=unit)
    own = [one.clone() for one in (h, mask, positive)]
    reused.update(*own)
    for one in own:
        one.fill_(1)
    assert torch.equal(plain.weight, reused.fit().weight)


@pytest.mark.parametrize("name", LEARNT)
def test_a_batch_of_another_width_is_refused_when_it_comes(name):
    fitter = LEARNT[name]()
    fitter.update(*batch())
    h, mask, positive = batch()
    with pytest.raises(ValueError, match="have 4 features, but the probe 5"):
        fitter.update(h[..., :4], mask, positive)


def test_a_probe_is_frozen_when_it_is_made():
    """A parameter that trains on, as the factor that a direction was read from, moves no probe and learns nothing from scores."""
    h, mask, _ = batch()
    for make in (lambda v: AffineProbe(v, 0.5), lambda v: DirectionProbe(v, "projection")):
        v = torch.eye(D, dtype=torch.float64)[0].requires_grad_()
        probe = make(v)
        scores = probe.score_rollouts(h, mask)
        assert not scores.requires_grad
        with torch.no_grad():
            v.mul_(3)
        assert torch.equal(probe.score_rollouts(h, mask), scores)


def test_an_affine_probe_is_a_vector_and_a_number():
    with pytest.raises(ValueError, match=r"weight must be Float\[Tensor, 'd'\], not a Tensor of torch.float32 and shape \[2, 2\]"):
        AffineProbe(torch.ones(2, 2), 0.0)
    with pytest.raises(TypeError, match="bias must be float, not NoneType"):
        AffineProbe(torch.ones(2), None)


def test_token_examples_are_the_masked_tokens_with_their_rollouts_label():
    h, mask, positive = batch()
    x, y = examples(h, mask, positive, "token")
    expected = [(h[b, s], positive[b]) for b in range(B) for s in range(S) if mask[b, s]]
    assert torch.equal(x, torch.stack([value for value, _ in expected]))
    assert torch.equal(y, torch.stack([label for _, label in expected]))


# Labels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("padding", [-100, 1])
def test_labels_of_tokens_train_on_the_tokens_in_the_mask_alone(name, padding):
    """Padded rollouts fit the probe of each one by itself without padding, whatever the labels and activations of padding."""
    h, mask, _ = batch()
    labels = (torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.4).long()
    h[..., 1] += 3.0 * labels  # so that tokens of one rollout differ
    padded = trained(
        LEARNT[name](unit="token"), torch.where(mask[..., None], h, math.nan), mask, torch.where(mask, labels, padding)
    )
    unpadded = LEARNT[name](unit="token")
    for b, length in enumerate(mask.sum(1).tolist()):
        unpadded.update(h[b : b + 1, :length], mask[b : b + 1, :length], labels[b : b + 1, :length])
    torch.testing.assert_close(padded.weight, unpadded.fit().weight, rtol=1e-9, atol=1e-11)
    probes = padded, fitted(f"{name}-token")
    areas = [auroc(probe.score_tokens(h)[mask].numpy(), labels[mask].numpy()) or 0.0 for probe in probes]
    assert areas[0] > 0.85 > 0.7 > areas[1]  # a rollout's label says little of these tokens
    with pytest.raises(ValueError, match="Labels per token fit a probe of tokens: pass unit='token'"):
        LEARNT[name]().update(h, mask, torch.where(mask, labels, padding))


@pytest.mark.parametrize("name", LEARNT)
def test_labels_of_tokens_that_repeat_their_rollouts_fit_the_same_probe(name):
    h, mask, positive = batch()
    once, repeated = (trained(LEARNT[name](unit="token"), h, mask, y) for y in (positive, positive[:, None].expand(B, S)))
    assert torch.equal(once.weight, repeated.weight)
    assert once.bias == repeated.bias


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("unit", ["rollout", "token"])
@pytest.mark.parametrize(("hack", "clean"), [("hack", "clean"), (2, -1), (0, 1), (True, False), ("a", "b")])
@pytest.mark.parametrize("form", [list, np.array])
def test_scores_rise_for_the_class_that_is_named_positive(name, unit, hack, clean, form):
    h, mask, positive = batch()
    labels = form([hack if one else clean for one in positive])
    for token in (False, True) if unit == "token" else (False,):
        given = form([[one] * S for one in labels]) if token else labels
        probe, other = (trained(LEARNT[name](unit=unit, positive=one), h, mask, given) for one in (hack, clean))
        assert torch.equal(probe.weight, trained(LEARNT[name](unit=unit), h, mask, positive).weight)
        torch.testing.assert_close(other.score_rollouts(h, mask), -probe.score_rollouts(h, mask), rtol=1e-4, atol=1e-4)
        assert (auroc(probe.score_rollouts(h, mask).numpy(), positive.numpy()) or 0.0) > 0.9
        assert (probe.positive, other.positive) == (hack, clean)


@pytest.mark.parametrize("kind", LEARNT.values())
def test_a_class_that_no_label_has_is_an_error_of_one_line(kind):
    h, mask, positive = batch()
    texts = ["hack" if one else "clean" for one in positive]
    for absent, labels in (("hacks", texts), (1, texts), ("1", positive.long()), (3, positive.long())):
        fault = rf"^A probe .* 0 labels are positive={absent!r} and 40 are not: name a class"
        with pytest.raises(ValueError, match=fault) as refused:
            trained(kind(positive=absent), h, mask, labels)
        assert "\n" not in str(refused.value)
    for labels, wrong in ((texts, "'hack'"), (positive.long() + 1, "2")):
        with pytest.raises(ValueError, match=rf"not {wrong}: name the class that the score rises for, positive='hack', say"):
            kind().update(h, mask, labels)
    for labels in (texts[1:], [texts] * 2, [["hack"], ["hack", "clean"]]):
        with pytest.raises(ValueError, match=r"give one per rollout, or one per token|labels"):
            kind(positive="hack").update(h, mask, labels)
