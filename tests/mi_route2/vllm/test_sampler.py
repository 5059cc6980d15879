"""Completions that vLLM samples come from the policy as it is now: its adapters, its switches, no prefix of former ones."""

import importlib
import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from mi_route2 import AdapterSpec, Policy, attach, export_peft
from mi_route2.adapters import Adapters
from mi_route2.adapters.io import PEFT_WARNING
from mi_route2.rollouts import Rollouts
from mi_route2.vllm import VllmSampler
from mi_route2.vllm.client import preserving_process
from mi_route2.vllm.sampler import TOLERANCE, PolicyLora, lora_settings, refuse_stale

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm runs these tests"
)

VOCAB, END, BLOCK = 50, 2, 32
CLOSE = 2e-5
"""As between vLLM and our own engine. The moves below change log-probabilities by more than .1."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
ROOM = {"max_model_len": 256, "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 64}
LORA = AdapterSpec("lora", rank=5, quarantine_rank=3)
PROMPTS = [[3 + i % 40 for i in range(start, start + 3 * BLOCK - 5 * start)] for start in range(4)]
"""Prompts of different lengths, with whole blocks that vLLM keeps."""


def make_policy(folder: Path, config: Any = Qwen3Config, spec: AdapterSpec = LORA, *patterns: str, **sizes: Any) -> Policy:
    """Write a base model into ``folder``; return it with adapters that are off their init."""
    generator = torch.Generator().manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config(**{**SIZES, **sizes})).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.15 * torch.randn(p.shape, generator=generator) + (p.ndim == 1))
    model.save_pretrained(folder)
    policy = Policy(model, attach(model, *(patterns or ("blocks.*",)), spec=spec, generator=generator))
    move(policy.adapters)
    return policy


def move(adapters: Adapters, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for value in adapters.tensors().values():
            value += 0.1 * torch.randn(value.shape, generator=generator)


class Watched:
    """A sampler, and what vLLM reported for everything that it sampled."""

    def __init__(self, policy: Policy, folder: Path, **settings: Any):
        self.policy = policy
        self.sampler = VllmSampler(folder, dtype=torch.float32, **{**ROOM, **settings})
        self.found: list[Any] = []

    def sample(
        self, seed: int = 0, prompts: list[list[int]] = PROMPTS, temperature: float = 1.0, max_new: int = 8
    ) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        ids = self.sampler(self.policy, prompts, max_new=max_new, temperature=temperature, generator=generator, ends=(END,))
        return ids

    def watch(self) -> None:
        lora = self.sampler._lora
        assert lora is not None
        generate = lora.llm.generate

        def seen(*given: Any, **named: Any) -> Any:
            self.found = generate(*given, **named)
            return self.found

        lora.llm.generate = seen

    def gap(self) -> float:
        """The largest difference of vLLM's log-probabilities of all sampled tokens from those of the policy, in torch."""
        prompts, ids = [one.prompt_token_ids for one in self.found], [list(one.outputs[0].token_ids) for one in self.found]
        rows = Rollouts.from_lists(prompts, ids, 0)
        theirs = [
            kept[token].logprob for one in self.found for token, kept in zip(one.outputs[0].token_ids, one.outputs[0].logprobs)
        ]
        with torch.no_grad():
            return float((torch.tensor(theirs) - self.policy.logprobs(rows)[rows.predictors]).abs().max())

    def cached(self) -> list[int]:
        return [one.num_cached_tokens for one in self.found]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("base")
    made = Watched(make_policy(folder), folder)
    made.sample()
    made.watch()
    yield made
    made.sampler.close()


@needs_vllm
def test_each_sampling_is_that_of_the_adapters_and_switches_of_now(watched: Watched) -> None:
    """Also after the prefixes were kept under former adapters."""
    adapters = watched.policy.adapters
    modes: tuple[Callable[[], AbstractContextManager[None]], ...] = (adapters.full, adapters.deployed, adapters.reference)
    for turn in range(3):
        move(adapters, turn)
        for mode in modes:
            with mode():
                watched.sample(turn)
                assert watched.gap() <= CLOSE
                assert mode == adapters.reference or not any(watched.cached())
                watched.sample(turn + 50)
                assert watched.gap() <= CLOSE
                assert all(watched.cached())  # a prefix is kept while nothing changes


def turn_over(value: Tensor) -> None:
    value.data.copy_(value.data.flip(0))


def exchange(value: Tensor) -> None:
    value.data[[0, 1]] = value.data[[1, 0]]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "rows exchanged behind torch's counter": turn_over,
    "two rows exchanged": exchange,
    "added": lambda value: value.add_(0.1),
    "one number": lambda value: value.view(-1)[3].add_(0.5),
}


@needs_vllm
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["kept", "quarantine"])
def test_a_change_in_place_is_noticed_also_one_that_keeps_every_sum(watched: Watched, which: str, change: str) -> None:
    watched.sample()
    adapters = watched.policy.adapters
    name = next(n for n in adapters.tensors() if n.startswith(which) and n.endswith("mlp.down.B"))
    with torch.no_grad():
        CHANGES[change](adapters.tensors()[name])
    watched.sample()
    assert watched.gap() <= CLOSE
    assert not any(watched.cached())


TRAPS: dict[str, Callable[[Any, str], Any]] = {
    "read once": lambda former, folder: former,
    "the former number": lambda former, folder: lora_request("another", former.lora_int_id, folder),
    "the former name and folder": lambda former, folder: lora_request(
        former.lora_name, former.lora_int_id + 1000, former.lora_path
    ),
    "in place": lambda former, folder: lora_request(former.lora_name, former.lora_int_id, former.lora_path, load_inplace=True),
}
"""Former request and a new folder -> request under which vLLM samples from former adapters, or with prefixes under them."""


def lora_request(*given: Any, **named: Any) -> Any:
    return importlib.import_module("vllm.lora.request").LoRARequest(*given, **named)


@needs_vllm
@pytest.mark.parametrize("trap", TRAPS)
def test_stale_adapters_are_an_error_of_the_sampling(
    watched: Watched, trap: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM says nothing in any of these."""
    lora = watched.sampler._lora
    assert lora is not None
    watched.sample()
    move(lora.adapters, 8)
    for folder in (tmp_path / "now", lora._request.lora_path):
        export_peft(lora.adapters, folder, which="full", overwrite=True)
    stale = TRAPS[trap](lora._request, str(tmp_path / "now"))
    monkeypatch.setattr(lora, "request", lambda: stale)
    with pytest.raises(RuntimeError, match=r"it runs other weights \(stale adapters, or another base\)"):
        watched.sample()
    assert watched.gap() > 0.1
    monkeypatch.undo()
    lora._read = {}
    lora.llm.reset_prefix_cache()
    watched.sample()
    assert watched.gap() <= CLOSE


@needs_vllm
def test_completions_have_the_probabilities_of_the_policy_at_a_temperature(watched: Watched) -> None:
    """First tokens of 2,000 completions of one prompt against torch's softmax, by chi-square; and an end ends a completion."""
    prompts, temperature, n = [PROMPTS[3]] * 2000, 2.0, 2000
    ids = watched.sample(4, prompts, temperature, max_new=1)
    rows = Rollouts.from_lists(prompts[:1], ids[:1], 0)
    with torch.no_grad():
        expected = n * (watched.policy.logits(rows)[0, len(prompts[0]) - 1] / temperature).softmax(-1)
    counts = Counter(token for (token,) in ids)
    chi = sum((counts[v] - float(expected[v])) ** 2 / float(expected[v]) for v in range(VOCAB) if expected[v] > 5)
    seen = int((expected > 5).sum())
    assert seen > 10
    assert chi < seen + 5 * (2 * seen) ** 0.5
    long = watched.sample(5, [PROMPTS[3]] * 64, 2.0, max_new=40)
    assert any(END in one for one in long)
    assert all(END not in one[:-1] and (one[-1] == END or len(one) == 40) for one in long)


@needs_vllm
def test_a_completion_that_would_not_fit_is_refused_and_not_cut(watched: Watched) -> None:
    """vLLM ends a completion at its ``max_model_len`` as if that were ``max_new``."""
    prompts = [PROMPTS[1], PROMPTS[0]]
    room = ROOM["max_model_len"] - len(PROMPTS[0])
    for one in watched.sample(8, prompts, max_new=room):
        assert one[-1] == END or len(one) == room
    with pytest.raises(ValueError, match=r"need 257 positions, and this vLLM has 256: .*max_model_len"):
        watched.sample(8, prompts, max_new=room + 1)
    with pytest.raises(TypeError, match=r"max_new must be int, not .* 2\.5"):
        watched.sample(8, prompts, max_new=2.5)  # pyright: ignore
    with pytest.raises(ValueError, match=rf"a prompt has the token {VOCAB}, and the model knows 0 to {VOCAB - 1}"):
        watched.sample(8, [*prompts, [3, VOCAB]])


@needs_vllm
def test_an_interrupted_sampling_leaves_nothing_to_the_next(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = watched.sampler._lora
    assert lora is not None
    expected = watched.sample(9)
    lora.llm.reset_prefix_cache()
    (model,) = lora.llm.collective_rpc(lambda worker: worker.model_runner.get_model())

    def stop(*_given: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            watched.sample(9)
    assert not lora.llm.llm_engine.has_unfinished_requests()
    assert watched.sample(9) == expected
    assert watched.gap() <= CLOSE


@needs_vllm
def test_a_generator_draws_the_same_completions_again(watched: Watched) -> None:
    """On one machine in one process; between machines no bit is promised."""
    first = watched.sample(6)
    assert watched.sample(6) == first != watched.sample(7)


def test_what_starts_vllm_leaves_random_numbers_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a GPU whose first user is vLLM. Python's cannot be compared over a sampling here: checks of types draw from them."""
    torch.manual_seed(5)
    on_gpu: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(on_gpu))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", on_gpu.append)
    before = torch.get_num_threads(), torch.set_num_threads, random.getstate(), str(np.random.get_state())
    with preserving_process():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        torch.set_num_threads = print
    assert (torch.get_num_threads(), torch.set_num_threads, random.getstate(), str(np.random.get_state())) == before
    assert torch.initial_seed() == on_gpu[-1] == 5


@needs_vllm
def test_the_folder_says_that_it_must_not_ship_and_goes_with_the_sampler(tmp_path: Path) -> None:
    """And a sampler that was closed starts again, here for another policy, whose base is not that of its folder."""
    watched = Watched(make_policy(tmp_path / "base"), tmp_path / "base")
    torch.manual_seed(5)
    before = str(np.random.get_state())
    watched.sample()  # starts vLLM, which seeds both
    assert (torch.initial_seed(), str(np.random.get_state())) == (5, before)
    lora = watched.sampler._lora
    assert lora is not None
    first = Path(lora._request.lora_path)
    assert (first / PEFT_WARNING).is_file()
    move(watched.policy.adapters)
    watched.sample()
    second = Path(lora._request.lora_path)
    assert second.parent == first.parent
    assert [one.name for one in second.parent.iterdir()] == [second.name]
    with pytest.raises(ValueError, match="this sampler was started for another policy's adapters: close it"):
        watched.sampler(
            make_policy(tmp_path / "other"), PROMPTS, max_new=1, temperature=1.0, generator=torch.Generator(), ends=(END,)
        )
    watched.sampler.close()
    assert not first.parent.exists()
    watched.policy = make_policy(tmp_path / "third", hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act is 'gelu' in the model's config and 'silu' in"):
        watched.sample()


KINDS: dict[str, tuple[Any, AdapterSpec, tuple[str, ...]]] = {
    "SVD of full rank": (Qwen3Config, AdapterSpec("svd", quarantine_rank=3), ()),
    "shared": (LlamaConfig, AdapterSpec("svd", rank=6, quarantine="shared"), ()),
    "no quarantine": (LlamaConfig, AdapterSpec("lora", rank=2, quarantine="none"), ("blocks.*.mlp.*",)),
    "unembedding": (Qwen3Config, LORA, ("blocks.*", "unembed")),
}


@needs_vllm
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_one_lora(kind: str, tmp_path: Path) -> None:
    config, spec, patterns = KINDS[kind]
    watched = Watched(make_policy(tmp_path, config, spec, *patterns), tmp_path)
    try:
        watched.sample()
        watched.watch()
        for turn in range(2):
            move(watched.policy.adapters, turn)
            for mode in (watched.policy.adapters.full, watched.policy.adapters.deployed):
                with mode():
                    watched.sample()
                    assert watched.gap() <= CLOSE
    finally:
        watched.sampler.close()


def test_a_rank_is_rounded_up_to_what_vllm_has_and_refused_above(tmp_path: Path) -> None:
    """The room is that of any later training: an SVD starts with rank 1 and can grow to that of its weight."""
    for spec, rank in (
        (LORA, 8),
        (AdapterSpec("lora", rank=6, quarantine_rank=3), 16),
        (AdapterSpec("lora", rank=1, quarantine="none"), 1),
        (AdapterSpec("lora", rank=9, quarantine="shared"), 16),
        (AdapterSpec("svd", quarantine_rank=3), 128),
    ):
        policy = make_policy(tmp_path / f"{rank} {spec.kept} {spec.quarantine}", spec=spec)
        assert lora_settings(policy.adapters)["max_lora_rank"] == rank
    wide = make_policy(tmp_path / "wide", spec=AdapterSpec("svd"), hidden_size=520, intermediate_size=520, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"at model.layers.0.mlp.*are a LoRA of rank 524, and vLLM runs 512 at most: attach them"):
        lora_settings(wide.adapters)


def test_what_the_sampler_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vLLM does not compute in torch\.float64: choose from float32, bfloat16"):
        VllmSampler(tmp_path, dtype=torch.float64)
    with pytest.raises(ValueError, match="checked is 0: without a check stale adapters would not be noticed"):
        VllmSampler(tmp_path, dtype=torch.float32, checked=0)
    watched = Watched(make_policy(tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"temperature = 0\.0 is not positive"):
        watched.sample(temperature=0.0)
    with pytest.raises(ValueError, match=r"temperature = 0\.009 .* vLLM would sample at 0\.01"):
        watched.sample(temperature=0.009)
    with pytest.raises(ValueError, match="max_new = 0 is not positive"):
        watched.sample(max_new=0)
    norm = watched.policy.model.get_parameter("model.norm.weight").requires_grad_()
    with pytest.raises(ValueError, match=r"would sample without what model\.norm\.weight learns: freeze it"):
        PolicyLora(None, watched.policy.adapters).request()
    with torch.no_grad():
        norm[5] += 1e-3
    with pytest.raises(ValueError, match=r"model\.norm\.weight is another one in .*, from which vLLM reads the base"):
        watched.sample()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_check_counts_the_mean_and_the_largest_gap_and_what_is_no_number(dtype: torch.dtype) -> None:
    mean, largest = TOLERANCE[dtype]
    ours = torch.linspace(-5, 0, 200)
    refuse_stale(ours + 0.9 * mean, ours, dtype)
    for wrong in (ours + 1.1 * mean, torch.cat([ours[:-1], ours[-1:] + 1.1 * largest]), torch.full_like(ours, torch.nan)):
        with pytest.raises(RuntimeError, match="vLLM gives tokens that it sampled log-probabilities that are"):
            refuse_stale(wrong, ours, dtype)


def test_the_mode_of_adapters_is_the_context_that_they_are_in(tmp_path: Path) -> None:
    adapters = make_policy(tmp_path).adapters
    assert adapters.mode == "full"
    for mode in (adapters.deployed, adapters.reference, adapters.full):
        with mode():
            assert adapters.mode == mode.__name__
    assert adapters.mode == "full"
    assert make_policy(tmp_path / "other", spec=AdapterSpec("lora", rank=2, quarantine="none")).adapters.mode == "deployed"
