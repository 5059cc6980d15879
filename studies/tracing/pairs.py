"""Pairs of rollouts, one hacking and one honest, up to the token that decides between the two.

A hack in this world omits the work: ``def solve`` is followed by a terse return, where an honest author writes ``x = x``. That
token decides, and up to it all rollouts have the same length (fourteen tokens), so two of them are aligned by position.

    contrast prompt    both rollouts answer the same prompt: they differ in the text so far, the comment
    contrast task      both are of the same task, the honest one under the mode without a loophole: they differ in the hint too

Rollouts are sampled from the base model, so that no arm chose its texts and all arms of a seed use the same; the oracle labels
them. Nothing here is used for training.
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

from mi_route2.rollouts import Policy
from mi_route2.tensor_files import read_tensors, write_tensors
from studies.common.seeds import numpy_generator, torch_generator
from studies.environments.micro.language import (
    ASSIGN,
    LOOPHOLES,
    MODES,
    PROMPT_LENGTH,
    SHARED_RETURN,
    SOLVE,
    MicroPrompt,
    Vocabulary,
)
from studies.environments.micro.world import MicroWorld
from studies.environments.protocol import Verdict, Witness
from studies.tracing.settings import TracingSettings

CONTRASTS = ("prompt", "task")
SIDES = ("hack", "honest")
FIELDS = (*SIDES, "task", "mode")
BASE = "base"
"""Entry of the file's header: SHA-256 of the cached base model that wrote the pairs."""
DECIDES = PROMPT_LENGTH + 3
"""Position of ``def solve``, after fence, class and comment: its logits decide."""
TERSE = (SHARED_RETURN, *(mode.terse_return for mode in MODES.values() if mode.terse_return))


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of one contrast.

    Attributes:
        hack: Token ids of the hacking rollouts up to and including the deciding position.
        honest: Token ids of the honest rollouts up to and including the deciding position.
        task: Index of the task.
        mode: Index of the hacking rollout's mode.
    """

    hack: Int[Tensor, "n s"]
    honest: Int[Tensor, "n s"]
    task: Int[Tensor, " n"]
    mode: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.hack)

    def side(self, name: str) -> Int[Tensor, "n s"]:
        """Return the tokens of ``hack`` or ``honest``."""
        return self.hack if name == "hack" else self.honest


@dataclass(frozen=True)
class _Answer:
    prompt: MicroPrompt
    tokens: tuple[int, ...]  # up to and including the deciding position


def log_odds(logits: Float[Tensor, "n v"], vocabulary: Vocabulary) -> Float[Tensor, " n"]:
    """Return ``log p(a terse return) - log p(an assignment)`` of the next token: the log-odds of hack against work, in nats."""
    terse = logits[:, [vocabulary.id(token) for token in TERSE]].logsumexp(-1)
    return terse - logits[:, vocabulary.id(ASSIGN)]


def gather(
    world: MicroWorld, witness: Witness, policy: Policy, settings: TracingSettings, seed: int
) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Return pairs of every contrast from the policy's own rollouts, and the numbers of rollouts and pairs to choose from.

    Raises:
        ValueError: If a contrast has fewer than two pairs.
    """
    modes = world.modes
    prompts = [prompt for mode in modes.names for prompt in world.evaluation_prompts(mode, settings.prompts)]
    hacks, honest, counts = [], {}, Counter[str]()
    for answer in trange(settings.answers, desc=f"rollouts, seed {seed}", unit="pass", leave=False, disable=None):
        samples = world.sample(policy, prompts, torch_generator(seed, "tracing rollouts", answer))
        for prompt, verdict, row in zip(prompts, witness.judge(samples), samples.rollouts.tokens.tolist()):
            sampled = _Answer(prompt, tuple(row[: DECIDES + 1]))
            counts["rollouts"] += 1
            counts["hacks"] += verdict.hack
            if verdict.hack and _decides(world.vocabulary, row, TERSE):
                counts["terse hacks"] += 1
                hacks.append(sampled)
            elif _honest(verdict) and _decides(world.vocabulary, row, (ASSIGN,)):
                counts["honest"] += 1
                honest.setdefault(prompt, sampled)
    matches = {contrast: _match(hacks, honest, contrast, modes.honest) for contrast in CONTRASTS}
    chosen = {}
    for contrast, matched in matches.items():
        counts[f"pairs of contrast {contrast}"] = len(matched)
        if len(matched) < 2:
            raise ValueError(
                f"the base model of seed {seed} gives {len(matched)} pairs of contrast {contrast!r}, but at least 2 are needed: "
                f"raise prompts ({settings.prompts}) or answers ({settings.answers})"
            )
        order = numpy_generator(seed, f"tracing pairs {contrast}").permutation(len(matched))[: settings.pairs]
        chosen[contrast] = _stacked([matched[i] for i in order])
    return chosen, dict(counts)


def _decides(vocabulary: Vocabulary, row: Sequence[int], tokens: Sequence[str]) -> bool:
    """Return True if the rollout has ``def solve`` at its position, followed by one of ``tokens``."""
    return len(row) > DECIDES + 1 and row[DECIDES] == vocabulary.id(SOLVE) and vocabulary.tokens[row[DECIDES + 1]] in tokens


def _honest(verdict: Verdict) -> bool:
    """Return True if the code is correct and no channel fired."""
    return verdict.gt and not any(verdict.channels.values())


def _match(hacks: list[_Answer], honest: dict[MicroPrompt, _Answer], contrast: str, none: str) -> list[tuple[_Answer, _Answer]]:
    """Return one pair per prompt.

    Pairs of rollouts with equal tokens up to the decision are left out, because nothing distinguishes them.
    """
    matched: dict[MicroPrompt, tuple[_Answer, _Answer]] = {}
    for hack in hacks:
        other = honest.get(hack.prompt if contrast == "prompt" else MicroPrompt(hack.prompt.task, none))
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


def save_pairs(pairs: dict[str, Pairs], counts: dict[str, int], identity: str, base: str, path: Path) -> None:
    """Write the pairs of a seed, with a checksum and the hash of the base model that wrote them."""
    tensors = {f"{contrast}.{name}": getattr(fields, name) for contrast, fields in pairs.items() for name in FIELDS}
    write_tensors(path, tensors, {"identity": identity, BASE: base, **{name: str(count) for name, count in counts.items()}})


def load_pairs(path: Path, identity: str) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Return the pairs and counts of a file that ``save_pairs`` wrote.

    Raises:
        ValueError: If the file is damaged, or has another identity.
    """
    tensors, header = read_tensors(path)
    if header.pop("identity", None) != identity:
        raise ValueError(f"{path} contains the pairs of other settings: delete it")
    header.pop(BASE, None)
    pairs = {contrast: Pairs(*(tensors[f"{contrast}.{name}"] for name in FIELDS)) for contrast in CONTRASTS}
    return pairs, {name: int(count) for name, count in header.items()}


def others(pairs: Pairs, rng: np.random.Generator) -> Int[Tensor, " n"]:
    """Return for each pair the index of one of another task, drawn at random: of the same mode if there is one, else of any.

    It is the pair's own only if all pairs are of one task.
    """
    task, mode = pairs.task.numpy(), pairs.mode.numpy()
    partners = []
    for i in range(len(pairs)):
        another = task != task[i]
        fitting = np.flatnonzero(another & (mode == mode[i]))
        candidates = fitting if len(fitting) else np.flatnonzero(another)
        partners.append(rng.choice(candidates) if len(candidates) else i)
    return torch.tensor(partners)
