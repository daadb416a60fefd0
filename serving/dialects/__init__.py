"""The dialects by name. To add one, write a module with a class of the protocol in ``base.py``, and add a line here."""

from __future__ import annotations

import functools
import re

from .anthropic.dialect import AnthropicDialect
from .base import Dialect, Encoded, Head, InferenceRoute, StreamEncoder, TemplatedEncoder, has_template
from .fields.tables import FIELDS, REFUSED_FIELDS
from .kserve.dialect import KServeDialect
from .mindie.dialect import MindieDialect
from .openai.databricks import DatabricksDialect
from .openai.dialect import OpenAIDialect
from .openai.mlflow import MlflowDialect
from .openai.rerank import RerankDialect
from .openvino.dialect import OpenVINODialect
from .responses.dialect import ResponsesDialect
from .triton.dialect import TritonGenerateDialect
from .triton.generate import GenerateDialect

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        OpenAIDialect(),
        ResponsesDialect(),
        AnthropicDialect(),
        RerankDialect(),
        KServeDialect(),
        DatabricksDialect(),
        MindieDialect(),
        GenerateDialect(),
        TritonGenerateDialect(),
        MlflowDialect(),
        OpenVINODialect(),
    )
}
FALLBACK = DIALECTS["mlflow"]


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a route's path: ``<name>`` matches one segment, ``<path:name>`` one or more."""
    return re.compile(re.sub(r"<\w+>", "[^/]+", re.sub(r"<path:\w+>", ".+", re.escape(path))))


def dialect_of(path: str) -> Dialect:
    """Return the dialect for the error of a request to ``path`` that fails before a route handles it.

    It is the dialect of the matching route, else the one with the longest matching prefix, else MLflow's.
    """
    path = path.rstrip("/")
    for dialect in DIALECTS.values():
        if any(_pattern(route.path).fullmatch(path) for route in dialect.routes):
            return dialect
    found = [
        (len(prefix), dialect)
        for dialect in DIALECTS.values()
        for prefix in dialect.prefixes
        if path == prefix or path.startswith(prefix + "/")
    ]
    return max(found, key=lambda one: one[0], default=(0, FALLBACK))[1]


__all__ = [
    "DIALECTS", "FIELDS", "REFUSED_FIELDS", "Dialect", "Encoded", "Head", "InferenceRoute", "StreamEncoder",
    "TemplatedEncoder", "dialect_of", "has_template",
]  # fmt: skip
