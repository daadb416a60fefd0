"""Turns a caller's JSON schema into one that llguidance enforces exactly: the entry point for schemas in this package.

``document`` reads the schema, ``conjunction`` normalizes it (with ``scalars``, ``containers`` and ``disjoint``), and
``forms`` writes the result as a schema again.
"""

from __future__ import annotations

from typing import Any

from ..interface.errors import InvalidField
from .conjunction import MAX_LEVELS, Conjunction
from .document import Document
from .forms import has_open_keys, written


def normalized(schema: Any, field: str) -> tuple[dict[str, Any], bool]:
    """Return the schema, and whether its texts may have keys that it does not name. Raises ``InvalidField``."""
    document = Document(schema, field)
    conjunction = Conjunction(document)
    form = conjunction.of([document.root], level=0)
    if not form:
        deep = f" within {MAX_LEVELS} levels of arrays and objects" if conjunction.was_cut else ""
        raise InvalidField(field, "the schema", f"a schema that some value satisfies{deep}")
    return written(form), has_open_keys(form)
