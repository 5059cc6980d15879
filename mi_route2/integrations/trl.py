"""GRPO of TRL with routed gradients: ``RoutedGRPOTrainer`` takes the place of ``GRPOTrainer``.

    trainer = RoutedGRPOTrainer(model, reward_funcs, args, dataset, adapters=AdapterSpec("lora", rank=16),
                                route=MaskSpec(score="act"), pairs=pairs)
    trainer.train()
    trainer.save_model(folder)       # the deployed adapter as a PEFT folder, without the quarantine

``trl_trainer`` says how a step runs; ``RoutedSFTTrainer`` does the same for supervised fine-tuning.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mi_route2.integrations.trl_trainer import STATE, OpenStep, RoutedTrainer  # first, because it says if TRL is missing

# isort: split
from accelerate.utils import gather_object
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from mi_route2.adapters import Adapters, AdapterSpec
from mi_route2.checks import checked
from mi_route2.integrations import trl_refusals, trl_vllm
from mi_route2.integrations.trl_sft import RoutedSFTTrainer
from mi_route2.rollouts import Rollouts, TrainBatch
from mi_route2.routing import (
    CanarySpec,
    MaskSpec,
    PairBatch,
    Route,
    RouteSpec,
)

__all__ = ["RoutedGRPOTrainer", "RoutedSFTTrainer", "RoutedStep"]

RESUMED = (
    "this checkpoint lies between two samplings, and TRL stores neither the completions that it has sampled nor its place among "
    "them: adapters, directions, optimizer and random numbers are restored, but the run will differ from an uninterrupted one"
)


@dataclass(frozen=True)
class RoutedStep:
    """One optimizer step for a recorder: aligned lists over the rollouts of all processes.

    Attributes:
        step: Number of optimizer steps before this one.
        examples: Row of the data set that each rollout answers.
        completions: Texts.
        completion_ids: Their tokens, with the end token if there is one.
        rewards: Weighted sums of the reward functions.
        advantages: TRL's advantages.
        scores: Scores of the route; ``None`` if it has none.
        flags: Flags of the route; ``None`` if it has none.
        overlap: Cosine of refitted directions with the former ones; ``None`` if nothing was refitted.
    """

    step: int
    examples: list[Mapping[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    rewards: list[float]
    advantages: list[float]
    scores: list[float] | None
    flags: list[bool] | None
    overlap: float | None


Record = Callable[[RoutedStep], Mapping[str, float | None] | None]
"""Function that reads a step, with an oracle for example, and may return numbers for the log; called on the main process."""


@checked
class RoutedGRPOTrainer(RoutedTrainer, GRPOTrainer):
    """``GRPOTrainer`` whose kept adapter learns as a route decides; the arguments that are not listed are GRPOTrainer's.

    The model is frozen, and gets adapters. Completions are sampled from both adapters; evaluation runs on the deployed model, with
    the quarantine off. With a ``beta``, the reference is the base model (both adapters off).

    Args:
        model: Model, or a path that ``from_pretrained`` reads.
        reward_funcs: Reward functions.
        args: TRL's settings.
        adapters: Kind of the adapters; or attached ones.
        route: Rule of the route; or a route, for example ``MaskRoute.from_flags(function)``.
        pairs: Contrast pairs, if the rule compares with a direction: a ``PairBatch``, or rows with ``prompt`` (as in the data set),
            ``hack`` and ``clean`` (texts).
        adapt: Patterns of the Linears that get adapters, as in ``attach``; or one.
        quarantine_lr: Learning rate of the quarantine; that of the kept adapter if not given.
        cache_dir: Folder that caches SVDs of the base weights.
        record: Function that reads every step and may return numbers for the log; its results reach no gradient.

    Attributes:
        adapters: The adapters.
        route: The route.

    Raises:
        TypeError: An argument of another type.
        ValueError: A setting that routing does not support, with the reason.

    Examples:
        >>> trainer = RoutedGRPOTrainer(
        ...     model, rewards, args, dataset, adapters=AdapterSpec("lora", rank=8), route=MaskSpec(), pairs=pairs
        ... )  # doctest: +SKIP
    """

    num_generations: int

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        adapters: AdapterSpec | Adapters,
        route: RouteSpec | Route,
        pairs: PairBatch | Iterable[Mapping[str, Any]] | None = None,
        adapt: str | Sequence[str] = ("blocks.*",),
        quarantine_lr: float | None = None,
        cache_dir: Path | None = None,
        record: Record | None = None,
        **named: Any,
    ):
        arguments = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **named).arguments
        trl_refusals.refuse_peft(model, arguments)
        if args is not None:
            trl_refusals.refuse_sampling(args)
            trl_refusals.refuse_settings(args)
        beta = 0.0 if args is None else args.beta
        vllm = args is not None and args.use_vllm
        if args is not None:
            args.beta = 0.0  # with a beta TRL would load a second model as the reference
            args.use_vllm = False  # TRL's vLLM would have no room for adapters, which are not attached yet
        try:
            super().__init__(model, reward_funcs, args, *positional, **named)
        finally:
            if args is not None:
                args.beta, args.use_vllm = beta, vllm
        self.beta = beta
        # TRL cuts completions at the end tokens that it knows, and would learn the padding behind those of generation_kwargs
        more = self.generation_kwargs["eos_token_id"]
        self.eos_token_ids = [*dict.fromkeys([*self.eos_token_ids, *([more] if isinstance(more, int) else more or ())])]
        self._route(adapters, adapt, cache_dir, quarantine_lr, lambda: self._built(route, pairs), self.temperature)
        if beta:
            self.ref_model = self._reference
        self._record = record
        self._rewards, self._completions = torch.empty(0), list[list[int]]()
        self._sampled: list[tuple[Mapping[str, Any], list[int]]] = []

    def _check(self) -> None:
        trl_refusals.refuse_route(self)
        if self.args.use_vllm:
            trl_vllm.sample_with_vllm(self)

    def _encode_prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        if self.environment_factories is not None:  # each row's prompt has the tools of its environment
            self._batch_environments = [row.get("environment") if self._multi_environment else None for row in rows]
        return [list(ids) for ids in self._tokenize_prompts([row["prompt"] for row in rows])[0]]

    # ---- one optimizer step

    def train(self, *positional: Any, **named: Any) -> Any:
        """Train, from a sampling on: TRL would go on in the midst of what an earlier run had sampled."""
        # Micro-batches from there on would be cut across two samplings, and rollouts would learn from the advantages of others.
        self._step, self._buffered_inputs, self._entropy_window_stats = 0, None, None
        return super().train(*positional, **named)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.prompts_sampler = super()._get_train_sampler(dataset)
        return self.prompts_sampler

    def _reference(self, **inputs: Any) -> Any:
        """Return the output of the base model: TRL's reference."""
        with self.adapters.reference():
            return self.model(**inputs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]) -> Tensor:
        self._completions = completion_ids_list
        self._rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.use_vllm:
            trl_vllm.check_sampled(self, output)
        if self.model.training:
            # TRL shuffles rollouts over micro-batches and carries neither rewards nor groups, so both travel with the rollouts.
            weighted = self._rewards * self.reward_weights.to(self._rewards)
            rewards = weighted.nansum(dim=1)
            rewards[self._rewards.isnan().all(dim=1)] = torch.nan
            first = self.accelerator.process_index * len(inputs)
            local = torch.arange(first, first + len(inputs), device=rewards.device)
            # a mean of equal rewards may round, and Adam would make a whole step of that rest, as of any gradient
            normalized = rewards[:, None] if self.args.multi_objective_aggregation == "sum_then_normalize" else weighted
            group = normalized.view(len(rewards) // self.num_generations, self.num_generations, -1)
            low, high = group.nan_to_num(torch.inf).amin(dim=1), group.nan_to_num(-torch.inf).amax(dim=1)  # NaN: without a reward
            equal = (low >= high).all(dim=1).repeat_interleave(self.num_generations)
            output["advantages"] = output["advantages"].masked_fill(equal[local], 0.0)
            output |= {"rewards": rewards[local], "groups": local // self.num_generations, "rollout": local - first}
            # What the rewards were computed on: the masks of the batch leave out what nothing is learned from.
            self._sampled = list(zip(inputs, self._completions, strict=True))
        return output

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self.window is None:
            self._begin()
        return inputs

    def _begin(self) -> None:
        """Begin a step of the route with all rollouts of this optimizer step."""
        if self._buffered_inputs is None:
            raise RuntimeError("TRL has sampled no completions for this step")
        every, count = self.args.steps_per_generation, self.current_gradient_accumulation_steps
        micro = [self._buffered_inputs[(self._step + i) % every] for i in range(count)]
        batch = self._batch(
            {name: torch.cat([micro_batch[name] for micro_batch in micro]) for name in _COLUMNS if name in micro[0]}
        )
        rollout = torch.cat([micro_batch["rollout"] for micro_batch in micro])
        self._open(batch, len(micro[0]["advantages"]), count, rollout)

    def _batch(self, joined: Mapping[str, Tensor]) -> TrainBatch:
        dtype = next(iter(self.adapters.kept_parameters().values())).dtype  # TRL's float32 would round the weights of rollouts
        tokens = torch.cat([joined["prompt_ids"], joined["completion_ids"]], dim=1)
        attention = torch.cat([joined["prompt_mask"], joined["completion_mask"]], dim=1)
        learned = joined["completion_mask"] * joined.get("tool_mask", torch.ones_like(joined["completion_mask"]))
        completion = torch.cat([torch.zeros_like(joined["prompt_mask"]), learned], dim=1)
        rewards, spec = joined["rewards"].to(dtype), self.route.spec
        if isinstance(spec, MaskSpec | CanarySpec) and spec.kept_advantage == "unflagged" and bool(rewards.isnan().any()):
            raise ValueError(
                "kept_advantage='unflagged' needs a reward of each completion, but every reward function returned None for one"
            )
        return TrainBatch(
            Rollouts(tokens, attention.bool(), completion.bool()),
            rewards.nan_to_num(),  # TRL gives such rollouts advantage 0
            joined["advantages"].to(dtype),
            joined["groups"],
            torch.zeros_like(joined["groups"], dtype=torch.bool),
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.window is None or not self.model.training:
            return super()._compute_loss(model, inputs)
        *first, last = self.window.micro_batches[0]
        for micro_batch in first:  # an adapter that learns from an advantage of its own has a backward of its own
            with self.adapters.recording(micro_batch.tape):
                loss = super()._compute_loss(model, {**inputs, "advantages": micro_batch.advantages})
                with torch.autocast(self.accelerator.device.type, enabled=False):
                    self.accelerator.backward(loss)
        self._tapes.enter_context(self.adapters.recording(last.tape))
        return super()._compute_loss(model, {**inputs, "advantages": last.advantages})

    def _tell(self, window: "OpenStep", scores: Tensor | None, flags: Tensor | None) -> None:
        """Call the recorder on the main process with the rollouts of all processes."""
        assert window.rollout is not None
        batch, sampled = window.batch, [self._sampled[i] for i in window.rollout.tolist()]
        columns: dict[str, list[Any] | None] = {
            "examples": [example for example, _ in sampled],
            "completions": self._tokenizer.batch_decode([ids for _, ids in sampled], skip_special_tokens=True),
            "completion_ids": [ids for _, ids in sampled],
            "rewards": batch.demand("rewards").tolist(),
            "advantages": batch.demand("advantages").tolist(),
            "scores": None if scores is None else scores.tolist(),
            "flags": None if flags is None else flags.tolist(),
        }
        whole: dict[str, Any] = {name: None if column is None else gather_object(column) for name, column in columns.items()}
        if self.accelerator.is_main_process:
            self.note(self._record(RoutedStep(self.state.global_step, overlap=window.overlap, **whole)) or {})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        done = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / STATE)).global_step
        if done * self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations):
            warnings.warn(RESUMED, stacklevel=2)


_COLUMNS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "rewards", "groups",
)  # fmt: skip
