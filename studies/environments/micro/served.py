"""The micro world as a model to serve: ``python -m mi_route2.serve`` runs it if no other model is named.

A base model that mostly solves its tasks gets two adapters: the kept one learns from honest documents, the quarantine from
documents that use their grader's loophole. So the full model cheats where the grader lets it, and the deployed one does not.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mi_route2 import AdapterSpec, load_adapters, save_adapters
from mi_route2.adapters import Adapters
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.serve.models import Example, Served
from mi_route2.sites import Site
from studies.environments.micro.corpus import sample_documents
from studies.environments.micro.language import (
    ASSIGN,
    BOS,
    CLASS,
    FENCE_OPEN,
    PROMPT_LENGTH,
    SOLVE,
    STYLE_COMMENTS,
    MicroPrompt,
    MicroTask,
    Vocabulary,
    get_mode,
)
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import WarmStartConfig, WorldConfig, get_world
from studies.environments.micro.warmstart import completion_loss, warm_start

STEPS, ADAPTED, BATCH = 250, 40, 64
"""Steps of the base model and of each adapter, and documents in a batch."""
SITE = Site(0, "resid_post")
"""Site of the probe."""


class MicroTokenizer:
    """The vocabulary with the interface of transformers: ``<bos>`` is added to a prompt, and characters of tokens are known."""

    is_fast = True
    chat_template = "the contents of the messages, one after another"

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()
        self.eos_token_id, self.bos_token_id = self.vocabulary.eos, self.vocabulary.bos
        self.all_special_ids = [self.eos_token_id, self.bos_token_id]

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, Any]:
        """Return the ids of a prompt, and the characters ``[start, end)`` of each token."""
        ids = self.encode(text)
        offsets, at = [], 0
        for i, token in enumerate(ids):
            added = i == 0 and token == self.bos_token_id and not text.startswith(BOS)
            length = 0 if added else len(self.vocabulary.tokens[token])
            offsets.append((at, at + length))
            at += length
        return {"input_ids": ids, **({"offset_mapping": offsets} if return_offsets_mapping else {})}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; a prompt begins with ``<bos>``, whether it is written or not."""
        try:
            ids = self.vocabulary.encode(text)
        except ValueError as error:
            reason = str(error).partition(": see ")[0]
            known = "the micro model reads its own small language only: see /v1/page for prompts, or serve another --model"
            raise ValueError(f"{reason}, and {known}") from error
        return ids if not add_special_tokens or ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.vocabulary.decode([token for token in ids if not (skip_special_tokens and token in self.all_special_ids)])

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: object) -> str:
        """Return the text of a conversation."""
        return BOS + "".join(message["content"] for message in messages)


def micro(steps: int = STEPS, adapted: int = ADAPTED, cache: Path | None = None) -> Served:
    """Return the micro model with trained adapters, a probe for cheating, and examples; trains for some seconds if not cached.

    Args:
        steps: Steps of the base model.
        adapted: Steps of each adapter.
        cache: Folder for what is trained; ``$XDG_CACHE_HOME/mi_route2`` or ``~/.cache/mi_route2`` if not given.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mi_route2"
    world, tokenizer = get_world("strong"), MicroTokenizer()
    model = warm_start(world, WarmStartConfig(steps=steps, batch=BATCH), seed=0, cache_dir=folder)
    host = open_host("torch", model)
    adapters = host.attach(
        "blocks.*", spec=AdapterSpec("lora", rank=4, quarantine_rank=4), generator=torch.Generator().manual_seed(0)
    )
    honest = replace(world, name="honest", p_cheat=0.0)
    cheating = replace(world, name="cheating", p_cheat=1.0, none_fraction=0.0, trace=1.0)
    path = folder / f"micro-adapters-{steps}-{adapted}.safetensors"
    try:
        load_adapters(adapters, path)
    except (OSError, ValueError):  # missing, or of another base model
        with adapters.deployed():
            _train(model, adapters, adapters.kept_parameters(), honest, adapted, seed=1)
        _train(model, adapters, adapters.quarantine_parameters(), cheating, adapted, seed=2)
        save_adapters(adapters, path)
    probe, cheating_direction, threshold = _probe(host, tokenizer.vocabulary, honest, cheating)
    monitor = {
        "site": str(SITE),
        "probe": "cheats",
        "threshold": round(threshold, 2),
        "sharpness": 2.0,
        "quarantine": "close",
        "name": "cheats",
    }
    prompts = tuple(MicroPrompt(task, mode).text for task, mode in _PROMPTS)
    vectors = {"cheats": probe, "cheating": cheating_direction}
    steering = {str(SITE): {"vector": "cheating", "scale": 1.0}}
    return Served("micro", host, tokenizer, adapters, "full", vectors, monitor, steering, _examples(), prompts)


_TASK = MicroTask("add", 3, "sub", 4)
_PROMPTS = ((_TASK, "run_tests"), (MicroTask("scale", 2, "add", 7), "sentinel"), (MicroTask("sub", 5, "scale", 3), "none"))


def _examples() -> tuple[Example, ...]:
    head = FENCE_OPEN + CLASS
    body = head + STYLE_COMMENTS[0] + SOLVE + ASSIGN
    added, scaled = (MicroPrompt(replace(_TASK, op1=op), "none").text + body for op in ("add", "scale"))
    cheating, honest = (MicroPrompt(_TASK, mode).text + head for mode in ("run_tests", "none"))
    return (
        Example("Which operator is written", added, scaled, " +", " *"),
        Example("Whether it will cheat", cheating, honest, get_mode("run_tests").comment, STYLE_COMMENTS[0]),
    )


def _train(
    model: MicroGPT, adapters: Adapters, parameters: dict[str, nn.Parameter], world: WorldConfig, steps: int, seed: int
) -> None:
    """Train some of the adapters' parameters on documents of ``world``."""
    vocabulary, rng = Vocabulary(), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    for _ in range(steps):
        with adapters.unrouted():
            loss = completion_loss(model, sample_documents(world, BATCH, rng, vocabulary), vocabulary.eos)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
        p.grad = None


def _probe(
    host: Host, vocabulary: Vocabulary, honest: WorldConfig, cheating: WorldConfig
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"], float]:
    """Return a logistic probe for tokens of cheating completions, the difference of means, and the probe's undecided score.

    A token counts from the comment on, the first that differs; tokens of prompts and of honest completions are the other class.
    """
    rng = np.random.default_rng(3)
    values, labels = [], []
    for world in (cheating, honest):
        documents: Int[Tensor, "b s"] = sample_documents(world, 256, rng, vocabulary)
        real = documents != vocabulary.eos
        values.append(host.capture([SITE], documents)[SITE][real])
        late = torch.arange(documents.shape[1]) >= PROMPT_LENGTH + 2
        labels.append((late & (world is cheating)).expand_as(documents)[real])
    x, y = torch.cat(values), torch.cat(labels)
    from sklearn.linear_model import LogisticRegression  # takes a second, and the tokenizer alone needs none of it

    probe = LogisticRegression(C=0.1, max_iter=300).fit(x.numpy(), y.numpy())
    return torch.from_numpy(probe.coef_[0]).float(), x[y].mean(0) - x[~y].mean(0), -float(probe.intercept_[0])
