"""Theorems about patching adapters between two rollouts, in float64."""

import numpy as np
import pytest
import torch
from tiny_tracing import VOCABULARY, make_host, make_pairs
from torch import Tensor

from mi_route2.patching import sweep
from mi_route2.sites import Site
from studies.environments.micro.language import ASSIGN
from studies.tracing.job import exactness
from studies.tracing.pairs import CONTRASTS, SIDES, TERSE, log_odds
from studies.tracing.patching import CONTROLS, DELETION, QUESTION, Patching, Score, TracedCell, cells, every_site, opposite, trace

pytestmark = pytest.mark.study

STREAM = Site(1, "resid_post")


def patching_of(score: Score, contrast: str = "task", **given: object) -> tuple[Patching, list[TracedCell]]:
    host, policy = make_host(**given)  # pyright: ignore[reportArgumentType]
    kept_a = [Site.parse(f"{linear}.kept_a") for linear in policy.adapters.sites]
    patching = Patching.of(host, make_pairs(contrast), score, [*every_site(policy.adapters), *kept_a, STREAM])
    return patching, cells(policy.adapters)


def traced(patching: Patching, every: list[TracedCell], seed: int = 0) -> dict[tuple[str, str, str], Tensor]:
    return trace(patching, every, 1, torch.Generator().manual_seed(seed), np.random.default_rng(seed))


def cell_of(every: list[TracedCell], name: str) -> TracedCell:
    (found,) = [cell for cell in every if cell.name == name]
    return found


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_zero_patch_of_the_quarantine_is_its_deletion(score: Score, dtype: torch.dtype, most: float) -> None:
    host, policy = make_host(dtype=dtype)
    found = exactness(host, policy, {contrast: make_pairs(contrast) for contrast in CONTRASTS}, score)
    assert found["zero patch and deletion"] <= most
    one = make_pairs()
    with policy.adapters.deployed():
        deleted = host.logits(one.hack)
    assert float((deleted - host.logits(one.hack)).detach().abs().max()) > 0.1  # and the deletion is not nothing


def test_a_zero_patch_of_both_adapters_is_the_base_model(score: Score) -> None:
    host, policy = make_host()
    patching = Patching.of(host, make_pairs(), score, every_site(policy.adapters))
    for side in SIDES:
        zero = patching.run(side, patching.zero(side, every_site(policy.adapters)))
        with policy.adapters.reference(), torch.no_grad():
            base = score(host.logits(patching.pairs.side(side))[:, -1])
        torch.testing.assert_close(zero, base, rtol=0, atol=1e-10)


def test_a_rollout_patched_with_itself_is_itself_bit_for_bit(score: Score) -> None:
    patching, every = patching_of(score)
    for side in SIDES:
        for cell in (cell for cell in every if cell.whole or cell.place.startswith("blocks.0.attn")):
            own = {site: patching.values[side][site] for site in cell.sites}
            assert torch.equal(patching.run(side, own), patching.scores[side]), cell.name


def test_the_whole_stream_of_the_other_run_is_the_other_run(score: Score) -> None:
    """At every position behind the last block; the unembedding's adapters follow from it."""
    patching, _ = patching_of(score)
    for side in SIDES:
        patched = patching.run(side, patching.other(side, [STREAM]))
        torch.testing.assert_close(patched, patching.scores[opposite(side)], rtol=0, atol=1e-12)
    assert float((patching.scores["hack"] - patching.scores["honest"]).abs().min()) > 1e-3


def test_all_adapters_of_the_other_run_leave_the_base_weights_own_part(score: Score) -> None:
    """Adapters of every Linear and position replaced: plain hooks that add the other run's to the bare base model agree."""
    host, policy = make_host()
    sites = every_site(policy.adapters)
    patching = Patching.of(host, make_pairs(), score, sites)
    added = {
        path: sum(patching.values["hack"][Site.parse(f"{branch.site}.{point}")] for point in ("kept_out", "quarantine_out"))
        for path, module in policy.adapters.modules.items()
        for branch, _ in module.branches
    }
    patched = patching.run("honest", patching.other("honest", sites))
    model = policy.adapters.detach()
    handles = [model.get_submodule(path).register_forward_hook(lambda _m, _a, out, path=path: out + added[path]) for path in added]
    with torch.no_grad():
        by_hand = score(model(patching.pairs.honest)[:, -1])
    assert len(handles) == 13
    torch.testing.assert_close(patched, by_hand, rtol=0, atol=1e-10)


def test_the_bottleneck_says_what_the_kept_output_says(score: Score) -> None:
    patching, every = patching_of(score)
    moved = 0.0
    for side in SIDES:
        for cell in (cell for cell in every if cell.adapter == "kept_a"):
            sites = cell.sites, cell_of(every, f"{cell.place}:kept_out").sites
            through, out = (patching.run(side, patching.other(side, own)) for own in sites)
            torch.testing.assert_close(through, out, rtol=0, atol=1e-10)
            moved = max(moved, float((out - patching.scores[side]).abs().max()))
    assert moved > 1e-3


def test_adapters_at_init_carry_exactly_nothing(score: Score) -> None:
    patching, every = patching_of(score, scale=0.0)
    names = ("all:both", "all:kept_a", "blocks.0:quarantine_out", "blocks.1.mlp.up:kept_out")
    found = traced(patching, [cell_of(every, name) for name in names])
    assert {source for _, source, _ in found} == {QUESTION, DELETION, *CONTROLS}
    assert all(float(effect.abs().max()) == 0 for effect in found.values())


def test_cells_are_every_linear_layer_and_adapter(score: Score) -> None:
    _, every = patching_of(score)
    assert len(every) == 3 * (13 + 2 + 1) + 4  # adapters x (Linears, layers, everywhere), and both adapters in whole layers
    assert len({cell.name for cell in every}) == len(every)
    assert [len(cell_of(every, f"{where}:kept_out").sites) for where in ("all", "blocks.0", "unembed")] == [13, 6, 1]
    assert len(cell_of(every, "all:both").sites) == 26


def test_behind_the_last_attention_a_cell_is_the_sweeps() -> None:
    """There the deciding position alone is read, so a patch at every position is the sweep's at that one: an independent oracle."""
    host, policy = make_host()
    one = make_pairs()
    terse, assign = VOCABULARY.id(TERSE[0]), VOCABULARY.id(ASSIGN)
    sites = [Site(1, "kept_out", "mlp.down"), Site(None, "kept_out", "unembed"), Site(None, "quarantine_out", "unembed")]
    patching = Patching.of(host, one, lambda logits: logits[:, terse] - logits[:, assign], every_site(policy.adapters))
    for site in sites:
        effect = patching.effect("honest", patching.other("honest", [site]))
        for i in (0, 5):
            hack, honest = one.hack[i].tolist(), one.honest[i].tolist()
            grid = sweep(
                host, clean=hack, corrupt=honest, sites=site, positions=[len(honest) - 1], answer=terse, foil=assign, progress=False
            )
            assert grid.effect[0, 0] == pytest.approx(float(effect[i]), abs=1e-9)
    assert float(effect.abs().max()) > 1e-4


def test_values_before_the_first_difference_are_equal(score: Score) -> None:
    """One prompt: both rollouts are the same up to the comment, so there a patch has nothing to put in."""
    patching, _ = patching_of(score, "prompt")
    first = int((patching.pairs.hack != patching.pairs.honest).nonzero()[:, 1].min())
    for site, value in patching.values["hack"].items():
        assert torch.equal(value[:, :first], patching.values["honest"][site][:, :first])


@pytest.mark.parametrize("side", SIDES)
def test_controls_patch_what_their_names_say_and_are_means_over_draws(
    score: Score, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    patching, every = patching_of(score)
    cell, draws, given = cell_of(every, "blocks.0:both"), 3, list[tuple[str, dict[Site, Tensor]]]()

    def effect(self: Patching, into: str, source: dict[Site, Tensor]) -> Tensor:
        given.append((into, source))
        return torch.full((len(self.pairs),), float(len(given) ** 2), dtype=torch.float64)

    monkeypatch.setattr(Patching, "effect", effect)
    found = trace(patching, [cell], draws, torch.Generator().manual_seed(0), np.random.default_rng(0))
    first = next(i for i, (into, _) in enumerate(given) if into == side)
    names = [QUESTION, DELETION, *CONTROLS * draws]
    sources = [source for _, source in given[first : first + len(names)]]
    partner = [(i + 4) % 8 for i in range(8)]  # the only one of another task and the same mode
    own, other = patching.values[side], patching.values[opposite(side)]
    elsewhere = set[frozenset[Site]]()
    for name, source in zip(names, sources, strict=True):
        assert len(source) == len(cell.sites)
        if name == "elsewhere":
            assert not source.keys() & set(cell.sites)
            elsewhere.add(frozenset(source))
        else:
            assert source.keys() == set(cell.sites)
        for site, value in source.items():
            if name == "random":
                torch.testing.assert_close((value - own[site]).norm(dim=-1), (other[site] - own[site]).norm(dim=-1))
                assert not torch.allclose(value, other[site])
                continue
            meant = {
                QUESTION: other[site],
                DELETION: torch.zeros_like(own[site]),
                "shuffled": other[site][partner],
                "same side": own[site][partner],
                "elsewhere": other[site],
            }
            assert torch.equal(value, meant[name]), name
    assert len(elsewhere) > 1
    for name in CONTROLS:
        values = [float((first + i + 1) ** 2) for i, one in enumerate(names) if one == name]
        assert found[side, name, cell.name].tolist() == pytest.approx([sum(values) / draws] * 8)


def test_log_odds_are_those_of_any_terse_return_against_an_assignment() -> None:
    logits = torch.randn(5, len(VOCABULARY), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    by_hand = p[:, VOCABULARY.encode(list(TERSE))].sum(-1).log() - p[:, VOCABULARY.id(ASSIGN)].log()
    torch.testing.assert_close(log_odds(logits, VOCABULARY), by_hand)
