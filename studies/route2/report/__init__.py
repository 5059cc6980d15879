"""Report of finished run folders: tables, figures and pages. Nothing here trains, samples or loads a model.

    write_report(root)              all of the following, of the runs in a folder
    write_tables(load_runs(root))   table.md, table.json, ablations.*
    write_leakage(load_runs(root))  leakage.md, leakage.json
    write_figures(load_runs(root))  all_arms_per_mode.png, cos_over_time.png, training.png and their further pages
    write_page(...)                 one HTML page of rollouts

The same folder gives the same bytes. Every file is written atomically; each function returns the paths that it wrote.
"""

from pathlib import Path

from tqdm import tqdm

from studies.common.publishing import write_texts
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

__all__ = ["load_runs", "read_rollouts", "write_figures", "write_leakage", "write_page", "write_report", "write_tables"]


def write_report(root: Path) -> list[Path]:
    """Write every table and figure of the study in `root` into `root`.

    Without vanilla there is no leakage file, and the table says so.

    Raises:
        ValueError: In one sentence, for folders that `load_runs` refuses, before anything is written.
    """
    runs = load_runs(root)
    return [*write_tables(runs), *(write_leakage(runs) if VANILLA in runs.specs else []), *write_figures(runs)]


def write_tables(runs: RunSet) -> list[Path]:
    """Write the tables of all arms and of the ablations."""
    content, groups = table(runs), ablation_groups(runs)
    texts = {
        "table.json": json_text(content),
        "table.md": table_markdown(runs, content),
        "ablations.json": json_text({"study": runs.root.name, "groups": groups}),
        "ablations.md": ablations_markdown(runs, groups),
    }
    return write_texts(runs.root, texts)


def write_leakage(runs: RunSet) -> list[Path]:
    """Write the leakage of every arm; ``ValueError`` if vanilla was not run."""
    content = leakage_table(runs)
    return write_texts(runs.root, {"leakage.json": json_text(content), "leakage.md": leakage_markdown(runs, content)})


def write_figures(runs: RunSet) -> list[Path]:
    """Write every figure."""
    draw = {
        "all_arms_per_mode.png": write_all_arms,
        "cos_over_time.png": write_cos_over_time,
        "training.png": write_training,
    }
    progress = tqdm(draw.items(), desc="figures", unit="figure", disable=None)
    return [path for name, write in progress for path in write(runs, runs.root / name)]
