"""Sites, logical Linears and the rows of architectures: names go round, wrong names are answered with the nearest, counts hold."""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, LAYERS, WIDTH, make_family
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.architectures import (
    ADAPTER_POINTS,
    ARCHITECTURES,
    BRIDGE_LINEARS,
    BRIDGE_POINTS,
    HEADED,
    LINEARS,
    POINTS,
    architecture_of,
    heads,
)
from mi_route2.hosts.base import known_architecture
from mi_route2.sites import Site, nearest, select, slots

SITES = st.one_of(
    st.builds(Site, st.integers(0, 200), st.sampled_from(list(POINTS))),
    st.builds(Site, st.integers(0, 200), st.sampled_from(list(ADAPTER_POINTS)), st.sampled_from(LINEARS)),
    st.builds(Site, st.none(), st.sampled_from(list(ADAPTER_POINTS)), st.just("unembed")),
)


# ---- names


@given(SITES)
def test_a_site_is_what_its_name_says(site: Site) -> None:
    assert Site.parse(str(site)) == site
    assert hash(Site.parse(str(site))) == hash(site)
    assert str(site).startswith(site.slot if site.linear else f"blocks.{site.layer}.")


@given(SITES, st.integers(0, 30), st.sampled_from(["", *"blocks.unembd01_attnqresidkp "]))
def test_what_parses_is_a_name_and_all_else_is_one_of_two_errors(site: Site, at: int, put: str) -> None:
    """Names of sites, most of them with a character that another one replaces, or that is left out."""
    text = str(site)
    changed = text[:at] + put + text[at + 1 :]
    try:
        found = Site.parse(changed)
    except (KeyError, ValueError):
        return
    assert str(found) == changed


@given(st.lists(SITES, min_size=2, max_size=6))
def test_sites_sort_by_layer_with_the_unembedding_last(sites: list[Site]) -> None:
    layers = [site.layer for site in sorted(sites)]
    assert layers == sorted(layers, key=lambda layer: (layer is None, layer or 0))
    turned = sites[::-1]
    assert sorted(sites) == sorted(turned)
    assert all((a < b) + (b < a) + (a == b) == 1 for a, b in itertools.pairwise(sites))


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: Site(0, "resid"), KeyError, r"'resid' is not a point: the nearest are resid_\w+, resid_\w+"),
        (lambda: Site(0, "Q"), KeyError, "is not a point"),
        (lambda: Site.parse("blocks.0.kept"), KeyError, r"'kept' is not a point: the nearest are kept_\w+, kept_\w+"),
        (lambda: Site(0, "kept_a", "mlp.dwon"), KeyError, "'mlp.dwon' is not a logical Linear: the nearest are mlp.down"),
        (lambda: Site.parse("blocks.0.attn.x.kept_a"), KeyError, "'attn.x' is not a logical Linear"),
        (lambda: Site(0, "kept_a"), ValueError, "name it, as in Site"),
        (lambda: Site(0, "q", "attn.q"), ValueError, "'q' is a point of a block, as in"),
        (lambda: Site(None, "resid_post"), ValueError, "only the unembedding has no layer"),
        (lambda: Site(0, "kept_a", "unembed"), ValueError, "only the unembedding has no layer"),
        (lambda: Site(None, "kept_a", "mlp.up"), ValueError, "only the unembedding has no layer"),
        (lambda: Site(-1, "resid_post"), ValueError, "layer -1 does not exist"),
        (lambda: Site(True, "resid_post"), ValueError, "layer True does not exist"),
        (lambda: Site.parse("blocks.-1.resid_post"), ValueError, "is not a site: write blocks.3.resid_mid"),
        (lambda: Site.parse("block.0.resid_post"), ValueError, "is not a site: write blocks.3.resid_mid"),
        (lambda: Site.parse("blocks.03.resid_post"), ValueError, "is not a site: write blocks.3.resid_mid"),
        (lambda: Site.parse("blocks.0"), ValueError, "is not a site: write blocks.3.resid_mid"),
        (lambda: Site.parse("unembed.resid_post"), ValueError, "'resid_post' is a point of a block"),
    ],
)
def test_a_wrong_site_is_answered_with_what_is_right(make: Callable[[], Site], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()


@given(st.sampled_from([*POINTS, *ADAPTER_POINTS, *LINEARS]), st.integers(0, 20), st.sampled_from("abz_"))
def test_the_nearest_name_to_one_wrong_letter_is_the_right_one(name: str, place: int, letter: str) -> None:
    known = [*POINTS, *ADAPTER_POINTS, *LINEARS]
    if len(name) > 3:
        place %= len(name)
        assert name in nearest(name[:place] + letter + name[place + 1 :], known).split(", ")
    assert nearest(name, []) == "none at all"


# ---- rows


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_every_point_and_names_only_what_there_is(name: str) -> None:
    model = make_family(name)
    row = known_architecture(model)
    assert row.name == name
    assert row.points.keys() == POINTS.keys()
    assert set(row.linears) <= set(LINEARS)
    assert row.bridge_points.keys() <= BRIDGE_POINTS.keys()
    assert row.bridge_linears.keys() <= BRIDGE_LINEARS.keys()
    assert all(at.path in row.linears for at in row.points.values() if not isinstance(at, str) and at.linear)
    assert {point for point in HEADED if heads(model, point) != 4} == ({"k", "v"} if name in GROUPED else set())


GROUPED = ("Qwen3", "Llama", "Mistral", "Gemma2", "Gemma3")


def test_every_row_has_a_tiny_model() -> None:
    """TransformerLens's own models have theirs in the tests of its host."""
    rows = {row.name for row in ARCHITECTURES.values() if "NativeModel" not in row.classes}
    assert {architecture_of(make_family(name)).name for name in FAMILIES} == rows


@pytest.mark.parametrize("name", FAMILIES)
def test_logical_linears_partition_the_weights_of_the_blocks(name: str) -> None:
    """Every number of a matrix in a block belongs to exactly one logical Linear; nothing is left out, nothing is there twice."""
    model = make_family(name)
    found = slots(model)
    per_block = len(known_architecture(model).linears)
    assert list(found)[-1] == "unembed"
    assert len(found) == LAYERS * per_block + 1
    numbers = torch.cat([slot.weight.flatten() for slot in found.values()]).sort().values
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    matrices = [p for m in others for p in m.parameters(recurse=False) if p.ndim == 2]
    assert torch.equal(numbers, torch.cat([p.flatten() for p in matrices]).sort().values)
    for slot in found.values():
        d_in = {"attn.o": WIDTH, "mlp.down": 24}.get(slot.name.split(".", 2)[-1], WIDTH)
        assert slot.weight.shape[1] == d_in, slot.name


@pytest.mark.parametrize(
    ("patterns", "micro", "llama", "gpt2"),
    [
        (("blocks.*",), 12, 14, 12),
        (("*",), 13, 15, 13),
        (("blocks.*.attn.*",), 8, 8, 8),
        (("blocks.*.attn.[qk]",), 4, 4, 4),
        (("blocks.0.*", "blocks.*.attn.q"), 7, 8, 7),
        (("unembed",), 1, 1, 1),
    ],
)
def test_patterns_select_counts(patterns: tuple[str, ...], micro: int, llama: int, gpt2: int) -> None:
    for name, count in (("MicroGPT", micro), ("Llama", llama), ("Gemma2", llama), ("GPT2", gpt2), ("GPTNeoX", gpt2)):
        model = make_family(name)
        assert len(select(model, *patterns, expect=count)) == count
        with pytest.raises(
            ValueError, match=rf"selected {count} Linears, not 99: blocks|selected {count} Linears, not 99: unembed"
        ):
            select(model, *patterns, expect=99)


def test_a_pattern_without_a_match_names_the_nearest_also_beside_one_that_matches() -> None:
    model = make_family("GPT2")
    with pytest.raises(KeyError, match=r"no Linear matches 'blocks\.\*\.mlp\.gate'; the nearest names are: blocks\.\d\.mlp"):
        select(model, "blocks.*.mlp.*", "blocks.*.mlp.gate")
    with pytest.raises(KeyError, match=r"'transformer\.h\.0\.attn\.c_attn'"):
        select(model, "transformer.h.0.attn.c_attn")
    with pytest.raises(ValueError, match="at least one pattern"):
        select(model)


def test_a_rank_that_does_not_fit_names_the_linear() -> None:
    """Key-value heads are fewer, so that a rank may fit q and not k."""
    model = make_family("Qwen3")
    with pytest.raises(ValueError, match=r"rank 12 is outside 1\.\.8 of this Linear, blocks\.0\.attn\.k"):
        attach(model, "blocks.*", spec=AdapterSpec(kept="lora", rank=12), generator=torch.Generator())


# ---- other models


class Another(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def test_an_unknown_architecture_has_its_linears_under_their_own_names() -> None:
    model = Another()
    assert list(slots(model)) == ["encoder.0", "encoder.2", "head"]
    adapters = attach(model, "encoder.*", spec=AdapterSpec(kept="lora", rank=2, quarantine_rank=1), generator=torch.Generator())
    assert list(adapters.sites) == ["encoder.0", "encoder.2"]
    assert model(torch.ones(3, 4)).shape == (3, 2)
    with pytest.raises(ValueError, match=r"Another is no known architecture, and no model of transformers"):
        known_architecture(model)


def test_a_class_of_two_rows_is_told_apart_by_its_config() -> None:
    parallel, sequential = make_family("GPTNeoX"), make_family("GPTNeoX (sequential)")
    assert type(parallel) is type(sequential)
    assert architecture_of(parallel) is ARCHITECTURES["GPTNeoX"]
    assert architecture_of(sequential) is ARCHITECTURES["GPTNeoX (sequential)"]
    assert isinstance(ARCHITECTURES["GPTNeoX"].points["resid_mid"], str)


@pytest.mark.parametrize(("name", "path"), [("Llama", "model.layers"), ("GPT2", "transformer.h"), ("MicroGPT", "blocks")])
def test_a_tree_that_is_not_its_rows_is_said(name: str, path: str) -> None:
    model = make_family(name)
    parent, _, leaf = path.rpartition(".")
    blocks = model.get_submodule(path)
    delattr(model.get_submodule(parent), leaf)
    setattr(model.get_submodule(parent), "stages", blocks)  # noqa: B010
    with pytest.raises(ValueError, match=f"has no module '{re.escape(path)}', which the row '{name}'"):
        attach(model, "blocks.*", generator=torch.Generator())
    assert all(p.requires_grad for p in model.parameters())


def test_a_config_without_heads_is_said() -> None:
    model = make_family("GPT2")
    model.config = type("Bare", (), {"use_cache": False})()
    with pytest.raises(ValueError, match="gives no number of heads: it needs one of num_attention_heads, n_head, n_heads, heads"):
        slots(model)
