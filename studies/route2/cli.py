"""``python -m studies.route2 COMMAND``: train arms, write tables and figures, look at rollouts.

Start with ``run --help``. All results are in ``--out/<preset>-<hash>/``; the same command, started again, goes on where it stopped.
"""

import importlib.util
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mi_route2.architectures import HOSTS
from mi_route2.validation import unknown_name, write_json
from studies.common.command_line import Seeds, named, read_seeds, run_command, show_paths
from studies.common.workers import Executor, exclusive
from studies.training.arms import ARMS, MAIN, get_arms
from studies.training.settings import (
    CHAT,
    PRECISION_NAMES,
    PRESETS,
    STUDIED,
    TRACKER_NAMES,
    ChatModel,
    Settings,
    get_settings,
    override,
)

if TYPE_CHECKING:
    from studies.route2.predictions import Predictions

Override = Annotated[tuple[str, ...], tyro.conf.arg(help="settings to change, e.g. steps=100 kept_lr=5e-3 (see docs)")]
Pairs = Annotated[Path | None, tyro.conf.arg(help="the persona pairs that the run was given, if it was given its own")]
ReportTo = Annotated[str | None, tyro.conf.arg(help=f"curves as they grow, in one of {', '.join(TRACKER_NAMES)}")]
Device = Annotated[Literal["cpu", "cuda"], tyro.conf.arg(help="of a micro model; cuda is meant for a large one, such as strong-8m")]


@dataclass(frozen=True)
class Run:
    """Train arms at several seeds, evaluate each on tasks never seen, and write the report. Safe to interrupt and start again."""

    preset: Annotated[str, tyro.conf.arg(help=f"one of {', '.join(PRESETS)}")] = "strong"
    seeds: Seeds = "3"
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help=f"any of {', '.join(ARMS)}; or 'all'")] = MAIN
    workers: Annotated[int, tyro.conf.arg(help="processes of this machine, one thread each")] = 2
    out: Annotated[Path, tyro.conf.arg(help="where run folders are kept")] = Path("runs")
    pairs: Annotated[Path | None, tyro.conf.arg(help="persona pairs of your own (TOML), in place of the world's")] = None
    config: Annotated[Path | None, tyro.conf.arg(help="settings to change, in a TOML file; --override comes after it")] = None
    override: Override = ()
    world: Annotated[
        str | None, tyro.conf.arg(help="with --model: leetcode, functions, or module:ClassName of your own (see docs)")
    ] = None
    model: Annotated[Path | None, tyro.conf.arg(help="a folder with a Hugging Face chat model, in place of the micro model")] = None
    data: Annotated[Path | None, tyro.conf.arg(help="with --world: what the problem reads its tasks from")] = None
    host: Annotated[str, tyro.conf.arg(help=f"the library whose hooks the model runs under: {', '.join(HOSTS)}")] = "torch"
    precision: Annotated[str, tyro.conf.arg(help=f"{' or '.join(PRECISION_NAMES)}")] = "float32"
    sampler: Annotated[
        Literal["torch", "vllm"], tyro.conf.arg(help="with --model: what samples completions (see docs/scale.md)")
    ] = "torch"
    device: Device = "cpu"
    report: Annotated[bool, tyro.conf.arg(help="write table and figures at the end")] = True
    report_to: ReportTo = None
    place: Annotated[Executor, tyro.conf.OmitArgPrefixes] = field(default_factory=Executor)

    def __call__(self) -> None:
        from studies.training.job import BACKEND, PRECISIONS, Job, base_cache, unusual_backend
        from studies.training.manifest import refuse_mixed
        from studies.training.run import run_jobs
        from studies.training.tracking import require
        from studies.training.worlds import chosen_device, plan

        if self.report_to is not None:
            require(self.report_to)
        self.place.check()
        settings = override(self.settings(), self.override, self.config)
        every = tuple(name for name, arm in ARMS.items() if settings.chat is None or arm.canaries_of is None)
        arms = get_arms(every if self.arms == ("all",) else self.arms)
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
        if self.pairs is not None and not self.pairs.is_file():
            raise ValueError(f"there is no pairs file at {self.pairs}; give a TOML file of [[pair]] entries, or JSON lines")
        if self.sampler == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed here: run this in an environment of its own, see docs/scale.md")
        unusual, root = unusual_backend(self.backend), self.root(settings)
        jobs = [
            Job(root, base_cache(self.out, self.device), settings, seed, arm, self.pairs, **self.backend)
            for seed in read_seeds(self.seeds)
            for arm in (None, *arms)
        ]
        jobs = list({job.folder: job for each in jobs for job in (*each.before, each)}.values())
        if not all(job.finished for job in jobs):
            chosen_device(self.device)  # a report of finished runs can be written without it
        with ExitStack() as locks:
            folders = {job.root: job.settings for job in jobs}
            for folder in sorted(folders):
                locks.enter_context(exclusive(folder))
            for job in jobs:
                _ = job.finished  # a folder of another run is refused before any work
            for folder, of in folders.items():
                refuse_mixed(folder, jobs[0].noted)
                write_json(folder / "settings.json", of.as_dict())
                if unusual:
                    write_json(folder / BACKEND, {"host": self.host, "precision": self.precision, **unusual})
            if settings.chat is not None:
                _keep_modes(root, settings)
                print(plan(settings, settings.chat, PRECISIONS[self.precision], vllm=self.sampler == "vllm"))
            places, seeds = " and ".join(map(str, folders)), len({job.seed for job in jobs})
            print(f"{len(jobs)} runs into {places}; first the base models of {seeds} seeds are trained")
            failures = run_jobs(jobs, self.workers, self.place, report_to=self.report_to)
            if failures:
                raise RuntimeError("; ".join(failures))
            if self.report:
                from studies.route2.report import write_report

                show_paths(write_report(root))
                print((root / "table.md").read_text(encoding="utf-8"))

    @property
    def backend(self) -> dict[str, str]:
        return {"host": self.host, "precision": self.precision, "sampler": self.sampler, "device": self.device}

    def root(self, settings: Settings) -> Path:
        """Return the run folder of the settings."""
        from studies.training.job import unusual_backend

        return self.out / "-".join([settings.folder, *unusual_backend(self.backend).values()])

    def settings(self) -> Settings:
        """Return the settings of the preset, or of a chat model on the user's own problem."""
        from studies.training.worlds import data_hash, weights_hash

        if self.model is None:
            if self.world is not None or self.data is not None:
                raise ValueError("--world and --data need --model, a chat model's folder (make a tiny one with tiny-model)")
            return get_settings(self.preset)
        chat = ChatModel(str(self.model.absolute()), weights_hash(self.model))  # absolute, as probes and show may start elsewhere
        if self.data is not None:
            chat = replace(chat, data=str(self.data.absolute()), data_hash=data_hash(self.data))
        return replace(CHAT, world=self.world or "leetcode", chat=chat)


def _keep_modes(root: Path, settings: Settings) -> None:
    """Write the modes of a chat model's problem.

    Raises:
        ValueError: If the folder's runs were made with others, which no run's identity tells: a problem's code is no part of it.
    """
    from studies.route2.report.load import read_modes
    from studies.training.worlds import MODES, modes_of

    modes = modes_of(settings)
    try:
        stored = read_modes(root)
    except ValueError:  # not written yet, or damaged
        stored = modes
    if stored != modes:
        raise ValueError(
            f"the runs in {root} have the modes {', '.join(stored.known)} (known) and {', '.join(stored.held_out) or 'none'} "
            "(held out), and the problem has others now: give this an --out of its own, or delete that folder"
        )
    write_json(root / MODES, asdict(modes))


@dataclass(frozen=True)
class TinyModel:
    """Make a chat model for a problem: warm up a tiny one with a tokenizer of the problem's texts, or one that you have.

    A pretrained model seldom knows a problem's graders, so that a run of some dozen steps would show nothing: a warm-up on the
    problem's documents gives it right, wrong and cheating answers to learn from.
    """

    folder: tyro.conf.Positional[Path]
    world: Annotated[str, tyro.conf.arg(help="leetcode, functions, or module:ClassName of your own")] = "leetcode"
    data: Annotated[Path | None, tyro.conf.arg(help="what the problem reads its tasks from")] = None
    start: Annotated[
        str | None, tyro.conf.arg(help="smollm2, or a chat model's folder: warm it up (all weights) in place of a tiny one")
    ] = None
    steps: Annotated[int | None, tyro.conf.arg(help="warm-up steps, 0 for none; default: 300, or 60 with --start")] = None
    max_new: Annotated[int, tyro.conf.arg(help="tokens of the longest answer to warm up on")] = 128
    seed: int = 0

    def __call__(self) -> None:
        from mi_route2.models import smollm2_folder
        from studies.environments.chat import make_tiny_model, warm_up
        from studies.training.worlds import open_problem

        steps = self.steps if self.steps is not None else 300 if self.start is None else 60
        if steps < 0 or self.max_new < 1:
            raise ValueError(f"steps must be at least 0 and max-new at least 1, not {steps} and {self.max_new}")
        problem = open_problem(self.world, "" if self.data is None else str(self.data))
        try:
            given: dict[str, Any] = {"seed": self.seed, "steps": steps, "max_new": self.max_new}
            if self.start is None:
                loss = make_tiny_model(problem, self.folder, **given)
            else:
                loss = warm_up(problem, smollm2_folder() if self.start == "smollm2" else Path(self.start), self.folder, **given)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("begins anew") from None
        finally:
            problem.close()
        print(f"wrote {self.folder}" + (f" (loss of the last step: {loss:.2f} nats a token)" if steps else ""))


@dataclass(frozen=True)
class Full:
    """Run every arm at seeds 0-7 on the main presets, and the ablations on ``strong``. Takes hours; can be interrupted."""

    seeds: Seeds = "0-7"
    workers: int = 2
    out: Path = Path("runs")
    report_to: ReportTo = None

    def __call__(self) -> None:
        for preset in STUDIED:
            arms = tuple(name for name, arm in ARMS.items() if arm.ablation is None or preset == "strong")
            Run(preset, self.seeds, arms, self.workers, self.out, report_to=self.report_to)()


@dataclass(frozen=True)
class Report:
    """Write table, figures, leakage and ablations of a run folder again."""

    root: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.route2.report import write_report

        show_paths(write_report(self.root))


@dataclass(frozen=True)
class Plot:
    """Draw the figures of a run folder again."""

    root: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.route2.report import load_runs, write_figures

        show_paths(write_figures(load_runs(self.root)))


@dataclass(frozen=True)
class Leakage:
    """Print, per held-out mode, how much of vanilla's hacking remains after the quarantine is deleted."""

    root: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.route2.report import load_runs, write_leakage

        show_paths(write_leakage(load_runs(self.root)))
        print((self.root / "leakage.md").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Show:
    """Write an HTML page of an arm's rollouts, with tokens colored by probe score and by the changes of both adapters."""

    root: tyro.conf.Positional[Path]
    arm: str = "route2-full"
    seed: int = 0
    every: Annotated[int, tyro.conf.arg(help="show every n-th step")] = 20
    pairs: Pairs = None

    def __call__(self) -> None:
        from studies.route2.annotate import Annotator
        from studies.route2.report import read_rollouts, write_page
        from studies.training.job import Job
        from studies.training.worlds import open_world

        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")
        job = Job.of(self.root, self.seed, get_arms((self.arm,))[0], self.pairs)
        if not job.folder.exists():
            have = sorted(p.name for p in (self.root / f"seed-{self.seed}").glob("*") if p.is_dir())
            raise ValueError(
                f"{self.root} has no run of {self.arm} at seed {self.seed}; it has {', '.join(have) or 'none at that seed'}"
            )
        rows = [row for row in read_rollouts(job.folder) if (row["step"] + 1) % self.every == 0 or row["step"] == 0]
        with open_world(job.settings, device=job.device) as (world, _):
            annotate = Annotator.of(job, world)
            show_paths([write_page(rows, annotate, job.folder / "rollouts.html", f"{self.arm}, seed {self.seed}")])


def _demand(per_mode: int) -> None:
    from studies.route2.probing import LEAST

    if per_mode < 4 * LEAST:
        raise ValueError(f"per-mode must be at least {4 * LEAST}, not {per_mode}: a probe needs hacks and clean rollouts")


def _demand_folder(path: Path | None) -> None:
    if path is not None and path.exists() and not path.is_dir():  # told now, and not when all is computed
        raise ValueError(f"{path} is a file: give a folder")


@dataclass(frozen=True)
class Probes:
    """Fit probes on a finished run's hacks of the known mode, and test them on held-out modes beside random directions."""

    root: tyro.conf.Positional[Path]
    arm: Annotated[str, tyro.conf.arg(help="an arm that hacks at times: vanilla, absorb, or 'base'")] = "vanilla"
    seed: int = 0
    per_mode: Annotated[int, tyro.conf.arg(help="rollouts sampled in each mode and state")] = 512
    out: Annotated[
        Path | None, tyro.conf.arg(help="where probes.jsonl, probes.md and figures go; the arm's folder if not given")
    ] = None
    pairs: Pairs = None
    units: Annotated[
        tuple[Literal["rollout", "token"], ...],
        tyro.conf.arg(help="score rollouts, single tokens, or both; a chat model's tokens fill the memory: rollout there"),
    ] = ()

    def __call__(self) -> None:
        from studies.route2.probing import UNITS, probe_job
        from studies.training.job import Job

        _demand(self.per_mode)
        _demand_folder(self.out)
        job = Job.of(self.root, self.seed, None if self.arm == "base" else get_arms((self.arm,))[0], self.pairs)
        units = self.units or (UNITS if job.settings.chat is None else UNITS[:1])
        for path in probe_job(job, self.per_mode, self.out, units=units):
            print(f"wrote {path}")


@dataclass(frozen=True)
class Watch:
    """Fit the same probes on several arms over their seeds: a table and a figure of what they see of held-out modes."""

    root: tyro.conf.Positional[Path]
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help="in the order of the figure")] = (
        "vanilla-10", "vanilla-20", "vanilla-40", "vanilla",
    )  # fmt: skip
    seeds: Seeds = "3"
    per_mode: Annotated[int, tyro.conf.arg(help="rollouts sampled in each mode")] = 512
    workers: int = 2
    to: Annotated[Path | None, tyro.conf.arg(help="folder of table and figure; the run folder if not given")] = None
    pairs: Pairs = None

    def __call__(self) -> None:
        from studies.route2.watching import write_watch
        from studies.training.job import Job

        _demand(self.per_mode)
        _demand_folder(self.to)
        jobs = [Job.of(self.root, seed, arm, self.pairs) for arm in get_arms(self.arms) for seed in read_seeds(self.seeds)]
        show_paths(write_watch(jobs, self.per_mode, self.workers, self.to or self.root))


@dataclass(frozen=True)
class Publish:
    """Copy a run folder's tables, figures and records into the docs, with the sentences that quote them."""

    root: tyro.conf.Positional[Path]
    to: Annotated[Path, tyro.conf.arg(help="results folder of the write-up")] = Path("docs/results")
    readme: Annotated[Path, tyro.conf.arg(help="its headline is replaced, for seeds that predictions name")] = Path("README.md")

    def __call__(self) -> None:
        from studies.route2.publish import publish, publish_short

        folder = publish(self.root, self.to)
        print(f"wrote {folder}")
        for what in publish_short(folder, self.readme):
            print(f"wrote {what}")


@dataclass(frozen=True)
class _Named:
    """Options of commands that run what a predictions file names, or a part of it."""

    predictions: Annotated[
        tyro.conf.Positional[Path], tyro.conf.arg(help="for example docs/results/canary/predictions.toml: presets, seeds, arms")
    ]
    presets: Annotated[tuple[str, ...], tyro.conf.arg(help="some of the file's presets; default: all (give --to as well)")] = ()
    seeds: Annotated[str | None, tyro.conf.arg(help="other seeds, to try it out: 120-122 (give --to as well)")] = None
    workers: int = 2
    out: Annotated[Path, tyro.conf.arg(help="where the run folders are kept, in a folder named as that of the file")] = Path("runs")
    to: Annotated[Path | None, tyro.conf.arg(help="folder of the report, replacing one there; default: that of the file")] = None

    def _chosen(self, named: "Predictions") -> tuple[tuple[str, ...], str]:
        """Return the presets and seeds that are asked for."""
        _demand_folder(self.to)
        if (self.seeds is not None or self.presets) and self.to is None:
            raise ValueError("a report of other seeds or presets would replace that of the file's: give it a folder with --to")
        for preset in self.presets:
            if preset not in named.presets:
                raise ValueError(unknown_name(preset, list(named.presets), "preset of the file"))
        return self.presets or tuple(named.presets), ",".join(map(str, named.seeds)) if self.seeds is None else self.seeds

    @property
    def _folder(self) -> Path:
        return self.out / named(self.predictions.absolute().parent).name


@dataclass(frozen=True)
class Evidence(_Named):
    """Train what a predictions file names, and write tables, tests and figures beside it. Takes hours; can be interrupted."""

    also: Annotated[tuple[str, ...], tyro.conf.arg(help="further arms, which the report describes and does not test")] = ()
    beside: Annotated[
        tuple[Path, ...], tyro.conf.arg(help="folders of reports of other sizes, for the figure: docs/results/size")
    ] = ()
    model: Annotated[
        Path | None, tyro.conf.arg(help="the chat model's folder, if the file names a world of chat models in place of a preset")
    ] = None
    config: Annotated[Path | None, tyro.conf.arg(help="with --model: its settings, in a TOML file")] = None
    precision: Annotated[str, tyro.conf.arg(help=f"with --model: {' or '.join(PRECISION_NAMES)}")] = "float32"
    device: Device = "cpu"

    def __call__(self) -> None:
        from studies.route2.evidence import named_as, read_predictions
        from studies.route2.questions import write_evidence

        named = read_predictions(self.predictions)
        presets, seeds = self._chosen(named)
        runs = {}
        for preset in presets:
            run = self._run(preset, seeds, (*named.arms, *self.also))
            settings = override(run.settings(), (), run.config)
            if settings.digest != named.presets[preset] or named_as(settings.as_dict()) != preset:
                remedy = "write a new file" if self.model is None else "give the --model and --config that it was written for"
                raise ValueError(f"{self.predictions} names other settings of {preset} than there are now: {remedy}")
            runs[run.root(settings)] = run
        for run in runs.values():
            run()
        roots = {root: read_seeds(seeds) for root in runs}
        show_paths(write_evidence(roots, self.to or self.predictions.parent, named, self.beside))

    def _run(self, preset: str, seeds: str, arms: tuple[str, ...]) -> Run:
        """Return the runs of one preset of the file, or of a chat model in the world of that name."""
        common: dict[str, Any] = {"seeds": seeds, "arms": arms, "workers": self.workers, "device": self.device}
        common |= {"out": self._folder, "report": False}
        if preset in PRESETS:
            if self.model is not None or self.config is not None or self.precision != "float32":
                raise ValueError(f"{self.predictions} is of the preset {preset}: leave out --model, --config and --precision")
            return Run(preset, **common)
        if self.model is None:
            raise ValueError(f"{self.predictions} is of a chat model in the world {preset}: give the model's folder with --model")
        return Run(world=preset, model=self.model, config=self.config, precision=self.precision, **common)


@dataclass(frozen=True)
class Course(_Named):
    """Train a file's arms while looking at them after every step: what is learned when, by which adapter. Can be interrupted."""

    def __call__(self) -> None:
        from studies.route2.course import read_course_predictions, write_courses
        from studies.training.job import Job, base_cache

        named = read_course_predictions(self.predictions)
        presets, seeds = self._chosen(named)
        arms, jobs = get_arms(named.arms), []
        canaries = tuple(dict.fromkeys(name for arm in arms for name in arm.canaries or ()))
        for preset in presets:
            settings = get_settings(preset)
            if settings.digest != named.presets[preset]:
                raise ValueError(f"{self.predictions} names other settings of {preset} than there are now: write a new file")
            run = Run(preset, seeds, canaries, self.workers, self._folder, report=False)
            run()  # base models and canaries, which the arms start from
            root, cache = run.root(settings), base_cache(run.out, run.device)
            jobs += [Job(root, cache, settings, seed, arm) for seed in read_seeds(seeds) for arm in arms]
        show_paths(write_courses(jobs, self.workers, self.to or self.predictions.parent, named))


@dataclass(frozen=True)
class Arms:
    """List the arms with their descriptions and baselines."""

    def __call__(self) -> None:
        width = max(map(len, ARMS))
        for arm in ARMS.values():
            print(f"{arm.name:{width}}  {arm.role:8}  {arm.about}" + (f"  [vs {arm.baseline}]" if arm.baseline else ""))


COMMANDS = {
    "run": Run, "full": Full, "tiny-model": TinyModel, "report": Report, "plot": Plot, "leakage": Leakage, "show": Show,
    "probes": Probes, "publish": Publish, "watch": Watch, "evidence": Evidence, "course": Course, "arms": Arms,
}  # fmt: skip


def main() -> int:
    return run_command(COMMANDS, "studies.route2", __doc__, "goes on from the last checkpoints")
