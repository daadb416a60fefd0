"""Schemas as people and programs write them, by seed."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "tags", "a b", "é", "kind", "value", "items", "id", "x-1"]
PATTERNS = ["^[a-z]{2,4}$", r"\d{3}", "^(yes|no)$", r"^[A-Z]{2}-\d+$", "a|b"]
FORMATS = ["date", "date-time", "time", "uuid", "email", "ipv4", "uri", "unheard-of"]


def random_schema(seed: int) -> Any:
    return _Schemas(random.Random(seed)).root()


class _Schemas:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.has_definitions = draw.random() < 0.4

    def root(self) -> Any:
        schema = self.schema(3)
        if self.has_definitions:
            self.has_definitions = False
            definitions = {"leaf": self.scalar(), "node": self.object(2)}
            node = definitions["node"]["properties"]
            node["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "default": None}
            schema = {**schema, "$defs": definitions}
        return schema

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = (
            [self.scalar] if depth <= 0 else [self.scalar, self.object, self.object, self.array, self.choice, self.map]
        )
        if self.has_definitions and depth < 3:
            kinds.append(
                lambda *_: {"$ref": self.draw.choice(["#/$defs/leaf", "#/$defs/node"]), "description": "of it"}
            )
        kind = self.draw.choice(kinds)
        made: dict[str, Any] = self.scalar() if kind == self.scalar else kind(depth - 1)
        if self.draw.random() < 0.2:
            made["title"] = "A title"
        return made

    def scalar(self, *_: Any) -> dict[str, Any]:
        draw = self.draw
        low = draw.randint(-50, 50)
        return draw.choice(
            [
                {"type": "string"},
                {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 12)},
                {"type": "string", "pattern": draw.choice(PATTERNS)},
                {"type": "string", "format": draw.choice(FORMATS)},
                {"enum": draw.sample(["a", "b c", "é", 1, 2.5, None, True, "\n"], draw.randint(1, 4))},
                {"const": draw.choice(["fixed", 7, -1.25, {"a": [1]}, []])},
                {"type": "integer"},
                {"type": "integer", "minimum": low, "exclusiveMaximum": low + draw.randint(2, 2000)},
                {"type": "integer", "multipleOf": draw.choice([2, 5, 7])},
                {"type": "number"},
                {"type": "number", "exclusiveMinimum": low / 4, "maximum": low + 10.5},
                {"type": ["integer", "null"]},
                {"type": "boolean"},
            ]
        )

    def object(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample(NAMES, self.draw.randint(0, 5))
        made: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        required = [name for name in names if self.draw.random() < 0.6]
        if required or self.draw.random() < 0.5:
            made["required"] = required
        extra = self.draw.random()
        if extra < 0.4:
            made["additionalProperties"] = False
        elif extra < 0.5:
            made["additionalProperties"] = self.schema(depth - 1)
        if self.draw.random() < 0.1:
            made["allOf"] = [{"properties": {"also": self.scalar()}, "required": ["also"]}]
        return made

    def map(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "object", "additionalProperties": self.schema(depth)}
        kind = self.draw.random()
        if kind < 0.2:
            made["propertyNames"] = {"enum": ["one", "two", "three"]}
        elif kind < 0.4:
            made = {
                "type": "object",
                "patternProperties": {"^[a-z]+$": self.schema(depth)},
                "additionalProperties": False,
            }
        elif kind < 0.6:
            made |= {"minProperties": 2, "maxProperties": 4}
        return made

    def array(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array", "items": self.schema(depth)}
        kind = self.draw.random()
        if kind < 0.3:
            made |= {"minItems": self.draw.randint(0, 2), "maxItems": self.draw.randint(2, 5)}
        elif kind < 0.5:
            made["prefixItems"] = [self.scalar(), self.schema(depth)]
        elif kind < 0.6:
            made = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
        return made

    def choice(self, depth: int) -> dict[str, Any]:
        if self.draw.random() < 0.5:
            return {"anyOf": [self.schema(depth), self.scalar(), {"type": "null"}]}
        branches = []
        for tag in ("first", "second", "third")[: self.draw.randint(2, 3)]:
            made = self.object(depth)
            made["properties"] = {
                "kind": {"const": tag},
                **{k: v for k, v in made["properties"].items() if k != "kind"},
            }
            made["required"] = [*{"kind": 0, **dict.fromkeys(made.get("required", ()))}][self.draw.randint(0, 1) :]
            branches.append(made)
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
