"""TensorRT-LLM's tensors as a raw request: values, datatypes, defaults, and tensors that depend on each other."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.dialects.kserve.requests import echo_of
from mlflow_llm.serving.dialects.kserve.tensor_fields import FIELDS
from mlflow_llm.serving.dialects.kserve.tensors import BF16, BYTES, DTYPES
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.request import Draft, LoraTask, PromptTable, RawBeams, RawCompletion, RawSampling

KSERVE = DIALECTS["kserve"]
GREEDY = RawSampling(
    max_tokens=4,
    min_tokens=0,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    typical_p=1.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
)


TEXT, MAX_TOKENS = ("text_input", BYTES, [1, 1], [b"hi"]), ("max_tokens", "INT32", [1, 1], [4])


def raw_of(values: Any, datatype: str) -> bytes:
    """Encode the values of a tensor as the protocol's bytes."""
    if datatype == BYTES:
        return b"".join(struct.pack("<I", len(one)) + one for one in values)
    if datatype == BF16:
        return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.asarray(values, DTYPES[datatype]).tobytes()


def decoded(*tensors: tuple[str, str, list[int], Any], binary: bool = True, **more: Any) -> RawCompletion:
    """Decode the tensors ``(name, datatype, shape, values)``, preceded by the mandatory two."""
    given = {name: (datatype, shape, values) for name, datatype, shape, values in tensors}
    if "text_input" not in given:
        given = {"input_ids": ("INT32", [1, 3], [5, 6, 7]), "request_output_len": ("INT32", [1, 1], [4])} | given
    inputs, data = [], []
    for name, (datatype, shape, values) in given.items():
        entry = {"name": name, "datatype": datatype, "shape": shape}
        if binary:
            data.append(raw_of(values, datatype))
            entry["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            entry["data"] = (
                [one.decode() for one in values] if datatype == BYTES else np.asarray(values).ravel().tolist()
            )
        inputs.append(entry)
    head = json.dumps({"inputs": inputs, **more}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
    raw = KSERVE.decode(Head(KSERVE.routes[0], headers), head + b"".join(data))
    assert isinstance(raw, RawCompletion)
    return raw


def test_a_user_has_256_characters_at_most() -> None:
    """It is a parameter of the call; more are refused by its name."""
    assert decoded(parameters={"user": "u" * 256}).labels == Labels(user="u" * 256)
    with pytest.raises(InvalidField, match="user"):
        decoded(parameters={"user": "u" * 257})


def test_tensorrt_llm_s_defaults() -> None:
    """The defaults are greedy sampling with seed 0 and no penalties, whatever the model's own; prompts are raw."""
    raw = decoded()
    assert (raw.prompts, raw.use_raw_prompt, raw.stream) == (((5, 6, 7),), True, False)
    assert raw.sampling == GREEDY


BIAS = np.array([0.5, -1, 0, 3], "<f4")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (("temperature", "FP32", [1], [0.5]), {}),
        (("runtime_top_k", "INT32", [1, 1], [7]), {"top_k": 7, "temperature": 1.0}),
        (("top_k", "INT32", [1], [1]), {"top_k": 1, "temperature": 1.0}),
        (("runtime_top_p", "FP16", [1], [0.5]), {"top_p": 0.5, "temperature": 1.0}),
        (("top_p", BF16, [1], [0.5]), {"top_p": 0.5, "temperature": 1.0}),
        (("random_seed", "UINT64", [1], [2**64 - 1]), {"seed": 2**64 - 1}),
        (("seed", "UINT64", [1], [3]), {"seed": 3}),
        (("min_length", "INT32", [1], [2]), {"min_tokens": 2}),
        (("min_tokens", "INT32", [1], [2]), {"min_tokens": 2}),
        (("repetition_penalty", "FP32", [1], [1.5]), {"repetition_penalty": 1.5}),
        (("presence_penalty", "FP32", [1], [0.5]), {"presence_penalty": 0.5, "penalize_prompt": True}),
        (("frequency_penalty", "FP32", [1], [-0.5]), {"frequency_penalty": -0.5, "penalize_prompt": True}),
        (("no_repeat_ngram_size", "INT32", [1], [3]), {"no_repeat_ngram_size": 3}),
        (("no_repeat_ngram_size", "INT32", [1], [0]), {}),
        (("end_id", "INT32", [1], [9]), {"end_id": 9}),
        (("end_id", "INT32", [1], [-1]), {}),
        (("pad_id", "INT32", [1], [9]), {}),
        (("beam_width", "INT32", [1], [1]), {}),
        (("len_penalty", "FP32", [1], [1]), {}),
        (("early_stopping", "INT32", [1], [1]), {}),
        (("streaming", "BOOL", [1], [False]), {}),
        (("embedding_bias", "FP32", [1, 4], BIAS), {"embedding_bias": BIAS.tobytes()}),
        (("embedding_bias", BF16, [1, 4], BIAS), {"embedding_bias": BIAS.tobytes()}),
        (("embedding_bias", "FP16", [4], BIAS), {"embedding_bias": BIAS.tobytes()}),
        (
            ("bad_words_list", "INT32", [1, 2, 5], [[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]),
            {"bad_words": ((5, 7, 3), (9, 2))},
        ),
        (("stop_words_list", "INT32", [1, 2, 2], [[8, 0], [1, -1]]), {"stop_sequences": ((8,),)}),
        (("stop_words_list", "INT32", [1, 2, 0], []), {}),
        (("bad_words", BYTES, [2], [b"a", b"b c"]), {"bad_words": ("a", "b c")}),
        (("stop_words", BYTES, [1, 1], ["é".encode()]), {"stop": ("é",)}),
        (("bad_words", BYTES, [1], [b""]), {}),
        (("stop_words", BYTES, [2], [b"", b"a"]), {"stop": ("a",)}),
        (("return_log_probs", "BOOL", [1], [True]), {"logprobs": True}),
        (("return_context_logits", "BOOL", [1], [True]), {"context_logits": True}),
        (("return_generation_logits", "BOOL", [1], [True]), {"generation_logits": True}),
        (("draft_input_ids", "INT32", [2], [3, 4]), {"draft": Draft(token_ids=(3, 4))}),
        (("draft_input_ids", "INT32", [0], []), {}),
        (("input_lengths", "INT32", [1, 1], [3]), {}),
        (("request_output_len", "UINT32", [1, 1], [4]), {}),
        (("beam_width", "UINT32", [1, 1], [1]), {}),
        (("runtime_top_k", "UINT32", [1, 1], [7]), {"top_k": 7, "temperature": 1.0}),
        (("num_return_sequences", "INT32", [1, 1], [1]), {}),
        (("return_perf_metrics", "BOOL", [1, 1], [False]), {}),
    ],
)
@pytest.mark.parametrize("binary", [True, False])
def test_each_tensor(tensor: tuple[str, str, list[int], Any], expected: dict[str, Any], binary: bool) -> None:
    """Each tensor sets its field, from bytes as from JSON; false switches and empty lists ask for nothing."""
    found = decoded(tensor, binary=binary).sampling
    assert {name: getattr(found, name) for name in expected} == expected
    assert all(
        getattr(found, name) == getattr(GREEDY, name) for name in found.__struct_fields__ if name not in expected
    )


def test_the_prompt_in_the_output() -> None:
    """exclude_input_in_output asks for the prompt if it is false; without it the output has none."""
    asked = {value: decoded(("exclude_input_in_output", "BOOL", [1, 1], [value])) for value in (False, True)}
    assert (asked[False].echo, asked[True].echo, decoded().echo) == (True, None, None)
    assert (echo_of(asked[False].echoed).with_prompt, echo_of(asked[True].echoed).with_prompt) == (True, False)


@pytest.mark.parametrize(
    ("tensors", "more", "named"),
    [
        ([("input_lengths", "INT32", [1, 1], [4])], {}, "input_lengths"),
        ([TEXT, MAX_TOKENS, ("input_lengths", "INT32", [1, 1], [1])], {}, "input_lengths"),
        ([("num_return_sequences", "INT32", [1, 1], [2])], {}, "num_return_sequences"),
        ([("return_perf_metrics", "BOOL", [1, 1], [True])], {}, "return_perf_metrics"),
        ([("stream", "BOOL", [1, 1], [True])], {}, "stream"),
        ([("streaming", "BOOL", [1, 1], [True])], {}, "streaming"),
        ([], {"parameters": {"Streaming": True}}, "parameters.Streaming"),
        ([], {"parameters": {"Streaming": "no"}}, "parameters.Streaming"),
    ],
)
def test_what_clients_of_the_backend_may_not_send(tensors: list[Any], more: dict[str, Any], named: str) -> None:
    """A length that is not the prompt's, several texts, metrics, a stream and a flag that contradicts its tensor are
    refused by the name that was sent."""
    with pytest.raises(InvalidField) as found:
        decoded(*tensors, **more)
    assert found.value.param == named


def test_a_search() -> None:
    """A beam search returns all beams without a length penalty by default; sampling fields are refused by name."""
    width = ("beam_width", "INT32", [1], [3])
    found = decoded(width, ("runtime_top_k", "INT32", [1], [1]), ("temperature", "FP32", [1], [1]))
    assert found.sampling.beams == RawBeams(width=3, length_penalty=0.0, early_stopping="heuristic")
    assert (found.sampling.n, found.sampling.temperature) == (3, 0.0)
    early = {0: "heuristic", 1: "first", 2: "never", -1: "never"}
    for value, meant in early.items():
        raw = decoded(width, ("early_stopping", "INT32", [1], [value]), ("length_penalty", "FP32", [1], [2]))
        assert raw.sampling.beams == RawBeams(width=3, length_penalty=2.0, early_stopping=meant)
    for name, datatype, value in (("temperature", "FP32", 0.5), ("runtime_top_k", "INT32", 5), ("top_k", "INT32", 5)):
        with pytest.raises(InvalidField, match=f"^{name}: {value} .* nothing is sampled"):
            decoded(width, (name, datatype, [1], [value]))


def test_an_adapter_with_the_request() -> None:
    """Adapter weights and config come together and must match; later the id alone selects them; half precision is
    exact.
    """
    task = ("lora_task_id", "UINT64", [1, 1], [7])
    config = ("lora_config", "INT32", [1, 2, 3], [[1, 0, 8], [2, 0, 8]])
    weights = np.arange(6, dtype="<f4")
    assert decoded(task).lora_task == LoraTask(task_id=7)
    for datatype in ("FP32", "FP16", BF16):
        found = decoded(task, config, ("lora_weights", datatype, [2, 3], weights)).lora_task
        assert found == LoraTask(task_id=7, weights=weights.tobytes(), config=((1, 0, 8), (2, 0, 8)))
    with pytest.raises(InvalidField, match=r"lora_config: None .* together"):
        decoded(task, ("lora_weights", "FP32", [2, 3], weights))
    with pytest.raises(InvalidField, match="lora_config: '2 rows' is not allowed; expected 3"):
        decoded(task, config, ("lora_weights", "FP32", [3, 2], weights))
    with pytest.raises(InvalidField, match=r"lora_config: .* is_dora"):
        decoded(task, ("lora_config", "INT32", [1, 2], [1, 2]), ("lora_weights", "FP32", [1, 6], weights))


def test_a_prompt_table() -> None:
    """A prompt table is [rows, hidden size], with or without a batch dimension, or flat as documented, in float16."""
    table = np.arange(6, dtype="<f4")
    size = ("prompt_vocab_size", "INT32", [1], [2])
    for shape in ([2, 3], [1, 2, 3], [6]):
        found = decoded(("prompt_embedding_table", "FP16", shape, table), size).prompt_table
        assert found == PromptTable(data=table.tobytes(), num_tokens=2)
    with pytest.raises(InvalidField, match="prompt_vocab_size: 2 is not allowed; expected 3"):
        decoded(("prompt_embedding_table", "FP16", [3, 2], table), size)


def test_drafts_and_what_they_were_drawn_from() -> None:
    """Draft logits have one row for each draft token; -inf is allowed and NaN is refused."""
    ids = ("draft_input_ids", "INT32", [2], [3, 4])
    logits = np.array([[1, -np.inf, 2], [0, 0, 0]], "<f4")
    found = decoded(ids, ("draft_logits", "FP32", [2, 3], logits)).sampling.draft
    assert found == Draft(token_ids=(3, 4), logits=logits.tobytes())
    with pytest.raises(InvalidField, match="draft_logits: '1 rows' is not allowed; expected 2"):
        decoded(ids, ("draft_logits", "FP32", [1, 3], logits[0]))
    with pytest.raises(InvalidField, match="draft_logits: 'NaN"):
        decoded(ids, ("draft_logits", "FP32", [2, 3], logits * np.nan))
    with pytest.raises(InvalidField, match="embedding_bias: 'NaN"):
        decoded(("embedding_bias", "FP32", [1, 3], -logits[0]))


def test_texts_and_parameters() -> None:
    """A text may replace the ids, and a parameter a tensor of one value; a timeout is in microseconds."""
    text = (("text_input", BYTES, [1, 1], ["ü".encode()]), ("max_tokens", "INT32", [1], [4]))
    parameters = {"top_k": 5, "temperature": 0.5, "timeout": 1500, "user": "u", "cache_salt": "s", "adapter": "a"}
    raw = decoded(*text, parameters=parameters | {"sequence_id": 0, "priority": 0, "binary_data_output": True})
    assert (raw.prompts, raw.labels, raw.cache_salt, raw.adapter) == (("ü",), Labels(user="u"), "s", "a")
    assert (raw.sampling.top_k, raw.sampling.temperature, raw.sampling.timeout) == (5, 0.5, 0.0015)
    with pytest.raises(InvalidField, match="max_tokens: None"):
        decoded(text[0])
    with pytest.raises(InvalidField, match="only one of temperature"):
        decoded(("temperature", "FP32", [1], [1.0]), parameters={"temperature": 1})


def test_every_tensor_of_the_document_is_known() -> None:
    """Every tensor in TensorRT-LLM's table of request tensors is known by name."""
    document = """request_output_len input_ids streaming beam_width temperature runtime_top_k runtime_top_p len_penalty
    early_stopping repetition_penalty min_length presence_penalty frequency_penalty no_repeat_ngram_size random_seed
    end_id pad_id embedding_bias bad_words_list stop_words_list prompt_embedding_table prompt_vocab_size lora_task_id
    lora_weights lora_config return_log_probs return_context_logits return_generation_logits draft_input_ids
    draft_logits"""
    assert set(document.split()) <= set(FIELDS)
