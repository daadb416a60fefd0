"""KServe's protocol through the whole application, without a socket: bodies and answers as Triton's own client writes
and reads them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    triton = pytest.importorskip("tritonclient.http")
    from tritonclient.utils import np_to_triton_dtype

INFER = "/v2/models/assistant/infer"
HEADER = "Inference-Header-Content-Length"


def tensor(name: str, values: Any, *, binary: bool = True) -> Any:
    array = np.asarray(values)
    found = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return found.set_data_from_numpy(array, binary_data=binary)


def prompt(length: int = 6, **more: Any) -> list[Any]:
    """Return the two mandatory tensors, in bytes, and others."""
    found = [
        tensor("input_ids", np.arange(10, 10 + length, dtype=np.int32)[None]),
        tensor("request_output_len", np.array([[4]], np.int32)),
    ]
    return found + [tensor(name, values) for name, values in more.items()]


def infer(client: FlaskClient, inputs: list[Any], path: str = INFER, **options: Any) -> Any:
    """Return the server's answer to what the client sends."""
    body, size = triton.InferenceServerClient.generate_request_body(inputs, **options)
    headers = {} if size is None else {HEADER: str(size)}
    return client.post(path, data=body, headers=headers, content_type=None)


def result(answer: Any) -> Any:
    """Parse an answer as the Triton client does."""
    assert answer.status_code == 200, answer.data
    size = answer.headers.get(HEADER)
    return triton.InferenceServerClient.parse_response_body(answer.data, header_length=size and int(size))


def refused(answer: Any, status: int = 400) -> str:
    """Return the message of an error in the protocol's form."""
    assert (answer.status_code, list(answer.json)) == (status, ["error"]), answer.data
    return str(answer.json["error"])


def test_what_clients_of_tensorrt_llm_s_backend_send(client: FlaskClient) -> None:
    """Lengths of the prompt, unsigned counts, and the prompt before the tokens, if that is asked for."""
    plain = result(infer(client, prompt()))
    sent = prompt(
        input_lengths=np.array([[6]], np.int32),
        beam_width=np.array([[1]], np.uint32),
        temperature=np.array([[1.0]], np.float32),
        streaming=np.array([[False]]),
        exclude_input_in_output=np.array([[True]]),
    )
    found = result(infer(client, sent, parameters={"Streaming": False}))
    assert found.as_numpy("output_ids").tolist() == plain.as_numpy("output_ids").tolist()
    whole = result(infer(client, prompt(exclude_input_in_output=np.array([[False]]))))
    expected = [[*range(10, 16), *plain.as_numpy("output_ids")[0].tolist()]]
    assert whole.as_numpy("output_ids").tolist() == expected
    assert whole.as_numpy("sequence_length").tolist() == [len(expected[0])]


def test_the_prompt_before_a_text(client: FlaskClient) -> None:
    """NVIDIA's end-to-end client asks for the prompt's text too unless it is told otherwise."""
    texts = []
    for exclude in (True, False):
        inputs = [
            tensor("text_input", np.array([["Hello"]], object)),
            tensor("max_tokens", np.array([[4]], np.int32)),
            tensor("num_return_sequences", np.array([[1]], np.int32)),
            tensor("exclude_input_in_output", np.array([[exclude]])),
        ]
        texts.append(result(infer(client, inputs)).as_numpy("text_output")[0].decode())
    assert texts[1] == "Hello" + texts[0]


def test_binary_and_json_tensors(client: FlaskClient) -> None:
    """Tensors in bytes, in JSON and mixed in one request ask for the same; outputs come as each is asked for."""
    ids = np.arange(10, 16, dtype=np.int32)[None]
    length = np.array([[4]], np.int32)
    answers = []
    for kinds in ((True, True), (False, False), (True, False), (False, True)):
        inputs = [tensor("input_ids", ids, binary=kinds[0]), tensor("request_output_len", length, binary=kinds[1])]
        outputs = [triton.InferRequestedOutput("output_ids", binary_data=kinds[1])]
        outputs.append(triton.InferRequestedOutput("sequence_length", binary_data=kinds[0]))
        answer = infer(client, inputs, outputs=outputs, request_id="a request")
        found = result(answer)
        assert found.get_response()["id"] == "a request"
        assert (found.get_output("output_ids").get("data") is None) == kinds[1]
        assert (answer.content_type == "application/json") == (not any(kinds))
        answers.append((found.as_numpy("output_ids").tolist(), found.as_numpy("sequence_length").tolist()))
    assert len({json.dumps(one) for one in answers}) == 1
    (ids_out, lengths) = answers[0]
    assert (np.shape(ids_out), lengths) == ((1, 4), [4])


def test_all_outputs_come_unless_some_are_asked_for(client: FlaskClient) -> None:
    """A prompt of token ids gets tensors of ids and one of text gets text, unless the request names its outputs and
    their encoding.
    """
    found = result(infer(client, prompt())).get_response()
    assert list(found) == ["model_name", "model_version", "outputs"]
    assert (found["model_name"], found["model_version"]) == ("assistant", "1")
    assert [one["name"] for one in found["outputs"]] == ["output_ids", "sequence_length"]
    assert all("binary_data_size" in one["parameters"] for one in found["outputs"])
    text = [tensor("text_input", np.array([b"hello"], object)), tensor("max_tokens", np.array([4], np.int32))]
    said = result(infer(client, text))
    assert [one["name"] for one in said.get_response()["outputs"]] == ["text_output"]
    outputs = [triton.InferRequestedOutput(name, binary_data=False) for name in ("text_output", "output_ids")]
    both = result(infer(client, text, outputs=outputs))
    assert both.as_numpy("text_output").tolist() == [entry.decode() for entry in said.as_numpy("text_output")]
    assert both.as_numpy("output_ids").shape == (1, 4)


def test_a_version_and_an_adapter_in_the_path(client: FlaskClient) -> None:
    """An existing version answers as the model, an adapter after a colon as itself; unknown ones are not found."""
    base = result(infer(client, prompt())).as_numpy("output_ids").tolist()
    versioned = "/v2/models/assistant/versions/{}/infer"
    assert result(infer(client, prompt(), versioned.format("1"))).as_numpy("output_ids").tolist() == base
    assert "version '7'" in refused(infer(client, prompt(), versioned.format("7")), 404)
    adapted = result(infer(client, prompt(), "/v2/models/assistant:pirate/infer")).as_numpy("output_ids").tolist()
    assert adapted != base
    assert adapted == result(infer(client, prompt(), parameters={"adapter": "pirate"})).as_numpy("output_ids").tolist()
    assert "nobody" in refused(infer(client, prompt(), "/v2/models/nobody/infer"), 404)


def body(**changed: Any) -> dict[str, Any]:
    """Return a request in JSON alone."""
    return {
        "inputs": [
            {"name": "input_ids", "datatype": "INT32", "shape": [1, 3], "data": [1, 2, 3]},
            {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "data": [[4]]},
        ]
    } | changed


def one(name: str, datatype: str, shape: list[int], data: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data} | more


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.pop("inputs"), "inputs: "),
        (lambda b: b.update(inputs=3), "inputs: 3"),
        (lambda b: b.update(inputs=[3]), "inputs[0]: 3"),
        (lambda b: b.update(other=1), "other: 1 is not allowed: no such field"),
        (lambda b: b.update(id=3), "id: 3"),
        (lambda b: b["inputs"].append(one("input_id", "INT32", [1], [1])), "did you mean 'input_ids'"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [1], [-1])), "inputs[seed].data: -1"),
        (lambda b: b["inputs"].append(one("seed", "INT32", [1], [1])), "seed: 'INT32' is not allowed; expected the da"),
        (lambda b: b["inputs"].append(one("seed", "INT99", [1], [1])), "inputs[2].datatype: 'INT99'"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [2], [1, 2])), "seed: [2] is not allowed; expected the sh"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [1], [1, 2])), "inputs[seed].data: '2 elements'"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [1], [1.5])), "inputs[seed].data[0]: 1.5"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [1], [True])), "inputs[seed].data[0]: True"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [1], None)), "inputs[seed].data: None"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [-1], [1])), "inputs[2].shape: [-1]"),
        (lambda b: b["inputs"].append(one("seed", "UINT64", [2**40, 2**40], [1])), "inputs[2].shape"),
        (lambda b: b["inputs"].append(b["inputs"][0]), "input_ids: 'two tensors'"),
        (lambda b: b["inputs"].append(one("max_tokens", "INT32", [1], [3])), "only one of request_output_len and max"),
        (lambda b: b["inputs"].append(one("text_input", "BYTES", [1], ["a"])), "input_ids: 'both'"),
        (lambda b: b["inputs"].append(one("temperature", "FP32", [1], [-1])), "temperature: -1.0"),
        (lambda b: b["inputs"].append(one("temperature", "FP32", [1], [1e300])), "inputs[temperature].data[0]: 1e+300"),
        (lambda b: b["inputs"].append(one("runtime_top_p", "FP32", [1], [1.5])), "runtime_top_p: 1.5"),
        (lambda b: b["inputs"].append(one("streaming", "BOOL", [1], [True])), "generate_stream"),
        (lambda b: b["inputs"].append(one("lora_weights", "FP32", [1, 1], [1])), "null without lora_task_id"),
        (lambda b: b["inputs"].append(one("prompt_vocab_size", "INT32", [1], [1])), "prompt_embedding_table: None"),
        (lambda b: b["inputs"].append(one("draft_logits", "FP32", [1, 1], [1])), "null without draft_input_ids"),
        (lambda b: b["inputs"].pop(), "request_output_len: None"),
        (lambda b: b["inputs"].pop(0), "input_ids: None"),
        (lambda b: b["inputs"][0].update(shape=[1, 0], data=[]), "input_ids: [] is not allowed; expected at least one"),
        (lambda b: b["inputs"][0].update(data=[1, -2, 3]), "input_ids: -2"),
        (lambda b: b["inputs"][0].update(data=[1, 2, 10**6]), "input_ids[2]: 1000000"),
        (lambda b: b["inputs"][0].update(data=[[1, 2], [3]]), "inputs[input_ids].data: 'nested lists'"),
        (lambda b: b["inputs"][0].update(other=1), "inputs[0].other"),
        (lambda b: b["inputs"][0].update(parameters={"shared_memory_region": "a"}), "shared memory"),
        (lambda b: b["inputs"][0].update(parameters={"binary_data_size": 12}), "inputs[input_ids].data: 'values'"),
        (lambda b: b["inputs"][1].update(data=[[0]]), "request_output_len: 0"),
        (lambda b: b["inputs"][1].update(data=[[10**6]]), "request_output_len: 1000000 does not fit"),
        (lambda b: b.update(parameters={"sequence_id": 3}), "parameters.sequence_id: 3"),
        (lambda b: b.update(parameters={"colour": "red"}), "parameters.colour: 'red'"),
        (lambda b: b.update(parameters={"stop_words": ","}), "parameters.stop_words: ','"),
        (lambda b: b.update(parameters={"text_input": "x"}), "text_input is a tensor"),
        (lambda b: b.update(parameters={"bad_words_list": ""}), "parameters.bad_words_list: ''"),
        (lambda b: b["inputs"].append(one("embedding_bias", "FP32", [1, 0], [])), "the shape [1, vocab_size]"),
        (lambda b: b["inputs"].append(one("len_penalty", "FP32", [1], [10**400])), "inputs[len_penalty].data[0]: "),
        (lambda b: b.update(parameters={"temperature": -1}), "parameters.temperature: -1"),
        (lambda b: b.update(parameters={"early_stopping": "x"}), "parameters.early_stopping: 'x'"),
        (lambda b: b.update(parameters={"request_output_len": 1}), "only one of request_output_len"),
        (lambda b: b.update(parameters={"timeout": "soon"}), "parameters.timeout: 'soon'"),
        (lambda b: b.update(outputs=[{"name": "scores"}]), "outputs[0].name: 'scores'"),
        (lambda b: b.update(outputs=[{"name": "cum_log_probs"}]), "set return_log_probs to true"),
        (lambda b: b.update(outputs=[{"name": "output_ids"}] * 2), "outputs[1].name: 'output_ids'"),
        (lambda b: b.update(outputs=[{"name": "output_ids", "parameters": {"classification": 3}}]), "no classes"),
        (lambda b: b.update(outputs=[{"name": "output_ids", "parameters": {"binary_data": 1}}]), "binary_data: 1"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: FlaskClient, change: Callable[[dict], Any], said: str) -> None:
    """A wrong tensor, parameter or output is refused with its name, its value and what is allowed."""
    asked = body()
    change(asked)
    assert said in refused(client.post(INFER, json=asked)), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([[1, 2, 3], [2, 4, -1]], "[0][1][1]: 4"),
        ([[1, 2, 3], [2, 2, -1]], "[0][1][1]: 2"),
        ([[1, 2, 3], [-1, 2, -1]], "[0][1][1]: 2"),
        ([[1, 2, 3], [0, 3, -1]], "[0][1][0]: 0"),
        ([[1, -2, 3], [3, -1, -1]], "-2"),
        ([[1, 2, 3], [-1, -1, -1]], "no words are [1, 2, 0]"),
    ],
)
def test_word_lists_with_wrong_offsets(client: FlaskClient, words: Any, said: str) -> None:
    """The offsets of a word list must increase within the row and be followed by -1 alone."""
    answer = infer(client, prompt(stop_words_list=np.array([words], np.int32)))
    assert said in refused(answer)


@pytest.mark.parametrize(
    ("header", "cut", "said"),
    [
        ("abc", 0, "Inference-Header-Content-Length: 'abc'"),
        ("-1", 0, "Inference-Header-Content-Length"),
        ("99999", 0, "Inference-Header-Content-Length: '99999'"),
        ("9" * 40, 0, "Inference-Header-Content-Length"),
        ("7", 0, "body: expected a JSON object"),
        (None, 0, "body: expected a JSON object"),
        ("", 0, "Inference-Header-Content-Length"),
        ("right", 3, "binary_data_size: 4 is not allowed; expected bytes after the JSON, of which 1 are left"),
        ("right", -3, "'3 bytes after the tensors'"),
    ],
)
def test_wrong_lengths_are_refused(client: FlaskClient, header: str | None, cut: int, said: str) -> None:
    """Wrong lengths of the JSON or of a tensor are refused, as are bytes behind the last tensor."""
    data, size = triton.InferenceServerClient.generate_request_body(prompt())
    data = data[: len(data) - cut] if cut >= 0 else data + b"\0" * -cut
    headers = {} if header is None else {HEADER: str(size) if header == "right" else header}
    answer = client.post(INFER, data=data, headers=headers, content_type="application/octet-stream")
    assert said in refused(answer)


@pytest.mark.parametrize(
    ("tensor_bytes", "said"),
    [
        (b"", "1 elements of BYTES"),
        (b"\5\0\0\0hell", "a length of 5 for element 0"),
        (b"\4\0\0\0hello", "9 bytes"),
        (b"\xff\xff\xff\xffhello", "4294967295"),
        (b"\1\0\0\0\xff", "expected UTF-8"),
    ],
)
def test_texts_with_wrong_lengths(client: FlaskClient, tensor_bytes: bytes, said: str) -> None:
    """Each element of a BYTES tensor must end within it, the last one at its end, and a prompt must be UTF-8."""
    asked = body(inputs=[one("text_input", "BYTES", [1], None), one("max_tokens", "INT32", [1], [4])])
    asked["inputs"][0] |= {"parameters": {"binary_data_size": len(tensor_bytes)}}
    head = json.dumps(asked).encode()
    answer = client.post(
        INFER, data=head + tensor_bytes, headers={HEADER: str(len(head))}, content_type="application/octet-stream"
    )
    assert said in refused(answer)


def test_the_server_and_its_models(client: FlaskClient) -> None:
    """Metadata, configuration, readiness and index describe the server, models and versions; unknown ones are not
    found.
    """
    assert client.get("/v2/health/live").status_code == client.get("/v2/health/ready").status_code == 200
    assert client.get("/v2").json["name"] == "mlflow-llm"
    for path in ("/v2/models/assistant", "/v2/models/assistant/versions/1"):
        metadata = client.get(path).json
        assert (metadata["name"], metadata["versions"]) == ("assistant", ["1"])
        assert {"name": "input_ids", "datatype": "INT32", "shape": [1, -1]} in metadata["inputs"]
        assert {"name": "output_ids", "datatype": "INT32", "shape": [-1, -1]} in metadata["outputs"]
        assert client.get(f"{path}/ready").json == {"name": "assistant", "ready": True}
        config = client.get(f"{path}/config").json
        assert {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": True} in config["input"]
    entry = {"name": "assistant", "version": "1", "state": "READY", "reason": ""}
    for data in (b"", b"{}", b'{"ready": true}'):
        assert client.post("/v2/repository/index", data=data).json == [entry]
    assert "ready: 1" in refused(client.post("/v2/repository/index", json={"ready": 1}))
    for path in ("/v2/models/nobody", "/v2/models/assistant/versions/2/ready", "/v2/models/a/config", "/v2/other"):
        refused(client.get(path), 404)
    refused(client.get(INFER), 405)
