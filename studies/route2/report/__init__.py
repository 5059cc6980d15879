"""Report of finished run folders: tables, figures and pages. Nothing here trains, samples or loads a model.

    write_report(root)              all of the following, of the runs in a folder
    write_tables(load_runs(root))   table.md, table.json, ablations.*, leakage.*
    write_leakage(load_runs(root))  leakage.md, leakage.json
    write_figures(load_runs(root))  all_arms_per_mode.png, cos_over_time.png, training.png and their further pages
    write_page(...)                 one HTML page of rollouts

The same folder gives the same bytes. Every file is written atomically; each function returns the paths that it wrote.
"""

import re
from pathlib import Path

from tqdm import tqdm

from studies.common.tables import write_texts
from studies.route2.report.figures import write_all_arms, write_cos_over_time, write_training
from studies.route2.report.load import VANILLA, RunSet, load_runs, read_rollouts
from studies.route2.report.show import write_page
from studies.route2.report.table import (
    ablation_groups,
    ablations_markdown,
    json_text,
    leakage_markdown,
    leakage_table,
    table,
    table_markdown,
)

__all__ = [
    "load_runs",
    "read_rollouts",
    "report_texts",
    "write_figures",
    "write_leakage",
    "write_page",
    "write_report",
    "write_tables",
]


def write_report(root: Path) -> list[Path]:
    """Write every table and figure of the study in `root` into `root`.

    Without vanilla there is no leakage file, and the table says so. Files of an earlier report that this one does not have are
    removed. Tables come last: where they are those of the runs, the figures are too.

    Raises:
        ValueError: In one sentence, for folders that `load_runs` refuses, before anything is written.
    """
    runs = load_runs(root)
    return [*write_figures(runs), *write_tables(runs)]


def write_tables(runs: RunSet) -> list[Path]:
    """Write `report_texts`; without vanilla the leakage of an earlier report is removed."""
    texts = report_texts(runs)
    for stale in {"leakage.json", "leakage.md"} - texts.keys():
        (runs.root / stale).unlink(missing_ok=True)
    return write_texts(runs.root, texts)


def report_texts(runs: RunSet) -> dict[str, str]:
    """Return the tables of a report by file name: those of all arms, of the ablations, and of the leakage if vanilla was run."""
    report, groups = table(runs), ablation_groups(runs)
    texts = {
        "table.json": json_text(report),
        "table.md": table_markdown(runs, report),
        "ablations.json": json_text({"study": runs.root.name, "groups": groups}),
        "ablations.md": ablations_markdown(runs, groups),
    }
    return texts | (_leakage_texts(runs) if VANILLA in runs.specs else {})


def _leakage_texts(runs: RunSet) -> dict[str, str]:
    leakage = leakage_table(runs)
    return {"leakage.json": json_text(leakage), "leakage.md": leakage_markdown(runs, leakage)}


def write_leakage(runs: RunSet) -> list[Path]:
    """Write the leakage of every arm; ``ValueError`` if vanilla was not run."""
    return write_texts(runs.root, _leakage_texts(runs))


def write_figures(runs: RunSet) -> list[Path]:
    """Write every figure; figures and pages of an earlier report that this one does not have are removed."""
    draw = {"all_arms_per_mode.png": write_all_arms, "cos_over_time.png": write_cos_over_time, "training.png": write_training}
    progress = tqdm(draw.items(), desc="figures", unit="figure", disable=None)
    written = [path for name, write in progress for path in write(runs, runs.root / name)]
    pages = re.compile(rf"({'|'.join(Path(name).stem for name in draw)})(-\d+)?\.png")
    for stale in [path for path in runs.root.glob("*.png") if pages.fullmatch(path.name) and path not in written]:
        stale.unlink()
    return written
