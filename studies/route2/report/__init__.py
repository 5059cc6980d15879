"""Report of finished run folders: tables, figures and pages. Nothing here trains, samples or loads a model.

    write_report(root)      table.md, table.json, leakage.*, ablations.*, all figures
    write_leakage(root)     leakage.md, leakage.json
    write_page(...)         one HTML page of rollouts

The same folder gives the same bytes. Every file is written atomically.
"""

from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from studies.common.publishing import write_texts
from studies.route2.report.figures import write_all_arms, write_cos_over_time, write_training
from studies.route2.report.load import VANILLA, RunSet, load_runs, read_rollouts
from studies.route2.report.show import write_page
from studies.route2.report.table import (
    ablations_json,
    ablations_markdown,
    leakage_json,
    leakage_markdown,
    leakage_table,
    table,
    table_json,
    table_markdown,
)

__all__ = ["load_runs", "read_rollouts", "write_figures", "write_leakage", "write_page", "write_report", "write_tables"]


def write_report(root: Path) -> list[Path]:
    """Write every table and figure of the study in `root` into `root`; return their paths.

    Without vanilla there is no leakage file, and the table says so.

    Raises:
        ValueError: In one sentence, for folders that `load_runs` refuses, before anything is written.
    """
    runs = load_runs(root)
    parts: list[Callable[[RunSet], list[Path]]] = [_tables, _figures]
    if VANILLA in runs.specs:
        parts.insert(1, _leakage)
    return [path for part in parts for path in part(runs)]


def write_tables(root: Path) -> list[Path]:
    """Write table.md, table.json, ablations.md and ablations.json; return their paths."""
    return _tables(load_runs(root))


def write_figures(root: Path) -> list[Path]:
    """Write all_arms_per_mode.png, cos_over_time.png, training.png and their further pages; return their paths."""
    return _figures(load_runs(root))


def write_leakage(root: Path) -> list[Path]:
    """Write leakage.json and leakage.md; return their paths. Raises ValueError if vanilla was not run."""
    return _leakage(load_runs(root))


def _tables(runs: RunSet) -> list[Path]:
    content = table(runs)
    texts = {
        "table.json": table_json(content),
        "table.md": table_markdown(runs, content),
        "ablations.json": ablations_json(runs),
        "ablations.md": ablations_markdown(runs),
    }
    return write_texts(runs.root, texts)


def _leakage(runs: RunSet) -> list[Path]:
    content = leakage_table(runs)
    return write_texts(runs.root, {"leakage.json": leakage_json(content), "leakage.md": leakage_markdown(runs, content)})


def _figures(runs: RunSet) -> list[Path]:
    draw = {
        "all_arms_per_mode.png": write_all_arms,
        "cos_over_time.png": write_cos_over_time,
        "training.png": write_training,
    }
    progress = tqdm(draw.items(), desc="figures", unit="figure", disable=None)
    return [path for name, write in progress for path in write(runs, runs.root / name)]
