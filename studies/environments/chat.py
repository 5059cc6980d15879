"""Chat models as policies of any problem: chat template, tokenizer, batched sampling with a cache, and a tiny chat model."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mi_route2.files import shortened, whole_folder
from mi_route2.hosts.load import load
from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Privileged
from studies.environments.protocol import Judge, PersonaPair, Problem, Samples, Split, TextPrompt, TrainingGrade, Verdict, World
from studies.environments.sampling import complete, draw_uniforms

NOTHING = -1  # behind a completion's end


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    temperature: float,
    generator: torch.Generator,
    ends: Sequence[int],
    pad: int,
    at_once: int,
) -> list[list[int]]:
    """Sample one completion per prompt, up to and including the first token of ``ends``; after ``max_new`` tokens it has no end.

    ``at_once`` rows are sampled at a time. Raises ValueError unless `temperature` is positive, and the two numbers at least 1.
    """
    for name, number in (("max_new", max_new), ("at_once", at_once)):
        if number < 1:
            raise ValueError(f"{name} is {number}: choose at least 1")
    uniforms = draw_uniforms(len(prompts), max_new, generator)
    device = next(model.parameters()).device
    # rows of similar length together, for less padding; the completions are the same
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        batch = _Decoding(model, [prompts[i] for i in rows], pad, device)
        draws = uniforms[rows].to(device)
        sampled = complete(batch.first, batch.go_on, draws, temperature=temperature, ends=ends, fill=NOTHING)
        for i, ids in zip(rows, sampled.tolist(), strict=True):
            completions[i] = ids[: ids.index(NOTHING)] if NOTHING in ids else ids
    return completions


@torch.no_grad()
def next_logits(model: nn.Module, prompts: Sequence[Sequence[int]], pad: int) -> Float[Tensor, "b v"]:
    """Return the logits of the token after each prompt."""
    return _Decoding(model, prompts, pad, next(model.parameters()).device).first()


class _Decoding:
    """Rows that are being completed: the model's cache, its mask of real tokens, and the position of each row."""

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], pad: int, device: torch.device):
        from transformers import DynamicCache

        places: dict[tuple[int, ...], int] = {}  # the rollouts of a group have one prompt, which is read once
        self._rows = torch.tensor([places.setdefault(tuple(p), len(places)) for p in prompts], device=device)
        self._model, width = model, max(map(len, places))
        self.tokens: Int[Tensor, "b s"] = torch.tensor([[pad] * (width - len(p)) + list(p) for p in places], device=device)
        lengths = torch.tensor([len(p) for p in places], device=device)
        self._real: Bool[Tensor, "b s"] = torch.arange(width, device=device) >= width - lengths[:, None]
        self._cache: Any = DynamicCache(config=getattr(model, "config", None))
        if len(prompts) > 1 and not all(hasattr(layer, "batch_select_indices") for layer in self._cache.layers):
            raise ValueError(
                f"{type(model).__name__} has layers without attention, whose cache cannot drop rows that have ended: "
                "choose at_once=1"
            )

    def first(self) -> Float[Tensor, "b v"]:
        """Return the logits of every row's first token, and go from distinct prompts to rows."""
        logits = self.logits()
        if len(self._rows) > len(logits):
            self._cache.batch_select_indices(self._rows)
            self._real = self._real[self._rows]
        return logits[self._rows]

    def logits(self) -> Float[Tensor, "b v"]:
        """Return the logits of the token after ``tokens``, which are in the cache afterwards."""
        positions = (self._real.long().cumsum(1) - 1).clamp_min(0)[:, -self.tokens.shape[1] :]
        out: Any = self._model(
            input_ids=self.tokens,
            attention_mask=self._real.long(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if not _tokens(self._cache):
            raise ValueError(
                f"{type(self._model).__name__} kept no token in its cache, so its answer would follow no prompt: "
                "call model.eval() if it checkpoints its blocks, else choose another model"
            )
        return out.logits[:, -1].float()

    def go_on(self, drawn: Int[Tensor, " r"], alive: Bool[Tensor, " b"]) -> Float[Tensor, "r v"]:
        """Go on with the rows that are ``alive``, each with its drawn token; logits of the tokens after these."""
        if not bool(alive.all()):
            self._cache.batch_select_indices(alive.nonzero()[:, 0])
            self._real = self._real[alive]
        self.tokens = drawn[:, None]
        self._real = torch.nn.functional.pad(self._real, (0, 1), value=True)
        return self.logits()


def _tokens(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 for one without attention, which models do not take as ``past_key_values``."""
    try:
        return cache.get_seq_length()
    except ValueError:
        return 0


QUESTION, RULE = "What-is-asked", "What-is-the-rule"
"""Test messages that show whether a template writes them; without white space, which some templates strip."""


class ChatTokenizer:
    """Checkpoint's tokenizer: prompts by its chat template, completions as plain text followed by its end token.

    If a template refuses or omits a system message, the message is put before the user's text instead.
    """

    def __init__(self, folder: Path | str, system: str, thinking: bool = False):
        """Load the tokenizer of a folder.

        Raises:
            ValueError: The folder has no tokenizer, the tokenizer no end token, or its template omits the user's message.
        """
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():  # transformers would take the text for a Hugging Face id
            raise ValueError(
                f"there is no folder {folder}, so no tokenizer: put it back, or start its runs again with --model where it is now"
            )
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False)
        except Exception as error:  # the readers of transformers raise other types of errors
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise ValueError(f"{folder} has no tokenizer that can be read ({said})") from error
        if not self.tokenizer.encode(QUESTION, add_special_tokens=False):  # of some architectures transformers makes an empty one
            raise ValueError(f"{folder} has no tokenizer that can be read (it makes no token of a text)")
        self.ends = _ends(self.tokenizer, Path(folder))
        self.pad: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.ends[0]
        self._system, self._thinking = system, thinking
        if self.tokenizer.chat_template is not None:
            self._fold = not self._shows(system)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a user's message after the system message, up to the start of the answer."""
        question = self.question(text)
        return self._opening(question) if isinstance(question, str) else self._apply(question, tokenize=True)

    def _opening(self, text: str) -> list[int]:
        """Return the tokens of a text without a template, with the token that begins a document, if there is one."""
        ids = self.tokenizer.encode(text, split_special_tokens=True)
        # Some tokenizers write an end behind every text, and the answer would come after it
        return ids[:-1] if len(ids) > 1 and ids[-1] in self.ends else ids

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and behind a user's message, up to the start of the answer."""
        question = self.question(QUESTION)
        before, _, behind = (question if isinstance(question, str) else self._apply(question, tokenize=False)).partition(QUESTION)
        if isinstance(question, str):
            return self._opening(before), self.plain(behind)
        return self.tokenizer.encode(before, add_special_tokens=False), self.tokenizer.encode(behind, add_special_tokens=False)

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a text. The name of a special token in it is text."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def question(self, text: str) -> str | list[dict[str, str]]:
        """Return a user's message after the system message: the messages of a chat, or one text if there is no template."""
        if self.tokenizer.chat_template is None:
            return "\n\n".join([self._system, text, ""] if self._system else [text, ""])
        if self._system and self._fold:
            return _messages("", f"{self._system}\n\n{text}")
        return _messages(self._system, text)

    def _apply(self, messages: list[dict[str, str]], tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False, enable_thinking=self._thinking
        )

    def _shows(self, system: str) -> bool:
        """Return whether the template writes a system message; ``ValueError`` if it does not even write the user's."""
        try:
            rendered = self._apply(_messages("", QUESTION), tokenize=False)
        except Exception as error:  # a template may raise any error
            raise ValueError(f"the chat template of this tokenizer cannot be used ({error}): give it another one") from error
        if QUESTION not in rendered:
            raise ValueError("the chat template of this tokenizer does not write the user's message: give it another one")
        try:
            return not system or RULE in self._apply(_messages(RULE, QUESTION), tokenize=False)
        except Exception:
            return False

    def completion(self, text: str) -> list[int]:
        """Return the tokens of an answer, with the end token. The name of a special token in the text is text."""
        return [*self.plain(text), self.ends[0]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer without its end token."""
        return self.tokenizer.decode([i for i in ids if i not in self.ends], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([i]) for i in ids]


def _messages(system: str, text: str) -> list[dict[str, str]]:
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]


def _ends(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's end token first, then those of the checkpoint's generation config."""
    from transformers import GenerationConfig

    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if (folder / "generation_config.json").exists():
        try:
            more = GenerationConfig.from_pretrained(folder).eos_token_id
            ends += [] if more is None else [more] if isinstance(more, int) else map(index, more)
        except Exception as error:  # the readers of transformers raise other types of errors
            raise ValueError(f"{folder / 'generation_config.json'} cannot be read: correct its JSON, or remove the file") from error
    if not ends:
        raise ValueError(f"the tokenizer in {folder} has no end token, so completions could not end: set its eos_token")
    return tuple(dict.fromkeys(ends))


@runtime_checkable
class Sampler(Protocol):
    """Protocol of an engine that samples from a policy as it is switched now, for example ``mi_route2.vllm.VllmSampler``."""

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        max_new: int,
        temperature: float,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Sample one completion per prompt, up to and including the first token of ``ends``."""
        ...


class ChatWorld(World):
    """World of a problem with a chat model; see ``protocol.World``.

    ``context`` is the maximum number of tokens of a prompt with its completion, and ``device`` is that of the model. ``sampler``
    takes the place of ``generate``.
    """

    def __init__(
        self,
        problem: Problem,
        tokenizer: ChatTokenizer,
        *,
        max_new: int,
        context: int,
        device: torch.device | None = None,
        at_once: int = 32,
        sampler: Sampler | None = None,
    ):
        self._sampler = sampler
        self.modes, self.max_new = problem.modes, max_new
        self._problem, self._tokenizer, self._context, self._at_once = problem, tokenizer, context, at_once
        self._device = torch.device("cpu") if device is None else device

    def tasks(self, split: Split) -> Sequence[str]:
        return self._problem.tasks(split)

    def prompt(self, task: str, mode: str) -> TextPrompt:
        """Return the problem's prompt; ``ValueError`` if it is of another task or mode, in which no table would count it."""
        prompt = self._problem.prompt(task, mode)
        if (prompt.task, prompt.mode) != (task, mode):
            raise ValueError(
                f"prompt({task!r}, {mode!r}) of {self._problem.name} returned a prompt of ({prompt.task!r}, {prompt.mode!r})"
            )
        return prompt

    def question(self, prompt: TextPrompt) -> str | list[dict[str, str]]:
        return self._tokenizer.question(prompt.text)

    def read_prompt(self, described: Mapping[str, Any]) -> TextPrompt:
        return TextPrompt(**described)

    def sample(
        self, policy: Policy, prompts: Sequence[TextPrompt], generator: torch.Generator, temperature: float = 1.0
    ) -> Samples:
        """Sample one completion per prompt, ``at_once`` of them at a time, which changes completions by rounding only."""
        encoded = self._encode_prompts([prompt.text for prompt in prompts])
        how: Any = {"max_new": self.max_new, "temperature": temperature, "generator": generator, "ends": self._tokenizer.ends}
        if self._sampler is not None:
            completions = self._sampler(policy, encoded, **how)
        else:
            completions = generate(policy.model, encoded, **how, pad=self._tokenizer.pad, at_once=self._at_once)
        return self._samples(prompts, encoded, completions)

    def package(self, prompts: Sequence[TextPrompt], completions: Sequence[Sequence[int]]) -> Samples:
        return self._samples(prompts, self._encode_prompts([prompt.text for prompt in prompts]), completions)

    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        """Return rollouts of texts, which may be longer than a sample, but not longer than the context."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: give one each per rollout")
        questions, answers = self._encode_prompts(prompts), [self._tokenizer.completion(text) for text in completions]
        for text, question, answer in zip(completions, questions, answers, strict=True):
            if len(question) + len(answer) > self._context:
                raise ValueError(f"a prompt and its completion are longer than {self._context} tokens: {text[:60]!r}")
        # a sample of max_new tokens has no end token, so an equal text gets none either
        cut = [answer[:-1] if len(answer) == self.max_new + 1 else answer for answer in answers]
        return self._rollouts(questions, cut)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._tokenizer.pieces(tokens)

    def grades(self, samples: Samples) -> list[TrainingGrade]:
        """Return the problem's grades; ``ValueError`` unless there is one per completion, each with a finite reward."""
        of = f"grade of {self._problem.name}"
        grades = _one_each(of, "answers", self._problem.grade(samples.prompts, samples.completions), samples)
        if wrong := [grade.reward for grade in grades if not math.isfinite(grade.reward)]:
            raise ValueError(f"{self._problem.name} returned a reward of {wrong[0]}: a reward must be a finite number")
        rewards = [float(grade.reward) for grade in grades]  # whole numbers alone would make a tensor of whole numbers
        return _with_answers(of, grades, "format", "passed", reward=rewards)

    def detect(self, samples: Samples) -> list[bool]:
        of = f"detect of {self._problem.name}"
        return _answers(of, _one_each(of, "answers", self._problem.detect(samples.prompts, samples.completions), samples))

    def make_pairs(self, seed: int, n: int, kind: str) -> list[PersonaPair]:
        """Return the problem's pairs; ``ValueError`` unless there are ``n``, each of two different texts."""
        if kind not in ("hack", "nonhack"):
            raise ValueError(f"unknown kind {kind!r}: choose from hack, nonhack")
        pairs = self._problem.pairs(seed, n, kind)
        if len(pairs) != n:
            raise ValueError(f"{self._problem.name} gave {len(pairs)} {kind} pairs, not {n}: choose pairs={len(pairs) or 1}")
        if any(pair.hack == pair.clean for pair in pairs):
            raise ValueError(
                f"{self._problem.name} gave a {kind} pair whose two sides are the same text: there is no contrast in it"
            )
        return pairs

    def _encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        known = {text: self._tokenizer.prompt(text) for text in dict.fromkeys(texts)}
        if long := [text for text, ids in known.items() if len(ids) + self.max_new > self._context]:
            worst = max(long, key=lambda text: len(known[text]))
            raise ValueError(
                f"{len(long)} of {len(known)} prompts, the longest of {len(known[worst])} tokens, with a completion of "
                f"{self.max_new} do not fit the model's context of {self._context} tokens: choose a smaller chat.max_new, or leave "
                f"out such a task as the one that begins {worst[:60]!r}"
            )
        return [known[text] for text in texts]

    def _samples(
        self, prompts: Sequence[TextPrompt], encoded: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> Samples:
        return Samples(list(prompts), self._rollouts(encoded, completions), [self._tokenizer.text(ids) for ids in completions])

    def _rollouts(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Rollouts:
        return Rollouts.from_lists(prompts, completions, self._tokenizer.pad).to(self._device)


class ChatWitness:
    """Problem's hidden verdict; see ``protocol.Witness``."""

    def __init__(self, world: ChatWorld, judge: Judge):
        self._world, self._judge = world, judge

    def judge(self, samples: Samples) -> list[Verdict]:
        verdicts = _one_each("the judge", "verdicts", self._judge.judge(samples.prompts, samples.completions), samples)
        return _with_answers("the judge", verdicts, "gt", "exploit", "hack", "judged", "memorized")

    def privileged(self, samples: Samples) -> Privileged:
        exploits = [verdict.exploit for verdict in self.judge(samples)]
        return Privileged(torch.tensor(exploits), torch.tensor(self._world.detect(samples)))


def _one_each(of: str, what: str, items: list[Any], samples: Samples) -> list[Any]:
    if len(items) != (n := len(samples.completions)):
        raise ValueError(f"{of} gave {len(items)} {what} for {n} completions: it must give one each")
    return items


def _answers(of: str, verdicts: Sequence[Any]) -> list[bool]:
    """Return answers as booleans, which a log can hold: numpy's, and 0 and 1, are theirs; ``ValueError`` for any other."""
    if wrong := [verdict for verdict in verdicts if not isinstance(verdict, int | np.bool_ | np.integer) or verdict not in (0, 1)]:
        raise ValueError(f"{of} gave {shortened(wrong[0])}, not True or False")
    return [bool(verdict) for verdict in verdicts]


def _with_answers(of: str, rollouts: Sequence[Any], *names: str, **columns: Sequence[Any]) -> list[Any]:
    """Return records with these fields as booleans, see `_answers`, and the columns as other fields."""
    columns |= {name: _answers(of, [getattr(rollout, name) for rollout in rollouts]) for name in names}
    return [replace(rollout, **{name: column[i] for name, column in columns.items()}) for i, rollout in enumerate(rollouts)]


TURN, END, PAD = "<|turn|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}" + TURN + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
)


DOCUMENTS = 512
"""Documents of a warm-up."""


@runtime_checkable
class WarmUpDocuments(Protocol):
    """Protocol of a problem with documents for a warm-up: prompts with honest and cheating answers."""

    def corpus(self, seed: int, n: int) -> Sequence[tuple[str, str]]: ...


def documents(problem: Problem, seed: int, n: int) -> list[tuple[str, str]]:
    """Return ``n`` prompts with an answer: from the problem's ``corpus`` if it has one, else both sides of its persona pairs."""
    if isinstance(problem, WarmUpDocuments):
        return list(problem.corpus(seed, n))
    return [(pair.prompt, side) for pair in problem.pairs(seed, -(-n // 2), "hack") for side in (pair.hack, pair.clean)][:n]


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a byte-level BPE of at most ``vocabulary`` tokens, with a chat template; it encodes every text without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END, TURN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_tiny_model(
    problem: Problem,
    folder: Path,
    *,
    seed: int = 0,
    vocabulary: int = 1024,
    width: int = 128,
    layers: int = 4,
    context: int = 4096,
    steps: int = 300,
    batch: int = 8,
    max_new: int = 128,
    progress: bool = True,
) -> float:
    """Train a tiny chat model and write its checkpoint into ``folder``, which must not exist.

    Documents whose answer is longer than ``max_new`` tokens, or whose prompt leaves less room, are left out of the warm-up.

    Returns:
        The loss of the last step, in nats per token.

    Raises:
        ValueError: The folder exists, or no document is short enough.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with _new_folder(folder) as partial:
        texts = documents(problem, seed, DOCUMENTS)
        tokenizer = make_tokenizer([problem.system, *(text for document in texts for text in document)], vocabulary)
        tokenizer.save_pretrained(partial)
        torch.manual_seed(seed)  # transformers draws initial weights from the global stream
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=context,
            tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        chat = ChatTokenizer(partial, problem.system)
        loss = _warm_up(model, chat, problem, texts, seed, steps, batch, max_new, 3e-3, progress)
        model.eval().save_pretrained(partial)
    return loss


def warm_up(
    problem: Problem,
    start: Path,
    folder: Path,
    *,
    seed: int = 0,
    steps: int = 60,
    batch: int = 16,
    max_new: int = 128,
    lr: float = 1e-4,
    progress: bool = True,
) -> float:
    """Train all weights of the checkpoint in ``start`` on the problem's documents; write it into ``folder``, which must not exist.

    It is trained in float32 and written in the type that it has in ``start``. Documents whose answer is longer than ``max_new``
    tokens, or whose prompt leaves less room, are left out.

    Returns:
        The loss of the last step, in nats per token.

    Raises:
        OSError: ``start`` has no weights.
        ValueError: The folder exists, ``start`` has no model or no tokenizer of it, or no document is short enough.
    """
    new = _new_folder(folder)
    # Before the block, which takes an OSError for one of writing
    chat = ChatTokenizer(start, problem.system)
    model: Any = load(start).model
    dtype, texts = model.dtype, documents(problem, seed, DOCUMENTS)
    with new as partial:
        chat.tokenizer.save_pretrained(partial)
        loss = _warm_up(model.float(), chat, problem, texts, seed, steps, batch, max_new, lr, progress)
        model.to(dtype).save_pretrained(partial)
    return loss


def _new_folder(folder: Path) -> AbstractContextManager[Path]:
    """Return a context: a folder that becomes ``folder`` if the block ends well; ``ValueError`` if there is one."""
    if folder.exists():
        raise ValueError(f"{folder} already exists: choose another folder, or delete it")
    return whole_folder(folder)


def _warm_up(
    model: Any,
    chat: ChatTokenizer,
    problem: Problem,
    texts: list[tuple[str, str]],
    seed: int,
    steps: int,
    batch: int,
    max_new: int,
    lr: float,
    show: bool,
) -> float:
    """Train on the next-token cross-entropy over answers, by AdamW with a linear decay to 0; return the last loss."""
    context, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    encoded = [(chat.prompt(prompt), chat.completion(answer)) for prompt, answer in texts]
    if (highest := max(chat.pad, *(token for both in encoded for ids in both for token in ids))) >= vocabulary:
        raise ValueError(f"the tokenizer has a token {highest}, but the model {vocabulary}: use the model's own tokenizer")
    short = [(prompt, answer) for prompt, answer in encoded if len(answer) <= max_new]
    if not short:
        raise ValueError(f"no document of {problem.name} has an answer of at most {max_new} tokens: choose a larger max_new")
    fitting = [(prompt, answer) for prompt, answer in short if len(prompt) + max_new <= context]
    if not fitting:
        raise ValueError(f"no document fits {context} tokens of context with {max_new} for its answer: choose a smaller max_new")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(steps, 1))
    loss = torch.zeros(())
    bar = tqdm(range(steps), desc="warm-up", unit="step", disable=None if show else True)
    for _ in bar:
        chosen = torch.randint(len(fitting), (batch,), generator=generator).tolist()
        rows = Rollouts.from_lists([fitting[i][0] for i in chosen], [fitting[i][1] for i in chosen], chat.pad)
        logits = model(rows.tokens, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits[rows.predictors[:, :-1]], rows.tokens[:, 1:][rows.completion[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()
