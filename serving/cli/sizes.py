"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?(?:([kmgt]?)b?|([kmgt])ib?)", re.IGNORECASE)


class Size(click.ParamType):
    """``8000000000``, ``8GB``, ``7.5GiB``: a number of bytes, at least 1."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a number of bytes, such as 8000000000, 8GB or 7.5GiB", param, ctx)
        number, unit, binary = found.groups()
        size = int(float(number) * (_BINARY_UNITS[binary.lower()] if binary else _UNITS[(unit or "").lower()]))
        if size < 1:
            self.fail(f"{value!r}: at least 1 byte", param, ctx)
        return size
