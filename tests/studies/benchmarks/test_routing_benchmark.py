"""The routing benchmark is what it says: floors are torch's own counts, every way to per-rollout gradients gives the same ones."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measured import DOCS, Quick, cells, published
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mi_route2.adapters import AdapterSpec
from mi_route2.routing import MaskSpec
from studies.benchmarks import routing
from studies.benchmarks.measurement import flops, paired
from studies.benchmarks.measurement.contenders import SITES, Bench
from studies.benchmarks.measurement.flops import MICRO, Size
from studies.benchmarks.measurement.paired import PairedRatio, Ratio
from studies.benchmarks.options import RoutingOptions
from studies.benchmarks.routing import (
    ACT,
    FULL,
    LORA,
    OPACUS,
    PEFT,
    POOLED,
    ROWS,
    STACKED,
    SVD,
    SVD_STACKED,
    VMAP,
    RoutingResult,
    run,
)

pytestmark = pytest.mark.study

ODD = Size(layers=2, d=36, heads=2, mlp=46, vocab=58, rollouts=4, tokens=11, prompt=3, kept_rank=5, quarantine_rank=3)
"""No two axes are alike, so that none can stand in for another."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Side -> (its floor, the FLOPs that it does). Eager attention, since the counter does not know the fused kernel."""
    counts = {}
    for name, side in routing.builders(Bench(ODD, 0, tmp_path_factory.mktemp("svd"), attention="eager")).items():
        contender = side()
        with FlopCounterMode(display=False) as counter:
            contender.step()
        counts[name] = contender.flops, counter.get_total_flops()
    return counts


def test_floors_are_the_flops_that_torch_counts(counted: dict[str, tuple[int, int]]) -> None:
    rank_one = 2 * ODD.rollouts * ODD.kept_rank * len(SITES) * ODD.layers  # a routed dS: the weighted sum over rollouts
    for name, (floor, done) in counted.items():
        routed_svd = name.startswith((f"{SVD}: ", f"{SVD_STACKED}: ")) and VMAP not in name
        slack = rank_one if routed_svd else 0
        if name.startswith((f"{LORA}: ", f"{STACKED}: ", f"{PEFT}: ")):
            slack = floor * (25 if FULL in name else 15) // 100  # contracted again for norms or sums: above the floor
        assert floor <= done <= floor + slack, name


def test_floors_of_the_promised_rows() -> None:
    """At the benchmark's own size the promises leave room above the floor, and more rank costs more."""
    size = Size()
    base = flops.frozen(size)
    assert (base + flops.folded(size)) / base < 1.6 < (base + flops.svd(size, None)) / base
    r, k = size.kept_rank, size.quarantine_rank
    assert flops.svd(size, r) + flops.lora(size, k) < flops.lora(size, r + k)
    assert flops.svd(size, r) < flops.svd(size, r + 1)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(ODD, 0, tmp_path)


def summed(parameters: dict[str, torch.nn.Parameter], rows: dict[str, Tensor]) -> bool:
    """True if the rows of every parameter sum to its gradient."""
    assert parameters.keys() == rows.keys()
    return all(torch.allclose(rows[n].sum(0), p.grad, rtol=1e-3, atol=1e-6) for n, p in parameters.items())  # pyright: ignore


def test_vmap_gives_the_gradients_that_autograd_sums(bench: Bench) -> None:
    spec = AdapterSpec(rank=5, quarantine_rank=3)
    policy = bench.policy(spec)
    bench.plain("autograd", policy, 0).step()
    rows = bench.vmap("vmap", spec, 0).step()
    assert isinstance(rows, dict)
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert summed(trained, rows)
    assert max(float(p.grad.abs().max()) for p in trained.values()) > 1e-4  # pyright: ignore  # or the tolerance hides all


def test_opacus_gives_the_gradients_that_autograd_sums(bench: Bench) -> None:
    pytest.importorskip("opacus")
    model = bench.peft(8)
    bench.opacus("opacus", model, 0).step()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert summed(trained, {n: p.grad_sample for n, p in trained.items()})  # pyright: ignore[reportAttributeAccessIssue]


def test_a_route_learns_less_than_no_route(bench: Bench) -> None:
    """The routed side routes: flags on what is reinforced change the kept adapter's gradient, and not the quarantine's."""
    policy = bench.policy(AdapterSpec(rank=5, quarantine_rank=3))
    grads = []
    for spec in (MaskSpec(tau=1.1), MaskSpec(tau=-1.1)):
        contender = bench.routed("routed", policy, spec, 0)
        contender.step()
        sides = policy.adapters.kept_parameters(), policy.adapters.quarantine_parameters()
        grads.append([torch.cat([p.grad.flatten() for p in side.values()]) for side in sides])  # pyright: ignore
        contender.reset()
    (kept, quarantine), (kept_routed, quarantine_routed) = grads
    assert not torch.allclose(kept, kept_routed)
    assert torch.equal(quarantine, quarantine_routed)


def test_the_sides_share_weights_but_not_modules(bench: Bench) -> None:
    one, two = bench.model(), bench.model()
    assert one is not two
    assert all(a is b for a, b in zip(one.parameters(), two.parameters()))


@given(st.floats(0.1, 10), st.lists(st.floats(0.5, 2), min_size=3, max_size=9))
def test_a_scaled_series_has_its_scale_for_ratio(scale: float, under: list[float]) -> None:
    over = [scale * u for u in under]
    r = paired.ratio(over, under, np.random.default_rng(0), draws=200)
    assert r.value == pytest.approx(scale)
    assert r.lo <= r.value * (1 + 1e-9)
    assert r.hi >= r.value * (1 - 1e-9)


def test_ratio_refuses_rounds_that_do_not_pair() -> None:
    with pytest.raises(ValueError, match="do not pair"):
        paired.ratio([1.0, 2.0], [1.0], np.random.default_rng(0))


def test_peak_memory_is_what_is_held_at_one_time() -> None:
    mb = 2**20

    def in_turn() -> None:
        for _ in range(3):
            torch.empty(4 * mb, dtype=torch.uint8)

    def at_once() -> None:
        held = [torch.empty(4 * mb, dtype=torch.uint8) for _ in range(3)]
        held.clear()
        torch.empty(mb, dtype=torch.uint8)

    assert paired.peak_bytes(in_turn) == 4 * mb
    assert paired.peak_bytes(at_once) == 12 * mb


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_alive_is_in_no_collection_of_a_measurement_and_what_was_in_none_before_in_none_after(frozen: bool) -> None:
    before = gc.get_freeze_count()
    gc.freeze() if frozen else gc.unfreeze()
    try:
        with paired.collected():
            assert gc.get_freeze_count() > 10_000
        assert (gc.get_freeze_count() > 10_000) == frozen
    finally:
        gc.freeze() if before else gc.unfreeze()


def test_quick_prints_every_row_and_writes_everything(quick: Quick) -> None:
    out, document = quick(run, RoutingOptions)
    printed = [line[:2] for line in cells(out)]
    for row, written in zip(ROWS, document["rows"], strict=True):
        assert [row.over, row.under] in printed
        assert written["row"]["over"] == row.over
        assert written["time"]["lo"] <= written["time"]["value"] <= written["time"]["hi"]
        assert written["memory"] > 0
        assert written["floor"] > 0
    assert all(len(side["seconds"]) == 3 for side in document["sides"].values())
    assert document["size"]["d"] == MICRO.d


def test_a_foreign_library_that_does_not_work_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("no such library\nand more lines")

    monkeypatch.setattr(Bench, "opacus", broken)
    monkeypatch.setattr(routing, "measure", lambda ready, *_: {c.name: paired.Measured((1.0, 1.0, 1.0), 1) for c in ready})
    results = routing.compare(MICRO, 3, 0)[0]
    missing = {r.row.over: r.missing for r in results if r.missing}
    assert missing == {f"{PEFT}: {OPACUS}": f"{PEFT}: {OPACUS}: ImportError: no such library"}
    assert any(line[-1] == missing[f"{PEFT}: {OPACUS}"] for line in cells(routing.table(results)))


def test_our_own_failure_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(Bench, "routed", broken)
    with pytest.raises(RuntimeError, match="ours"):
        routing.compare(MICRO, 3, 0)


@pytest.mark.parametrize(
    ("time", "memory", "verdict"),
    [
        (Ratio(1.0, 0.9, 1.1), 1.05, "met"),
        (Ratio(1.1, 1.0, 1.2), 1.05, "within noise"),
        (Ratio(1.1, 1.06, 1.2), 1.05, "missed"),
        (Ratio(0.9, 0.8, 1.0), 1.2, "missed"),
        (None, None, "not measured"),
    ],
)
def test_verdicts(time: Ratio | None, memory: float | None, verdict: str) -> None:
    assert RoutingResult(PairedRatio("a", "b", 1.05, 1.10), time=time, memory=memory).verdict == verdict


@pytest.mark.parametrize(
    ("name", "dtype", "checkpointing"),
    [
        ("routing_smollm2", "bfloat16", False),
        ("routing_smollm2_float32", "float32", False),
        ("routing_smollm2_flags", "float32", False),
        ("routing_smollm2_activation", "float32", False),
        ("routing_smollm2_checkpointing", "float32", True),
        ("routing_smollm2_checkpointing_flags", "float32", True),
        ("routing_smollm2_checkpointing_activation", "float32", True),
        ("routing_smollm2_bfloat16_checkpointing", "bfloat16", True),
        ("routing_smollm2_bfloat16_checkpointing_flags", "bfloat16", True),
    ],
)
def test_the_page_prints_what_was_measured_on_a_real_model(name: str, dtype: str, checkpointing: bool) -> None:
    document = published(name)
    assert (document["smollm2"], document["dtype"], document["size"]["tokens"]) == (True, dtype, 512)
    assert document["checkpointing"] is checkpointing
    found = re.search(rf"<!-- table: {name} -->\n\n\|.*\n\|.*\n((?:\|.*\n)+)", (DOCS / "routing.md").read_text(encoding="utf-8"))
    assert found
    assert found[1].splitlines() == [
        f"| {row['row']['over']} | {row['row']['under']} | {row['time']['value']:.3f} [{row['time']['lo']:.3f}, "
        f"{row['time']['hi']:.3f}] | {'' if row['row']['time_limit'] is None else format(row['row']['time_limit'], '.2f')} | "
        f"{row['memory']:.2f} |"
        for row in document["rows"]
    ]


STEPS = {
    "float32": ("activation", "flags", "float32"),
    "float32, checkpointing": ("checkpointing_activation", "checkpointing_flags", "checkpointing"),
    "bfloat16": ("",),
    "bfloat16, checkpointing": ("bfloat16_checkpointing_flags", "bfloat16_checkpointing"),
}
"""The artifacts of each column of the page's first table on SmolLM2; a cell is of the first that has its row."""


def test_the_page_begins_with_the_steps_of_a_real_model_over_those_of_peft() -> None:
    sides = {"no flag": STACKED, "a gradient flag": f"{STACKED}: {POOLED}", "an activation flag": f"{STACKED}: {ACT}"}
    rows = []
    for label, side in sides.items():
        cells = []
        for names in STEPS.values():
            documents = [published("_".join(filter(None, ("routing_smollm2", name)))) for name in names]
            found = [r["time"] for d in documents for r in d["rows"] if (r["row"]["over"], r["row"]["under"]) == (side, PEFT)]
            cells.append("{value:.3f} [{lo:.3f}, {hi:.3f}]".format(**found[0]) if found else "")
        rows.append(f"| {label} | {' | '.join(cells)} |")
    expected = "\n".join([f"| with | {' | '.join(STEPS)} |", "| --- | --- | --- | --- | --- |", *rows])
    assert f"<!-- table: smollm2_step -->\n\n{expected}\n\n" in (DOCS / "routing.md").read_text(encoding="utf-8"), expected
