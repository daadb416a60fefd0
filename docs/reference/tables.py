"""A hook of MkDocs: tables of settings, environment variables and errors, made from the code that they describe."""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface import errors
from mlflow_llm.serving.interface.validated_struct import Checked

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^\{\{ (\w+)(?:: ([\w.]+))? \}\}$", re.MULTILINE)
VARIABLE = re.compile(r"\bMLFLOW_LLM_[A-Z_]+\b")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``{{ settings: module.Class }}``, ``{{ environment }}`` and ``{{ errors }}``."""
    makers = {"settings": settings, "environment": environment, "errors": error_tree}
    return DIRECTIVE.sub(lambda found: makers[found[1]](*[found[2]] if found[2] else []), markdown)


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings(path: str) -> str:
    module, _, name = path.rpartition(".")
    cls: type[Checked] = getattr(importlib.import_module(module), name)
    meanings = cls.meanings()
    rows = [
        (f"`{name}`", f"`{json.dumps(value)}`", allowed, code(meanings[name]))
        for name, value, allowed in cls.described()
    ]
    return table(("setting", "default", "allowed", "meaning"), rows)


def code(docstring: str) -> str:
    """Markdown of what a docstring says."""
    return re.sub(r"``([^`]*)``", r"`\1`", docstring)


def environment() -> str:
    """Return every variable of ours that the code reads, with the files that name it."""
    places: dict[str, set[str]] = {}
    for folder in ("flavors", "plugin", "serving"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in VARIABLE.findall(file.read_text(encoding="utf-8")):
                places.setdefault(name, set()).add(file.relative_to(ROOT).as_posix())
    rows = [
        (f"`{name}`", ", ".join(f"`{place}`" for place in sorted(where)[:3])) for name, where in sorted(places.items())
    ]
    return table(("variable", "read or told in"), rows)


APIS = {"openai": "OpenAI", "anthropic": "Anthropic", "databricks": "Databricks", "mlflow": "MLflow"}


def error_tree() -> str:
    rows = []
    for cls in errors.walk():
        depth = len([base for base in cls.__mro__ if issubclass(base, errors.ServingError)]) - 1
        error = cls("a", "b", "c") if cls is errors.InvalidField else _example(cls)
        codes = [_code(json.loads(DIALECTS[name].error(error).body)) for name in APIS]
        rows.append((f"{'· ' * depth}`{cls.__name__}`", str(cls.status), *(f"`{code}`" for code in codes)))
    tree = (errors.__doc__ or "").partition("::\n\n")[2].partition("\n\nA class")[0]
    return f"{table(('class', 'status', *APIS.values()), rows)}\n\n```text\n{textwrap.dedent(tree)}\n```"


def _example(cls: type[errors.ServingError]) -> errors.ServingError:
    found = cls.__new__(cls)
    errors.ServingError.__init__(found, "message")
    return found


def _code(body: Any) -> str:
    told = body.get("error", body)
    return str(told.get("code") or told.get("error_code") or told.get("type"))
