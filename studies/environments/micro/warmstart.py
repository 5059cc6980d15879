"""Warm start: trains the base model on the corpus by next-token cross-entropy over completions.

    loss = mean over completion tokens (the first <eos> included) of -log p(token | tokens before it)

Prompts are not predicted, because their tasks are uniform and have nothing to learn. AdamW with a short linear warm-up, then a
cosine to 0. A finished model is cached as safetensors under a hash of everything that determines it.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mi_route2.files import parse_json, write_whole
from studies.environments.micro.corpus import sample_documents
from studies.environments.micro.language import PROMPT_LENGTH, Vocabulary
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig, WarmStartConfig, WorldConfig

# Incremented if the training loop changes in a way that no setting shows.
FORMAT = 1

CPU = torch.device("cpu")

REPORTED = 10  # steps between two reports of the training

# The only entry of a cached file's metadata, as JSON: safetensors writes several entries in random order, so bytes would differ.
HEADER = "warm start"


def warm_start(
    config: WorldConfig,
    training: WarmStartConfig,
    seed: int,
    cache_dir: Path | str | None,
    progress: bool = True,
    report: Callable[[int], None] | None = None,
    device: torch.device = CPU,
) -> MicroGPT:
    """Return the base model of a world, on the CPU in float32 and eval mode, from `cache_dir` if it is cached.

    Otherwise it is trained on `device` and cached. A cached file that is not valid is reported by a warning, trained again and
    replaced; with `cache_dir=None` nothing is read or written. `report` receives the number of finished steps every `REPORTED`
    steps. Raises ValueError if the model's vocabulary or context does not fit the corpus, or if a folder is in the file's place.
    """
    vocabulary = Vocabulary()
    if training.model.vocab != len(vocabulary):
        raise ValueError(f"a model of {training.model.vocab} tokens does not fit: choose vocab={len(vocabulary)}")
    if cache_dir is None:
        return train(config, training, seed, progress, report, device)
    path, key = cached_at(config, training, seed, Path(cache_dir))
    if path.is_dir():
        raise ValueError(f"{path} is a folder in the place of a cached base model: move it away")
    if path.exists():
        try:
            return _load(path, training.model, key)
        except (SafetensorError, ValueError) as error:
            warnings.warn(f"the cached base model {path} is not usable ({error}): training it again", stacklevel=2)
    model = train(config, training, seed, progress, report, device)
    _save(model, path, key)
    return model


def cached_at(config: WorldConfig, training: WarmStartConfig, seed: int, cache_dir: Path) -> tuple[Path, str]:
    """Return the file in which a base model is cached, and the hash of its settings."""
    key = settings_hash(config, training, seed)
    return cache_dir / f"warmstart-{config.name}-{seed}-{key[:16]}.safetensors", key


@cache
def settings_hash(config: WorldConfig, training: WarmStartConfig, seed: int) -> str:
    """Return a hash of all settings, the vocabulary and some documents, so that a changed world gives another model."""
    vocabulary = Vocabulary()
    documents = sample_documents(config, 256, np.random.default_rng(seed), vocabulary)
    described = {
        "format": FORMAT,
        "world": asdict(config),
        "training": asdict(training),
        "seed": seed,
        "vocabulary": vocabulary.tokens,
        "documents": hashlib.sha256(documents.numpy().tobytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def train(
    config: WorldConfig,
    training: WarmStartConfig,
    seed: int,
    progress: bool = True,
    report: Callable[[int], None] | None = None,
    device: torch.device = CPU,
) -> MicroGPT:
    """Train a base model from scratch on `device`; the same seed, settings, device and thread count give the same bits."""
    vocabulary = Vocabulary()
    rng = np.random.default_rng(seed)
    model = MicroGPT(training.model, torch.Generator().manual_seed(seed)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, training.rate)
    bar = tqdm(range(training.steps), desc=f"warm start ({config.name}, seed {seed})", disable=not progress)
    for step in bar:
        documents = sample_documents(config, training.batch, rng, vocabulary)
        loss = completion_loss(model, documents.to(device), vocabulary.eos)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        if report is not None and (step + 1) % REPORTED == 0:
            report(step + 1)
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.cpu().eval()


def completion_loss(model: MicroGPT, documents: Int[Tensor, "b s"], eos: int) -> Float[Tensor, ""]:
    """Return the mean negative log-likelihood, in nats per token, of the completions up to and including their first `eos`."""
    lengths = (documents != eos).sum(1)
    documents = documents[:, : int(lengths.max()) + 1]
    logits = model(documents[:, :-1])[:, PROMPT_LENGTH - 1 :]
    targets = documents[:, PROMPT_LENGTH:]
    positions = torch.arange(PROMPT_LENGTH, documents.shape[1], device=documents.device)
    padding = positions[None, :] > lengths[:, None]
    return cross_entropy(logits.flatten(0, 1), targets.masked_fill(padding, -100).flatten(), ignore_index=-100)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _save(model: MicroGPT, path: Path, key: str) -> None:
    """Write a model with the hash of its settings, atomically."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(tensors, metadata={HEADER: json.dumps({"settings": key, "sha256": _digest(tensors)})}))


def _load(path: Path, config: MicroConfig, key: str) -> MicroGPT:
    """Read a cached model; raises SafetensorError or ValueError unless settings, names, shapes and bytes all agree."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    entries = parse_json(metadata.get(HEADER, "null"))
    if not isinstance(entries, dict) or entries.get("settings") != key:
        raise ValueError("it was made by other settings")
    model = MicroGPT(config, torch.Generator())
    if {name: t.shape for name, t in model.state_dict().items()} != {name: t.shape for name, t in tensors.items()}:
        raise ValueError("its tensors are not those of the model")
    if entries.get("sha256") != _digest(tensors):
        raise ValueError("its checksum does not match")
    model.load_state_dict(tensors)
    return model.eval()
