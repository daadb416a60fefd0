"""``--spec FILE``: what a command serves, as JSON; an error is one line that names file and field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ...control.settings import ServerSettings
from ...control.spec import ServeSpec
from ...interface.canary import Canary
from ...interface.dialect_settings import DialectSettings
from ...interface.errors import InvalidField
from ...interface.payload_log import PayloadLog
from ...interface.settings import EngineSettings, check_server_engine
from ...interface.validated_struct import Checked
from ...supervision.engine_spec import EngineSpec

T = TypeVar("T")


def read_serve_spec(path: str) -> ServeSpec:
    """Raise ``ClickException``."""
    return _read(path, ServeSpec, ServerSettings)


def read_engine_spec(path: str) -> EngineSpec:
    """Raise ``ClickException``."""
    return _read(path, EngineSpec, EngineSettings)


def _read(path: str, kind: type[T], settings: type[Checked]) -> T:
    try:
        data = Path(path).read_bytes()
        raw = msgspec.json.decode(data)
        for parent, checked, values in _settings_in(raw, settings):
            read = checked.read(values, parent)
            if checked is EngineSettings:
                check_server_engine(values, parent)
            values.update({name: getattr(read, name) for name in values if isinstance(getattr(read, name, None), int)})
        return msgspec.convert(raw, type=kind)
    except (OSError, ValueError, msgspec.MsgspecError, InvalidField) as error:
        raise click.ClickException(f"--spec {path}: {error}") from None


def _settings_in(raw: Any, settings: type[Checked]) -> Iterator[tuple[str, type[Checked], dict[str, Any]]]:
    """Locate the settings in a spec file, with their kinds; a value that is not an object is left to the type check."""
    found: list[tuple[str, type[Checked], Any]] = [
        ("settings", settings, raw),
        ("engine", EngineSettings, raw),
        ("dialects", DialectSettings, raw),
    ]
    listed = raw.get("endpoints") if isinstance(raw, dict) else None
    for place, one in enumerate(listed if isinstance(listed, list) else ()):
        found.append((f"endpoints[{place}].engine", EngineSettings, one))
        found.append((f"endpoints[{place}].dialects", DialectSettings, one))
        found.append((f"endpoints[{place}].payload_log", PayloadLog, one))
        found.append((f"endpoints[{place}].canary", Canary, one))
    for parent, checked, holder in found:
        values = holder.get(parent.rpartition(".")[2]) if isinstance(holder, dict) else None
        if isinstance(values, dict):
            yield parent, checked, values
