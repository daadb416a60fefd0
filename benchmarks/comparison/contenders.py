"""The contenders and their recipes. The first is the one that the others are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environments import Environments, Models
from .protocol import Failed, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A contender. ``environment`` None is this one's. ``options`` are the adapter's, with what ``made`` adds.
    ``streams``: the times of its tokens are known."""

    adapter: str
    environment: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    made: Callable[[Environments, Models], dict[str, Any]] = lambda environments, models: {}
    variables: dict[str, str] = field(default_factory=dict)
    streams: bool = True


def stored(environments: Environments, models: Models) -> dict[str, Any]:
    return {"store": str(models.folder)}


ENCODER = "feature-extraction"
CONTENDERS = {
    "ours int8": Contender(adapter="ours", options={"quantization": "int8"}),
    "OpenVINO int8": Contender(
        adapter="openvino", environment="openvino", made=lambda e, m: {"model": m.openvino("int8")}
    ),
    "ours int8, KV float32": Contender(adapter="ours", options={"quantization": "int8", "kv_cache_dtype": "float32"}),
    "ours int8, KV bfloat16": Contender(adapter="ours", options={"quantization": "int8", "kv_cache_dtype": "bfloat16"}),
    "OpenVINO default": Contender(
        adapter="openvino", environment="openvino", made=lambda e, m: {"model": m.openvino("fp32")}
    ),
    "ours bfloat16": Contender(adapter="ours", options={"dtype": "bfloat16"}),
    "llama.cpp Q8_0": Contender(
        adapter="llama_cpp", made=lambda e, m: {"server": e.server("llama.cpp"), "model": m.gguf()}
    ),
    "ours int8, HTTP": Contender(adapter="ours_http", options={"quantization": "int8"}, made=stored),
    "llama.cpp Q8_0, wheel": Contender(
        adapter="llama_cpp_wheel", environment="llama.cpp-wheel", made=lambda e, m: {"model": m.gguf()}
    ),
    "ours float32": Contender(adapter="ours"),
    "transformers continuous batching": Contender(adapter="transformers_batching", environment="transformers"),
    "vLLM CPU, bfloat16": Contender(
        adapter="vllm_cpu",
        environment="vllm",
        options={"dtype": "bfloat16"},
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"},
    ),
    "mlflow.transformers": Contender(adapter="mlflow_transformers", environment="mlflow", made=stored, streams=False),
}
EMBEDDERS = {
    "sentence-transformers float32": Contender(
        adapter="embed_sentence_transformers", environment="sentence-transformers", options={"dtype": "float32"}
    ),
    "ours float32": Contender(adapter="embed_ours"),
    "ours bfloat16": Contender(adapter="embed_ours", options={"dtype": "bfloat16"}),
    "ours int8": Contender(adapter="embed_ours", options={"quantization": "int8"}),
    "sentence-transformers bfloat16": Contender(
        adapter="embed_sentence_transformers", environment="sentence-transformers", options={"dtype": "bfloat16"}
    ),
    "fastembed (ONNX Runtime)": Contender(
        adapter="embed_fastembed", environment="fastembed", made=lambda e, m: {"model": m.onnx()}
    ),
    "OpenVINO default": Contender(
        adapter="embed_openvino", environment="openvino", made=lambda e, m: {"model": m.openvino("fp32", ENCODER)}
    ),
    "OpenVINO int8": Contender(
        adapter="embed_openvino", environment="openvino", made=lambda e, m: {"model": m.openvino("int8", ENCODER)}
    ),
}
REFERENCE = Contender(adapter="reference")


def made(contender: Contender, environments: Environments, models: Models) -> dict[str, Any]:
    """Return the adapter's options of the models made for it. Raises ``Failed`` for any error."""
    try:
        return contender.made(environments, models)
    except Failed:
        raise
    except Exception as error:
        raise Failed(f"its model could not be made: {type(error).__name__}: {error}") from error


def start(
    name: str, contender: Contender, environments: Environments, models: Models, model: Path, limit: float
) -> tuple[Process, dict[str, Any]]:
    """Start its process with the model loaded; return it and the versions that it reports. Raises ``Failed``."""
    options = {**contender.options, **made(contender, environments, models)}
    python = environments.python(contender.environment) if contender.environment else sys.executable
    log = environments.logs / f"contender-{''.join(c if c.isalnum() else '-' for c in name)}.log"
    log.unlink(missing_ok=True)
    here = str(Path(__file__).resolve().parents[1])
    variables = {"PYTHONPATH": here, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **contender.variables}
    process = Process([python, "-m", f"comparison.adapters.{contender.adapter}"], log, variables)
    try:
        told = process.ask({"do": "load", "model": str(model), "options": options}, limit)
    except BaseException:
        process.close()
        raise
    process.servers = told["servers"]
    return process, told["versions"]
