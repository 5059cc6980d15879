"""Probes over training: one table and figure of several policies, each probed once, from what the probe command measures."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from tiny_study import tiny_job
from titles import saved_titles, untitled

from mi_route2.validation import write_json
from studies.common.stats import mean
from studies.common.tables import UNDEFINED, interval, number
from studies.environments.micro.language import HELD_OUT
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.settings import get_world
from studies.environments.micro.world import MicroWitness
from studies.environments.protocol import Modes, Samples, Verdict, write_pairs
from studies.route2 import probing, watching
from studies.route2.cli import Watch as Command
from studies.route2.probing import Probed, probe, probe_job
from studies.route2.watching import Watch, shown, table, write_watch
from studies.training.arms import ARMS
from studies.training.job import FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.run import run_job

pytestmark = pytest.mark.study
PER_MODE = 60
NAMES = [f"{layer} {kind}" for layer in ("blocks.1", "gradient") for kind in watching.STYLES]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[Job]:
    folder = tmp_path_factory.mktemp("watched")
    jobs = [tiny_job(folder, replace(ARMS[name], steps=2), cache=cache) for name in ("vanilla-5", "vanilla")]
    for job in jobs:
        run_job(job)
    return jobs


@pytest.fixture(autouse=True)
def labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other rollout is a hack: the tiny policy itself hacks too rarely."""

    def judge(self: MicroWitness, samples: Samples) -> list[Verdict]:
        return [Verdict(False, hack, hack, {}) for hack in (len(text) % 2 == 0 for text in samples.completions)]

    monkeypatch.setattr(MicroWitness, "judge", judge)


@functools.cache
def probed_once(job: Job) -> Probed:
    return probe(job, PER_MODE, False, ("rollout",))


def test_the_table_and_the_figure_are_what_the_probes_measured_once_unless_under_other_settings(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    def once(job: Job, per_mode: int, *rest: object) -> Probed:
        """Numbers of other settings are asked for too, and are those of ``PER_MODE``."""
        calls.append((job.name, per_mode))
        assert rest == (False, ("rollout",))  # as ``probed_once`` has them
        return probed_once(job)

    monkeypatch.setattr(watching, "probe", once)
    to, preset = tmp_path / "out", jobs[0].settings.preset
    write_watch(jobs[:1], PER_MODE + 1, 1, tmp_path / "other settings")
    write_watch(jobs[:1], PER_MODE, 1, tmp_path / "one arm")
    assert calls == [("vanilla-5", PER_MODE + 1), ("vanilla-5", PER_MODE)]
    with saved_titles() as seen:
        written = {path.name for path in write_watch(jobs, PER_MODE, 1, to)}
    assert calls[2:] == [("vanilla", PER_MODE)]
    assert written == {f"{preset}-watch.{kind}" for kind in ("json", "md", "png")}
    assert [len(seen), untitled(seen, preset)] == [1, []]
    watch = Watch.read(to / f"{preset}-watch.json")
    rows = probed_once(jobs[0]).rows()
    for layer, name in (("blocks.1", "lda"), ("gradient", "logistic"), ("gradient", "direction")):
        same = [row for row in rows if (row["layer"], row["probe"]) == (layer, name)]
        held = [row for row in same if not row["known"]]
        assert len(held) == 3
        values = watch.values["vanilla-5"][f"{layer} {name}"]
        assert values["known"] == [next(row["auroc"] for row in same if row["known"])]
        for column, key in (("held", "auroc"), ("random", "random_p95"), ("ece", "ece")):
            assert values[column] == [pytest.approx(np.mean([row[key] for row in held]))]
        single = {name: value for name, value in values.items() if name.startswith("held out: ")}
        assert single == {f"held out: {row['mode']}": [row["auroc"]] for row in held}
        assert watch.modes("vanilla-5", f"{layer} {name}") == ""  # every mode has both classes
    assert list(shown(watch)) == ["blocks.1", "gradient"]
    line = next(line for line in table(watch).splitlines() if "gradient" in line and "lda" in line)
    cells = [cell.strip() for cell in line.split("|")[3:-1]]
    assert cells == [
        text
        for arm in ("vanilla-5", "vanilla")
        for text in (
            number(watch.summary(arm, "gradient lda", "known")["mean"]),
            interval(watch.summary(arm, "gradient lda", "held")),
        )
    ] + [number(watch.summary("vanilla", "gradient lda", "ece")["mean"])]


def test_a_run_that_was_made_again_is_probed_again(jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other code, which is no part of a run's identity: its folder was deleted, and the one of the numbers was not."""
    calls: list[str] = []
    monkeypatch.setattr(watching, "probe", lambda job, *rest: (calls.append(job.name), probed_once(jobs[0]))[1])
    job = replace(jobs[0], root=tmp_path / jobs[0].root.name)
    shutil.copytree(jobs[0].folder, job.folder)
    for _ in range(2):
        write_watch([job], PER_MODE, 1, tmp_path / "out")
    assert calls == [job.name]
    manifest = json.loads((job.folder / MANIFEST).read_text())
    manifest["checksums"][FULL] = "0" * 64
    write_json(job.folder / MANIFEST, manifest)
    for _ in range(2):
        write_watch([job], PER_MODE, 1, tmp_path / "out")
    assert calls == [job.name] * 2
    (part,) = (job.root / "watch").iterdir()
    stored = json.loads(part.read_text())
    del stored["modes"]  # as an earlier version wrote it, of the means alone
    write_json(part, stored)
    for _ in range(2):
        write_watch([job], PER_MODE, 1, tmp_path / "out")
    assert calls == [job.name] * 3
    (job.folder / MANIFEST).unlink()
    monkeypatch.setattr(watching, "probe", probe)
    with pytest.raises(ValueError, match="is not finished: run the arm to its end first"):
        write_watch([job], PER_MODE, 1, tmp_path / "out")


def test_the_table_counts_the_seeds_of_each_mean() -> None:
    held: dict[str, list[float | None]] = {"vanilla-5": [0.5, 0.6], "vanilla-10": [0.5, None], "vanilla": [None, None]}
    columns = {arm: {"known": [0.9, 0.7], "held": means, "random": means, "ece": means} for arm, means in held.items()}
    watch = Watch("none", PER_MODE, (0, 1), {arm: dict.fromkeys(NAMES, own) for arm, own in columns.items()})
    header, *_ = table(watch).splitlines()
    assert [cell.strip() for cell in header.split("|")[3:-2]] == [
        "vanilla-5, n 2: known", "held out", "vanilla-10, n 2: known", "held out, n 1", "vanilla, n 2: known", "held out, n 0",
    ]  # fmt: skip


def test_table_and_figure_say_of_how_many_modes_the_mean_of_a_seed_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode without a hack, or without a clean rollout, has no AUROC, and the modes that have one change as the policy learns."""
    drawn: list[Figure] = []
    monkeypatch.setattr(watching, "save_figure", lambda figure, path: (drawn.append(figure), path)[1])
    single: dict[str, list[list[float | None]]] = {  # of three seeds, by mode
        "vanilla-5": [[0.5, 0.6, None], [0.7, 0.8, None], [0.9, 0.4, None]],  # all modes of two seeds; the third hacks too rarely
        "vanilla-10": [[0.5, 0.6, 0.7], [None, None, 0.5], [0.9, None, 0.6]],
        "vanilla": [[0.5, 0.6, None], [None, None, None], [0.7, 0.8, None]],
    }

    def columns(modes: list[list[float | None]]) -> dict[str, list[float | None]]:
        means = [mean(seed) for seed in zip(*modes)]
        each = {f"held out: {mode}": values for mode, values in zip(HELD_OUT, modes, strict=True)}
        return {"known": means, "held": means, "random": means, "ece": means, **each}

    watch = Watch("strong", PER_MODE, (0, 1, 2), {arm: dict.fromkeys(NAMES, columns(modes)) for arm, modes in single.items()})
    header, *_ = table(watch).splitlines()
    assert [cell.strip() for cell in header.split("|")[3:-2]] == [
        "vanilla-5, n 2: known", "held out",
        "vanilla-10, n 3: known", "held out, 1 to 3 of 3 modes",
        "vanilla, n 2: known", "held out, 2 of 3 modes",
    ]  # fmt: skip
    watching.figure(watch, tmp_path / "watch.png")
    for axes in drawn[0].axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["5", "10\n1 to 3 of 3 modes", "all\n2 of 3 modes"]


def test_the_figure_draws_the_held_out_means_with_their_intervals_beside_the_random_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(watching, "save_figure", lambda figure, path: (drawn.append(figure), path)[1])
    arms = ("vanilla-5", "vanilla-10", "vanilla", "vanilla-slow")
    for asked in (arms[:3], arms[:1], arms):
        values = {
            arm: {
                f"{layer} {kind}": {
                    "known": [0.99, 0.98],
                    "held": [0.5 + arms.index(arm) / 10, 0.6 + place / 50],
                    "random": [0.7 + arms.index(arm) / 50] * 2,
                    "ece": [0.2, 0.3],
                }
                for place, (layer, kind) in enumerate((a, b) for a in ("blocks.0", "blocks.1", "gradient") for b in watching.STYLES)
            }
            for arm in asked
        }
        watch = Watch("strong", PER_MODE, (0, 1), values)
        watching.figure(watch, tmp_path / "watch.png")
        for axes, layer in zip(drawn[-1].axes, ("blocks.1", "gradient"), strict=True):
            assert layer.replace("gradient", "fingerprints") in axes.get_title()
            ordinary = "vanilla-slow" not in asked
            names = ["5", "10", "all"][: len(asked)] if ordinary else list(arms)
            assert [label.get_text() for label in axes.get_xticklabels()] == names
            assert axes.get_xlabel() == ("steps of ordinary training" if ordinary else "arm")
            lines = {bars.get_label(): bars for bars in axes.containers}
            assert list(lines) == list(watching.STYLES)
            for kind, bars in lines.items():
                each = [watch.summary(arm, f"{layer} {kind}", "held") for arm in asked]
                line, _, (spans,) = bars  # pyright: ignore[reportGeneralTypeIssues]
                assert line.get_ydata().tolist() == pytest.approx([one["mean"] for one in each])
                ends = [(one["lo"], one["hi"]) for one in each]
                assert [tuple(segment[:, 1]) for segment in spans.get_segments()] == [pytest.approx(end) for end in ends]
            (band,) = (line for line in axes.lines if str(line.get_label()).startswith("random"))
            assert list(dict.fromkeys(np.asarray(band.get_ydata()).tolist())) == pytest.approx(
                [0.7, 0.72, 0.74, 0.76][: len(asked)]
            )
            assert np.ptp(np.asarray(band.get_xdata())) > 0
        assert drawn[-1].axes[0].get_ylabel() == "AUROC, held-out modes"


def test_a_second_known_mode_is_not_held_out_and_there_may_be_none(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = replace(probed_once(jobs[0]), modes=Modes(("run_tests", "sentinel"), HELD_OUT[1:]))
    monkeypatch.setattr(watching, "probe", lambda *arguments: probed)
    write_watch(jobs[:1], PER_MODE + 4, 1, tmp_path)
    (held,) = Watch.read(next(tmp_path.glob("*.json"))).values["vanilla-5"]["gradient lda"]["held"]
    rows = [row for row in probed.rows() if (row["layer"], row["probe"]) == ("gradient", "lda") and row["mode"] in HELD_OUT[1:]]
    assert held == pytest.approx(np.mean([row["auroc"] for row in rows]))
    assert len(rows) == 2
    known = {which: replace(result, rows=[row for row in result.rows if row.known]) for which, result in probed.results.items()}
    monkeypatch.setattr(probing, "probe", lambda *arguments: Probed(known, {}, Modes(("run_tests",), ())))
    monkeypatch.setattr(probing, "_figures", lambda *arguments: {})
    probe_job(jobs[0], PER_MODE, tmp_path)
    assert f"| {UNDEFINED} |" in re.sub(" +", " ", (tmp_path / "probes.md").read_text())


def test_a_seed_without_a_hack_is_counted_out_and_wrong_input_is_one_sentence(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: Callable[..., list[Verdict]] = lambda self, samples: [Verdict(True, False, False, {}) for _ in samples.completions]  # noqa: E731
    monkeypatch.setattr(MicroWitness, "judge", honest)
    with pytest.raises(ValueError, match="no policy of vanilla hacks at times: choose other arms or seeds, or a larger --per-mode"):
        write_watch(jobs[1:], PER_MODE + 3, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="per-mode must be at least 40, not 39"):
        Command(jobs[0].root, per_mode=39)()
    with pytest.raises(ValueError, match="is not finished: run the arm to its end first"):
        write_watch([replace(jobs[0], arm=ARMS["absorb"])], PER_MODE, 1, tmp_path / "out")
    (tmp_path / "watch.json").write_text(json.dumps({"preset": "strong"}))
    with pytest.raises(ValueError, match="lacks 'per_mode'"):
        Watch.read(tmp_path / "watch.json")


def test_runs_with_pairs_of_ones_own_are_watched_with_the_same_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(make_pairs(get_world("strong"), 1, 4), mine := tmp_path / "mine.toml")
    job = replace(tiny_job(tmp_path, "vanilla"), pairs=mine)
    job.folder.mkdir(parents=True)
    write_json(job.root / "settings.json", job.settings.as_dict())
    empty: dict[str, dict[str, str]] = {"arm_spec": {}, "versions": {}, "platform": {}, "checksums": {}}
    said = {"arm": "vanilla", "seed": 0, "status": "finished", "identity": job.identity, "settings_hash": job.settings.digest}
    write_json(job.folder / MANIFEST, {**said, **empty, "pairs_sha256": job.pairs_hash})
    monkeypatch.setattr(watching, "write_watch", lambda jobs, *_: [str(one.finished) for one in jobs])
    Command(job.root, ("vanilla",), "0-0", pairs=mine)()
    with pytest.raises(ValueError, match=r"give the --pairs that it was made with"):
        Command(job.root, ("vanilla",), "0-0")()
