"""Which adapters an engine has now, and what names each in the prefix cache's keys (``kv_cache.PrefixKey``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import AlreadyExists, Conflict, InvalidField, NotFound
from .interface import AdapterInfo


class AdapterRegistry:
    """``pool`` (``lora.LoraPool``) holds the weights, None where the model takes no adapter; ``cache`` the KV."""

    def __init__(self, pool: Any, cache: Any) -> None:
        self._pool, self._cache = pool, cache
        self._key_of: dict[str | None, str] = {None: ""}
        self._keys_made = 0

    def key_of(self, name: str | None) -> str:
        """The key of an adapter's KV, "" for the base. Raises ``NotFound`` for a name that is not loaded."""
        if name not in self._key_of:
            raise NotFound(f"adapter {name!r} is not loaded", param="adapter")
        return self._key_of[name]

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read a peft directory into the pool. A name already loaded is refused: unload it to replace it."""
        if self._pool is None:
            raise InvalidField("adapter", name, "no adapter: this model takes none")
        if name in self._key_of:
            raise AlreadyExists(f"adapter {name!r} is already loaded", param="adapter")
        info: AdapterInfo = self._pool.load(name, path)
        self._keys_made += 1
        self._key_of[name] = f"{name}#{self._keys_made}"  # KV of an earlier adapter of that name is not this one's
        return info

    def unload(self, name: str, in_use: Iterable[str | None]) -> None:
        """Raises ``NotFound`` for an unknown name, ``Conflict`` where ``in_use`` holds it."""
        key = self.key_of(name)
        if name in in_use:
            raise Conflict(f"adapter {name!r} is in use", param="adapter")
        del self._key_of[name]
        self._cache.forget(key)
        self._pool.unload(name)

    def infos(self) -> tuple[AdapterInfo, ...]:
        """The adapters loaded now; () where the model takes none."""
        return tuple(self._pool.infos()) if self._pool is not None else ()
