"""Our own engine, the ``native`` backend: one thread adds requests, aborts them and takes steps that return events.

Every request ends in exactly one way: either each of its sequences is ``Finished`` (or ``Embedded``), or the request
has ``Failed``.

::

    EngineCore(bundle, settings) ─┬─ GenerationCore    models that generate    cores/generation_core.py
                                  └─ EmbeddingCore     embed and score         cores/embedding_core.py
"""

from __future__ import annotations

from ..interface.bundle import Bundle
from ..interface.settings import EngineSettings
from ..interface.validated_struct import Checked
from .adapters.registry import pinned_adapters
from .assembly import EmbeddingParts, assemble
from .cores.base_core import BACKEND, BaseCore
from .cores.embedding_core import EmbeddingCore
from .cores.generation_core import GenerationCore


def EngineCore(bundle: Bundle, settings: EngineSettings) -> BaseCore:  # noqa: N802 (a ``CoreFactory``, named in specs)
    """Load a model and return the core that runs it. Raises ``PackagingError`` if it cannot run as the settings ask."""
    settings.of_backend(BACKEND, Checked)
    pinned = pinned_adapters(settings, bundle)
    parts = assemble(bundle, settings)
    core: BaseCore
    if isinstance(parts, EmbeddingParts):
        core = EmbeddingCore(settings, parts)
    else:
        core = GenerationCore(bundle, settings, parts, pinned)
    core.load_bundled_adapters(bundle)
    return core
