"""Numbers of bytes as options of commands."""

from __future__ import annotations

from typing import Any

import click

from ...system.sizes import EXAMPLES, bytes_of


class Size(click.ParamType):
    """``8000000000``, ``8GB``, ``7.5GiB``: a number of bytes, at least 1."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        size = bytes_of(str(value))
        if size is None:
            self.fail(f"{value!r} is not a number of bytes, such as {EXAMPLES}", param, ctx)
        if size < 1:
            self.fail(f"{value!r}: at least 1 byte", param, ctx)
        return size
