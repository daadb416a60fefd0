"""The model behind a served entity, as it was found when the endpoint's configuration was accepted."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ..bundle import Bundle
from ..settings import EngineSettings


class Source(Struct, frozen=True, kw_only=True):
    """``uri`` names a version even where an alias was asked for, so that a configuration never changes by itself.

    ``defaults`` are request fields for requests that lack them. ``core`` replaces the engine's own class.
    ``addresses`` (``tcp://host:port``) are engines that other hosts keep, with the key in ``key_file``: a replica
    each, and none is started here.
    """

    uri: str
    bundle: Bundle
    engine: EngineSettings = EngineSettings()
    defaults: dict[str, Any] = {}
    core: str | None = None
    addresses: tuple[str, ...] = ()
    key_file: str | None = None
