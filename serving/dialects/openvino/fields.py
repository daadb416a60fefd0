"""The request fields of OpenVINO Model Server: OpenAI's, with their own defaults, limits and beam search.

Source of the format: its document of ``/v3/chat/completions``. The fields that it lists as unsupported are read as in
this server's OpenAI dialect, vLLM's fields included; vLLM's other fields are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...interface.errors import InvalidField
from ...interface.readers import integer, number, one_of, refused
from ...interface.request import RawBeams, RawChat, RawCompletion, RawRequest, RawSampling, Task
from ..fields.beam_fields import EARLY, check_nothing_drawn, take_beams
from ..fields.decode import decode
from ..fields.fields import Field, Table, task_of
from ..fields.tables import MAX_TOKENS, OPENAI

IGNORE_EOS_MAX_TOKENS = 4000
DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "n": 1,
}
DIVERSITY_PENALTY = 1.0
_SEARCH = "beam search (best_of above 1)"


def _shared(name: str, /, **changes: Any) -> Field:
    """Return the field as OpenAI's chats have it, with this document's ``changes``."""
    return OPENAI["chat"].fields[name].replace(**changes)


FIELDS = (
    _shared(
        "ignore_eos",
        description=f"continue after the end-of-text token; max_tokens is then at most {IGNORE_EOS_MAX_TOKENS}, and by "
        "default that or the rest of the context",
    ),
    _shared("n", description="texts to return, at most best_of"),
    _shared(
        "best_of",
        description="above 1: beam search with this many beams that returns the best n texts; not streamed",
        default=1,
    ),
    _shared("use_beam_search", description="implied by best_of above 1", default=None),
    _shared(
        "length_penalty",
        description=f"{_SEARCH} divides the log probability of a text by its length to this power",
        default=1.0,
    ),
    _shared(
        "diversity_penalty",
        description=f"{_SEARCH} with num_beam_groups above 1: subtracted from the log probability of a token for each "
        "earlier group that chose it; no effect with one group",
        default=DIVERSITY_PENALTY,
    ),
    _shared(
        "num_beam_groups",
        description=f"{_SEARCH}: groups of beams that diversity_penalty makes differ; a divisor of best_of",
        default=1,
    ),
    _shared("temperature", description="above 0: sampling", default=0.0),
    _shared("top_p", default=1.0),
    _shared("top_k", read=integer(0, MAX_TOKENS), description="the k most probable tokens; 0: all", default=0),
    _shared("repetition_penalty", read=number(0, 100, above=True), default=1.0),
    _shared("seed", default=0),
)
REFUSED = {
    "prompt_logprobs": refused("echo with logprobs at /v3/completions scores a prompt"),
    "detokenize": one_of(True, why="replies are texts"),
    "spaces_between_special_tokens": one_of(True, why="tokens are joined as the tokenizer joins them"),
    "logits_processors": refused("code does not come with a request; logit_bias, bad_words and grammars do"),
    "truncate_prompt_tokens": refused("a prompt that is too long is refused, not cut"),
}


def _table(task: Task) -> Table:
    table = OPENAI[task]
    own = {field.name: field for field in FIELDS}
    return Table(required=table.required, fields={**table.fields, **own}, refused={**table.refused, **REFUSED})


TABLES: Mapping[Task, Table] = {
    "chat": _table("chat"),
    "completions": _table("completions"),
    "embeddings": OPENAI["embeddings"],
}


def read_request(body: dict[str, Any], task: Task | None) -> RawRequest:
    """Read a body. Raises ``InvalidField``."""
    name = task_of(body, task)
    if name not in TABLES:
        raise InvalidField("body", sorted(map(str, body))[:8], "a chat, a completion or embeddings")
    raw = decode(TABLES, body, name, _beams_of)
    if raw.model is None:
        raise InvalidField("model", None, "the name of a model")
    if not isinstance(raw, RawChat | RawCompletion):
        return raw
    return msgspec.structs.replace(raw, sampling=_with_defaults(raw.sampling))


def _with_defaults(asked: RawSampling) -> RawSampling:
    """Add the document's defaults, which win over a model's own: any server gives the same text for a request."""
    filled = {name: value for name, value in DEFAULTS.items() if getattr(asked, name) is None}
    if asked.ignore_eos:
        if asked.max_tokens is None:
            filled |= {"max_tokens": IGNORE_EOS_MAX_TOKENS, "clip_max_tokens": True}
        elif asked.max_tokens > IGNORE_EOS_MAX_TOKENS:
            raise InvalidField("max_tokens", asked.max_tokens, f"at most {IGNORE_EOS_MAX_TOKENS} with ignore_eos")
    return msgspec.structs.replace(asked, **filled)


def _beams_of(found: dict[str, Any], sampling: Mapping[str, Any], body: Mapping[str, Any]) -> RawBeams | None:
    """Remove the fields of a beam search from ``found`` and return the search, or None if none is asked for."""
    given = take_beams(found)
    width, n, use = given.pop("best_of", 1), sampling.get("n", 1), given.pop("use", None)
    if n > width:
        raise InvalidField("n", n, f"an integer in [1, best_of ({width})]")
    if use is False and width > 1:
        raise InvalidField("use_beam_search", False, "null or true with best_of above 1, which is a beam search")
    if width == 1 and not use:
        for name, nothing in _NO_SEARCH.items():
            if name in given and given[name] not in nothing:
                field = _NAMES[name]
                raise InvalidField(field, body[field], f"null or {nothing[0]} unless best_of is above 1")
        return None
    check_nothing_drawn(sampling, body, "best_of above 1")
    if found.get("stream"):
        raise InvalidField("stream", True, "false with best_of above 1: a text is known when its search has ended")
    groups = given.pop("num_groups", 1)
    if width % groups:
        raise InvalidField("num_beam_groups", groups, f"a divisor of best_of, {width}")
    penalty = given.pop("diversity_penalty", DIVERSITY_PENALTY)
    if "early_stopping" in given:
        given["early_stopping"] = EARLY[given["early_stopping"]]
    if groups > 1:
        given |= {"num_groups": groups, "diversity_penalty": penalty}
    return RawBeams(width=width, field="best_of", **given)


# the values that search fields may have without a search: their defaults
_NO_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "diversity_penalty": (DIVERSITY_PENALTY, 0.0),
    "num_groups": (1,),
    "early_stopping": (False,),
}
_NAMES = {"num_groups": "num_beam_groups"} | {
    name: name for name in ("length_penalty", "diversity_penalty", "early_stopping")
}
