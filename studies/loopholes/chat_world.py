"""Any problem under a chat model: the model's own template and tokenizer, batched sampling with a cache, right-padded rollouts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mi_route2.rollouts import Policy, Rollouts
from mi_route2.routing import Privileged
from studies.loopholes.base import World
from studies.loopholes.chat_sampling import generate
from studies.loopholes.protocol import Judge, Pair, Problem, Samples, Split, TextPrompt, TrainingGrade, Verdict

QUESTION, RULE = "What-is-asked", "What-is-the-rule"
"""Messages without white space, which some templates strip, to see whether a template writes them."""


class ChatTokenizer:
    """A checkpoint's tokenizer: prompts by its chat template, completions as they are, ended by its end token.

    A template that refuses a system's message, or leaves it out, has it before the user's own text instead.
    """

    def __init__(self, folder: Path | str, system: str, thinking: bool = False):
        """``ValueError`` where the folder has no tokenizer, the tokenizer no end token, or its template no room for a question."""
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():  # transformers would take the text for a name on its hub
            raise ValueError(f"there is no folder {folder}, so no tokenizer")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False)
        except Exception as error:  # its readers have errors of their own
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise ValueError(f"{folder} has no tokenizer that can be read ({said})") from error
        self.ends = _ends(self.tokenizer, Path(folder))
        self.pad: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.ends[0]
        self._system, self._thinking = system, thinking
        if self.tokenizer.chat_template is not None:
            self._fold = not self._shows(system)

    def prompt(self, text: str) -> list[int]:
        """A user's message after the system's, up to where the answer begins."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode("\n\n".join([self._system, text, ""] if self._system else [text, ""]))
        if self._system and self._fold:
            return self._apply("", f"{self._system}\n\n{text}", tokenize=True)
        return self._apply(self._system, text, tokenize=True)

    def _apply(self, system: str, text: str, tokenize: bool) -> Any:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False, enable_thinking=self._thinking
        )

    def _shows(self, system: str) -> bool:
        """Whether the template writes a system's message. ``ValueError`` where it does not even write the user's."""
        try:
            asked = self._apply("", QUESTION, tokenize=False)
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the chat template of this tokenizer cannot be used ({error}): give it another one") from error
        if QUESTION not in asked:
            raise ValueError("the chat template of this tokenizer does not write what the user says: give it another one")
        try:
            return not system or RULE in self._apply(RULE, QUESTION, tokenize=False)
        except Exception:
            return False

    def completion(self, text: str) -> list[int]:
        """An answer and its end."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.ends[0]]

    def text(self, ids: Sequence[int]) -> str:
        """An answer without its end."""
        return self.tokenizer.decode([i for i in ids if i not in self.ends], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([i]) for i in ids]


def _ends(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """What ends an answer: the tokenizer's end token first, then those that the checkpoint's generation stops at."""
    from transformers import GenerationConfig

    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if (folder / "generation_config.json").exists():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        ends += [] if more is None else [more] if isinstance(more, int) else more
    if not ends:
        raise ValueError(f"the tokenizer in {folder} has no end token, so a completion could not end")
    return tuple(dict.fromkeys(ends))


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
        """``ValueError`` for grades that are not one a completion, or whose reward is no number."""
        grades = self._one_each("grade", self._problem.grade(samples.prompts, samples.completions), samples)
        if wrong := [grade.reward for grade in grades if not math.isfinite(grade.reward)]:
            raise ValueError(f"{self._problem.name} paid a reward of {wrong[0]}: a reward is a finite number")
        return grades

    def detect(self, samples: Samples) -> list[bool]:
        return self._one_each("detect", self._problem.detect(samples.prompts, samples.completions), samples)

    def make_pairs(self, seed: int, n: int, kind: str) -> list[Pair]:
        """``ValueError`` unless the problem gives ``n`` pairs, each of two different texts."""
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

    def _one_each(self, what: str, found: list[Any], samples: Samples) -> list[Any]:
        if len(found) != (n := len(samples.completions)):
            raise ValueError(f"{what} of {self._problem.name} gave {len(found)} answers for {n} completions: it gives one each")
        return found

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

    def _rollouts(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Rollouts:
        return Rollouts.from_lists(prompts, completions, self._tokenizer.pad).to(self._device)


class ChatWitness:
    """The problem's hidden verdict; see ``protocol.Witness``."""

    def __init__(self, world: ChatWorld, judge: Judge):
        self._world, self._judge = world, judge

    def judge(self, samples: Samples) -> list[Verdict]:
        verdicts = self._judge.judge(samples.prompts, samples.completions)
        if len(verdicts) != len(samples.completions):
            raise ValueError(
                f"the judge gave {len(verdicts)} verdicts for {len(samples.completions)} completions: it gives one each"
            )
        return verdicts

    def privileged(self, samples: Samples) -> Privileged:
        own = [verdict.exploit for verdict in self.judge(samples)]
        return Privileged(torch.tensor(own), torch.tensor(self._world.detect(samples)))
