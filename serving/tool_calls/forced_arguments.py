"""The grammar of a forced call's arguments, as a format writes them and a schema restricts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ..interface.errors import InvalidField
from ..interface.tool_format import ToolFormat
from .lark import Lark, one_of, quoted, times

MAX_OPEN = 32  # arguments with names that the schema does not give
_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NOT_A_WORD = " & ~/(?i:true|false|null|none|nan|inf|infinity)(?s:.*)/"  # a parser may read these as another type
_SINGLE_QUOTED = r"""/'(?:[^'\\\x00-\x1F]|\\[nrtbf'"\\])*'/"""
_NO_MARK = "^(?:(?:[^<]|<[^<A-Za-z/])*)$"
_SURE = re.compile(r"(?!(?i:true|false|null|none|nan|inf))[A-Za-z]")


class ArgumentsGrammar:
    """The writer of the grammar of one call's arguments.

    ``schema`` is in the form that ``structured`` writes: an object, alternatives of objects, or a reference to one.
    """

    def __init__(self, lark: Lark, format: ToolFormat, schema: Mapping[str, Any], field: str) -> None:
        self._lark = lark
        self._format = format
        self._schema = _without_marks(schema) if format.arguments == "parameters" else schema
        schema = self._schema
        self._shared = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
        self._field = field

    def written(self) -> str:
        """Return the grammar expression of the arguments."""
        if self._format.arguments == "json":
            return self._lark.json(self._schema)
        objects = [each for each in self._leaves(self._schema) if each.get("type") == "object"]
        if not objects:
            self._refuse("the schema", "an object with properties")
        return one_of(self._object(each) for each in objects)

    def _leaves(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "$ref" in schema:
            yield from self._leaves(self._schema["$defs"][schema["$ref"].removeprefix("#/$defs/")])
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                yield from self._leaves(each)
        else:
            yield schema

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = {name: each for name, each in schema.get("properties", {}).items() if each is not False}
        required = set(schema.get("required", ()))
        self._check(schema, properties, required)
        each = [(self._argument(name, value), name in required) for name, value in properties.items()]
        if not each and isinstance(schema.get("additionalProperties"), Mapping):
            return self._open(schema["additionalProperties"])
        if self._format.arguments == "keywords":
            return self._separated(each)
        return " ".join(argument if needed else f"({argument})?" for argument, needed in each)

    def _check(self, schema: Mapping[str, Any], properties: Mapping[str, Any], required: set[str]) -> None:
        """Raise ``InvalidField`` for restrictions that only a format with JSON arguments can enforce."""
        bounds = {"minProperties", "maxProperties", "patternProperties"} & schema.keys()
        names = [name for name in properties if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.\-]*", name)]
        if self._format.arguments == "keywords":
            names = [name for name in properties if not name.isidentifier()]
        if bounds and not (schema.get("minProperties", 0) <= len(required) and bounds <= {"minProperties"}):
            self._refuse(f"{sorted(bounds)[0]}", "properties and required")
        if names:
            self._refuse(names[0], "names of letters, digits and _")

    def _refuse(self, what: str, allowed: str) -> NoReturn:
        why = f"{allowed} alone: the calls of this model ({self._format.name}) are not written as JSON"
        raise InvalidField(self._field, what, why)

    def _open(self, schema: Mapping[str, Any]) -> str:
        """Return arguments with any names."""
        key = self._lark.terminal(_KEY)
        one = self._lark.rule(self._named(key, schema))
        if self._format.arguments == "keywords":
            more = times('", " ' + one, 0, MAX_OPEN)
            return f"({one} {more})?"
        return times(one, 0, MAX_OPEN)

    def _separated(self, arguments: list[tuple[str, bool]]) -> str:
        """Return arguments in order, with commas between those that are present.

        The rules are built from the last argument back: ``first`` is the rest if no argument has been written yet,
        ``more`` the rest after an argument.
        """
        first = more = ""
        for argument, needed in reversed(arguments):
            rest = self._lark.rule(f'", " {argument} {more}')
            begins = self._lark.rule(f"{argument} {more}")
            more = rest if needed else self._lark.rule(f"({rest}) | {more}" if more else f"({rest})?")
            first = begins if needed else self._lark.rule(f"({begins}) | {first}" if first else f"({begins})?")
        return first

    def _argument(self, name: str, schema: Mapping[str, Any]) -> str:
        return self._lark.rule(self._named(self._lark.text(name), schema))

    def _named(self, key: str, schema: Mapping[str, Any]) -> str:
        """Return a key and its value."""
        format, lark = self._format, self._lark
        leaves = list(self._leaves(schema))
        if format.arguments == "keywords":
            return f'{key} "=" {one_of(self._python(leaf) for leaf in leaves)}'
        begin = f"{lark.text(format.parameter_begin)} {key}"
        texts = [leaf for leaf in leaves if leaf.get("type") == "string"]
        values = [value for leaf in leaves for value in leaf.get("enum", ())]
        alone = len(texts) == len(leaves) or (all(isinstance(value, str) for value in values) and len(leaves) == 1)
        options = [self._text(leaf, alone) for leaf in texts]
        if listed := [lark.plain(value) for value in values if self._is_text(value, alone)]:
            options.append(f"{one_of(listed)} {lark.text(format.value_end)}")
        others = [leaf for leaf in leaves if leaf.get("type") != "string" and "enum" not in leaf]
        if rest := [value for value in values if not isinstance(value, str)]:
            others.append({"enum": rest})
        written = []
        if options:
            written.append(f"{lark.text(format.key_end)} {one_of(options)}")
        if others:
            end = lark.text(format.key_end_json or format.key_end)
            written.append(f"{end} {one_of(map(self._json, others))} {lark.text(format.value_end)}")
        if not written:
            self._refuse(json.dumps(dict(schema))[:200], "strings that look like no other type")
        return f"{begin} {one_of(written)}"

    def _is_text(self, value: Any, alone: bool) -> bool:
        """Return whether a parser reads ``value`` as a string; ``alone`` says that no other type is allowed."""
        if not isinstance(value, str) or any(mark in value for mark in self._marks()):
            return False
        return alone or _SURE.match(value) is not None

    def _marks(self) -> list[str]:
        """Return the markers that a string must not contain, because a parser would see its end there."""
        format = self._format
        marks = (format.value_end, format.parameter_begin, format.key_end, format.call_begin, format.call_end)
        return [mark.strip() for mark in (*marks, format.end, *format.begin) if mark.strip()]

    def _text(self, schema: Mapping[str, Any], alone: bool) -> str:
        """Return an unquoted string, up to and including the marker that ends it."""
        end = self._format.value_end
        rules = ("" if alone else " & /[A-Za-z](?s:.*)/" + _NOT_A_WORD) + _rules(schema)
        lark, mark = self._lark, end.strip()
        free = lark.free(self._marks(), rules)
        if lark.text(mark).startswith("<["):
            return f"{free} {lark.text(end)}"
        lead = end[: len(end) - len(end.lstrip())]
        head = lark.rule(lark.terminal(f"{free} /{quoted(lead + mark)}/"), "[lazy]")
        return f"{head} {lark.text(end[len(lead + mark) :])}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._lark.json({**schema, **self._shared})

    def _python(self, schema: Mapping[str, Any]) -> str:
        """Return a value in Python's notation: strings in either kind of quotes (Python has all of JSON's escapes)."""
        if schema.get("type") == "boolean":
            return '("True" | "False")'
        if schema.get("type") == "null":
            return '"None"'
        plain = self._json(schema)
        if schema.get("type") == "string":
            return f"({plain} | {self._lark.terminal(_single_quoted(schema))})"
        texts = [repr(value) for value in schema.get("enum", ()) if isinstance(value, str)]
        return one_of([plain, *(self._lark.plain(text) for text in texts if text.startswith("'"))])


def _without_marks(schema: Any, *, within: bool = False) -> Any:
    """Return the schema with a pattern on strings inside lists and objects: no "<" before a letter or a slash.

    A parser could otherwise take such a string for a marker that ends the value.
    """
    if isinstance(schema, list):
        return [_without_marks(each, within=within) for each in schema]
    if not isinstance(schema, Mapping) or "enum" in schema:
        return schema
    if within and schema.get("type") == "string":
        return {"pattern": _NO_MARK, **schema}
    found = dict(schema)
    for key in schema.keys() & {"items", "additionalProperties", "prefixItems", "anyOf"}:
        inside = within or key != "anyOf"
        found[key] = _without_marks(schema[key], within=inside)
    for key in schema.keys() & {"properties", "patternProperties", "$defs"}:
        inside = within or key == "$defs"
        found[key] = {name: _nested(each, within=inside) for name, each in schema[key].items()}
    return found


def _nested(schema: Any, *, within: bool) -> Any:
    """Return the schema of an argument, whose own string needs no pattern, or of a value inside one."""
    if not within and isinstance(schema, Mapping) and schema.get("type") == "object":
        return {
            **schema,
            "properties": {name: _without_marks(each, within=True) for name, each in schema["properties"].items()},
            "additionalProperties": _without_marks(schema.get("additionalProperties", False), within=True),
        }
    if not within and isinstance(schema, Mapping) and "anyOf" in schema:
        return {**schema, "anyOf": [_nested(each, within=False) for each in schema["anyOf"]]}
    return _without_marks(schema, within=within)


def _single_quoted(schema: Mapping[str, Any]) -> str:
    rules = _rules(schema)
    return f"/'/ (/[^'\\\\\\x00-\\x1F]*/{rules}) /'/" if rules else _SINGLE_QUOTED


def _rules(schema: Mapping[str, Any]) -> str:
    """Return a string schema's length and pattern in the notation of terminals."""
    minimum, maximum, rules = schema.get("minLength"), schema.get("maxLength"), ""
    if minimum is not None or maximum is not None:
        rules += f" & /(?s:.){{{minimum or 0},{'' if maximum is None else maximum}}}/"
    if "pattern" in schema:
        rules += f" & /{slashed(schema['pattern'].removeprefix('^').removesuffix('$'))}/"
    return rules


def slashed(expression: str) -> str:
    """Return an expression with slashes and line breaks escaped, so that it can stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), expression)
