"""Write a transformers model object as config and safetensors (``save_pretrained``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason
from .quantised import refuse_quantised


def save_pretrained(model: Any, target: Path) -> None:
    """Write a ``PreTrainedModel`` to the directory ``target``.

    Raises ``PackagingError`` if its weights are quantised or partly offloaded, or if transformers cannot save it.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        refuse_quantised(model.config.to_dict(), type(model).__name__, even_known=True)
        raise PackagingError(
            "model: its weights are quantised; load it without quantization_config, and set quantization='int8' to"
            " serve it in int8"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PackagingError("model: some weights are on the meta device (offloaded); load it whole first")
    try:
        model.save_pretrained(target)
    except Exception as error:  # from transformers, safetensors or the model's own code
        raise PackagingError(f"model: save_pretrained failed: {reason(error)}") from None
