"""A tiny chat model, made here: a tokenizer trained on a problem's own texts and a small Qwen3, for a run without any download.

It has the layout of a real checkpoint (config, tokenizer with a chat template, safetensors), so a run on it is a run on any other.
Random weights answer noise, which no grader pays; a short warm-up on the problem's documents gives it answers to be told apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mi_route2.rollouts import Rollouts
from studies.loopholes.chat_world import ChatTokenizer
from studies.loopholes.protocol import Problem

TURN, END, PAD = "<|turn|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}" + TURN + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
)


@runtime_checkable
class Corpus(Protocol):
    """A problem with documents to warm up on: honest and cheating answers, a prompt's text with each."""

    def corpus(self, seed: int, n: int) -> Sequence[tuple[str, str]]: ...


def documents(problem: Problem, seed: int, n: int) -> list[tuple[str, str]]:
    """``n`` prompts with an answer: the problem's own ``corpus`` where it has one, else both sides of its persona pairs."""
    if isinstance(problem, Corpus):
        return list(problem.corpus(seed, n))
    return [(pair.prompt, side) for pair in problem.pairs(seed, -(-n // 2), "hack") for side in (pair.hack, pair.clean)][:n]


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE of at most ``vocabulary`` tokens, with a chat template: every text survives encoding and decoding."""
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
    """Write a checkpoint into ``folder``, which must not exist; the last step's loss in nats a token.

    Documents whose answer is longer than ``max_new`` tokens are left out of the warm-up. ``ValueError`` where none is left.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another folder, or delete it")
    texts = documents(problem, seed, 512)
    tokenizer = make_tokenizer([problem.system, *(text for document in texts for text in document)], vocabulary)
    partial = folder.with_name(f".{folder.name}.partial")
    tokenizer.save_pretrained(partial)
    chat = ChatTokenizer(partial, problem.system)
    encoded = [(chat.prompt(prompt), chat.completion(answer)) for prompt, answer in texts]
    fitting = [(prompt, answer) for prompt, answer in encoded if len(answer) <= max_new and len(prompt) + max_new <= context]
    if not fitting:
        raise ValueError(f"no document of {problem.name} has an answer of at most {max_new} tokens: choose a larger max_new")
    torch.manual_seed(seed)  # transformers draws initial weights from the global stream
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=context, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    loss = _warm_up(model, fitting, chat.pad, torch.Generator().manual_seed(seed), steps, batch, progress)
    model.eval().save_pretrained(partial)
    partial.rename(folder)
    return loss


def _warm_up(
    model: Any, encoded: list[tuple[list[int], list[int]]], pad: int, generator: torch.Generator, steps: int, batch: int, show: bool
) -> float:
    """Next-token cross-entropy over answers, AdamW with a linear decay to 0."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, max(steps, 1))
    loss = torch.zeros(())
    bar = tqdm(range(steps), desc="tiny model", unit="step", disable=None if show else True)
    for _ in bar:
        chosen = torch.randint(len(encoded), (batch,), generator=generator).tolist()
        rows = Rollouts.from_lists([encoded[i][0] for i in chosen], [encoded[i][1] for i in chosen], pad)
        logits = model(rows.tokens, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits[rows.predictors[:, :-1]], rows.tokens[:, 1:][rows.completion[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()
