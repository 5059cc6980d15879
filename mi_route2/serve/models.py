"""Models to serve: ``load("micro")``, ``load("smollm2")``, ``load("path/to/checkpoint")`` or ``load("module:function")``.

A served model is a host with a tokenizer, and whatever a page can offer with it: examples, named vectors, a monitor. With adapters
it runs in one mode: ``full`` (kept adapter and quarantine), ``deployed`` (no quarantine) or ``reference`` (the base model).
"""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor

from mi_route2.adapters import Adapters
from mi_route2.adapters.io import from_pretrained
from mi_route2.engine.text import SPLIT
from mi_route2.hosts.load import load as load_host
from mi_route2.rollouts import vocabulary
from mi_route2.runs.store import automatic, available
from mi_route2.serve.options import Mode, ServerLimits
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor
from mi_route2.vllm.client import VllmEngine, launch

CLOSED = "adapters: deployed"
"""Name of the monitor that closes the quarantine of one request."""


@dataclass(frozen=True)
class Example:
    """Two prompts for a sweep, whose difference decides between two tokens, and a prompt to complete."""

    title: str
    clean: str
    corrupt: str
    answer: str
    foil: str


class Readable:
    """Tokenizer of one thread, a copy: ``decode`` leaves special tokens out. The copy takes half a second of a real tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = copy.deepcopy(tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(eq=False)
class Served:
    """A model that is ready to be served.

    Attributes:
        name: Name that requests may give.
        host: Model on the host ``torch`` or ``transformer_lens``; ``None`` if ``vllm`` runs it.
        tokenizer: Tokenizer with the interface of transformers.
        adapters: Attached adapters, if any.
        mode: Mode of the adapters in which the model runs.
        vectors: Named vectors that every client may use.
        monitor: A monitor to start from, as the JSON of a request.
        steering: Steering vectors to start from, likewise.
        examples: Examples of sweeps, the best one first.
        prompts: Prompts to complete.
        vllm: The model on vLLM, in place of a host.
        ends: Further tokens that end a completion.
    """

    name: str
    host: Any
    tokenizer: Any
    adapters: Adapters | None = None
    mode: Mode = "full"
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    monitor: Mapping[str, Any] | None = None
    steering: Mapping[str, Any] | None = None
    examples: tuple[Example, ...] = ()
    prompts: tuple[str, ...] = ()
    vllm: VllmEngine | None = None
    ends: tuple[int, ...] = ()
    opened: ExitStack = field(default_factory=ExitStack, repr=False)
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for what in ("encode", "decode"):
            if not hasattr(self.tokenizer, what):
                raise TypeError(f"the tokenizer of {self.name} has no {what}: give one of transformers, or one like it")

    def switch(self, mode: Mode) -> None:
        """Run the model in another mode. ``ValueError`` for another mode than ``full`` without adapters."""
        if self.adapters is None:
            if mode != "full":
                raise ValueError(f"{self.name} has no adapters, so it has no mode {mode!r}: leave the mode out, or give adapters")
            return
        self.opened.close()
        self.opened.enter_context(getattr(self.adapters, mode)())
        self.mode = mode

    @property
    def modes(self) -> dict[str, bool]:
        """Modes that a request may ask for."""
        return {mode: self.refusal(mode) is None for mode in get_args(Mode)}

    def refusal(self, mode: str) -> str | None:
        """Return the reason for which a request cannot run in ``mode``; ``None`` if it can."""
        if self.adapters is None or mode == self.mode or (mode, self.mode) == ("deployed", "full"):
            return None
        return f"this server runs its model in mode {self.mode}: start a server with --mode {mode}, or leave `adapters` out"

    def closing(self, mode: str | None, width: int, adapters: Sequence[Site]) -> Monitor | None:
        """Return the monitor that runs one request without the quarantine; ``None`` if nothing needs to change.

        Its gate is exactly 1 at every token, prompt included, so that every quarantine adds exactly 0. ``width`` is that of the
        residual stream, ``adapters`` are the outputs of those that are on.
        """
        if mode != "deployed" or all(site.point != "quarantine_out" for site in adapters):
            return None
        return Monitor(
            Site(0, "resid_pre"), torch.zeros(width), threshold=-1e6, gates=(), quarantine="close", prompt=True, name=CLOSED
        )

    def encode(self, text: str, tokenizer: Any = None, **how: bool) -> list[int]:
        """Return the ids of a prompt, with the tokenizer's usual special tokens; ``ValueError`` for a text that it cannot read.

        ``tokenizer``: a copy of the model's, for another thread; ``how``: its options.
        """
        try:
            return [int(token) for token in (tokenizer or self.tokenizer).encode(text, **how)]
        except ValueError:
            raise
        except Exception as error:  # tokenizers raise errors of their own kinds
            raise ValueError(f"the tokenizer cannot read this text ({' '.join(str(error).split()):.200})") from error

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token within a text; a replacement character for a token that is a part of a character."""
        for token in ids:
            if token not in self._texts:
                once, twice = (str(self.tokenizer.decode(some)) for some in ([token], [token, token]))
                # SentencePiece leaves out the space of a text's first word, with which a word has another text than its end has
                within = twice.startswith(once) and SPLIT not in once
                self._texts[token] = twice[len(once) :] if within else once
        return [self._texts[token] for token in ids]

    def pieces(self, ids: Sequence[int], held: list[int]) -> list[str]:
        """Return the text of each token, and that of a character of several tokens at the last of them.

        ``held`` keeps the tokens of a character that is not finished, for the next call.
        """
        pieces = []
        for token, text in zip(ids, self.tokens(ids), strict=True):
            if held or SPLIT in text:
                held.append(token)
                whole = SPLIT not in text or len(held) == 4  # a character of UTF-8 has at most four bytes
                text = str(self.tokenizer.decode(held))
                if SPLIT in text and not whole:
                    text = ""
                else:
                    held.clear()
            pieces.append(text)
        return pieces

    def chat(self, messages: Sequence[Mapping[str, str]], tokenizer: Any = None, **how: bool) -> list[int]:
        """Return the ids of a conversation by the tokenizer's chat template; ``ValueError`` if it has none, or refuses it.

        ``how``: ``add_generation_prompt`` and ``continue_final_message`` of the template.
        """
        tokenizer = tokenizer or self.tokenizer
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"{self.name} has no chat template: use /v1/completions with a prompt")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, **({"add_generation_prompt": True} | how))
        except Exception as error:  # templates raise errors of their own kinds
            raise ValueError(f"the chat template refuses these messages: {' '.join(str(error).split()):.300}") from error
        return self.encode(text, tokenizer, add_special_tokens=False)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens of the model that end a completion: the tokenizer's end of text, and those of the generation config."""
        model: Any = getattr(self.host, "model", None)
        config = getattr(model, "generation_config", None)
        configured = [getattr(self.tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None), self.ends]
        flat = [token for each in configured for token in (each if isinstance(each, list | tuple) else [each])]
        size = (
            vocabulary(model) if self.vllm is None else self.vllm.facts.vocabulary
        )  # a tokenizer, or a config that was not adapted, may name a token that the model lacks
        return tuple(dict.fromkeys(int(token) for token in flat if token is not None and (size is None or 0 <= int(token) < size)))


def _smollm2() -> Served:
    from mi_route2.models import smollm2, smollm2_tokenizer

    story = "When Mary and John went to the store, {} gave a drink to"
    examples = (Example("Who gets the drink", story.format("John"), story.format("Mary"), " Mary", " John"),)
    prompts = ("The capital of France is", "Once upon a time")
    return Served("smollm2", smollm2(), smollm2_tokenizer(), examples=examples, prompts=prompts)


NAMES: Mapping[str, str] = MappingProxyType(
    {"micro": "studies.environments.micro.served:micro", "smollm2": "mi_route2.serve.models:_smollm2"}
)
"""Short names, and the ``module:function`` that each stands for."""


def load(
    model: str = "micro",
    *,
    adapters: Path | str | None = None,
    mode: Mode = "full",
    dtype: str | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> Served:
    """Return a model to serve.

    Args:
        model: ``micro`` (trained in seconds, nothing is downloaded), ``smollm2``, the folder of a checkpoint of transformers, or
            ``module:function``: a function without arguments that returns a ``Served``.
        adapters: Folder that ``save_pretrained`` of mi_route2 wrote, attached to the model.
        mode: Mode of the adapters.
        dtype: Type of the weights of a checkpoint folder.
        device: Device of the model.
        threads: Threads of torch from now on.

    Raises:
        ValueError: No such model, adapters that do not fit, or a mode without adapters.
        FileNotFoundError: No such folder.

    Examples:
        >>> served = load("micro")  # doctest: +SKIP
    """
    if threads is not None:
        torch.set_num_threads(threads)
    name = NAMES.get(model, model)
    if ":" in name and not Path(model).exists():
        served = _called(name)
        if dtype is not None:
            raise ValueError(f"dtype is for a checkpoint folder: leave it out for {model}")
    else:
        served = Served(Path(model).name, load_host(model, dtype=dtype), _tokenizer(model))
    if device is not None:
        served.host.model.to(device)  # pyright: ignore[reportArgumentType]
    if adapters is not None:
        if served.adapters is not None:
            raise ValueError(f"{model} has adapters of its own: leave the folder {adapters} out")
        served.adapters = from_pretrained(served.host, adapters)
    served.switch(mode)
    return served


def load_vllm(model: Path | str, *, dtype: str | None = None, limits: ServerLimits | None = None, **settings: Any) -> Served:
    """Return a checkpoint's folder to serve on vLLM, which takes its sizes from ``limits``, and ``settings`` of ``vllm.LLM``.

    Raises:
        ValueError: No such folder, or vLLM's model was never compared.
        ModuleNotFoundError: vLLM is not installed.
    """
    from transformers import GenerationConfig

    limits = limits or ServerLimits()
    if not Path(model).is_dir():
        raise ValueError(f"vLLM serves the folder of a checkpoint, and {model} is none: save the model with its tokenizer")
    tokenizer, slot_bytes = _tokenizer(model), limits.slot_bytes
    if slot_bytes is None and not torch.cuda.is_available():
        slot_bytes = automatic(available())
    sizes: dict[str, Any] = {"max_num_seqs": limits.rows, "queue": limits.queue, "kv_cache_memory_bytes": slot_bytes}
    sizes |= {"enable_prefix_caching": limits.prefix_bytes > 0, "dtype": dtype or "auto"}
    sizes |= {"controllers": (), "tokenizer": Readable(tokenizer)}
    engine = launch(model, **(sizes | settings))
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has none
        ends = None
    several = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    return Served(Path(model).name, None, tokenizer, vllm=engine, ends=several)


def _tokenizer(model: Path | str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} has no tokenizer that transformers can read ({' '.join(str(error).split()):.200})") from error


def _called(name: str) -> Served:
    module, _, function = name.partition(":")
    try:
        make: Callable[[], Served] = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"there is no model {name!r} ({error}): choose {', '.join(NAMES)}, the folder of a checkpoint, or module:function"
        ) from error
    served = make()
    if not isinstance(served, Served):
        raise ValueError(f"{name} returned a {type(served).__name__}: return a mi_route2.serve.models.Served")
    return served
