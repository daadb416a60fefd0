"""A model for embeddings or scores, loaded once as an engine loads it: what that would refuse is refused when it is
saved."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ...serving.bundle import Bundle
from ...serving.errors import PackagingError, reason
from ...serving.settings import EngineSettings

logger = logging.getLogger(__name__)

# In float32 as much as a machine has on which models are logged; XLM-R large has 560 million.
MOST_PARAMETERS = 700_000_000


def try_encoder(skeleton: Any, bundle: Bundle, settings: EngineSettings) -> None:
    """Compare what the engine computes for a few tokens with the model's own code, as it does at each start.

    In float32 on the CPU and by torch, which is what all machines have in common. A model of more than
    ``MOST_PARAMETERS`` is left to the engine. Raises ``PackagingError``; any other failure is ignored: the engine's
    machine may have what this one lacks.
    """
    from ...serving.engine.cross_encoder import load_cross_encoder
    from ...serving.engine.embedder import load_embedder

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
    except Exception as error:  # of transformers, or of the model's own code
        logger.debug("the model was not tried: %s", reason(error))
