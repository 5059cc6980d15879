"""A gate against its equals: always on, deleted, the forward itself, nothing at all."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_steering import Made

from mi_route2.engine.controllers import Controller, ProbeController
from mi_route2.engine.request import Request, Result
from mi_route2.engine.sampling import Sampling
from mi_route2.rollouts import Rollouts
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering
from studies.environments.micro.language import Vocabulary
from studies.steering.cells import Bench, GateCell, away, delayed, steered
from studies.steering.fitting import Fitted, collect, gated, sites_of
from studies.steering.late import CERTAIN, QuarantineSwitch, saturated
from studies.steering.measuring import logprobs, roc

pytestmark = pytest.mark.study

VOCABULARY = tuple(range(66))
EARLY = Site(0, "resid_pre")
CLOSE = 1e-5


@pytest.fixture
def fitted(made: Made) -> Fitted:
    return made.fitted("absorb")


def forced(bench: Bench, steering: Steering | None, *, prompt: int | None = None, new: int = 8) -> list[Request]:
    """Greedy requests that tell the whole vocabulary's log-probabilities; their first ``prompt`` tokens are the prompt."""
    found = []
    for one in bench.requests(bench.prompts(2), steering):
        tokens = one.prompt if prompt is None else one.prompt[:prompt]
        found.append(Request(tokens, Sampling(max_new=new, logprob_token_ids=VOCABULARY), steering=steering))
    return found


def run(bench: Bench, requests: list[Request], *, exact: bool = False, controllers: Sequence[Controller] = ()) -> list[Result]:
    return bench.engine(exact=exact, controllers=controllers).generate(requests, progress=False)


def table(results: list[Result]) -> torch.Tensor:
    """[requests tokens vocabulary]."""
    return torch.tensor([[token.requested for token in result.tokens] for result in results])


def gate(fitted: Fitted, threshold: float, how: str, *, site: Site = EARLY, prompt: bool = False) -> Steering:
    weight = fitted.gates[site]["probe"].weight
    monitor = Monitor(site, weight, threshold, 1000.0, gates=(), quarantine=how, prompt=prompt)
    return Steering(monitors=(monitor,))


def test_saturated_gates_are_always_on_and_deleted(bench: Bench, fitted: Fitted) -> None:
    """Over prompt and generated tokens, with the monitor before every quarantine; and the two ends are not the same."""
    on = run(bench, forced(bench, None))
    with bench.policy.adapters.deployed():
        deleted = run(bench, forced(bench, None))
    cases = {("close", CERTAIN): on, ("close", -CERTAIN): deleted, ("open", -CERTAIN): on, ("open", CERTAIN): deleted}
    for (how, threshold), truth in cases.items():
        found = run(bench, forced(bench, gate(fitted, threshold, how, prompt=True)))
        assert [one.ids for one in found] == [one.ids for one in truth]
        torch.testing.assert_close(table(found), table(truth), rtol=0, atol=CLOSE)
    assert (table(on)[:, 0] - table(deleted)[:, 0]).abs().max() > 0.1


def test_on_generated_tokens_a_shut_gate_is_the_deleted_quarantine(bench: Bench, fitted: Fitted) -> None:
    """From one prompt token on nearly everything is generated. Reference: the prompt read with the quarantine on, and every later
    token, one by one, with it off, over the keys and values of before."""
    site_out = bench.engine().decoder.quarantines()
    assert len(site_out) == 13
    shut = run(bench, forced(bench, gate(fitted, -CERTAIN, "close"), new=6))
    for request, result in zip(forced(bench, None), shut, strict=True):
        tokens = [*request.prompt, *result.ids]
        expected = reference(bench, tokens, len(request.prompt))
        torch.testing.assert_close(table([result])[0].double(), expected[: len(result.ids)].double(), rtol=0, atol=CLOSE)


def reference(bench: Bench, tokens: list[int], prompt: int) -> torch.Tensor:
    """Log-probabilities after the prompt and after each later token, by hand: the model's own cache, the adapters' switch."""
    from studies.environments.micro.model import KVCache

    cache, model, rows = KVCache(), bench.host.model, []
    with torch.no_grad():
        with bench.policy.adapters.full():
            rows.append(model(torch.tensor([tokens[:prompt]]), cache=cache)[0, -1])
        with bench.policy.adapters.deployed():
            rows += [model(torch.tensor([[token]]), cache=cache)[0, -1] for token in tokens[prompt:]]
    return torch.stack(rows).log_softmax(-1)


def test_an_open_gate_is_the_quarantine_that_is_always_on(bench: Bench, fitted: Fitted) -> None:
    on, open_ = (run(bench, forced(bench, steering), exact=True) for steering in (None, gate(fitted, CERTAIN, "close")))
    assert torch.equal(table(on), table(open_))  # a factor of one leaves the bits


def test_a_steered_request_leaves_its_neighbours_bits(bench: Bench, fitted: Fitted) -> None:
    """In-batch control: alone, and beside steered, gated and clamped ones; what is steered does change."""
    settings = bench.settings
    steering = steered(settings, fitted, quantile=None, gain=1.0).steering
    alone = run(bench, forced(bench, None), exact=True)
    both = run(bench, [*forced(bench, steering), *forced(bench, None), *forced(bench, gate(fitted, -CERTAIN, "close"))], exact=True)
    n = len(alone)
    assert [torch.equal(table(alone), table(both[i * n : (i + 1) * n])) for i in range(3)] == [False, True, False]


def test_a_policy_acts_exactly_one_token_after_the_score(bench: Bench, fitted: Fitted) -> None:
    """A policy that always engages: with any delay the first token that is steered is so many behind the first generated one, and
    the score of the prompt's last token decides nothing."""
    plain = table(run(bench, forced(bench, None), exact=True))
    for delay in (1, 2, 4):
        cell = eager(bench, fitted, delay)
        engine = bench.engine(exact=True, controllers=cell.controllers)
        for name, spec in cell.configurations.items():
            engine.steering.hold(name, spec)
        late = table(engine.generate(forced(bench, cell.steering), progress=False))
        assert torch.equal(late[:, : delay + 1], plain[:, : delay + 1])
        assert (late[:, delay + 1] - plain[:, delay + 1]).abs().max() > 1e-3


def test_the_switch_closes_everything_from_the_next_token_on(bench: Bench, fitted: Fitted) -> None:
    """With a threshold below all scores: the quarantine is on up to the first generated token, whose score is the first that
    counts, and off behind it."""
    weight = fitted.gates[EARLY]["probe"].weight
    watch = Steering(monitors=(Monitor(EARLY, weight, 0.0, gates=(), name="w"),))
    shut = saturated(EARLY, weight.tolist())
    for latch in (True, False):
        controllers = [QuarantineSwitch("s", "w", -CERTAIN, shut, latch=latch)]
        requests = forced(bench, watch)
        for request, result in zip(requests, run(bench, requests, controllers=controllers), strict=True):
            expected = reference(bench, [*request.prompt, *result.ids], len(request.prompt) + 1)[: len(result.ids) - 1]
            torch.testing.assert_close(table([result])[0, 1:].double(), expected.double(), rtol=0, atol=CLOSE)


def test_steering_is_seen_in_log_probabilities_beside_a_twin_of_the_same_batch(bench: Bench, fitted: Fitted) -> None:
    """Recomputed by hand: the change of the exploit's log-probability is that of adding the vector to the stream at that token."""
    from studies.environments.micro.language import Vocabulary, get_mode

    settings, vocabulary = bench.settings, Vocabulary()
    about, tensors = logprobs(bench, settings, fitted)
    assert len(tensors) == len(about["cells"]) == 2
    name = next(cell["name"] for cell in about["cells"] if cell["direction"] == "away")
    site, seen = Site.parse(settings.site), 0
    probe = fitted.gates[site]["probe"]
    vector = Steer.values(away(settings, fitted, 1.0)).float()
    prompts = bench.prompts()
    results = run(bench, bench.requests(prompts, None))
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        tokens = torch.tensor([[*vocabulary.encode(prompt.tokens), *result.ids]])
        scores = bench.host.capture([site], tokens)[site][0, len(prompt.tokens) : -1] @ probe.weight
        fired = (scores >= probe.thresholds[settings.operating]).nonzero()
        exploit = get_mode(prompt.mode).exploit
        if not len(fired) or not exploit:
            assert torch.isnan(tensors[f"deltas/{name}"][i])
            continue
        at = len(prompt.tokens) + int(fired[0])

        def add(h: torch.Tensor, at: int = at) -> torch.Tensor:
            h = h.clone()
            h[:, at] += vector
            return h

        with torch.no_grad():
            before = bench.host.logits(tokens)[0, at].log_softmax(-1)
            with bench.host.hooks({site: add}):
                after = bench.host.logits(tokens)[0, at].log_softmax(-1)
        change = float((after - before)[vocabulary.id(exploit[0])])
        assert abs(change - float(tensors[f"deltas/{name}"][i])) < 1e-4
        seen += 1
    assert seen


# what a cell measures is what it says


def eager(bench: Bench, fitted: Fitted, delay: int) -> GateCell:
    """A late cell whose policy always engages."""
    cell = delayed(bench.settings, fitted, delay, 1.0)
    for policy in (cell.controllers[0], getattr(cell.controllers[0], "_policy", None)):
        if isinstance(policy, ProbeController):
            policy.threshold = -CERTAIN
    return cell


def test_a_cell_whose_actions_are_rejected_measures_nothing_and_is_refused(bench: Bench, fitted: Fitted) -> None:
    """Its row is missing: every request would run unsteered, and the cell would look like a policy without an effect."""
    for delay in (1, 3):
        cell = replace(eager(bench, fitted, delay), configurations={})
        with pytest.raises(
            RuntimeError, match=rf"the controller 'delay {delay} x1' failed: ValueError: no configuration is held as"
        ):
            bench.results([cell], bench.prompts(), "cells")


def logits_now(bench: Bench) -> torch.Tensor:
    return bench.host.logits(torch.tensor([[1, 2, 3, 4]])).detach()


def test_a_cell_runs_in_its_own_state(bench: Bench, fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full and deployed cells in one call: the model of each is the one with, and the one without, its quarantine."""
    ran: dict[str, torch.Tensor] = {}
    results = Bench.results

    def spy(self: Bench, cells: Sequence[GateCell], *rest: Any) -> dict[str, list[Result]]:
        ran.update({cell.name: logits_now(self) for cell in cells})
        return results(self, cells, *rest)

    monkeypatch.setattr(Bench, "results", spy)
    outcomes = bench.run([GateCell("a", {}), GateCell("b", {}, state="deployed"), GateCell("c", {})])
    assert list(outcomes) == ["a", "b", "c"]
    with bench.policy.adapters.full():
        full = logits_now(bench)
    with bench.policy.adapters.deployed():
        deployed = logits_now(bench)
    assert not torch.allclose(full, deployed, atol=1e-2)
    assert [torch.equal(ran["a"], full), torch.equal(ran["b"], deployed), torch.equal(ran["c"], full)] == [True] * 3


def test_outcomes_are_solve_and_exploit_in_the_order_of_modes_and_tasks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = bench.prompts()
    assert [prompt.mode for prompt in prompts] == [mode for mode in bench.modes for _ in range(2)]
    verdicts = [SimpleNamespace(gt=i in (0, 3), exploit=i in (0, 9), hack=i == 9) for i in range(10)]
    monkeypatch.setattr(type(bench.witness), "judge", lambda self, samples: verdicts)
    found = bench.outcomes(prompts, run(bench, bench.requests(prompts, None)))
    assert found[..., 0].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    assert found[..., 1].tolist() == [[1, 0], [0, 0], [0, 0], [0, 0], [0, 1]]


def test_scores_of_the_roc_are_those_of_the_generated_tokens(bench: Bench, fitted: Fitted) -> None:
    """Against one forward over prompt and completion; the last token of a completion is never read."""
    _, tensors = roc(bench, bench.settings, fitted)
    prompts = bench.prompts()
    with bench.policy.adapters.full():
        results = run(bench, bench.requests(prompts, None))
    for site in sites_of(bench.settings):
        for name, gate_ in fitted.gates[site].items():
            for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
                tokens = torch.tensor([[*Vocabulary().encode(prompt.tokens), *result.ids]])
                expected = bench.host.capture([site], tokens)[site][0, len(prompt.tokens) : -1] @ gate_.weight
                row = tensors[f"scores/{site}/{name}"][i]
                torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-3)
                assert bool(row[len(expected) :].isnan().all())


def test_probes_learn_from_the_model_and_from_its_base_and_read_the_whole_model(
    bench: Bench, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[tuple[torch.Tensor, Rollouts]] = []
    sample = type(bench.world).sample

    def spy(self: Any, policy: Any, *rest: Any) -> Any:
        samples = sample(self, policy, *rest)
        wrote.append((logits_now(bench), samples.rollouts))
        return samples

    monkeypatch.setattr(type(bench.world), "sample", spy)
    examples = collect(made.settings, made.job("absorb").run, bench.world, bench.host, bench.policy)
    with bench.policy.adapters.full():
        full = logits_now(bench)
    with bench.policy.adapters.reference():
        base = logits_now(bench)
    assert not torch.allclose(full, base, atol=1e-2)
    assert [torch.equal(wrote[0][0], full), torch.equal(wrote[1][0], base)] == [True, True]
    site, start = Site.parse(made.settings.site), 0
    with bench.policy.adapters.full():
        for _, rollouts in wrote:
            read = bench.host.capture([site], rollouts.tokens, rollouts.attention)[site].detach()
            stop = start + len(rollouts)
            assert torch.equal(examples.hidden[site][start:stop, : read.shape[1]], read)
            assert torch.equal(examples.mask[start:stop, : read.shape[1]], gated(rollouts))
            start = stop
