"""The report of the canary's experiment says what the runs hold: fronts, coverage, tables, files."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from synthetic_study import write_study
from titles import saved_titles, untitled

from studies.common.publishing import compact
from studies.common.tables import number
from studies.environments.micro.model import MicroGPT
from studies.route2 import cli, questions
from studies.route2.evidence import EXPLOIT, ON_EXPLOIT, PATH, SOLVE, Evidence, collect, flagged_late, goals, stopped_inside, table
from studies.route2.predictions import Predictions
from studies.route2.publish import command, folder_name
from studies.route2.questions import write_evidence
from studies.route2.report import figures as figures_module
from studies.route2.report.load import load_runs
from studies.training.manifest import refuse_mixed
from studies.training.settings import PRESETS, get_settings

pytestmark = pytest.mark.study


def evidence() -> Evidence:
    """Two seeds and two loopholes; the canary never exploits ``b`` on seed 1, and the filtered run does."""

    def arm(exploit: list[float], solve: list[float], a: list[float], b: list[float]) -> dict[str, list[float | None]]:
        rates = {"deploy_exploit_held": exploit, "deploy_hack_held": exploit, "deploy_solve": solve}
        rates |= {"deploy_exploit_a": a, "deploy_exploit_b": b}
        return {**rates, **{key: [None, None] for key in ("auroc", "recall", "fire_clean", "seconds")}}  # pyright: ignore[reportReturnType]

    values = {
        "base": arm([0.1, 0.1], [0.3, 0.3], [0.1, 0.1], [0.1, 0.1]),
        "vanilla-10": arm([0.2, 0.2], [0.6, 0.4], [0.2, 0.2], [0.2, 0.2]),
        "vanilla": arm([0.9, 0.9], [0.1, 0.1], [0.9, 0.9], [0.9, 0.9]),
        "canary-10": arm([0.4, 0.4], [0.3, 0.3], [0.6, 0.7], [0.8, 0.0]),
        "canary-20": arm([0.4, 0.4], [0.3, 0.3], [0.9, 0.2], [0.5, 0.1]),
        "filter-canary": arm([0.0, 0.5], [0.9, 0.5], [0.0, 0.0], [0.1, 0.9]),
        "canary-rotated": arm([0.3, 0.4], [0.4, 0.5], [0.0, 0.0], [0.1, 0.9]),
    }
    return Evidence("strong", (200, 201), ("a", "b"), {"settings_hash": "0"}, values)


def test_an_arm_counts_only_outside_of_ordinary_training() -> None:
    found = evidence()
    assert stopped_inside(found, "filter-canary") == []
    assert stopped_inside(found, "canary-rotated") == ["vanilla-10"]
    assert stopped_inside(found, "vanilla") == ["base", "vanilla-10"]
    lines = {line.split("|")[1].strip(): line.split("|") for line in table(found).splitlines() if line.startswith("| ")}
    assert lines["filter-canary"][4].strip() == ".500"
    assert lines["filter-canary"][7].strip() == "none"
    assert lines["canary-rotated"][7].strip() == "10"


def test_goals_are_compared_with_means_and_paired_differences() -> None:
    said = goals(evidence(), "filter-canary").splitlines()
    assert said[0].startswith("- held-out exploit at most .020: .250")
    assert said[0].endswith("**missed** (1 of 2 seeds are within it, median .250, worst .500).")
    assert said[1].startswith("- solve at least .850: .700")
    assert "**missed**" in said[1]
    assert said[2] == "- no point of ordinary training better in both: **met**."
    assert said[3].startswith("- canary-rotated exploits at least .300 more: +.100")
    assert goals(evidence(), "canary-rotated").splitlines()[2].endswith("**missed** (vanilla-10).")


def test_goals_are_those_of_the_method_that_the_predictions_name() -> None:
    found = evidence()
    file = {"seeds": found.seeds, "arms": tuple(found.values), "presets": {"strong": "0"}, "comparison": ()}
    for method, judged in ((None, "filter-canary"), ("canary-rotated", "canary-rotated")):
        assert questions.texts(found, Predictions(**file, alpha=0.05, sha256="", method=method))["-goals"] == goals(found, judged)


def test_coverage_pairs_the_best_checkpoint_of_a_mode_with_what_the_run_keeps() -> None:
    found = evidence()
    assert sorted(questions.coverage(found, "filter-canary")) == [
        (200, "a", 0.9, 0.0),
        (200, "b", 0.8, 0.1),
        (201, "a", 0.7, 0.0),
        (201, "b", 0.1, 0.9),
    ]
    said = questions.coverage_sentence(found, "filter-canary")
    assert "in the 1 seeds and modes of which its canary exploits less than .2 it exploits .900" in said
    assert "in the 3 of which the canary exploits at least .5 .033" in said


def test_recall_counts_the_runs_that_flagged() -> None:
    found = evidence()
    flagged = {"filter-canary": [1.0, 0.5], "canary-rotated": [None, 0.97]}
    found = replace(found, values={arm: {**row, "recall": flagged.get(arm, [None, None])} for arm, row in found.values.items()})
    exploits = found.values["filter-canary"][EXPLOIT]
    assert questions.recalls(found, "no label, no pair") == list(zip([1.0, 0.5], exploits, strict=True))
    said = questions.recall_sentence(found)
    assert "of 2 runs that flagged at least .950 of their hacks in the first 30 steps, 1 end with" in said  # exploits of 0 and .4
    assert "of 1 runs that flagged less than .800" in said


def test_a_quarantines_rate_is_that_of_its_arm_and_preset_over_the_kept_one(tmp_path: Path) -> None:
    """1.7e-3 over 3e-3 on `weak`; the figure needs no arm without a quarantine."""
    row = {**evidence().values["vanilla"], ON_EXPLOIT: [0.5, None]}
    names = [f"sees-{seen}-quarantine{pace}" for seen in ("known", "0") for pace in ("-fast", "", "-slow")]
    # no quarantine, other flags, a band, a quarantine that forgets
    others = ("sees-known", "sees-100-quarantine", "sees-known-bands-fast", "sees-known-quarantine-fast-forgets")
    found = replace(evidence(), preset="weak", values=dict.fromkeys([*names, *others], row))
    slow, usual, fast = questions.rates(found, "sees-known")
    assert [arm for _, arm in (slow, usual, fast)] == [names[2], names[1], names[0]]
    assert np.allclose([slow[0], usual[0], fast[0]], [1.7 / 9, 1.7 / 3, 1.7])
    # the rates of a chat model are its own, which a report does not have
    assert questions.rates(replace(found, preset="functions"), "sees-known") == []
    assert questions.rates_figure([found, replace(found, preset="strong")], tmp_path / "rates.png").stat().st_size > 10_000


def test_lessons_are_drawn_from_their_first_step_to_their_end(tmp_path: Path) -> None:
    """An arm that had no lesson, or was not stopped right after it, is no dot."""
    row = {**evidence().values["vanilla"], "recall": [None, None]}
    names = ("base", "vanilla", "vanilla-5", "taught-honest", "taught-honest-1", "taught-8", "taught-8-1", "taught-2")
    found = replace(evidence(), values=dict.fromkeys(names, row))
    assert questions.lessons(found) == ["taught-honest", "taught-8"]
    assert questions.lessons_figure([found, found], tmp_path / "lessons.png").stat().st_size > 10_000
    starts = {"taught-honest-1": (0.9, 0.8), "taught-8-1": (0.7, 0.1)}  # of what it solves, from the least to the most exploits
    ends = {"taught-honest": (0.1, 0.2), "taught-8": (0.3, 0.4)}
    values = {**found.values, **{arm: {**row, SOLVE: [*solve], EXPLOIT: [0.5, 0.6]} for arm, solve in starts.items()}}
    values |= {arm: {**row, EXPLOIT: [*exploit]} for arm, exploit in ends.items()}
    said = questions.lessons_sentence(replace(found, values=values))
    assert "over 4 runs with a lesson, Spearman's correlation of held-out exploits at the end is -1.000 with what" in said
    assert "and .447 with what is exploited then." in said  # ranks 1.5, 3.5, 1.5, 3.5 against 1, 2, 3, 4
    assert not questions.flagged(found)
    assert questions.flagged(replace(found, values={**found.values, "filter-canary": {**row, "recall": [None, 0.5]}}))


def test_a_probes_sight_is_told_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    root = write_study(tmp_path / "strong-0123abcd", ("base", "vanilla", "filter-act", "penalty-act"), seeds=(0, 1), steps=80)
    found, runs = collect(load_runs(root)), load_runs(root)
    lines = {line.split("|")[1].strip(): line.split("|") for line in questions.monitors(found).splitlines()}
    assert lines.keys() - {"arm", "---", "-" * len("penalty-act")} == {"filter-act", "penalty-act"}
    for arm in ("filter-act", "penalty-act"):
        masks = {seed: [row["mask"] for row in runs.runs[arm, seed].metrics] for seed in (0, 1)}
        for place, rows in ((5, slice(30)), (6, slice(50, 80))):
            means = [np.mean([m["recall"] for m in own[rows] if m and m["recall"] is not None]) for own in masks.values()]
            assert lines[arm][place].strip() == number(float(np.mean(means)))
    bare = {arm: row for arm, row in found.values.items() if arm != "penalty-act"}
    assert questions.monitors(replace(found, values=bare)) == ""


def test_the_map_orders_worlds_by_what_ten_pairs_see(tmp_path: Path) -> None:
    worlds = []
    for preset, auroc, exploit in (("strong", 0.9, 0.1), ("sparse", 0.6, 0.7), ("persona-20", 0.75, 0.4)):
        row = {**evidence().values["vanilla"], "auroc": [auroc, auroc], EXPLOIT: [exploit, exploit]}
        worlds.append(replace(evidence(), preset=preset, values=dict.fromkeys(("vanilla", "filter-full", "taught-honest"), row)))
    ordered = questions.mapped(worlds)
    assert [world.preset for world in ordered] == ["sparse", "persona-20", "strong"]
    head, _, *lines = questions.map_table(ordered).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:-1]] == [
        "sparse (AUROC .600)", "persona-20 (AUROC .750)", "strong (AUROC .900)",
    ]  # fmt: skip
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert [cell.partition(" ")[0] for cell in cells["filter-full"]] == [".700", ".400", ".100"]
    assert all(cell.endswith("/ .100") for cell in cells["taught-honest"])
    assert questions.map_figure(worlds, tmp_path / "map.png").stat().st_size > 10_000
    assert questions.mapped(worlds[:2]) == []  # two worlds are no map
    assert questions.mapped([replace(world, values={"vanilla": world.values["vanilla"]}) for world in worlds]) == []


def test_sizes_are_in_the_order_of_the_models_parameters_and_of_one_world(tmp_path: Path) -> None:
    names = ("strong", "strong-400k", "weak", "strong-30k")
    every = [replace(evidence(), preset=name) for name in names]
    counted = [sum(p.numel() for p in MicroGPT(PRESETS[name].warm.model).parameters()) for name in names]
    assert questions.sized(every) == [(counted[i], every[i]) for i in (3, 0, 1)]
    head, _, *lines = questions.size_table(every).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:-1]] == ["30,144 parameters", "109,440 parameters", "415,488 parameters"]
    assert [line.split("|")[1].strip() for line in lines[:2]] == ["base", "vanilla"]
    assert questions.size_figure(every, tmp_path / "size.png").stat().st_size > 10_000
    assert questions.sized(every[:3]) == []  # two sizes of one world


def test_a_run_is_loud_by_its_last_flags_and_broken_by_its_worst_mode() -> None:
    early, late = ({"flags": {"n": 8, "flagged": flagged}} for flagged in (8, 1))
    metrics = [*[early] * 30, *[late] * 10, *[{"flags": None}] * 5, {"flags": {"n": 2, "flagged": 1}}, *[late] * 4]
    assert flagged_late(metrics) == (14 + 1) / (14 * 8 + 2)
    assert flagged_late([{"flags": None}]) is None
    found, seeds = evidence(), ("deploy_exploit_a", "deploy_exploit_b", "late_flagged")
    rows = {
        "filter-canary-run": ([0.0, 0.0], [0.05, 0.9], [0.03, 0.031]),
        "canary-run-early": ([0.06, 0.0], [0.0, 0.0], [0.0, 0.2]),
    }
    values = {arm: dict(zip(seeds, row, strict=True)) for arm, row in rows.items()}
    told = questions.sign(replace(found, values={**found.values, **values})).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in told] == [
        ["filter-canary-run", "2", "1", "0", "1", "1"],
        ["canary-run-early", "2", "1", "1", "1", "0"],
    ]
    assert questions.sign(found) == ""


def test_every_figure_says_of_which_presets_it_is(tmp_path: Path) -> None:
    """Drawn from what is published: the three worlds of the map, or the experiment of that name."""
    results = Path(__file__).parents[4] / "docs/results"
    figures = {name: draw for name, draw in vars(questions).items() if name.endswith("_figure")}
    assert {"fronts_figure", "map_figure"} <= figures.keys()
    for name, draw in figures.items():
        named = results / name.removesuffix("_figure")
        folder = named if named.is_dir() else results / "map"
        presets = sorted(path.stem for path in folder.glob("*.json") if not path.stem.endswith("-watch"))
        every = [Evidence.read(folder / f"{preset}.json") for preset in presets]
        with saved_titles() as seen:
            draw(every, tmp_path / f"{name}.png")
        assert len(seen) == 1
        assert [untitled(seen, preset) for preset in presets] == [[]] * len(presets), name


def test_figures_draw_what_their_axes_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dots and means are the published numbers, across and up as the labels have it."""
    drawn: list[Figure] = []
    monkeypatch.setattr(figures_module, "save_figure", lambda figure, path: drawn.append(figure))

    def axes(draw: Callable[..., Path], every: list[Evidence]) -> list[Axes]:
        draw(every, tmp_path / "figure.png")
        return drawn[-1].axes

    def means(ax: Axes) -> dict[str, np.ndarray]:
        bars = [each for each in ax.containers if isinstance(each, ErrorbarContainer)]
        return {str(each.get_label()): np.asarray(each.lines[0].get_xydata()) for each in bars}

    def dots(ax: Axes) -> dict[str, list[list[float]]]:
        return {str(each.get_label()): each.get_offsets().tolist() for each in ax.collections if isinstance(each, PathCollection)}

    def same(found: Any, expected: Any) -> bool:
        return np.allclose(np.asarray(found, dtype=float), np.asarray(expected, dtype=float))

    def mean_of(evidence: Evidence, arm: str, metric: str) -> float:
        return float(np.mean(np.asarray(evidence.values[arm][metric], dtype=float)))

    results = Path(__file__).parents[4] / "docs/results"
    sizes = [Evidence.read(results / f"size/{preset}.json") for preset in ("strong-30k", "strong", "strong-400k")]
    worlds = [Evidence.read(results / f"map/{preset}.json") for preset in ("sparse", "persona-20", "strong")]

    (ax,) = axes(questions.fronts_figure, worlds[:1])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("exploit fires, held-out modes", "solve, all modes")
    shown = means(ax)
    assert {"filter-canary-run", "filter-full", "penalty-act"} <= shown.keys()
    for arm, point in shown.items():
        assert same(point, [[mean_of(worlds[0], arm, metric) for metric in (EXPLOIT, SOLVE)]]), arm
    path = [[mean_of(worlds[0], arm, metric) for metric in (EXPLOIT, SOLVE)] for arm in PATH if arm in worlds[0].values]
    assert same(next(line for line in ax.lines if line.get_label() == "ordinary training, by steps").get_xydata(), path)

    for draw, every in ((questions.size_figure, sizes), (questions.map_figure, worlds)):
        exploits, solves = axes(draw, every)
        assert exploits.get_title().startswith("exploit fires, held-out modes")
        assert solves.get_title().startswith("solve, all modes")
        for ax, metric in ((exploits, EXPLOIT), (solves, SOLVE)):
            assert "filter-canary-run" in means(ax)
            for arm, points in means(ax).items():
                assert same(points[:, 1], [mean_of(evidence, arm, metric) for evidence in every if arm in evidence.values]), arm

    one = Evidence.read(results / "sign/strong.json")
    (ax,) = axes(questions.sign_figure, [one])
    assert same(dots(ax)["canary-run-early"], questions.signs(one, "canary-run-early"))
    assert same(ax.lines[0].get_xdata(), [questions.LOUD, questions.LOUD])
    one = Evidence.read(results / "canary/strong.json")
    (ax,) = axes(questions.coverage_figure, [one])
    assert same(dots(ax)["canary-one: 3 checkpoints"], [point[2:] for point in questions.coverage(one, "canary-one")])
    (ax,) = axes(questions.recall_figure, [one])
    assert same(dots(ax)["ten pairs"], questions.recalls(one, "ten pairs"))
    one = Evidence.read(results / "lessons/weak.json")
    (ax,) = axes(questions.lessons_figure, [one])
    starts, ends = one.values["taught-honest-1"][SOLVE], one.values["taught-honest"][EXPLOIT]
    assert same(dots(ax)["taught-honest"], np.transpose([starts, ends]))


def test_the_report_of_real_folders_is_read_again_and_drawn(tmp_path: Path) -> None:
    root = write_study(tmp_path / "strong-0123abcd", ("base", "vanilla", "filter-full", "filter-known"), seeds=(0, 1, 2), steps=3)
    (tmp_path / "out").mkdir()
    for name in ("strong-tests.md", "weak.json", "weak.md", "weak-tests.md", "map.md", "map.png", "lessons.png", "fronts.png"):
        (tmp_path / "out" / name).write_text("of another report")
    written = {path.name for path in write_evidence({root: (0, 1)}, tmp_path / "out")}
    assert Evidence.read(tmp_path / "out/strong.json").seeds == (0, 1)  # and not 2, which was run to try something out
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    written = {path.name for path in write_evidence({root: (0, 1, 2)}, tmp_path / "out")}
    assert written == {"strong.json", "strong.md", "strong-recall.md", "fronts.png", "recall.png"}
    again, runs = Evidence.read(tmp_path / "out/strong.json"), load_runs(root)
    assert again.values == collect(runs).values
    assert again.summary("vanilla", "deploy_exploit_held")["mean"] == pytest.approx(
        np.mean([[run.modes[m]["deploy"]["exploit"] for m in runs.modes.held_out] for run in runs.of("vanilla").values()])
    )
    twin = write_study(tmp_path / "twin/strong-0123abcd", ("base", "vanilla"), seeds=(0, 1), steps=3)
    with pytest.raises(ValueError, match="two reports are of one preset"):
        write_evidence({root: (0, 1), twin: (0, 1)}, tmp_path / "out")
    with pytest.raises(ValueError, match=r"has no report of a preset: give a folder that `evidence` wrote"):
        write_evidence({root: (0, 1)}, tmp_path / "out", beside=[tmp_path])
    with pytest.raises(ValueError, match="two reports are of one preset"):
        write_evidence({root: (0, 1)}, tmp_path / "out", beside=[tmp_path / "out"])
    (others := tmp_path / "other sizes").mkdir()
    for name in ("strong-30k", "strong-400k"):
        (others / f"{name}.json").write_text(compact(asdict(replace(again, preset=name))))
    assert {"size.md", "size.png"} <= {path.name for path in write_evidence({root: (0, 1)}, tmp_path / "out", beside=[others])}
    with pytest.raises(ValueError, match="stand beside this one, which would replace them"):
        write_evidence({root: (0, 1)}, others, beside=[others])
    (mine := tmp_path / "docs/size.md").parent.mkdir()
    mine.write_text("a page")
    with pytest.raises(ValueError, match=r"size\.md is of no report, and would be replaced: give the report a folder of its own"):
        write_evidence({root: (0, 1)}, tmp_path / "docs", beside=[others])
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["size.md"]
    (tmp_path / "docs/strong.json").touch()  # as of a report that was broken off
    write_evidence({root: (0, 1)}, tmp_path / "docs", beside=[others])
    assert mine.read_text() == (tmp_path / "out/size.md").read_text()
    head = (tmp_path / "out/size.md").read_text().splitlines()[0]
    assert [head.count(f"{n} parameters") for n in ("30,144", "109,440", "415,488")] == [1, 1, 1]
    timings = root / "seed-0/vanilla/timings.jsonl"
    for text, said in (
        ('{"seconds": 1', r"timings\.jsonl, line 1: .*; delete it, and the report gives no time of this run"),
        ("[1]\n", "the seconds of every start"),
        ('{"from": 0, "to": 3, "seconds": -5}\n', "every start"),
    ):
        timings.write_text(text)
        with pytest.raises(ValueError, match=said):
            collect(load_runs(root))
    stopped, killed = '{"from": 0, "to": 2, "seconds": 4.0}\n', '{"from": 2, "to": 3, "seconds": 1.5}\n'
    for text, taken in ((stopped + killed, 5.5), (killed, None), (stopped + '{"from": 3, "to": 3, "seconds": 0.1}\n', None)):
        timings.write_text(text)  # a start that was killed leaves no time of its steps
        assert collect(load_runs(root)).values["vanilla"]["seconds"] == [taken, None, None]
    timings.unlink()
    (tmp_path / "out/strong.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks 'preset'"):
        Evidence.read(tmp_path / "out/strong.json")


def test_a_report_needs_no_ordinary_training(tmp_path: Path) -> None:
    root = write_study(
        tmp_path / "strong-0123abcd", ("base", "filter-full", "filter-known", "absorb", "oracle"), seeds=(0, 1), steps=3
    )
    (tmp_path / "out").mkdir()
    (mine := tmp_path / "out/map.md").write_text("a user's")  # docs is no folder of a report, and has such a page
    written = {path.name for path in write_evidence({root: (0, 1)}, tmp_path / "out")}
    assert written == {"strong.json", "strong.md", "strong-recall.md", "fronts.png", "recall.png"}
    shown = (tmp_path / "out/strong.md").read_text()  # arms of no method are told too, a bound as one
    assert re.findall(r"^\*\*(?:An oracle|Other)\*\*$|^\| (?:absorb|oracle) ", shown, re.M) == [
        "**An oracle**", "| oracle ", "**Other**", "| absorb ",
    ]  # fmt: skip
    assert mine.exists()
    names = ("base", "taught-honest", "taught-honest-1", "taught-8", "taught-8-1")
    found = replace(evidence(), values=dict.fromkeys(names, evidence().values["vanilla"]))
    assert questions.lessons_figure([found], tmp_path / "lessons.png").stat().st_size > 10_000


def test_folders_without_held_out_modes_are_refused(tmp_path: Path) -> None:
    runs = load_runs(write_study(tmp_path / "strong-0123abcd", ("base",), seeds=(0,), steps=1))
    with pytest.raises(ValueError, match=r"compares exploits of held-out modes, .* report .*strong-0123abcd` describes its runs"):
        collect(replace(runs, modes=replace(runs.modes, known=runs.modes.loopholes, held_out=())))


def test_the_command_refuses_what_would_not_be_the_files_experiment(tmp_path: Path) -> None:
    file = Path(__file__).parents[4] / "docs/results/canary/predictions.toml"

    def refused(match: str, file: Path = file, **given: Any) -> None:
        with pytest.raises(ValueError, match=match):
            cli.Evidence(file, **({"out": tmp_path / "runs"} | given))()

    assert cli.Evidence(file.parent / "none" / ".." / file.name, out=tmp_path)._folder == tmp_path / "canary"
    for given in ({"seeds": "120-122"}, {"presets": ("strong",)}):
        refused(r"would replace that of the file's: give it a folder with --to", **given)
    for other in (cli.Evidence(file, to=file), cli.Probes(tmp_path, out=file), cli.Watch(tmp_path, to=file)):
        with pytest.raises(ValueError, match=r"predictions\.toml is a file: give a folder"):
            other()
    refused(r"unknown preset of the file 'wek': did you mean 'weak'", presets=("strong", "wek"), to=tmp_path)
    refused("'' names no seeds: give a number", seeds="", to=tmp_path)  # which are not the file's
    refused("is of the preset strong: leave out --model, --config and --precision", precision="bfloat16")
    of_functions = file.parents[1] / "canary-smollm2/predictions.toml"
    refused("is of a chat model in the world functions: give the model's folder with --model", of_functions)
    mine, other, named = tmp_path / "mine.toml", tmp_path / "predictions.toml", file.read_text(encoding="utf-8")
    mine.write_text(named, encoding="utf-8")  # a report would be written without tests
    refused(r"mine\.toml: a report names predictions\.toml as the file of its predictions: rename it", mine)
    for changed, match in (
        (named.replace('weak = "2d0e', 'weak = "3d0e'), "names other settings of weak than there are now"),
        (named.replace('"deploy_solve"', '"on_solve"', 1), "a report has no on_solve; choose from deploy_exploit_held"),
        (
            re.sub(r"seeds = .*", "seeds = [200, 201, 202]", named),
            r"3 seeds can show none of the 10 differences of strong at alpha = 0\.05: give at least 9",
        ),
    ):
        other.write_text(changed, encoding="utf-8")
        refused(match, other)
    assert not (tmp_path / "runs").exists()


def test_a_report_in_another_folder_is_judged_by_the_predictions_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, to = Path(__file__).parents[4] / "docs/results/canary/predictions.toml", tmp_path / "out"
    write_study(tmp_path / "runs/canary" / get_settings("strong").folder, ("base", "vanilla"), seeds=(200, 999), steps=1)
    monkeypatch.setattr(cli.Run, "__call__", lambda self: None)
    to.mkdir()
    shutil.copy(file.parents[1] / "canary-run/predictions.toml", to)  # of another experiment
    cli.Evidence(file, presets=("strong",), out=tmp_path / "runs", to=to)()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (to / "strong-tests.md").read_text()
    cli.Evidence(file, presets=("strong",), seeds="200,999", out=tmp_path / "runs", to=to)()
    assert not (to / "strong-tests.md").exists()


def test_an_arm_is_compared_with_early_stopping_on_its_own_seeds() -> None:
    found = evidence()
    of_one_seed = {key: [None, value] for key, value in (("deploy_exploit_held", 0.25), ("deploy_solve", 0.35))}
    values = {**found.values, "filter-full": {**found.values["filter-canary"], **of_one_seed}}  # at seed 201 alone
    seen = replace(found, values=values)
    assert stopped_inside(seen, "filter-full") == ["vanilla-10"]  # .2 / .4 there; its mean over both seeds is .2 / .5
    values = {**values, "vanilla-10": {**values["vanilla-10"], "deploy_solve": [0.9, 0.3]}}
    assert stopped_inside(replace(found, values=values), "filter-full") == []
    equal = {**found.values, "filter-full": found.values["vanilla-10"]}
    assert stopped_inside(replace(found, values=equal), "filter-full") == ["vanilla-10"]  # no better than stopping is inside
    both = {"deploy_exploit_held": [0.0, 0.25], "deploy_solve": [0.9, 0.35]}  # at both seeds, and the point at the second alone
    point = {key: [None, value] for key, value in (("deploy_exploit_held", 0.2), ("deploy_solve", 0.4))}
    values |= {"filter-full": {**values["filter-full"], **both}, "vanilla-10": {**values["vanilla-10"], **point}}
    assert stopped_inside(replace(found, values=values), "filter-full") == ["vanilla-10"]


def test_runs_that_do_not_differ_have_no_correlation() -> None:
    found = evidence()
    same = found.values["vanilla"]
    values = {"taught-honest": same, "taught-honest-1": same, "taught-8": same, "taught-8-1": same}
    assert questions.lessons_sentence(replace(found, values=values)) == ""
    empty = {key: [None, None] for key in same}
    assert questions.lessons_sentence(replace(found, values=dict.fromkeys(values, empty))) == ""


def test_runs_with_other_pairs_or_of_a_copied_seed_are_not_in_one_table(tmp_path: Path) -> None:
    root = write_study(tmp_path / "strong-0123abcd", ("base", "vanilla"), seeds=(0, 1), steps=3)
    shutil.copytree(root / "seed-1", root / "seed-01")
    assert load_runs(root).seeds == (0, 1)
    shutil.rmtree(root / "seed-01")
    for arm in ("base", "vanilla"):
        path = root / "seed-1" / arm / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pairs_sha256": "ab" * 32}))
    with pytest.raises(ValueError, match=r"different pairs or backends.*--out of its own"):
        load_runs(root)
    with pytest.raises(ValueError, match=r"was run with \{'pairs_sha256'.*the usual ones: give this an --out"):
        refuse_mixed(root, {})
    own = load_runs(root, {1})
    assert folder_name(own) == f"{get_settings('strong').folder}-pairs-abababab"
    assert command(own).endswith(f"--pairs {'ab' * 32}")
