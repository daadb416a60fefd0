"""Refuse checkpoints whose weights are already quantised, naming their format.

Each format needs kernels of its own (and mostly a GPU), which this engine does not have: it quantises floats itself
(``quantization: int8``). A model that is logged for vLLM may have any of them. A GGUF file is the exception: it is
dequantised to floats when it is logged.
"""

from __future__ import annotations

import json
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
    "mlflow-llm": "log_model(quantize='int4')",
}
UNQUANTISED = "log the checkpoint that it was made of, or the model object after transformers' dequantize()"


def refuse_quantised(config: Any, what: str) -> None:
    """Raise ``PackagingError`` if ``config`` (parsed from a ``config.json``), or a config inside it, is of quantised
    weights. ``what`` names the model in the message."""
    for path, found in _said(config, ""):
        method = found.get("quant_method") if isinstance(found, dict) else None
        if method is None and isinstance(found, dict):
            method = "bitsandbytes" if any(name.startswith(("load_in_", "bnb_")) for name in found) else None
        name = NAMES.get(str(method).lower(), shown(method)) if method is not None else "a form that is not named"
        raise PackagingError(
            f"model: the weights of {what} are quantised already: {name} ({path}); the engine runs floats and quantises"
            f" them itself (quantization='int8'): {UNQUANTISED}; or log it with engine='vllm', which runs such weights"
        )


def check_directory(folder: Path) -> None:
    """Apply ``refuse_quantised`` to the ``config.json`` in ``folder`` and to ModelOpt's own file."""
    for name in ("config.json", "hf_quant_config.json"):
        try:
            config = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # code that needs the file reports what is wrong with it
        if name == "hf_quant_config.json":
            config = {"quantization_config": {"quant_method": "modelopt"}}
        refuse_quantised(config, folder.name)


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
