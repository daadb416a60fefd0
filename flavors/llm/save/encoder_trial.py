"""Load a model for embeddings or scores, or one that reads images, once as an engine would: what it refuses is refused
when the model is logged."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ....serving.interface.bundle import Bundle, EmbeddingSpec
from ....serving.interface.errors import PackagingError, reason
from ....serving.interface.settings import EngineSettings
from .first_layers import write_first_layers
from .meta_model import count

logger = logging.getLogger(__name__)

# In float32 this fits the memory of a machine on which models are logged; XLM-R large has 560 million.
MAX_TRIAL_PARAMETERS = 700_000_000
LEFT = "the model is large: only the engine compares it with its own code"


def try_encoder(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare the engine's results for a few tokens with those of the model's own code, as it does at each start.

    The comparison runs in float32 on the CPU with torch, which every machine has. Of a model with more than
    ``MAX_TRIAL_PARAMETERS`` the first layers are compared, with a part of the vocabulary if need be. If one layer alone
    has more, the modules after pooling are read; the whole is left to the engine.

    Raises ``PackagingError``, also if the model's code or ours fails with any other error, since it would fail in the
    engine too. Only a lack of memory, of a package or of a file is not taken for one: the engine's machine may have it.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    from ....serving.engine.models.cross_encoder import load_cross_encoder
    from ....serving.engine.models.embedder import load_embedder

    scores = "score" in bundle.tasks
    load: Any = load_cross_encoder if scores else load_embedder
    if not _is_large(skeleton):
        _try(load, skeleton, bundle, settings)
        return
    kind = AutoModelForSequenceClassification if scores else AutoModel
    with tempfile.TemporaryDirectory(dir=Path(bundle.model_dir).parent) as folder:
        place = Path(folder, "model")
        options = {"trust_remote_code": settings.trust_remote_code}
        try:
            part = write_first_layers(kind, Path(bundle.model_dir), place, MAX_TRIAL_PARAMETERS, **options)
        except Exception as error:  # from transformers, or from the model's own code: the whole may well load
            logger.warning("only the engine tries the model: its first layers cannot be loaded: %s", reason(error))
            return
        if part is None:
            logger.info(LEFT)
            if not scores:
                _read_head(skeleton, bundle)
            return
        words = "the model is large: its first %d layers%s are tried, the whole by the engine"
        logger.info(words, part.layers, f" with {part.tokens} tokens" if part.tokens else "")
        _try(load, skeleton, msgspec.structs.replace(bundle, model_dir=str(place)), settings)


def try_images(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare the logits of a prompt with an image with those of the whole model, as ``try_encoder`` does."""
    from ....serving.engine.models.loader import load_model

    if _is_large(skeleton):
        logger.info(LEFT)
    else:
        _try(load_model, skeleton, bundle, settings)


def _read_head(skeleton: Any, bundle: Bundle) -> None:
    """Read the modules after pooling for vectors of the model's size. Raises ``PackagingError`` if they do not fit."""
    from ....serving.engine.models.pooling import EmbeddingHead

    width = skeleton.config.get_text_config().hidden_size
    try:
        EmbeddingHead(bundle.embedding or EmbeddingSpec(), bundle.model_dir, width, "cpu")
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None


def _is_large(skeleton: Any) -> bool:
    return count(skeleton) > MAX_TRIAL_PARAMETERS


def _try(
    load: Callable[[Bundle, EngineSettings], Any], skeleton: Any, bundle: Bundle, settings: EngineSettings
) -> None:
    import torch

    plain = msgspec.structs.replace(
        settings, device="cpu", dtype="float32", kernels="torch", quantization="none", packed_cache=0
    )
    try:
        load(bundle, plain)
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None
    except (ImportError, MemoryError, OSError, torch.OutOfMemoryError) as error:
        logger.warning("only the engine tries the model: %s", reason(error))
    except Exception as error:  # from transformers, or from the model's own code
        why = f"{type(error).__name__}: {reason(error)}"
        raise PackagingError(f"model: {type(skeleton).__name__} cannot be run: {why}") from None
