"""Anything may happen between steps: requests come, are cancelled and put back, steering changes. Each result is that of one whole
forward over its tokens, with at each position what was in force when that position was computed."""

from dataclasses import dataclass, field

import pytest
import torch
from families import VOCAB, make_family
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mi_route2.engine import Capture, Engine, Request, Result, Sampling
from mi_route2.hosts import open_host
from mi_route2.patching.patches import Patch
from mi_route2.sites import Site
from mi_route2.steering.specs import Steer, Steering

pytestmark = pytest.mark.machine

HOST = open_host("torch", make_family("MicroGPT", torch.float64))
SITE, PATCHED = Site(1, "resid_pre"), Site(0, "mlp_out")
VECTORS = torch.randn(6, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
STEM = tuple(torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(4)).tolist())


@dataclass
class Expected:
    """A request, and what was added at ``SITE`` at each position that was computed so far."""

    request: Request
    override: bool = False
    added: list[Tensor] = field(default_factory=list)


class Running(RuleBasedStateMachine):
    @initialize(rows=st.integers(1, 3), chunk=st.integers(2, 9), room=st.none() | st.integers(44, 70))
    def start(self, rows: int, chunk: int, room: int | None) -> None:
        self.engine = Engine(HOST, rows=rows, budget=rows + 6, chunk=chunk, room=room, block=4, steering_rows=4)
        self.engine.steering.hold("held", Steering(decode=(Steer(SITE, VECTORS[5]),)))
        self.known: dict[int, Expected] = {}
        self.done: list[Result] = []
        self.tier: Tensor | None = None

    @rule(
        shared=st.integers(0, 14), own=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=8), new=st.integers(1, 6),
        steer=st.none() | st.integers(0, 1), patch=st.none() | st.integers(0, 20), priority=st.integers(0, 1),
        capture=st.booleans(),
    )  # fmt: skip
    def submit(
        self, shared: int, own: list[int], new: int, steer: int | None, patch: int | None, priority: int, capture: bool
    ) -> None:
        prompt = (*STEM[:shared], *own)
        asked = Sampling(max_new=new, logprob_token_ids=tuple(range(VOCAB)))
        patches = () if patch is None or patch >= len(prompt) + new - 1 else (Patch(PATCHED, patch, VECTORS[2], 0.5),)
        steering = None if steer is None else Steering(base=(Steer(SITE, VECTORS[steer]),))
        captures = (Capture(PATCHED),) if capture else ()
        request = Request(prompt, asked, patches, steering, captures, priority=priority)
        self.known[self.engine.submit(request)] = Expected(request)

    def living(self) -> list[int]:
        return sorted(self.known.keys() - {result.request for result in self.done})

    @rule(data=st.data())
    @precondition(lambda self: self.living())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.living())))
        self.take(self.engine.step)

    @rule(data=st.data())
    @precondition(lambda self: self.living())
    def put_back(self, data: st.DataObject) -> None:
        running = [one.id for one in self.engine.scheduler.running]
        if running:
            self.engine.preempt(data.draw(st.sampled_from(running)))

    @rule(which=st.integers(3, 4))
    def set_tier(self, which: int) -> None:
        self.tier = VECTORS[which]
        self.engine.steering.set_tier([Steer(SITE, self.tier)])

    @rule()
    def clear_tier(self) -> None:
        self.tier = None
        self.engine.steering.clear_tier()

    @rule(data=st.data(), on=st.booleans())
    @precondition(lambda self: self.engine.steering.requests)
    def override(self, data: st.DataObject, on: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.engine.steering.requests)))
        self.engine.steering.override(request, "held" if on else None)
        self.known[request].override = on

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.engine.step)

    def take(self, step) -> None:
        """One step; whatever positions it computed had what is in force now."""
        before = {number: one.computed for number, one in self.engine._requests.items()}
        sequences = dict(self.engine._requests)
        results = step()
        for number, one in sequences.items():
            expected = self.known[number]
            start = max(before[number], one.result.cached)  # a prefix that was found had the same, or it would not be found
            for position in range(len(expected.added), one.computed):
                expected.added.append(self.in_force(expected, position))
            assert one.computed >= start
        self.done += results

    def in_force(self, expected: Expected, position: int) -> Tensor:
        steering, decode = expected.request.steering, position >= len(expected.request.prompt)
        base = torch.zeros(16, dtype=torch.float64) if steering is None else steering.base[0].values()
        if not decode:
            return base
        row = VECTORS[5] if expected.override else base
        return row if self.tier is None else row + self.tier

    @invariant()
    def nothing_is_lost_or_held_for_nobody(self) -> None:
        if hasattr(self, "known"):
            living = set(self.living())
            assert set(self.engine._requests) == living
            assert set(self.engine.steering.requests) <= living

    @torch.no_grad()
    def teardown(self) -> None:
        if not hasattr(self, "known"):
            return
        for _ in range(400):
            if not self.engine.busy:
                break
            self.take(self.engine.step)
        assert not self.engine.busy
        self.engine.steering.drop("held")
        assert self.engine.steering.snapshot()["rows"]["used"] == 0
        assert len(self.done) == len(self.known)
        for result in self.done:
            self.check(result)
        self.engine.close()

    def check(self, result: Result) -> None:
        expected = self.known[result.request]
        if not result.tokens:
            assert result.finish == "cancelled"
            return
        tokens = torch.tensor([[*expected.request.prompt, *result.ids[:-1]]])
        seen: list[Tensor] = []

        def patched(h: Tensor) -> Tensor:
            seen.append(h[0].clone())
            new = h.clone()
            for one in expected.request.patch:
                if one.position < h.shape[1]:
                    new[0, one.position] = 0.5 * h[0, one.position] + 0.5 * VECTORS[2]
            return new

        added = torch.stack(expected.added)[: tokens.shape[1]]
        with HOST.hooks({SITE: lambda h: h + added, PATCHED: patched}):
            logits = HOST.logits(tokens)[0, len(expected.request.prompt) - 1 :]
        found = torch.tensor([token.requested for token in result.tokens], dtype=torch.float64)
        torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=1e-9)
        assert result.ids == found.argmax(-1).tolist()
        for captured in result.captured.values():
            torch.testing.assert_close(captured.rows, seen[0][list(captured.positions)], rtol=0, atol=1e-9)
            assert captured.positions[: tokens.shape[1]] == tuple(range(tokens.shape[1]))


TestRunning = Running.TestCase
TestRunning.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
