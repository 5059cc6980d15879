"""Cost of routing and speed of the engine on an accelerator, by the clock.

    python -m studies.benchmarks device [--device cuda] [--quick] [--sizes 135M 1.1B] [--rounds 15] [--out FILE.json]

Random decoders of the shapes of SmolLM2-135M and TinyLlama-1.1B in bfloat16 with adapters in float32, in one process:

    steps     a forward and backward of 8 rollouts of 512 tokens: PEFT's LoRA, both adapters, and both under a route
    engine    64 requests of 32 tokens with 64 new ones each, and ragged ones, against transformers' ``generate`` on a padded batch

Sides take turns, each between two waits for the device; a ratio is one of medians, with a 95% bootstrap interval over rounds. Below
1 is faster. Memory is the peak of torch's allocations on the device during a step, above what was allocated before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from studies.benchmarks.engine import EngineSides
from studies.benchmarks.measurement.contenders import Bench, random_qwen3
from studies.benchmarks.measurement.flops import MICRO, Size
from studies.benchmarks.measurement.paired import (
    QUICK,
    Contender,
    PairedRatio,
    PairedRatioResult,
    Turn,
    clock,
    compared,
    device_name,
    machine,
    peak_bytes,
    side_table,
    take_turns,
    wait,
)
from studies.benchmarks.options import DeviceOptions
from studies.benchmarks.routing import FROZEN, FULL, LORA, PEFT, PEFT_HALF, POOLED, SMOLLM2, STACKED, build

SIZES = {
    "135M": SMOLLM2,
    "1.1B": Size(22, 2048, 32, 5632, 32000, rollouts=8, tokens=512, prompt=64, kept_rank=16, quarantine_rank=16, kv=256),
}
STEPS = (
    PairedRatio(PEFT, FROZEN),
    PairedRatio(LORA, PEFT),
    PairedRatio(STACKED, PEFT),
    PairedRatio(STACKED, PEFT_HALF),
    PairedRatio(f"{LORA}: {POOLED}", LORA),
    PairedRatio(f"{STACKED}: {POOLED}", STACKED),
    PairedRatio(f"{STACKED}: {POOLED}", PEFT),
    PairedRatio(f"{STACKED}: {FULL}", STACKED),
)
CONTEXT = 512
ENGINE = (PairedRatio("engine", "generate, one padded batch"), PairedRatio("engine, ragged", "generate, padded to the longest"))


def peak(step: Callable[[], object], device: torch.device) -> int:
    """Return a step's peak memory in bytes, above the allocation before it."""
    if device.type != "cuda":
        return peak_bytes(step)
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def model(size: Size, seed: int, device: torch.device, **more: Any) -> Any:
    """Return a random decoder in bfloat16 on the device."""
    return random_qwen3(size, seed, **more).to(device, torch.bfloat16)


def steps(
    size: Size, options: DeviceOptions, device: torch.device
) -> tuple[list[PairedRatioResult], dict[str, list[float]], dict[str, int]]:
    """Return the rows of ``STEPS``, and of every side the seconds and the peak memory."""
    decoder = model(size, options.seed, device, use_cache=False, attn_implementation="sdpa").train().requires_grad_(False)
    with TemporaryDirectory() as folder:
        sides, missing = build(Bench(size, options.seed, Path(folder), model=decoder), STEPS)

    def turn(side: Contender) -> dict[str, float]:
        seconds = clock(side.step, device)
        side.reset()
        return {side.name: seconds}

    rng, memory = np.random.default_rng(options.seed), {}
    turns: dict[str, Turn] = {side.name: lambda side=side: turn(side) for side in sides}
    seconds = take_turns(turns, options.turns, rng)
    for side in sides:
        memory[side.name] = peak(side.step, device)
        side.reset()
    rows = [row for row in STEPS if not {row.over, row.under} & missing.keys()]
    return compared(rows, seconds, rng), seconds, memory


def engine(
    size: Size, options: DeviceOptions, device: torch.device
) -> tuple[list[PairedRatioResult], dict[str, list[float]], dict[str, int]]:
    """Return the rows of ``ENGINE``, and of every side the seconds and its tokens."""
    decoder = model(replace(size, tokens=CONTEXT), options.seed, device, pad_token_id=0, bos_token_id=1, eos_token_id=None).eval()
    sides = EngineSides(options.seed, options.quick, model=decoder)
    calls, rng = sides.batches(), np.random.default_rng(options.seed)
    turns: dict[str, Turn] = {name: lambda name=name, call=call: {name: clock(call, device)} for name, call in calls.items()}
    seconds = take_turns(turns, options.turns, rng)
    return compared(ENGINE, seconds, rng), seconds, {name: sides.tokens(name) for name in calls}


def table(
    what: str, results: Sequence[PairedRatioResult], seconds: Mapping[str, Sequence[float]], amount: Mapping[str, int]
) -> str:
    """Return a Markdown table of ``training``, whose ``amount`` is in bytes, or of ``sampling``, where it is in tokens."""
    if what == "training":
        shown = {side: f"{1e3 * median(each):,.1f} ms, {amount[side] / 2**20:,.0f} MiB" for side, each in seconds.items()}
    else:
        shown = {side: f"{amount[side] / median(each):,.0f} tokens/s" for side, each in seconds.items()}
    header = ("what", "", "against", "", "time", "95%", "")
    return side_table(results, shown.__getitem__, header)


def run(options: DeviceOptions) -> None:
    """Measure, print each table when it is measured, and write ``options.out`` again after each."""
    device = torch.device(options.device)
    named = device_name(device)
    print(f"{options.turns} rounds on {named}, bfloat16" + f"\n{QUICK}" * options.quick)
    sizes: dict[str, dict[str, object]] = {}
    for name in ("tiny",) if options.quick else options.sizes:
        sizes[name] = {"size": (size := MICRO if options.quick else SIZES[name])}
        for what, measure in (("training", steps), ("sampling", engine)):
            results, seconds, amount = measure(size, options, device)
            print(f"\n{name}, {what}\n\n{table(what, results, seconds, amount)}", end="", flush=True)
            sizes[name][what] = {"rows": results, "seconds": seconds, "bytes" if what == "training" else "tokens": amount}
            options.write({"machine": machine(), "rounds": options.turns, "device": named, "sizes": sizes})
