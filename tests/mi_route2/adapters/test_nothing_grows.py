"""A finished step is freed: what a gate holds must not hold the graph that holds the gate."""

import gc
import weakref

import pytest
import torch
from tiny_policy import SPECS, make_batch, make_policy, policy_loss

from mi_route2.routing import HaarFitter, MaskRoute, MaskSpec, PairBatch, PersonaFitter, StepContext
from mi_route2.specs import LEGAL

pytestmark = pytest.mark.process

METHODS = [key for key in LEGAL if key[0] in ("act", "grad", "full")]


@pytest.mark.parametrize("key", METHODS, ids="-".join)
@pytest.mark.parametrize("kind", ["svd", "lora"])
def test_every_tape_is_freed_after_its_step(key: tuple[str, str, str], kind: str) -> None:
    policy, batch = make_policy(SPECS[kind]), make_batch()
    score, unit, score_policy = key
    pairs = PairBatch(batch.rollouts.rows(torch.arange(3)), batch.rollouts.rows(torch.arange(3, 6)), "test")
    persona = PersonaFitter("hack", score, pairs)  # pyright: ignore
    spec = MaskSpec(score=score, unit=unit, score_policy=score_policy)  # pyright: ignore
    route = MaskRoute(spec, HaarFitter(persona, 0))
    route.refresh(policy, 0)
    tapes = []
    for _ in range(2):
        step = route.begin(policy, batch, StepContext(torch.Generator()))
        for micro_batch in step.micro_batches:
            tapes.append(weakref.ref(micro_batch.tape))
            with policy.adapters.recording(micro_batch.tape):
                policy_loss(policy, micro_batch.batch, micro_batch.advantages).backward()
        step.finish()
    del step, micro_batch
    gc.collect()
    assert [tape() for tape in tapes] == [None] * len(tapes)
