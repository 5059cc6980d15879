"""Entry point of ``python -m studies.route2``; see ``cli``. Ctrl-C during its imports ends without a traceback."""

import sys

if __name__ == "__main__":
    try:
        from studies.route2.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
