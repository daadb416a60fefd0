"""Further names under which clients ask for endpoints (``--model-alias``), such as the ``gpt-4o`` that is built into
many of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAliases:
    """The names, or patterns with ``*`` and ``?``, and the endpoint or ``endpoint:adapter`` that each of them means.

    ``default`` is the endpoint of requests that name none; None means the only endpoint there is.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def meant_by(self, called: str) -> str | None:
        """Return the target of ``called``: a name comes before the first pattern that matches. None if there is none.

        ``called`` may have an adapter behind an alias of an endpoint. A pattern without ":" matches what is before it.
        """
        if called in self.names:
            return self.names[called]
        name, colon, adapter = called.rpartition(":") if ":" in called else (called, "", "")
        for alias, target in self.names.items():
            if ":" in alias and fnmatch.fnmatchcase(called, alias):
                return target
        matching = (target for alias, target in self.names.items() if fnmatch.fnmatchcase(name, alias))
        found = self.names.get(name) or next(matching, None)
        if found is None or not colon:
            return found
        return None if ":" in found else f"{found}:{adapter}"
