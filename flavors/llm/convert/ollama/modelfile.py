"""Parse Ollama's Modelfile: one instruction after another, as https://docs.ollama.com/modelfile describes them.

A value ends with its line. One in single or triple double quotes may have several lines. A line that begins with ``#``
is a comment. Names of instructions may be written in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from .....serving.interface.errors import PackagingError, shown

INSTRUCTIONS = (
    *("from", "parameter", "template", "system", "adapter", "license", "message", "requires"),
    *("renderer", "parser", "draft", "capability"),
)
ROLES = ("system", "user", "assistant")
LONG, SHORT = '"""', '"'
MAX_BYTES = 8 << 20


class Instruction(Struct, frozen=True, kw_only=True):
    """An instruction; of ``parameter`` and ``message``, ``key`` is the parameter or the role."""

    name: str
    value: str
    line: int
    key: str = ""


def read(file: Path) -> list[Instruction]:
    """Return the instructions of the Modelfile ``file``. Raises ``PackagingError``, which names the line."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise PackagingError(f"{file.name}: it has more than {MAX_BYTES} bytes")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PackagingError(f"{shown(str(file))} cannot be read as a Modelfile: {type(error).__name__}") from None
    found = list(parse(text))
    if not any(one.name == "from" for one in found):
        raise PackagingError(f"{file.name}: it has no FROM, which names the model")
    return found


def parse(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Modelfile's ``text``. Raises ``PackagingError``."""
    lines = text.replace("\r\n", "\n").split("\n")
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        number = place
        name = line.split()[0]
        if name.lower() not in INSTRUCTIONS:
            known = ", ".join(one.upper() for one in INSTRUCTIONS)
            raise PackagingError(f"line {number}: {shown(name)} is not an instruction; expected one of {known}")
        value = line.strip()[len(name) :].lstrip()
        key = ""
        if name.lower() in ("parameter", "message"):
            key = value.split(None, 1)[0] if value else ""
            value = value[len(key) :].lstrip()
        while (closed := _unquoted(value)) is None and place < len(lines):
            value += "\n" + lines[place]
            place += 1
        if closed is None:
            raise PackagingError(f"line {number}: the quotes of {name.upper()} are not closed")
        if not closed and name.lower() not in ("system", "template", "license"):
            raise PackagingError(f"line {number}: {name.upper()} has no value")
        if name.lower() == "message" and key not in ROLES:
            raise PackagingError(f"line {number}: MESSAGE {shown(key)}: expected one of {', '.join(ROLES)}")
        yield Instruction(name=name.lower(), value=closed, line=number, key=key)


def _unquoted(value: str) -> str | None:
    """Return a value without its quotes; None if they are not closed yet."""
    text = value.strip()
    for quotes in (LONG, SHORT):
        if text.startswith(quotes):
            closed = len(text) >= 2 * len(quotes) and text.endswith(quotes)
            return text[len(quotes) : -len(quotes)] if closed else None
    return text
