"""A caller's JSON schema as one that llguidance holds to: the front of this package's work on schemas.

``document`` reads it, ``conjunction`` brings it into one form (``scalars``, ``containers``, ``disjoint``), ``forms``
writes that down again.
"""

from __future__ import annotations

from typing import Any

from ..errors import InvalidField
from .conjunction import MAX_LEVELS, Conjunction
from .document import Document
from .forms import has_open_keys, written


def normalized(schema: Any, field: str) -> tuple[dict[str, Any], bool]:
    """The schema, and whether its texts may have keys that it does not name. Raises ``InvalidField``."""
    document = Document(schema, field)
    conjunction = Conjunction(document)
    form = conjunction.of([document.root], level=0)
    if not form:
        deep = f" within {MAX_LEVELS} levels of arrays and objects" if conjunction.was_cut else ""
        raise InvalidField(field, "the schema", f"a schema that some value satisfies{deep}")
    return written(form), has_open_keys(form)
