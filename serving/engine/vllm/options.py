"""Engine settings as vLLM's ``EngineArgs``: what is passed on, what is refused by name, and the environment.

A setting that vLLM has under another name is translated. One that it has not is refused unless it has its default.
Arguments of ``engine_args`` are passed as they are, except those that are decided here.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...interface.bundle import Bundle
from ...interface.errors import InvalidField, PackagingError
from ...interface.request import POOLED
from ...interface.settings import EngineSettings
from ...interface.validated_struct import Checked
from ...system.files import cache_dir
from ...system.main_memory import main_memory

RACE = "mlflow_llm.serving.engine.vllm.race:RaceProcessor"
CPU_SHARE = 2  # the KV cache takes one part of so many of the free memory, as in our own engine
DEFAULT_LORAS = 4  # adapters in one batch; each takes memory for ``max_lora_rank``
POOLING = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}

# settings of our own engine, with what says the same here
UNUSED = {
    "quantization": 'a checkpoint that is stored so, or engine_args {"quantization": …}',
    "kernels": "the kernels are vLLM's",
    "kv_cache_dtype": 'engine_args {"kv_cache_dtype": …}',
    "speculation": 'engine_args {"speculative_config": …} and backend.vllm.sampling vllm',
    "batch_invariant": "the environment variable VLLM_BATCH_INVARIANT, where vLLM supports it",
    "draft_model": 'engine_args {"speculative_config": …} and backend.vllm.sampling vllm',
    "adapter_memory": 'engine_args {"max_loras": …, "max_cpu_loras": …}',
    "adapter_host_memory": 'engine_args {"max_cpu_loras": …}',
    "encoder_cache": "this engine reads no images",
    "packed_cache": "vLLM has no packed weights",
}
# arguments that are decided here, each with the setting that decides it
DECIDED = {
    "model": "the model", "tokenizer": "the model", "skip_tokenizer_init": "the model", "runner": "the model's tasks",
    "pooler_config": "the model", "served_model_name": "the endpoint", "dtype": "the setting dtype",
    "max_model_len": "the setting of that name", "max_num_seqs": "the setting of that name",
    "max_num_batched_tokens": "the setting of that name", "block_size": "the setting kv_block_size",
    "enable_prefix_caching": "the setting prefix_caching", "kv_cache_memory_bytes": "the setting kv_cache_memory",
    "trust_remote_code": "the setting of that name", "max_cpu_loras": "the setting max_adapters",
    "scheduling_policy": "the classes of requests", "logits_processors": "backend.vllm.sampling",
    "disable_log_stats": "this engine", "max_logprobs": "this engine", "stream_interval": "this engine",
    "data_parallel_size": "the number of replicas",
}  # fmt: skip


class VllmSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings under ``EngineSettings.backend["vllm"]``.

    ``sampling`` "race" draws tokens by our own race, so that a seed gives the text that it gives in our engine, and a
    request that goes on in another engine process goes on with the same text. "vllm" leaves sampling to vLLM: some
    fields of requests are then refused, and a request that has delivered tokens ends with its engine."""

    sampling: Literal["race", "vllm"] = "race"


def own_settings(settings: EngineSettings) -> VllmSettings:
    """Return the settings of this backend. Raises ``InvalidField``, also for a setting that vLLM cannot apply."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineSettings)}
    for name, instead in UNUSED.items():
        if (value := getattr(settings, name)) != defaults[name]:
            raise InvalidField(name, value, f"{defaults[name]!r} with engine vllm: {instead}")
    return settings.of_backend("vllm", VllmSettings)


def set_environment(settings: EngineSettings) -> None:
    """Set vLLM's variables, before it is imported; those that the operator has set take precedence."""
    wanted = {
        # the model runs on this process's own thread; workers of tensor parallelism are processes all the same
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # only the first runner has logits processors that see what was drawn so far
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_dir("vllm")),
        # as many threads as OMP_NUM_THREADS says, wherever the system puts them: other processes run here too
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if settings.engine_args.get("enforce_eager"):
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first log probabilities wait for a compiler
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def arguments(bundle: Bundle, settings: EngineSettings, platform: str, fields: Collection[str]) -> dict[str, Any]:
    """Return the arguments of ``EngineArgs``, whose fields are ``fields``. ``platform``: "cpu", "cuda" or another.

    Raises ``InvalidField`` and ``PackagingError``."""
    own = own_settings(settings)
    given = dict(settings.engine_args)
    _check_given(given, fields)
    _check_device(settings.device, platform)
    pooled = bool(POOLED.intersection(bundle.tasks))
    found: dict[str, Any] = {
        "model": bundle.model_dir,
        "tokenizer": bundle.tokenizer_dir or None,
        "skip_tokenizer_init": True,
        "runner": "pooling" if pooled else "generate",
        "dtype": _dtype(bundle, settings.dtype, platform),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_prefix_caching": settings.prefix_caching and not pooled,
        "kv_cache_memory_bytes": settings.kv_cache_memory,
        "trust_remote_code": settings.trust_remote_code,
        "scheduling_policy": "priority",
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    if settings.kv_cache_memory is None and platform == "cpu":
        found["kv_cache_memory_bytes"] = main_memory().free // CPU_SHARE
    if settings.kv_block_size is not None:
        found["block_size"] = settings.kv_block_size
    if settings.cuda_graphs == "none":
        found["enforce_eager"] = True
    if pooled:
        found["pooler_config"] = _pooler(bundle)
    elif own.sampling == "race":
        if given.get("async_scheduling") or given.get("speculative_config"):
            name = "async_scheduling" if given.get("async_scheduling") else "speculative_config"
            raise InvalidField(f"engine_args.{name}", given[name], "none unless backend.vllm.sampling is vllm")
        found |= {"logits_processors": [RACE], "async_scheduling": False}
    if bundle.adapters or given.get("enable_lora"):
        slots = int(given.get("max_loras") or min(DEFAULT_LORAS, settings.max_adapters))
        found |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": max(slots, settings.max_adapters)}
    return found | given


def _check_given(given: Mapping[str, Any], fields: Collection[str]) -> None:
    for name, value in given.items():
        if name in DECIDED:
            raise InvalidField(f"engine_args.{name}", value, f"none: {DECIDED[name]} decides it")
        if name not in fields or name.startswith("_"):
            near = difflib.get_close_matches(name[:64], fields, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidField(f"engine_args.{name}", value, f"a field of vLLM's EngineArgs{meant}")


def _check_device(device: str, platform: str) -> None:
    if device not in ("auto", platform):
        raise InvalidField("device", device, f"auto or {platform}, which this vLLM is built for")


def _dtype(bundle: Bundle, dtype: str, platform: str) -> str:
    """Return vLLM's ``dtype``: "auto" is float32 on CPUs as in our own engine, unless the weights are quantised."""
    if dtype != "auto" or platform != "cpu":
        return dtype
    try:
        config = json.loads(Path(bundle.model_dir, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return dtype  # vLLM reports it
    return "auto" if isinstance(config, dict) and config.get("quantization_config") else "float32"


def _pooler(bundle: Bundle) -> dict[str, Any]:
    """Return vLLM's pooler for the vectors of ``bundle``. Raises ``PackagingError`` for one that it has not."""
    spec = bundle.embedding
    if spec is None or "score" in bundle.tasks:
        raise PackagingError("engine: 'vllm' is not allowed for a model that scores texts; expected 'native'")
    if spec.pooling not in POOLING:
        raise PackagingError(
            f"engine: 'vllm' is not allowed with pooling {spec.pooling!r}; expected one of {', '.join(POOLING)}"
        )
    if any(module.kind != "normalize" for module in spec.head):
        raise PackagingError("engine: 'vllm' is not allowed for a model with modules after its pooling")
    # cut and scaled to length 1 by this engine, so that both happen in the order that the model states
    return {"pooling_type": POOLING[spec.pooling], "use_activation": False}


def field_names(engine_args: Any) -> list[str]:
    """Return the names of the fields of vLLM's ``EngineArgs``, a dataclass."""
    return [field.name for field in dataclasses.fields(engine_args)]
