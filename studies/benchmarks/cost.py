"""Cost of routing on paper: FLOPs, bytes held and bytes sent; predicted and measured on small cases, predicted for large models.

    python -m studies.benchmarks cost [--quick] [--out FILE.json]

With ``P`` the parameters of the kept adapter, ``Q`` those of the quarantine and ``b`` rollouts in a micro-batch of one process:

    FLOPs     those of ``measurement.flops``: the training pass, what gates add to it, and a scoring pass if there is one
    held      bytes after the backward of a micro-batch, beyond the gradients of the quarantine:
                  4 P                    a flag that is known by then (activations, one per module, or a scoring pass)
                  4 b P                  a pooled gradient flag (LoRA; a pair of sides where that is smaller)
    wire      2 (w - 1) / w * 4 (P + Q)  bytes that each of w processes sends in a step (ring all-reduce); flags are not sent

FLOPs are measured by torch's own counter, bytes held by the profiler's record of allocations, bytes on the wire by the kernel's
counter of the loopback device, in a network namespace of its own where the system allows one.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from mi_route2.adapters import AdapterSpec
from mi_route2.routing import MaskSpec
from mi_route2.routing.optimizer import sum_over_ranks
from studies.benchmarks.measurement import flops
from studies.benchmarks.measurement.contenders import Bench
from studies.benchmarks.measurement.flops import Size
from studies.benchmarks.measurement.paired import allocations, machine
from studies.benchmarks.options import CostOptions
from studies.common.tables import markdown_table

Kept = Literal["svd", "lora"]
SMALL = Size(layers=2, d=96, heads=4, mlp=160, vocab=128, rollouts=4, tokens=48, prompt=16, kept_rank=8, quarantine_rank=4)
SIZES = {
    "base case": SMALL,
    "twice the rollouts": replace(SMALL, rollouts=8),
    "twice the tokens": replace(SMALL, tokens=96),
    "twice the layers": replace(SMALL, layers=4),
    "twice the width": replace(SMALL, d=192, mlp=320),
    "fewer keys": replace(SMALL, kv=48),
    "rank above the tokens": replace(SMALL, tokens=12, prompt=4, kept_rank=48),
}
ROUTES: dict[str, MaskSpec | None] = {
    "no route": None,
    "activation flags": MaskSpec(score="act"),
    "gradient flags, one per module": MaskSpec(score="grad", unit="rollout"),
    "gradient flags, pooled": MaskSpec(score="grad"),
    "gradient flags, a scoring pass": MaskSpec(score="grad", score_policy="ablated"),
    "full score": MaskSpec(score="full"),
    "full score, a scoring pass": MaskSpec(score="full", score_policy="ablated"),
}
RANKS = (2, 4)


class Cost(NamedTuple):
    """FLOPs of a forward and backward, and bytes held after it beyond the gradients of the quarantine."""

    flops: int
    retained: int


@dataclass(frozen=True)
class Compared:
    """A quantity of one case, predicted and measured."""

    what: str
    case: str
    route: str
    predicted: int | float
    measured: int | float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


# ---- the prediction


def parameters(size: Size, kept: Kept) -> tuple[int, int]:
    """Return the numbers of parameters of the kept adapter and of a LoRA quarantine."""
    r, k = size.kept_rank, size.quarantine_rank
    sides = size.layers * sum(d_in + d_out for d_in, d_out in size.adapted)
    return (size.layers * len(size.adapted) * r if kept == "svd" else r * sides), k * sides


def predict(size: Size, kept: Kept, spec: MaskSpec | None) -> Cost:
    """Return the cost of a forward and backward of one micro-batch, its scoring pass included; activations are in float32."""
    r, k = size.kept_rank, size.quarantine_rank
    work = flops.frozen(size) + flops.lora(size, k) + (flops.svd(size, r) if kept == "svd" else flops.lora(size, r))
    kept_count, _ = parameters(size, kept)
    if spec is None:
        return Cost(work, 4 * kept_count)
    work += flops.gates(size, kept, spec.score, spec.decided_at)
    if spec.score == "act":
        work += sum(size.layers * 2 * size.rollouts * (r if kept == "svd" else min(d)) * d[0] for d in size.adapted)
    if spec.score_policy == "ablated":
        work += flops.deployed_pass(size) + (flops.full_score(size) if spec.score == "full" else flops.grad_score(size, kept))
    elif spec.score == "full":
        work += flops.full_score(size)
    return Cost(work, retained(size, kept, spec))


FIRST = (True, False, False, True, True, False, True)
"""Of the modules of a block those with an input of their own: q, k and v have one input; so have gate and up."""


def retained(size: Size, kept: Kept, spec: MaskSpec | None) -> int:
    """Return the bytes that are left after the backward: kept gradients, or those of every rollout, and numbers per rollout."""
    kept_count, _ = parameters(size, kept)
    if spec is None:
        return 4 * kept_count
    b, r, sites = size.rollouts, size.kept_rank, size.layers * len(size.adapted)
    if spec.decided_at != "finish":
        # A scale, a mask of each module or one with its weights; and what was read for it in this pass.
        read, masks = 0, 1 + (2 if spec.unit == "pooled" else sites)
        if spec.score_policy == "live":
            coordinates = sum(r if kept == "svd" else min(d) for d in size.adapted) * size.layers
            shared = size.layers * sum(first for _, first in zip(size.adapted, FIRST))  # magnitudes
            read = 4 * b * (coordinates + shared) + 5 * b if spec.score == "act" else b * (5 * sites + 4)
        return 4 * (kept_count + b * masks) + read
    if kept == "svd":
        waiting, written = 4 * b * kept_count, sites
    else:
        floats = written = 0
        for (d_in, d_out), first in zip(size.adapted, FIRST):
            floats += size.n * (r + d_in * first) if flops.as_pair(size, r, d_in) else b * r * d_in
            floats += size.n * (r + d_out) if (pair := flops.as_pair(size, r, d_out)) else b * r * d_out
            written += not pair
        waiting, written = 4 * size.layers * floats, size.layers * written
    return waiting + 4 * b * (written if spec.score == "grad" else 3 * sites)


def wire(count: int, ranks: int) -> float:
    """Return the bytes that each process sends when ``count`` float32 gradients are summed in a ring."""
    return 2 * (ranks - 1) / ranks * 4 * count


# ---- the measurement


def spec_of(size: Size, kept: Kept) -> AdapterSpec:
    return AdapterSpec(kept, rank=size.kept_rank, quarantine_rank=size.quarantine_rank)


def measure(size: Size, kept: Kept, spec: MaskSpec | None, seed: int, cache_dir: Path) -> Cost:
    """Return the cost that torch counts. Eager attention, because the counter does not know the fused kernel of a CPU."""
    bench = Bench(size, seed, cache_dir, attention="eager")
    policy = bench.policy(spec_of(size, kept))
    begin = bench.route(policy, spec)
    with FlopCounterMode(display=False) as counter:
        routing = begin()
        bench.backward(policy, routing)
        routing.finish()
    policy.model.zero_grad()
    routing = begin()
    left = sum(allocations(lambda: bench.backward(policy, routing)))
    quarantine = sum(p.numel() for p in policy.adapters.quarantine_parameters().values())
    return Cost(counter.get_total_flops(), left - 4 * quarantine)


class Step(NamedTuple):
    """A step that several ranks take together."""

    size: Size
    kept: Kept
    spec: MaskSpec | None


def sent(steps: Sequence[Step], ranks: int, seed: int) -> list[float]:
    """Return the bytes that each of ``ranks`` processes sends in each step, from the kernel's counter of the loopback device."""
    with TemporaryDirectory() as folder:
        plain = [[asdict(one.size), one.kept, None if one.spec is None else asdict(one.spec)] for one in steps]
        (Path(folder) / "order.json").write_text(json.dumps({"steps": plain, "ranks": ranks, "seed": seed}))
        command_line = [sys.executable, "-W", "ignore", "-c", f"from {MODULE} import launch; launch({folder!r})"]
        if isolated():
            command_line = ["unshare", *_NAMESPACE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command_line]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{ranks} processes could not take a step together: {done.stderr.strip().splitlines()[-1]}")
        return [count / ranks for count in json.loads((Path(folder) / "sent.json").read_text())]


MODULE = "studies.benchmarks.cost"
TRIES = 3
"""Steps of which the one counts that sent least: on a full machine packets are sent again."""
_NAMESPACE = ("--user", "--map-root-user", "--net")


def isolated() -> bool:
    """Return True if a process may have a network of its own, in which nothing else is sent."""
    if which("unshare") is None or which("ip") is None:
        return False
    return (
        subprocess.run(["unshare", *_NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0
    )


def launch(folder: str) -> None:
    """Take the steps of an order on all of its ranks, each in a process of its own."""
    from transformers import Qwen3ForCausalLM  # noqa: F401  # of every rank's decoder: they would import it once each

    given = json.loads((Path(folder) / "order.json").read_text())
    # forked before torch has used a thread, because each process would import torch anew otherwise
    start_processes(take, args=(given, folder), nprocs=given["ranks"], start_method="fork")


def take(rank: int, given: dict[str, Any], folder: str) -> None:
    """Take the steps on this rank's rollouts; rank 0 writes what all ranks have sent in each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given["ranks"])
    for _ in range(2):  # opens the connections
        dist.all_reduce(torch.ones(2**16))
        dist.barrier()
    counts = []
    for size, kept, spec in given["steps"]:
        bench = Bench(Size(**size), given["seed"] + rank, Path(folder) / f"svd-{rank}", attention="eager")
        policy = bench.policy(spec_of(bench.size, kept))
        begin, tries = bench.route(policy, None if spec is None else MaskSpec(**spec)), []
        for _ in range(TRIES):
            dist.barrier()
            before = loopback()
            dist.barrier()
            routing = begin()
            bench.backward(policy, routing)
            routing.finish(sum_over_ranks)
            dist.barrier()
            tries.append(loopback() - before)
            policy.model.zero_grad()
        counts.append(min(tries))
    if rank == 0:
        (Path(folder) / "sent.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def loopback() -> int:
    """Return the bytes that the loopback device has sent."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


# ---- large models


@dataclass(frozen=True)
class Large:
    """A model on many processes; sizes are those of a published model of its class."""

    name: str
    weights: float
    processes: int
    size: Size


def large(layers: int, d: int, heads: int, kv: int, mlp: int, vocab: int, attention_only: bool = False) -> Size:
    """Return a micro-batch of 4 rollouts of 4,096 tokens, with LoRA r16 and a quarantine r16."""
    return Size(layers, d, heads, mlp, vocab, 4, 4096, 512, 16, 16, kv, attention_only)


LARGE = (
    Large("7B", 7.6e9, 64, large(28, 3584, 28, 512, 18944, 152064)),
    Large("70B", 70.6e9, 512, large(80, 8192, 64, 1024, 28672, 128256)),
    Large("400B, 17B active", 400e9, 4096, large(48, 5120, 40, 1024, 16384, 202048, attention_only=True)),
)
MICRO_BATCHES = 4
"""Micro-batches of a process in one step."""


def flops_table() -> str:
    """Return a Markdown table of the FLOPs of a forward and backward, relative to the one without a route."""

    def added(size: Size, spec: MaskSpec | None) -> float:
        return predict(size, "lora", spec).flops / predict(size, "lora", None).flops

    rows = [(name, *(f"{added(one.size, spec):.4f}" for one in LARGE)) for name, spec in ROUTES.items()]
    return markdown_table(("route", *(one.name for one in LARGE)), rows)


def memory_table() -> str:
    """Return a Markdown table of bytes in each process: adapters, waiting gradients, directions."""
    counts: dict[str, Callable[[Size], int]] = {
        "both adapters": lambda size: 4 * sum(parameters(size, "lora")),
        "kept gradients that wait, pooled gradient flags": lambda size: retained(size, "lora", ROUTES["gradient flags, pooled"]),
        "kept gradients, any other route": lambda size: retained(size, "lora", ROUTES["full score, a scoring pass"]),
        "a direction of `grad`": lambda size: 4 * size.layers * size.kept_rank * sum(d_out for _, d_out in size.adapted),
        "a direction of `act`, with its coordinates": lambda size: 4 * size.layers * sum(min(d) * (d[0] + 1) for d in size.adapted),
        "a direction of `full`": lambda size: 4 * size.layers * sum(d_in * d_out for d_in, d_out in size.adapted),
    }
    rows = [(name, *(in_bytes(count(one.size)) for one in LARGE)) for name, count in counts.items()]
    return markdown_table(("what", *(one.name for one in LARGE)), rows)


def wire_table(rate: float, link: float) -> str:
    """Return a Markdown table of one step of each process.

    Args:
        rate: FLOPs per second that a process sustains.
        link: bytes per second that it sends.
    """
    rows = []
    for one in LARGE:
        work = MICRO_BATCHES * predict(one.size, "lora", None).flops / rate
        gathered = 2 * MICRO_BATCHES * 2 * one.weights * (one.processes - 1) / one.processes  # bf16, in each forward and backward
        adapters = wire(sum(parameters(one.size, "lora")), one.processes)
        gradients = f"{in_bytes(adapters)}, {1e3 * adapters / link:,.1f} ms"
        rows.append((one.name, f"{one.processes:,}", f"{work:,.1f} s", in_bytes(gathered), gradients))
    header = ("model", "processes", "forward and backward", "base weights gathered", "adapters' gradients, after the backward")
    return markdown_table(header, rows)


def in_bytes(count: int | float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


# ---- the command


def table(rows: Sequence[Compared]) -> str:
    """Return a Markdown table: for each quantity and route, over all cases, the range of predicted over measured."""
    lines = []
    for what in dict.fromkeys(row.what for row in rows):
        for route in dict.fromkeys(row.route for row in rows if row.what == what):
            ratios = [row.ratio for row in rows if (row.what, row.route) == (what, route)]
            low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
            lines.append((what, route, len(ratios), low if low == high else f"{low} - {high}"))
    return markdown_table(("what", "route", "cases", "predicted / measured"), lines, left=2)


def run(options: CostOptions) -> None:
    """Measure, print the table, and write ``options.out``."""
    sizes = dict(list(SIZES.items())[: 1 if options.quick else None])
    rows = compare(sizes, RANKS[: 1 if options.quick else None], options.seed)
    print(table(rows))
    print(f"FLOPs of a forward and backward over those without a route\n\n{flops_table()}")
    print(f"bytes in each process\n\n{memory_table()}")
    print(f"a step of {MICRO_BATCHES} micro-batches, in each process\n\n{wire_table(options.rate, options.link)}", end="")
    options.write({"machine": machine(), "isolated": isolated(), "rows": rows})


def compare(sizes: Mapping[str, Size], ranks: Sequence[int], seed: int) -> list[Compared]:
    """Return every quantity of every case, predicted and measured."""
    kinds: tuple[Kept, ...] = ("svd", "lora")
    rows: list[Compared] = []
    with TemporaryDirectory() as folder, tqdm(total=len(sizes) * len(ROUTES) * 2 + len(ranks), desc="counting", leave=False) as bar:
        every = list(itertools.product(sizes.items(), kinds, ROUTES.items()))
        for (case, size), kept, (route, spec) in every:
            predicted, measured = predict(size, kept, spec), measure(size, kept, spec, seed, Path(folder))
            for what, expected, other in zip(("FLOPs", "bytes held"), predicted, measured):
                rows.append(Compared(f"{what}, {kept}", case, route, expected, other))
            bar.update()
        together = [(case, route, Step(size, kept, spec)) for (case, size), kept, (route, spec) in every]
        for count in ranks:
            for (case, route, one), counted in zip(together, sent([step for *_, step in together], count, seed), strict=True):
                expected = wire(sum(parameters(one.size, one.kept)), count)
                rows.append(Compared(f"bytes sent, {one.kept}", f"{case}, {count} processes", route, expected, counted))
            bar.update()
    return rows
