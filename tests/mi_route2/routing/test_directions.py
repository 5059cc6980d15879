"""Directions against brute force; what a refresh changes and what it must not; top-k; files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from mask_oracle import FixedFitter, random_directions, run
from tiny_policy import SPECS, make_batch, make_model, make_policy, make_rollouts
from torch import Tensor
from written_out import written_out

from mi_route2.rollouts import Policy
from mi_route2.routing import (
    Directions,
    EraseRoute,
    EraseSpec,
    HaarFitter,
    MaskRoute,
    MaskSpec,
    PairBatch,
    PersonaFitter,
    TopKFitter,
)
from mi_route2.routing import directions as directions_module
from mi_route2.routing.directions import collect, units

KINDS = ("act", "grad", "full")


def make_pairs(n: int = 5) -> PairBatch:
    """Hack and clean sides of different lengths: the lists know nothing of each other."""
    return PairBatch(make_rollouts(n, seed=21), make_rollouts(n, seed=22), "pairs-hash")


def persona(policy: Policy, kind: str, pairs: PairBatch | None = None, refreshes: bool = True) -> PersonaFitter:
    return PersonaFitter("persona", kind, pairs or make_pairs(), refreshes=refreshes)  # pyright: ignore[reportArgumentType]


def written_features(policy: Policy, kind: str, side: str, n: int = 5) -> Mapping[str, Tensor]:
    """``[pairs, *shape]`` a site, one rollout at a time, by the written-out policy without its quarantine."""
    rollouts, basis = getattr(make_pairs(n), side), policy.adapters.coordinates()
    rows: dict[str, list[Tensor]] = {site: [] for site in policy.adapters.sites}
    for b in range(n):
        one = rollouts.rows(torch.tensor([b]))
        own = written_out(policy, one, lambda lp: -lp.sum(), quarantine=False)
        for site, row in rows.items():
            if kind == "act":
                row.append(torch.stack([basis[site] @ x for x in own.inputs[site][0][one.predictors[0]]]).mean(0))
            else:
                name = f"kept.{site}.{policy.adapters.sites[site].kept.scored}" if kind == "grad" else f"W.{site}"
                row.append(own.gradients[name].sum((0, 1)))
    return {site: torch.stack(row) for site, row in rows.items()}


@pytest.mark.parametrize("kind", ["grad", "full"])
def test_a_direction_has_no_unit(kind: str) -> None:
    """Logits near 0 have the gradient of uniform chances times their scale, so two small scales have one direction."""
    policy = make_policy(SPECS["lora"])

    def scaled(by: float) -> Directions:
        small = Policy(policy.model, policy.adapters, lambda *given: by * policy.forward(*given))
        return persona(small, kind).fit(small, 0)

    assert scaled(1e-7).overlap(scaled(1e-17)) > 1 - 1e-5


@pytest.mark.parametrize("name", ["svd", "svd-low", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_persona_directions_are_the_mean_contrast_by_brute_force(kind: str, name: str) -> None:
    policy = make_policy(SPECS[name])
    own = persona(policy, kind).fit(policy, 0)
    hack, clean = (written_features(policy, kind, side) for side in ("hack", "clean"))
    assert own.vectors.keys() == policy.adapters.sites.keys()
    for site, v in own.vectors.items():
        if kind == "full":
            contrast = torch.stack([h / h.norm() - c / c.norm() for h, c in zip(hack[site], clean[site])]).mean(0)
        else:
            contrast = torch.stack([h - c for h, c in zip(hack[site], clean[site])]).mean(0)
        assert torch.allclose(v, contrast / contrast.norm(), rtol=0, atol=1e-10), site
        assert float(v.norm()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("micro", [1, 2, 4, 9])
@pytest.mark.parametrize("name", ["svd-low", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_run_in_pieces_give_the_same_directions(kind: str, name: str, micro: int) -> None:
    policy, seen = make_policy(SPECS[name]), list[int]()

    def counted(model: Any, tokens: Tensor, attention: Tensor) -> Tensor:
        seen.append(len(tokens))
        return policy.forward(model, tokens, attention)

    inner, pairs = Policy(policy.model, policy.adapters, counted), make_pairs(7)
    pieces = replace(pairs, micro=micro)
    fitters: list[Callable[[PairBatch], Any]] = [lambda given: persona(policy, kind, given)]
    fitters.append(lambda given: TopKFitter(kind, given, k=2))  # pyright: ignore[reportArgumentType]
    for fitter in fitters:
        whole = fitter(pairs).fit(policy, 0)
        own = fitter(pieces).fit(inner, 0)
        for site, v in whole.vectors.items():
            assert torch.allclose(own.vectors[site], v, rtol=0, atol=1e-12), site
    assert max(seen) == min(micro, 7)


def test_contrasts_of_all_weights_are_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together are as large as the weights, once for every pair."""
    policy, real = make_policy(SPECS["lora"]), directions_module.contrast
    made, most = list[ref[Tensor]](), list[int]()

    def counted(hack: Tensor, clean: Tensor) -> Any:
        made.append(ref(found := real(hack, clean)[0]))
        most.append(sum(each() is not None for each in made))
        return directions_module.Contrast(found, torch.zeros(len(found)))

    monkeypatch.setattr(directions_module, "contrast", counted)
    persona(policy, "full", replace(make_pairs(), micro=1)).fit(policy, 0)
    assert len(made) == 5 * len(policy.adapters.sites)
    assert max(most) <= 2


def test_activation_directions_live_in_the_coordinates_of_ds() -> None:
    """``v_act`` has the adapter's own r coordinates; a LoRA has none, so all of the weight's."""
    for name, width in (("svd", 16), ("svd-low", 5), ("lora", 16)):
        policy = make_policy(SPECS[name])
        vectors = persona(policy, "act").fit(policy, 0).vectors
        assert vectors["blocks.0.mlp.up"].shape == (width,)
        if name != "lora":
            assert vectors["blocks.0.mlp.up"].shape == policy.adapters.scored("blocks.0.mlp.up").shape


def test_a_lengthening_of_one_side_counts_as_the_loss_does() -> None:
    """Summed NLL over one fixed length: a completion twice as long weighs as much as it is long, not half."""
    policy = make_policy(SPECS["svd"])
    hack, clean = (written_features(policy, "grad", side) for side in ("hack", "clean"))
    lengths = [int(r.completion.sum(1).unique().numel()) for r in (make_pairs().hack, make_pairs().clean)]
    assert min(lengths) > 1, "all completions are of one length, so this says nothing"
    own = persona(policy, "grad").fit(policy, 0).vectors
    per_token = {
        s: (hack[s] / make_pairs().hack.completion.sum(1)[:, None] - clean[s] / make_pairs().clean.completion.sum(1)[:, None]).mean(
            0
        )
        for s in own
    }
    assert any(not torch.allclose(v, per_token[s] / per_token[s].norm(), atol=1e-3) for s, v in own.items())


@pytest.mark.parametrize("kind", KINDS)
def test_refresh_changes_a_persona_direction_once_the_policy_has_moved(kind: str) -> None:
    """An earlier form had a refresh that silently did nothing."""
    policy = make_policy(SPECS["svd"])
    route = MaskRoute(MaskSpec(score=kind, refresh_every=5), persona(policy, kind))  # pyright: ignore[reportArgumentType]
    assert route.refresh(policy, 0) is None
    first = route.directions
    with torch.no_grad():
        for p in policy.adapters.kept_parameters().values():
            p += 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
    for step in (1, 4, 6):
        assert route.refresh(policy, step) is None
        assert route.directions is first
    overlap = route.refresh(policy, 5)
    assert route.directions is not first
    assert route.directions.provenance.step == 5
    cosines = [float((v * route.directions.vectors[s]).sum()) for s, v in first.vectors.items()]
    assert overlap == pytest.approx(sum(cosines) / len(cosines), abs=1e-12)
    assert overlap is not None
    assert overlap < 0.999
    again = route.refresh(policy, 10)
    assert again == pytest.approx(1.0, abs=1e-12)


def test_directions_of_another_space_have_no_overlap() -> None:
    """Also if one has fewer sites, or another kind of feature of the same shape; a refresh that meets such directions says so."""
    policy = make_policy(SPECS["lora"])
    own = random_directions(policy, "grad")
    first, *others = own.vectors
    fewer = replace(own, vectors={first: own.vectors[first]})
    longer = replace(own, vectors={**own.vectors, first: own.vectors[first].flatten()})
    kind = replace(own, provenance=replace(own.provenance, kind="full"))
    assert others
    for one, other in ((own, fewer), (fewer, own), (own, longer), (own, kind)):
        with pytest.raises(ValueError, match=r"no overlap.*set route.directions = None"):
            one.overlap(other)
    route = MaskRoute(MaskSpec("grad"), replace(FixedFitter(own), refreshes=True))
    route.directions = fewer
    with pytest.raises(ValueError, match="no overlap"):
        route.refresh(policy, 5)


@pytest.mark.parametrize("route_kind", ["mask", "erase"])
def test_a_random_control_survives_refresh(route_kind: str) -> None:
    """The original's random control was cancelled, because a refresh overwrote it."""
    policy = make_policy(SPECS["svd"])
    fitter = HaarFitter(persona(policy, "grad") if route_kind == "mask" else TopKFitter("grad", make_pairs(), k=2), seed=3)
    route = MaskRoute(MaskSpec(refresh_every=1), fitter) if route_kind == "mask" else EraseRoute(EraseSpec(refresh_every=1), fitter)
    route.refresh(policy, 0)
    before = {s: v.clone() for s, v in route.directions.vectors.items()}
    with torch.no_grad():
        for p in policy.adapters.kept_parameters().values():
            p += 1
    for step in range(1, 7):
        assert route.refresh(policy, step) is None
    assert all(torch.equal(v, before[s]) for s, v in route.directions.vectors.items())


def test_haar_is_uniform_on_the_sphere() -> None:
    """Mean 0 and covariance I/d over draws, at one site."""
    policy = make_policy(SPECS["svd"])
    like = FixedFitter(persona(policy, "grad").fit(policy, 0))
    site = "blocks.0.attn.q"
    draws = torch.stack([HaarFitter(like, seed).fit(policy, 0).vectors[site] for seed in range(400)])
    d = draws.shape[1]
    assert draws.mean(0).abs().max() < 5 / (400 * d) ** 0.5
    assert (draws.T @ draws / 400 - torch.eye(d, dtype=torch.float64) / d).abs().max() < 5 / d / 400**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_does_not_see_the_quarantine(kind: str) -> None:
    policy = make_policy(SPECS["lora"])
    one, scores = persona(policy, kind).fit(policy, 0), collect(policy, make_rollouts(), kind, policy.adapters.coordinates())
    with torch.no_grad():
        for p in policy.adapters.quarantine_parameters().values():
            p += 3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
    two, again = persona(policy, kind).fit(policy, 0), collect(policy, make_rollouts(), kind, policy.adapters.coordinates())
    assert all(torch.equal(v, two.vectors[s]) for s, v in one.vectors.items())
    assert all(torch.equal(f.values(), again[s].values()) for s, f in scores.items())
    policy.adapters.sites["blocks.0.attn.q"].kept.B.data += 1.0  # pyright: ignore
    assert not all(torch.equal(v, persona(policy, kind).fit(policy, 0).vectors[s]) for s, v in one.vectors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_collect_touches_no_gradient_and_no_switch(kind: str) -> None:
    policy = make_policy(SPECS["lora"])
    before = run(policy, MaskRoute(MaskSpec(score="none"), None), make_batch(6))
    grads = {n: (p.grad, None if p.grad is None else p.grad.clone()) for n, p in policy.model.named_parameters()}
    with torch.no_grad():
        logits = policy.model(make_rollouts().tokens)
        features = collect(policy, make_rollouts(), kind, policy.adapters.coordinates())
        assert torch.equal(policy.model(make_rollouts().tokens), logits)
    assert not any(f.values().requires_grad for f in features.values())
    for name, p in policy.model.named_parameters():
        assert p.grad is grads[name][0], name
        assert p.grad is None or torch.equal(p.grad, grads[name][1])
    assert before.quarantine


def test_top_k_axes_are_those_of_the_stacked_differences() -> None:
    """Orthonormal, in the span of the differences, most pairs on the positive side, none from under the noise floor."""
    policy = make_policy(SPECS["svd"])
    own = TopKFitter("grad", make_pairs(), k=3).fit(policy, 7)
    hack, clean = (written_features(policy, "grad", side) for side in ("hack", "clean"))
    singular = {site: torch.linalg.svdvals(hack[site] - clean[site])[:3] for site in hack}
    floor = torch.cat(list(singular.values())).quantile(0.25)
    assert any((s < floor).any() for s in singular.values())
    for site, axes in own.vectors.items():
        difference = hack[site] - clean[site]
        assert len(axes) == int((singular[site] >= floor).sum())
        assert torch.allclose(axes @ axes.T, torch.eye(len(axes), dtype=torch.float64), rtol=0, atol=1e-10)
        along = difference @ axes.T
        assert torch.allclose(along.norm(dim=0), singular[site][: len(axes)], rtol=1e-8)
        assert ((along > 0).sum(0) > len(difference) / 2).all()  # 5 pairs: no ties
    assert own.provenance.fitter == "top3"
    assert own.provenance.step == 7


def test_a_tied_vote_goes_to_the_mean_and_not_to_the_svd() -> None:
    """Even numbers of pairs tie; the sign that LAPACK happens to give must not decide."""
    policy, ties = make_policy(SPECS["svd"]), 0
    own = TopKFitter("grad", make_pairs(4), k=3, noise_quantile=0.0).fit(policy, 0)
    hack, clean = (written_features(policy, "grad", side, 4) for side in ("hack", "clean"))
    for site, axes in own.vectors.items():
        along = (hack[site] - clean[site]) @ axes.T
        tied = (along > 0).sum(0) == 2
        ties += int(tied.sum())
        assert (along.sum(0)[tied] > 0).all()
    assert ties > 0


def test_haar_axes_for_erase_are_orthonormal() -> None:
    for name in ("svd", "lora"):
        policy = make_policy(SPECS[name])
        own = HaarFitter(TopKFitter("grad", make_pairs(), k=3, noise_quantile=0.0), 1).fit(policy, 0)
        for site, axes in own.vectors.items():
            assert axes.shape == (3, *policy.adapters.scored(site).shape)
            assert torch.allclose(axes.flatten(1) @ axes.flatten(1).T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_whose_sides_are_the_same_have_no_direction(kind: str) -> None:
    """Also where one side is padded otherwise, so that they differ by rounding: noise over its norm would look like a direction."""
    policy, side = make_policy(SPECS["svd"]), make_rollouts(3)
    for other in (side, make_rollouts(3, left=True)):
        with pytest.raises(ValueError, match="hack and clean sides"):
            persona(policy, kind, PairBatch(side, other, "same")).fit(policy, 0)


def test_pairs_must_be_aligned_and_units_need_a_norm() -> None:
    with pytest.raises(ValueError, match="3 hack and 2 clean"):
        PairBatch(make_rollouts(3), make_rollouts(2), "")
    for bad in (torch.zeros(3), torch.full((3,), float("nan"))):
        with pytest.raises(ValueError, match="norm 0"):
            units({"a site": bad})


def test_directions_round_trip_with_their_provenance(tmp_path: Path) -> None:
    policy = make_policy(SPECS["lora"])
    for own in (persona(policy, "full").fit(policy, 15), HaarFitter(persona(policy, "grad"), 8).fit(policy, 5)):
        own.save(tmp_path / "d.safetensors")
        again = Directions.load(tmp_path / "d.safetensors")
        assert again.provenance == own.provenance
        assert again.vectors.keys() == own.vectors.keys()
        assert all(torch.equal(v, again.vectors[s]) for s, v in own.vectors.items())
        assert again.overlap(own) == pytest.approx(1.0)
    assert persona(policy, "grad").fit(policy, 15).provenance == directions_module.Provenance(
        "persona", "grad", "pairs-hash", policy.adapters.base_hash, 15, None
    )


def test_the_base_hash_is_of_the_frozen_weights_alone() -> None:
    policy = make_policy(SPECS["svd"])
    assert policy.adapters.base_hash == make_policy(SPECS["lora"], scale=3.0).adapters.base_hash
    with torch.no_grad():
        policy.model.blocks[1].mlp.down.weight[0, 0] += 1e-6  # pyright: ignore
    assert policy.adapters.base_hash != make_policy(SPECS["svd"]).adapters.base_hash
    assert make_model().blocks[1].mlp.down.weight.shape == (16, 40)  # pyright: ignore
