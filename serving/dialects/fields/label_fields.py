"""Readers of labels, and the request fields that are labels in OpenAI's and Databricks' tables."""

from __future__ import annotations

from typing import Any

from ...interface.errors import InvalidField
from ...interface.labels import MAX_REQUEST_ID, MAX_TAG_NAME, MAX_TAG_VALUE, MAX_TAGS, MAX_USER
from ...interface.readers import Entry, Reader, boolean, reader, record, string
from .fields import Field

USER = "an id of the end user, recorded in log, ledger and traces"
CLIENT_REQUEST_ID = "the caller's own id of the request, recorded in log, ledger and traces"
_NO_NUL = r"^[^\u0000]*$"  # no database keeps one


def label(minimum: int, maximum: int) -> Reader[str]:
    """Return a reader of a label of ``minimum`` to ``maximum`` characters."""
    lengths = {"minLength": minimum} if minimum else {}
    allowed = f"a text of {f'{minimum} to' if minimum else 'at most'} {maximum} characters, none of them NUL"

    @reader(type="string", maxLength=maximum, pattern=_NO_NUL, **lengths)
    def read(value: Any, path: str) -> str:
        text = string(value, path)
        if not minimum <= len(text) <= maximum or "\0" in text:
            raise InvalidField(path, value, allowed)
        return text

    return read


user = label(0, MAX_USER)
client_request_id = label(0, MAX_REQUEST_ID)
_NAME, _VALUE = label(1, MAX_TAG_NAME), label(0, MAX_TAG_VALUE)
TAGS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_TAGS,
    "propertyNames": {key: value for key, value in _NAME.schema.items() if key != "type"},
    "additionalProperties": dict(_VALUE.schema),
}


@reader(**TAGS_SCHEMA)
def tags(value: Any, path: str) -> dict[str, str]:
    """Read labels by name: as many, and as long, as OpenAI's API allows."""
    if not isinstance(value, dict) or len(value) > MAX_TAGS:
        raise InvalidField(path, value, f"an object of at most {MAX_TAGS} labels, each a text")
    for name in value:
        if not isinstance(name, str) or not 1 <= len(string(name, path)) <= MAX_TAG_NAME or "\0" in name:
            raise InvalidField(path, name, f"labels whose names have 1 to {MAX_TAG_NAME} characters")
    return {name: _VALUE(text, f"{path}.{name}") for name, text in value.items()}


USER_FIELD = Field(name="user", read=user, target="labels.user", description=USER)
METADATA = Field(
    name="metadata",
    read=tags,
    target="labels.tags.metadata",
    description="labels of the request, recorded in log, ledger and traces",
)
SAFETY_IDENTIFIER = Field(
    name="safety_identifier",
    read=user,
    target="labels.safety_identifier",
    description="the newer name of user",
)
RETURN_TRACE = "databricks_options.return_trace"
NO_TRACE = "false: only the replies of mlflow-llm serve have the trace; MLflow's own tracing can see this call"
_OPTIONS = record(return_trace=Entry(boolean))


@reader(**_OPTIONS.schema)
def databricks_options(value: Any, path: str) -> bool:
    """Read Databricks' options of a request: whether its reply has the trace."""
    return bool(_OPTIONS(value, path).get("return_trace"))


DATABRICKS_LABELS = (
    Field(
        name="usage_context",
        read=tags,
        target="labels.tags.usage_context",
        description="labels of the request, recorded in log, ledger and traces",
    ),
    Field(
        name="client_request_id",
        read=client_request_id,
        target="labels.client_request_id",
        description=CLIENT_REQUEST_ID,
    ),
    Field(
        name="databricks_options",
        read=databricks_options,
        target="return_trace",
        description="return_trace: true adds the trace of the request to its reply, as databricks_output.trace",
    ),
)
