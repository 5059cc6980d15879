"""The benchmark of the server: both sides do the same work, and the page prints what was measured."""

from pathlib import Path

import pytest
from measured import DOCS, demand_printed, published, results

from mi_route2.serve.process import serving
from studies.benchmarks import serve

pytestmark = pytest.mark.study


def test_every_turn_measures_its_sides_and_memory_is_sampled(tmp_path: Path) -> None:
    with serving("studies.benchmarks.serve:model", tmp_path / "log") as server:
        sides = serve.ServerSides(serve.model(), server, serve.SIZES["quick"], 0)
        found = {name: seconds for turn in sides.turns().values() for name, seconds in turn().items()}
        assert found.keys() == {name for row in serve.ROWS for name in (row.over, row.under)}
        assert all(seconds > 0 for name, seconds in found.items() if "processor" not in name)
        samples = serve.memory(server, 60, 0)
    assert [count for count, _ in samples] == [16, 32, 48, 60]
    assert serve.slope([(1000 * i, (100 + 2 * i) << 20) for i in range(10)])[0] == pytest.approx(2.0)


def test_the_page_prints_what_was_measured() -> None:
    document, page = published("serve"), (DOCS / "serve.md").read_text(encoding="utf-8")
    demand_printed("serve.md", "serve", serve.table(results(document), document["seconds"]))
    grown = [tuple(one) for one in published("serve_memory")["samples"]]
    cold = published("serve_cold")
    for line in (serve.start_line(document["starts"]), serve.cold_line(cold["starts"], cold["load"][0]), serve.memory_line(grown)):
        assert line in page, f"docs/serve.md must have the line:\n\n{line}"
    assert all(one["healthy"] - one["loaded"] < 5 for one in (*document["starts"], *cold["starts"]))
