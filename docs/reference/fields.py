"""Prints docs/fields.md, the request fields of every dialect, from the dialects' own schemas:

python docs/reference/fields.py > docs/fields.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.request import Task

HEAD = """\
# Request fields

The fields of request bodies in each dialect, and what they mean. `python docs/reference/fields.py` generates this page,
and a test compares it with the code.

- `yes`: the field is accepted.
- `refused`: the field is known. Values that ask for nothing, such as null, are accepted; all others are refused by
  name.
- empty: there is no such field, and a request that has it is refused.

[Dialects](dialects.md) has what a running server does with each field. Types and ranges are in a server's
`/openapi.json`, and on its page `/docs`.
"""
NAMES = {
    "openai": "OpenAI",
    "responses": "Responses",
    "anthropic": "Anthropic",
    "rerank": "Rerank",
    "databricks": "Databricks",
    "mlflow": "MLflow",
    "openvino": "OpenVINO",
    "mindie": "MindIE",
    "generate": "MindIE generate",
    "triton-generate": "Triton generate",
    "kserve": "KServe",
}
TITLES: Mapping[Task, str] = {
    "chat": "Chats",
    "completions": "Completions",
    "embeddings": "Embeddings",
    "score": "Scores",
}
REFUSED = "(refused where it asks for something)"


def page() -> str:
    """Return the whole document."""
    return HEAD + "".join(section(task) for task in get_args(Task))


class Meaning(NamedTuple):
    """``taken`` False: nothing may be asked of the field."""

    text: str
    taken: bool


def section(task: Task) -> str:
    dialects = [name for name, dialect in DIALECTS.items() if task in dialect.request_schemas]
    rows: dict[str, dict[str, Meaning]] = {}
    for dialect in dialects:
        for name, meaning in fields(DIALECTS[dialect].request_schemas[task]):
            meanings = rows.setdefault(name, {})
            if dialect not in meanings or not meanings[dialect].taken:  # in another of a body's forms it may be
                meanings[dialect] = meaning
    lines = [("field", *(NAMES.get(name, name) for name in dialects), "meaning")]
    lines.append(tuple("---" for _ in lines[0]))
    for name, meanings in sorted(rows.items()):
        lines.append((f"`{name}`", *(_cell(meanings.get(dialect)) for dialect in dialects), _meaning(meanings)))
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"\n## {TITLES[task]}\n\n{table}\n"


def fields(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Meaning]]:
    """Yield the properties of ``schema``; of an object ``parameters`` those within it, of a list of named tensors the
    names that there are."""
    for kind in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(kind, ()):
            yield from fields(option, prefix)
    for name, described in schema.get("properties", {}).items():
        within = described.get("items", {}).get("properties", {}).get("name", {})
        if "enum" in within:
            told = within.get("x-descriptions", {})
            yield from ((f"{prefix}{name}[{one}]", Meaning(told.get(one, ""), True)) for one in within["enum"])
            continue
        inner = [] if name != "parameters" else list(fields(described, f"{prefix}parameters."))
        if inner:
            yield from inner
        else:
            yield prefix + name, meaning_of(described)


def meaning_of(described: Mapping[str, Any]) -> Meaning:
    text = re.sub(r"\s+", " ", str(described.get("description", ""))).strip()
    return Meaning("" if text == REFUSED else text, takes_something(described))


def takes_something(schema: Mapping[str, Any]) -> bool:
    """Return whether there is a value other than null, false and what is empty."""
    if "anyOf" in schema:
        return any(takes_something(option) for option in schema["anyOf"])
    return schema.get("type") != "null" and any(schema.get("enum", [True]))


def _cell(meaning: Meaning | None) -> str:
    return "" if meaning is None else "yes" if meaning.taken else "refused"


def _meaning(meanings: Mapping[str, Meaning]) -> str:
    """Return what the first dialect says, then what others say otherwise."""
    said: dict[str, list[str]] = {}
    for dialect, meaning in meanings.items():
        if meaning.text:
            said.setdefault(meaning.text, []).append(NAMES.get(dialect, dialect))
    first, *others = said or [""]
    return "; ".join([first, *(f"{', '.join(said[other])}: {other}" for other in others)])


if __name__ == "__main__":
    print(page(), end="")
