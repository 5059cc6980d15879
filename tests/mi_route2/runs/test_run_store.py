"""A run store returns what was written, bit for bit, or an error that says why there is nothing to read."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mi_route2.runs import RunStore
from mi_route2.runs.store import automatic, available
from mi_route2.sites import Site

MID, PRE, KEPT, UNEMBED = Site(0, "resid_mid"), Site(1, "resid_pre"), Site(1, "kept_a", "mlp.down"), Site(None, "kept_a", "unembed")
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "memory": lambda folder: {},
    "disk": lambda folder: {"budget": 0, "folder": folder},
    "both": lambda folder: {"folder": folder},
}


@pytest.fixture(params=list(TIERS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    return RunStore(**TIERS[request.param](tmp_path / "runs"))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write(store: RunStore, run: str, rows: Tensor, site: Site = MID, weights: str = "w") -> None:
    with store.writing(run, weights=weights) as writer:
        writer.append(site, range(len(rows)), rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_type_and_shape_comes_back_bit_for_bit(store: RunStore, dtype: torch.dtype) -> None:
    rows = {site: drawn(6, *shape, dtype=dtype) for site, shape in zip((MID, PRE, KEPT, UNEMBED), [(), (3,), (2, 5), (1, 2, 3)])}
    rows[MID][0] = float("nan")
    with store.writing("a", weights="w") as writer:
        for site, values in rows.items():
            writer.append(site, range(6), values)
    for site, values in rows.items():
        assert bits(store.rows("a", site, range(6))) == bits(values)


@settings(max_examples=20)
@given(order=st.permutations(range(30)), cuts=st.sets(st.integers(1, 29)), asked=st.lists(st.integers(0, 29), max_size=40))
def test_rows_come_back_in_the_order_asked_however_they_came(order: list[int], cuts: set[int], asked: list[int]) -> None:
    rows, edges, store = drawn(30, 2), [0, *sorted(cuts), 30], RunStore()
    with store.writing("a", weights="w") as writer:
        for start, stop in pairwise(edges):
            writer.append(MID, order[start:stop], rows[order[start:stop]])
    assert torch.equal(store.rows("a", MID, asked), rows[asked])
    assert store.positions("a", MID) == list(range(30))


def test_what_is_stored_and_what_is_given_out_are_copies(store: RunStore) -> None:
    rows, truth, meta = drawn(4, 2).requires_grad_(), drawn(4, 2), {"note": [1]}
    with torch.inference_mode(), store.writing("a", weights="w", meta=meta) as writer:
        writer.append(MID, range(4), rows)
    with torch.no_grad():
        rows.zero_()
    store.rows("a", MID, [1, 2]).zero_()
    store.info("a").meta["note"].append(2)
    assert torch.equal(store.rows("a", MID, range(4)), truth)
    assert store.info("a").meta == meta == {"note": [1]}


@pytest.mark.parametrize("tier", ["disk", "both"])
def test_a_folder_that_is_opened_again_holds_the_same_runs(tier: str, tmp_path: Path) -> None:
    with RunStore(**TIERS[tier](tmp_path)) as store:
        with store.writing("a", weights="w", tokens=(5, 6), prompt_length=1, meta={"n": 1}) as writer:
            writer.append(MID, [4, 1], drawn(2, 3))
            writer.append(UNEMBED, [0], drawn(1, dtype=torch.bfloat16))
            writer.add_tokens([7])
        write(store, "b", drawn(1, 2))
        store.drop("b")
        before = store.info("a")
    with RunStore(**TIERS["disk"](tmp_path)) as store:
        assert store.runs() == ["a"]
        info = store.info("a")
        assert (info.tokens, info.prompt_length, info.meta, info.sites) == ((5, 6, 7), 1, {"n": 1}, before.sites)
        assert info.nbytes == 2 * 3 * 4 + 2
        assert torch.equal(store.rows("a", MID, [4, 1]), drawn(2, 3))


def test_a_run_appears_when_its_writer_closes_and_not_after_an_error(store: RunStore) -> None:
    writer = store.writing("a", weights="w")
    writer.append(MID, [0], drawn(1, 2))
    with pytest.raises(KeyError, match="still being written"):
        store.rows("a", MID, [0])
    writer.close()
    assert "a" in store
    with pytest.raises(RuntimeError, match="'a' was closed: open a new one"):
        writer.append(MID, [1], drawn(1, 2))
    store.writing("b", weights="w").abort()
    assert store.runs() == ["a"]
    assert store.stats().writing == 0
    write(store, "b", drawn(1, 2))  # the name is free


@pytest.mark.parametrize(
    ("positions", "rows", "fragment"),
    [
        ([3], drawn(1, 2), "a position twice"),
        ([-1], drawn(1, 2), "whole numbers from 0 on"),
        ([4, 5], drawn(1, 2), "give one for each row"),
        ([4], drawn(1, 3), "earlier rows had torch.float32"),
        ([4], drawn(1, 2).long(), "rows of torch.int64"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(positions: list[int], rows: Tensor, fragment: str) -> None:
    store = RunStore()
    with store.writing("a", weights="w") as writer:
        writer.append(MID, [3], drawn(1, 2))
        with pytest.raises(ValueError, match=fragment):
            writer.append(MID, positions, rows)
    assert store.positions("a", MID) == [3]


def test_every_reason_is_given(store: RunStore) -> None:
    write(store, "clean", drawn(40, 2))
    write(store, "corrupt", drawn(1, 2), weights="other")
    store.drop("corrupt")
    reasons = {
        "no run 'claen' was captured here: the nearest are clean": partial(store.rows, "claen", MID, [0]),
        "run 'corrupt' was dropped": partial(store.rows, "corrupt", MID, [0]),
        f"no rows at {PRE}: the nearest sites that were captured are {MID}": partial(store.rows, "clean", PRE, [0]),
        "position 44 .* not captured: the nearest are 35, 36, 37, 38, 39": partial(store.rows, "clean", MID, [1, 44, 60]),
    }
    for fragment, read in reasons.items():
        with pytest.raises(KeyError, match=fragment):
            read()
    assert store.invalidate("new") == ["clean"]
    with pytest.raises(KeyError, match="captured with weights w, and the model now has new; capture it again"):
        store.rows("clean", MID, [0])
    assert "model now has new" in str(store.why_gone("clean"))


def test_a_change_of_weights_ends_writers_too(store: RunStore) -> None:
    writer, same = store.writing("a", weights="old"), store.writing("b", weights="new")
    assert store.invalidate("new") == ["a"]
    with pytest.raises(RuntimeError, match="is invalid"):
        writer.append(MID, [0], drawn(1, 2))
    same.close()
    assert store.runs() == ["b"]


def test_the_least_recently_used_run_is_evicted(caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore(8000)
    for run in "abc":
        write(store, run, drawn(100, 2))  # 2,624 bytes each
    store.rows("a", MID, [0])
    write(store, "d", drawn(100, 2))
    assert store.runs() == ["a", "c", "d"]
    assert "raise the budget" in str(store.why_gone("b"))
    with caplog.at_level(logging.WARNING):
        for run in ("e", "f"):  # which both are written at once, and keep their bytes
            store.writing(run, weights="w").append(MID, range(200), drawn(200, 2))
    assert store.runs() == []
    assert "over the budget" in caplog.text


def test_a_run_over_the_budget_is_an_error_and_evicts_nothing() -> None:
    store = RunStore(4000)
    write(store, "a", drawn(10, 2))
    with pytest.raises(RuntimeError, match="'b' needs 25,024 bytes or more"):
        write(store, "b", drawn(1000, 4))
    assert store.runs() == ["a"]


def test_with_a_folder_memory_holds_what_fits(tmp_path: Path) -> None:
    store = RunStore(4000, tmp_path)
    for run, n in ("a", 100), ("b", 1000), ("c", 100):
        write(store, run, drawn(n, 2))
    assert [run for run in store.runs() if "memory" in store.info(run).tiers] == ["c"]
    assert torch.equal(store.rows("b", MID, range(1000)), drawn(1000, 2))
    store.rows("a", MID, [0])
    assert store.info("a").tiers == ("memory", "disk")


def test_damaged_files_are_errors_and_never_other_values(tmp_path: Path) -> None:
    with RunStore(0, tmp_path) as store:
        write(store, "a", drawn(8, 2))
        (path,) = tmp_path.glob("*.safetensors")
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(ValueError, match="is damaged"):
                store.rows("a", MID, [0])
        path.write_bytes(whole[:-3])
        with pytest.raises(ValueError, match="drop run 'a'"):
            store.rows("a", MID, [0])
    with pytest.raises(ValueError, match="is not the file of a run"):
        RunStore(0, tmp_path)


def test_one_store_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    with RunStore(0, tmp_path), pytest.raises(RuntimeError, match="another run store"):
        RunStore(0, tmp_path)
    store = RunStore(0, tmp_path)
    store.close()
    with pytest.raises(RuntimeError, match="this run store is closed"):
        store.runs()


_BUSY = """
import sys, torch
from mi_route2.runs import RunStore
from mi_route2.sites import Site
store = RunStore(0, sys.argv[1])
for i in range(10_000):
    with store.writing(f"run {i}", weights="w") as writer:
        writer.append(Site(0, "resid_mid"), range(50), torch.full((50, 40), float(i)))
    print(i, flush=True)
"""


@pytest.mark.process
def test_after_a_kill_a_run_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    done = [int(child.stdout.readline()) for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (tmp_path / ".0.safetensors.5f.tmp").write_bytes(b"half")
    with RunStore(0, tmp_path) as store:
        assert {f"run {i}" for i in done} <= set(store.runs())
        for run in store.runs():
            assert torch.equal(store.rows(run, MID, range(50)), torch.full((50, 40), float(run.split()[1])))
        assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:100])
        raise OSError(28, "No space left on device")

    store = RunStore(None, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("mi_route2.files.write_synced", full)
        with pytest.raises(OSError, match="No space left"):
            write(store, "a", drawn(8, 2))
    assert store.runs() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("tier", list(TIERS))
def test_threads_write_read_and_drop_at_once(tier: str, tmp_path: Path) -> None:
    store, errors = RunStore(**TIERS[tier](tmp_path)), []

    def work(thread: int) -> None:
        try:
            for i in range(15):
                run = f"{thread}/{i}"
                write(store, run, torch.full((5, 2), float(i)))
                assert store.rows(run, MID, [2])[0, 0] == i
                if i % 2:
                    store.drop(run)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(store.runs()) == 4 * 8


def test_the_automatic_budget_is_a_share_within_bounds() -> None:
    assert [automatic(free) for free in (0, 16 << 30, 1 << 50)] == [256 << 20, 2 << 30, 8 << 30]
    assert RunStore().stats().budget == pytest.approx(automatic(available()), rel=0.2)
