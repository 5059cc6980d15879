"""``python -m studies.route2 COMMAND``: train arms, report, compare arms over seeds, probe.

Start with ``run --help``. All results are in ``--out/<preset>-<hash>/``; the same command, started again, goes on where it stopped.
"""

import importlib.util
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mi_route2.architectures import HOSTS
from mi_route2.validation import write_json
from studies.common.command_line import Seeds, read_seeds, run_command, show_paths
from studies.common.workers import Executor, exclusive
from studies.training.arms import ARMS, MAIN, get_arms
from studies.training.settings import (
    CHAT_PRESETS,
    PRECISION_NAMES,
    PRESETS,
    TRACKER_NAMES,
    ChatModel,
    Settings,
    get_settings,
    override,
)

Override = Annotated[tuple[str, ...], tyro.conf.arg(help="settings to change, e.g. steps=100 kept_lr=5e-3 (see docs)")]
Pairs = Annotated[Path | None, tyro.conf.arg(help="the persona pairs that the run was given, if it was given its own")]
ReportTo = Annotated[str | None, tyro.conf.arg(help=f"curves as they grow, in one of {', '.join(TRACKER_NAMES)}")]
Device = Annotated[Literal["cpu", "cuda"], tyro.conf.arg(help="of a micro model; cuda is meant for a large one, such as strong-8m")]


@dataclass(frozen=True)
class RunArms:
    """Train arms at several seeds, evaluate each on tasks never seen, and write the report. Safe to interrupt and start again."""

    preset: Annotated[
        str | None,
        tyro.conf.arg(help=f"strong if not given: one of {', '.join(PRESETS)}; with --model one of {', '.join(CHAT_PRESETS)}"),
    ] = None
    seeds: Seeds = "3"
    arms: Annotated[tuple[str, ...], tyro.conf.arg(help=f"any of {', '.join(ARMS)}; or 'all'")] = MAIN
    workers: Annotated[int, tyro.conf.arg(help="processes of this machine, one thread each")] = 2
    out: Annotated[Path, tyro.conf.arg(help="where run folders are kept")] = Path("runs")
    pairs: Annotated[Path | None, tyro.conf.arg(help="persona pairs of your own (TOML), in place of the world's")] = None
    config: Annotated[Path | None, tyro.conf.arg(help="settings to change, in a TOML file; --override comes after it")] = None
    override: Override = ()
    world: Annotated[
        str | None, tyro.conf.arg(help="with --model: leetcode, functions, djinn, or module:ClassName of your own (see docs)")
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
        from studies.training.run import run_jobs
        from studies.training.tracking import require
        from studies.training.worlds import chosen_device, plan

        if self.report_to is not None:
            require(self.report_to)
        self.place.check()
        settings = override(self.settings(), self.override, self.config)
        arms = get_arms(tuple(ARMS) if self.arms == ("all",) else self.arms)
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
        jobs = list({job.folder: job for each in jobs for job in (*each.canaries, each)}.values())
        unfinished = [job for job in jobs if not job.finished]  # each is checked before any is trained
        if unfinished:
            chosen_device(self.device)  # a report of finished runs can be written without it
        with exclusive(root):
            write_json(root / "settings.json", settings.as_dict())
            if unusual:
                write_json(root / BACKEND, unusual)
            if settings.chat is not None:
                _keep_modes(root, settings)
                full = any(getattr(arm.route, "score", None) == "full" for arm in arms)
                print(plan(settings, settings.chat, PRECISIONS[self.precision], vllm=self.sampler == "vllm", full=full))
            print(f"{len(jobs)} runs into {root}; base models first")
            failures = run_jobs(jobs, self.workers, self.place, report_to=self.report_to)
            if failures:
                raise RuntimeError("; ".join(failures))
            if self.report:
                from studies.route2.report import write_report

                show_paths(write_report(root))
                print((root / "answer.md").read_text(encoding="utf-8"))

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
            if self.preset in CHAT_PRESETS:
                raise ValueError(f"--preset {self.preset} needs --model, a chat model's folder (make a tiny one with tiny-model)")
            return get_settings(self.preset or "strong")
        preset = self.preset or "chat"
        if preset not in CHAT_PRESETS:
            raise ValueError(
                f"--preset {preset} is of the micro model: with --model give one of {', '.join(CHAT_PRESETS)}, or none"
            )
        settings, how = CHAT_PRESETS[preset]
        # absolute, as probes and show may start elsewhere
        chat = replace(ChatModel(str(self.model.absolute()), weights_hash(self.model)), **how)
        if self.data is not None:
            chat = replace(chat, data=str(self.data.absolute()), data_hash=data_hash(self.data))
        return replace(settings, world=self.world or "leetcode", chat=chat)


def _keep_modes(root: Path, settings: Settings) -> None:
    """Write the modes of a chat model's problem.

    Raises:
        ValueError: The folder's runs were made with others (a problem's code is no part of a run's identity).
    """
    from studies.route2.runs import read_modes
    from studies.training.worlds import MODES, modes_of

    modes = modes_of(settings)
    stored = read_modes(root) if (root / MODES).exists() else modes
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
    world: Annotated[str, tyro.conf.arg(help="leetcode, functions, djinn, or module:ClassName of your own")] = "leetcode"
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
        from studies.environments.problems import open_problem

        steps = self.steps if self.steps is not None else 300 if self.start is None else 60
        if steps < 0 or self.max_new < 1:
            raise ValueError(f"steps must be at least 0 and max-new at least 1, not {steps} and {self.max_new}")
        problem = open_problem(self.world, "" if self.data is None else str(self.data))
        try:
            options: dict[str, Any] = {"seed": self.seed, "steps": steps, "max_new": self.max_new}
            if self.start is None:
                loss = make_tiny_model(problem, self.folder, **options)
            else:
                loss = warm_up(problem, smollm2_folder() if self.start == "smollm2" else Path(self.start), self.folder, **options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("begins anew") from None
        finally:
            problem.close()
        print(f"wrote {self.folder}" + (f" (loss of the last step: {loss:.2f} nats a token)" if steps else ""))


@dataclass(frozen=True)
class ReportAgain:
    """Write the answer, table and figures of a run folder again."""

    root: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        from studies.route2.report import write_report

        show_paths(write_report(self.root))
        print((self.root / "answer.md").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class CompareArms:
    """Print contrasts between arms over seeds, with intervals, Holm's p and counts of failures; draw them beside the file."""

    contrasts: tyro.conf.Positional[Path]
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(help="run folders and CSV tables of runs; evidence.csv beside the file")] = ()

    def __call__(self) -> None:
        from studies.route2.contrasts import write_contrasts

        text, paths = write_contrasts(self.contrasts, self.runs or (self.contrasts.with_name("evidence.csv"),))
        print(text)
        show_paths(paths)


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
class Detection:
    """Score answers of finished runs with the pairs' direction and with random ones: AUROC and F0.5 per mode."""

    roots: tyro.conf.Positional[tuple[Path, ...]]
    arms: Annotated[
        tuple[str, ...], tyro.conf.arg(help="an arm that hacks at times, or 'base'; one for every root, or one for each")
    ] = ("vanilla",)
    seed: int = 0
    per_mode: Annotated[int, tyro.conf.arg(help="answers sampled in each mode")] = 128
    draws: Annotated[int, tyro.conf.arg(help="random directions beside the pairs'")] = 20
    out: Annotated[Path | None, tyro.conf.arg(help="where detection.json, .md and .png go; the first root if not given")] = None
    pairs: Pairs = None
    trajectories: Annotated[
        Path | None, tyro.conf.arg(help="labelled trajectories (TRACE's columns) in place of the runs' own answers")
    ] = None

    def __call__(self) -> None:
        from studies.route2.detection import write_detection
        from studies.training.job import Job

        if not self.roots or min(self.per_mode, self.draws) < 1:
            raise ValueError("give the folder of at least one run, and at least 1 for per-mode and draws")
        _demand_folder(self.out)
        if len(self.arms) not in (1, len(self.roots)):
            raise ValueError(f"--arms takes one name, or one for each root: {len(self.arms)} for {len(self.roots)} roots")
        names = self.arms * (len(self.roots) if len(self.arms) == 1 else 1)
        jobs = [
            Job.of(root, self.seed, None if name == "base" else get_arms((name,))[0], self.pairs)
            for root, name in zip(self.roots, names)
        ]
        names = [name if name == "base" else f"{name}, {job.settings.steps} steps" for name, job in zip(names, jobs)]
        show_paths(write_detection(jobs, names, self.per_mode, self.out or self.roots[0], self.draws, self.trajectories))


@dataclass(frozen=True)
class ShareRollouts:
    """Write the labelled rollouts of finished runs as a folder that Hugging Face's datasets read, with a card."""

    roots: tyro.conf.Positional[tuple[Path, ...]]
    out: Annotated[Path, tyro.conf.arg(help="the folder to write; it must not exist")]

    def __call__(self) -> None:
        from studies.route2.sharing import write_dataset

        if not self.roots:
            raise ValueError("give the folder of at least one run")
        print(f"wrote {write_dataset(self.roots, self.out)}")


COMMANDS = {
    "run": RunArms,
    "report": ReportAgain,
    "contrasts": CompareArms,
    "probes": Probes,
    "detection": Detection,
    "share": ShareRollouts,
    "tiny-model": TinyModel,
}


def main() -> int:
    return run_command(COMMANDS, "studies.route2", __doc__, "goes on from the last checkpoints")
