"""Every field of a request of any task, those that are refused by name among them."""

from __future__ import annotations

from ...serving.dialects import FIELDS, REFUSED_FIELDS


def request_fields() -> tuple[str, ...]:
    """Every field of a request of any task, and those that are refused by name.

    A signature without the latter would have MLflow drop them instead of having them refused.
    """
    return tuple(dict.fromkeys([*(name for names in FIELDS.values() for name in names), *REFUSED_FIELDS]))
