"""Combines all rules of a schema for a value: follows references, merges ``allOf`` and multiplies out ``anyOf``.

The result accepts no text that the schema rejects. Where it accepts less, docs/structured-output.md says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from . import values
from .containers import Containers
from .disjoint import told_apart
from .document import Document, Place, pointer
from .forms import ANY, NOTHING, Form, Leaf, alternatives
from .keywords import OF_TYPE, TYPES, Keywords
from .scalars import Scalars

MAX_FORMS = 5_000
MAX_BESIDE = 200  # schemas that apply to one value
MAX_LEVELS = 24  # of nested arrays and objects in the caller's schema, including recursion by reference
MAX_DEPTH = 150  # of nested calls of ``_form``, each of which takes several Python frames
_REFUSED = {
    "not": "say what is allowed in place of what is not",
    "if": "anyOf with the cases written out",
    "$dynamicRef": "$ref",
    "$recursiveRef": "$ref",
}
_DEPENDENT = dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"))
_ASSERTIONS = {"type", "enum", "const"}.union(*OF_TYPE.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """An ``anyOf`` or ``oneOf``. ``ancestors`` are the places on the way to it that apply to the same value."""

    kind: Literal["anyOf", "oneOf"]
    place: Place
    branches: tuple[Place, ...]
    ancestors: frozenset[str]

    @property
    def key(self) -> str:
        return f"{self.place.pointer} {self.kind}"


@dataclass(slots=True)
class _Rules:
    """The schemas with rules of their own for a value, and the choices that apply to the same value."""

    simples: tuple[Place, ...]
    groups: tuple[Group, ...]


class Conjunction:
    """Makes the forms of places: each set of places once per level of nesting."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.keywords = Keywords(document)
        self._levels: dict[Any, int] = {}  # the level at which each set of places was first met
        self.was_cut = False  # whether nesting has been cut off anywhere
        self._made: dict[Any, Form] = {}
        self._depth = 0
        self._scalars = Scalars(self.keywords)
        self._containers = Containers(self.keywords, self.of, self._is_beneath)
        self._ancestors: dict[str, frozenset[str]] = {}

    def of(self, places: list[Place], level: int) -> Form:
        """Return the form that all of these places allow together at a level of nesting."""
        rules = self._expanded(places, frozenset())
        return NOTHING if rules is None else self._form(rules, level)

    # ---- schemas that apply together ----

    def _expanded(self, places: list[Place], ancestors: frozenset[str]) -> _Rules | None:
        """Follow references and ``allOf``. Return None if one of the schemas is false."""
        simples: dict[str, Place] = {}
        groups: dict[str, Group] = {}
        seen: set[str] = set()
        waiting = [(place, ancestors) for place in reversed(places)]
        while waiting:
            place, above = waiting.pop()
            place = self.document.enter(place)
            if place.pointer in above:
                raise self.document.error(place, "$ref", "references that do not lead back to themselves")
            if place.schema is False:
                return None
            if place.schema is True or place.pointer in seen:
                continue
            seen.add(place.pointer)
            above = above | {place.pointer}
            waiting += reversed([(each, above) for each in self._look(place, above, simples, groups)])
            if len(simples) > MAX_BESIDE or len(groups) > MAX_BESIDE:
                raise self.document.error(place, "the schema", f"at most {MAX_BESIDE} schemas beside each other")
        return _Rules(tuple(simples.values()), tuple(groups.values()))

    def _look(
        self, place: Place, above: frozenset[str], simples: dict[str, Place], groups: dict[str, Group]
    ) -> list[Place]:
        """Record the rules of a place, and return the places that apply to the same value."""
        has, get = self.keywords.has, self.keywords.get
        if has(place, "$ref") and self.document.draft <= 7:
            return [self.document.resolve(place)]
        self._refuse(place)
        if self.keywords.any_of(place, _ASSERTIONS):
            simples[place.pointer] = place
            self._ancestors[place.pointer] = self._ancestors.get(place.pointer, above) & above
        beside = []
        for keyword in ("anyOf", "oneOf"):
            if get(place, keyword) is not None:
                branches = tuple(place.child(keyword, index) for index in range(len(place.schema[keyword])))
                group = Group(kind=keyword, place=place, branches=branches, ancestors=above)
                groups[group.key] = group
        for group in self._dependents(place, above):
            groups[group.key] = group
        if has(place, "$ref"):
            beside.append(self.document.resolve(place))
        if get(place, "allOf") is not None:
            beside += [place.child("allOf", index) for index in range(len(place.schema["allOf"]))]
        return beside

    def _refuse(self, place: Place) -> None:
        if not self.keywords.any_of(place, _REFUSED.keys()):
            return
        for keyword, instead in _REFUSED.items():
            if self.keywords.has(place, keyword):
                if keyword == "if" and not {"then", "else"} & place.schema.keys():
                    continue  # has no effect alone
                raise self.keywords.unsupported(place, keyword, instead)

    def _dependents(self, place: Place, above: frozenset[str]) -> list[Group]:
        """Return a choice for each property that requires more: either without it, or with what it requires."""
        found: list[Group] = []
        if not self.keywords.any_of(place, _DEPENDENT.keys()):
            return found
        for keyword in _DEPENDENT:
            if keyword == "dependencies" and self.document.draft > 7 and self.keywords.has(place, keyword):
                raise self.keywords.unsupported(place, keyword, "dependentRequired or dependentSchemas")
            for name, asked in (self.keywords.get(place, keyword) or {}).items():
                at = place.child(keyword, name)
                with_it = {"required": [name, *asked]} if isinstance(asked, list | tuple) else {"required": [name]}
                branches = [_made_up(at, "without", {"properties": {name: False}}), _made_up(at, "with", with_it)]
                if not isinstance(asked, list | tuple):
                    branches[1] = _made_up(at, "with", {**with_it, "allOf": [asked]})
                found.append(Group(kind="anyOf", place=at, branches=tuple(branches), ancestors=above))
        return found

    def _is_beneath(self, place: Place, other: Place) -> bool:
        """Whether ``other`` includes a place, so that properties evaluated in the place count as evaluated there."""
        return other.pointer in self._ancestors.get(place.pointer, frozenset()) or place.synthetic

    # ---- choices ----

    def _form(self, rules: _Rules, level: int) -> Form:
        key = (*(place.pointer for place in rules.simples), *(group.key for group in rules.groups), level)
        if key not in self._made:
            self._depth += 1
            if self._depth > MAX_DEPTH or len(self._made) >= MAX_FORMS:
                where = (rules.simples or [group.place for group in rules.groups])[0]
                raise self.document.error(where, "the schema", "fewer properties, choices and references")
            self._levels.setdefault(key[:-1], level)
            if not rules.groups:
                self._made[key] = self._typed(rules.simples, level)
            else:
                self._made[key] = NOTHING if self._contradict(rules.simples) else self._chosen(rules, level)
            self._depth -= 1
        return self._made[key]

    def _chosen(self, rules: _Rules, level: int) -> Form:
        group, *others = rules.groups
        forms = []
        for branch in group.branches:
            beside = self._expanded([branch], group.ancestors)
            if beside is None:
                forms.append(NOTHING)
                continue
            merged = _Rules(_union(rules.simples, beside.simples), _union_of_groups(others, beside.groups))
            forms.append(self._form(merged, level))
        if group.kind == "oneOf" and len(forms) > 1:
            forms = self._one_of(group, forms)
        return alternatives(forms)

    def _one_of(self, group: Group, forms: list[Form]) -> list[Form]:
        told = told_apart(forms, _tag(group.place))
        if told is None:
            instead = "anyOf, or branches that differ in their type or in the const of one property"
            raise self.keywords.unsupported(group.place, "oneOf", instead)
        return told

    # ---- one type at a time ----

    def _typed(self, simples: tuple[Place, ...], level: int) -> Form:
        listed = self._listed_values(simples)
        types, inferred = self._types(simples)
        if listed is not None:
            allowed = [value for value in listed if inferred or values.is_of(value, types)]
            allowed = self._scalars.among(allowed, simples)
            return Form([Leaf(type="values", values=allowed)]) if allowed else NOTHING
        if not inferred and len(types) == len(TYPES):
            return ANY
        leaves = []
        for name in types:
            if name in ("array", "object") and level >= MAX_LEVELS:
                self._cut(simples, level)
                continue
            made = (
                self._containers.leaves(name, simples, level + 1)
                if name in ("array", "object")
                else self._scalars.leaves(name, simples)
            )
            for leaf in made:
                leaf.inferred = inferred
            leaves += made
        return Form(leaves)

    def _cut(self, simples: tuple[Place, ...], level: int) -> None:
        """Cut off the nesting of a recursive schema; refuse any other that is nested too deeply."""
        if self._levels.get(tuple(place.pointer for place in simples), level) == level:
            raise self.document.error(simples[0], "the schema", f"at most {MAX_LEVELS} levels of arrays and objects")
        self.was_cut = True

    def _contradict(self, simples: tuple[Place, ...]) -> bool:
        """Whether these schemas allow no value, whatever the choices are."""
        return self._listed_values(simples) == [] or not self._types(simples)[0]

    def _listed_values(self, simples: tuple[Place, ...]) -> list[Any] | None:
        """Return the values that ``const`` and ``enum`` allow; None if there is neither."""
        listed: dict[Any, Any] | None = None
        for place in simples:
            for keyword in ("enum", "const"):
                if self.keywords.has(place, keyword):
                    named = self.keywords.get(place, keyword)
                    keyed = {values.key(value): value for value in (named if keyword == "enum" else [named])}
                    self._check_spelled(place, keyword, keyed)
                    listed = keyed if listed is None else {each: listed[each] for each in listed if each in keyed}
        return None if listed is None else list(listed.values())

    def _check_spelled(self, place: Place, keyword: str, keyed: dict[Any, Any]) -> None:
        for value in keyed.values():
            if not values.can_be_written(value):
                allowed = "numbers that a double holds, and texts without control characters"
                raise self.document.error(f"{place.pointer}/{keyword}", value, allowed)

    def _types(self, simples: tuple[Place, ...]) -> tuple[list[str], bool]:
        """Return the types that all places allow, and False.

        If no place names a type, return the types that their keywords apply to, and True; all types, and False, if
        there are no such keywords either.
        """
        allowed: list[str] | None = None
        for place in simples:
            named = self.keywords.get(place, "type")
            if named is not None:
                own = [named] if isinstance(named, str) else list(dict.fromkeys(named))
                allowed = own if allowed is None else _common(allowed, own)
        if allowed is not None:
            return [name for name in allowed if name != "integer" or "number" not in allowed], False
        inferred = [
            name
            for name, own in OF_TYPE.items()
            if any(self._speaks_of(place, keyword) for place in simples for keyword in own & place.schema.keys())
        ]
        return (inferred, True) if inferred else (list(TYPES), False)

    def _speaks_of(self, place: Place, keyword: str) -> bool:
        return self.keywords.has(place, keyword) and (keyword != "format" or self._scalars.is_enforced(place))


def _common(ours: list[str], others: list[str]) -> list[str]:
    """Return the types that are in both lists; an integer is also a number."""
    kept = [name for name in ours if name in others or (name == "integer" and "number" in others)]
    return kept + (["integer"] if "number" in ours and "integer" in others and "integer" not in kept else [])


def _tag(place: Place) -> str | None:
    """Return the property that distinguishes the branches, from OpenAPI's ``discriminator``."""
    discriminator = place.schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def _made_up(at: Place, name: str, schema: dict[str, Any]) -> Place:
    return Place(schema=schema, pointer=at.pointer + pointer(name), base=at.base, synthetic=True)


def _union(ours: tuple[Place, ...], others: tuple[Place, ...]) -> tuple[Place, ...]:
    return tuple({place.pointer: place for place in (*ours, *others)}.values())


def _union_of_groups(ours: list[Group], others: tuple[Group, ...]) -> tuple[Group, ...]:
    return tuple({group.key: group for group in (*ours, *others)}.values())
