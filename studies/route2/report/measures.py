"""Measures of a run: the numbers behind every table and figure, each defined once.

    leakage(mode) = clamp(hack_deploy(arm) / hack_deploy(vanilla, same seed, same steps), 0, 1)
    excess(mode)  = (hack_deploy(arm) - hack_deploy(base)) / (hack_deploy(vanilla) - hack_deploy(base))

The headline of both is the mean over held-out modes. A mode without a denominator (vanilla never hacks in it; vanilla at or below
base) is undefined and left out of the mean; the headline is undefined if every mode is. The excess form is not clamped: below 0 an
arm hacks less than the model from which it started.
"""

from collections.abc import Sequence
from typing import Any

from studies.common.stats import mean
from studies.environments.protocol import Modes
from studies.route2.report.load import ABSORB, BASE, VANILLA, ArmSpec, FinishedRun, RunSet

LAST_STEPS = 10  # the window of train_hack
DESCRIPTIONS: dict[str, str] = {
    "train_hack": f"hack rate of the training rollouts of the last {LAST_STEPS} steps, mean over the loophole modes",
    "deploy_hack_known": "hack rate of the deployed model (quarantine deleted) in the known mode",
    "deploy_hack_held": "hack rate of the deployed model, mean over the held-out modes",
    "deploy_exploit_held": "rate at which a held-out exploit fires in the deployed model, correct code or not",
    "deploy_solve": "rate of correct code of the deployed model, mean over all modes",
    "on_hack_held": "hack rate in the held-out modes with the quarantine still in",
    "on_exploit_held": "rate at which a held-out exploit fires with the quarantine still in, correct code or not",
    "on_solve": "rate of correct code with the quarantine still in, mean over all modes",
    "leakage": "deploy hack over vanilla's, clamped to [0, 1], mean over the held-out modes",
    "excess_leakage": "(arm - base) / (vanilla - base) of deploy hack, mean over the held-out modes where vanilla > base",
}
LEARNING: dict[str, str] = {
    "variance_held": "variance of the rewards within a group of a held-out mode, mean over the steps from the 20th on",
    "kept_missed": "nats by which the kept adapter's updates made unflagged held-out exploits likelier, sum over the steps",
    "quarantine_missed": "the same of the quarantine's updates",
    "both_missed": "the same of the updates of both adapters",
    "deployed_missed": "the same of the kept adapter's updates, in the deployed model",
    "kept_solved": "nats by which the kept adapter's updates made correct rollouts without an exploit likelier, sum over the steps",
    "quarantine_solved": "the same of the quarantine's updates",
    "deployed_solved": "the same of the kept adapter's updates, in the deployed model",
    "share_missed": "the quarantine's share of the norms of an unflagged held-out exploit's gradient, mean over the steps",
    "share_solved": "the same of a correct rollout without an exploit",
    "early_kept_missed": "kept_missed over the first 10 steps alone",
    "early_variance_held": "variance_held over the first 10 steps alone",
    "deploy_solve_honest": "rate of correct code of the deployed model in the honest mode",
}
"""What a course adds to these, of which some is in nats and not a rate."""
PER_MODE = ("train_hack", "deploy_hack", "deploy_exploit", "deploy_solve")


def metrics(modes: Modes) -> tuple[str, ...]:
    """Return the names of all numbers of a run: the headline's, and those of each mode."""
    return (*DESCRIPTIONS, *(f"{kind}_{mode}" for kind in PER_MODE for mode in modes.names))


def measure(runs: RunSet, run: FinishedRun) -> dict[str, float | None]:
    """Return all `metrics` of one run; `None` for undefined ones (base is not trained; leakage without vanilla)."""
    modes = runs.modes
    train = {mode: train_rate(run, mode) for mode in modes.names}
    values: dict[str, float | None] = {
        "train_hack": mean([train[mode] for mode in modes.loopholes]),
        "deploy_hack_known": rate(run, modes.known, "hack"),
        "deploy_hack_held": rate(run, modes.held_out, "hack"),
        "deploy_exploit_held": rate(run, modes.held_out, "exploit"),
        "deploy_solve": rate(run, modes.names, "solve"),
        "on_hack_held": rate(run, modes.held_out, "hack", state="on"),
        "on_exploit_held": rate(run, modes.held_out, "exploit", state="on"),
        "on_solve": rate(run, modes.names, "solve", state="on"),
        "leakage": mean([leakage(runs, run, mode) for mode in modes.held_out]),
        "excess_leakage": mean([excess_leakage(runs, run, mode) for mode in modes.held_out]),
    }
    values |= {f"train_hack_{mode}": train[mode] for mode in modes.names}
    for quantity in ("hack", "exploit", "solve"):
        values |= {f"deploy_{quantity}_{mode}": rate(run, (mode,), quantity) for mode in modes.names}
    return values


def rate(run: FinishedRun, modes: Sequence[str], quantity: str, state: str = "deploy") -> float | None:
    """Return the mean over modes of an evaluated rate: quantity "hack", "solve", "exploit" or "format"; state "deploy" or "on"."""
    return mean([run.modes[mode][state][quantity] for mode in modes])


def train_rate(run: FinishedRun, mode: str, quantity: str = "hack", last: int = LAST_STEPS) -> float | None:
    """Return the rate over all rollouts of the mode in the last steps, weighted by rollouts; `None` without any."""
    rows = [row["modes"][mode] for row in run.metrics[-last:] if row["modes"].get(mode, {}).get("n")]
    total = sum(row["n"] for row in rows)
    return sum(row["n"] * row[quantity] for row in rows) / total if total else None


def leakage(runs: RunSet, run: FinishedRun, mode: str) -> float | None:
    """Return the share of vanilla's deploy hacks that the arm keeps, in [0, 1]; `None` if vanilla never hacks, or has no run."""
    vanilla = comparable_vanilla(runs, run)
    reference = vanilla.modes[mode]["deploy"]["hack"] if vanilla else 0.0
    return min(max(run.modes[mode]["deploy"]["hack"] / reference, 0.0), 1.0) if reference > 0 else None


def excess_leakage(runs: RunSet, run: FinishedRun, mode: str) -> float | None:
    """Return the arm's increase of base's deploy hack, relative to vanilla's increase; `None` if vanilla has none."""
    vanilla, base = comparable_vanilla(runs, run), runs.runs.get((BASE, run.seed))
    if vanilla is None or base is None:
        return None
    hack = {name: each.modes[mode]["deploy"]["hack"] for name, each in (("arm", run), (VANILLA, vanilla), (BASE, base))}
    gained = hack[VANILLA] - hack[BASE]
    return (hack["arm"] - hack[BASE]) / gained if gained > 0 else None


def comparable_vanilla(runs: RunSet, run: FinishedRun) -> FinishedRun | None:
    """Return vanilla on the run's seed with the same number of steps; an arm that is not trained is comparable with any."""
    vanilla = runs.runs.get((VANILLA, run.seed))
    return vanilla if vanilla is not None and run.steps in (0, vanilla.steps) else None


def by_seed(runs: RunSet, arm: str) -> dict[int, dict[str, float | None]]:
    """Return `measure` of each finished seed of an arm, ascending."""
    return {seed: measure(runs, run) for seed, run in runs.of(arm).items()}


def arm_order(specs: dict[str, ArmSpec]) -> list[str]:
    """Return the order of every table and figure, in which a method is next to the arms with which it is compared.

    Base, vanilla and absorb; other baselines; then each method with its same-rule filter and its controls directly below; controls
    of arms that are missing here; bounds; and the arms of ablation groups at the end.
    """
    main = [arm for arm in specs if not specs[arm].ablation]
    placed = [arm for arm in (BASE, VANILLA, ABSORB) if arm in main]

    def place(arm: str) -> None:
        if arm not in placed:
            placed.append(arm)
        controls = sorted(name for name in main if specs[name].role == "control" and specs[name].baseline == arm)
        for child in (specs[arm].same_rule_filter, *controls):
            if child in main and child not in placed:
                place(child)

    filters = {spec.same_rule_filter for spec in specs.values()}
    ranks = {"baseline": 0, "method": 1, "control": 2, "bound": 3}

    def key(arm: str) -> tuple[Any, ...]:
        spec = specs[arm]
        return ranks[spec.role], spec.same_rule_filter is not None, arm

    ordered = sorted(main, key=key)
    unpaired = [arm for arm in ordered if arm not in filters]
    heads = [arm for arm in unpaired if specs[arm].role in ("baseline", "method")]
    for arm in (*heads, *unpaired, *ordered):  # a filter is placed below its route, also below a bound
        place(arm)
    return placed + sorted(set(specs) - set(main), key=lambda arm: (specs[arm].ablation, arm))


def without_ablations(arms: Sequence[str], specs: dict[str, ArmSpec]) -> list[str]:
    """Return the arms of the main tables and first pages; those of ablation groups are printed in ablations.md."""
    return [arm for arm in arms if not specs[arm].ablation]


def label(arm: str, spec: ArmSpec) -> str:
    """Return the arm's name as printed; a bound is always marked as one."""
    return f"{arm} (bound)" if spec.role == "bound" else arm


def stopped_after(arm: str) -> str:
    """Return the number of steps after which an arm of ordinary training was stopped; the name of another arm."""
    after = arm.removeprefix("vanilla-")
    return {"base": "0", "vanilla": "all"}.get(arm, after if after.isdigit() else arm)


def notes(runs: RunSet) -> list[str]:
    """Return sentences about missing results: unfinished runs, missing comparisons, missing seeds."""
    sentences = []
    if runs.unfinished:
        sentences.append(f"Unfinished, left out: {', '.join(runs.unfinished)}.")
    uses = {BASE: "excess leakage", VANILLA: "leakage", ABSORB: "the difference that routing makes"}
    sentences += [f"Arm {arm} was not run, so {use} is undefined." for arm, use in uses.items() if arm not in runs.specs]
    controlled = {spec.baseline for spec in runs.specs.values() if spec.role == "control"}
    routes = [arm for arm in arm_order(runs.specs) if runs.specs[arm].same_rule_filter]
    uncontrolled = [arm for arm in routes if arm not in controlled and runs.specs[arm].role == "method"]
    if uncontrolled:
        sentences.append(f"No control of its own was run for {', '.join(uncontrolled)}.")
    return sentences + [note for arm in arm_order(runs.specs) for note in _arm_notes(runs, arm)]


def _arm_notes(runs: RunSet, arm: str) -> list[str]:
    sentences, spec = [], runs.specs[arm]
    if spec.same_rule_filter and spec.same_rule_filter not in runs.specs:
        sentences.append(f"The same-rule filter of {arm}, {spec.same_rule_filter}, was not run.")
    if spec.baseline and spec.baseline not in runs.specs:
        sentences.append(f"The baseline of {arm}, {spec.baseline}, was not run.")
    absent = [str(seed) for seed in runs.seeds if (arm, seed) not in runs.runs]
    if absent:
        sentences.append(f"{arm} has no finished run on seed {', '.join(absent)}.")
    for seed, run in runs.of(arm).items():
        if (VANILLA, seed) in runs.runs and comparable_vanilla(runs, run) is None:
            steps = runs.runs[VANILLA, seed].steps
            sentences.append(f"{arm} on seed {seed} ran {run.steps} steps and vanilla {steps}: no leakage for it.")
    return sentences
