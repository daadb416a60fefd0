"""The chat template and the tokenizer that training leaves beside an adapter (TRL, transformers' ``Trainer``).

The adapter's requests use its template. Its tokenizer is never served: one that makes other tokens of a text than the
model's is refused, so that no answer is silently wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....serving.interface.bundle import ADAPTER_TEMPLATE
from ....serving.interface.errors import PackagingError
from ....serving.model_files.adapter_template import own_template
from ....serving.tasks.prompt.adapter_tokenizer import difference, has_tokenizer, other_end
from ..model import templates as chat_templates
from .tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


def place_adapter_templates(
    adapters: dict[str, Any] | None,
    root: Path,
    tokenizer: Any,
    templates: Mapping[str, str],
    *,
    given: bool,
    parts: bool = False,
    trust_remote_code: bool = False,
) -> bool:
    """Write the templates that adapters have of their own under ``root``; return whether there are any.

    ``templates`` are the model's; with ``given``, the caller has named them, for the adapters too. Raises
    ``PackagingError`` for a tokenizer that differs, and for a template that cannot be served.
    """
    found = False
    for name, source in (adapters or {}).items():
        if not isinstance(source, str | os.PathLike):
            continue
        directory = Path(source).expanduser()
        own = _template(name, directory, tokenizer, trust_remote_code=trust_remote_code)
        if own is None or own == templates.get(chat_templates.DEFAULT):
            continue
        if given:
            logger.warning("adapters: %r has a chat template of its own, which chat_template= replaces", name)
            continue
        chat_templates.check({f"adapter:{name}": own}, tokenizer, parts=parts)
        (root / "adapters" / name / ADAPTER_TEMPLATE).write_bytes(own.encode())
        found = True
    return found


def _template(name: str, directory: Path, tokenizer: Any, *, trust_remote_code: bool) -> str | None:
    """Return the template of the adapter in ``directory``, None if it has none. Check the tokenizer beside it."""
    own: Any = None
    if has_tokenizer(directory):
        beside = load_tokenizer(directory, trust_remote_code=trust_remote_code)
        _check_same(name, beside, tokenizer)
        own = beside.chat_template
    else:
        own = own_template(directory)
    collected = chat_templates.collect(own, None) if own else {}
    return collected.get(chat_templates.DEFAULT)


def _check_same(name: str, own: Any, tokenizer: Any) -> None:
    """Raise ``PackagingError`` if a text has other tokens for the adapter than for the model; warn of another end."""
    if (found := difference(own, tokenizer)) is not None:
        raise PackagingError(
            f"adapters: {name!r}: its tokenizer differs from the model's: {found}; merge the adapter into its base and"
            " save that, or pass tokenizer= with the one it was trained with"
        )
    if (end := other_end(own, tokenizer)) is not None:
        logger.warning("adapters: %r %s: name both in generation_config= (eos_token_id)", name, end)
