"""Settings, machines, rules and optimizers of TRL that routing refuses, each with the reason and the remedy.

Everything is refused while a trainer is made, before the first completion is sampled.
"""

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accelerate.utils import DynamoBackend
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from trl import GRPOConfig

from mi_route2.integrations import trl_vllm
from mi_route2.routing import CanarySpec, MaskSpec

DEEPSPEED = "DeepSpeed reduces and partitions gradients inside of the backward, where a route cannot finish: use DDP or FSDP2"
COMPILED = "a step under a route runs uncompiled between broken graphs, which costs time and gains none: leave torch_compile out"
UPLOADS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "clearml": ("CLEARML_LOG_MODEL", "true"),
        "comet_ml": ("COMET_LOG_ASSETS", "false"),
        "dagshub": ("HF_DAGSHUB_LOG_ARTIFACTS", "false"),
        "dvclive": ("HF_DVCLIVE_LOG_MODEL", "false"),
        "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", "false"),
        "swanlab": ("SWANLAB_LOG_MODEL", "false"),
        "wandb": ("WANDB_LOG_MODEL", "false"),
    }
)
"""Tracker -> the environment variable with which transformers uploads models or checkpoints to it, and its default."""


CUTS: Mapping[str, float | None] = MappingProxyType(
    dict.fromkeys(
        ("min_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
         "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "min_length", "min_new_tokens",
         "forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config", "max_time")
    )
    | {"typical_p": 1, "guidance_scale": 1, "num_beams": 1, "encoder_repetition_penalty": 1}
)  # fmt: skip
"""Entries of a generation config that change what is drawn, and which TRL takes from the model's -> the value that does not."""


def refuse_settings(args: GRPOConfig) -> None:
    """Raise ``ValueError`` for settings of TRL that routing does not support, with the reason and the remedy."""
    reasons = {
        "use_transformers_continuous_batching": "continuous batching casts adapters to half precision: leave it out",
        "sync_ref_model": "the reference is the base model itself, and cannot move: leave sync_ref_model out",
        "fp16_full_eval": "evaluate() would round the adapters themselves to half precision, and for good: leave it out",
        "bf16_full_eval": "evaluate() would round the adapters themselves to half precision, and for good: leave it out",
        "torch_compile": COMPILED,
        "deepspeed": DEEPSPEED,
        "auto_find_batch_size": "a step that ran out of memory cannot be begun again: choose per_device_train_batch_size",
    }
    if args.use_vllm:
        trl_vllm.refuse_settings(args)
    for name, reason in reasons.items():
        if getattr(args, name):
            raise ValueError(reason)
    if "temperature" in (args.generation_kwargs or {}):
        raise ValueError("the loss would be at another temperature than that of generation_kwargs: use GRPOConfig(temperature=...)")
    known, other = ("stop_token_ids", "eos_token_id") if args.use_vllm else ("eos_token_id", "stop_token_ids")
    if other in (args.generation_kwargs or {}):  # transformers would not even say that it ignores the name of vLLM's
        raise ValueError(f"{other} in generation_kwargs would end no completion here: use {known}")
    if args.mixed_precision == "fp16":  # also if the launcher says so
        raise ValueError("fp16 scales losses, and a flag would be decided on gradients that overflow: use bf16=True")
    optim = str(getattr(args.optim, "value", args.optim))
    if "layerwise" in optim or "lomo" in optim:
        raise ValueError(f"{optim} steps inside of the backward, where a route has not decided yet: use optim='adamw_torch'")
    for tracker, (variable, usual) in UPLOADS.items():
        uploads = os.environ.get(variable, usual).lower() not in ("", "0", "off", "no", "none", "false")
        if uploads and tracker in (args.report_to or ()):
            raise ValueError(f"{variable} uploads checkpoints, which hold the quarantine: set it to false")
    if "flyte" in (args.report_to or ()):  # it has no variable
        raise ValueError(
            "Flyte uploads checkpoints, which hold the quarantine: leave it out of report_to, and give "
            "callbacks=[FlyteCallback(sync_checkpoints=False)]"
        )
    if args.push_to_hub and "checkpoint" in str(args.hub_strategy).lower():
        raise ValueError("checkpoints hold the quarantine and must not be uploaded: use hub_strategy='every_save' or 'end'")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError("save_only_model leaves out what load_best_model_at_end would load: choose one of them")


def refuse_machine(trainer: Any) -> None:
    """Raise ``ValueError`` for a model, or a way of running it on several devices, that routing does not support."""
    if trainer._is_vlm:
        raise ValueError("a rollout here is text, and its score would ignore the images: give a tokenizer and a language model")
    if (launched := int(os.environ.get("WORLD_SIZE", "1"))) != trainer.accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but {trainer.accelerator.num_processes} train together: set use_cpu=True in "
            "GRPOConfig if there is no GPU"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError(DEEPSPEED)
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(COMPILED)
    if trainer.is_fsdp_enabled:
        refuse_fsdp(trainer.accelerator.state.fsdp_plugin)
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise ValueError("a rollout that is split over processes has no whole gradient to flag: leave parallelism_config out")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError("a model that from_pretrained has sharded was never tried with a route: let accelerate's FSDP2 do it")


def refuse_cuts(trainer: Any) -> None:
    """Raise ``ValueError`` if the model's generation config changes what is drawn, in a way that no setting of the trainer says."""
    for name, neutral in CUTS.items():
        value = getattr(trainer.model.generation_config, name, None)
        if value and value != neutral and trainer.generation_kwargs.get(name) is None:
            raise ValueError(
                f"{name} = {value!r:.60} in the model's generation config changes what is drawn, which the loss does not know: set "
                f"model.generation_config.{name} = None, or give it in generation_kwargs of GRPOConfig if it is meant"
            )


def refuse_fsdp(plugin: Any) -> None:
    """Raise ``ValueError`` for settings of FSDP that routing does not support, with the remedy."""
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP 1 flattens adapters and base into shards, whose flags would be wrong: use fsdp_version=2")
    if isinstance(plugin.ignored_modules, str):
        raise ValueError("the adapters are what FSDP must ignore, and the trainer says so itself: leave ignored_modules out")
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "cpu_ram_efficient_loading leaves the other processes without weights, from which adapters are made: set it to false"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("weights that are offloaded to the CPU cannot be gathered for their hash: set offload_params to false")


def refuse_route(trainer: Any) -> None:
    """Raise ``ValueError`` for a rule that TRL's batches, or the trainer's settings, cannot serve."""
    spec, args = trainer.route.spec, trainer.args
    if spec.privileged:
        raise ValueError(
            "this rule reads a detector over the student's rollouts, which TRL's batches do not carry: use a rule without "
            "one, or MaskRoute.from_flags(function) with flags of your own"
        )
    generated = args.steps_per_generation * trainer.num_iterations
    if generated % args.gradient_accumulation_steps:
        raise ValueError(
            f"a route begins an optimizer step with all of its rollouts, but here some of them would be sampled later: choose "
            f"steps_per_generation={args.steps_per_generation} as a multiple of "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}"
        )
    separate = isinstance(spec, MaskSpec | CanarySpec) and spec.kept_advantage == "unflagged" and trainer.adapters.has_quarantine
    if args.ddp_static_graph and (separate or args.gradient_accumulation_steps > 1):
        raise ValueError("a static graph has one backward in a step, and here are several: leave ddp_static_graph out")
    if isinstance(getattr(trainer.route, "_given", None), Tensor):
        raise ValueError(
            "TRL shuffles the rollouts of a step, so that flags by position would be those of others: give from_flags a "
            "function of the batch"
        )
    if not isinstance(spec, MaskSpec | CanarySpec):
        return
    if spec.shuffle and trainer.accelerator.num_processes > 1:
        raise ValueError("shuffle=True would shuffle the flags of each process apart: train this control in one process")
    early = isinstance(spec, MaskSpec) and spec.decided_at in ("forward", "backward")
    if spec.shuffle and early and args.gradient_accumulation_steps > 1:
        raise ValueError(
            "shuffle=True would shuffle these flags within each micro-batch, which is not a valid control: use "
            "gradient_accumulation_steps=1, or unit='pooled' with score_policy='ablated'"
        )
    if spec.kept_advantage == "unflagged":
        refuse_groups(trainer)


def refuse_groups(trainer: Any) -> None:
    """Raise ``ValueError`` unless each optimizer step of a process has whole groups, with advantages of our definition."""
    args = trainer.args
    if args.scale_rewards != "none" or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "kept_advantage='unflagged' is R - mean(R over the unflagged of the group), which is not divided by a deviation: "
            "use scale_rewards='none' and multi_objective_aggregation='sum_then_normalize'"
        )
    local = args.per_device_train_batch_size * args.steps_per_generation
    if args.steps_per_generation != args.gradient_accumulation_steps or local % trainer.num_generations:
        raise ValueError(
            "kept_advantage='unflagged' needs whole groups in each optimizer step of a process: choose steps_per_generation = "
            f"gradient_accumulation_steps, and their product with per_device_train_batch_size ({local}) as a multiple of "
            f"num_generations ({trainer.num_generations})"
        )
    if args.use_adaptive_entropy and trainer.adapters.has_quarantine:
        raise ValueError(
            "kept_advantage='unflagged' runs a backward for each adapter, and use_adaptive_entropy would count both: set "
            "entropy_coef"
        )


def refuse_optimizer(trainer: Any, quarantine_lr: float | None) -> None:
    """Raise ``ValueError`` for a rate that is none, and for an optimizer that would not do what the trainer's own does."""
    if quarantine_lr is not None and not 0 <= quarantine_lr < math.inf:  # torch does not look at a group that is added by hand
        raise ValueError(f"quarantine_lr must be finite and at least 0, not {quarantine_lr}")
    if trainer.optimizer is None:
        return
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    adapters = trainer.adapters
    if not {id(p) for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values())} <= optimized:
        raise ValueError(
            "this optimizer does not hold the adapters, which would learn nothing: attach() them first, and make it of their "
            "kept_parameters() and quarantine_parameters(); or set optim in GRPOConfig"
        )
    if quarantine_lr is not None:
        raise ValueError("an optimizer of your own gives the quarantine its own rate in a group: leave quarantine_lr out")
    if getattr(trainer.route, "want_unrouted", False):
        raise ValueError("want_unrouted=True needs RoutedAdamW, which the trainer makes: leave optimizers out")
