"""Options of every benchmark. Nothing here needs torch, so that ``--help`` waits for none of what is timed."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from mi_route2.files import write_whole
from mi_route2.specs import MaskSpec, OpenSpec
from mi_route2.validation import demand_device, unknown_name


@dataclass(frozen=True)
class Benchmark:
    """Options of every benchmark. The docstring of a subclass is its help text."""

    quick: Annotated[bool, tyro.conf.arg(help="a tiny model and three rounds: shows that every row runs, not how fast")] = False
    rounds: Annotated[int | None, tyro.conf.arg(help="turns per side; default: 15, or 3 with --quick")] = None
    seed: Annotated[int, tyro.conf.arg(help="seed of the weights, the adapters, the tokens and the order of turns")] = 0
    out: Annotated[Path | None, tyro.conf.arg(help="write all measurements to this JSON file")] = None

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return self.rounds or (3 if self.quick else 15)

    def check(self) -> None:
        """Check the options before anything is measured; ``ValueError`` if an option cannot work."""
        if self.rounds is not None and self.rounds < 3:
            raise ValueError(f"a median of {self.rounds} rounds is meaningless: --rounds must be at least 3")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"there is no folder {self.out.parent} to write {self.out.name} into")
        if self.out is not None and self.out.is_dir():
            raise ValueError(f"--out {self.out} is a folder: give a file in it, as {self.out / 'measured.json'}")

    def write(self, document: Mapping[str, object]) -> None:
        """Write ``document`` to ``out``, if given; dataclasses in it become objects of JSON."""
        if self.out is not None:
            write_whole(self.out, (json.dumps(document, indent=1, default=asdict) + "\n").encode())
            print(f"\nwrote {self.out}")


@dataclass(frozen=True)
class CostOptions(Benchmark):
    """FLOPs, bytes held and bytes sent by routed steps: predicted over measured on small cases, and predicted for large models.

    Counts, not times: one run says it all, and other work on the machine changes nothing. Some minutes; --quick one.
    """

    rounds: Annotated[int | None, tyro.conf.Suppress] = None
    rate: Annotated[float, tyro.conf.arg(help="FLOPs per second that a process of a large model sustains")] = 4e14
    link: Annotated[float, tyro.conf.arg(help="bytes per second that it sends")] = 5e10

    def check(self) -> None:
        super().check()
        if not (self.rate > 0 and self.link > 0):
            raise ValueError("--rate and --link are FLOPs and bytes per second: give positive numbers")


@dataclass(frozen=True)
class DeviceOptions(Benchmark):
    """Routed steps beside PEFT's, and the engine beside transformers' generate, on an accelerator.

    A ratio is that of times on the clock, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 15 rounds take
    some minutes on one GPU; --quick seconds, on a CPU too (--device cpu).
    """

    device: Annotated[str, tyro.conf.arg(help="device of the models, as cuda, cuda:1 or cpu")] = "cuda"
    sizes: Annotated[tuple[Literal["135M", "1.1B"], ...], tyro.conf.arg(help="models to measure")] = ("135M", "1.1B")

    def check(self) -> None:
        super().check()
        demand_device(self.device)


@dataclass(frozen=True)
class EngineOptions(Benchmark):
    """Tokens per second of the engine and of transformers' generate, and the cost of steering, monitoring and exactness.

    A ratio is that of processor times, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 15 rounds take
    four minutes, --quick some seconds; --smollm2 a minute a round.
    """

    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M, in float32 and in bfloat16, in place of a tiny model")] = (
        False
    )
    look: Annotated[bool, tyro.conf.arg(help="measure the look at the weights of an idle engine, and nothing else")] = False


@dataclass(frozen=True)
class HostsOptions(Benchmark):
    """Cost of each host over bare torch hooks that read the same sites: a forward, a routed step, a generated token.

    A cell such as "1.20 (1.15 - 1.26), +2.1 ms" is the median time over the partner's, its 95% bootstrap interval over rounds, and
    the difference of the medians. A host adds Python work at a site, so its cost is a number of milliseconds rather than a ratio:
    it matters for the small model and hardly for a large one. "torch hooks, eager" over "torch hooks" is the price of eager
    attention, which TransformerLens's bridge forces; BridgeHost over "torch hooks, eager" is the bridge's own cost. Sides take
    turns in a random order in one process on one thread, and time is processor time, so that other work on the machine is not
    counted. 15 rounds take about six minutes, --quick about ten seconds, --smollm2 half a minute a round.
    """

    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M in place of random models; not with --quick")] = False

    def check(self) -> None:
        super().check()
        if self.quick and self.smollm2:
            raise ValueError("--quick measures a tiny model and --smollm2 a real one: give one of the two")


@dataclass(frozen=True)
class ImportsOptions(Benchmark):
    """Processor seconds of ``import mi_route2`` beyond torch, and of helps, in fresh processes.

    Medians over rounds, with a 95% bootstrap interval. 15 rounds take two minutes, --quick 20 seconds.
    """


@dataclass(frozen=True)
class JailOptions(Benchmark):
    """Grades per second of the jail, of a fresh confined process per grade, and of forks without confinement.

    A ratio is that of the processor times of a grade, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 15
    rounds take a minute, --quick a few seconds.
    """


SPECS: dict[str, MaskSpec | OpenSpec] = {
    "no route": OpenSpec(),
    "activation flags": MaskSpec(score="act"),
    "gradient flags": MaskSpec(score="grad"),
    "full score, a pass of its own": MaskSpec(score="full", score_policy="ablated"),
}


@dataclass(frozen=True)
class PackedOptions(Benchmark):
    """Time and peak memory of routed steps on packed rollouts relative to padded ones.

    A ratio is that of processor times, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 15 rounds take two
    minutes, --quick some seconds; --smollm2 two minutes a round, and half a minute with one route and --rollouts 4.
    """

    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M in place of a tiny model")] = False
    rollouts: Annotated[int | None, tyro.conf.arg(help="number of rollouts; default: 16, or 8 with --smollm2")] = None
    routes: Annotated[tuple[str, ...], tyro.conf.arg(help=f"any of {', '.join(map(repr, SPECS))}")] = tuple(SPECS)

    def check(self) -> None:
        """Check the options; the errors of ``Benchmark.check``, and ``ValueError`` for rollouts and routes that are none."""
        super().check()
        if self.rollouts is not None and self.rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, not {self.rollouts}")
        for name in self.routes:
            if name not in SPECS:
                raise ValueError(unknown_name(name, list(SPECS), "route"))


@dataclass(frozen=True)
class RoutingOptions(Benchmark):
    """Paired speed and memory ratios of routing, its adapters, and other ways to get per-rollout gradients.

    --smollm2 takes some minutes a round.
    """

    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M on 8 rollouts of 512 tokens in place of a random model")] = (
        False
    )
    dtype: Annotated[Literal["float32", "bfloat16"], tyro.conf.arg(help="type of its weights; adapters stay float32")] = "float32"
    checkpointing: Annotated[bool, tyro.conf.arg(help="run it with gradient checkpointing")] = False
    only: Annotated[str, tyro.conf.arg(help="measure the rows whose names contain this text, with their sides")] = ""

    def check(self) -> None:
        super().check()
        if self.quick and self.smollm2:
            raise ValueError("--quick shows that every row runs on a tiny model: leave out --smollm2")
        if not self.smollm2 and (self.checkpointing or self.dtype != "float32"):
            raise ValueError("--dtype and --checkpointing are settings of the real model: give --smollm2 too")


@dataclass(frozen=True)
class ServeOptions(Benchmark):
    """Cost of HTTP on top of the engine: throughput, time to the first token, streams beside sweeps, start; with --memory, growth.

    A ratio is that of times on the clock, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 9 rounds take
    four minutes on two quiet cores, --quick half a minute. --memory sends 10,000 requests and takes some minutes.
    """

    rounds: Annotated[int | None, tyro.conf.arg(help="turns per side; default: 9, or 3 with --quick")] = None
    smollm2: Annotated[bool, tyro.conf.arg(help="serve SmolLM2-135M in place of a tiny model")] = False
    memory: Annotated[bool, tyro.conf.arg(help="measure memory over many requests, and nothing else")] = False
    cold: Annotated[bool, tyro.conf.arg(help="measure starts with empty caches, and nothing else")] = False
    requests: Annotated[int, tyro.conf.arg(help="requests of --memory")] = 10_000

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return self.rounds or (3 if self.quick else 9)

    def check(self) -> None:
        super().check()
        if self.memory and self.cold:
            raise ValueError("--memory and --cold measure nothing else: give one of the two")
        if self.memory and self.requests < 500:
            raise ValueError(f"{self.requests} requests say nothing about memory: --requests must be at least 500")


@dataclass(frozen=True)
class SteeringOptions(Benchmark):
    """Cost of steering at a decode step of 64 requests, in microseconds of processor time on one thread (medians)."""


@dataclass(frozen=True)
class SweepsOptions(Benchmark):
    """Patch sweeps and TransformerLens's get_act_patch_resid_pre or get_act_patch_block_every: time per cell, grids compared.

    "times as fast" is the ratio of medians with its 95% bootstrap interval over rounds. "FLOPs: bound, run" is how many times fewer
    FLOPs a cell needs than a whole forward: at best, and as its groups were cut. The rest of the ratio is overhead shared by many
    cells, or eager attention. Sides take turns in a random order in one process on one thread, and time is processor time, so that
    other work on the machine is not counted; with --device cuda it is the clock between two waits for the device. 15 rounds take
    some twelve minutes, --long with its fewer rounds half an hour, --every a quarter of one, --quick a few seconds.
    """

    long: Annotated[bool, tyro.conf.arg(help="prompts of 128 and 256 tokens, and SmolLM2-135M, in fewer rounds")] = False
    every: Annotated[bool, tyro.conf.arg(help="attn_out and mlp_out beside resid_pre, at 64 to 256 tokens, in fewer rounds")] = (
        False
    )
    device: Annotated[str, tyro.conf.arg(help="device of the models, as cpu, cuda or cuda:1")] = "cpu"
    only: Annotated[str, tyro.conf.arg(help="measure the models whose names contain this text, as 'd 64'")] = ""

    def check(self) -> None:
        """Raise ``ValueError`` for a load or a device that does not exist."""
        super().check()
        demand_device(self.device)
        if self.long and self.every:
            raise ValueError("--long and --every are two loads: give one")


@dataclass(frozen=True)
class TapInOptions(Benchmark):
    """Tokens per second of Tap-In's matcher, and of linked lists in plain Python and compiled, and their change with text length.

    Processor time on one thread, medians over rounds with 95% bootstrap intervals; a ratio above 1 is faster than the plain lists.
    """


@dataclass(frozen=True)
class VllmSamplerOptions(Benchmark):
    """Sampled tokens per second of vLLM with both adapters as one LoRA, and of what samples without vLLM.

    A ratio is that of processor times, by medians over rounds, with a 95% bootstrap interval; below 1 is faster. 15 rounds take
    two minutes, --quick half a minute; --smollm2 a minute a round.
    """

    smollm2: Annotated[bool, tyro.conf.arg(help="measure SmolLM2-135M in place of a tiny model")] = False

    def check(self) -> None:
        super().check()
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed here: run this in an environment of its own, see docs/vllm.md")


BENCHMARKS: Mapping[str, type[Benchmark]] = MappingProxyType(
    {
        "cost": CostOptions,
        "device": DeviceOptions,
        "engine": EngineOptions,
        "hosts": HostsOptions,
        "imports": ImportsOptions,
        "jail": JailOptions,
        "packed": PackedOptions,
        "routing": RoutingOptions,
        "serve": ServeOptions,
        "steering": SteeringOptions,
        "sweeps": SweepsOptions,
        "tapin": TapInOptions,
        "vllm_sampler": VllmSamplerOptions,
    }
)
"""Module -> its options."""
