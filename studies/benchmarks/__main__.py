"""``python -m studies.benchmarks [NAME] [OPTIONS]``: list the benchmarks, or run one; ``NAME --help`` explains its options."""

import sys

from mi_route2.validation import unknown_name
from studies.benchmarks import command
from studies.benchmarks.options import BENCHMARKS


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{__doc__}\n\nbenchmarks: {', '.join(BENCHMARKS)}")
        return 0
    name = sys.argv.pop(1)
    if name not in BENCHMARKS:
        print(f"error: {unknown_name(name, list(BENCHMARKS), 'benchmark')}", file=sys.stderr)
        return 2
    return command.main(BENCHMARKS[name], name)


if __name__ == "__main__":
    sys.exit(main())
