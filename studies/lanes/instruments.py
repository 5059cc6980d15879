"""Measurements on small models with random weights, in float64: symmetries, dead routing scalars, gradient paths.

They are identities or statements about a wiring and need no trained model: they are cheap, so there are more draws of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from studies.common.artifacts import Artifact
from studies.common.seeds import torch_generator
from studies.lanes.config import LanesConfig, StartName, WiringName
from studies.lanes.gradients.paths import coefficients, decompose, ratios
from studies.lanes.gradients.symmetry import (
    TWO_LANES,
    compared,
    exchange_gap,
    gauge_gap,
    partials,
    relative,
    slopes,
    trace_quarantines,
    trace_wirings,
)
from studies.lanes.measures import excerpt, training_tokens
from studies.lanes.model import LanesModel
from studies.lanes.scoring.bpb import table_bpb
from studies.lanes.settings import LanesSettings
from studies.lanes.text import TextCorpus, batches

PATHS: Mapping[str, tuple[WiringName, StartName]] = MappingProxyType(
    {
        "sequential": ("sequential", "symmetric"),
        "gptj": ("gptj", "symmetric"),
        "shipped": ("shipped", "symmetric"),
        "asymmetric": ("shipped", "asymmetric"),
    }
)
"""Name -> the wiring and the routing start whose gradient paths are decomposed."""


def tables(settings: LanesSettings, corpus: TextCorpus, seed: int) -> Artifact:
    """Return the bits per byte of count tables on the seed's test text: the baseline for a model that learned more than counts."""
    evaluation = settings.evaluation
    tokens = excerpt(corpus, "test", evaluation.test, evaluation.piece, seed)
    return table_bpb(training_tokens(settings, corpus), tokens), {}


def rows(settings: LanesSettings, corpus: TextCorpus, seed: int, count: int, length: int, purpose: str) -> Int64[Tensor, "n s"]:
    """Return `count` windows of `length` + 1 training tokens."""
    generator = torch_generator(seed, f"lanes {purpose}")
    drawn = batches(training_tokens(settings, corpus), size=count, length=length, steps=1, generator=generator)
    return next(drawn)


def draw(config: LanesConfig, seed: int) -> LanesModel:
    """Return a float64 model with random weights."""
    return LanesModel(config, torch_generator(seed, "lanes instruments")).double()


def symmetry(settings: LanesSettings, corpus: TextCorpus, seed: int) -> Artifact:
    """Return one row per wiring of two lanes: the difference of the lanes' gradients, and the effects of exchange and gauge."""
    instruments = settings.instruments
    tokens = rows(settings, corpus, seed, instruments.batch, instruments.length, "symmetry")
    texts = rows(settings, corpus, seed, instruments.texts, instruments.text, "slopes")
    return {
        "wirings": [_wiring(instruments.config(wiring), tokens, texts, seed) for wiring in TWO_LANES],
        "gptj": _gptj(settings, tokens, seed),
    }, {}


def _wiring(config: LanesConfig, tokens: Tensor, texts: Tensor, seed: int) -> dict[str, Any]:
    model = draw(config, seed)
    in_lanes = [[relative(*pair) for pair in layer] for layer in partials(model, tokens)["post"][list(compared(config))]]
    at_zero = partials(draw(replace(config, zero_init=True), seed), tokens)["post"]
    unequal = draw(replace(config, start="asymmetric"), seed)  # equal weights can be exchanged in any wiring
    return {
        "wiring": config.wiring,
        "largest": float(torch.tensor(in_lanes, dtype=torch.float64).max()),  # as in `_closed_form`
        "at_zero_init": float(at_zero.abs().max()),
        "exchange": abs(exchange_gap(unequal, tokens)),
        "gauge": abs(gauge_gap(model, tokens)),
        "scalars": model.post.numel() + model.resid.numel(),
        **slopes(model, texts),
    }


@torch.no_grad()
def _gptj(settings: LanesSettings, tokens: Tensor, seed: int) -> float:
    """Return the largest logit difference between a GPT-J block and the shipped wiring with all scalars at 1."""
    config = replace(settings.instruments.config("shipped"), skips_in_fork=False)
    shipped, gptj = draw(config, seed), draw(replace(config, wiring="gptj"), seed)
    shipped.post.fill_(1.0)
    shipped.resid.fill_(1.0)
    return float((shipped(tokens[:, :-1]) - gptj(tokens[:, :-1])).abs().max())


def paths(settings: LanesSettings, corpus: TextCorpus, seed: int) -> Artifact:
    """Return direct and cascade of every sublayer behind the fork, and the deviation of the direct part from its closed form."""
    instruments = settings.instruments
    tokens = rows(settings, corpus, seed, instruments.batch, instruments.length, "paths")
    by_arm: dict[str, Any] = {}
    for name, (wiring, start) in PATHS.items():
        model = LanesModel(instruments.config(wiring, start), torch.Generator().manual_seed(seed)).double()
        by_arm[name] = [asdict(row) for row in ratios(model, tokens, seed) if row.layer >= instruments.lane_start]
    return {"rows": by_arm, "closed_form": _closed_form(instruments.config("shipped", "asymmetric"), tokens, seed)}, {}


def _closed_form(config: LanesConfig, tokens: Tensor, seed: int) -> float:
    """Return the largest deviation of a direct gradient from its coefficient times dL / d hook_final.

    The deviation is relative to the largest entry of the expected gradient.
    """
    model = draw(config, seed)
    seen: list[Tensor] = []
    with model.hooks(fwd_hooks=[("hook_final", lambda value, hook: seen.append(value))]):
        loss = model.loss(tokens)
    (final,) = torch.autograd.grad(loss, seen)
    predicted, deviations = coefficients(model), []
    for term in decompose(model, tokens):
        expected = predicted[term.sublayer].detach() * final
        deviations.append((term.direct - expected).abs().max() / expected.abs().max())
    return float(torch.stack(deviations).max())  # NaN if one is, which Python's `max` may pass over


def traces(settings: LanesSettings, corpus: TextCorpus, seed: int) -> Artifact:
    """Return traces of lanes and quarantines over training."""
    lanes, quarantine = settings.instruments.symmetry, settings.instruments.quarantine
    by_lanes = rows(settings, corpus, seed, lanes.steps * lanes.batch, lanes.length, "traces")
    by_quarantine = rows(settings, corpus, seed, quarantine.steps * quarantine.batch, quarantine.length, "traces")
    traced = (*trace_wirings(lanes, by_lanes, seed), *trace_quarantines(quarantine, by_quarantine, seed))
    return {"traces": [asdict(trace) for trace in traced]}, {}


INSTRUMENTS: Mapping[str, Callable[[LanesSettings, TextCorpus, int], Artifact]] = MappingProxyType(
    {"symmetry": symmetry, "paths": paths, "traces": traces, "tables": tables}
)
DRAWN = ("symmetry", "paths")
"""The instruments that are drawn `Instruments.draws` times; the others are drawn once per seed."""
