"""Triton's own ``generate`` extension, as in its models of TensorRT-LLM and vLLM.

Keys of a body that are inputs of the model become tensors, all others become parameters. Source: Triton's documents of
the extension; ``tensor_fields`` for the names. It shares its paths with MindIE's form (``generate``); a body with a key
that only this form has is read in this form (``is_meant``). An error is ``{"error": "..."}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ...interface.errors import InvalidField, RequestError, ServingError, as_sent
from ...interface.readers import boolean, obj, short_text
from ...interface.reply import Delta, Done, Piece, Reply
from ...interface.request import RawRequest, Task, ValidRequest
from .. import sse
from ..base import Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import retry_headers
from ..json_body import check_objects, json_bytes, leniently, read_object
from ..kserve.body import MAX_ID, InferCall
from ..kserve.dialect import message_of, prompt_of, reply_head, reply_tensors
from ..kserve.requests import PARAMETERS as CALL_PARAMETERS
from ..kserve.requests import echo_of, raw_request
from ..kserve.tensor_fields import FIELDS
from ..kserve.tensors import BYTES, FLOATS, Tensor, from_json, to_list
from .generate import streams
from .reply_types import TRITON
from .requests import BODY, PARAMETERS

STREAM = ("stream", "streaming")
_ONCE = "false: a stream does not carry them; use …/generate"
_MADE = {"logprobs": "return_log_probs"} | {name: f"return_{name}" for name in ("context_logits", "generation_logits")}


class _Echo(Struct, frozen=True, array_like=True):
    """The parts of a request that its reply needs. If ``once``, a stream has its text in one event."""

    call: bytes
    once: bool = False


_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Echo).decode


def is_meant(body: bytes) -> bool:
    """Return whether a body has this form: a key or a parameter that this form has and MindIE's does not."""
    try:
        check_objects(body)
        found = msgspec.json.decode(body)
    except RequestError:
        return False  # either form refuses it
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = leniently(body)  # its keys decide in which form the invalid value is refused
    if not isinstance(found, dict):
        return False
    given = found.get("parameters")
    names = {name for name in found if name not in BODY.fields}
    names |= {name for name in given if name not in PARAMETERS.fields} if isinstance(given, dict) else set()
    return any(name in FIELDS or name in CALL_PARAMETERS for name in names)


def _schema() -> dict[str, Any]:
    value = {"type": ["string", "number", "boolean", "array", "null"]}
    tensors = {name: value | {"description": field.description} for name, field in FIELDS.items()}
    parameters = dict.fromkeys(CALL_PARAMETERS, value)
    named = {"id": {"type": ["string", "null"], "description": "returned in the reply"}}
    return {
        "type": "object",
        "properties": {
            **named,
            **tensors,
            **parameters,
            "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}], "description": "any of the others"},
        },
        "additionalProperties": False,
    }


class TritonGenerateDialect:
    """A pure codec without routes of its own; one object serves every request."""

    name = "triton-generate"
    routes = ()
    prefixes: tuple[str, ...] = ()
    request_id_header: str | None = None
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"completions": _schema()}
    error_schema: Mapping[str, Any] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"completions": TRITON}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        with as_sent():
            return read_object(body, lambda found: _read(found, streams=streams(head.route)))

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        return Encoded(body=json_bytes(_object(request, reply, echoed)))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return _Stream(request, echoed)

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps({"error": message_of(error)}).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))


def _read(body: dict[str, Any], *, streams: bool) -> RawRequest:
    given = {} if body.get("parameters") is None else obj(body["parameters"], "parameters")
    for name, value in body.items():
        if name in given and name not in ("id", "parameters"):
            raise InvalidField(name, value, f"only one of {name} and parameters.{name}")
    values = {name: value for name, value in body.items() if name not in ("id", "parameters")} | given
    values = {name: value for name, value in values.items() if value is not None}
    asked = {name: boolean(values.pop(name), name) for name in STREAM if name in values}
    if any(asked.values()) and not streams:
        name = next(name for name, value in asked.items() if value)
        raise InvalidField(name, True, "false: generate answers once; POST …/generate_stream sends tokens")
    inputs = {name: _tensor(name, values.pop(name)) for name in list(values) if name in FIELDS}
    id = "" if body.get("id") is None else short_text(MAX_ID)(body["id"], "id")
    raw = raw_request(InferCall(id=id, parameters=values, inputs=inputs))
    echo = _Echo(call=raw.echoed, once=streams and list(asked.values()) == [False])
    if streams:
        for attribute, name in _MADE.items():
            if getattr(raw.sampling, attribute):
                raise InvalidField(name, True, _ONCE)
        if raw.sampling.beams is not None:
            raise InvalidField("beam_width", raw.sampling.beams.width, "1: a beam search has its texts only at its end")
    return msgspec.structs.replace(raw, stream=streams, echoed=_pack(echo))


def _tensor(name: str, value: Any) -> Tensor:
    """Convert a JSON value, either a single value or nested lists, to a tensor."""
    datatype = FIELDS[name].datatypes[0]
    data = value if isinstance(value, list) else [value]
    shape: list[int] = []
    level: Any = data
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    if name == "input_ids" and len(shape) == 1:
        shape = [1, *shape]  # the batch dimension of 1, which may be left out
    if datatype in FLOATS:
        datatype = "FP32"
    if datatype == BYTES and not isinstance(value, str | list):
        raise InvalidField(name, value, "a text, or a list of them")
    return from_json(name, datatype, tuple(shape), data, name)


def _object(request: ValidRequest, reply: Reply, echoed: bytes) -> dict[str, Any]:
    echo = echo_of(_unpack(echoed).call)
    found = reply_head(request, echo)
    for tensor, _ in reply_tensors(request, reply, echo):
        values = to_list(tensor)
        found[tensor.name] = values[0] if len(values) == 1 else values
    return found


class _Stream:
    """The encoder of one streamed reply: an event for each text, or for tokens if the prompt was token ids; no
    ``[DONE]``."""

    content_type = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest, echoed: bytes) -> None:
        own = _unpack(echoed)
        echo = echo_of(own.call)
        self._head = reply_head(request, echo)
        self._once, self._is_text = own.once, echo.is_text
        self._prompt = prompt_of(request) if echo.with_prompt else ()
        self._held: list[Delta] = []
        self._has_said = False

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            self._held.append(piece)
            return self._said() if not self._once and (piece.text or not self._is_text) else b""
        if isinstance(piece, Done) and not self._has_said:
            return self._said()
        return b""

    def waiting(self) -> bytes:
        return sse.COMMENT if self._once else self._event([])

    def error(self, error: ServingError) -> bytes:
        return sse.event({"error": message_of(error)})

    def _said(self) -> bytes:
        held, self._held, self._has_said = self._held, [], True
        return self._event(held)

    def _event(self, held: list[Delta]) -> bytes:
        if self._is_text:
            said: dict[str, Any] = {"text_output": "".join(delta.text for delta in held)}
        else:
            said = {"output_ids": [*self._prompt, *(token for delta in held for token in delta.token_ids)]}
            self._prompt = ()
        return sse.event({**self._head, **said})
