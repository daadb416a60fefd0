"""The adapters of an engine as its core uses them, and those of a model that takes none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...interface.engine import AdapterInfo
from ...interface.errors import AlreadyExists, InvalidField, LimitExceeded, NotFound
from ...interface.request import ValidRequest


class RequestAdapters(Protocol):
    """The adapters that requests claim, loaded and unloaded by name (``registry.AdapterRegistry``)."""

    def claim(self, request: ValidRequest) -> str:
        """Keep a request's adapter loaded until ``release`` and return its key; "" for the base model."""
        ...

    def release(self, key: str) -> None:
        """Note the end of a request that had claimed ``key``."""
        ...

    def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """See ``Engine.load_adapter``."""
        ...

    def unload(self, name: str, *, at_once: bool = False) -> None:
        """See ``Engine.unload_adapter``."""
        ...

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return the named adapters."""
        ...

    def check_integrity(self, claims: Iterable[str]) -> None:
        """Raise ``RuntimeError`` unless the counts agree with ``claims``, the keys of the requests in flight."""
        ...


class NoAdapters:
    """The adapters of a model that takes none: each is refused, or not found."""

    def claim(self, request: ValidRequest) -> str:
        if request.adapter is not None:
            raise not_loaded(request.adapter)
        return ""

    def release(self, key: str) -> None:
        return

    def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        raise InvalidField("adapter", name, "no adapter: this model takes none")

    def unload(self, name: str, *, at_once: bool = False) -> None:
        raise not_loaded(name)

    def infos(self) -> tuple[AdapterInfo, ...]:
        return ()

    def check_integrity(self, claims: Iterable[str]) -> None:
        if any(claims):
            raise RuntimeError("a request claims an adapter, and there are none")


def check_new(name: str, num_loaded: int, maximum: int, *, is_known: bool, replace: bool) -> None:
    """Check whether an adapter may be loaded beside ``num_loaded`` others. Raises ``AlreadyExists`` and
    ``LimitExceeded``."""
    if is_known and not replace:
        raise AlreadyExists(f"adapter {name!r} is already loaded", param="adapter")
    if not is_known and num_loaded >= maximum:
        raise LimitExceeded(
            f"{maximum} adapters are loaded, as many as max_adapters allows",
            limit="max_adapters",
            allowed=maximum,
            remaining=0,
        )


def not_loaded(name: str) -> NotFound:
    """Return the error for an adapter that is not loaded."""
    return NotFound(f"adapter {name!r} is not loaded", param="adapter")
