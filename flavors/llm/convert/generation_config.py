"""Default sampling parameters of a model as transformers' ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..model import generation_config

NAMES = {field: name for name, field in generation_config.FIELDS.items()}
SAMPLED = frozenset({"temperature", "top_p", "top_k", "min_p", "typical_p"})


def write(source: Path, target: Path, defaults: dict[str, Any]) -> dict[str, Any]:
    """Write the ``defaults`` of request fields to generation_config.json in ``target``.

    The file of the model in ``source`` stays as it is where it says the same. Returns the defaults for which
    transformers has no setting.
    """
    found, _ = generation_config.read(source)
    unsaid = {field: value for field, value in defaults.items() if field not in NAMES}
    said = {field: value for field, value in defaults.items() if field in NAMES}
    file = target / generation_config.FILE
    original = source / generation_config.FILE
    if said == found:
        if original.is_file():  # a merge has written its own
            file.write_bytes(original.read_bytes())
        return unsaid
    values = json.loads(original.read_text(encoding="utf-8")) if original.is_file() else {}
    for name in (*generation_config.FIELDS, "do_sample"):
        values.pop(name, None)
    if said.get("temperature") == 0:
        values["do_sample"] = False
        said = {field: value for field, value in said.items() if field not in SAMPLED}
    elif SAMPLED & said.keys():
        values["do_sample"] = True
    values |= {NAMES[field]: value for field, value in said.items()}
    if isinstance(stop := values.get("stop_strings"), str):
        values["stop_strings"] = [stop]
    if any(isinstance(one, str) for one in values.get("bad_words_ids") or ()):
        unsaid["bad_words"] = values.pop("bad_words_ids")  # words, where transformers has ids
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return unsaid
