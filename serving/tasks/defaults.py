"""What a model's own defaults say where a request says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..request import RawChat, RawCompletion, RawEmbedding, RawRequest, Task
from .endpoint import EndpointView

T = TypeVar("T", bound=Struct)
LENGTHS = ("max_tokens", "min_tokens")
TASKS: Mapping[type[RawRequest], Task] = {RawChat: "chat", RawCompletion: "completions", RawEmbedding: "embeddings"}


def with_defaults(raw: RawRequest, endpoint: EndpointView) -> RawRequest:
    """``raw`` with the endpoint's default adapter and fields where it names none. Raises ``NotFound`` for an adapter
    that is not there, ``InvalidField``.

    Lengths stay out: as defaults they give way to what the request says and to the room in the context, which
    ``sampling.resolve`` knows.
    """
    if endpoint.default_adapter is not None and endpoint.find_adapter(raw.model, raw.adapter) is None:
        raw = msgspec.structs.replace(raw, adapter=endpoint.default_adapter)
    defaults = endpoint.defaults(TASKS[type(raw)])
    if defaults is None:
        return raw
    if not isinstance(raw, RawEmbedding) and not isinstance(defaults, RawEmbedding):
        raw = msgspec.structs.replace(raw, sampling=_filled(raw.sampling, defaults.sampling, LENGTHS))
    return _filled(raw, defaults)


def _filled(given: T, defaults: Struct, without: tuple[str, ...] = ()) -> T:
    empty = [name for name in given.__struct_fields__ if getattr(given, name) is None and name not in without]
    missing: dict[str, Any] = {name: getattr(defaults, name) for name in empty}
    return msgspec.structs.replace(given, **{name: value for name, value in missing.items() if value is not None})
