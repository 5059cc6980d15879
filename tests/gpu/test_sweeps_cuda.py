"""Sweeps on a CUDA device: every cell is a forward with the clean value put in by hand there, and the CPU's cell."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from families import SPECS, make_family, move
from gpu import DEVICE, NEEDS
from torch import Tensor

from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.patching import Grid, Target, attribute, paths, sweep
from mi_route2.sites import Site

pytestmark = NEEDS
CLEAN, CORRUPT = [3, 7, 11, 5, 2, 8, 4], [3, 9, 11, 6, 2, 8, 4]
QUESTION = {"clean": CLEAN, "corrupt": CORRUPT, "answer": 5, "foil": 9, "progress": False}
POINTS = ("resid_pre", "resid_mid", "attn_out", "z", "k", "mlp_out")
ADAPTED = ("kept_a", "kept_out", "quarantine_out")
CLOSE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference of a logit difference; transformers computes rotary angles in float32 in any case."""


def opened(family: str, dtype: torch.dtype, device: str, host: str = "torch") -> Host:
    made = open_host(host, make_family(family, dtype).to(device))
    move(made.attach("blocks.*.mlp.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.2)
    return made


def put(source: Tensor, position: int, head: int | None, value: Tensor) -> Tensor:
    new = value.clone()
    at = (0, position) if head is None else (0, position, head)
    new[at] = source[at]
    return new


@torch.no_grad()
def by_hand(host: Host, target: Target, position: int) -> float:
    """One whole forward under plain hooks."""
    clean, corrupt = (torch.tensor([tokens], device=DEVICE) for tokens in (CLEAN, CORRUPT))
    source = host.capture([target.site], clean)[target.site]
    with host.hooks({target.site: partial(put, source, position, target.head)}):
        logits = host.logits(corrupt)[0, -1].double()
    return float(logits[5] - logits[9])


def check(grid: Grid, host: Host, close: float) -> None:
    for row, target in enumerate(grid.sites):
        for column, position in enumerate(grid.positions):
            assert abs(grid.values[row, column] - by_hand(host, target, position)) < close, (str(target), position)


# On a CPU each sweep is compared with itself, and tests/mi_route2/patching has the forwards by hand of every family and host: one
# form is enough to see that the tests themselves work.
ON_CPU = DEVICE == "cpu"


@pytest.mark.parametrize(
    ("family", "dtype"), [("GPT2", torch.float32)] if ON_CPU else list(product(("Qwen3", "GPT2", "MicroGPT"), CLOSE))
)
def test_cells_are_forwards_by_hand_and_those_of_the_cpu(family: str, dtype: torch.dtype) -> None:
    """Points of the blocks and of the adapters; attention groups heads in the first family, and fuses q, k and v in the second."""
    made, here = opened(family, dtype, DEVICE), opened(family, dtype, "cpu")
    sites = [*POINTS, *ADAPTED]
    grid = sweep(made, sites=sites, **QUESTION)
    check(grid, made, CLOSE[dtype])
    np.testing.assert_allclose(grid.values, sweep(here, sites=sites, **QUESTION).values, rtol=0, atol=CLOSE[dtype])
    assert np.abs(grid.effect).max() > 0.01


@pytest.mark.parametrize("host", ["torch"] if ON_CPU else ["torch", "transformer_lens"])
def test_heads_one_by_one_resumed_and_whole(host: str) -> None:
    """z by query head, k and v by the fewer heads of keys and values."""
    made = opened("Qwen3", torch.float32, DEVICE, host)
    resumed, whole = (sweep(made, sites=["z", "k", "v"], heads=True, how=how, **QUESTION) for how in ("resumed", "whole"))
    assert [sum(one.site.point == point for one in resumed.sites) for point in ("z", "k", "v")] == [8, 4, 4]
    check(resumed, made, CLOSE[torch.float32])
    np.testing.assert_allclose(resumed.values, whole.values, rtol=0, atol=CLOSE[torch.float32])


def test_estimates_and_paths_are_those_of_the_cpu() -> None:
    made, here = (opened("Qwen3", torch.float64, device) for device in (DEVICE, "cpu"))
    estimates = {key: value for key, value in QUESTION.items() if key != "progress"}
    one, other = (attribute(host, sites=["z", "kept_a", "mlp_out"], heads=True, **estimates) for host in (made, here))
    np.testing.assert_allclose(one.values, other.values, rtol=0, atol=CLOSE[torch.float64])
    one, other = (paths(host, senders=Site(0, "attn_out"), receivers=Site(1, "v"), **QUESTION) for host in (made, here))
    np.testing.assert_allclose(one.values, other.values, rtol=0, atol=CLOSE[torch.float64])
    assert np.abs(one.effect).max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_floor_bounds_what_company_does_to_a_run(dtype: torch.dtype) -> None:
    """Cells without an effect, run all the same among others, lie within it of the corrupt score."""
    made = opened("Qwen3", dtype, DEVICE)
    question = {**QUESTION, "clean": [3, 9, 11, 6, 2, 8, 5]}  # only the last token differs: nothing before it can act
    grid = sweep(made, sites="resid_pre", shortcuts=False, **question)
    assert np.abs(grid.effect[:, :-1]).max() <= 4 * grid.noise_floor
    assert np.abs(grid.effect[:, -1]).max() > grid.noise_floor
