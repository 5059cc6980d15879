"""Pairs of rollouts, one hacking and one honest, up to the token that decides between the two.

A hack of this world leaves out the work: after ``def solve`` comes a terse return where an honest author writes ``x = x``. That
token decides, and up to it all rollouts have the same length (fourteen tokens), so two of them are aligned position by position.

    contrast prompt    both rollouts answer one prompt: they differ in what was written so far, the comment
    contrast task      both are of one task, the honest one under the mode without a loophole: they differ in the hint too

Rollouts are the base model's own, so that no arm chose its texts and all arms of a seed read the same; the oracle labels them.
Nothing here is trained on.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import trange

from mi_route2.adapters.io import read_tensors, write_tensors
from mi_route2.rollouts import Policy
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.micro.language import ASSIGN, LOOPHOLES, MODES, PROMPT_LENGTH, SHARED_RETURN, SOLVE, Prompt, Vocabulary
from studies.environments.micro.world import MicroWorld
from studies.environments.protocol import Verdict, Witness
from studies.tracing.settings import Settings

CONTRASTS = ("prompt", "task")
SIDES = ("hack", "honest")
FIELDS = (*SIDES, "task", "mode")
DECIDES = PROMPT_LENGTH + 3
"""Position of ``def solve``, behind fence, class and comment: its logits decide."""
TERSE = (SHARED_RETURN, *(mode.terse_return for mode in MODES.values() if mode.terse_return))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Of one contrast: token ids ``hack`` and ``honest`` up to and with the deciding position, and numbers that stand for the task
    and for the hacking rollout's mode."""

    hack: Int[Tensor, "n s"]
    honest: Int[Tensor, "n s"]
    task: Int[Tensor, " n"]
    mode: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.hack)

    def side(self, name: str) -> Int[Tensor, "n s"]:
        """The tokens of ``hack`` or ``honest``."""
        return self.hack if name == "hack" else self.honest


@dataclass(frozen=True)
class _Answer:
    prompt: Prompt
    tokens: tuple[int, ...]  # up to and with the deciding position


def log_odds(logits: Float[Tensor, "n v"], vocabulary: Vocabulary) -> Float[Tensor, " n"]:
    """``log p(a terse return) - log p(an assignment)`` in nats: the log-odds of the hack against the work, as next token."""
    terse = logits[:, [vocabulary.id(token) for token in TERSE]].logsumexp(-1)
    return terse - logits[:, vocabulary.id(ASSIGN)]


def gather(
    world: MicroWorld, witness: Witness, policy: Policy, settings: Settings, seed: int
) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Pairs of every contrast from the policy's own rollouts, and how many rollouts and pairs there were to choose from.

    ``ValueError`` where a contrast has fewer than two pairs.
    """
    modes = world.modes
    prompts = [prompt for mode in modes.names for prompt in world.evaluation_prompts(mode, settings.prompts)]
    hacks, honest, counts = [], {}, Counter[str]()
    for answer in trange(settings.answers, desc=f"rollouts, seed {seed}", unit="pass", leave=False, disable=None):
        samples = world.sample(policy, prompts, torch_generator(seed, "tracing rollouts", answer))
        for prompt, verdict, row in zip(prompts, witness.judge(samples), samples.rollouts.tokens.tolist()):
            one = _Answer(prompt, tuple(row[: DECIDES + 1]))
            counts["rollouts"] += 1
            counts["hacks"] += verdict.hack
            if verdict.hack and _decides(world.vocabulary, row, TERSE):
                counts["terse hacks"] += 1
                hacks.append(one)
            elif _honest(verdict) and _decides(world.vocabulary, row, (ASSIGN,)):
                counts["honest"] += 1
                honest.setdefault(prompt, one)
    found = {contrast: _match(hacks, honest, contrast, modes.honest) for contrast in CONTRASTS}
    chosen = {}
    for contrast, matched in found.items():
        counts[f"pairs of contrast {contrast}"] = len(matched)
        if len(matched) < 2:
            raise ValueError(
                f"the base model of seed {seed} gives {len(matched)} pairs of contrast {contrast!r}, and 2 are the least: "
                f"raise prompts ({settings.prompts}) or answers ({settings.answers})"
            )
        order = numpy_generator(seed, f"tracing pairs {contrast}").permutation(len(matched))[: settings.pairs]
        chosen[contrast] = _stacked([matched[i] for i in order])
    return chosen, dict(counts)


def _decides(vocabulary: Vocabulary, row: Sequence[int], tokens: Sequence[str]) -> bool:
    """Whether the rollout has ``def solve`` where it belongs, and one of ``tokens`` behind it."""
    return len(row) > DECIDES + 1 and row[DECIDES] == vocabulary.id(SOLVE) and vocabulary.tokens[row[DECIDES + 1]] in tokens


def _honest(verdict: Verdict) -> bool:
    """Correct, and no channel fired."""
    return verdict.gt and not any(verdict.channels.values())


def _match(hacks: list[_Answer], honest: dict[Prompt, _Answer], contrast: str, none: str) -> list[tuple[_Answer, _Answer]]:
    """One pair a prompt. Two rollouts that are one and the same up to the decision have nothing to tell them apart, and are left
    out."""
    matched: dict[Prompt, tuple[_Answer, _Answer]] = {}
    for hack in hacks:
        other = honest.get(hack.prompt if contrast == "prompt" else Prompt(hack.prompt.task, none))
        if other is not None and other.tokens != hack.tokens:
            matched.setdefault(hack.prompt, (hack, other))
    return list(matched.values())


def _stacked(matched: Sequence[tuple[_Answer, _Answer]]) -> Pairs:
    tasks = {task: i for i, task in enumerate(dict.fromkeys(hack.prompt.task for hack, _ in matched))}
    return Pairs(
        torch.tensor([hack.tokens for hack, _ in matched]),
        torch.tensor([honest.tokens for _, honest in matched]),
        torch.tensor([tasks[hack.prompt.task] for hack, _ in matched]),
        torch.tensor([LOOPHOLES.index(hack.prompt.mode) for hack, _ in matched]),
    )


def save_pairs(pairs: dict[str, Pairs], counts: dict[str, int], identity: str, path: Path) -> None:
    """Write the pairs of a seed, under a checksum."""
    tensors = {f"{contrast}.{name}": getattr(one, name) for contrast, one in pairs.items() for name in FIELDS}
    write_tensors(path, tensors, {"identity": identity, **{name: str(count) for name, count in counts.items()}})


def load_pairs(path: Path, identity: str) -> tuple[dict[str, Pairs], dict[str, int]]:
    """What ``save_pairs`` wrote. ``ValueError`` for a damaged file, and for one of another identity."""
    tensors, found = read_tensors(path)
    if found.pop("identity", None) != identity:
        raise ValueError(f"{path} holds the pairs of other settings; delete it")
    pairs = {contrast: Pairs(*(tensors[f"{contrast}.{name}"] for name in FIELDS)) for contrast in CONTRASTS}
    return pairs, {name: int(count) for name, count in found.items()}


def others(pairs: Pairs, rng: np.random.Generator) -> Int[Tensor, " n"]:
    """For each pair one of another task and the same mode, drawn at random: the pair itself where there is none."""
    task, mode = pairs.task.numpy(), pairs.mode.numpy()
    fitting = [np.flatnonzero((task != task[i]) & (mode == mode[i])) for i in range(len(pairs))]
    return torch.tensor([rng.choice(found) if len(found) else i for i, found in enumerate(fitting)])
