"""LoRA adapters in vLLM, which knows each load by a number of its own: another load of a name is another adapter.

vLLM keeps the weights, evicts those that no request uses and reads them again from their path.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...interface.engine import AdapterInfo, public_name
from ...interface.errors import Conflict, InvalidField, reason
from ...interface.request import ValidRequest
from ..adapters.files import CONFIG
from ..adapters.request_adapters import check_new, not_loaded

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Adapter:
    """One load of an adapter. ``users`` counts the requests that claim it; ``is_current``: its name refers to it."""

    info: AdapterInfo
    lora: Any  # vllm.lora.request.LoRARequest
    users: int = 0
    is_current: bool = True


class VllmAdapters:
    """The adapters of one engine (``adapters.request_adapters.RequestAdapters``). ``llm`` is vLLM's ``LLMEngine``."""

    def __init__(self, llm: Any, *, max_adapters: int, max_rank: int, pinned: Iterable[str] = ()) -> None:
        self._llm, self._max_adapters, self._max_rank, self._pinned = llm, max_adapters, max_rank, frozenset(pinned)
        self._current: dict[str, _Adapter] = {}
        self._by_key: dict[str, _Adapter] = {}
        self._loads = 0

    def claim(self, request: ValidRequest) -> str:
        """Keep a request's adapter until ``release`` and return its key; "" for the base model."""
        if request.adapter is None:
            return ""
        adapter = self._current.get(request.adapter)
        if adapter is None:
            raise not_loaded(request.adapter)
        adapter.users += 1
        return str(adapter.lora.lora_name)

    def release(self, key: str) -> None:
        if key:
            adapter = self._by_key[key]
            adapter.users -= 1
            self._drop_unused(adapter)

    def lora(self, key: str) -> Any:
        """Return the ``LoRARequest`` of a claimed adapter; None for the base model."""
        return self._by_key[key].lora if key else None

    def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        from vllm.lora.request import LoRARequest

        known = self._current.get(name)
        named = set(map(public_name, self._current))
        is_known = known is not None or (replace and public_name(name) in named)
        check_new(name, len(named), self._max_adapters, is_known=is_known, replace=replace)
        rank = _rank(name, path)
        if rank > self._max_rank:
            allowed = f'a rank up to {self._max_rank}, which engine_args {{"max_lora_rank": …}} sets'
            raise InvalidField("adapter", f"{name} of rank {rank}", allowed)
        self._loads += 1
        lora = LoRARequest(f"{name}#{self._loads}", self._loads, path)
        try:
            self._llm.add_lora(lora)
            if pinned or name in self._pinned:
                self._llm.pin_lora(lora.lora_int_id)
        except Exception as error:
            logger.info("adapter %s is refused", name, exc_info=True)
            raise InvalidField(
                "adapter", name, f"an adapter that vLLM can apply to this model: {reason(error)}"
            ) from None
        adapter = _Adapter(AdapterInfo(name=name, rank=rank, path=path), lora)
        self._current[name] = self._by_key[lora.lora_name] = adapter
        if known is not None:
            known.is_current = False
            self._drop_unused(known)
        return adapter.info

    def unload(self, name: str, *, at_once: bool = False) -> None:
        adapter = self._current.get(name)
        if adapter is None:
            raise not_loaded(name)
        if adapter.users and not at_once:
            raise Conflict(f"adapter {name!r} is in use", param="adapter")
        del self._current[name]
        adapter.is_current = False
        self._drop_unused(adapter)

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(one.info for one in self._current.values())

    def check_integrity(self, claims: Iterable[str]) -> None:
        held = list(claims)
        for key, adapter in self._by_key.items():
            if adapter.users != held.count(key) or not (adapter.is_current or adapter.users):
                raise RuntimeError(f"adapter {key} has {adapter.users} users, {held.count(key)} requests")

    def _drop_unused(self, adapter: _Adapter) -> None:
        if not adapter.users and not adapter.is_current:
            del self._by_key[adapter.lora.lora_name]
            self._llm.remove_lora(adapter.lora.lora_int_id)


def _rank(name: str, path: str) -> int:
    """Return the rank of the adapter in ``path``. Raises ``InvalidField`` for a directory without a LoRA adapter."""
    try:
        config = json.loads(Path(path, CONFIG).read_bytes())
        if config["peft_type"] == "LORA" and isinstance(config["r"], int):
            return int(max([config["r"], *(config.get("rank_pattern") or {}).values()]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    raise InvalidField("adapter", name, f"a directory with a LoRA adapter of peft ({CONFIG})")
