"""The backends of the engine contract, each with a model that it runs; vLLM where an interpreter is named."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle
from tokenizer_kinds import byte_level, save

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantModel, write_model
from mlflow_llm.serving.transport.process_spec import ENGINE_CORE

INSTANT_CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
VARIABLE = "MLFLOW_LLM_VLLM_PYTHON"
VLLM_PYTHON = os.environ.get(VARIABLE)
WITHOUT_VLLM = f"{VARIABLE} names no interpreter with vLLM (docs/vllm.md)"
BACKENDS = ("native", "instant", "vllm")
CONTEXT = 1024
WIDE = COMMON | {
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}  # vLLM's attention on CPUs takes heads of 32 and more


@dataclass(frozen=True)
class Backend:
    """A backend as ``connect`` takes it: the model, the settings and the name of the core."""

    name: str
    bundle: Bundle
    settings: EngineSettings
    core: str = ENGINE_CORE


@functools.cache
def wide_llama() -> Any:
    """Return a tiny Llama that vLLM runs on CPUs."""
    return make_model(tf.LlamaConfig(**WIDE))


def vllm_settings(**more: Any) -> EngineSettings:
    """Return settings of a small engine in vLLM; ``engine_args`` are added to those for a quick start."""
    args = {"enforce_eager": True} | more.pop("engine_args", {})
    values = {"engine": "vllm", "engine_python": VLLM_PYTHON, "engine_args": args, "kv_cache_memory": 1 << 26}
    return EngineSettings.read({**values, "idle_timeout": 0.3, "max_num_seqs": 8, "threads": 1, **more})


def make_backend(name: str, directory: Path) -> Backend:
    """Write a model for a backend and return both."""
    if name == "instant":
        settings = EngineSettings(idle_timeout=0.3, max_num_seqs=8)
        model = InstantModel(vocab_size=131, max_model_len=CONTEXT, step_delay=0.002)
        return Backend(name, write_model(directory, model), settings, INSTANT_CORE)
    bundle = msgspec.structs.replace(save_bundle(wide_llama(), directory), content_hash=f"wide {name}")
    if name == "vllm":
        return Backend(name, bundle, vllm_settings())
    return Backend(name, bundle, EngineSettings(idle_timeout=0.3, max_num_seqs=8, kv_cache_memory=1 << 26, threads=1))


def text_bundle(directory: Path) -> Bundle:
    """Write a tiny Llama with a tokenizer, which both our engine and vLLM run, and return its bundle."""
    tokenizer = byte_level()
    config = tf.LlamaConfig(**WIDE | {"vocab_size": tokenizer.get_vocab_size()})
    return msgspec.structs.replace(
        save_bundle(make_model(config), directory / "model", "wide texts"),
        tokenizer_dir=str(save(tokenizer, directory / "tokenizer")),
    )
