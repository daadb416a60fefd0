"""Load a model for embeddings or scores once as an engine would, so that what the engine refuses is refused at save."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ....serving.interface.bundle import Bundle
from ....serving.interface.errors import PackagingError, reason
from ....serving.interface.settings import EngineSettings

logger = logging.getLogger(__name__)

# In float32 this fits the memory of a machine on which models are logged; XLM-R large has 560 million.
MOST_PARAMETERS = 700_000_000


def try_encoder(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare the engine's results for a few tokens with those of the model's own code, as it does at each start.

    The comparison runs in float32 on the CPU with torch, which every machine has. A model with more than
    ``MOST_PARAMETERS`` is left to the engine. Raises ``PackagingError``. Any other failure is ignored: the engine's
    machine may have what this one lacks.
    """
    from ....serving.engine.models.cross_encoder import load_cross_encoder
    from ....serving.engine.models.embedder import load_embedder

    if sum(parameter.numel() for parameter in skeleton.parameters()) > MOST_PARAMETERS:
        logger.info("the model is compared with its own code by the engine alone: it is large")
        return
    plain = msgspec.structs.replace(
        settings, device="cpu", dtype="float32", kernels="torch", quantization="none", packed_cache=0
    )
    load: Any = load_cross_encoder if "score" in bundle.tasks else load_embedder
    try:
        load(bundle, plain)
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None
    except Exception as error:  # from transformers, or from the model's own code
        logger.debug("the model was not tried: %s", reason(error))
