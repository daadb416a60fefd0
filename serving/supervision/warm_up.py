"""The readiness probe of an engine: one token generated, or one text embedded."""

from __future__ import annotations

import time
import uuid

from ..interface.engine import Engine
from ..interface.errors import EngineDied, from_kind
from ..interface.events import Embedded, Failed, Finished
from ..interface.request import POOLED, Sampling, Sequence, ValidRequest


def generate_one(engine: Engine, *, timeout: float = 120.0) -> float:
    """Generate one token (or embed one text) and return the seconds it took.

    Raises the ``ServingError`` that prevents it.
    """
    started = time.monotonic()
    task = engine.info.tasks[0]
    request = ValidRequest(
        request_id=f"warm-{uuid.uuid4().hex}",
        task=task,
        model="",
        sequences=(Sequence(prompt_token_ids=(0,)),),
        sampling=None if task in POOLED else Sampling(max_tokens=1, temperature=0.0),
        deadline=time.monotonic() + timeout,
    )
    stream = engine.submit(request)
    try:
        for event in stream:
            if isinstance(event, Failed):
                raise from_kind(event.kind, event.message)
            if isinstance(event, Embedded):
                return time.monotonic() - started
            if isinstance(event, Finished):
                if event.num_generated_tokens < 1:
                    raise EngineDied(f"the engine gave no token within {timeout:g} seconds")
                return time.monotonic() - started
    finally:
        stream.close()
    raise EngineDied("the engine ended without a token")
