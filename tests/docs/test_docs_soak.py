"""The page on serving says what the file of the soak says."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_says_what_the_hour_of_soak_left() -> None:
    soak = json.loads((DOCS / "results/benchmarks/soak.json").read_text(encoding="utf-8"))
    page = " ".join((DOCS / "serve.md").read_text(encoding="utf-8").split())
    samples = soak["samples"]
    memory = {round(one["second"]): round(one["rss"] / 2**20) for one in samples}
    answers = sum(n for name, n in soak["counts"].items() if name.startswith("status "))
    assert soak["minutes"] == 60
    assert not any(soak["left"].values())
    assert f"with seed {soak['seed']} " in page
    assert f"{min(soak['load']):.1f} to {max(soak['load']):.1f} on two cores" in page
    assert f"{answers:,} answers, {soak['compared']} compared and all equal, {len(soak['failures'])} failures" in page
    assert f"memory was {memory[20]} MiB after 20 seconds" in page
    assert f"{round(soak['idle']['rss'] / 2**20)} MiB at the end and {max(memory.values())} MiB at most" in page
    late = [one["rss"] for one in samples if one["second"] > 1800]
    assert late[-1] <= late[0]
