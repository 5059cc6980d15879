"""Lists on the pages are those of the code: legal combinations, arms, main arms, answers, the README's headline.

A table stands below its `<!-- table: name -->`. Where one differs, the failure prints the right one.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from measured import DOCS, demand_printed, printed_table, published
from PIL import Image

from mi_route2.specs import LEGAL, MaskSpec
from studies.benchmarks.imports import StartCost
from studies.benchmarks.imports import table as starts_table
from studies.benchmarks.measurement.paired import Ratio
from studies.common.publishing import filled
from studies.common.tables import interval, markdown_table, number
from studies.route2.course import Course, read_course_predictions
from studies.route2.course import texts as course_texts
from studies.route2.evidence import EXPLOIT, SOLVE, Evidence, read_predictions
from studies.route2.headline import HACK, short
from studies.route2.predictions import FILE
from studies.route2.publish import REPORTS, SHORT, predicted_results
from studies.route2.questions import map_table, mapped, reports, size_table, sized, texts
from studies.route2.watching import Watch
from studies.route2.watching import table as watch_table
from studies.tracing.figures import ADAPTER_NAMES
from studies.tracing.patching import EVERYWHERE, QUESTION
from studies.tracing.report import cell
from studies.tracing.settings import UNTRAINED
from studies.training.arms import ARMS, MAIN, Arm
from studies.training.settings import STUDIED

pytestmark = pytest.mark.docs

RESULTS = DOCS / "results"


def legal_table() -> str:
    rows = [
        [score, unit, policy, *("yes" if through in allowed else "refused" for through in ("filter", "detach"))]
        for (score, unit, policy), allowed in LEGAL.items()
    ]
    return markdown_table(["score", "unit", "score policy", "filter", "detach"], rows, left=5)


def arms_table(arms: Iterable[Arm]) -> str:
    rows = [[f"`{a.name}`", a.role, a.about, a.baseline or "", a.same_rule_filter or ""] for a in arms]
    return markdown_table(["arm", "role", "what it is", "compared with", "same-rule filter"], rows, left=5)


def ablations_table(arms: Iterable[Arm]) -> str:
    rows = [[f"`{a.name}`", a.ablation or "", a.about, a.baseline or ""] for a in arms]
    return markdown_table(["arm", "ablation of", "change", "compared with"], rows, left=4)


WORLDS = ("weak", "strong", "sparse")
LESSON, RUN = ("honest", "honest", "lessons-sparse"), ("canary-run", "canary-run", "canary-sparse")
CANARY, RATES = ("canary", "canary", "canary-sparse"), ("misses-16", "misses-16", "map-16")
DEFENCES = (
    ("tasks that nobody can cheat", "[a lesson](docs/taught.md) of them first", "taught-honest", LESSON),
    ("nothing", "[a canary](docs/canary.md): drop what it likes", "filter-canary-run", RUN),
    (
        "nothing, and one run",
        "[its quarantine](docs/canary_one_run.md) is the canary",
        "canary-surprisal",
        ("canary-surprisal",) * 3,
    ),
    ("ten pairs of one loophole", "[drop](docs/map.md) what their gradients flag", "filter-full", CANARY),
    ("a detector of one loophole", "drop what it reports", "sees-known", RATES),
    ("a detector of one loophole", "and add [a fast quarantine](docs/misses.md)", "sees-known-quarantine-fast", RATES),
)
"""What one has, what one does, the arm, and its experiment in each of ``WORLDS``."""


def defences_table() -> str:
    rows = []
    for have, do, arm, folders in DEFENCES:
        cells = []
        for world, folder in zip(WORLDS, folders, strict=True):
            evidence = Evidence.read(RESULTS / folder / f"{world}.json")
            plain, solve = (number(evidence.summary("vanilla", metric)["mean"]) for metric in (EXPLOIT, SOLVE))
            left, solved = interval(evidence.summary(arm, EXPLOIT)), number(evidence.summary(arm, SOLVE)["mean"])
            cells.append(f"{plain} → {left}, solve {solve} → {solved}")
        rows.append([have, do, *cells])
    return markdown_table(["you have", "do", *(f"{world}: exploit" for world in WORLDS)], rows, left=5)


SURPRISAL, OTHER = "canary-surprisal", ("canary-other", None)
HONEST, LESSONS, ALONE = "honest", ("lessons", "lessons", "lessons-sparse"), ("lessons", "lessons", None)
ANSWERS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str, Any], ...]]] = {
    "canary.md": (
        WORLDS,
        (
            ("no defence", "vanilla", RUN),
            ("the canary, compared with the run", "filter-canary-run", RUN),
            ("its flags shuffled", "canary-run-shuffled", RUN),
            ("a canary that never hacked", "canary-run-honest", RUN),
        ),
    ),
    "canary_first_rule.md": (
        ("strong", "weak"),
        (
            ("no defence", "vanilla", "canary"),
            ("two canaries, judged against the base", "filter-canary", "canary"),
            ("one of them", "canary-one", "canary"),
            ("and a quarantine beside the flags", "route2-canary", "canary"),
            ("ten pairs of a known loophole", "filter-full", "canary"),
            ("a canary that never hacked", "canary-honest", "canary"),
        ),
    ),
    "canary_one_run.md": (
        WORLDS,
        (
            ("no defence", "vanilla", SURPRISAL),
            ("its own quarantine, taught by surprise", "canary-surprisal", SURPRISAL),
            ("taught by successes at random", "canary-surprisal-random", SURPRISAL),
            ("taught by every success", "canary-first", SURPRISAL),
            ("rotated when it judges", "canary-surprisal-rotated", SURPRISAL),
            ("surprise alone, no canary", "filter-surprisal", SURPRISAL),
        ),
    ),
    "canary_other.md": (
        ("strong", "sparse"),
        (
            ("no defence", "vanilla", "canary-weak"),
            ("the run's own canaries", "filter-canary-run", "canary-weak"),
            ("canaries of `weak`", "canary-run-weak", "canary-weak"),
            ("the same, rotated", "canary-run-weak-rotated", "canary-weak"),
            ("no defence, on other seeds", "vanilla", OTHER),
            ("the run's own canaries", "filter-canary-run", OTHER),
            ("canaries of `weak`", "canary-run-weak", OTHER),
            ("canaries of 30,144 parameters", "canary-run-30k", OTHER),
        ),
    ),
    "canary_cheats.md": (
        ("cheat-15", "cheat-30", "cheat-50"),
        (
            ("the base", "base", "cheats"),
            ("no defence", "vanilla", "cheats"),
            ("a quantile", "canary-surprisal", "cheats"),
            ("a quarter of a nat", "canary-nats", "cheats"),
            ("its flags shuffled", "canary-nats-shuffled", "cheats"),
            ("rotated when it judges", "canary-nats-rotated", "cheats"),
        ),
    ),
    "real_study.md": (
        ("functions",),
        (
            ("before training", "base", "canary-smollm2"),
            ("no defence", "vanilla", "canary-smollm2"),
            ("a canary of ten steps", "canary-run-10", "canary-smollm2"),
            ("the same, rotated", "canary-run-10-rotated", "canary-smollm2"),
            ("its flags shuffled", "canary-run-10-shuffled", "canary-smollm2"),
        ),
    ),
    "misses.md": (
        ("weak", "strong"),
        (
            ("no defence", "vanilla", "misses"),
            ("half of the hacks are flagged", "sees-50", "misses"),
            ("a quarter", "sees-25", "misses"),
            ("no defence, on other seeds", "vanilla", "rates"),
            ("one loophole of four is flagged", "sees-known", "rates"),
            ("and a quarantine beside it", "sees-known-quarantine", "rates"),
            ("and one that learns three times as fast", "sees-known-quarantine-fast", "rates"),
        ),
    ),
    "taught.md": (
        ("weak", "strong"),
        (
            ("no lesson", "vanilla", HONEST),
            ("32 honest rollouts, to the model", "taught-honest", HONEST),
            ("the same, to a frozen quarantine", "inoculation-honest", HONEST),
            ("32 hacks, to the model", "taught-hacks", HONEST),
            ("no lesson, on other seeds", "vanilla", "taught"),
            ("32 hacks, to a frozen quarantine", "inoculation", "taught"),
            ("32 hacks, to one that learns on", "inoculation-trainable", "taught"),
        ),
    ),
    "lessons.md": (
        WORLDS,
        (
            ("no lesson", "vanilla", LESSONS),
            ("32 honest rollouts", "taught-honest", LESSONS),
            ("8 of them", "taught-8", ALONE),
            ("2 of them", "taught-2", ALONE),
            ("honest, and little to learn", "taught-easy", ALONE),
            ("honest, and wrong", "taught-failed", ALONE),
            ("passing, some by a cheat", "taught-passing", ALONE),
        ),
    ),
    "starts.md": (
        ("weak", "sparse"),
        (
            ("no defence", "vanilla", "starts"),
            ("a direction, and drop what it flags", "filter-full", "starts"),
            ("clean sides, taught before training", "contrast-kept", "starts"),
            ("hacks to a quarantine, clean sides to the model", "contrast", "starts"),
            ("a push along them while training", "preventative-1", "starts"),
            ("three bands of their score", "bands-full", "starts"),
        ),
    ),
}
"""Page -> the presets of its first table, and its rows: words, arm, experiment."""


def answers_table(page: str) -> str:
    """Held-out exploits, with their interval, and solving of the arms that answer a page's question."""
    presets, rows = ANSWERS[page]
    body = []
    for words, arm, runs in rows:
        cells = []
        for preset, folder in zip(presets, (runs,) * len(presets) if isinstance(runs, str) else runs, strict=True):
            found = None if folder is None else Evidence.read(RESULTS / folder / f"{preset}.json")
            both = [found.summary(arm, metric) for metric in (EXPLOIT, SOLVE)] if found else []
            cells.append(f"{interval(both[0])} / {number(both[1]['mean'])}" if both else "")
        body.append([words, f"`{arm}`", *cells])
    return markdown_table(["", "arm", *(f"{preset}: exploit / solve" for preset in presets)], body, left=2)


def routes_table() -> str:
    """Held-out hacking and solving on fresh seeds."""
    arms = ("vanilla", "absorb", "haar", "shuffled", "route2-full", "filter-full")
    rows = {}
    for preset in ("strong", "weak"):
        content = json.loads((RESULTS / f"{preset}-300-307/table.json").read_text(encoding="utf-8"))
        rows[preset] = {row["arm"]: row for row in content["rows"]}
    body = [
        [f"`{arm}`", ARMS[arm].about, *(f"{interval(of[arm][HACK])} / {number(of[arm][SOLVE]['mean'])}" for of in rows.values())]
        for arm in arms
    ]
    return markdown_table(["arm", "what it is", *(f"{preset}: hack, held out / solve" for preset in rows)], body, left=2)


def adapters_of_an_arm_table() -> str:
    """The share of the gap that each whole adapter carries in contrast task."""
    rows = json.loads((RESULTS / "tracing/table.json").read_text(encoding="utf-8"))["rows"]
    shares = {
        (row["arm"], row["adapter"], row["into"]): row["recovered"]
        for row in rows
        if (row["contrast"], row["source"], row["where"]) == ("task", QUESTION, EVERYWHERE) and row["arm"] != UNTRAINED
    }
    adapters = [(arm, one, name) for arm, one in dict.fromkeys(key[:2] for key in shares) if (name := ADAPTER_NAMES.get(one))]
    body = [[f"`{arm}`", name, *(cell(shares[arm, one, into]) for into in ("honest", "hack"))] for arm, one, name in adapters]
    return markdown_table(["arm", "adapter", "carried into the honest rollout", "into the hacking one"], body, left=2)


def gates_table() -> str:
    """A quarantine that a probe switches, minus one that is deleted."""
    rows = json.loads((RESULTS / "steering/results.json").read_text(encoding="utf-8"))["comparisons"]
    body = []
    for row in rows:
        if row["reference"] == "deleted" and (row["how"] == "on" or (row.get("probe"), row["how"] != "open") == ("probe", True)):
            differences = [{"mean": row[name]["mean"], "lo": row[name]["low"], "hi": row[name]["high"]} for name in GATED]
            cells = [interval(each, signed=True) for each in differences]  # pyright: ignore[reportArgumentType]
            body.append([f"`{row['subject']}`", GATES[row["how"]], *cells, row["verdict"]])
    return markdown_table(["model", "the quarantine is", "hack, held out, minus deleted", "solve", "verdict"], body, left=2)


GATED = ("hack_held", "solve")
GATES = {
    "on": "always on",
    "forward": "closed behind the probe, in the same forward",
    "early": "closed by a probe of the embedding, in the same forward",
    "next token": "closed from the next token on, while the score is high",
    "latch": "closed from the next token on, for good",
}


def verdicts_table() -> str:
    """Count the claims of each kind by verdict, and return those of the page's first sentence."""
    claims = json.loads((RESULTS / "lanes/claims.json").read_text(encoding="utf-8"))["claims"]
    body = []
    for name in ("bigram", "stays", "persists", "lanes", "contraction", "momentum", "tapin"):
        (claim,) = [each for each in claims if each["id"] == name]
        measured, digits = claim["measured"], 4 if name == "lanes" else 2
        low, value, high = (f"{measured[key]:.{digits}f}".replace("0.", ".", 1) for key in ("low", "value", "high"))
        body.append([claim["words"], claim["record"], f"{value} [{low}, {high}]", claim["verdict"]])
    return markdown_table(["claim", "the record", "here", "verdict"], body, left=2)


def imports_table() -> str:
    stored = published("imports")
    rows = [StartCost(row["name"], Ratio(**row["time"]), row["limit"]) for row in stored["rows"]]
    assert all(row.limit is None or row.time.hi <= row.limit for row in rows)
    return starts_table(rows, stored["seconds"])


TABLES = {
    **{(page, "answer"): answers_table(page) for page in ANSWERS},
    ("results.md", "answer"): routes_table(),
    ("tracing.md", "answer"): adapters_of_an_arm_table(),
    ("steering_study.md", "answer"): gates_table(),
    ("lanes.md", "answer"): verdicts_table(),
    ("../README.md", "defences"): defences_table(),
    ("routing.md", "legal"): legal_table(),
    ("decisions.md", "imports"): imports_table(),
    ("arms.md", "arms"): arms_table(arm for arm in ARMS.values() if arm.ablation is None),
    ("arms.md", "ablations"): ablations_table(arm for arm in ARMS.values() if arm.ablation is not None),
}


OTHERS = ("map", "results", "results_strong", "results_weak", "results_development", "tracing", "steering_study", "lanes")
ANSWERING = (*ANSWERS, *(f"{page}.md" for page in OTHERS))
INTERVAL = re.compile(r"[+-]?\d*\.\d+ \[[^]\n]+\]")


@pytest.mark.parametrize("page", ANSWERING)
def test_a_page_of_results_answers_before_its_first_heading(page: str) -> None:
    """The answer with its interval, the figure, the table; intervals are those of the table, or of what the page shows."""
    opening, _, rest = (DOCS / page).read_text(encoding="utf-8").partition("\n## ")
    answer, figure, after = opening.partition("\n![")
    assert figure
    assert "\n![" not in after
    shown = re.findall(r"<!-- shown: (\S+) -->\n(.*?)<!-- end of \1 -->", rest, re.DOTALL)
    table = "".join(re.findall(r"^\|.*\n", after, re.MULTILINE)) or "".join(text for _, text in shown)
    intervals = INTERVAL.findall(answer)
    assert intervals
    assert set(intervals) <= set(INTERVAL.findall(table))


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_a_printed_table_is_the_code(page: str, name: str) -> None:
    demand_printed(page, name, TABLES[page, name])


def test_the_legal_table_says_yes_exactly_where_a_spec_can_be_made() -> None:
    for line in printed_table("routing.md", "legal").splitlines()[2:]:
        score, unit, policy, *said = (cell.strip() for cell in line.strip("|").split("|"))
        for through, answer in zip(("filter", "detach"), said, strict=True):
            if answer == "yes":
                MaskSpec(score=score, unit=unit, score_policy=policy, through=through)  # pyright: ignore[reportArgumentType]
            else:
                with pytest.raises(ValueError, match="refused"):
                    MaskSpec(score=score, unit=unit, score_policy=policy, through=through)  # pyright: ignore[reportArgumentType]


def test_the_page_of_arms_names_the_main_ones_in_order() -> None:
    text = " ".join((DOCS / "arms.md").read_text(encoding="utf-8").split())
    assert f"`make study` runs {', '.join(f'`{name}`' for name in MAIN)} and the base model." in text


def test_every_preset_has_what_the_pages_include() -> None:
    for preset in STUDIED:
        texts = (*REPORTS, "headline.md", "tables.md", "figures.md")
        assert {name for name in texts if not (RESULTS / preset / name).is_file()} == set(), preset


PAGES = [DOCS.parent / "README.md", *DOCS.glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_files_that_it_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(page), f"{page.name}: studies.common.publishing.update_pages writes it anew"
    assert re.findall("<!-- shown: (.*) -->", text) == re.findall("<!-- end of (.*[.].*) -->", text)
    assert "--8<--" not in text
    open_fence = ""
    for line in text.splitlines():  # by the rule of CommonMark: a closing fence has no word behind it
        if open_fence:
            open_fence = "" if line.strip() == open_fence else open_fence
        elif line.startswith("```"):
            open_fence = "`" * (len(line) - len(line.lstrip("`")))
        assert not (open_fence and line.startswith("<!-- ")), f"{page.name} has {line} inside of a code block"
    assert not open_fence, f"{page.name} leaves a code block open"


def test_the_headline_of_readme_and_home_page_is_the_published_one() -> None:
    assert (RESULTS / SHORT).read_text(encoding="utf-8").strip() == short(predicted_results(RESULTS)).strip()
    assert {page.name for page in PAGES if f"results/{SHORT} -->" in page.read_text(encoding="utf-8")} == {"README.md", "index.md"}


PUBLISHED = sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("provenance.json"))
NAMED = sorted(path.parent.name for path in RESULTS.glob("*/predictions.toml"))
COURSES = [name for name in NAMED if list((RESULTS / name).glob("*-course.json"))]
EXPERIMENTS = [name for name in NAMED if name not in COURSES]


def test_every_published_figure_is_whole() -> None:
    """A PNG has a checksum in each of its parts."""
    figures = [*DOCS.rglob("*.png")]
    assert len(figures) > 50
    for path in figures:
        with Image.open(path) as image:
            image.verify()


def test_the_development_seeds_and_the_predicted_ones_are_published() -> None:
    assert {*STUDIED, "strong-300-307", "weak-300-307"} <= set(PUBLISHED)


@pytest.mark.parametrize("folder", PUBLISHED)
def test_published_files_are_those_of_their_provenance(folder: str) -> None:
    """A published number that was edited by hand is found by its checksum."""
    path = RESULTS / folder / "provenance.json"
    files = json.loads(path.read_text(encoding="utf-8"))["files"]
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.parent.iterdir() if each != path}
    assert found == files


BESIDE = {"largest": ("size", "larger")}
"""Experiments whose table of sizes has those of others."""


@pytest.mark.parametrize("folder", EXPERIMENTS)
def test_published_reports_are_those_of_their_numbers(folder: str) -> None:
    """These folders have no checksums: tables, goals and verdicts are made again from the numbers of each run."""
    predictions = read_predictions(RESULTS / folder / FILE)
    every = [Evidence.read(path) for preset in predictions.presets if (path := RESULTS / folder / f"{preset}.json").exists()]
    expected = {f"{e.preset}{end}.md": text for e in every for end, text in texts(e, predictions).items() if text}
    worlds = mapped(every)
    expected |= {"map.md": map_table(worlds)} if worlds else {}
    every += [Evidence.read(path) for other in BESIDE.get(folder, ()) for path in reports(RESULTS / other)]
    expected |= {"size.md": size_table(every)} if sized(every) else {}
    for path in (RESULTS / folder).glob("*-watch.json"):
        expected[f"{path.stem}.md"] = watch_table(Watch.read(path))
    assert {path.name: path.read_text(encoding="utf-8") for path in (RESULTS / folder).glob("*.md")} == expected


@pytest.mark.parametrize("folder", COURSES)
def test_published_courses_are_those_of_their_numbers(folder: str) -> None:
    predictions = read_course_predictions(RESULTS / folder / FILE)
    every = [Course.read(path) for path in (RESULTS / folder).glob("*-course.json")]
    assert {course.preset for course in every} == predictions.presets.keys()
    expected = {f"{course.preset}-{name}.md": text for course in every for name, text in course_texts(course, predictions).items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in (RESULTS / folder).glob("*.md")} == expected
