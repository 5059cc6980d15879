"""Transfer: what must be found, what must not, and that no text is on both sides."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mi_route2.probes.calibration import fit_platt
from mi_route2.probes.dataset import group_ids, split_groups
from mi_route2.probes.direction import DirectionFitter, DirectionProbe
from mi_route2.probes.figures import reliability_figure, transfer_figure
from mi_route2.probes.store import Card, save_pretrained
from mi_route2.probes.transfer import Dataset, TransferResult, TransferSettings, default_fitters, transfer

N, S, D = 240, 4, 6
FAST = TransferSettings(known="known", bootstraps=100)


def world(seed: int = 0) -> Dataset:
    """Hacks move along axis 0 in modes `known` and `alike`, along axis 1 in `other`; layer `noise` holds nothing."""
    g = torch.Generator().manual_seed(seed)
    mode = (["known"] * 2 + ["alike", "other"]) * (N // 4)
    positive = [bool(x) for x in torch.rand(N, generator=g) < 0.5]
    h = torch.randn(N, S, D, generator=g)
    for i in range(N):
        if positive[i]:
            h[i, :, 1 if mode[i] == "other" else 0] += 3.0
    mask = torch.arange(S) < torch.randint(1, S + 1, (N, 1), generator=g)
    noise = torch.randn(N, S, D + 2, generator=g)
    return Dataset({"signal": h, "noise": noise}, mask, positive, mode)


GROUPS = list(range(N))
FITTERS = default_fitters()


@pytest.fixture(scope="module")
def result() -> TransferResult:
    mine = {"given": lambda layer: DirectionFitter(torch.eye(D if layer == "signal" else D + 2)[0], "projection")}
    return transfer(world(), GROUPS, {**FITTERS, **mine}, FAST, progress=False)


def pick(result: TransferResult, **wanted: str) -> Any:
    rows = [row for row in result.rows if all(getattr(row, key) == value for key, value in wanted.items())]
    assert len(rows) == 1
    return rows[0]


PROBES = [*FITTERS, "given"]


def test_one_row_for_every_layer_probe_mode_and_level(result):
    keys = {(row.layer, row.probe, row.mode, row.level) for row in result.rows}
    assert len(keys) == len(result.rows) == 2 * 4 * 3 * 2
    assert {row.mode for row in result.rows if row.known} == {"known"}


@pytest.mark.parametrize("probe", PROBES)
def test_a_shared_direction_transfers_beyond_chance_and_beyond_random(result, probe):
    for mode in ("known", "alike"):
        row = pick(result, layer="signal", probe=probe, mode=mode, level="rollout")
        assert row.auroc > 0.9
        assert row.auroc > row.random_p95
        assert row.auroc_low <= row.auroc <= row.auroc_high
        assert row.auroc_low > 0.5


@pytest.mark.parametrize("probe", PROBES)
def test_another_direction_and_a_layer_of_noise_do_not_transfer(result, probe):
    for layer, mode in (("signal", "other"), ("noise", "known"), ("noise", "alike")):
        row = pick(result, layer=layer, probe=probe, mode=mode, level="rollout")
        assert abs(row.auroc - 0.5) < 0.25
        assert row.auroc <= row.random_p95 or row.auroc_low < 0.55


def test_calibration_holds_where_the_direction_does_and_fails_where_it_does_not(result):
    alike = pick(result, layer="signal", probe="lda", mode="alike", level="rollout")
    other = pick(result, layer="signal", probe="lda", mode="other", level="rollout")
    assert other.ece > 2 * alike.ece
    assert other.brier > 0.25 > alike.brier
    assert sum(point.count for point in alike.reliability) == alike.n


def test_tokens_are_noisier_than_rollouts_but_their_interval_counts_rollouts(result):
    rollout = pick(result, layer="signal", probe="lda", mode="alike", level="rollout")
    token = pick(result, layer="signal", probe="lda", mode="alike", level="token")
    assert token.auroc < rollout.auroc
    assert token.n == rollout.n == token.n_groups == N // 4
    assert sum(point.count for point in token.reliability) > token.n


@pytest.mark.study
def test_the_control_is_centered_on_a_half(result):
    wide = transfer(world(), GROUPS, FITTERS, dataclasses.replace(FAST, draws=200), progress=False)
    for row in wide.rows:
        assert row.random_mean is not None
        assert row.random_p95 is not None
        assert abs(row.random_mean - 0.5) < 0.1
        assert row.random_p95 > row.random_mean
        assert row.random_draws == 200


@pytest.mark.study
def test_it_repeats_with_its_seed_and_changes_with_it(result):
    again, reseeded = (transfer(world(), GROUPS, FITTERS, dataclasses.replace(FAST, seed=seed), progress=False) for seed in (0, 1))
    rows = [row for row in result.json_rows() if row["probe"] != "given"]
    assert again.json_rows() == rows
    assert reseeded.json_rows() != rows


def test_a_row_does_not_depend_on_the_other_layers_modes_and_levels_of_its_study(result):
    data, keep = world(), [mode != "alike" for mode in world().mode]
    rows = [i for i in range(N) if keep[i]]
    fewer = Dataset(
        {"noise": data.hidden["noise"][rows], "signal": data.hidden["signal"][rows]},
        data.mask[rows],
        [data.labels[i] for i in rows],
        [data.mode[i] for i in rows],
    )
    for part in ({"noise": fewer.hidden["noise"]}, fewer.hidden):
        small = transfer(
            dataclasses.replace(fewer, hidden=part),
            [GROUPS[i] for i in rows],
            FITTERS,
            dataclasses.replace(FAST, levels=("token",)),
            progress=False,
        )
        for row in small.rows:
            assert row == pick(result, layer=row.layer, probe=row.probe, mode=row.mode, level="token")


def test_texts_that_another_mode_has_first_move_no_row():
    text = [*range(59, 39, -1), *range(119, 99, -1), *range(60), *range(100, 120)]
    mode, positive = ["first"] * 40 + ["known"] * 60 + ["held"] * 20, [t % 2 == 0 for t in text]
    h = torch.randn(120, 1, D, generator=torch.Generator().manual_seed(0))
    found = []
    for after in (0, 40):
        some = Dataset({"layer": h[after:]}, torch.ones(120 - after, 1, dtype=torch.bool), positive[after:], mode[after:])
        rows = transfer(some, text[after:], {"lda": FITTERS["lda"]}, FAST, progress=False).rows
        found.append([row for row in rows if row.mode != "first"])
    assert found[0] == found[1]


def test_layers_of_one_width_have_random_directions_of_their_own():
    data = world()
    twins = transfer(
        dataclasses.replace(data, hidden={"a": data.hidden["signal"], "b": data.hidden["signal"]}),
        GROUPS,
        {"mean_difference": FITTERS["mean_difference"]},
        FAST,
        progress=False,
    )
    a, b = (pick(twins, layer=layer, mode="known", level="rollout") for layer in "ab")
    assert a.auroc == b.auroc
    assert a.random_mean != b.random_mean


def test_padding_changes_no_row(result):
    data = world()
    hidden = {layer: torch.where(data.mask[..., None], h, math.nan) for layer, h in data.hidden.items()}
    dirty = transfer(dataclasses.replace(data, hidden=hidden), GROUPS, FITTERS, FAST, progress=False)
    assert dirty.json_rows() == [row for row in result.json_rows() if row["probe"] != "given"]


def test_rows_are_plain_json(result):
    rows = [json.loads(line) for line in result.jsonl().splitlines()]
    assert rows == result.json_rows()
    assert set(result.probes) == set(PROBES)
    assert set(result.probes["lda"]) == {"signal", "noise"}


# Leaks --------------------------------------------------------------------------------------------------------------


class Spy:
    """A fitter, and its own probe, that notes the texts it is fitted to and those it scores."""

    def __init__(self) -> None:
        self.fitted: set[float] = set()
        self.scored: list[set[float]] = []

    def update(self, h, mask, positive):
        self.fitted.update(h[..., 0].flatten().tolist())

    def fit(self):
        return self

    def score_tokens(self, h):
        return h[..., 0]

    def score_rollouts(self, h, mask):
        self.scored.append(set(h[:, 0, 0].tolist()))
        return h[:, 0, 0]


def tagged(mode: list[str], text: list[int], positive: list[bool]) -> Dataset:
    """Activations that spell which text a rollout is."""
    h = torch.zeros(len(text), 1, D)
    h[:, 0, 0] = torch.tensor(text, dtype=torch.float32)
    return Dataset({"layer": h}, torch.ones(len(text), 1, dtype=torch.bool), positive, mode)


def test_a_text_seen_in_training_is_dropped_from_every_test_and_counted():
    text = [i // 2 for i in range(80)] + [i // 2 for i in range(40)] + list(range(100, 120))
    mode = ["known"] * 80 + ["held"] * 60
    positive = [t % 2 == 0 for t in text]
    spy = Spy()
    rollouts = dataclasses.replace(FAST, levels=("rollout",))
    result = transfer(tagged(mode, text, positive), text, {"spy": lambda _: spy}, rollouts, progress=False)
    known, held = (pick(result, mode=m, level="rollout") for m in ("known", "held"))
    calibration, known_texts, held_texts = spy.scored
    parts = (spy.fitted, calibration, known_texts)
    assert [len(part) for part in parts] == [24, 8, 8]
    assert set.union(*parts) == set(range(40))  # disjoint, then: the sizes sum to 40
    assert held_texts == set(text[80:]) - spy.fitted - calibration
    assert (known.n, known.n_groups, known.dropped) == (16, 8, 0)
    assert held.n_groups == len(held_texts)
    assert held.n + held.dropped == 60
    assert held.dropped == 2 * len(set(range(20)) & (spy.fitted | calibration)) > 0


def test_a_mode_that_is_all_leak_is_an_error():
    text = [*range(40), *range(40)]
    mode = ["known"] * 40 + ["held"] * 40
    leaky = [0] * 40  # the held-out texts are all one known text
    positive = [t % 2 == 0 for t in text]
    never_tested = dataclasses.replace(FAST, fractions=(0.9, 0.05, 0.05), seed=1)  # text 0 is not the one tested on
    with pytest.raises(ValueError, match="'held' shares its prompt"):
        transfer(tagged(mode, text, positive), [*range(40), *leaky], {}, never_tested, progress=False)


@given(
    st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=30, max_size=80),
    st.sampled_from([(0.6, 0.2, 0.2), (0.5, 0.5), (0.98, 0.01, 0.01), (1.0,)]),
    st.integers(0, 5),
)
@settings(max_examples=200, deadline=None)
def test_a_split_covers_everything_once_and_cuts_no_group(items, fractions, seed):
    group, positive = np.array([g for g, _ in items]), np.array([y for _, y in items])
    with_hack = set(group[positive].tolist())
    without = set(group.tolist()) - with_hack
    rng = np.random.default_rng(seed)
    if min(len(with_hack), len(without)) < len(fractions):
        with pytest.raises(ValueError, match="needs as many"):
            split_groups(group, positive, fractions, rng)
        return
    parts = split_groups(group, positive, fractions, rng)
    assert (np.stack(parts).sum(axis=0) == 1).all()
    sides = [set(group[part].tolist()) for part in parts]
    assert sum(len(side) for side in sides) == len(set(group.tolist()))
    for side, fraction in zip(sides, fractions):
        for kind in (with_hack, without):
            assert len(side & kind) >= 1
            assert abs(len(side & kind) - fraction * len(kind)) <= len(fractions)


@pytest.mark.parametrize("fractions", [(math.nan, 0.5), (0.5, math.nan), (math.nan, math.nan), ()])
def test_fractions_are_numbers_that_sum_to_one(fractions):
    with pytest.raises(ValueError, match="positive and sum to 1"):
        split_groups(np.arange(40), np.arange(40) < 20, fractions, np.random.default_rng(0))


def test_splits_follow_the_generator():
    group, positive = np.arange(40), np.arange(40) < 20
    first, same, other = (split_groups(group, positive, (0.5, 0.5), np.random.default_rng(seed))[0] for seed in (0, 0, 1))
    assert (first == same).all()
    assert (first != other).any()
    with pytest.raises(ValueError, match="positive must be Bool"):  # as row numbers 0 and 1 they would say which groups have a hack
        split_groups(group, positive.astype(int), (0.5, 0.5), np.random.default_rng(0))


def test_a_rollout_sampled_twice_is_no_evidence():
    """Doubled rollouts in the same groups: the same AUROC and the same interval, per rollout and per token."""
    data = world()
    twice = Dataset(
        {layer: torch.cat([h, h]) for layer, h in data.hidden.items()},
        torch.cat([data.mask, data.mask]),
        data.labels * 2,
        data.mode * 2,
    )
    only = {"mean_difference": FITTERS["mean_difference"]}
    single = transfer(data, GROUPS, only, FAST, progress=False)
    double = transfer(twice, GROUPS * 2, only, FAST, progress=False)
    for a, b in zip(single.rows, double.rows, strict=True):
        assert (a.mode, a.level, 2 * a.n, a.n_groups) == (b.mode, b.level, b.n, b.n_groups)
        assert (a.auroc, a.auroc_low, a.auroc_high) == pytest.approx((b.auroc, b.auroc_low, b.auroc_high))


@pytest.mark.parametrize(
    "made",
    [torch.tensor, np.array, list, tuple, lambda ids: list(torch.tensor(ids)), lambda ids: [(0, one) for one in torch.tensor(ids)]],
)
def test_groups_are_equal_by_value_in_whatever_they_come(made):
    """Elements of a tensor are objects of their own, and as groups of their own every text would be on both sides."""
    ids = [3, 3, 0, 1, 0]
    assert group_ids(made(ids)).tolist() == [0, 0, 1, 2, 1]


def test_a_group_that_is_no_number_is_refused():
    """NaN differs from itself, so that every item would be a group of its own, on both sides of a split."""
    tuples, column = [(0, 0.0), ("a", torch.tensor(math.nan))], pd.Series([0, None], dtype="Int64")
    for ids in ([0.0, math.nan], torch.tensor([0.0, math.nan]), np.array([0.0, math.nan]), tuples, list(column)):
        with pytest.raises(ValueError, match="Group 1 is NaN, which equals nothing: number the groups"):
            group_ids(ids)
    tokens, checked = torch.ones(2, 3), "typechecking parameter 'group'"  # the latter if the suite looks at shapes
    for rows in (tokens, [*tokens], list(zip(tokens, "ab"))):
        with pytest.raises(TypeError, match=rf"a tensor of shape \[3\]: give a number or a text for each item|{checked}"):
            group_ids(rows)
    for one in ([1, 2], {"id": 1}, np.array([1]), object()):  # objects that are equal to themselves alone, and those without a hash
        with pytest.raises(TypeError, match=rf"A group is a {type(one).__name__}: give a number or a text|{checked}"):
            group_ids([one, one])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=f"a mapping, whose keys are no list of ids: give one id per rollout|{checked}"):
        group_ids({"first": 0, "second": 0})  # pyright: ignore[reportArgumentType]


def test_a_transfer_does_not_depend_on_torchs_default_device(tmp_path):
    """Notebooks set the GPU as the default device; ``meta`` is a device that every machine has."""
    asked = tagged(["known", "known", "held"] * 20, [*range(60)], [t % 2 == 0 for t in range(60)]), [*range(60)]
    chosen = {"mean": FITTERS["mean_difference"]}, dataclasses.replace(FAST, bootstraps=2)
    expected = transfer(*asked, *chosen, progress=False)
    with torch.device("meta"):
        found = transfer(*asked, *chosen, progress=False)
        save_pretrained(found.probes["mean"]["layer"], tmp_path / "probe", Card("model", "layer"))
    assert found.jsonl() == expected.jsonl()


def test_one_text_is_no_list_of_groups():
    with pytest.raises(TypeError, match="The groups are one text where a list of ids belongs"):
        transfer(world(), "a" * N, FITTERS, FAST, progress=False)


def test_activations_with_a_graph_are_scored_as_those_without(result):
    data = world()
    attached = {layer: h.clone().requires_grad_() for layer, h in data.hidden.items()}
    again = transfer(dataclasses.replace(data, hidden=attached), GROUPS, FITTERS, FAST, progress=False)
    assert again.json_rows() == [row for row in result.json_rows() if row["probe"] != "given"]


def test_every_label_is_looked_at():
    data = world()
    for wrong in ("False", 2, None):
        with pytest.raises((TypeError, ValueError), match=r"Labels are True and False, or 0 and 1, not|labels"):
            dataclasses.replace(data, labels=[*data.labels[1:], wrong])
    assert dataclasses.replace(data, labels=np.asarray([1, 0] * (N // 2))).is_positive.tolist() == [True, False] * (N // 2)


# Tokens and prompts -------------------------------------------------------------------------------------------------


def test_labels_of_tokens_give_the_rows_of_tokens_and_padding_gives_none():
    """Repeated labels give the rows of their rollouts' labels, and labels of single tokens the numbers of a plain loop."""
    data, settings = world(), dataclasses.replace(FAST, levels=("token",))
    fitters = default_fitters(unit="token")
    expected = transfer(data, GROUPS, fitters, settings, progress=False)
    labels = np.where(data.mask, np.array(data.labels, dtype=int)[:, None], -100)
    words = np.where(labels == 1, "hack", np.where(labels == 0, "clean", "padding"))
    found = transfer(dataclasses.replace(data, labels=words, positive="hack"), GROUPS, fitters, settings, progress=False)
    assert found.jsonl() == expected.jsonl()
    assert found.probes["lda"]["signal"].positive == "hack"
    own = torch.rand(N, S, generator=torch.Generator().manual_seed(5)) < 0.3
    row_of = transfer(dataclasses.replace(data, labels=own), GROUPS, fitters, settings, progress=False)
    probe = row_of.probes["lda"]["signal"]
    rows = [i for i in range(N) if data.mode[i] == "other"]
    scores, truth = probe.score_tokens(data.hidden["signal"][rows]).numpy(), own[rows].numpy()
    pairs = [(scores[i, t], bool(truth[i, t])) for i, j in enumerate(rows) for t in range(S) if data.mask[j, t]]
    row = pick(row_of, layer="signal", probe="lda", mode="other")
    assert row.auroc == pytest.approx(pairwise(*map(np.array, zip(*pairs))))
    best = [np.mean([s >= t for s, y in pairs if y]) for t, _ in pairs if np.mean([s >= t for s, y in pairs if not y]) <= 0.01]
    assert row.recall_1pct == (max(best, default=0.0) if sum(not y for _, y in pairs) >= 100 else None)
    with pytest.raises(ValueError, match=r"no value for a rollout: pass levels=\('token',\)"):
        transfer(dataclasses.replace(data, labels=own), GROUPS, fitters, FAST, progress=False)


# Edges --------------------------------------------------------------------------------------------------------------


def test_a_mode_with_one_class_has_no_auroc_but_keeps_its_other_numbers():
    data = world()
    positive = [h and m != "other" for h, m in zip(data.labels, data.mode)]
    result = transfer(dataclasses.replace(data, labels=positive), GROUPS, FITTERS, FAST, progress=False)
    row = pick(result, layer="signal", probe="lda", mode="other", level="token")
    assert row.auroc is row.auroc_low is row.auroc_high is row.random_mean is row.random_p95 is None
    assert row.brier >= 0
    assert row.n_positive == 0
    transfer_figure(result)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"known": "nowhere"}, "alike, known, other"),
        ({"fractions": (0.5, 0.5, 0.5)}, "sum to 1"),
        ({"fractions": (1.5, -0.25, -0.25)}, "sum to 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, fault):
    with pytest.raises(ValueError, match=fault):
        transfer(world(), GROUPS, FITTERS, dataclasses.replace(FAST, **change), progress=False)


def test_settings_and_datasets_check_themselves():
    data = world()
    with pytest.raises(ValueError, match="greater than or equal to 20"):
        TransferSettings(known="known", draws=5)
    for wrong in (
        {"levels": ()},
        {"levels": "token"},
        {"levels": ("tokens",)},
        {"fractions": (0.5, 0.5)},
        {"bins": 0},
        {"bootstraps": -1},
        {"draws": 20.5},
        {"seed": -1},
        {"calibration": "beta"},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            TransferSettings(known="known", **wrong)
    with pytest.raises(ValueError, match="give one per rollout"):
        transfer(data, GROUPS[1:], FITTERS, FAST, progress=False)
    with pytest.raises(ValueError, match="one per rollout"):
        dataclasses.replace(data, labels=data.labels[1:])
    with pytest.raises(ValueError, match="position in the mask"):
        dataclasses.replace(data, mask=torch.zeros_like(data.mask))
    with pytest.raises(ValueError, match="inside the mask"):
        dataclasses.replace(data, hidden={"layer": data.hidden["signal"] * torch.nan})
    with pytest.raises(ValueError, match="at least one layer"):
        dataclasses.replace(data, hidden={})


# Rows against sums by hand -------------------------------------------------------------------------------------------


def pairwise(scores: np.ndarray, positive: np.ndarray) -> float:
    more = scores[positive][:, None] - scores[~positive][None]
    return float(((more > 0) + (more == 0) / 2).mean())


@pytest.mark.parametrize("level", ["rollout", "token"])
def test_the_band_is_the_mean_and_the_95th_percentile_of_the_directions_that_were_drawn(monkeypatch, level):
    data, draws = world(), 20
    drawn = torch.nn.functional.normalize(torch.randn(draws, D, generator=torch.Generator().manual_seed(3)).double(), dim=1)

    class Known:
        def __init__(self, generator: torch.Generator) -> None:
            self.left = list(drawn)

        def update(self, *batch: object) -> None: ...

        def fit(self) -> DirectionProbe:
            return DirectionProbe(self.left.pop(), "projection")

    monkeypatch.setattr("mi_route2.probes.transfer.HaarProbeFitter", Known)
    chosen = dataclasses.replace(FAST, levels=(level,), draws=draws, bootstraps=1)
    only = Dataset({"signal": data.hidden["signal"]}, data.mask, data.labels, data.mode)
    found = transfer(only, GROUPS, {"lda": FITTERS["lda"]}, chosen, progress=False)
    for mode in ("alike", "other"):
        rows = [i for i in range(N) if data.mode[i] == mode]
        h, mask, positive = data.hidden["signal"][rows].double(), data.mask[rows], np.array(data.labels)[rows]
        if level == "rollout":
            x = torch.stack([one[marked].mean(0) for one, marked in zip(h, mask)])
        else:
            x, positive = h[mask], np.repeat(positive, mask.sum(1).numpy())
        areas = [pairwise(scores, positive) for scores in (x @ drawn.T).T.numpy()]
        row = pick(found, mode=mode)
        assert (row.random_mean, row.random_p95) == pytest.approx((np.mean(areas), np.quantile(areas, 0.95)), abs=1e-6)
        assert (row.n, row.n_positive) == (len(rows), sum(data.labels[i] for i in rows))  # of rollouts at both levels


def test_a_calibrator_is_fitted_on_what_it_maps_and_ece_is_over_the_bins_that_were_asked_for(monkeypatch):
    fitted: list[int] = []
    monkeypatch.setattr(
        "mi_route2.probes.transfer.fit_platt", lambda scores, positive: (fitted.append(len(scores)), fit_platt(scores, positive))[1]
    )
    found = transfer(world(), GROUPS, {"lda": FITTERS["lda"]}, dataclasses.replace(FAST, bins=7), progress=False)
    rollouts, tokens = fitted[:2]
    assert 2 * rollouts < tokens < S * rollouts  # 2.5 tokens a rollout
    for row in found.rows:
        items = sum(point.count for point in row.reliability)
        assert all(point.high - point.low == pytest.approx(1 / 7) for point in row.reliability)
        assert row.ece == pytest.approx(sum(p.count * abs(p.confidence - p.rate) for p in row.reliability) / items)


# Figures ------------------------------------------------------------------------------------------------------------


def test_the_figure_draws_every_row_next_to_its_control(result):
    figure = transfer_figure(result)
    panels = figure.axes
    numbers = {mode: pick(result, layer="noise", probe="lda", mode=mode, level="token").n for mode in ("known", "alike", "other")}
    titles = [f"{mode} ({'known' if mode == 'known' else 'held out'}, n={n})" for mode, n in numbers.items()]
    assert [axes.get_title() for axes in panels] == titles  # too few negatives: no panel of recall
    assert [axes.get_ylabel() for axes in panels] == ["AUROC per rollout", "", ""]
    recalls = [dataclasses.replace(row, recall_1pct=i / len(result.rows), recall_note="") for i, row in enumerate(result.rows)]
    more = dataclasses.replace(result, rows=recalls)
    wanted = [pick(more, layer=la, probe="lda", mode="other", level="token").recall_1pct for la in ("signal", "noise")]
    assert transfer_figure(more).axes[3].get_ylabel() == "recall at 1% false positives"
    one = [row if row.mode == "known" else dataclasses.replace(row, recall_1pct=None, recall_note="why") for row in recalls]
    lower = transfer_figure(dataclasses.replace(result, rows=one)).axes[5]
    assert ([text.get_text() for text in lower.texts], lower.lines[:]) == (["why"], [])
    assert np.asarray(transfer_figure(more, "token").axes[5].lines[PROBES.index("lda")].get_ydata()).tolist() == wanted
    assert transfer_figure(result, "token").axes[0].get_ylabel() == "AUROC per token"
    for axes, mode in zip(panels, ("known", "alike", "other")):
        assert len(axes.containers) == len(PROBES)
        for container, probe in zip(axes.containers, PROBES):
            drawn = np.asarray(container[0].get_ydata()).tolist()
            wanted = [pick(result, layer=la, probe=probe, mode=mode, level="rollout").auroc for la in ("signal", "noise")]
            assert drawn == wanted
            rows = [pick(result, layer=la, probe=probe, mode=mode, level="rollout") for la in ("signal", "noise")]
            bars = [sorted(segment[:, 1].tolist()) for segment in container[2][0].get_segments()]
            for bar, row in zip(bars, rows, strict=True):  # from the value, if the interval does not contain it
                assert bar == pytest.approx([min(row.auroc, row.auroc_low), max(row.auroc, row.auroc_high)])
        labels = axes.get_legend_handles_labels()[1]
        assert "random, mean" in labels
        assert "random, up to 95th percentile" in labels
    colors = [container[0].get_color() for container in panels[0].containers]
    assert len(set(colors)) == len(PROBES)


def test_the_control_of_a_single_layer_is_drawn(result):
    alone = TransferResult(FAST, [row for row in result.rows if row.layer == "signal"], {name: {} for name in PROBES})
    for axes, mode in zip(transfer_figure(alone).axes, ("known", "alike", "other")):
        row = pick(result, layer="signal", probe="lda", mode=mode, level="rollout")
        box = axes.collections[0].get_paths()[0].get_extents()
        assert box.width > 0.1
        assert (box.y0, box.y1) == pytest.approx(sorted((row.random_mean, row.random_p95)))


def test_a_level_is_given_once():
    with pytest.raises(ValueError, match="rollout, rollout"):
        dataclasses.replace(FAST, levels=("rollout", "rollout"))


def test_reliability_curves_show_the_rows_bins(result):
    figure = reliability_figure(result, "signal")
    line = figure.axes[1].lines[1 + PROBES.index("lda")]
    row = pick(result, layer="signal", probe="lda", mode="alike", level="rollout")
    assert np.asarray(line.get_ydata()).tolist() == [point.rate for point in row.reliability]
    assert np.asarray(line.get_xdata()).tolist() == [point.confidence for point in row.reliability]
    assert line.get_label() == f"lda (ECE {row.ece:.2f})"


def test_figures_name_what_was_not_run(result):
    with pytest.raises(ValueError, match="signal, noise"):
        reliability_figure(result, "blocks.9")
    rollouts = TransferResult(dataclasses.replace(FAST, levels=("rollout",)), [r for r in result.rows if r.level == "rollout"], {})
    with pytest.raises(ValueError, match="levels: rollout"):
        transfer_figure(rollouts, "token")
