"""A tiny model that generates for a few requests in step, with keys and values kept: what controllers need of an engine.

All prompts are of one length and nothing is padded, so that a step is one call of the model. Tokens are the most likely ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from families import make_family
from torch import Tensor
from transformers import DynamicCache

from mi_route2.engine.controllers import Controllers, RequestView, StepView
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.state import SteeringState

WIDTH = 16
PROMPTS = torch.randint(3, 50, (3, 4), generator=torch.Generator().manual_seed(11))


def new_host() -> TorchHost:
    return TorchHost(make_family("Llama"))


def new_state(**given) -> SteeringState:
    return SteeringState(lambda site: (WIDTH,), **({"dtype": torch.float64} | given))


def direction(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Stepper:
    """``requests`` (as many as ``PROMPTS`` has rows, or fewer) must be admitted to ``state``."""

    host: TorchHost
    state: SteeringState
    controllers: Controllers = field(default_factory=Controllers)
    requests: Sequence[int] = (0, 1, 2)

    def __post_init__(self) -> None:
        self.cache, self.step = DynamicCache(), 0
        self.tokens = PROMPTS[: len(self.requests)]
        self.logits: list[Tensor] = []
        self.views: list[StepView] = []

    def run(self, steps: int) -> "Stepper":
        for _ in range(steps):
            self.one()
        return self

    def one(self) -> None:
        """A step: a forward, a token for each request, the controllers."""
        prompt, start = PROMPTS.shape[1], self.cache.get_seq_length()
        count = self.tokens.shape[1] - start
        self.state.begin(BatchLayout.of([Piece(request, start, count, prompt) for request in self.requests]))
        seen: dict[Site, Tensor] = {}
        sites = self.state.sites() | self.controllers.wants

        def edit(site: Site, h: Tensor) -> Tensor:
            seen[site] = h[:, -1].clone()
            return self.state.at(site, h)

        with torch.no_grad(), self.host.hooks({site: lambda h, site=site: edit(site, h) for site in sites}):
            out = self.host.model(self.tokens[:, start:], past_key_values=self.cache, use_cache=True)
        last = out.logits[:, -1]
        readings = self.state.end().last()
        chosen = last.argmax(-1)
        logprobs = last.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        self.logits.append(last)
        self.tokens = torch.cat([self.tokens, chosen[:, None]], 1)
        views = tuple(
            RequestView(
                request,
                start + count - 1,
                int(chosen[row]),
                float(logprobs[row]),
                {site: seen[site][row] for site in self.controllers.wants},
                readings.get(request, {}),
            )
            for row, request in enumerate(self.requests)
        )
        self.views.append(StepView(self.step, views, set(self.requests)))
        self.controllers.after_step(self.views[-1], self.state)
        self.step += 1
