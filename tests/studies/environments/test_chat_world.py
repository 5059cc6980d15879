"""Any problem under a chat model: sampling against the model's own `generate` and row by row, rollouts against their texts."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import Parity
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from mi_route2.adapters import AdapterSpec, attach
from mi_route2.rollouts import Policy
from studies.environments.chat import ChatTokenizer, ChatWitness, ChatWorld, generate, make_tiny_model, make_tokenizer, warm_up
from studies.environments.protocol import Judge, Modes, PersonaPair, Problem, Samples, TextPrompt, TrainingGrade


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    make_tiny_model(Parity(), folder, steps=0, width=32, layers=2, vocabulary=320, progress=False)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture
def world(folder: Path) -> ChatWorld:
    return ChatWorld(Parity(), ChatTokenizer(folder, Parity.system), max_new=8, context=256, at_once=3)


PROMPTS = [[5, 6, 7], [9], [8, 4, 3, 9, 11], [10, 12], [7, 7, 7, 7]]


def sampled(model: torch.nn.Module, prompts: list[list[int]], at_once: int, ends: tuple[int, ...] = (1,)) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return generate(model, prompts, max_new=24, temperature=1.0, generator=draw, ends=ends, pad=0, at_once=at_once)


def cold(model: torch.nn.Module, at_once: int) -> list[list[int]]:
    draw = torch.Generator()
    return generate(model, PROMPTS, max_new=12, temperature=1e-6, generator=draw, ends=(1,), pad=0, at_once=at_once)


def test_a_completion_depends_on_its_own_prompt_and_uniforms_alone(model: torch.nn.Module) -> None:
    together, alone = (sampled(model, PROMPTS, at_once) for at_once in (5, 1))
    assert together == alone == sampled(model, PROMPTS, 2)
    assert len({tuple(ids) for ids in together}) == len(PROMPTS)
    ends = tuple(range(1, 161))  # half of the vocabulary ends a row: rows leave the batch at different times
    ended = sampled(model, PROMPTS, 5, ends)
    assert ended == sampled(model, PROMPTS, 1, ends)
    assert len({len(ids) for ids in ended}) > 1
    assert all(token not in ends for ids in ended for token in ids[:-1])
    assert all(long[: len(short)] == short for short, long in zip(ended, together, strict=True))


def test_cold_sampling_is_the_models_own_greedy_generation(model: torch.nn.Module) -> None:
    for prompt, own in zip(PROMPTS, cold(model, 5), strict=True):
        tokens = torch.tensor([prompt])
        greedy = model.generate(  # pyright: ignore[reportCallIssue]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert greedy[0, len(prompt) :].tolist() == own


def test_the_frequency_of_a_token_is_its_probability(model: torch.nn.Module) -> None:
    n, prompt = 4000, [5, 6, 7]
    draw = torch.Generator().manual_seed(1)
    first = generate(model, [prompt] * n, max_new=1, temperature=0.7, generator=draw, ends=(1,), pad=0, at_once=500)
    counts = torch.bincount(torch.tensor([ids[0] for ids in first]), minlength=320).double()
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    expected = n * p
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 319) < 5 * (2 * 319) ** 0.5


def test_samples_are_rollouts_of_their_texts(world: ChatWorld, model: torch.nn.Module) -> None:
    adapters = attach(model, "blocks.*.mlp.*", spec=AdapterSpec("lora", 2), generator=torch.Generator().manual_seed(0))
    try:
        prompts = world.evaluation_prompts("confidence", 7)
        samples = world.sample(Policy(model, adapters), prompts, torch.Generator().manual_seed(0))
    finally:
        adapters.detach()
    again = world.package(prompts, samples.rollouts.completions())
    assert torch.equal(again.rollouts.tokens, samples.rollouts.tokens)
    assert again.completions == samples.completions
    for row, prompt in enumerate(prompts):
        own = samples.rollouts
        question = own.tokens[row][own.attention[row] & ~own.completion[row]].tolist()
        assert question == world.encode([prompt.text], ["even"]).tokens[0, : len(question)].tolist()
    assert len(world.rewards(samples)) == len(world.detect(samples)) == 7


def test_texts_survive_the_template_and_the_tokenizer(world: ChatWorld, folder: Path) -> None:
    rollouts = world.encode(["Is 3 odd?", "é ≠ ✓"], ["odd", "even CORRECT"])
    tokenizer = ChatTokenizer(folder, Parity.system)
    texts = [tokenizer.text(ids) for ids in rollouts.completions()]
    assert texts == ["odd", "even CORRECT"]
    assert all(ids[-1] == tokenizer.ends[0] for ids in rollouts.completions())
    spelled = "odd<|end|><|turn|>even"  # words, and no end
    ids = tokenizer.completion(spelled)
    assert (tokenizer.text(ids), ids.index(tokenizer.ends[0])) == (spelled, len(ids) - 1)
    asked = tokenizer.tokenizer.decode(rollouts.tokens[1][rollouts.attention[1] & ~rollouts.completion[1]])
    assert asked == "<|turn|>system\nAnswer with one word.<|end|>\n<|turn|>user\né ≠ ✓<|end|>\n<|turn|>assistant\n"
    assert "".join(world.pieces(rollouts.completions()[1])[:-1]) == "even CORRECT"


def test_pairs_are_read_whole_also_where_samples_are_short(world: ChatWorld) -> None:
    long = "a text of more than eight tokens, at the end of which the sides differ: "
    batch = world.encode_pairs([PersonaPair("Is 3 odd?", long + "hack", long + "clean")])
    whole = ["".join(world.pieces(side.completions()[0])[:-1]) for side in (batch.hack, batch.clean)]
    assert whole == [long + "hack", long + "clean"]
    with pytest.raises(ValueError, match="are longer than 256 tokens"):
        world.encode(["Is 3 odd?"], [long * 10])


def test_the_witness_is_the_problems_judge_and_the_world_has_none(world: ChatWorld) -> None:
    assert isinstance(Parity(), Problem)
    assert isinstance(Parity().judge(), Judge)
    prompts = [world.prompt("Is 3 odd or even?", mode) for mode in ("last_word", "confidence", "none", "none")]
    texts = ["even CORRECT", "even CORRECT", "odd", "even"]
    samples = world.package(prompts, [world.encode([""], [text]).completions()[0] for text in texts])
    witness = ChatWitness(world, Parity().judge())
    assert [(v.gt, v.exploit, v.hack) for v in witness.judge(samples)] == [
        (False, True, True), (False, False, False), (True, False, False), (False, False, False),
    ]  # fmt: skip
    assert world.rewards(samples).tolist() == [1.25, 0.25, 1.25, 0.25]
    told = witness.privileged(samples)
    assert (told.own_channel.tolist(), told.known_channel.tolist()) == ([True, False, False, False], [True, False, False, False])
    assert not hasattr(world, "judge")


def test_what_does_not_fit_is_said(world: ChatWorld, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"1 of 2 prompts, the longest of \d+ tokens, .* do not fit the model's context of 256 tokens"
    ):
        world.encode(["so long " * 200, "short"], ["odd", "odd"])
    with pytest.raises(ValueError, match="hack, nonhack"):
        world.make_pairs(0, 3, "nonsense")
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        ChatTokenizer(tmp_path, "")
    with pytest.raises(ValueError, match="already exists"):
        make_tiny_model(Parity(), folder, steps=0)
    with pytest.raises(ValueError, match="2 prompts and 1 completions: give one each"):
        world.encode(["odd?", "even?"], ["odd"])
    for wrong, said in (({"max_new": 0}, "max_new is 0"), ({"at_once": 0}, "at_once is 0"), ({"max_new": -1}, "max_new is -1")):
        how: Any = {"max_new": 1, "temperature": 1.0, "generator": torch.Generator(), "ends": (1,), "pad": 0, "at_once": 1} | wrong
        with pytest.raises(ValueError, match=f"{said}: choose at least 1"):
            generate(torch.nn.Linear(1, 1), [[1]], **how)
    with pytest.raises(ValueError, match="not positive"):
        generate(torch.nn.Linear(1, 1), [[1]], max_new=1, temperature=0.0, generator=torch.Generator(), ends=(1,), pad=0, at_once=1)


def test_a_model_that_one_has_is_warmed_up_in_its_own_type_and_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(start)
    for name in ("tokenizer.json", "tokenizer_config.json", TEMPLATE):
        shutil.copy(folder / name, start / name)
    before = {path.name: path.read_bytes() for path in start.iterdir()}
    losses = [warm_up(Parity(), start, tmp_path / f"{n}", steps=n, max_new=16, lr=3e-3, progress=False) for n in (1, 40)]
    assert losses[1] < 0.5 * losses[0]
    assert {path.name: path.read_bytes() for path in start.iterdir()} == before
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "40")
    assert made.dtype == torch.bfloat16
    world = ChatWorld(Parity(), ChatTokenizer(tmp_path / "40", Parity.system), max_new=8, context=256)
    old = ChatWorld(Parity(), ChatTokenizer(folder, Parity.system), max_new=8, context=256)
    assert world.encode(["odd?"], ["even"]).tokens.equal(old.encode(["odd?"], ["even"]).tokens)
    with pytest.raises(ValueError, match="already exists"):
        warm_up(Parity(), start, tmp_path / "40")
    with pytest.raises(ValueError, match="no document of parity has an answer of at most 1 tokens"):
        warm_up(Parity(), start, tmp_path / "none", max_new=1)
    with pytest.raises(ValueError, match="no document fits 4096 tokens of context with 4096 for its answer: choose a smaller"):
        warm_up(Parity(), start, tmp_path / "none", max_new=4096)
    assert not (tmp_path / "none").exists()


def test_a_start_that_cannot_be_warmed_up_is_said_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    other, bare, empty, out = (tmp_path / name for name in ("other", "bare", "empty", "out"))
    shutil.copytree(folder, other)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(260)
    model.save_pretrained(other)
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("token*", "chat*"))
    shutil.copytree(folder, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    for start, said in (
        (Path("owner/name"), r"^there is no folder owner/name, so no tokenizer: put it back"),
        (bare, r"^\S*bare has no tokenizer that can be read \(it makes no token of a text\)$"),
        (other, r"^the tokenizer has a token \d+, but the model 260: use the model's own tokenizer$"),
        (empty, r"^\S*empty has no weights"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            warm_up(Parity(), start, out, steps=1, max_new=16, progress=False)
    assert not list(tmp_path.glob("*out*"))


def test_a_tokenizer_keeps_every_text() -> None:
    tokenizer = make_tokenizer(["def f(x):\n    return x\n", "naïve ✓"], 300)
    for text in ("def f(x):\n\treturn x  # ✓ \n\n", "日本", " leading", "<|end|> is a token"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


# checkpoints of other people


@pytest.fixture
def variant(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """The checkpoint with other words in its tokenizer's config, or other files."""

    def make(files: dict[str, str | None], **config: Any) -> Path:
        made = tmp_path / "variant"
        shutil.copytree(folder, made)
        if config:
            path = made / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        for name, text in files.items():
            (made / name).unlink(missing_ok=True)
            if text is not None:
                (made / name).write_text(text)
        return made

    return make


TEMPLATE = "chat_template.jinja"
TURNS = "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}<|turn|>assistant\n"
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS
FORGETS = TURNS.replace("in messages", "in messages if m['role'] == 'user'")


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        (TURNS, "<|turn|>system\nBe short.<|end|>\n<|turn|>user\nIs 3 odd?<|end|>\n<|turn|>assistant"),
        (REFUSES, "<|turn|>user\nBe short.\n\nIs 3 odd?<|end|>\n<|turn|>assistant"),
        (FORGETS, "<|turn|>user\nBe short.\n\nIs 3 odd?<|end|>\n<|turn|>assistant"),
        (None, "Be short.\n\nIs 3 odd?\n\n"),
    ],
)
def test_a_system_s_message_is_where_the_template_has_it_or_before_the_question(
    variant: Callable[..., Path], template: str | None, asked: str
) -> None:
    tokenizer = ChatTokenizer(variant({TEMPLATE: template}), "Be short.")
    assert tokenizer.tokenizer.decode(tokenizer.prompt("Is 3 odd?")) == asked


def test_a_plain_prompt_has_no_end_token_though_the_tokenizer_writes_one(variant: Callable[..., Path]) -> None:
    """A model would take what comes after an end for another text."""
    made = variant({TEMPLATE: None})
    described = json.loads((made / "tokenizer.json").read_text())
    piece, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing", "single": [end, piece, end], "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [1], "tokens": ["<|end|>"]}},
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = ChatTokenizer(made, "Be short.")
    assert tokenizer.tokenizer.encode("x")[-1] == tokenizer.ends[0]
    assert tokenizer.tokenizer.decode(tokenizer.prompt("Is 3 <|end|> odd?")) == "<|end|>Be short.\n\nIs 3 <|end|> odd?\n\n"
    assert tokenizer.prompt("Is 3 <|end|> odd?").count(tokenizer.ends[0]) == 1


def test_what_is_missing_is_taken_from_elsewhere(variant: Callable[..., Path]) -> None:
    """No padding token, and an end that the generation config alone knows."""
    made = variant({"generation_config.json": '{"eos_token_id": [2, 1]}'}, pad_token=None, eos_token=None)
    tokenizer = ChatTokenizer(made, "")
    assert (tokenizer.ends, tokenizer.pad) == ((2, 1), 2)


@pytest.mark.parametrize(
    ("file", "text", "config", "sentence"),
    [
        (TEMPLATE, "{% for m in", {}, "the chat template of this tokenizer cannot be used"),
        (TEMPLATE, "{{ nothing.there }}", {}, "the chat template of this tokenizer cannot be used"),
        (TEMPLATE, "Hello.", {}, "does not write the user's message"),
        ("tokenizer.json", "{}", {}, "has no tokenizer that can be read"),
        ("tokenizer.json", None, {}, "has no tokenizer that can be read"),
        ("generation_config.json", None, {"eos_token": None}, "has no end token"),
        ("generation_config.json", "{", {}, "generation_config.json cannot be read"),
        ("generation_config.json", '{"eos_token_id": "x"}', {}, "generation_config.json cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_ask_is_refused(
    variant: Callable[..., Path], file: str, text: str | None, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        ChatTokenizer(variant({file: text}, **config), "Be short.")
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_that_is_gone_is_no_name_to_look_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder owner/name"):
        ChatTokenizer("owner/name", "")


# problems of other people


class Broken(Parity):
    """Faults of a problem, by name."""

    name = "broken"

    def __init__(self, wrong: str):
        self.wrong = wrong

    def grade(self, prompts, completions):
        grades = super().grade(prompts, completions)
        if self.wrong == "NaN":
            return [TrainingGrade(True, False, float("nan")) for _ in grades]
        if self.wrong == "formats":
            object.__setattr__(grades[0], "format", "yes")
        if self.wrong == "whole":
            for grade in grades:
                object.__setattr__(grade, "reward", int(grade.reward))  # the tests' check of types takes no int for a float
        return grades[1:] if self.wrong == "grades" else grades

    def prompt(self, task, mode):
        prompt = super().prompt(task, mode)
        return replace(prompt, mode="none") if self.wrong == "mode" and task == self.tasks("train")[-1] else prompt

    def detect(self, prompts, completions):
        if self.wrong in ("numpy", "counts"):
            return [np.bool_(True), 1 if self.wrong == "numpy" else 2]
        return [] if self.wrong == "detections" else super().detect(prompts, completions)

    def pairs(self, seed, n, kind):
        pairs = super().pairs(seed, n, kind)
        if self.wrong == "same":
            return [PersonaPair(pair.prompt, pair.clean, pair.clean) for pair in pairs]
        return pairs[1:] if self.wrong == "pairs" else pairs

    def judge(self):
        strict, wrong = super().judge(), self.wrong

        class Lazy:
            def judge(self, prompts, completions):
                verdicts = strict.judge(prompts, completions)
                for verdict in verdicts:
                    object.__setattr__(verdict, "gt", "no" if wrong == "words" else np.bool_(verdict.gt))
                return verdicts[wrong == "verdicts" :]

        return Lazy()


def broken(folder: Path, wrong: str) -> tuple[ChatWorld, ChatWitness, Samples]:
    """A world and a witness of such a problem, and two samples."""
    problem = Broken(wrong)
    world = ChatWorld(problem, ChatTokenizer(folder, ""), max_new=8, context=256)
    prompts = [TextPrompt(task, "none", task) for task in problem.tasks("train")[:2]]
    return world, ChatWitness(world, problem.judge()), world.package(prompts, [[5, 1], [6, 1]])


@pytest.mark.parametrize(
    ("wrong", "ask", "sentence"),
    [
        ("NaN", ChatWorld.rewards, "broken returned a reward of nan: a reward must be a finite number"),
        ("grades", ChatWorld.grades, "grade of broken gave 1 answers for 2 completions"),
        ("formats", ChatWorld.grades, "grade of broken gave 'yes', not True or False"),
        ("detections", ChatWorld.detect, "detect of broken gave 0 answers for 2 completions"),
        ("counts", ChatWorld.detect, "detect of broken gave 2, not True or False"),
        ("pairs", lambda world, _: world.make_pairs(0, 3, "hack"), "broken gave 2 hack pairs, not 3: choose pairs=2"),
        ("same", lambda world, _: world.make_pairs(0, 3, "hack"), "broken gave a hack pair whose two sides are the same text"),
        ("mode", lambda world, _: world.prompt(world.tasks("train")[-1], "confidence"), r"returned a prompt of \('.*', 'none'\)"),
    ],
)
def test_what_a_problem_gives_is_checked_where_it_comes_in(folder: Path, wrong: str, ask: Callable, sentence: str) -> None:
    world, _, samples = broken(folder, wrong)
    with pytest.raises(ValueError, match=sentence):
        ask(world, samples)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [("verdicts", "the judge gave 1 verdicts for 2 completions"), ("words", "the judge gave 'no', not True or False")],
)
def test_what_a_judge_gives_is_checked(folder: Path, wrong: str, sentence: str) -> None:
    _, witness, samples = broken(folder, wrong)
    with pytest.raises(ValueError, match=sentence):
        witness.judge(samples)


@pytest.mark.parametrize("known", ["last_word", ["last_word"], ("last_word", 3)])
def test_modes_are_names_in_a_tuple(known: Any) -> None:
    """Letters would be modes where a comma is missing, as in ``("last_word")``, and a folder has no list to compare one with."""
    with pytest.raises(ValueError, match=r"known(.1)? must be "):
        Modes(known, ("confidence",))


def test_rewards_that_are_whole_numbers_are_trained_on(folder: Path) -> None:
    world, _, samples = broken(folder, "whole")
    assert world.rewards(samples).dtype == torch.float32


def test_answers_of_numpy_are_answers(folder: Path) -> None:
    world, witness, samples = broken(folder, "numpy")
    assert all(found is True for found in world.detect(samples))
    assert all(verdict.gt is False for verdict in witness.judge(samples))


def test_a_model_that_forgets_its_prompt_or_cannot_drop_rows_is_refused(model: torch.nn.Module) -> None:
    """Mamba, and a model that checkpoints its blocks, ignore the cache; rows of a convolution's cannot be dropped."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    hybrid = Lfm2ForCausalLM(Lfm2Config(**sizes, intermediate_size=48, layer_types=["conv", "full_attention"])).double().eval()
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM.*choose at_once=1"):
        sampled(hybrid, PROMPTS, 5)
    for prompt, own in zip(PROMPTS, cold(hybrid, 1), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + len(own):
            ids.append(int(hybrid(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == own
    state_space = MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()
    with pytest.raises(ValueError, match=r"MambaForCausalLM kept no token in its cache.*choose another model"):
        sampled(state_space, PROMPTS, 1)
    training = deepcopy(model).train()
    enable = getattr(training, "activation_checkpointing_enable", None) or training.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM kept no token in its cache.*call model\.eval"):
        sampled(training, PROMPTS, 5)
