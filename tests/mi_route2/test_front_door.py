"""The package's front: what it names is there, says what it is, and has an example that runs."""

import copy
import doctest
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_batch, make_family, make_policy, make_rollouts

import mi_route2
from mi_route2.patching import sweep
from mi_route2.routing import EraseSpec, OpenRoute, OpenSpec, PairBatch
from mi_route2.routing.directions import TopKFitter
from mi_route2.runs.record import record


@pytest.mark.parametrize("name", mi_route2.__all__)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(mi_route2, name)
    assert found.__name__ == name
    assert found.__doc__
    assert found.__module__.startswith("mi_route2.")


INSIDE = {
    **dict.fromkeys(("Adapters", "Tape", "from_pretrained", "save_pretrained"), "mi_route2.adapters"),
    **dict.fromkeys(("EraseRoute", "OpenRoute"), "mi_route2.routing"),
    **{"select": "mi_route2.sites", "Grid": "mi_route2.patching", "RunStore": "mi_route2.runs"},
}
"""Names that are met later, in their rooms; their examples run as well."""


def named(name: str) -> Any:
    return getattr(import_module(INSIDE.get(name, "mi_route2")), name)


def test_the_front_door_is_short() -> None:
    assert len(set(mi_route2.__all__)) == len(mi_route2.__all__) <= 25
    assert not INSIDE.keys() & set(dir(mi_route2))


@pytest.mark.parametrize("name", [*mi_route2.__all__, *INSIDE])
def test_each_name_has_an_example_that_runs(name: str, tmp_path: Path) -> None:
    host, policy = make_policy("GPT2", dtype=torch.float32)
    base = make_family("GPT2", dtype=torch.float32)
    if name == "load":
        base.save_pretrained(tmp_path / "checkpoint")
    tokens, batch, route = torch.randint(1, 12, (2, 7)), make_batch(), OpenRoute(OpenSpec())
    batch = replace(batch, rewards=batch.rewards.float(), advantages=batch.advantages.float())
    site, width = mi_route2.Site(1, "resid_post"), policy.model.config.n_embd
    known = {
        **{each: named(each) for each in (*mi_route2.__all__, *INSIDE)},
        "copy": copy, "torch": torch, "record": record,
        "EraseSpec": EraseSpec, "OpenSpec": OpenSpec, "TopKFitter": TopKFitter,
        "model": make_family("GPT2", dtype=torch.float32), "base": base,
        "host": host, "policy": policy, "adapters": policy.adapters,
        "checkpoint": tmp_path / "checkpoint", "folder": tmp_path, "tokens": tokens, "site": site, "vector": torch.ones(width),
        "pairs": PairBatch(make_rollouts(seed=3), make_rollouts(seed=4), "none"), "rollouts": batch.rollouts,
        "honest": make_rollouts(seed=4), "rewards": batch.rewards, "batch": batch, "route": route,
        "loss_fn": lambda logits, batch: -batch.rollouts.logprobs(logits).sum(1) * batch.advantages,
        "grid": sweep(host, sites="resid_pre", clean=[3, 7, 1], corrupt=[9, 7, 1], answer=3, foil=9) if name == "Grid" else None,
    }  # fmt: skip
    text = named(name).__doc__
    test = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    assert test.examples, f"{name} has no example in its docstring"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        _ = mi_route2.Enginee


@pytest.mark.process
def test_the_front_door_waits_for_nothing_and_what_it_brings_is_still_checked() -> None:
    """Neither torch nor a room is imported with the package; names, rooms and the import hook's checks are as if they were."""
    code = """
import sys, jaxtyping
hook = jaxtyping.install_import_hook("mi_route2", "beartype.beartype")
import mi_route2
print({"torch", "transformers"} & {*sys.modules}, [name for name in sys.modules if name.startswith("mi_route2.")])
assert set(mi_route2._MODULES) == set(mi_route2.__all__) <= set(dir(mi_route2))
mi_route2.MaskRoute, mi_route2.patching.paths
import torch
from mi_route2.routing.mask import decide
try:
    decide(torch.zeros(3), mi_route2.MaskSpec(), torch.zeros(2), torch.zeros(3, 4, dtype=torch.bool))
except jaxtyping.TypeCheckError:
    print("checked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["set() []", "checked", ""]
