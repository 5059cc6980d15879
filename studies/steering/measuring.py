"""Experiments that read more than outcomes: scores for the ROC, log-probabilities with an in-batch control, and the shadow."""

import torch
from torch import Tensor

from mi_route2.engine.controllers import ProbeController
from mi_route2.engine.request import Result
from mi_route2.sites import Site
from studies.common.artifacts import Artifact
from studies.environments.micro.language import Vocabulary, get_mode
from studies.steering.cells import Bench, checked, delayed, refuse_failures, steered
from studies.steering.fitting import Fitted, sites_of
from studies.steering.settings import SteeringSettings


def roc(bench: Bench, settings: SteeringSettings, fitted: Fitted) -> Artifact:
    """Return the scores of every probe at the generated tokens of the model's own rollouts, and the oracle's verdicts.

    ``scores/<site>/<probe>`` is ``[rollouts tokens]``, NaN after the end of a rollout; ``exploits`` has the position of the first
    exploit token among the generated ones, or -1.
    """
    prompts = bench.prompts()
    with bench.policy.adapters.full():
        results = _generated(bench, bench.requests(prompts, None, capture=sites_of(settings)))
    width = bench.world.max_new
    tensors = {"outcomes": bench.outcomes(prompts, results), "exploits": first_exploits(bench, results, [p.mode for p in prompts])}
    for site in sites_of(settings):
        rows = [result.captured[site].rows[len(prompt.tokens) :] for prompt, result in zip(prompts, results, strict=True)]
        for name, gate in fitted.gates[site].items():
            table = torch.full((len(rows), width), float("nan"))
            for i, h in enumerate(rows):
                table[i, : len(h)] = h.float() @ gate.weight
            tensors[f"scores/{site}/{name}"] = table
    return {"cells": []}, tensors


def first_exploits(bench: Bench, results: list[Result], modes: list[str]) -> Tensor:
    """Return the position of the first token of its mode's exploit among a rollout's generated tokens; -1 if there is none."""
    vocabulary, positions = Vocabulary(), []
    for result, mode in zip(results, modes, strict=True):
        exploit = get_mode(mode).exploit
        ids = result.ids
        positions.append(ids.index(vocabulary.id(exploit[0])) if exploit and vocabulary.id(exploit[0]) in ids else -1)
    return torch.tensor(positions)


def logprobs(bench: Bench, settings: SteeringSettings, fitted: Fitted) -> Artifact:
    """Return the change of the log-probability of the exploit's first token by steering, against an unsteered twin in the batch.

    It is read at the first token at which the gate opens: nothing acted before it, so both twins wrote the same tokens.
    ``deltas/<cell>`` has one difference per rollout; NaN if the gate never opened, or if the mode has no exploit.
    """
    prompts = bench.prompts()
    names = ["away", *(name for name in fitted.directions if name != "away")]
    cells = [
        steered(settings, fitted, quantile=settings.operating, gain=gain, direction=direction)
        for direction in names
        for gain in (settings.gains if direction == "away" else (settings.gain,))
    ]
    gate = fitted.gates[Site.parse(settings.site)]["probe"]
    with bench.policy.adapters.full():
        engine = bench.engine()
        twins = bench.requests(prompts, None, capture=(gate.site,), with_exploit=True)
        lots = [twins, *(bench.requests(prompts, cell.steering, with_exploit=True) for cell in cells)]
        # prompt by prompt, so that a request and its twins are in one batch
        flat = engine.generate([lot[i] for i in range(len(prompts)) for lot in lots], progress=False)
    control = [checked(result) for result in flat[:: len(lots)]]
    tensors: dict[str, Tensor] = {}
    threshold = gate.thresholds[settings.operating]
    opened = [_opened(result, gate.weight, threshold, len(p.tokens)) for result, p in zip(control, prompts, strict=True)]
    for number, cell in enumerate(cells, start=1):
        of_cell = [checked(result) for result in flat[number :: len(lots)]]
        tensors[f"deltas/{cell.name}"] = torch.tensor(
            [_delta(a, b, at) for a, b, at in zip(of_cell, control, opened, strict=True)], dtype=torch.float64
        )
    return {"cells": [{"name": cell.name, **cell.about} for cell in cells]}, tensors


def _opened(result: Result, weight: Tensor, threshold: float, prompt: int) -> int:
    """Return the first generated token that the model read with a score at or above the threshold; -1 if there is none."""
    (captured,) = result.captured.values()
    above = (captured.rows[prompt:].float() @ weight >= threshold).nonzero()
    return int(above[0]) if len(above) else -1


def _delta(steered: Result, control: Result, at: int) -> float:
    """Return the effect of steering on generated token ``at`` on the exploit's log-probability in the next token's prediction."""
    if at < 0 or not control.tokens[at + 1].requested:
        return float("nan")
    if steered.ids[: at + 1] != control.ids[: at + 1]:
        return float("nan")  # a score within float noise of the threshold acted earlier than in its twin
    return steered.tokens[at + 1].requested[0] - control.tokens[at + 1].requested[0]


def shadow(bench: Bench, settings: SteeringSettings, fitted: Fitted) -> Artifact:
    """Compare, in exact mode, a policy that decides but has no effect with no policy at all; return also its decisions."""
    prompts = bench.prompts(settings.exact)
    cell = delayed(settings, fitted, 1, settings.gain, shadow=True)
    with bench.policy.adapters.full():
        plain = _generated(bench, bench.requests(prompts, None, with_exploit=True), exact=True)
        engine = bench.engine(exact=True, controllers=cell.controllers)
        watched = [
            checked(result) for result in engine.generate(bench.requests(prompts, cell.steering, with_exploit=True), progress=False)
        ]
    refuse_failures(engine)
    (policy,) = cell.controllers
    assert isinstance(policy, ProbeController)
    same = sum(a.ids == b.ids and a.logprobs == b.logprobs for a, b in zip(plain, watched, strict=True))
    decided = {decision.request for decision in policy.decisions if decision.engaged}
    about = {
        "rollouts": len(prompts),
        "bit_equal": same,
        "decisions": len(policy.decisions),
        "engaged": len(decided),
        "actions": engine.controllers.applied["shadow"],
    }
    return {"cells": [], "shadow": about}, {}


def _generated(bench: Bench, requests: list, *, exact: bool = False) -> list[Result]:
    return [checked(result) for result in bench.engine(exact=exact).generate(requests, progress=False)]
