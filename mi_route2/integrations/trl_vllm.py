"""vLLM as the sampler of ``RoutedGRPOTrainer``: ``GRPOConfig(use_vllm=True, vllm_mode="colocate")``.

TRL sends merged weights after each step. Here vLLM reads the base once, from its folder, and then both adapters as one LoRA, under
a new name whenever they have changed. What TRL makes of vLLM's log-probabilities (its importance sampling correction) stays.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from mi_route2.adapters import Adapters
from mi_route2.vllm.client import abandon, preserving_process
from mi_route2.vllm.facts import COLDEST, imported
from mi_route2.vllm.sampler import PolicyLora, demand_dtype, lora_settings, refuse_stale

PLAIN: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "top_p": (1.0,),
        "top_k": (0, -1, None),
        "min_p": (0.0, None),
        "repetition_penalty": (1.0,),
        "generation_kwargs": (None, {}),
        "vllm_structured_outputs_regex": (None,),
    }
)
"""Settings of sampling, and their values under which vLLM's log-probabilities are those of the policy at its temperature."""


class PolicyGeneration(VLLMGeneration):
    """TRL's generation on vLLM in this process, from the adapters as they are, and are switched, at each call."""

    def __init__(self, adapters: Adapters, dtype: torch.dtype, turns: bool, **named: Any):
        self.adapters, self.dtype, self.turns = adapters, dtype, turns
        super().__init__(**named)

    def _init_vllm(self) -> None:
        vllm, rank = imported(), self.accelerator.process_index
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as the launcher below demands
        ranks = {"RANK": rank, "LOCAL_RANK": self.accelerator.local_process_index, "WORLD_SIZE": self.accelerator.num_processes}
        names = (*ranks, "MASTER_ADDR", "MASTER_PORT")
        before = {name: os.environ[name] for name in names if name in os.environ}
        os.environ |= {name: str(number) for name, number in ranks.items()}
        ensure_master_addr_port()
        try:
            with preserving_process():  # TRL's own settings, and room for the adapters
                self.llm = vllm.LLM(
                    model=self.model.name_or_path,
                    dtype=str(self.dtype).removeprefix("torch."),
                    gpu_memory_utilization=self.gpu_memory_utilization,
                    max_model_len=self.max_model_length,
                    max_num_seqs=self.max_num_seqs,
                    model_impl=self.model_impl,
                    distributed_executor_backend="external_launcher",
                    seed=rank,
                    max_num_batched_tokens=4096,
                    logprobs_mode="processed_logprobs",
                    trust_remote_code=self.trust_remote_code,
                    **lora_settings(self.adapters),
                )
        finally:  # a later trainer would be one of several processes
            for name in names:
                os.environ.pop(name, None)
            os.environ |= before
        self._lora = PolicyLora(self.llm, self.adapters)
        for name in ("generate", "chat"):  # a rollout_func may call either
            setattr(self.llm, name, partial(self._sample, getattr(self.llm, name)))
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this once in a step, and an evaluation switches adapters within one."""

    def generate(self, prompts: list[list[int]], *positional: Any, **named: Any) -> tuple:
        if not self.turns:  # the prompts of later turns hold what has been used of max_completion_length
            self.demand_room(max(map(len, prompts), default=0))
        return super().generate(prompts, *positional, **named)

    def demand_room(self, longest: int) -> None:
        """Raise ``ValueError`` if completions of a prompt of ``longest`` tokens may end early for want of positions."""
        room = self.llm.llm_engine.model_config.max_model_len
        if longest + self.max_completion_length > room:
            raise ValueError(
                f"a prompt of {longest} tokens and max_completion_length = {self.max_completion_length} do not fit vLLM's {room} "
                "positions, where completions end early as if they were whole: choose a larger vllm_max_model_length"
            )

    def _sample(self, ask: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Run requests under the adapters as they are, and are switched, now."""
        try:
            return ask(*positional, **named | {"lora_request": named.get("lora_request") or self._lora.request()})
        except BaseException:
            abandon(self.llm)
            raise


def unsupported(args: Any) -> list[tuple[str, object, str]]:
    """Return settings of vLLM that the adapters cannot follow: the name, whether it is set, and what to use."""
    sampling = args.generation_kwargs or {}
    uses = {"seed": "GRPOConfig(seed=...)", "n": "num_generations", "max_tokens": "max_completion_length"}
    uses |= {"logprobs": "the trainer's own", "ignore_eos": "the trainer's end tokens"}
    by_sequence = args.vllm_importance_sampling_correction and "token" not in args.vllm_importance_sampling_mode
    return [
        (f"vllm_mode={args.vllm_mode!r}", args.vllm_mode != "colocate", "use vllm_mode='colocate'"),
        ("vllm_enable_sleep_mode", args.vllm_enable_sleep_mode, "leave it out"),
        ("vllm_tensor_parallel_size", args.vllm_tensor_parallel_size != 1, "use 1"),
        ("vllm_model_impl='transformers'", args.vllm_model_impl == "transformers", "use 'vllm'"),
        *((f"generation_kwargs[{name!r}]", name in sampling, f"use {use}") for name, use in uses.items()),
        (
            "mask_truncated_completions with a stop text, which TRL takes for truncation",
            args.mask_truncated_completions and sampling.get("stop"),
            "give stop_token_ids in generation_kwargs",
        ),
        (f"temperature={args.temperature}", args.temperature < COLDEST, f"choose at least {COLDEST}, vLLM's lowest"),
        (
            "loss_type='vespo' with a ratio per sequence",
            args.loss_type == "vespo" and by_sequence,
            "use vllm_importance_sampling_mode='token_truncate' or 'token_mask'",
        ),
    ]


def sample_with_vllm(trainer: Any) -> None:
    """Start vLLM for a trainer that was made without it.

    Raises:
        ValueError: The model has no folder of its base, or vLLM cannot run its adapters or its dtype.
    """
    args, base = trainer.args, trainer.model.name_or_path
    if trainer.is_fsdp_enabled:
        raise ValueError("vLLM beside a sharded model was never tried: leave use_vllm out, or use DDP")
    if not base or not Path(base).is_dir():
        raise ValueError(
            f"vLLM reads the base model from a folder, and this model's name_or_path is {base!r}: save it before adapters are "
            "attached, and give the trainer the folder"
        )
    options = args.generation_kwargs or {}
    # vLLM knows the end tokens of the folder alone, and a script may have set others; it ends a text under a regex by its own
    ends = {
        "ignore_eos": not (args.vllm_structured_outputs_regex or options.get("structured_outputs")),
        "stop_token_ids": [*trainer.eos_token_ids, *options.get("stop_token_ids", ())],
    }
    trainer.eos_token_ids = ends["stop_token_ids"]  # or TRL would take what ends at others for truncated
    dtype = torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else trainer.model.dtype
    demand_dtype(dtype)
    trainer.vllm_generation = PolicyGeneration(
        trainer.adapters,
        dtype,
        turns=bool(trainer.tools),
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        generation_kwargs={**options, **ends},
    )
    trainer.use_vllm, trainer._last_loaded_step = True, -1


@torch.no_grad()
def check_sampled(trainer: Any, output: dict[str, Any]) -> None:
    """Raise an error if vLLM had no room for completions, or its log-probabilities are not the model's.

    Compared are those of the completions in ``output``, unless the sampling cuts or reweights the distribution (``PLAIN``), or
    ``rollout_func`` gave none.

    Raises:
        ValueError: A completion may have ended early for want of positions.
        RuntimeError: vLLM runs other weights.
    """
    if trainer.tools:  # TRL looks for room in later turns alone
        trainer.vllm_generation.demand_room(int(output["prompt_mask"].sum(dim=1).max()))
    theirs = output.get("sampling_per_token_logps")
    if theirs is None or any(getattr(trainer.args, name) not in plain for name, plain in PLAIN.items()):
        return  # nothing to compare
    ours, kept = output.get("old_per_token_logps"), output["completion_mask"] * output.get("tool_mask", 1)
    if ours is None:
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        each, width = trainer.args.per_device_train_batch_size, output["completion_ids"].shape[1]
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, width, batch_size=each)[0]
    kept = kept.bool()
    if trainer.rollout_func is not None:
        kept &= ~theirs.isnan()  # it may leave out what it did not sample
    if bool(kept.any()):
        refuse_stale(theirs[kept], ours[kept], trainer.vllm_generation.dtype)
