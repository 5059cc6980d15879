"""Publishing: sentences say what table.json says, nothing is lost in packing, and a folder appears whole or not at all."""

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from synthetic_study import change_eval, write_manifest, write_study
from tiny_study import predictions_file

import studies.route2.headline as figure_module
import studies.route2.publish as publish_module
from studies.common.command_line import read_seeds, seeds_text
from studies.common.publishing import update_pages
from studies.common.tables import number
from studies.environments.micro.language import HELD_OUT
from studies.route2.cli import Publish
from studies.route2.headline import (
    BOUND,
    EARLY,
    HACK,
    QUALITIES,
    ROUTES,
    SHOWN,
    StudyResult,
    headline,
    short,
    tables,
    write_headline_figure,
)
from studies.route2.predictions import FILE, MOST, Predictions
from studies.route2.publish import REPORTS, command, figure_list, mask_quality, publish, unpacked
from studies.route2.report import report_texts, write_tables
from studies.route2.report.load import ArmSpec, FinishedRun, RunSet, load_runs
from studies.training.arms import ARMS as REAL_ARMS
from studies.training.job import Job
from studies.training.settings import changes, get_settings, override

pytestmark = pytest.mark.study

DOCS = Path(__file__).parents[4] / "docs"
NAMED = Predictions.read(DOCS / "results" / FILE)
ARMS = ("base", "vanilla", "absorb", "route2-act", "filter-act", "route2-full", "filter-full", "shuffled", "oracle")


def report(root: Path) -> dict[str, Any]:
    """Tables of the folder, without figures; the content of table.json."""
    write_tables(load_runs(root))
    return json.loads((root / "table.json").read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A synthetic study under the real settings of `strong`, reported."""
    root = write_study(tmp_path / "runs/strong-0123abcd", ARMS, seeds=(0, 1, 2), steps=4)
    report(root)
    return root


def test_a_published_folder_holds_everything_and_is_the_same_bytes_again(root: Path, tmp_path: Path) -> None:
    (root / "training.png").write_bytes(png(np.zeros((4, 4, 4), np.uint8) + 255))
    folder = publish(root, tmp_path / "results")
    assert folder == tmp_path / "results/strong"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    texts = {*REPORTS, "headline.md", "tables.md", "figures.md"}
    assert {*texts, "table.json", "runs.json", "provenance.json", "settings.json", "headline.png", "training.png"} <= set(first)
    publish(root, tmp_path / "results")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["strong"]
    assert str(tmp_path).encode() not in b"".join(first.values())


def test_runs_are_packed_without_loss(root: Path, tmp_path: Path) -> None:
    found = unpacked((publish(root, tmp_path / "results") / "runs.json").read_text())
    assert len(found) == len(ARMS) * 3
    for (arm, seed), (evaluation, manifest) in found.items():
        folder = root / f"seed-{seed}" / arm
        assert evaluation == json.loads((folder / "eval.json").read_text())
        assert manifest == json.loads((folder / "manifest.json").read_text())


def test_published_json_says_what_the_report_says(root: Path, tmp_path: Path) -> None:
    folder = publish(root, tmp_path / "results")
    for name in ("table.json", "leakage.json", "ablations.json"):
        assert json.loads((folder / name).read_text()) == json.loads((root / name).read_text())
        assert (folder / name).stat().st_size <= (root / name).stat().st_size


def test_the_sentences_carry_the_numbers_of_the_table(root: Path) -> None:
    before = headline(StudyResult(report(root)))
    for seed, rate in ((0, 0.5), (1, 0.25), (2, 0.375)):
        change_eval(root, "route2-full", seed, dict.fromkeys(HELD_OUT, rate))
    content = report(root)
    result = StudyResult(content)
    after = headline(result)
    assert "**route2-full**: held-out hack median .375, mean .375 [" in after
    assert "**route2-full**: held-out hack median .375" not in before
    assert re.search(r"\| \*\*route2-full\*\* +\| .* \| +\.375 \|", short([(result, NAMED)]))
    rows = {row["arm"]: row for row in content["rows"]}
    for arm in ARMS:
        if arm.startswith("filter"):
            assert f"{arm} (no quarantine; hack {number(rows[arm][HACK]['mean'])}, " in after
        else:
            assert f"median {number(rows[arm][HACK]['median'])}, mean" in "".join(re.findall(rf"- \*\*{arm}\b.*", after)), arm


def test_published_sentences_are_those_of_the_published_tables() -> None:
    folders = sorted((DOCS / "results").glob("**/headline.md"))
    texts = {path: json.loads(path.with_name("table.json").read_text()) for path in folders if path.with_name("runs.json").exists()}
    assert len(texts) > 5
    for path, content in texts.items():
        result, written = StudyResult(content), path.with_name("tables.md").read_text()
        assert headline(result) == path.read_text()
        assert figure_module._main_table(result) in written
        assert figure_module._filter_table(result) in written
    assert short(publish_module.predicted_results(DOCS / "results")) == (DOCS / "results/short.md").read_text()


def test_results_of_a_preset_are_not_those_of_folders_whose_names_begin_alike(tmp_path: Path) -> None:
    """Of another preset, of runs with other pairs or in another precision, and of a copy."""
    content = json.loads((DOCS / "results/strong-300-307/table.json").read_text())
    named = (DOCS / "results" / FILE).read_text()
    (tmp_path / FILE).write_text(named.replace("[presets]", f'[presets]\nstrong-30k = "{content["settings_hash"]}"'))
    settings, varied = content["settings"], f"strong-{content['settings_hash'][:8]}-bfloat16"
    for folder in (right := ["strong-300-307", "strong-30k-300-307"]) + [varied, "strong-300-307 (copy)"]:
        (tmp_path / folder).mkdir()
        own = settings | {"preset": "strong-30k" if "30k" in folder else "strong", "place": folder}
        (tmp_path / folder / "table.json").write_text(json.dumps(content | {"settings": own}))
    assert [result.settings["place"] for result, _ in publish_module.predicted_results(tmp_path)] == right


def test_every_route_stands_with_absorb_and_its_own_filter_and_bounds_are_marked(root: Path) -> None:
    result = StudyResult(report(root))
    text = headline(result)
    for route in ("route2-act", "route2-full"):
        block = text.partition(f"**{route}**")[2].split("\n- ")[0]
        assert "Against absorb" in block
        assert f"same-rule filter, {REAL_ARMS[route].same_rule_filter} (no quarantine" in block
    assert "**route2-grad**: not run." in text
    for written in (text, short([(result, NAMED)]), tables(result, {}, {}, {})):
        assert not re.search(rf"\b{BOUND}\b(?! \(bound\)| and is no method)(?=[ *|,.])", written.replace("reads the oracle", ""))


def test_the_readme_counts_the_predictions_that_held_and_names_the_others(root: Path, tmp_path: Path) -> None:
    for seed, rate in ((0, 0.5), (1, 0.25), (2, 0.375)):
        change_eval(root, "absorb", seed, dict.fromkeys(HELD_OUT, rate + 0.5))
        change_eval(root, "route2-full", seed, dict.fromkeys(HELD_OUT, rate))
    content = report(root)
    presets, given = {"strong": content["settings_hash"]}, {"seeds": [0, 1, 2], "alpha": 0.3}
    for expect, said in (("less", "1 of 1 predictions held"), ("more", "Not: one (1 the opposite)")):
        file = predictions_file(tmp_path, presets, "route2-full", "absorb", HACK, expect=expect, **given)
        assert said in short([(StudyResult(content), Predictions.read(file))])


def test_named_seeds_get_a_folder_of_their_own_with_their_predictions_and_the_readme(tmp_path: Path) -> None:
    root = write_study(tmp_path / "runs/strong-0123abcd", ARMS, seeds=(300, 301), steps=2)
    content = report(root)
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    named = (DOCS / "results" / FILE).read_text()
    (results / FILE).write_text(named.replace(NAMED.presets["strong"], content["settings_hash"]))
    readme.write_text("<!-- shown: results/short.md -->\n<!-- end of results/short.md -->\n")
    Publish(root, results, readme)()
    said = (results / "strong-300-301/predictions.md").read_text()
    assert Predictions.read(results / FILE).sha256 in said
    assert "| route2-full - absorb " in said
    assert "strong: hack" in readme.read_text()
    before = readme.read_text()
    other = write_study(tmp_path / "other/strong-0123abcd", ARMS, seeds=(300, 999), steps=2)
    report(other)
    Publish(other, results, readme)()
    assert not (results / "strong-300,999/predictions.md").exists()  # one seed was not named
    assert readme.read_text() == before


def test_a_study_with_a_missing_seed_is_provisional(root: Path, tmp_path: Path) -> None:
    whole = write_study(tmp_path / "whole", (*ARMS, "route2-grad", "filter-grad"), seeds=(0, 1), steps=2)
    assert not StudyResult(report(whole)).provisional
    assert "Provisional" not in headline(StudyResult(report(whole)))
    assert StudyResult(report(root)).provisional  # route2-grad was not run
    assert "rovisional" in short([(StudyResult(report(root)), NAMED)])


def test_seeds_that_stand_out_are_listed_with_their_masks(tmp_path: Path) -> None:
    root = write_study(tmp_path / "s", ("base", "route2-full"), seeds=(0, 1, 2, 3), steps=2)
    for seed in range(4):
        change_eval(root, "route2-full", seed, dict.fromkeys(HELD_OUT, 0.75 if seed == 2 else 0.0))
    write_tables(load_runs(root))
    runs = load_runs(root)
    text = tables(StudyResult(json.loads((root / "table.json").read_text())), publish_module.mask_quality(runs), {}, {})
    line = next(line for line in text.splitlines() if re.match(r"\| route2-full +\| +2 \|", line))
    masks = [row["mask"]["auroc"] for row in runs.runs["route2-full", 2].metrics]
    assert number(sum(masks) / len(masks)) in line


def test_more_seeds_than_the_exact_test_takes_are_told_without_its_p(root: Path) -> None:
    content = json.loads((root / "table.json").read_text())
    row, seeds = next(row for row in content["rows"] if row["arm"] == "shuffled"), list(range(MOST + 1))
    many = {
        key: value | {"seeds": [float(seed) for seed in seeds]} if isinstance(value, dict) else value for key, value in row.items()
    }
    result = StudyResult(
        content
        | {"differences": [], "seed_ids": seeds, "rows": [many | {"arm": arm, "seed_ids": seeds} for arm in ("haar", "haar-2")]}
    )
    luck = {(arm, seed): {"auroc": auroc} for arm, auroc in (("haar", 0.4), ("haar-2", 0.6)) for seed in seeds}
    result.rows["haar-2"] = result.rows["haar"] | {HACK: {**result.rows["haar"][HACK], "seeds": [seed + 1.0 for seed in seeds]}}
    assert f"mean 1.000 (n {MOST + 1}, too many for an exact test)" in tables(result, luck, {}, {})


def test_expectations_stand_beside_what_was_measured_in_training_and_after(root: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/prototype.toml").write_text("[strong]\nroute2-act = { hack = 0.111, solve = 0.222 }\n")
    text = (publish(root, tmp_path / "results") / "tables.md").read_text()
    line = text.partition("prototype:\n")[2].splitlines()[-1]
    runs = load_runs(root)
    rates = []
    for run in runs.of("route2-act").values():
        modes = {mode: [each["modes"][mode] for each in run.metrics if each["modes"][mode]["n"]] for mode in run.modes}
        known = [sum(r["n"] * r["solve"] for r in rows) / sum(r["n"] for r in rows) for rows in modes.values() if rows]
        rates.append(sum(known) / len(known))
    assert line.startswith("| route2-act |")
    assert ".111" in line
    assert ".222" in line
    assert line.rstrip(" |").rpartition("|")[2].strip().startswith(number(sum(rates) / len(rates)))


def test_every_table_is_that_of_the_runs_or_nothing_is_published(root: Path, tmp_path: Path) -> None:
    for name in report_texts(load_runs(root)):
        good = (root / name).read_bytes()
        for wrong in (good + b"\n", b"", b"\xff"):
            (root / name).write_bytes(wrong)
            with pytest.raises(ValueError, match=rf"{name} in .* is not that of its runs: `python -m studies.route2 report"):
                publish(root, tmp_path / "results")
        (root / name).write_bytes(good)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("given", [".", "..", "named as the preset"])
def test_changed_settings_do_not_replace_the_presets_results(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    changed = replace(get_settings("strong"), kept_lr=1e-3)
    (root / "settings.json").write_text(json.dumps(changed.as_dict()))
    with pytest.raises(ValueError, match=r"settings.json was changed: its hash is .*, but its runs have 88e860b8"):
        report(root)
    for folder in root.glob("seed-*/*"):
        write_manifest(folder)
    root = root.rename(root.with_name("strong"))
    monkeypatch.chdir(root / ("seed-0" if given == ".." else ""))
    named = Path(given) if given.startswith(".") else root
    report(named)
    other = tmp_path / "results/strong/table.json"
    other.parent.mkdir(parents=True)
    other.touch()
    assert publish(named, tmp_path / "results") == tmp_path / "results" / changed.folder
    assert other.exists()
    assert "--override kept_lr=0.001" in command(load_runs(root))
    assert load_runs(named).root.name == "strong"
    assert Job.of(named, 0, None).cache == root.parent / "warmstarts"


def test_an_arm_that_differs_between_seeds_is_refused(root: Path, tmp_path: Path) -> None:
    spec = json.loads((root / "seed-1/absorb/manifest.json").read_text())["arm_spec"]
    write_manifest(root / "seed-1/absorb", arm_spec={**spec, "route": {"tau": 1}})
    with pytest.raises(ValueError, match="absorb is defined differently on seed 1"):
        publish(root, tmp_path / "results")


def test_the_command_names_these_runs(root: Path) -> None:
    words = shlex.split(command(load_runs(root)))
    at = {name: words.index(name) for name in ("--preset", "--seeds", "--arms")}
    assert words[at["--preset"] + 1] == "strong"
    assert read_seeds(words[at["--seeds"] + 1]) == [0, 1, 2]
    assert set(words[at["--arms"] + 1 :]) == set(ARMS) - {"base"}


@pytest.mark.parametrize("seeds", [[0], [3], [0, 1, 2], [2, 5, 9], [4, 5]])
def test_the_seeds_of_a_command_are_read_back(tmp_path: Path, seeds: list[int]) -> None:
    runs = load_runs(write_study(tmp_path / "s", ("base", "absorb"), seeds=seeds, steps=1))
    words = shlex.split(command(replace(runs, settings=get_settings("strong").as_dict())))
    assert read_seeds(words[words.index("--seeds") + 1]) == seeds
    assert seeds_text(seeds).startswith("seed")


@given(st.integers(1, 500), st.floats(1e-5, 1), st.sampled_from([None, 3]), st.integers(1, 99))
def test_an_override_gives_the_settings_back(steps: int, rate: float, micro: int | None, warm: int) -> None:
    preset = get_settings("strong")
    changed = replace(preset, steps=steps, kept_lr=rate, micro=micro, warm=replace(preset.warm, steps=warm))
    assert override(preset, tuple(changes(changed.as_dict(), preset.as_dict()))) == changed
    assert changes(preset.as_dict(), preset.as_dict()) == []


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def test_the_figure_shows_every_seed_at_its_rate(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(figure_module, "save_figure", lambda figure, path: (kept.append(figure), path)[1])
    content = report(root)
    write_headline_figure(StudyResult(content), tmp_path / "headline.png")
    order = [arm for arm in SHOWN if arm in ARMS]
    rows = {row["arm"]: row for row in content["rows"]}
    for ax, metric in zip(kept[0].axes, (HACK, "deploy_exploit_held", "deploy_solve"), strict=True):
        drawn = np.concatenate([np.asarray(each.get_offsets()) for each in ax.collections])
        expected = [(value, order.index(arm)) for arm in order for value in rows[arm][metric]["seeds"]]
        assert np.array(sorted(drawn.tolist())) == pytest.approx(np.array(sorted(expected)))
        assert [line.get_xdata()[0] for line in ax.lines] == [rows[arm][metric]["median"] for arm in order]  # pyright: ignore
    assert [label.get_text() for label in kept[0].axes[0].get_yticklabels()][-1] == "oracle (bound)"


def test_probes_of_every_probed_run_are_copied_with_their_figures(root: Path, tmp_path: Path) -> None:
    folder = publish(root, tmp_path / "before")
    assert "Not computed" in (folder / "probes.md").read_text()
    for arm, seed in (("vanilla", 0), ("absorb", 1)):
        place = root / f"seed-{seed}" / arm
        (place / "probes.md").write_text(f"# Probes of {arm}, seed {seed}\n\n## As deployed\n")
        (place / "probes-deploy-rollout-residual.png").write_bytes(png(np.zeros((2, 2, 4), np.uint8)))
    shutil.copytree(root / "seed-1", root / "seed-1-before")  # no seed
    folder = publish(root, tmp_path / "after")
    text = (folder / "probes.md").read_text()
    assert re.findall("^#+ .*", text, re.MULTILINE) == [
        "# Probes", "## Probes of vanilla, seed 0", "### As deployed", "## Probes of absorb, seed 1", "### As deployed",
    ]  # fmt: skip
    links = re.findall(r"\]\((\S+)\)", text)
    assert len(links) == 2
    assert all((folder / link).is_file() for link in links)


def test_figures_are_listed_page_by_page(tmp_path: Path) -> None:
    names = (
        "training-10.png",
        "training-3.png",
        "training.png",
        "training-2.png",
        "all_arms_per_mode.png",
        "headline.png",
        "o.png",
    )
    for name in names:
        (tmp_path / name).write_bytes(b"")
    links = re.findall(r"\(results/strong/(\S+)\)", figure_list("strong", tmp_path))
    assert links == ["all_arms_per_mode.png", "training.png", "training-2.png", "training-3.png"]


def test_only_the_blocks_of_a_page_change(tmp_path: Path) -> None:
    page, shown = tmp_path / "README.md", tmp_path / "results/short.md"
    start, end = "<!-- shown: results/short.md -->", "<!-- end of results/short.md -->"
    page.write_text(f"# top\n\n{start}\nold\n{end}\n\nbottom\n")
    with pytest.raises(ValueError, match=r"README\.md shows results/short\.md, which does not exist"):
        update_pages([page])
    shown.parent.mkdir()
    shown.write_text("new \\1\n")
    assert update_pages([page]) == [page]
    assert page.read_text() == f"# top\n\n{start}\n\nnew \\1\n\n{end}\n\nbottom\n"
    assert update_pages([page]) == []
    page.write_text("no block\n")
    assert update_pages([page]) == []


def test_routes_and_their_filters_are_real_arms() -> None:
    for route in ROUTES:
        assert REAL_ARMS[route].same_rule_filter in REAL_ARMS
    assert {arm for arm in SHOWN if arm != "base"} <= REAL_ARMS.keys()


def test_a_masks_quality_is_of_the_first_steps_and_its_rule_of_the_ratio() -> None:
    """A window that slides, a ratio that counts from 1, or a seed among the others would all go unseen in whole reports."""
    masks = [{"mask": {key: float(step >= EARLY) for key in QUALITIES}} for step in range(2 * EARLY)]
    run = FinishedRun("filter-act", 0, Path("filter-act"), ArmSpec("method"), "", masks, {})
    runs = RunSet(Path("strong"), {}, {("filter-act", 0): run})
    assert mask_quality(runs)["filter-act", 0]["auroc"] == 0.0
    assert mask_quality(runs, slice(-EARLY, None))["filter-act", 0]["auroc"] == 1.0
    row = {"arm": "route2-act", "role": "method", "seed_ids": [0, 1, 2]}
    rest = {"settings": {}, "seed_ids": [0, 1, 2], "modes": {"held_out": []}, "differences": [], "unfinished": []}
    result = StudyResult({**rest, "rows": [row]})
    quality = {("route2-act", seed): {"fire_hack": hack, "fire_clean": 0.25} for seed, hack in enumerate((0.75, 0.75, 0.5))}
    line = figure_module._fire_table(result, quality).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["route2-act", ".750", ".250", "2 of 3", "**not met**"]
    seen = {("route2-act", seed): {"auroc": value, "recall": value} for seed, value in enumerate((0.1, 0.8, 0.9))}
    assert figure_module._mask_cells(row, 0, seen) == [".100", ".850", ".100", ".850"]
