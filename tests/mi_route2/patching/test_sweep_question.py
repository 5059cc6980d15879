"""The question of a sweep: prompts, their alignment, positions, answers, sites; refused questions; groups of cells."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from decoders import make_decoder
from families import SPECS, VOCAB, make_family
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mi_route2.hosts import Host, open_host
from mi_route2.patching import Alignment, CleanRun, Grid, Span, Target, align, attribute, paths, prepare, sweep, tokens_of
from mi_route2.patching.forwards import Limits, plan
from mi_route2.patching.question import Grader, one_token, places, read
from mi_route2.patching.targets import choose
from mi_route2.sites import Site
from studies.environments.micro.language import Vocabulary

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(prompts, prompts)
def test_partners_are_the_longest_common_ends(clean: list[int], corrupt: list[int]) -> None:
    if len(clean) == len(corrupt):
        found = align(clean, corrupt)
        assert [found.source(i) for i in range(len(corrupt))] == list(range(len(corrupt)))
        assert not found.skipped
        return
    if clean[0] != corrupt[0] and clean[-1] != corrupt[-1]:
        with pytest.raises(ValueError, match="neither their beginning nor their end"):
            align(clean, corrupt)
        return
    found = align(clean, corrupt)
    pairs = [(found.source(i), i) for i in range(len(corrupt)) if found.source(i) is not None]
    assert all(clean[source] == corrupt[i] for source, i in pairs)
    assert all(one[0] < other[0] for one, other in combinations(pairs, 2))  # no token has two partners, and order stays
    assert [i for i in range(len(corrupt)) if found.source(i) is None] == list(found.skipped)
    # Neither end could go on: they meet, or the next tokens differ.
    room = min(len(clean), len(corrupt)) - found.prefix - found.suffix
    if room:
        assert clean[found.prefix] != corrupt[found.prefix]
        assert clean[-1 - found.suffix] != corrupt[-1 - found.suffix]
    assert str(len(found.skipped)) in found.summary


@given(prompts)
def test_one_more_token_in_the_middle_leaves_the_rest_as_partners(tokens: list[int]) -> None:
    found = align([*tokens, 7, *tokens], [*tokens, *tokens])
    assert (found.prefix, found.suffix) == (len(tokens), len(tokens))
    back = align([*tokens, *tokens], [*tokens, 7, *tokens])
    assert list(back.skipped) == [len(tokens)]
    assert back.source(len(tokens) + 1) == len(tokens)


def test_lengths_alone_align_only_where_they_are_equal() -> None:
    assert align(None, [1, 2], clean_length=2) == Alignment(2, 2, 2, 0)
    for arguments, words in (
        (({"clean_length": 3}), "give the clean prompt's tokens to align them"),
        (({}), "or at least their number"),
    ):
        with pytest.raises(ValueError, match=words):
            align(None, [1, 2], **arguments)
    with pytest.raises(ValueError, match="is empty"):
        align([], [1])
    with pytest.raises(ValueError, match="is not possible"):
        Alignment(3, 2, 2, 1)
    with pytest.raises(ValueError, match=r"outside the corrupt prompt, which has 0\.\.1"):
        Alignment(2, 2, 2, 0).source(2)


@given(st.text("ab ", min_size=1, max_size=14), st.text("ab ", min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 3))
def test_a_span_is_every_token_that_shares_a_character_with_it(text: str, part: str, width: int, occurrence: int) -> None:
    offsets = [(0, 0), *((i, min(i + width, len(text))) for i in range(0, len(text), width))]
    where = [i for i in range(len(text)) if text[i : i + len(part)] == part]
    if occurrence >= len(where):
        with pytest.raises(ValueError, match=f"{len(where)} times"):
            tokens_of(text, part, offsets, occurrence)
        return
    characters = set(range(where[occurrence], where[occurrence] + len(part)))
    expected = tuple(i for i, (a, b) in enumerate(offsets) if characters & set(range(a, b)))
    assert tokens_of(text, part, offsets, occurrence) == expected


def words() -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(["?", "the", "cat", "sat", "on", "mat", "dog"])}
    inner = Tokenizer(WordLevel(ids, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def test_positions_can_be_named_by_what_stands_there() -> None:
    prompt = read("the cat sat on the mat", words(), "corrupt")
    assert prompt.tokens == (1, 2, 3, 4, 1, 5)
    assert prompt.labels == ("the", "cat", "sat", "on", "the", "mat")
    assert places("the", prompt) == (0,)
    assert places(Span("the", occurrence=1), prompt) == (4,)
    assert places(["at on", 5], prompt) == (2, 3, 5)
    assert places(range(2, 4), prompt) == (2, 3)
    assert places(None, prompt) == tuple(range(6))
    plain = {"encode": lambda _, text: [ord(c) for c in text], "decode": lambda _, ids: chr(ids[0])}
    for chosen, among, said in (
        ([1, 6], prompt, r"outside the corrupt prompt, which has 0\.\.5"),
        (-1, prompt, "positions count from 0"),
        ([], prompt, "no positions"),
        (Span("the", occurrence=2), prompt, "no occurrence 2"),
        ("the", read([1, 2], words(), "corrupt"), "give the prompt as text"),
        ("a", read("ab", type("Own", (), plain)(), "x"), "does not give the characters"),
    ):
        with pytest.raises(ValueError, match=said):
            places(chosen, among)
    for part, said in (("x", "overlaps 'x' at character 0"), ("", "part is empty")):
        with pytest.raises(ValueError, match=said):
            tokens_of("x y", part, [(2, 3)])


def test_prompts_are_rows_of_ids_or_texts() -> None:
    assert read(torch.tensor([[3, 4]]), None, "clean").tokens == (3, 4)
    assert read([3, 4], None, "clean").labels == ("3", "4")
    vocabulary = Vocabulary()
    text = vocabulary.tokens[7] + vocabulary.tokens[9]
    assert read(text, vocabulary, "clean").tokens == tuple(vocabulary.encode(text))
    for prompt, tokenizer, said in (
        ("the cat", None, "there is no tokenizer"),
        ("", words(), "no tokens"),
        ([], None, "no tokens"),
        (torch.zeros(2, 3, dtype=torch.long), None, "one row of token ids"),
        (torch.zeros(3), None, "one row of token ids"),
    ):
        with pytest.raises(ValueError, match=said):
            read(prompt, tokenizer, "clean")


def host() -> Host:
    return open_host("torch", make_family("Qwen3"))


ASKED: dict[str, Any] = {"clean": [5, 6, 7], "corrupt": [5, 8, 9], "sites": "resid_pre", "answer": 3, "foil": 4}


def paths_to_the_end(host: Host, sites: Any, **given: Any) -> Grid:
    return paths(host, senders=sites, receivers=Site(1, "resid_post"), **given)


every_way = pytest.mark.parametrize("asking", [sweep, attribute, paths_to_the_end])


@every_way
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"sites": "resid_prf"}, KeyError, "nearest are resid_pre"),
        ({"sites": "blocks.*.attn.q.kept_a"}, KeyError, "attach them first, with host.attach"),
        ({"sites": Site(7, "q")}, KeyError, r"layers are 0\.\.1"),
        ({"sites": []}, ValueError, "no sites"),
        ({"sites": Target(Site(0, "z"), 4)}, ValueError, r"heads 0\.\.3"),
        ({"sites": "blocks.0.k[2]"}, ValueError, r"heads 0\.\.1"),
        ({"heads": True}, ValueError, "none of the sites has heads"),
        ({"positions": 3}, ValueError, r"0\.\.2"),
        ({"answer": "cat sat", "tokenizer": words()}, ValueError, "is 2 tokens"),
        ({"answer": ""}, ValueError, "there is no tokenizer"),
        ({"answer": VOCAB}, ValueError, rf"the vocabulary is 0\.\.{VOCAB - 1}"),
        ({"foil": -1}, ValueError, "is not a token"),
        ({"foil": None}, ValueError, "logit_diff needs foil"),
        ({"metric": "logprob"}, ValueError, "logprob takes no foil"),
        ({"metric": "kl", "foil": None}, ValueError, "kl takes no answer"),
        ({"metric": "loss"}, ValueError, "logit_diff, logprob, kl"),
        ({"foil": 3}, ValueError, "always 0"),
        ({"clean": [1, 8, 7, 7]}, ValueError, "neither their beginning nor their end"),
        ({"at": 3}, ValueError, r"0\.\.2"),
        ({"clean": [5, 6, 6, 9], "at": 1}, ValueError, "cannot be scored"),
        ({"positions": [2], "at": 1}, ValueError, "after position 1"),
        ({"clean": [5, 6, VOCAB]}, ValueError, rf"the clean prompt's {VOCAB} is not a token: the vocabulary is 0\.\.{VOCAB - 1}"),
        ({"corrupt": [5, 8, -1]}, ValueError, "the corrupt prompt's -1 is not a token"),
        ({"alpha": float("nan")}, ValueError, "alpha=nan is not a finite number"),
        ({"at": True}, ValueError, "at=True is not a position"),
        ({"clean": [5] * 65, "corrupt": [6] * 65, "positions": 0}, ValueError, "the model takes at most 64"),
    ],
)
def test_what_cannot_be_asked_is_said(asking: Any, changes: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        asking(HOST, **{**ASKED, **changes})


HOST = host()


def unscored() -> CleanRun:
    """A captured run whose logits are not numbers."""
    run = CleanRun.capture(HOST, [5, 6, 7], "resid_pre")
    return CleanRun(run.values, torch.full_like(run.logits, float("nan")), run.tokens)


def test_what_cannot_be_run_is_said() -> None:
    for changes, said in (
        ({"replicas": 2}, "at least 3"),
        ({"batch": 0}, "at least 1"),
        ({"how": "fast"}, "auto, resumed, whole"),
        ({"clean": [5] * 65, "corrupt": [6] * 65, "how": "whole"}, "the model takes at most 64"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare(HOST, **{**ASKED, **changes})
    bloom = open_host("torch", make_decoder("Bloom"))
    with pytest.raises(ValueError, match="no forward can resume: use whole"):
        sweep(bloom, **ASKED, how="resumed")
    dropping = make_family("GPT2")
    dropping.transformer.h[0].resid_dropout = dropping.transformer.h[0].mlp.dropout = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"call host\.model\.eval"):
        sweep(open_host("torch", dropping.train()), **ASKED)
    with pytest.raises(ValueError, match=r"call host\.model\.eval"):
        CleanRun.capture(open_host("torch", dropping.train()), [5, 6, 7], "resid_pre")
    sweep(open_host("torch", dropping.eval()), **ASKED)
    for prompt, said in (([5, VOCAB], "is not a token"), ([5] * 65, "at most 64")):
        with pytest.raises(ValueError, match=said):
            CleanRun.capture(HOST, prompt, "resid_pre")
    for run, said in (
        (lambda: CleanRun({}, torch.zeros(VOCAB), (5, 6, 7)), "values of at least one site"),
        (lambda: CleanRun({Site(0, "z"): torch.zeros(3, 16)}, torch.zeros(1, VOCAB)), r"logits must be Float"),
        (lambda: sweep(HOST, **{**ASKED, "clean": unscored()}), "the score of the clean run is nan"),
    ):
        with pytest.raises(ValueError, match=said):
            run()
    with pytest.raises(ValueError, match="no path leads from"):
        paths(HOST, senders="mlp_out", receivers=Site(0, "q"), **{k: v for k, v in ASKED.items() if k != "sites"})
    with pytest.raises(ValueError, match=r"blocks\.1\.q\[9\] is outside"):
        paths(HOST, senders=Site(0, "z"), receivers="blocks.1.q[9]", **{k: v for k, v in ASKED.items() if k != "sites"})


@pytest.mark.parametrize("metric", ["kl", "logprob", "logit_diff"])
@every_way
def test_a_clean_run_without_numbers_is_compared_by_no_metric(asking: Any, metric: str) -> None:
    """Its divergence from itself, and from every patched run, would be 0 if tokens whose chance is NaN were left out."""
    tokens = {"kl": {"answer": None, "foil": None}, "logprob": {"foil": None}}.get(metric, {})
    with pytest.raises(ValueError, match="the score of the clean run is nan"):
        asking(HOST, **{**ASKED, **tokens, "metric": metric, "clean": unscored()})


def test_tokens_that_the_clean_run_rules_out_add_nothing_to_a_divergence() -> None:
    """``0 log 0 = 0``: the divergence is that of the other tokens."""
    clean, patched = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    without = torch.tensor([1, 4, 8])
    rest = [i for i in range(9) if i not in without.tolist()]
    grader = Grader("kl")
    expected = grader(patched[None, rest], clean[rest])
    ruled_out = (row.index_fill(0, without, float("-inf")) for row in (patched, clean))
    torch.testing.assert_close(grader(next(ruled_out)[None], next(ruled_out)), expected, rtol=1e-12, atol=0)
    assert expected > 0.01


def test_a_path_that_can_be_received_nowhere_is_an_error() -> None:
    asked = {key: value for key, value in ASKED.items() if key != "sites"}
    with pytest.raises(ValueError, match="comes after position 1, which is scored"):
        paths(HOST, senders=Site(0, "z"), receivers=Site(1, "q"), received=[2], at=1, **asked)


def test_tokens_of_numpy_and_heads_that_are_named_twice_are_taken() -> None:
    assert one_token(np.int64(3), None, "answer") == 3
    heads: Any = {**ASKED, "heads": True, "progress": False}
    twice = sweep(HOST, **{**heads, "sites": [Site(0, "z"), "blocks.0.z[1]"]})
    np.testing.assert_array_equal(twice.values, sweep(HOST, **{**heads, "sites": Site(0, "z")}).values)
    with pytest.raises(ValueError, match="no head True"):
        Target(Site(0, "z"), True)


def test_adapters_that_are_switched_off_or_merged_are_no_sites() -> None:
    adapted = open_host("torch", make_family("Qwen3"))
    adapters = adapted.attach("blocks.*.mlp.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    points = {"on": {"kept_a", "kept_out", "quarantine_out"}, "deployed": {"kept_a", "kept_out"}, "merged": set()}
    for state, switched in (("on", adapters.full), ("deployed", adapters.deployed), ("merged", adapters.merged)):
        with switched():
            assert {site.point for site in adapted.sites() if site.linear} == points[state]
    with adapters.deployed(), pytest.raises(KeyError, match="no site matches 'quarantine_out'"):
        sweep(adapted, **{**ASKED, "sites": "quarantine_out"})


def test_sites_are_chosen_by_point_by_glob_or_by_themselves() -> None:
    def names(*sites: Any) -> list[str]:
        return [str(target) for target in choose(HOST, list(sites))]

    assert names("z") == ["blocks.0.z", "blocks.1.z"]
    assert names("blocks.1.mlp_*", Site(1, "mlp_in"), "blocks.0.q[1]") == ["blocks.1.mlp_in", "blocks.1.mlp_out", "blocks.0.q[1]"]
    assert len(names("*")) == 22
    for text in ("blocks.3.z[2]", "blocks.0.resid_pre", "unembed.kept_a", "blocks.1.mlp.down.quarantine_out"):
        assert str(Target.parse(text)) == text
    with pytest.raises(ValueError, match="read the same stream in parallel"):
        choose(open_host("torch", make_family("GPTNeoX")), "resid_mid")
    with pytest.raises(ValueError, match="is not a site"):
        Target.parse("z[2]")
    with pytest.raises(ValueError, match="is not a site"):
        Target.parse("blocks.0.z[02]")  # a second name
    with pytest.raises(ValueError, match="has no head"):
        Target(Site(0, "mlp_out"), 1)
    with pytest.raises(ValueError, match="3 is not a site: write 'resid_pre'"):
        choose(HOST, (one for one in ["z", 3]))  # pyright: ignore[reportArgumentType]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=30),
    st.builds(Limits, length=st.just(6), most=st.integers(6, 40), most_positions=st.just(99)),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_groups_hold_every_cell_once_and_are_as_large_as_they_may_be(
    places: list[tuple[int, int]], limits: Limits, batch: int | None
) -> None:
    groups = plan(places, limits, batch)
    assert sorted(cell for group in groups for cell in group.cells) == list(range(len(places)))
    for i, group in enumerate(groups):
        positions = [places[cell][1] for cell in group.cells]
        assert group.start == min(positions)
        room = min(limits.rows(6 - group.start), batch or 99)
        assert len(group.cells) == room or (i == len(groups) - 1 and len(group.cells) < room)
        entries = [places[cell][0] for cell in group.cells]
        assert entries == sorted(entries)
        assert all(max(positions) <= places[cell][1] for later in groups[i + 1 :] for cell in later.cells)
