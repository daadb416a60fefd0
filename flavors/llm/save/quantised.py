"""Checkpoints whose weights are already quantised: those that the engine reads, and a refusal of others by name.

Each format needs kernels of its own; the engine has them for four bits and float8 of ``weights/published.py``. A model
that is logged for vLLM may have any other. A GGUF file is dequantised to floats when it is logged.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, shown

# by quantization_config.quant_method, as in transformers (transformers.utils.quantization_config.QuantizationMethod)
NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors (llm-compressor)",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "gguf": "GGUF",
    "modelopt": "ModelOpt",
    "torchao": "torchao",
    "quanto": "Quanto",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "quark": "Quark",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "mlflow-llm": "log_model(quantize=…)",
}
UNQUANTISED = "log the checkpoint that it was made of, or the model object after transformers' dequantize()"


def refuse_quantised(config: Any, what: str, *, even_known: bool = False) -> None:
    """Raise ``PackagingError`` if ``config`` (parsed from a ``config.json``), or a config inside it, is of quantised
    weights that the engine does not read, or, ``even_known``, of any. ``what`` names the model in the message."""
    for path, found in _said(config, ""):
        if path == "quantization_config" and not even_known and _is_read(found, what):
            continue
        method = found.get("quant_method") if isinstance(found, dict) else None
        if method is None and isinstance(found, dict):
            method = "bitsandbytes" if any(name.startswith(("load_in_", "bnb_")) for name in found) else None
        name = NAMES.get(str(method).lower(), shown(method)) if method is not None else "a form that is not named"
        raise PackagingError(
            f"model: the weights of {what} are quantised already: {name} ({path}); the engine runs floats and quantises"
            f" them itself (quantization='int8'), and AWQ, GPTQ and compressed-tensors of models that generate:"
            f" {UNQUANTISED}; or log it with engine='vllm', which runs such weights"
        )


def _is_read(said: Any, what: str) -> bool:
    from ....serving.engine.weights.published import published_of

    try:
        return published_of(said) is not None
    except PackagingError as error:
        raise PackagingError(f"model: the weights of {what} are quantised already: {error}") from None


def quantization_in(folder: Path, tasks: Collection[str], quantize: Any, *, own_code: bool) -> str | None:
    """Return the quantization of the checkpoint in ``folder`` if others quantised it, else ``quantize``.

    Raises ``PackagingError`` for a model that does not generate or runs code of its own, and if it is to be quantised
    again."""
    from ....serving.engine.weights.stored_weights import quantization_of

    found = quantization_of(folder)
    if found is None:
        own: str | None = quantize
        return own
    if quantize is not None:
        raise PackagingError(
            f"quantize: {quantize!r} is not allowed; expected None: the weights are quantised already ({found})"
        )
    if not {"chat", "completions"}.intersection(tasks):
        raise PackagingError(
            f"model: weights that are quantised already ({found}) are not allowed for {', '.join(tasks)}; expected a"
            f" model that generates: {UNQUANTISED}"
        )
    if own_code:
        raise PackagingError(
            f"trust_remote_code: True is not allowed; expected False: the weights are quantised already ({found}), and"
            " code of the model's own may do with them what it likes"
        )
    return found


def check_directory(folder: Path, *, even_known: bool = False) -> None:
    """Apply ``refuse_quantised`` to the ``config.json`` in ``folder`` and to ModelOpt's own file."""
    for name in ("config.json", "hf_quant_config.json"):
        try:
            config = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # code that needs the file reports what is wrong with it
        if name == "hf_quant_config.json":
            config = {"quantization_config": {"quant_method": "modelopt"}}
        refuse_quantised(config, folder.name, even_known=even_known)


def _said(config: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(config, dict):
        return []
    found = [
        (f"{path}{name}", config[name]) for name in ("quantization_config", "compression_config") if config.get(name)
    ]
    for name, entry in config.items():
        if name.endswith("_config") and name not in ("quantization_config", "compression_config"):
            found += _said(entry, f"{path}{name}.")
    return found
