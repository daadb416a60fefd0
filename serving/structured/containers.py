"""Combines the rules for objects and arrays; each property and item is a form.

An object with named properties may have no others, and a tuple no further items, unless the schema says which:
otherwise a model would fill what ``additionalProperties`` and ``items`` leave open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

from . import values
from .document import SchemaNode, pointer
from .expression import whole_text_pattern
from .forms import ANY, EMPTY_FORM, Form, Leaf
from .keywords import Keywords

MAX_ITEMS = 1_000  # of an array or an object with a bound on their number
MAX_OPTIONAL = 64  # properties of which at least one must be present
MAX_PATTERNS = 64  # of properties
MAX_CHOSEN = 6  # properties or items of which all combinations are written out

_BEGINNING = re.compile(
    r"\^([\w -]+)(?![\w -]|[*?{|])(?!.*\|)", re.DOTALL
)  # a literal prefix that nothing after it changes
_LISTED = re.compile(r"\^\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\)\$|\^([\w -]+)\$")  # a list of literal names
_OWN_NAMES = ("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties")


class Containers:
    """The maker of the leaves of arrays and objects. ``of(nodes, level)`` makes the form of an item or property."""

    def __init__(
        self,
        keywords: Keywords,
        of: Callable[[list[SchemaNode], int], Form],
        is_beneath: Callable[[SchemaNode, SchemaNode], bool],
    ) -> None:
        self.keywords, self.of, self.is_beneath = keywords, of, is_beneath

    def leaves(self, name: str, nodes: tuple[SchemaNode, ...], level: int) -> list[Leaf]:
        """Return the leaves of a type under the rules of all nodes; [] if they contradict each other."""
        return self._arrays(nodes, level) if name == "array" else self._objects(nodes, level)

    def _all(self, nodes: tuple[SchemaNode, ...], keyword: str) -> list[Any]:
        return [value for node in nodes if (value := self.keywords.get(node, keyword)) is not None]

    def _children(self, nodes: tuple[SchemaNode, ...], keyword: str) -> list[SchemaNode]:
        return [node.child(keyword) for node in nodes if self.keywords.get(node, keyword) is not None]

    def _first(self, nodes: tuple[SchemaNode, ...], keyword: str) -> SchemaNode:
        return next(node for node in nodes if self.keywords.has(node, keyword))

    # ---- arrays ----

    def _arrays(self, nodes: tuple[SchemaNode, ...], level: int) -> list[Leaf]:
        self._refuse_in_arrays(nodes)
        tuples = [self._tuple(node) for node in nodes]
        prefix: list[Form] = []
        minimum = int(max(self._all(nodes, "minItems"), default=0))
        maximum = min(self._all(nodes, "maxItems"), default=None)
        for index in range(max((len(own) for own, _ in tuples), default=0)):
            parts = [own[index] if index < len(own) else rest for own, rest in tuples]
            prefix.append(self._part([part for part in parts if part is not None], level))
        rest = [rest for _, rest in tuples if rest is not None]
        closed = bool(prefix) and not rest and minimum <= len(prefix)
        items = EMPTY_FORM if closed else self._part(rest, level)
        end = next((index for index, form in enumerate(prefix) if not form), len(prefix) if not items else None)
        maximum = end if maximum is None else maximum if end is None else min(maximum, end)
        return self._bounded_array(nodes, prefix, items, minimum, None if maximum is None else int(maximum))

    def _refuse_in_arrays(self, nodes: tuple[SchemaNode, ...]) -> None:
        for node in nodes:
            for keyword in ("contains", "unevaluatedItems"):
                if self.keywords.get(node, keyword) not in (None, True) or (
                    keyword == "contains" and self.keywords.has(node, keyword)
                ):
                    raise self.keywords.unsupported(node, keyword, "items and prefixItems")

    def _tuple(self, node: SchemaNode) -> tuple[list[SchemaNode], SchemaNode | None]:
        """Return the schemas of the first items, and the schema of all others."""
        items = self.keywords.get(node, "items")
        if isinstance(items, list | tuple):
            own = [node.child("items", index) for index in range(len(items))]
            return own, node.child("additionalItems") if "additionalItems" in node.schema else None
        count = len(self.keywords.get(node, "prefixItems") or ())
        own = [node.child("prefixItems", index) for index in range(count)]
        return own, None if items is None else node.child("items")

    def _part(self, nodes: list[SchemaNode], level: int) -> Form:
        return self.of(nodes, level) if nodes else ANY

    def _bounded_array(
        self, nodes: tuple[SchemaNode, ...], prefix: list[Form], items: Form, minimum: int, maximum: int | None
    ) -> list[Leaf]:
        if maximum is not None and minimum > maximum:
            return []
        if minimum > MAX_ITEMS:
            node = next(node for node in nodes if self.keywords.get(node, "minItems") == minimum)
            raise self.keywords.document.error(f"{node.pointer}/minItems", minimum, f"at most {MAX_ITEMS:,}")
        rules: dict[str, Any] = {"minItems": minimum} if minimum else {}
        if maximum is not None:
            maximum = min(maximum, MAX_ITEMS)
            rules["maxItems"] = maximum
        if True in self._all(nodes, "uniqueItems") and (maximum is None or maximum > 1):
            return self._unique(nodes, prefix, items, minimum, maximum)
        kept = prefix if maximum is None else prefix[:maximum]
        return [
            Leaf(
                type="array", prefix=kept, items=items if maximum is None or maximum > len(kept) else None, rules=rules
            )
        ]

    def _unique(
        self, nodes: tuple[SchemaNode, ...], prefix: list[Form], items: Form, minimum: int, maximum: int | None
    ) -> list[Leaf]:
        """Return all combinations of the few listed values, each in the order of the list."""
        listed = [value for leaf in items.leaves for value in _listed(leaf)]
        few = [*values.distinct(listed)]
        are_listed = all(leaf.type in ("values", "boolean", "null") for leaf in items.leaves)
        if prefix or not are_listed or len(few) > MAX_CHOSEN:
            instead = f"false, or items of an enum of at most {MAX_CHOSEN} values"
            raise self.keywords.unsupported(self._first(nodes, "uniqueItems"), "uniqueItems", instead)
        sizes = range(minimum, min(len(few), len(few) if maximum is None else maximum) + 1)
        return [
            Leaf(type="values", values=[list(chosen) for size in sizes for chosen in combinations(few, size)])
        ] if sizes else []  # fmt: skip

    # ---- objects ----

    def _objects(self, nodes: tuple[SchemaNode, ...], level: int) -> list[Leaf]:
        self._refuse_in_objects(nodes)
        required = list(dict.fromkeys(name for names in self._all(nodes, "required") for name in names))
        leaf = Leaf(type="object", required=required, demanded=tuple(required))
        leaf.sealed = False in self._all(nodes, "additionalProperties") and not self._all(nodes, "patternProperties")
        additional = self._additional(nodes, level)
        self._add_patterns(leaf, nodes, level)
        names = [name for own in self._all(nodes, "properties") for name in own]
        own = [self._named(node) for node in nodes]
        unevaluated = self._children(nodes, "unevaluatedProperties")
        for name in dict.fromkeys([*names, *(() if leaf.patterns else required)]):
            if name not in leaf.properties:
                leaf.properties[name] = self._property(own, unevaluated, name, level)
        leaf.additional = additional or None
        self._hold_names(leaf, nodes, level)
        if any(name in leaf.properties and not leaf.properties[name] for name in required):
            return []
        return self._counted(leaf, nodes)

    def _refuse_in_objects(self, nodes: tuple[SchemaNode, ...]) -> None:
        for node in nodes:
            if self.keywords.get(node, "unevaluatedProperties") not in (None, True):
                others = [other for other in nodes if other is not node and not self.is_beneath(other, node)]
                if any(self.keywords.has(other, own) for other in others for own in _OWN_NAMES):
                    raise self.keywords.unsupported(
                        node, "unevaluatedProperties", "it beside allOf or $ref, not in them"
                    )
        with_patterns = next((node for node in nodes if self.keywords.has(node, "patternProperties")), None)
        for node in nodes:
            if with_patterns and node is not with_patterns and any(self.keywords.has(node, own) for own in _OWN_NAMES):
                raise self.keywords.unsupported(with_patterns, "patternProperties", "one schema for all properties")

    def _additional(self, nodes: tuple[SchemaNode, ...], level: int) -> Form:
        """Return the form of properties that are not named; EMPTY_FORM if there may be none."""
        own = self._children(nodes, "additionalProperties")
        if own:
            return self.of([*own, *self._children(nodes, "unevaluatedProperties")], level)
        names = ("properties", "patternProperties")
        if any(self.keywords.has(node, name) for node in nodes for name in names if not node.synthetic):
            return EMPTY_FORM
        return self._part(self._children(nodes, "unevaluatedProperties"), level)

    def _named(self, node: SchemaNode) -> tuple[SchemaNode, dict[str, Any], SchemaNode | None]:
        """Return a node, the properties that it names, and its schema for all others."""
        others = None
        if self.keywords.get(node, "additionalProperties") is not None:
            others = None if self.keywords.get(node, "patternProperties") else node.child("additionalProperties")
        return node, self.keywords.get(node, "properties") or {}, others

    def _property(
        self,
        own: list[tuple[SchemaNode, dict[str, Any], SchemaNode | None]],
        unevaluated: list[SchemaNode],
        name: str,
        level: int,
    ) -> Form:
        parts = [node.child("properties", name) if name in named else others for node, named, others in own]
        return self._part([part for part in parts if part is not None] or unevaluated, level)

    def _add_patterns(self, leaf: Leaf, nodes: tuple[SchemaNode, ...], level: int) -> None:
        for node in nodes:
            own = self.keywords.get(node, "patternProperties") or {}
            if len(own) > MAX_PATTERNS or any(not _begin_apart(one, other) for one, other in combinations(own, 2)):
                instead = "one pattern, or a few that begin with different texts (^a, ^b)"
                raise self.keywords.unsupported(node, "patternProperties", instead)
            for pattern in own:
                at = node.child("patternProperties", pattern)
                found = _LISTED.fullmatch(pattern)
                names = (found[1] or found[2]).split("|") if found else []
                if names and not {*names} & {*(self.keywords.get(node, "properties") or {})}:
                    leaf.properties |= dict.fromkeys(names, self.of([at], level))
                    continue
                leaf.patterns[whole_text_pattern(pattern, self._refusal(at, pattern))] = self.of([at], level)

    def _refusal(self, node: SchemaNode, value: Any) -> Any:
        def refuse(allowed: str) -> Any:
            raise self.keywords.document.error(node, value, allowed)

        return refuse

    def _hold_names(self, leaf: Leaf, nodes: tuple[SchemaNode, ...], level: int) -> None:
        """Apply ``propertyNames``: listed names become properties, a rule for names becomes a pattern."""
        own = self._children(nodes, "propertyNames")
        if not own:
            return
        at = own[0].pointer + pointer("a name")
        text = SchemaNode(schema={"type": "string"}, pointer=at, base=own[0].base, synthetic=True)
        allowed = self.of([*own, text], level)
        listed = [value for each in allowed.leaves for value in each.values]
        if all(each.type == "values" for each in allowed.leaves) and not leaf.patterns:
            for name in leaf.properties:
                leaf.properties[name] = leaf.properties[name] if name in listed else EMPTY_FORM
            if leaf.additional:
                leaf.properties |= {name: leaf.additional for name in listed if name not in leaf.properties}
                leaf.additional = None
            return
        shape = allowed.leaves[0].rules if len(allowed.leaves) == 1 else None
        if shape == {}:
            return
        pattern = None if shape is None or leaf.properties or leaf.patterns else _as_pattern(shape)
        if pattern is None:
            instead = "an enum of names, or one pattern for an object that names no properties"
            raise self.keywords.unsupported(self._first(nodes, "propertyNames"), "propertyNames", instead)
        if leaf.additional:
            leaf.patterns, leaf.additional = {pattern: leaf.additional}, None

    def _counted(self, leaf: Leaf, nodes: tuple[SchemaNode, ...]) -> list[Leaf]:
        """Apply ``minProperties`` and ``maxProperties``.

        They are kept in the schema if every named property is required; otherwise the possible sets of properties are
        written out.
        """
        minimum = int(max(self._all(nodes, "minProperties"), default=0))
        maximum = min(self._all(nodes, "maxProperties"), default=None)
        asked = {*leaf.required}
        optional = [name for name, form in leaf.properties.items() if form and name not in asked]
        is_open = bool(leaf.additional or leaf.patterns)
        count = len(leaf.required) + len(optional)
        if minimum <= len(leaf.required) and (maximum is None or (maximum >= count and not is_open)):
            return [leaf]
        if maximum is not None and (maximum < minimum or maximum < len(leaf.required)):
            return []
        if minimum > MAX_ITEMS:
            node = next(node for node in nodes if self.keywords.get(node, "minProperties") == minimum)
            raise self.keywords.document.error(f"{node.pointer}/minProperties", minimum, f"at most {MAX_ITEMS:,}")
        maximum = maximum if maximum is None else min(maximum, MAX_ITEMS)
        if is_open and not optional:
            leaf.rules = {"minProperties": minimum} if minimum else {}
            leaf.rules |= {} if maximum is None else {"maxProperties": int(maximum)}
            return [leaf]
        is_at_least_one = maximum is None and minimum == len(leaf.required) + 1 and len(optional) <= MAX_OPTIONAL
        if is_open or (len(optional) > MAX_CHOSEN and not is_at_least_one):
            name = "minProperties" if self._all(nodes, "minProperties") else "maxProperties"
            instead = "required, or named properties alone (additionalProperties false)"
            raise self.keywords.unsupported(self._first(nodes, name), name, instead)
        if len(optional) > MAX_CHOSEN:
            return [_with(leaf, optional[index:], [name]) for index, name in enumerate(optional)]
        fewest, largest = (
            max(0, minimum - len(leaf.required)),
            len(optional) if maximum is None else maximum - len(leaf.required),
        )
        sizes = range(fewest, int(min(largest, len(optional))) + 1)
        chosen = [names for size in sizes for names in combinations(optional, size)]
        return [_with(leaf, list(names), list(names)) for names in chosen]


def _begin_apart(one: str, other: str) -> bool:
    """Return whether no name can match both expressions, because they begin with different literal texts."""
    found = [_BEGINNING.match(each) for each in (one, other)]
    texts = [each[1] for each in found if each]
    return len(texts) == 2 and not texts[0].startswith(texts[1]) and not texts[1].startswith(texts[0])


def _with(leaf: Leaf, kept: list[str], required: list[str]) -> Leaf:
    """Return the object with only the ``kept`` ones of its optional properties, and with ``required`` ones added."""
    names = {name: form for name, form in leaf.properties.items() if name in kept or name in leaf.required}
    return Leaf(
        type="object",
        properties=names,
        required=[*leaf.required, *required],
        demanded=leaf.demanded,
        sealed=leaf.sealed,
    )


def _listed(leaf: Leaf) -> list[Any]:
    of_type: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    return of_type.get(leaf.type, leaf.values)


def _as_pattern(rules: dict[str, Any]) -> str | None:
    """Return the rules of a string as one expression; None if they cannot be."""
    if rules.keys() == {"pattern"}:
        return str(rules["pattern"])
    if rules.keys() <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}})$"
    return None
