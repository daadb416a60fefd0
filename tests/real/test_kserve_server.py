"""TensorRT-LLM's tensors, by both of Triton's clients, on a server with real weights: each has its effect."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_server import WARNINGS_OF_CLIENTS, served
from safetensors.numpy import load_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    http = pytest.importorskip("tritonclient.http")
    rpc = pytest.importorskip("tritonclient.grpc")
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype

pytestmark = WARNINGS_OF_CLIENTS
LENGTH = 12
MODULES = {"q_proj": 1, "v_proj": 3, "up_proj": 7, "down_proj": 6}  # as TensorRT-LLM numbers them


class Tensors:
    """Both clients of one server: whatever is asked, over HTTP and gRPC, is answered alike."""

    def __init__(self, url: str, port: int) -> None:
        self.clients = (
            (http, http.InferenceServerClient(url.removeprefix("http://"), network_timeout=240)),
            (rpc, rpc.InferenceServerClient(f"127.0.0.1:{port}")),
        )

    def ask(self, prompt: Any, length: int = LENGTH, model: str = "assistant", **tensors: Any) -> dict[str, Any]:
        """Send a request by both clients and return the answer's tensors by name, after checking that they agree."""
        given = {"input_ids": np.array([prompt], np.int32), "request_output_len": np.array([[length]], np.int32)}
        found = []
        for module, client in self.clients:
            inputs = [of(module, name, values) for name, values in (given | tensors).items()]
            result = client.infer(model, inputs)
            said = result.get_response()
            names = [one["name"] for one in said["outputs"]] if module is http else [one.name for one in said.outputs]
            found.append({name: result.as_numpy(name) for name in names})
        assert found[0].keys() == found[1].keys()
        for name, values in found[0].items():
            np.testing.assert_array_equal(values, found[1][name])
        return found[0]

    def ids(self, prompt: Any, length: int = LENGTH, **tensors: Any) -> list[int]:
        return self.ask(prompt, length, **tensors)["output_ids"][0].tolist()


def of(module: Any, name: str, values: Any) -> Any:
    array = np.asarray(values)
    found = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def one(value: Any, dtype: Any = np.int32) -> Any:
    return np.array([value], dtype)


def words(*runs: list[int]) -> Any:
    ids = [token for run in runs for token in run]
    ends = np.cumsum([len(run) for run in runs]).tolist()
    return np.array([[ids, ends + [-1] * (len(ids) - len(ends))]], np.int32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kserve")


@pytest.fixture(scope="module")
def tensors(place: Path, assistant: Path) -> Iterator[Tensors]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with served(place, "-m", f"{assistant}=assistant", "--grpc-port", str(port)) as url:
        found = Tensors(url, port)
        yield found
        for _, client in found.clients:
            client.close()


@pytest.fixture(scope="module")
def prompt(smollm2_dir: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2_dir)("The capital of France is the city of").input_ids
    return ids


@pytest.fixture(scope="module")
def greedy(tensors: Tensors, prompt: list[int]) -> list[int]:
    return tensors.ids(prompt)


def test_words_ends_biases_and_n_grams(tensors: Tensors, prompt: list[int], greedy: list[int]) -> None:
    """Bad words do not occur, stop words and another end id end the text, and a vocabulary bias and n-gram bans
    hold."""
    banned = tensors.ids(prompt, bad_words_list=words(greedy[:1], greedy[3:5]))
    assert greedy[0] not in banned
    assert tensors.ids(prompt, stop_words_list=words([1, 2, 3], greedy[2:4])) == greedy[:4]
    assert tensors.ids(prompt, end_id=one(greedy[4])) == greedy[: greedy.index(greedy[4]) + 1]
    bias = np.zeros((1, vocabulary(tensors)), np.float32)
    bias[0, 7] = 1000
    assert tensors.ids(prompt, embedding_bias=bias) == [7] * LENGTH
    text = prompt + tensors.ids(prompt, 40, no_repeat_ngram_size=one(2))
    bigrams = list(zip(text[len(prompt) - 1 :], text[len(prompt) :], strict=False))
    assert len(set(bigrams)) == len(bigrams)
    avoided = tensors.ids(prompt, presence_penalty=one(1000, np.float32))
    assert len(set(avoided)) == LENGTH
    assert not set(avoided) & set(prompt)


def vocabulary(tensors: Tensors) -> int:
    config = tensors.clients[0][1].get_model_config("assistant")
    return int(config["parameters"]["vocab_size"]["string_value"])


def test_sampling_is_by_the_seed(tensors: Tensors, prompt: list[int], greedy: list[int]) -> None:
    """The seed is 0 unless another is sent, in either spelling, and top_k 1 is greedy."""
    free = {"runtime_top_p": one(1, np.float32), "temperature": one(1.5, np.float32)}
    drawn = [
        tensors.ids(prompt, **free, **seed)
        for seed in ({}, {"random_seed": one(0, np.uint64)}, {"seed": one(5, np.uint64)})
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert tensors.ids(prompt, runtime_top_k=one(1)) == greedy


def test_a_search_and_log_probabilities(tensors: Tensors, prompt: list[int], greedy: list[int]) -> None:
    """All beams are returned, best first without a length penalty; each sum is that of its tokens."""
    flag = {"return_log_probs": one(True, bool)}
    alone = tensors.ask(prompt, **flag)
    assert alone["output_ids"].tolist() == [greedy]
    assert alone["output_log_probs"].shape == (1, 1, len(greedy))
    np.testing.assert_allclose(alone["cum_log_probs"][0], alone["output_log_probs"].sum(-1)[0], rtol=1e-5)
    found = tensors.ask(prompt, beam_width=one(3), len_penalty=one(0, np.float32), pad_id=one(3), **flag)
    assert found["output_ids"].shape == (3, found["sequence_length"].max())
    sums = found["cum_log_probs"][0]
    assert sums.tolist() == sorted(sums.tolist(), reverse=True)
    assert sums[0] >= alone["cum_log_probs"][0, 0] - 1e-4


def test_logits(tensors: Tensors, prompt: list[int], greedy: list[int]) -> None:
    """Context and generation logits have their shapes, and their maxima are the greedy text."""
    flags = {name: one(True, bool) for name in ("return_context_logits", "return_generation_logits")}
    found = tensors.ask(prompt, **flags)
    size = vocabulary(tensors)
    assert found["context_logits"].shape == (1, len(prompt), size)
    assert found["generation_logits"].shape == (1, 1, LENGTH, size)
    assert found["context_logits"][0, -1].argmax() == greedy[0]
    assert found["generation_logits"][0, 0].argmax(-1).tolist() == greedy


def test_drafts_change_nothing(tensors: Tensors, prompt: list[int], greedy: list[int]) -> None:
    """Right and wrong drafts leave the text unchanged."""
    assert tensors.ids(prompt, draft_input_ids=np.array(greedy[:6], np.int32)) == greedy
    assert tensors.ids(prompt, draft_input_ids=np.array([*greedy[:3], 1, 2], np.int32)) == greedy


def test_a_prompt_table(tensors: Tensors, prompt: list[int], greedy: list[int], smollm2_dir: Path) -> None:
    """Table rows with the embeddings of the prompt's tokens, used by ids after the vocabulary, give the prompt's
    text."""
    rows = load_file(smollm2_dir / "model.safetensors")["model.embed_tokens.weight"][prompt].astype(np.float32)
    table = {"prompt_embedding_table": rows, "prompt_vocab_size": one(len(prompt))}
    ids = [vocabulary(tensors) + place for place in range(len(prompt))]
    assert tensors.ids(ids, **table) == greedy
    with pytest.raises(InferenceServerException):
        tensors.ids([ids[-1] + 1], **table)


def test_an_adapter_with_the_request(
    tensors: Tensors, prompt: list[int], greedy: list[int], adapters_dir: Path
) -> None:
    """An adapter sent with its first request, and later by its id alone, gives the text of the same adapter by name."""
    weights, config = trt_adapter(adapters_dir / "pirate")
    task = {"lora_task_id": one(7, np.uint64)}
    with pytest.raises(InferenceServerException, match="not found in cache"):
        tensors.ids(prompt, **task)
    adapted = tensors.ids(prompt, **task, lora_weights=weights, lora_config=config)
    assert adapted == tensors.ids(prompt, **task) == tensors.ids(prompt, model="assistant:pirate")
    assert adapted != greedy


def trt_adapter(folder: Path) -> tuple[Any, Any]:
    """Convert peft's files to TensorRT-LLM's rows: A [rank, in], then B [out, rank] with the scaling in it, padded."""
    described = json.loads((folder / "adapter_config.json").read_text())
    scaling, found = described["lora_alpha"] / described["r"], load_file(folder / "adapter_model.safetensors")
    rows, config = [], []
    for name in sorted(found):
        if not name.endswith("lora_A.weight"):
            continue
        a, b = found[name], found[name.replace("lora_A", "lora_B")] * scaling
        parts = name.split(".")
        rows.append(np.concatenate([a.reshape(-1), b.reshape(-1)]).astype(np.float32))
        config.append([MODULES[parts[-3]], int(parts[parts.index("layers") + 1]), a.shape[0]])
    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows]), np.array(config, np.int32)
