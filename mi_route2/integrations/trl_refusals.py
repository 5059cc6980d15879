"""Settings, machines, rules and optimizers of TRL that routing does not support: each with its name and what to use.

Everything is refused while a trainer is made, before the first completion is sampled.
"""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import DynamoBackend, is_peft_model
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments
from trl import GRPOConfig, SFTConfig

from mi_route2.integrations import trl_vllm
from mi_route2.routing import CanarySpec, MaskSpec


def refuse(unsupported: Iterable[tuple[str, object, str]]) -> None:
    """Raise ``ValueError`` for the first (name, whether it is set, what to use) that is set."""
    for name, value, use in unsupported:
        if value:
            raise ValueError(f"routing does not support {name}: {use}")


def refuse_peft(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for adapters of PEFT, on the model or among the arguments of a trainer."""
    if arguments.get("peft_config") is not None or (not isinstance(model, str) and is_peft_model(model)):
        raise ValueError("adapters= attaches this trainer's own adapters, and PEFT's would train unrouted: give a plain model")


def refuse_sampling(args: GRPOConfig) -> None:
    """Raise ``ValueError`` for settings of GRPO that routing does not support."""
    sampling = args.generation_kwargs or {}
    ends, ignored = ("stop_token_ids", "eos_token_id") if args.use_vllm else ("eos_token_id", "stop_token_ids")
    refuse(
        (
            *((name, getattr(args, name), "leave it out") for name in ("use_transformers_continuous_batching", "sync_ref_model")),
            ("generation_kwargs['temperature']", "temperature" in sampling, "use GRPOConfig(temperature=...)"),
            (f"generation_kwargs[{ignored!r}] with this sampler", ignored in sampling, f"use {ends!r}"),
        )
    )
    if args.use_vllm:
        refuse(trl_vllm.unsupported(args))


def refuse_settings(args: TrainingArguments) -> None:
    """Raise ``ValueError`` for settings of transformers that routing does not support."""
    optim = str(getattr(args.optim, "value", args.optim))
    refuse(
        (
            *((name, getattr(args, name), "leave it out") for name in ("fp16_full_eval", "bf16_full_eval", "torch_compile")),
            ("deepspeed", args.deepspeed, "use DDP or FSDP2"),
            ("auto_find_batch_size", args.auto_find_batch_size, "choose per_device_train_batch_size"),
            ("fp16", args.mixed_precision == "fp16", "use bf16=True"),  # also if the launcher says so
            (f"optim={optim!r}", "layerwise" in optim or "lomo" in optim, "use optim='adamw_torch'"),
            (
                "hub_strategy='checkpoint', since checkpoints hold the quarantine",
                args.push_to_hub and "checkpoint" in str(args.hub_strategy).lower(),
                "use hub_strategy='every_save' or 'end'",
            ),
            (
                "load_best_model_at_end with save_only_model",
                args.load_best_model_at_end and args.save_only_model,
                "choose one of them",
            ),
        )
    )


def refuse_machine(trainer: Any) -> None:
    """Raise ``ValueError`` for a model, or a way of running it on several devices, that routing does not support."""
    accelerator, launched = trainer.accelerator, int(os.environ.get("WORLD_SIZE", "1"))
    fsdp = accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    refuse(
        (
            ("images", trainer._is_vlm, "give a tokenizer and a language model"),
            (
                f"{launched} processes of which {accelerator.num_processes} train together",
                launched != accelerator.num_processes,
                "set use_cpu=True in GRPOConfig if there is no GPU",
            ),
            ("deepspeed", trainer.is_deepspeed_enabled, "use DDP or FSDP2"),
            ("torch_compile", accelerator.state.dynamo_plugin.backend != DynamoBackend.NO, "leave it out"),
            ("parallelism_config", getattr(accelerator, "parallelism_config", None) is not None, "leave it out"),
            (
                "a model that from_pretrained has sharded",
                getattr(trainer, "is_distributed_loading_by_transformers", False),
                "use accelerate's FSDP2",
            ),
        )
    )
    if fsdp is not None:
        refuse(
            (
                ("FSDP 1", fsdp.fsdp_version != 2, "use fsdp_version=2"),
                ("ignored_modules", isinstance(fsdp.ignored_modules, str), "leave it out, since the trainer sets it"),
                ("cpu_ram_efficient_loading", fsdp.cpu_ram_efficient_loading, "set it to false"),
                ("offload_params", isinstance(fsdp.cpu_offload, CPUOffloadPolicy), "set it to false"),
            )
        )


def refuse_rule(trainer: Any) -> None:
    """Raise ``ValueError`` for a rule that batches of TRL cannot serve."""
    spec, args = trainer.route.spec, trainer.args
    several, accumulated = trainer.accelerator.num_processes > 1, args.gradient_accumulation_steps
    told = spec.privileged or (isinstance(spec, MaskSpec) and spec.score == "judge")
    masks = isinstance(spec, MaskSpec | CanarySpec)
    shuffles = masks and spec.shuffle
    separate = masks and spec.kept_advantage == "unflagged" and trainer.adapters.has_quarantine
    early = isinstance(spec, MaskSpec) and spec.decided_at == "backward"
    adapters = {id(p) for p in (*trainer.adapters.kept_parameters().values(), *trainer.adapters.quarantine_parameters().values())}
    beside = [name for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in adapters]
    refuse(
        (
            (f"parameters that train beside the adapters ({', '.join(beside[:1])})", beside, "freeze them"),
            ("ddp_static_graph", args.ddp_static_graph and (separate or accumulated > 1), "leave it out"),
            ("a rule that reads a detector or a judge", told, "use MaskRoute.from_flags(function) with flags of your own"),
            (
                "flags by position",
                isinstance(getattr(trainer.route, "_given", None), Tensor),
                "give from_flags a function of the batch, since TRL shuffles rollouts",
            ),
            ("shuffle=True in several processes", shuffles and several, "train this control in one process"),
            (
                "shuffle=True with flags of each micro-batch",
                shuffles and early and accumulated > 1,
                "use gradient_accumulation_steps=1, or score_policy='ablated'",
            ),
        )
    )


def refuse_route(trainer: Any) -> None:
    """Raise ``ValueError`` for a rule that GRPO's batches, or the trainer's settings, cannot serve."""
    spec, args = trainer.route.spec, trainer.args
    several, accumulated = trainer.accelerator.num_processes > 1, args.gradient_accumulation_steps
    unflagged = isinstance(spec, MaskSpec | CanarySpec) and spec.kept_advantage == "unflagged"
    separate = unflagged and trainer.adapters.has_quarantine
    local = args.per_device_train_batch_size * args.steps_per_generation
    whole = args.steps_per_generation == accumulated and local % trainer.num_generations == 0
    scaled = args.scale_rewards != "none" or args.multi_objective_aggregation != "sum_then_normalize"
    refuse(
        (
            (
                f"steps_per_generation={args.steps_per_generation} with gradient_accumulation_steps={accumulated}",
                args.steps_per_generation * trainer.num_iterations % accumulated,
                "choose the first as a multiple of the second, since a route begins a step with all of its rollouts",
            ),
            (
                "kept_advantage='unflagged' with scaled rewards",
                unflagged and scaled,
                "use scale_rewards='none' and multi_objective_aggregation='sum_then_normalize'",
            ),
            (
                "kept_advantage='unflagged' without whole groups in each step of a process",
                unflagged and not whole,
                "choose steps_per_generation = gradient_accumulation_steps, and their product with per_device_train_batch_size as "
                "a multiple of num_generations",
            ),
            (
                "kept_advantage='unflagged' with split_batches",
                unflagged and several and trainer.accelerator.split_batches,
                "leave it out of accelerator_config",
            ),
            ("use_adaptive_entropy with two backwards", separate and args.use_adaptive_entropy, "set entropy_coef"),
        )
    )


def refuse_demonstrations(args: SFTConfig, named: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for settings and arguments of SFTTrainer under which rows are not rollouts, or have another loss."""
    smoothing = args.label_smoothing_factor
    refuse(
        (
            ("packing", args.packing, "leave it out, because a flag is of a row"),
            ("padding_free", args.padding_free, "leave it out, because a flag is of a row"),
            ("label_smoothing_factor, which takes a second forward", smoothing, "leave it out"),
            ("compute_loss_func, which takes a second forward", named.get("compute_loss_func") is not None, "leave it out"),
        )
    )


def refuse_optimizer(trainer: Any, quarantine_lr: float | None) -> None:
    """Raise ``ValueError`` for a rate that is none, and for an optimizer that would not do what the trainer's own does."""
    if quarantine_lr is not None and not 0 <= quarantine_lr < math.inf:  # torch does not look at a group that is added by hand
        raise ValueError(f"quarantine_lr must be finite and at least 0, not {quarantine_lr}")
    if trainer.optimizer is None:
        return
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    parameters = (*trainer.adapters.kept_parameters().values(), *trainer.adapters.quarantine_parameters().values())
    refuse(
        (
            (
                "an optimizer without the adapters",
                not {id(p) for p in parameters} <= optimized,
                "attach() first and make it of kept_parameters() and quarantine_parameters(), or set optim in GRPOConfig",
            ),
            (
                "quarantine_lr with an optimizer of your own",
                quarantine_lr is not None,
                "give the quarantine's group its rate",
            ),
        )
    )
