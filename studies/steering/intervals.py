"""Means over seeds and tasks with a bootstrap interval that resamples both, and paired differences of cells.

    value = sum_st a_s b_t x_st / (sum_s a_s sum_t b_t)        a, b: how often a draw holds seed s, task t

Every seed was asked the same tasks, so seeds and tasks are crossed, and each is resampled by itself (Owen, "The pigeonhole
bootstrap", Annals of Applied Statistics, 2007). All cells share the draws: a difference of two is paired. With few seeds such an
interval is too narrow rather than too wide; what differs from seed to seed is printed beside it.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from probes.auroc import cluster_draws

ROUNDING = 1e-9


@dataclass(frozen=True)
class Estimate:
    """``low`` and ``high`` bound 95% of the draws; ``seeds`` are the means of each seed."""

    mean: float
    low: float
    high: float
    seeds: list[float]

    @property
    def direction(self) -> int:
        """-1 below 0, 1 above, 0 not told apart; a bound that is 0 but for rounding is 0."""
        return -1 if self.high < -ROUNDING else 1 if self.low > ROUNDING else 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Draws:
    """Resamples of seeds and of tasks, as counts; one for a whole study."""

    seeds: Int[np.ndarray, "m s"]
    tasks: Int[np.ndarray, "m t"]

    @staticmethod
    def of(seeds: int, tasks: int, draws: int = 2000) -> "Draws":
        rng = np.random.default_rng(0)
        return Draws(cluster_draws(seeds, draws, rng), cluster_draws(tasks, draws, rng))

    def estimate(self, values: Float[np.ndarray, "s t"]) -> Estimate:
        """Of one number a seed and task. ``ValueError`` where sizes differ from the draws'."""
        if values.shape != (self.seeds.shape[1], self.tasks.shape[1]):
            raise ValueError(
                f"values of {values.shape} do not fit draws of {self.seeds.shape[1]} seeds and {self.tasks.shape[1]} tasks"
            )
        drawn = ((self.seeds @ values) * self.tasks).sum(axis=1) / values.size
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Estimate(float(values.mean()), float(low), float(high), values.mean(axis=1).tolist())
