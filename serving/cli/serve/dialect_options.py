"""Options of ``mlflow-llm serve`` that are settings of other servers, under the names that they have there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ...interface.dialect_settings import NAMES, DialectSettings

F = TypeVar("F", bound=Callable[..., Any])
_COUNT = click.IntRange(1, 2**31 - 1)
_OPTIONS: dict[str, dict[str, Any]] = {
    "openAiSupport": {"metavar": "WORD", "help": "vllm: /v1/chat/completions has MindIE's format instead of OpenAI's."},
    "fullTextEnabled": {"is_flag": True, "help": "Each chunk of MindIE's streams has the whole text so far."},
    "maxIterTimes": {"type": _COUNT, "help": "Maximum tokens of a reply."},
    "maxSeqLen": {"type": _COUNT, "help": "Maximum tokens of prompt and reply together."},
    "maxInputTokenLen": {"type": _COUNT, "help": "Maximum tokens of a prompt."},
    "maxPrefillTokens": {"type": _COUNT, "help": "Maximum tokens of a step (-C max_num_batched_tokens)."},
    "generateProfile": {
        "type": click.Choice(["seed", "current"]),
        "help": "current: the details of Triton's generate have first_token_cost and decode_cost; seed: both are null.",
    },
    "generateEndText": {"is_flag": True, "help": "The last event of Triton's generate_stream shows </s>."},
    "allowedLocalMediaPath": {
        "metavar": "DIR",
        "help": "Directory below which images that messages name may be read (default: none).",
    },
    "allowedMediaDomains": {
        "multiple": True,
        "metavar": "HOST",
        "help": "Host from which images that messages name may be fetched (default: none); repeatable.",
    },
    "embeddingTokenIds": {
        "is_flag": True,
        "help": "Inputs of embeddings may be any token ids: all callers use the model's own tokenizer.",
    },
}


def dialect_options(command: F) -> F:
    """Return ``command`` with an option for each of ``DialectSettings``."""
    for name in reversed(NAMES):
        command = click.option(f"--{name}", name, **_OPTIONS[name])(command)
    return command


def dialects_of(given: dict[str, Any]) -> DialectSettings:
    """Pop and parse the dialect options in ``given``. Raises ``InvalidField``."""
    said = {name: given.pop(name) for name in NAMES}
    return DialectSettings.read({name: value for name, value in said.items() if value not in (None, False, ())})
