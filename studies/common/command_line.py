"""Command line of all studies: errors in one sentence, an orderly end at Ctrl-C, and the syntax of seeds."""

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

MAX_SEEDS = 10_000
FIRST_SEEDS = 64
"""Largest number that is read as that many seeds; behind it a single seed is meant more often."""

Seeds = Annotated[str, tyro.conf.arg(help="a number (3 means 0, 1, 2), a range (0-7) or a list (4,9)")]
Workers = Annotated[int, tyro.conf.arg(help="number of processes of this machine, one thread each")]
Config = Annotated[Path | None, tyro.conf.arg(help="TOML file of training settings to change; --override takes precedence")]
Override = Annotated[tuple[str, ...], tyro.conf.arg(help="training settings to change, e.g. steps=100")]


def run_command(commands: Mapping[str, Callable[..., Any]], name: str, description: str | None, stopped: str) -> int:
    """Run one of ``commands`` from the command line of ``python -m <name>``; return the exit status.

    Args:
        commands: Functions by the name of their subcommand.
        name: Module name of the study.
        description: Help text.
        stopped: End of the sentence that Ctrl-C prints: what the same command will do when it is started again.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks must not end a run
            stream.reconfigure(errors="replace")
    if twice := given_twice(sys.argv[1:]):
        print(f"error: {twice} is given twice: give it once, with all of its values behind it", file=sys.stderr)
        return 2
    command = tyro.extras.subcommand_cli_from_dict(dict(commands), prog=f"python -m {name}", description=description)
    try:
        command()
    except KeyboardInterrupt as interrupt:  # a command may say another end
        print(f"\nstopped; the same command {str(interrupt) or stopped}", file=sys.stderr)
        return 130
    except (KeyError, ValueError, OSError, RuntimeError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        print(f"error: {text}", file=sys.stderr)
        return 2
    return 0


def report_command(module: str, printed: str | None = None) -> Callable[..., Any]:
    """Return the command ``report`` of a study.

    Args:
        module: Module with the function ``write_report(folder)``, imported when the command runs.
        printed: File of the report that the command prints.
    """

    @dataclass(frozen=True)
    class ReportCommand:
        """Rewrite the tables and figures of a study's folder from its artifacts alone."""

        folder: tyro.conf.Positional[Path]

        def __call__(self) -> None:
            show_paths(import_module(module).write_report(named(self.folder)))
            if printed is not None:
                print((self.folder / printed).read_text(encoding="utf-8"))

    return ReportCommand


def given_twice(words: Sequence[str]) -> str:
    """Return the first option that occurs a second time, of which the parser would drop the first; otherwise an empty text."""
    options = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    return next((option for place, option in enumerate(options) if option in options[:place]), "")


def sentence(error: Exception) -> str:
    """Return an error as text; its type is named only for errors that were not written for users."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text if isinstance(error, ValueError | KeyError | OSError) and text else f"{type(error).__name__}: {text}"


def read_seeds(text: str) -> list[int]:
    """Parse seeds: ``"3"`` is 0, 1, 2; ``"0-7"`` a range with its end; ``"4,9"`` a list.

    Raises:
        ValueError: No seed, a negative one, more than ``MAX_SEEDS``, or a number above ``FIRST_SEEDS``.
    """
    seeds: Sequence[int] = ()
    with contextlib.suppress(ValueError):
        if "_" in text:
            raise ValueError  # Python reads 1_0 as 10
        if "," in text:
            seeds = [int(part) for part in text.split(",")]
        elif "-" in text.strip("-"):
            first, last = map(int, text.split("-"))
            seeds = range(first, last + 1)
        else:
            seeds = range(int(text))
    if seeds[MAX_SEEDS:]:  # the length of a range may be larger than Python can say
        raise ValueError(f"{text!r} names more than {MAX_SEEDS} seeds, which is the limit of one run: give fewer")
    if len(seeds) > FIRST_SEEDS and "," not in text and "-" not in text:
        raise ValueError(
            f"{text!r} would be the first {len(seeds)} seeds: write {len(seeds)}-{len(seeds)} for seed {len(seeds)} alone, or "
            f"0-{len(seeds) - 1} for all"
        )
    if not seeds or min(seeds) < 0:
        raise ValueError(f"{text!r} names no seeds: give a number (3 means 0, 1, 2), a range (0-7) or a list (4,9)")
    return sorted(set(seeds))


def seeds_text(seeds: Sequence[int]) -> str:
    """Return ``seed 3``, ``seeds 0-7`` or ``seeds 0, 2, 5``."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"seeds {seeds[0]}-{seeds[-1]}" if whole else "seeds " + ", ".join(map(str, seeds))


def named(folder: Path) -> Path:
    """Return a folder that was given as ``.`` or ``..`` by its path: a report prints its name, and looks beside it."""
    return folder.resolve() if folder.name in ("", "..") else folder


def show_paths(paths: list[Path]) -> None:
    """Print the paths that were written."""
    for path in paths:
        print(f"wrote {path}")
