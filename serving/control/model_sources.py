"""The models of served entities, found through MLflow (``mlflow_resolver``) and stored with the configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..dialects.fields.defaults import check_defaults, request_defaults
from ..endpoints.config import EndpointConfig, EntityConfig, ModelSource, Route
from ..endpoints.config_body import check_placement
from ..interface.bundle import Bundle
from ..interface.errors import InvalidField, PackagingError
from ..model_files import downloads
from ..model_files.entity_names import label_of
from ..model_files.model_uri import is_path, parse
from .mlflow_resolver import ResolvedModel, resolve, with_drafts
from .settings import NO_HOSTS, lacks_runtime
from .spec import EndpointSpec

logger = logging.getLogger(__name__)


def not_applied(name: str, unused: Mapping[str, Any]) -> str:
    """Return the message about the server-wide engine settings that are not applied to a model."""
    given = ", ".join(f"{key}={value}" for key, value in unused.items())
    return f"{name} runs without the server's {given}: it generates no text"


def locate(
    entities: tuple[EntityConfig, ...],
    overrides: dict[str, Any],
    *,
    metered: bool = True,
    has_hosts: bool = True,
    find: Callable[..., tuple[ResolvedModel, ...]] | None = None,
) -> tuple[ModelSource, ...]:
    """Find the models of ``entities``. This takes seconds and runs in a separate process.

    ``overrides`` are the server's engine settings, for models that have a use for them. ``metered`` says that there is
    a ledger; without one, no throughput can be reserved. ``has_hosts`` says that engines may be placed on joined hosts;
    of models that are, no weights are fetched. ``find`` is ``mlflow_resolver.resolve`` or a ``ResolverPool``,
    which limits the lookups. Raises ``NotFound`` for a model that the registry does not have, and ``InvalidField``,
    with its path in the config, for one that cannot be served.
    """
    for place, entity in enumerate(entities):
        check_defaults(entity.defaults, f"served_entities[{place}].defaults")
        if entity.is_hosted and not has_hosts:
            raise InvalidField(f"served_entities[{place}].placement", "hosts", f"'local' {NO_HOSTS}")
        if entity.scale is not None and (lacking := lacks_runtime(entity.scale.runtime)):
            raise InvalidField(f"served_entities[{place}].scale.runtime", entity.scale.runtime, lacking)
        if entity.provisioned and not metered:
            field, given = entity.reserve
            raise InvalidField(
                f"served_entities[{place}].{field}", given, "none on a server started without --database"
            )
    try:
        found = _found(entities, find or resolve)
        for model in found:
            if unused := model.unused(overrides):
                logger.info("%s", not_applied(model.uri, unused))
        settings = [model.settings(overrides, e.engine_settings) for model, e in zip(found, entities, strict=True)]
        bundles = [
            model.bundle if entity.is_hosted else with_drafts([model.bundle], [engine], find or resolve)[0]
            for model, engine, entity in zip(found, settings, entities, strict=True)
        ]
    except PackagingError as error:
        raise InvalidField(
            "served_entities", [entity.uri for entity in entities], f"models that can be served: {error}"
        ) from None
    return tuple(
        ModelSource(
            uri=model.uri,
            bundle=bundle,
            engine=engine,
            defaults=request_defaults(model.defaults, entity.defaults),
        )
        for model, bundle, engine, entity in zip(found, bundles, settings, entities, strict=True)
    )


def _found(
    entities: tuple[EntityConfig, ...], find: Callable[..., tuple[ResolvedModel, ...]]
) -> tuple[ResolvedModel, ...]:
    """Return the models of ``entities``, without the weights of those whose engines run on joined hosts."""
    texts = tuple(dict.fromkeys(entity.uri for entity in entities if entity.is_hosted))
    if not texts:
        return find(tuple(entity.uri for entity in entities))
    uris = tuple(dict.fromkeys(entity.uri for entity in entities if not entity.is_hosted))
    found = find(uris, texts=texts)
    here, elsewhere = dict(zip(uris, found, strict=False)), dict(zip(texts, found[len(uris) :], strict=True))
    return tuple((elsewhere if entity.is_hosted else here)[entity.uri] for entity in entities)


def with_files(
    entity: EntityConfig,
    *,
    find: Callable[..., tuple[ResolvedModel, ...]] | None = None,
    key_file: str | None = None,
) -> EntityConfig:
    """Return ``entity`` with its model's files on this machine; files that are gone are fetched again.

    Those that are in the cache of downloads are held until ``downloads.keep_only`` drops them.

    ``find`` is the same as in ``locate``; ``key_file`` has the key of engines on joined hosts, which need no weights
    here. Raises ``PackagingError``, ``NotFound``.
    """
    source = entity.model
    if entity.is_hosted:
        if key_file is None:
            raise PackagingError("engines on joined hosts need their key: this server has no --engine-key-file")
        source = msgspec.structs.replace(source, key_file=key_file)
        entity = msgspec.structs.replace(entity, source=source)
    if _is_here(source.bundle):
        return entity
    uris = (source.uri,)
    look = find or resolve
    (found,) = look((), texts=uris) if entity.is_elsewhere else look(uris)
    if found.bundle.content_hash != source.bundle.content_hash:
        raise PackagingError(f"{source.uri} is not the model that was configured: its content has changed")
    bundle = found.bundle if entity.is_elsewhere else with_drafts([found.bundle], [source.engine], look)[0]
    if not _is_here(bundle):
        raise PackagingError(f"{source.uri}: its files were removed from the cache right after the download")
    return msgspec.structs.replace(entity, source=msgspec.structs.replace(source, bundle=bundle))


def _is_here(bundle: Bundle) -> bool:
    """Hold the files of ``bundle`` that are in the cache of downloads, and say whether all files are there."""
    return downloads.hold(bundle) and all(map(os.path.isdir, downloads.paths_of(bundle)))


def config_of(spec: EndpointSpec) -> EndpointConfig:
    """Return the configuration, with one served entity, that the command line asked for."""
    if spec.addresses and (spec.scale_to_zero_enabled or spec.max_provisioned_throughput is not None):
        raise PackagingError(f"{spec.name}: engines of other hosts are neither provisioned nor scaled to zero")
    name, version = _named(spec.entity)
    label = label_of(spec.entity)
    source = ModelSource(
        uri=spec.uri or spec.entity,
        bundle=spec.bundle,
        engine=spec.engine,
        defaults=spec.defaults,
        core=spec.core,
        addresses=spec.addresses,
        key_file=spec.key_file,
    )
    entity = EntityConfig(
        name=label,
        asked="" if label == spec.entity else spec.entity,
        entity_name=name,
        entity_version=version,
        source=source,
        defaults=spec.given_defaults,
        min_provisioned_throughput=spec.min_provisioned_throughput,
        max_provisioned_throughput=spec.max_provisioned_throughput,
        scale_to_zero_enabled=spec.scale_to_zero_enabled,
        follow_alias=spec.follow_alias,
        canary=spec.canary,
        placement="hosts" if spec.scale is not None and spec.placement is None else spec.placement,
        replicas=spec.replicas,
        scale=spec.scale,
    )
    try:
        check_placement(entity, spec.name)
    except InvalidField as error:
        raise PackagingError(str(error)) from None
    route = Route(served_model_name=label, traffic_percentage=100)
    return EndpointConfig(
        served_entities=(entity,),
        routes=(route,),
        profile=spec.profile,
        prefix_sharing=spec.prefix_sharing,
        payload_log=spec.payload_log,
        guardrails=spec.guardrails,
        dialects=spec.dialects,
    )


def _named(uri: str) -> tuple[str, str]:
    """Return (name, version or alias) of a registered model: (assistant, champion) for ``models:/assistant@champion``.

    Return (``uri``, "") for everything else; a path that is here is made absolute, since the API takes no other.
    """
    named = parse(uri)
    version = (named.alias or named.version) if named is not None else None
    if named is None or version is None:
        return (os.path.abspath(uri) if is_path(uri) and os.path.exists(uri) else uri), ""
    return named.name, version
