"""Chat templates: collected when a model is logged, and rendered once to prove that they work.

The template ``default`` is used for chat requests; others (``tool_use``, ``rag``, a caller's own) are stored beside it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, shown
from .manifest import DEFAULT_TEMPLATE

logger = logging.getLogger(__name__)

DEFAULT = "default"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

Templates = str | os.PathLike[str] | dict[str, Any] | list[dict[str, str]] | None


def collect(given: Templates, tokenizer: Any) -> dict[str, str]:
    """Return template texts by name: those ``given``, else the tokenizer's own; empty if there are none.

    Raises ``PackagingError``.
    """
    chosen = given if given is not None else getattr(tokenizer, "chat_template", None)
    if chosen is None:
        return {}
    if isinstance(chosen, list):  # the form in tokenizer_config.json
        chosen = dict(map(_entry, chosen))
    if not isinstance(chosen, dict):
        return {DEFAULT: _text(chosen)}
    for name in chosen:
        _check_name(name)
    templates = {name: _text(template) for name, template in chosen.items()}
    if DEFAULT not in templates and len(templates) == 1:
        templates = {DEFAULT: next(iter(templates.values()))}
    if DEFAULT not in templates:
        raise PackagingError(f'chat_template: none of {", ".join(sorted(templates))} is named "{DEFAULT}"')
    return templates


def check(templates: dict[str, str], tokenizer: Any, *, parts: bool = False) -> None:
    """Render each template as serving does (``tasks.rendering``). Raises ``PackagingError`` with the reason.

    With ``parts``, the content of messages is a list of parts, as for models that read images.

    The rendered text must contain the user's message. What a template needs for that besides the messages
    (``tasks.template_trial``) is named in a warning.
    """
    from ....serving.tasks.prompt.template_trial import check_template

    for name, template in templates.items():
        if needed := str(check_template(name, template, tokenizer, parts=parts)):
            logger.warning("chat_template %r: a request must give %s", name, needed)


def write(templates: dict[str, str], root: Path) -> None:
    """Write the templates under the model root."""
    for name, template in templates.items():
        file = root / DEFAULT_TEMPLATE if name == DEFAULT else root / "chat_templates" / f"{name}.jinja"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(template.encode())


def stored(root: Path) -> dict[str, str]:
    """Return the absolute paths of the templates under a model root, by name."""
    found = {DEFAULT: str(root / DEFAULT_TEMPLATE)} if (root / DEFAULT_TEMPLATE).is_file() else {}
    return found | {file.stem: str(file) for file in sorted((root / "chat_templates").glob("*.jinja"))}


def _entry(given: Any) -> tuple[str, Any]:
    """Return the name and template of a list entry. Raises ``PackagingError``."""
    if not isinstance(given, dict) or given.keys() != {"name", "template"}:
        allowed = 'expected a list of {"name": …, "template": …}'
        raise PackagingError(f"chat_template: the entry {shown(given)} is not allowed; {allowed}")
    _check_name(given["name"])
    return given["name"], given["template"]


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PackagingError(f"chat_template: the name {shown(name)} is not allowed; expected letters, digits, _.-")


def _text(template: Any) -> str:
    """Return a template's text; a path (a path object, or a string that names an existing file) is read."""
    if isinstance(template, os.PathLike):
        return _read(Path(template))
    if not isinstance(template, str) or not template.strip():
        raise PackagingError(f"chat_template: {shown(template)} is not allowed; expected a template or its path")
    if "\n" not in template and "{" not in template:
        if Path(template).is_file() or template.endswith((".jinja", ".jinja2", ".j2")):
            return _read(Path(template))
        raise PackagingError(f"chat_template: {shown(template)} is neither a file nor a template")
    return template


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PackagingError(f"chat_template: {path.name} cannot be read: {type(error).__name__}") from None
