"""The messages of inference calls: a codec like those of the dialects, for protobuf instead of HTTP bodies.

A stream's messages pass through the server's iterator of bytes, each preceded by its length (``framed``, ``frames``).
In a stream each token is a separate response, as TensorRT-LLM documents it; ``triton_final_response`` is true on the
last one. That final response is empty and only sent if the request asks for it
(``triton_enable_empty_final_response``).
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from ..dialects.base import Encoded, Head, InferenceRoute, StreamEncoder
from ..dialects.kserve.body import InferCall, RequestedOutput, by_name, check_parameters, read_id
from ..dialects.kserve.dialect import KServeDialect, message_of, reply_head, reply_tensors
from ..dialects.kserve.requests import Echo, echo_of, raw_request
from ..dialects.kserve.tensors import BYTES, Tensor, from_bytes, from_json, read_datatype, read_shape, to_bytes
from ..interface.errors import InvalidField, RequestError, ServingError, as_sent
from ..interface.reply import Choice, Delta, Done, LogitRows, Piece, Reply, Usage
from ..interface.request import RawRequest, ValidRequest
from .messages import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

PROTOBUF = "application/grpc"
INFER = InferenceRoute("/inference.GRPCInferenceService/ModelInfer", "completions", "ModelInfer", (PROTOBUF,))
STREAM = InferenceRoute(
    "/inference.GRPCInferenceService/ModelStreamInfer", "completions", "ModelStreamInfer", (PROTOBUF,)
)
FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
MAX_TENSORS = 64
# the field with typed contents for each datatype; half-precision types have none
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def parsed(data: bytes, kind: Any) -> Any:
    """Parse a message of class ``kind``. Raises ``RequestError``."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RequestError(f"the message is not a {kind.DESCRIPTOR.name}") from None


def framed(messages: Iterable[Any]) -> bytes:
    """Join messages into bytes that ``frames`` can split again: each after its length."""
    return b"".join(struct.pack("<I", len(data)) + data for data in (one.SerializeToString() for one in messages))


def frames(data: bytes) -> Iterator[bytes]:
    """Yield the serialized messages that ``framed`` has joined."""
    place = 0
    while place < len(data):
        (length,) = struct.unpack_from("<I", data, place)
        place += 4 + length
        yield data[place - length : place]


class RpcDialect(KServeDialect):
    """The KServe dialect for gRPC: calls instead of paths. The code that answers the call sets an error's status."""

    name = "kserve-grpc"
    routes = (INFER, STREAM)

    def decode(self, head: Head, body: bytes) -> RawRequest:
        with as_sent():
            return self._read(head, body)

    def _read(self, head: Head, body: bytes) -> RawRequest:
        call = read_call(parsed(body, ModelInferRequest))
        if head.route is not STREAM:
            return raw_request(call)
        parameters = dict(call.parameters)
        empty_final = parameters.pop(EMPTY_FINAL, False)
        if not isinstance(empty_final, bool):
            raise InvalidField(f"parameters.{EMPTY_FINAL}", empty_final, "true or false")
        call = InferCall(id=call.id, parameters=parameters, inputs=call.inputs, outputs=call.outputs)
        return raw_request(call, streams=True, empty_final=empty_final)

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        echo = echo_of(echoed)
        response = _response(request, reply, echo)
        if echo.streams:
            response.parameters[FINAL].bool_param = True
            response = ModelStreamInferResponse(infer_response=response)
        return Encoded(body=response.SerializeToString(), content_type=PROTOBUF)

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> StreamEncoder:
        return TokenStream(request, echo_of(echoed))


def read_call(message: Any) -> InferCall:
    """Read the call from a ``ModelInferRequest``. Raises ``InvalidField``."""
    if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidField("inputs", f"{len(message.inputs)} tensors", f"at most {MAX_TENSORS}, and as many outputs")
    raw = list(message.raw_input_contents)
    inputs = by_name(_input(one, f"inputs[{i}]", raw) for i, one in enumerate(message.inputs))
    if raw:
        raise InvalidField("raw_input_contents", f"{len(raw)} more", "one for each input without contents")
    return InferCall(
        id=read_id(message.id, "id"),
        parameters=_parameters(message.parameters),
        inputs=inputs,
        outputs=tuple(_output(one, f"outputs[{i}]") for i, one in enumerate(message.outputs)),
    )


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(value, kind)
    return found


def _input(message: Any, path: str, raw: list[bytes]) -> Tensor:
    """Read one input tensor; without typed contents it takes its bytes from the front of ``raw``."""
    datatype = read_datatype(message.datatype, f"{path}.datatype")
    shape = read_shape(list(message.shape), f"{path}.shape")
    check_parameters(_parameters(message.parameters), f"{path}.parameters")
    if not message.HasField("contents") or not message.contents.ListFields():
        if not raw and 0 not in shape:
            raise InvalidField(f"{path}.contents", None, "values, or bytes in raw_input_contents")
        return from_bytes(message.name, datatype, shape, raw.pop(0) if raw else b"", f"{path} in raw_input_contents")
    given = [field.name for field, _ in message.contents.ListFields()]
    field = CONTENTS.get(datatype)
    if field is None or given != [field]:
        allowed = f"{field}, for {datatype}" if field else f"null: {datatype} comes in raw_input_contents"
        raise InvalidField(f"{path}.contents", ", ".join(given), allowed)
    values = list(getattr(message.contents, field))
    where = f"{path}.contents.{field}"
    if datatype != BYTES:
        return from_json(message.name, datatype, shape, values, where)
    data = b"".join(struct.pack("<I", len(one)) + one for one in values)
    return from_bytes(message.name, datatype, shape, data, where)


def _output(message: Any, path: str) -> RequestedOutput:
    parameters = _parameters(message.parameters)
    parameters.pop("binary_data", None)  # only meaningful over HTTP: here all outputs are binary
    check_parameters(parameters, f"{path}.parameters", ("binary_data",))
    return RequestedOutput(name=message.name)


def _response(request: ValidRequest, reply: Reply, echo: Echo) -> Any:
    response = ModelInferResponse(**reply_head(request, echo))
    for tensor, _ in reply_tensors(request, reply, echo):
        _add(response, tensor)
    return response


def _add(response: Any, tensor: Tensor) -> None:
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.append(to_bytes(tensor))


class TokenStream:
    """The encoder of a stream with one response for each token.

    A response has the token's id, its log probability, the sum of all log probabilities so far, and its logits; the
    first response also has the prompt and its logits, each if asked for. The text of a delta is in the response of the
    delta's last token, or in a response without a token if only the held-back end of the text was left."""

    content_type = PROTOBUF
    headers: Mapping[str, str] = {}

    def __init__(self, request: ValidRequest, echo: Echo) -> None:
        self._request, self._echo = request, echo
        self._usage = Usage(prompt_tokens=request.num_prompt_tokens)
        self._context: list[bytes] = []
        self._rows: deque[bytes] = deque()  # logits of the tokens that are still to come
        self._cum_logprob = 0.0

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            return framed(self._responses(piece))
        if isinstance(piece, LogitRows):
            self._keep(piece)
        if isinstance(piece, Done) and self._echo.empty_final:
            return framed([self._response((), is_final=True)])
        return b""

    def waiting(self) -> bytes:
        return b""  # HTTP/2 has its own pings

    def error(self, error: ServingError) -> bytes:
        return framed([failure(error, self._echo.id)])

    def _keep(self, piece: LogitRows) -> None:
        if piece.of == "context":
            self._context.append(piece.data)
        elif piece.num_rows:
            width = len(piece.data) // piece.num_rows
            self._rows.extend(piece.data[i : i + width] for i in range(0, len(piece.data), width))

    def _responses(self, delta: Delta) -> Iterator[Any]:
        if not delta.token_ids and delta.text:
            yield self._said(Choice(index=0, text=delta.text, finish_reason="stop"))
        for place, token_id in enumerate(delta.token_ids):
            logprobs = delta.token_logprobs[place : place + 1]
            self._cum_logprob += sum(logprobs)
            yield self._said(
                Choice(
                    index=0,
                    text=delta.text if place == len(delta.token_ids) - 1 else "",
                    finish_reason="stop",
                    token_ids=(token_id,),
                    token_logprobs=logprobs,
                    context_logits=b"".join(self._context),
                    generation_logits=self._rows.popleft() if self._rows else b"",
                )
            )

    def _said(self, choice: Choice) -> Any:
        reply = Reply(choices=(choice,), usage=self._usage)
        tensors = [tensor for tensor, _ in reply_tensors(self._request, reply, self._echo)]
        if not self._context:  # the first response has already sent them
            tensors = [tensor for tensor in tensors if tensor.name != "context_logits"]
        self._context.clear()
        self._echo = msgspec.structs.replace(self._echo, with_prompt=False)  # the first response has the prompt
        return self._response(tensors, is_final=False)

    def _response(self, tensors: Iterable[Tensor], *, is_final: bool) -> Any:
        response = ModelInferResponse(**reply_head(self._request, self._echo))
        for tensor in tensors:
            values = np.array([self._cum_logprob], "<f4") if tensor.name == "cum_log_probs" else tensor.values
            _add(response, dataclasses.replace(tensor, values=values))
        response.parameters[FINAL].bool_param = is_final
        return ModelStreamInferResponse(infer_response=response)


def failure(error: ServingError, request_id: str) -> Any:
    """Return the stream's message for a request that has failed; other requests of the stream continue."""
    return ModelStreamInferResponse(error_message=message_of(error), infer_response=ModelInferResponse(id=request_id))
