"""The OpenAPI document as schemathesis reads it, one operation at a time.

``schema.parametrize()`` draws each operation's requests while tests are collected, which every process of xdist does
for all of them: a fixture with an operation as its parameter draws those of the tests that run.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

from mlflow_llm.serving.http.openapi.document import document
from mlflow_llm.serving.http.routes import ROUTES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis

by_fixture = schemathesis.pytest.from_fixture


@functools.cache
def _document() -> dict[str, Any]:
    return document(ROUTES)


def operations(of: str = "", without: str = "^$") -> list[str]:
    """Return the operations, such as ``POST /v1/completions``, whose path matches ``of`` and not ``without``
    (patterns).
    """
    return [
        f"{method.upper()} {path}"
        for path, methods in _document()["paths"].items()
        for method in methods
        if re.search(of, path) and not re.search(without, path)
    ]


def described(operation: str, *, coverage: bool = True) -> Any:
    """Return schemathesis' schema of one operation, with or without its coverage phase."""
    method, _, path = operation.partition(" ")
    found = _document()["paths"][path][method.lower()]
    schema = schemathesis.openapi.from_dict(_document() | {"paths": {path: {method.lower(): found}}})
    schema.config.phases.coverage.enabled = coverage
    return schema
