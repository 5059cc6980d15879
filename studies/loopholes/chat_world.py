"""Any problem under a chat model: the model's own template and tokenizer, batched sampling with a cache, right-padded rollouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Privileged
from studies.loopholes.base import World
from studies.loopholes.chat_sampling import generate
from studies.loopholes.protocol import Judge, Pair, Problem, Samples, Split, TextPrompt, TrainingGrade, Verdict


class ChatTokenizer:
    """A checkpoint's tokenizer: prompts by its chat template, completions as they are, ended by its end token."""

    def __init__(self, folder: Path | str, system: str, thinking: bool = False):
        """``ValueError`` where the folder has no tokenizer, or the tokenizer no end token."""
        from transformers import AutoTokenizer, GenerationConfig

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no tokenizer that can be read ({str(error).strip().splitlines()[0]})") from error
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {folder} has no end token, so a completion could not end")
        ends = [self.tokenizer.eos_token_id]
        if (Path(folder) / "generation_config.json").exists():
            more = GenerationConfig.from_pretrained(folder).eos_token_id
            ends += [] if more is None else [more] if isinstance(more, int) else more
        self.ends: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.pad: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.ends[0]
        self._system, self._thinking = system, thinking

    def prompt(self, text: str) -> list[int]:
        """A user's message after the system's, up to where the answer begins."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode("\n\n".join([self._system, text, ""] if self._system else [text, ""]))
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": text})
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=self._thinking
        )

    def completion(self, text: str) -> list[int]:
        """An answer and its end."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.ends[0]]

    def text(self, ids: Sequence[int]) -> str:
        """An answer without its end."""
        return self.tokenizer.decode([i for i in ids if i not in self.ends], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([i]) for i in ids]


class ChatWorld(World):
    """See ``base.World``. ``context`` is the longest prompt with its completion that the model reads, ``device`` where it is."""

    def __init__(
        self,
        problem: Problem,
        tokenizer: ChatTokenizer,
        *,
        max_new: int,
        context: int,
        device: torch.device | None = None,
        at_once: int = 32,
    ):
        self.modes, self.max_new = problem.modes, max_new
        self._problem, self._tokenizer, self._context, self._at_once = problem, tokenizer, context, at_once
        self._device = torch.device("cpu") if device is None else device

    def tasks(self, split: Split) -> Sequence[str]:
        return self._problem.tasks(split)

    def prompt(self, task: str, mode: str) -> TextPrompt:
        return self._problem.prompt(task, mode)

    def read_prompt(self, described: Mapping[str, Any]) -> TextPrompt:
        return TextPrompt(**described)

    def sample(
        self, policy: Policy, prompts: Sequence[TextPrompt], generator: torch.Generator, temperature: float = 1.0
    ) -> Samples:
        """One completion a prompt, ``at_once`` of them at a time: that changes no completion, but for rounding."""
        encoded = self._encode_prompts([prompt.text for prompt in prompts])
        completions = generate(
            policy.model,
            encoded,
            max_new=self.max_new,
            temperature=temperature,
            generator=generator,
            ends=self._tokenizer.ends,
            pad=self._tokenizer.pad,
            at_once=self._at_once,
        )
        return Samples(list(prompts), self._rollouts(encoded, completions), [self._tokenizer.text(ids) for ids in completions])

    def package(self, prompts: Sequence[TextPrompt], completions: Sequence[Sequence[int]]) -> Samples:
        rollouts = self._rollouts(self._encode_prompts([prompt.text for prompt in prompts]), completions)
        return Samples(list(prompts), rollouts, [self._tokenizer.text(ids) for ids in completions])

    def encode(self, prompts: Sequence[str], completions: Sequence[str]) -> Rollouts:
        """Texts may be longer than a sample, but not than the context."""
        questions, answers = self._encode_prompts(prompts), [self._tokenizer.completion(text) for text in completions]
        for text, question, answer in zip(completions, questions, answers, strict=True):
            if len(question) + len(answer) > self._context:
                raise ValueError(f"a prompt and its completion are longer than {self._context} tokens: {text[:60]!r}")
        # a sample that never ended had no room for its end: it has none here either
        cut = [answer[:-1] if len(answer) == self.max_new + 1 else answer for answer in answers]
        return self._rollouts(questions, cut)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._tokenizer.pieces(tokens)

    def grades(self, samples: Samples) -> list[TrainingGrade]:
        return self._problem.grade(samples.prompts, samples.completions)

    def detect(self, samples: Samples) -> list[bool]:
        return self._problem.detect(samples.prompts, samples.completions)

    def make_pairs(self, seed: int, n: int, kind: str) -> list[Pair]:
        if kind not in ("hack", "nonhack"):
            raise ValueError(f"unknown kind {kind!r}: choose from hack, nonhack")
        return self._problem.pairs(seed, n, kind)

    def _encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        known = {text: self._tokenizer.prompt(text) for text in dict.fromkeys(texts)}
        longest, text = max((len(ids), text) for text, ids in known.items())
        if longest + self.max_new > self._context:
            raise ValueError(
                f"a prompt of {longest} tokens and a completion of {self.max_new} do not fit the model's context of "
                f"{self._context} tokens: choose a smaller chat.max_new, or leave out the task that begins {text[:60]!r}"
            )
        return [known[text] for text in texts]

    def _rollouts(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Rollouts:
        return Rollouts.from_lists(prompts, completions, self._tokenizer.pad).to(self._device)


class ChatWitness:
    """The problem's hidden verdict; see ``protocol.Witness``."""

    def __init__(self, world: ChatWorld, judge: Judge):
        self._world, self._judge = world, judge

    def judge(self, samples: Samples) -> list[Verdict]:
        return self._judge.judge(samples.prompts, samples.completions)

    def privileged(self, samples: Samples) -> Privileged:
        own = [verdict.exploit for verdict in self.judge(samples)]
        return Privileged(torch.tensor(own), torch.tensor(self._world.detect(samples)))
