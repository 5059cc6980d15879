"""The adapted policy written out: every token owns a copy of every factor, so one plain backward gives every token's gradient.

    y[b,t] = W[b,t] x[b,t] + kept[b,t](x[b,t]) + quarantine[b,t](x[b,t])

It shares no code with the library's backward: no gates, no contractions, only einsum and ``torch.autograd.grad``. ``cut`` detaches
the kept adapter's output where it is true (its value stays, nothing flows through it); with ``features`` it detaches the input in
its place, so that a module's own gradient is still there to be scored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tiny_policy import make_model
from torch import Tensor, nn

from mi_route2.adapters.linear import Branch, LoRA, SharedQuarantine, SVDKept
from mi_route2.rollouts import Policy, Rollouts

Loss = Callable[[Tensor], Tensor]
"""From log-probabilities ``[b, s]`` (0 off the predictors) to a loss."""


class WrittenLinear(nn.Module):
    """One routed Linear with a copy of its factors for every token; ``leaves`` are what gradients are taken of."""

    def __init__(self, module: Branch, b: int, s: int, cut: Tensor | None, quarantine: bool, features: bool):
        super().__init__()
        self._module, self._cut, self._features = (module,), cut, features

        def copies(t: Tensor) -> Tensor:
            return t.detach().expand(b, s, *t.shape).clone().requires_grad_()

        self.leaves = {"W": copies(module.weight)}
        self.leaves |= {f"kept.{n}": copies(p) for n, p in module.kept.named_parameters()}
        if quarantine and module.quarantine is not None:
            self.leaves |= {f"quarantine.{n}": copies(p) for n, p in module.quarantine.named_parameters()}
        self.x = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        (module,) = self._module
        own, self.x = self.leaves, x.detach()
        y = torch.einsum("bsoi,bsi->bso", own["W"], x)
        kept = self._kept(module, x)
        if self._cut is not None:
            severed = self._kept(module, x.detach()) if self._features else kept.detach()
            kept = torch.where(self._cut[..., None], severed, kept)
        y = y + kept
        if "quarantine.B" in own:
            y = y + torch.einsum("bsok,bski,bsi->bso", own["quarantine.B"], own["quarantine.A"], x)
        elif "quarantine.shared" in own:
            y = y + self._shared(module, x)
        return y

    def _kept(self, module: Branch, x: Tensor) -> Tensor:
        own = self.leaves
        if isinstance(module.kept, SVDKept):
            return (x @ module.kept.Vh.T * own["kept.dS"]) @ module.kept.U.T
        return torch.einsum("bsor,bsri,bsi->bso", own["kept.B"], own["kept.A"], x)

    def _shared(self, module: Branch, x: Tensor) -> Tensor:
        assert isinstance(module.quarantine, SharedQuarantine)
        shared = self.leaves["quarantine.shared"]
        if isinstance(module.kept, SVDKept):
            return (x @ module.kept.Vh.T * shared) @ module.kept.U.T
        assert isinstance(module.kept, LoRA)
        return torch.einsum("bsor,ri,bsi->bso", shared, module.kept.A.detach(), x)


@dataclass(frozen=True)
class WrittenOut:
    """``gradients["kept.<site>.<factor>"]`` (or ``quarantine.``, or ``W.<site>``) is ``[b, s, *shape]``; ``inputs[site]`` is x."""

    gradients: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    logprobs: Tensor

    def summed(self, adapter: str) -> dict[str, Tensor]:
        """The batch's gradient of each factor of an adapter."""
        return {n.removeprefix(f"{adapter}."): g.sum((0, 1)) for n, g in self.gradients.items() if n.startswith(f"{adapter}.")}


def written_out(
    policy: Policy,
    rollouts: Rollouts,
    loss: Loss,
    *,
    cut: Mapping[str, Tensor] | None = None,
    quarantine: bool = True,
    features: bool = False,
) -> WrittenOut:
    """Run the written-out policy forward and backward once."""
    b, s = rollouts.tokens.shape
    model = make_model().to(policy.model.embed.weight.dtype)
    model.load_state_dict({n.replace(".base.weight", ".weight"): t for n, t in policy.model.state_dict().items() if _base(n)})
    linears: dict[str, WrittenLinear] = {}
    for site, module in policy.adapters.sites.items():
        linears[site] = WrittenLinear(module, b, s, None if cut is None else cut[site], quarantine, features)
        parent, _, leaf = site.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linears[site])
    logits = model(rollouts.tokens, rollouts.attention)
    following = torch.cat([rollouts.tokens[:, 1:], rollouts.tokens[:, :1]], dim=1)
    logprobs = logits.log_softmax(-1).gather(-1, following[..., None])[..., 0]
    logprobs = torch.where(rollouts.predictors, logprobs, 0.0)
    leaves = {
        (f"W.{site}" if name == "W" else f"{name.split('.')[0]}.{site}.{name.split('.')[1]}"): leaf
        for site, linear in linears.items()
        for name, leaf in linear.leaves.items()
    }
    gradients = torch.autograd.grad(loss(logprobs), list(leaves.values()))
    return WrittenOut(dict(zip(leaves, gradients)), {site: li.x for site, li in linears.items()}, logprobs.detach())


def _base(name: str) -> bool:
    return ".kept." not in name and ".quarantine." not in name
