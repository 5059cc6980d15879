"""Hack rates of sampled rollouts, under zero patches and with adapters deleted, on the same prompts and uniforms.

    on                  both adapters on
    deleted             the quarantine deleted: weights merged without it, as deployed
    quarantine patched  zeros patched at every quarantine_out of every forward; nothing is deleted
    kept patched        zeros patched at every kept_out: the effect of the quarantine alone
    base                both adapters off

``deleted`` and ``quarantine patched`` must give the same answers. They are computed differently (one weight per Linear in the
first, three products in the second), so an answer may differ if a draw falls within a rounding error.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mi_route2.hosts import Host
from mi_route2.rollouts import Policy
from studies.common.seeds import torch_generator
from studies.environments.micro.world import MicroWorld
from studies.environments.protocol import Samples, Witness
from studies.tracing.patching import sites_at

ON, DELETED, PATCHED, KEPT_PATCHED, BASE = "on", "deleted", "quarantine patched", "kept patched", "base"
STATES = (ON, DELETED, PATCHED, KEPT_PATCHED, BASE)


def rate_states(
    world: MicroWorld, witness: Witness, host: Host, policy: Policy, prompts: Sequence[Any], seed: int
) -> dict[str, dict[str, float]]:
    """Return ``{state: {"hack", "exploit", "solve", "as_deleted"}}``, as shares of the prompts.

    ``as_deleted`` is the share of answers that equal, token by token, those of ``deleted``. States of a quarantine are left out if
    there is none.
    """
    samples = {state: _sample(world, host, policy, prompts, seed, state) for state in _states(policy)}
    deleted = samples[DELETED].completions
    rates = {}
    for state, rollouts in samples.items():
        verdicts, n = witness.judge(rollouts), len(prompts)
        rates[state] = {
            "hack": sum(v.hack for v in verdicts) / n,
            "exploit": sum(v.exploit for v in verdicts) / n,
            "solve": sum(v.gt for v in verdicts) / n,
            "as_deleted": sum(a == b for a, b in zip(rollouts.completions, deleted, strict=True)) / n,
        }
    return rates


def _states(policy: Policy) -> tuple[str, ...]:
    return STATES if policy.adapters.has_quarantine else (ON, DELETED, KEPT_PATCHED, BASE)


def _sample(world: MicroWorld, host: Host, policy: Policy, prompts: Sequence[Any], seed: int, state: str) -> Samples:
    # A new generator for every state: all of them draw the same uniforms, and differ only in their logits.
    generator, adapters = torch_generator(seed, "tracing rates"), policy.adapters
    switched = {DELETED: adapters.deployed, BASE: adapters.reference}.get(state, adapters.full)
    point = {PATCHED: "quarantine_out", KEPT_PATCHED: "kept_out"}.get(state)
    if point is None:
        with switched():
            return world.sample(policy, prompts, generator)
    edits = dict.fromkeys(sites_at(adapters, point), torch.zeros_like)
    with adapters.full(), host.hooks(edits):  # merged weights have no points to patch
        return world.sample_unmerged(policy, prompts, generator)
