"""The MLflow flavor ``llm``: log a language model with its tokenizer, adapters and template; load it anywhere."""

from __future__ import annotations

from . import errors
from .bundle_reader import load_bundle
from .load import _load_pyfunc, as_responses_agent, close, closing, load_model
from .names import FLAVOR_NAME
from .requirements import get_default_conda_env, get_default_pip_requirements
from .save import log_model, save_model

__all__ = [
    "FLAVOR_NAME",
    "_load_pyfunc",
    "as_responses_agent",
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
