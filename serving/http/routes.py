"""Every route of the server. To add one, put a ``Route`` into the ``ROUTES`` of the module that handles it."""

from __future__ import annotations

import re

from ..dialects import DIALECTS, Dialect
from . import accounts, count_tokens, engine_logs, kserve, lora_adapters, management, openvino, pages, tokenize, usage
from .invoke import invoke
from .openapi import documented
from .route import Auth, Route


def inference_routes(dialect: Dialect) -> tuple[Route, ...]:
    """Return the routes to which tasks of ``dialect`` are posted."""
    return tuple(
        Route(
            method="POST",
            path=route.path,
            handler=invoke,
            summary=route.summary,
            dialect=dialect,
            auth=Auth.INVOKE,
            inference=route,
        )
        for route in dialect.routes
    )


ROUTES = documented(
    (
        *(route for dialect in DIALECTS.values() for route in inference_routes(dialect)),
        *tokenize.ROUTES,
        *count_tokens.ROUTES,
        *pages.ROUTES,
        *openvino.ROUTES,
        *kserve.ROUTES,
        *management.ROUTES,
        *lora_adapters.ROUTES,
        *engine_logs.ROUTES,
        *accounts.ROUTES,
        *usage.ROUTES,
    )
)


def one_slash(path: str) -> str:
    """Return ``path`` with repeated slashes replaced by one: ``/v1//models`` → ``/v1/models``.

    Clients send such paths when they join a path to a base URL that ends in a slash.
    """
    return re.sub("/{2,}", "/", path)
