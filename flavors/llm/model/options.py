"""The keyword arguments of ``save_model``, ``log_model`` and ``load_model`` that are engine settings, with their types.

They are written out for type checkers and editors. A test keeps them equal to ``serving.settings.EngineSettings``,
which documents each setting and checks its value.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: str
    quantization: Literal["none", "int8", "int4", "fp8"]
    kernels: Literal["auto", "torch"]
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_queued_requests: int
    kv_cache_memory: int | None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"]
    kv_block_size: Literal[8, 16, 32, 64, 128, 256] | None
    cuda_graphs: Literal["auto", "none"]
    async_scheduling: Literal["auto", "none"]
    prefix_caching: bool
    speculation: Literal["auto", "none"]
    batch_invariant: bool
    draft_model: str | None
    max_adapters: int
    adapter_memory: int
    adapter_host_memory: int | None
    pinned_adapters: tuple[str, ...]
    max_logits_bytes: int
    threads: int | None
    trust_remote_code: bool
    idle_timeout: float
    stall_timeout: float
    start_timeout: float
    encoder_cache: int
    packed_cache: int
    standby: int
    engine: Literal["native", "vllm"]
    engine_python: str | None
    engine_args: dict[str, Any]
    backend: dict[str, dict[str, Any]]
    in_process: bool


class LoadOptions(EngineOptions, total=False):
    """Options of ``load_model``. ``defaults`` and ``generation_config`` replace the saved ones; ``{}`` for none."""

    default_adapter: str | None
    defaults: dict[str, Any]
    generation_config: Any
