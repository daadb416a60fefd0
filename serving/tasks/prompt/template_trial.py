"""Finds out what a chat template needs of a request, by rendering short conversations.

Most templates write any conversation. Some need a variable of ``chat_template_kwargs``, some take one turn alone, and
some read the content of messages only as a list of parts. A model with such a template is packaged, and its requests
are refused by the name of what they lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...interface.errors import PackagingError
from ...sandbox import Ended, Exceeded, NoProcess, Refused
from .conversation import RESERVED
from .rendering import Renderer, TemplateReads, check_length, read_template

SYSTEM = {"role": "system", "content": "Answer in one word."}
TURNS = [
    {"role": "user", "content": "What colour is grass?"},
    {"role": "assistant", "content": "Green."},
    {"role": "user", "content": "And the clear sky?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}
DEFAULT_TEMPLATE = "default"  # answers chats; others may be for chats with tools or documents
MAX_VALUES = 48  # values tried for the variables of a template that needs some
_PARTS = re.compile(r"\bfor\b[^%]*\bcontent\b|content['\"\]]*\s*\[\s*0")
_QUOTED = re.compile(r"""'([^'\\\n]{1,64})'|"([^"\\\n]{1,64})\"""")
_OWN = RESERVED | {
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "raise_exception",
    "strftime_now", "enable_thinking", "thinking", "additional_special_tokens", "namespace", "range",
}  # fmt: skip


class Needs(NamedTuple):
    """The needs of a template: ``variables`` by name, and ``one_turn`` of the user alone. With ``parts``, the content
    of messages has to be rendered as a list of parts."""

    variables: tuple[str, ...] = ()
    one_turn: bool = False
    parts: bool = False

    def __str__(self) -> str:
        named = [f"chat_template_kwargs.{name}" for name in self.variables]
        return " and ".join([*named, *["one message of the user, without further turns"] * self.one_turn])


class Text(Protocol):
    """The rendering of a conversation; raises any error."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, parts: bool) -> str: ...


def render_text(tokenizer: Any, source: str) -> Text:
    """Return a function that renders conversations with one template, as text or as parts."""
    renderers = {parts: Renderer(tokenizer, parts=parts) for parts in (False, True)}

    def text(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, parts: bool) -> str:
        return renderers[parts].text(messages, source, variables)

    return text


class Attempt(NamedTuple):
    """A conversation in which the text of the last message must appear."""

    messages: list[dict[str, str]]
    variables: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple, which nothing changes
    parts: bool = False


def attempts(source: str, reads: TemplateReads, *, parts: bool, named: bool) -> Iterator[Attempt]:
    """Yield what is tried, the conversations that ask least of a request first.

    With ``parts``, content is always a list of parts. ``named`` templates are for chats with tools or documents too.
    """
    forms = (True,) if parts else (False, True) if _PARTS.search(source) else (False,)
    chats = ([SYSTEM, *TURNS], TURNS)
    short = ([SYSTEM, TURNS[0]], TURNS[:1])
    yield from (Attempt(chat, {}, form) for form in forms for chat in chats)
    if named:
        own: tuple[dict[str, Any], ...] = ({"tools": [TOOL]}, {"documents": [{"title": "Sky", "text": "It is blue."}]})
        yield from (Attempt(TURNS, given, form) for form in forms for given in own)
    yield from (Attempt(chat, {}, form) for form in forms for chat in short)
    unknown = sorted((reads.variables or frozenset()) - _OWN)
    if unknown:
        for value in _values(source):
            given = dict.fromkeys(unknown, value)
            yield from (Attempt(chat, given, form) for form in forms for chat in (*chats, *short))


def _values(source: str) -> Iterable[Any]:
    """Return the values that a template's variables may take: of any type, and the texts that the template has."""
    texts = dict.fromkeys(one or other for one, other in _QUOTED.findall(source))
    return ["text", True, 1, {}, [], *texts][:MAX_VALUES]


def succeeds(text: Text, attempt: Attempt) -> bool:
    """Return whether the template writes the last message. Raises what ``text`` raises."""
    written = text(attempt.messages, attempt.variables, parts=attempt.parts)
    return attempt.messages[-1]["content"] in written


def needs_of(text: Text, attempt: Attempt) -> Needs:
    """Return what a template needs for which ``attempt`` has succeeded and all before it have not."""
    needed = tuple(name for name in attempt.variables if name not in RESERVED and _lacks(text, attempt, name))
    return Needs(needed, len(attempt.messages) < len(TURNS), attempt.parts)


def check_template(name: str, template: str, tokenizer: Any, *, parts: bool) -> Needs:
    """Return what a template needs of a request. Raises ``PackagingError`` if it renders no conversation.

    With ``parts``, the content of messages is a list of parts, as for models that read images.
    """
    check_length(name, template)
    text = render_text(tokenizer, template)
    reasons = []
    for attempt in attempts(template, read_template(name, template), parts=parts, named=name != DEFAULT_TEMPLATE):
        try:
            if succeeds(text, attempt):
                return needs_of(text, attempt)
            found = "the user's message is not in the text"
        except (Exceeded, Ended, NoProcess) as error:
            raise PackagingError(f"chat_template {name!r}: it was stopped: it took {error}") from None
        except Refused as error:
            if error.line is not None:
                raise PackagingError(f"chat_template {name!r}: line {error.line}: {error.reason}") from None
            found = f"{error.kind}: {error.reason[:160]}"
        except Exception as error:  # a tokenizer's own code may raise anything
            found = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        reasons.append(found)
    without_system = reasons[1]
    raise PackagingError(f"chat_template {name!r} does not render a conversation: {without_system}")


def _lacks(text: Text, attempt: Attempt, name: str) -> bool:
    fewer = {key: value for key, value in attempt.variables.items() if key != name}
    try:
        return not succeeds(text, attempt._replace(variables=fewer))
    except Exception:  # a template may raise anything
        return True
