"""Prompt templates of ``mlflow.transformers``, such as ``"Question: {prompt}\\nAnswer:"``, as chat templates."""

from __future__ import annotations

import json
from typing import Any

from ....serving.interface.errors import PackagingError, shown
from .transformers_parts import loaded_tokenizer

PLACE = "\x00prompt\x00"
ALONE = "this model takes one message of a user: it was saved with a prompt template, which has place for one text"


def chat_template_of(template: str, tokenizer: Any) -> dict[str, str]:
    """Return the chat templates of a model with a prompt ``template``: the user's one message takes the prompt's place.

    The tokens are those that the pipeline makes: what the tokenizer puts before a text comes first. The tokenizer's own
    chat template is kept beside it, as ``tokenizer``. Raises ``PackagingError``.
    """
    loaded = loaded_tokenizer(tokenizer)
    try:
        pieces = template.format(prompt=PLACE).split(PLACE)
    except (LookupError, ValueError):
        raise PackagingError(f"prompt_template: {shown(template)} is not allowed; expected one {{prompt}}") from None
    first = tokens_before(loaded, "prompt_template")
    text = " + messages[0]['content'] + ".join(map(_literal, [first + pieces[0], *pieces[1:]]))
    check = "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    refusal = f"{{{{- raise_exception({_literal(ALONE)}) -}}}}{{%- endif -%}}"
    found = {"default": f"{check}{refusal}{{{{- {text} -}}}}"}
    own = loaded.chat_template
    if isinstance(own, dict):
        return found | {name if name != "default" else "tokenizer": one for name, one in own.items()}
    return found | ({"tokenizer": own} if own else {})


def tokens_before(tokenizer: Any, what: str) -> str:
    """Return the special tokens that the tokenizer puts before a text. Raises ``PackagingError`` for some after it.

    ``what`` is the template in the message."""
    whole = tokenizer("a").input_ids
    plain = tokenizer("a", add_special_tokens=False).input_ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    if start is None or start + len(plain) != len(whole):
        raise PackagingError(f"{what}: the tokenizer ends each text with special tokens, which no chat does")
    return "".join(tokenizer.convert_ids_to_tokens(whole[:start]))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
