"""Imports transformers without the packages that no engine uses, which saves half of the imports' CPU time.

Whatever the model, ``transformers.modeling_utils`` imports:

- torch's compiler, for a few decorators;
- torch's distributed tensors with sympy, for annotations;
- accelerate (and with it boto3, if that is installed), for models spread over devices;
- scipy, for losses of object detection.

Here the compiler is run when it is first used, and the rest is not imported. Every import of transformers also reads
the sources of all its models, twice, for the names that they export; here the result is cached (``export_cache``). Use
this only in a process that is just an engine: a notebook's imports belong to its owner.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch

from . import export_cache

COMPILER = "torch._dynamo"
DECORATORS = ("allow_in_graph", "assume_constant_result")  # of functions that no engine compiles


class Deferred(ModuleType):
    """A package in ``sys.modules`` that has not run yet. It runs, in place, when it is first asked for a missing
    attribute, ``__path__`` included, which is how the import of a submodule begins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # tools ask every module for such names
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        assert spec.submodule_search_locations is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)
        return getattr(self, name)


def import_lean() -> None:
    """Import transformers without what engines do not use.

    Call it before the engine's own modules are imported, in a process that compiles nothing of its own. Does nothing if
    the compiler is already imported."""
    if COMPILER in sys.modules:
        return
    with export_cache.used():
        from transformers import utils
    compiler = _deferred(COMPILER)
    # torch uses this around computations on the meta device, which every model does once while it is loaded
    compiler.disable = _undecorated  # type: ignore[attr-defined]
    # an engine is one process, so none of its tensors is distributed
    for place in (utils, utils.import_utils):
        place.is_torch_distributed_available = lambda: False
    with ExitStack() as stack:
        stack.enter_context(_replaced(utils, "is_scipy_available", lambda: False))  # only now: a model may need scipy
        for place in (utils, utils.import_utils):
            stack.enter_context(_replaced(place, "is_accelerate_available", lambda *version: False))
        stack.enter_context(_replaced(torch.compiler, "disable", _undecorated))
        for name in DECORATORS:
            stack.enter_context(_replaced(compiler, name, _undecorated))
        for name in ("transformers.modeling_utils", "transformers.generation.utils"):  # every model imports these
            importlib.import_module(name)
    del compiler.__path__


def _deferred(name: str) -> ModuleType:
    spec = find_spec(name)
    assert spec is not None
    module = module_from_spec(spec)
    module.__class__ = Deferred
    sys.modules[name] = module
    return module


def _undecorated(function: Any = None, *words: Any, **options: Any) -> Any:
    """Return a decorator, used with or without arguments, that returns a function unchanged."""
    return function if function is not None else _undecorated


@contextmanager
def _replaced(place: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of ``place`` to ``value`` while the block runs; afterwards restore or delete it."""
    own = dict(vars(place))
    setattr(place, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(place, name, own[name])
        else:
            delattr(place, name)
