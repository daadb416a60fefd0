"""Fields in errors have the names that the caller sent, whichever of several names these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.cli.model_options import named_models
from mlflow_llm.serving.dialects.fields import tables
from mlflow_llm.serving.dialects.fields.fields import Table
from mlflow_llm.serving.dialects.kserve.tensor_fields import FIELDS
from mlflow_llm.serving.dialects.openvino import fields
from mlflow_llm.serving.frontend.worker_state import WorkerState, make_server
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints
from mlflow_llm.serving.testing.instant_engine import InstantEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
CHATS = [
    "/v1/chat/completions",
    "/v3/chat/completions",
    "/serving-endpoints/chat/completions",
    "/serving-endpoints/assistant/invocations",
    "/invocations",
]
BY_DIALECT = {
    "openai": tables.OPENAI,
    "databricks": tables.DATABRICKS,
    "mlflow": tables.MLFLOW,
    "openvino": fields.TABLES,
}
READ = [
    pytest.param(table, name, id=f"{dialect}-{task}-{name}")
    for dialect, of_tasks in BY_DIALECT.items()
    for task, table in of_tasks.items()
    for name in (*table.fields, *table.refused)
]
WRONG: tuple[Any, ...] = (object(), {"\0": [{}]}, [[{}]], -(10**40), "\0" * 5000)


@pytest.mark.parametrize(("table", "name"), READ)
def test_a_value_of_every_field(table: Table, name: str) -> None:
    """A value that a field does not take is refused by the field's own name, in every table."""
    read = table.fields[name].read if name in table.fields else table.refused[name]
    refused = []
    for value in WRONG:
        try:
            read(value, name)
        except InvalidField as error:
            refused.append(error)
    assert refused
    for error in refused:
        assert str(error.param).startswith(name)
        assert error.message.startswith(name)


@pytest.mark.parametrize("path", CHATS)
def test_the_newer_name_of_max_tokens(client: FlaskClient, path: str) -> None:
    """``max_completion_tokens`` is what is wrong where it was sent, also where another field is compared with it."""
    body = {"messages": MESSAGES} | ({} if "assistant" in path or path == "/invocations" else {"model": "assistant"})
    for sent in ("max_completion_tokens", "max_tokens"):
        refused = client.post(path, json=body | {sent: 10**6})
        assert (refused.status_code, f"{sent}: 1000000 does not fit" in refused.text) == (400, True), refused.text
        if "error" in refused.json and isinstance(refused.json["error"], dict):
            assert refused.json["error"]["param"] == sent
        compared = client.post(path, json=body | {sent: 3, "min_tokens": 9})
        assert f"min_tokens: 9 is not allowed; expected at most {sent}, 3" in compared.text
        assert (compared.status_code, client.post(path, json=body | {sent: 3}).status_code) == (400, 200)
    both = client.post(path, json=body | {"max_completion_tokens": 10**6, "max_tokens": 10**6})
    assert '"max_tokens: 1000000 does not fit' in both.text


def infer(*tensors: tuple[str, Any, str]) -> dict[str, Any]:
    inputs = []
    for name, value, datatype in tensors:
        values = value if isinstance(value, list) else [value]
        inputs.append({"name": name, "shape": [1, len(values)], "datatype": datatype, "data": values})
    return {"inputs": inputs}


TEXT, IDS = ("text_input", "Hi", "BYTES"), ("input_ids", [1, 2, 3], "INT32")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ((TEXT, ("max_tokens", 10**6, "INT32")), "max_tokens: 1000000 does not fit"),
        ((TEXT, ("request_output_len", 10**6, "INT32")), "request_output_len: 1000000 does not fit"),
        ((IDS, ("max_tokens", 10**6, "INT32")), "max_tokens: 1000000 does not fit"),
        ((IDS, ("request_output_len", 2, "INT32"), ("min_tokens", 9, "INT32")), "at most request_output_len, 2"),
        ((IDS, ("max_tokens", 2, "INT32"), ("min_length", 9, "INT32")), "min_length: 9 is not allowed"),
        ((("text_input", "x" * 5000, "BYTES"), ("max_tokens", 1, "INT32")), "text_input: "),
        ((("input_ids", [1] * 5000, "INT32"), ("max_tokens", 1, "INT32")), "input_ids: "),
        ((("input_ids", [1, 10**6], "INT32"), ("max_tokens", 1, "INT32")), "input_ids[1]: 1000000"),
    ],
)
def test_tensors(client: FlaskClient, tensors: tuple[tuple[str, Any, str], ...], said: str) -> None:
    """KServe's tensors have two names each; the one that was sent is in the error, and the other is not."""
    refused = client.post("/v2/models/assistant/infer", json=infer(*tensors))
    assert (refused.status_code, said in refused.json["error"]) == (400, True), refused.text
    sent = {name for name, *_ in tensors}
    for one, other in (("max_tokens", "request_output_len"), ("text_input", "input_ids"), ("min_tokens", "min_length")):
        assert not [name for name in {one, other} - sent if name in refused.json["error"]]


@pytest.mark.parametrize("name", ["stream", "streaming"])
def test_a_stream_where_one_reply_is_made(client: FlaskClient, name: str) -> None:
    """Both routes of a single reply refuse a stream by the name that was sent."""
    body = {"text_input": "Hi", "max_tokens": 2, name: True}
    for path, sent in (
        ("infer", infer(TEXT, ("max_tokens", 2, "INT32"), (name, True, "BOOL"))),
        ("generate", body),
        ("generate", {"text_input": "Hi", "max_tokens": 2, "parameters": {name: True}}),
    ):
        refused = client.post(f"/v2/models/assistant/{path}", json=sent)
        assert (refused.status_code, refused.json["error"].split(":")[0]) == (400, name)


@pytest.mark.parametrize("name", FIELDS)
def test_a_tensor_of_another_type(client: FlaskClient, name: str) -> None:
    """Each tensor is refused by its own name."""
    others = [one for one in (TEXT, ("max_tokens", 4, "INT32")) if FIELDS[one[0]].target != FIELDS[name].target]
    others = [one for one in others if (one[0], name) != ("text_input", "input_ids")]
    refused = client.post("/v2/models/assistant/infer", json=infer(*others, (name, [1.5], "FP64")))
    assert refused.status_code == 400
    assert refused.json["error"].startswith(f"{name}: 'FP64' is not allowed")


@pytest.fixture(scope="module")
def embedder(make: Callable[..., WorkerState], instant_bundle: Bundle) -> FlaskClient:
    """Return an endpoint that makes vectors only."""
    (entity,) = make().endpoints
    engine = InstantEngine(msgspec.structs.replace(instant_bundle, tasks=("embeddings",)), EngineSettings())
    view = dataclasses.replace(entity.view, info=engine.info)
    endpoints = ServedEndpoints(dataclasses.replace(entity, engine=engine, view=view))
    return create_app(make_server(endpoints)).test_client()


@pytest.mark.parametrize(("tensor", "sent"), [(TEXT, "text_input"), (IDS, "input_ids")])
def test_tensors_for_an_embedding_model(embedder: FlaskClient, tensor: tuple[str, Any, str], sent: str) -> None:
    """A model of another task names the tensor that was sent."""
    refused = embedder.post("/v2/models/assistant/infer", json=infer(tensor, ("max_tokens", 4, "INT32")))
    assert (refused.status_code, refused.json["error"]) == (
        400,
        f"{sent}: this model does embeddings, not completions",
    )


@pytest.mark.parametrize("uri", ["models:/assistant/3", "models:/assistant@champion", "Org/model", "{tmp_path}"])
def test_a_name_with_a_slash(tmp_path: Path, uri: str) -> None:
    """``-m URI=org/assistant`` is refused by that name, and not for a model that is not there."""
    given = uri.format(tmp_path=tmp_path)
    with pytest.raises(InvalidField, match="name: 'org/assistant' is not allowed"):
        named_models((f"{given}=org/assistant",), None)
    assert named_models((f"{given}=assistant",), None) == {"assistant": given}


def test_a_path_with_an_equals_sign(tmp_path: Path) -> None:
    """Is a path, where it exists or could be nothing else."""
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "c").mkdir()
    for given in (f"{tmp_path}/a=b/c", "/nowhere/a=b/c", "s3://bucket/a=b/c"):
        assert named_models((given,), None) == {"c": given}
    with pytest.raises(click.UsageError, match="the URI comes first"):
        named_models(("assistant=models:/assistant/3",), None)
