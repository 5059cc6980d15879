"""Numbers and tables as plain Markdown, readable in a terminal without rendering; and tables of data sets."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mi_route2.files import write_whole
from mi_route2.validation import read_lines
from studies.common.stats import Summary

UNDEFINED = "–"  # noqa: RUF001 - an en dash, as in printed tables


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Return a padded pipe table that ends with a newline; the first `left` columns are aligned left, the others right.

    Cells are texts: a pipe or a line break in a cell is escaped or replaced, so that no text can add a column.
    """
    cells = [[_escape(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])]) + "\n"


def markdown_page(sections: Iterable[str]) -> str:
    """Return a page of these sections, with an empty line between two."""
    return "\n\n".join(section.rstrip() for section in sections) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\r", " ").replace("\n", " ")


def number(value: float | None, signed: bool = False) -> str:
    """Format a number with three decimals, without the leading zero of a rate: .053, 1.000, -.120; with `signed`, +.053."""
    if value is None:
        return UNDEFINED
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    if float(text) == 0:
        text = text.lstrip("+-")  # without a sign, so that zero is always printed the same
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def interval(summary: Summary, signed: bool = False) -> str:
    """Format `mean [lo, hi]`; only the mean if one seed gives no interval."""
    center = number(summary["mean"], signed)
    if summary["lo"] is None:
        return center
    return f"{center} [{number(summary['lo'], signed)}, {number(summary['hi'], signed)}]"


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl`` or ``.parquet`` file, or of all such files in a folder.

    Raises:
        ValueError: There is no such file, one cannot be read, or a row lacks one of the columns.
    """
    files = sorted(each for kind in ("jsonl", "parquet") for each in path.rglob(f"*.{kind}")) if path.is_dir() else [path]
    if not any(file.is_file() for file in files):
        raise ValueError(f"there is no .jsonl or .parquet file at {path}: give one, or a folder with some")
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.suffix == ".parquet":
            try:
                import pyarrow.parquet as parquet
            except ModuleNotFoundError as error:
                raise ValueError(f"{file} needs pyarrow: pip install pyarrow, or give the rows as .jsonl") from error
            rows += parquet.read_table(file).to_pylist()
        else:
            rows += read_lines(file, lambda _index, row: row)
    for row in rows:
        if missing := [column for column in columns if not isinstance(row, dict) or row.get(column) is None]:
            raise ValueError(f"a row of {path} has no {missing[0]!r}: give rows with {', '.join(columns)}")
    return rows


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the texts of a report by file name, each atomically; return their paths."""
    return [write_whole(folder / name, text.encode()) for name, text in texts.items()]
