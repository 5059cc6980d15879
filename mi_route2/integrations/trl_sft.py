"""Supervised fine-tuning of TRL with routed gradients: ``RoutedSFTTrainer`` takes the place of ``SFTTrainer``.

    trainer = RoutedSFTTrainer(model, args, train_dataset=rows, adapters=spec, flags="hack")
    trainer.train()
    trainer.save_model(folder)       # the deployed adapter as a PEFT folder, without the quarantine

A row is a rollout: its tokens with a label are the completion. ``trl_trainer`` says how a step runs.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mi_route2.integrations.trl_trainer import RoutedTrainer  # first, because it says if TRL is missing

# isort: split
from trl import SFTConfig, SFTTrainer

from mi_route2.adapters import Adapters, AdapterSpec
from mi_route2.checks import checked
from mi_route2.integrations import trl_refusals
from mi_route2.rollouts import Rollouts, TrainBatch
from mi_route2.routing import MaskRoute, MaskSpec, PairBatch, Route, RouteSpec

FLAGS = "route2_flags"
"""Name of the flags in a collated batch."""


@checked
class RoutedSFTTrainer(RoutedTrainer, SFTTrainer):
    """``SFTTrainer`` whose kept adapter learns as a route decides; the arguments that are not listed are SFTTrainer's.

    The model is frozen, and gets adapters. Evaluation runs on the deployed model, with the quarantine off. Rows have no rewards or
    advantages, so a rule with ``reinforced_only`` counts all of them as reinforced.

    Args:
        model: Model, or a path that ``from_pretrained`` reads.
        args: TRL's settings.
        adapters: Kind of the adapters; or attached ones.
        route: Rule of the route; or a route. Beside ``flags``, a ``MaskSpec(score="none")`` says what a flag does.
        flags: Column of the data set with your own flags, True if the kept adapter must learn nothing: one per row, or a list of
            one per token if the data set has ``input_ids``. A token's flag is of the position that reads it.
        pairs: Contrast pairs, if the rule compares with a direction: a ``PairBatch``, or rows with ``prompt`` (as in the data set),
            ``hack`` and ``clean`` (texts).
        adapt: Patterns of the Linears that get adapters, as in ``attach``; or one.
        quarantine_lr: Learning rate of the quarantine; that of the kept adapter if not given.
        cache_dir: Folder that caches SVDs of the base weights.

    Attributes:
        adapters: The adapters.
        route: The route.

    Raises:
        TypeError: An argument of another type.
        ValueError: A setting that routing does not support, with the reason, or flags that do not fit the rows.

    Examples:
        >>> trainer = RoutedSFTTrainer(
        ...     model, args, train_dataset=rows, adapters=AdapterSpec("lora", rank=8), flags="hack"
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        *positional: Any,
        adapters: AdapterSpec | Adapters,
        route: RouteSpec | Route | None = None,
        flags: str | None = None,
        pairs: PairBatch | Iterable[Mapping[str, Any]] | None = None,
        adapt: str | Sequence[str] = ("blocks.*",),
        quarantine_lr: float | None = None,
        cache_dir: Path | None = None,
        **named: Any,
    ):
        arguments = inspect.signature(SFTTrainer).bind_partial(model, args, *positional, **named).arguments
        trl_refusals.refuse_peft(model, arguments)
        if args is not None:
            trl_refusals.refuse_demonstrations(args, arguments)
            trl_refusals.refuse_settings(args)
        if (route is None) == (flags is None) and not (isinstance(route, MaskSpec) and route.score == "none"):
            raise ValueError("give route=, or the column of your flags, flags= (with no route but a MaskSpec(score='none'))")
        columns = getattr(arguments.get("train_dataset"), "column_names", None)
        if flags is not None and columns is not None and flags not in columns:
            raise ValueError(f"the data set has no column {flags!r} of flags: it has {', '.join(columns)}")
        self._flags, self._column = torch.empty(0), flags
        self._samples: list[dict[str, Tensor]] = []
        super().__init__(model, args, *positional, **named)
        if flags is not None:
            self.data_collator = WithFlags(self.data_collator, flags, self.args.max_length, self.args.truncation_mode)

        def build() -> Route:
            if flags is None:
                assert route is not None
                return self._built(route, pairs)
            spec = route if isinstance(route, MaskSpec) else MaskSpec(score="none")
            return MaskRoute(spec, None, flags=lambda _batch: self._flags)

        self._route(adapters, adapt, cache_dir, quarantine_lr, build)

    def _check(self) -> None:
        unflagged = getattr(self.route.spec, "kept_advantage", "own") == "unflagged"
        trl_refusals.refuse((("kept_advantage='unflagged' without rewards", unflagged, "use kept_advantage='own'"),))

    def _encode_prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        def encoded(prompt: Any) -> Any:
            if isinstance(prompt, str):
                return self._tokenizer(prompt)["input_ids"]
            return self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)

        return [list(encoded(row["prompt"])) for row in rows]

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        if self._column is not None and self._column not in columns:
            columns.append(self._column)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the micro-batches of an optimizer step, padded to one length: a route begins with all of their rows."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        width = max((sample["input_ids"].shape[1] for sample in samples), default=0)
        fill = {"input_ids": self._tokenizer.pad_token_id, "labels": -100}
        self._samples = [
            {
                name: functional.pad(t, (0, width - t.shape[1]), value=fill.get(name, 0)) if t.ndim == 2 else t
                for name, t in sample.items()
            }
            for sample in samples
        ]
        return [*self._samples], count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch; the first one of an optimizer step begins the route's."""
        if self.window is None:
            self._begin()
        return super().training_step(model, inputs, num_items_in_batch)

    def _begin(self) -> None:
        samples, device = self._samples, self.accelerator.device
        tokens, labels = (torch.cat([sample[name] for sample in samples]).to(device) for name in ("input_ids", "labels"))
        attention = torch.cat([sample["attention_mask"] for sample in samples]).to(device)
        completion = labels != -100
        completion[:, 0] = False  # no position predicts the first token
        if self._column is not None:
            self._flags = torch.cat([sample[FLAGS] for sample in samples]).to(device)
        self._open(TrainBatch(Rollouts(tokens, attention, completion)), len(samples[0]["input_ids"]), len(samples))

    def compute_loss(self, model: Any, inputs: Any, *positional: Any, **named: Any) -> Any:
        """Return TRL's loss; in training under the tape of this micro-batch."""
        inputs = {name: value for name, value in inputs.items() if name != FLAGS}
        if self.window is not None and self.model.training:
            ((micro_batch,), *_) = self.window.micro_batches
            self._tapes.enter_context(self.adapters.recording(micro_batch.tape))
        return super().compute_loss(model, inputs, *positional, **named)


@dataclass
class WithFlags:
    """Collator that adds the flags of rows ``[b]`` or tokens ``[b s]`` in a column to what ``collate`` returns."""

    collate: Any
    column: str
    longest: int | None
    truncation: str

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.collate([{name: value for name, value in row.items() if name != self.column} for row in examples])
        if any(row.get(self.column) is None for row in examples):
            if all(self.column not in row for row in examples):
                return batch  # for an evaluation
            raise ValueError(f"a row has no flag in {self.column!r}: give True or False to each")
        flags = [row[self.column] for row in examples]
        if not isinstance(flags[0], list):
            return batch | {FLAGS: torch.tensor(flags).bool()}
        by_token = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        for place, row, row_flags in zip(by_token, examples, flags, strict=True):
            count = len(row["input_ids"])
            if len(row_flags) > count == self.longest:  # as the tokens were cut
                row_flags = row_flags[:count] if self.truncation == "keep_start" else row_flags[-count:]
            if len(row_flags) != count:
                raise ValueError(
                    f"a row has {len(row_flags)} flags in {self.column!r} and {count} tokens: give one per row, or per token of "
                    "a data set that has input_ids"
                )
            place[:count] = torch.tensor(row_flags).bool()
        return batch | {FLAGS: by_token}
