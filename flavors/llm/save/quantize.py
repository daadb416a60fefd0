"""Quantise weights once, when a model is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ....serving.interface.errors import PackagingError, shown
from ..model.tasks import config_file

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8", "int4")
MAX_TOKENS = 16384  # of all calibration texts together
MAX_LENGTH = 512  # of one text, in tokens
PARTS, PART_LENGTH = 20, 1100  # of the default texts; the length is in characters


def check_quantize(quantize: Any, *, calibration: Any, base: str | None, trust_remote_code: bool) -> None:
    """Raise ``PackagingError`` for arguments that are not allowed, before anything is read."""
    if calibration is not None:
        if quantize not in QUANTIZATIONS:
            raise PackagingError("calibration: only quantize='int8' and quantize='int4' use it; expected None")
        texts = calibration if isinstance(calibration, list) else []
        if not texts or not all(isinstance(text, str) and text and _is_unicode(text) for text in texts):
            raise PackagingError(f"calibration: {shown(calibration)} is not allowed; expected a list of texts, or None")
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


def _is_unicode(text: str) -> bool:
    """Return whether ``text`` has no lone surrogates, which no tokenizer accepts."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def quantize_weights(
    model_dir: Path, tasks: tuple[str, ...], quantize: Any, calibration: list[str] | None, tokenizer: Any
) -> None:
    """Quantise the weights in ``model_dir``. Raises ``PackagingError``."""
    from ....serving.engine.quantize.weight_writer import quantize_files

    if quantize == "int4" and not {"chat", "completions"}.intersection(tasks):
        raise PackagingError(f"quantize: 'int4' is not allowed for {', '.join(tasks)}; expected 'int8', or None")
    if calibration is not None and not {"chat", "completions"}.intersection(tasks):
        raise PackagingError(f"calibration: it is for models that generate; expected None for {', '.join(tasks)}")
    chosen = default_texts() if calibration is None and quantize == "int4" else calibration
    texts = [] if chosen is None else tokenised(chosen, tokenizer)
    written = quantize_files(config_file(model_dir).parent, tasks, quantize, texts)
    logger.info(
        "linears quantised: %d to int4, %d to int8; %d bytes of weights instead of %d",
        written.four_bits,
        written.linears - written.four_bits,
        written.bytes_after,
        written.bytes_before,
    )


def default_texts() -> list[str]:
    """Return excerpts of Python's documentation (``pydoc_data.topics``): prose and code that every Python has."""
    whole = "\n\n".join(text for _, text in sorted(topics.items()))
    return [whole[i * len(whole) // PARTS :][:PART_LENGTH] for i in range(PARTS)]


def tokenised(calibration: list[str], tokenizer: Any) -> list[list[int]]:
    """Tokenise texts into pieces of at most ``MAX_LENGTH`` ids, ``MAX_TOKENS`` in total. Raises ``PackagingError``."""
    found: list[list[int]] = []
    room = MAX_TOKENS
    for text in calibration:
        ids = list(tokenizer(text[: 32 * room]).input_ids)[:room]
        room -= len(ids)
        found += [ids[i : i + MAX_LENGTH] for i in range(0, len(ids), MAX_LENGTH)]
        if room <= 0:
            break
    if not found:
        raise PackagingError("calibration: its texts have no tokens")
    return found
