"""The fields of each document with their expected effect or refusal: the data of docs/dialects.md.

``tests/real/test_conformance.py`` sends every row to a real server, ``tests/serving/dialects/test_dialects_page.py``
holds the page to the rows and the rows to the dialects' fields. The page is made by

    python tests/conformance.py > docs/dialects.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["whole", "stream"]
BOTH: tuple[Mode, ...] = ("whole", "stream")
WHOLE: tuple[Mode, ...] = ("whole",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer as a client sees it. ``events`` are a stream's; a whole answer is its only one. ``completion`` and
    ``prompt`` are tokens as the reply counts them, None where it does not."""

    status: int
    events: list[dict[str, Any]]
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    prompt: int | None = None
    completion: int | None = None

    @property
    def first(self) -> dict[str, Any]:
        return self.events[0]

    @property
    def text(self) -> str:
        return self.texts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request that has the field, beside the part's own. ``refused``: words of the error, which names the field;
    None where it is honoured, and then ``shows`` says what is to be seen. ``note`` is for the page. ``path`` and
    ``endpoint`` are where it goes, where not to the part's own. ``named``: what the error calls the field."""

    body: Mapping[str, Any]
    refused: str | None = None
    shows: Callable[[Seen, Seen], object] = lambda seen, plain: True
    note: str = ""
    modes: tuple[Mode, ...] = BOTH
    endpoint: str = "assistant"
    named: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kind of request of a document. ``document`` and ``of_document``: its name, and the fields that it names.

    ``request``: path and headers and body of a row in a mode. ``read``: an answer's status, headers and bytes.
    """

    name: str
    title: str
    document: str
    dialect: str
    task: str
    of_document: tuple[str, ...]
    rows: Mapping[str, Row]
    request: Callable[[Row, Mode], tuple[str, dict[str, str], bytes]]
    read: Callable[[int, Mapping[str, str], bytes], Seen]
    modes: tuple[Mode, ...] = BOTH


TEST = "test_conformance.py::test_field"
HEAD = """\
# Dialects

Every field of the supported API documents, and what the server does with it. Each row is a test: a request with that
field to a running server with real weights, whole and streamed where both are possible, whose usage is compared with
the ledger (`tests/real/test_conformance.py`). `python tests/conformance.py` generates this page from those tests.
Fields marked * are not in the document; they are ours, OpenAI's or vLLM's, and accepted too. A field that is not listed
is refused by name.

[Request fields](fields.md) says what each field means, and [moving to mlflow-llm](migrate.md) how to move a client.
"""


def page(parts: tuple[Part, ...]) -> str:
    """Return the whole document."""
    return HEAD + "".join(_section(part) for part in parts)


def _section(part: Part) -> str:
    lines = [f"\n## {part.title}\n\nDocument: {part.document}.\n\n| field | | test |\n|---|---|---|\n"]
    for name, row in part.rows.items():
        mark = "" if name in part.of_document else " *"
        cells = (f"`{name}`{mark}", outcome(part, row), f"`{TEST}[{test_id(part, name)}]`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def outcome(part: Part, row: Row) -> str:
    """Return the page's description of a row."""
    if row.refused is not None:
        return f"refused: {row.refused}" + (f" ({row.note})" if row.note else "")
    modes = [mode for mode in part.modes if mode in row.modes]
    only = f"; {'not streamed' if modes == ['whole'] else 'streamed only'}" if len(modes) < len(part.modes) else ""
    return "honoured" + only + (f"; {row.note}" if row.note else "")


def test_id(part: Part, name: str) -> str:
    """Return the id of a row's test."""
    return f"{part.name}-{name}"


test_id.__test__ = False  # type: ignore[attr-defined]  # to pytest a function of this name is one


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of a stream's events."""
    found = []
    for event in data.decode().replace("\r\n", "\n").split("\n\n"):
        payload = event.strip().removeprefix("data:").strip()
        if payload and payload != "[DONE]":
            found.append(json.loads(payload))
    return found


def is_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("Content-Type", "").startswith("text/event-stream")


def declared(schema: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of a dialect's fields by its schema, those of ``parameters`` and named tensors by themselves."""
    for kind in ("anyOf", "oneOf"):
        for option in schema.get(kind, ()):
            yield from declared(option)
    for name, described in schema.get("properties", {}).items():
        within = described.get("items", {}).get("properties", {}).get("name", {}).get("enum")
        inner = list(declared(described)) if name == "parameters" else []
        if within:
            yield from within
        elif inner:
            yield from inner
        else:
            yield name


if __name__ == "__main__":
    from conformance_rows import PARTS

    print(page(PARTS), end="")
