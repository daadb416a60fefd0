"""The adapters that an engine has now: named ones, loaded from disk, and LoRA tasks, whose weights came with requests.

A request claims its adapter when the engine accepts it, and releases it when it ends. Here, in the pool and in the
prefix cache (``kv_cache.PrefixKey``), a key made anew for each load names an adapter's weights. An adapter that
replaces another of the same name therefore has another key, and running requests end on the weights they began with.

::

    named      loaded ⇄ evicted (read again from disk by the next request)      → replaced → gone with its last request
    a task     loaded → evicted, and so unknown: the next request sends its weights again
    either     loaded ⇄ on the host alone, where it may have copies there (``host_copies``)

The loaded adapters stay within ``budget`` bytes. To make room, adapters that no request uses are evicted, fairly
between their owners (``adapter_room``). Pinned adapters are never evicted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ...interface.bundle import Bundle
from ...interface.engine import AdapterInfo, public_name
from ...interface.errors import (
    Conflict,
    InternalError,
    InvalidField,
    LimitExceeded,
    NotFound,
    Overloaded,
    ServingError,
)
from ...interface.request import LoraTask, ValidRequest
from ...interface.settings import EngineSettings
from . import lora_task
from .eviction import choose, held_by
from .files import CONFIG, WEIGHTS
from .host_cache import HostCopies
from .lora import Adapter, LoraPool
from .request_adapters import check_new, not_loaded
from .virtual_tokens import Table

HOST_MEMORY_BYTES = 1 << 30  # default for bytes of copies on the host if the weights are on another device
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(slots=True, eq=False)
class _Adapter:
    """One adapter. ``users`` counts the requests that claim it. Only named adapters have ``info`` and ``stamp`` (of
    their files), only tasks have a ``digest``. ``is_current``: its name refers to it; if not, it is dropped with its
    last user."""

    key: str
    name: Hashable
    num_bytes: int
    info: AdapterInfo | None = None
    stamp: Stamp = ()
    digest: bytes = b""
    is_pinned: bool = False
    is_current: bool = True
    users: int = 0
    last_used: int = 0

    @property
    def owner(self) -> Hashable:
        """The tenant of a task; None for a named adapter."""
        return self.name[0] if isinstance(self.name, tuple) else None


class Forgetful(Protocol):
    """The part of the KV cache used here, which is above the adapters."""

    def forget(self, adapter: str) -> None:
        """Drop the idle KV of an adapter, whatever its salt."""
        ...


class AdapterRegistry:
    """The part that loads, evicts and counts the adapters of one engine.

    ``pool`` holds the weights, ``cache`` the KV.
    ``max_adapters`` limits the number of named adapters, ``budget`` the bytes of all loaded ones and ``host_budget``
    the bytes of the copies of evicted ones on the host. Adapters named in ``pinned`` are never evicted.
    """

    def __init__(
        self,
        pool: LoraPool,
        cache: Forgetful,
        *,
        max_adapters: int,
        budget: int,
        host_budget: int = 0,
        pinned: Collection[str] = (),
    ) -> None:
        self._pool, self._cache = pool, cache
        self._max_adapters, self._budget, self._pinned = max_adapters, budget, frozenset(pinned)
        self._host: HostCopies[Adapter] = HostCopies(host_budget)
        self._current: dict[Hashable, _Adapter] = {}  # a named adapter by its name, a task by (owner, id)
        self._by_key: dict[str, _Adapter] = {}
        self._clock = itertools.count(1)
        self._keys_made = 0
        self.num_loads = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that the loaded adapters take."""
        return sum(one.num_bytes for one in self._loaded())

    @property
    def num_host_bytes(self) -> int:
        """The bytes that the copies of evicted adapters take on the host."""
        return self._host.num_bytes

    def _loaded(self) -> list[_Adapter]:
        return [one for one in self._by_key.values() if one.key in self._pool]

    # -- requests

    def claim(self, request: ValidRequest) -> str:
        """Load a request's adapter, keep it until ``release`` and return its key; "" for the base model.

        Raises ``NotFound`` for an unknown adapter, ``InvalidField`` for weights that do not fit the model, and
        ``Overloaded`` if every loaded adapter is in use.
        """
        if request.lora_task is not None:
            adapter = self._task((request.tenant, request.lora_task.task_id), request.lora_task)
        elif request.adapter is None:
            return ""
        else:
            adapter = self._named(request.adapter)
        adapter.users += 1
        adapter.last_used = next(self._clock)
        return adapter.key

    def release(self, key: str) -> None:
        """Note the end of a request that had claimed ``key``."""
        if not key:
            return
        adapter = self._by_key[key]
        adapter.users -= 1
        if not adapter.users and not adapter.is_current:
            self._drop(adapter)

    def learned_prompt(self, key: str) -> Table | None:
        """Return the learned prompt of a claimed adapter, which goes before its requests' prompts; None if it has
        none."""
        return self._pool.prompt_of(key) if key else None

    def _named(self, name: str) -> _Adapter:
        adapter = self._current.get(name)
        if adapter is None:
            raise not_loaded(name)
        if adapter.key not in self._pool and not self._came_back(adapter):
            assert adapter.info is not None
            path = adapter.info.path
            try:
                read = self._pool.read(name, path) if _stamp(path) == adapter.stamp else None
            except (OSError, ServingError) as error:
                raise InternalError(f"adapter {name!r} could not be read from disk again: {error}") from error
            if read is None:
                raise InternalError(f"adapter {name!r} changed on disk since it was loaded; load it again")
            self._make_room(adapter)
            self._add(adapter, read)
        return adapter

    def _came_back(self, adapter: _Adapter) -> bool:
        """Bring an adapter from the host to the device if there is a copy; return whether there was one."""
        if adapter.key not in self._host:
            return False
        weights = self._host.take(adapter.key)
        try:
            self._make_room(adapter)
        except ServingError:
            self._host.keep(adapter.key, adapter.owner, adapter.num_bytes, weights)  # its room is still free
            raise
        self._pool.add(adapter.key, self._pool.to_device(weights))
        return True

    def _task(self, name: Hashable, task: LoraTask) -> _Adapter:
        adapter = self._current.get(name)
        if task.weights is None:
            if adapter is None:
                text = f"LoRA task {task.task_id} not found in cache. Please send LoRA weights with request"
                raise NotFound(text, param="lora_task_id")
            return self._on_device(adapter)
        found = lora_task.digest(task)
        if adapter is not None and adapter.digest == found:
            return self._on_device(adapter)
        read = self._pool.read_task(task)
        new = _Adapter(self._new_key("task"), name, read.num_bytes, digest=found)
        self._make_room(new, "lora_weights", leaving=adapter)
        return self._enter(new, read)

    def _on_device(self, task: _Adapter) -> _Adapter:
        if task.key not in self._pool:
            came_back = self._came_back(task)
            assert came_back  # without a copy the task would not be known
        return task

    # -- named adapters

    def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Load a named adapter from a peft directory. With ``pinned`` it is never evicted.

        A name that is already loaded is refused, or replaced with ``replace``: running requests end on the old
        weights. Raises ``AlreadyExists``, ``LimitExceeded``, ``Overloaded``, or ``InvalidField`` if it does not fit."""
        known = self._current.get(name)
        named = {public_name(one.info.name) for one in self._current.values() if one.info is not None}
        is_known = known is not None or (replace and public_name(name) in named)
        check_new(name, len(named), self._max_adapters, is_known=is_known, replace=replace)
        stamp = _stamp(path)
        read = self._pool.read(name, path)
        info = AdapterInfo(name=name, rank=read.rank, path=path)
        adapter = _Adapter(self._new_key(name), name, read.num_bytes, info=info, stamp=stamp)
        adapter.is_pinned = pinned or name in self._pinned
        self._make_room(adapter, leaving=known)
        self._enter(adapter, read)
        return info

    def unload(self, name: str, *, at_once: bool = False) -> None:
        """Unload a named adapter. Raises ``NotFound`` for an unknown name and ``Conflict`` while a request uses it.

        With ``at_once`` there is no conflict: requests that use the adapter end on its weights."""
        adapter = self._current.get(name)
        if adapter is None:
            raise not_loaded(name)
        if adapter.users and not at_once:
            raise Conflict(f"adapter {name!r} is in use", param="adapter")
        self._leave(adapter)

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return the named adapters."""
        return tuple(one.info for one in self._current.values() if one.info is not None)

    # -- room

    def _make_room(self, new: _Adapter, field: str = "adapter", leaving: _Adapter | None = None) -> None:
        """Evict adapters that no request uses until ``new`` fits; evict none if that would not be enough.

        ``leaving`` is the adapter that ``new`` replaces; it goes first."""
        loaded = [one for one in self._loaded() if one is not leaving or one.users]
        room = self._budget - sum(one.num_bytes for one in loaded if one.is_pinned)
        if new.num_bytes > room:
            beside = "in total" if room == self._budget else "beside pinned adapters"
            raise LimitExceeded(
                f"{field}: {new.num_bytes} bytes is more than adapter_memory allows {beside}: {room}",
                limit="adapter_memory",
                allowed=room,
                remaining=room,
            )
        others = [one for one in loaded if not one.is_pinned]
        idle = [one for one in others if not one.users]
        gone = choose(idle, held_by(others), new.owner, new.num_bytes, room=room)
        if gone is None:
            raise Overloaded("Cache is full. There are no done tasks to evict", retry_after=1.0)
        if leaving is not None and not leaving.users and leaving.key in self._pool:
            self._pool.remove(leaving.key)  # its name refers to it until the new adapter enters
        for one in gone:
            self._evict(one)

    def _evict(self, adapter: _Adapter) -> None:
        """Move an adapter from the device to the host if there is room. A task left in neither place is forgotten."""
        weights = self._pool.remove(adapter.key)
        lost = [adapter.key]
        if self._host.has_room_for(adapter.num_bytes):
            copy = self._pool.to_host(weights)
            lost = self._host.keep(adapter.key, adapter.owner, adapter.num_bytes, copy)
        for one in (self._by_key[key] for key in lost):
            if one.info is None:
                self._leave(one)

    def _enter(self, adapter: _Adapter, read: Adapter) -> _Adapter:
        """Make ``adapter`` the one that its name refers to."""
        known = self._current.get(adapter.name)
        if known is not None:
            self._leave(known)
        adapter.last_used = next(self._clock)
        self._current[adapter.name] = self._by_key[adapter.key] = adapter
        self._add(adapter, read)
        return adapter

    def _add(self, adapter: _Adapter, read: Adapter) -> None:
        self._pool.add(adapter.key, read)
        self.num_loads += 1

    def _leave(self, adapter: _Adapter) -> None:
        """Separate an adapter from its name, and drop it if no request uses it."""
        del self._current[adapter.name]
        adapter.is_current = False
        if not adapter.users:
            self._drop(adapter)

    def _drop(self, adapter: _Adapter) -> None:
        del self._by_key[adapter.key]
        self._cache.forget(adapter.key)
        self._host.drop(adapter.key)
        if adapter.key in self._pool:
            self._pool.remove(adapter.key)

    def _new_key(self, name: str) -> str:
        self._keys_made += 1
        return f"{name}#{self._keys_made}"

    def check_integrity(self, claims: Iterable[str]) -> None:
        """Raise ``RuntimeError`` unless the counts agree with ``claims``, the keys of the requests in flight."""
        held = list(claims)
        for key, adapter in self._by_key.items():
            if adapter.users != held.count(key) or not (adapter.is_current or adapter.users):
                raise RuntimeError(f"adapter {key} has {adapter.users} users, {held.count(key)} requests")
        if self.num_bytes > self._budget or len(self._pool) > len(self._by_key):
            raise RuntimeError(f"{len(self._pool)} adapters of {self.num_bytes} bytes are loaded")
        for key in self._by_key:
            if key in self._host and key in self._pool:
                raise RuntimeError(f"adapter {key} is on the device and has a copy")


def _stamp(path: str) -> Stamp:
    """Return inode, size and time of change of an adapter's files, which tell them from others put in their place."""
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = os.stat(os.path.join(path, name))
        except OSError:
            continue  # reading the file will report the error
        found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def pinned_adapters(settings: EngineSettings, bundle: Bundle) -> frozenset[str]:
    """Return the adapters of ``bundle`` that are never evicted, the default one included. Raises ``InvalidField``."""
    for name in settings.pinned_adapters:
        if name not in bundle.adapters:
            has = ", ".join(sorted(bundle.adapters)) or "none"
            raise InvalidField("pinned_adapters", name, f"an adapter that came with the model: {has}")
    default = () if bundle.default_adapter is None else (bundle.default_adapter,)
    return frozenset((*settings.pinned_adapters, *default))


def adapter_host_memory(settings: EngineSettings, pool: LoraPool) -> int:
    """Return the bytes allowed for copies on the host. If the weights are there anyway, only what the setting asks
    for."""
    if settings.adapter_host_memory is not None:
        return settings.adapter_host_memory
    return 0 if pool.is_on_host else HOST_MEMORY_BYTES
