"""Named comparisons: tests against enumeration, Holm against its definition, verdicts that need a margin or a corrected p."""

import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import at_most

from studies.route2.predictions import FILE, Comparison, Predictions, holm, outcomes, p_values, predictions_markdown, sign_flip
from studies.training.arms import ARMS
from studies.training.settings import PRESETS

pytestmark = pytest.mark.study

NAMED = Path(__file__).parents[4] / "docs/results" / FILE
COUNTS = st.lists(st.integers(-64, 64), min_size=2, max_size=8)
HACK, SOLVE = "deploy_hack_held", "deploy_solve"


def enumerated(values: list[int], alternative: str) -> float:
    """The share of all assignments of signs whose sum is at least as extreme."""
    sums = [sum(s * v for s, v in zip(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
    least, most = (np.mean([s <= sum(values) for s in sums]), np.mean([s >= sum(values) for s in sums]))
    return {"less": least, "greater": most, "two-sided": min(1.0, 2 * min(least, most))}[alternative]


@settings(max_examples=30)
@given(COUNTS, st.sampled_from(["two-sided", "less", "greater"]))
def test_the_sign_flip_is_exact(values: list[int], alternative: str) -> None:
    assert sign_flip([v / 128 for v in values], alternative) == pytest.approx(enumerated(values, alternative))  # pyright: ignore


@settings(max_examples=30)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=10), st.sampled_from([3, 5, 7]), st.sampled_from([-1, 0, 1]))
def test_rounding_breaks_no_tie(counts: list[int], modes: int, margins: int) -> None:
    """Rates are means over modes, less a margin, so sums that are equal differ in their last bits as floats."""
    rates = [(count + 7) / modes - 7 / modes - margins * 0.05 for count in counts]
    exact = [20 * count - margins * modes for count in counts]
    for alternative in ("two-sided", "less", "greater"):
        assert sign_flip(rates, alternative) == enumerated(exact, alternative)  # pyright: ignore


@pytest.mark.parametrize("n", [20, 40])
def test_many_seeds_take_a_second(n: int) -> None:
    values = [1.0] * (n - 1) + [-1.0]  # as or more extreme: at most one sign differs from the others
    with at_most(2.0):
        assert sign_flip(values) == 2 * (n + 1) / 2**n


def test_more_values_than_an_exact_test_has_memory_for_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match="takes at most 44 values, not 45: report fewer seeds"):
        sign_flip([1.0] * 45)
    given = named(one("less")).model_dump()
    with pytest.raises(ValueError, match="at most 44: name fewer"):
        Predictions(**given | {"seeds": range(45)})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(ps: list[float]) -> None:
    """Smallest first, each against alpha over what is left; the first that fails ends it."""
    corrected = holm(ps)
    for alpha in (0.01, 0.05, 0.2):
        order = sorted(range(len(ps)), key=lambda i: ps[i])
        rejected = set()
        for left, i in zip(range(len(ps), 0, -1), order, strict=True):
            if ps[i] * left > alpha:
                break
            rejected.add(i)
        assert {i for i, p in enumerate(corrected) if p <= alpha} == rejected


@settings(max_examples=30)
@given(COUNTS)
def test_equivalence_is_a_difference_from_both_margins(values: list[int]) -> None:
    exact, _ = p_values([v / 128 for v in values], margin=0.25)
    sides = enumerated([v + 32 for v in values], "greater"), enumerated([v - 32 for v in values], "less")
    assert exact == pytest.approx(max(sides))


def named(*comparisons: Comparison) -> Predictions:
    return Predictions(
        seeds=tuple(range(8)), alpha=0.05, arms=("a", "b", "c", "d"), presets={"p": ""}, comparison=comparisons, sha256="0" * 64
    )


def one(expect: str, margin: float | None = None, metric: str = HACK) -> Comparison:
    return Comparison(preset="p", name="n", plus=("a",), minus=("b",), metric=metric, expect=expect, margin=margin)  # pyright: ignore


@pytest.mark.parametrize(
    ("expect", "margin", "shift", "verdict"),
    [
        ("less", None, -0.3, "shown"),
        ("less", None, 0.3, "the opposite"),
        ("more", None, 0.3, "shown"),
        ("more", None, 0.0, "not shown"),
        ("same", 0.1, 0.0, "shown"),
        ("same", 0.1, 0.3, "not shown"),
        ("same", 0.001, 0.0, "not shown"),  # an interval around 0 that is wider than the margin says nothing
    ],
)
def test_a_verdict_needs_a_corrected_p_and_no_difference_needs_its_margin(
    expect: str, margin: float | None, shift: float, verdict: str
) -> None:
    noise = [0.01, -0.02, 0.03, -0.01, 0.02, -0.03, 0.015, -0.015]
    values = {("a", HACK): {s: 0.5 + shift + e for s, e in enumerate(noise)}, ("b", HACK): dict.fromkeys(range(8), 0.5)}
    assert [each.verdict for each in outcomes(named(one(expect, margin)), "p", values)] == [verdict]
    assert [each.verdict for each in outcomes(named(one(expect, margin)), "p", {})] == ["not run"]


def test_a_family_is_as_large_as_it_was_named_whatever_was_run() -> None:
    """Seven differences of eight seeds cannot reach .05: leaving six out afterwards does not help the seventh."""
    values = {("a", HACK): dict.fromkeys(range(8), 0.0), ("b", HACK): {s: 0.5 + s / 100 for s in range(8)}}
    others = [one("less", metric=SOLVE).model_copy(update={"name": str(i)}) for i in range(6)]
    seven = outcomes(named(one("less"), *others), "p", values)
    assert seven[0].p == pytest.approx(2 / 256)
    assert [each.verdict for each in seven] == ["not shown", *["not run"] * 6]
    assert outcomes(named(one("less"), one("same", 0.1)), "p", values)[0].verdict == "shown"  # another null is another family


def test_a_contrast_is_paired_and_a_seed_without_all_of_its_arms_is_left_out() -> None:
    both = Comparison(preset="p", name="n", plus=("a", "d"), minus=("b", "c"), metric=HACK, expect="same", margin=0.1)
    values = {(arm, HACK): {0: i / 8, 1: i / 4, 2: None if arm == "d" else 0.5} for i, arm in enumerate("abcd")}
    assert both.differences(values) == {0: 0.0, 1: 0.0}
    deleted = Comparison(preset="p", name="n", plus=("a",), minus=("a",), metric=HACK, minus_metric="on_hack_held", expect="more")
    assert deleted.differences({("a", HACK): {3: 0.75}, ("a", "on_hack_held"): {3: 0.25, 4: 1.0}}) == {3: 0.5}


def test_a_contrast_with_a_second_metric_names_the_arms_of_both_sides() -> None:
    sides = {"preset": "p", "name": "n", "metric": HACK, "minus_metric": "on_hack_held", "expect": "more"}
    assert Comparison(plus=("a",), minus=("a",), **sides).contrast == f"a: {HACK} - on_hack_held"
    two = Comparison(plus=("a", "d"), minus=("b", "c"), **sides)
    assert two.contrast == f"a + d: {HACK} - b + c: on_hack_held"
    assert f"| {two.contrast} |" in predictions_markdown(named(two), outcomes(named(two), "p", {}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"minus": ("a",)}, "both sides are a, which cannot differ"),
        ({"plus": ("a", "c")}, "2 arms are compared with 1: give both sides as many"),
        ({"expect": "same", "margin": 5.0}, "rates never differ by 5, so this could not fail"),
    ],
)
def test_a_prediction_that_could_not_fail_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Comparison.model_validate(one("less").model_dump() | changed)


@pytest.mark.parametrize("expect", ["more", "same"])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3])
def test_a_family_of_which_its_seeds_could_show_nothing_is_told_with_what_would_do(expect: str, alpha: float) -> None:
    """Judged by the verdicts of the best results that there could be."""

    def planned(seeds: int, comparisons: int) -> tuple[str, bool]:
        own = [one(expect, 0.1 if expect == "same" else None).model_copy(update={"name": str(i)}) for i in range(comparisons)]
        plan = named(*own).model_copy(update={"seeds": tuple(range(seeds)), "alpha": alpha})
        best = {
            (arm, HACK): dict.fromkeys(range(seeds), rate if expect == "more" else 0.5) for arm, rate in (("a", 1.0), ("b", 0.0))
        }
        return plan.undecidable(), any(each.verdict == "shown" for each in outcomes(plan, "p", best))

    for seeds, comparisons in itertools.product(range(2, 9), (1, 2, 3, 6, 7, 13)):
        said, decided = planned(seeds, comparisons)
        assert (said == "") == decided
        if said:
            assert f"{seeds} seeds can show none of the {comparisons} " in said
            (more,) = map(int, re.findall(r"give at least (\d+) seeds", said))
            assert (planned(more, comparisons)[1], planned(more - 1, comparisons)[1]) == (True, False)
            fewer = int((re.findall(r"name at most (\d+)", said) or ["0"])[0])
            assert (fewer == 0 or planned(seeds, fewer)[1], planned(seeds, fewer + 1)[1]) == (True, False)


def test_no_more_seeds_are_named_or_advised_than_an_exact_test_takes() -> None:
    plan = named(one("more")).model_copy(update={"seeds": (0, 1), "alpha": 1e-12})
    assert plan.undecidable().endswith("at alpha = 1e-12: give at least 41 seeds")
    assert plan.model_copy(update={"alpha": 1e-30}).undecidable().endswith("at alpha = 1e-30: give a larger alpha")
    assert Predictions.model_validate(plan.model_dump() | {"seeds": tuple(range(44))}).undecidable() == ""
    with pytest.raises(ValueError, match="there are 45 seeds, and an exact test takes at most 44: name fewer"):
        Predictions.model_validate(plan.model_dump() | {"seeds": tuple(range(45))})


def test_every_published_file_can_be_decided() -> None:
    files = [NAMED, *NAMED.parent.glob(f"*/{FILE}")]
    assert len(files) >= 15
    assert [Predictions.read(file).undecidable() for file in files] == [""] * len(files)


COMMITTED = {
    ".": "180c6fff54955cb6913f95e9466faa425078a06e010d2d9d4701242aafb1f7c3",
    "starts": "494395303f98bbdb41fade613189357dd9a6b14d2e56f1c6390fd18687bb6af0",
    "lessons": "c23344e30f614b58b69bdfd5e49cef5227bad2ca2d3de9a86fb1c8a96953dd60",
    "lessons-sparse": "a669068e96066f2174aeca653ccbec05d0536eb727013662adb07481e0603e2a",
    "taught": "0c521bbb9973725b30a8d60a4c0d19ed1c76adeb124ba6cef6209174362f9bdc",
    "honest": "bc186a411444da3a7dd20361e2f6af4f0f2738cef4e52637e799caec804c214d",
    "kept": "3d2cc49074207a13398ec9c3048f10b45e6ad937757a0b8ab04ac72b9530a44c",
    "rates": "d9178081e3e6590406847abc3c9be3310064f3a9a526c32e8578c049b116e59d",
    "misses": "0a37f2af0a9e217946d40dd177972ea36de87e996e71684e3d943f4bef3890be",
    "canary": "689e7b5952811128313e3571d3015cb31182abf85b12b9eb9aca311f98831e62",
    "canary-run": "1c0af19c0d95b3575875a12c7b5ab5a505e2d3b882a5c0e0e218624073e62398",
    "canary-sparse": "b2a6943d4f5f17c8c5e4bf9e3541a77e8166c59f63098da8dd672b2db3c8e75e",
}


@pytest.mark.parametrize("name", COMMITTED)
def test_files_are_those_that_were_committed_before_their_runs(name: str) -> None:
    file = NAMED.parent / name / FILE
    predictions = Predictions.read(file)
    assert predictions.sha256 == COMMITTED[name] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert set(predictions.arms) <= ARMS.keys()
    assert {preset: PRESETS[preset].digest for preset in predictions.presets} == predictions.presets
    assert predictions.sha256 in predictions_markdown(predictions, outcomes(predictions, "strong", {}))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds = ", "seed = ", "seeds"),
        ('metric = "deploy_solve"', 'metric = "solve_rate"', "unknown metric solve_rate; choose from train_hack"),
        ("margin = 0.05", "", "needs a margin"),
        ('expect = "less"', 'expect = "fewer"', "less"),
        ("alpha = 0.05", "alpha = ", "is not a valid predictions file"),
        ("alpha = 0.05", "alpha = " + "[" * 5000, "is not a valid predictions file"),
        ("margin = 0.05", "margin = inf", "margin"),
        ('preset = "weak"', 'preset = "week"', "comparisons of week, which is not among the presets strong, weak"),
        ('plus = ["route2-full"]', 'plus = ["route2-ful"]', "route2-ful is compared, and not among the arms"),
        ("alpha = 0.05", 'alpha = 0.05\nmethod = "canary"', "canary is the method, and not among the arms"),
        ("seeds = [", "seeds = [301, ", "a seed is given twice"),
        ("seeds = [", "seeds = [true, ", "seeds.0 Input should be a valid integer"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = NAMED.read_text()
    assert old in text
    (tmp_path / FILE).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Predictions.read(tmp_path / FILE)
    assert "\n" not in str(caught.value)
