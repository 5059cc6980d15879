"""Numbers that would be wrong without an error: padding, frozen factors, rounding, hooks that do not run, weights not hashed."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from families import make_family
from mask_oracle import FixedFitter, assert_same, erase_route, mask_route, random_directions, run
from tiny_policy import SPECS, make_batch, make_model, make_policy, make_rollouts, named_policy
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrizations
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForCausalLM

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec, Policy, Rollouts, attach, open_host
from mi_route2.adapters import export_merged, load_adapters, save_adapters, save_pretrained
from mi_route2.adapters.gradients import Diagonal, Pairs
from mi_route2.adapters.io import TENSORS
from mi_route2.adapters.svd import SVD
from mi_route2.rollouts import call_with_mask, packed_forward
from mi_route2.routing import (
    Directions,
    OpenRoute,
    OpenSpec,
    PairBatch,
    PersonaFitter,
    StepContext,
    TopKFitter,
    group_advantages,
)
from mi_route2.routing.canary import Canary
from mi_route2.routing.directions import ActivationReader, collect, floors
from mi_route2.routing.mask import cosine
from mi_route2.routing.routes import hack_component
from mi_route2.vllm import VllmSampler
from mi_route2.vllm.sampler import _logprobs
from probes.fingerprint import Fingerprint

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


def other_models() -> dict[str, nn.Module]:
    sizes = {"vocab_size": 50, "max_position_embeddings": 32}
    bart = BartConfig(**sizes, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    roberta = RobertaConfig(**sizes, **small, is_decoder=True, pad_token_id=1)
    torch.manual_seed(0)
    return {"bart": BartForCausalLM(bart), "roberta": RobertaForCausalLM(roberta), "wrapped": Wrapped()}


@pytest.mark.parametrize("name", ["bart", "roberta", "wrapped"])
def test_a_model_that_counts_padding_is_refused_under_left_padding_alone(name: str) -> None:
    model = other_models()[name]
    policy = Policy(model, attach(model, "*", spec=LORA, generator=seeded()))
    assert policy.logprobs(make_rollouts(3)).isfinite().all()
    with pytest.raises(ValueError, match=r"gives tokens behind padding other logits than alone.*pad on the right"):
        policy.logprobs(make_rollouts(3, left=True))


@pytest.mark.parametrize("kind", ["act", "grad", "full"])
def test_features_are_of_no_forward_that_a_policy_refuses(kind: Literal["act", "grad", "full"]) -> None:
    """Activations would count the padding of pairs, and give a direction, where log-probabilities are refused."""
    model = other_models()["wrapped"]
    policy = Policy(model, attach(model, "*", spec=LORA, generator=seeded()))
    pairs = PairBatch(make_rollouts(3, left=True), make_rollouts(3, seed=3, left=True), "")
    with pytest.raises(ValueError, match="gives tokens behind padding other logits than alone"):
        PersonaFitter("persona", kind, pairs).fit(policy, 0)
    model = make_family("Llama")
    policy = Policy(model, attach(model, "blocks.*", spec=LORA, generator=seeded()))
    foreign = Rollouts.from_lists([[1], [1]], [[2, 3], [10_000, 4]], pad=0)
    with pytest.raises(ValueError, match="10000 is not a token of this model"):
        PersonaFitter("persona", kind, PairBatch(foreign, foreign, "")).fit(policy, 0)


def test_nan_behind_padding_and_features_that_are_nan_are_refused() -> None:
    """A NaN would be compared as no more than any threshold, and its rollout would teach the kept adapter."""
    model = make_family("Llama").double()
    model.set_attn_implementation("eager")
    policy = Policy(model, attach(model, "blocks.*", spec=LORA, generator=seeded()))
    with pytest.raises(ValueError, match="makes NaN of it"):
        policy.logprobs(make_rollouts(3, left=True))
    policy, batch = make_policy(SPECS["lora"]), make_batch()
    policy.model.pos_embed.weight.data[9] = torch.nan  # a position that the longer rollouts reach  # pyright: ignore
    route = MaskRoute(MaskSpec("act"), FixedFitter(random_directions(policy, "act")))
    route.refresh(policy, 0)
    with pytest.raises(ValueError, match=r"rollouts \[.*\] have activations or gradients that are NaN"):
        route.backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits).sum(1))


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


@pytest.mark.parametrize("unit", ["rollout", "pooled"])
def test_scores_under_autocast_have_the_digits_of_their_features(unit: Literal["rollout", "pooled"]) -> None:
    """Flags of a module's own are decided in the forward, and so under its autocast. Oracle: float64."""
    policy, batch, seen = make_policy(SPECS["svd"], dtype=torch.float32), make_batch(), dict[str, Tensor]()
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    route = MaskRoute.from_pairs(PairBatch(make_rollouts(5), make_rollouts(5, seed=3), ""), MaskSpec("act", unit))
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


@pytest.mark.parametrize("name", ["svd", "lora", "lora-stacked"])
@pytest.mark.parametrize(
    "spec",
    [MaskSpec("act"), MaskSpec("act", score_policy="ablated"), MaskSpec("grad"), MaskSpec("full", "rollout")],
    ids=lambda spec: f"{spec.score}-{spec.unit}-{spec.score_policy}",
)
def test_a_whole_step_under_autocast_is_the_one_whose_forward_is(spec: MaskSpec, name: str) -> None:
    """Autocast reaches the backward and the end of a step too, whose sums would be rounded to half precision."""
    batch, runs = make_batch(), []
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    for whole in (False, True):
        policy = make_policy(SPECS[name.removesuffix("-stacked")], dtype=torch.float32)
        policy.adapters.stack = name.endswith("-stacked")
        policy = Policy(policy.model, policy.adapters, autocast)
        route = MaskRoute.from_pairs(PairBatch(make_rollouts(5), make_rollouts(5, seed=3), ""), spec, want_unrouted=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=whole):
            route.refresh(policy, 0)
            decision = route.backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits).sum(1) * part.advantages)
        assert route.directions is not None
        assert decision.scores is not None
        gradients = [p.grad for p in policy.adapters.kept_parameters().values()]
        runs.append([*route.directions.vectors.values(), decision.scores, *gradients, *decision.unrouted.values()])
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


def test_an_unrouted_gradient_of_half_precision_is_summed_as_the_routed_one() -> None:
    """Over many micro-batches; the second moment of an optimizer comes of it."""
    policy, batch = make_policy(SPECS["lora"], dtype=torch.bfloat16), make_batch(12)
    route = MaskRoute.from_flags(torch.zeros(12, dtype=torch.bool), want_unrouted=True)
    context = StepContext(seeded(), micro=1)
    decision = route.backward(policy, batch, lambda logits, part: -part.rollouts.logprobs(logits), context)
    for name, p in policy.adapters.kept_parameters().items():
        assert torch.equal(decision.unrouted[name], p.grad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_diagonal_gradient_that_nearly_cancels_has_its_digits(dtype: torch.dtype) -> None:
    """Products are summed as they are, and not rounded to half precision before. Oracle: float64."""
    generator = seeded()
    h = torch.randn(4, 1, 64, generator=generator) + 0.03 * torch.randn(4, 16, 64, generator=generator)
    dy = torch.randn(4, 16, 64, generator=generator)
    gradient = Diagonal(h.to(dtype), (dy - dy.mean(1, keepdim=True)).to(dtype))
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
        assert cosine(reader.features["s"], v, floors(reader.features, "act")["s"]).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_mean_for_sites_that_read_one_tensor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of a reader of its own, bit for bit, and none is used again after a write or for another tensor."""
    predictors, averaged = torch.arange(9)[None] < torch.tensor([5, 9, 0])[:, None], 0
    x, other = (torch.randn(3, 9, 16, generator=seeded()).to(dtype) for _ in range(2))
    x[0, 7], x[2, 0] = torch.nan, torch.inf
    sites = [*"qkvwt", "elsewhere.q"]
    basis = {site: torch.randn(4, 16, generator=seeded(), dtype=torch.float64) for site in ["attn." + s for s in sites] + sites}
    reader, average = ActivationReader(predictors, basis), ActivationReader._average

    def counted(self: ActivationReader, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal averaged
        averaged += 1
        return average(self, x)

    def check(site: str, x: Tensor, times: int) -> None:
        nonlocal averaged
        averaged = 0
        monkeypatch.setattr(ActivationReader, "_average", counted)
        reader.read(site, x.detach())
        monkeypatch.setattr(ActivationReader, "_average", average)
        alone = ActivationReader(predictors, basis)
        alone.read(site, x.clone())
        kept = torch.where(predictors[..., None], x, 0.0).to(reader._calls[site][-1].values().dtype)
        count = predictors.sum(dim=1).clamp_min(1)
        expected = kept.sum(dim=1) / count[:, None] @ basis[site].to(kept).mT
        assert averaged == times
        assert torch.equal(reader._calls[site][-1].values(), alone.features[site].values())
        assert torch.equal(reader._calls[site][-1].magnitude(), alone.features[site].magnitude())
        torch.testing.assert_close(alone.features[site].values(), expected, rtol=1e-5, atol=1e-5)

    check("attn.q", x, times=1)
    check("attn.k", x, times=0)
    check("attn.q", x, times=1)  # a second call: what lies in one buffer may be new without a count of its writes
    check("attn.k", x, times=0)
    x[1, 3] += 1
    check("attn.v", x, times=1)
    for site, written in (("attn.w", slice(None)), ("attn.t", (0, 1)), ("attn.q", (..., 3))):
        x.data[written] *= 2  # of which torch counts nothing
        check(site, x, times=1)
    check("attn.elsewhere.q", x, times=1)
    check("q", x, times=1)
    check("w", x.mT.contiguous().mT, times=1)
    with torch.inference_mode():
        frozen = other.clone()
        check("t", frozen, times=1)
        check("q", frozen, times=1)
    assert reader.features.keys() == {"attn.w", "attn.t", "attn.q", "attn.k", "attn.v", "attn.elsewhere.q", "q", "w", "t"}


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-3, 2e-4])
def test_the_norm_of_a_gradient_that_nearly_cancels_has_its_digits(share: float) -> None:
    """Keys alike and output gradients that sum to 0: |G| is ``share`` of what was summed. Oracle: float64."""
    generator = seeded()
    h = torch.randn(4, 1, 128, generator=generator) + share * torch.randn(4, 16, 128, generator=generator)
    dy = torch.randn(4, 16, 128, generator=generator)
    dy = dy - dy.mean(1, keepdim=True)
    exact = torch.bmm(dy.double().mT, h.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(Pairs(h, dy).norms().double(), exact, rtol=0.02, atol=0)


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


@pytest.mark.parametrize("frozen", [".B", ".A", "blocks.1."])
@pytest.mark.parametrize(
    "spec",
    [
        MaskSpec("grad"),
        MaskSpec("grad", unit="rollout", through="detach"),
        MaskSpec("full", unit="rollout", through="detach"),
        MaskSpec("act", through="detach"),
    ],
    ids=lambda spec: f"{spec.score}-{spec.unit}-{spec.through}",
)
def test_stacked_adapters_ask_the_gates_of_frozen_factors_too(spec: MaskSpec, frozen: str) -> None:
    runs = []
    for stack in (False, True):
        policy = make_policy(SPECS["lora"])
        policy.adapters.stack = stack
        for name, p in policy.adapters.kept_parameters().items():
            p.requires_grad_(frozen not in f".{name}" and not name.endswith(frozen))
        route = MaskRoute(spec, FixedFitter(random_directions(policy, spec.score)))  # pyright: ignore[reportArgumentType]
        route.refresh(policy, 0)
        runs.append(run(policy, route, make_batch()))
    plain, stacked = runs
    assert_same(stacked.kept, plain.kept)
    assert_same(stacked.quarantine, plain.quarantine)
    assert torch.equal(stacked.decision.flags, plain.decision.flags)


@pytest.mark.parametrize("both", [False, True], ids=["kept", "both"])
@pytest.mark.parametrize("frozen", ["blocks.0.attn.q.", "blocks.0.", ""])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("lora", MaskSpec("full", unit="rollout")),
        ("lora-stacked", MaskSpec("full", unit="rollout", through="detach")),
        ("svd-shared", MaskSpec("full", unit="rollout")),
        ("svd-fold", MaskSpec("grad", unit="rollout")),
        ("lora-shared", MaskSpec("grad")),
        ("svd-stacked", MaskSpec("full")),
        ("lora", MaskSpec("act")),
        ("lora", None),
    ],
)
def test_frozen_adapters_where_no_input_needs_a_gradient_are_scored_as_others(
    name: str, spec: MaskSpec | None, frozen: str, both: bool
) -> None:
    """Autograd runs nothing backwards there by itself. A frozen adapter learns nothing, and changes no flag and no other."""
    policy, batch = named_policy(name), make_batch()
    route = OpenRoute(OpenSpec()) if spec is None else mask_route(policy, spec)
    expected = run(policy, route, batch)
    for named in (policy.adapters.kept_parameters(), *([policy.adapters.quarantine_parameters()] if both else [])):
        for n, p in named.items():
            p.requires_grad_(not n.startswith(frozen))
    if spec is None and both and not frozen:
        with pytest.raises(ValueError, match=r"freeze no more than some of the adapters"):
            route.backward(policy, batch, lambda logits, batch: batch.rollouts.logprobs(logits).sum())
        return
    own = run(policy, route, batch)
    kept, quarantine = (
        {n: torch.zeros_like(g) if learns_not and n.startswith(frozen) else g for n, g in gradients.items()}
        for gradients, learns_not in ((expected.kept, True), (expected.quarantine, both))
    )
    assert_same(own.kept, kept)
    assert_same(own.quarantine, quarantine)
    if spec is not None:
        torch.testing.assert_close(own.decision.scores, expected.decision.scores, rtol=0, atol=1e-12)
        assert torch.equal(own.decision.flags, expected.decision.flags)


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


def test_reading_features_fires_no_hook_of_a_parameter() -> None:
    """An optimizer that steps within the backward would train on the pairs."""
    policy = make_policy(SPECS["lora"])
    embed = policy.model.embed.weight.requires_grad_(True)  # pyright: ignore[reportAttributeAccessIssue]
    fired: list[str] = []
    embed.register_hook(lambda gradient: fired.append("hook"))
    embed.register_post_accumulate_grad_hook(lambda p: fired.append("step"))
    collect(policy, make_rollouts(), "grad", {})
    assert fired == []
    assert embed.grad is None
    with policy.adapters.unrouted():
        policy.logprobs(make_rollouts()).sum().backward()
    assert fired == ["hook", "step"]


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


@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_of_ones_own_beside_other_hooks_is_still_asked_for(cached: bool) -> None:
    policy = make_policy(SPECS["lora"])

    def log(module: nn.Module, args: object, out: Tensor) -> None:
        return None

    for branch in policy.adapters.sites.values():
        for point in (branch.hook_kept_a, branch.hook_kept, branch.hook_quarantine):
            point.register_forward_hook(log)
        branch.hook_mask.register_forward_hook(log if cached else lambda module, args, out: torch.zeros_like(out))
    if cached:
        run(policy, OpenRoute(OpenSpec()), make_batch())
        return
    with pytest.raises(RuntimeError, match=r"hook_mask was hooked at .* and did not fire"):
        run(policy, OpenRoute(OpenSpec()), make_batch())


@pytest.mark.parametrize("gain", [2.0, 1.005])
@pytest.mark.parametrize("how", ["merged", "merged, later", "folded", "folded, later"])
def test_a_forward_of_ones_own_is_not_left_out_of_a_merged_or_folded_weight(how: str, gain: float) -> None:
    model = make_model()
    linear = model.blocks[0].attn.o  # pyright: ignore[reportAttributeAccessIssue]
    plain = linear.forward

    def patched() -> None:
        linear.forward = lambda x: gain * plain(x)

    spec = SPECS["svd-fold" if how.startswith("folded") else "lora"]
    if how == "folded":
        patched()
        with pytest.raises(ValueError, match=r"blocks.0.attn.o computes more than a matmul"):
            attach(model, "blocks.*", spec=spec, generator=seeded())
        return
    policy = Policy(model, attach(model, "blocks.*", spec=spec, generator=seeded()))
    if how == "merged":
        patched()
    context = policy.adapters.merged() if how.startswith("merged") else nullcontext()
    with pytest.raises(ValueError, match=r"blocks.0.attn.o computes more than a matmul"), context:  # noqa: PT012
        patched()
        policy.logprobs(make_rollouts())


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


def test_small_things_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: give the file in it"):
        Directions.load(tmp_path)
    model = Toy()
    model.inner.weight.data[0, 0] = torch.nan  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match=r"holds NaN or infinity, so it has no SVD: load the base model again, inner"):
        attach(model, "inner", spec=AdapterSpec("svd"), generator=seeded())

    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(input), None

    model = Toy(Pair(8, 8))
    attach(model, "inner", spec=LORA, generator=seeded())
    with pytest.raises(ValueError, match=r"inner is a Pair that returns a tuple, to which no adapter can add: leave it out"):
        model(torch.zeros(1, 2, dtype=torch.long))
    model = Toy()
    attach(model, "inner", spec=LORA, generator=seeded())
    x = torch.randn(2, 8)
    assert torch.equal(model.inner(input=x), model.inner(x))


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_full_backward_hook])
def test_stacked_adapters_run_one_by_one_under_a_hook_on_every_module(register: Callable[..., Any]) -> None:
    policy, seen = named_policy("lora-stacked"), list[str]()
    handle = register(lambda module, given, out: seen.append(type(module).__name__))
    with policy.adapters.unrouted():
        policy.logprobs(make_rollouts()).sum().backward()
        handle.remove()
        assert seen.count("LoRA") == 24
        policy.logprobs(make_rollouts())
    assert seen.count("LoRA") == 24


@pytest.mark.parametrize("how", ["merged", "folded"])
def test_an_argument_beside_the_input_is_not_lost(how: str) -> None:
    class Times(nn.Linear):
        def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return scale * super().forward(input)

    class Calling(Toy):
        def forward(self, tokens: Tensor, **_given: object) -> Tensor:
            return self.inner(self.embed(tokens), 2.0)

    torch.manual_seed(0)
    model, tokens = Calling(Times(8, 8)), torch.zeros(1, 2, dtype=torch.long)
    expected = model(tokens)
    adapters = attach(model, "inner", spec=AdapterSpec("svd", fold=how == "folded"), generator=seeded())
    with adapters.reference():
        assert torch.equal(model(tokens), expected)
    with adapters.merged() if how == "merged" else adapters.full(), torch.no_grad():
        with pytest.raises(ValueError, match="inner is called with more than its input"):
            model(tokens)


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


def test_no_tokens_are_refused_by_a_host_and_dropout_by_no_packed_forward() -> None:
    model = make_family("Llama").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3  # pyright: ignore
    packed_forward(model)
    assert model.training
    for shape in ((1, 0), (0, 3)):
        with pytest.raises(ValueError, match=r"give at least one sequence of at least one token"):
            open_host("torch", model).logits(torch.zeros(shape, dtype=torch.long))


def test_an_optimizer_calls_its_closure() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [p]}], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert (p < 1).all()


def test_an_unrouted_gradient_is_that_of_a_parameter_of_the_optimizer() -> None:
    """Of a copy of the policy it would be ignored, and of another shape it would be broadcast."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [p]}], lr=0.1)
    p.grad = torch.ones(3)
    for unrouted in ({p: torch.ones(1)}, {nn.Parameter(torch.ones(3)): torch.ones(3)}):
        with pytest.raises(ValueError, match=r"fits no parameter of this optimizer: give those of the policy's own decision"):
            optimizer.step(unrouted=unrouted)
    assert torch.equal(p, torch.ones(3))
