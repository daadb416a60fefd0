"""Inference calls as protobuf's messages: tensors in bytes and in typed fields, and what is said of a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlflow_llm.serving.dialects import Head
from mlflow_llm.serving.interface.errors import InvalidField, Overloaded, RequestError
from mlflow_llm.serving.interface.reply import Delta, Done, LogitRows, Usage
from mlflow_llm.serving.interface.request import RawCompletion, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.rpc.call import Metadata, address_of
from mlflow_llm.serving.rpc.codec import INFER, STREAM, RpcDialect, frames
from mlflow_llm.serving.rpc.messages import ModelInferRequest, ModelStreamInferResponse

DIALECT = RpcDialect()
PROMPT = {"name": "input_ids", "datatype": "INT32", "shape": [1, 3], "contents": {"int_contents": [5, 6, 7]}}
LENGTH = {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "contents": {"int_contents": [4]}}


def decoded(*tensors: dict[str, Any], route: Any = INFER, **more: Any) -> RawCompletion:
    given = {entry["name"]: entry for entry in (PROMPT, LENGTH, *tensors)}
    message = ModelInferRequest(model_name="a", inputs=list(given.values()), **more)
    raw = DIALECT.decode(Head(route, {}), message.SerializeToString())
    assert isinstance(raw, RawCompletion)
    return raw


def test_typed_and_raw_contents() -> None:
    """Typed fields, raw bytes and both mixed in one request are decoded alike."""
    ids, length = np.array([5, 6, 7], "<i4").tobytes(), np.array([4], "<i4").tobytes()
    bare = [{key: entry[key] for key in ("name", "datatype", "shape")} for entry in (PROMPT, LENGTH)]
    expected = decoded()
    assert (expected.prompts, expected.sampling.max_tokens) == (((5, 6, 7),), 4)
    assert decoded(*bare, raw_input_contents=[ids, length]) == expected
    assert decoded(bare[1], raw_input_contents=[length]) == expected
    assert decoded(bare[0], raw_input_contents=[ids]) == expected


@pytest.mark.parametrize(
    ("tensor", "more", "said"),
    [
        ({"datatype": "INT32", "shape": [1]}, {}, "inputs[2].contents: None"),
        (
            {"datatype": "FP32", "shape": [1]},
            {"raw_input_contents": [b"1"]},
            "inputs[2] in raw_input_contents: '1 bytes",
        ),
        ({"datatype": "FP32", "shape": [1]}, {"raw_input_contents": [b"1234"] * 2}, "raw_input_contents: '1 more'"),
        (
            {"datatype": "FP16", "shape": [1], "contents": {"fp32_contents": [1]}},
            {},
            "FP16 comes in raw_input_contents",
        ),
        ({"datatype": "FP32", "shape": [1], "contents": {"int_contents": [1]}}, {}, "expected fp32_contents"),
        (
            {"datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1]}},
            {},
            "inputs[2].contents.fp32_contents",
        ),
        ({"datatype": "FP32", "shape": [-1], "contents": {"fp32_contents": [1]}}, {}, "inputs[2].shape: [-1]"),
        ({"datatype": "none", "shape": [1]}, {}, "inputs[2].datatype: 'none'"),
        (
            {"datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": {"string_param": "a"}}},
            {},
            "shared",
        ),
    ],
)
def test_inconsistent_tensors_are_refused(tensor: dict[str, Any], more: dict[str, Any], said: str) -> None:
    """A tensor is refused if values are missing, too many, or of another type or size than declared."""
    with pytest.raises(InvalidField) as refused:
        decoded({"name": "temperature"} | tensor, **more)
    assert said in refused.value.message


def test_bytes_that_are_not_protobuf_are_refused() -> None:
    """Bytes that protobuf cannot parse are refused as such."""
    with pytest.raises(RequestError, match="not a ModelInferRequest"):
        DIALECT.decode(Head(INFER, {}), b"\xff\xff\xff")


STREAMING = {"name": "streaming", "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}}


def test_only_streams_are_streamed() -> None:
    """Only streaming calls are streamed, and no beam search, whose best texts are known at the end."""
    assert decoded(STREAMING, route=STREAM).stream
    with pytest.raises(InvalidField, match="ModelStreamInfer"):
        decoded(STREAMING)
    width = {"name": "beam_width", "datatype": "INT32", "shape": [1], "contents": {"int_contents": [2]}}
    with pytest.raises(InvalidField, match="false with a beam_width above 1"):
        decoded(STREAMING, width, route=STREAM)
    with pytest.raises(InvalidField, match="triton_enable_empty_final_response: 1"):
        decoded(route=STREAM, parameters={"triton_enable_empty_final_response": {"int64_param": 1}})


def test_a_token_s_response_has_all_that_was_asked_for() -> None:
    """A token's response has its text, log probabilities and logits, the first one those of the prompt too; the last is
    empty and marked final.
    """
    asked = [
        {"name": name, "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}}
        for name in ("streaming", "return_log_probs", "return_context_logits", "return_generation_logits")
    ]
    raw = decoded(*asked, route=STREAM, id="a", parameters={"triton_enable_empty_final_response": {"bool_param": True}})
    request = ValidRequest(
        request_id="r",
        task="completions",
        model="m",
        model_version="3",
        sequences=(Sequence(prompt_token_ids=(5, 6, 7)),),
        sampling=Sampling(max_tokens=4),
    )
    stream = DIALECT.stream(request, raw.echoed)
    rows = np.arange(8, dtype="<f4")
    said = b"".join(
        stream.encode(piece)
        for piece in (
            LogitRows(index=0, of="context", num_rows=3, data=np.zeros(12, "<f4").tobytes()),
            LogitRows(index=0, of="generation", num_rows=2, data=rows.tobytes()),
            Delta(index=0, text="xy", num_tokens=2, token_ids=(1, 2), token_logprobs=(-0.5, -0.25)),
            Done(usage=Usage(prompt_tokens=3)),
        )
    )
    responses = [ModelStreamInferResponse.FromString(one).infer_response for one in frames(said)]
    found = [
        {o.name: (list(o.shape), data) for o, data in zip(one.outputs, one.raw_output_contents, strict=True)}
        for one in responses
    ]
    assert [one.parameters["triton_final_response"].bool_param for one in responses] == [False, False, True]
    assert {(one.id, one.model_name, one.model_version) for one in responses} == {("a", "m", "3")}
    assert [np.frombuffer(one["output_ids"][1], "<i4").tolist() for one in found[:2]] == [[1], [2]]
    assert [np.frombuffer(one["cum_log_probs"][1], "<f4").tolist() for one in found[:2]] == [[-0.5], [-0.75]]
    assert [np.frombuffer(one["output_log_probs"][1], "<f4").tolist() for one in found[:2]] == [[-0.5], [-0.25]]
    assert [one["generation_logits"] for one in found[:2]] == [
        ([1, 1, 1, 4], rows[:4].tobytes()),
        ([1, 1, 1, 4], rows[4:].tobytes()),
    ]
    assert found[0]["context_logits"][0] == [1, 3, 4]
    assert "context_logits" not in found[1]
    assert found[2] == {}
    (failed,) = frames(stream.error(Overloaded("full")))
    message = ModelStreamInferResponse.FromString(failed)
    assert (message.error_message, message.infer_response.id) == ("full", "a")


def test_a_stream_that_begins_with_the_prompt() -> None:
    """With exclude_input_in_output false, the first response has the prompt, and only that one."""
    switches = [
        {"name": name, "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [value]}}
        for name, value in (("streaming", True), ("exclude_input_in_output", False))
    ]
    raw = decoded(*switches, route=STREAM)
    assert raw.echo
    request = ValidRequest(
        request_id="r",
        task="completions",
        model="m",
        sequences=(Sequence(prompt_token_ids=(5, 6, 7)),),
        sampling=Sampling(max_tokens=4),
        echo=("abc",),
    )
    pieces = [Delta(index=0, text="abc")]
    pieces += [Delta(index=0, text=text, num_tokens=1, token_ids=(token,)) for token, text in ((1, "x"), (2, "y"))]
    for begun in (pieces, pieces[1:]):  # a prompt whose text is empty has no piece of its own
        stream = DIALECT.stream(request, raw.echoed)
        said = b"".join(map(stream.encode, begun))
        found: list[int] = []
        for one in frames(said):
            response = ModelStreamInferResponse.FromString(one).infer_response
            outputs = dict(zip([o.name for o in response.outputs], response.raw_output_contents, strict=True))
            found += np.frombuffer(outputs["output_ids"], "<i4").tolist()
        assert found == [5, 6, 7, 1, 2]


def test_metadata_and_deadlines() -> None:
    """Metadata names are case-insensitive, the shorter of deadline and time limit applies, and addresses lose their
    port.
    """
    assert Metadata({"authorization": "x"}, None).get("Authorization") == "x"
    limits = [
        ({}, 2.5, "2.500000"),
        ({"x-request-timeout": "1"}, 2.5, "1"),
        ({"x-request-timeout": "9"}, 2.5, "2.500000"),
    ]
    for given, left, expected in limits:
        assert Metadata(given, left).get("X-Request-Timeout") == expected
    assert Metadata({}, 1e12).get("X-Request-Timeout") is None
    peers = {"ipv4:10.0.0.7:51": "10.0.0.7", "ipv6:[::1]:51": "::1", "ipv6:%5B::1%5D:51": "::1", "unix:": ""}
    assert {peer: address_of(peer) for peer in peers} == peers
