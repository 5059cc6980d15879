"""Steering rules of a request as plain data (condition, scope, action), and the rule book that applies them."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, Literal, get_args

from mi_route2.engine.controllers import Action, ClearOverride, Override, RequestView, SetScale, StepView
from mi_route2.sites import Site
from mi_route2.steering.specs import UNSTEERED, At, AVector, Monitor, Plain, Steer, Steering, Vector, looker, several
from mi_route2.steering.state import SteeringState
from mi_route2.validation import NonNegative, Probability, validated

Scope = Literal["this_token", "next_step", "rest_of_request", "rest_of_conversation"]
SCOPES = get_args(Scope)
RULES, SWITCHED, ADDED = 16, 3, 256
"""Maximum rules per request; maximum rules that may add vectors between steps, because each subset of them needs a steering row;
and maximum vectors of all rules of a request that are read from plain data, and of all that hold in a conversation, each of which
is summed for each subset."""
_FIELDS = {
    "a rule": ("when", "scope", "apply"),
    "a probe": ("site", "vector", "threshold", "sharpness"),
    "an added vector": ("site", "vector", "scale"),
}


@validated
class Probe:
    """The gate ``sigmoid(sharpness * (h.vector - threshold))`` at a site."""

    site: At
    vector: AVector
    threshold: Annotated[float, Plain] = 0.0
    sharpness: Annotated[NonNegative, Plain] = 1.0

    def __post_init__(self) -> None:
        if self.sharpness == 0:
            raise ValueError("a probe with sharpness 0 has a gate of 0.5 for every token: give a sharpness above 0")


@validated
class Rule:
    """One steering rule: a condition, a scope, and vectors to add or an attenuation.

    Raises:
        ValueError: the combination is not possible; the sentence says what to write instead.
    """

    scope: Scope
    when: Probe | None = None
    add: Annotated[tuple[Steer, ...], several(Steer)] = ()
    attenuate: Annotated[Probability, Plain] | None = None

    def __post_init__(self) -> None:
        if bool(self.add) == (self.attenuate is not None):
            raise ValueError("a rule either adds vectors or attenuates: split it into two rules")
        if self.when is None and self.scope == "next_step":
            raise ValueError("always with next_step would act on every step: write rest_of_request")
        if self.scope == "rest_of_conversation" and any(Vector(entry.vector).values is not None for entry in self.add):
            raise ValueError("a vector for the rest of a conversation needs a name: register the vector and give its name")
        if self.when is not None and self.scope == "this_token":
            self.monitor("")

    @cached_property
    def _monitors(self) -> dict[str, Monitor]:
        """Monitors by name, one for all checks and admissions, because each sums its vectors."""
        return {}

    def monitor(self, name: str) -> Monitor:
        """Return the monitor of this rule; with scope ``this_token`` it also acts. ``ValueError`` for a site before the probe's."""
        if name not in self._monitors:
            self._monitors[name] = self._monitor(name)
        return self._monitors[name]

    def _monitor(self, name: str) -> Monitor:
        assert self.when is not None
        probe = (self.when.site, self.when.vector, self.when.threshold, self.when.sharpness)
        if self.scope != "this_token":
            return Monitor(*probe, gates=(), name=name)
        if self.attenuate is None:
            return Monitor(*probe, gates=(), adds=self.add, name=name)
        return Monitor(*probe, mode="attenuate", depth=1 - self.attenuate, gate_rows=True, name=name)

    def resolved(self, lookup: Callable[[str], Vector]) -> "Rule":
        """Return the rule with its names resolved. Vectors added for the rest of a conversation stay names, which may lapse."""
        when = self.when and replace(self.when, vector=Vector(self.when.vector).resolved(lookup))
        add = tuple(entry.resolved(lookup) for entry in self.add)
        return replace(self, when=when, add=self.add if self.scope == "rest_of_conversation" else add)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the vectors that the rule adds."""
        return tuple(vector.name for entry in self.add if (vector := Vector(entry.vector)).values is None)

    def fingerprint(self) -> bytes:
        """Return a digest that identifies the rule: by numbers if vectors are given as such, by names if they are named."""
        vectors = [*(entry.vector for entry in self.add), *([] if self.when is None else [self.when.vector])]
        hasher = hashlib.sha256(repr((self.scope, self.attenuate)).encode())
        for entry in self.add:
            hasher.update(f"add {entry.site} {entry.scale!r} ".encode())
        if self.when is not None:
            hasher.update(f"when {self.when.site} {self.when.threshold!r} {self.when.sharpness!r} ".encode())
        for vector in map(Vector, vectors):
            hasher.update((vector.digest or vector.name.encode()) + b";")
        return hasher.digest()


def parse_rules(data: object) -> tuple[Rule, ...]:
    """Parse rules from plain data, as read from JSON (a vector may also be a tensor).

    Raises:
        ValueError: names the rule and what to change.
    """
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ValueError("steering rules are a list of objects with when, scope and apply")
    _refuse_many(data)
    rules = []
    for number, one in enumerate(data):
        try:
            rules.append(_rule(one))
        except (ValueError, KeyError, TypeError) as error:
            reason = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise ValueError(f"steering rule {number}: {reason}") from error
    _refuse_added(sum(len(rule.add) for rule in rules))
    refuse_rules(rules)
    return tuple(rules)


def _refuse_added(count: int) -> None:
    if count > ADDED:
        raise ValueError(
            f"rules that add {count} vectors are too many: those of a request may add {ADDED}, so sum those of one site"
        )


def _refuse_many(rules: Sequence[object]) -> None:
    if len(rules) > RULES:
        raise ValueError(f"{len(rules)} steering rules are too many: a request may have at most {RULES}")


def refuse_rules(rules: Sequence[Rule]) -> None:
    """Raise ``ValueError`` if the rules cannot be combined in one request."""
    _refuse_many(rules)
    if (switched := sum(is_switched(rule) for rule in rules)) > SWITCHED:
        raise ValueError(
            f"{switched} rules add vectors after a probe has fired: a request has at most {SWITCHED}, beside this_token"
        )


def is_switched(rule: Rule) -> bool:
    """Return whether a rule adds vectors that are switched on between steps."""
    return bool(rule.when is not None and rule.add and rule.scope != "this_token")


def _rule(data: object) -> Rule:
    fields = _object("a rule", data)
    when, apply = fields.get("when", "always"), fields.get("apply")
    probe = None
    if when != "always":
        if not isinstance(when, Mapping) or set(when) != {"probe"}:
            raise ValueError('when is "always" or {"probe": {...}}')
        given = _object("a probe", when["probe"])
        probe = Probe(_site(given), _vector(given), **{key: given[key] for key in ("threshold", "sharpness") if key in given})
    if not isinstance(apply, Mapping) or set(apply) not in ({"add"}, {"attenuate"}):
        raise ValueError('apply is {"add": [...]} or {"attenuate": factor}')
    if "scope" not in fields:
        raise ValueError(f"scope is missing: choose among {', '.join(SCOPES)}")
    if "attenuate" in apply:
        return Rule(fields["scope"], probe, attenuate=apply["attenuate"])
    if not isinstance(apply["add"], Sequence) or isinstance(apply["add"], str) or not apply["add"]:
        raise ValueError("add is a list of at least one object with site, vector and scale")
    _refuse_added(len(apply["add"]))
    entries = [_object("an added vector", entry) for entry in apply["add"]]
    return Rule(fields["scope"], probe, tuple(Steer(_site(e), _vector(e), e.get("scale", 1.0)) for e in entries))


def _object(what: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is an object with {', '.join(_FIELDS[what])}, not {data!r:.60}")
    if unknown := [key for key in data if key not in _FIELDS[what]]:
        raise ValueError(f"{what} has no field {unknown[0]!r}: it has {', '.join(_FIELDS[what])}")
    return data


def _site(data: Mapping[str, Any]) -> Site:
    site = data.get("site")
    if isinstance(site, Site):
        return site
    if not isinstance(site, str):
        raise ValueError("a site is written as in blocks.3.resid_post")
    return Site.parse(site)


def _vector(data: Mapping[str, Any]) -> Vector:
    if "vector" not in data:
        raise ValueError("a vector is missing: give numbers, or the name of one that is registered")
    return Vector(data["vector"])


CONVERSATIONS = 1024
FIRES = 0.5
LASTING = "rest_of_conversation"


@dataclass
class RuledRequest:
    """State of a running request with rules: its steering at admission and its active rules."""

    spec: Steering
    configs: Mapping[str, Steering]
    rules: Sequence[Rule]
    conversation: str | None
    owner: str
    base: float
    """The scale that holds for the whole request."""
    digests: Mapping[str, bytes]
    """Content digests of the named vectors in the rules, as of admission."""
    fired: set[int] = field(default_factory=set)
    config: str | None = None
    scale: float = 1.0

    @property
    def attenuates(self) -> bool:
        """True if the scale of the request is, or may be, set for a rule."""
        later = any(rule.attenuate is not None and rule.when is not None and rule.scope != "this_token" for rule in self.rules)
        return later or self.base != 1

    @property
    def switches(self) -> bool:
        """True if the scale or the row of the request is, or may be, set for a rule."""
        return self.attenuates or bool(self.configs)


@dataclass(frozen=True)
class Latch:
    """A rule that holds in a conversation, the digests of its named vectors at the time it was latched, and by whom it was."""

    rule: Rule
    digests: Mapping[str, bytes]
    requests: set[int] = field(default_factory=set)


class RuleBook:
    """The rules of all running requests and conversations; a ``SyncController``.

    Args:
        conversations: how many conversations may have rules for their rest; then the least recently used one of the owner that has
            most of them is forgotten.
        rivals: names of the probe controllers that set the scale and the row of a request with this steering.
    """

    def __init__(self, conversations: int = CONVERSATIONS, rivals: Callable[[Steering], Sequence[str]] = lambda _: ()):
        self.name = "rules"
        self.capacity, self._rivals = conversations, rivals
        self.lapsed = 0
        """Number of latches that ended because a name no longer stood for the same vector."""
        self._latches: OrderedDict[str, dict[bytes, Latch]] = OrderedDict()
        self._whose: dict[str, str] = {}
        """Owner of each conversation that was latched."""
        self._runs: dict[int, RuledRequest] = {}

    def admit(
        self,
        state: SteeringState,
        request: int,
        rules: Sequence[Rule],
        spec: Steering | None = None,
        conversation: str | None = None,
        vectors: Mapping[str, Vector] | None = None,
        *,
        owner: str = "client",
    ) -> None:
        """Call ``state.admit`` with the request's rules and those that hold in its conversation, if it has any of these.

        ``vectors`` are those that names in the rules stood for when the request came (``None``: those of now).

        Raises the errors of ``state.admit``, and ``ValueError`` for conversation rules without a conversation, more than ``RULES``
        of them in one, or rules beside a probe controller that sets the same scale; nothing is stored then.
        """
        if not rules and conversation is None:
            state.admit(request, spec, owner=owner)
            return
        run = self._runs.get(request)
        if run is None:
            run = self._run(state, tuple(rules), spec, conversation, vectors, owner)
            self._refuse_rivals(run, spec)
        again = request in state
        state.admit(request, run.spec, owner=run.owner, conversation=run.conversation, configs=run.configs)
        self._runs[request] = run
        if not again:
            run.scale = run.base
            if run.base != 1:
                state.set_scale(run.base, request=request)
            for rule in run.rules:
                if rule.when is None and rule.scope == LASTING:
                    self._latch(run, rule, request)

    def check(
        self,
        state: SteeringState,
        rules: Sequence[Rule],
        spec: Steering | None,
        conversation: str | None,
        vectors: Mapping[str, Vector] | None = None,
    ) -> None:
        """Raise the errors that ``admit`` would raise for as long as the engine lives, without admitting."""
        if not rules and conversation is None:
            state.check(spec)
            return
        run = self._run(state, rules, spec, conversation, vectors)
        self._refuse_rivals(run, spec)
        state.check(run.spec, run.configs)

    def switches(
        self,
        state: SteeringState,
        request: int,
        rules: Sequence[Rule],
        spec: Steering | None,
        conversation: str | None,
        vectors: Mapping[str, Vector] | None = None,
    ) -> bool:
        """Return whether the scale or the row of a request, which may still wait, is or may be set for a rule."""
        run = self._runs.get(request)
        return (run or self._run(state, rules, spec, conversation, vectors)).switches

    def refuse(self, request: int, value: float | str | None) -> None:
        """Raise ``ValueError`` for a scale or a configuration by which a rule of a running request would be undone, or might be."""
        run = self._runs.get(request)
        if run is None:
            return
        if isinstance(value, str) or value is None:
            undone, what = bool(run.configs) and value != run.config, "adds vectors sets the row"
        else:
            undone, what = run.attenuates and value != run.scale, "attenuates sets the scale"
        if undone:
            raise ValueError(f"a rule that {what} of request {request}, and would be undone: send it without that rule")

    @property
    def idle(self) -> bool:
        """True if no running request has rules."""
        return not self._runs

    def release(self, request: int) -> None:
        """Forget a request that has ended; no effect for one without rules."""
        self._runs.pop(request, None)

    def _refuse_rivals(self, run: RuledRequest, spec: Steering | None) -> None:
        if run.switches and (rivals := self._rivals(spec or UNSTEERED)):
            raise ValueError(
                f"the controller {rivals[0]!r} and the rules that hold here would both set the scale and the row of this request: "
                "give it one of them"
            )

    def _run(
        self,
        state: SteeringState,
        rules: Sequence[Rule],
        spec: Steering | None,
        conversation: str | None,
        vectors: Mapping[str, Vector] | None,
        owner: str = "",
    ) -> RuledRequest:
        spec = spec or UNSTEERED
        refuse_rules(rules)
        if conversation is None and any(rule.scope == LASTING for rule in rules):
            raise ValueError(
                "a rule for the rest of the conversation needs a conversation: give the request its field conversation "
                "(conversation_id over HTTP)"
            )
        fingerprints, named = [rule.fingerprint() for rule in rules], {**state.vectors, **(vectors or {})}
        # a rule that holds with newer vectors than those that its names stood for when this request came is not this request's
        newer = {name for name in vectors or {} if name in state.vectors and named[name].digest != state.vectors[name].digest}
        latched = [
            rule
            for rule in self._holding(state, conversation)
            if rule.fingerprint() not in fingerprints or newer.isdisjoint(rule.names)
        ]
        known = {rule.fingerprint() for rule in latched}
        # a rule that already holds is not added again, and one for the rest of the conversation that is given twice is one rule
        rules = [
            rule
            for i, rule in enumerate(rules)
            if fingerprints[i] not in known and not (rule.scope == LASTING and fingerprints[i] in fingerprints[:i])
        ]
        self._refuse_full(conversation, (*latched, *rules))
        look = looker(named)
        digests = {name: named[name].digest for rule in rules for name in rule.names if name in named}
        resolved_adds = [tuple(entry.resolved(look) for entry in rule.add) for rule in rules]
        monitors = tuple(rule.monitor(_name(i)) for i, rule in enumerate(rules) if rule.when is not None)
        throughout = [*latched, *(rule for rule in rules if rule.when is None)]
        latched_adds = tuple(entry for rule in latched for entry in rule.add)
        added = latched_adds + tuple(entry for rule, adds in zip(rules, resolved_adds) if rule.when is None for entry in adds)
        steering = replace(spec, decode=(*spec.decode, *added), monitors=(*spec.monitors, *monitors))
        switched = [i for i, rule in enumerate(rules) if is_switched(rule)]
        configs = {}
        for count in range(1, len(switched) + 1):
            for some in combinations(switched, count):
                entries = tuple(entry for i in some for entry in resolved_adds[i])
                configs[_config(some)] = replace(steering.rows, decode=(*steering.decode, *entries))
        base = math.prod((rule.attenuate for rule in throughout if rule.attenuate is not None), start=1.0)
        return RuledRequest(steering, configs, rules, conversation, owner, base, digests)

    def _refuse_full(self, conversation: str | None, rules: Sequence[Rule]) -> None:
        """Raise ``ValueError`` if more than ``RULES`` rules, or rules of more vectors than ``ADDED``, may come to hold."""
        if conversation is None:
            return
        running = [rule for run in self._runs.values() if run.conversation == conversation for rule in run.rules]
        lasting = {rule.fingerprint(): len(rule.add) for rule in (*rules, *running) if rule.scope == LASTING}
        for count, what, most in ((len(lasting), "rules", RULES), (sum(lasting.values()), "vectors of rules", ADDED)):
            if count > most:
                raise ValueError(
                    f"this conversation would have {count} {what} for its rest, and a conversation has at most {most}: start "
                    "another, or send fewer"
                )

    # Conversations

    def _holding(self, state: SteeringState, conversation: str | None) -> list[Rule]:
        """Return the rules that hold in a conversation; those whose names stand for other vectors now are dropped as lapsed."""
        if conversation is None or conversation not in self._latches:
            return []
        self._latches.move_to_end(conversation)
        latches = self._latches[conversation]
        for key, latch in list(latches.items()):
            if any(name not in state.vectors or state.vectors[name].digest != old for name, old in latch.digests.items()):
                del latches[key]
                self.lapsed += 1
        if not latches:
            del self._latches[conversation], self._whose[conversation]
        return [latch.rule for latch in latches.values()]

    def withdraw(self, requests: Set[int]) -> None:
        """Forget the rules that hold in a conversation only because of ``requests``."""
        for conversation, latches in list(self._latches.items()):
            for key, latch in list(latches.items()):
                if latch.requests and latch.requests <= requests:
                    del latches[key]
                latch.requests.difference_update(requests)
            if not latches:
                del self._latches[conversation], self._whose[conversation]

    def _latch(self, run: RuledRequest, rule: Rule, request: int) -> None:
        """Make ``rule`` hold in the conversation of ``run``, evicting the least recently used conversation if needed."""
        if run.conversation is None:
            return
        latches = self._latches.setdefault(run.conversation, {})
        self._latches.move_to_end(run.conversation)
        key, digests = rule.fingerprint(), {name: run.digests[name] for name in rule.names}
        latch = latches.get(key)
        if latch is None or (latch.digests != digests and request > max(latch.requests, default=-1)):
            latch = latches[key] = Latch(rule, digests)  # a later request has the newer vectors of its names
        if latch.digests == digests:
            latch.requests.add(request)
        assert len(latches) <= RULES, len(latches)  # all that may come to hold are counted when a request is admitted
        self._whose[run.conversation] = run.owner
        if len(self._latches) > self.capacity:
            self._whose = {conversation: self._whose[conversation] for conversation in self._latches}
            ((most, _),) = Counter(self._whose.values()).most_common(1)
            del self._latches[next(one for one in self._latches if self._whose[one] == most)]

    # Between steps

    def on_step(self, view: StepView) -> list[Action]:
        """Evaluate the probes at the tokens from which one was sampled, and return the changes for the next token."""
        actions: list[Action] = []
        for request in view.requests:
            run = self._runs.get(request.request)
            if run is not None and request.token is not None:
                changes = self._judge(run, request)  # even the last token may latch a rule for the rest of the conversation
                actions += () if request.finished else changes
            if request.finished:
                self.release(request.request)
        return actions

    def _judge(self, run: RuledRequest, request: RequestView) -> list[Action]:
        on = set()
        for i, rule in enumerate(run.rules):
            if rule.when is None or rule.scope == "this_token":
                continue
            reading = request.readings.get(_name(i))
            if reading is not None and reading.gate >= FIRES:
                on.add(i)
                if rule.scope == LASTING and i not in run.fired:
                    self._latch(run, rule, request.request)
                if rule.scope != "next_step":
                    run.fired.add(i)
        return self._switch(run, request.request, on | run.fired)

    def _switch(self, run: RuledRequest, request: int, on: set[int]) -> list[Action]:
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
        """Return plain data: the number of requests with rules, of conversations with latched rules, and of lapsed latches."""
        return {"requests": len(self._runs), "conversations": len(self._latches), "lapsed": self.lapsed}


def _name(i: int) -> str:
    return f"rule {i}"


def _config(which: Sequence[int]) -> str:
    return f"rules {'+'.join(map(str, which))}"
