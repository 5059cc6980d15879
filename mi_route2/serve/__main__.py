"""``python -m mi_route2.serve``: the same as ``mi-route2 serve``."""

from mi_route2.serve.command import main

if __name__ == "__main__":
    main()
