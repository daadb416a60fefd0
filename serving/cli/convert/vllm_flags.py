"""The flags of ``vllm serve`` that stand for options here, and what becomes of their values.

Engine settings under vLLM's names are in ``advice.CONFIG``, and texts of advice in ``advice.SERVE``; this module says
which values can be taken over as they are. The flags: https://docs.vllm.ai/en/stable/cli/serve/
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..advice import CONFIG, SERVE, for_setting
from ..vllm_only import NO_COUNTERPART, NO_EFFECT


class Meant(NamedTuple):
    """The words of ``mlflow-llm serve`` that a flag becomes, and a line about it; without words it has no effect."""

    words: tuple[str, ...]
    note: str


class Refused(ValueError):
    """A value that has no counterpart."""


SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}
SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
DTYPES = {"half": "float16", "float": "float32"}
SWITCHES = {  # flags without a value
    *("--trust-remote-code", "--enable-lora", "--enable-prefix-caching", "--enforce-eager", "--async-scheduling"),
    *("--enable-auto-tool-choice", "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log"),
    *("--enable-sleep-mode", "--enable-chunked-prefill", "--enable-log-requests", "--enable-expert-parallel"),
    *("--disable-custom-all-reduce", "--disable-sliding-window", "--skip-tokenizer-init", "--enable-prompt-embeds"),
    *("--enable-lora-bias", "--fully-sharded-loras", "--disable-cascade-attn", "--allow-credentials", "--headless"),
    *("--disable-frontend-multiprocessing", "--enable-request-id-headers", "--return-tokens-as-token-ids"),
    *("--enable-server-load-tracking", "--enable-force-include-usage", "--enable-prompt-tokens-details"),
    *("--enable-ssl-refresh", "--enable-tokenizer-info-endpoint", "--disable-fastapi-docs", "--use-tqdm-on-load"),
    *("--calculate-kv-scales", "--enable-eplb", "--data-parallel-hybrid-lb", "--data-parallel-external-lb"),
    *("--disable-hybrid-kv-cache-manager", "--enable-return-routed-experts", "--log-error-stack", "--enable-reasoning"),
    *("--enable-log-outputs", "--trust-request-chat-template", "--exclude-tools-when-tool-choice-none"),
    *(
        "--enable-multimodal-encoder-data-parallel",
        "--skip-mm-profiling",
        "--language-model-only",
        "--enable-mfu-metrics",
    ),
}


def size(value: str) -> int:
    """Return a number as vLLM reads it: ``4096``, ``4k`` (4,000), ``4K`` (4,096), ``1.5k``. Raises ``Refused``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", value.strip())
    if found is None:
        raise Refused("expected a number")
    return int(float(found[1]) * SIZES.get(found[2], 1))


def _setting(name: str, convert: Callable[[str], Any] = str) -> Callable[[str], Meant]:
    def meant(value: str) -> Meant:
        made = convert(value)
        words = ("-C", f"{name}={made if isinstance(made, str) else json.dumps(made)}")
        return Meant(words, " ".join(words))

    return meant


def _option(name: str, convert: Callable[[str], str] = str) -> Callable[[str], Meant]:
    return lambda value: Meant((name, convert(value)), f"{name} {convert(value)}")


def _max_model_len(value: str) -> Meant:
    if value in ("auto", "-1"):
        return Meant((), "the model's own length is used without -C max_model_len")
    return _setting("max_model_len", size)(value)


def _dtype(value: str) -> Meant:
    return Meant((), "the default") if value == "auto" else _setting("dtype", lambda v: DTYPES.get(v, v))(value)


def _quantization(value: str) -> Meant:
    if value == "fp8":
        return _setting("quantization")(value)
    return Meant((), "the checkpoint's own quantization is used without -C quantization; int8 and fp8 quantise floats")


def _kv_cache_dtype(value: str) -> Meant:
    if value == "auto":
        return Meant((), "the default")
    return _setting("kv_cache_dtype", lambda v: "int8" if v.startswith("fp8") else v)(value)


def _device(value: str) -> Meant:
    return Meant((), "the default") if value == "auto" else _setting("device")(value)


def _speculative(value: str) -> Meant:
    said = _json(value)
    if not isinstance(said, dict) or not isinstance(said.get("model"), str):
        raise Refused('expected a draft model in "model": other methods have no counterpart (speculation= is on)')
    words = ("-C", f"draft_model={said['model']}")
    return Meant(words, f"{' '.join(words)}; how many tokens it drafts follows from what is accepted")


def _defaults(value: str) -> Meant:
    from mlflow_llm.flavors.llm.model.generation_config import divided

    said = _json(value)
    if not isinstance(said, dict):
        raise Refused("expected a JSON object")
    fields, rest = divided(said)
    words = tuple(word for key, one in fields.items() for word in ("-D", f"{key}={json.dumps(one)}"))
    without = f"; without effect: {', '.join(map(str, rest))}" if rest else ""
    return Meant(words, " ".join(words) + without)


def _generation_config(value: str) -> Meant:
    if value == "auto":
        return Meant((), "the default: the model's generation_config.json")
    raise Refused("log the model with llm.log_model(generation_config={}), or -D FIELD=null for single fields")


def _template_kwargs(value: str) -> Meant:
    words = ("-D", f"chat_template_kwargs={json.dumps(_json(value))}")
    return Meant(words, " ".join(words))


def _origins(value: str) -> Meant:
    words = tuple(word for one in _json(value) for word in ("--cors-origin", str(one)))
    return Meant(words, " ".join(words))


def _log_level(value: str) -> str:
    return {"critical": "error", "trace": "debug"}.get(value, value)


def _gibibytes(value: str) -> int:
    try:
        return int(float(value) * 2**30)
    except ValueError:
        raise Refused("expected a number of GiB") from None


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise Refused("expected JSON") from None


CONVERSIONS: dict[str, Callable[[str], Meant]] = {
    "--max-model-len": _max_model_len,
    "--max-num-seqs": _setting("max_num_seqs", size),
    "--max-num-batched-tokens": _setting("max_num_batched_tokens", size),
    "--max-loras": _setting("max_adapters", size),
    "--block-size": _setting("kv_block_size", size),
    "--kv-cache-memory-bytes": _setting("kv_cache_memory", size),
    "--mm-processor-cache-gb": _setting("encoder_cache", _gibibytes),
    "--dtype": _dtype,
    "--quantization": _quantization,
    "--kv-cache-dtype": _kv_cache_dtype,
    "--device": _device,
    "--speculative-config": _speculative,
    "--host": _option("--host"),
    "--port": _option("--port"),
    "--uds": _option("--socket"),
    "--ssl-certfile": _option("--tls-cert"),
    "--ssl-keyfile": _option("--tls-key"),
    "--ssl-ca-certs": _option("--tls-client-ca"),
    "--api-server-count": _option("--workers"),
    "--uvicorn-log-level": _option("--log-level", _log_level),
    "--allowed-local-media-path": _option("--allowedLocalMediaPath"),
    "--allowed-media-domains": _option("--allowedMediaDomains"),
    "--seed": lambda value: Meant(("-D", f"seed={size(value)}"), f"-D seed={size(value)}"),
    "--override-generation-config": _defaults,
    "--default-chat-template-kwargs": _template_kwargs,
    "--generation-config": _generation_config,
    "--allowed-origins": _origins,
}
SWITCHED = {
    "--trust-remote-code": ("-C", "trust_remote_code=true"),
    "--enforce-eager": ("-C", "cuda_graphs=none"),
    "--no-enable-prefix-caching": ("-C", "prefix_caching=false"),
    "--async-scheduling": ("-C", "async_scheduling=auto"),
    "--no-async-scheduling": ("-C", "async_scheduling=none"),
    "--disable-log-requests": ("--log-level", "warning"),
    "--disable-uvicorn-access-log": ("--log-level", "warning"),
}


def reason_without(flag: str) -> tuple[bool, str] | None:
    """Return whether a flag is without a counterpart, and why; None for a flag that is not known.

    A flag that only is so here anyway has a counterpart: nothing.
    """
    if flag in NO_EFFECT:
        return False, NO_EFFECT[flag]
    if flag in NO_COUNTERPART:
        return True, NO_COUNTERPART[flag]
    if (advice := SERVE.get(flag)) is not None:
        return not advice.startswith("nothing: "), advice.removeprefix("nothing: ")
    name = flag.removeprefix("--").replace("-", "_")
    if name in CONFIG and (setting := for_setting(name)) is not None:
        return True, f"write {setting}"
    return (True, "it is not known here") if flag in SWITCHES else None
