"""``python -m studies.benchmarks [NAME] [OPTIONS]``: list the benchmarks, or run one; ``NAME --help`` explains its options."""

import runpy
import sys
from pathlib import Path

from mi_route2.validation import unknown_name

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the benchmark modules."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "command.main(" in path.read_text(encoding="utf-8"))


def main() -> int:
    known = [name for name in names() if name != Path(__file__).stem]
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{__doc__}\n\nbenchmarks: {', '.join(known)}")
        return 0
    name = sys.argv.pop(1)
    if name not in known:
        print(f"error: {unknown_name(name, known, 'benchmark')}", file=sys.stderr)
        return 2
    runpy.run_module(f"studies.benchmarks.{name}", run_name="__main__")  # which exits by itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
