"""Weights that are quantised once, when a model is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...serving.errors import PackagingError, shown
from .tasks import config_file

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8",)


def check_quantize(quantize: Any, *, base: str | None, trust_remote_code: bool) -> None:
    """Raises ``PackagingError`` for what cannot be, before anything is read."""
    if quantize is None:
        return
    allowed = " or ".join(map(repr, QUANTIZATIONS))
    if quantize not in QUANTIZATIONS:
        raise PackagingError(f"quantize: {shown(quantize)} is not allowed; expected {allowed}, or None")
    if base is not None:
        raise PackagingError(
            f"quantize: {quantize!r} is not allowed with base=: the weights are the base's; log the base with it"
        )
    if trust_remote_code:
        raise PackagingError(
            f"quantize: {quantize!r} is not allowed with trust_remote_code: code of the model's own may do with its"
            " weights what it likes; set quantization='int8' to quantise them at each start"
        )


def quantize_weights(model_dir: Path, tasks: tuple[str, ...], quantize: Any) -> None:
    """Quantise what lies in ``model_dir``. Raises ``PackagingError``."""
    from ...serving.engine.weight_writer import quantize_files

    written = quantize_files(config_file(model_dir).parent, tasks, quantize)
    logger.info(
        "%d linears in %s: %d bytes of weights instead of %d",
        written.linears,
        quantize,
        written.bytes_after,
        written.bytes_before,
    )
