"""Import slow modules when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A stand-in for module ``name``, which is imported on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
