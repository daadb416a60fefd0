"""Every route of the server. To add one, put a ``Route`` into the ``ROUTES`` of the module that handles it."""

from __future__ import annotations

import re

from ..dialects import DIALECTS, Dialect
from ..frontend.invoke import invoke
from ..frontend.operation import Auth
from .batches import batches, files
from .inference import info_routes, kserve, openvino, token_counts
from .management import (
    accounts,
    caller_account,
    endpoints,
    engine_hosts,
    engine_logs,
    lora_adapters,
    payloads,
    prompts,
    receipts,
    recent_requests,
    usage,
)
from .openapi.document import documented
from .page import bundle_routes
from .route import Route


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
        *token_counts.ROUTES,
        *info_routes.ROUTES,
        *openvino.ROUTES,
        *kserve.ROUTES,
        *files.ROUTES,
        *batches.ROUTES,
        *endpoints.ROUTES,
        *lora_adapters.ROUTES,
        *engine_logs.ROUTES,
        *engine_hosts.ROUTES,
        *accounts.ROUTES,
        *usage.ROUTES,
        *recent_requests.ROUTES,
        *payloads.ROUTES,
        *receipts.ROUTES,
        *caller_account.ROUTES,
        *prompts.ROUTES,
        *bundle_routes.ROUTES,
    )
)


def one_slash(path: str) -> str:
    """Return ``path`` with repeated slashes replaced by one: ``/v1//models`` → ``/v1/models``.

    Clients send such paths when they join a path to a base URL that ends in a slash.
    """
    return re.sub("/{2,}", "/", path)
