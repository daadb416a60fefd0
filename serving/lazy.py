"""Modules that take long to import, imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """Stands for module ``name``, which is imported with its first attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
