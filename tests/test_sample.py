"""The suite's own choices, of tests and of checks, leave out nothing that they should not."""

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from sample import MARK, choosable, covering
from shapes import where_shapes_are
from torch import Tensor

WHOLE = "process or study or docs"
FAST = f"not (matrix or machine or {WHOLE})"


def test_a_covering_choice_has_every_pair_of_values() -> None:
    """By brute force, on rows that are drawn."""
    rng = random.Random(0)
    for factors in (1, 2, 3, 4):
        rows = [tuple(rng.randrange(4) for _ in range(factors)) for _ in range(60)]
        chosen = [rows[place] for place in covering(rows)]
        for columns in combinations(range(factors), 2 if factors > 2 else 1):
            values = ({tuple(row[column] for column in columns) for row in some} for some in (rows, chosen))
            assert next(values) == next(values)
        assert len(chosen) < len(rows)


@pytest.mark.parametrize(
    ("text", "asked", "possible"),
    [
        ("pytestmark = pytest.mark.process\n", WHOLE, True),
        ("pytestmark = pytest.mark.process\n", FAST, False),
        ("pytestmark = pytest.mark.process\n@pytest.mark.machine\n", "machine", True),
        ("pytestmark = [\n    pytest.mark.filterwarnings('ignore'),\n    pytest.mark.docs,\n]\n", FAST, False),
        ("@pytest.mark.process\ndef test(): ...\n", WHOLE, True),
        ("@pytest.mark.process\ndef test(): ...\n", FAST, True),
        ("pytest.param(1, marks=pytest.mark.study)\n", WHOLE, True),
        ("def test(): ...\n", WHOLE, False),
        ("def test(): ...\n", f"(matrix or machine) and not ({WHOLE})", True),
        ("pytestmark = pytest.mark.machine\n", f"(matrix or machine) and not ({WHOLE})", True),
        ("pytestmark = pytest.mark.study\n", f"(matrix or machine) and not ({WHOLE})", False),
    ],
)  # fmt: skip
def test_a_file_is_left_out_only_if_no_test_of_it_can_be_chosen(text: str, asked: str, possible: bool) -> None:
    assert choosable(text, asked) is possible


def test_no_marker_comes_from_another_file(pytestconfig: pytest.Config) -> None:
    """What chooses files by their texts would not see it: ``-m gpu`` once chose no test."""
    ours = {told.partition(":")[0] for told in pytestconfig.getini("markers")}
    assert {"gpu", "process"} <= ours
    others = (path for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith("test_"))
    assert {path.name for path in others if ours & {*MARK.findall(path.read_text(encoding="utf-8"))}} == set()


checked = where_shapes_are(jaxtyping._decorator.jaxtyped)(typechecker=beartype)


def added(a: Float[Tensor, " d"], b: list[Float[Tensor, " d"]]) -> Float[Tensor, " d"]:
    return a + sum(b)


def alike(a: "Float[Tensor, ' d']", b: "Float[Tensor, ' d'] | None" = None) -> None: ...


def doubled(n: int, text: str = "") -> int:
    return n * 2 if text == "" else text  # pyright: ignore[reportReturnType]


def calling(n: int, sizes: list[int]) -> None:
    for size in sizes:  # axes of one call are not those of the next
        checked(added)(torch.zeros(size), [torch.zeros(size)])


one, two = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("fn", "right", "wrong"),
    [
        (added, (two, [two, two]), (two, [one])),
        (added, (two, [two]), (two[None], [two])),
        (alike, (two, two), (two, one)),
        (doubled, (2,), ("2",)),
        (doubled, (2,), (2, "not an int comes back")),
        (calling, (1, [2, 3]), (1, "23")),
    ],
)
def test_wrong_shapes_and_wrong_types_are_errors_unless_checks_are_off(
    fn: Callable[..., Any], right: tuple[Any, ...], wrong: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    checked(fn)(*right)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(fn)(*wrong)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    if fn is not added and fn is not calling:
        checked(fn)(*wrong)


def test_only_functions_without_a_shape_have_the_plain_check() -> None:
    ours, theirs = checked(doubled), jaxtyping._decorator.jaxtyped(doubled, typechecker=beartype)
    assert ours.__code__ is not theirs.__code__
    for fn in (added, alike):
        assert checked(fn).__code__ is theirs.__code__
