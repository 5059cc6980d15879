"""Split of what a training step adds to log-probabilities between the two adapters: which of them learned what.

Let L_b(k, q) be the log-probability, in nats, of the completion of rollout b with the kept adapter k and the quarantine q, and let
a step lead from (k, q) to (k', q'). Each adapter's part is its Shapley value among two, so that both add up to the whole change:

    kept_b       = ((L_b(k', q) - L_b(k, q)) + (L_b(k', q') - L_b(k, q'))) / 2
    quarantine_b = ((L_b(k, q') - L_b(k, q)) + (L_b(k', q') - L_b(k', q))) / 2
    deployed_b   = L_b(k', none) - L_b(k, none)                              what stays once the quarantine is deleted

Nothing is linearized, so Adam's moments, learning rates and clipping are in it. Beside it stands the size of the gradients, by
which "magnitude sorts them" if the quarantine's are larger for what it should take:

    share_b = |g_b^quarantine| / (|g_b^quarantine| + |g_b^kept|),            g_b = d L_b / d (all factors of the adapter)

Source of the split: Shapley, "A value for n-person games" (1953).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.adapters import Adapters
from mi_route2.adapters.gradients import FactorGradient
from mi_route2.adapters.tape import LearnNothing, Tape
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing.directions import untouched


@dataclass(frozen=True)
class State:
    """Factors of both adapters at one point of training."""

    kept: Mapping[str, Tensor]
    quarantine: Mapping[str, Tensor]

    @staticmethod
    def of(adapters: Adapters) -> "State":
        """Return a copy of the factors as they are now."""
        kept, quarantine = (
            {name: p.detach().clone() for name, p in parameters.items()}
            for parameters in (adapters.kept_parameters(), adapters.quarantine_parameters())
        )
        return State(kept, quarantine)


@torch.no_grad()
def learned(policy: Policy, rollouts: Rollouts, before: State) -> dict[str, Float[Tensor, " b"]]:
    """Return ``kept``, ``deployed`` and, if there is one, ``quarantine``: the nats of the module's equations since ``before``.

    The adapters are afterwards what they are now, bit for bit.
    """
    adapters = policy.adapters
    kept, quarantine = adapters.kept_parameters(), adapters.quarantine_parameters()

    def nats() -> Tensor:
        return policy.logprobs(rollouts).sum(dim=1)

    with adapters.deployed():
        deployed = nats()
        with put_back(kept, before.kept):
            deployed = deployed - nats()
    if not quarantine:
        return {"kept": deployed, "deployed": deployed}
    with adapters.full():
        both = nats()
        with put_back(kept, before.kept):
            quarantine_alone = nats()
            with put_back(quarantine, before.quarantine):
                neither = nats()
        with put_back(quarantine, before.quarantine):
            kept_alone = nats()
    return {
        "kept": ((kept_alone - neither) + (both - quarantine_alone)) / 2,
        "quarantine": ((quarantine_alone - neither) + (both - kept_alone)) / 2,
        "deployed": deployed,
    }


@contextmanager
def put_back(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context: the parameters have these values."""
    now = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.copy_(values[name])
        yield
    finally:
        for name, p in parameters.items():
            p.copy_(now[name])


class _Norms(LearnNothing):
    """Gate that passes no gradient and adds up the squared norms of each rollout's."""

    def __init__(self) -> None:
        super().__init__()
        self.squares: Tensor | float = 0.0

    def gradient(self, site: str, factor: str, pair: FactorGradient) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.squares = self.squares + pair.norms().square()


def shares(policy: Policy, rollouts: Rollouts) -> Float[Tensor, " b"]:
    """Return the quarantine's share of the norms of each rollout's gradient, NaN without a gradient.

    A module that the forward runs more than once counts each of its calls as a factor of its own.
    """
    (b, s), kept, quarantine = rollouts.tokens.shape, _Norms(), _Norms()
    tape = Tape(b, s, kept=kept, quarantine=quarantine, real=rollouts.attention)
    with policy.adapters.full(), untouched(policy.model.parameters()), torch.enable_grad(), policy.adapters.recording(tape):
        policy.logprobs(rollouts).sum().backward()
    tape.assert_fired(policy.adapters.sites, backward=True)
    sizes = [torch.as_tensor(gate.squares).sqrt() for gate in (kept, quarantine)]
    return sizes[1] / (sizes[0] + sizes[1])
