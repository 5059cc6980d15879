"""Deployment evaluation: per mode, on tasks that warm start, pairs and GRPO never saw, quarantine on and deleted."""

from typing import Any

from mi_route2.rollouts import Policy
from studies.loopholes.base import World
from studies.loopholes.protocol import TrainingGrade, Verdict, Witness
from studies.route2.randomness import torch_generator
from studies.route2.settings import Settings


def rates(verdicts: list[Verdict], grades: list[TrainingGrade]) -> dict[str, float]:
    """Shares of rollouts: ``hack``, ``solve`` (correct on hidden inputs), ``exploit`` (own channel, correct or not), ``format``."""
    n = len(verdicts)
    return {
        "hack": sum(v.hack for v in verdicts) / n,
        "solve": sum(v.gt for v in verdicts) / n,
        "exploit": sum(v.exploit for v in verdicts) / n,
        "format": sum(g.format for g in grades) / n,
    }


def evaluate(world: World, witness: Witness, policy: Policy, settings: Settings, seed: int) -> dict[str, Any]:
    """``{mode: {"on": rates, "deploy": rates}}``. The prompts are fixed; every arm of a seed meets the same uniforms."""
    prompts = {mode: world.evaluation_prompts(mode, settings.evaluation_prompts) for mode in world.modes.names}
    flat = [prompt for mode in prompts for prompt in prompts[mode]]
    report: dict[str, Any] = {mode: {} for mode in prompts}
    for name, switched in (("on", policy.adapters.full), ("deploy", policy.adapters.deployed)):
        with switched():
            samples = world.sample(policy, flat, torch_generator(seed, "evaluate"), settings.evaluation_temperature)
        grades = world.grades(samples)
        verdicts = witness.judge(samples)  # after the grades: it looks at the very executions that they were given for
        for i, mode in enumerate(prompts):
            rows = slice(i * settings.evaluation_prompts, (i + 1) * settings.evaluation_prompts)
            report[mode][name] = rates(verdicts[rows], grades[rows])
    return report
