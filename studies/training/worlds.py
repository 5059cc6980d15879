"""Worlds of a run: the micro world with its warm-started model, or the user's problem with a chat model and its memory plan."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from mi_route2.hosts.load import load
from mi_route2.rollouts import Forward
from mi_route2.validation import demand_device
from studies.environments.chat import ChatTokenizer, ChatWitness, ChatWorld, Sampler
from studies.environments.micro.language import MICRO_MODES
from studies.environments.micro.runner import CachedRunner, SubprocessRunner
from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import cached_at, settings_hash, warm_start
from studies.environments.micro.world import MicroWitness, MicroWorld
from studies.environments.problems import open_problem
from studies.environments.protocol import Modes, Problem, Witness, World
from studies.training.settings import ChatModel, Settings

MODES = "modes.json"
"""File of a run folder: the modes of a chat model's problem."""


@contextmanager
def open_world(settings: Settings, sampler: Sampler | None = None, device: str = "cpu") -> Iterator[tuple[World, Witness]]:
    """Context: the world for training and, separate from it, the witness; both are closed on exit.

    ``sampler`` is that of a chat model's completions; transformers' own modules sample if not given. On ``device`` lie the rollouts
    of a micro world.

    Raises:
        ValueError: The problem's data are not those of the settings, before or after.
    """
    if settings.chat is None:
        with SubprocessRunner() as child:
            runner = CachedRunner(child)
            yield MicroWorld(get_world(settings.world), runner, chosen_device(device)), MicroWitness(runner)
        return
    _refuse_changed_data(settings.chat)
    problem = open_problem(settings.world, settings.chat.data)
    try:
        world = chat_world(settings.chat, problem, sampler)
        yield world, ChatWitness(world, problem.judge())
    finally:
        problem.close()
    _refuse_changed_data(settings.chat)


def _refuse_changed_data(chat: ChatModel) -> None:
    if chat.data_hash:
        _refuse_changed(chat.data, data_hash(Path(chat.data)), chat.data_hash, "data")


def _refuse_changed(path: str, current: str, known: str, what: str) -> None:
    """Raise ``ValueError`` if data or model do not have the hash that is in the settings."""
    if current != known:
        raise ValueError(
            f"{path} was changed (its hash is {current or 'that of nothing'}, and {known} in the settings): put it back, or run on "
            f"the new {what} into another --out"
        )


def chat_world(chat: ChatModel, problem: Problem, sampler: Sampler | None = None) -> ChatWorld:
    """Return the problem's world under the chat model's tokenizer."""
    from transformers import AutoConfig

    tokenizer = ChatTokenizer(chat.path, problem.system, chat.thinking)
    config: Any = AutoConfig.from_pretrained(Path(chat.path), trust_remote_code=False)
    highest = max(*tokenizer.prompt("?"), *tokenizer.ends, tokenizer.pad)
    if highest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {chat.path} has a token {highest}, but the model {config.vocab_size}: use the model's own tokenizer"
        )
    context = config.max_position_embeddings
    return ChatWorld(
        problem,
        tokenizer,
        max_new=chat.max_new,
        context=context,
        device=chosen_device(chat.device),
        at_once=chat.at_once,
        sampler=sampler,
    )


def modes_of(settings: Settings) -> Modes:
    """Return the modes of the run's world."""
    if settings.chat is None:
        return MICRO_MODES
    problem = open_problem(settings.world, settings.chat.data)
    problem.close()
    return problem.modes


def base_model(
    settings: Settings, seed: int, cache: Path, dtype: torch.dtype, report: Callable[[int], None] | None = None, device: str = "cpu"
) -> nn.Module:
    """Return the model from which every arm of a seed starts, in ``dtype`` and ``eval`` mode; ``report`` as in ``warm_start``.

    ``device`` is that of a micro model.

    Raises:
        ValueError: A chat model's folder is not as its hash in the settings says.
    """
    if settings.chat is None:
        place = chosen_device(device)
        model = warm_start(get_world(settings.world), settings.warm, seed, cache, progress=False, report=report, device=place)
        return model.to(place, dtype)
    from transformers.utils import logging

    logging.disable_progress_bar()  # a worker's bar would break the run's own display
    # a Path, so that a missing folder is an error and not taken for a Hugging Face id
    model: Any = load(Path(settings.chat.path), dtype=dtype, device=chosen_device(settings.chat.device)).model
    _refuse_changed(settings.chat.path, weights_hash(Path(settings.chat.path)), settings.chat.weights, "model")  # once it is read
    if settings.chat.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def base_file(settings: Settings, seed: int, cache: Path) -> Path:
    """Return the file in which the base model of a micro world is cached."""
    return cached_at(get_world(settings.world), settings.warm, seed, cache)[0]


def base_key(settings: Settings, seed: int) -> str:
    """Return a hash of everything that the base model and its samples depend on."""
    if settings.chat is None:
        return settings_hash(get_world(settings.world), settings.warm, seed)[:16]
    chat = settings.chat
    described = f"{settings.world} {chat.data_hash} {chat.weights} {chat.max_new} {chat.thinking} {chat.tries} {seed}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def checkpointed(model: nn.Module, forward: Forward) -> Forward:
    """Return ``forward`` with the model's gradient checkpointing on only while gradients are recorded.

    transformers checkpoints a block whose ``training`` flag is set. Only the blocks' own flags are changed: dropout stays off, and
    sampling, which needs the cache that checkpointing disables, is unaffected.
    """
    blocks = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]

    def call(network: nn.Module, tokens: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        recorded = torch.is_grad_enabled()
        for block in blocks:
            block.training = recorded
        try:
            return forward(network, tokens, attention)
        finally:
            for block in blocks:
                block.training = False

    return call


def chosen_device(name: str) -> torch.device:
    """Return a device of this machine; ``auto`` is CUDA if available, and an error as in `demand_device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    demand_device(name)
    return torch.device(name)


def weights_hash(folder: Path) -> str:
    """Return 16 hexadecimal digits that identify the config, the tokenizer and the weights in a checkpoint's folder.

    Raises:
        ValueError: There is no checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is not a folder with a Hugging Face checkpoint (it has no config.json): give --model such a folder"
        )
    kinds = (".json", ".safetensors", ".txt", ".jinja", ".model")
    return _hashed(folder, sorted(path for path in folder.iterdir() if path.suffix in kinds), "hashing the model")


def data_hash(path: Path) -> str:
    """Return 16 hexadecimal digits that identify a file, or all files in a folder; empty if there is neither."""
    if path.is_file():
        return _hashed(path.parent, [path], "hashing the data")
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return _hashed(path, files, "hashing the data") if files else ""


def _hashed(root: Path, files: list[Path], what: str) -> str:
    digest = hashlib.sha256()
    for path in tqdm(files, desc=what, unit="file", delay=3, disable=None, leave=False):
        with path.open("rb") as file:
            digest.update(str(path.relative_to(root)).encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


FLOAT = 4
PROMPT = 2048
"""Assumed number of tokens in a prompt."""
LACKING = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of torch's out-of-memory errors that are plain RuntimeErrors."""


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated memory in bytes by use, and the memory of the device (``None`` if unknown)."""

    sizes: dict[str, int]
    available: int | None

    @property
    def peak(self) -> int:
        """Peak memory: the largest of sampling, training and fitting, which alternate, plus what stays."""
        training = self.sizes["activations"] + self.sizes["logits"]
        always = sum(self.sizes.get(name, 0) for name in ("weights", "adapters", "vLLM", "directions"))
        return always + max(training, self.sizes["sampling"], self.sizes.get("fitting", 0))

    def __str__(self) -> str:
        rows = [f"  {name:12} {_gib(size)}" for name, size in self.sizes.items()]
        have = "" if self.available is None else f" of {_gib(self.available)}"
        return "\n".join(["memory plan, one worker:", *rows, f"  {'peak':12} {_gib(self.peak)}{have}"])


def plan(settings: Settings, chat: ChatModel, dtype: torch.dtype, vllm: bool = False, full: bool = False) -> MemoryPlan:
    """Return the memory plan of one worker; ``vllm`` has weights of its own, and holds its cache while the policy trains.

    With ``full`` a route holds directions of all adapted weights; to fit them anew takes as much again, and a pair's gradients.

    Raises:
        ValueError: If transformers does not know the folder's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(Path(chat.path), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    d, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or d // heads
    inner = getattr(config, "intermediate_size", None) or 4 * d
    size, tokens = dtype.itemsize, chat.token_budget
    block = 8 * d + 3 * inner + 2 * head * (heads + 2 * kv_heads)
    activations = layers * d + block if chat.checkpointing else layers * block
    linears = [(d, heads * head), (d, kv_heads * head), (d, kv_heads * head), (heads * head, d), (d, inner), (d, inner), (inner, d)]
    rank = settings.quarantine_rank + (0 if settings.kept_rank is None else settings.kept_rank)
    adapters = layers * sum((a + b) * rank for a, b in linears)
    sizes = {
        "weights": parameters * size,
        "adapters": 4 * FLOAT * adapters,
        "activations": tokens * activations * size,
        "logits": 3 * FLOAT * tokens * vocabulary,
        "sampling": chat.at_once * min(config.max_position_embeddings, PROMPT + chat.max_new) * 2 * layers * kv_heads * head * size,
    }
    if full:
        adapted = layers * sum(a * b for a, b in linears)
        sizes |= {"directions": FLOAT * adapted, "fitting": (FLOAT + 2 * size) * adapted}
    if vllm:
        sizes |= {"vLLM": sizes["weights"] + sizes["sampling"], "sampling": 0}
    return MemoryPlan(sizes, _available(chosen_device(chat.device)))


SLACK = 512
"""Tokens of vLLM's cache beyond those of a batch, because it gives them out in blocks."""


def vllm_sampler(settings: Settings, chat: ChatModel, dtype: torch.dtype) -> AbstractContextManager[Sampler]:
    """Return a sampler of the chat model on vLLM, with room for ``chat.at_once`` completions at one time."""
    from transformers import AutoConfig

    from mi_route2.vllm import VllmSampler  # with the engine, which ``--help`` need not wait for

    context = AutoConfig.from_pretrained(Path(chat.path), trust_remote_code=False).max_position_embeddings
    tokens = chat.at_once * min(context, PROMPT + chat.max_new)
    room = plan(settings, chat, dtype).sizes["sampling"] // tokens * (tokens + SLACK)
    # With a size of its own vLLM leaves the rest of the memory to training.
    return VllmSampler(
        chat.path, dtype=dtype, max_model_len=min(context, tokens), kv_cache_memory_bytes=room, max_num_seqs=chat.at_once
    )


def out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is torch's or Python's out-of-memory error."""
    lacking = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return lacking or (isinstance(error, RuntimeError) and any(word in str(error) for word in LACKING))


ADVICE = (
    "out of memory: choose a smaller token budget (--override chat.token_budget=8192), sample fewer completions at a time "
    "(chat.at_once=8), shorten them (chat.max_new=256), keep chat.checkpointing=true, or use --precision bfloat16; "
    "the same command goes on from the last checkpoint"
)


def _available(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
