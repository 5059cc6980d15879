"""One thread (results then do not depend on the machine's cores), one set of hypothesis examples, a Ctrl-C that works;
and the marker ``matrix`` for those parameter sets of a test that add only a combination."""

import gc
import os
import signal
from itertools import groupby
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings
from sample import choosable, covering
from shapes import where_shapes_are

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")
jaxtyping.jaxtyped = where_shapes_are(jaxtyping.jaxtyped)  # what the import hook of --jaxtyping-packages decorates with
# A suite that was started in the background ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Read when huggingface_hub is imported; otherwise each trainer of TRL would look for the network.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


LATER = pytest.StashKey[dict[str, bool]]()
"""By choice of ``--shapes``, True for the parameter sets of a test that run without the checks of shapes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--shapes``."""
    told = (
        "check the shapes of every call in all parameter sets of a test; in each that is the first with one of its values "
        "(an architecture, a kind of adapter), which takes a quarter less time; or in the first alone, a third less"
    )
    parser.addoption("--shapes", choices=("all", "each", "first"), default="all", help=told)


MEMORY = Path("/dev/shm")
ROOM = 4 << 30
"""Free bytes that a disk in memory needs; the suite takes less than a tenth of them."""


def pytest_configure() -> None:
    """Collect no garbage while modules are imported: a third of the time of the imports, and there is none.

    Folders of tests are in memory if there is a disk for it: half of the time of tests that write much went into ``fsync``.
    """
    gc.disable()
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        disk = os.statvfs(MEMORY)
        if disk.f_bavail * disk.f_frsize >= ROOM and not disk.f_flag & os.ST_NOEXEC:  # tests run programs from their folders
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later garbage collection."""
    gc.enable()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which ``-m`` leaves out every test: half of the time of collecting."""
    if not config.option.markexpr or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    return None if choosable(collection_path.read_text(encoding="utf-8"), config.option.markexpr) else True


@pytest.hookimpl(trylast=True)  # after the fixtures' ends
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what a file's tests imported out of them too: in a worker of a hundred files a collection would take a second."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Switch the import hook's checks; those at the front door (``mi_route2.checks``) are always on."""
    off = item.stash.get(LATER, {}).get(item.config.getoption("--shapes"), False)
    jaxtyping.config.update("jaxtyping_disable", off)


def factors(item: pytest.Function) -> tuple[object, ...]:
    """Return the parameters of a test one by one, tuples taken apart, as things that can be compared."""
    values = (part for value in item.callspec.params.values() for part in (value if isinstance(value, tuple) else (value,)))
    return tuple(
        value if isinstance(value, str | int | float | bool | None) else getattr(value, "__qualname__", repr(value))
        for value in values
    )


FEW = {"Qwen3", "GPT2", "MicroGPT"}
"""Architectures that differ in most: gated and not, rotary and learned positions, one from transformers and ours."""

LONG = (
    *("test_smollm2", "test_docs", "test_trl", "test_resume", "test_chat_study", "test_tracing", "test_study", "test_compile"),
    *("test_probing", "test_benchmarks", "test_gates", "test_canary_study", "test_transformer_lens", "test_study_hosts"),
    *("test_page", "test_distributed", "test_front_door", "test_checkpoints", "test_architecture", "test_jail_lifecycle"),
)
"""Files that take from two minutes down to fifteen seconds, the longest first, or the other core would be idle at the end."""


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark ``matrix`` the parameter sets of a test that a covering choice leaves out, and all but few architectures.

    Of a test of a device it is all but the first where the device is the CPU: it shows there that the test runs, and what a set
    adds other tests of the CPU have.
    """
    import torch  # here: the process that only hands tests out to workers would wait for both of these imports
    from families import FAMILIES

    torch.set_num_threads(1)
    place = {stem: number for number, stem in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    made = (item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    for _, group in groupby(made, key=lambda item: (item.path, item.originalname, item.cls)):
        tests = list(group)
        rows = [factors(test) for test in tests]
        seen: set[tuple[int, object]] = set()
        for test, row in zip(tests, rows):
            values = set(enumerate(row))
            test.stash[LATER] = {"first": test is not tests[0], "each": values <= seen}
            seen |= values
        stand_in = os.environ.get("ROUTE2_TEST_DEVICE") == "cpu" and tests[0].get_closest_marker("gpu") is not None
        if len(tests) < 4 and not stand_in:
            continue
        kept = [place for place, row in enumerate(rows) if not set(row) & (FAMILIES.keys() - FEW)] or list(range(len(rows)))
        chosen = {kept[place] for place in ([0] if stand_in else covering([rows[place] for place in kept]))}
        for place, test in enumerate(tests):
            if place not in chosen:
                test.add_marker("matrix")
