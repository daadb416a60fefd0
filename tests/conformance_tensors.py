"""The rows of KServe's protocol with TensorRT-LLM's tensors; tensors of thousands of values go as bytes, others as
JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from conformance import WHOLE, Mode, Part, Row, Seen

VOCAB, HIDDEN = 49152, 576  # SmolLM2's
IDS = [5345, 28, 827, 28, 1296, 28]
WITH_PROMPT = str(IDS).removesuffix("]") + ", "
COMMA = 28
LENGTH = 6
MANY = 1000  # values
TYPES = {"INT32": "<i4", "UINT64": "<u8", "FP32": "<f4"}
BYTES_OF_JSON = "Inference-Header-Content-Length"


def tensor(name: str, datatype: str, data: Any, *shape: int) -> dict[str, Any]:
    return {name: {"name": name, "datatype": datatype, "shape": list(shape), "data": data}}


def ints(name: str, *values: int) -> dict[str, Any]:
    return tensor(name, "INT32", list(values), len(values))


def real(name: str, value: float) -> dict[str, Any]:
    return tensor(name, "FP32", [value], 1)


def flag(name: str) -> dict[str, Any]:
    return tensor(name, "BOOL", [True], 1)


def seed(name: str, value: int) -> dict[str, Any]:
    return tensor(name, "UINT64", [value], 1)


def request(row: Row, mode: Mode) -> tuple[str, dict[str, str], bytes]:
    """Return a row's request: ``id``, ``parameters`` and ``outputs`` as they are, the rest tensors; None removes
    one."""
    base = {**tensor("input_ids", "INT32", IDS, 1, len(IDS)), **tensor("request_output_len", "INT32", [LENGTH], 1, 1)}
    top = {name: value for name, value in row.body.items() if name in ("id", "parameters", "outputs")}
    inputs, tail = [], b""
    for one in (base | {name: value for name, value in row.body.items() if name not in top}).values():
        if one is None:
            continue
        if np.size(one["data"]) > MANY:
            data = np.asarray(one["data"], TYPES[one["datatype"]]).tobytes()
            one = {name: value for name, value in one.items() if name != "data"}
            one["parameters"] = {"binary_data_size": len(data)}
            tail += data
        inputs.append(one)
    head = json.dumps({"inputs": inputs, **top}).encode()
    headers = {"Content-Type": "application/octet-stream", BYTES_OF_JSON: str(len(head))} if tail else {}
    return f"/v2/models/{row.endpoint}/infer", headers, head + tail


def read(status: int, headers: Mapping[str, str], data: bytes) -> Seen:
    """Read the texts from output_ids, decoded, or from text_output; a prompt that is repeated in front of the output
    is no part of the completion."""
    size = int(headers.get(BYTES_OF_JSON, len(data)))
    answer, data = json.loads(data[:size]), data[size:]
    for one in answer["outputs"]:
        if "data" not in one:
            length = one["parameters"]["binary_data_size"]
            one["data"], data = np.frombuffer(data[:length], TYPES[one["datatype"]]).tolist(), data[length:]
    found = {one["name"]: one for one in answer["outputs"]}
    said = found.get("text_output") or found.get("output_ids")
    beams = said["shape"][0] if said else 0
    texts = [str(said["data"])] * beams if said else []
    lengths = found.get("sequence_length")
    repeated = len(IDS) if texts and texts[0].startswith(WITH_PROMPT) else 0
    completion = sum(lengths["data"]) - repeated if lengths else None
    return Seen(status=status, events=[answer], texts=texts, completion=completion)


def as_plain(seen: Seen, plain: Seen) -> bool:
    return seen.texts == plain.texts


def unlike_plain(seen: Seen, plain: Seen) -> bool:
    return seen.texts != plain.texts


def has(name: str) -> Callable[[Seen, Seen], bool]:
    return lambda seen, plain: any(one["name"] == name and np.size(one["data"]) for one in seen.first["outputs"])


def without_comma(seen: Seen, plain: Seen) -> bool:
    return not any(f"{COMMA}," in text or f"{COMMA}]" in text for text in seen.texts)


def tokens(count: int) -> Callable[[Seen, Seen], bool]:
    return lambda seen, plain: seen.completion == count


def row(*tensors: Mapping[str, Any], **more: Any) -> Row:
    body: dict[str, Any] = {}
    for one in tensors:
        body |= one
    return Row(body=body, modes=WHOLE, **more)


def lora(task: int) -> dict[str, Any]:
    """Return an adapter of rank 1 for the queries of layer 0."""
    weights = tensor("lora_weights", "FP32", [[1.0] * (2 * HIDDEN)], 1, 2 * HIDDEN)
    return {**seed("lora_task_id", task), **weights, **tensor("lora_config", "INT32", [[1, 0, 1]], 1, 3)}


HEAT = real("temperature", 5.0)
DRAWN = {**HEAT, **ints("runtime_top_k", 1000)}
BEAMS: dict[str, Any] = {"endpoint": "reserved", "shows": lambda seen, plain: len(seen.texts) == 2}
WIDTH = ints("beam_width", 2)
WORDS = tensor("stop_words_list", "INT32", [[[COMMA], [1]]], 1, 2, 1)
BAD = tensor("bad_words_list", "INT32", [[[COMMA], [1]]], 1, 2, 1)
TABLE = {
    **tensor("input_ids", "INT32", [*IDS, VOCAB, VOCAB + 1], 1, len(IDS) + 2),
    **tensor("prompt_embedding_table", "FP32", [[0.1] * HIDDEN] * 2, 2, HIDDEN),
    **ints("prompt_vocab_size", 2),
}
DRAFT = tensor("draft_input_ids", "INT32", [COMMA, 5, 6], 3)
TEXT = {**tensor("text_input", "BYTES", ["One, two, three,"], 1), "input_ids": None}


def output(name: str, *flags: str) -> Row:
    body: dict[str, Any] = {"outputs": [{"name": name, "parameters": {"binary_data": True}}]}
    for one in flags:
        body |= flag(one)
    return row(body, shows=has(name))


def parameter(name: str, value: Any, **more: Any) -> Row:
    return row({"parameters": {name: value}}, **more)


BINARY = {"parameters": {"binary_data_output": True}}
ROWS: dict[str, Row] = {
    "id": row({"id": "one"}, shows=lambda seen, plain: seen.first["id"] == "one"),
    "input_ids": row(tensor("input_ids", "INT32", [5, 6, 7], 1, 3), shows=unlike_plain),
    "text_input": row(TEXT, shows=has("text_output"), note="in place of input_ids"),
    "input_lengths": row(ints("input_lengths", len(IDS)), shows=as_plain, note="the number of input_ids"),
    "request_output_len": row(tensor("request_output_len", "INT32", [[3]], 1, 1), shows=tokens(3)),
    "max_tokens": row({"request_output_len": None, **ints("max_tokens", 3)}, shows=tokens(3)),
    "streaming": row(
        flag("streaming"), refused="generate_stream", note="false is taken; over gRPC's stream it is honoured"
    ),
    "stream": row(flag("stream"), refused="generate_stream", note="false is taken; over gRPC's stream it is honoured"),
    "beam_width": row(WIDTH, **BEAMS, note="on provisioned endpoints, as every request of several texts"),
    "temperature": row(DRAWN, shows=unlike_plain),
    "runtime_top_k": row(HEAT, ints("runtime_top_k", 1), shows=as_plain),
    "top_k": row(HEAT, ints("top_k", 1), shows=as_plain),
    "runtime_top_p": row(HEAT, real("runtime_top_p", 0.0001), shows=as_plain),
    "top_p": row(HEAT, real("top_p", 0.0001), shows=as_plain),
    "len_penalty": row(WIDTH, real("len_penalty", 0.5), **BEAMS),
    "length_penalty": row(WIDTH, real("length_penalty", 0.5), **BEAMS),
    "early_stopping": row(WIDTH, ints("early_stopping", 1), **BEAMS),
    "repetition_penalty": row(real("repetition_penalty", 3.0), shows=unlike_plain),
    "min_length": row(ints("min_length", LENGTH), ints("end_id", COMMA), shows=tokens(LENGTH)),
    "min_tokens": row(ints("min_tokens", LENGTH), ints("end_id", COMMA), shows=tokens(LENGTH)),
    "presence_penalty": row(real("presence_penalty", 30.0), shows=unlike_plain),
    "frequency_penalty": row(real("frequency_penalty", 30.0), shows=unlike_plain),
    "no_repeat_ngram_size": row(ints("no_repeat_ngram_size", 1), shows=unlike_plain),
    "random_seed": row(DRAWN, seed("random_seed", 11), shows=unlike_plain),
    "seed": row(DRAWN, seed("seed", 11), shows=unlike_plain),
    "end_id": row(ints("end_id", COMMA), shows=lambda seen, plain: 0 < seen.completion < LENGTH),
    "pad_id": row(WIDTH, ints("pad_id", 3), **BEAMS),
    "embedding_bias": row(
        tensor("embedding_bias", "FP32", [[1000.0 if place == 5 else 0.0 for place in range(VOCAB)]], 1, VOCAB),
        shows=lambda seen, plain: seen.texts == [str([5] * LENGTH)],
    ),
    "bad_words_list": row(BAD, shows=without_comma),
    "stop_words_list": row(WORDS),
    "bad_words": row(tensor("bad_words", "BYTES", [","], 1), shows=without_comma),
    "stop_words": row(
        TEXT, tensor("stop_words", "BYTES", ["e"], 1), shows=lambda seen, plain: "e" not in seen.texts[0]
    ),
    "prompt_embedding_table": row(TABLE, shows=unlike_plain),
    "prompt_vocab_size": row(TABLE, shows=unlike_plain),
    "lora_task_id": row(lora(7), shows=has("output_ids"), note="alone once its adapter has come"),
    "lora_weights": row(lora(8), shows=has("output_ids")),
    "lora_config": row(lora(9), shows=has("output_ids")),
    "exclude_input_in_output": row(
        tensor("exclude_input_in_output", "BOOL", [False], 1),
        shows=lambda seen, plain: seen.texts[0] == WITH_PROMPT + plain.texts[0].removeprefix("["),
    ),
    "num_return_sequences": row(ints("num_return_sequences", 2), refused="num_return_sequences: 2", note="1 is taken"),
    "return_perf_metrics": row(
        flag("return_perf_metrics"), refused="times are in the server's metrics", note="false is taken"
    ),
    "return_log_probs": row(flag("return_log_probs"), shows=has("output_log_probs")),
    "return_context_logits": row(flag("return_context_logits"), BINARY, shows=has("context_logits")),
    "return_generation_logits": row(flag("return_generation_logits"), BINARY, shows=has("generation_logits")),
    "draft_input_ids": row(DRAFT, shows=as_plain),
    "draft_logits": row(DRAFT, tensor("draft_logits", "FP32", [[0.0] * VOCAB] * 3, 3, VOCAB), shows=has("output_ids")),
    "binary_data_output": row(BINARY, shows=as_plain),
    "timeout": parameter("timeout", 600_000_000, shows=as_plain, note="microseconds, as Triton has it"),
    "Streaming": parameter("Streaming", False, shows=as_plain, note="as the tensor streaming has it"),
    "adapter": parameter("adapter", "pirate"),
    "user": parameter("user", "u", shows=as_plain),
    "cache_salt": parameter("cache_salt", "own", shows=as_plain),
    "output_ids": output("output_ids"),
    "text_output": row(TEXT, {"outputs": [{"name": "text_output"}]}, shows=has("text_output")),
    "sequence_length": output("sequence_length"),
    "output_log_probs": output("output_log_probs", "return_log_probs"),
    "cum_log_probs": output("cum_log_probs", "return_log_probs"),
    "context_logits": output("context_logits", "return_context_logits"),
    "generation_logits": output("generation_logits", "return_generation_logits"),
}
OURS = (
    "id", "text_input", "max_tokens", "stream", "top_k", "top_p", "length_penalty", "min_tokens", "seed", "bad_words",
    "stop_words", "binary_data_output", "timeout", "adapter", "user", "cache_salt", "text_output",
    "input_lengths", "exclude_input_in_output", "num_return_sequences", "return_perf_metrics", "Streaming",
)  # fmt: skip
PART = Part(
    name="kserve",
    title="KServe's protocol with TensorRT-LLM's tensors",
    document="TensorRT-LLM's inference request",
    dialect="kserve",
    task="completions",
    of_document=tuple(name for name in ROWS if name not in OURS),
    rows=ROWS,
    request=request,
    read=read,
    modes=WHOLE,
)
