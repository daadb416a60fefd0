"""Names of models on the command line: a place on this machine, a URI, a registered model's name, or a hub id.

The first of these that fits is taken:

1. what has a scheme (``models:/…``, ``runs:/…``) is that URI; ``models:/NAME`` is its latest version,
2. a model's directory or a GGUF file that is here,
3. ``NAME``, ``NAME/VERSION`` or ``NAME@ALIAS``: a registered model, of which ``NAME`` is the latest version,
4. ``ORG/NAME``: a hub id.

A directory thus comes before a registered model of the same name, which ``models:/NAME`` always finds.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..model_files.model_uri import LATEST, RegisteredModel, is_path, parse
from ..system.escape import visible_line
from . import start_log

REGISTERED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?:/(?P<version>[0-9]+)|@(?P<alias>[\w.-]+))?")
MODEL_FILES = ("MLmodel", "manifest.json", "config.json", "modules.json", "adapter_config.json")


def located(given: str) -> str:
    """Return the URI or path that ``given`` stands for, and say on standard error where there was a choice."""
    if not is_path(given):
        named = parse(given)
        is_bare = named is not None and named.version is None and named.alias is None
        return f"models:/{named.name}/{LATEST}" if named is not None and is_bare else given
    found = REGISTERED.fullmatch(given)
    path = Path(given).expanduser()
    is_here = path.is_file() or any((path / name).is_file() for name in MODEL_FILES)
    if found is None or is_here or given.lower().endswith(".gguf"):
        if found is not None and is_here:
            start_log.say(
                f"{visible_line(given)} is a model here, in {visible_line(str(path.absolute()))}; "
                f"a registered model of that name is models:/{given}"
            )
        return given
    named = RegisteredModel(name=found["name"], version=found["version"], alias=found["alias"])
    uri = named.uri if found["version"] or found["alias"] else f"{named.uri}/{LATEST}"
    start_log.say(f"{visible_line(given)}: no model's directory or file here; looking for {uri}")
    return uri


def named_version(given: str, fixed: str) -> str | None:
    """Return the line that says which version ``fixed`` is taken for what was ``given``; None if it was that one."""
    return None if not fixed or fixed == given or parse(fixed) is None else f"{given} is {fixed}"
