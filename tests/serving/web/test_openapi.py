"""The OpenAPI document, and requests made from it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.web.app import create_app
from mlflow_llm.serving.web.invoke import Server
from mlflow_llm.serving.web.openapi import document

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, settings


def test_every_route_is_described(client: FlaskClient) -> None:
    """The served document has an operation for each route that the application answers, and no other; its own
    references resolve."""
    served = client.get("/openapi.json").json
    described = {(path, method.upper()) for path, operations in served["paths"].items() for method in operations}
    mounted = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), method)
        for rule in client.application.url_map.iter_rules()
        for method in rule.methods - {"HEAD"}  # which Flask answers wherever it answers GET
    }
    assert described == mounted
    queries = {p["name"] for p in served["paths"]["/api/2.0/usage"]["get"]["parameters"] if p["in"] == "query"}
    assert {"start", "end", "tenant", "by", "format", "cursor"} <= queries
    for operations in served["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for ref in body.get("oneOf", [body] if body else []):
                known = ref.get("type") == "object"  # the management API's bodies stand where they are used
                assert known or ref["$ref"].split("/")[-1] in served["components"]["schemas"]


def test_operations_have_ids_of_their_own(client: FlaskClient) -> None:
    """Code generators name a function after each: no two are the same."""
    operations = [one for path in client.get("/openapi.json").json["paths"].values() for one in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_headers_keep_to_the_document(client: FlaskClient) -> None:
    """A sticky key as long as the document allows is taken, a longer one is refused by the header's name."""
    operation = client.get("/openapi.json").json["paths"]["/v1/completions"]["post"]
    most = next(p["schema"]["maxLength"] for p in operation["parameters"] if p["name"] == "X-Sticky-Key")
    body = {"model": "assistant", "prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers={"X-Sticky-Key": "k" * most}).status_code == 200
    refused = client.post("/v1/completions", json=body, headers={"X-Sticky-Key": "k" * (most + 1)})
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "X-Sticky-Key")
    assert f"at most {most}" in refused.json["error"]["message"]


# the management API is tried in test_management, on a store
schema = schemathesis.openapi.from_dict(document()).exclude(path_regex="^/api/2.0/serving-endpoints")


@pytest.fixture
def bounded(make: Callable[..., Server]) -> Server:
    return make(timeout=5.0)


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_5xx(case, bounded: Server) -> None:
    """Whatever the document allows, and near it, gets an answer that is no fault of ours."""
    answer = send(case, bounded)
    assert answer.status_code < 500 or answer.status_code == 504, answer.text


def send(case, server: Server):
    client = create_app(server).test_client()
    kwargs = case.as_transport_kwargs(base_url="http://localhost")
    parts = urlsplit(kwargs["url"])
    data = kwargs.get("data")
    body = {"json": kwargs["json"]} if "json" in kwargs else {"data": data}
    headers = {k: v for k, v in (kwargs.get("headers") or {}).items() if "\n" not in v and "\r" not in v}
    return client.open(parts.path, method=kwargs["method"], headers=headers, query_string=kwargs.get("params"), **body)
