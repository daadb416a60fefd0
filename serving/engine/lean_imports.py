"""An engine's process without what transformers imports and no engine uses: half of its imports' processor time.

``transformers.modeling_utils`` imports, whatever the model, torch's compiler for a few decorators, torch's distributed
tensors with sympy for annotations, accelerate (and with it boto3, where that is installed) for models spread over
devices, and scipy for losses of object detection. Here the compiler runs when it is first used, and the rest is not
imported. Every import of transformers also reads the sources of all of its models, twice, for the names that they
export: here what was found is kept (``export_cache``). For a process that is an engine's alone: a notebook's imports
are its owner's.
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
    """A package in ``sys.modules`` that has not run. It runs, in place, when it is first asked for an attribute that is
    not there; ``__path__`` among them, which is how a submodule's import begins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which tools ask of every module
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
    """Before the engine's own modules are imported, in a process that compiles nothing of its own. Does nothing where
    the compiler is imported already."""
    if COMPILER in sys.modules:
        return
    with export_cache.used():
        from transformers import utils
    compiler = _deferred(COMPILER)
    # torch asks for it around what it computes on the meta device, as every model that is loaded does once
    compiler.disable = _undecorated  # type: ignore[attr-defined]
    # an engine is one process: no tensor of it is spread over several
    for place in (utils, utils.import_utils):
        place.is_torch_distributed_available = lambda: False
    with ExitStack() as stack:
        stack.enter_context(_replaced(utils, "is_scipy_available", lambda: False))  # by losses: a model may want it
        for place in (utils, utils.import_utils):
            stack.enter_context(_replaced(place, "is_accelerate_available", lambda *version: False))
        stack.enter_context(_replaced(torch.compiler, "disable", _undecorated))
        for name in DECORATORS:
            stack.enter_context(_replaced(compiler, name, _undecorated))
        for name in ("transformers.modeling_utils", "transformers.generation.utils"):  # of every model's module
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
    """A decorator, with and without arguments, that leaves a function as it is."""
    return function if function is not None else _undecorated


@contextmanager
def _replaced(place: ModuleType, name: str, value: Any) -> Iterator[None]:
    """``value`` as ``place``'s attribute for as long as the block runs; afterwards what was there, if anything."""
    own = dict(vars(place))
    setattr(place, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(place, name, own[name])
        else:
            delattr(place, name)
