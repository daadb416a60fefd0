"""Changes to a module of MLflow, made once MLflow has imported it and not before: ``import mlflow`` stays as fast."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Finder:
    """A finder of one module, by the finders after it, that calls ``change`` with the module when it has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        run = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or spec.loader is None or run is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Waiter:
    """A finder of nothing: at the next import after ``module`` has run to its end it calls ``change`` with it."""

    def __init__(self, module: ModuleType, change: Callable[[ModuleType], None]) -> None:
        self.name, self._module, self._change = module.__name__, module, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if not is_running(self._module):
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            self._change(self._module)


def is_running(module: ModuleType) -> bool:
    """Return whether a module is being imported, so that what it defines is not there yet."""
    return bool(getattr(module.__spec__, "_initializing", False))


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call ``change`` with the module ``name``, now or once it is imported."""
    loaded = sys.modules.get(name)
    if loaded is not None and not is_running(loaded):
        change(loaded)
    elif not any(isinstance(finder, Finder | Waiter) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(name, change) if loaded is None else Waiter(loaded, change))
