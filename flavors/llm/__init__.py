"""The MLflow flavor ``llm``: log a language model with its tokenizer, adapters and template; load it anywhere.

Each public name is imported on first use, so a program that only reads a model from a directory, such as the server,
imports neither MLflow nor the code that logs models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .convert.export import export
    from .convert.ollama.import_model import from_modelfile
    from .convert.transformers_model import from_transformers_model
    from .load.load_model import _load_pyfunc, as_responses_agent, close, closing, load_model
    from .load.spark import spark_udf
    from .model.bundle_loader import load_bundle
    from .model.names import FLAVOR_NAME
    from .save.requirements import get_default_conda_env, get_default_pip_requirements
    from .save.save_model import log_model, save_model
    from .save.whole_model import materialise

__all__ = [
    "FLAVOR_NAME",
    "_load_pyfunc",
    "as_responses_agent",
    "close",
    "closing",
    "errors",
    "export",
    "from_modelfile",
    "from_transformers_model",
    "get_default_conda_env",
    "get_default_pip_requirements",
    "load_bundle",
    "load_model",
    "log_model",
    "materialise",
    "save_model",
    "spark_udf",
]

MODULES = {
    "FLAVOR_NAME": "model.names",
    "_load_pyfunc": "load.load_model",
    "as_responses_agent": "load.load_model",
    "close": "load.load_model",
    "closing": "load.load_model",
    "errors": "errors",
    "export": "convert.export",
    "from_modelfile": "convert.ollama.import_model",
    "from_transformers_model": "convert.transformers_model",
    "get_default_conda_env": "save.requirements",
    "get_default_pip_requirements": "save.requirements",
    "load_bundle": "model.bundle_loader",
    "load_model": "load.load_model",
    "log_model": "save.save_model",
    "materialise": "save.whole_model",
    "save_model": "save.save_model",
    "spark_udf": "load.spark",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{MODULES[name]}", __name__)
    found = globals()[name] = module if name == MODULES[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    """Return the public names: modules, and the function that only MLflow calls, are none."""
    return [name for name in __all__ if not name.startswith("_")]
