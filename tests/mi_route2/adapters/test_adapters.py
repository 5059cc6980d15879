"""Adapters: nothing at init, switches that restore, the base model bit for bit, merged forms, other types, sites."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from families import make_family
from tiny_policy import SPECS, make_batch, make_model, make_policy, make_rollouts, policy_loss
from torch import Tensor, nn
from torch.nn.utils import prune

from mi_route2.adapters import Adapters, AdapterSpec, Tape, attach
from mi_route2.adapters.linear import RoutedLinear
from mi_route2.hosts import open_host
from mi_route2.rollouts import Policy
from mi_route2.sites import select

SWITCHES = ("full", "deployed", "reference")
TOKENS = make_rollouts(4).tokens


def switch(adapters: Adapters, name: str) -> AbstractContextManager[object]:
    return getattr(adapters, name)()


def logits(policy: Policy) -> Tensor:
    return policy.model(TOKENS).detach()


def base_logits() -> Tensor:
    return make_model()(TOKENS).detach()


# ---- at init, and switched off


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_at_init_the_model_is_the_base_bit_for_bit(spec: AdapterSpec, dtype: torch.dtype) -> None:
    base = make_model(dtype)(TOKENS)
    policy = make_policy(spec, scale=0.0, dtype=dtype)
    for name in SWITCHES:
        with switch(policy.adapters, name):
            assert torch.equal(policy.model(TOKENS), base)


def test_reference_is_the_base_bit_for_bit_wherever_the_adapters_stand(spec: AdapterSpec) -> None:
    policy = make_policy(spec, scale=1.0)
    assert not torch.allclose(logits(policy), base_logits(), atol=1e-3)
    with policy.adapters.reference():
        assert torch.equal(logits(policy), base_logits())
        with pytest.raises(KeyError), policy.adapters.full():
            raise KeyError
        assert torch.equal(logits(policy), base_logits())
    assert not torch.allclose(logits(policy), base_logits(), atol=1e-3)


def test_deployed_is_full_where_the_quarantine_is_zero_and_not_elsewhere(spec: AdapterSpec) -> None:
    policy = make_policy(spec)
    full = logits(policy)
    with policy.adapters.deployed():
        deployed = logits(policy)
    assert not torch.allclose(full, deployed, atol=1e-6)
    with torch.no_grad():
        for p in policy.adapters.quarantine_parameters().values():
            p.zero_()
    assert torch.allclose(logits(policy), deployed, rtol=0, atol=1e-14)


@pytest.mark.parametrize("outer", SWITCHES)
@pytest.mark.parametrize("inner", SWITCHES)
def test_switches_nest_and_restore_also_on_error(outer: str, inner: str) -> None:
    policy = make_policy(SPECS["lora"])
    value = {}
    for name in SWITCHES:
        with switch(policy.adapters, name):
            value[name] = logits(policy)
    with pytest.raises(ZeroDivisionError), switch(policy.adapters, outer):  # noqa: PT012
        with pytest.raises(ZeroDivisionError), switch(policy.adapters, inner):  # noqa: PT012
            assert torch.equal(logits(policy), value[inner])
            raise ZeroDivisionError
        assert torch.equal(logits(policy), value[outer])
        raise ZeroDivisionError
    assert torch.equal(logits(policy), value["full"])


@pytest.mark.parametrize("first", [*SWITCHES, "merged"])
@pytest.mark.parametrize("second", SWITCHES)
def test_contexts_that_are_left_in_the_order_of_their_entry_leave_what_was(first: str, second: str) -> None:
    policy = make_policy(SPECS["lora"])
    value = {}
    for name in (*SWITCHES, "merged"):
        with switch(policy.adapters, name):
            value[name] = logits(policy)
    if first == "merged":
        first, second = second, first
    with ExitStack() as one, ExitStack() as two:
        one.enter_context(switch(policy.adapters, first))
        two.enter_context(switch(policy.adapters, second))
        one.close()
        expected = value[first] if second == "merged" else value[second]
        assert torch.allclose(logits(policy), expected, rtol=0, atol=1e-13)
        assert second != "merged" or policy.adapters.mode == first
    assert torch.equal(logits(policy), value["full"])
    assert policy.adapters.mode == "full"


@pytest.mark.parametrize("name", ["deployed", "unrouted"])
def test_a_second_thread_is_refused_while_one_has_switched(name: str) -> None:
    policy, refused = make_policy(SPECS["lora"]), list[str]()

    def enter() -> None:
        try:
            with switch(policy.adapters, name):
                refused.append("")
        except RuntimeError as error:
            refused.append(str(error))

    def in_a_thread() -> None:
        (thread := Thread(target=enter)).start()
        thread.join()

    with switch(policy.adapters, "reference"):
        in_a_thread()
    in_a_thread()
    assert refused[0].startswith("another thread has switched the adapters")
    assert refused[1:] == [""]


def test_recording_restores_on_error_and_does_not_nest() -> None:
    policy = make_policy(SPECS["lora"])
    tape = Tape(*TOKENS.shape)
    with pytest.raises(ZeroDivisionError), policy.adapters.recording(tape):  # noqa: PT012
        with pytest.raises(RuntimeError, match="already open"), policy.adapters.recording(Tape(*TOKENS.shape)):
            pass
        raise ZeroDivisionError
    with policy.adapters.recording(tape):
        logits(policy)
    with pytest.raises(ValueError, match="this tape was made for 9 rollouts"), policy.adapters.recording(Tape(9, 9)):
        Policy(policy.model, policy.adapters).logprobs(make_rollouts(4))


def test_a_site_that_does_not_run_is_named() -> None:
    policy = make_policy(SPECS["svd"])
    policy.model.blocks[1].mlp.forward = lambda x: x  # pyright: ignore
    with (
        pytest.raises(RuntimeError, match=r"blocks\.1\.mlp\.up, blocks\.1\.mlp\.down"),
        policy.adapters.recording(Tape(*TOKENS.shape)),
    ):
        logits(policy)


# ---- merged


@pytest.mark.parametrize("name", SWITCHES)
def test_merged_equals_unmerged_under_each_switch(spec: AdapterSpec, name: str) -> None:
    policy = make_policy(spec)
    with switch(policy.adapters, name):
        plain = logits(policy)
        with policy.adapters.merged():
            merged = policy.model(TOKENS)
            assert not merged.requires_grad
        assert torch.equal(logits(policy), plain)
    assert torch.allclose(merged, plain, rtol=0, atol=1e-12)


def test_a_routed_linear_has_the_sizes_of_its_base_and_no_merged_weight_in_its_state() -> None:
    """GPT-2 stores its weights transposed."""
    adapters = open_host("torch", make_family("GPT2")).attach("*.attn.*", spec=SPECS["lora"])
    with adapters.merged():
        for module in adapters.model.modules():
            if isinstance(module, RoutedLinear):
                x = torch.zeros(1, module.in_features, dtype=module.weight.dtype)
                assert module(x).shape == (1, module.out_features)
                assert not any("merged_weight" in name for name in module.state_dict())


# ---- which gradients


@pytest.mark.parametrize("name", ["svd-shared", "lora-shared"])
def test_one_shared_coordinate_gives_both_adapters_the_same_gradient(name: str) -> None:
    policy = make_policy(SPECS[name])
    with policy.adapters.unrouted():
        policy_loss(policy, make_batch(), make_batch().advantages).backward()
    for site, module in policy.adapters.sites.items():
        own, shared = policy.adapters.scored(site).grad, module.quarantine.shared.grad  # pyright: ignore
        assert own is not None
        assert own.abs().max() > 0
        assert torch.allclose(own, shared, rtol=0, atol=1e-14)  # pyright: ignore


def test_what_a_shared_lora_quarantine_learns_does_not_reach_the_kept_factors() -> None:
    """The quarantine's path ends at its own B: the kept A learns from the kept path alone, so from nothing at B = 0."""
    policy = make_policy(SPECS["lora-shared"], scale=0.0)
    with torch.no_grad():
        for p in policy.adapters.quarantine_parameters().values():
            p += 0.3
    with policy.adapters.unrouted():
        policy_loss(policy, make_batch(), make_batch().advantages).backward()
    assert all(not p.grad.any() for n, p in policy.adapters.kept_parameters().items() if n.endswith(".A"))  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_models_train_float32_parameters(spec: AdapterSpec, dtype: torch.dtype) -> None:
    """Compute follows the model, parameters are float32, and every gradient points where float64's does."""
    batch = make_batch()
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    low, exact = make_policy(spec, dtype=dtype), make_policy(spec)
    with torch.no_grad():
        for name, p in low.model.named_parameters():
            dict(exact.model.named_parameters())[name].copy_(p)
        for module in exact.adapters.sites.values():
            for name, p in module.kept.named_buffers():
                p.copy_(dict(low.adapters.sites[module.site].kept.named_buffers())[name])
    assert low.model(TOKENS).dtype == dtype
    for policy in (low, exact):
        with policy.adapters.unrouted():
            policy_loss(policy, batch, batch.advantages).backward()
    for own, oracle in zip(trainable(low.adapters), trainable(exact.adapters)):
        assert own.dtype == torch.float32
        assert own.grad is not None
        assert own.grad.dtype == torch.float32
        assert torch.isfinite(own.grad).all()
        gap = (own.grad - oracle.grad).norm() / oracle.grad.norm()  # pyright: ignore
        assert gap < (0.15 if dtype == torch.bfloat16 else 1e-4), gap


# ---- attach, detach, select


def test_only_adapters_are_trainable_and_detach_gives_the_model_back(spec: AdapterSpec) -> None:
    model = make_model()
    model.ln_f.requires_grad_(False)
    before = {n: (p, p.requires_grad) for n, p in model.named_parameters()}
    adapters = attach(model, "blocks.*", spec=spec, generator=torch.Generator().manual_seed(0))
    assert {id(p) for p in model.parameters() if p.requires_grad} == set(map(id, trainable(adapters)))
    assert adapters.has_quarantine == bool(adapters.quarantine_parameters())
    with torch.no_grad():
        for p in trainable(adapters):
            p += 1
    assert adapters.detach() is model
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (p, learnt) in before.items():
        assert after[name] is p
        assert p.requires_grad == learnt, name
    assert torch.equal(model(TOKENS), base_logits())
    attach(model, "blocks.*", spec=spec, generator=torch.Generator().manual_seed(0))


def test_adapters_that_were_detached_leave_others_alone_and_say_so() -> None:
    """A second ``detach()`` in a notebook, or a context of the former adapters, would else undo or pass by what stands now."""
    model, tokens = make_model(), make_rollouts(4).tokens
    before = attach(model, "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    before.detach()
    policy = Policy(model, attach(model, "blocks.*", spec=SPECS["svd"], generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        for p in policy.adapters.quarantine_parameters().values():
            p += 1
    full = model(tokens)
    assert before.detach() is model
    assert torch.equal(model(tokens), full)
    assert not any(p.requires_grad for p in model.parameters() if not any(p is own for own in trainable(policy.adapters)))
    for context in (before.full, before.deployed, before.reference, before.merged, lambda: before.recording(Tape(4, 9))):
        with (
            pytest.raises(RuntimeError, match="these adapters were detached from their model: use those that attach"),
            context(),
        ):
            pytest.fail("the block must not run")
    with policy.adapters.deployed():
        assert not torch.equal(model(tokens), full)


def trainable(adapters: Adapters) -> list[nn.Parameter]:
    return [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]


def test_attaching_twice_is_an_error() -> None:
    policy = make_policy(SPECS["svd"])
    with pytest.raises(ValueError, match="already has adapters"):
        attach(policy.model, "blocks.*", generator=torch.Generator())


def test_a_quantized_linear_is_refused() -> None:
    """Merging and an SVD would take its codes for weights; some libraries do not even call them weight."""
    model = make_model()
    linear: Any = select(model, "blocks.1.attn.q")["blocks.1.attn.q"].module
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"blocks.1.attn.q is quantized \(torch.int8\).* load the base model in bfloat16"):
        attach(model, "blocks.*", spec=SPECS["lora"])
    del linear.weight
    with pytest.raises(ValueError, match=r"blocks.1.attn.q is a Linear without a weight: load the base model in bfloat16"):
        attach(model, "blocks.*", spec=SPECS["lora"])


class Encoder(nn.Module):
    """Torch's own layers, whose fast path multiplies by the weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.unembed = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.layer(self.embed(tokens)))


class Packed(Tensor):
    """Integers and a scale that act as float32, as torchao's and quanto's weights."""

    packed: Tensor
    scale: float

    @staticmethod
    def __new__(cls, packed: Tensor, scale: float) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)  # pyright: ignore

    def __init__(self, packed: Tensor, scale: float):
        self.packed, self.scale = packed, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        return func(*(a.packed * a.scale if isinstance(a, Packed) else a for a in args), **(kwargs or {}))


class Marked(Tensor):
    """Another class of tensors, whose memory is its numbers."""


@pytest.mark.parametrize("pattern", ["*.attn.q", "*.mlp.up"])
@pytest.mark.parametrize("kind", ["packed", "marked"])
def test_a_weight_that_is_stored_otherwise_is_refused_wherever_it_stands(kind: str, pattern: str) -> None:
    model = make_model(torch.float32)
    linear: Any = model.blocks[0].attn.q
    weight = linear.weight.detach()
    stored = Packed((weight * 64).round().to(torch.int8), 1 / 64) if kind == "packed" else weight.as_subclass(Marked)
    linear.weight = nn.Parameter(stored, requires_grad=False)
    assert model(TOKENS).isfinite().all()
    with pytest.raises(
        ValueError, match=rf"^blocks\.0\.attn\.q\.weight is a {kind.title()}, which is stored otherwise .* load the"
    ):
        attach(model, pattern, spec=SPECS["lora"])
    assert not [m for m in model.modules() if isinstance(m, RoutedLinear)]


def test_linears_that_torch_passes_by_are_refused() -> None:
    """In eval mode the adapters of an encoder layer would be out of the forward in silence."""
    model = Encoder().eval()
    with pytest.raises(ValueError, match=r"layer.self_attn.out_proj .*MultiheadAttention.* leave it out"):
        attach(model, "*", spec=SPECS["lora"])
    with pytest.raises(ValueError, match=r"layer.linear1 .*TransformerEncoderLayer.*set_fastpath_enabled\(False\)"):
        attach(model, "*.linear*", spec=SPECS["lora"])
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        policy = Policy(model, attach(model, "*.linear*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0)))
        plain = logits(policy)
        with torch.no_grad():
            for p in trainable(policy.adapters):
                p += 0.1
            changed = policy.model(TOKENS)
            assert not torch.allclose(changed, plain, atol=1e-3)
            torch.backends.mha.set_fastpath_enabled(True)  # as another library may do, at any time
            torch.testing.assert_close(policy.model(TOKENS), changed, rtol=0, atol=1e-5)  # attention has a fast path of its own
            with policy.adapters.reference():
                torch.testing.assert_close(policy.model(TOKENS), plain, rtol=0, atol=1e-5)
        policy.adapters.detach()
        assert not policy.model.layer.linear1._forward_pre_hooks  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.mha.set_fastpath_enabled(False)
        stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
        attach(stack, "*linear1", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
        torch.backends.mha.set_fastpath_enabled(True)
        x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"for its fast path.*set_fastpath_enabled\(False\)"):
            stack(x, src_key_padding_mask=padding)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    "computed",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    ],
)
def test_a_weight_that_is_computed_is_refused(computed: Callable[[nn.Linear], nn.Module]) -> None:
    known = make_model()
    computed(known.blocks[1].attn.q)  # pyright: ignore
    for model, name in ((nn.Sequential(nn.Embedding(20, 16), computed(nn.Linear(16, 16))), "1"), (known, "blocks.1.attn.q")):
        with pytest.raises(ValueError, match=rf"{name} is a .*whose weight is computed from others: .*prune.remove"):
            attach(model, name, spec=SPECS["lora"])


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.mT + self.bias


@pytest.mark.parametrize("kind", [Doubled, Named, nn.Linear])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_matmul_in_place_of_a_linear_loses_nothing(kind: type[nn.Linear], hooked: bool) -> None:
    model = nn.Sequential(nn.Embedding(20, 16), kind(16, 16)).double()
    if hooked:
        model[1].register_forward_hook(lambda module, given, out: out + 1.0)
    policy = Policy(model, attach(model, "1", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0)))
    plain, lost = logits(policy), hooked or kind is Doubled
    if lost:
        with pytest.raises(ValueError, match=r"1 (has hooks|computes more than a matmul).*"), policy.adapters.merged():
            pass
    else:
        with policy.adapters.merged():
            assert torch.allclose(policy.model(TOKENS), plain, rtol=0, atol=1e-12)
    assert torch.equal(logits(policy), plain)


def test_random_factors_come_from_the_generator_alone() -> None:
    def factors(seed: int) -> list[Tensor]:
        torch.manual_seed(torch.seed() % 1000)
        adapters = attach(make_model(), "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(seed))
        return list(adapters.tensors().values())

    assert all(torch.equal(a, b) for a, b in zip(factors(4), factors(4)))
    assert any(not torch.equal(a, b) for a, b in zip(factors(4), factors(5)))


def test_a_quarantine_draws_its_a_with_variance_one_over_d_in() -> None:
    linear = nn.Sequential(nn.Linear(256, 64, bias=False))
    adapters = attach(linear, "0", spec=AdapterSpec(quarantine_rank=64), generator=torch.Generator().manual_seed(0))
    A = adapters.quarantine_parameters()["0.A"]
    assert A.shape == (64, 256)
    assert float(A.detach().var()) == pytest.approx(1 / 256, rel=0.05)
    assert not adapters.quarantine_parameters()["0.B"].any()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdapterSpec(kept="lora"), "needs a rank"),
        (lambda: attach(make_model(), "blocks.*", spec=AdapterSpec(rank=17), generator=torch.Generator()), r"outside 1\.\.16"),
        (
            lambda: attach(make_model(), "blocks.*", spec=AdapterSpec(quarantine_rank=0), generator=torch.Generator()),
            "quarantine_rank must be greater than or equal to 1, not 0",
        ),
    ],
)
def test_bad_specs_are_refused_with_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


# ---- what they print


def test_printed_adapters_are_a_table_of_sites() -> None:
    adapters = make_policy(SPECS["lora"]).adapters
    first, *rows = repr(adapters).split("\n")
    assert first == "Adapters of MicroGPT: kept lora, quarantine lora; on: full"
    assert len(rows) == 12
    assert rows[0] == "  blocks.0.attn.q [16, 16]: rank 4, quarantine 3"
