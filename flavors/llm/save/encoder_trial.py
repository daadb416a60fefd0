"""Load a model for embeddings or scores, or one that reads images, once as an engine would: what it refuses is refused
when the model is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from ....serving.interface.bundle import Bundle
from ....serving.interface.errors import PackagingError, reason
from ....serving.interface.settings import EngineSettings

logger = logging.getLogger(__name__)

# In float32 this fits the memory of a machine on which models are logged; XLM-R large has 560 million.
MAX_TRIAL_PARAMETERS = 700_000_000


def try_encoder(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare the engine's results for a few tokens with those of the model's own code, as it does at each start.

    The comparison runs in float32 on the CPU with torch, which every machine has. A model with more than
    ``MAX_TRIAL_PARAMETERS`` is left to the engine. Raises ``PackagingError``, also if the model's code or ours fails
    with any other error, since it would fail in the engine too. Only a lack of memory, of a package or of a file is
    not taken for one: the engine's machine may have it.
    """
    from ....serving.engine.models.cross_encoder import load_cross_encoder
    from ....serving.engine.models.embedder import load_embedder

    _try(load_cross_encoder if "score" in bundle.tasks else load_embedder, skeleton, bundle, settings)


def try_images(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare the logits of a prompt with an image with those of the whole model, as ``try_encoder`` does."""
    from ....serving.engine.models.loader import load_model

    _try(load_model, skeleton, bundle, settings)


def _try(
    load: Callable[[Bundle, EngineSettings], Any], skeleton: Any, bundle: Bundle, settings: EngineSettings
) -> None:
    import torch

    if sum(parameter.numel() for parameter in skeleton.parameters()) > MAX_TRIAL_PARAMETERS:
        logger.info("the model is large: only the engine compares it with its own code")
        return
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
