"""Every wrong call at the library's front is refused in one sentence that names the remedy; what is right in another form is taken.

The rows are in ``wrong_calls``. Tests run under a hook that checks every annotation of the package; users do not, so the whole
table is run once more in a process of its own, without it, and must say the same there.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import wrong_calls
from wrong_calls import ACCEPTED, WRONG, WrongCall, outcome

import mi_route2
from mi_route2.adapters import attach
from mi_route2.adapters.attach import Adapters
from mi_route2.checks import as_mask, checked
from mi_route2.hosts import HOSTS, open_host


@pytest.fixture(scope="module")
def of_users() -> dict[str, Any]:
    """Return the error of every row in a process without the hook."""
    path = os.pathsep.join((str(Path(wrong_calls.__file__).parent), str(Path(mi_route2.__file__).parents[1])))
    told = subprocess.run(
        [sys.executable, wrong_calls.__file__], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return json.loads(told.stdout)


def named(row: WrongCall) -> str:
    return row.name


@pytest.mark.parametrize("row", WRONG, ids=named)
def test_a_wrong_call_is_refused_in_one_sentence_with_its_remedy(row: WrongCall, of_users: dict[str, Any]) -> None:
    raised = outcome(row)
    assert raised is not None
    assert row.error is not None
    assert (raised["error"], row.says in raised["text"]) == (row.error.__name__, True), raised
    assert "\n" not in raised["text"]
    assert len(raised["text"]) < 600
    assert of_users[row.name] == raised


@pytest.mark.parametrize("row", ACCEPTED, ids=named)
def test_another_form_of_the_right_thing_is_accepted(row: WrongCall, of_users: dict[str, Any]) -> None:
    row.call()
    assert of_users[row.name] is None


def test_the_table_is_as_large_as_it_should_be_and_names_each_call_once() -> None:
    names = [row.name for row in (*WRONG, *ACCEPTED)]
    assert len(names) == len(set(names))
    assert len(WRONG) >= 60


def test_a_mask_of_0_and_1_is_the_boolean_one() -> None:
    sites = [wrong_calls.Site(1, "resid_post")]
    tokens, mask = wrong_calls.tokens(), wrong_calls.attention()
    mask[1, :1] = False  # padding on the left, where the mask matters
    host = wrong_calls.host()
    expected, found = (host.capture(sites, tokens, one)[sites[0]] for one in (mask, mask.long()))
    assert torch.equal(found[mask], expected[mask])
    assert not torch.equal(host.capture(sites, tokens)[sites[0]][mask], expected[mask])
    plain, whole = (
        wrong_calls.Rollouts(tokens, mask.to(kind), wrong_calls.completion().to(kind)) for kind in (torch.bool, torch.int64)
    )
    assert torch.equal(plain.predictors, whole.predictors)
    assert whole.attention.dtype == whole.completion.dtype == torch.bool
    assert as_mask("mask", mask) is mask


def test_every_entry_of_a_list_is_checked_and_nothing_is_drawn() -> None:
    @checked
    def take(rows: Sequence[int] | None, named: Mapping[str, str | list[Sequence[float]]] = MappingProxyType({})) -> None:
        """Have arguments in which beartype would draw the entry that it looks at."""

    before = random.getstate()
    take([1, 2, 3], {"a": [[1, 2.5], (np.float32(3), 4)], "b": "text"})
    take(None, {"a": [[]]})
    for place in range(8):
        with pytest.raises(TypeError, match=r"take: rows must be a Sequence\[int\] or None, not the list"):
            take([1] * place + ["x"] + [1] * (7 - place))  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="named must be"):
            take([], {"a": "text", "b": [[1.0], [2.0] * place + [None] + [3.0] * 7]})  # pyright: ignore[reportArgumentType]
    assert random.getstate() == before


def test_axes_of_one_name_have_one_length_and_whole_numbers_of_numpy_are_numbers() -> None:
    @checked
    def both(a: wrong_calls.Tensor, *more: int, scale: float = 1.0) -> float:
        return sum(more) * scale

    assert both(torch.zeros(1), wrong_calls.np.int64(2), 3, scale=2) == 10
    with pytest.raises(TypeError, match=r"more must be an int, not the float 2\.5"):
        both(torch.zeros(1), 2.5)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("training", [True, False])
def test_adapters_take_the_training_flag_of_what_they_wrap(name: str, training: bool) -> None:
    host = open_host(name, wrong_calls.llama().train(training))
    flags = {path: module.training for path, module in host.model.named_modules()}
    adapters = host.attach("blocks.*", spec=wrong_calls.SPEC, generator=wrong_calls.seeded())
    assert {module.training for routed in adapters.modules.values() for module in routed.modules()} == {training}
    assert {module.training for module in host.model.modules()} == {training}
    host.model.train(not training)
    assert {module.training for module in host.model.modules()} == {not training}
    host.model.train(training)
    adapters.detach()
    assert {path: module.training for path, module in host.model.named_modules()} == flags


def test_each_adapter_takes_the_flag_of_its_own_linear() -> None:
    model = wrong_calls.llama().train()
    model.model.layers[1].eval()
    adapters: Adapters = attach(model, "blocks.*", spec=wrong_calls.SPEC, generator=wrong_calls.seeded())
    for path, routed in adapters.modules.items():
        assert {module.training for module in routed.modules()} == {"layers.0" in path}, path
