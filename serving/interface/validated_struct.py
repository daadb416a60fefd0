"""Self-checking settings: a Struct whose annotations are the only table of types, choices and ranges."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Mapping
from inspect import cleandoc
from typing import Any, ClassVar, Self

import msgspec
import msgspec.inspect as inspect
from msgspec import Struct

from ..system.sizes import bytes_of
from .errors import InvalidField

OF_BYTES = "a number of bytes"  # begins the description of settings that take sizes such as 1GiB
ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


class Checked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of settings that are checked however they are created.

    A value that its field does not allow raises ``InvalidField``, which names the field, the value and what is allowed.
    ``Meta(description=…)`` says what is allowed in words if type and bounds do not. ``ALIASES`` has the present name of
    a setting by each name that earlier releases had for it; ``DROPPED`` has the one value that former settings could
    have, which is accepted and has no effect. ``read`` takes a number of bytes also as a text, such as "1GiB".
    """

    ALIASES: ClassVar[Mapping[str, str]] = {}
    DROPPED: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        for name, (kind, allowed) in _fields(type(self)).items():
            _checked(name, getattr(self, name), kind, allowed)

    @classmethod
    def read(cls, values: Mapping[str, Any], parent: str = "") -> Self:
        """Create from plain values of JSON or YAML; ``parent`` is their path, for errors. Raises ``InvalidField``."""
        fields, found, before = _fields(cls), {}, f"{parent}." if parent else ""
        for given, value in values.items():
            name = cls.ALIASES.get(given, given)
            if given in cls.DROPPED and value is cls.DROPPED[given]:
                continue
            if name != given and name in values:
                raise InvalidField(f"{before}{given}", value, f"only {name}, its present name, which is given too")
            if name not in fields:
                raise InvalidField(f"{before}{name}", value, "no such setting; expected one of " + ", ".join(fields))
            found[name] = _checked(f"{before}{name}", value, *fields[name])
        return cls(**found)

    @classmethod
    def renamed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` by the present names of the settings."""
        return {cls.ALIASES.get(name, name): value for name, value in values.items()}

    @classmethod
    def described(cls) -> tuple[tuple[str, Any, str], ...]:
        """Return (name, default, what is allowed in words) for every setting."""
        defaults = cls()
        return tuple((name, getattr(defaults, name), allowed) for name, (_, allowed) in _fields(cls).items())

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return what each setting does, by name: the ``Attributes`` in the docstrings of the class and its bases."""
        found: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            _, _, attributes = cleandoc(base.__doc__ or "").partition("Attributes:\n")
            for name, text in ATTRIBUTE.findall(attributes):
                found[name] = " ".join(text.split())
        return {name: found.get(name, "") for name in _fields(cls)}


def _checked(name: str, given: Any, kind: Any, allowed: str) -> Any:
    value = given
    if isinstance(value, str) and allowed.startswith(OF_BYTES):
        size = bytes_of(value)
        value = value if size is None else size
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise InvalidField(name, given, allowed) from None


@functools.cache
def _fields(cls: type[Checked]) -> dict[str, tuple[Any, str]]:
    """Return each field's type, and what it allows in words."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    return {name: (kinds[name], _allowed(inspect.type_info(kinds[name]))) for name in cls.__struct_fields__}


def _allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            described = (kind.extra_json_schema or {}).get("description")
            return described or _allowed(kind.type)
        case inspect.UnionType():
            rest = [_allowed(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
            return ", ".join([*rest, "or null"] if kind.includes_none else rest)
        case inspect.LiteralType():
            return "one of " + ", ".join(map(repr, kind.values))
        case inspect.IntType() | inspect.FloatType():
            return ("an integer" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)
        case inspect.BoolType():
            return "true or false"
        case _:
            return "a text"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f" above {kind.gt:g}" if kind.gt is not None else f" from {kind.ge:g}" if kind.ge is not None else ""
    return low + (f" to {kind.le:.0f}" if kind.le is not None else "")
