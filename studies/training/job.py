"""Job: one arm at one seed, or the base model alone. What identifies its result, where it is kept, and the model that it trains.

``run.run_job`` trains and evaluates a job; ``build`` makes what its arm brings to the main loop.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mi_route2.adapters import Adapters, AdapterSpec, attach, load_adapters
from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import PairBatch
from mi_route2.tensor_files import read_tensors
from mi_route2.validation import read_object, unknown_name
from studies.common.command_line import named
from studies.common.seeds import derive, torch_generator
from studies.environments.chat import Sampler
from studies.environments.micro.model import MicroGPT
from studies.environments.protocol import PersonaPair, World, read_pairs, write_pairs
from studies.training.arms import CANARIES, Arm
from studies.training.manifest import MANIFEST, REMEDY, read_manifest, verify
from studies.training.settings import PRECISION_NAMES, Settings
from studies.training.teacher import TRIES
from studies.training.worlds import base_key, base_model, checkpointed, open_world, vllm_sampler

EVAL, FULL, DEPLOYED = "eval.json", "adapters.safetensors", "deployed.safetensors"
BACKEND = "host.json"
"""File of a run folder with host, precision, sampler and device, if they are not the default ones."""
PRECISIONS: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in PRECISION_NAMES})
SAMPLERS = ("torch", "vllm")
BACKENDS = ("host", "precision", "sampler", "device")
"""Fields of a job that say what it is computed with; results of another differ by rounding."""


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
        device: Device of a micro model; that of a chat model is a setting.
        pairs_hash: SHA-256 of the file of pairs when the job was first made: the file may change while the job runs.
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
    device: str = "cpu"
    pairs_hash: str | None = None

    def __post_init__(self) -> None:
        """Check the arguments before base models are trained.

        Raises:
            ValueError: If the host, the precision or the sampler is unknown or cannot run the arm, if a device is given for a chat
                model, or if the settings do not fit the world.
        """
        for name, known in (("host", HOSTS), ("precision", PRECISIONS), ("sampler", SAMPLERS)):
            if getattr(self, name) not in tuple(known):
                raise ValueError(unknown_name(getattr(self, name), list(known), name))
        if self.sampler == "vllm" and self.settings.chat is None:
            raise ValueError("vLLM samples from a chat model: give --model and --world with it, or leave out --sampler")
        if self.sampler == "vllm" and self.arm is not None and self.arm.steering:
            raise ValueError(f"vLLM samples from a model without the steering of {self.name!r}: leave out this arm or --sampler")
        if self.sampler == "vllm":
            self.open_sampler()  # refuses a dtype; starts nothing
        if self.settings.chat is not None and self.device != "cpu":
            raise ValueError("the device of a chat model is a setting: give chat.device in place of --device")
        _fit_the_world(self.settings, self.pairs)
        if self.pairs is not None and self.pairs_hash is None:
            object.__setattr__(self, "pairs_hash", hashlib.sha256(self.pairs.read_bytes()).hexdigest())

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
        return json.loads(json.dumps(asdict(self.arm)))

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
        """File of the teacher pool in the cache; another host, precision, sampler or device draws other bytes."""
        drawn = "-".join([base_key(self.settings, self.seed), *self.backend.values()])
        return self.cache / f"teachers-{self.settings.teachers}-{drawn}.safetensors"

    @property
    def tries(self) -> int:
        """Samples of the base model among which rollouts for a pool are searched."""
        return TRIES if self.settings.chat is None else self.settings.chat.tries

    @property
    def canaries(self) -> "list[Job]":
        """Jobs whose adapters are the canary's checkpoints."""
        if self.arm is None or not self.arm.canaries:
            return []
        return [replace(self, arm=CANARIES[name]) for name in self.arm.canaries]

    @property
    def identity(self) -> str:
        """Hash of everything that the job's result depends on, except for the code."""
        canaries = [canary.identity for canary in self.canaries]
        described = json.dumps(
            [self.settings.digest, self.seed, self.spec, self.pairs_hash, *self.backend.values(), *canaries], sort_keys=True
        )
        return hashlib.sha256(described.encode()).hexdigest()

    @staticmethod
    def of(root: Path, seed: int, arm: Arm | None, pairs: Path | None = None) -> "Job":
        """Return a job of the run folder ``root``, with the settings and the backend stored there."""
        root = named(root)
        path = root / BACKEND
        backend = read_object(path, REMEDY) if path.exists() else {}
        cache = base_cache(root.parent, backend.get("device", "cpu"))
        return Job(root, cache, Settings.read(root / "settings.json"), seed, arm, pairs, **backend)

    @property
    def backend(self) -> dict[str, str]:
        """Host, precision, sampler and device, if they are not the default ones."""
        return unusual_backend({name: getattr(self, name) for name in BACKENDS})

    @property
    def unusual(self) -> dict[str, str]:
        """Backend and hash of the pairs, if not the default ones."""
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
            if manifest.pairs_sha256 != self.pairs_hash:
                raise ValueError(
                    f"{self.folder} holds a run of {self.name!r} with other persona pairs: give the --pairs that it was made with "
                    "(or none, if none were given), or choose another --out"
                )
            raise ValueError(
                f"{self.folder} holds a run of {self.name!r} under other settings; choose another --out or delete that folder"
            )
        return manifest.status == "finished"


def unusual_backend(backend: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of host, precision, sampler and device that are not the default ones."""
    usual = {field.name: field.default for field in fields(Job)}
    return {name: value for name, value in backend.items() if value != usual[name]}


def base_cache(out: Path, device: str) -> Path:
    """Return the folder of warm starts beside the run folders in ``out``; those of another device have other bits."""
    return out / "-".join(["warmstarts", *unusual_backend({"device": device}).values()])


@functools.cache
def _fit_the_world(settings: Settings, pairs: Path | None) -> None:
    """Check that the settings fit the world.

    Raises:
        ValueError: If there are fewer tasks than requested, if the world cannot read the pairs, or if the micro model does not have
            the ranks (a chat model is too large to try).
    """
    with open_world(settings) as (world, _):
        prompts = world.evaluation_prompts(world.modes.honest, settings.evaluation_prompts)
        if settings.chat is not None:  # the longest prompt of every task, because one that does not fit would end a run midway
            modes, tasks = world.modes.names, [*world.tasks("train"), *world.tasks("test")]
            prompts = [max((world.prompt(task, mode) for mode in modes), key=lambda prompt: len(prompt.text)) for task in tasks]
        world.encode([prompt.text for prompt in prompts], [""] * len(prompts))
        world.make_pairs(0, settings.pairs, "hack")
        if pairs is not None:
            users_pairs(world, pairs)
    if settings.chat is None:
        spec = AdapterSpec(settings.kept, settings.kept_rank, "lora", settings.quarantine_rank)
        generator = torch.Generator()
        attach(MicroGPT(settings.warm.model, generator), *settings.adapt, spec=spec, generator=generator)


def users_pairs(world: World, path: Path) -> list[PersonaPair]:
    """Read the user's persona pairs.

    Raises:
        ValueError: If the world cannot read them.
    """
    try:
        pairs = read_pairs(path)
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
    model = base_model(settings, job.seed, cache, PRECISIONS[job.precision], device=job.device)
    host = open_host(job.host, model)
    quarantine = "none" if arm is None else arm.quarantine
    spec = AdapterSpec(settings.kept, settings.kept_rank, quarantine, settings.quarantine_rank)
    # One generator draws the kept adapter and then the quarantine, so arms of a seed share all common initial values.
    svds = None if settings.chat is None else cache / "svd"
    adapters = host.attach(*settings.adapt, spec=spec, generator=torch_generator(job.drawn, "adapters"), cache_dir=svds)
    # The model itself samples (its modules are now the host's); training, fitting and scoring run through the host.
    return host, Policy(model, adapters, checkpointed(model, host.policy(adapters).forward))


def finished_policy(job: Job) -> tuple[Host, Policy]:
    """Return the host and the policy of a finished job.

    Raises:
        ValueError: If it is not finished, its weights are not those that it ended with, or its base model was trained again.
    """
    if not job.finished:
        raise ValueError(f"{job.folder} is not finished: run the arm to its end first")
    host, policy = build_hosted(job, job.cache)
    if job.arm is not None:
        load_trained(policy.adapters, job, FULL)
    return host, policy


def load_trained(adapters: Adapters, job: Job, name: str) -> None:
    """Copy the file ``name`` of a finished job into ``adapters``.

    Raises:
        ValueError: As ``verify`` does, because another arm's weights may fit as well; or the base model was trained again since.
    """
    verify(job.folder, {name: read_manifest(job.folder).checksums[name]})
    path = job.folder / name
    if read_tensors(path)[1].get("base_hash") != adapters.base_hash:
        raise ValueError(
            f"{path} was trained on another base model than the one in {job.cache}, which was made again since: put the former "
            f"one back, or delete {job.folder} and run this arm again"
        )
    load_adapters(adapters, path)


def micro_batches(rollouts: Rollouts, settings: Settings) -> list[Rollouts]:
    """Return the rollouts in micro-batches of the run, in order."""
    each = settings.micro_batch(rollouts.tokens.shape[1]) or len(rollouts)
    return [rollouts.rows(rows) for rows in torch.arange(len(rollouts), device=rollouts.tokens.device).split(each)]


def build_pairs(job: Job, world: World, kind: str) -> PairBatch:
    """Return the persona pairs: the user's file for ``hack`` if one was given, otherwise the world's own.

    The world's pairs are also saved in readable form beside the runs. Those of a chat model run one at a time, because a
    gradient of all its weights is as large as these.
    """
    if kind == "hack" and job.pairs is not None:
        pairs = users_pairs(world, job.pairs)
        if hashlib.sha256(job.pairs.read_bytes()).hexdigest() != job.pairs_hash:
            raise ValueError(
                f"{job.pairs} was changed since this run was begun: put it back, or give the new pairs an --out of their own"
            )
    else:
        pairs = world.make_pairs(derive(job.seed, "pairs"), job.settings.pairs, kind)
        path = job.root / f"seed-{job.seed}" / f"pairs-{kind}.toml"
        if not path.exists():
            fresh = job.folder / f".{path.name}.tmp"  # in the locked folder, where leftovers of a killed process are deleted
            write_pairs(pairs, fresh)
            fresh.replace(path)
    return replace(world.encode_pairs(pairs), micro=job.settings.micro if job.settings.chat is None else 1)
