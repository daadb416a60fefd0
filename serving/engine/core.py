"""Our own engine, the ``native`` backend: one thread adds requests, aborts them and takes steps that return events.

Every request ends in exactly one way: either each of its sequences is ``Finished`` (or ``Embedded``), or the request
has ``Failed``.

::

    EngineCore(bundle, settings) ─┬─ GenerationCore    models that generate                   cores/generation_core.py
                                  └─ EmbeddingCore     models that embed texts or score pairs cores/embedding_core.py
"""

from __future__ import annotations

from .cores import embedding_core, generation_core  # noqa: F401 (they register what EngineCore makes)
from .cores.engine_core import EngineCore

__all__ = ["EngineCore"]
