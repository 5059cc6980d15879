"""Trainers of TRL whose kept adapter learns as a route decides: what GRPO and supervised fine-tuning share.

An optimizer step of TRL is one step of the route. Of each process:

    route.begin(rollouts of the step)                           before its first micro-batch
    forward and backward of a micro-batch under its tape        TRL's own loss; no process sends anything yet
    step.settle(micro_batch)                                    flags that need no other micro-batch
    step.finish(reduce)                                         reduce: the mean over processes

    kept gradient = mean over processes of  sum_b w_b g_b

One reduction serves gradients that autograd computed and those that a route assigns after the backward. DDP would send the former
once more, and is kept from it. A rollout's ``g_b`` is the gradient of its whole loss, a KL term included.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

try:
    import trl  # noqa: F401
    from accelerate.utils import gather_object
    from transformers import Trainer, TrainerCallback, TrainerState
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: routed trainers need TRL, pip install 'mi-route2[trl]'", name=error.name) from error

from mi_route2.adapters import Adapters, AdapterSpec, attach, export_peft, load_adapters, save_adapters
from mi_route2.adapters.gradients import wide
from mi_route2.adapters.io import TURNED, bases
from mi_route2.checks import checked
from mi_route2.integrations import trl_refusals
from mi_route2.rollouts import Policy, Rollouts, TrainBatch
from mi_route2.routing import (
    CanarySpec,
    Directions,
    EraseRoute,
    EraseSpec,
    HaarFitter,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    OpenSpec,
    PairBatch,
    PersonaFitter,
    Route,
    RouteSpec,
    StepContext,
    TopKFitter,
)
from mi_route2.routing.canary import CanaryRoute
from mi_route2.routing.directions import Fitter
from mi_route2.routing.routes import MicroBatch, RouteStep, sum_over_ranks
from mi_route2.tensor_files import digest, refuse_infinite

ADAPTERS, DIRECTIONS = "route2_training.safetensors", "route2_directions.safetensors"
"""Files of a checkpoint folder: both adapters, and the route's directions."""
STATE = "trainer_state.json"
"""File of TRL in it."""


@dataclass(frozen=True)
class TRLPolicy(Policy):
    """Policy whose log-probabilities are those of TRL's training pass; its fused head never stores the logits ``[b s v]``."""

    def logprobs(self, rollouts: Rollouts) -> Float[Tensor, "b s"]:
        """Return the log-probability of token ``t + 1`` at position ``t``, at TRL's temperature; 0 if ``t`` is not a predictor."""
        labels = rollouts.tokens.masked_fill(~rollouts.completion, -100)
        out = self.model(input_ids=rollouts.tokens, attention_mask=rollouts.attention.long(), labels=labels, fused_lm_head=True)
        return torch.nn.functional.pad(out.log_probs, (0, 1))


def forward(model: torch.nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
    """Return logits as in TRL's training pass, which leaves positions to the model."""
    return model(input_ids=tokens, attention_mask=attention.long(), use_cache=False).logits


class _Scored(NamedTuple):
    """Output that TRL reads of a forward with ``fused_lm_head``."""

    log_probs: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"]
    aux_loss: Tensor | None
    label_mask: Bool[Tensor, "b t"]
    is_top1: Bool[Tensor, "b t"]


def unfuse(model: Any, temperature: float) -> None:
    """Replace TRL's fused head by the model's own, which calls the unembedding with its adapters, in the type of the model.

    The fused head multiplies by the unembedding's weight, past an adapter there, and sums in float32.
    """
    forward = model.forward.__func__

    @wraps(type(model).forward)
    def unfused(self: Any, *inputs: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **named: Any) -> Any:
        if not fused_lm_head:
            return forward(self, *inputs, **named, **({} if labels is None else {"labels": labels}))
        assert labels is not None
        out = forward(self, *inputs, **{**named, "use_cache": False})
        logprobs = (out.logits[:, :-1].to(wide(out.logits.dtype)) / temperature).log_softmax(dim=-1)
        learned = labels[:, 1:] != -100
        chosen = logprobs.gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        zero = torch.zeros_like(chosen)
        log_probs, entropies = torch.where(learned, chosen, zero), torch.where(learned, entropy, zero)
        top = (logprobs.argmax(dim=-1) == labels[:, 1:]) & learned
        return _Scored(log_probs, entropies, getattr(out, "aux_loss", None), learned, top)

    model.forward = MethodType(unfused, model)


class Watch(TrainerCallback):
    """Callback that reports an optimizer step to the route (``Route.after_update``)."""

    def __init__(self, trainer: "RoutedTrainer"):
        self._trainer, self._before = trainer, dict[str, Tensor]()

    def on_train_begin(self, args: Any, state: TrainerState, *_given: Any, **_named: Any) -> None:
        prompts: Any = self._trainer.prompts_sampler
        if getattr(prompts, "shuffle", False):
            for _ in range(int(state.epoch or 0)):  # a resumed run would begin with the order of the first epoch again
                torch.randperm(prompts.num_samples, generator=prompts.generator)

    def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
        adapters = self._trainer.adapters
        self._before = {site: adapters.scored(site).detach().clone() for site in adapters.sites}

    def on_optimizer_step(self, *_given: Any, **_named: Any) -> None:
        scored = self._trainer.adapters.scored
        moved = {site: scored(site).detach() - value for site, value in self._before.items()}
        self._before = {}
        self._trainer.note({f"route/{name}": value for name, value in self._trainer.route.after_update(moved).items()})


class RoutedTrainer(Trainer):
    """What trainers of TRL with routed gradients share: the adapters, an optimizer step of the route, and the files."""

    # TRL and transformers declare these as optional, or more narrowly than they are.
    args: Any
    model: Any
    accelerator: Any
    processing_class: Any
    _metrics: Any
    _tokenizer: Any
    prompts_sampler: Any = None
    _record: Any = None

    def _route(
        self,
        adapters: AdapterSpec | Adapters,
        adapt: str | Sequence[str],
        cache_dir: Path | None,
        quarantine_lr: float | None,
        build: Callable[[], Route],
        temperature: float = 1.0,
    ) -> None:
        """Attach the adapters and build the route; detach them after an error."""
        trl_refusals.refuse_machine(self)
        self.adapters = self._attached(adapters, adapt, cache_dir)
        if self.is_fsdp_enabled:
            self._replicate()
        try:
            self.route = build()
            trl_refusals.refuse_rule(self)
            trl_refusals.refuse_optimizer(self, quarantine_lr)
            self._check()
        except BaseException:
            if self.adapters is not adapters:
                self.adapters.detach()
            raise
        if "unembed" in self.adapters.sites or self.model.dtype == torch.float64:
            unfuse(self.model, temperature)
        self.quarantine_lr = self.args.learning_rate if quarantine_lr is None else quarantine_lr
        self._tapes = ExitStack()
        self.window: OpenStep | None = None
        self._alike = False  # whether the processes were compared
        self.add_callback(Watch(self))

    def _check(self) -> None:
        """Refuse what this trainer alone cannot do; the adapters are detached then."""

    def _encode_prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the tokens of the prompts of ``rows``."""
        raise NotImplementedError

    def _tell(self, window: "OpenStep", scores: Tensor | None, flags: Tensor | None) -> None:
        """Call the recorder."""
        raise NotImplementedError

    # ---- construction

    def _attached(self, adapters: AdapterSpec | Adapters, adapt: str | Sequence[str], cache_dir: Path | None) -> Adapters:
        if isinstance(adapters, Adapters):
            if adapters.model is not self.model:
                raise ValueError(
                    "these adapters are attached to another model than the trainer's: attach them to the model that you pass"
                )
            return adapters
        generator = torch.Generator().manual_seed(self.args.seed)
        patterns = (adapt,) if isinstance(adapt, str) else adapt
        return attach(self.model, *patterns, spec=adapters, generator=generator, cache_dir=cache_dir)

    def _replicate(self) -> None:
        """Exclude the adapters from sharding by FSDP2: a shard's flags would be wrong, and gradients are averaged here."""
        branches = list(self.adapters.sites.values())
        for branch in branches:
            branch.to(self.accelerator.device)  # FSDP2 moves what it shards
        self.accelerator.state.fsdp_plugin.ignored_modules = branches

    def _built(self, route: RouteSpec | Route, pairs: PairBatch | Iterable[Mapping[str, Any]] | None) -> Route:
        """Return the route of a rule, with the fitter of its directions."""
        if isinstance(route, CanarySpec):
            raise ValueError("this rule needs its canary and samples of the base: pass CanaryRoute(spec, canary, samples)")
        if not isinstance(route, MaskSpec | EraseSpec | OpenSpec):
            if pairs is not None:
                raise ValueError("a route has its own pairs: leave out pairs=, or give the rule alone (MaskSpec or EraseSpec)")
            return route
        if isinstance(route, OpenSpec):
            return OpenRoute(route)
        if isinstance(route, MaskSpec) and not route.needs_direction:
            return MaskRoute(route, None)
        if pairs is None:
            raise ValueError("this rule compares with the direction of contrast pairs: pass pairs=")
        batch = pairs if isinstance(pairs, PairBatch) else self.encode_pairs(pairs)
        device = self.accelerator.device
        batch = replace(batch, hack=batch.hack.to(device), clean=batch.clean.to(device))
        fitter: Fitter
        if isinstance(route, EraseSpec):
            fitter = TopKFitter("grad", batch, k=route.k)
        else:
            assert route.score in ("act", "grad", "full")
            fitter = PersonaFitter("persona", route.score, batch)
        if route.fitter == "haar":
            fitter = HaarFitter(fitter, seed_of(self.args.seed, "haar", route.draw))
        return EraseRoute(route, fitter) if isinstance(route, EraseSpec) else MaskRoute(route, fitter)

    @checked
    def encode_pairs(self, rows: Iterable[Mapping[str, Any]]) -> PairBatch:
        """Return contrast pairs in tokens: prompts as those of the data set, answers with the end token.

        Raises:
            TypeError: Something else than rows.
            ValueError: No row, one without ``prompt``, ``hack`` and ``clean``, or an answer that is no text.
        """
        names = ("prompt", "hack", "clean")
        rows = [*rows]
        if not rows or any(not set(names) <= row.keys() for row in rows):
            raise ValueError("pairs are rows with prompt, hack and clean: give at least one, with all three")
        for name, value in ((name, row[name]) for row in rows for name in names[1:]):
            if not isinstance(value, str):
                raise ValueError(f"{name} of a pair must be a text, the answer alone, not a {type(value).__name__}")
        tokenizer: Any = self._tokenizer
        prompts = self._encode_prompts(rows)

        def side(name: str) -> Rollouts:
            texts = [row[name] for row in rows]
            completions = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
            return Rollouts.from_lists(prompts, completions, tokenizer.pad_token_id)

        text = json.dumps([[row[name] for name in names] for row in rows], sort_keys=True)
        pairs_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
        return PairBatch(side("hack"), side("clean"), pairs_hash, self.args.per_device_train_batch_size)

    @property
    def policy(self) -> Policy:
        """The model with its adapters, as a route and a probe take it."""
        return TRLPolicy(self.model, self.adapters, forward)

    # ---- one optimizer step

    def train(self, *positional: Any, **named: Any) -> Any:
        """Train; a step that an earlier run broke off is not gone on with."""
        self.window = None
        return super().train(*positional, **named)

    def _open(self, batch: TrainBatch, micro: int, count: int, rollout: Tensor | None = None) -> None:
        """Begin a step of the route with all rollouts of this optimizer step, in ``count`` micro-batches of ``micro``."""
        self.adapters.demand_replicated()
        step = self.state.global_step
        overlap = self.route.refresh(self.policy, step)
        self._demand_alike()
        generator = torch.Generator().manual_seed(seed_of(self.args.seed, "route", step, self.accelerator.process_index))
        routed = self.route.begin(self.policy, batch, StepContext(generator, micro=micro))
        # one or two of the same rollouts: where all are flagged the kept adapter has none of its own
        micro_batches = [[*of] for _, of in groupby(routed.micro_batches, key=lambda micro_batch: id(micro_batch.batch))]
        assert len(micro_batches) == count
        self.window = OpenStep(routed, batch, rollout, micro_batches, overlap)

    def _demand_alike(self) -> None:
        """Raise ``ValueError`` if processes have different adapters or routes; all processes must call this."""
        if self._alike or self.accelerator.num_processes == 1:
            return
        route = self.route
        pairs = None if route.directions is None else route.directions.provenance.pairs_hash
        judge = digest(route.inputs(), {}) if isinstance(route, CanaryRoute) else None
        inputs = digest(self.adapters.tensors(), {}), repr(route.spec), pairs, judge, self._record is None
        bases_of_all = [*bases(self.adapters).values()]
        (first, turned), *others = gather_object([(inputs, bases_of_all)])
        if any(logits != first or any(abs(u - v) >= TURNED for u, v in zip(two, turned)) for logits, two in others):
            raise ValueError(
                "the adapters, routes, pairs, canaries or recorders of the processes differ: give the same to each, and an "
                "AdapterSpec or attach() with a generator of the same seed"
            )
        self._alike = True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch; after the last one of an optimizer step, make its gradients final."""
        try:
            # A tape stays open during the backward, because gradient checkpointing runs the forward again there.
            with ExitStack() as self._tapes:
                self._tapes.enter_context(self.accelerator.no_sync(model))  # `_finish` averages every gradient
                loss = super().training_step(model, inputs, num_items_in_batch)
            window = self.window
            assert window is not None
            for micro_batch in window.micro_batches.pop(0):
                window.routed.settle(micro_batch)
            if self.accelerator.sync_gradients:
                self._finish(window)
                self.window = None
        except BaseException:
            self.window = None  # a step that failed is not gone on with
            raise
        return loss

    def _finish(self, window: "OpenStep") -> None:
        several = self.accelerator.num_processes > 1
        decision = window.routed.finish(self._mean_over_processes if several else None)
        numbers = {f"route/{name}": value for name, value in decision.extra.items()}
        for name, column in (("flagged", decision.flags), ("score", decision.scores)):
            if column is not None:
                numbers[f"route/{name}"] = float(self.accelerator.gather(column.float()).mean())
        if window.overlap is not None:
            numbers["route/overlap"] = window.overlap
        for name, parameters in self._both().items():
            norms = [p.grad.norm() for p in parameters if p.grad is not None]
            numbers[f"grad_norm/{name}"] = float(torch.stack(norms).norm()) if norms else 0.0
        self.note(numbers)
        if self._record is not None:
            self._tell(window, decision.scores, decision.flags)

    def _mean_over_processes(self, gradients: Sequence[Tensor]) -> None:
        sum_over_ranks(gradients)
        for gradient in gradients:
            gradient.div_(self.accelerator.num_processes)

    def _both(self) -> dict[str, list[torch.nn.Parameter]]:
        pairs = {"kept": self.adapters.kept_parameters(), "quarantine": self.adapters.quarantine_parameters()}
        return {name: list(parameters.values()) for name, parameters in pairs.items() if parameters}

    def note(self, numbers: Mapping[str, float | None]) -> None:
        """Add numbers to TRL's log of the training, which averages them over the steps between two logs."""
        for name, value in numbers.items():
            if value is not None:
                self._metrics["train"][name].append(value)

    # ---- optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create TRL's optimizer with the quarantine in groups of its own."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        super().create_optimizer(model)
        assert self.optimizer is not None
        quarantine = {id(p) for p in self.adapters.quarantine_parameters().values()}
        groups: Any = self.optimizer.param_groups
        for group in list(groups):
            in_quarantine = [p for p in group["params"] if id(p) in quarantine]
            group["params"] = [p for p in group["params"] if id(p) not in quarantine]
            if in_quarantine:
                groups.append({**group, "params": in_quarantine, "lr": self.quarantine_lr})
        groups[:] = [group for group in groups if group["params"]]
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip the kept adapter and the quarantine apart: together, a large quarantine gradient would shrink the kept one."""
        limit = self.args.max_grad_norm
        trained = self._both()
        # the norm of no gradient, as of a kept adapter that learns later, is a number on the CPU
        norms = {name: clip_grad_norm_(parameters, limit).to(self.accelerator.device) for name, parameters in trained.items()}
        return torch.stack(list(norms.values())).norm()

    # ---- evaluation, files

    def evaluation_loop(self, *positional: Any, **named: Any) -> Any:
        """Evaluate, or predict with, the deployed model, with the quarantine off."""
        with self.adapters.deployed():
            return super().evaluation_loop(*positional, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the deployed adapter as a PEFT folder, with the tokenizer; no file of it contains the quarantine.

        Other files of the folder stay. Use ``save_pretrained(trainer.adapters, folder, which="full")`` to keep the quarantine too.
        """
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            export = folder / ".deployed"
            export_peft(self.adapters, export, overwrite=True)
            for file in export.iterdir():
                file.replace(folder / file.name)
            export.rmdir()
            self.processing_class.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.is_fsdp_enabled:
            _ = self.adapters.base_hash  # of all processes, before one of them writes it
        if self.args.should_save and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            refuse_infinite(self.adapters.tensors())  # before an earlier run's checkpoint in this folder loses its state
            (folder / STATE).unlink(missing_ok=True)  # of an earlier run: whole is what has one, since TRL writes it last
            save_adapters(self.adapters, folder / ADAPTERS)
            if self.route.directions is not None:
                self.route.directions.save(folder / DIRECTIONS)
        super()._save_checkpoint(model, trial)  # last, because it deletes older checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / ADAPTERS).is_file() and not (folder / STATE).is_file():
            raise ValueError(f"{folder} has no {STATE}: a run ended while it was saved; give the checkpoint before it")
        self._restore(folder)

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        """Context: TRL sees no FSDP, because the optimizer holds only replicated adapters, and the base needs no copy."""
        enabled, self.is_fsdp_enabled = self.is_fsdp_enabled, False
        try:
            yield
        finally:
            self.is_fsdp_enabled = enabled

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._unsharded():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._unsharded():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._restore(Path(self.state.best_model_checkpoint))

    def _restore(self, folder: Path) -> None:
        """Restore both adapters and the directions of a checkpoint."""
        if not (folder / ADAPTERS).is_file():
            raise ValueError(
                f"{folder} has no {ADAPTERS}: give a checkpoint folder that this trainer wrote, without save_only_model"
            )
        load_adapters(self.adapters, folder / ADAPTERS)
        if (folder / DIRECTIONS).is_file():
            directions = Directions.load(folder / DIRECTIONS)
            # in the model's order, so that sums over sites round as before
            known = [site for site in self.adapters.sites if site in directions.vectors]
            vectors = {site: directions.vectors[site].to(self.adapters.scored(site).device) for site in known}
            self.route.directions = replace(directions, vectors=vectors)


@dataclass
class OpenStep:
    """One optimizer step: the route's step, its rollouts, their places among the sampled ones, and its remaining micro-batches."""

    routed: RouteStep
    batch: TrainBatch
    rollout: Tensor | None
    micro_batches: list[list[MicroBatch]]
    overlap: float | None


def seed_of(*purpose: object) -> int:
    """Return a seed that depends on all of ``purpose``, so that a resumed run draws what an uninterrupted one draws."""
    return int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:7])
