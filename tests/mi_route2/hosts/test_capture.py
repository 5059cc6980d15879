"""Capture reads what a module really saw or gave, changes nothing, and leaves nothing behind."""

import pytest
import torch
from torch import Tensor, nn

from mi_route2.hosts.capture import capture


class Block(nn.Module):
    """A residual block with an in-place addition, as fused implementations have."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, h: Tensor, *, scale: float = 1.0) -> tuple[Tensor, float]:
        return h + self.down(torch.relu(self.up(h))) * scale, scale


class Toy(nn.Module):
    """Blocks that return tuples, one called by keyword; a head that runs twice; a module that never runs."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.act = nn.Identity()
        self.head = nn.Linear(d, d)
        self.unused = nn.Linear(d, d)
        self.tied = self.head

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h, _ = self.blocks[0](h)
        h, _ = self.blocks[1](h=h, scale=0.5)
        h = self.act(h)
        h += 1  # writes into what `act` returned
        return self.head(self.head(h))


@pytest.fixture
def model() -> Toy:
    torch.manual_seed(0)
    return Toy()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))


def hooks_left(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


EVERYTHING = {"embed": "output", "blocks.0": "output", "blocks.1": "input", "blocks.1.up": "output", "head": "input"}


def test_values_are_those_of_manual_hooks(model, tokens):
    seen = {}
    handles = [
        model.blocks[0].register_forward_hook(lambda _m, _a, out: seen.update(block=out[0].clone())),
        model.blocks[1].up.register_forward_hook(lambda _m, _a, out: seen.update(up=out.clone())),
        model.blocks[1].down.register_forward_pre_hook(lambda _m, args: seen.update(down=args[0].clone())),
    ]
    with capture(model, {"blocks.0": "output", "blocks.1.up": "output", "blocks.1.down": "input"}) as cache:
        model(tokens)
    for handle in handles:
        handle.remove()
    assert torch.equal(cache["blocks.0"], seen["block"])
    assert torch.equal(cache["blocks.1.up"], seen["up"])
    assert torch.equal(cache["blocks.1.down"], seen["down"])


def test_the_output_of_a_block_is_the_input_of_the_next_even_by_keyword(model, tokens):
    with capture(model, {"blocks.0": "output", "blocks.1": "input"}) as cache:
        model(tokens)
    assert torch.equal(cache["blocks.0"], cache["blocks.1"])


@pytest.mark.parametrize("pristine", [True, False])
@pytest.mark.parametrize("copy", [True, False])
def test_forward_and_gradients_are_unchanged_bit_for_bit(model, tokens, pristine, copy):
    def run() -> list[Tensor]:
        model.zero_grad()
        out = model(tokens)
        out.square().sum().backward()
        return [out.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = run()
    with capture(model, EVERYTHING, pristine=pristine, copy=copy):
        captured = run()
    assert len(plain) == len(captured) > 5
    assert all(torch.equal(a, b) for a, b in zip(plain, captured))


def test_captured_tensors_are_detached_and_survive_in_place_writes(model, tokens):
    with capture(model, {"act": "output", "blocks.1": "output"}) as cache:
        model(tokens)
    assert not cache["act"].requires_grad
    assert torch.equal(cache["act"], cache["blocks.1"])
    with capture(model, {"act": "output"}, copy=False) as view:
        model(tokens)
    assert torch.equal(view["act"], cache["act"] + 1)  # why copies are the default


def test_every_call_is_kept_in_order_and_a_single_value_is_refused(model, tokens):
    with capture(model, {"head": "output", "tied": "input"}) as cache:
        out = model(tokens)
    first, second = cache.calls("head")
    assert torch.equal(second, out)
    assert torch.equal(cache.calls("tied")[1], first)
    with pytest.raises(ValueError, match="ran 2 times"):
        cache["head"]
    with (
        pytest.raises(ValueError, match=r"head \(2 times\)"),
        capture(model, {"head": "output", "embed": "output"}, once=True),
    ):
        model(tokens)
    assert hooks_left(model) == 0


def test_pristine_reads_before_existing_hooks_and_otherwise_after(model, tokens):
    with capture(model, {"blocks.0.up": "output"}) as untouched:
        model(tokens)
    model.blocks[0].up.register_forward_hook(lambda _m, _a, out: out + 5)
    with capture(model, {"blocks.0.up": "output"}) as before:
        model(tokens)
    with capture(model, {"blocks.0.up": "output"}, pristine=False) as after:
        model(tokens)
    assert torch.equal(before["blocks.0.up"], untouched["blocks.0.up"])
    assert torch.equal(after["blocks.0.up"], untouched["blocks.0.up"] + 5)


def test_pristine_reads_an_input_before_existing_hooks_and_otherwise_after(model, tokens):
    with capture(model, {"blocks.0": "input"}) as untouched:
        model(tokens)
    model.blocks[0].register_forward_pre_hook(lambda _m, args: (args[0] + 5,))
    with capture(model, {"blocks.0": "input"}) as before, capture(model, {"blocks.0": "input"}, pristine=False) as after:
        model(tokens)
    assert torch.equal(before["blocks.0"], untouched["blocks.0"])
    assert torch.equal(after["blocks.0"], untouched["blocks.0"] + 5)


def test_among_several_tensors_by_keyword_the_hidden_states_are_the_input():
    class Attention(nn.Module):
        def forward(self, *, attention_mask: Tensor, hidden_states: Tensor) -> Tensor:
            return hidden_states * attention_mask

    module, h = nn.Sequential(Attention()), torch.randn(2, 3)
    with capture(module, {"0": "input"}) as cache:
        module[0](attention_mask=torch.zeros(2, 3), hidden_states=h)
    assert torch.equal(cache["0"], h)


def test_a_module_that_did_not_run_is_an_error_that_names_it(model, tokens):
    with pytest.raises(ValueError, match=r"did not run.*unused"), capture(model, {"unused": "output", "head": "input"}):
        model(tokens)
    assert hooks_left(model) == 0


def test_an_unknown_name_lists_the_nearest_before_anything_is_attached(model):
    with pytest.raises(KeyError, match=r"blocks\.1\.up"), capture(model, {"head": "input", "blocks.1.upp": "output"}):
        pytest.fail("the block must not run")
    assert hooks_left(model) == 0


def test_a_wrong_side_and_an_empty_request_are_refused(model):
    with pytest.raises(ValueError, match="input, output"), capture(model, {"head": "both"}):
        pytest.fail("the block must not run")
    with pytest.raises(ValueError, match="at least one"), capture(model, {}):
        pytest.fail("the block must not run")


def test_an_error_inside_passes_unchanged_and_removes_the_hooks(model, tokens):
    kept = model.head.register_forward_hook(lambda *_: None)

    def broken() -> None:
        with capture(model, {**EVERYTHING, "unused": "output"}):
            model(tokens)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert hooks_left(model) == 1  # the user's own
    kept.remove()


def test_a_value_that_is_not_a_tensor_is_refused(model, tokens):
    class Words(nn.Module):
        def forward(self, tokens: Tensor) -> str:
            return "no tensor"

    model.words = Words()
    with pytest.raises(ValueError, match="not a tensor"), capture(model, {"words": "output"}):
        model.words(tokens)
    model.act.forward = lambda a, b: a + b
    with pytest.raises(ValueError, match="not clear"), capture(model, {"act": "input"}):
        model.act(a=tokens, b=tokens)
    assert hooks_left(model) == 0


def test_the_root_has_the_empty_name(model, tokens):
    with capture(model, {"": "output"}) as cache:
        out = model(tokens)
    assert torch.equal(cache[""], out)
    assert "" in cache
    with pytest.raises(KeyError, match="was not captured"):
        cache.calls("head")
