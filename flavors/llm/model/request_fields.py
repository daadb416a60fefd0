"""The request fields of all tasks, including those that are refused by name."""

from __future__ import annotations

from ....serving.dialects import FIELDS, REFUSED_FIELDS


def request_fields() -> tuple[str, ...]:
    """Return every request field of any task, including those that are refused by name.

    If the signature lacked the latter, MLflow would drop them silently instead of letting them be refused.
    """
    return tuple(dict.fromkeys([*(name for names in FIELDS.values() for name in names), *REFUSED_FIELDS]))
