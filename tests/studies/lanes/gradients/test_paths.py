"""Paths add up to the gradient; each is what patching that path alone would do; the direct one has a closed form."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_reader import byte_rows, moved_model
from torch import Tensor

from studies.lanes.config import WIRINGS, LanesConfig, Loop
from studies.lanes.gradients.paths import Paths, Sublayer, coefficients, decompose, ratios, sublayers
from studies.lanes.model import LanesModel

pytestmark = pytest.mark.study

PLAIN = LanesConfig(layers=5, d_model=8, heads=2, mlp=1, lane_start=3, zero_init=False)
LOOPED = replace(PLAIN, loop=Loop(1, 2, 1), loop_embeddings=True)
draw = partial(byte_rows, length=7)
READ_AS_ONE = [name for name in WIRINGS if name != "z2"]


def by_sublayer(model: LanesModel) -> dict[Sublayer, Paths]:
    return {paths.sublayer: paths for paths in decompose(model, draw())}


def at_final(model: LanesModel) -> Tensor:
    """dL / d hook_final."""
    seen = []
    with model.hooks(fwd_hooks=[("hook_final", lambda x, hook: seen.append(x))]):
        loss = model.loss(draw())
    return torch.autograd.grad(loss, seen)[0]


@pytest.mark.parametrize("config", [PLAIN, LOOPED], ids=["plain", "looped"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_direct_and_terms_add_up_to_the_total(wiring: str, config: LanesConfig) -> None:
    model = moved_model(replace(config, wiring=wiring))
    paths = decompose(model, draw())
    assert [one.sublayer for one in paths] == list(sublayers(model))
    assert len(paths) == 2 * len(model.schedule)
    assert max(one.missing for one in paths) < 1e-12
    assert paths[0].missing < 1e-12 < float(paths[0].cascade.abs().max()), "the first sublayer has later ones to pass through"
    last = paths[-1]
    assert not last.terms
    assert torch.allclose(last.direct, last.total, rtol=0, atol=1e-15)
    for hook in model.hook_dict.values():
        assert not hook.fwd_hooks
        assert not hook.bwd_hooks


@pytest.mark.parametrize("wiring", ["sequential", "shipped", "z2"])
def test_paths_are_what_patching_them_alone_does(wiring: str) -> None:
    """Finite differences: push one output, hold every other sublayer but the path's at what it was, read the loss."""
    model = moved_model(replace(LOOPED, wiring=wiring))
    all_paths, order = by_sublayer(model), sublayers(model)
    source, through = order[3], order[6]
    _, cache = model.run_with_cache(draw()[:, :-1])
    push = torch.randn(cache[source.out].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def losses(size: float) -> tuple[float, float]:
        """With the push seen by lanes alone; and with it seen by the read of `through` alone, which then is all that moved."""
        held = [(s.out, lambda x, hook: cache[hook.name]) for s in order if s != source]
        moved = (source.out, lambda x, hook: cache[hook.name] + size * push)
        reads: list[Tensor] = []
        reader = (through.read, lambda x, hook: reads.append(x))
        with model.hooks(fwd_hooks=[moved, *held, reader]):
            direct = float(model.loss(draw()))
        with model.hooks(fwd_hooks=[(through.read, lambda x, hook: reads[0])]):
            return direct, float(model.loss(draw()))

    with torch.no_grad():
        up, down = losses(1e-4), losses(-1e-4)
    slopes = [(a - b) / 2e-4 for a, b in zip(up, down, strict=True)]
    paths = all_paths[source]
    assert slopes[0] == pytest.approx(float((paths.direct * push).sum()), rel=1e-5)
    assert slopes[1] == pytest.approx(float((paths.terms[through] * push).sum()), rel=1e-5)
    assert abs(slopes[1]) > 1e-6


@pytest.mark.parametrize("config", [PLAIN, LOOPED], ids=["plain", "looped"])
@pytest.mark.parametrize("wiring", READ_AS_ONE)
def test_the_direct_path_is_a_coefficient(wiring: str, config: LanesConfig) -> None:
    model = moved_model(replace(config, wiring=wiring, start="asymmetric"))
    final, found = at_final(model), coefficients(model)
    assert list(found) == list(sublayers(model))
    for sublayer, paths in by_sublayer(model).items():
        assert torch.allclose(paths.direct, found[sublayer] * final, rtol=0, atol=1e-12 * float(final.abs().max())), sublayer


def test_ratios_have_a_row_a_sublayer_and_seed() -> None:
    for wiring in ("sequential", "gptj", "shipped"):
        models = {seed: moved_model(replace(PLAIN, wiring=wiring), seed, moved=0.0) for seed in range(2)}
        rows = [row for seed, model in models.items() for row in ratios(model, draw(), seed)]
        assert [(row.seed, row.step, row.sublayer) for row in rows] == [
            (seed, k, name) for seed in range(2) for k in range(5) for name in ("attn", "mlp")
        ]
        assert all(row.layer == row.step and row.missing < 1e-12 for row in rows)
        last = {(row.seed, row.sublayer): row for row in rows if row.layer == 4}
        assert all(last[seed, "mlp"].direct == pytest.approx(1.0, abs=1e-12) for seed in range(2))
        # of two sublayers that read before either writes, neither passes through the other
        assert (last[0, "attn"].direct == pytest.approx(1.0, abs=1e-12)) == (wiring != "sequential")
        assert all(abs(1 - row.direct) <= row.cascade + 1e-12 for row in rows)
        assert rows[0].cascade != rows[10].cascade
