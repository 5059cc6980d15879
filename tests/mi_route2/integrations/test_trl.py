"""TRL's own loop with a route makes the steps of ours, however its batch is cut, and ships the kept adapter alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl is not installed: pip install 'mi-route2[trl]'")

from tiny_trl import LORA, Ours, Seen, make_trainer, our_loop, our_policy, pairs, weights
from torch import Tensor

from mi_route2 import AdapterSpec, MaskRoute, MaskSpec
from mi_route2.integrations.trl import RoutedGRPOTrainer
from mi_route2.routing import EraseRoute, EraseSpec, OpenRoute, OpenSpec, Route, RouteSpec
from mi_route2.routing.spec import LEGAL, PRIVILEGED

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::FutureWarning")]

SVD = AdapterSpec("svd", rank=5, quarantine_rank=2)
SHARED = AdapterSpec("lora", rank=3, quarantine="shared")
ALONE = AdapterSpec("lora", rank=3, quarantine="none")


def ours(spec: RouteSpec) -> Route:
    """The route that our own loop would use."""
    if isinstance(spec, EraseSpec):
        return EraseRoute.from_pairs(pairs(), spec)
    if isinstance(spec, OpenSpec):
        return OpenRoute(spec)
    return MaskRoute.from_pairs(pairs(), spec) if spec.needs_direction else MaskRoute(spec, None)


def assert_close(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Equal to 1e-12, where the largest values are about 1e-2."""
    assert own.keys() == other.keys()
    for name, expected in other.items():
        gap = float((own[name] - expected).abs().max())
        assert gap <= 1e-12, f"{name}: off by {gap:.1e} where the largest is {float(expected.abs().max()):.1e}"


def assert_ours(trainer: RoutedGRPOTrainer, seen: Seen, route: Route, settings: Ours | None = None, *adapt: str) -> None:
    """Every gradient and the final weights are those of our own loop, and the rules flagged some and not all."""
    policy = our_policy(trainer.adapters.spec, *adapt)
    gradients, updates = our_loop(policy, route, Ours() if settings is None else settings)
    assert len(seen.gradients) == len(gradients)
    for own, expected in zip(seen.gradients, gradients):
        assert_close(own, expected)
    assert_close(weights(trainer.adapters), weights(policy.adapters))
    assert any(float(p.abs().max()) > 1e-3 for name, p in weights(policy.adapters).items() if name.endswith((".B", ".dS")))
    shown = [log["route/flagged"] for log in seen.logs if "route/flagged" in log]
    assert shown == [float(u.decision.flags.double().mean()) for u in updates if u.decision.flags is not None]


ROUTES: dict[str, tuple[Any, Any]] = {
    "-".join((*key, through)): (MaskSpec(score=key[0], unit=key[1], score_policy=key[2], through=through), LORA)  # pyright: ignore
    for key, ways in LEGAL.items()
    if key[0] not in PRIVILEGED
    for through in sorted(ways)
}
ROUTES |= {
    "open": (OpenSpec(), LORA),
    "erase": (EraseSpec(k=2), LORA),
    "erase to the quarantine": (EraseSpec(k=2, dispose="quarantine"), SHARED),
    "svd": (MaskSpec(), SVD),
    "svd, folded": (MaskSpec(score="full", score_policy="ablated"), AdapterSpec("svd", quarantine_rank=2, fold=True)),
    "shared": (MaskSpec(unit="rollout"), SHARED),
    "no quarantine": (MaskSpec(score="act"), ALONE),
    "negative scale": (MaskSpec(score="act", negative_scale=0.3, reinforced_only=False), LORA),
    "unflagged": (MaskSpec(score_policy="ablated", kept_advantage="unflagged"), LORA),
    "unflagged, detached": (MaskSpec(score="act", score_policy="ablated", kept_advantage="unflagged", through="detach"), LORA),
    "unflagged, no quarantine": (MaskSpec(score="full", score_policy="ablated", kept_advantage="unflagged"), ALONE),
}


@pytest.mark.parametrize("name", ROUTES)
def test_every_legal_rule_learns_what_it_learns_in_our_own_loop(name: str, tmp_path: Path) -> None:
    rule, adapters = ROUTES[name]
    trainer, seen = make_trainer(tmp_path, rule, adapters, size=4, gradient_accumulation_steps=2)
    trainer.train()
    assert_ours(trainer, seen, ours(rule))
