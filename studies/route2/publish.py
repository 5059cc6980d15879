"""Publishing: copies the small artifacts of a finished run folder to the docs, docs/results/<preset>/.

    table, leakage, ablations (.md .json)              the report's own files, the JSON without white space
    headline, tables, figures (.md)                    included by the docs, with the run's numbers
    rates.md                                           for a chat model: exploits and solves, seed by seed
    predictions.md                                     for seeds in predictions.toml: expectations and outcomes
    probes.md and its figures                          of every arm and seed that was probed
    headline.png and the report's figures              repacked without loss
    ../short.md                                        headline of README and home page: all presets of those seeds
    runs.json                                          eval.json and manifest.json of every arm and seed
    provenance.json                                    settings hash, versions, seeds, the command, checksums

A folder is named after its preset; seeds other than the development seeds are part of the name. It is replaced atomically.
"""

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mi_route2.files import write_whole
from studies.common.command_line import seeds_argument
from studies.common.publishing import compact, nested, published, update_pages
from studies.common.stats import Summary, mean, summary
from studies.common.tables import markdown_table, number
from studies.route2.headline import (
    DEVELOPMENT,
    EARLY,
    QUALITIES,
    Quality,
    StudyResult,
    headline,
    short,
    tables,
    write_headline_figure,
)
from studies.route2.predictions import FILE, Predictions, outcomes, predictions_markdown
from studies.route2.report import report_texts
from studies.route2.report.load import RunSet, load_runs
from studies.route2.report.measures import arm_order, rate, train_rate
from studies.route2.report.table import table
from studies.training.arms import ARMS
from studies.training.manifest import MANIFEST, read_manifest
from studies.training.settings import CHAT, FIXED, PRESETS, ChatModel, changes

REPORTS = ("table.md", "leakage.md", "ablations.md", "probes.md")
SHORT = "short.md"
JSONS = ("table.json", "leakage.json", "ablations.json")
FIGURES = {
    "all_arms_per_mode": "Train hack, deploy hack and deploy solve of every arm in every mode.",
    "cos_over_time": "Scores of student hacks, student clean rollouts and teachers, fire rates, AUROC and refresh overlap.",
    "training": "Reward, hacking, solving, zero-variance groups and gradient norms over training.",
}
MOST_PAGES = 3  # of one figure; further pages hold ablations and stay in the run folder


def publish_short(folder: Path, readme: Path) -> list[Path]:
    """Write the headline of results that predictions name, beside ``folder``; return it and the pages that show it."""
    if not (folder / "predictions.md").exists():
        return []
    short_text = write_whole(folder.parent / SHORT, short(predicted_results(folder.parent)).encode())
    pages = [*folder.resolve().parent.parent.glob("*.md"), *([readme] if readme.exists() else [])]
    return [short_text, *update_pages(pages)]


def publish(root: Path, to: Path) -> Path:
    """Publish the run folder ``root`` under ``to``; return the new folder.

    Raises:
        ValueError: Runs are broken, the report in ``root`` does not match its runs, or the new folder would replace another thing,
            such as ``root`` itself.
    """
    runs = load_runs(root)
    report, reported = table(runs), report_texts(runs)
    for name, text in reported.items():
        if not (root / name).is_file() or (root / name).read_bytes() != text.encode():
            raise ValueError(
                f"{name} in {root} is not that of its runs: `python -m studies.route2 report {root}` writes the report again"
            )
    place, result = to / folder_name(runs), StudyResult(report)
    texts = {
        "headline.md": headline(result),
        "tables.md": tables(result, mask_quality(runs), trained_solve(runs), prototype_of(to, runs.settings["preset"])),
        "figures.md": figure_list(place.name, root),
        "runs.json": packed(runs),
    }
    if runs.settings["preset"] == CHAT.preset:
        texts["rates.md"] = seed_by_seed(runs)
    if not unusual(runs) and (predictions := predictions_for(to, report)) is not None:
        results = outcomes(predictions, runs.settings["preset"], result.values)
        texts["predictions.md"] = predictions_markdown(predictions, results)
    with published(place, provenance(runs)) as part:
        _copy(runs, reported, part)
        write_headline_figure(result, part / "headline.png")
        for name, text in texts.items():
            (part / name).write_text(text, encoding="utf-8")
    return place


def _copy(runs: RunSet, reported: Mapping[str, str], part: Path) -> None:
    """Write the report's files; a file that the report could not write is replaced by a note."""
    for name in REPORTS:
        missing = f"# {name.removesuffix('.md')}\n\n*Not computed: no run that it needs is here.*\n"
        (part / name).write_text(reported.get(name, missing), encoding="utf-8")
    _copy_probes(runs, part)
    for name in JSONS:
        if name in reported:
            (part / name).write_text(compact(json.loads(reported[name])), encoding="utf-8")
    for path in figures(runs.root):
        shutil.copyfile(path, part / path.name)
    shutil.copyfile(runs.root / "settings.json", part / "settings.json")


def _copy_probes(runs: RunSet, part: Path) -> None:
    """Write probes.md: those of every probed arm and seed, each with its figures of the residual stream."""
    sections = []
    probed = (run.folder / "probes.md" for run in runs.runs.values())  # a copy of a seed's folder under another name is no run
    for source in sorted(path for path in probed if path.exists()):
        name = f"{source.parent.name}-{source.parent.parent.name}"
        sections.append(nested(source.read_text(encoding="utf-8")))
        for figure in sorted(source.parent.glob("probes-*-residual.png")):
            target = f"{name}-{figure.name}"
            shutil.copyfile(figure, part / target)
            sections.append(f"![{figure.stem.replace('-', ' ')}]({target})\n")
    if sections:
        (part / "probes.md").write_text("# Probes\n\n" + "\n".join(sections), encoding="utf-8")


def figures(folder: Path) -> list[Path]:
    """Return the report's figures, page by page, up to ``MOST_PAGES`` of each."""
    pattern, order = re.compile(rf"({'|'.join(FIGURES)})(-(\d+))?\.png"), list(FIGURES)
    matched = [(match, path) for path in folder.glob("*.png") if (match := pattern.fullmatch(path.name))]
    placed = sorted((order.index(match[1]), int(match[3] or 1), path) for match, path in matched)
    return [path for _, page, path in placed if page <= MOST_PAGES]


def figure_list(preset: str, folder: Path) -> str:
    """Return figures.md: each figure of the folder with its caption, with paths relative to the page that includes it."""
    lines = []
    for path in figures(folder):
        stem, _, page = path.stem.partition("-")
        caption = FIGURES[stem].removesuffix(".") + (f" (page {page})." if page else ".")
        lines.append(f"![{caption}](results/{preset}/{path.name})\n\n*{caption}*\n")
    return "\n".join(lines) if lines else "*No figures.*\n"


def seed_by_seed(runs: RunSet) -> str:
    """Return rates.md, for runs of a few seeds: what each deployed model exploits in each mode and solves in the honest one."""
    modes, rows = runs.modes, []
    for arm in arm_order(runs.specs):
        for seed, run in runs.of(arm).items():
            exploits = [number(run.modes[mode]["deploy"]["exploit"]) for mode in modes.loopholes]
            held_out = [number(rate(run, modes.held_out, "exploit", state)) for state in ("deploy", "on")]
            solve = [number(run.modes[modes.honest]["deploy"]["solve"]), number(rate(run, modes.names, "solve"))]
            rows.append((f"`{arm}`", seed, *exploits, *held_out, *solve))
    named = [f"{mode}{' (known)' * (mode in modes.known)}" for mode in modes.loopholes]
    header = ("exploit:", "seed", *named, "held out", "with the quarantine", f"solve: {modes.honest}", "all modes")
    return markdown_table(header, rows)


def mask_quality(runs: RunSet, steps: slice = slice(EARLY)) -> Quality:
    """Return the means of every mask's ``QUALITIES`` over some steps, by default its first ``EARLY``."""
    quality = {}
    for (arm, seed), run in runs.runs.items():
        masks = [row["mask"] for row in run.metrics[steps] if row.get("mask")]
        if masks:
            quality[arm, seed] = {key: mean([mask[key] for mask in masks]) for key in QUALITIES}
    return quality


def trained_solve(runs: RunSet) -> dict[str, Summary]:
    """Return the solve rate of the last steps' training rollouts (both adapters on), averaged over modes, summarized over seeds."""
    summaries = {}
    for arm in runs.specs:
        seeds = [mean([train_rate(run, mode, "solve") for mode in runs.modes.names]) for run in runs.of(arm).values()]
        if any(value is not None for value in seeds):
            summaries[arm] = summary(seeds)
    return summaries


def prototype_of(to: Path, preset: str) -> dict[str, dict[str, float]]:
    """Return the prototype's measurements from prototype.toml beside the results; empty if there is no such file."""
    path = to / "prototype.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).get(preset, {}) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore it from the repository") from error


def predictions_for(to: Path, report: Mapping[str, Any]) -> Predictions | None:
    """Return the predictions of predictions.toml beside the results; ``None`` if they are for other settings or seeds."""
    path = to / FILE
    predictions = Predictions.read(path) if path.exists() else None
    named = predictions is not None and predictions.apply_to(
        report["settings"]["preset"], report["settings_hash"], report["seed_ids"]
    )
    return predictions if named else None


def predicted_results(to: Path) -> list[tuple[StudyResult, Predictions]]:
    """Return the published results of seeds that predictions name, in the order of the presets: of each, that with most seeds."""
    predicted = []
    for preset in PRESETS:
        named = []
        for path in sorted(to.glob(f"{preset}-*/table.json")):
            report = json.loads(path.read_text(encoding="utf-8"))
            if path.parent.name != f"{preset}-{seeds_argument(report['seed_ids'])}":  # strong-30k's, or other pairs or backends
                continue
            if (predictions := predictions_for(to, report)) is not None:
                named.append((len(report["seed_ids"]), StudyResult(report), predictions))
        predicted += [(result, predictions) for _, result, predictions in sorted(named, key=lambda each: each[0])[-1:]]
    return predicted


def provenance(runs: RunSet) -> dict[str, Any]:
    """Return the origin of the folder's numbers: settings, versions, seeds and the command."""
    manifests = [read_manifest(run.folder) for run in runs.runs.values()]
    versions = sorted({json.dumps(manifest.versions, sort_keys=True) for manifest in manifests})
    platforms = sorted({json.dumps(manifest.platform, sort_keys=True) for manifest in manifests})
    return {
        "study": runs.root.name,
        "settings_hash": next(iter(runs.runs.values())).settings_hash,
        "versions": [json.loads(each) for each in versions],
        "platforms": [json.loads(each) for each in platforms],
        "seeds": list(runs.seeds),
        "arms": sorted({arm for arm, _ in runs.runs}),
        "unfinished": list(runs.unfinished),
        "command": command(runs),
    }


def folder_name(runs: RunSet) -> str:
    """Return the preset's name, with the seeds if they are not the development seeds (``strong-300-307``).

    If settings, pairs or backend are not the preset's, it is the name under which ``run`` makes the folder, so
    that a variation does not replace the preset's results, whatever the folder is called now. Runs of a chat model are named after
    its problem.
    """
    name = str(runs.settings.get("preset"))
    if name == CHAT.preset:
        name = runs.settings["world"].rpartition(":")[2].rpartition(".")[2].lower()
    elif name not in PRESETS:
        raise ValueError(f"{runs.root}/settings.json names no preset of this study: choose a run folder of {', '.join(PRESETS)}")
    if name not in PRESETS or unusual(runs) or changes(runs.settings, PRESETS[name].as_dict()):
        others = {key: f"pairs-{value[:8]}" if key == "pairs_sha256" else value for key, value in unusual(runs).items()}
        return "-".join([name, next(iter(runs.runs.values())).settings_hash[:8], *others.values()])
    return name if set(runs.seeds) <= set(DEVELOPMENT) else f"{name}-{seeds_argument(runs.seeds)}"


def unusual(runs: RunSet) -> dict[str, str]:
    """Return what all of the runs have beside the defaults of pairs and backend."""
    return next(iter(runs.runs.values())).unusual


def command(runs: RunSet) -> str:
    """Return the command line that makes these runs; of the user's own pairs it has the hash."""
    run_arms = {arm for arm, _ in runs.runs} - {"base"}
    arms = [arm for arm in ARMS if arm in run_arms] + sorted(run_arms - ARMS.keys())
    chosen, usual, settings = f"--preset {runs.settings['preset']}", CHAT.as_dict(), dict(runs.settings)
    if (chat := settings.pop("chat", None)) is None:
        usual = PRESETS[settings["preset"]].as_dict()
    else:
        fixed = {"world": settings["world"], "chat": {name: chat[name] for name in FIXED}}
        usual |= fixed | {"chat": ChatModel(**fixed["chat"]).__dict__}
        settings["chat"] = chat
        places = {"model": Path(chat["path"]).name, "world": settings["world"], "data": Path(chat["data"]).name}
        chosen = " ".join(f"--{name} {shlex.quote(place)}" for name, place in places.items() if place)
    changed = changes(settings, usual)
    override = f" --override {shlex.join(changed)}" if changed else ""
    given = {name.replace("pairs_sha256", "pairs"): value for name, value in unusual(runs).items()}
    override += "".join(f" --{name} {value}" for name, value in given.items())
    return f"python -m studies.route2 run {chosen} --seeds {seeds_argument(runs.seeds)} --arms {' '.join(arms)}{override}"


def packed(runs: RunSet) -> str:
    """Return runs.json: ``{"arm_specs": {arm: spec}, "runs": [{"eval", "manifest"}]}``, without ``arm_spec`` in the manifests.

    Raises:
        ValueError: An arm's spec differs between seeds.
    """
    specs: dict[str, Any] = {}
    records = []
    for (arm, seed), run in runs.runs.items():
        manifest = json.loads((run.folder / MANIFEST).read_text(encoding="utf-8"))
        spec = manifest.pop("arm_spec")
        if specs.setdefault(arm, spec) != spec:
            raise ValueError(f"arm {arm} is defined differently on seed {seed}: run it again on every seed")
        records.append({"eval": json.loads((run.folder / "eval.json").read_text(encoding="utf-8")), "manifest": manifest})
    return compact({"arm_specs": specs, "runs": records})


def unpacked(text: str) -> dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]]:
    """Return ``(arm, seed)`` -> its eval.json and manifest.json, from the text of runs.json."""
    stored = json.loads(text)
    out = {}
    for record in stored["runs"]:
        manifest = record["manifest"] | {"arm_spec": stored["arm_specs"][record["manifest"]["arm"]]}
        out[manifest["arm"], manifest["seed"]] = (record["eval"], manifest)
    return out
