"""Run of jobs: train an arm, evaluate it with the quarantine on and deleted, and write the result.

The evaluation runs per mode, on tasks that warm start, pairs and GRPO never saw.
"""

import contextlib
import hashlib
import multiprocessing
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mi_route2.adapters import save_adapters
from mi_route2.rollouts import Policy
from mi_route2.routing import Route
from mi_route2.validation import write_json
from studies.common.seeds import torch_generator
from studies.common.workers import Executor, job_lock, run_each
from studies.environments.protocol import TeacherPool, Witness, World
from studies.training.build import (
    build_optimizer,
    build_route,
    build_screen,
    forget_quarantine,
    learn_lesson,
    steered,
)
from studies.training.checkpoint import CHECKPOINT, PREVIOUS, resume, save_checkpoint
from studies.training.grpo import StepRecord, train
from studies.training.job import DEPLOYED, EVAL, FULL, Job, build_hosted
from studies.training.manifest import MANIFEST
from studies.training.recorder import METRICS, ROLLOUTS, Recorder, opened, rates
from studies.training.settings import Settings
from studies.training.teacher import cached_pool
from studies.training.tracking import curves, numbers
from studies.training.worlds import ADVICE, open_world, out_of_memory

CHECKPOINT_EVERY = 20


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    executor: Executor = Executor(),  # noqa: B008 - frozen
    *,
    quiet: bool = False,
    report_to: str | None = None,
) -> list[str]:
    """Run all jobs that are not finished; return a sentence for each failure.

    Base models are trained first, because arms start from them, then arms, then arms whose canary is made of other arms' adapters.

    Args:
        jobs: The jobs.
        workers: Number of processes of this machine.
        executor: Where jobs run.
        quiet: Show no progress bar.
        report_to: Name of a tracker (see ``tracking``).
    """
    failures, failed = list[str](), set[Path]()
    for what, stage in zip(("base models", "arms", "arms with a canary"), stages(jobs), strict=True):
        todo = [job for job in stage if not job.finished]
        late = [job for job in todo if failed & needed(job)]
        failed |= {job.folder for job in late}
        failures += [f"{job.name} at seed {job.seed} cannot start: a run that it starts from failed" for job in late]
        todo = [job for job in todo if job not in late]
        if not todo:
            continue
        work = partial(run_job, report_to=report_to)
        lost = run_each(work, todo, workers=workers, executor=executor, folder=todo[0].root, what=what, quiet=quiet)
        failures += [f"{job.name} at seed {job.seed} failed: {reason}" for job, reason in lost]
        failed |= {job.folder for job, _ in lost}
    return failures


def stages(jobs: Sequence[Job]) -> tuple[list[Job], list[Job], list[Job]]:
    """Return the base models, the arms that need nothing else, and the arms that need other arms' adapters."""
    by_stage: tuple[list[Job], list[Job], list[Job]] = ([], [], [])
    for job in jobs:
        by_stage[0 if job.arm is None else 2 if job.canaries else 1].append(job)
    return by_stage


def needed(job: Job) -> set[Path]:
    """Return the folders of the jobs from which this one starts."""
    base = set() if job.arm is None or job.settings.chat is not None else {job.folder.with_name("base")}
    return base | {canary.folder for canary in job.canaries}


def run_job(job: Job, report_to: str | None = None) -> None:
    """Run a job, or go on with it from its last checkpoint."""
    torch.set_num_threads(1)  # the bits of a base model depend on the number of threads
    try:
        with job_lock(job.folder):
            if job.finished:
                _drop_checkpoints(job.folder)  # of a run that was killed when it had just ended
            else:
                _run(job, report_to)
    except Exception as error:
        if job.settings.chat is not None and out_of_memory(error):
            raise ValueError(ADVICE) from error
        raise


def _run(job: Job, report_to: str | None) -> None:
    with job.open_sampler() as sampler, open_world(job.settings, sampler, job.device) as (world, witness):
        host, policy = build_hosted(job, job.cache)
        if job.arm is not None:
            # before anything steers the model, because all arms of a seed read this file
            teachers = cached_pool(world, policy, job.seed, job.settings.teachers, job.pool, job.tries)
            with steered(job, world, host, policy):
                _train(job, world, witness, policy, teachers, report_to)
        report = evaluate(world, witness, policy, job.settings, job.seed)
    _finish(job, policy, report)
    if job.arm is not None and report_to is not None:
        with curves(report_to, job, job.steps) as log:
            log(job.steps, numbers(report, "eval"))


def _train(
    job: Job,
    world: World,
    witness: Witness,
    policy: Policy,
    teachers: TeacherPool | None,
    report_to: str | None,
) -> None:
    assert job.arm is not None
    settings, folder = job.settings, job.folder
    for name in (METRICS, ROLLOUTS):
        opened(folder / name).close()  # what is in the place of one is told now, and not once there is something to lose
    for path in (folder / CHECKPOINT, folder / PREVIOUS):
        if path.is_dir():
            raise OSError(f"{path} is a folder; move away what is in its place")
    route, optimizer = build_route(job, world, policy), build_optimizer(job, policy)
    learn_lesson(job, world, policy, teachers)
    recorder = Recorder(folder, world, witness, teachers, settings)
    start = resume(folder, policy.adapters, optimizer, route, identity=job.identity, logs=(METRICS, ROLLOUTS))
    recorder.go_on()
    records = training(job, world, witness, policy, route, optimizer, teachers, start=start)
    alone = multiprocessing.parent_process() is None  # beside others, only the bar of all jobs is shown
    with curves(report_to, job, start) as log:
        for record in tqdm(records, job.name, job.steps, initial=start, leave=False, delay=3, disable=None if alone else True):
            row = recorder.note(record, policy, route)
            log(record.step, numbers(row, "train"))
            done = record.step + 1
            if done % CHECKPOINT_EVERY == 0 or done == job.steps:
                logs = recorder.flush()
                save_checkpoint(folder, policy.adapters, optimizer, route, step=done, identity=job.identity, logs=logs)
    recorder.check()  # otherwise the manifest would certify logs that something else changed


def training(
    job: Job,
    world: World,
    witness: Witness,
    policy: Policy,
    route: Route,
    optimizer: torch.optim.AdamW,
    teachers: TeacherPool | None,
    *,
    start: int = 0,
) -> Iterator[StepRecord]:
    """Train the job's arm from step ``start``, with what its arm brings to the main loop; yield a record after each step."""
    assert job.arm is not None
    arm, settings = job.arm, job.settings
    records = train(
        world, witness, policy, route, optimizer, replace(settings, steps=job.steps),
        seed=job.drawn, start=start, teachers=teachers if settings.teachers_per_group else None, penalty=arm.penalty,
        instruct=arm.instruct, screen=build_screen(job, policy),
    )  # fmt: skip
    for record in records:
        done = record.step + 1
        if arm.forget_every and done % arm.forget_every == 0 and done < job.steps:
            forget_quarantine(policy, optimizer)
        yield record


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
            "processor": _processor(),
            **({"accelerator": torch.cuda.get_device_name(policy.device)} if policy.device.type == "cuda" else {}),
        },
        **job.unusual,
        "checksums": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
    }
    write_json(folder / MANIFEST, manifest)
    _drop_checkpoints(folder)


def _processor() -> str:
    """Return the processor's maker, family, model and stepping, by which kernels are chosen among those of its instructions."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        names = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part")  # the last two on ARM
        return " ".join(facts[name] for name in names if name in facts)
    return platform.processor()


def _drop_checkpoints(folder: Path) -> None:
    for name in (PREVIOUS, CHECKPOINT):  # in this order, so that a kill in between leaves the newest
        (folder / name).unlink(missing_ok=True)


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
            formed = sum(grade.format for grade in grades[rows]) / settings.evaluation_prompts
            report[mode][name] = {**rates(verdicts[rows]), "format": formed}
    return report
