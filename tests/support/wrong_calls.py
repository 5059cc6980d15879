"""Wrong calls at the library's front, each with its error and the words that name the remedy; and calls that must go through.

Run as a script it makes every call without the run-time checks of shapes that tests install, as users do, and prints what came.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mi_route2 import (
    AdapterSpec,
    Policy,
    Rollouts,
    Site,
    attach,
    export_merged,
    export_peft,
    load,
    load_adapters,
    open_host,
    save_adapters,
)
from mi_route2.adapters import Adapters, Tape, from_pretrained, save_pretrained
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.hosts.base import Host
from mi_route2.hosts.capture import capture
from mi_route2.models import smollm2_folder
from mi_route2.patching import CleanRun, Grid, Target, attribute, cells, paths, sweep
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.routing import (
    CanarySpec,
    Directions,
    EraseRoute,
    EraseSpec,
    MaskRoute,
    MaskSpec,
    OpenRoute,
    PairBatch,
    StepContext,
    TrainBatch,
    group_advantages,
)
from mi_route2.routing.canary import Canary, CanaryRoute, calibrate
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection, record
from mi_route2.sites import select
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering
from probes.auroc import auroc
from probes.dataset import Dataset
from probes.direction import DirectionFitter
from probes.haar import HaarProbeFitter
from probes.lda import LdaFitter
from probes.logistic import LogisticFitter
from probes.mean_difference import MeanDifferenceFitter
from probes.store import load_probe, save_probe

B, S, VOCAB, WIDTH = 4, 7, 32, 16
RESID = Site(0, "resid_pre")
SPEC = AdapterSpec("lora", rank=2, quarantine_rank=2)


@dataclass(frozen=True)
class WrongCall:
    """One call; ``error`` is ``None`` where it must go through."""

    name: str
    call: Callable[[], Any]
    error: type[Exception] | None
    says: str


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes)).eval()


@cache
def bare() -> LlamaForCausalLM:
    """A model without adapters."""
    return llama()


@cache
def host() -> Host:
    return open_host("torch", bare())


@cache
def routed_host() -> Host:
    return open_host("torch", llama())


@cache
def adapters() -> Adapters:
    return routed_host().attach("blocks.*", spec=SPEC, generator=seeded())


@cache
def policy() -> Policy:
    return Policy(adapters().model, adapters())


def headless() -> Policy:
    model = llama().model
    return Policy(model, attach(model, "*q_proj", spec=AdapterSpec("lora", rank=2), generator=seeded()))


@cache
def engine() -> Engine:
    return Engine(host())


@cache
def tokens() -> Tensor:
    return torch.randint(1, VOCAB, (B, S), generator=seeded())


def attention() -> Tensor:
    return torch.ones(B, S, dtype=torch.bool)


def completion() -> Tensor:
    mask = attention()
    mask[:, :3] = False
    return mask


def rollouts() -> Rollouts:
    return Rollouts(tokens(), attention(), completion())


def batch(**changes: Any) -> TrainBatch:
    given: dict[str, Any] = {
        "rollouts": rollouts(),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "advantages": torch.tensor([0.5, -0.5, 0.5, -0.5]),
        "groups": torch.tensor([0, 0, 1, 1]),
        "teacher": torch.zeros(B, dtype=torch.bool),
    }
    return TrainBatch(**{**given, **changes})


def pairs() -> PairBatch:
    return PairBatch(rollouts(), rollouts(), "these")


def by_flags() -> MaskRoute:
    return MaskRoute.from_flags(labels())


def ratios(given: Rollouts) -> Tensor:
    return torch.randn(1, *given.tokens.shape, generator=seeded())


QUESTION: dict[str, Any] = {"clean": [3, 7, 1, 5], "corrupt": [9, 7, 1, 5], "answer": 3, "foil": 9}


def ask(**changes: Any) -> Grid:
    given: dict[str, Any] = {"sites": "resid_pre", "progress": False, **QUESTION}
    return sweep(host(), **{**given, **changes})


@cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="wrong-calls-"))


def hidden() -> Tensor:
    return torch.randn(B, S, 5, generator=seeded())


def labels() -> Tensor:
    return torch.tensor([True, False, True, False])


def fitted(fitter: Any, h: Any, mask: Any, hack: Any) -> Any:
    fitter.update(h, mask, hack)
    return fitter.fit()


def unread(model: nn.Module, folder: str) -> None:
    load_adapters(model, folder)  # pyright: ignore[reportArgumentType]


NAN = float("nan")

WRONG: list[WrongCall] = []
ACCEPTED: list[WrongCall] = []


def wrong(name: str, call: Callable[[], Any], error: type[Exception], says: str) -> None:
    WRONG.append(WrongCall(name, call, error, says))


def accepted(name: str, call: Callable[[], Any], says: str = "") -> None:
    ACCEPTED.append(WrongCall(name, call, None, says))


# Adapters
wrong("attach: a list of patterns", lambda: attach(bare(), ["blocks.*"], generator=seeded()), TypeError, "an argument of its own")
wrong("attach: a path as pattern", lambda: attach(bare(), Path("q"), generator=seeded()), TypeError, "patterns")
wrong("attach: a path as model", lambda: attach("gpt2", "blocks.*", generator=seeded()), TypeError, "load(")
wrong("attach: a host as model", lambda: attach(host(), "blocks.*", generator=seeded()), TypeError, "host.attach(")
wrong("attach: peft's name", lambda: attach(bare(), "q_proj", generator=seeded()), KeyError, "blocks.*.attn.q")
wrong("attach: peft's names with a glob", lambda: attach(bare(), "*.down_proj", generator=seeded()), KeyError, "blocks.*.mlp.down")
wrong(
    "attach: a module's path",
    lambda: attach(bare(), "model.layers.1.self_attn.v_proj", generator=seeded()),
    KeyError,
    "blocks.1.attn.v",
)
wrong("attach: peft's all-linear", lambda: attach(bare(), "all-linear", generator=seeded()), KeyError, "blocks.*")
wrong("attach: generator=0", lambda: attach(bare(), "blocks.*", generator=0), TypeError, "torch.Generator().manual_seed(")
wrong("attach: a spec by its kind", lambda: attach(bare(), "blocks.*", spec="lora", generator=seeded()), TypeError, "AdapterSpec(")
wrong(
    "attach: a spec as a dictionary",
    lambda: attach(bare(), "blocks.*", spec={"kept": "lora", "rank": 2}, generator=seeded()),
    TypeError,
    "AdapterSpec(",
)
wrong("attach: expect as text", lambda: attach(bare(), "blocks.*", generator=seeded(), expect="14"), TypeError, "expect")
wrong("attach: another count", lambda: attach(bare(), "blocks.*", generator=seeded(), expect=3), ValueError, "selected 14 Linears")
wrong("attach: no pattern", lambda: attach(bare(), generator=seeded()), ValueError, "blocks.*.attn.*")
wrong("attach: twice", lambda: attach(adapters().model, "blocks.*", generator=seeded()), ValueError, "adapters.detach()")
wrong("attach: no Linear at all", lambda: attach(nn.Embedding(3, 3), "*", generator=seeded()), KeyError, "no nn.Linear")
wrong(
    "attach: rank too large",
    lambda: attach(bare(), "blocks.*", spec=AdapterSpec("lora", rank=99), generator=seeded()),
    ValueError,
    "outside 1..16",
)
wrong("host.attach: peft's name", lambda: host().attach("q_proj", generator=seeded()), KeyError, "blocks.*.attn.q")
wrong("host.attach: generator=0", lambda: host().attach("blocks.*", generator=0), TypeError, "torch.Generator().manual_seed(")
wrong("select: a list", lambda: select(bare(), ["blocks.*"]), TypeError, "an argument of its own")
wrong("select: a path as model", lambda: select("gpt2", "blocks.*"), TypeError, "load(")
wrong("recording: no tape", lambda: adapters().recording(None).__enter__(), TypeError, "micro_batch.tape")
wrong("recording: a batch", lambda: adapters().recording(batch()).__enter__(), TypeError, "micro_batch.tape")
wrong("tape: sizes as floats", lambda: Tape(4.0, 7.0), TypeError, "int")

# Sites
wrong("site: layer as text", lambda: Site("0", "resid_mid"), TypeError, "layer")
wrong("site: a layer and a half", lambda: Site(0.5, "resid_mid"), TypeError, "layer")
wrong("site: unknown point", lambda: Site(0, "resid_middle"), KeyError, "resid_mid")
wrong("site: negative layer", lambda: Site(-1, "resid_mid"), ValueError, "count from 0")
wrong("site: parse a number", lambda: Site.parse(3), TypeError, "str")
wrong("site: parse a module's path", lambda: Site.parse("model.layers.0"), ValueError, "blocks.3.resid_mid")

# Hosts
wrong("smollm2: a cache as text", lambda: smollm2_folder("cache"), TypeError, "cache must be a Path or None")  # pyright: ignore
wrong("open_host: arguments swapped", lambda: open_host(bare(), "torch"), TypeError, "name")
wrong("open_host: a path", lambda: open_host("torch", "gpt2"), TypeError, "load(")
wrong("open_host: no model", lambda: open_host("torch", None), TypeError, "load(")
wrong("open_host: a number", lambda: open_host("torch", 3), TypeError, "load(")
wrong("open_host: unknown host", lambda: open_host("tl", bare()), ValueError, "transformer_lens")
wrong("open_host: unknown architecture", lambda: open_host("torch", nn.Linear(2, 2)), ValueError, "choose among")
wrong("load: a number", lambda: load(3), TypeError, "path_or_id")
wrong("load: no folder", lambda: load("./nothing-here"), FileNotFoundError, "there is no folder")
wrong("load: unknown host", lambda: load("./nothing-here", host="tl"), ValueError, "transformer_lens")
wrong("capture: a text", lambda: host().capture("blocks.0.resid_mid", tokens()), TypeError, "Site.parse('blocks.0.resid_mid')")
wrong("capture: texts", lambda: host().capture(["blocks.0.resid_mid"], tokens()), TypeError, "Site.parse('blocks.0.resid_mid')")
wrong("capture: one site", lambda: host().capture(Site(0, "resid_mid"), tokens()), TypeError, "[Site(")
wrong("capture: no such layer", lambda: host().capture([Site(7, "resid_mid")], tokens()), KeyError, "0..1")
wrong("capture: no adapters", lambda: host().capture([Site(0, "kept_a", "attn.q")], tokens()), KeyError, "attach")
wrong("capture: tokens as a list", lambda: host().capture([Site(0, "z")], [[1, 2, 3]]), TypeError, "torch.tensor(")
wrong("capture: one row of tokens", lambda: host().capture([Site(0, "z")], tokens()[0]), ValueError, "[b s]")
wrong("capture: float tokens", lambda: host().capture([Site(0, "z")], tokens().float()), ValueError, "int")
wrong("capture: tokens past the end", lambda: host().capture([Site(0, "z")], tokens() + VOCAB), ValueError, "0..31")
wrong("capture: tokens of -100", lambda: host().capture([Site(0, "z")], tokens() * -100), ValueError, "0..31")
wrong("capture: a longer mask", lambda: host().capture([Site(0, "z")], tokens(), torch.ones(B, S + 1).bool()), ValueError, "[b s]")
wrong("capture: a mask of 2", lambda: host().capture([Site(0, "z")], tokens(), attention().long() * 2), ValueError, "0 and 1")
wrong("capture: a mask of floats", lambda: host().capture([Site(0, "z")], tokens(), attention().float()), ValueError, "bool")
wrong("logits: tokens as a list", lambda: host().logits([[1, 2, 3]]), TypeError, "torch.tensor(")
wrong("logits: tokens past the end", lambda: host().logits(tokens() + VOCAB), ValueError, "0..31")
wrong("logits: a mask of 2", lambda: host().logits(tokens(), attention().long() * 2), ValueError, "0 and 1")
wrong("hooks: a text", lambda: host().hooks({"blocks.0.z": lambda z: z}).__enter__(), TypeError, "Site.parse('blocks.0.z')")
wrong("hooks: a list", lambda: host().hooks([Site(0, "z")]).__enter__(), TypeError, "edits")
wrong("hooks: no function", lambda: host().hooks({Site(0, "z"): torch.zeros(3)}).__enter__(), TypeError, "function")
wrong("host.policy: a model", lambda: host().policy(bare()), TypeError, "attach(")

# Rollouts, batches, policies
wrong("from_lists: nothing", lambda: Rollouts.from_lists([], [], 0), ValueError, "at least one")
wrong("from_lists: other lengths", lambda: Rollouts.from_lists([[1]], [[2], [3]], 0), ValueError, "1 prompts and 2 completions")
wrong("from_lists: an empty completion", lambda: Rollouts.from_lists([[1], [1]], [[2], []], 0), ValueError, "rollout 1")
wrong("from_lists: an empty prompt", lambda: Rollouts.from_lists([[]], [[2]], 0), ValueError, "prompt token")
wrong("from_lists: texts", lambda: Rollouts.from_lists(["def"], ["pass"], 0), TypeError, "tokenizer")
wrong("from_lists: one flat row", lambda: Rollouts.from_lists([1, 2], [3, 4], 0), TypeError, "a list for each rollout")
wrong("from_lists: floats", lambda: Rollouts.from_lists([[1.5]], [[2.5]], 0), TypeError, "token ids")
wrong("from_lists: pad as text", lambda: Rollouts.from_lists([[1]], [[2]], "<pad>"), TypeError, "pad")
wrong("rollouts: lists", lambda: Rollouts([[1, 2]], [[True, True]], [[False, True]]), TypeError, "torch.tensor(")
wrong("rollouts: a narrower mask", lambda: Rollouts(tokens(), attention()[:, 1:], completion()), ValueError, "[b s]")
wrong("rollouts: float tokens", lambda: Rollouts(tokens().float(), attention(), completion()), ValueError, "int")
wrong("rollouts: a mask of 3", lambda: Rollouts(tokens(), attention().long() * 3, completion()), ValueError, "0 and 1")
wrong("rollouts: completion on padding", lambda: Rollouts(tokens(), ~completion(), completion()), ValueError, "subset of attention")
wrong("rollouts: none", lambda: batch(rollouts=rollouts().rows(torch.tensor([], dtype=torch.long))), ValueError, "one per rollout")
wrong("batch: empty", lambda: batch().rows(torch.zeros(0, dtype=torch.long)), ValueError, "no rollouts")
wrong("batch: rewards as a list", lambda: batch(rewards=[1.0, 0.0, 1.0, 0.0]), TypeError, "torch.tensor(")
wrong("batch: whole rewards", lambda: batch(rewards=torch.tensor([1, 0, 1, 0])), ValueError, ".float()")
wrong("batch: NaN rewards", lambda: batch(rewards=torch.tensor([1.0, NAN, 1.0, 0.0])), ValueError, "rewards")
wrong("batch: NaN advantages", lambda: batch(advantages=torch.tensor([1.0, NAN, 1.0, 0.0])), ValueError, "advantages")
wrong("batch: infinite advantages", lambda: batch(advantages=torch.full((B,), float("inf"))), ValueError, "advantages")
wrong("batch: advantages a token", lambda: batch(advantages=torch.zeros(B, S)), ValueError, "[b]")
wrong("batch: too few rewards", lambda: batch(rewards=torch.zeros(B - 1)), ValueError, "[b]")
wrong("batch: groups as floats", lambda: batch(groups=torch.zeros(B)), ValueError, "int")
wrong("batch: tokens as rollouts", lambda: batch(rollouts=tokens()), TypeError, "Rollouts")
wrong("batch: logprobs of another width", lambda: batch(old_logprobs=torch.zeros(B, S + 1)), ValueError, "one per token")
wrong("batch: NaN logprobs", lambda: batch(**dict.fromkeys(LOGPROBS, torch.full((B, S), NAN))), ValueError, "old_logprobs")
wrong("batch: rows by a list of texts", lambda: batch().rows(["0"]), TypeError, "index")
wrong("advantages: lists", lambda: group_advantages([1.0, 0.0], [0, 0]), TypeError, "torch.tensor(")
wrong("advantages: other lengths", lambda: group_advantages(torch.zeros(4), torch.tensor([0, 1])), ValueError, "[b]")
wrong("advantages: a NaN reward", lambda: group_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0])), ValueError, "rewards")
wrong("advantages: nothing", lambda: group_advantages(torch.zeros(0), torch.zeros(0).long()), ValueError, "no rollouts")
wrong("policy: no adapters", lambda: Policy(bare(), None), TypeError, "attach(")
wrong("policy: arguments swapped", lambda: Policy(adapters(), bare()), TypeError, "model")
wrong("policy: adapters of another model", lambda: Policy(bare(), adapters()), ValueError, "attach(")
wrong("host.policy: adapters of another model", lambda: host().policy(adapters()), ValueError, "attach(")
wrong("policy: a model without a head", lambda: headless().logits(rollouts()), ValueError, "load the model with its head")
wrong("policy: a host", lambda: Policy(host(), adapters()), TypeError, "host.policy(")
wrong("policy: logprobs of tokens", lambda: policy().logprobs(tokens()), TypeError, "Rollouts")
wrong(
    "policy: tokens past the end",
    lambda: policy().logprobs(Rollouts(tokens() + VOCAB, attention(), completion())),
    ValueError,
    "0..31",
)
wrong("pairs: other lengths", lambda: PairBatch(rollouts(), rollouts().rows(torch.tensor([0])), "x"), ValueError, "are not pairs")
wrong("pairs: lists", lambda: PairBatch([[1, 2]], [[1, 3]], "x"), TypeError, "Rollouts.from_lists(")
wrong("context: generator=0", lambda: StepContext(0), TypeError, "torch.Generator().manual_seed(")
wrong("context: micro=0", lambda: StepContext(seeded(), micro=0), ValueError, "micro")
wrong("context: micro=-1", lambda: StepContext(seeded(), micro=-1), ValueError, "micro")

# Routes
wrong("route: a spec by its score", lambda: MaskRoute("act", None), TypeError, "MaskSpec(")
wrong("route: pairs as the fitter", lambda: MaskRoute(MaskSpec(), pairs()), TypeError, "MaskRoute.from_pairs(")
wrong("route: pairs alone", lambda: MaskRoute(pairs()), TypeError, "MaskRoute.from_pairs(")
wrong("from_pairs: a spec by its score", lambda: MaskRoute.from_pairs(pairs(), "act"), TypeError, "MaskSpec(")
wrong("from_pairs: swapped", lambda: MaskRoute.from_pairs(MaskSpec(), pairs()), TypeError, "PairBatch(")
wrong("from_pairs: rollouts", lambda: MaskRoute.from_pairs(rollouts()), TypeError, "PairBatch(")
wrong("from_pairs: l1 as text", lambda: MaskRoute.from_pairs(pairs(), l1="0.1"), TypeError, "l1")
wrong("from_flags: nothing", lambda: MaskRoute.from_flags(None), TypeError, "flags")
wrong("from_flags: a list", lambda: MaskRoute.from_flags([True, False]), TypeError, "torch.tensor(")
wrong("from_flags: 0 and 1", lambda: MaskRoute.from_flags(torch.tensor([1, 0])), ValueError, "bool")
wrong("refresh: the model", lambda: MaskRoute.from_pairs(pairs()).refresh(bare(), 0), TypeError, "Policy(")
wrong("refresh: no step", lambda: MaskRoute.from_pairs(pairs()).refresh(policy()), TypeError, "step")
wrong("refresh: half a step", lambda: by_flags().refresh(policy(), 0.5), TypeError, "step")
wrong("begin: no context", lambda: by_flags().begin(policy(), batch()), TypeError, "StepContext(")
wrong("begin: rollouts", lambda: by_flags().begin(policy(), rollouts(), StepContext(seeded())), TypeError, "TrainBatch(")
wrong("begin: a generator", lambda: by_flags().begin(policy(), batch(), seeded()), TypeError, "StepContext(")
wrong("score: a batch", lambda: by_flags().score(policy(), batch()), TypeError, "Rollouts.from_lists(")
wrong("backward: swapped", lambda: by_flags().backward(batch(), policy(), lambda logits, _: logits.sum()), TypeError, "Policy(")
wrong("backward: no loss", lambda: by_flags().backward(policy(), batch(), None), TypeError, "function")
wrong("open route: a text", lambda: OpenRoute("open"), TypeError, "OpenSpec()")
wrong("erase route: pairs as the fitter", lambda: EraseRoute(EraseSpec(), pairs()), TypeError, "EraseRoute.from_pairs(")
wrong("erase route: k as the spec", lambda: EraseRoute.from_pairs(pairs(), 3), TypeError, "EraseSpec(")
wrong("canary route: a text", lambda: CanaryRoute("canary", None, rollouts()), TypeError, "CanarySpec(")
wrong("canary route: a batch", lambda: CanaryRoute(CanarySpec(), None, batch()), TypeError, "Rollouts.from_lists(")
wrong("canary route: micro=-1", lambda: CanaryRoute(CanarySpec(), None, rollouts(), micro=-1), ValueError, "at least 1")
wrong("canary: one folder", lambda: Canary.from_pretrained(bare(), "folder"), TypeError, "['folder']")
wrong("calibrate: top=0", lambda: calibrate(ratios, rollouts(), 0.5, top=0), ValueError, "at least 1")
wrong("calibrate: micro=0", lambda: calibrate(ratios, rollouts(), 0.5, micro=0), ValueError, "at least 1")
wrong("calibrate: no answer", lambda: calibrate(lambda _: None, rollouts(), 0.5), ValueError, "[k b s]")
wrong("stack: a text", lambda: setattr(adapters(), "stack", "no"), TypeError, "bool")
wrong("logits: tokens of 16 bits", lambda: host().logits(tokens().short()), ValueError, ".long()")
wrong("find: a number", lambda: host().find(3), TypeError, "name")
wrong("record: the model", lambda: record(bare(), [RESID], tokens(), store=RunStore(), runs=list("abcd")), TypeError, "open_host(")
wrong("record: a list", lambda: record(host(), [RESID], [[1, 2]], store=RunStore(), runs=["a"]), TypeError, "torch.tensor(")
wrong("record: one site", lambda: record(host(), RESID, tokens(), store=RunStore(), runs=list("abcd")), TypeError, "[Site(")
wrong(
    "record: selection as text",
    lambda: record(host(), [RESID], tokens(), store=RunStore(), runs=list("abcd"), selection="prompt"),
    TypeError,
    "TokenSelection(",
)

# Sweeps
wrong("sweep: the model", lambda: sweep(bare(), sites="resid_pre", **QUESTION), TypeError, "open_host(")
wrong("sweep: no adapters", lambda: ask(sites="kept_out"), KeyError, "attach")
wrong("sweep: no adapters at a Linear", lambda: ask(sites="blocks.*.attn.q.kept_a"), KeyError, "attach")
wrong("sweep: unknown site", lambda: ask(sites="resid"), KeyError, "resid_pre")
wrong("sweep: a layer's number", lambda: ask(sites=3), TypeError, "a Target, a str")
wrong("sweep: no sites", lambda: ask(sites=[]), ValueError, "at least one")
wrong("sweep: text without tokenizer", lambda: ask(clean="Paris"), ValueError, "tokenizer")
wrong("sweep: two prompts", lambda: ask(clean=tokens()), ValueError, "one row of token ids")
wrong("sweep: an empty prompt", lambda: ask(corrupt=[]), ValueError, "has no tokens")
wrong("sweep: no answer", lambda: ask(answer=None), ValueError, "answer")
wrong("sweep: unknown metric", lambda: ask(metric="accuracy"), ValueError, "logit_diff")
wrong("sweep: an answer past the end", lambda: ask(answer=VOCAB), ValueError, "0..31")
wrong("sweep: a float answer", lambda: ask(answer=3.0), TypeError, "answer")
wrong("sweep: alpha as text", lambda: ask(alpha="1"), TypeError, "alpha")
wrong("sweep: alpha NaN", lambda: ask(alpha=NAN), ValueError, "alpha")
wrong("sweep: a position in a tensor", lambda: ask(positions=torch.tensor(2)), TypeError, "not an int64 tensor []")
wrong("sweep: position outside", lambda: ask(positions=[9]), ValueError, "0..3")
wrong("sweep: batch=0", lambda: ask(batch=0), ValueError, "batch")
wrong("sweep: batch as text", lambda: ask(batch="8"), TypeError, "batch")
wrong("sweep: unknown how", lambda: ask(how="fast"), ValueError, "resumed")
wrong("sweep: at outside", lambda: ask(at=99), ValueError, "0..3")
wrong("sweep: heads of none", lambda: ask(heads=True), ValueError, "has heads")
wrong("cells: the model", lambda: list(cells(bare(), sites="resid_pre", **QUESTION)), TypeError, "open_host(")
wrong("attribute: the model", lambda: attribute(bare(), sites="resid_pre", **QUESTION), TypeError, "open_host(")
wrong("paths: texts", lambda: paths(host(), senders=3, receivers=Site(1, "k"), **QUESTION), TypeError, "senders")
wrong("clean run: the model", lambda: CleanRun.capture(bare(), [1, 2], "resid_pre"), TypeError, "open_host(")
wrong("grid: no file", lambda: Grid.load("./nothing.safetensors"), FileNotFoundError, "nothing.safetensors")

# The engine
wrong("engine: the model", lambda: Engine(bare()), TypeError, "open_host(")
wrong("engine: rows=0", lambda: Engine(host(), rows=0), ValueError, "rows")
wrong("engine: rows as text", lambda: Engine(host(), rows="4"), TypeError, "rows")
wrong("engine: vectors as a list", lambda: Engine(host(), vectors=[torch.zeros(3)]), TypeError, "vectors")
wrong("submit: a prompt", lambda: engine().submit((1, 2, 3)), TypeError, "Request(")
wrong("generate: one request", lambda: engine().generate(Request((1, 2))), TypeError, "[Request(")
wrong("generate: prompts", lambda: engine().generate([(1, 2, 3)]), TypeError, "Request(")
wrong("generate: a text", lambda: engine().generate("hello"), TypeError, "Request(")
wrong("request: a text", lambda: Request("hello"), ValueError, "token ids")
wrong("request: empty", lambda: engine().submit(Request(())), ValueError, "prompt")
wrong("request: several rows", lambda: Request(tokens()), ValueError, "one row of token ids")
wrong("request: past the end", lambda: engine().submit(Request((VOCAB,))), ValueError, "31")
wrong("request: sampling by a number", lambda: Request((1,), 8), ValueError, "Sampling(")
wrong("request: steering as a list", lambda: Request((1,), steering=[Steer(Site(0, "z"), [1.0])]), ValueError, "Steering(")
wrong("request: captures as texts", lambda: Request((1,), capture=("blocks.0.z",)), ValueError, "Capture")
wrong("capture request: a text", lambda: Capture("blocks.0.z"), ValueError, "Site.parse(")
wrong("capture request: selection as text", lambda: Capture(Site(0, "z"), "prompt"), ValueError, "TokenSelection(")
wrong("selection: unknown part", lambda: TokenSelection("end"), ValueError, "generated")
wrong("patch: a text", lambda: Patch("blocks.0.z", 3, "zeros"), ValueError, "Site.parse(")
wrong("steer: a text", lambda: Steer("blocks.0.z", [1.0]), ValueError, "Site.parse(")
wrong(
    "steer: another width",
    lambda: engine().submit(Request((1,), steering=Steering(base=(Steer(Site(0, "resid_pre"), [1.0]),)))),
    ValueError,
    "16",
)
wrong("sampling: no tokens", lambda: Sampling(max_new=0), ValueError, "max_new")
wrong("sampling: hot", lambda: Sampling(temperature="hot"), ValueError, "temperature")
wrong("sampling: top_p=2", lambda: Sampling(top_p=2.0), ValueError, "top_p")
wrong("sampling: a seed as text", lambda: Sampling(seed="x", temperature=1.0), ValueError, "seed")
wrong("cancel: no such request", lambda: engine().cancel(99), KeyError, "99")

# Files
wrong("export_peft: the model", lambda: export_peft(bare(), scratch() / "a"), TypeError, "attach(")
wrong("export_merged: the model", lambda: export_merged(bare(), scratch() / "a"), TypeError, "attach(")
wrong("export_peft: a number", lambda: export_peft(adapters(), 3), TypeError, "folder")
wrong("save_adapters: the model", lambda: save_adapters(bare(), scratch() / "a"), TypeError, "attach(")
wrong("save_adapters: unknown part", lambda: save_adapters(adapters(), scratch() / "a", "deploy"), ValueError, "deployed")
wrong("save_adapters: a number", lambda: save_adapters(adapters(), 3), TypeError, "path")
wrong("save_pretrained: unknown part", lambda: save_pretrained(adapters(), scratch() / "a", "kept"), ValueError, "deployed")
wrong("load_adapters: the model", lambda: unread(bare(), "./nothing"), TypeError, "attach(")
wrong("load_adapters: no file", lambda: load_adapters(adapters(), "./nothing"), FileNotFoundError, "nothing")
wrong("from_pretrained: swapped", lambda: from_pretrained("./nothing", bare()), TypeError, "load(path)")
wrong("from_pretrained: no folder", lambda: from_pretrained(bare(), "./nothing"), FileNotFoundError, "nothing")

# Probes
wrong("probe: lists", lambda: fitted(MeanDifferenceFitter(), [[1.0]], [[True]], [True]), TypeError, "torch.tensor(")
wrong(
    "probe: labels of a filtered table",
    lambda: fitted(LdaFitter(), hidden(), attention(), pd.Series([True, False], index=[4, 7])),
    TypeError,
    "torch.tensor(np.asarray(",  # torch.tensor alone looks for the label 0
)
wrong("probe: another mask", lambda: fitted(LdaFitter(), hidden(), attention()[:, 1:], labels()), ValueError, "[b s]")
wrong("probe: too few labels", lambda: fitted(LogisticFitter(), hidden(), attention(), labels()[1:]), ValueError, "[b]")
wrong("probe: labels of 2", lambda: fitted(LdaFitter(), hidden(), attention(), labels().long() * 2), ValueError, "0 and 1")
wrong(
    "probe: one class",
    lambda: fitted(MeanDifferenceFitter(), hidden(), attention(), torch.ones(B).bool()),
    ValueError,
    "hack and clean",
)
wrong("probe: nothing learnt", lambda: LdaFitter().fit(), ValueError, "hack and clean")
wrong("probe: NaN", lambda: fitted(LdaFitter(), hidden() * NAN, attention(), labels()), ValueError, "NaN")
wrong("probe: a list as direction", lambda: DirectionFitter([1.0, 0.0]), TypeError, "torch.tensor(")
wrong("probe: a direction of two axes", lambda: DirectionFitter(torch.ones(2, 2)), ValueError, "[d]")
wrong("probe: another width", lambda: DirectionFitter(torch.ones(3)).fit().score_tokens(hidden()), ValueError, "5 features")
wrong("probe: score of one row", lambda: DirectionFitter(torch.ones(5)).fit().score_tokens(hidden()[0]), ValueError, "[b s d]")
wrong("probe: how as a name", lambda: DirectionFitter(torch.ones(5), "dot"), ValueError, "cosine")
wrong("auroc: lists", lambda: auroc([0.1, 0.9], [False, True]), TypeError, "np.asarray(")
wrong("auroc: whole numbers", lambda: auroc(np.arange(2), np.array([False, True])), ValueError, "give .astype(float) of it")
wrong("auroc: other lengths", lambda: auroc(np.zeros(3), np.zeros(2, dtype=bool)), ValueError, "[n]")
wrong("auroc: NaN", lambda: auroc(np.array([NAN, 1.0]), np.array([True, False])), ValueError, "finite")
wrong("save_probe: swapped", lambda: save_probe(DirectionFitter(torch.ones(5)).fit(), scratch() / "p"), TypeError, "path")
wrong("load_probe: no file", lambda: load_probe(Path("./nothing")), FileNotFoundError, "nothing")
wrong("dataset: lists", lambda: Dataset({"a": [[1.0]]}, attention(), [True] * B, ["x"] * B), TypeError, "hidden")
wrong("dataset: too few labels", lambda: Dataset({"a": hidden()}, attention(), [True], ["x"] * B), ValueError, "one per rollout")

LOGPROBS = ("old_logprobs", "reference_logprobs")

# Specs, runs and grids
wrong("steering: one vector", lambda: Steering(base=Steer(RESID, [1.0])), ValueError, "(Steer(...),)")
wrong("clamp: a bound as text", lambda: Clamp(RESID, [1.0], high="a"), ValueError, "number")
wrong("monitor: gates as text", lambda: Monitor(RESID, [1.0], gates="blocks.0.z"), ValueError, "Site")
wrong("register: a number as name", lambda: engine().steering.register(3, [1.0]), TypeError, "name")
wrong("set_global: one vector", lambda: engine().steering.set_global("decode", Steer(RESID, [1.0])), TypeError, "[Steer(")
wrong("set_global: texts", lambda: engine().steering.set_global("decode", ["calm"]), TypeError, "[Steer(")
wrong("set_tier: one vector", lambda: engine().steering.set_tier(Steer(RESID, [1.0])), TypeError, "[Steer(")
wrong("hold: vectors", lambda: engine().steering.hold("x", [Steer(RESID, [1.0])]), TypeError, "Steering(")
wrong("selection: one position", lambda: TokenSelection(positions=3), ValueError, "(3, 40)")
wrong("from a run: a number", lambda: FromRun(3, 0), ValueError, "run")
wrong("store: sizes as text", lambda: RunStore("1GB"), TypeError, "int")
wrong("sampling: stop at a number", lambda: Sampling(stop=3), ValueError, "stop=('END',)")
wrong("target: a text", lambda: Target("blocks.0.z"), TypeError, "Site.parse('blocks.0.z')")
wrong("scored: peft's name", lambda: adapters().scored("q_proj"), KeyError, "blocks.1.attn.q")
wrong("grid: a cell outside", lambda: ask().cell(99, 0), IndexError, "2 sites and 4 columns")
wrong("grid: a cell by name", lambda: ask().cell("resid_pre", 0), TypeError, "row")
wrong("grid: top of a text", lambda: ask().top("5"), TypeError, "k must be an int")
wrong("grid: correlation with a number", lambda: ask().rank_correlation(3), TypeError, "Grid")
wrong("directions: a number as path", lambda: Directions.load(3), TypeError, "path")
wrong("capture of modules: a list", lambda: capture(bare(), ["lm_head"]).__enter__(), TypeError, "sites")
wrong("rows: outside", lambda: rollouts().rows(torch.tensor([99])), IndexError, "0..3")
wrong("rows: a shorter mask", lambda: rollouts().rows(torch.ones(3).bool()), IndexError, "a boolean for each")
wrong("rows: floats", lambda: batch().rows(torch.ones(3)), IndexError, "whole numbers")
wrong("probe: another unit", lambda: MeanDifferenceFitter("tokens"), ValueError, "'rollout' or 'token'")
wrong("probe: C as text", lambda: LogisticFitter("0.1"), TypeError, "c must be a float")
wrong("probe: generator=0", lambda: HaarProbeFitter(0), TypeError, "torch.Generator().manual_seed(")

# What must go through
accepted("from_flags: a function", lambda: MaskRoute.from_flags(lambda given: given.rewards > 0.5))
accepted("from_flags: by token", lambda: MaskRoute.from_flags(completion()))
accepted("record: int64 mask", lambda: record(host(), [RESID], tokens(), attention().long(), store=RunStore(), runs=list("abcd")))
accepted("capture: int64 mask", lambda: host().capture([Site(0, "z")], tokens(), attention().long()))
accepted("logits: int64 mask", lambda: host().logits(tokens(), attention().long()))
accepted("logits: int32 tokens", lambda: host().logits(tokens().int()))
accepted("rollouts: int64 masks", lambda: Rollouts(tokens(), attention().long(), completion().long()))
accepted("rollouts: masks of uint8", lambda: Rollouts(tokens(), attention().to(torch.uint8), completion()))
accepted("from_lists: tuples", lambda: Rollouts.from_lists(((1, 2), (3,)), ((4,), (5, 6)), 0))
accepted("from_lists: tensors", lambda: Rollouts.from_lists([torch.tensor([1, 2])], [torch.tensor([3])], 0))
accepted("from_lists: numpy", lambda: Rollouts.from_lists([np.array([1, 2])], [np.array([3])], 0))
accepted("batch: float64", lambda: batch(rewards=torch.ones(B).double(), advantages=torch.ones(B).double()))
accepted("batch: old logprobs alone", lambda: batch(old_logprobs=torch.zeros(B, S)))
accepted("batch: int64 teacher", lambda: batch(teacher=torch.tensor([0, 1, 0, 0])))
accepted("capture: any iterable", lambda: host().capture((Site(i, "z") for i in range(2)), tokens()))
accepted("attach: an eval model", lambda: attach(llama(), "blocks.*", spec=SPEC, generator=seeded()).detach())
accepted("sweep: a whole alpha", lambda: ask(alpha=1))
accepted("sweep: a tensor", lambda: ask(clean=torch.tensor([[3, 7, 1, 5]])))
accepted("sweep: a prompt of numpy", lambda: ask(clean=np.array([3, 7, 1, 5])))
accepted("engine: vectors as lists", lambda: Engine(host(), vectors={"calm": [1.0] * WIDTH}))
accepted("auroc: numpy labels", lambda: auroc(np.array([0.1, 0.9]), np.array([False, True])))
accepted("dataset: numpy labels", lambda: Dataset({"a": hidden()}, attention(), np.array([True, False] * 2), ["x"] * B))
accepted("dataset: numpy bools", lambda: Dataset({"a": hidden()}, attention(), [np.True_, np.False_] * 2, ["x"] * B))
accepted("probe: int64 masks and labels", lambda: fitted(MeanDifferenceFitter(), hidden(), attention().long(), labels().long()))
accepted("request: a tensor", lambda: Request(torch.tensor([1, 2])))
accepted(
    "generate: a generator", lambda: engine().generate((Request((1, 2), Sampling(max_new=1)) for _ in range(2)), progress=False)
)
accepted("save_adapters: text as path", lambda: save_adapters(adapters(), f"{scratch()}/saved", "deployed"))
accepted("group_advantages: one group", lambda: group_advantages(torch.ones(2), torch.zeros(2).long()))


def outcome(row: WrongCall) -> dict[str, str] | None:
    """Return the error that a call raised, ``None`` if it went through."""
    try:
        row.call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error.args[0]) if error.args else ""}
    return None


if __name__ == "__main__":
    print(json.dumps({row.name: outcome(row) for row in [*WRONG, *ACCEPTED]}))
