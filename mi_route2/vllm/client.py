"""Requests of our own engine run by vLLM: a request becomes a prompt and ``SamplingParams``, and the answer a ``Result``."""

import os
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mi_route2.adapters.io import PEFT_CONFIG, PEFT_TENSORS
from mi_route2.checks import checked
from mi_route2.engine.request import EngineRequest, Finish, Request, Result, Token, refuse
from mi_route2.engine.sampling import Sampling
from mi_route2.patching.patches import FromRun, Resolved, resolve
from mi_route2.steering.plan import MonitorReading
from mi_route2.steering.specs import Steering, Vector, VectorLike, looker
from mi_route2.steering.state import SteeringState
from mi_route2.tensor_files import unpack
from mi_route2.validation import parse_object
from mi_route2.vllm.facts import COLDEST, Facts, installed, refuse_settings
from mi_route2.vllm.wire import KEY, Orders, salt, write

EXTENSION = "mi_route2.vllm.worker.WorkerExtension"
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"worker_extension_cls": EXTENSION, "max_logprobs": -1, "enforce_eager": True, "async_scheduling": False}
)
"""Settings of ``vllm.LLM`` that a ``VllmEngine`` needs."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""

_REFUSED: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "run": (None, "captures come with the result, not to a run store: leave run out"),
        "priority": (0, "vLLM was not started with priorities: leave priority out"),
        "norms": ((), "norms are not computed in vLLM: capture the site and take the norms of its rows"),
    }
)
"""Field of a ``Request`` -> its only value here, and what to do instead."""


class VllmEngine:
    """vLLM with interventions per request; see the package.

    ``facts`` are the sizes of the model.

    Args:
        llm: a ``vllm.LLM`` that was started with ``SETTINGS``; ``launch`` starts one.
        vectors: named vectors that patches and steering may use.
        adapters: folders that ``export_peft`` wrote, by a name of yours, for a vLLM with ``enable_lora=True``.
        generator: draws the seeds of sampled requests that give none. ``None``: seeded nondeterministically.

    Raises:
        ValueError: vLLM has another version, was started without ``SETTINGS``, or runs a model that was never compared.
    """

    def __init__(
        self,
        llm: Any,
        *,
        vectors: Mapping[str, VectorLike] | None = None,
        adapters: Mapping[str, Path | str] | None = None,
        generator: torch.Generator | None = None,
    ):
        self.llm = llm
        try:
            answer = llm.collective_rpc("mi_route2_open")[0]
        except (AttributeError, NotImplementedError) as error:
            raise ValueError(f"this vLLM was started without its extension: give it worker_extension_cls={EXTENSION!r}") from error
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self.facts = Facts(**answer)
        self.vectors = {name: Vector(vector) for name, vector in (vectors or {}).items()}
        self._adapters = {name: Path(folder) for name, folder in (adapters or {}).items()}
        self._loaded: dict[str, tuple[object, Any]] = {}
        self._seeds = generator or torch.Generator()
        if generator is None:
            self._seeds.seed()

    def _encoded(self, number: int, request: Request, key: str) -> tuple[dict[str, Any], dict[str, Any], EngineRequest]:
        sampling = request.sampling
        if sampling.seed is None and not sampling.plain:
            sampling = replace(sampling, seed=int(torch.randint(2**53, (), generator=self._seeds, device=self._seeds.device)))
        return encoded(number, request, sampling, self.facts, self.vectors, key)

    @checked
    def generate(self, requests: Iterable[Request], *, adapters: str | None = None) -> list[Result]:
        """Run ``requests`` together and return their results in order.

        Args:
            requests: the requests.
            adapters: name of the LoRA under which they run; ``None``: the base model.

        Raises:
            ValueError, KeyError: a request cannot be run, or there is no LoRA of this name; none was started.
        """
        if adapters is not None and adapters not in self._adapters:
            raise KeyError(f"no LoRA is called {adapters!r}; there are: {', '.join(self._adapters) or 'none'}")
        made: dict[str, tuple[dict[str, Any], dict[str, Any], EngineRequest]] = {}
        for number, request in enumerate(requests):
            key = secrets.token_hex(16)
            made[key] = self._encoded(number, request, key)
        if not made:
            return []
        prompts, params = [prompt for prompt, *_ in made.values()], [_params(arguments) for _, arguments, _ in made.values()]
        try:
            answers = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora(adapters))
        except BaseException:
            abandon(self.llm)
            raise
        finally:
            left = self.llm.collective_rpc("mi_route2_collect", args=(list(made),))[0]
        return [_result(req, answer, left.get(key)) for (key, (*_, req)), answer in zip(made.items(), answers, strict=True)]

    def _lora(self, name: str | None) -> Any:
        """Return vLLM's request for a LoRA, a new one if the folder was written again.

        vLLM never reads a number or a prefix under a name again, so a folder with new content needs another number and name.
        """
        if name is None:
            return None
        folder = self._adapters[name]
        stat = (folder / PEFT_TENSORS).stat()
        stamp, (before, lora) = (stat.st_mtime_ns, stat.st_size, stat.st_ino), self._loaded.get(name, (None, None))
        if stamp != before:
            if lora is not None:
                self.llm.llm_engine.remove_lora(lora.lora_int_id)
            number = 1 + secrets.randbits(30)  # another engine on this vLLM, or its user, may have counted from 1
            lora = import_module("vllm.lora.request").LoRARequest(f"{name} {number}", number, str(folder))
            self._loaded[name] = stamp, lora
        return lora


def abandon(llm: Any) -> None:
    """Abort all requests that an interrupted ``generate`` left in vLLM, also those that a user had added, and forget all prefixes.

    vLLM counts a step's tokens as computed, and offers their blocks as prefixes, before it runs the step. After a step that broke
    off it would wait for a left request for ever, and other requests would read keys and values that were never written.

    Raises:
        RuntimeError: vLLM keeps its prefixes.
    """
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM was interrupted and keeps prefixes that may be half computed: start it again")


@contextmanager
def preserving_process() -> Iterator[None]:
    """Context in which vLLM may start; random numbers and torch's threads are ours again afterwards.

    vLLM seeds Python, NumPy and torch with its own seed, the same in every run. The worker of its CPU build replaces
    ``torch.set_num_threads`` by a function that does nothing.
    """
    count, change, started = torch.get_num_threads(), torch.set_num_threads, torch.cuda.is_initialized()
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if started else []):
            yield
    finally:
        if torch.cuda.is_initialized() and not started:
            torch.cuda.manual_seed_all(torch.initial_seed())  # as torch seeds a GPU at its first use
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = change
        torch.set_num_threads(count)


def launch(
    model: Path | str,
    *,
    vectors: Mapping[str, VectorLike] | None = None,
    adapters: Mapping[str, Path | str] | None = None,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> VllmEngine:
    """Start vLLM in this process on a checkpoint's folder.

    Args:
        model: the folder.
        vectors: as for ``VllmEngine``.
        adapters: as for ``VllmEngine``; vLLM is started with room for their ranks.
        generator: as for ``VllmEngine``.
        **settings: of ``vllm.LLM``, for example ``dtype="float32"``.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: a setting, or this version of vLLM, is refused.
    """
    if "worker_extension_cls" in settings:
        raise ValueError("worker_extension_cls is what this package needs for itself: leave it out")
    refuse_settings(settings)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    room = {"enable_lora": True, "max_lora_rank": _rank(adapters.values())} if adapters else {}
    vllm = installed()
    with preserving_process():
        llm = vllm.LLM(str(model), **({"skip_tokenizer_init": True} | room | settings | dict(SETTINGS)))
    return VllmEngine(llm, vectors=vectors, adapters=adapters, generator=generator)


def _rank(folders: Iterable[Path | str]) -> int:
    """Return the smallest rank that vLLM reserves for the LoRAs in ``folders``."""
    configs = [parse_object((Path(folder) / PEFT_CONFIG).read_bytes()) for folder in folders]
    return rank_of_vllm(max(rank for config in configs for rank in (config["r"], *config.get("rank_pattern", {}).values())))


def rank_of_vllm(rank: int) -> int:
    """Return the smallest rank that vLLM reserves, which has steps, for a LoRA of ``rank``; ``ValueError`` above the largest."""
    if rank > RANKS[-1]:
        raise ValueError(f"a LoRA of rank {rank} is more than vLLM runs, which is {RANKS[-1]}: attach adapters with a lower rank")
    return next(step for step in RANKS if step >= rank)


def resolved(request: Request, facts: Facts, vectors: Mapping[str, Vector]) -> tuple[tuple[Resolved, ...], Steering]:
    """Return a request's patches and steering without names; ``ValueError`` or ``KeyError`` if vLLM cannot run the request."""
    for name, (only, remedy) in _REFUSED.items():
        if getattr(request, name) != only:
            raise ValueError(f"{name}={getattr(request, name)!r:.60} is not possible on vLLM: {remedy}")
    if request.sampling.prompt_logprobs is not None:
        raise ValueError("log-probabilities of a prompt are not read here: use this project's own Engine")
    if request.sampling.stop:
        raise ValueError("stop texts are not looked for here: give stop_tokens")
    _refuse_sampling(request.sampling)
    refuse(request, facts.context - 1, facts.vocabulary)  # vLLM keeps one position for the last token
    if runs := [patch for patch in request.patch if isinstance(patch.source, FromRun)]:
        raise ValueError(
            f"the patch at {runs[0].site} reads a run, and no run can be compared with vLLM's weights: give its row as a tensor"
        )
    for capture in request.capture:
        facts.shape(capture.site)
    named = {name: vector.data for name, vector in vectors.items()}
    patches = resolve(request.patch, facts.shape, vectors=named, dtype=facts.torch_dtype)
    steering = (request.steering or Steering()).resolved(looker(vectors))
    SteeringState(facts.shape, rows=1, dtype=facts.torch_dtype).check(steering)
    return patches, steering


def _refuse_sampling(how: Sampling) -> None:
    """Raise ``ValueError`` for a distribution from which vLLM would draw otherwise than our engine."""
    if how.plain:
        return
    if how.temperature < COLDEST:
        raise ValueError(f"temperature={how.temperature} is not possible, vLLM would sample at {COLDEST}: give that or more, or 0")
    if (how.top_k or how.min_p) and how.top_p < 1:
        raise ValueError(
            f"top_k={how.top_k} and min_p={how.min_p} with top_p={how.top_p} are not possible on vLLM, which takes the share of "
            "what these keep and not of the whole distribution: give top_p alone, or leave it out"
        )


def encoded(
    number: int, request: Request, sampling: Sampling, facts: Facts, vectors: Mapping[str, Vector], key: str
) -> tuple[dict[str, Any], dict[str, Any], EngineRequest]:
    """Return a request's prompt for vLLM, the arguments of its ``SamplingParams``, and what its result is collected in.

    Args:
        number: number of the request in its results.
        request: the request; errors as in ``resolved``.
        sampling: its sampling, with a seed if it samples.
        facts: of the model.
        vectors: named vectors.
        key: name under which the worker keeps what the request leaves.
    """
    patches, steering = resolved(request, facts, vectors)
    req = EngineRequest(number, request, Result(number, seed=sampling.seed), sampling, patches)
    orders = Orders(key, len(request.prompt), patches, steering, request.capture, request.readings)
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    cache_salt = salt(request, patches, steering, SteeringState(facts.shape, rows=1, dtype=facts.torch_dtype))
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    arguments = _sampling(sampling)
    if orders:
        arguments["extra_args"] = {KEY: write(orders)}
    # What a cached prefix holds is not computed by this request, so nothing of it would be captured or read.
    if req.lowest_capture() < req.prompt:
        arguments["skip_reading_prefix_cache"] = True
    return prompt, arguments, req


def _sampling(sampling: Sampling) -> dict[str, Any]:
    logprobs = -1 if sampling.logprob_token_ids else sampling.logprobs
    return {
        "max_tokens": sampling.max_new,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": logprobs,
        "ignore_eos": True,  # as in our engine, stop_tokens alone end a request
        "detokenize": False,
    }


def _params(arguments: Mapping[str, Any]) -> Any:
    return installed().SamplingParams(**arguments)


def _result(req: EngineRequest, answer: Any, left: Mapping[str, Any] | None) -> Result:
    """Return vLLM's output and the values that the worker collected, as a ``Result``."""
    result, output = req.result, answer.outputs[0]
    details = output.logprobs or [None] * len(output.token_ids)
    result.tokens = [_token(token, detail, req.sampling) for token, detail in zip(output.token_ids, details, strict=True)]
    result.finish = _finish(output.finish_reason)
    result.cached = answer.num_cached_tokens or 0
    req.tokens += result.ids
    req.computed = len(req.tokens) - 1
    for number, kept in (left or {}).get("captured", {}).items():
        order = sorted(range(len(kept["positions"])), key=kept["positions"].__getitem__)
        req.keep(int(number), [kept["positions"][i] for i in order], unpack(kept["rows"])[order])
    for position, readings in sorted((left or {}).get("readings", {}).items(), key=lambda item: int(item[0])):
        req.note(int(position), {name: MonitorReading(*pair) for name, pair in readings.items()})
    if left is not None and left["error"] is not None:
        result.finish, result.error = "error", left["error"]
    req.settle()
    return result


def _finish(reason: str | None) -> Finish:
    return "length" if reason == "length" else "stop" if reason == "stop" else "cancelled"


def _token(token: int, detail: Mapping[int, Any] | None, sampling: Sampling) -> Token:
    if detail is None:
        return Token(token)
    best = sorted((logprob.rank, token_id) for token_id, logprob in detail.items() if logprob.rank is not None)
    top = {token_id: detail[token_id].logprob for _, token_id in best[: sampling.logprobs or 0]}
    requested = tuple(detail[token_id].logprob for token_id in sampling.logprob_token_ids)
    return Token(token, detail[token].logprob, top, requested)
