"""Numbers that would be wrong without an error: padding, frozen factors, rounding, hooks that do not run, weights not hashed."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
import torch
from families import make_family
from mask_oracle import FixedFitter, erase_route, random_directions, run
from tiny_policy import SPECS, make_batch, make_policy, make_rollouts
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec, Policy, Rollouts, attach
from mi_route2.adapters import export_merged, load_adapters, save_adapters, save_pretrained
from mi_route2.adapters.gradients import DiagonalGrad, MatrixGrad
from mi_route2.adapters.io import TENSORS
from mi_route2.adapters.svd import SVD
from mi_route2.probes.fingerprint import Fingerprint
from mi_route2.rollouts import call_with_mask
from mi_route2.routing import (
    PairBatch,
    PersonaFitter,
    TopKFitter,
    group_advantages,
)
from mi_route2.routing.canary import Canary
from mi_route2.routing.directions import ActivationReader, collect, compare, floors
from mi_route2.routing.mask import cosine
from mi_route2.routing.routes import hack_component
from mi_route2.vllm import VllmSampler
from mi_route2.vllm.sampler import _logprobs

LORA = AdapterSpec("lora", rank=2, quarantine_rank=2)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# ---- padding


def test_a_completion_behind_padding_is_refused() -> None:
    tokens, real = torch.tensor([[3, 4, 0, 0, 5, 6]]), torch.tensor([[1, 1, 0, 0, 1, 1]])
    with pytest.raises(
        ValueError, match=r"in rollout 0 a completion follows padding.*left of the prompt or right of the completion"
    ):
        Rollouts(tokens, real, torch.tensor([[0, 0, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"a completion follows padding.*give each rollout a prompt"):
        Rollouts(torch.tensor([[0, 0, 5, 6]]), torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="have no tokens"):
        Rollouts(*(torch.zeros(1, 0, dtype=torch.long) for _ in range(3)))
    Rollouts(tokens, real, torch.tensor([[0, 0, 0, 0, 0, 1]]))  # padding within a prompt


class Wrapped(nn.Module):
    """A model whose signature does not tell that it takes positions, as that of a wrapper with a value head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=24))

    def forward(self, input_ids: Tensor, **given: object) -> object:
        return self.inner(input_ids, **given)


@pytest.mark.parametrize("kind", ["act", "grad", "full"])
def test_pairs_that_are_nan_are_not_left_out_of_a_direction_in_silence(kind: Literal["act", "grad", "full"]) -> None:
    """A comparison with the floor of rounding errors would take NaN for a 0."""
    policy, hack, clean = make_policy(SPECS["lora"]), make_rollouts(5), make_rollouts(5, seed=3)
    policy.model.embed.weight.data[12] = torch.nan  # pyright: ignore
    known = [Rollouts(side.tokens.where(side.tokens != 12, 3), side.attention, side.completion) for side in (hack, clean)]
    assert PersonaFitter("persona", kind, PairBatch(*known, "")).fit(policy, 0).vectors
    known[0].tokens[2, 1] = 12
    for fitter in (PersonaFitter("persona", kind, PairBatch(*known, "")), TopKFitter(kind, PairBatch(*known, ""))):
        with pytest.raises(ValueError, match=r"pairs \[2\] have activations or gradients at .* that are NaN or infinite"):
            fitter.fit(policy, 0)


def autocast(model: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call_with_mask(model, tokens, attention)


def test_features_under_autocast_have_the_digits_of_what_the_linears_saw() -> None:
    """In half precision a contrast of a quarter of its sides would count as a rounding error. Oracle: float64."""
    policy = make_policy(SPECS["svd"], dtype=torch.float32)
    policy, rollouts, seen = Policy(policy.model, policy.adapters, autocast), make_rollouts(), dict[str, Tensor]()
    for site, module in policy.adapters.modules.items():
        module.register_forward_pre_hook(lambda _, given, site=site: seen.__setitem__(site, given[0].double()))
    basis = policy.adapters.coordinates()
    for site, feature in collect(policy, rollouts, "act", basis).items():
        means = torch.stack([x[real].mean(0) for x, real in zip(seen[site], rollouts.predictors, strict=True)])
        torch.testing.assert_close(feature.values().double(), means @ basis[site].double().mT, rtol=0, atol=1e-6)
    alike = Rollouts(rollouts.tokens.clone(), rollouts.attention, rollouts.completion)
    alike.tokens[:, 5] = alike.tokens[:, 5] % 11 + 1
    assert len(PersonaFitter("persona", "act", PairBatch(rollouts, alike, "")).fit(policy, 0).vectors) == 12


def test_scores_under_autocast_have_the_digits_of_their_features() -> None:
    """Flags of a module's own are decided in the forward, and so under its autocast. Oracle: float64."""
    policy, batch, seen = make_policy(SPECS["svd"], dtype=torch.float32), make_batch(), dict[str, Tensor]()
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    route = MaskRoute.from_pairs(PairBatch(make_rollouts(5), make_rollouts(5, seed=3), ""), MaskSpec("act"))
    route.refresh(policy, 0)
    assert route.directions is not None
    for site, module in policy.adapters.modules.items():
        module.register_forward_pre_hook(lambda _, given, site=site: seen.__setitem__(site, given[0].detach().double()))
    policy = Policy(policy.model, policy.adapters, autocast)
    scores = route.backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits)).scores
    cosines = []
    for site, v in route.directions.vectors.items():
        means = torch.stack([x[real].mean(0) for x, real in zip(seen[site], batch.rollouts.predictors, strict=True)])
        features = means @ policy.adapters.sites[site].kept.Vh.double().mT  # pyright: ignore
        cosines.append(torch.cosine_similarity(features, v.double()[None], dim=1))
    assert scores is not None
    torch.testing.assert_close(scores, torch.stack(cosines).mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["svd", "lora"])
@pytest.mark.parametrize(
    "spec",
    [MaskSpec("act"), MaskSpec("act", score_policy="ablated"), MaskSpec("grad"), MaskSpec("full")],
    ids=lambda spec: f"{spec.score}-{spec.unit}-{spec.score_policy}",
)
def test_a_whole_step_under_autocast_is_the_one_whose_forward_is(spec: MaskSpec, name: str) -> None:
    """Autocast reaches the backward and the end of a step too, whose sums would be rounded to half precision."""
    batch, runs = make_batch(), []
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    for whole in (False, True):
        policy = make_policy(SPECS[name], dtype=torch.float32)
        policy = Policy(policy.model, policy.adapters, autocast)
        route = MaskRoute.from_pairs(PairBatch(make_rollouts(5), make_rollouts(5, seed=3), ""), spec)
        with torch.autocast("cpu", torch.bfloat16, enabled=whole):
            route.refresh(policy, 0)
            decision = route.backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits).sum(1) * part.advantages)
        assert route.directions is not None
        assert decision.scores is not None
        gradients = [p.grad for p in policy.adapters.kept_parameters().values()]
        runs.append([*route.directions.vectors.values(), decision.scores, *gradients])
    for plain, under in zip(*runs, strict=True):
        torch.testing.assert_close(under, plain, rtol=0, atol=0)


def test_what_is_kept_is_computed_outside_of_autocast(tmp_path: Path) -> None:
    """Coordinates that a cache keeps, merged weights, what an erase route removes, fingerprints."""
    q, p = (torch.linalg.qr(torch.randn(1024, 1024, generator=seeded()))[0] for _ in range(2))
    weight, policy = (q * torch.arange(1, 1025) ** -0.5) @ p, make_policy(SPECS["lora"], dtype=torch.float32)
    plain = Policy(policy.model, policy.adapters, autocast)
    axes, fingerprint = torch.linalg.qr(p[:, :3])[0].mT, Fingerprint.draw(policy.adapters, width=8, generator=seeded())
    found: list[list[Tensor]] = []
    for casts in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            svd = decompose(weight, tmp_path / str(casts), rank=4)
            with policy.adapters.merged():
                merged = [module.merged_weight for module in policy.adapters.modules.values()]
            found.append([svd.U, svd.S, svd.Vh, *merged, hack_component(p[0], axes), fingerprint(plain, make_rollouts(4))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_diagonal_gradient_that_nearly_cancels_has_its_digits(dtype: torch.dtype) -> None:
    """Products are summed as they are, and not rounded to half precision before. Oracle: float64."""
    generator = seeded()
    h = torch.randn(4, 1, 64, generator=generator) + 0.03 * torch.randn(4, 16, 64, generator=generator)
    dy = torch.randn(4, 16, 64, generator=generator)
    gradient = DiagonalGrad(h.to(dtype), (dy - dy.mean(1, keepdim=True)).to(dtype))
    exact = (gradient.h.double() * gradient.dy.double()).sum(1)
    torch.testing.assert_close(gradient.values().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.weighted(torch.ones(4, 16)).double(), exact.sum(0), rtol=1e-5, atol=1e-5)


def written(_: nn.Module, given: object, mask: Tensor, value: float, counted: bool) -> None:
    (mask if counted else mask.data).fill_(value)


@pytest.mark.parametrize("how", ["returned", "written in place", "written past torch's count"])
@pytest.mark.parametrize("value", [-0.5, 1.5, torch.nan, torch.inf])
def test_a_mask_that_is_none_is_refused(value: float, how: str) -> None:
    """-0.5 would train the kept adapter uphill."""
    policy, route = make_policy(SPECS["lora"]), MaskRoute.from_flags(torch.zeros(6, dtype=torch.bool))
    point = policy.adapters.sites["blocks.0.attn.q"].hook_mask
    in_place = partial(written, value=value, counted=how == "written in place")
    hook = in_place if how != "returned" else lambda _, given, mask: torch.full_like(mask, value)
    handle = point.register_forward_hook(hook)
    with pytest.raises(ValueError, match=rf"blocks.0.attn.q.hook_mask returned {value}, but a mask lies between 0"):
        route.backward(policy, make_batch(), lambda logits, part: -part.rollouts.logprobs(logits))
    handle.remove()
    point.register_forward_hook(lambda _, given, mask: mask.bool())
    route.backward(policy, make_batch(), lambda logits, part: -part.rollouts.logprobs(logits))


def test_a_merged_weight_beyond_its_type_is_not_written(tmp_path: Path) -> None:
    adapters = attach(make_family("Llama").half(), "blocks.*.mlp.down", spec=LORA, generator=seeded())
    for p in adapters.kept_parameters().values():
        p.data.fill_(300.0)
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight in torch.float16 holds values that are not finite"):
        export_merged(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# ---- rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_an_advantage_of_0(dtype: torch.dtype) -> None:
    """Of a rounding error Adam would make a step, and its sign a flag."""
    generator = seeded()
    for size in range(1, 40):
        reward = torch.rand(1, generator=generator, dtype=dtype)
        groups = torch.arange(2 * size) // size
        rewards = torch.cat([reward.expand(size), 3 * reward.expand(size)])
        assert not group_advantages(rewards, groups).any()
        rewards[0] = 9.0
        if size > 1:
            assert not group_advantages(rewards, groups, torch.arange(2 * size) > 0)[1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_advantages_of_half_precision_are_of_the_mean(dtype: torch.dtype) -> None:
    """A count in bfloat16 ends at 256, and a sum in float16 at 65504."""
    rewards = (900 * torch.rand(600, generator=seeded())).to(dtype)
    found, mean = group_advantages(rewards, torch.zeros(600, dtype=torch.long)), rewards.double().mean()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), rewards.double() - mean, rtol=0, atol=500 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.bfloat16, torch.float32]], ids=["cast", "cast and cast back"])
def test_coordinates_are_those_of_the_weights_as_they_were_cast(dtypes: list[torch.dtype]) -> None:
    """Torch does not count ``model.to`` as a write; a process that loads the directions has coordinates of the cast weights."""
    policy = make_policy(SPECS["lora"], dtype=torch.float32)
    weight = policy.adapters.sites["blocks.0.attn.q"].weight
    weight.copy_(torch.linalg.qr(torch.randn(16, 16, generator=seeded()))[0])  # no singular vector is more than rounding's choice
    policy.adapters.coordinates()
    for dtype in dtypes:
        policy.model.to(dtype)
    for site, vectors in policy.adapters.coordinates().items():
        assert torch.equal(vectors, decompose(policy.adapters.sites[site].weight).Vh)


def test_a_copy_does_not_take_coordinates_of_former_weights_for_its_own() -> None:
    """Torch counts the writes of a copied weight from 0, as those of the original when its coordinates were computed."""
    policy = make_policy(SPECS["lora"])
    for module in policy.adapters.modules.values():
        module.base.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    policy.adapters.coordinates()
    with torch.no_grad():
        for module in policy.adapters.modules.values():
            module.weight.copy_(torch.randn(module.weight.shape, generator=seeded()))
    for site, vectors in copy.deepcopy(policy).adapters.coordinates().items():
        assert torch.equal(vectors, decompose(policy.adapters.sites[site].weight).Vh)


def test_activations_that_cancel_have_no_cosine() -> None:
    x = torch.randn(1, 3, 16, generator=seeded())
    x = 1000 * torch.cat([x, -x.flip(1)], 1)[:, torch.randperm(6, generator=seeded())]
    v = torch.randn(16, generator=seeded())
    for padding in (0, 1, 3, 7):
        reader = ActivationReader(torch.arange(6 + padding)[None] < 6, {"s": torch.eye(16)})
        reader.read("s", torch.cat([x, torch.full((1, padding, 16), 9.0)], 1))
        inner, norms, magnitude = compare(reader.features["s"], v)
        assert cosine(inner, norms, v.norm(), floors({"s": magnitude}, "act")["s"]).tolist() == [0.0]


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-3, 2e-4])
def test_the_norm_of_a_gradient_that_nearly_cancels_has_its_digits(share: float) -> None:
    """Keys alike and output gradients that sum to 0: |G| is ``share`` of what was summed. Oracle: float64."""
    generator = seeded()
    h = torch.randn(4, 1, 128, generator=generator) + share * torch.randn(4, 16, 128, generator=generator)
    dy = torch.randn(4, 16, 128, generator=generator)
    dy = dy - dy.mean(1, keepdim=True)
    exact = torch.bmm(dy.double().mT, h.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(MatrixGrad(h, dy).norms().double(), exact, rtol=0.02, atol=0)


def test_a_fingerprint_is_of_real_gradients_alone() -> None:
    """q and k of a prompt of one token and a completion of one: 0 in theory, and rounding of any direction in practice."""
    policy = make_policy(SPECS["lora"])
    fingerprint = Fingerprint.draw(policy.adapters, width=8, generator=seeded())
    other = Fingerprint(
        {site: u * 1e12 if site[-1] in "qk" else u for site, u in fingerprint.left.items()}, fingerprint.right
    )  # what rounding there is would be seen
    short = Rollouts.from_lists([[3], [4], [5]], [[7], [8], [9]], pad=0)
    assert torch.equal(fingerprint(policy, short), other(policy, short))
    assert fingerprint(policy, short).norm(dim=1).min() > 0.1
    assert not torch.equal(fingerprint(policy, make_rollouts(3)), other(policy, make_rollouts(3)))


# ---- frozen factors, and models that write into what they get


def test_nothing_is_erased_from_a_frozen_adapter() -> None:
    policy = make_policy(SPECS["lora"])
    route = erase_route(policy)
    policy.adapters.scored("blocks.1.attn.q").requires_grad_(False)
    with pytest.raises(ValueError, match=r"kept adapter of blocks\.1\.attn\.q is frozen.*requires_grad_\(True\)"):
        run(policy, route, make_batch())


class InPlace(nn.Module):
    """A residual stream that is added to in place, as Falcon's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.unembed = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)

    def forward(self, tokens: Tensor, **_given: object) -> Tensor:
        x = self.embed(tokens)
        y = self.up(x)
        y += x
        return self.unembed(torch.relu_(y))


def test_a_full_score_leaves_a_model_its_writes_in_place() -> None:
    torch.manual_seed(0)
    model = InPlace().double()
    policy = Policy(model, attach(model, "*", spec=LORA, generator=seeded()))
    features = collect(policy, rollouts := make_rollouts(3), "full", {})
    weights = {"up": model.up.weight, "unembed": model.unembed.weight}
    for i in range(3):
        one = rollouts.rows(torch.tensor([i]))
        for weight in weights.values():
            weight.requires_grad_(True)
        with policy.adapters.reference():
            gradients = torch.autograd.grad(-policy.logprobs(one).sum(), list(weights.values()))
        for (site, _), gradient in zip(weights.items(), gradients, strict=True):
            torch.testing.assert_close(features[site].values()[i], gradient)


# ---- hooks


def test_a_hook_on_a_gradient_that_waits_for_its_flag_is_refused() -> None:
    policy = make_policy(SPECS["lora"])
    first = next(iter(policy.adapters.kept_parameters().values()))
    handle = first.register_hook(torch.zeros_like)
    directions = random_directions(policy, "grad")
    waiting, now = (MaskRoute(MaskSpec(score_policy=p), FixedFitter(directions)) for p in ("live", "ablated"))  # pyright: ignore
    for route in (waiting, now):
        route.refresh(policy, 0)
    assert not run(policy, now, make_batch()).kept[next(iter(policy.adapters.kept_parameters()))].any()
    with pytest.raises(ValueError, match=r"blocks.0.attn.q.A has a hook on its gradient, which would not fire"):
        run(policy, waiting, make_batch())
    handle.remove()
    run(policy, waiting, make_batch())


# ---- files


class Scaled(nn.Linear):
    """A Linear with a gain, and a module within."""

    def __init__(self, d: int) -> None:
        super().__init__(d, d, bias=False)
        self.gain, self.shift = nn.Parameter(torch.ones(d)), nn.Linear(d, d)

    def forward(self, input: Tensor) -> Tensor:
        return self.shift(super().forward(input) * self.gain)


class Toy(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.inner, self.unembed = nn.Embedding(13, 8), inner or nn.Linear(8, 8, bias=False), nn.Linear(8, 13)

    def forward(self, tokens: Tensor, **_given: object) -> Tensor:
        x = self.embed(tokens)
        return self.unembed(x + self.inner(x))


@pytest.mark.parametrize("part", ["gain", "shift.weight", "shift.bias", "parametrizations.weight.original0"])
def test_the_hash_of_the_base_counts_all_that_a_linear_has(part: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy(Scaled(8) if part[0] in "gs" else parametrizations.weight_norm(nn.Linear(8, 8)))
    adapters = attach(model, "unembed", spec=LORA, generator=seeded())
    save_adapters(adapters, tmp_path / "file.safetensors")
    load_adapters(adapters, tmp_path / "file.safetensors")
    model.inner.get_parameter(part).data += 1
    with pytest.raises(ValueError, match="was trained on other base weights"):
        load_adapters(adapters, tmp_path / "file.safetensors")


def turned(weight: Tensor, cache_dir: Path | None = None, rank: int | None = None) -> SVD:
    """Another choice of the singular vectors of a weight whose singular values are all equal."""
    svd, (q, _) = decompose(weight, cache_dir, rank=rank), torch.linalg.qr(torch.randn(8, 8, generator=seeded()))
    return SVD(svd.U @ q, svd.S, q.mT @ svd.Vh)


attaching = import_module("mi_route2.adapters.attach")  # a function of that name hides it
decompose = attaching.decompose


def test_singular_vectors_are_compared_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base = Toy()
    base.inner.weight.data.copy_(torch.linalg.qr(torch.randn(8, 8))[0])  # pyright: ignore

    def write(folder: Path, decomposed: Callable[..., SVD]) -> None:
        monkeypatch.setattr(attaching, "decompose", decomposed)
        adapters = attach(copy.deepcopy(base), "inner", spec=AdapterSpec("svd"), generator=seeded())
        for p in adapters.kept_parameters().values():
            p.data.copy_(torch.linspace(-2, 2, 8))
        save_pretrained(adapters, folder)

    write(tmp_path / "turned", turned)
    write(tmp_path / "one", decompose)
    adapters = attach(copy.deepcopy(base), "inner", spec=AdapterSpec("svd"), generator=seeded())
    load_adapters(adapters, tmp_path / "one" / TENSORS)
    told = re.escape(f"the singular vectors of inner differ from those where {tmp_path / 'turned'}")
    with pytest.raises(ValueError, match=told):
        load_adapters(adapters, tmp_path / "turned" / TENSORS)
    with pytest.raises(ValueError, match=told):
        Canary.from_pretrained(copy.deepcopy(base), [tmp_path / "one", tmp_path / "turned"])


# ---- wrong calls


def test_vllm_is_asked_for_no_prompt_and_torch_drops_nothing_beside_it(tmp_path: Path) -> None:
    model = make_family("Llama").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5  # pyright: ignore
    policy = Policy(model, attach(model, "blocks.*", spec=LORA, generator=seeded()))
    found = [_logprobs(policy, [3, 4, 5], [6, 7]) for _ in range(2)]
    assert torch.equal(*found)
    sampler = VllmSampler(tmp_path, dtype=torch.float32)
    assert sampler(policy, [], max_new=1, temperature=1.0, generator=seeded(), ends=(2,)) == []
