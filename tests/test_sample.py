"""The suite's own choices leave out nothing that they should not."""

import random
from itertools import combinations

import pytest
from sample import choosable, covering

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
