"""The routes of the management API and of usage, what their bodies and parameters look like, for ``routes`` and the
OpenAPI document."""

from __future__ import annotations

from typing import Any

from ..endpoints.config_body import config_body
from ..endpoints.management_body import NEW_ENDPOINT, NEW_RATE_LIMITS, TAG_CHANGES
from ..readers import Reader

BASE = "/api/2.0/serving-endpoints"
ONE = f"{BASE}/<name>"
SERVED = f"{ONE}/served-models/<path:served>"

_NAME = {"type": "string", "minLength": 1, "maxLength": 256}
_TIME = {"type": "string", "description": "A day, an ISO 8601 time or milliseconds since the epoch"}
USAGE = "/api/2.0/usage"
USAGE_QUERY: dict[str, dict[str, Any]] = {
    "start": _TIME,
    "end": _TIME,
    "tenant": _NAME,
    "endpoint": _NAME,
    "entity": _NAME,
    "key_id": _NAME,
    "status": {"enum": ["open", "ok", "error", "aborted", "recovered"]},
    "by": {"type": "string", "description": "Sums by day, tenant, endpoint, entity, key_id; several with commas"},
    "format": {"enum": ["json", "csv", "parquet"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "description": "Rows of a page"},
    "cursor": {"type": "string", "description": "next_cursor of the page before"},
}

# (method, path, handler, summary, reader of the body)
TABLE: tuple[tuple[str, str, str, str, Reader[Any] | None], ...] = (
    (
        "POST",
        BASE,
        "create_serving_endpoint",
        "Create an endpoint; it is ready when its engines are",
        NEW_ENDPOINT,
    ),
    ("GET", BASE, "list_serving_endpoints", "All endpoints", None),
    ("GET", ONE, "get_serving_endpoint", "One endpoint: its state, config and pending config", None),
    ("DELETE", ONE, "delete_serving_endpoint", "Delete an endpoint; what runs is finished", None),
    (
        "PUT",
        f"{ONE}/config",
        "update_serving_endpoint",
        "Change what is served, without dropping a request",
        config_body,
    ),
    ("PUT", f"{ONE}/rate-limits", "put_serving_rate_limits", "Replace the calls a minute", NEW_RATE_LIMITS),
    ("PATCH", f"{ONE}/tags", "patch_serving_tags", "Add and delete tags", TAG_CHANGES),
    ("GET", f"{ONE}/openapi", "get_serving_openapi", "The OpenAPI document of one endpoint", None),
    ("GET", f"{ONE}/metrics", "get_serving_metrics", "The metrics of one endpoint", None),
    ("GET", f"{SERVED}/logs", "get_serving_logs", "The end of what a served model's engines wrote", None),
    ("GET", f"{SERVED}/build-logs", "get_serving_build_logs", "What they wrote while they loaded", None),
)
