"""Whether a joined host can run an engine: its devices, and the memory that other engines leave of its offer."""

from __future__ import annotations

from collections.abc import Iterable

from ...endpoints.config import EntityConfig
from ...endpoints.engine_hosts import EngineHost, Placement, placement_key
from ..engine_memory import GIB


def needed(entity: EntityConfig) -> int:
    """Return the bytes that an engine of ``entity`` takes at least: its weights, and the KV cache that is set.

    The weights of a model that was found by an earlier release are not known. Its host then finds out.
    """
    source = entity.model
    return source.bundle.weight_bytes + (source.engine.kv_cache_memory or 0)


def may_run(host: EngineHost, entity: EntityConfig) -> bool:
    """Return whether ``host`` takes new engines, is there for this one and has the device that the entity's settings
    name."""
    return not host.draining and _is_for(host, entity) and _has_device(host, entity)


def _is_for(host: EngineHost, entity: EntityConfig) -> bool:
    start = host.offer.start
    if start is None or entity.scale is None:  # hosts of a runtime and its entities are for each other alone
        return start is None and entity.scale is None
    return start.state == "JOINED" and start.engine == placement_key(entity)


def _has_device(host: EngineHost, entity: EntityConfig) -> bool:
    return bool(host.offer.devices) or not entity.model.engine.device.startswith("cuda")


def offered(host: EngineHost, entity: EntityConfig) -> int:
    """Return the bytes that ``host`` offers to engines of ``entity``: of its GPUs together if they run there."""
    if host.offer.devices and entity.model.engine.device != "cpu":
        return sum(device.memory for device in host.offer.devices)
    return host.offer.memory


def room(host: EngineHost, entity: EntityConfig, placements: Iterable[Placement]) -> int:
    """Return the bytes that the engines on ``host`` leave to one of ``entity``. Those on GPUs leave all main memory."""
    on_cpu = not host.offer.devices or entity.model.engine.device == "cpu"
    others = (one.entity for one in placements if one.host == host.host)
    alike = (one for one in others if (not host.offer.devices or one.model.engine.device == "cpu") == on_cpu)
    return offered(host, entity) - sum(map(needed, alike))


def has_room(host: EngineHost, entity: EntityConfig, placements: Iterable[Placement]) -> bool:
    """Return whether ``host`` may run an engine of ``entity``, and has memory for it."""
    return may_run(host, entity) and needed(entity) <= room(host, entity, placements)


def refusal(host: EngineHost, entity: EntityConfig, placements: Iterable[Placement]) -> str:
    """Say why ``host`` cannot run an engine of ``entity``; "" if it can."""
    if host.draining:
        return f"host {host.name} drains"
    if not _is_for(host, entity):
        return f"host {host.name} is there for others"
    if not _has_device(host, entity):
        return f"host {host.name} has no GPU, and the settings name {entity.model.engine.device}"
    if needed(entity) > (left := max(room(host, entity, placements), 0)):
        return f"host {host.name} offers {offered(host, entity) / GIB:.2f} GiB, of which {left / GIB:.2f} GiB are left"
    return ""
