"""Carries out the rules that requests bring (``rules.py``), and remembers what holds for the rest of a conversation.

    book.admit(state, 7, rules, spec, conversation="c1")     in the place of state.admit
    controllers = Controllers([book, ...])                   it judges probes between steps

All that a rule may ever need is checked and taken when the request is admitted: a probe that fires cannot be refused.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from mi_route2.engine.actions import Action, ClearOverride, Override, SetScale
from mi_route2.engine.controllers import RequestView, StepView
from mi_route2.engine.rules import RULES, Rule, is_switched, refuse_rules
from mi_route2.interventions.specs import Steering
from mi_route2.interventions.steering import SteeringState

CONVERSATIONS = 1024
FIRES = 0.5


@dataclass
class Run:
    """A request with rules: what it was admitted with, and what of its rules is on."""

    spec: Steering
    configs: Mapping[str, Steering]
    rules: Sequence[Rule]
    conversation: str | None
    owner: str
    base: float
    """The scale that holds throughout."""
    digests: Mapping[str, bytes]
    """Content of the vectors that the rules name, as the request was admitted with them."""
    fired: set[int] = field(default_factory=set)
    config: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Latch:
    """A rule that holds in a conversation, and the content that its names had when it began to."""

    rule: Rule
    digests: Mapping[str, bytes]


class RuleBook:
    """See the module; a ``SyncController``."""

    def __init__(self, conversations: int = CONVERSATIONS):
        self.name = "rules"
        self.capacity = conversations
        self.lapsed = 0
        """Latches that ended because a name no longer stood for the same vector."""
        self._latches: OrderedDict[str, dict[bytes, Latch]] = OrderedDict()
        self._runs: dict[int, Run] = {}

    def admit(
        self,
        state: SteeringState,
        request: int,
        rules: Sequence[Rule],
        spec: Steering | None = None,
        *,
        owner: str = "client",
        conversation: str | None = None,
    ) -> None:
        """``state.admit``, with the rules and with what holds in the conversation. Errors are those of ``state.admit``, and
        ``ValueError`` for rules of a conversation without one; nothing is remembered then."""
        run = self._runs.get(request)
        if run is None:
            run = self._composed(state, tuple(rules), spec or Steering(), owner, conversation)
        again = request in state
        state.admit(request, run.spec, owner=run.owner, conversation=run.conversation, configs=run.configs)
        self._runs[request] = run
        if not again:
            if run.base != 1:
                state.set_scale(run.base, request=request)
            run.scale = run.base
            for rule in run.rules:
                if rule.when is None and rule.scope == "rest_of_conversation":
                    self._latch(run, rule)

    def check(self, state: SteeringState, rules: Sequence[Rule], spec: Steering | None, conversation: str | None) -> None:
        """The errors that ``admit`` would raise for as long as the engine lives; takes nothing."""
        run = self._composed(state, rules, spec or Steering(), "", conversation)
        state.check(run.spec, run.configs)

    @property
    def idle(self) -> bool:
        """Whether no running request has rules."""
        return not self._runs

    def release(self, request: int) -> None:
        """The request has ended; nothing happens for one without rules."""
        self._runs.pop(request, None)

    def _composed(self, state: SteeringState, rules: Sequence[Rule], spec: Steering, owner: str, conversation: str | None) -> Run:
        refuse_rules(rules)
        if conversation is None and any(rule.scope == "rest_of_conversation" for rule in rules):
            raise ValueError("a rule for the rest of the conversation needs one: give conversation_id")
        latched = self._holding(state, conversation)
        known = {rule.content() for rule in latched}
        rules = [rule for rule in rules if rule.content() not in known]  # what holds already does not hold twice
        throughout = [*latched, *(rule for rule in rules if rule.when is None)]
        monitors = tuple(rule.monitor(_name(i)) for i, rule in enumerate(rules) if rule.when is not None)
        added = tuple(entry for rule in throughout for entry in rule.add)
        own = replace(spec, decode=(*spec.decode, *added), monitors=(*spec.monitors, *monitors))
        switched = [i for i, rule in enumerate(rules) if is_switched(rule)]
        configs = {}
        for count in range(1, len(switched) + 1):
            for some in combinations(switched, count):
                entries = tuple(entry for i in some for entry in rules[i].add)
                configs[_config(some)] = replace(own.rows, decode=(*own.decode, *entries))
        base = math.prod((rule.attenuate for rule in throughout if rule.attenuate is not None), start=1.0)
        digests = {name: state.vectors[name].digest for rule in rules for name in rule.names if name in state.vectors}
        return Run(own, configs, rules, conversation, owner, base, digests)

    # Conversations

    def _holding(self, state: SteeringState, conversation: str | None) -> list[Rule]:
        """What holds in a conversation, as far as its names stand for the same vectors; the rest has lapsed."""
        if conversation is None or conversation not in self._latches:
            return []
        self._latches.move_to_end(conversation)
        latches = self._latches[conversation]
        for key, latch in list(latches.items()):
            if any(name not in state.vectors or state.vectors[name].digest != old for name, old in latch.digests.items()):
                del latches[key]
                self.lapsed += 1
        if not latches:
            del self._latches[conversation]
        return [latch.rule for latch in latches.values()]

    def _latch(self, run: Run, rule: Rule) -> None:
        """From now on ``rule`` holds in the conversation of ``run``; the conversation that was idle for longest makes room."""
        if run.conversation is None:
            return
        latches = self._latches.setdefault(run.conversation, {})
        self._latches.move_to_end(run.conversation)
        latches[rule.content()] = Latch(rule, {name: run.digests[name] for name in rule.names})
        while len(latches) > RULES:
            del latches[next(iter(latches))]
        while len(self._latches) > self.capacity:
            self._latches.popitem(last=False)

    # Between steps

    def on_step(self, view: StepView) -> list[Action]:
        """Judge the probes at the tokens from which one was sampled, and say what changes for the next."""
        actions: list[Action] = []
        for request in view.requests:
            run = self._runs.get(request.request)
            if run is not None and request.token is not None:
                found = self._judge(run, request)  # a last token may still decide about the rest of the conversation
                actions += () if request.finished else found
            if request.finished:
                self.release(request.request)
        return actions

    def _judge(self, run: Run, request: RequestView) -> list[Action]:
        on = set()
        for i, rule in enumerate(run.rules):
            if rule.when is None or rule.scope == "this_token":
                continue
            reading = request.readings.get(_name(i))
            if reading is not None and reading.gate >= FIRES:
                on.add(i)
                if rule.scope == "rest_of_conversation" and i not in run.fired:
                    self._latch(run, rule)
                if rule.scope != "next_step":
                    run.fired.add(i)
        return self._switch(run, request.request, on | run.fired)

    def _switch(self, run: Run, request: int, on: set[int]) -> list[Action]:
        adding = [i for i in sorted(on) if run.rules[i].add]
        config = _config(adding) if adding else None
        scale = run.base * math.prod(factor for i in sorted(on) if (factor := run.rules[i].attenuate) is not None)
        actions: list[Action] = []
        if config != run.config:
            actions.append(ClearOverride(request) if config is None else Override(request, config))
        if scale != run.scale:
            actions.append(SetScale(scale, request))
        run.config, run.scale = config, scale
        return actions

    def snapshot(self) -> dict[str, object]:
        """Plain data: how many requests have rules, in how many conversations something holds, and what lapsed."""
        return {"requests": len(self._runs), "conversations": len(self._latches), "lapsed": self.lapsed}


def _name(i: int) -> str:
    return f"rule {i}"


def _config(which: Sequence[int]) -> str:
    return f"rules {'+'.join(map(str, which))}"
