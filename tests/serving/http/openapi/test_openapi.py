"""The OpenAPI document; requests made from it are in ``test_openapi_server``."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from flask.testing import FlaskClient

from mlflow_llm.serving.http.openapi.docs_page import page


def test_every_route_is_described(client: FlaskClient) -> None:
    """The served document describes exactly the routes that the application answers, and its references resolve."""
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
    for reference in references(served):
        found = served
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from references(entry)


def test_operations_have_ids_of_their_own(client: FlaskClient) -> None:
    """Operation ids are unique, since code generators name functions after them."""
    operations = [one for path in client.get("/openapi.json").json["paths"].values() for one in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_headers_keep_to_the_document(client: FlaskClient) -> None:
    """A sticky key as long as the document allows is taken, a longer one is refused by the header's name."""
    operation = client.get("/openapi.json").json["paths"]["/v1/completions"]["post"]
    maximum = next(p["schema"]["maxLength"] for p in operation["parameters"] if p["name"] == "X-Sticky-Key")
    body = {"model": "assistant", "prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers={"X-Sticky-Key": "k" * maximum}).status_code == 200
    refused = client.post("/v1/completions", json=body, headers={"X-Sticky-Key": "k" * (maximum + 1)})
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "X-Sticky-Key")
    assert f"at most {maximum}" in refused.json["error"]["message"]


def test_the_page_tells_what_a_field_takes(client: FlaskClient) -> None:
    """The page shows every property of any message shape once, with defaults and whether a model may have its own."""
    page = html.unescape(client.get("/docs").text)
    (row, *_) = re.findall(r"<tr><td><code>messages\[\]\.role</code>.*?</tr>", page)
    assert all(f'"{role}"' in row for role in ("system", "developer", "user", "assistant", "tool"))
    (row, *_) = re.findall(r"<tr><td><code>messages\[\]\.content</code>.*?</tr>", page)
    assert "string | array of object | null" in row
    (row, *_) = re.findall(r"<tr><td><code>temperature</code>.*?</tr>", page)
    assert "(default: 1, or the model's own)" in row
    (row, *_) = re.findall(r"<tr><td><code>n</code>.*?</tr>", page)
    assert "default 1" in row
    (row, *_) = re.findall(r"<tr><td><code>served_entities\[\]\.defaults</code>.*?</tr>", page)
    assert "over the model's own" in row


def test_the_page_escapes_what_it_shows() -> None:
    """The page escapes all text of the document, and shows a body of several media types once for each shape."""
    shape = {"type": "object", "properties": {"<i>": {"type": "string", "description": "<script>alert(1)</script>"}}}
    body = {"content": {"application/json": {"schema": shape}, "application/octet-stream": {"schema": {}}}}
    operation = {"tags": ["<b>"], "summary": "a & b", "parameters": [], "requestBody": body, "responses": {}}
    shown = page({"paths": {"/<x>": {"post": operation}}, "components": {"schemas": {}}})
    assert "<script>" not in shown
    assert "<code>&lt;i&gt;</code>" in shown
    assert "<code>/&lt;x&gt;</code> a &amp; b" in shown
    assert shown.count("<p>Body</p>") == 2
