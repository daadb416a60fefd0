"""Fields that label a request, in every dialect: none is dropped, and what is too large is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.request import RawRequest

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "completions": {"prompt": "x"},
    "embeddings": {"input": "x"},
    "score": {"query": "x", "documents": ["y"]},
}


def decoded(dialect: str, body: dict[str, Any], place: int = 0) -> RawRequest:
    found = DIALECTS[dialect]
    head = Head(found.routes[place], {}, {"name": "m"})
    return found.decode(head, json.dumps(body).encode())


@pytest.mark.parametrize("task", BODIES)
@pytest.mark.parametrize("dialect", ["databricks", "mlflow"])
def test_databricks_labels(dialect: str, task: str) -> None:
    """Every task takes a user, the platform's usage context and the caller's own id of the request."""
    more = {"user": "u", "usage_context": {"team": "a"}, "client_request_id": "c"}
    raw = decoded(dialect, BODIES[task] | more | {"databricks_options": {"return_trace": True}})
    assert raw.labels == Labels(user="u", client_request_id="c", tags={"team": "a"})
    assert raw.return_trace


def test_openai_labels() -> None:
    """Chats and completions have metadata and safety_identifier, every task has a user."""
    for place, task in enumerate(("chat", "completions")):
        raw = decoded("openai", BODIES[task] | {"safety_identifier": "s", "metadata": {"a": "b"}}, place)
        assert raw.labels == Labels(user="s", tags={"a": "b"})
    assert decoded("openai", BODIES["embeddings"] | {"user": "u"}, 2).labels == Labels(user="u")
    assert decoded("rerank", BODIES["score"] | {"user": "u"}).labels == Labels(user="u")


def test_a_response_has_its_labels_and_repeats_them() -> None:
    """A response repeats its labels as they were sent."""
    sent = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "u"}
    raw = decoded("responses", {"input": "hi"} | sent)
    assert raw.labels == Labels(user="u", tags={"a": "b"})
    assert sent.items() <= json.loads(raw.echoed).items()


def test_ids_and_users_of_the_other_dialects() -> None:
    """Anthropic's user, and the id that KServe's and MindIE's requests carry."""
    asked = {"model": "m", "max_tokens": 1, "messages": HI, "metadata": {"user_id": "u"}}
    assert decoded("anthropic", asked).labels == Labels(user="u")
    tensors = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [1]},
    ]
    call = {"id": "c", "inputs": tensors, "parameters": {"user": "u"}}
    assert decoded("kserve", call).labels == Labels(user="u", client_request_id="c")
    assert decoded("kserve", call | {"id": "c" * 1000}).labels == Labels(user="u")  # the reply repeats it all the same
    assert decoded("generate", {"id": "c", "text_input": "x"}).labels == Labels(client_request_id="c")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "u" * 257}, "user"),
        ({"user": "a\0b"}, "user"),
        ({"safety_identifier": "u" * 257}, "safety_identifier"),
        ({"client_request_id": "c" * 257}, "client_request_id"),
        ({"client_request_id": 5}, "client_request_id"),
        ({"metadata": ["a"]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": {"b": "c"}}}, "metadata.a"),
        ({"metadata": {"a": "v" * 513}}, "metadata.a"),
        ({"metadata": {"a": "\0"}}, "metadata.a"),
        ({"metadata": {"n" * 65: "v"}}, "metadata"),
        ({"metadata": {"": "v"}}, "metadata"),
        ({"usage_context": {str(i): "" for i in range(17)}}, "usage_context"),
        ({"metadata": {"a": "b"}, "usage_context": {"a": "c"}}, "usage_context.a"),
        ({"databricks_options": {"return_trace": "yes"}}, "databricks_options.return_trace"),
        ({"databricks_options": {"colour": "red"}}, "databricks_options.colour"),
    ],
)
def test_labels_beyond_their_bounds_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The error names the field, or the label within it."""
    with pytest.raises(InvalidField) as refused:
        decoded("databricks", BODIES["chat"] | fields)
    assert refused.value.param == param


def test_labels_of_the_largest_size_are_taken() -> None:
    """Labels are taken as many and as long as OpenAI's API allows."""
    tags = {f"{i:064}": "v" * 512 for i in range(16)}
    assert decoded("openai", BODIES["chat"] | {"metadata": tags}).labels == Labels(tags=tags)
