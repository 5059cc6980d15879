"""``run_with_cache`` and ``run_with_hooks`` on every host, against TransformerLens's own on a bridge."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from families import SPECS, VOCAB, make_family, make_tokens, move
from torch import Tensor

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.hosts.base import Hook
from mi_route2.sites import Site

pytestmark = pytest.mark.hosts

FAMILIES = ["GPT2", "GPTNeoX", "MicroGPT", "Gemma3"]
KNOWN = (
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    *(f"attn.hook_{x}" for x in "qkvz"),
)
TOKENS, _ = make_tokens()
FIRE = pytest.mark.parametrize("host", HOSTS)


@cache
def opened(host: str, family: str) -> Host:
    made = open_host(host, make_family(family, attn="eager" if family == "Gemma3" else "sdpa"))
    adapters = made.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))
    move(adapters)
    return made


@cache
def theirs(family: str) -> tuple[Tensor, Any]:
    """Return TransformerLens's own values of the same model, with the same adapters."""
    with torch.no_grad():
        return opened("transformer_lens", family).bridge.run_with_cache(TOKENS)  # pyright: ignore[reportAttributeAccessIssue]


def close(ours: Tensor, other: Tensor, bound: float = 1e-10) -> bool:
    return ours.shape == other.shape and float((ours - other).abs().max()) < bound


@FIRE
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_has_transformer_lenss_names_and_values(family: str, host: str) -> None:
    """Every hook that everybody knows, and every hook of the bridge's that has a site, adapters included."""
    made, (expected, cache) = opened(host, family), theirs(family)
    with torch.no_grad():
        logits, found = made.run_with_cache(TOKENS)
    assert close(logits, expected)
    assert set(found) == set(made.sites())
    lacking = {"hook_resid_mid"} if family == "GPTNeoX" else set()
    for name in [f"blocks.{layer}.{hook}" for layer in (0, 1) for hook in KNOWN if hook not in lacking]:
        assert close(found[name], cache[name]), name
    for site, value in found.items():
        ours, *lens = made.hook_names(site)
        assert found[ours] is value
        for name in lens:
            assert close(value, cache[name].view(value.shape)), name
    routed = [name for name in cache if ".route.hook_" in name and not name.endswith("hook_mask")]
    assert all(name in found for name in routed)
    assert len(routed) > 20
    assert found["z", 1] is found[Site(1, "z")]
    assert all(not value.requires_grad for value in found.values())


@FIRE
def test_a_cache_of_some_names(host: str) -> None:
    made = opened(host, "GPT2")
    for names, sites in (
        ("z", [Site(0, "z"), Site(1, "z")]),
        (Site(1, "q"), [Site(1, "q")]),
        ("blocks.*.hook_resid_pre", [Site(0, "resid_pre"), Site(1, "resid_pre")]),
        (lambda name: name.endswith("attn.hook_v"), [Site(0, "v"), Site(1, "v")]),
        (["blocks.1.hook_mlp_out", Site(0, "attn_in"), "blocks.0.mlp.in.route.hook_kept_a"],
         [Site(0, "attn_in"), Site(0, "kept_a", "mlp.up"), Site(1, "mlp_out")]),
    ):  # fmt: skip
        _, found = made.run_with_cache(TOKENS, names=names)
        assert sorted(found) == sites
        for site, value in made.capture(sites, TOKENS).items():
            assert torch.equal(found[site], value)
    with pytest.raises(KeyError, match=r"no value at 'blocks\.0\.attn\.hook_q'.*nearest are blocks\.0\.attn\.hook_z"):
        made.run_with_cache(TOKENS, names="z")[1]["blocks.0.attn.hook_q"]
    with pytest.raises(KeyError, match=r"no site matches 'blocks\.0\.attn\.hook_zz'.*blocks\.0\.attn\.hook_z"):
        made.run_with_cache(TOKENS, names="blocks.0.attn.hook_zz")
    with pytest.raises(KeyError, match="selects no site"):
        made.run_with_cache(TOKENS, names=lambda name: name.endswith("hook_zz"))


@FIRE
@pytest.mark.parametrize("name", ["attn.hook_z", "hook_attn_out", "hook_resid_post", "attn.q.route.hook_kept"])
def test_hook_functions_of_transformer_lens_run_as_they_are(name: str, host: str) -> None:
    """One function of ``(value, hook)``: on the bridge by TransformerLens, and here on every host."""
    made, bridge = opened(host, "GPT2"), opened("transformer_lens", "GPT2").bridge  # pyright: ignore[reportAttributeAccessIssue]
    seen: list[Hook] = []

    def ablate(value: Tensor, hook: Any, share: float) -> Tensor:
        seen.append(hook)
        return value.flip(1) * share

    hooks = [(f"blocks.1.{name}", partial(ablate, share=0.5))]
    with torch.no_grad():
        expected = bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
        seen.clear()
        assert close(made.run_with_hooks(TOKENS, hooks), expected)
        wrapped = made.run_with_hooks(TOKENS, [(f"blocks.1.{name}", lambda *args, **named: ablate(*args, **named, share=0.5))])
        assert close(wrapped, expected)
        assert not close(made.logits(TOKENS), expected, 1e-3)
    assert (seen[0].name, seen[0].layer()) == (f"blocks.1.{name}", 1)


@FIRE
def test_hooks_at_one_site_act_in_order_and_a_reader_changes_nothing(host: str) -> None:
    made, site, seen = opened(host, "GPT2"), Site(0, "mlp_out"), []
    with torch.no_grad():
        both = made.run_with_hooks(
            TOKENS, [(site, lambda x: x + 1), ("blocks.0.hook_mlp_out", lambda x: x * 2), (site, seen.append)]
        )
        with made.hooks({site: lambda x: (x + 1) * 2}):
            assert torch.equal(both, made.logits(TOKENS))
        assert torch.equal(seen[0], (made.capture([site], TOKENS)[site] + 1) * 2)
        assert torch.equal(
            made.run_with_hooks(TOKENS, [("z", torch.zeros_like)]), made.run_with_hooks(TOKENS, [("z", lambda x: 0 * x)])
        )
        assert torch.equal(made.run_with_hooks(TOKENS, [(site, lambda x: x.mul_(1))]), made.logits(TOKENS))
        assert torch.equal(made.run_with_hooks(TOKENS, []), made.logits(TOKENS))
    for wrong in ({site: torch.relu}, [(site, 3)], [site]):
        with pytest.raises(TypeError, match="a hook is a name and a function"):
            made.run_with_hooks(TOKENS, wrong)
    with pytest.raises(ValueError, match=f"0..{VOCAB - 1}"):
        made.run_with_cache(TOKENS + VOCAB)


def test_padding_and_gradients_are_those_of_logits() -> None:
    made = opened("torch", "GPT2")
    tokens, attention = make_tokens(side="left")
    logits, found = made.run_with_cache(tokens, attention, "resid_post")
    assert torch.equal(logits, made.logits(tokens, attention))
    assert not torch.equal(logits, made.logits(tokens))
    for site, value in made.capture([*found], tokens, attention).items():
        assert torch.equal(found[site], value)
    assert logits.requires_grad
    with torch.no_grad():
        assert not made.run_with_cache(tokens, attention)[0].requires_grad
