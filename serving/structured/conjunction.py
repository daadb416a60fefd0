"""Combines all rules of a schema for a value: follows references, merges ``allOf`` and multiplies out ``anyOf``.

The result accepts no text that the schema rejects. Where it accepts less, docs/structured-output.md says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from . import values
from .containers import Containers
from .disjoint import prove_disjoint
from .document import Document, SchemaNode, pointer
from .forms import ANY, EMPTY_FORM, Form, Leaf, alternatives
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
    """An ``anyOf`` or ``oneOf``. ``ancestors`` are the nodes on the way to it that apply to the same value."""

    kind: Literal["anyOf", "oneOf"]
    node: SchemaNode
    branches: tuple[SchemaNode, ...]
    ancestors: frozenset[str]

    @property
    def key(self) -> str:
        return f"{self.node.pointer} {self.kind}"


@dataclass(slots=True)
class _Rules:
    """The schemas with rules of their own for a value, and the choices that apply to the same value."""

    simples: tuple[SchemaNode, ...]
    groups: tuple[Group, ...]


class Conjunction:
    """The maker of the forms of nodes: each set of nodes once per level of nesting."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.keywords = Keywords(document)
        self._levels: dict[Any, int] = {}  # the level at which each set of nodes was first met
        self.was_cut = False  # whether nesting has been cut off anywhere
        self._made: dict[Any, Form] = {}
        self._depth = 0
        self._scalars = Scalars(self.keywords)
        self._containers = Containers(self.keywords, self.of, self._is_beneath)
        self._ancestors: dict[str, frozenset[str]] = {}

    def of(self, nodes: list[SchemaNode], level: int) -> Form:
        """Return the form that all of these nodes allow together at a level of nesting."""
        rules = self._expanded(nodes, frozenset())
        return EMPTY_FORM if rules is None else self._form(rules, level)

    # ---- schemas that apply together ----

    def _expanded(self, nodes: list[SchemaNode], ancestors: frozenset[str]) -> _Rules | None:
        """Follow references and ``allOf``. Return None if one of the schemas is false."""
        simples: dict[str, SchemaNode] = {}
        groups: dict[str, Group] = {}
        seen: set[str] = set()
        waiting = [(node, ancestors) for node in reversed(nodes)]
        while waiting:
            node, above = waiting.pop()
            node = self.document.enter(node)
            if node.pointer in above:
                raise self.document.error(node, "$ref", "references that do not lead back to themselves")
            if node.schema is False:
                return None
            if node.schema is True or node.pointer in seen:
                continue
            seen.add(node.pointer)
            above = above | {node.pointer}
            waiting += reversed([(each, above) for each in self._look(node, above, simples, groups)])
            if len(simples) > MAX_BESIDE or len(groups) > MAX_BESIDE:
                raise self.document.error(node, "the schema", f"at most {MAX_BESIDE} schemas beside each other")
        return _Rules(tuple(simples.values()), tuple(groups.values()))

    def _look(
        self, node: SchemaNode, above: frozenset[str], simples: dict[str, SchemaNode], groups: dict[str, Group]
    ) -> list[SchemaNode]:
        """Record the rules of a node, and return the nodes that apply to the same value."""
        has, get = self.keywords.has, self.keywords.get
        if has(node, "$ref") and self.document.draft <= 7:
            return [self.document.resolve(node)]
        self._refuse(node)
        if self.keywords.any_of(node, _ASSERTIONS):
            simples[node.pointer] = node
            self._ancestors[node.pointer] = self._ancestors.get(node.pointer, above) & above
        beside = []
        for keyword in ("anyOf", "oneOf"):
            if get(node, keyword) is not None:
                branches = tuple(node.child(keyword, index) for index in range(len(node.schema[keyword])))
                group = Group(kind=keyword, node=node, branches=branches, ancestors=above)
                groups[group.key] = group
        for group in self._dependents(node, above):
            groups[group.key] = group
        if has(node, "$ref"):
            beside.append(self.document.resolve(node))
        if get(node, "allOf") is not None:
            beside += [node.child("allOf", index) for index in range(len(node.schema["allOf"]))]
        return beside

    def _refuse(self, node: SchemaNode) -> None:
        if not self.keywords.any_of(node, _REFUSED.keys()):
            return
        for keyword, instead in _REFUSED.items():
            if self.keywords.has(node, keyword):
                if keyword == "if" and not {"then", "else"} & node.schema.keys():
                    continue  # has no effect alone
                raise self.keywords.unsupported(node, keyword, instead)

    def _dependents(self, node: SchemaNode, above: frozenset[str]) -> list[Group]:
        """Return a choice for each property that requires more: either without it, or with what it requires."""
        found: list[Group] = []
        if not self.keywords.any_of(node, _DEPENDENT.keys()):
            return found
        for keyword in _DEPENDENT:
            if keyword == "dependencies" and self.document.draft > 7 and self.keywords.has(node, keyword):
                raise self.keywords.unsupported(node, keyword, "dependentRequired or dependentSchemas")
            for name, asked in (self.keywords.get(node, keyword) or {}).items():
                at = node.child(keyword, name)
                with_it = {"required": [name, *asked]} if isinstance(asked, list | tuple) else {"required": [name]}
                branches = [_made_up(at, "without", {"properties": {name: False}}), _made_up(at, "with", with_it)]
                if not isinstance(asked, list | tuple):
                    branches[1] = _made_up(at, "with", {**with_it, "allOf": [asked]})
                found.append(Group(kind="anyOf", node=at, branches=tuple(branches), ancestors=above))
        return found

    def _is_beneath(self, node: SchemaNode, other: SchemaNode) -> bool:
        """Return whether ``other`` includes a node, so that properties evaluated in the node count as evaluated
        there."""
        return other.pointer in self._ancestors.get(node.pointer, frozenset()) or node.synthetic

    # ---- choices ----

    def _form(self, rules: _Rules, level: int) -> Form:
        key = (*(node.pointer for node in rules.simples), *(group.key for group in rules.groups), level)
        if key not in self._made:
            self._depth += 1
            if self._depth > MAX_DEPTH or len(self._made) >= MAX_FORMS:
                where = (rules.simples or [group.node for group in rules.groups])[0]
                raise self.document.error(where, "the schema", "fewer properties, choices and references")
            self._levels.setdefault(key[:-1], level)
            if not rules.groups:
                self._made[key] = self._typed(rules.simples, level)
            else:
                self._made[key] = EMPTY_FORM if self._contradict(rules.simples) else self._chosen(rules, level)
            self._depth -= 1
        return self._made[key]

    def _chosen(self, rules: _Rules, level: int) -> Form:
        group, *others = rules.groups
        forms = []
        for branch in group.branches:
            beside = self._expanded([branch], group.ancestors)
            if beside is None:
                forms.append(EMPTY_FORM)
                continue
            merged = _Rules(_union(rules.simples, beside.simples), _union_of_groups(others, beside.groups))
            forms.append(self._form(merged, level))
        if group.kind == "oneOf" and len(forms) > 1:
            forms = self._one_of(group, forms)
        return alternatives(forms)

    def _one_of(self, group: Group, forms: list[Form]) -> list[Form]:
        told = prove_disjoint(forms, _tag(group.node))
        if told is None:
            instead = "anyOf, or branches that differ in their type or in the const of one property"
            raise self.keywords.unsupported(group.node, "oneOf", instead)
        return told

    # ---- one type at a time ----

    def _typed(self, simples: tuple[SchemaNode, ...], level: int) -> Form:
        listed = self._listed_values(simples)
        types, inferred = self._types(simples)
        if listed is not None:
            allowed = [value for value in listed if inferred or values.is_of(value, types)]
            allowed = self._scalars.among(allowed, simples)
            return Form([Leaf(type="values", values=allowed)]) if allowed else EMPTY_FORM
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

    def _cut(self, simples: tuple[SchemaNode, ...], level: int) -> None:
        """Cut off the nesting of a recursive schema; refuse any other that is nested too deeply."""
        if self._levels.get(tuple(node.pointer for node in simples), level) == level:
            raise self.document.error(simples[0], "the schema", f"at most {MAX_LEVELS} levels of arrays and objects")
        self.was_cut = True

    def _contradict(self, simples: tuple[SchemaNode, ...]) -> bool:
        """Return whether these schemas allow no value, whatever the choices are."""
        return self._listed_values(simples) == [] or not self._types(simples)[0]

    def _listed_values(self, simples: tuple[SchemaNode, ...]) -> list[Any] | None:
        """Return the values that ``const`` and ``enum`` allow; None if there is neither."""
        listed: dict[Any, Any] | None = None
        for node in simples:
            for keyword in ("enum", "const"):
                if self.keywords.has(node, keyword):
                    named = self.keywords.get(node, keyword)
                    keyed = {values.key(value): value for value in (named if keyword == "enum" else [named])}
                    self._check_spelled(node, keyword, keyed)
                    listed = keyed if listed is None else {each: listed[each] for each in listed if each in keyed}
        return None if listed is None else list(listed.values())

    def _check_spelled(self, node: SchemaNode, keyword: str, keyed: dict[Any, Any]) -> None:
        for value in keyed.values():
            if not values.can_be_written(value):
                allowed = "numbers that a double holds, and texts without control characters"
                raise self.document.error(f"{node.pointer}/{keyword}", value, allowed)

    def _types(self, simples: tuple[SchemaNode, ...]) -> tuple[list[str], bool]:
        """Return the types that all nodes allow, and False.

        If no node names a type, return the types that their keywords apply to, and True; all types, and False, if
        there are no such keywords either.
        """
        allowed: list[str] | None = None
        for node in simples:
            named = self.keywords.get(node, "type")
            if named is not None:
                own = [named] if isinstance(named, str) else list(dict.fromkeys(named))
                allowed = own if allowed is None else _common(allowed, own)
        if allowed is not None:
            return [name for name in allowed if name != "integer" or "number" not in allowed], False
        inferred = [
            name
            for name, own in OF_TYPE.items()
            if any(self._speaks_of(node, keyword) for node in simples for keyword in own & node.schema.keys())
        ]
        return (inferred, True) if inferred else (list(TYPES), False)

    def _speaks_of(self, node: SchemaNode, keyword: str) -> bool:
        return self.keywords.has(node, keyword) and (keyword != "format" or self._scalars.is_enforced(node))


def _common(ours: list[str], others: list[str]) -> list[str]:
    """Return the types that are in both lists; an integer is also a number."""
    kept = [name for name in ours if name in others or (name == "integer" and "number" in others)]
    return kept + (["integer"] if "number" in ours and "integer" in others and "integer" not in kept else [])


def _tag(node: SchemaNode) -> str | None:
    """Return the property that distinguishes the branches, from OpenAPI's ``discriminator``."""
    discriminator = node.schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def _made_up(at: SchemaNode, name: str, schema: dict[str, Any]) -> SchemaNode:
    return SchemaNode(schema=schema, pointer=at.pointer + pointer(name), base=at.base, synthetic=True)


def _union(ours: tuple[SchemaNode, ...], others: tuple[SchemaNode, ...]) -> tuple[SchemaNode, ...]:
    return tuple({node.pointer: node for node in (*ours, *others)}.values())


def _union_of_groups(ours: list[Group], others: tuple[Group, ...]) -> tuple[Group, ...]:
    return tuple({group.key: group for group in (*ours, *others)}.values())
