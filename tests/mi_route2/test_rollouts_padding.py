"""A policy without a host: padding on the left changes no log-probability, whether the model counts positions or is told them."""

from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, VOCAB, make_family, make_rollouts, move_all
from torch import nn
from transformers import (
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy, demand_causal

_SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 32}
_SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
LEARNED = {
    "GPTBigCode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**_SIZES, **_SPECIAL)),
    "OPT": lambda: OPTForCausalLM(OPTConfig(**_SIZES, **_SPECIAL, ffn_dim=32, word_embed_proj_dim=16)),
}
"""Learned positions: one model takes them and would count padding, the other may also work them out of its mask."""


def make_policy(model: nn.Module, pattern: str) -> Policy:
    return Policy(model, attach(model, pattern, spec=AdapterSpec("lora", 2), generator=torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("ignore:these stay frozen")  # GPTBigCode has one weight for queries and one shared key and value
@pytest.mark.parametrize("name", [*FAMILIES, *LEARNED])
def test_left_padding_is_right_padding(name: str) -> None:
    if name in FAMILIES:
        policy = make_policy(make_family(name), "blocks.*.mlp.*")
    else:
        policy = make_policy(move_all(LEARNED[name]()).double().eval(), "*")
    with torch.no_grad():
        sides = {}
        for side in ("left", "right"):
            rollouts = make_rollouts(side=side)
            sides[side] = policy.logprobs(rollouts)[rollouts.predictors]
    assert float(sides["left"].abs().min()) > 0
    torch.testing.assert_close(sides["left"], sides["right"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_model_whose_tokens_see_later_ones_is_refused(side: str) -> None:
    """Padding on the right would leak into every logit: no mask is given for it."""
    policy = make_policy(make_family("Llama"), "blocks.*.mlp.*")
    policy.model.config.is_causal = False  # pyright: ignore
    with pytest.raises(ValueError, match="LlamaForCausalLM has is_causal=False, but it must be causal: padding would leak"):
        policy.logprobs(make_rollouts(side=side))


@pytest.mark.parametrize("state", ["merged", "detached"])
def test_left_padding_needs_no_switch_of_adapters(state: str) -> None:
    policy, rollouts = make_policy(move_all(LEARNED["OPT"]()).eval(), "*"), make_rollouts(side="left")
    with torch.no_grad():
        expected = policy.logprobs(rollouts)
        if state == "detached":
            policy.adapters.detach()
        with policy.adapters.merged() if state == "merged" else nullcontext():
            torch.testing.assert_close(policy.logprobs(rollouts), expected)


@pytest.mark.parametrize(("seen", "causal"), [("vision", True), (None, True), ("all", False)])
def test_a_model_that_sees_images_alone_at_once_is_causal_for_text(seen: str | None, causal: bool) -> None:
    """As the larger models of Gemma 4."""
    model = make_family("GPT2")
    model.config.use_bidirectional_attention = seen  # pyright: ignore
    with nullcontext() if causal else pytest.raises(ValueError, match="='all', but it must be causal"):
        demand_causal(model)
