"""Every route of the server, as one table.

``handler`` names what answers: "invoke" runs a task of an endpoint, on the routes that the dialects bring
(``inference``); the others are the functions of that name in ``pages``, ``management``, ``accounts`` and ``usage``.
``dialect`` names the codec of the route, its errors included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dialects import DIALECTS, Dialect, InferenceRoute
from ..dialects.base import JSON
from ..readers import Reader
from .account_routes import TABLE as ACCOUNTS
from .management_routes import TABLE as MANAGEMENT
from .management_routes import USAGE, USAGE_QUERY


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """``open`` routes answer without an API key and while the server drains: probes depend on them.

    ``scope`` is what the key must have, None for any key. ``body`` reads a body that is no request of a dialect,
    ``query`` are the JSON schemas of the parameters behind the path.
    """

    path: str
    methods: tuple[str, ...]
    dialect: str
    handler: str
    inference: InferenceRoute | None = None
    summary: str = ""
    open: bool = False
    scope: str | None = "invoke"
    body: Reader[Any] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def content_types(self) -> tuple[str, ...]:
        """Of bodies."""
        return (JSON,) if self.inference is None else self.inference.content_types

    @property
    def is_invocation(self) -> bool:
        return self.inference is not None


def inference_routes(dialect: Dialect) -> tuple[Route, ...]:
    """The routes at which tasks of ``dialect`` are posted."""
    return tuple(
        Route(
            path=route.path,
            methods=("POST",),
            dialect=dialect.name,
            handler="invoke",
            inference=route,
            summary=route.summary,
        )
        for route in dialect.routes
    )


def _page(path: str, dialect: str, handler: str, summary: str, *, open: bool = False) -> Route:
    return Route(path=path, methods=("GET",), dialect=dialect, handler=handler, summary=summary, open=open, scope=None)


ROUTES: tuple[Route, ...] = (
    _page("/v1/models", "openai", "list_models", "Endpoints and their adapters"),
    _page("/v1/models/<path:name>", "openai", "get_model", "One endpoint or endpoint:adapter"),
    *(route for dialect in DIALECTS.values() for route in inference_routes(dialect)),
    _page("/.well-known/databricks-config", "databricks", "databricks_config", "Discovery; empty", open=True),
    _page("/api/2.0/endpoints/", "mlflow", "list_endpoints", "Endpoints, as MLflow's deployments server lists them"),
    _page("/api/2.0/endpoints/<name>", "mlflow", "get_endpoint", "One endpoint"),
    _page("/ping", "mlflow", "ping", "Is the server up", open=True),
    _page("/health", "mlflow", "health", "Do the engines make progress", open=True),
    _page("/ready", "mlflow", "ready", "Does the server take requests", open=True),
    _page("/version", "mlflow", "version", "The version of MLflow this server speaks for", open=True),
    _page("/metrics", "mlflow", "metrics", "Prometheus metrics", open=True),
    _page("/openapi.json", "mlflow", "openapi", "This document", open=True),
    _page("/docs", "mlflow", "docs", "A page to read the document", open=True),
)

ROUTES += tuple(
    Route(
        path=path,
        methods=(method,),
        dialect="databricks",
        handler=handler,
        summary=summary,
        scope=None if method == "GET" else "manage",
        body=body,
    )
    for method, path, handler, summary, body in MANAGEMENT
)

ROUTES += tuple(
    Route(
        path=path,
        methods=(method,),
        dialect="mlflow",
        handler=handler,
        summary=summary,
        scope="manage",
        body=body,
        query=query,
    )
    for method, path, handler, summary, body, query in ACCOUNTS
)

ROUTES += (
    Route(
        path=USAGE,
        methods=("GET",),
        dialect="mlflow",
        handler="usage",
        summary="What was used, and its cost: rows, sums, CSV or Parquet",
        scope=None,
        query=USAGE_QUERY,
    ),
)


def one_slash(path: str) -> str:
    """``/v1//models`` → ``/v1/models``: how a base URL that ends in a slash is joined to a path."""
    return re.sub("/{2,}", "/", path)
