"""The JSON Schema test suite: what is enforced, what is refused by name, and that no invalid value is ever taken.

``json_schema_test_suite.json`` is json-schema-org's suite as ``jsonschema`` 4.26.0 ships it, with its licence, without
``content`` and ``format-assertion`` (contents and formats are annotations there).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grammar_texts as texts
import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.document import DRAFTS

SUITE = json.loads((Path(__file__).parent / "json_schema_test_suite.json").read_text())["drafts"]
URLS = {f"draft{'-'.join(re.findall('[0-9]+', url)).lstrip('0')}": url for url in DRAFTS}
MAX_TEXTS = 200

# schemas held to, valid values taken, valid values that we do not write (docs/structured-output.md says which), invalid
# values kept out, schemas refused
EXPECTED = {
    "draft2020-12": (270, 443, 167, 353, 144),
    "draft2019-09": (274, 438, 157, 353, 133),
    "draft7": (230, 375, 128, 315, 59),
    "draft6": (214, 327, 116, 311, 51),
    "draft4": (164, 238, 112, 251, 27),
}


def written(value: Any) -> Iterator[str]:
    """Yield a value in compact JSON, with its objects' properties in every order."""
    if isinstance(value, dict):
        orders = itertools.permutations(value) if len(value) <= 4 else [tuple(value)]
        for names in orders:
            for parts in itertools.product(*(written(value[name]) for name in names)):
                pairs = (
                    f"{json.dumps(name, ensure_ascii=False)}:{part}" for name, part in zip(names, parts, strict=True)
                )
                yield "{" + ",".join(pairs) + "}"
    elif isinstance(value, list):
        yield from ("[" + ",".join(parts) + "]" for parts in itertools.product(*map(written, value)))
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


@pytest.mark.parametrize("draft", SUITE)
def test_no_invalid_value_of_the_suite_is_taken(draft: str) -> None:
    """Each schema is enforced or refused with keyword and pointer, and the counts are those of the document."""
    counts: Counter[str] = Counter()
    wrong = []
    for file, cases in SUITE[draft].items():
        for description, schema, examples in cases:
            if isinstance(schema, dict):
                schema = {"$schema": URLS[draft], **schema}
            try:
                made = texts.of("json_schema", schema)
            except InvalidField as error:
                counts["refused"] += 1
                if error.param != "field" or not re.match(r"field(#[^:]*)?: .+ is not allowed; exp", error.message):
                    wrong.append((file, description, error.message))
                continue
            counts["held to"] += 1
            for name, value, valid in examples:
                taken = any(texts.takes(made, text) for text in itertools.islice(written(value), MAX_TEXTS))
                counts[f"{'valid' if valid else 'invalid'} {'taken' if taken else 'not taken'}"] += 1
                if taken and not valid and file != "optional/zeroTerminatedFloats":  # 1.0 may be written 1
                    wrong.append((file, description, name))
    assert wrong == []
    kinds = ("held to", "valid taken", "valid not taken", "invalid not taken", "refused")
    assert tuple(counts[kind] for kind in kinds) == EXPECTED[draft]
