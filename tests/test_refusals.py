"""Refusals: each wrong call raises one line, which names what is wrong and what to give."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mi_route2 import (
    AdapterSpec,
    Policy,
    Rollouts,
    Site,
    attach,
    load,
    load_adapters,
    open_host,
    save_adapters,
)
from mi_route2.adapters import Adapters, from_pretrained, save_pretrained
from mi_route2.checks import checked
from mi_route2.engine import Engine, Request, Sampling
from mi_route2.hosts.base import Host
from mi_route2.patching import Grid, sweep
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.probes import store
from mi_route2.probes.auroc import auroc
from mi_route2.probes.dataset import Dataset
from mi_route2.probes.direction import DirectionFitter
from mi_route2.probes.lda import LdaFitter
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.routing import (
    MaskRoute,
    MaskSpec,
    PairBatch,
    StepContext,
    TrainBatch,
    group_advantages,
)
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection, record
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering

B, S, VOCAB, WIDTH = 4, 7, 32, 16
RESID = Site(0, "resid_pre")
SPEC = AdapterSpec("lora", rank=2, quarantine_rank=2)


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


NAN = float("nan")
LOGPROBS = ("old_logprobs", "reference_logprobs")

REFUSED: list[tuple[Callable[[], Any], str]] = [
    # Adapters
    (lambda: attach(host(), "blocks.*", generator=seeded()), "model must be Module, not TorchHost"),
    (lambda: attach(bare(), "q_proj", generator=seeded()), "blocks.*.attn.q"),
    (lambda: attach(bare(), "*.down_proj", generator=seeded()), "blocks.*.mlp.down"),
    (lambda: attach(bare(), "model.layers.1.self_attn.v_proj", generator=seeded()), "blocks.1.attn.v"),
    (lambda: attach(bare(), "all-linear", generator=seeded()), "blocks.*"),
    (lambda: attach(bare(), "blocks.*", generator=0), "generator must be Generator | None, not the in"),
    (lambda: attach(bare(), "blocks.*", generator=seeded(), expect=3), "selected 14 Linears"),
    (lambda: attach(bare(), generator=seeded()), "blocks.*.attn.*"),
    (lambda: attach(adapters().model, "blocks.*", generator=seeded()), "adapters.detach()"),
    (lambda: attach(nn.Embedding(3, 3), "*", generator=seeded()), "no nn.Linear"),
    (lambda: attach(bare(), "blocks.*", spec=AdapterSpec("lora", rank=99), generator=seeded()), "outside 1..16"),
    (lambda: host().attach("q_proj", generator=seeded()), "blocks.*.attn.q"),
    # Sites
    (lambda: Site("0", "resid_mid"), "layer"),
    (lambda: Site(0, "resid_middle"), "resid_mid"),
    (lambda: Site(-1, "resid_mid"), "count from 0"),
    (lambda: Site.parse("model.layers.0"), "blocks.3.resid_mid"),
    # Hosts
    (lambda: open_host("tl", bare()), "transformer_lens"),
    (lambda: open_host("torch", nn.Linear(2, 2)), "no model of transformers"),
    (lambda: load("./nothing-here"), "there is no folder"),
    (lambda: load("./nothing-here", host="tl"), "transformer_lens"),
    (lambda: host().capture("blocks.0.resid_mid", tokens()), "sites must be Iterable[Site], not the str"),
    (lambda: host().capture([Site(7, "resid_mid")], tokens()), "0..1"),
    (lambda: host().capture([Site(0, "kept_a", "attn.q")], tokens()), "attach"),
    (lambda: host().capture([Site(0, "z")], tokens()[0]), "tokens must be Int[Tensor, 'b s'], not a Te"),
    (lambda: host().capture([Site(0, "z")], tokens() + VOCAB), "0..31"),
    (lambda: host().capture([Site(0, "z")], tokens() * -100), "0..31"),
    (lambda: host().capture([Site(0, "z")], tokens(), attention().long() * 2), "0 and 1"),
    (lambda: host().logits([[1, 2, 3]]), "tokens must be Int[Tensor, 'b s'], not the"),
    (lambda: host().logits(tokens() + VOCAB), "0..31"),
    (lambda: host().logits(tokens(), attention().long() * 2), "0 and 1"),
    (lambda: host().hooks({Site(0, "z"): torch.zeros(3)}).__enter__(), "edits must be Mapping[Site, Callable[[Tens"),
    # Rollouts, batches, policies
    (lambda: Rollouts.from_lists([], [], 0), "at least one"),
    (lambda: Rollouts.from_lists([[1]], [[2], [3]], 0), "1 prompts and 2 completions"),
    (lambda: Rollouts.from_lists([[1], [1]], [[2], []], 0), "rollout 1"),
    (lambda: Rollouts.from_lists([[]], [[2]], 0), "prompt token"),
    (lambda: Rollouts.from_lists(["def"], ["pass"], 0), "tokenizer"),
    (lambda: Rollouts.from_lists([1, 2], [3, 4], 0), "a list for each rollout"),
    (lambda: Rollouts.from_lists([[1.5]], [[2.5]], 0), "token ids"),
    (lambda: Rollouts(tokens().float(), attention(), completion()), "tokens must be Int[Tensor, 'b s'], not a Te"),
    (lambda: Rollouts(tokens(), attention().long() * 3, completion()), "0 and 1"),
    (lambda: Rollouts(tokens(), ~completion(), completion()), "subset of attention"),
    (lambda: batch(rollouts=rollouts().rows(torch.tensor([], dtype=torch.long))), "one per rollout"),
    (lambda: batch().rows(torch.zeros(0, dtype=torch.long)), "no rollouts"),
    (lambda: TrainBatch(rollouts(), teacher=torch.tensor([True])), "1 teacher for 4 rollouts: give one per rollout"),
    (lambda: batch(rewards=torch.tensor([1, 0, 1, 0])), "rewards must be Float[Tensor, 'b'] | None, not a Te"),
    (lambda: batch(rewards=torch.tensor([1.0, NAN, 1.0, 0.0])), "rewards"),
    (lambda: batch(advantages=torch.tensor([1.0, NAN, 1.0, 0.0])), "advantages"),
    (lambda: batch(advantages=torch.full((B,), float("inf"))), "advantages"),
    (lambda: batch(old_logprobs=torch.zeros(B, S + 1)), "one per token"),
    (lambda: batch(**dict.fromkeys(LOGPROBS, torch.full((B, S), NAN))), "old_logprobs"),
    (lambda: group_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0])), "rewards"),
    (lambda: group_advantages(torch.zeros(0), torch.zeros(0).long()), "no rollouts"),
    (lambda: Policy(bare(), adapters()), "attach("),
    (lambda: host().policy(adapters()), "attach("),
    (lambda: headless().logits(rollouts()), "load the model with its head"),
    (lambda: Policy(host(), adapters()), "model must be Module, not TorchHost"),
    (lambda: policy().logprobs(Rollouts(tokens() + VOCAB, attention(), completion())), "0..31"),
    (lambda: PairBatch(rollouts(), rollouts().rows(torch.tensor([0])), "x"), "are not pairs"),
    (lambda: StepContext(seeded(), micro=0), "micro"),
    (lambda: StepContext(seeded(), micro=-1), "micro"),
    # Routes
    (lambda: MaskRoute(pairs()), "MaskRoute: missing a required argument: "),
    (lambda: MaskRoute.from_pairs(MaskSpec(), pairs()), "pairs must be PairBatch, not MaskSpec"),
    (lambda: MaskRoute.from_flags(labels(), want_unrouted="no"), "want_unrouted"),
    (lambda: MaskRoute.from_pairs(pairs()).refresh(policy()), "step"),
    (lambda: by_flags().begin(policy(), batch()), "MaskRoute.begin: missing a required argu"),
    (lambda: host().logits(tokens().short()), ".long()"),
    # Sweeps
    (lambda: sweep(bare(), sites="resid_pre", **QUESTION), "host must be Host, not LlamaForCausalLM"),
    (lambda: ask(sites="kept_out"), "attach"),
    (lambda: ask(sites="blocks.*.attn.q.kept_a"), "attach"),
    (lambda: ask(sites="resid"), "resid_pre"),
    (lambda: ask(sites=[]), "at least one"),
    (lambda: ask(clean="Paris"), "tokenizer"),
    (lambda: ask(clean=tokens()), "one row of token ids"),
    (lambda: ask(corrupt=[]), "has no tokens"),
    (lambda: ask(answer=None), "answer"),
    (lambda: ask(metric="accuracy"), "logit_diff"),
    (lambda: ask(answer=VOCAB), "0..31"),
    (lambda: ask(alpha=NAN), "alpha"),
    (lambda: ask(positions=[9]), "0..3"),
    (lambda: ask(batch=0), "batch"),
    (lambda: ask(how="fast"), "resumed"),
    (lambda: ask(at=99), "0..3"),
    (lambda: ask(heads=True), "has heads"),
    (lambda: Grid.load("./nothing.safetensors"), "nothing.safetensors"),
    # The engine
    (lambda: Engine(host(), rows=0), "rows"),
    (lambda: engine().submit((1, 2, 3)), "request must be Request, not the tuple"),
    (lambda: Request("hello"), "token ids"),
    (lambda: engine().submit(Request(())), "prompt"),
    (lambda: Request(tokens()), "one row of token ids"),
    (lambda: engine().submit(Request((VOCAB,))), "31"),
    (lambda: Request((1,), capture=("blocks.0.z",)), "Capture"),
    (lambda: TokenSelection("end"), "generated"),
    (lambda: Patch("blocks.0.z", 3, "zeros"), "site must be an instance of Site, not 'bl"),
    (lambda: engine().submit(Request((1,), steering=Steering(base=(Steer(Site(0, "resid_pre"), [1.0]),)))), "16"),
    (lambda: Sampling(max_new=0), "max_new"),
    (lambda: Sampling(temperature="hot"), "temperature"),
    (lambda: Sampling(top_p=2.0), "top_p"),
    (lambda: Sampling(seed="x", temperature=1.0), "seed"),
    (lambda: engine().cancel(99), "99"),
    # Files
    (lambda: save_adapters(bare(), scratch() / "a"), "adapters must be Adapters, not LlamaForCausal"),
    (lambda: save_adapters(adapters(), scratch() / "a", "deploy"), "deployed"),
    (lambda: save_pretrained(adapters(), scratch() / "a", "kept"), "deployed"),
    (lambda: load_adapters(adapters(), "./nothing"), "nothing"),
    (lambda: from_pretrained(bare(), "./nothing"), "nothing"),
    # Probes
    (lambda: fitted(MeanDifferenceFitter(), [[1.0]], [[True]], [True]), "h must be Float[Tensor, 'b s d'], not"),
    (lambda: fitted(LdaFitter(), hidden(), attention(), labels().long() * 2), "0 and 1"),
    (lambda: fitted(MeanDifferenceFitter(), hidden(), attention(), torch.ones(B).bool()), "positive and negative"),
    (lambda: LdaFitter().fit(), "positive and negative"),
    (lambda: fitted(LdaFitter(), hidden() * NAN, attention(), labels()), "NaN"),
    (lambda: DirectionFitter(torch.ones(3)).fit().score_tokens(hidden()), "5 features"),
    (lambda: DirectionFitter(torch.ones(5), "dot"), "cosine"),
    (lambda: auroc(np.arange(2), np.array([False, True])), "scores must be Float[ndarray, 'n'], not a n"),
    (lambda: auroc(np.zeros(3), np.zeros(2, dtype=bool)), "positive must be Bool[ndarray, 'n'] | Int[nda"),
    (lambda: auroc(np.array([NAN, 1.0]), np.array([True, False])), "finite"),
    (lambda: store.from_pretrained(Path("./nothing")), "nothing"),
    (lambda: Dataset({"a": hidden()}, attention(), [True], ["x"] * B), "one per rollout"),
    # Specs, runs and grids
    (lambda: Steering(base=Steer(RESID, [1.0])), "(Steer(...),)"),
    (lambda: Clamp(RESID, [1.0], high="a"), "number"),
    (lambda: Monitor(RESID, [1.0], gates="blocks.0.z"), "Site"),
    (lambda: TokenSelection(positions=3), "(3, 40)"),
    (lambda: FromRun(3, 0), "run"),
    (lambda: RunStore("1GB"), "int"),
    (lambda: Sampling(stop=3), "stop=('END',)"),
    (lambda: adapters().scored("q_proj"), "blocks.1.attn.q"),
    (lambda: ask().cell(99, 0), "2 sites and 4 columns"),
    (lambda: rollouts().rows(torch.tensor([99])), "0..3"),
    (lambda: rollouts().rows(torch.ones(3).bool()), "a boolean for each"),
    (lambda: batch().rows(torch.ones(3)), "whole numbers"),
    (lambda: MeanDifferenceFitter("tokens"), "unit must be Literal['rollout', 'token'],"),
]


@pytest.mark.parametrize(("call", "fragment"), REFUSED, ids=[fragment for _, fragment in REFUSED])
def test_a_wrong_call_raises_one_line_that_says_what_to_give(call: Callable[[], Any], fragment: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, OSError, RuntimeError)) as caught:
        call()
    message = str(caught.value.args[0] if len(caught.value.args) == 1 else caught.value)
    assert fragment in message
    assert "\n" not in message
    assert len(message) < 600


ACCEPTED: dict[str, Callable[[], Any]] = {
    "from_flags: a function": lambda: MaskRoute.from_flags(lambda given: given.rewards > 0.5),
    "from_flags: by token": lambda: MaskRoute.from_flags(completion()),
    "record: int64 mask": lambda: record(host(), [RESID], tokens(), attention().long(), store=RunStore(), runs=list("abcd")),
    "capture: int64 mask": lambda: host().capture([Site(0, "z")], tokens(), attention().long()),
    "logits: int64 mask": lambda: host().logits(tokens(), attention().long()),
    "logits: int32 tokens": lambda: host().logits(tokens().int()),
    "rollouts: int64 masks": lambda: Rollouts(tokens(), attention().long(), completion().long()),
    "rollouts: masks of uint8": lambda: Rollouts(tokens(), attention().to(torch.uint8), completion()),
    "from_lists: tuples": lambda: Rollouts.from_lists(((1, 2), (3,)), ((4,), (5, 6)), 0),
    "from_lists: tensors": lambda: Rollouts.from_lists([torch.tensor([1, 2])], [torch.tensor([3])], 0),
    "from_lists: numpy": lambda: Rollouts.from_lists([np.array([1, 2])], [np.array([3])], 0),
    "batch: float64": lambda: batch(rewards=torch.ones(B).double(), advantages=torch.ones(B).double()),
    "batch: old logprobs alone": lambda: batch(old_logprobs=torch.zeros(B, S)),
    "batch: int64 teacher": lambda: batch(teacher=torch.tensor([0, 1, 0, 0])),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_another_form_of_the_same_argument_is_accepted(name: str) -> None:
    ACCEPTED[name]()


def test_axes_of_one_name_have_one_length_and_numbers_of_numpy_are_numbers() -> None:
    @checked
    def both(a: Float[Tensor, "b s"], b: Float[Tensor, " b"], *more: int, scale: float = 1.0) -> float:
        return sum(more) * scale

    assert both(torch.zeros(2, 3), torch.zeros(2), np.int64(2), 3, scale=2) == 10
    with pytest.raises(ValueError, match="both: b must be Float"):
        both(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(TypeError, match=r"more must be int, not the float 2\.5"):
        both(torch.zeros(2, 3), torch.zeros(2), 2.5)  # pyright: ignore[reportArgumentType]
