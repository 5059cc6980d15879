"""Rules that a request brings along as data: when something shows, for how long, do what.

    {"when": {"probe": {"site": "blocks.3.resid_post", "vector": "refusal", "threshold": 2.0, "sharpness": 4.0}},
     "scope": "rest_of_request",
     "apply": {"add": [{"site": "blocks.4.resid_post", "vector": [...], "scale": 2.0}]}}

when    always, or a probe: it fires where its gate is at least a half, which is where its score is at least the threshold
scope   this_token           the very token that is read: a monitor in the forward, whose gate scales what it applies
        next_step            the token after one on which it fired
        rest_of_request      from the token after the first one on which it fired
        rest_of_conversation likewise, and all of every later request of the conversation
apply   add                  vectors, on top of the request's own steering
        attenuate            the factor, 0 to 1, that what steers the request's generated tokens is multiplied by

Rules act on generated tokens alone. Those that are judged between steps read the token from which one was sampled.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from mi_route2.interventions.specs import At, AVector, Monitor, Plain, Steer, Vector, several
from mi_route2.sites import Site
from mi_route2.validation import NonNegative, Probability, validated

Scope = Literal["this_token", "next_step", "rest_of_request", "rest_of_conversation"]
SCOPES = get_args(Scope)
RULES, SWITCHED = 16, 3
"""Rules that a request may bring, and how many of them may add vectors after a step: each subset of those needs a row."""
_FIELDS = {
    "a rule": ("when", "scope", "apply"),
    "a probe": ("site", "vector", "threshold", "sharpness"),
    "an added vector": ("site", "vector", "scale"),
}


@validated
class Probe:
    """``sigmoid(sharpness * (h.vector - threshold))`` at a site."""

    site: At
    vector: AVector
    threshold: Annotated[float, Plain] = 0.0
    sharpness: Annotated[NonNegative, Plain] = 1.0

    def __post_init__(self) -> None:
        if self.sharpness == 0:
            raise ValueError("a probe with sharpness 0 reads nothing: its gate is always a half")


@validated
class Rule:
    """One rule. ``ValueError`` for what no rule can do, in one sentence that says what to write instead."""

    scope: Scope
    when: Probe | None = None
    add: Annotated[tuple[Steer, ...], several(Steer)] = ()
    attenuate: Annotated[Probability, Plain] | None = None

    def __post_init__(self) -> None:
        if bool(self.add) == (self.attenuate is not None):
            raise ValueError("a rule adds vectors or attenuates, one of the two: split it into two rules")
        if self.when is None and self.scope == "next_step":
            raise ValueError("always with next_step is no rule of its own: write rest_of_request")
        if self.scope == "rest_of_conversation" and any(Vector(entry.vector).values is not None for entry in self.add):
            raise ValueError("what is added for the rest of a conversation is named: register the vector and give its name")
        if self.when is not None and self.scope == "this_token":
            self.monitor("")

    def monitor(self, name: str) -> Monitor:
        """What is watched for this rule; of scope ``this_token`` it also acts. ``ValueError`` for a site before the probe's."""
        assert self.when is not None
        probe = (self.when.site, self.when.vector, self.when.threshold, self.when.sharpness)
        if self.scope != "this_token":
            return Monitor(*probe, gates=(), name=name)
        if self.attenuate is None:
            return Monitor(*probe, gates=(), adds=self.add, name=name)
        return Monitor(*probe, mode="attenuate", depth=1 - self.attenuate, gate_rows=True, name=name)

    def resolved(self, lookup: Callable[[str], Vector]) -> "Rule":
        """With its names looked up; what it adds for the rest of a conversation stays a name, under which it may lapse."""
        when = self.when and replace(self.when, vector=Vector(self.when.vector).resolved(lookup))
        add = tuple(entry.resolved(lookup) for entry in self.add)
        return replace(self, when=when, add=self.add if self.scope == "rest_of_conversation" else add)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the vectors that it adds."""
        return tuple(vector.name for entry in self.add if (vector := Vector(entry.vector)).values is None)

    def content(self) -> bytes:
        """What tells rules apart: numbers where they are given, names where vectors are named."""
        vectors = [*(entry.vector for entry in self.add), *([] if self.when is None else [self.when.vector])]
        found = hashlib.sha256(repr((self.scope, self.attenuate)).encode())
        for entry in self.add:
            found.update(f"add {entry.site} {entry.scale!r} ".encode())
        if self.when is not None:
            found.update(f"when {self.when.site} {self.when.threshold!r} {self.when.sharpness!r} ".encode())
        for vector in map(Vector, vectors):
            found.update((vector.digest or vector.name.encode()) + b";")
        return found.digest()


def parse_rules(data: object) -> tuple[Rule, ...]:
    """Rules from plain data, as JSON has it (a vector may be a tensor too). ``ValueError`` names the rule and what to change."""
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ValueError("steering rules are a list of objects with when, scope and apply")
    if len(data) > RULES:
        raise ValueError(f"{len(data)} steering rules are too many: a request brings at most {RULES}")
    found = []
    for number, one in enumerate(data):
        try:
            found.append(_rule(one))
        except (ValueError, KeyError, TypeError) as error:
            reason = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise ValueError(f"steering rule {number}: {reason}") from error
    refuse_rules(found)
    return tuple(found)


def refuse_rules(rules: Sequence[Rule]) -> None:
    """``ValueError`` for rules that cannot be brought together."""
    if (switched := sum(is_switched(rule) for rule in rules)) > SWITCHED:
        raise ValueError(
            f"{switched} rules add vectors after a probe has fired: a request has at most {SWITCHED}, beside this_token"
        )


def is_switched(rule: Rule) -> bool:
    """Whether a rule adds vectors that are switched on between steps."""
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
        raise ValueError("add is a list of objects with site, vector and scale, one at least")
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
