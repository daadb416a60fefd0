"""The guardrails of an endpoint: which texts of its requests and replies are refused or masked."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from .errors import InvalidField
from .payload_log import REDACTED

MASK = REDACTED
MAX_KEYWORDS = 100
MAX_KEYWORD = 100  # characters
KEYWORD = re.compile(rf"[^ \x00-\x1f](?:[^\x00-\x1f]{{0,{MAX_KEYWORD - 2}}}[^ \x00-\x1f])?")
KEYWORD_ALLOWED = f"a text of 1 to {MAX_KEYWORD} characters in one line, without spaces around it"

PiiType: TypeAlias = Literal["email", "iban", "credit_card", "us_ssn", "ip_address", "phone"]
PII_TYPES: tuple[PiiType, ...] = get_args(PiiType)
Behavior: TypeAlias = Literal["NONE", "BLOCK", "MASK"]
BEHAVIORS: tuple[Behavior, ...] = get_args(Behavior)
NO_SAFETY = "false: no model that judges safety is built in; keywords and pii are"


class Pii(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The treatment of personal data, and the kinds of it that are looked for (all of them)."""

    behavior: Behavior = "NONE"
    types: Annotated[tuple[PiiType, ...], Meta(min_length=1)] = PII_TYPES


class TextRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for texts, in the form of Databricks' AI Gateway. One of ``invalid_keywords`` blocks a text."""

    invalid_keywords: Annotated[tuple[str, ...], Meta(max_length=MAX_KEYWORDS)] = ()
    pii: Pii = Pii()
    safety: bool = False

    def __post_init__(self) -> None:
        if self.safety:
            raise InvalidField("safety", True, NO_SAFETY)
        for place, keyword in enumerate(self.invalid_keywords):
            if not KEYWORD.fullmatch(keyword):
                raise InvalidField(f"invalid_keywords[{place}]", keyword, KEYWORD_ALLOWED)

    @property
    def is_empty(self) -> bool:
        """Whether no text can break the rules."""
        return not self.invalid_keywords and self.pii.behavior == "NONE"


NO_RULES = TextRules()


class Guardrails(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for what requests say, and for what the model answers."""

    input: TextRules = TextRules()
    output: TextRules = TextRules()


NO_GUARDRAILS = Guardrails()


def shown(guardrails: Guardrails) -> dict[str, Any]:
    """Return guardrails as the management API shows them."""
    return {name: _shown(getattr(guardrails, name)) for name in ("input", "output")}


def _shown(rules: TextRules) -> dict[str, Any]:
    pii = {"behavior": rules.pii.behavior, "types": list(rules.pii.types)}
    return {"invalid_keywords": list(rules.invalid_keywords), "pii": pii, "safety": rules.safety}
