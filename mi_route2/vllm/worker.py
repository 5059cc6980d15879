"""Extension of vLLM's worker: applies each request's interventions in the forwards of the model, by hooks on its modules.

Before a forward the worker reads which tokens of which requests it computes, and writes lines and scales of their vectors into
``VectorBanks``. Hooks on the modules of the sites in use add these vectors, by the same kernels in every step. For everything else
they gather the tokens of the requests with interventions ``[b t ...]``, run what our own engine runs on them, and write back the
tokens that changed. No other token is touched, not even by an addition of 0.

A replayed CUDA graph would run past all Python of the hooks, but not past the banks: ``_model_forward`` is outside of it. No graph
was captured: vLLM captures before this extension is opened, with no site known, so ``enforce_eager`` is demanded.

Private parts of vLLM that are read:

    worker.model_runner, worker.vllm_config
    model_runner.requests[id].sampling_params, .input_batch.req_ids, .input_batch.num_computed_tokens_cpu, .query_start_loc.np
    model_runner.requests[id].block_ids, .kv_cache_config, .max_num_tokens

Two are written: model_runner._model_forward is wrapped, and in model_runner.kv_caches a block whose keys and values a request made
infinite or NaN is zeroed before another writes into it, since vLLM's kernel multiplies what lies behind a request's last token in
its block by 0, and makes NaN of NaN.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mi_route2.architectures import VLLM_CLASSES, VllmAt
from mi_route2.engine.forward import Work
from mi_route2.patching.patches import firing
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, MonitorReading, Piece
from mi_route2.steering.state import SteeringState
from mi_route2.tensor_files import pack
from mi_route2.vllm.facts import Facts, installed, refuse_settings
from mi_route2.vllm.wire import KEY, Orders, read

BLOCKS = "model.layers"
"""Path of the blocks in each of vLLM's classes that are known here."""
CONFIGURATIONS = 64
"""Steering rows for configurations that controllers hold, beside one row for each request."""


@dataclass(eq=False)
class Collected:
    """Values of a request that wait at its worker: captured rows by capture and position, readings by position, or an error."""

    captured: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    readings: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    error: str | None = None

    def __bool__(self) -> bool:
        return bool(self.captured or self.readings or self.error)

    def keep(self, number: int, positions: Sequence[int], rows: Tensor) -> None:
        """Store captured rows; a position that is computed again, after a preemption, replaces the former value."""
        if self.error is None:
            self.captured.setdefault(number, {}).update(zip(positions, rows.detach().clone(), strict=True))

    def note(self, position: int, name: str, score: float, gate: float) -> None:
        """Store a reading."""
        if self.error is None:
            self.readings.setdefault(position, {})[name] = score, gate

    def fail(self, error: str) -> None:
        """Store an error in place of all values, unless there is an earlier error."""
        self.captured.clear()
        self.readings.clear()
        self.error = self.error or error

    def plain(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return {
            "error": self.error,
            "captured": {
                str(number): {"positions": list(rows), "rows": pack(torch.stack(list(rows.values())))}
                for number, rows in self.captured.items()
            },
            "readings": {str(at): read for at, read in self.readings.items()},
        }


@dataclass(eq=False)
class Running:
    """Request with interventions that vLLM runs, and vLLM's own state of it.

    ``admitted`` while its steering has a row, ``broken`` once its stream was not finite. Its positions before ``reach`` were
    computed; ``acts`` is the steering of its latest generated token, ``changed`` once it had another one before.
    """

    state: Any
    orders: Orders
    collected: Collected
    admitted: bool = False
    broken: bool = False
    reach: int = 0
    acts: bytes | None = None
    changed: bool = False

    @property
    def number(self) -> int:
        return self.orders.number


@dataclass(eq=False)
class Batch:
    """Tokens of one forward that belong to requests with interventions: their rows ``index [b t]`` in the flat batch."""

    layout: BatchLayout
    running: list[Running]
    index: Tensor
    work: dict[Site, Work]
    steered: bool
    taken: list[tuple[Callable[[Tensor], None], Tensor]] = field(default_factory=list)
    fired: set[Site] = field(default_factory=set)

    def run(self, work: Work, h: Tensor) -> Tensor:
        """Take the captures at a site and apply its patches."""
        if work.captures:
            self.taken += work.take(h)
        return work.put(h) if work.patches else h


class RunnerInterventions:
    """Interventions of all requests of one model runner.

    ``pieces`` are what its last forward computed of them; ``readings`` and ``seen``, what monitors read and the values of ``wants``
    at the last token of each, are for controllers.
    """

    def __init__(self, runner: Any, facts: Facts, device: torch.device):
        self._runner, self._facts, self._device = runner, facts, device
        self.model: nn.Module = runner.get_model()
        rows, tokens = facts.rows + CONFIGURATIONS, runner.max_num_tokens
        self.steering = SteeringState(facts.shape, rows=rows, dtype=facts.torch_dtype, device=device, tokens=tokens)
        self.opened = 0
        self.wants: frozenset[Site] = frozenset()
        self.pieces: tuple[Piece, ...] = ()
        self.readings: Mapping[int, Mapping[str, MonitorReading]] = {}
        self.seen: dict[int, dict[Site, Tensor]] = {}
        self.results: dict[str, Collected] = {}
        self._running: dict[str, Running | None] = {}
        self._batch: Batch | None = None
        self._hooks: dict[Site, Any] = {}
        self._spoiled: set[int] = set()
        """Numbers of the blocks in which a request may have left keys and values that are not finite."""
        self._forward, runner._model_forward = runner._model_forward, self._run

    # One forward

    def _run(self, **inputs: Any) -> Tensor:
        self._begin(inputs["input_ids"])
        output = self._forward(**inputs)
        self._end(output)
        return output

    def _begin(self, ids: Tensor | None) -> None:
        for req in () if self._batch is None else self._batch.running:  # of a forward that broke off, and may have written NaN
            self._spoiled.update(*req.state.block_ids)
        self._batch, self.pieces, self.readings, self.seen = None, (), {}, {}
        batch = self._runner.input_batch
        self._forget(batch.req_ids)
        bounds, computed = self._runner.query_start_loc.np, batch.num_computed_tokens_cpu
        here: list[tuple[Running, int, int, int]] = []
        for row, name in enumerate(batch.req_ids):
            req = self._find(name)
            if req is not None:
                first, stop = int(bounds[row]), int(bounds[row + 1])
                if stop > first:
                    here.append((req, first, int(computed[row]), stop - first))
            if self._spoiled and (req is None or not req.broken):
                self._clean(name, int(computed[row]))
        if here:
            self._batch = self._made(here, ids)
        pieces = () if self._batch is None else self._batch.layout.pieces
        self.steering.fill(zip(pieces, (first for _, first, _, _ in here), strict=True))
        # hooks only where somebody intervenes now: each one costs time in the forwards of all requests
        wanted = set() if self._batch is None else self._batch.work.keys() | self.steering.sites()
        for site in self._hooks.keys() - wanted:
            self._hooks.pop(site).remove()
        for site in sorted(wanted - self._hooks.keys()):
            self._hooks[site] = self._hook(site)

    def _made(self, here: list[tuple[Running, int, int, int]], ids: Tensor | None) -> Batch:
        for req, *_ in here:
            if not req.admitted:
                self.steering.admit(req.number, req.orders.steering)
                req.admitted = True
            elif not req.orders.private and self.steering.shared:
                raise RuntimeError("steering of all requests was set by another engine on this vLLM: give each a vLLM of its own")
        pieces = [Piece(req.number, start, count, req.orders.prompt) for req, _, start, count in here]
        for req, piece in zip((req for req, *_ in here), pieces, strict=True):
            self._follow(req, piece)
        layout = BatchLayout.of(pieces, self._device)
        firsts = torch.tensor([first for _, first, _, _ in here], device=self._device)[:, None]
        starts = torch.tensor([piece.start for piece in pieces], device=self._device)[:, None]
        index = firsts + torch.where(layout.real, layout.positions - starts, 0)
        work: dict[Site, Work] = {}
        for row, (req, first, start, count) in enumerate(here):
            for column, placed in firing(req.orders.patches, start, count):
                work.setdefault(placed.site, Work()).patches.append((row, column, placed))
            for site in self.wants if req.orders.private else ():
                sink = partial(self._see, req.number, site)
                work.setdefault(site, Work()).captures.append((sink, [(row, count - 1)]))
            if not req.orders.captures:
                continue
            if ids is None:
                raise RuntimeError("a request with captures runs on embeddings in place of tokens: give token ids")
            tokens = ids[first : first + count].tolist()
            for number, capture in enumerate(req.orders.captures):
                if columns := capture.selection.rows(tokens, start, req.orders.prompt):
                    sink = partial(req.collected.keep, number, [start + column for column in columns])
                    places = [(row, column) for column in columns]
                    work.setdefault(capture.site, Work()).captures.append((sink, places))
        return Batch(layout, [req for req, *_ in here], index, work, self.steering.begin(layout))

    def _see(self, number: int, site: Site, rows: Tensor) -> None:
        self.seen.setdefault(number, {})[site] = rows[0].clone()

    def _follow(self, req: Running, piece: Piece) -> None:
        """Note how far a request is, and fail it if it is computed anew, after a preemption, under steering that was changed."""
        if piece.start < req.reach and req.changed:
            req.collected.fail(
                "this request was preempted after a change of its steering, and its tokens were computed anew under the last one: "
                "give vLLM more kv_cache_memory_bytes, or a smaller max_num_seqs"
            )
        req.reach = max(req.reach, piece.start + piece.count)
        if req.orders.private and req.reach > piece.prompt:
            acts = self.steering.fingerprint(req.number, decode=True)
            req.changed |= req.acts not in (None, acts)
            req.acts = acts

    def _end(self, output: Tensor) -> None:
        batch = self._batch
        if batch is None:
            return
        if silent := self._hooks.keys() - batch.fired:
            raise RuntimeError(f"these hooks did not fire in a forward of vLLM: {', '.join(map(str, sorted(silent)))}")
        by_number = {req.number: req for req in batch.running}
        readings = self.steering.end() if batch.steered else None
        self.pieces = batch.layout.pieces
        if readings is not None:
            self.readings = readings.last()
        for number, name, start, track in readings.each() if readings is not None else ():
            req = by_number[number]
            if req.orders.readings:
                for at, (score, gate) in enumerate(zip(track.scores.tolist(), track.gates.tolist(), strict=True), start):
                    req.collected.note(at, name, score, gate)
        for sink, rows in batch.taken:
            sink(rows)
        self._check(batch, output)
        self._batch = None  # last: what nobody has checked is taken for spoiled

    def _check(self, batch: Batch, output: Tensor) -> None:
        """Store values for collection; fail the requests whose stream is not finite."""
        ends = torch.tensor([piece.count - 1 for piece in batch.layout.pieces], device=self._device)
        last = output[batch.index.gather(1, ends[:, None])[:, 0]]
        for req, piece, finite in zip(batch.running, batch.layout.pieces, last.isfinite().all(-1).tolist(), strict=True):
            if not finite:
                at = piece.start + piece.count - 1
                req.broken = True
                req.collected.fail(f"the activations at position {at} are not finite: is an intervention too strong?")
                self._spoiled.update(*req.state.block_ids)
            if req.collected:  # requests that leave nothing need not be collected
                self.results[req.orders.key] = req.collected

    def _clean(self, name: str, computed: int) -> None:
        """Zero the spoiled blocks into which a request is to write; its whole ones are its own, or a prefix that stays as it is."""
        config = self._runner.kv_cache_config
        groups = zip(config.kv_cache_groups, self._runner.requests[name].block_ids, strict=True)
        new = {block for group, blocks in groups for block in blocks[computed // group.kv_cache_spec.block_size :]}
        if spoiled := sorted(new & self._spoiled):
            self._spoiled.difference_update(spoiled)
            for cache in self._runner.kv_caches:  # a block may be several of the kernel's
                cache.unflatten(0, (config.num_blocks, -1))[spoiled] = 0

    # Sites

    def _hook(self, site: Site) -> Any:
        at = self._facts.points[site.point]
        module = self.model.get_submodule(f"{BLOCKS}.{site.layer}.{at.path}".rstrip("."))
        if at.side == "input":
            return module.register_forward_pre_hook(lambda module, args: self._input(site, at, args))
        return module.register_forward_hook(lambda module, args, output: self._output(site, at, output))

    def _input(self, site: Site, at: VllmAt, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not at.stream:
            return self._edited(site, args[0])[0], *args[1:]
        *before, hidden, residual = args
        return *before, *self._edited(site, hidden, residual)

    def _output(self, site: Site, at: VllmAt, output: Any) -> Any:
        if at.stream:
            return self._edited(site, *output)
        values, *rest = output if isinstance(output, tuple) else (output,)
        if at.part:
            sizes = [count * self._facts.head for count in (self._facts.heads, self._facts.kv_heads, self._facts.kv_heads)]
            qkv = list(values.split(sizes, dim=-1))
            number = "qkv".index(at.part)
            qkv[number], before = self._edited(site, qkv[number])[0], qkv[number]
            new = values if qkv[number] is before else torch.cat(qkv, dim=-1)
        else:
            new, _ = self._edited(site, values)
        return (new, *rest) if isinstance(output, tuple) else new

    def _edited(self, site: Site, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Run the interventions on ``hidden + residual``; a token that changes becomes the pair of its new value and 0.

        A graph could replay the banks alone; all else is Python that depends on the batch.
        """
        batch = self._batch
        if batch is not None:
            batch.fired.add(site)
            if (work := batch.work.get(site)) is not None:
                hidden, residual = self._gathered(site, batch, partial(batch.run, work), hidden, residual)
        if (banks := self.steering.banks) is not None and site in banks:
            hidden, residual = banks.add(site, hidden, residual)
        if batch is not None and site in self.steering.acting:
            hidden, residual = self._gathered(site, batch, partial(self.steering.at, site), hidden, residual)
        return hidden, residual

    def _gathered(
        self, site: Site, batch: Batch, edit: Callable[[Tensor], Tensor], hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``edit`` on the tokens ``[b t ...]`` of requests with interventions, and write those that change."""
        flat = batch.index.flatten()
        h = hidden.index_select(0, flat)
        if residual is not None:
            h = h + residual.index_select(0, flat)
        old = h.reshape(*batch.index.shape, *self._facts.shape(site))
        new = edit(old)
        if new is old:
            return hidden, residual
        new = new.reshape(h.shape)
        # Other tokens keep their pair of hidden and residual, whose sum may be rounded otherwise here than in vLLM's kernels.
        # A new NaN differs from everything, so it counts as a change.
        acts = (new != h).any(-1) & batch.layout.real.flatten()
        rows = flat[acts]
        return hidden.index_copy(0, rows, new[acts]), None if residual is None else residual.index_fill(0, rows, 0)

    # Requests

    def _find(self, name: str) -> Running | None:
        if name not in self._running:
            state = self._runner.requests[name]
            text = None if state.sampling_params is None else (state.sampling_params.extra_args or {}).get(KEY)
            self._running[name] = None if text is None else self._started(state, text)
        return self._running[name]

    def _started(self, state: Any, text: str) -> Running:
        return Running(state, read(text, self._facts.torch_dtype, self._device), Collected())

    def _forget(self, batch: Sequence[str]) -> None:
        """Release the rows of requests that are not in this batch, and forget those that have ended."""
        there = set(batch)
        for name, req in list(self._running.items()):
            if name in there:
                continue
            if req is not None and req.admitted:
                self.steering.preempted(req.number)
                req.admitted = False
            if name not in self._runner.requests:
                if req is not None:
                    self.steering.release(req.number)
                del self._running[name]


class WorkerExtension:
    """Methods that vLLM's worker gains by ``worker_extension_cls``; call them with ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def mi_route2_open(self) -> dict[str, Any]:
        """Install the hooks, once; return the model's ``Facts`` as plain data, or ``{"refused": sentence}``."""
        try:
            if not hasattr(self, "_mi_route2"):
                facts = _facts(self.model_runner, self.vllm_config)
                self._mi_route2 = RunnerInterventions(self.model_runner, facts, torch.device(self.device)), facts
            self._mi_route2[0].opened += 1
            return {"facts": dict(vars(self._mi_route2[1])), "opened": self._mi_route2[0].opened, "process": os.getpid()}
        except ValueError as error:
            return {"refused": str(error)}

    def mi_route2_interventions(self) -> RunnerInterventions:
        """Return the interventions themselves, to an engine in this process."""
        return self._mi_route2[0]

    def mi_route2_collect(self, keys: list[str]) -> dict[str, Any]:
        """Return and forget the values of the requests of these keys."""
        results = self._mi_route2[0].results
        return {key: results.pop(key).plain() for key in keys if key in results}


def _facts(runner: Any, config: Any) -> Facts:
    """Return the facts of a runner's model; ``ValueError`` if interventions on it, or results, would be lost or wrong."""
    installed()
    parallel = config.parallel_config
    refuse_settings(
        {
            "enforce_eager": config.model_config.enforce_eager,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "speculative_config": config.speculative_config,
            "logprobs_mode": config.model_config.logprobs_mode,
            "kv_transfer_config": config.kv_transfer_config,
        }
    )
    if not hasattr(getattr(runner, "input_batch", None), "num_computed_tokens_cpu"):
        raise ValueError("this is vLLM's second model runner, whose batches are not known here: set VLLM_USE_V2_MODEL_RUNNER=0")
    model = runner.get_model()
    if (name := type(model).__name__) not in VLLM_CLASSES:
        raise ValueError(f"vLLM's {name} was never compared with this project's engine: use one of {', '.join(VLLM_CLASSES)}")
    shape = config.model_config.hf_text_config
    attention = model.get_submodule(f"{BLOCKS}.0.self_attn")
    if getattr(shape, "attention_bias", False) and attention.o_proj.bias is None:
        raise ValueError("vLLM leaves out the bias of this model's o_proj (attention_bias=True): use this project's own Engine")
    return Facts(
        architecture=name,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head=attention.head_dim,
        vocabulary=shape.vocab_size,
        context=config.model_config.max_model_len - 1,  # vLLM keeps one position for the last token
        rows=config.scheduler_config.max_num_seqs,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        ranks=parallel.tensor_parallel_size,
        experts=getattr(shape, "num_experts", 0),
        mixtures=tuple(layer for layer, block in enumerate(model.get_submodule(BLOCKS)) if hasattr(block.mlp, "experts")),
    )
