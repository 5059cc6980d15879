"""Per-token readings of finished rollouts under a finished policy, for the rollout page.

score(t)       mean over modules of cos(Vh x_t, v_act), with v_act fitted on the finished policy from the run's own pairs
kept(t)        log p_deployed - log p_reference
quarantine(t)  log p_full - log p_deployed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mi_route2.adapters import Tape
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Directions, PersonaFitter
from mi_route2.routing.mask import TokenReader
from studies.environments.protocol import World
from studies.training.job import Job, build_pairs, finished_policy, micro_batches
from studies.training.settings import Settings


@dataclass(frozen=True)
class Annotator:
    """Function from rows of ``rollouts.jsonl.gz`` to one annotation per row; it runs the model one micro-batch at a time."""

    world: World
    policy: Policy
    fitter: PersonaFitter
    settings: Settings
    basis: Mapping[str, Tensor]

    @staticmethod
    def of(job: Job, world: World) -> "Annotator":
        """Return an annotator for the finished policy of ``job``; ``ValueError`` if the job is not finished."""
        _, policy = finished_policy(job)
        basis = policy.adapters.coordinates()
        return Annotator(world, policy, PersonaFitter("persona", "act", build_pairs(job, world, "hack")), job.settings, basis)

    @torch.no_grad()
    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rollouts = self.world.encode([row["prompt"] for row in rows], [row["completion"] for row in rows])
        directions = self.fitter.fit(self.policy, 0)
        batches = micro_batches(rollouts, self.settings)
        return [annotation for part in batches for annotation in self._annotate(part, directions)]

    def _annotate(self, rollouts: Rollouts, directions: Directions) -> list[dict[str, Any]]:
        adapters = self.policy.adapters
        readings = {}
        for name, switched in (("reference", adapters.reference), ("deployed", adapters.deployed), ("full", adapters.full)):
            with switched():
                readings[name] = self.policy.logprobs(rollouts)
        scores = self._token_scores(rollouts, directions)
        kept, moved = readings["deployed"] - readings["reference"], readings["full"] - readings["deployed"]
        annotations = []
        for b, completion in enumerate(rollouts.completions()):
            at = rollouts.predictors[b].nonzero()[:, 0]
            annotations.append(
                {
                    "tokens": self.world.pieces(completion),
                    "score": scores[b, at].tolist(),
                    "kept": kept[b, at].tolist(),
                    "quarantine": moved[b, at].tolist() if adapters.has_quarantine else None,
                }
            )
        return annotations

    def _token_scores(self, rollouts: Rollouts, directions: Directions) -> Float[Tensor, "b s"]:
        reader = TokenReader(rollouts.predictors, dict(self.basis), directions)
        with self.policy.adapters.deployed(), self.policy.adapters.recording(Tape(*rollouts.tokens.shape, inputs=reader)):
            self.policy.forward(self.policy.model, rollouts.tokens, rollouts.attention)
        return torch.stack(list(reader.scores.values())).mean(dim=0)
