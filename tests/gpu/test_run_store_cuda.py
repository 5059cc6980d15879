"""Runs that are captured on a CUDA device: streamed to memory and disk, read back to the bit, put in again on the device."""

from pathlib import Path

import pytest
import torch
from families import SPECS, VOCAB, make_family, make_tokens, move
from gpu import DEVICE, NEEDS
from torch import Tensor

from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Capture, Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection, record
from mi_route2.sites import Site

pytestmark = [pytest.mark.gpu, NEEDS]
DTYPES = [torch.float32, torch.bfloat16]
SITES = [Site(0, "resid_pre"), Site(0, "z"), Site(1, "kept_a", "mlp.down"), Site(1, "quarantine_out", "attn.o")]
TIERS = {"memory": (None, False), "disk": (0, True), "both": (None, True)}


def on_device(dtype: torch.dtype) -> Host:
    made = open_host("torch", make_family("Qwen3", dtype).to(DEVICE))
    move(made.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.2)
    return made


def opened(tier: str, folder: Path) -> RunStore:
    budget, disk = TIERS[tier]
    return RunStore(budget, folder if disk else None)


def prompts(n: int = 4) -> list[tuple[int, ...]]:
    tokens, attention = make_tokens(n, longest=20)
    return [tuple(row[real].tolist()) for row, real in zip(tokens, attention, strict=True)]


def asked(n: int = 5) -> Sampling:
    return Sampling(max_new=n, logprob_token_ids=tuple(range(VOCAB)))


def table(result: Result) -> Tensor:
    assert result.finish == "length", result.error
    return torch.tensor([token.requested for token in result.tokens])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_streams_to_the_store_is_what_comes_with_the_result(tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In exact mode twice the same bits: once into runs, in pieces as they are computed, and once into results."""
    made, keep = on_device(dtype), tuple(Capture(site) for site in SITES)
    with opened(tier, tmp_path) as store:
        engine = Engine(made, rows=3, chunk=4, block=4, budget=16, store=store, exact=True)
        streamed = engine.generate([Request(p, asked(), capture=keep, run=f"{i}") for i, p in enumerate(prompts())], progress=False)
        alone = Engine(made, rows=1, block=4, exact=True)
        held = alone.generate([Request(p, asked(), capture=keep) for p in prompts()], progress=False)
        for i, (one, other) in enumerate(zip(streamed, held, strict=True)):
            assert one.finish == "length", one.error
            assert list(store.info(f"{i}").tokens) == [*prompts()[i], *one.ids]
            for site in SITES:
                rows = other.captured[site].rows.cpu()
                positions = store.positions(f"{i}", site)
                assert positions == list(range(len(rows)))
                assert torch.equal(store.rows(f"{i}", site, positions), rows)
    if tier != "memory":
        with RunStore(0, tmp_path) as again:
            assert torch.equal(again.rows("0", SITES[0], [2, 0]), held[0].captured[SITES[0]].rows[[2, 0]].cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_that_is_put_in_again_changes_no_bit_and_makes_another_prompt_its_own(dtype: torch.dtype, tmp_path: Path) -> None:
    made, stream = on_device(dtype), Site(0, "resid_pre")
    with opened("both", tmp_path) as store:
        engine = Engine(made, store=store, exact=True)
        prompt = max(prompts(), key=len)
        other = tuple(token % (VOCAB - 4) + 3 for token in prompt)
        (plain,) = engine.generate([Request(prompt, asked(), capture=(Capture(stream),), run="clean")], progress=False)
        every = tuple(Patch(stream, i, FromRun("clean", i)) for i in range(len(prompt)))
        same, turned, left = engine.generate(
            [Request(prompt, asked(1), patch=every), Request(other, asked(1), patch=every), Request(other, asked(1))],
            progress=False,
        )
        assert torch.equal(table(same)[0], table(plain)[0])
        assert torch.equal(table(turned)[0], table(plain)[0])  # the whole input of the first block is the other prompt's
        assert not torch.equal(table(left)[0], table(plain)[0])


def test_record_keeps_what_the_host_captures_without_the_padding(tmp_path: Path) -> None:
    made = on_device(torch.float32)
    tokens, attention = (each.to(DEVICE) for each in make_tokens(3, longest=12))
    truth = made.capture(SITES, tokens, attention)
    with opened("both", tmp_path) as store:
        record(made, SITES, tokens, attention, store=store, runs=["a", "b", "c"], weights="w", selection=TokenSelection("prompt"))
        for i, run in enumerate("abc"):
            for site in SITES:
                rows = truth[site][i][attention[i]].cpu()
                assert torch.equal(store.rows(run, site, range(len(rows))), rows)
