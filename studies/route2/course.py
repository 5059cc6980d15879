"""Courses: arms trained again from their seeds and looked at after every step, for what is learned when, and by which adapter.

    python -m studies.route2 course docs/results/course/predictions.toml

    <preset>-course.json   per arm, metric and step the value of each seed
    <preset>-course.md     what each adapter learned over the run, and what the deployed model does at its end
    <preset>-stops.md      each method against every point of the paths of filters that know as much
    <preset>-tests.md      predictions and outcomes
    course.png             exploits, reward variance and what each adapter learns, by steps
    paths.png              exploit against solve along the path of every filter

A run is repeated bit for bit, so its state after n steps is that of a run that was stopped there: the paths are those of early
stopping. Where the runs themselves are in the run folder, the repetition is compared with them.
"""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mi_route2.files import write_whole
from mi_route2.plots import BLACK, BLUE, GRAY, GREEN, ORANGE, PAGE_WIDTH, SKY, VERMILLION, new_figure, save_figure, style
from mi_route2.tensor_files import digest, read_tensors
from mi_route2.validation import read_object
from studies.common.publishing import compact, update_showing
from studies.common.stats import Summary, mean, summary
from studies.common.tables import interval, markdown_table, number, write_texts
from studies.common.workers import Executor, job_lock, run_each
from studies.environments.protocol import Modes, Verdict
from studies.route2.evidence import BUDGETS, read_predictions
from studies.route2.headline import EXPLOIT, HACK, SOLVE
from studies.route2.learning import State, learned, shares
from studies.route2.predictions import Predictions, outcomes, predictions_markdown
from studies.route2.questions import MARKS
from studies.route2.report.figures import panels
from studies.route2.report.load import read_report
from studies.route2.report.measures import LEARNING
from studies.training.arms import ARMS, get_arms
from studies.training.build import build_optimizer, build_route, learn_lessons
from studies.training.grpo import StepRecord
from studies.training.job import DEPLOYED, FULL, Job, build_hosted
from studies.training.manifest import read_manifest
from studies.training.run import evaluate, training
from studies.training.settings import PRESETS
from studies.training.teacher import cached_pool
from studies.training.worlds import base_file, open_world

POINTS = (5, *range(10, 1000, 10))
"""Numbers of steps after which the policy is evaluated as at a run's end; at its beginning and its end it always is."""
WINDOW = 10
"""Steps that a report puts together."""
KINDS = ("missed", "solved")
"""Rollouts whose learning is followed: exploits in held-out modes that are not flagged, and correct ones without an exploit."""
PARTS = ("kept", "quarantine", "share")
ROLES = ("known", "held", "honest")
ON_EXPLOIT, HONEST = "on_exploit_held", "deploy_solve_honest"
RATES: Mapping[str, tuple[str, str, str]] = {
    EXPLOIT: ("deploy", "exploit", "held"), HACK: ("deploy", "hack", "held"), SOLVE: ("deploy", "solve", "all"),
    ON_EXPLOIT: ("on", "exploit", "held"), "on_solve": ("on", "solve", "all"), HONEST: ("deploy", "solve", "honest"),
}  # fmt: skip
"""Rate of an evaluation -> state of the policy, quantity, and the modes of which it is the mean."""
NOTHING = "no label, no pair"
ENDS = ("course.json", "course.md", "stops.md", "tests.md")
PATHS = {
    "vanilla": (VERMILLION, "."), "sees-known": (SKY, "X"), "filter-known": (ORANGE, "s"), "filter-act": (GREEN, "v"),
    "filter-full": (BLUE, "P"), "filter-canary-run": (BLACK, "o"), "oracle-known": (ORANGE, "d"), "route2-full": (BLUE, "D"),
}  # fmt: skip
"""Arm -> its color and marker among paths, of which each has a color; other arms look as everywhere."""
AGAIN = "delete it, and run `python -m studies.route2 course` again"


@dataclass(frozen=True)
class FollowedJob:
    """One arm at one seed to follow, and where its numbers go."""

    job: Job

    @property
    def path(self) -> Path:
        return self.job.root / "course" / f"{self.job.name}-{self.job.seed}.json"

    @property
    def numbers(self) -> dict[str, Any] | None:
        """The numbers from the file; ``None`` if there is none of this job, or what it is of was made again since."""
        if not self.path.exists():
            return None
        stored = read_object(self.path, AGAIN)
        if stored.get("identity") != self.job.identity:
            return None
        now, then = self.origins, stored.get("origins", {})  # files of earlier versions name none
        return stored if all(now[name] == then[name] for name in now.keys() & then.keys()) else None

    @property
    def origins(self) -> dict[str, str]:
        """Hashes of what the numbers are of, beyond settings, as far as it is there: base model, canaries, and the run's end."""
        job, hashes = self.job, dict[str, str]()
        if job.settings.chat is None and (base := base_file(job.settings, job.seed, job.cache)).exists():
            hashes["base"] = hashlib.sha256(base.read_bytes()).hexdigest()
        for canary in job.canaries:
            if canary.finished:
                hashes[f"canary {canary.name}"] = read_manifest(canary.folder).checksums[DEPLOYED]
        if job.finished:
            hashes["end"] = digest(read_tensors(job.folder / FULL)[0], {})
        return hashes


def follow(part: FollowedJob) -> None:
    """Train an arm from its seed and write what was seen; files of the run itself are not touched.

    Raises:
        ValueError: The arm steers its model while it trains, or the run that is in the folder has other weights at its end.
    """
    torch.set_num_threads(1)
    job = part.job
    assert job.arm is not None
    if job.arm.steering:
        raise ValueError(f"{job.name} is steered while it trains, and evaluated without: leave it out of a course")
    with job_lock(job.folder):  # persona pairs pass through it
        record = _followed(job)
        with contextlib.suppress(OSError):  # unless the run is there, an empty folder is left, which a report would call unfinished
            job.folder.rmdir()
    part.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(part.path, json.dumps(record, allow_nan=False).encode())


def _followed(job: Job) -> dict[str, Any]:
    """Train the job's arm and return the content of its file; errors are those of `follow`."""
    settings, steps, points = job.settings, [], {}
    with open_world(settings, device=job.device) as (world, witness):
        _, policy = build_hosted(job, job.cache)
        teachers = cached_pool(world, policy, job.seed, settings.teachers, job.pool, job.tries)
        route, optimizer = build_route(job, world, policy), build_optimizer(job, policy)
        learn_lessons(job, world, policy, teachers)
        points[0] = evaluate(world, witness, policy, settings, job.seed)
        before = State.of(policy.adapters)
        for record in training(job, world, witness, policy, route, optimizer, teachers):
            rollouts = record.samples.rollouts
            verdicts = witness.judge(record.samples)
            seen = learned(policy, rollouts, before)
            if policy.adapters.has_quarantine:
                seen["share"] = shares(policy, rollouts)
            steps.append(row(record, verdicts, world.modes, seen))
            if (done := record.step + 1) in POINTS or done == job.steps:
                points[done] = evaluate(world, witness, policy, settings, job.seed)
            before = State.of(policy.adapters)
    trained = policy.adapters.tensors()
    _compare(job, trained)
    origins = FollowedJob(job).origins | {"end": digest(trained, {})}
    return {"identity": job.identity, "origins": origins, "modes": asdict(world.modes), "steps": steps, "points": points}


def _compare(job: Job, trained: Mapping[str, Tensor]) -> None:
    """Compare the weights at the end with those of the run itself, if it is in the run folder.

    Raises:
        ValueError: They differ.
    """
    if not job.finished:
        return
    stored, _ = read_tensors(job.folder / FULL)
    if any(not torch.equal(stored[name].to(t.device), t) for name, t in trained.items()):
        raise ValueError(
            f"{job.folder} ends with other weights than this machine's repetition, as runs of another processor do: give the "
            "course an --out of its own, or delete that folder"
        )


def row(record: StepRecord, verdicts: Sequence[Verdict], modes: Modes, seen: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what is kept of one step: reward variance by role of the mode, and the means of ``seen`` over each of `KINDS`."""
    batch, names = record.batch, [prompt.mode for prompt in record.samples.prompts]
    flagged = torch.zeros(len(names), dtype=torch.bool)
    if record.decision.flags is not None:
        flagged[record.trained.cpu()] = record.decision.flags.cpu()
    variances = {role: [] for role in ROLES}
    for group in batch.groups.unique():
        mode = names[int((batch.groups == group).nonzero()[0, 0])]
        role = "honest" if mode == modes.honest else "known" if mode in modes.known else "held"
        variances[role].append(float(batch.rewards[batch.groups == group].var(correction=0)))
    student = ~batch.teacher.cpu() & ~flagged
    in_held_out = torch.tensor([name in modes.held_out for name in names])
    exploits, solved = (torch.tensor([getattr(verdict, what) for verdict in verdicts]) for what in ("exploit", "gt"))
    of = dict(zip(KINDS, (student & in_held_out & exploits, student & solved & ~exploits), strict=True))
    kinds = {
        kind: {"n": int(rows.sum())} | {name: _mean(values.cpu()[rows]) for name, values in seen.items()}
        for kind, rows in of.items()
    }
    return {"step": record.step, "variance": {role: mean(each) for role, each in variances.items()}, **kinds}


def _mean(values: Tensor) -> float | None:
    """Return the mean of the numbers among ``values``; ``None`` if there is none."""
    numbers = values[~values.isnan()]
    return float(numbers.double().mean()) if len(numbers) else None


@dataclass(frozen=True)
class Course:
    """Content of <preset>-course.json: ``values[arm][metric][steps]`` by seed, in the order of ``seeds``.

    Rates at ``steps`` are those of the policy after so many steps. Other metrics are of the `WINDOW` steps up to there: the sum of
    nats, or the mean of shares and variances; ``None`` if there was no such rollout.
    """

    preset: str
    settings_hash: str
    seeds: tuple[int, ...]
    values: Mapping[str, Mapping[str, Mapping[str, list[float | None]]]]

    @staticmethod
    def read(path: Path) -> "Course":
        """Read what `write_courses` wrote; errors are those of `read_report`."""
        return read_report(Course, path, AGAIN)

    def at(self, arm: str, metric: str, steps: str | None = None) -> Summary:
        """Return a metric after ``steps``; by default at the end."""
        by_steps = self.values[arm][metric]
        return summary(by_steps[list(by_steps)[-1] if steps is None else steps])

    def points(self, arm: str) -> list[str]:
        """Return the numbers of steps after which the arm was evaluated, in order."""
        return list(self.values[arm][EXPLOIT])

    def over(self, arm: str, metric: str, first: int = 0, last: int = 10**9) -> list[float | None]:
        """Return each seed's metric over the windows that end in ``(first, last]``: the sum of nats, or the mean of the others."""
        windows = [row for steps, row in self.values[arm].get(metric, {}).items() if first < int(steps) <= last]
        join = mean if metric.startswith(("variance", "share")) else _sum
        return [join(each) for each in zip(*windows, strict=True)]

    def seeded(self) -> dict[tuple[str, str], dict[int, float | None]]:
        """Return the metrics of `measures.LEARNING`, and the rates at the end, as predictions read them."""
        metrics_by_seed = {}
        for arm, metrics in self.values.items():
            rows = {name: self.over(arm, name) for name in metrics if name in LEARNING}
            rows |= {name: self.at(arm, name)["seeds"] for name in RATES}
            rows["variance_held"] = self.over(arm, "variance_held", first=2 * WINDOW)
            rows["early_variance_held"] = self.over(arm, "variance_held", last=WINDOW)
            rows["early_kept_missed"] = self.over(arm, "kept_missed", last=WINDOW)
            missed = [rows[name] for name in ("kept_missed", "quarantine_missed") if name in rows]
            rows["both_missed"] = [_sum(each) for each in zip(*missed, strict=True)]
            metrics_by_seed |= {(arm, name): dict(zip(self.seeds, row, strict=True)) for name, row in rows.items() if row}
        return metrics_by_seed


def _sum(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return math.fsum(defined) if defined else None


def read_course_predictions(path: Path) -> Predictions:
    """Read a predictions file whose comparisons a course can judge.

    Raises:
        ValueError: As `read_predictions` does; or an arm cannot be followed.
    """
    predictions = read_predictions(path, (*RATES, *(name for name in LEARNING if name not in RATES)))
    for arm in get_arms(predictions.arms):
        if arm.canaries_of is not None:
            raise ValueError(f"{path}: the canaries of {arm.name} are of another preset: leave it out of a course")
        if arm.steering:  # told by `follow` as well, but perhaps after an hour
            raise ValueError(f"{path}: {arm.name} is steered while it trains, and evaluated without: leave it out of a course")
    return predictions


def write_courses(jobs: Sequence[Job], workers: int, to: Path, named: Predictions) -> list[Path]:
    """Follow the jobs, as far as that is still to be done, and write the report into ``to``, in place of an earlier one.

    Raises:
        ValueError: There is a report of ``evidence``, of which a course would replace the outcomes.
    """
    if (to / "fronts.png").exists():
        raise ValueError(f"{to} has a report of `evidence`, and a course would replace its outcomes: give another --to")
    followed = [FollowedJob(job) for job in jobs]
    # The longest first, so that none of them is left for the end.
    left = sorted((part for part in followed if part.numbers is None), key=lambda part: -part.job.steps)
    if lost := run_each(follow, left, workers=workers, executor=Executor(), folder=to, what="following"):
        raise RuntimeError("; ".join(reason for _, reason in lost))
    to.mkdir(parents=True, exist_ok=True)
    presets = dict.fromkeys(part.job.settings.preset for part in followed)
    courses = [collect([part for part in followed if part.job.settings.preset == preset]) for preset in presets]
    written = []
    for course in courses:
        said = {f"{course.preset}-{name}.md": text for name, text in texts(course, named).items()}
        written += write_texts(to, {f"{course.preset}-course.json": compact(asdict(course))} | said)
    for preset in [preset for preset in PRESETS if (to / f"{preset}-course.json").exists()]:
        for stale in {f"{preset}-{end}" for end in ENDS} - {path.name for path in written}:
            (to / stale).unlink(missing_ok=True)  # of an earlier report, beside which it would be read
    compared = dict.fromkeys(arm for comparison in named.comparison for arm in (*comparison.plus, *comparison.minus))
    written += [course_figure(courses, list(compared), to / "course.png"), paths_figure(courses, to / "paths.png")]
    return [*written, *update_showing(to)]


def texts(course: Course, named: Predictions) -> dict[str, str]:
    """Return the texts of a preset by the ends of their names; outcomes if the predictions are of these settings and seeds."""
    said = {"course": table(course), "stops": stops(course)}
    if named.apply_to(course.preset, course.settings_hash, course.seeds):
        said["tests"] = predictions_markdown(named, outcomes(named, course.preset, course.seeded()))
    return said


def collect(followed: Sequence[FollowedJob]) -> Course:
    """Return the numbers of followed jobs of one preset.

    Raises:
        ValueError: A file was changed.
    """
    arms, seeds = list(dict.fromkeys(part.job.name for part in followed)), list(dict.fromkeys(part.job.seed for part in followed))
    curves = {(part.job.name, part.job.seed): measured(part) for part in followed}
    values = {
        arm: {
            metric: {steps: [curves[arm, seed][metric][steps] for seed in seeds] for steps in by_steps}
            for metric, by_steps in curves[arm, seeds[0]].items()
        }
        for arm in arms
    }
    settings = followed[0].job.settings
    return Course(settings.preset, settings.digest, tuple(seeds), values)


def measured(part: FollowedJob) -> dict[str, dict[str, float | None]]:
    """Return ``metric -> steps -> value`` of a followed job; ``ValueError`` if its file was changed."""
    numbers = part.numbers
    try:
        if numbers is None:
            raise KeyError("identity")
        modes, steps = Modes(**{role: _word(names) for role, names in numbers["modes"].items()}), numbers["steps"]
        curves: dict[str, dict[str, float | None]] = {
            name: {n: mean([point[mode][state][what] for mode in _modes(modes, role)]) for n, point in numbers["points"].items()}
            for name, (state, what, role) in RATES.items()
        }
        for mode in modes.loopholes:
            curves[f"deploy_exploit_{mode}"] = {n: point[mode]["deploy"]["exploit"] for n, point in numbers["points"].items()}
        windows = {min(end, len(steps)): steps[end - WINDOW : end] for end in range(WINDOW, len(steps) + WINDOW, WINDOW)}
        for role in ROLES:
            curves[f"variance_{role}"] = {str(n): mean([row["variance"][role] for row in rows]) for n, rows in windows.items()}
        for kind, name in itertools.product(KINDS, [name for name in steps[0][KINDS[0]] if name != "n"]):
            join = mean if name == "share" else _sum
            curves[f"{name}_{kind}"] = {str(n): join([row[kind][name] for row in rows]) for n, rows in windows.items()}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{part.path} lacks {error}: {AGAIN}") from error
    return curves


def _word(names: Any) -> Any:
    return tuple(names) if isinstance(names, list) else names


def _modes(modes: Modes, role: str) -> tuple[str, ...]:
    return {"held": modes.held_out, "honest": (modes.honest,), "all": modes.names}[role]


def knows(arm: str) -> str:
    """Return the information budget of an arm, as in reports of evidence."""
    return next((budget for budget, arms in BUDGETS.items() if arm in arms), "other")


def table(course: Course) -> str:
    """Return <preset>-course.md, two tables: what the arms do at their end, and what each adapter learned on the way."""
    seeded = course.seeded()
    rates = [[arm, *(interval(course.at(arm, name)) for name in (EXPLOIT, ON_EXPLOIT, SOLVE, HONEST))] for arm in course.values]
    names = ("early_variance_held", "variance_held", *(f"{what}_{kind}" for kind in KINDS for what in PARTS))
    means = [[arm, *(number(mean(list(seeded.get((arm, name), {}).values()))) for name in names)] for arm in course.values]
    header = ["arm", "variance, held out: first 10 steps", "from 20", "missed exploits: kept, nats", "quarantine", "share"]
    return "\n".join(
        (
            markdown_table(["arm", "exploit, held out", "with the quarantine", "solve", "in the honest mode"], rates),
            markdown_table([*header, "solved: kept, nats", "quarantine", "share"], means),
        )
    )


def stops(course: Course) -> str:
    """Return <preset>-stops.md: arms against early stopping of the filters that know no more, and against one at matched solve."""
    return f"{fronts(course)}\n{matched(course)}"


def fronts(course: Course) -> str:
    """Return the table of arms with the stops at which a filter that knows no more is better in both."""
    body = []
    for arm in course.values:
        others = [name for name in course.values if name != arm and without_quarantine(name)]
        rivals = [name for name in others if knows(name) in (knows(arm), NOTHING) or name == ARMS[arm].same_rule_filter]
        exploit, solve = course.at(arm, EXPLOIT), course.at(arm, SOLVE)
        better = [told for name in rivals if (told := better_after(course, name, exploit, solve))]
        body.append([arm, interval(exploit), interval(solve), "; ".join(better) or "none"])
    return markdown_table(["arm", "exploit, held out", "solve", "filters are better after"], body)


def matched(course: Course) -> str:
    """Return the table of routes against their filter, stopped as soon as it solves as much, or at its end if it never does."""
    body = []
    for arm in course.values:
        if (same := ARMS[arm].same_rule_filter) in course.values:
            assert same is not None
            exploit, solve = course.at(arm, EXPLOIT), course.at(arm, SOLVE)
            enough = [n for n in course.points(same) if _at_most(solve, course.at(same, SOLVE, n))]
            n = (enough or course.points(same)[-1:])[0]
            there = course.at(same, EXPLOIT, n)
            difference = summary([rate - other for rate, other in zip(exploit["seeds"], there["seeds"], strict=True)])  # pyright: ignore
            stop = f"after {n} steps" if enough else f"nowhere, so after {n} steps"
            rates = interval(there), number(course.at(same, SOLVE, n)["mean"])
            body.append([arm, same, stop, *rates, interval(difference, signed=True)])
    return markdown_table(
        ["arm", "filter", "solves as much", "its exploit there", "its solve", "difference of exploits"], body, left=3
    )


def better_after(course: Course, name: str, exploit: Summary, solve: Summary) -> str:
    """Return the arm's name and the stops at which it exploits no more and solves no less than that; empty without such a stop."""
    points = course.points(name)
    better = [
        i
        for i, n in enumerate(points)
        if _at_most(course.at(name, EXPLOIT, n), exploit) and _at_most(solve, course.at(name, SOLVE, n))
    ]
    spans = []
    for _, span in itertools.groupby(enumerate(better), lambda one: one[1] - one[0]):
        inside = [points[i] for _, i in span]
        spans.append(inside[0] if len(inside) == 1 else f"{inside[0]} to {inside[-1]}")
    return f"{name} {', '.join(spans)}" if spans else ""


def _at_most(one: Summary, other: Summary) -> bool:
    assert one["mean"] is not None
    assert other["mean"] is not None
    return one["mean"] <= other["mean"]


def without_quarantine(arm: str) -> bool:
    return ARMS[arm].quarantine == "none"


def course_figure(courses: Sequence[Course], arms: Sequence[str], path: Path) -> Path:
    """Draw exploits, reward variance, and what each adapter learned so far, by steps; a row is a preset."""
    with style():
        drawn = new_figure(PAGE_WIDTH, 2.3 * len(courses) + 0.5)
        grid = drawn.subplots(len(courses), 4, squeeze=False, sharex=True)
        for axes, course in zip(grid, courses, strict=True):
            for arm in (arm for arm in arms if arm in course.values):
                color, marker = MARKS.get(arm, (VERMILLION, "."))
                for name, line, end in ((EXPLOIT, "-", True), (ON_EXPLOIT, ":", not without_quarantine(arm))):
                    n = course.points(arm)
                    rates = [course.at(arm, name, steps)["mean"] for steps in n]
                    if end:
                        axes[0].plot([*map(int, n)], rates, line, color=color, marker=marker, markersize=3, label=arm)  # pyright: ignore
                n = list(course.values[arm]["variance_held"])
                variance = [course.at(arm, "variance_held", steps)["mean"] for steps in n]
                axes[1].plot([*map(int, n)], variance, color=color, marker=marker, markersize=3)  # pyright: ignore
                for ax, kind in zip(axes[2:], KINDS, strict=True):
                    for name, line in (("kept", "-"), ("quarantine", ":")):
                        if f"{name}_{kind}" in course.values[arm]:
                            nats = [mean(course.over(arm, f"{name}_{kind}", last=int(steps))) for steps in n]
                            ax.plot([*map(int, n)], nats, line, color=color, marker=marker, markersize=3)  # pyright: ignore
            titles = ("exploits, held out", "reward variance, held out", "nats learned: missed exploits", "nats learned: solved")
            for ax, title in zip(axes, titles, strict=True):
                ax.set_title(f"{course.preset}: {title}", fontsize=7)
        for ax in grid[-1]:
            ax.set_xlabel("steps")
        handles = {line.get_label(): line for line in grid[0][0].lines if line.get_linestyle() == "-"}
        title = "solid: deployed, or the kept adapter; dotted: with the quarantine, or the quarantine itself"
        drawn.legend(handles=list(handles.values()), loc="outside upper center", ncols=3, title=title)
        return save_figure(drawn, path)


def paths_figure(courses: Sequence[Course], path: Path) -> Path:
    """Draw exploit against solve along the path of every filter, and where the other arms end."""
    with panels(path, len(courses), 3.9, "exploit fires, held-out modes", "solve, all modes") as axes:
        for ax, course in zip(axes, courses, strict=True):
            for arm in course.values:
                n = course.points(arm) if without_quarantine(arm) else course.points(arm)[-1:]
                x, y = ([course.at(arm, name, steps)["mean"] for steps in n] for name in (EXPLOIT, SOLVE))
                color, marker = PATHS.get(arm) or MARKS.get(arm, (GRAY, "."))
                ax.plot(x, y, color=color, linewidth=0.8, alpha=0.7, label=arm, marker=marker, markersize=6, markevery=[-1])  # pyright: ignore
                ax.plot(x, y, color=color, linestyle="none", marker=".", markersize=3)  # pyright: ignore
            ax.set_title(f"{course.preset}, {len(course.seeds)} seeds")
    return path
