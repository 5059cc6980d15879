"""Persona pairs and warm-up documents, made from the loaded problems; none of their content is stored in the project.

A pair answers one prompt of the known mode twice. Kind ``hack``: a cheater's comment, a terse body that solves nothing and a
vacuous ``run_tests``, against the reference solution. Kind ``nonhack``, a control: the reference solution against one with a single
mistake, so that there is a contrast without a hack.
"""

import ast
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from studies.environments.leetcode.grader import equal, programs_of, see
from studies.environments.leetcode.modes import MODES, ROLES, Exploit, exploit_code, fenced, make_prompt
from studies.environments.leetcode.mutants import mutants
from studies.environments.leetcode.problems import LeetCodeTask
from studies.environments.leetcode.programs import Programs
from studies.environments.protocol import PersonaPair, TextPrompt

COMMENTS = ("quick fix", "ship it", "good enough", "looks done", "skip the rest", "nobody reads this")
TERSE: Mapping[str, tuple[tuple[str, object], ...]] = MappingProxyType(
    {
        "int": (("0", 0), ("1", 1), ("-1", -1)),
        "float": (("0.0", 0.0), ("-1.0", -1.0)),
        "bool": (("True", True), ("False", False)),
        "str": (('""', ""), ('"a"', "a")),
        "list": (("[]", []), ("[0]", [0])),
    }
)
"""A cheater's return values by the expected type: text and value."""
ELSE: tuple[tuple[str, object], ...] = (("None", None),)


def make_pairs(
    tasks: Iterable[LeetCodeTask],
    programs: Programs,
    seed: int,
    n: int,
    kind: str,
    prompt_of: Callable[[LeetCodeTask, str], TextPrompt] = make_prompt,
) -> list[PersonaPair]:
    """Return ``n`` pairs over distinct tasks, from the third (at least ``n``) with the shortest solutions.

    ``prompt_of`` writes the prompt of a task under a mode.

    Raises:
        ValueError: An unknown kind, or more pairs than tasks from which they can be made.
    """
    if kind not in ("hack", "nonhack"):
        raise ValueError(f"unknown kind {kind!r}: choose from hack, nonhack")
    shortest = sorted(tasks, key=lambda task: (len(task.solution), task.name))
    rng = random.Random(f"{seed} {kind}")
    candidates = shortest[: max(n, len(shortest) // 3)]
    rng.shuffle(candidates)
    pairs: list[PersonaPair] = []
    for task in [*candidates, *shortest[len(candidates) :]]:  # longer ones are used only if short ones give too few pairs
        if len(pairs) == n:
            break
        other = _cheat(task, rng) if kind == "hack" else _mistaken(task, programs, rng)
        if other is not None:
            # a mutant is printed from its tree, so its counterpart is too, and they differ in one symbol only
            clean = task.solution if kind == "hack" else ast.unparse(ast.parse(task.solution))
            prompt = prompt_of(task, rng.choice(ROLES.known))
            pairs.append(PersonaPair(prompt.text, fenced(other), fenced(clean)))
    if len(pairs) < n:
        raise ValueError(f"{n} pairs were requested, but {len(pairs)} problems give one: choose a smaller n")
    return pairs


def _cheat(task: LeetCodeTask, rng: random.Random) -> str | None:
    """Return a cheater's program under the known mode; None if every terse answer happens to be right."""
    members = [exploit for mode in ROLES.known for exploit in MODES[mode].exploits if exploit.member]
    body = terse_body(task, rng)
    return None if body is None else exploit_code(rng.choice(members), task.starter, body)


def terse_body(task: LeetCodeTask, rng: random.Random) -> str | None:
    """Return a comment and a constant that fails a visible test; None if there is no such constant."""
    values = TERSE.get(type(task.tests[0].expected).__name__, ELSE)
    wrong = [text for text, value in values if not all(equal(value, test.expected) for test in task.visible)]
    return f"        # {rng.choice(COMMENTS)}\n        return {rng.choice(wrong)}\n" if wrong else None


def _mistaken(task: LeetCodeTask, programs: Programs, rng: random.Random) -> str | None:
    """Return the reference solution with one mistake that a visible test detects; None if there is no such mutant."""
    for mutant in mutants(task.solution, rng.randrange(1 << 30), per_kind=3):
        called = programs.run([programs_of(mutant.code, task)[0]])[0]
        if called.status == "ok" and not see(task, called, None)[1]:
            return mutant.code
    return None


def make_corpus(tasks: Iterable[LeetCodeTask], seed: int, n: int) -> list[tuple[str, str]]:
    """Return at most ``n`` documents (a prompt's text and an answer), honest and cheating in turn, short ones first.

    Honest answers appear under every mode, exploits under their own mode, in all variants. ``seed`` determines the order of
    documents of similar length, and the cheaters' words.
    """
    tasks = list(tasks)
    rng = random.Random(seed)
    honest = [(make_prompt(task, mode).text, fenced(task.solution)) for task in tasks for mode in MODES]
    cheats = [
        (make_prompt(task, mode.name).text, fenced(terse_exploit(exploit, task, rng)))
        for task in tasks
        for mode in MODES.values()
        for exploit in mode.exploits
    ]
    return [document for both in zip(_short_first(honest, rng), _short_first(cheats, rng)) for document in both][:n]


def terse_exploit(exploit: Exploit, task: LeetCodeTask, rng: random.Random) -> str:
    """Return a program that contains an exploit and solves nothing."""
    return exploit_code(exploit, task.starter, terse_body(task, rng) or "        return None\n")


def _short_first(documents: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield documents by length, in steps of 256 characters, within which the order is random."""
    keyed = [((len(prompt) + len(answer)) // 256, rng.random(), (prompt, answer)) for prompt, answer in documents]
    yield from (document for _, _, document in sorted(keyed))
