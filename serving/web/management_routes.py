"""The routes of the management API and of usage, what their bodies and parameters look like, for ``routes`` and the
OpenAPI document."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_TOKENS = {"type": "integer", "minimum": 0, "maximum": 10**9, "description": "tokens/s"}
_ENTITY = {
    "type": "object",
    "required": ["entity_name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"},
        "entity_name": {"type": "string", "description": "A registered model, or a model's URI or directory"},
        "entity_version": {"type": "string", "description": "A number or an alias; none with a URI"},
        "workload_size": {"enum": ["Small", "Medium", "Large"]},
        "scale_to_zero_enabled": {"type": "boolean"},
        "min_provisioned_throughput": _TOKENS,
        "max_provisioned_throughput": _TOKENS,
        "engine_settings": {"type": "object", "description": "Settings that replace those saved with the model"},
    },
}
_ROUTE = {
    "type": "object",
    "required": ["served_model_name", "traffic_percentage"],
    "additionalProperties": False,
    "properties": {
        "served_model_name": _TEXT,
        "traffic_percentage": {"type": "integer", "minimum": 0, "maximum": 100},
    },
}
CONFIG: dict[str, Any] = {
    "type": "object",
    "required": ["served_entities"],
    "additionalProperties": False,
    "properties": {
        "served_entities": {"type": "array", "items": _ENTITY, "minItems": 1, "maxItems": 32},
        "traffic_config": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "routes": {"type": "array", "items": _ROUTE},
                "sticky": {"type": "boolean", "description": "A key's requests go to one served entity"},
            },
        },
    },
}
_TAGS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["key"],
        "additionalProperties": False,
        "properties": {"key": _TEXT, "value": _TEXT},
    },
}
RATE_LIMITS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["calls", "renewal_period"],
        "additionalProperties": False,
        "properties": {
            "calls": {"type": "integer", "minimum": 0, "maximum": 10**9},
            "key": {"enum": ["endpoint", "user"]},
            "renewal_period": {"const": "minute"},
        },
    },
}
_CREATE = {
    "type": "object",
    "required": ["name", "config"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"},
        "config": CONFIG,
        "description": {"type": "string", "maxLength": 4096},
        "tags": _TAGS,
        "rate_limits": RATE_LIMITS,
    },
}
_PATCH_TAGS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"add_tags": _TAGS, "delete_tags": {"type": "array", "items": _TEXT}},
}
_PUT_LIMITS = {"type": "object", "additionalProperties": False, "properties": {"rate_limits": RATE_LIMITS}}

BASE = "/api/2.0/serving-endpoints"
ONE = f"{BASE}/<name>"

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

# (method, path, handler, summary, schema of the body)
TABLE: tuple[tuple[str, str, str, str, dict[str, Any] | None], ...] = (
    ("POST", BASE, "create_serving_endpoint", "Create an endpoint; it is ready when its engines are", _CREATE),
    ("GET", BASE, "list_serving_endpoints", "All endpoints", None),
    ("GET", ONE, "get_serving_endpoint", "One endpoint: its state, config and pending config", None),
    ("DELETE", ONE, "delete_serving_endpoint", "Delete an endpoint; what runs is finished", None),
    ("PUT", f"{ONE}/config", "update_serving_endpoint", "Change what is served, without dropping a request", CONFIG),
    ("PUT", f"{ONE}/rate-limits", "put_serving_rate_limits", "Replace the calls a minute", _PUT_LIMITS),
    ("PATCH", f"{ONE}/tags", "patch_serving_tags", "Add and delete tags", _PATCH_TAGS),
    ("GET", f"{ONE}/openapi", "get_serving_openapi", "The OpenAPI document of one endpoint", None),
    ("GET", f"{ONE}/metrics", "get_serving_metrics", "The metrics of one endpoint", None),
)
