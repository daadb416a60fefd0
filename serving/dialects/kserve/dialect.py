"""KServe's inference protocol (v2) with TensorRT-LLM's tensors: JSON and binary, for token ids and for texts.

``http.kserve`` describes the server, its models and their tensors. An error is ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...interface.errors import ServingError, as_sent
from ...interface.reply import Reply
from ...interface.request import RawRequest, Task, ValidRequest
from ..base import JSON, Encoded, Exchange, Head, InferenceRoute, StreamEncoder
from ..errors import retry_headers
from .body import BINARY, HEADER_LENGTH, encoded, read_call
from .replies import OUTPUTS, tensor
from .reply_types import INFER
from .requests import PARAMETERS, Echo, echo_of, raw_request
from .tensor_fields import FIELDS
from .tensors import DATATYPES, Tensor

# Field names used below the dialects, and their names here, with those of text requests in parentheses.
_NAMES = (
    (r"max_tokens", "request_output_len (max_tokens)"),
    (r"min_tokens", "min_length (min_tokens)"),
    (r"prompt(?=$|\W)", "input_ids (text_input)"),
    (r"(top_)?logprobs", "return_log_probs"),
    (r"(?=(context|generation)_logits)", "return_"),
    (r"stop_sequences", "stop_words_list"),
    (r"stop(?=$|\W)", "stop_words"),
    (r"bad_words(?=$|\W)", "bad_words_list (bad_words)"),
    (r"n$", "beam_width"),
    (r"lora_task(?!_)", "lora_task_id"),
    (r"prompt_table", "prompt_embedding_table"),
)
NAMES = tuple((re.compile(pattern), name) for pattern, name in _NAMES)
_TYPES = (JSON, BINARY, "")  # Triton's own clients send no type


def message_of(error: ServingError) -> str:
    """Return the error's message, with the name that its field has here."""
    param = error.param
    if param is None or error.is_as_sent or not error.message.startswith(param):
        return error.message
    for pattern, name in NAMES:
        if match := pattern.match(param):
            return name + error.message[match.end() :]
    return error.message


def reply_tensors(request: ValidRequest, reply: Reply, echo: Echo) -> list[tuple[Tensor, bool]]:
    """Return the requested tensors of a reply, each with whether it is to be sent as binary."""
    assert request.sampling is not None
    pad_id = echo.pad_id
    if pad_id is None:
        pad_id = next(iter(request.sampling.stop_token_ids), 0)
    wanted = echo.outputs or tuple(
        (name, echo.binary)
        for name, field in OUTPUTS.items()
        if (field.needs is None or getattr(echo, field.needs)) and field.of_text in (None, echo.is_text)
    )
    prompt = prompt_of(request) if echo.with_prompt else ()
    return [(tensor(name, reply, pad_id, prompt), binary) for name, binary in wanted]


def prompt_of(request: ValidRequest) -> tuple[int, ...]:
    """Return the tokens of the request's one prompt."""
    return request.sequences[0].prompt_token_ids


def reply_head(request: ValidRequest, echo: Echo) -> dict[str, Any]:
    """Return the fields of a response before its tensors."""
    named = {"id": echo.id} if echo.id else {}
    return {**named, "model_name": request.model, "model_version": request.model_version}


class KServeDialect:
    """A pure codec. Errors on all paths below ``/v2`` have its form."""

    name = "kserve"
    routes = (
        InferenceRoute("/v2/models/<name>/infer", "completions", "Inference on tensors", _TYPES),
        InferenceRoute(
            "/v2/models/<name>/versions/<model_version>/infer", "completions", "Inference on tensors", _TYPES
        ),
    )
    prefixes = ("/v2",)
    request_id_header: str | None = None
    error_schema: Mapping[str, Any] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    @property
    def request_schemas(self) -> Mapping[Task, Mapping[str, Any]]:
        return {"completions": SCHEMA}

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        return {"completions": INFER}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        with as_sent():
            return raw_request(read_call(body, head.headers.get(HEADER_LENGTH)))

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        echo = echo_of(echoed)
        return encoded(reply_head(request, echo), reply_tensors(request, reply, echo))

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        raise AssertionError("decode refuses what would be streamed")

    def error(self, error: ServingError) -> Encoded:
        body = json.dumps({"error": message_of(error)}).encode()
        return Encoded(status=error.status, body=body, headers=retry_headers(error))


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": list(required)} if required else {})


def _names(described: Mapping[str, str]) -> dict[str, Any]:
    return {"enum": list(described), "x-descriptions": dict(described)}


_MADE = {name: field.description for name, field in OUTPUTS.items()}
_PARAMETERS = {"type": "object", "description": "of the tensor: binary_data_size (inputs), binary_data (outputs)"}
SCHEMA: Mapping[str, Any] = _object(
    {
        "id": {"type": "string", "description": "returned in the reply"},
        "parameters": {
            "type": "object",
            "description": "each tensor of one value may stand here too, by its name",
            "properties": {name: {"description": words} for name, words in PARAMETERS.items()},
        },
        "inputs": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "name": _names({name: field.description for name, field in FIELDS.items()}),
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "datatype": {"enum": list(DATATYPES)},
                    "parameters": _PARAMETERS,
                    "data": {"type": "array", "description": "flat or nested; none where binary_data_size is given"},
                },
                "name",
                "shape",
                "datatype",
            ),
        },
        "outputs": {
            "type": "array",
            "items": _object({"name": _names(_MADE), "parameters": _PARAMETERS}, "name"),
        },
    },
    "inputs",
)
