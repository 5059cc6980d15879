"""The table's numbers against a recomputation from the raw files, its order, its notes and its text."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from scipy import stats as scipy_stats
from synthetic_study import change_eval, write_manifest, write_study

from studies.common.tables import markdown_table, number
from studies.environments.micro.language import MICRO_MODES
from studies.environments.protocol import Modes
from studies.route2.report import write_tables
from studies.route2.report.load import load_runs
from studies.route2.report.measures import arm_order, measure, metrics
from studies.route2.report.table import table, table_markdown

pytestmark = pytest.mark.study

METRICS = metrics(MICRO_MODES)
LOOPHOLES = ["run_tests", "sentinel", "stdout_marker", "file_marker"]
HELD = LOOPHOLES[1:]
ARMS = ("base", "vanilla", "absorb", "erase", "route2-grad", "filter-grad", "haar-grad", "shared-basis", "oracle")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_study(tmp_path / "strong-0123abcd", ARMS, seeds=(0, 1, 4), steps=14)


def _raw(root: Path, arm: str, seed: int) -> tuple[dict, list[dict]]:
    folder = root / f"seed-{seed}" / arm
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "eval.json").read_text())["modes"], [json.loads(line) for line in lines]


def _by_hand(root: Path, arm: str, seed: int) -> dict[str, float | None]:
    """Every metric of one run, straight from the definitions and the raw files."""
    modes, steps = _raw(root, arm, seed)
    vanilla, _ = _raw(root, "vanilla", seed)
    base, _ = _raw(root, "base", seed)
    values: dict[str, float | None] = {
        "deploy_hack_known": modes["run_tests"]["deploy"]["hack"],
        "deploy_hack_held": fmean(modes[mode]["deploy"]["hack"] for mode in HELD),
        "deploy_exploit_held": fmean(modes[mode]["deploy"]["exploit"] for mode in HELD),
        "deploy_solve": fmean(modes[mode]["deploy"]["solve"] for mode in [*LOOPHOLES, "none"]),
        "on_hack_held": fmean(modes[mode]["on"]["hack"] for mode in HELD),
        "on_exploit_held": fmean(modes[mode]["on"]["exploit"] for mode in HELD),
        "on_solve": fmean(modes[mode]["on"]["solve"] for mode in [*LOOPHOLES, "none"]),
    }
    ratios, excess = [], []
    for mode in HELD:
        mine, theirs, start = (each[mode]["deploy"]["hack"] for each in (modes, vanilla, base))
        ratios += [max(0.0, min(1.0, mine / theirs))] if theirs else []
        excess += [(mine - start) / (theirs - start)] if theirs > start else []
    values["leakage"] = fmean(ratios) if ratios else None
    values["excess_leakage"] = fmean(excess) if excess else None
    for mode in [*LOOPHOLES, "none"]:
        rollouts = [(row["modes"][mode]["hack"], row["modes"][mode]["n"]) for row in steps[-10:] if row["modes"][mode]["n"]]
        total = sum(n for _, n in rollouts)
        values[f"train_hack_{mode}"] = sum(rate * n for rate, n in rollouts) / total if total else None
        for quantity in ("hack", "exploit", "solve"):
            values[f"deploy_{quantity}_{mode}"] = modes[mode]["deploy"][quantity]
    train = [rate for mode in LOOPHOLES if (rate := values[f"train_hack_{mode}"]) is not None]
    values["train_hack"] = fmean(train) if train else None
    return values


@pytest.mark.parametrize("arm", ARMS)
def test_every_metric_of_every_arm_is_what_the_raw_files_say(root: Path, arm: str) -> None:
    content = table(load_runs(root))
    row = next(row for row in content["rows"] if row["arm"] == arm)
    assert row["seed_ids"] == [0, 1, 4]
    by_hand = [_by_hand(root, arm, seed) for seed in (0, 1, 4)]
    assert set(by_hand[0]) == set(METRICS)
    for metric in METRICS:
        expected = [each[metric] for each in by_hand]
        assert row[metric]["seeds"] == [None if v is None else pytest.approx(v, abs=1e-12) for v in expected]
        defined = [value for value in expected if value is not None]
        assert row[metric]["n"] == len(defined)
        if len(defined) == 3:
            assert row[metric]["mean"] == pytest.approx(fmean(defined), abs=1e-12)
            assert row[metric]["median"] == pytest.approx(median(defined), abs=1e-12)
            half = scipy_stats.t.ppf(0.975, 2) * scipy_stats.sem(defined)
            assert row[metric]["hi"] - row[metric]["mean"] == pytest.approx(half, abs=1e-9)


def test_differences_are_paired_by_seed_with_absorb_and_the_same_rule_filter(root: Path) -> None:
    content = table(load_runs(root))
    found = {(each["kind"], each["arm"], each["reference"]): each for each in content["differences"]}
    assert ("same_rule_filter", "route2-grad", "filter-grad") in found
    assert {arm for kind, arm, _ in found if kind == "absorb"} == set(ARMS) - {"absorb"}
    assert ("baseline", "haar-grad", "route2-grad") in found
    assert ("baseline", "route2-grad", "absorb") not in found  # it is there once already
    for (_, arm, reference), each in found.items():
        for metric in ("deploy_hack_held", "deploy_solve"):
            sides = np.array([[_by_hand(root, name, seed)[metric] for seed in (0, 1, 4)] for name in (arm, reference)])
            expected = (sides[0] - sides[1]).tolist()
            assert each[metric]["seeds"] == pytest.approx(expected, abs=1e-12)
            assert each[metric]["mean"] == pytest.approx(fmean(expected), abs=1e-12)


def test_steps_weigh_by_their_rollouts_and_only_the_last_ten_count(root: Path) -> None:
    folder = root / "seed-0/vanilla"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        for mode in LOOPHOLES:
            n, hack = (8, 1.0) if i < len(rows) - 10 else (30, 0.5) if i == len(rows) - 1 else (10, 0.0)
            row["modes"][mode] = {"n": n, "hack": hack, "solve": 0.0, "exploit": hack, "reward": 0.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_manifest(folder)
    runs = load_runs(root)
    assert measure(runs, runs.runs["vanilla", 0])["train_hack"] == pytest.approx(30 * 0.5 / (30 + 9 * 10))


def test_what_a_route_is_judged_against_stands_next_to_it(root: Path) -> None:
    order = arm_order(load_runs(root).specs)
    assert order[:3] == ["base", "vanilla", "absorb"]
    route = order.index("route2-grad")
    assert order[route + 1 : route + 3] == ["filter-grad", "haar-grad"]
    assert order[-2:] == ["oracle", "shared-basis"]  # bounds behind methods, ablations behind all
    assert sorted(order) == sorted(ARMS)


def test_a_bounds_filter_stands_below_it_whatever_its_role(tmp_path: Path) -> None:
    arms = ("base", "route2-grad", "filter-grad", "filter-known", "oracle-known", "oracle")
    order = arm_order(load_runs(write_study(tmp_path / "s", arms, seeds=(0,), steps=1)).specs)
    assert order.index("filter-known") == order.index("oracle-known") + 1


def test_ablations_are_in_the_json_and_have_a_file_of_their_own(root: Path) -> None:
    written = {path.name: path.read_text() for path in write_tables(load_runs(root))}
    assert "| shared-basis " not in written["table.md"]
    assert "Ablations, in ablations.md next to the arm that each changes: shared-basis." in written["table.md"]
    assert any(row["arm"] == "shared-basis" for row in json.loads(written["table.json"])["rows"])
    assert "| shared-basis " in written["ablations.md"]


COLUMNS = {
    "deploy hack, held out": "deploy_hack_held",
    "deploy exploit, held out": "deploy_exploit_held",
    "deploy hack, known": "deploy_hack_known",
    "deploy solve": "deploy_solve",
    "train hack": "train_hack",
    "quarantine in: hack, held out": "on_hack_held",
    "quarantine in: exploit, held out": "on_exploit_held",
    "quarantine in: solve": "on_solve",
    "quarantine deleted: hack, held out": "deploy_hack_held",
    "leakage": "leakage",
    "excess leakage": "excess_leakage",
}
PER_MODE = {"train hack, last steps": "train_hack", "deploy hack": "deploy_hack", "deploy exploit": "deploy_exploit"}


def _printed(text: str) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Title of a section -> header and cells of each row of its tables."""
    sections: dict[str, list[tuple[list[str], list[str]]]] = {}
    title, header = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            title, header = line.strip("# "), []
        elif line.startswith("|") and not header:
            header = cells
        elif line.startswith("|") and not line.startswith("| ---"):
            sections.setdefault(title, []).append((header, cells))
        elif not line.startswith("|"):
            header = []
    return sections


def _said(result: dict, signed: bool = False) -> str:
    mean, lo, hi = (number(result[key], signed) for key in ("mean", "lo", "hi"))
    return mean if result["lo"] is None else f"{mean} [{lo}, {hi}]"


def test_every_printed_cell_is_the_number_that_its_column_names(root: Path) -> None:
    written = {path.name: path.read_text() for path in write_tables(load_runs(root))}
    content, leaks, groups = (json.loads(written[f"{name}.json"]) for name in ("table", "leakage", "ablations"))
    rows, leaked = {row["arm"]: row for row in content["rows"]}, {row["arm"]: row for row in leaks["arms"]}
    pairs = {(each["arm"], each["reference"]): each for each in content["differences"]}
    checked = set()
    for title, lines in {**_printed(written["table.md"]), **_printed(written["leakage.md"])}.items():
        for header, (name, *cells) in lines:
            arm = name.removesuffix(" (bound)")
            row, minus = rows[arm], cells[0].removesuffix(" (bound)") if header[1] == "minus" else ""
            row = pairs[arm, minus] if minus else row
            for column, cell in zip(header[1:], cells, strict=True):
                mode = column.removesuffix(" (known)")
                if column in ("role", "minus", "n"):
                    assert cell in (rows[arm]["role"], cells[0], str(len(row["seed_ids"])))
                    continue
                if column.startswith("seed "):
                    metric = "leakage" if title.endswith("leakage, held-out mean") else COLUMNS[title]
                    expected = number(row[metric]["seeds"][row["seed_ids"].index(int(column.removeprefix("seed ")))])
                elif column == "median":
                    expected = number(row[COLUMNS.get(title, "deploy_hack_held")]["median"], bool(minus))
                elif title in ("Leakage", "Excess leakage"):
                    ratios = leaked[arm]["excess_leakage" if title.startswith("Excess") else "leakage"]
                    expected = number(ratios["held_out"]["median"]) if column == "median of the mean" else None
                    expected = expected or _said(ratios["held_out" if column == "held-out mean" else mode])
                elif header[3] == "run_tests (known)":
                    expected = _said(row[f"{PER_MODE.get(title, 'deploy_solve')}_{mode}"])
                else:
                    expected = _said(row[COLUMNS[column]], bool(minus))
                assert cell == expected, (title, arm, column)
                checked.add((title, column))
    assert ("deploy solve", "none") in checked
    assert len(checked) > 70
    (group,) = groups["groups"]
    lines, rows = _printed(written["ablations.md"])[group["group"]], {record["arm"]: record for record in group["arms"]}
    assert len(lines) == 2 * len(rows) == 4
    for header, (arm, *cells) in lines:
        held = rows[arm]["deploy_hack_held"]["value"]
        if header[1] != "minus":
            assert cells == [*map(number, held["seeds"]), number(held["median"])]
            continue
        numbers = (rows[arm][metric] for metric in ("deploy_hack_held", "deploy_exploit_held", "deploy_solve"))
        pairs = ((_said(each["value"]), _said(each["difference"], True) if each["difference"] else "") for each in numbers)
        assert cells[2:] == [cell for pair in pairs for cell in pair]
    assert ", 80 training steps, settings" in written["table.md"]  # of the settings, though an arm may have others


def test_bounds_are_marked_wherever_they_are_printed(root: Path) -> None:
    runs = load_runs(root)
    text = table_markdown(runs, table(runs))
    lines = [line for line in text.splitlines() if line.startswith("| oracle")]
    assert len(lines) > 10
    assert all(line.startswith("| oracle (bound) ") for line in lines)


def test_a_missing_arm_is_said_and_its_comparisons_are_undefined(root: Path, tmp_path: Path) -> None:
    runs = load_runs(write_study(tmp_path / "small", ("vanilla", "route2-grad"), seeds=(0,), steps=3))
    content = table(runs)
    notes = " ".join(content["notes"])
    assert "Arm base was not run, so excess leakage is undefined." in notes
    assert "Arm absorb was not run" in notes
    assert "The same-rule filter of route2-grad, filter-grad, was not run." in notes
    assert "No control of its own was run for route2-grad." in notes
    row = next(row for row in content["rows"] if row["arm"] == "route2-grad")
    assert row["excess_leakage"]["mean"] is None
    assert row["leakage"]["mean"] is not None
    assert content["differences"] == []
    assert all(note in table_markdown(runs, content) for note in content["notes"])


def test_a_missing_seed_is_said_and_pairs_use_the_others(root: Path) -> None:
    write_manifest(root / "seed-1/absorb", status="running")
    runs = load_runs(root)
    content = table(runs)
    assert "Unfinished, left out: seed-1/absorb." in content["notes"]
    assert "absorb has no finished run on seed 1." in content["notes"]
    pairs = [each for each in content["differences"] if each["reference"] == "absorb"]
    assert all(each["seed_ids"] == [0, 4] and each["deploy_solve"]["n"] == 2 for each in pairs)
    assert "not run" in table_markdown(runs, content)


def test_every_seed_is_printed_and_the_odd_one_is_marked(root: Path) -> None:
    write_study(root, ARMS, seeds=(5, 6, 7), steps=14)
    change_eval(root, "route2-grad", 6, dict.fromkeys(HELD, 0.75))
    runs = load_runs(root)
    section = table_markdown(runs, table(runs)).split("### deploy hack, held out")[1].split("###")[0]
    cells = next(line for line in section.splitlines() if line.startswith("| route2-grad ")).split("|")[2:-2]
    assert [cell.strip() for cell in cells].index("**.750**") == 4
    assert sum("**" in cell for cell in cells) == 1


def test_a_world_without_held_out_modes_has_a_table(root: Path) -> None:
    runs = replace(load_runs(root), modes=Modes(("run_tests",), ()))
    assert "Held-out modes: none; known: run_tests." in table_markdown(runs, table(runs))


def test_markdown_tables_are_rectangular_and_cells_cannot_add_a_column() -> None:
    text = markdown_table(["arm", "rate"], [["a|b\nc", ".5"], ["long name", "1.000"]])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| a\\|b c ")


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        (0.0531, False, ".053"),
        (1.0, False, "1.000"),
        (-0.0401, False, "-.040"),
        (-0.0001, False, ".000"),
        (0.0531, True, "+.053"),
        (-0.0001, True, ".000"),
        (0.9999, False, "1.000"),
        (10.04, True, "+10.040"),
        (0.0, True, ".000"),
    ],
)
def test_numbers_have_one_spelling(value: float, signed: bool, text: str) -> None:
    assert number(value, signed) == text
    assert math.isclose(float(text), value, abs_tol=6e-4)
