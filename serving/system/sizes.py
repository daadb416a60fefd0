"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

EXAMPLES = "8000000000, 8GB or 7.5GiB"
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?(?:([kmgt]?)b?|([kmgt])ib?)", re.IGNORECASE)


def bytes_of(text: str) -> int | None:
    """Return the number of bytes that ``text`` names (``8000000000``, ``8GB``, ``7.5GiB``); None if it names none."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit, binary = found.groups()
    return int(float(number) * (_BINARY_UNITS[binary.lower()] if binary else _UNITS[(unit or "").lower()]))


def readable(size: int) -> str:
    """Return ``size`` with a decimal unit: ``525 MB``."""
    for unit, factor in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
