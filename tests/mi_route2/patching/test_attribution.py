"""AtP* by finite differences with a layer held, integrated gradients by what they add up to, and means over pairs of prompts."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import make_decoder
from families import FAMILIES, HEADS, LAYERS, VOCAB, _exact_mask, make_family, move_all
from scipy.stats import t as student
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.patching import Grid, Span, Target, attribute, sweep
from mi_route2.patching.question import Grader
from mi_route2.sites import Site

ANSWER, FOIL, LENGTH = 4, 9, 5
CLEAN, CORRUPT = (torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL}
SHIFT: dict[int, Tensor] = {}
SEEN: dict[int, Tensor] = {}


def shifted_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention whose probabilities are read, and shifted by ``SHIFT``, in a layer."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    chances = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    SEEN[module.layer_idx] = chances.detach().clone()
    return ((chances + SHIFT.get(module.layer_idx, 0.0)) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("shifted", shifted_attention)
AttentionMaskInterface.register("shifted", _exact_mask)


@cache
def three_layers(family: str) -> Host:
    config: Any = copy.deepcopy(FAMILIES[family])
    config.num_hidden_layers = 3
    if family == "Qwen3":
        config.layer_types = ["full_attention"] * 3
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="shifted")
    return open_host("torch", move_all(model).eval())


def score(host: Host, edits: dict[Site, Any]) -> float:
    with torch.no_grad(), host.hooks(edits):
        logits = host.logits(CORRUPT[None])[0, -1]
    return float(logits[ANSWER] - logits[FOIL])


def slope(function: Callable[[float], float], step: float = 1e-3) -> float:
    return (function(step) - function(-step)) / (2 * step)


def written(target: Target, source: Tensor, position: int, share: float, value: Tensor) -> Tensor:
    new = value.clone()
    part = slice(None) if target.head is None else target.head
    new[0, position, part] += share * (source[position, part] - new[0, position, part])
    return new


def starred_by_hand(host: Host, target: Target, position: int) -> float:
    """The mean over layers of the slope's size with the layer's outputs held; of queries and keys with the exact probabilities."""
    outputs = [site for site in host.sites() if site.point in ("attn_out", "mlp_out")]
    corrupt, layer = host.capture(outputs, CORRUPT[None]), target.site.layer
    assert layer is not None
    write = partial(written, target, host.capture([target.site], CLEAN[None])[target.site][0], position)
    score(host, {})
    before = SEEN[layer]
    score(host, {target.site: partial(write, 1.0)})
    moved = SEEN[layer] - before

    def shifted(hold: dict[Site, Any], share: float) -> float:
        if target.site.point not in ("q", "k"):
            return score(host, {target.site: partial(write, share), **hold})
        SHIFT[layer] = share * moved
        try:
            return score(host, hold)
        finally:
            SHIFT.clear()

    stream = target.site.point.startswith("resid")
    layers = [other for other in range(3) if other != layer or stream]
    holds = [{site: lambda _, v=value: v for site, value in corrupt.items() if site.layer == other} for other in layers]
    return sum(abs(slope(partial(shifted, hold))) for hold in holds) / len(layers)


@pytest.mark.parametrize(("family", "tolerance"), [("GPT2", 1e-6), ("Qwen3", 1e-3)])
def test_atp_star_fixes_queries_and_keys_and_drops_one_layer_at_a_time(family: str, tolerance: float) -> None:
    host = three_layers(family)
    points = ["q", "k", "v", "z"]
    starred = attribute(host, sites=points, heads=True, method="atp*", **ASKED)
    streams = attribute(host, sites=["resid_pre", "mlp_out"], method="atp*", **ASKED)
    assert starred.kind == "attribution (atp*)"
    assert starred.effect.min() >= 0
    for grid, targets in (
        (starred, [Target(Site(layer, point), 1) for layer in (0, 2) for point in points]),
        (streams, [Target(Site(1, "resid_pre")), Target(Site(0, "mlp_out"))]),
    ):
        for target in targets:
            for position in (1, LENGTH - 1):
                found = grid.effect[grid.sites.index(target), position]
                expected = starred_by_hand(host, target, position)
                assert found == pytest.approx(expected, rel=0, abs=tolerance * grid.effect.max()), (target, position)
    together = attribute(host, sites="q", heads=True, together=True, method="atp*", **ASKED)
    assert (together.effect[:, 0] <= starred.effect[: 3 * HEADS].sum(1) + 1e-12).all()


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_atp_star_is_the_same_on_every_host_and_attention(name: str, attn: str) -> None:
    asked: dict[str, Any] = {"sites": ["q", "k", "z"], "heads": True, "method": "atp*", **ASKED}
    expected = attribute(open_host("torch", make_family("GPT2")), **asked)
    found = attribute(open_host(name, make_family("GPT2", attn=attn)), **asked)
    np.testing.assert_allclose(found.effect, expected.effect, rtol=0, atol=1e-10)


def test_atp_star_says_where_it_is_impossible() -> None:
    def own_softmax(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        weights = (query @ key.mT).exp() * mask
        return (weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("own softmax", own_softmax)
    AttentionMaskInterface.register("own softmax", _exact_mask)
    host = open_host("torch", make_family("GPT2", attn="own softmax"))
    with pytest.raises(ValueError, match=r"layer 0 calls neither softmax nor sdpa of torch.*'sdpa'"):
        attribute(host, sites="q", method="atp*", **ASKED)
    assert attribute(host, sites="v", method="atp*", **ASKED).effect.max() > 0  # needs no probabilities
    single = open_host("torch", move_all(make_decoder("Llama", num_hidden_layers=1)))
    with pytest.raises(ValueError, match="this model has one: take method='atp'"):
        attribute(single, sites="v", method="atp*", **ASKED)
    for wrong in ({"steps": 3}, {"method": "atp*", "steps": 3}, {"method": "ig", "steps": 0}):
        with pytest.raises(ValueError, match="give method='ig' at least 1 step, and no other method any"):
            attribute(host, sites="v", **wrong, **ASKED)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_integrated_gradients_add_up_to_the_exact_effect(alpha: float) -> None:
    """Of a site at all positions together; the midpoint rule errs by the square of a step."""
    host = open_host("torch", make_family("MicroGPT"))
    asked: dict[str, Any] = {"sites": ["q", "v", "resid_mid", "mlp_out", "resid_post"], "alpha": alpha, **ASKED}
    exact = sweep(host, together=True, progress=False, **asked).effect[:, 0]
    found = [attribute(host, method="ig", steps=steps, **asked).effect.sum(1) for steps in (20, 40)]
    errors = [np.abs(one - exact).max() for one in found]
    assert errors[1] < 1e-3 * np.abs(exact).max()
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    together = attribute(host, method="ig", steps=20, together=True, **asked)
    np.testing.assert_allclose(together.effect[:, 0], found[0], atol=1e-12)
    assert together.kind == "attribution (ig)"


def test_a_site_whose_tensor_others_read_or_overwrite_has_its_own_slope() -> None:
    """Falcon's attention and MLP read one tensor, and attention is added to the MLP's output in place."""
    model = move_all(make_decoder("Falcon", new_decoder_architecture=False, num_kv_heads=4, parallel_attn=True))
    sites = ["attn_in", "mlp_in", "attn_out", "mlp_out"]
    for frozen in (False, True):
        host = open_host("torch", model.requires_grad_(not frozen))
        ahead, back = (sweep(host, sites=sites, alpha=alpha, how="whole", progress=False, **ASKED) for alpha in (1e-4, -1e-4))
        expected = (ahead.values - back.values) / 2e-4
        for method in ("atp", "atp*"):
            found = attribute(host, sites=sites, method=method, **ASKED).effect
            if method == "atp":
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
            else:  # with two layers, what is in the last one has one way to the score: around the other
                np.testing.assert_allclose(found[LAYERS - 1 :: LAYERS], np.abs(expected[LAYERS - 1 :: LAYERS]), rtol=0, atol=1e-4)


# Several pairs of prompts


def pairs(lengths: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randint(3, VOCAB, (2, length), generator=generator) for length in lengths]
    return {"clean": [both[0] for both in draw], "corrupt": [both[1].tolist() for both in draw]}


@pytest.mark.parametrize("call", [partial(sweep, progress=False), attribute, partial(attribute, method="ig", steps=2)])
def test_several_pairs_have_the_mean_of_their_grids_and_its_t_interval(call: Any, tmp_path: Path) -> None:
    host = open_host("torch", make_family("GPT2"))
    asked = pairs([4, 4, 4])
    answers, foil = [4, 5, 6], 9
    mean = call(host, sites="z", heads=True, answer=answers, foil=foil, **asked)
    single = [
        call(host, sites="z", heads=True, clean=clean, corrupt=corrupt, answer=answer, foil=foil)
        for clean, corrupt, answer in zip(asked["clean"], asked["corrupt"], answers)
    ]
    for grid, one in zip(mean.pairs, single, strict=True):
        np.testing.assert_array_equal(grid.values, one.values)
    effects = np.stack([one.effect for one in single])
    np.testing.assert_allclose(mean.effect, effects.mean(0), atol=1e-12)
    half = student.ppf(0.975, 2) * effects.std(0, ddof=1) / 3**0.5
    np.testing.assert_allclose(mean.interval, [effects.mean(0) - half, effects.mean(0) + half], atol=1e-12)
    assert (mean.metric, mean.grader.answer) == ("mean of logit_diff", None)  # the pairs' answers differ
    table = mean.to_pandas()
    np.testing.assert_allclose(table["high"] - table["low"], 2 * half.ravel(), atol=1e-12)
    assert "mean of 3 pairs" in repr(mean)
    mean.save(tmp_path / "mean.safetensors")
    for again in (Grid.load(tmp_path / "mean.safetensors"), Grid.from_json(mean.to_json())):
        np.testing.assert_array_equal(again.interval, mean.interval)
        assert again.labels == mean.labels
    same = call(host, sites="z", answer=4, foil=9, **asked)
    assert same.grader == Grader("logit_diff", 4, 9)
    with pytest.raises(ValueError, match="at least two pairs"):
        _ = mean.pairs[0].interval


class Letters:
    """A tokenizer of one token a letter that knows its characters."""

    is_fast = True

    def __call__(self, text: str, return_offsets_mapping: bool = False, add_special_tokens: bool = True) -> Any:
        ids = [3 + ord(letter) % (VOCAB - 3) for letter in text]
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self(text)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


def test_pairs_of_other_lengths_are_compared_by_names_or_together() -> None:
    host = open_host("torch", make_family("GPT2"))
    asked: dict[str, Any] = {
        "clean": ["abxcd", "abbxcdd"],
        "corrupt": ["aexcd", "aeexcdd"],
        "answer": 4,
        "foil": 9,
        "tokenizer": Letters(),
        "sites": "resid_pre",
        "progress": False,
    }
    by_name = sweep(host, positions=["xc", Span("d")], **asked)
    every = [
        sweep(host, **{**asked, "clean": clean, "corrupt": corrupt}) for clean, corrupt in zip(asked["clean"], asked["corrupt"])
    ]
    expected = (every[0].effect[:, [2, 3, 4]] + every[1].effect[:, [3, 4, 5]]) / 2
    np.testing.assert_allclose(by_name.effect, expected, atol=1e-10)
    assert len(sweep(host, together=True, **asked).columns) == 1
    for positions in (None, [1], [1, "x"]):
        with pytest.raises(ValueError, match=r"pair 1 are not those of pair 0.*equal lengths.*Span.*together=True"):
            sweep(host, positions=positions, **asked)
    for wrong in ({"corrupt": ["aexcd"]}, {"corrupt": "aexcd"}, {"answer": [4, 4, 4]}):
        with pytest.raises(ValueError, match="several pairs of prompts need as many of each"):
            sweep(host, together=True, **{**asked, **wrong})


def test_heads_are_drawn_by_layer_and_head(tmp_path: Path) -> None:
    host = open_host("torch", make_family("Qwen3"))
    grid = sweep(host, sites=["z", "blocks.1.k"], heads=True, together=True, progress=False, **ASKED)
    drawn = grid.heatmap(tmp_path / "heads.svg").read_text()
    assert drawn.count("<!-- head of z -->") == drawn.count("<!-- head of k -->") == 1
    assert drawn.count("<!-- layer -->") == 2
    assert "blocks." not in drawn
    assert "blocks." in sweep(host, sites="z", heads=True, progress=False, **ASKED).heatmap(tmp_path / "all.svg").read_text()
