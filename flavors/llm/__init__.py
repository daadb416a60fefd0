"""The MLflow flavor ``llm``: log a language model with its tokenizer, adapters and template; load it anywhere."""

from __future__ import annotations

from . import errors
from .failures import FLAVOR_NAME
from .lifetime import close, closing
from .requirements import get_default_conda_env, get_default_pip_requirements
from .resolve import _load_pyfunc, load_bundle, load_model
from .save import log_model, save_model

__all__ = [
    "FLAVOR_NAME",
    "_load_pyfunc",
    "close",
    "closing",
    "errors",
    "get_default_conda_env",
    "get_default_pip_requirements",
    "load_bundle",
    "load_model",
    "log_model",
    "save_model",
]
