"""The dialects by name. A new one is a module with a class of the protocol in ``base.py`` and a line here."""

from __future__ import annotations

from .base import Dialect, ErrorBody, StreamEncoder
from .databricks import DatabricksDialect
from .mlflow import MlflowDialect
from .openai import OpenAIDialect
from .tables import FIELDS, REFUSED_FIELDS

DIALECTS: dict[str, Dialect] = {d.name: d for d in (OpenAIDialect(), DatabricksDialect(), MlflowDialect())}

__all__ = ["DIALECTS", "FIELDS", "REFUSED_FIELDS", "Dialect", "ErrorBody", "StreamEncoder"]
