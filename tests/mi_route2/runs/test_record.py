"""A record equals ``host.capture``: on every host, at every site, of the real tokens alone."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, LAYERS, SPECS, make_family, make_tokens, move
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2 import files
from mi_route2.architectures import ADAPTER_POINTS, POINTS
from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.runs import RunStore
from mi_route2.runs.record import SEQUENCE_PARTS, TokenSelection, record
from mi_route2.sites import Site

FAMILY = "Qwen3"
ROWS = [f"row {i}" for i in range(4)]
EVERYWHERE = [
    *(Site(layer, point) for layer in range(LAYERS) for point in POINTS),
    *(Site(1, point, "mlp.down") for point in ADAPTER_POINTS),
    *(Site(0, point, "attn.q") for point in ADAPTER_POINTS),
]
SOME = [Site(0, "resid_mid"), Site(1, "z"), Site(1, "kept_a", "mlp.down")]


@cache
def host_of(name: str, family: str = FAMILY) -> Host:
    host = open_host(name, make_family(family))
    linear = "blocks.*.mlp.down", "blocks.*.attn.q"
    move(host.attach(*linear, spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    return host


def gap(store: RunStore, run: str, site: Site, expected: Tensor) -> float:
    found = store.rows(run, site, store.positions(run, site))
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", list(HOSTS))
def test_rows_are_those_of_capture_at_every_site_of_every_host(name: str) -> None:
    """To the last bit: the same forward, less what is padding. Padding is on the right, as every host allows in float64."""
    host, (tokens, attention), store = host_of(name), make_tokens(4), RunStore()
    before = host.logits(tokens, attention)
    record(host, EVERYWHERE, tokens, attention, store=store, runs=ROWS, weights="w", meta={"family": FAMILY})
    assert torch.equal(host.logits(tokens, attention), before)
    values = host.capture(EVERYWHERE, tokens, attention)
    for run, row, real in zip(ROWS, range(4), attention, strict=True):
        info = store.info(run)
        assert list(info.tokens) == tokens[row][real].tolist()
        assert info.prompt_length == int(real.sum())
        assert info.meta == {"family": FAMILY}
        assert set(info.sites) == set(EVERYWHERE)
        for site in EVERYWHERE:
            assert store.positions(run, site) == list(range(int(real.sum())))
            assert gap(store, run, site, values[site][row][real]) == 0.0


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_its_rows_alone(family: str, side: Any) -> None:
    """Padded on either side: the same rows at the same positions as of each sequence by itself, to float64's noise."""
    host, (tokens, attention), store = host_of("torch", family), make_tokens(4, side), RunStore()
    sites = [Site(0, "resid_post"), *SOME[1:]]  # not every block has a resid_mid
    record(host, sites, tokens, attention, store=store, runs=ROWS, weights="w")
    for run, row, real in zip(ROWS, tokens, attention, strict=True):
        record(host, sites, row[real][None], store=store, runs=[f"{run} alone"], weights="w")
        for site in sites:
            assert store.positions(run, site) == store.positions(f"{run} alone", site)
            alone = store.rows(f"{run} alone", site, store.positions(f"{run} alone", site))
            assert gap(store, run, site, alone) < 1e-12


@settings(max_examples=12)
@given(
    side=st.sampled_from(["left", "right"]),
    choice=st.one_of(
        st.fixed_dictionaries({"part": st.sampled_from(SEQUENCE_PARTS)}),
        st.fixed_dictionaries({"positions": st.lists(st.integers(0, 3), min_size=1, unique=True)}),
    ),
    ids=st.none() | st.sets(st.integers(3, 49), min_size=10),
    prompts=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_only_what_the_selection_names_is_kept(side: Any, choice: dict[str, Any], ids: set[int] | None, prompts: list[int]) -> None:
    host, (tokens, attention), store = host_of("torch"), make_tokens(4, side), RunStore()
    selection = TokenSelection(**choice, token_ids=ids)
    record(host, SOME, tokens, attention, store=store, runs=ROWS, weights="w", selection=selection, prompt_lengths=prompts)
    values = host.capture(SOME, tokens, attention)
    for row, (run, prompt) in enumerate(zip(ROWS, prompts, strict=True)):
        real = attention[row]
        kept = selection.rows(tokens[row][real].tolist(), 0, prompt)
        assert store.info(run).prompt_length == prompt
        assert set(store.info(run).sites) == (set(SOME) if kept else set())
        for site in SOME if kept else []:
            assert store.positions(run, site) == kept
            assert gap(store, run, site, values[site][row][real][kept]) == 0.0


# ---- wrong use leaves nothing


def refused(error: type[Exception], sentence: str, sites: Sequence[Site] = SOME, **given: Any) -> RunStore:
    store = given.pop("store", None) or RunStore()
    host, (tokens, attention) = given.pop("host", None) or host_of("torch"), make_tokens(4)
    before = store.runs(), store.stats()
    arguments = {"runs": ROWS, "weights": "w", "attention": attention, **given}
    with pytest.raises(error, match=sentence) as caught:
        record(host, sites, tokens, store=store, **arguments)
    assert "\n" not in str(caught.value)
    assert (store.runs(), store.stats()) == before
    return store


def test_wrong_use_is_one_sentence_and_leaves_nothing() -> None:
    refused(ValueError, "give at least one site", sites=[])
    refused(ValueError, "4 rows were given 3 run ids and 4 prompt lengths", runs=ROWS[:3])
    refused(ValueError, r"runs is the text 'abcd': give one id for each row, as \['abcd'\]", runs="abcd")
    refused(ValueError, "4 rows were given 4 run ids and 1 prompt lengths", prompt_lengths=[2])
    refused(ValueError, "there is already a run 'row 0'", runs=["row 0"] * 4)
    refused(ValueError, "row of run 'row 0' has no real token", attention=torch.zeros_like(make_tokens(4)[1]))
    refused(ValueError, "a prompt of 7 tokens but 4", prompt_lengths=[2, 2, 2, 7])
    refused(ValueError, "hash of the weights", weights="")
    never = TokenSelection(positions=[1, 6, 8])
    refused(ValueError, "the row of run 'row 1' has 7 tokens, so no position 8: give 0 to 6", selection=never)
    refused(KeyError, "no adapter at 'blocks.0.mlp.up'", sites=[Site(0, "kept_a", "mlp.up")])


class Deaf(TorchHost):
    """A host whose forward does not run the model, as a cache in front of it would not."""

    def _logits(self, tokens: Tensor, attention: Tensor | None) -> Tensor:
        return torch.zeros(*tokens.shape, 1)


def test_a_hook_that_does_not_fire_is_an_error_and_no_run_is_there() -> None:
    refused(RuntimeError, "these hooks did not fire: blocks.0.resid_mid", host=Deaf(host_of("torch").model))


def test_a_run_that_cannot_be_finished_takes_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(0, tmp_path)
    write, done = files.write_synced, []

    def full(path: Path, data: bytes) -> None:
        if len(done) == 2:
            raise OSError(28, "no room")
        done.append(path)
        write(path, data)

    monkeypatch.setattr(files, "write_synced", full)
    refused(OSError, "no room", store=store)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
