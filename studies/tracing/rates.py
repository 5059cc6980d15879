"""Hack rates of sampled rollouts, under zero patches and with lanes deleted: the same prompts and uniforms each time.

    on                  both adapters in
    deleted             the quarantine deleted: weights merged without it, as it ships
    quarantine patched  zeros put in at every quarantine_out of every forward; nothing is deleted
    kept patched        zeros put in at every kept_out: what the quarantine does alone
    base                both switched off

``deleted`` and ``quarantine patched`` must answer alike. They are computed in different ways (one weight a Linear in the first,
three products in the second), so a draw that falls on a rounding error may differ.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mi_route2.hosts import Host
from mi_route2.rollouts import Policy
from mi_route2.sites import Site
from studies.common.seeds import torch_generator
from studies.environments.micro.world import MicroWorld
from studies.environments.protocol import Samples, Witness

ON, DELETED, PATCHED, KEPT_PATCHED, BASE = "on", "deleted", "quarantine patched", "kept patched", "base"
STATES = (ON, DELETED, PATCHED, KEPT_PATCHED, BASE)


def rate_states(
    world: MicroWorld, witness: Witness, host: Host, policy: Policy, prompts: Sequence[Any], seed: int
) -> dict[str, dict[str, float]]:
    """``{state: {"hack", "exploit", "solve", "as_deleted"}}``, shares of the prompts.

    ``as_deleted``: answers that are, token by token, those of ``deleted``. States of a quarantine only where there is one.
    """
    samples = {state: _sample(world, host, policy, prompts, seed, state) for state in _states(policy)}
    deleted = samples[DELETED].completions
    found = {}
    for state, one in samples.items():
        verdicts, n = witness.judge(one), len(prompts)
        found[state] = {
            "hack": sum(v.hack for v in verdicts) / n,
            "exploit": sum(v.exploit for v in verdicts) / n,
            "solve": sum(v.gt for v in verdicts) / n,
            "as_deleted": sum(a == b for a, b in zip(one.completions, deleted, strict=True)) / n,
        }
    return found


def _states(policy: Policy) -> tuple[str, ...]:
    return STATES if policy.adapters.has_quarantine else (ON, DELETED, KEPT_PATCHED, BASE)


def _sample(world: MicroWorld, host: Host, policy: Policy, prompts: Sequence[Any], seed: int, state: str) -> Samples:
    generator, adapters = torch_generator(seed, "tracing rates"), policy.adapters
    switched = {DELETED: adapters.deployed, BASE: adapters.reference}.get(state, adapters.full)
    point = {PATCHED: "quarantine_out", KEPT_PATCHED: "kept_out"}.get(state)
    if point is None:
        with switched():
            return world.sample(policy, prompts, generator)
    edits = {Site.parse(f"{linear}.{point}"): torch.zeros_like for linear in adapters.sites}
    with adapters.full(), host.hooks(edits):  # merged weights have no points to patch
        return world.sample_unmerged(policy, prompts, generator)
