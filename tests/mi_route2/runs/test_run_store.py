"""A run store returns what was written, bit for bit, or an error that says why there is nothing to read."""

import gc
import json
import logging
import math
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from mi_route2 import files
from mi_route2.runs import RunStore, Writer
from mi_route2.runs import disk as disk_module
from mi_route2.runs.disk import Stored
from mi_route2.runs.rows import LEAST, MOST, automatic, available
from mi_route2.sites import Site

MID, PRE, KEPT, UNEMBED = Site(0, "resid_mid"), Site(1, "resid_pre"), Site(1, "kept_a", "mlp.down"), Site(None, "kept_a", "unembed")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "memory": lambda folder: {},
    "disk": lambda folder: {"budget": 0, "folder": folder},
    "both": lambda folder: {"folder": folder},
}
Opened = Callable[..., RunStore]


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens stores, and closes them after the test."""
    stores: list[RunStore] = []

    def new(*args: Any, **given: Any) -> RunStore:
        stores.append(RunStore(*args, **given))
        return stores[-1]

    yield new
    for store in stores:
        store.close()


@pytest.fixture(params=list(TIERS))
def store(request: pytest.FixtureRequest, tmp_path: Path, opened: Opened) -> RunStore:
    return opened(**TIERS[request.param](tmp_path / "runs"))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write(store: RunStore, run: str, rows: Tensor, site: Site = MID, weights: str = "w") -> None:
    with store.writing(run, weights=weights) as writer:
        writer.append(site, range(len(rows)), rows)


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


def tamper(folder: Path, script: str) -> None:
    db = sqlite3.connect(folder / "index.sqlite")
    db.executescript(script)
    db.close()


# ---- what comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (1, 2, 3)], ids=str)
def test_every_type_and_shape_comes_back_bit_for_bit(store: RunStore, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = drawn(9, *shape, dtype=dtype)
    rows.view(-1)[:6] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, torch.finfo(dtype).tiny / 2, -float("inf")])
    write(store, "a", rows)
    assert bits(store.rows("a", MID, range(9))) == bits(rows)
    assert bits(store.slice("a", MID, 2, 7)) == bits(rows[2:7])
    assert bits(store.rows("a", MID, [])) == bits(rows[:0])


def test_the_payload_of_a_nan_survives(store: RunStore) -> None:
    odd = torch.tensor([0x7FC01234, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    write(store, "a", odd)
    assert bits(store.rows("a", MID, [2, 0, 1])) == bits(odd[[2, 0, 1]])


PLACES = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


@settings(max_examples=40)
@given(
    tier=st.sampled_from(list(TIERS)),
    order=st.fixed_dictionaries(dict.fromkeys((MID, KEPT, UNEMBED), PLACES)),
    steps=st.lists(st.tuples(st.sampled_from([MID, KEPT, UNEMBED]), st.integers(0, 5)), max_size=10),
    shard_bytes=st.sampled_from([1, 40, 4000]),
    asked=st.lists(st.integers(0, 11), max_size=15),
    ends=st.tuples(st.integers(0, 14), st.integers(0, 14)).map(sorted),
)
def test_rows_come_back_in_the_order_asked_however_they_came(
    tmp_path_factory: pytest.TempPathFactory,
    tier: str,
    order: dict[Site, list[int]],
    steps: list[tuple[Site, int]],
    shard_bytes: int,
    asked: list[int],
    ends: list[int],
) -> None:
    """Sites interleaved, positions in any order and with gaps, appended in pieces of any size; asked for in any order, repeated."""
    values = {site: drawn(41, 2, seed=i) for i, site in enumerate(order)}
    left = {site: list(places) for site, places in order.items()}
    with RunStore(**TIERS[tier](tmp_path_factory.mktemp("runs")), shard_bytes=shard_bytes) as store:
        with store.writing("a", weights="w") as writer:
            for site, count in [*steps, *((site, 12) for site in order)]:
                some, left[site] = left[site][:count], left[site][count:]
                writer.append(site, some, values[site][some])
        for site, places in order.items():
            wanted = [places[i % len(places)] for i in asked]
            assert store.positions("a", site) == sorted(places)
            assert torch.equal(store.rows("a", site, wanted), values[site][wanted])
            assert torch.equal(store.slice("a", site, *ends), values[site][sorted(places)[slice(*ends)]])


def test_what_is_stored_and_what_is_given_out_are_copies(store: RunStore) -> None:
    rows = drawn(4, 3)
    kept = rows.clone()
    with store.writing("a", weights="w") as writer:
        writer.append(MID, range(4), rows)
        rows.zero_()
    store.rows("a", MID, range(4)).zero_()
    store.slice("a", MID, 0, 4).zero_()
    assert torch.equal(store.rows("a", MID, range(4)), kept)


def test_a_row_that_carries_gradient_or_comes_from_inference_mode_is_a_row(store: RunStore) -> None:
    rows = drawn(6, 2)
    with store.writing("a", weights="w") as writer:
        writer.append(MID, [0, 1], rows[:2].requires_grad_())
        with torch.inference_mode():
            writer.append(MID, [2, 3], rows[2:4] * 1)
        writer.append(MID, [4, 5], rows[4:])
    found = store.rows("a", MID, range(6))
    assert torch.equal(found, rows)
    assert not found.requires_grad
    assert not found.is_inference()


def test_info_says_what_is_there(store: RunStore) -> None:
    with store.writing("a", weights="w1", tokens=[5, 6, 7], prompt_length=2, meta={"arm": "route2", "seeds": [1, 2]}) as writer:
        writer.append(PRE, [0, 2], drawn(2, 4))
        writer.append(UNEMBED, [1], drawn(1, 3, dtype=torch.float64))
        writer.add_tokens([8])
    info = store.info("a")
    assert (info.run, info.weights, info.tokens, info.prompt_length) == ("a", "w1", (5, 6, 7, 8), 2)
    assert info.meta == {"arm": "route2", "seeds": [1, 2]}
    info.meta["seeds"].append(3)  # a reader's own
    assert store.info("a").meta == {"arm": "route2", "seeds": [1, 2]}
    assert {site: (kind.rows, kind.dtype, kind.shape) for site, kind in info.sites.items()} == {
        PRE: (2, torch.float32, (4,)),
        UNEMBED: (1, torch.float64, (3,)),
    }
    assert info.nbytes == 2 * 4 * 4 + 3 * 8
    assert store.runs() == ["a"]


def test_everything_is_there_again_when_the_folder_is_opened_again(tmp_path: Path, opened: Opened) -> None:
    rows, stores = drawn(50, 3), []
    for budget in (None, 0, 10_000):
        store = opened(budget, tmp_path, shard_bytes=100)
        stores.append([store.info(run) for run in store.runs()])
        with store.writing(f"run {budget}", weights="w", tokens=[1, 2], meta={"n": 1}) as writer:
            writer.append(MID, range(20), rows[:20])
            writer.append(KEPT, range(50), rows)
        store.close()
    store = opened(0, str(tmp_path))
    assert store.runs() == ["run None", "run 0", "run 10000"]
    for run in store.runs():
        assert torch.equal(store.rows(run, MID, range(20)), rows[:20])
        assert torch.equal(store.rows(run, KEPT, range(50)), rows)
    assert stores[2] == [store.info("run None"), store.info("run 0")]


def test_a_shard_is_a_safetensors_file_that_others_can_read(tmp_path: Path, opened: Opened) -> None:
    rows = drawn(5, 3, dtype=torch.bfloat16)
    write(opened(0, tmp_path), "a", rows)
    (path,) = shards(tmp_path)
    assert torch.equal(load_file(path)[str(MID)], rows)


# ---- writing


def test_a_run_is_there_once_it_is_closed_and_not_before(store: RunStore) -> None:
    writer = store.writing("a", weights="w")
    writer.append(MID, [0], drawn(1, 2))
    for read in (partial(store.rows, "a", MID, [0]), partial(store.info, "a"), partial(store.positions, "a", MID)):
        with pytest.raises(KeyError, match="still being written"):
            read()
    with pytest.raises(ValueError, match="being written"):
        store.drop("a")
    with pytest.raises(ValueError, match="already"):
        store.writing("a", weights="w")
    assert store.runs() == []
    writer.close()
    assert store.runs() == ["a"]
    with pytest.raises(ValueError, match="already"):
        store.writing("a", weights="w")
    with pytest.raises(RuntimeError, match="was closed"):
        writer.append(MID, [1], drawn(1, 2))
    writer.abort()
    assert store.runs() == ["a"]


@pytest.mark.parametrize("tier", list(TIERS))
def test_an_aborted_write_leaves_nothing(tier: str, tmp_path: Path, opened: Opened) -> None:
    store = opened(**TIERS[tier](tmp_path), shard_bytes=64)
    before = store.stats()

    def fail() -> None:
        with store.writing("a", weights="w") as writer:
            writer.append(MID, range(90), drawn(90, 8))
            assert tier == "memory" or shards(tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.stats() == before
    assert tier == "memory" or not shards(tmp_path)
    with pytest.raises(KeyError, match="no run 'a'"):
        store.info("a")
    write(store, "a", drawn(3, 2))
    assert store.runs() == ["a"]


@pytest.mark.parametrize(
    ("positions", "rows", "sentence"),
    [
        ([3], drawn(1, 4), "position 3 twice"),
        ([9, 8, 9], drawn(3, 4), "position 9 twice"),
        ([1], drawn(1, 4), "position 1 twice"),
        ([-1], drawn(1, 4), "position -1"),
        ([5, 6], drawn(1, 4), "2 positions for rows"),
        ([5], drawn(4)[0], "1 positions for rows of shape"),
        ([5], drawn(1, 5), "but earlier rows had"),
        ([5], drawn(1, 4, dtype=torch.float64), "but earlier rows had"),
        ([5], torch.ones(1, 4, dtype=torch.int64), "use one of torch.bfloat16"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_the_run_goes_on(
    store: RunStore, positions: list[int], rows: Tensor, sentence: str
) -> None:
    good = drawn(4, 4)
    with store.writing("a", weights="w") as writer:
        writer.append(MID, [1, 0, 3], good[[1, 0, 3]])
        with pytest.raises(ValueError, match=sentence):
            writer.append(MID, positions, rows)
        writer.append(MID, [2], good[2:3])
    assert torch.equal(store.rows("a", MID, range(4)), good)


def test_a_position_that_is_on_the_disk_already_is_not_taken_again(tmp_path: Path, opened: Opened) -> None:
    store = opened(0, tmp_path, shard_bytes=1)
    with store.writing("a", weights="w") as writer:
        writer.append(MID, [4, 2], drawn(2, 4))
        for place in (2, 4):
            with pytest.raises(ValueError, match=f"position {place} twice"):
                writer.append(MID, [place], drawn(1, 4))
        writer.append(MID, [3], drawn(1, 4))
    assert store.positions("a", MID) == [2, 3, 4]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"run": ""}, "cannot name a run"),
        ({"run": "x" * 257}, "cannot name a run"),
        ({"run": "a\nb"}, "cannot name a run"),
        ({"run": "\ud800"}, "cannot name a run"),
        ({"weights": ""}, "hash of the weights"),
        ({"tokens": [1, 2], "prompt_length": 3}, "a prompt of 3 tokens but 2"),
        ({"meta": {"a": object()}}, "cannot be stored as JSON"),
        ({"meta": {"a": float("nan")}}, "cannot be stored as JSON"),
        ({"meta": {"a": [-float("inf")]}}, "cannot be stored as JSON"),
        ({"tokens": [True]}, "given the token True: give token ids"),
        ({"tokens": [-1]}, "given the token -1: give token ids"),
        ({"tokens": [1, 2], "prompt_length": True}, "a prompt of True tokens but 2"),
    ],
)
def test_a_run_that_cannot_be_described_is_refused(store: RunStore, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        store.writing(**{"run": "a", "weights": "w", **wrong})
    assert store.stats().writing == 0


_WRONG = """
import numpy as np
import torch
from mi_route2.runs import RunStore
from mi_route2.sites import Site

store, site = RunStore(), Site(0, "resid_pre")
writer = store.writing("a", weights="w", tokens=torch.tensor([5, 6]))
rows = torch.zeros(1, 4)
wrong = [
    ("cannot name a run", lambda: store.writing(5, weights="w")),
    ("hash of the weights", lambda: store.writing("b", weights=5)),
    ("the token 1.7: give token ids", lambda: store.writing("b", weights="w", tokens=[1, 1.7])),
    ("the token '5': give token ids", lambda: store.writing("b", weights="w", tokens="57")),
    ("a prompt of 1.5 tokens but 2", lambda: store.writing("b", weights="w", tokens=[1, 2], prompt_length=1.5)),
    ("cannot be stored as JSON", lambda: store.writing("b", weights="w", meta={1: "a", "1": "b"})),
    *((f"the token {one!r}: give token ids", lambda one=one: writer.add_tokens([3, one])) for one in (1.7, True, "7", -1)),
    *((f"position {one!r}: positions are whole", lambda one=one: writer.append(site, [one], rows)) for one in (1.7, True, "7")),
    *(("needs a Site, as Site(3, 'resid_pre')", lambda one=one: writer.append(one, [0], rows)) for one in ("blocks.0.mid", None)),
]
for sentence, call in wrong:
    try:
        call()
    except ValueError as error:
        assert sentence in str(error) and "\\n" not in str(error), (sentence, str(error))
    else:
        raise AssertionError(sentence)
writer.add_tokens(np.array([7]))
writer.append(site, torch.tensor([2, 0]), torch.zeros(2, 4))
writer.close()
assert (store.runs(), store.info("a").tokens, store.positions("a", site)) == (["a"], (5, 6, 7), [0, 2])
for one in (2**63, -(2**70), True):  # a mask would be read as rows 1 and 0
    for call in (lambda: store.rows("a", site, [one]), lambda: store.writing("b", weights="w").append(site, [one], rows)):
        try:
            call()
        except ValueError as error:
            assert "whole numbers below 2**63" in str(error), error
        else:
            raise AssertionError(one)
    store._writing["b"].abort()
for call in (lambda: store.rows("a", str(site), [0]), lambda: store.positions("a", str(site))):
    try:
        call()
    except ValueError as error:  # the nearest site that was captured would be this one
        assert "run 'a' needs a Site, as Site(3, 'resid_pre') or Site.parse('" in str(error), error
    else:
        raise AssertionError(str(site))
"""


def test_what_is_no_token_and_no_position_is_refused_and_the_run_goes_on() -> None:
    """In a process of its own: here every call's types are checked before."""
    root = Path(__file__).parents[3]
    found = subprocess.run([sys.executable, "-c", _WRONG], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr


def test_many_runs_are_written_at_once(store: RunStore) -> None:
    rows = {f"run {i}": drawn(30, 2, seed=i) for i in range(20)}
    writers = {run: store.writing(run, weights="w") for run in rows}
    for step in range(30):
        for run, writer in writers.items():
            writer.append(MID, [step], rows[run][step : step + 1])
    for run in reversed(rows):
        writers[run].close()
    assert store.stats().writing == 0
    for run, values in rows.items():
        assert torch.equal(store.rows(run, MID, range(30)), values)


# ---- what cannot be had, and why


def test_every_reason_is_given(store: RunStore) -> None:
    write(store, "clean", drawn(40, 2))
    write(store, "corrupt", drawn(1, 2), weights="other")
    store.lease("corrupt", "me")
    store.drop("corrupt")  # which beats a lease
    assert store.stats().leases == 0
    reasons = {
        "no run 'claen' was captured here: the nearest are clean": partial(store.rows, "claen", MID, [0]),
        "run 'corrupt' was dropped": partial(store.rows, "corrupt", MID, [0]),
        f"no rows at {PRE}: the nearest sites that were captured are {MID}": partial(store.rows, "clean", PRE, [0]),
        "position 44 .* not captured: the nearest are 35, 36, 37, 38, 39": partial(store.rows, "clean", MID, [1, 44, 60]),
        "position -1 .* not captured: the nearest are 0, 1, 2, 3, 4": partial(store.rows, "clean", MID, [-1]),
    }
    for sentence, read in reasons.items():
        with pytest.raises(KeyError, match=sentence):
            read()
    for call in (store.info, store.drop, partial(store.lease, owner="me"), partial(store.positions, site=MID)):
        with pytest.raises(KeyError, match="was dropped"):
            call("corrupt")
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="are not valid"):
            store.slice("clean", MID, start, stop)
    store.invalidate("new")
    with pytest.raises(KeyError, match="captured with weights w, and the model now has new; capture it again"):
        store.rows("clean", MID, [0])


@pytest.mark.parametrize("tier", ["disk", "both"])
def test_reasons_are_known_when_the_folder_is_opened_again(tier: str, tmp_path: Path, opened: Opened) -> None:
    with opened(**TIERS[tier](tmp_path)) as store:
        write(store, "a", drawn(1, 2))
        write(store, "b", drawn(1, 2))
        store.drop("a")
        store.invalidate("new")
    store = opened(**TIERS[tier](tmp_path))
    with pytest.raises(KeyError, match="was dropped"):
        store.info("a")
    with pytest.raises(KeyError, match="is invalid"):
        store.info("b")
    assert not shards(tmp_path)


def test_the_name_of_a_run_that_is_gone_can_be_taken_again(store: RunStore) -> None:
    for seed in range(3):
        write(store, "a", drawn(4, 2, seed=seed))
        assert torch.equal(store.rows("a", MID, range(4)), drawn(4, 2, seed=seed))
        assert store.why_gone("a") is None
        store.drop("a")
        assert "dropped" in str(store.why_gone("a"))


def test_a_change_of_weights_ends_every_other_run_and_its_writer(store: RunStore) -> None:
    write(store, "old", drawn(3, 2), weights="1")
    write(store, "new", drawn(3, 2), weights="2")
    kept, ended = store.writing("kept", weights="2"), store.writing("ended", weights="1")
    for writer in (kept, ended):
        writer.append(MID, [0], drawn(1, 2))
    store.lease("old", "me")
    assert set(store.invalidate("2")) == {"old", "ended"}
    with pytest.raises(RuntimeError, match="weights 1, and the model now has 2"):
        ended.append(MID, [1], drawn(1, 2))
    with pytest.raises(RuntimeError, match="weights 1, and the model now has 2"):
        ended.close()
    for run in ("old", "ended"):
        with pytest.raises(KeyError, match="is invalid"):
            store.info(run)
    kept.close()
    assert sorted(store.runs()) == ["kept", "new"]
    assert store.invalidate("2") == []
    assert store.stats().leases == 0


def test_a_writer_that_is_ended_late_leaves_the_leases_of_the_next_run_of_its_id(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may take the id between the moment at which its run is invalid and the one at which its writer ends."""
    old = store.writing("a", weights="1")
    end = old.abort

    def late(why: str) -> None:
        store.writing("a", weights="2").close()
        store.lease("a", "reader")
        end(why)

    monkeypatch.setattr(old, "abort", late)
    assert store.invalidate("2") == ["a"]
    assert store.stats().leases == 1
    assert store.runs() == ["a"]


def test_weights_that_change_while_a_run_is_closed_end_it_too(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are on the disk, and it is not in the index yet."""
    store = opened(0, tmp_path)
    assert store._disk
    write_shard = store._disk.write

    def late(run: str, sites: Any) -> list[Stored]:
        stored = write_shard(run, sites)
        assert store.invalidate("2") == ["a"]
        return stored

    monkeypatch.setattr(store._disk, "write", late)
    with pytest.raises(RuntimeError, match="the store has ended run 'a': run 'a' is invalid"):
        write(store, "a", drawn(3, 2), weights="1")
    assert store.runs() == []


def test_weights_that_change_before_a_run_is_published_end_it_too(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, when all rows are written: it cannot end the writer before ``close`` does."""
    writer, threads = store.writing("a", weights="1"), list[threading.Thread]()
    writer.append(MID, range(3), drawn(3, 2))
    finished = writer._finished_run

    def late() -> Any:
        threads.append(threading.Thread(target=store.invalidate, args=("2",)))
        threads[0].start()
        while store.stats().writing:
            time.sleep(0.001)
        return finished()

    monkeypatch.setattr(writer, "_finished_run", late)
    with pytest.raises(RuntimeError, match="the store has ended run 'a': run 'a' is invalid"):
        writer.close()
    threads[0].join(10)
    assert store.runs() == []


def test_an_interrupt_behind_the_commit_does_not_take_the_files_of_a_finished_run(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(0, tmp_path)
    assert store._disk
    commit = store._disk.commit

    def interrupted(*given: Any) -> None:
        commit(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(store._disk, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(store, "a", drawn(3, 2))
    assert torch.equal(store.rows("a", MID, range(3)), drawn(3, 2))


def test_a_closed_store_says_so(store: RunStore) -> None:
    write(store, "a", drawn(3, 2))
    writer = store.writing("b", weights="w")
    store.close()
    store.close()
    for call in (store.runs, store.stats, partial(store.rows, "a", MID, [0]), partial(store.writing, "c", weights="w")):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="its store was closed"):
        writer.append(MID, [0], drawn(1, 2))


# ---- memory


def test_the_automatic_budget_is_a_share_within_bounds() -> None:
    assert (automatic(0), automatic(1 << 50)) == (LEAST, MOST) == (256 << 20, 8 << 30)
    assert automatic(16 << 30) == 2 << 30
    assert 0 < available() < 1 << 50


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"budget": -1}, {"lease_seconds": 0.0}, {"lease_seconds": math.nan}, {"shard_bytes": 0}]
)
def test_a_store_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give|is not positive"):
        RunStore(**wrong)


def test_the_least_recently_used_run_leaves_first(opened: Opened) -> None:
    write(probe := opened(), "a", drawn(100, 10))
    size = probe.stats().memory_bytes
    assert 4800 < size < 6500, "4000 bytes of rows, 800 of positions"
    store = opened(3 * size)
    for run in "abc":
        write(store, run, drawn(100, 10))
    store.rows("a", MID, [0])
    write(store, "d", drawn(100, 10))
    assert sorted(store.runs()) == ["a", "c", "d"]
    store.info("c")
    write(store, "e", drawn(100, 10))
    assert sorted(store.runs()) == ["c", "d", "e"]
    with pytest.raises(KeyError, match=f"'b' of {size} bytes was evicted.*raise the budget, give the store a folder, or lease"):
        store.rows("b", MID, [0])
    assert store.stats().evictions == 2
    assert store.stats().memory_bytes <= store.stats().budget


def test_who_has_most_loses_first_and_an_equal_share_is_safe(opened: Opened) -> None:
    write(probe := opened(), "a", drawn(100, 10))
    size = probe.stats().memory_bytes
    store = opened(4 * size + 100, owner=lambda run: run.partition("/")[0])
    write(store, "alice/first", drawn(100, 10))
    write(store, "alice/second", drawn(100, 10))
    for i in range(8):
        write(store, f"bob/{i}", drawn(100, 10))
    assert sorted(store.runs()) == ["alice/first", "alice/second", "bob/6", "bob/7"]
    assert "was evicted" in str(store.why_gone("bob/5"))
    assert store.why_gone("bob/7") is None
    assert store.why_gone("bob/9") is None
    for i in range(3):
        write(store, f"carol/{i}", drawn(100, 10))
    assert sorted({run.partition("/")[0] for run in store.runs()}) == ["alice", "bob", "carol"]


def test_what_an_owner_writes_evicts_its_own_runs_and_none_within_anothers_share(opened: Opened) -> None:
    store = opened(budget=100_000, owner=lambda run: run.partition("/")[0])
    for run, rows in (("alice/mine", 100), ("bob/old", 40)):
        with store.writing(run, weights="w") as writer:
            writer.append(MID, range(rows), torch.zeros(rows, 100))  # 40 kB and 16 kB
    writer = store.writing("bob/new", weights="w")
    for i in range(9):
        writer.append(MID, range(25 * i, 25 * i + 25), torch.zeros(25, 100))
    assert store.runs() == ["alice/mine"]
    writer.close()
    assert store.runs() == ["alice/mine"]  # both together are more than the store, and bob has most
    assert store.stats().memory_bytes <= 100_000


def test_a_run_that_left_memory_is_read_from_the_disk(tmp_path: Path, opened: Opened) -> None:
    store = opened(6000, tmp_path)
    rows = {run: drawn(100, 10, seed=ord(run)) for run in "abc"}
    for run, values in rows.items():
        write(store, run, values)
    assert [store.info(run).tiers for run in "abc"] == [("disk",), ("disk",), ("memory", "disk")]
    for run, values in rows.items():
        assert torch.equal(store.rows(run, MID, range(100)), values)
    assert store.stats().bytes_read == 2 * 4000


def test_a_lease_keeps_a_run_over_the_budget_with_one_warning(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    store = opened(12_000, lease_seconds=100.0, clock=clock)
    with caplog.at_level(logging.WARNING):
        for run in "abcd":
            with store.writing(run, weights="w") as writer:
                writer.append(MID, range(100), drawn(100, 10))
                store.lease(run, "request 1")
                store.lease(run, "request 2")
    assert store.runs() == list("abcd")
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert "over the budget of 12000: the rest is leased or being written" in caplog.text
    store.release("request 1")
    assert len(store.runs()) == 4
    store.release("request 2")
    assert store.runs() == ["c", "d"]
    store.drop("d")


def test_a_lease_ends_by_time_and_is_renewed_in_its_second_half(opened: Opened) -> None:
    clock = Clock()
    store = opened(6000, lease_seconds=100.0, clock=clock)
    write(store, "a", drawn(100, 10))
    store.lease("a", "me")
    clock.now = 99.0
    write(store, "b", drawn(100, 10))
    assert store.runs() == ["a"], "the run that nobody leases left"
    store.lease("a", "me")  # until 199
    for clock.now in (109.0, 129.0, 148.0):
        store.lease("a", "me")  # too early: still until 199
    clock.now = 198.0
    write(store, "b", drawn(100, 10))
    assert store.runs() == ["a"]
    clock.now = 199.0
    assert store.stats().leases == 0
    write(store, "b", drawn(100, 10))
    assert store.runs() == ["b"]


def test_a_run_that_is_being_written_stays(opened: Opened) -> None:
    store = opened(6000)
    rows = drawn(400, 10)
    with store.writing("long", weights="w") as writer:
        store.lease("long", "me")
        for start in range(0, 400, 50):
            writer.append(MID, range(start, start + 50), rows[start : start + 50])
            write(store, f"short {start}", drawn(1, 2))
    assert torch.equal(store.rows("long", MID, range(400)), rows)
    store.release("me")
    with pytest.raises(KeyError, match="was evicted"):
        store.info("long")


def test_a_run_that_could_not_be_kept_is_an_error(opened: Opened) -> None:
    store = opened(6000)
    write(store, "short", drawn(10, 2))
    writer = store.writing("long", weights="w")
    writer.append(MID, range(50), drawn(50, 10))
    with pytest.raises(RuntimeError, match=r"run 'long' needs [\d,]+ bytes or more, and the store holds 6,000: capture fewer"):
        writer.append(MID, range(50, 200), drawn(150, 10))
    assert store.runs() == ["short"]
    assert store.stats().evictions == 0


def live_bytes() -> int:
    """Bytes of every tensor that there is."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is Tensor}
    return sum(storages.values())


@pytest.mark.process
@pytest.mark.parametrize("budget", [0, 300_000])
def test_a_run_of_any_length_streams_to_the_disk(budget: int, tmp_path: Path, opened: Opened) -> None:
    """8 MB through a store that may hold 64 KiB, or 300 kB: neither by its own count nor by torch's does more stay in memory."""
    store, sites = opened(budget, tmp_path, shard_bytes=1 << 16), (MID, PRE)
    rows, before = drawn(1000, 1000), live_bytes()
    most = counted = 0
    with store.writing("long", weights="w") as writer:
        for start in range(0, 1000, 10):
            for site in sites:
                writer.append(site, range(start, start + 10), rows[start : start + 10])
            counted = max(counted, store.stats().memory_bytes)
            if start == 690:
                most = live_bytes() - before
        assert len(shards(tmp_path)) > 50
    assert max(most, counted) < budget + 250_000
    for site in sites:
        assert torch.equal(store.rows("long", site, range(1000)), rows)
    assert store.info("long").tiers == ("disk",)


def test_a_small_run_stays_in_memory_beside_a_long_one(tmp_path: Path, opened: Opened) -> None:
    """A run that can never fit does not drive out those that do."""
    store = opened(200_000, tmp_path, shard_bytes=1 << 14)
    write(store, "small", drawn(100, 10))
    write(store, "long", drawn(1000, 1000))
    assert store.info("small").tiers == ("memory", "disk")
    assert store.info("long").tiers == ("disk",)


def test_appending_row_by_row_copies_no_row_twice(opened: Opened) -> None:
    """Time per row does not grow: what is taken at the end is at most twice what is there, and was never moved."""
    store, rows = opened(), drawn(2000, 8)
    with store.writing("a", weights="w") as writer:
        growing = None
        for i in range(2000):
            writer.append(MID, [i], rows[i : i + 1])
            blocks = writer._sites[MID]._blocks
            assert growing is None or [b.data_ptr() for b in blocks[: len(growing)]] == growing
            growing = [block.data_ptr() for block in blocks]
        assert sum(block.nbytes for block in blocks) <= 2 * rows.nbytes
        assert 0 <= store.stats().memory_bytes - sum(block.nbytes for block in blocks) <= 2000 * 8
        assert len(blocks) < 12
    assert torch.equal(store.rows("a", MID, range(2000)), rows)


@pytest.mark.process
def test_nothing_grows_where_nothing_is_captured(store: RunStore) -> None:
    clock, empty = Clock(), drawn(0, 4)

    def round_trip(i: int) -> None:
        clock.now = float(i)
        writer = store.writing(f"run {i}", weights="w")
        writer.append(MID, [], empty)
        writer.abort()
        store.release(f"request {i}")
        with pytest.raises(KeyError):
            store.rows(f"run {i}", MID, [0])

    round_trip(0)
    before = store.stats()
    tracemalloc.start()
    grown = []
    try:
        for window in range(6):
            start = tracemalloc.get_traced_memory()[0]
            for i in range(50):
                round_trip(50 * window + i)
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] - start)
    finally:
        tracemalloc.stop()
    # A cache of Python's own that fills in one window is no leak: what a request leaves, it leaves in each.
    assert min(grown) < 50 * 50, f"{grown} bytes stay of 50 requests each that captured nothing"
    assert store.stats() == before


def test_runs_without_rows_and_reasons_are_bounded_too(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "REMEMBERED", remembered := 200)
    store = opened(20_000)
    for i in range(remembered + 300):
        store.writing(f"run {i}", weights="w").close()
    assert len(store.runs()) < 20
    with pytest.raises(KeyError, match="was evicted"):
        store.info(f"run {remembered + 200}")
    with pytest.raises(KeyError, match="no run 'run 0'"):
        store.info("run 0")


# ---- the disk


def test_ten_thousand_rows_are_read_by_slice_without_the_rest(tmp_path: Path, opened: Opened) -> None:
    """Every file but those that hold the slice is taken away, and so is every tensor of another site by the count of bytes."""
    store = opened(0, tmp_path, shard_bytes=1 << 16)
    rows = drawn(10_000, 32)
    with store.writing("a", weights="w") as writer:
        for start in range(0, 10_000, 500):
            for site in (MID, PRE):
                writer.append(site, range(start, start + 500), rows[start : start + 500])
    found = store.slice("a", MID, 6200, 6300)
    assert torch.equal(found, rows[6200:6300])
    assert found.nbytes <= store.stats().bytes_read <= 2 * (1 << 16)
    needed = [path for path in shards(tmp_path) if rows[6200].numpy().tobytes() in path.read_bytes()]
    assert 1 <= len(needed) <= 2 < 15 < len(shards(tmp_path))
    aside = tmp_path / "aside"
    shutil.copytree(tmp_path / "shards", aside)
    for path in shards(tmp_path):
        path.unlink()
    loaded: list[Path] = []
    with pytest.raises(ValueError, match="the file is missing"):
        store.slice("a", MID, 6200, 6300)
    while True:
        try:
            assert torch.equal(store.slice("a", MID, 6200, 6300), rows[6200:6300])
            break
        except ValueError as error:
            name = str(error).split(" is damaged")[0]
            shutil.copy(aside / Path(name).name, name)
            loaded.append(Path(name))
    assert len(loaded) <= 2
    with pytest.raises(ValueError, match="the file is missing"):
        store.rows("a", MID, [0])


def test_one_flipped_bit_anywhere_is_an_error_or_makes_no_difference(tmp_path: Path, opened: Opened) -> None:
    store = opened(0, tmp_path)
    rows = drawn(6, 3)
    write(store, "a", rows)
    (path,) = shards(tmp_path)
    whole, harmless, sentences = path.read_bytes(), [], set()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        try:
            assert bits(store.rows("a", MID, range(6))) == bits(rows)
        except ValueError as error:
            sentences.add(str(error))
            continue
        harmless.append(i)
    assert all("\n" not in text and f"{path} is damaged" in text and "drop run 'a' and capture it" in text for text in sentences)
    assert max(harmless) < len(whole) - rows.nbytes, "a bit of a row was flipped and nobody noticed"
    assert len(harmless) < len(whole) // 4
    path.write_bytes(whole)
    assert bits(store.rows("a", MID, range(6))) == bits(rows)


def test_a_shard_that_is_cut_short_longer_or_gone_is_refused(tmp_path: Path, opened: Opened) -> None:
    store = opened(0, tmp_path)
    write(store, "a", drawn(6, 3))
    (path,) = shards(tmp_path)
    whole = path.read_bytes()
    before = json.dumps({str(MID): {"data_offsets": [-9999, 72]}}).ljust(int.from_bytes(whole[:8], "little")).encode()
    for data in (*(whole[:n] for n in range(0, len(whole), 7)), whole + b"\0", whole[:8] + before + whole[8 + len(before) :]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is damaged"):
            store.rows("a", MID, [0])
    path.unlink()
    with pytest.raises(ValueError, match="the file is missing"):
        store.rows("a", MID, [0])
    store.drop("a")
    write(store, "a", drawn(6, 3))
    assert torch.equal(store.rows("a", MID, range(6)), drawn(6, 3))


def test_a_file_that_is_written_over_while_it_is_read_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    """A copy is put back with ``cp``, which empties each file first: a file mapped into memory would be a bus error."""
    folder, rows = tmp_path / "runs", drawn(1000, 1000)
    with RunStore(0, folder) as store:
        write(store, "a", rows)
    (path,) = shards(folder)
    shutil.copy(path, tmp_path / "copy")

    def read() -> None:
        with RunStore(0, folder) as store:
            end, refused = time.monotonic() + 10, set[str]()
            reads = 0
            while (reads < 300 or not refused) and time.monotonic() < end:
                reads += 1
                try:
                    assert torch.equal(store.rows("a", MID, [7, 999]), rows[[7, 999]])
                except ValueError as error:
                    refused.add(str(error))
            assert refused
            assert all(text.startswith(f"{path} is damaged") for text in refused)

    loop = subprocess.Popen(["sh", "-c", f"while cp {tmp_path}/copy {path}; do :; done"])
    try:
        assert in_a_child(read) == 0
    finally:
        loop.kill()
        loop.wait()


def test_a_damaged_index_never_gives_wrong_rows(tmp_path: Path, opened: Opened) -> None:
    """A bit is flipped in every 23rd byte of the index that is not 0."""
    rows = {run: drawn(6, 3, seed=seed) for seed, run in enumerate("ab")}
    with opened(0, tmp_path) as store:
        for run, values in rows.items():
            with store.writing(run, weights="w", tokens=[1, 2, 3]) as writer:
                writer.append(MID, [0, 2, 4, 6, 8, 10], values)
    index = tmp_path / "index.sqlite"
    whole, sentences = index.read_bytes(), []
    places = [i for i, byte in enumerate(whole) if byte][::23]
    for i in places:
        index.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        try:
            with RunStore(0, tmp_path) as store:
                for run, values in rows.items():
                    assert bits(store.rows(run, MID, [0, 2, 4, 6, 8, 10])) == bits(values)
                    assert store.info(run).tokens == (1, 2, 3)
        except (ValueError, KeyError, OSError) as error:
            sentences.append(str(error))
    assert len(sentences) > len(places) // 4
    assert not [text for text in sentences if "\n" in text]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE tensors SET positions = CAST(zeroblob(8) || substr(positions, 9) AS BLOB)",
        "UPDATE tensors SET positions = substr(positions, 5)",
        "UPDATE tensors SET positions = 'text', dtype = 7",
        "UPDATE tensors SET run = CASE run WHEN 'a' THEN 'b' ELSE 'a' END",
        "UPDATE tensors SET shard = 3 - shard",
        "UPDATE tensors SET dtype = 'bfloat16'",
        "UPDATE tensors SET dtype = 'float33'",
        "UPDATE tensors SET shape = '2'",
        "UPDATE tensors SET shape = 'two'",
        "UPDATE tensors SET shape = '-2'",
        "UPDATE tensors SET shape = '99999999999x99999999999'",
        "UPDATE tensors SET dtype = CAST(x'ff' AS TEXT)",
        "UPDATE shards SET shard = shard + 7",
        "ALTER TABLE tensors RENAME COLUMN dtype TO kind",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, 'dtype', '\"') WHERE name = 'tensors'",
        "UPDATE tensors SET site = 'nowhere'",
        "UPDATE shards SET size = size + 1",
        "UPDATE runs SET about = replace(about, '7', '8')",
        "UPDATE runs SET run = CASE run WHEN 'a' THEN 'A' ELSE 'a' END",
    ],
)
def test_an_index_that_says_something_else_is_refused(change: str, tmp_path: Path, opened: Opened) -> None:
    with opened(0, tmp_path) as store:
        for seed, run in enumerate("ab"):
            with store.writing(run, weights="w", tokens=[7]) as writer:
                writer.append(MID, [1, 3], drawn(2, 3, seed=seed))
    tamper(tmp_path, f"PRAGMA foreign_keys = OFF; {change}")
    with pytest.raises(ValueError, match="is damaged") as caught:
        opened(0, tmp_path).slice("a", MID, 0, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["tensors SET dtype = 'float16'", "tensors SET shape = '1x3'", "shards SET shard = 9"])
def test_an_index_that_says_something_else_of_one_shard_is_refused_at_the_others(
    change: str, tmp_path: Path, opened: Opened
) -> None:
    """Rows of the first shard would be rounded to the type of the second, and the second's would be missing without a word."""
    with opened(0, tmp_path, shard_bytes=24) as store:
        write(store, "a", drawn(4, 3))
    tamper(tmp_path, f"PRAGMA foreign_keys = OFF; UPDATE {change} WHERE shard = 2")
    store = opened(0, tmp_path)
    for read in (lambda: store.rows("a", MID, [0]), lambda: store.slice("a", MID, 0, 4), lambda: store.positions("a", MID)):
        with pytest.raises(ValueError, match="is damaged"):
            read()


def test_a_run_whose_description_is_damaged_can_be_dropped_as_its_error_says(tmp_path: Path, opened: Opened) -> None:
    with opened(0, tmp_path) as store:
        write(store, "a", drawn(6, 3))
    tamper(tmp_path, "UPDATE runs SET about = about || ' '")
    store = opened(0, tmp_path)
    with pytest.raises(ValueError, match="drop the run and capture it again"):
        store.info("a")
    assert "a" in store
    store.drop("a")
    assert "a" not in store
    write(store, "a", drawn(6, 3))
    assert torch.equal(store.rows("a", MID, range(6)), drawn(6, 3))


def test_whoever_asks_whether_there_is_a_run_does_not_use_it(opened: Opened) -> None:
    store = opened(1 << 20)
    write(store, "a", drawn(6, 3))
    store = opened(store.stats().memory_bytes * 5 // 2)
    for run in "ab":
        write(store, run, drawn(6, 3))
    assert "a" in store
    write(store, "c", drawn(6, 3))
    assert store.runs() == ["b", "c"]


def test_an_index_that_is_not_one_is_refused(tmp_path: Path, opened: Opened) -> None:
    for name, make in {
        "other": lambda folder: tamper(folder, "CREATE TABLE mine (a); PRAGMA user_version = 7;"),
        "text": lambda folder: (folder / "index.sqlite").write_text("no database" * 100),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder)
        before = (folder / "index.sqlite").read_bytes()
        with pytest.raises(ValueError, match=r"index\.sqlite is (damaged|not an index of runs)"):
            opened(0, folder)
        assert (folder / "index.sqlite").read_bytes() == before
    write(store := opened(0, tmp_path / "mine"), "a", drawn(3, 2))
    store.close()
    (tmp_path / "mine" / "index.sqlite").unlink()
    with pytest.raises(ValueError, match=r"index\.sqlite beside it is missing"):
        opened(0, tmp_path / "mine")
    (tmp_path / "mine" / "index.sqlite").touch()
    with pytest.raises(ValueError, match=r"index\.sqlite beside it is empty: restore the index, or give the store an empty"):
        opened(0, tmp_path / "mine")
    tamper(tmp_path / "mine", "CREATE TABLE a (b); DROP TABLE a;")
    with pytest.raises(ValueError, match=r"index\.sqlite is damaged \(it holds no tables\)"):
        opened(0, tmp_path / "mine")
    assert shards(tmp_path / "mine")


def test_a_folder_that_cannot_be_one_is_a_sentence(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="choose another folder"):
        opened(0, tmp_path / "file")
    (tmp_path / "runs" / "index.sqlite").mkdir(parents=True)
    with pytest.raises(OSError, match=r"could not use .*index\.sqlite .*: make room there, or give the store another folder"):
        opened(0, tmp_path / "runs")
    store = opened(0, tmp_path / "mine")
    (tmp_path / "mine" / "shards").rmdir()
    with pytest.raises(OSError, match=r"could not write .*shards, "), store.writing("a", weights="w"):
        pass
    assert store.runs() == []


def test_a_store_stays_where_it_was_opened(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = opened(0, Path("runs"))
    write(store, "a", drawn(3, 2))
    monkeypatch.chdir("elsewhere")
    write(store, "b", drawn(3, 2))
    for run in "ab":
        assert torch.equal(store.rows(run, MID, range(3)), drawn(3, 2))


def test_files_of_others_are_left_alone(tmp_path: Path, opened: Opened) -> None:
    write(opened(0, tmp_path), "a", drawn(3, 2))
    opened(0, tmp_path / "b").close()
    for name in ("shards/notes.txt", "shards/1.safetensors", "mine.safetensors"):
        (tmp_path / "b" / name).write_text("mine")
    for name in ("shards/000000000007.safetensors", "shards/.000000000008.safetensors.123.tmp"):
        (tmp_path / "b" / name).write_text("left by a kill")
    opened(0, tmp_path / "b")
    assert [path.name for path in shards(tmp_path / "b")] == ["1.safetensors", "notes.txt"]
    assert (tmp_path / "b" / "mine.safetensors").exists()


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """No file grows past some bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("budget", [0, None])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    budget: int | None, tmp_path: Path, opened: Opened, small_files: Callable[[int], None]
) -> None:
    store = opened(budget, tmp_path, shard_bytes=4000)
    write(store, "before", drawn(10, 4))
    taken, writer = store.stats(), store.writing("a", weights="w")
    writer.append(MID, range(100), drawn(100, 10))
    assert len(shards(tmp_path)) > 1
    small_files(1000)
    with pytest.raises(OSError, match=r"could not write .*safetensors, make room there.*nothing of run 'a'.*: File too large$"):
        writer.append(PRE, range(100), drawn(100, 10))
    with pytest.raises(RuntimeError, match="aborted"):
        writer.append(MID, [200], drawn(1, 10))
    small_files(resource.RLIM_INFINITY)
    assert len(shards(tmp_path)) == 1
    assert store.stats() == taken
    write(store, "a", drawn(100, 10))
    assert torch.equal(store.rows("a", MID, range(100)), drawn(100, 10))


def test_a_disk_that_has_no_room_for_the_index_keeps_nothing_of_the_run(
    tmp_path: Path, opened: Opened, small_files: Callable[[int], None]
) -> None:
    """Rows of two bytes at positions of eight: the shard fits, the index does not."""
    store = opened(0, tmp_path)
    write(store, "before", drawn(10, 4))
    writer = store.writing("a", weights="w")
    writer.append(MID, range(50_000), drawn(50_000, dtype=torch.bfloat16))
    small_files(200_000)
    with pytest.raises(OSError, match=r"could not use .*index\.sqlite"):
        writer.close()
    small_files(resource.RLIM_INFINITY)
    assert len(shards(tmp_path)) == 1
    assert store.runs() == ["before"]
    assert torch.equal(store.rows("before", MID, range(10)), drawn(10, 4))
    store.close()
    assert opened(0, tmp_path).runs() == ["before"]


@pytest.mark.parametrize("room", ["in the log", "once files are deleted", "none"])
def test_a_run_can_be_dropped_on_a_full_disk(
    room: str, tmp_path: Path, opened: Opened, small_files: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping is the way to make room there; what it writes into the index itself may be too much for the log, or for any file."""
    store = opened(0, tmp_path)
    for run in ("a", "b"):
        write(store, run, drawn(100, 10))
    assert store._disk
    discard, listed = store._disk.discard, list[bool]()

    def deleting(numbers: Iterable[int]) -> None:
        listed.append("a" in store.runs())
        discard(numbers)
        if room == "once files are deleted":
            small_files(resource.RLIM_INFINITY)

    monkeypatch.setattr(store._disk, "discard", deleting)
    small_files((tmp_path / "index.sqlite-wal").stat().st_size if room == "in the log" else 1000)
    if room == "none":
        with pytest.raises(OSError, match=r"could not use .*index\.sqlite .*make room there"):
            store.drop("a")
        small_files(resource.RLIM_INFINITY)
        with pytest.raises(ValueError, match=r"damaged \(the file is missing\): drop run 'a'"):
            store.rows("a", MID, [0])
    store.drop("a")
    assert listed[0] == (room != "in the log")
    small_files(resource.RLIM_INFINITY)
    assert len(shards(tmp_path)) == 1
    assert torch.equal(store.rows("b", MID, range(100)), drawn(100, 10))
    with pytest.raises(KeyError, match="run 'a' was dropped"):
        store.info("a")
    store.close()
    assert opened(0, tmp_path).runs() == ["b"]


# ---- other processes, and threads


def in_a_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def test_a_second_store_on_the_same_folder_is_one_sentence(tmp_path: Path, opened: Opened) -> None:
    store = opened(0, tmp_path)

    def second() -> None:
        with pytest.raises(RuntimeError, match=f"{tmp_path} is open in another run store: close that one") as caught:
            RunStore(0, tmp_path)
        assert "\n" not in str(caught.value)

    second()
    assert in_a_child(second) == 0
    assert store._disk is not None
    assert in_a_child(store.close) == 0
    assert in_a_child(second) == 0
    waits = subprocess.Popen(["sleep", "60"], pass_fds=[store._disk._lock.fileno()])  # as a worker of a data loader, a fork, does
    write(store, "a", drawn(3, 2))
    store.close()
    assert in_a_child(lambda: RunStore(0, tmp_path).close()) == 0
    waits.kill()
    waits.wait()


def test_a_fork_changes_nothing_of_its_parents_store(tmp_path: Path, opened: Opened) -> None:
    """Both would number their shards alike, and write over each other's."""
    store = opened(0, tmp_path, shard_bytes=1)
    write(store, "a", drawn(3, 2))
    began = store.writing("b", weights="w")
    began.append(MID, [0], drawn(1, 2))

    def forked() -> None:
        for change in (
            lambda: write(store, "c", drawn(3, 2)),
            lambda: store.writing("d", weights="w").close(),
            lambda: store.drop("a"),
        ):
            with pytest.raises(RuntimeError, match=f"of process {os.getppid()}, of which this one is a fork: write there, or open"):
                change()
        assert torch.equal(store.rows("a", MID, range(3)), drawn(3, 2))
        store.close()  # ends the writer too

    assert in_a_child(forked) == 0
    began.close()
    write(store, "c", drawn(3, 2))
    for run, rows in {"a": 3, "b": 1, "c": 3}.items():
        assert torch.equal(store.rows(run, MID, range(rows)), drawn(rows, 2))


def busy(folder: Path) -> None:
    """Two runs, one of several shards, a drop, and an abort."""
    with RunStore(20_000, folder, shard_bytes=600) as store:
        write(store, "first", drawn(30, 5))
        for site in (MID, PRE):
            other = store.writing(f"second {site}", weights="w")
            for start in range(0, 40, 8):
                other.append(site, range(start, start + 8), drawn(40, 5)[start : start + 8])
            other.close()
        store.drop("first")
        gone = store.writing("aborted", weights="w")
        gone.append(MID, range(40), drawn(40, 5))
        gone.abort()
        store.invalidate("w")
        write(store, "last", drawn(5, 5))


ENDS = [set(), {"first"}, {"first", f"second {MID}"}, {"first", f"second {MID}", f"second {PRE}"}]
ENDS += [{f"second {MID}", f"second {PRE}"}, {f"second {MID}", f"second {PRE}", "last"}]


def killed_at(nth: int | None, folder: Path) -> int:
    """``busy`` killed as the ``nth`` line of the store's modules or its writer's begins; how many there are, if ``None``."""
    seen = 0
    own = (str(Path(disk_module.__file__).parent), files.__file__)

    def line(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: FrameType, _event: str, _argument: object) -> Any:
        return line if frame.f_code.co_filename.startswith(own) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        busy(folder)
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.process
def test_after_a_kill_anywhere_a_run_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """The process is killed between two lines of the store: at 40 places, and between two of them that miss a state."""
    lines = killed_at(None, tmp_path / "whole")
    assert lines > 1000

    def left(nth: int) -> int:
        """Return the state that a kill leaves, after a look at all that is there."""
        folder = tmp_path / str(nth)
        assert in_a_child(partial(killed_at, nth, folder)) == -signal.SIGKILL
        with RunStore(0, folder) as store:
            end = ENDS.index(set(store.runs()))
            for run in store.runs():
                (site,) = store.info(run).sites
                count = {"first": 30, "last": 5}.get(run, 40)
                assert torch.equal(store.rows(run, site, range(count)), drawn(count, 5))
            known = {f"{shard:012d}.safetensors" for (shard,) in store._disk._ask("SELECT shard FROM shards")}
            assert {path.name for path in shards(folder)} == known
            write(store, "new", drawn(7, 2))
            assert torch.equal(store.rows("new", MID, range(7)), drawn(7, 2))
        return end

    ends = {nth: left(nth) for nth in range(1, lines + 1, lines // 40)}
    while gaps := [(a, b) for a, b in pairwise(sorted(ends)) if ends[b] - ends[a] > 1 and b - a > 1]:
        middle = sum(gaps[0]) // 2
        ends[middle] = left(middle)
    assert set(ends.values()) >= set(range(len(ENDS) - 1))


def test_a_write_that_is_killed_within_the_file_leaves_nothing(tmp_path: Path) -> None:
    """The kernel ends the process within the write of a shard, after a byte more each time."""

    def die(size: int, folder: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        store = RunStore(0, folder)
        writer = store.writing("a", weights="w")
        writer.append(MID, range(9), drawn(9, 8))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        writer.close()

    for size in (1, 8, 100, 300):
        folder = tmp_path / str(size)
        assert in_a_child(partial(die, size, folder)) == -signal.SIGXFSZ
        assert len(shards(folder)) == 1, "what was written of the temporary file"
        with RunStore(0, folder) as store:
            assert store.runs() == []
            assert shards(folder) == []


def started(work: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
    """A thread that works, and notes what that raises."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread


def test_a_store_that_is_closed_while_an_invalid_run_is_written(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer was ended by new weights within its write, for which ``close`` waits: the folder may be another store's then."""
    store = opened(0, tmp_path, shard_bytes=1)
    assert store._disk
    writer, write_now = store.writing("a", weights="old"), store._disk.write
    writing, go, errors = threading.Event(), threading.Event(), list[BaseException]()

    def late(run: str, sites: Any) -> list[Stored]:
        writing.set()
        assert go.wait(10)
        return write_now(run, sites)

    monkeypatch.setattr(store._disk, "write", late)
    threads = [started(lambda: writer.append(MID, [0], drawn(1, 2)), errors)]
    assert writing.wait(10)
    threads.append(started(lambda: store.invalidate("new"), errors))
    while store.stats().writing:
        time.sleep(0.001)
    threads.append(started(store.close, errors))
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join(10)
    assert ["invalid" in str(error) for error in errors] == [True], errors
    assert shards(tmp_path) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_is_dropped_while_it_is_read(
    again: bool, tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding out where its rows are and reading them. One of the same name that has come since is read then."""
    store = opened(0, tmp_path)
    write(store, "a", drawn(4, 2))
    assert store._disk
    load = store._disk.load

    def late(stored: Stored) -> Tensor:
        monkeypatch.undo()
        store.drop("a")
        if again:
            write(store, "a", drawn(4, 2, seed=1))
        return load(stored)

    monkeypatch.setattr(store._disk, "load", late)
    if again:
        assert torch.equal(store.rows("a", MID, range(4)), drawn(4, 2, seed=1))
    else:
        with pytest.raises(KeyError, match="was dropped"):
            store.rows("a", MID, range(4))


@pytest.mark.process
@pytest.mark.parametrize("tier", list(TIERS))
def test_threads_write_read_and_drop_at_once(tier: str, tmp_path: Path, opened: Opened) -> None:
    store = opened(**{**TIERS[tier](tmp_path), **({} if tier == "disk" else {"budget": 40_000})}, shard_bytes=500)
    errors: list[BaseException] = []
    reads, over, reasons = 0, threading.Event(), set()
    values = [drawn(40, 6, seed=seed) for seed in range(24)]

    def engine() -> None:
        for seed in range(0, 24, 4):
            writers: list[tuple[int, Writer]] = [(i, store.writing(f"run {i}", weights="w")) for i in range(seed, seed + 4)]
            for step in range(40):
                for i, writer in writers:
                    writer.append(MID, [step], values[i][step : step + 1])
            for i, writer in writers:
                writer.abort() if i % 7 == 6 else writer.close()
        while reads <= 5 and not errors:  # on a fast machine everything may be written before much was read
            time.sleep(0.001)
        over.set()

    def server() -> None:
        nonlocal reads
        while not (over.is_set() or errors):
            for run in store.runs():
                try:
                    assert torch.equal(store.rows(run, MID, range(40)), values[int(run[4:])])
                    assert torch.equal(store.slice(run, MID, 5, 9), values[int(run[4:])][5:9])
                    reads += 1
                    store.lease(run, "server")
                    if int(run[4:]) % 5 == 0:
                        store.drop(run)
                except KeyError as error:
                    reasons.add(str(error).partition(" was ")[2].split()[0])
            store.stats()
            store.release("server")
            time.sleep(0.001)

    for thread in [started(work, errors) for work in (engine, server, server)]:
        thread.join()
    assert errors == []
    assert reads > 5
    assert reasons <= {'dropped"', "evicted,"}
    for run in store.runs():
        assert torch.equal(store.rows(run, MID, range(40)), values[int(run[4:])])


def test_a_store_does_not_depend_on_torchs_default_device(store: RunStore) -> None:
    """Notebooks set the GPU as the default device; ``meta`` is a device that every machine has."""
    rows = drawn(5, 3)
    with torch.device("meta"):
        with store.writing("a", weights="w") as writer:
            for place in (3, 1, 4, 0, 2):
                writer.append(MID, [place], rows[place : place + 1])
        found = [store.rows("a", MID, [4, 0]), store.slice("a", MID, 1, 3)]
    assert [bits(one) for one in found] == [bits(rows[[4, 0]]), bits(rows[1:3])]
