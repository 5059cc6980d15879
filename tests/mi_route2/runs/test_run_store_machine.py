"""A run store against a dict, under any sequence of calls: hypothesis looks for one after which they differ."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from mi_route2.runs import RunStore, Writer
from mi_route2.sites import Site

pytestmark = pytest.mark.machine

SITES = (Site(0, "resid_mid"), Site(0, "z"), Site(1, "kept_a", "mlp.down"))
SHAPES = {SITES[0]: (5,), SITES[1]: (2, 3), SITES[2]: ()}
DTYPES = {SITES[0]: torch.float32, SITES[1]: torch.bfloat16, SITES[2]: torch.float64}
RUNS = st.sampled_from(["a", "b", "c", "d"])
WEIGHTS = st.sampled_from(["w1", "w1", "w1", "w2"])
SELDOM = st.sampled_from([False, False, False, True])
"""Of what ends many runs at once: done as often as anything else, it would leave nothing to read."""
BUDGET, OVERHEAD, EXAMPLES = 3600, 1100, 20

Rows = dict[Site, dict[int, Tensor]]


class Stores(RuleBasedStateMachine):
    """The model: what was written, by run, site and position; why a run is gone."""

    budget, on_disk, seen = 0, True, Counter[str]()

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp()) if self.on_disk else None
        self.drawn = 0
        self.done: dict[str, tuple[str, Rows]] = {}
        self.writing: dict[str, tuple[Writer, str, Rows]] = {}
        self.gone: dict[str, str] = {}
        self.open()
        for run in "ab":
            self.write(run, "w1", 5)

    def open(self) -> None:
        self.store = RunStore(self.budget, self.folder)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            if self.folder:
                shutil.rmtree(self.folder)

    def fresh(self, site: Site, n: int) -> Tensor:
        """Rows that no other rows are equal to."""
        self.drawn += 1
        return torch.randn((n, *SHAPES[site]), generator=torch.Generator().manual_seed(self.drawn), dtype=torch.float64).to(
            DTYPES[site]
        )

    # ---- writing

    @rule(run=RUNS, weights=WEIGHTS)
    def open_run(self, run: str, weights: str) -> None:
        if run in self.done or run in self.writing:
            with pytest.raises(ValueError, match="already"):
                self.store.writing(run, weights=weights)
        else:
            self.writing[run] = self.store.writing(run, weights=weights), weights, {}
            self.gone.pop(run, None)

    @rule(run=RUNS, weights=WEIGHTS, count=st.integers(10, 20))
    def write(self, run: str, weights: str, count: int) -> None:
        """A whole run at once, with rows at two sites."""
        if run in self.done or run in self.writing:
            return
        self.open_run(run, weights)
        writer, _, rows = self.writing[run]
        for site in SITES[:2]:
            values = self.fresh(site, count)
            writer.append(site, range(count), values)
            rows[site] = dict(enumerate(values))
        self.close(run)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), site=st.sampled_from(SITES), positions=st.lists(st.integers(0, 40), max_size=20))
    def append(self, data: st.DataObject, site: Site, positions: list[int]) -> None:
        writer, _, rows = self.writing[data.draw(st.sampled_from(sorted(self.writing)))]
        values = self.fresh(site, len(positions))
        if len(set(positions)) < len(positions) or rows.get(site, {}).keys() & set(positions):
            with pytest.raises(ValueError, match="twice"):
                writer.append(site, positions, values)
        else:
            writer.append(site, positions, values)
            if positions:
                rows.setdefault(site, {}).update(zip(positions, values, strict=True))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def close_run(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.writing))))

    def close(self, run: str) -> None:
        writer, weights, rows = self.writing.pop(run)
        writer.close()
        self.done[run] = weights, rows

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort_run(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.pop(run)[0].abort()

    # ---- reading

    @rule(run=RUNS, there=SELDOM.map(lambda seldom: not seldom), site=st.sampled_from(SITES), data=st.data())
    def read(self, run: str, there: bool, site: Site, data: st.DataObject) -> None:
        if there and self.done:
            run = data.draw(st.sampled_from(sorted(self.done)))
            site = data.draw(st.sampled_from(sorted(self.done[run][1]) or [site]))
        if run not in self.done:
            reason = self.gone.get(run, "still being written" if run in self.writing else "no run")
            with pytest.raises(KeyError, match=reason):
                self.store.rows(run, site, [0])
            return
        rows = self.done[run][1].get(site)
        if rows is None:
            with pytest.raises(KeyError, match="has no rows at"):
                self.store.positions(run, site)
            return
        asked = data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=data.draw(st.sampled_from([0, 3])), max_size=6))
        found = self.store.rows(run, site, asked)
        self.seen["rows read"] += len(asked)
        assert found.dtype == DTYPES[site]
        assert found.shape == (len(asked), *SHAPES[site])
        assert all(torch.equal(value, rows[place]) for value, place in zip(found, asked, strict=True))
        absent = data.draw(st.integers(0, 45))
        if absent not in rows:
            with pytest.raises(KeyError, match="was not captured"):
                self.store.rows(run, site, [absent])

    # ---- keeping and letting go

    @rule(run=RUNS)
    def drop(self, run: str) -> None:
        if run in self.writing:
            with pytest.raises(ValueError, match="being written"):
                self.store.drop(run)
        elif run in self.done:
            self.store.drop(run)
            del self.done[run]
            self.gone[run] = "was dropped"
        else:
            with pytest.raises(KeyError, match=self.gone.get(run, "no run")):
                self.store.drop(run)

    @rule(weights=WEIGHTS, really=SELDOM)
    def invalidate(self, weights: str, really: bool) -> None:
        if not really:
            return
        ended = {run for run, (old, _) in self.done.items() if old != weights}
        stopped = {run for run, (_, old, _) in self.writing.items() if old != weights}
        assert set(self.store.invalidate(weights)) == ended | stopped
        for run in ended | stopped:
            self.gone[run] = "is invalid"
        for run in ended:
            del self.done[run]
        for run in stopped:
            with pytest.raises(RuntimeError, match="is invalid"):
                self.writing.pop(run)[0].close()

    @precondition(lambda self: self.on_disk)
    @rule(really=SELDOM)
    def reopen(self, really: bool) -> None:
        if not really:
            return
        self.store.close()
        for writer, _, _ in self.writing.values():
            with pytest.raises(RuntimeError, match="its store was closed"):
                writer.close()
        self.writing.clear()
        self.gone.clear()
        self.open()

    # ---- what always holds

    @invariant()
    def nothing_is_lost_but_by_eviction(self) -> None:
        """And eviction loses only where there is no disk."""
        there = self.store.runs()
        assert len(set(there)) == len(there)
        assert set(there) <= self.done.keys()
        for run in self.done.keys() - set(there):
            assert not self.on_disk
            del self.done[run]
            self.gone[run] = "was evicted"
            self.seen["evicted"] += 1

    @invariant()
    def what_is_there_is_what_was_written(self) -> None:
        """Reading does not evict: what is read from the disk goes to memory only if it fits."""
        for run in self.store.runs():
            weights, rows = self.done[run]
            info = self.store.info(run)
            assert info.weights == weights
            assert {site: kind.rows for site, kind in info.sites.items()} == {site: len(each) for site, each in rows.items()}
            for site, each in rows.items():
                assert self.store.positions(run, site) == sorted(each)
                self.seen["sites read"] += 1
                assert torch.equal(self.store.rows(run, site, sorted(each)), torch.stack([each[place] for place in sorted(each)]))

    @invariant()
    def the_budget_is_kept(self) -> None:
        """But for what is being written."""
        stats = self.store.stats()
        held = [run for run in self.store.runs() if "memory" in self.store.info(run).tiers]
        assert stats.memory_runs == len(held)
        assert stats.writing == len(self.writing)
        assert stats.memory_bytes <= stats.budget or self.writing
        least = sum(self.store.info(run).nbytes for run in held)
        assert least <= stats.memory_bytes
        if not self.writing:
            assert stats.memory_bytes <= 9 * least + OVERHEAD * len(held)  # a position of a row takes 8 bytes

    @invariant()
    def no_file_is_left_over(self) -> None:
        if self.folder and not self.writing:
            files = [path for path in self.folder.iterdir() if path.name != "lock"]
            assert len(files) == len(self.store.runs()) == self.store.stats().disk_runs
            assert sum(path.stat().st_size for path in files) == self.store.stats().disk_bytes


@pytest.mark.parametrize(("budget", "on_disk"), [(BUDGET, False), (0, True), (BUDGET, True)], ids=["memory", "disk", "both"])
def test_a_store_is_a_dict(budget: int, on_disk: bool) -> None:
    seen = Counter[str]()
    machine = type("Tiered", (Stores,), {"budget": budget, "on_disk": on_disk, "seen": seen})
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30))
    assert min(seen["rows read"], seen["sites read"]) > 40
    assert (seen["evicted"] > 5) is (not on_disk)
