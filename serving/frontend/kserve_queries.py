"""Answers to KServe's queries about the server and its models, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.kserve.metadata import index_entry, model_config, model_metadata
from ..dialects.kserve.reply_types import IndexEntry, ModelConfig, ModelMetadata
from ..metering.accounts.authorization import Caller
from ..routing.served_endpoints import ServedEndpoints, ServedEntity
from .readiness import reason_against
from .worker_state import WorkerState


def takes_requests(server: WorkerState) -> bool:
    """Return whether the server is ready (``readiness``) and each served entity has an engine that makes progress."""
    if reason_against(server):
        return False
    return all(entity.engine.health().status == "ready" for entity in server.endpoints.entities())


def metadata_of(endpoints: ServedEndpoints, entity: ServedEntity) -> ModelMetadata:
    """Return the tensors of an endpoint's models, and the versions of these models."""
    versions = endpoints.versions_of(entity.endpoint)
    return model_metadata(entity.endpoint, versions, generates=entity.view.generates)


def config_of(entity: ServedEntity) -> ModelConfig:
    """Return the model's configuration in Triton's terms."""
    view = entity.view
    return model_config(
        entity.endpoint, generates=view.generates, max_model_len=view.context, vocab_size=view.info.vocab_size
    )


def entries(endpoints: ServedEndpoints, *, only_ready: bool) -> Iterator[IndexEntry]:
    """Yield the entries of the repository's index: each model and version that is served."""
    ready: dict[tuple[str, str], bool] = {}
    for entity in endpoints.entities():
        place = entity.endpoint, entity.version
        ready[place] = answers(entity) or ready.get(place, False)
    for (name, version), is_up in ready.items():
        if is_up or not only_ready:
            yield index_entry(name, version, is_ready=is_up)


def answers(entity: ServedEntity) -> bool:
    """Return whether ``entity`` takes requests. An unloaded or starting engine counts, because requests wait for it."""
    return entity.engine.health().status in ("ready", "starting")


def find(endpoints: ServedEndpoints, caller: Caller, name: str, version: str | None) -> ServedEntity:
    """Return the served entity that ``name`` and ``version`` name. Raises ``NotFound``."""
    entity, adapter = endpoints.find(name, version)
    endpoints.check_use(caller, entity, adapter)
    return entity
