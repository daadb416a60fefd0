"""The normalized form of a schema: alternatives, each of one type, with all rules of that type in one place.

It has no ``allOf`` and no references, and nothing applies in addition to an alternative. ``written`` turns it back into
a JSON schema that uses only the few keywords that llguidance enforces exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_INLINE_DEPTH = 12  # JSON parsers accept 128 levels, and one form takes up to four of them
ANY_LEVELS = 8  # of arrays and objects in arbitrary JSON


@dataclass(slots=True, eq=False, kw_only=True)
class Leaf:
    """One alternative of a form.

    ``type`` is "any", "values" (one of ``values``), or a JSON type. ``rules`` are further keywords of the type.
    ``inferred`` says that the caller named no type, so the type is the one that the keywords apply to.
    """

    type: str
    rules: dict[str, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    inferred: bool = False
    # of an object
    properties: dict[str, Form] = field(default_factory=dict)
    patterns: dict[str, Form] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    additional: Form | None = None
    demanded: tuple[str, ...] = ()  # required by the schema itself
    sealed: bool = False  # the schema itself says that there are no other properties
    # of an array
    prefix: list[Form] = field(default_factory=list)
    items: Form | None = None

    def may_have(self, name: str) -> bool:
        """Return whether an object may have a property of that name."""
        if name in self.properties:
            return bool(self.properties[name])
        return bool(self.additional or self.patterns)

    def forms(self) -> Iterator[Form]:
        yield from self.properties.values()
        yield from self.patterns.values()
        yield from self.prefix
        yield from (form for form in (self.additional, self.items) if form)


@dataclass(slots=True, eq=False)
class Form:
    """The values of any of its leaves; a form without leaves allows no value."""

    leaves: list[Leaf]

    def __bool__(self) -> bool:
        return bool(self.leaves)


ANY = Form([Leaf(type="any")])
EMPTY_FORM = Form([])


def alternatives(forms: list[Form]) -> Form:
    leaves = [leaf for form in forms for leaf in form.leaves]
    return ANY if any(leaf.type == "any" for leaf in leaves) else Form(leaves)


def has_open_keys(form: Form) -> bool:
    """Return whether a text may have keys that no schema names, whose repetition a grammar cannot prevent."""
    return any(
        leaf.type == "any" or leaf.patterns or leaf.additional for each in _all_forms(form) for leaf in each.leaves
    )


def written(form: Form) -> dict[str, Any]:
    """Return the form as one JSON schema; forms that are used more than once or nested deeply are in ``$defs``."""
    uses = Counter(id(used) for each in _all_forms(form) for leaf in each.leaves for used in leaf.forms())
    writer = _Writer({used for used, times in uses.items() if times > 1})
    root = writer.form(form)
    return {**root, "$defs": writer.definitions} if writer.definitions else root


def _all_forms(root: Form) -> list[Form]:
    seen = {id(root): root}
    waiting = [root]
    while waiting:
        for leaf in waiting.pop().leaves:
            for form in leaf.forms():
                if id(form) not in seen:
                    seen[id(form)] = form
                    waiting.append(form)
    return list(seen.values())


class _Writer:
    def __init__(self, shared: set[int]) -> None:
        self.shared = shared
        self.definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._depth = 0

    def form(self, form: Form) -> dict[str, Any]:
        is_named = _is_worth_a_name(form) and (id(form) in self.shared or self._depth == MAX_INLINE_DEPTH)
        if not is_named:
            return self._alternatives(form)
        if id(form) not in self._names:
            self._names[id(form)] = name = f"f{len(self._names)}"
            depth, self._depth = self._depth, 0
            self.definitions[name] = self._alternatives(form)
            self._depth = depth
        return {"$ref": f"#/$defs/{self._names[id(form)]}"}

    def _alternatives(self, form: Form) -> dict[str, Any]:
        self._depth += 1
        leaves = [self._leaf(leaf) for leaf in form.leaves]
        self._depth -= 1
        return leaves[0] if len(leaves) == 1 else {"anyOf": leaves}

    def _leaf(self, leaf: Leaf) -> dict[str, Any]:
        if leaf.type == "any":
            return self._any(ANY_LEVELS)
        if leaf.type == "values":
            return {"enum": leaf.values}
        if leaf.type == "object":
            return self._object(leaf)
        if leaf.type == "array":
            return self._array(leaf)
        return {"type": leaf.type, **leaf.rules}

    def _object(self, leaf: Leaf) -> dict[str, Any]:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._or_false(form) for name, form in leaf.properties.items()},
            "required": leaf.required,
            "additionalProperties": self._or_false(leaf.additional),
            **leaf.rules,
        }
        if leaf.patterns:
            schema["patternProperties"] = {pattern: self._or_false(form) for pattern, form in leaf.patterns.items()}
        return schema

    def _array(self, leaf: Leaf) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self._or_false(leaf.items), **leaf.rules}
        if leaf.prefix:
            schema["prefixItems"] = [self._or_false(form) for form in leaf.prefix]
        return schema

    def _or_false(self, form: Form | None) -> dict[str, Any] | bool:
        return self.form(form) if form else False

    def _any(self, levels: int) -> dict[str, Any]:
        """Return the schema of arbitrary JSON with at most ``levels`` nested arrays and objects."""
        name = f"any{levels}"
        if name not in self.definitions:
            self.definitions[name] = {"anyOf": [*SCALARS, *(self._containers(levels) if levels else ())]}
        return {"$ref": f"#/$defs/{name}"}

    def _containers(self, levels: int) -> list[dict[str, Any]]:
        below = self._any(levels - 1)
        return [{"type": "array", "items": below}, {"type": "object", "additionalProperties": below}]


def _is_worth_a_name(form: Form) -> bool:
    return form is not ANY and (len(form.leaves) > 1 or form.leaves[0].type in ("object", "array"))


WHOLE_DIGITS, PARTS_DIGITS = 10**15, 10
INTEGERS = 10**18
NUMBER = {"minimum": -WHOLE_DIGITS, "maximum": WHOLE_DIGITS, "multipleOf": 10.0**-PARTS_DIGITS}
SCALARS = [
    *({"type": "string"}, {"type": "number", **NUMBER}, {"type": "boolean"}, {"type": "null"}),
]
