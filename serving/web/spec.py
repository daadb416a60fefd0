"""What is to be served, as one value that crosses from the command to keeper and workers."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ..bundle import Bundle
from ..settings import EngineSettings
from .settings import ServerSettings

ProfileName = Literal["open", "databricks-provisioned", "databricks-pay-per-token"]


class EndpointSpec(Struct, frozen=True, kw_only=True):
    """``entity`` names the served model (its URI's last part by default). ``core`` replaces the engine's own class."""

    name: str
    entity: str
    bundle: Bundle
    engine: EngineSettings = EngineSettings()
    profile: ProfileName = "open"
    created: int = 0
    core: str | None = None


class ServeSpec(Struct, frozen=True, kw_only=True):
    """``runtime_dir`` is where engine processes are found; None is the user's own."""

    endpoints: tuple[EndpointSpec, ...]
    settings: ServerSettings = ServerSettings()
    runtime_dir: str | None = None


def connect_options(spec: ServeSpec, endpoint: EndpointSpec) -> dict[str, Any]:
    """The options of ``transport.client.connect`` that name the same engine from every process of a server."""
    options: dict[str, Any] = {}
    if spec.runtime_dir is not None:
        options["state_dir"] = spec.runtime_dir
    if endpoint.core is not None:
        options["core"] = endpoint.core
    return options
