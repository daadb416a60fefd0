"""Settings, each with the default that was measured or reasoned for, saved with a model and open to override."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs a model.

    ``dtype``: "auto" is float32 on CPU, bfloat16 on CUDA. ``quantization``: "int8" stores linear weights in int8 by
    output channel and quantises activations per token. ``kernels``: "auto" takes our own where they were built and the
    processor has what they need, "torch" never. ``max_model_len`` None is the model's own. ``kv_cache_memory``
    is bytes, None half of what is free at start. ``threads`` None is the physical cores this process may use.
    ``idle_timeout``: seconds an engine process outlives its last client; ``start_timeout``: seconds its start may take.
    ``in_process`` runs the engine on a thread
    of this process (debugging and small tests: about half the speed, see docs/performance.md).
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["none", "int8"] = "none"
    kernels: Literal["auto", "torch"] = "auto"
    compile: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
    kv_cache_memory: int | None = None
    prefix_caching: bool = True
    max_adapters: int = 64
    threads: int | None = None
    trust_remote_code: bool = False
    idle_timeout: float = 3.0
    stall_timeout: float = 60.0
    start_timeout: float = 900.0
    in_process: bool = False
