"""Every cell of a sweep is the score of a forward under one plain hook, however cells are grouped, resumed or left out."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, HEADS, SPECS, VOCAB, make_family, move
from patched_by_hand import ByHand
from torch import Tensor

import mi_route2.hosts.cache as attention
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.hosts import Host, open_host
from mi_route2.hosts.decoder import COMPARED
from mi_route2.patching import CleanRun, Grid, Target, attribute, cells, forwards, prepare, sweep
from mi_route2.patching.patches import Patch
from mi_route2.patching.sweep import TooManyCellsError
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection, record
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

ANSWER, FOIL, LENGTH = 4, 9, 6
ADAPTED = {"Qwen3": "lora", "Llama": "svd", "GPT2": "svd-low", "MicroGPT": "lora-shared"}
OTHERS = sorted(FAMILIES.keys() - set(COMPARED))


def prompt(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


CLEAN, CORRUPT = prompt(1), prompt(2)
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL}


class Bench:
    """A model with moved adapters (where it takes a decoder), on the torch host and by hand."""

    def __init__(self, family: str):
        self.model = make_family(family)
        self.host: Host = open_host("torch", self.model)
        adapters = None
        if family in ADAPTED:
            given: Any = {"spec": SPECS[ADAPTED[family]], "generator": torch.Generator().manual_seed(7)}
            adapters = move(self.host.attach("blocks.*", "unembed", **given))
        self.hand = ByHand(self.model, family, adapters)

    def sweep(self, **given: Any) -> Grid:
        return sweep(self.host, **{**ASKED, "sites": "*", "progress": False, **given})

    def by_hand(self, grid: Grid, clean: Tensor = CLEAN, corrupt: Tensor = CORRUPT) -> np.ndarray:
        """The logit difference of every cell, one forward each."""
        here, source = self.hand.read(corrupt), self.hand.read(clean)
        values = np.full(grid.values.shape, np.nan)
        columns = [(j, p) for j, p in enumerate(grid.positions) if grid.alignment.source(p) is not None]
        where, partners = [p for _, p in columns], [grid.alignment.source(p) for _, p in columns]
        for i, target in enumerate(grid.sites):
            part = slice(None) if target.head is None else target.head
            new = (1 - grid.alpha) * here[target.site][where, part] + grid.alpha * source[target.site][partners, part]
            logits = self.hand.each(corrupt, target.site, [[p] for p in where], new[:, None], target.head)
            values[i, [j for j, _ in columns]] = (logits[:, ANSWER] - logits[:, FOIL]).numpy()
        return values


@cache
def bench(family: str) -> Bench:
    return Bench(family)


def assert_equal(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.nanmax(np.abs(expected)))


decoders = pytest.mark.parametrize("family", COMPARED)


@decoders
def test_every_point_of_every_decoder_is_patched_as_by_plain_hooks(family: str) -> None:
    grid = bench(family).sweep()
    expected = bench(family).by_hand(grid)
    assert {target.site for target in grid.sites} == set(bench(family).hand.sites)
    assert grid.forwards == "resumed"
    assert_equal(grid.values, expected)
    for row, target in zip(grid.values, grid.sites):  # no site is a blank: each has an effect somewhere
        assert np.abs(row - grid.corrupt).max() > 1e-6, target
    assert_equal(bench(family).sweep(shortcuts=False, batch=70).values, expected)  # groups that start at other positions


@pytest.mark.parametrize("family", OTHERS)
def test_so_is_every_other_architecture(family: str) -> None:
    grid = bench(family).sweep()
    assert grid.forwards == ("whole" if family.startswith("TransformerLens") else "resumed")
    assert {target.site for target in grid.sites} == set(bench(family).hand.sites)
    assert_equal(grid.values, bench(family).by_hand(grid))


@pytest.mark.parametrize("point", ["resid_pre", "z"])
def test_hooks_of_others_act_in_a_sweep_as_in_whole_forwards(point: str) -> None:
    """Also one that goes by the position, and one at the stream with which a cell would enter."""
    one = bench("Qwen3")

    def later_is_larger(value: Tensor) -> Tensor:
        return value * torch.arange(1.0, 1 + value.shape[1]).view(-1, *[1] * (value.ndim - 2))

    with one.host.hooks({Site(1, point): later_is_larger}):
        grid = one.sweep(sites=["resid_pre", "z"], batch=2)
        assert_equal(grid.values, one.by_hand(grid))
        with pytest.raises(ValueError, match=r"a hook stands on the model.*how='whole'"):
            one.sweep(how="resumed")


@pytest.mark.parametrize("family", ["Qwen3", "GPT2", "GPTNeoX"])
def test_heads_are_patched_one_by_one(family: str) -> None:
    grid = bench(family).sweep(sites=["q", "k", "v", "z"], heads=True)
    grouped = getattr(FAMILIES[family], "num_key_value_heads", None) or HEADS
    assert len(grid.sites) == 2 * (2 * HEADS + 2 * grouped)
    assert str(grid.sites[HEADS + 1]) == "blocks.1.q[1]"
    assert_equal(grid.values, bench(family).by_hand(grid))
    two = bench(family).sweep(sites=["blocks.*.z[1]", Target(Site(1, "q"), 3)])
    assert_equal(two.values, bench(family).by_hand(two))


@pytest.mark.parametrize(("family", "alpha"), [("Qwen3", 0.3), ("GPT2", -1.0), ("MicroGPT", 0.3)])
def test_alpha_is_the_share_of_the_source(family: str, alpha: float) -> None:
    grid = bench(family).sweep(alpha=alpha, sites=["resid_pre", "z", "resid_mid", "kept_a", "quarantine_out"])
    assert_equal(grid.values, bench(family).by_hand(grid))


@pytest.mark.parametrize("family", ["Qwen3", "MicroGPT"])
@pytest.mark.parametrize("batch", [1, 2, 7, None])
def test_any_grouping_gives_the_same_grid(family: str, batch: int | None) -> None:
    some = ["resid_pre", "z", "resid_post", "blocks.*.attn.k.kept_a"]
    planned = prepare(bench(family).host, **ASKED, sites=some, batch=batch)
    most = max(len(group.cells) for group in planned.groups)
    assert most == batch if batch else most > 7
    assert_equal(planned.grid().values, bench(family).sweep(how="whole", sites=some, shortcuts=False).values, 1e-12)


@pytest.mark.parametrize("how", ["resumed", "whole"])
@pytest.mark.parametrize("clean", [prompt(3, 9), torch.cat([CORRUPT[:2], prompt(4, 5), CORRUPT[4:]]), CORRUPT[[0, 1, 4, 5]]])
def test_prompts_of_other_lengths_are_aligned(how: str, clean: Tensor) -> None:
    clean = torch.cat([CORRUPT[:1], clean[1:]])
    grid = bench("Qwen3").sweep(clean=clean, sites=["resid_pre", "k", "mlp_out", "kept_a"], how=how)
    assert_equal(grid.values, bench("Qwen3").by_hand(grid, clean=clean))
    skipped = [skip.position for skip in grid.skipped]
    assert skipped == list(grid.alignment.skipped)
    assert skipped
    assert np.isnan(grid.values[:, skipped]).all()
    logits = bench("Qwen3").hand.run(clean)
    assert grid.clean == pytest.approx(float(logits[ANSWER] - logits[FOIL]), abs=1e-10)


@pytest.mark.parametrize("how", ["resumed", "whole"])
def test_another_position_can_be_scored(how: str) -> None:
    grid = bench("Llama").sweep(at=3, how=how, positions=[1, 3, 5], sites=["resid_pre", "v", "mlp_out", "quarantine_out"])
    short = bench("Llama").sweep(corrupt=CORRUPT[:4], clean=CLEAN[:4], how="whole", sites=[*grid.sites])
    assert_equal(grid.values[:, :2], short.values[:, [1, 3]], 1e-12)
    (skip,) = grid.skipped
    assert (skip.position, grid.at) == (5, 3)
    assert "after position 3" in skip.why


@decoders
def test_all_positions_together_are_patched_in_one_cell(family: str) -> None:
    """With all of the stream in front of the first block, the corrupt run is the clean one."""
    one = bench(family)
    grid = one.sweep(together=True, sites=["resid_pre", "z", "kept_a", "mlp_out"])
    assert grid.values.shape == (len(grid.sites), 1)
    assert grid.recovered[0, 0] == pytest.approx(1, abs=1e-10)
    clean = one.hand.read(CLEAN)
    for target, value in zip(grid.sites, grid.values[:, 0]):
        logits = one.hand.logits(CORRUPT, target.site, range(LENGTH), clean[target.site])
        assert value == pytest.approx(float(logits[ANSWER] - logits[FOIL]), abs=1e-10)
    some = one.sweep(together=True, sites="blocks.1.z", positions=[1, 4])
    logits = one.hand.logits(CORRUPT, Site(1, "z"), [1, 4], clean[Site(1, "z")][[1, 4]])
    assert some.values[0, 0] == pytest.approx(float(logits[ANSWER] - logits[FOIL]), abs=1e-10)
    assert one.sweep(together=True, sites="mlp_out", shortcuts=False).values == pytest.approx(
        one.sweep(together=True, sites="mlp_out", how="whole").values, abs=1e-12
    )


@pytest.mark.parametrize("metric", ["logprob", "kl"])
def test_metrics_are_over_the_whole_vocabulary(metric: Any) -> None:
    one = bench("Qwen3")
    grid = one.sweep(metric=metric, answer=ANSWER if metric == "logprob" else None, foil=None, sites=["resid_pre", "z"])
    clean, source = one.hand.run(CLEAN).log_softmax(-1), one.hand.read(CLEAN)

    def score(logits: Tensor) -> float:
        chances = logits.log_softmax(-1)
        return float(chances[ANSWER]) if metric == "logprob" else float(sum(p.exp() * (p - q) for p, q in zip(clean, chances)))

    assert grid.corrupt == pytest.approx(score(one.hand.run(CORRUPT)), abs=1e-12)
    assert grid.clean == pytest.approx(score(one.hand.run(CLEAN)), abs=1e-12)
    for target, row in zip(grid.sites, grid.values):
        for position, value in enumerate(row):
            logits = one.hand.logits(CORRUPT, target.site, [position], source[target.site][[position]])
            assert value == pytest.approx(score(logits), abs=1e-10)


@decoders
@pytest.mark.parametrize("given", [{"alpha": 0.0}, {"clean": CORRUPT}], ids=["alpha 0", "the run itself"])
def test_what_changes_nothing_gives_the_corrupt_score(family: str, given: dict[str, Any]) -> None:
    """Bit for bit where it is known, within rounding where it is run; and between equal runs there is nothing to recover."""
    given = {**given, "sites": ["resid_pre", "blocks.1.z", "blocks.0.mlp.down.kept_a"]}
    grid = bench(family).sweep(**given)
    assert (grid.values == grid.corrupt).all()
    run = bench(family).sweep(**given, shortcuts=False)
    assert np.abs(run.effect).max() < 1e-13
    if "clean" in given:
        assert not grid.defined
        with pytest.raises(ValueError, match="equal within the noise floor"):
            _ = grid.recovered


def test_positions_before_the_first_difference_need_no_run() -> None:
    clean = torch.cat([CORRUPT[:4], CLEAN[4:]])
    given: Any = {**ASKED, "clean": clean, "sites": ["resid_pre", "v"]}
    planned = prepare(bench("Qwen3").host, **given)
    assert {cell.position for cell in planned.known} >= {0, 1, 2, 3}
    assert not {position for row in planned.rows for position in row.positions} & {0, 1, 2, 3}
    grid = planned.grid()
    assert (grid.values[:, :4] == grid.corrupt).all()
    assert_equal(grid.values, bench("Qwen3").sweep(**given, how="whole", shortcuts=False).values, 1e-12)


@pytest.mark.parametrize("how", ["resumed", "whole"])
def test_replicas_run_among_the_cells(how: Any) -> None:
    planned = prepare(bench("GPT2").host, **ASKED, sites=["resid_pre", "z"], replicas=5, how=how, batch=6)
    with_cells = [finished for finished in planned.run() if finished.replicas]
    assert sum(len(finished.replicas) for finished in with_cells) == 5
    assert len(with_cells) >= 3  # in forwards here and there
    assert all(finished.cells for finished in with_cells)
    grid = planned.grid()
    assert 0 < grid.noise_floor < 1e-13
    assert len(grid.replicas) == 5
    assert max(grid.replicas) - min(grid.replicas) <= grid.noise_floor


def test_float32_noise_is_seen_and_is_small() -> None:
    host = open_host("torch", make_family("Qwen3").float())
    grid = sweep(host, **ASKED, sites=["resid_pre", "z", "mlp_out"], shortcuts=False, alpha=0.0)
    assert 1e-8 < grid.noise_floor < 1e-5
    assert np.abs(grid.effect).max() < 1e-5
    exact = sweep(open_host("torch", make_family("Qwen3")), **ASKED, sites="*")
    assert_equal(sweep(host, **ASKED, sites="*").values, exact.values, 1e-5)


def test_bfloat16_is_scored_in_a_wider_type() -> None:
    models = (make_family("Qwen3").bfloat16(), make_family("Qwen3"))
    asked: Any = {**ASKED, "foil": None, "sites": "resid_pre", "metric": "logprob"}
    grid, expected = (sweep(open_host("torch", model), **asked) for model in models)
    assert grid.noise_floor >= torch.finfo(torch.bfloat16).eps
    assert_equal(grid.values, expected.values, 0.1)
    assert (grid.values != torch.from_numpy(grid.values).bfloat16().double().numpy()).any()


@pytest.mark.parametrize("family", ["Qwen3", "GPT2"])
def test_the_last_block_attends_from_the_scored_column_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing would be wrong, and a sweep a tenth slower."""
    planned = prepare(bench(family).host, **ASKED, sites="resid_pre", positions=[0, 1, 2])
    seen, own = list[int](), attention._one_query

    def counted(query: Tensor, *given: Any) -> Tensor:
        seen.append(query.shape[2])
        return own(query, *given)

    monkeypatch.setattr(attention, "_one_query", counted)
    planned.grid(progress=False)
    assert seen == [1] * len(planned.groups)  # other blocks have a query for each column, and take another way


@pytest.mark.parametrize("family", ["Qwen3", "MicroGPT"])
@pytest.mark.parametrize("held", [2**26, 1])
def test_what_others_do_not_read_in_a_block_is_patched_at_every_position_of_one_sequence(
    family: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each cell would run its own block: a grid of heads would take a third longer, and have the same numbers."""
    one, last = bench(family), LENGTH - 1
    monkeypatch.setattr(forwards, "HELD", held)  # of 1: the streams of one group at a time
    some = [*(Target(Site(0, "z"), head) for head in range(2)), Target(Site(0, "mlp_out")), Target(Site(0, "q"))]
    asked: Any = {**ASKED, "sites": some, "tokens": 2 * LENGTH}
    ran = list[tuple[int, ...]]()
    block = one.host.model.get_submodule(f"{one.host.architecture.blocks}.0")
    own = type(block).forward

    def counted(self: torch.nn.Module, stream: Tensor, *given: Any, **named: Any) -> Any:
        if self is block:
            ran.append(stream.shape[:2])
        return own(self, stream, *given, **named)

    monkeypatch.setattr(type(block), "forward", counted)
    planned = prepare(one.host, **asked)
    ran.clear()
    grid = planned.grid(progress=False)
    monkeypatch.undo()
    assert_equal(grid.values, one.by_hand(grid))
    assert grid.values.size == len(some) * LENGTH
    if held > 1:
        assert ran == [(3, LENGTH)] * 2  # the corrupt run itself, and two targets at a time
    else:
        assert len(ran) > 2
    assert max(row.place for row in planned.rows) == (1, last)
    few = prepare(one.host, **asked, positions=[last])  # of one column each: a sequence has as many, and the corrupt run's
    assert {row.place for row in few.rows} == {(0, last)}
    assert_equal((grid := few.grid(progress=False)).values, one.by_hand(grid))
    near = prepare(one.host, **asked, positions=[1, 2])  # sequences of two columns
    assert {row.place[0] for row in near.rows} == {1}
    assert_equal((grid := near.grid(progress=False)).values, one.by_hand(grid))


def test_cells_come_forward_by_forward_and_can_be_left() -> None:
    one = bench("MicroGPT")
    given: Any = {**ASKED, "sites": ["resid_pre", "z"], "batch": 4}
    grid = one.sweep(**given)
    batches = list(cells(one.host, **given))
    assert all(0 < len(batch) <= 6 for batch in batches)
    found = {(cell.target, cell.position): cell.value for batch in batches for cell in batch}
    assert len(found) == grid.values.size == sum(map(len, batches))
    for i, target in enumerate(grid.sites):
        assert [found[target, position] for position in grid.positions] == grid.values[i].tolist()
    forwards = []
    with one.model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        coming = cells(one.host, **given)
        for _ in range(2):
            next(coming)
        seen = len(forwards)
        coming.close()
    assert len(forwards) == seen < len(batches)
    left = {name for name, m in one.model.named_modules() if m._forward_hooks or m._forward_pre_hooks}
    assert not left  # nothing of a cancelled sweep stays on the model


def test_a_clean_run_can_be_one_that_was_captured() -> None:
    one = bench("GPT2")
    sites = [Site(0, "resid_pre"), Site(1, "k"), Site(1, "kept_a", "mlp.down")]
    captured = CleanRun({site: one.hand.read(CLEAN)[site] for site in sites}, one.hand.run(CLEAN))
    assert_equal(one.sweep(clean=captured, sites=sites).values, one.sweep(sites=sites).values, 1e-12)
    with pytest.raises(KeyError, match=r"no values of blocks\.0\.q"):
        one.sweep(clean=captured, sites="q")
    longer = CORRUPT.repeat(2)[:-2]
    with pytest.raises(ValueError, match="give the clean prompt's tokens"):
        one.sweep(clean=captured, corrupt=longer, sites=sites)
    told = CleanRun.capture(one.host, CLEAN, sites)
    for site in sites:
        torch.testing.assert_close(told.values[site], captured.values[site], rtol=0, atol=1e-12)
    shorter = torch.cat([CLEAN[:1], CLEAN[2:]])
    aligned = one.sweep(clean=told, corrupt=shorter, sites=sites)
    assert_equal(aligned.values, one.sweep(corrupt=shorter, sites=sites).values, 1e-12)
    assert not aligned.skipped  # a token fewer: all that is left has its partner
    with pytest.raises(ValueError, match="neither their beginning nor their end"):
        one.sweep(clean=told, corrupt=torch.cat([1 + longer % 2, longer]), sites=sites)
    with pytest.raises(ValueError, match="the same number of positions"):
        CleanRun(captured.values, captured.logits, (1, 2))


@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
def test_a_sweep_from_a_stored_run_is_the_one_from_its_prompt(family: str) -> None:
    """Also if the run goes on after its prompt, and whatever its first values were computed beside."""
    one, store = bench(family), RunStore()
    final = Site(len(one.host.layers()) - 1, "resid_post")
    sites = [Site(0, "resid_pre"), Site(1, "k"), Site(1, "kept_a", "mlp.down")]
    longer = torch.stack([torch.cat([CLEAN, CORRUPT[:2]]), torch.cat([CORRUPT, CLEAN[:2]])])
    record(one.host, [*sites, final], longer, store=store, runs=["clean", "other"], prompt_lengths=[len(CLEAN)] * 2)
    told = CleanRun.stored(one.host, store, "clean", sites)
    torch.testing.assert_close(told.logits, one.hand.run(CLEAN), rtol=0, atol=1e-12)
    for metric, tokens in (("kl", {}), ("logit_diff", {"answer": 3, "foil": 5})):
        asked: Any = {"corrupt": CORRUPT, "sites": sites, "metric": metric, "progress": False, **tokens}
        truth = sweep(one.host, clean=CLEAN, **asked)
        assert_equal(sweep(one.host, clean=told, **asked).values, truth.values, 1e-12)
    with pytest.raises(KeyError, match=r"needs blocks\.0\.q at every position of the prompt: capture it too"):
        CleanRun.stored(one.host, store, "clean", "q")
    record(one.host, sites, longer[:1], store=store, runs=["without"])
    with pytest.raises(KeyError, match=r"resid_post at position \d+, of which come the logits: capture it too"):
        CleanRun.stored(one.host, store, "without", sites)
    with pytest.raises(KeyError, match="no run 'none' was captured here"):
        CleanRun.stored(one.host, store, "none", sites)
    with torch.no_grad():
        next(one.model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="capture it again"):
        CleanRun.stored(one.host, store, "clean", sites)


def test_the_logits_of_a_stored_run_are_those_of_its_request_or_it_is_refused() -> None:
    """Captures are of values before their steering or patch: behind the last of them, the logits are made from others."""
    one, store = bench("Llama"), RunStore()
    vector, first, final = torch.ones(16), Site(0, "resid_post"), Site(1, "resid_post")
    gate = Monitor(Site(0, "resid_pre"), torch.zeros(16), threshold=-1e6, gates=(), quarantine="close", prompt=True)
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "early": {"steering": Steering(base=(Steer(first, vector),))},
        "patched early": {"patch": (Patch(first, LENGTH - 1, vector),)},
        "late": {"steering": Steering(base=(Steer(final, vector),))},
        "patched late": {"patch": (Patch(final, LENGTH - 1, vector),)},
        "closed": {"steering": Steering(monitors=(gate,))},  # at the unembedding too
    }
    ask = Sampling(max_new=1, logprob_token_ids=tuple(range(VOCAB)))
    capture = (Capture(first, TokenSelection("prompt")), Capture(final, TokenSelection("last")))
    tokens = tuple(CLEAN.tolist())
    engine = Engine(one.host, store=store)
    for run, given in asked.items():  # one by one: sites are those of all requests in the engine
        (result,) = engine.generate([Request(tokens, ask, run=run, capture=capture, **given)])
        if run in ("late", "patched late", "closed"):
            with pytest.raises(ValueError, match="at resid_post of the last block or behind it"):
                CleanRun.stored(one.host, store, run, first)
            continue
        truth = torch.tensor(result.tokens[0].requested, dtype=torch.float64)
        found = CleanRun.stored(one.host, store, run, first).logits.double().log_softmax(-1)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)


def test_a_captured_run_is_not_scored_at_another_position_than_its_logits() -> None:
    """Its logits are those of one position: scored elsewhere, the clean score and the target of ``kl`` would be of that one."""
    one = bench("GPT2")
    told = CleanRun.capture(one.host, CLEAN, "resid_pre")
    last = len(CLEAN) - 1
    asked: Any = {"corrupt": CORRUPT, "sites": "resid_pre", "metric": "kl"}
    for call in (sweep, attribute):
        with pytest.raises(ValueError, match=rf"logits at position {last}, and position 3 is to be scored: give the clean prompt"):
            call(one.host, clean=told, at=3, **asked)
    assert sweep(one.host, clean=told, at=last, progress=False, **asked).clean == 0.0
    logits = one.hand.run(CLEAN[:4])
    by_hand = sweep(one.host, clean=CleanRun(told.values, logits, told.tokens), at=3, progress=False, **asked)
    assert_equal(by_hand.values, sweep(one.host, clean=CLEAN, at=3, progress=False, **asked).values, 1e-12)


@pytest.mark.parametrize(
    "given", [{"positions": [True, False, True]}, {"clean": [True, 7, 1, 5]}, {"corrupt": [9, False, 1, 5]}, {"answer": True}]
)
def test_truth_values_are_neither_positions_nor_tokens(given: dict[str, Any]) -> None:
    """A mask of positions would be read as the positions 0 and 1."""
    asked: Any = {"clean": [3, 7, 1, 5], "corrupt": [9, 7, 1, 5], "answer": 3, "foil": 9} | given
    with pytest.raises((TypeError, ValueError), match=r"(True|False)|not the list \[True"):
        sweep(bench("GPT2").host, sites="resid_pre", progress=False, **asked)


@pytest.mark.parametrize("how", ["resumed", "whole"])
def test_a_sweep_of_a_model_that_changed_since_is_refused_at_any_forward(how: str) -> None:
    """A switch and an in-place write; before the first forward or between two."""
    host = open_host("torch", make_family("Qwen3"))
    adapters = move(host.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(7)), 0.3)
    weight = host.model.get_parameter("model.embed_tokens.weight")
    planned = prepare(host, **ASKED, sites="resid_pre", how=how, batch=3)
    expected = planned.grid(progress=False).values
    with adapters.deployed(), pytest.raises(RuntimeError, match="prepare it again"):
        planned.grid(progress=False)
    assert_equal(planned.grid(progress=False).values, expected)  # as it was
    running = planned.run()
    next(running)
    with adapters.deployed(), pytest.raises(RuntimeError, match="prepare it again"):
        list(running)
    with torch.no_grad():
        weight[:] = weight.roll(1, 0)
    with pytest.raises(RuntimeError, match="prepare it again"):
        planned.grid(progress=False)


@pytest.mark.parametrize("how", ["resumed", "whole"])
@pytest.mark.parametrize("change", ["replaced", "attached"])
def test_a_change_between_two_forwards_of_a_sweep_is_an_error(how: str, change: str) -> None:
    """Cells behind it would be of another model than those before."""
    host = open_host("torch", make_family("Qwen3"))
    mlp: Any = host.model.get_submodule("model.layers.1.mlp")
    running = prepare(host, **ASKED, sites="resid_pre", how=how, batch=3).run()
    next(running)
    if change == "replaced":
        mlp.up_proj.weight = torch.nn.Parameter(2 * mlp.up_proj.weight)
    else:
        host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7))
    with pytest.raises(RuntimeError, match="prepare it again"):
        list(running)


def test_a_clean_run_of_other_weights_is_refused_unless_its_hash_is_left_out() -> None:
    host = open_host("torch", make_family("Qwen3"))
    run = CleanRun.capture(host, CLEAN, "resid_pre")
    weight = host.model.get_parameter("model.embed_tokens.weight")
    weight.data[:] = weight.data.roll(1, 0)
    asked: Any = {**ASKED, "sites": "resid_pre", "progress": False}
    with pytest.raises(ValueError, match=r"captured with weights \w{12}, but the model now has \w{12}: capture it again"):
        sweep(host, **{**asked, "clean": run})
    other = sweep(host, **{**asked, "clean": CleanRun(run.values, run.logits, run.tokens)})
    assert np.isfinite(other.values).all()


def test_too_many_cells_are_refused_before_anything_runs() -> None:
    host, run, ran = open_host("torch", make_family("Llama")), {**ASKED, "sites": "resid_pre"}, []
    host.model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda *_: ran.append(1))
    total = prepare(host, **run).total
    assert prepare(host, most=total, **run).total == total
    assert ran
    ran.clear()
    with pytest.raises(TooManyCellsError, match=rf"^{total} cells"):
        prepare(host, most=total - 1, **run)
    assert not ran


def test_the_resolution_of_a_grid_is_the_rounding_of_its_scores() -> None:
    grid = bench("Llama").sweep(sites="resid_pre")
    assert grid.resolution == torch.finfo(torch.float64).eps * max(1.0, abs(grid.clean), abs(grid.corrupt))
