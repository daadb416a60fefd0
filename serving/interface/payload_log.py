"""The payload log of an endpoint: which requests' texts are kept, how many, for how long, and what is redacted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from .errors import InvalidField
from .validated_struct import Checked

MAX_TEXT = 256 * 2**10
"""Bytes of a request, and of a reply, that the log keeps. A longer one is left out, with a code that says so."""
REDACTED = "[redacted]"
MAX_PATTERNS = 20

PayloadCode: TypeAlias = Literal[
    "MAX_REQUEST_SIZE_EXCEEDED", "MAX_RESPONSE_SIZE_EXCEEDED", "REQUEST_NOT_JSON", "REDACTION_FAILED"
]

Pattern = Annotated[str, Meta(min_length=1, max_length=500)]
Patterns = Annotated[
    tuple[Pattern, ...],
    Meta(max_length=MAX_PATTERNS, description=f"a list of at most {MAX_PATTERNS} regular expressions in RE2's syntax"),
]


class PayloadLog(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an endpoint's payload log. An endpoint without them logs no text.

    Attributes:
        sample: share of the requests that are logged, above 0 and up to 1.
        max_rows: the most requests that are kept; the oldest ones go first.
        max_bytes: the most bytes of texts that are kept.
        max_age: seconds after which a request is deleted.
        redact: regular expressions (RE2). What they match in a text is replaced before anything is stored.
    """

    sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_rows: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    max_bytes: Annotated[int, Meta(ge=2**16, le=2**32)] = 64 * 2**20
    max_age: Annotated[float, Meta(ge=60, le=366 * 86_400)] = 7 * 86_400.0
    redact: Patterns = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for place, pattern in enumerate(self.redact):
            try:
                redacted([""], (pattern,))
            except ValueError as error:  # pyarrow's ArrowInvalid is one
                allowed = f"a regular expression in RE2's syntax: {error}"
                raise InvalidField(f"redact[{place}]", pattern, allowed) from None


def redacted(texts: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return ``texts`` with what the patterns match replaced, in time linear in their length.

    Raises ``ValueError`` for a pattern that is not RE2's.
    """
    import pyarrow as pa  # only servers that redact load it
    import pyarrow.compute as pc

    found: Any = pa.array(texts, pa.large_string())
    for pattern in patterns:
        found = pc.replace_substring_regex(found, pattern=pattern, replacement=REDACTED)
    replaced: list[str] = found.to_pylist()
    return replaced


def redacted_json(value: Any, patterns: Sequence[str], *, names: bool = True) -> Any:
    """Return a JSON value in which every text is redacted, names of fields too unless ``names`` is False."""
    texts: dict[str, None] = {}
    _collect(value, texts, names)
    replaced = dict(zip(texts, redacted(list(texts), patterns), strict=True))
    return _replaced(value, replaced, names)


def _collect(value: Any, texts: dict[str, None], names: bool) -> None:
    if isinstance(value, str):
        texts[value] = None
    elif isinstance(value, dict):
        texts.update(dict.fromkeys(value if names else ()))
        for one in value.values():
            _collect(one, texts, names)
    elif isinstance(value, list):
        for one in value:
            _collect(one, texts, names)


def _replaced(value: Any, replaced: dict[str, str], names: bool) -> Any:
    again = functools.partial(_replaced, replaced=replaced, names=names)
    if isinstance(value, str):
        return replaced[value]
    if isinstance(value, dict):
        return {replaced[name] if names else name: again(one) for name, one in value.items()}
    return [again(one) for one in value] if isinstance(value, list) else value
