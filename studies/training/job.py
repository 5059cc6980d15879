"""Job: train one arm at one seed, or only the base model, and evaluate it with the quarantine on and deleted.

The evaluation runs per mode, on tasks that warm start, pairs and GRPO never saw.
"""

import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from mi_route2.adapters import AdapterSpec, attach, load_adapters, save_adapters
from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import (
    CanarySpec,
    DelayedRoute,
    DelayedSpec,
    EraseRoute,
    EraseSpec,
    HaarFitter,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    PairBatch,
    PersonaFitter,
    Route,
    TopKFitter,
)
from mi_route2.routing.canary import Canary, CanaryRoute
from mi_route2.routing.directions import Fitter
from mi_route2.routing.optimizer import RoutedAdamW
from mi_route2.sites import Site
from mi_route2.validation import Natural, read_object, read_record, unknown_name, validated, write_json
from probes.probe import pool
from studies.common.processes import held
from studies.common.seeds import derive, numpy_generator, torch_generator
from studies.environments.chat import Sampler
from studies.environments.micro.model import MicroGPT
from studies.environments.protocol import (
    Forgetful,
    Pair,
    Samples,
    TeacherPool,
    TrainingGrade,
    Verdict,
    Witness,
    World,
    read_pairs,
    write_pairs,
)
from studies.training.arms import LESSON_STEPS, Arm, Lesson, get_arms
from studies.training.checkpoint import CHECKPOINT, PREVIOUS, resume, save_checkpoint
from studies.training.grpo import Watched, train
from studies.training.recorder import METRICS, ROLLOUTS, TIMINGS, Recorder, append
from studies.training.settings import PRECISION_NAMES, Settings
from studies.training.teacher import TRIES, cached_pool, make_pool, teach
from studies.training.worlds import ADVICE, base_key, base_model, checkpointed, open_world, out_of_memory, vllm_sampler


def rates(verdicts: list[Verdict], grades: list[TrainingGrade]) -> dict[str, float]:
    """Return the rates ``hack``, ``solve`` (correct on hidden inputs), ``exploit`` (own channel, correct or not) and ``format``."""
    n = len(verdicts)
    return {
        "hack": sum(v.hack for v in verdicts) / n,
        "solve": sum(v.gt for v in verdicts) / n,
        "exploit": sum(v.exploit for v in verdicts) / n,
        "format": sum(g.format for g in grades) / n,
    }


def evaluate(world: World, witness: Witness, policy: Policy, settings: Settings, seed: int) -> dict[str, Any]:
    """Return ``{mode: {"on": rates, "deploy": rates}}``; prompts are fixed, and every arm of a seed uses the same uniforms."""
    prompts = {mode: world.evaluation_prompts(mode, settings.evaluation_prompts) for mode in world.modes.names}
    flat = [prompt for mode in prompts for prompt in prompts[mode]]
    report: dict[str, Any] = {mode: {} for mode in prompts}
    for name, switched in (("on", policy.adapters.full), ("deploy", policy.adapters.deployed)):
        if name == "deploy" and not policy.adapters.has_quarantine:
            return {mode: {"on": both["on"], "deploy": both["on"]} for mode, both in report.items()}  # one and the same model
        with switched():
            samples = world.sample(policy, flat, torch_generator(seed, "evaluate"), settings.evaluation_temperature)
        grades = world.grades(samples)
        verdicts = witness.judge(samples)  # after the grades, because it judges the same executions
        for i, mode in enumerate(prompts):
            rows = slice(i * settings.evaluation_prompts, (i + 1) * settings.evaluation_prompts)
            report[mode][name] = rates(verdicts[rows], grades[rows])
    return report


MANIFEST, EVAL, FULL, DEPLOYED = "manifest.json", "eval.json", "adapters.safetensors", "deployed.safetensors"
BACKEND = "host.json"
"""File of a run folder with host, precision and sampler, if they are not the default ones."""
CHECKPOINT_EVERY = 20
PRECISIONS: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in PRECISION_NAMES})
SAMPLERS = ("torch", "vllm")
RESUME = "vLLM rounds differently in other batches, so a resumed run ends with other bytes than an unbroken one"


REMEDY = "run the command again that made this folder"


@validated
class Manifest:
    """Description of a finished job folder; ``identity`` is a hash of everything that its result depends on."""

    arm: str
    seed: Natural
    status: Literal["finished", "running"]
    identity: str
    settings_hash: str
    arm_spec: dict[str, Any]
    versions: dict[str, str]
    platform: dict[str, str]
    checksums: dict[str, str]
    host: str | None = None
    precision: str | None = None
    sampler: str | None = None
    resume: str | None = None
    pairs_sha256: str | None = None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run folder.

    Raises:
        ValueError: If it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        return read_record(Manifest, read_object(path, REMEDY), optional=("host", "precision", "sampler", "resume", "pairs_sha256"))
    except ValueError as error:
        told = str(error) if str(path) in str(error) else f"{path} is damaged ({error})"
        raise ValueError(f"{told}; delete {folder} to run this arm again") from error


def unusual_entries(manifest: Manifest) -> dict[str, str]:
    """Return host, precision, sampler and the pairs' hash of a run, if they are not the default ones."""
    entries = {name: getattr(manifest, name) for name in ("host", "precision", "sampler", "pairs_sha256")}
    return {name: value for name, value in entries.items() if value is not None}


def refuse_mixed(root: Path, unusual: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if ``root`` holds a run with other pairs, or another host, precision or sampler."""
    for path in sorted(root.glob(f"seed-*/*/{MANIFEST}")):
        if (found := unusual_entries(read_manifest(path.parent))) != unusual:
            raise ValueError(
                f"{path.parent} was run with {found or 'the usual pairs, host and precision'}, and this would be run with "
                f"{dict(unusual) or 'the usual ones'}: give this an --out of its own"
            )


@dataclass(frozen=True)
class Job:
    """One arm at one seed; ``arm`` is ``None`` for the base model (warm start and evaluation only).

    Attributes:
        root: Run folder.
        cache: Folder of warm starts.
        settings: Settings of the run.
        seed: The seed.
        arm: The arm.
        pairs: File of the user's pairs, which replaces the world's own pairs.
        host: Library whose hooks the model runs under; it changes results by rounding only.
        precision: Dtype of training; the warm start is float32 and is cast.
        sampler: ``torch``, or ``vllm`` for a chat model: engine that samples completions. Log-probabilities are always torch's.
    """

    root: Path
    cache: Path
    settings: Settings
    seed: int
    arm: Arm | None
    pairs: Path | None = None
    host: str = "torch"
    precision: str = "float32"
    sampler: str = "torch"

    def __post_init__(self) -> None:
        """Check the arguments before base models are trained.

        Raises:
            ValueError: If the host, the precision or the sampler is unknown, or if the settings do not fit the world.
        """
        for name, known in (("host", HOSTS), ("precision", PRECISIONS), ("sampler", SAMPLERS)):
            if getattr(self, name) not in tuple(known):
                raise ValueError(unknown_name(getattr(self, name), list(known), name))
        if self.sampler == "vllm" and self.settings.chat is None:
            raise ValueError("vLLM samples from a chat model: give --model and --world with it, or leave out --sampler")
        if self.sampler == "vllm":
            self.open_sampler()  # refuses a dtype; starts nothing
        _fit_the_world(self.settings, self.pairs)
        _ = self.pairs_hash  # now, because the file may change while the job runs

    @property
    def name(self) -> str:
        return "base" if self.arm is None else self.arm.name

    @property
    def folder(self) -> Path:
        return self.root / f"seed-{self.seed}" / self.name

    @property
    def spec(self) -> dict[str, Any]:
        """The arm as JSON."""
        if self.arm is None:
            return {"name": "base", "about": "the warm-started model, not trained further", "role": "baseline", "baseline": None}
        described = json.loads(json.dumps(asdict(self.arm)))
        if described["route"].get("relative_to") == "base":  # as runs were described before there was another
            del described["route"]["relative_to"]
        # Settings of few arms, left out of the others' identity.
        usual = {"steps": None, "draw": 0, "canaries": None, "rotated": False, "recall": 1.0}
        usual |= {"kept_lr_scale": 1.0, "penalty": 0.0, "monitor": None}
        usual |= {"taught": None, "lesson_size": None, "lesson_steps": LESSON_STEPS, "kept_taught": None}
        usual |= {"clean": None, "steering": 0.0}
        return {name: value for name, value in described.items() if name not in usual or value != usual[name]}

    @property
    def steps(self) -> int:
        """Number of training steps; 0 for the base model."""
        return 0 if self.arm is None else self.arm.steps or self.settings.steps

    @property
    def drawn(self) -> int:
        """Seed of the adapters, prompts and samples: the job's own, or another draw that shares its base model."""
        return self.seed if self.arm is None or not self.arm.draw else derive(self.seed, "draw", self.arm.draw)

    @property
    def pool(self) -> Path:
        """File of the teacher pool in the cache; another host, precision or sampler draws other bytes."""
        drawn = "-".join([base_key(self.settings, self.seed), *self.backend.values()])
        return self.cache / f"teachers-{self.settings.teachers}-{drawn}.safetensors"

    @property
    def tries(self) -> int:
        """Samples of the base model among which rollouts for a pool are searched."""
        return TRIES if self.settings.chat is None else self.settings.chat.tries

    @property
    def canaries(self) -> "list[Job]":
        """Jobs whose adapters are the canary's checkpoints."""
        return [] if self.arm is None else [replace(self, arm=arm) for arm in get_arms(self.arm.canaries or ())]

    @property
    def identity(self) -> str:
        """Hash of everything that the job's result depends on, except for the code."""
        canaries = [canary.identity for canary in self.canaries]
        described = json.dumps(
            [self.settings.digest, self.seed, self.spec, self.pairs_hash, *self.backend.values(), *canaries], sort_keys=True
        )
        return hashlib.sha256(described.encode()).hexdigest()

    @functools.cached_property
    def pairs_hash(self) -> str | None:
        """SHA-256 of the user's pairs file when the job was made; ``None`` if none was given."""
        return None if self.pairs is None else hashlib.sha256(self.pairs.read_bytes()).hexdigest()

    @staticmethod
    def of(root: Path, seed: int, arm: Arm | None, pairs: Path | None = None) -> "Job":
        """Return a job of the run folder ``root``, with the settings, host and precision stored there."""
        path = root / BACKEND
        backend = read_object(path, REMEDY) if path.exists() else {}
        if unknown := sorted(backend.keys() - {"host", "precision", "sampler"}):
            raise ValueError(f"{path} says {unknown[0]!r}, and knows host, precision and sampler; {REMEDY}")
        return Job(root, root.parent / "warmstarts", Settings.read(root / "settings.json"), seed, arm, pairs, **backend)

    @property
    def backend(self) -> dict[str, str]:
        """Host, precision and sampler, if they are not the default ones."""
        return unusual_backend({"host": self.host, "precision": self.precision, "sampler": self.sampler})

    @property
    def unusual(self) -> dict[str, str]:
        """Entries of the manifest beyond the usual ones: host, precision, sampler, and the user's pairs."""
        return self.noted | ({"resume": RESUME} if self.sampler == "vllm" else {})

    @property
    def noted(self) -> dict[str, str]:
        """Backend and hash of the pairs, if not the default ones, as in ``unusual_entries``."""
        return self.backend | ({} if self.pairs_hash is None else {"pairs_sha256": self.pairs_hash})

    def open_sampler(self) -> AbstractContextManager[Sampler | None]:
        """Return the context of the engine that samples; ``None`` in it if the model itself does."""
        if self.sampler == "torch":
            return nullcontext()
        assert self.settings.chat is not None
        return vllm_sampler(self.settings, self.settings.chat, PRECISIONS[self.precision])

    @property
    def finished(self) -> bool:
        """True if the folder holds this job's result.

        Raises:
            ValueError: If it holds that of another job.
        """
        if not (self.folder / MANIFEST).exists():
            return False
        manifest = read_manifest(self.folder)
        if manifest.identity != self.identity:
            raise ValueError(
                f"{self.folder} holds a run of {self.name!r} under other settings; choose another --out or delete that folder"
            )
        return manifest.status == "finished"


def unusual_backend(backend: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of host, precision and sampler that are not the default ones."""
    usual = {field.name: field.default for field in fields(Job)}
    return {name: value for name, value in backend.items() if value != usual[name]}


@functools.cache
def _fit_the_world(settings: Settings, pairs: Path | None) -> None:
    """Check that the settings fit the world.

    Raises:
        ValueError: If there are fewer tasks than requested, if the world cannot read the pairs, or if the micro model does not have
            the ranks (a chat model is too large to try).
    """
    with open_world(settings) as (world, _):
        asked = world.evaluation_prompts(world.modes.honest, settings.evaluation_prompts)
        if settings.chat is not None:  # the longest prompt of every task, because one that does not fit would end a run midway
            modes, tasks = world.modes.names, [*world.tasks("train"), *world.tasks("test")]
            asked = [max((world.prompt(task, mode) for mode in modes), key=lambda prompt: len(prompt.text)) for task in tasks]
        world.encode([prompt.text for prompt in asked], [""] * len(asked))
        world.make_pairs(0, settings.pairs, "hack")
        if pairs is not None:
            users_pairs(world, pairs)
    if settings.chat is None:
        spec = AdapterSpec(settings.kept, settings.kept_rank, "lora", settings.quarantine_rank)
        generator = torch.Generator()
        attach(MicroGPT(settings.warm.model, generator), *settings.adapt, spec=spec, generator=generator)


def users_pairs(world: World, path: Path) -> list[Pair]:
    """Read the user's persona pairs.

    Raises:
        ValueError: If the world cannot read them.
    """
    try:
        pairs = read_pairs(path)
        if not pairs:
            raise ValueError("it has no pair")
        world.encode_pairs(pairs)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"cannot read persona pairs from {path}: {getattr(error, 'strerror', None) or error}") from error
    return pairs


def build_policy(job: Job, cache: Path) -> Policy:
    """Return the warm-started model with the job's adapters at initialization."""
    return build_hosted(job, cache)[1]


def build_hosted(job: Job, cache: Path) -> tuple[Host, Policy]:
    """Return the policy of `build_policy`, and the host that it runs on."""
    settings, arm = job.settings, job.arm
    model = base_model(settings, job.seed, cache, PRECISIONS[job.precision])
    host = open_host(job.host, model)
    quarantine = "none" if arm is None else arm.quarantine
    spec = AdapterSpec(settings.kept, settings.kept_rank, quarantine, settings.quarantine_rank)
    # One generator draws the kept adapter and then the quarantine, so arms of a seed share all common initial values.
    adapt = settings.adapt if arm is None or arm.adapt is None else arm.adapt
    svds = None if settings.chat is None else cache / "svd"
    adapters = host.attach(*adapt, spec=spec, generator=torch_generator(job.drawn, "adapters"), cache_dir=svds)
    # The model itself samples (its modules are now the host's); training, fitting and scoring run through the host.
    return host, Policy(model, adapters, checkpointed(model, host.policy(adapters).forward))


def finished_policy(job: Job) -> tuple[Host, Policy]:
    """Return the host and the policy of a finished job.

    Raises:
        ValueError: If it is not finished.
    """
    if not job.finished:
        raise ValueError(f"{job.folder} is not finished: run the arm to its end first")
    host, policy = build_hosted(job, job.cache)
    if job.arm is not None:
        load_adapters(policy.adapters, job.folder / FULL)
    return host, policy


def build_pairs(job: Job, world: World, kind: str) -> PairBatch:
    """Return the persona pairs: the user's file for ``hack`` if one was given, otherwise the world's own.

    The world's pairs are also saved in readable form beside the runs.
    """
    if kind == "hack" and job.pairs is not None:
        pairs = users_pairs(world, job.pairs)
        if hashlib.sha256(job.pairs.read_bytes()).hexdigest() != job.pairs_hash:
            raise ValueError(
                f"{job.pairs} was changed since this run was begun: put it back, or give the new pairs an --out of their own"
            )
        return world.encode_pairs(pairs)
    pairs = world.make_pairs(derive(job.seed, "pairs"), job.settings.pairs, kind)
    path = job.root / f"seed-{job.seed}" / f"pairs-{kind}.toml"
    if not path.exists():
        fresh = job.folder / f".{path.name}.tmp"  # in the locked folder, where leftovers of a killed process are deleted
        write_pairs(pairs, fresh)
        fresh.replace(path)
    return world.encode_pairs(pairs)


def build_route(job: Job, world: World, policy: Policy) -> Route:
    """Return the arm's route, with its fitter."""
    arm = job.arm
    assert arm is not None
    spec = arm.route
    if isinstance(spec, EraseSpec):
        fitter: Fitter = TopKFitter("grad", build_pairs(job, world, "hack"), k=spec.k)
        return EraseRoute(spec, HaarFitter(fitter, derive(job.seed, "haar", spec.draw)) if spec.fitter == "haar" else fitter)
    if isinstance(spec, CanarySpec):
        samples = base_samples(world, policy, job.drawn, job.settings.none_fraction)
        micro = job.settings.micro_batch(samples.rollouts.tokens.shape[1])
        return CanaryRoute(spec, build_canary(job), samples.rollouts, micro=micro)
    if isinstance(spec, DelayedSpec):
        return DelayedRoute(spec, arm.l1)
    if arm.monitor is not None:
        assert isinstance(spec, OpenSpec)
        return MonitoredRoute(spec, _mask_route(job, world, arm.monitor), job.settings.micro_batch)
    if not isinstance(spec, MaskSpec):
        return OpenRoute(spec, arm.l1)
    return _mask_route(job, world, spec)


def _mask_route(job: Job, world: World, spec: MaskSpec) -> MaskRoute:
    arm, fitter = job.arm, None
    assert arm is not None
    if spec.score in ("act", "grad", "full"):
        kind = "nonhack" if spec.fitter == "nonhack" else "hack"
        fitter = PersonaFitter(kind, spec.score, build_pairs(job, world, kind), refreshes=kind == "hack")
        if spec.fitter == "haar":
            fitter = HaarFitter(fitter, derive(job.seed, "haar", spec.draw))
    return MaskRoute(spec, fitter, l1=arm.l1, want_unrouted=arm.second_moment == "unrouted")


class MonitoredRoute(OpenRoute):
    """Open route with the probe whose flags cost reward; its direction is fitted, stored and resumed as a mask route's is."""

    def __init__(self, spec: OpenSpec, probe: MaskRoute, micro: Callable[[int], int | None]):
        super().__init__(spec)
        self._probe, self._micro = probe, micro

    def refresh(self, policy: Policy, step: int) -> float | None:
        self._probe.directions = self.directions  # a resumed run has put the stored ones here
        overlap = self._probe.refresh(policy, step)
        self.directions = self._probe.directions
        return overlap

    def score(self, policy: Policy, rollouts: Rollouts) -> Tensor | None:
        return self._probe.score(policy, rollouts)

    def watch(self, policy: Policy, samples: Samples) -> Watched:
        """Flag what scores above the probe's threshold, whatever its reward is."""
        scores = scored(self._probe, policy, samples.rollouts, self._micro)
        return Watched(scores > self._probe.spec.tau, scores)


def scored(route: MaskRoute, policy: Policy, rollouts: Rollouts, micro: Callable[[int], int | None]) -> Tensor:
    """Return the route's score of each rollout, a micro-batch at a time."""
    each = micro(rollouts.tokens.shape[1]) or len(rollouts)
    batches = torch.arange(len(rollouts), device=rollouts.tokens.device).split(each)
    return torch.cat([score for rows in batches if (score := route.score(policy, rollouts.rows(rows))) is not None])


CALIBRATION = 512
"""Samples of the base model from which a canary's threshold is computed."""


def base_samples(world: World, policy: Policy, seed: int, none_fraction: float) -> Samples:
    """Return samples of the base model on training prompts, without grades or verdicts."""
    prompts = world.prompts(CALIBRATION, numpy_generator(seed, "calibration"), none_fraction)
    with policy.adapters.reference():
        return world.sample(policy, prompts, torch_generator(seed, "calibration"), 1.0)


def build_canary(job: Job) -> Canary | None:
    """Return the arm's canary, on a model of its own; ``None`` if the run's own quarantine is the canary.

    Raises:
        ValueError: A checkpoint is not finished.
    """
    assert job.arm is not None
    if not job.canaries:
        return None
    if missing := [canary.name for canary in job.canaries if not canary.finished]:
        raise ValueError(f"{job.name} needs the canaries {', '.join(missing)} of seed {job.seed} first: run them with --arms")
    _, policy = build_hosted(job.canaries[0], job.cache)
    checkpoints = []
    for canary in job.canaries:
        load_adapters(policy.adapters, canary.folder / DEPLOYED)
        if job.arm.rotated:
            rotate(map(policy.adapters.scored, policy.adapters.sites), torch_generator(job.seed, f"rotate {canary.name}"))
        checkpoints.append({name: tensor.clone() for name, tensor in policy.adapters.tensors(quarantine=False).items()})
    return Canary(policy, checkpoints)


@torch.no_grad()
def rotate(factors: Iterable[Tensor], generator: torch.Generator) -> None:
    """Rotate the output of each factor by a random orthogonal matrix: the same norms and singular values, another direction."""
    for factor in factors:
        q, r = torch.linalg.qr(torch.randn(len(factor), len(factor), generator=generator, dtype=torch.float64))
        factor.copy_((q * r.diagonal().sign()) @ factor.double())  # the signs make the distribution uniform


def learn_lessons(job: Job, world: World, policy: Policy, teachers: TeacherPool | None) -> None:
    """Teach the adapters what the arm says, before training.

    Raises:
        ValueError: A lesson needs a teacher pool, and the settings have none.
    """
    arm, settings = job.arm, job.settings
    assert arm is not None
    lessons: list[tuple[Literal["kept", "quarantine"], Lesson | None]] = [("kept", arm.kept_taught), ("quarantine", arm.taught)]
    for adapter, lesson in lessons:
        if lesson is None:
            continue
        if lesson in ("pair-hacks", "pair-clean"):
            pairs = build_pairs(job, world, "hack")
            rollouts = pairs.hack if lesson == "pair-hacks" else pairs.clean
        elif teachers is None:
            raise ValueError(f"{job.name} needs a teacher pool: set teachers to a positive number")
        elif lesson in ("hacks", "random"):
            rollouts = teachers.samples(world).rollouts
        else:
            size, tries = arm.lesson_size or settings.teachers, job.tries
            made = make_pool(world, policy, job.seed, size, tries, lesson=lesson, none_fraction=settings.none_fraction)
            rollouts = made.samples(world).rollouts
        micro = settings.micro_batch(rollouts.tokens.shape[1])
        teach(policy, rollouts, settings.quarantine_lr, micro, arm.lesson_steps, adapter=adapter)
    if arm.taught == "random":
        factors = [p for name, p in policy.adapters.quarantine_parameters().items() if name.endswith(".B")]
        rotate(factors, torch_generator(job.seed, "rotate quarantine"))


def clean_rollouts(job: Job, world: World, route: Route) -> Callable[[Policy, Samples], Tensor] | None:
    """Return the function that marks the rollouts of which the arm says that they are clean; ``None`` if it says nothing."""
    assert job.arm is not None
    if job.arm.clean is None:
        return None
    if job.arm.clean == "honest":
        return lambda policy, samples: torch.tensor([prompt.mode == world.modes.honest for prompt in samples.prompts])
    assert isinstance(route, MaskRoute)

    def below(policy: Policy, samples: Samples) -> Tensor:
        scores = scored(route, policy, samples.rollouts, job.settings.micro_batch)
        return scores < -route.spec.tau

    return below


@contextmanager
def steered(job: Job, world: World, host: Host, policy: Policy) -> Iterator[None]:
    """Context of training: every forward of the model runs under the arm's preventative steering, if it has any."""
    arm = job.arm
    assert arm is not None
    if not arm.steering:
        yield
        return
    layers, pairs = host.layers(), build_pairs(job, world, "hack")
    site = Site(layers[len(layers) // 2], "resid_post")
    with torch.no_grad(), policy.adapters.reference():
        hack, clean = (
            pool(host.capture([site], side.tokens, side.attention)[site], side.predictors) for side in (pairs.hack, pairs.clean)
        )
    vector = (hack - clean).mean(dim=0)
    if arm.rotated:
        drawn = torch.randn(vector.shape, generator=torch_generator(job.seed, "random steering"), dtype=torch.float64).to(vector)
        vector = drawn * (vector.norm() / drawn.norm())
    push = arm.steering * vector
    with host.hooks({site: lambda h: h + push.to(h)}):
        yield


def build_optimizer(job: Job, policy: Policy) -> RoutedAdamW:
    arm, settings = job.arm, job.settings
    assert arm is not None
    groups: list[dict[str, object]] = [
        {"params": list(policy.adapters.kept_parameters().values()), "lr": settings.kept_lr * arm.kept_lr_scale}
    ]
    if policy.adapters.has_quarantine:
        # In a shared basis the quarantine has the same coordinates as the kept adapter, so it has the same learning rate.
        rate = settings.kept_lr if arm.quarantine == "shared" else settings.quarantine_lr
        rate *= arm.quarantine_lr_scale
        groups.append({"params": list(policy.adapters.quarantine_parameters().values()), "lr": rate})
    return RoutedAdamW(groups, lr=settings.kept_lr, betas=settings.betas)


def run_job(job: Job, progress: Callable[[int], None] = lambda n: None, stop: Callable[[], bool] = lambda: False) -> bool:
    """Run or resume a job; ``progress`` receives numbers of finished steps. Return False if ``stop`` ended it early."""
    torch.set_num_threads(1)
    try:
        return _run_locked(job, progress, stop)
    except Exception as error:
        if job.settings.chat is not None and out_of_memory(error):
            raise ValueError(ADVICE) from error
        raise


def _run_locked(job: Job, progress: Callable[[int], None], stop: Callable[[], bool]) -> bool:
    with held(job.folder):
        if not job.finished:
            return _run(job, progress, stop)
        _drop_checkpoints(job.folder)  # of a run that was killed when it had just ended
    progress(job.steps if job.arm else 1)
    return True


def _run(job: Job, progress: Callable[[int], None], stop: Callable[[], bool]) -> bool:
    with job.open_sampler() as sampler, open_world(job.settings, sampler) as (world, witness):
        host, policy = build_hosted(job, job.cache)
        if job.arm is not None:
            with steered(job, world, host, policy):
                trained = _train(job, world, witness, policy, progress, stop)
            if not trained:
                return False
        report = evaluate(world, witness, policy, job.settings, job.seed)
    _finish(job, policy, report)
    progress(1 if job.arm is None else 0)
    return True


def _train(
    job: Job, world: World, witness: Witness, policy: Policy, progress: Callable[[int], None], stop: Callable[[], bool]
) -> bool:
    assert job.arm is not None
    settings, folder = job.settings, job.folder
    route, optimizer = build_route(job, world, policy), build_optimizer(job, policy)
    teachers = cached_pool(world, policy, job.seed, settings.teachers, job.pool, job.tries)
    learn_lessons(job, world, policy, teachers)
    recorder = Recorder(folder, world, witness, teachers, settings.probe_every)
    start = resume(folder, policy.adapters, optimizer, route, identity=job.identity, logs=(METRICS, ROLLOUTS))
    recorder.go_on()
    progress(start)
    began = time.perf_counter()
    mixed = teachers if settings.teachers_per_group else None
    detector = witness if job.arm.recall == 1 else Forgetful(witness, job.arm.recall, derive(job.drawn, "recall"))
    steps = train(
        world, detector, policy, route, optimizer, replace(settings, steps=job.steps),
        seed=job.drawn, start=start, none_fraction=job.arm.none_fraction, teachers=mixed,
        penalty=job.arm.penalty, monitor=route.watch if isinstance(route, MonitoredRoute) else None,
        clean=clean_rollouts(job, world, route), stop=stop,
    )  # fmt: skip
    done = start
    for record in steps:
        recorder.note(record, policy, route)
        done = record.step + 1
        if done % CHECKPOINT_EVERY == 0 or done == job.steps:
            logs = recorder.flush()
            save_checkpoint(folder, policy.adapters, optimizer, route, step=done, identity=job.identity, logs=logs)
        progress(1)
    seconds = {"from": start, "to": done, "seconds": time.perf_counter() - began}
    append(folder / TIMINGS, (json.dumps(seconds) + "\n").encode())
    if done == job.steps:
        recorder.check()  # otherwise the manifest would certify logs that something else changed
    return done == job.steps


def _finish(job: Job, policy: Policy, report: dict[str, Any]) -> None:
    folder = job.folder
    write_json(folder / EVAL, {"arm": job.name, "seed": job.seed, "n": job.settings.evaluation_prompts, "modes": report})
    files = [EVAL]
    if job.arm is not None:
        save_adapters(policy.adapters, folder / FULL, "full")
        save_adapters(policy.adapters, folder / DEPLOYED, "deployed")
        files += [METRICS, ROLLOUTS, FULL, DEPLOYED]
    libraries = ("torch", "numpy", "mi-route2") if job.settings.chat is None else ("torch", "numpy", "transformers", "mi-route2")
    versions = {"python": platform.python_version(), **{name: version(name) for name in libraries}}
    if job.sampler == "vllm":
        from mi_route2.vllm.facts import imported

        versions["vllm"] = imported().__version__  # several packages install this module
    manifest = {
        "arm": job.name,
        "seed": job.seed,
        "status": "finished",
        "identity": job.identity,
        "settings_hash": job.settings.digest,
        "arm_spec": job.spec,
        "versions": versions,
        "platform": {
            "system": platform.system(),
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # other kernels round differently, also for equal seeds
        },
        **job.unusual,
        "checksums": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
    }
    write_json(folder / MANIFEST, manifest)
    _drop_checkpoints(folder)


def _drop_checkpoints(folder: Path) -> None:
    for name in (PREVIOUS, CHECKPOINT):  # in this order, so that a kill in between leaves the newest
        (folder / name).unlink(missing_ok=True)
