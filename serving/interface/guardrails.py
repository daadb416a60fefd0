"""The guardrails of an endpoint: which texts of its requests and replies are refused or masked."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
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
NO_SAFETY = "false: no model that judges safety is built in; a scorer may ask one"
SCORER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")
SCORER_ALLOWED = "module:name of a scorer that the server is started with (--guardrail-scorers)"
MAX_SCORERS = 4
MAX_SCORER_SECONDS = 120.0
OnError: TypeAlias = Literal["BLOCK", "PASS"]


class Pii(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The treatment of personal data, and the kinds of it that are looked for (all of them)."""

    behavior: Behavior = "NONE"
    types: Annotated[tuple[PiiType, ...], Meta(min_length=1)] = PII_TYPES


class ScorerRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scorer of MLflow's that judges whole texts: ``module:name``. ``on_error`` says what its failure means for a
    text, and so does one that takes more than ``timeout`` seconds."""

    scorer: Annotated[str, Meta(pattern=f"^{SCORER.pattern}$")]
    on_error: OnError = "BLOCK"
    timeout: Annotated[float, Meta(gt=0, le=MAX_SCORER_SECONDS)] = 10.0


class TextRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for texts, in the form of Databricks' AI Gateway. One of ``invalid_keywords`` blocks a text."""

    invalid_keywords: Annotated[tuple[str, ...], Meta(max_length=MAX_KEYWORDS)] = ()
    pii: Pii = Pii()
    safety: bool = False
    scorers: Annotated[tuple[ScorerRule, ...], Meta(max_length=MAX_SCORERS)] = ()

    def __post_init__(self) -> None:
        if self.safety:
            raise InvalidField("safety", True, NO_SAFETY)
        for place, keyword in enumerate(self.invalid_keywords):
            if not KEYWORD.fullmatch(keyword):
                raise InvalidField(f"invalid_keywords[{place}]", keyword, KEYWORD_ALLOWED)

    @property
    def is_empty(self) -> bool:
        """Whether no text can break the rules, apart from those that scorers know."""
        return not self.invalid_keywords and self.pii.behavior == "NONE"


NO_RULES = TextRules()


class Guardrails(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for what requests say, and for what the model answers."""

    input: TextRules = TextRules()
    output: TextRules = TextRules()


NO_GUARDRAILS = Guardrails()


def scorer_names(names: str) -> tuple[str, ...]:
    """Return the names of a server's setting, which are separated by commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def check_scorers(guardrails: Guardrails | None, allowed: tuple[str, ...], path: str) -> None:
    """Raise ``InvalidField`` if guardrails use a scorer that is not allowed; ``path`` is their place."""
    for side in ("input", "output") if guardrails is not None else ():
        for place, rule in enumerate(getattr(guardrails, side).scorers):
            if rule.scorer not in allowed:
                listed = "one that the server is started with (--guardrail-scorers): " + (", ".join(allowed) or "none")
                raise InvalidField(f"{path}.{side}.scorers[{place}].scorer", rule.scorer, listed)


def shown(guardrails: Guardrails) -> dict[str, Any]:
    """Return guardrails as the management API shows them."""
    return {name: _shown(getattr(guardrails, name)) for name in ("input", "output")}


def _shown(rules: TextRules) -> dict[str, Any]:
    pii = {"behavior": rules.pii.behavior, "types": list(rules.pii.types)}
    found = {"invalid_keywords": list(rules.invalid_keywords), "pii": pii, "safety": rules.safety}
    return found | ({"scorers": msgspec.to_builtins(rules.scorers)} if rules.scorers else {})
