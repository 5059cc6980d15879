"""Tables as plain Markdown: readable in a terminal before anything renders them."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """A padded pipe table; the first `left` columns are aligned left, the others right. Ends with a newline.

    Cells are texts: a pipe or a line break in one is escaped, so a hostile name cannot add a column.
    """
    cells = [[_escape(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])]) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\r", " ").replace("\n", " ")
