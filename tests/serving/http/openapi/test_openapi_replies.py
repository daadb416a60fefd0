"""Real replies and errors have the schemas that the OpenAPI document gives them, and its examples run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.openapi.document import document
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Ledger, Store
from mlflow_llm.serving.modes import PayPerToken


@functools.cache
def described() -> dict[str, Any]:
    return document(ROUTES)


def closed(schema: Any) -> Any:
    """Return ``schema`` with no properties of objects but those that it names, so that none is left out of it."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value if name in ("example", "examples") else closed(value) for name, value in schema.items()}
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def validator(method: str, path: str, status: str, kind: str) -> Any:
    content = described()["paths"][path][method]["responses"][status]["content"]
    assert kind in content, (method, path, status, kind, list(content))
    components = {"schemas": closed(described()["components"]["schemas"])}
    return jsonschema_rs.Draft202012Validator({**closed(content[kind]["schema"]), "components": components})


class Checked:
    """A client each of whose replies is compared with the document."""

    def __init__(self, client: FlaskClient) -> None:
        self.client = client

    def send(self, method: str, path: str, body: Any = None, *, query: Any = None, **path_values: str) -> Any:
        """Send a request to the route ``path``, and return its answer after checking it."""
        real = re.sub(r"{(\w+)}", lambda name: path_values[name[1]], path)
        options = {} if body is None else {"json": body}
        answer = self.client.open(real, method=method.upper(), query_string=query, **options)
        kind, status = answer.content_type.partition(";")[0], str(answer.status_code)
        check = validator(method, path, status, kind)
        for value in values(answer, kind):
            errors = [f"{error.instance_path}: {error.message}" for error in check.iter_errors(value)]
            assert not errors, (method, path, errors[:3], value)
        return answer


def values(answer: Any, kind: str) -> Iterator[Any]:
    """Yield what the schema is about: the object, or the data of each event of a stream."""
    if kind == "text/event-stream":
        for event in re.split(r"\n\n", answer.text):
            data = [line.removeprefix("data:").strip() for line in event.split("\n") if line.startswith("data:")]
            if data and data != ["[DONE]"]:
                yield json.loads(data[0])
    else:
        yield answer.json if kind == "application/json" else answer.data.decode("latin-1")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path_factory.mktemp('replies')}/serving.db")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def checked(make: Callable[..., WorkerState], store: Store, instant_bundle: Bundle, tmp_path_factory: Any) -> Checked:
    """Return a checked client of a server with a store, a ledger and the endpoint ``assistant``."""

    def locate(entities: tuple) -> tuple[ModelSource, ...]:
        return tuple(ModelSource(uri=entity.uri, bundle=instant_bundle) for entity in entities)

    ledger = Ledger(store, state_dir=tmp_path_factory.mktemp("state"))
    endpoints = EndpointStore(store, locate=locate)
    server = make(mode=PayPerToken(ledger), ledger=ledger, endpoint_store=endpoints)
    endpoints.create({"name": "assistant", "config": CONFIG})
    return Checked(create_app(server).test_client())


CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
HELLO = [{"role": "user", "content": "Hi"}]


def inference_examples() -> Iterator[Any]:
    for path, operations in described()["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in body.get("examples", {}).items():
            yield pytest.param(path, name, example["value"], id=f"{path}-{name}".replace(" ", "-"))


@pytest.mark.parametrize(("path", "name", "example"), list(inference_examples()))
def test_examples_of_inference_run(checked: Checked, path: str, name: str, example: dict[str, Any]) -> None:
    """Each example of an inference route is a 200 whose reply, or whose events, have the documented schema. The instant
    engine compares no texts, which is refused in the documented form."""
    answer = checked.send("post", path, example, name="assistant", model_version="1")
    compares = "score" in name
    assert answer.status_code == (404 if compares else 200), answer.text
    if "stream" in name:
        assert answer.text.count("data:") > 1


@pytest.mark.parametrize("path", sorted({case.values[0] for case in inference_examples()}))
def test_refusals_of_inference(checked: Checked, path: str) -> None:
    """A field that is unknown is refused by each inference route in its documented form of error."""
    answer = checked.send("post", path, {"colour": 1}, name="assistant", model_version="1")
    assert answer.status_code in (400, 422), answer.text


ASKED = (
    ("get", "/v1/models"), ("get", "/v1/models/{name}"), ("get", "/v3/models"), ("get", "/v3/models/{name}"),
    ("get", "/v1/config"), ("get", "/api/2.0/endpoints/"), ("get", "/api/2.0/endpoints/{name}"),
    ("get", "/.well-known/databricks-config"), ("get", "/ping"), ("get", "/health"), ("get", "/ready"),
    ("get", "/version"), ("get", "/metrics"), ("get", "/v2"), ("get", "/v2/health/live"), ("get", "/v2/health/ready"),
    ("get", "/v2/models/{name}"), ("get", "/v2/models/{name}/ready"), ("get", "/v2/models/{name}/config"),
    ("get", "/v2/models/{name}/versions/{model_version}"), ("get", "/v2/models/{name}/versions/{model_version}/ready"),
    ("get", "/v2/models/{name}/versions/{model_version}/config"), ("get", "/openapi.json"), ("get", "/docs"),
    ("get", "/"), ("get", "/page/{name}"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_answers_about_the_server(checked: Checked, method: str, path: str) -> None:
    """Each route about the server and its models answers with its documented schema, and refuses an unknown name so."""
    name = "app.js" if path.startswith("/page") else "assistant"
    assert checked.send(method, path, name=name, model_version="1").status_code == 200
    if "{name}" in path:
        assert checked.send(method, path, name="nobody", model_version="1").status_code == 404


def test_models_in_the_form_of_anthropic(checked: Checked) -> None:
    """Both forms of the lists of models are documented."""
    for path, name in (("/v1/models", ""), ("/v1/models/{name}", "assistant")):
        real = path.format(name=name)
        found = checked.client.get(real, headers={"anthropic-version": "2023-06-01"})
        assert validator("get", path, "200", "application/json").is_valid(found.json), found.json
        refused = checked.client.get(real, headers={"anthropic-version": "x"})
        assert validator("get", path, str(refused.status_code), "application/json").is_valid(refused.json)


def example(method: str, path: str) -> Any:
    return described()["paths"][path][method]["requestBody"]["content"]["application/json"]["example"]


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v2/repository/index"],
)
def test_tokens_without_a_run(checked: Checked, path: str) -> None:
    """The examples of routes that count run, and an unknown field is refused in the documented form."""
    assert checked.send("post", path, example("post", path)).status_code == 200
    assert checked.send("post", path, {"colour": 1}).status_code == 400


API = "/api/2.0"
KEYS, LIMITS, PRICES, CURRENCY = (f"{API}/{name}" for name in ("keys", "limits", "prices", "currency"))


def test_accounts(checked: Checked) -> None:
    """The examples of keys, limits, prices and the currency run one after another, and each reply has its schema."""
    made = checked.send("post", KEYS, example("post", KEYS)).json["key"]["key_id"]
    one = f"{KEYS}/{{name}}"
    checked.send("get", KEYS)
    checked.send("get", one, name=made)
    assert checked.send("patch", one, example("patch", one), name=made).status_code == 200
    assert checked.send("post", f"{one}/rotate", example("post", f"{one}/rotate"), name=made).status_code == 200
    assert checked.send("put", CURRENCY, example("put", CURRENCY)).status_code == 200
    checked.send("get", CURRENCY)
    assert checked.send("put", LIMITS, example("put", LIMITS)).status_code == 200
    assert checked.send("get", LIMITS).json["limits"]
    limit = {"scope": "tenant", "subject": "search", "kind": "qpm"}
    assert checked.send("delete", LIMITS, query=limit).status_code == 200
    assert checked.send("put", PRICES, example("put", PRICES)).status_code == 200
    assert checked.send("get", PRICES).json["prices"]
    assert checked.send("delete", PRICES, query={"entity": "assistant-1"}).status_code == 200
    assert checked.send("get", f"{API}/audit").json["audit"]
    assert checked.send("delete", one, name=made).json["key"]["state"] == "revoked"
    for method, path, body in (
        ("post", KEYS, {}),
        ("put", LIMITS, {}),
        ("put", PRICES, {}),
        ("put", CURRENCY, {}),
        ("patch", one, {"colour": 1}),
        ("post", f"{one}/rotate", {"colour": 1}),
    ):
        assert checked.send(method, path, body, name=made).status_code == 400
    for method, path in (("get", KEYS), ("get", LIMITS), ("delete", LIMITS), ("get", PRICES), ("delete", PRICES)):
        assert checked.send(method, path, query={"colour": 1}).status_code == 400
    assert checked.send("get", f"{API}/audit", query={"colour": 1}).status_code == 400
    for method in ("get", "delete"):
        assert checked.send(method, one, name="nobody").status_code == 404


def test_usage(checked: Checked) -> None:
    """Rows, sums and exports of usage have their schemas."""
    path = f"{API}/usage"
    chat = {"model": "assistant", "messages": HELLO, "max_tokens": 2}
    checked.send("post", "/v1/chat/completions", chat)
    assert checked.send("get", path).json["usage"]
    assert checked.send("get", path, query={"by": "day,tenant,entity"}).json["usage"]
    for form in ("csv", "parquet"):
        assert checked.send("get", path, query={"format": form}).status_code == 200
    assert checked.send("get", path, query={"by": "colour"}).status_code == 400


def test_managed_endpoints(checked: Checked) -> None:
    """The examples of the management API run, and its replies and refusals have their schemas."""
    root = f"{API}/serving-endpoints"
    one = f"{root}/{{name}}"
    made = checked.send("post", root, example("post", root))
    assert (made.status_code, made.json["name"]) == (200, "second")
    assert checked.send("post", root, example("post", root)).status_code == 409
    assert checked.send("put", f"{one}/config", example("put", f"{one}/config"), name="second").status_code == 409
    assert len(checked.send("get", root).json["endpoints"]) == 2
    for path in (one, f"{one}/openapi", f"{one}/metrics"):
        assert checked.send("get", path, name="second").status_code == 200
        assert checked.send("get", path, name="nobody").status_code == 404
    for method, path in (("put", f"{one}/rate-limits"), ("patch", f"{one}/tags")):
        assert checked.send(method, path, example(method, path), name="second").status_code == 200
        assert checked.send(method, path, {"colour": 1}, name="second").status_code == 400
    logs = f"{one}/served-models/{{served}}"
    for kind in ("logs", "build-logs"):
        assert checked.send("get", f"{logs}/{kind}", name="second", served="assistant-1").status_code == 200
        assert checked.send("get", f"{logs}/{kind}", name="second", served="nobody").status_code == 404
    assert checked.send("delete", one, name="second").status_code == 200
    assert checked.send("delete", one, name="second").status_code == 404


def test_examples_have_the_schema_of_their_body() -> None:
    """Every example of a body is valid by the body's schema, and every example of an error by the error's."""
    components = {"schemas": described()["components"]["schemas"]}
    count = 0
    for path, operations in described()["paths"].items():
        for method, operation in operations.items():
            contents = [operation["requestBody"]["content"]] if "requestBody" in operation else []
            contents += [one["content"] for one in operation["responses"].values()]
            for shown in (entry for content in contents for entry in content.values()):
                check = jsonschema_rs.Draft202012Validator({**shown["schema"], "components": components})
                given = [one["value"] for one in shown.get("examples", {}).values()]
                for value in [*given, *([shown["example"]] if "example" in shown else [])]:
                    errors = [error.message for error in check.iter_errors(value)]
                    assert not errors, (method, path, value, errors[:2])
                    count += 1
    assert count > 500


def test_each_body_has_an_example() -> None:
    """Every route with a JSON body shows one that runs; no JSON reply is an object of unknown fields."""
    free = ("/openapi.json", "/api/2.0/serving-endpoints/{name}/openapi")
    for path, operations in described()["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            assert body is None or "example" in body or body.get("examples"), (method, path)
            reply = operation["responses"]["200"]["content"].get("application/json", {"schema": {}})["schema"]
            assert path in free or reply.get("type") != "object" or reply["additionalProperties"], (method, path)
