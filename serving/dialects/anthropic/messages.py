"""Convert the turns of the Messages API to ``request.Message``.

Consecutive turns of one role become one turn. A user's tool results become messages of role tool, before the turn's
text and images. An assistant's texts come before its calls, as in chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...interface.errors import InvalidField
from ...interface.readers import Entry, any_of, one_of, reader, record
from ...interface.request import MAX_MESSAGES, Message, Part, Role, TextPart, ToolCall
from ..fields.image_parts import MediaLimit
from .blocks import ASSISTANT_BLOCK, SYSTEM_BLOCK, USER_BLOCK, texts_or

IMAGES = frozenset({"image"})
BETWEEN_TURNS = TextPart("\n\n")  # between two turns that are joined
ERROR = "Error: "  # before the content of a tool result with ``is_error``


class Block(NamedTuple):
    """A content block and its path; ``fields`` are as its reader returned them."""

    fields: dict[str, Any]
    path: str
    begins: bool = False  # it is the first block of a turn that was joined to the one before

    @property
    def type(self) -> str:
        found: str = self.fields["type"]
        return found


class Turn(NamedTuple):
    role: Role
    blocks: list[Block]
    path: str


_TURNS = {
    role: record(role=Entry(one_of(role), required=f'"{role}"'), content=Entry(content, required="a string or blocks"))
    for role, content in (
        ("user", texts_or(USER_BLOCK, minimum=1)),
        ("assistant", texts_or(ASSISTANT_BLOCK)),
        ("system", texts_or(SYSTEM_BLOCK, minimum=1)),
    )
}


@reader(
    type="array",
    items=any_of(*(turn.schema for turn in _TURNS.values())),
    minItems=1,
    maxItems=MAX_MESSAGES,
)
def read_turns(value: Any, path: str) -> tuple[Turn, ...]:
    """Read a non-empty list of turns; consecutive turns of the same role are joined.

    ``chat_of`` checks what the schema cannot express: which calls have results.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(path, value, "a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidField(path, f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    turns: list[Turn] = []
    limit = MediaLimit(value, path, IMAGES)
    for i, entry in enumerate(value):
        turn = _turn(entry, f"{path}[{i}]", limit)
        if turns and turns[-1].role == turn.role:
            blocks = turns[-1].blocks
            begins = bool(blocks)
            blocks += [block._replace(begins=begins and k == 0) for k, block in enumerate(turn.blocks)]
        else:
            turns.append(turn)
    return tuple(turns)


def _turn(value: Any, path: str, limit: MediaLimit) -> Turn:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with role and content")
    role = value.get("role")
    read = _TURNS.get(role) if isinstance(role, str) else None
    if read is None:
        allowed = "one of " + ", ".join(f'"{name}"' for name in _TURNS)
        raise InvalidField(f"{path}.role", role, allowed)
    if not isinstance(value.get("content"), str):
        limit.check()
    found = read(value, path)
    return Turn(found["role"], _blocks(found["content"], f"{path}.content"), path)


def _blocks(content: str | Sequence[dict[str, Any]], path: str) -> list[Block]:
    if isinstance(content, str):
        return [Block({"type": "text", "text": content}, path)] if content else []
    return [Block(fields, f"{path}[{i}]") for i, fields in enumerate(content)]


def text_of(content: str | Sequence[dict[str, Any]]) -> str | tuple[Part, ...]:
    """Return a string unchanged, or the texts of text blocks as separate parts."""
    return content if isinstance(content, str) else tuple(TextPart(block["text"]) for block in content)


class Chat(NamedTuple):
    """The messages of a chat. If ``is_begun``, the last one is the beginning of the reply, which is to be continued."""

    messages: tuple[Message, ...]
    is_begun: bool


def chat_of(turns: Sequence[Turn], system: str | tuple[Part, ...] | None) -> Chat:
    """Convert turns and system prompt to a chat.

    Raises ``InvalidField`` for a call without its result, a result without its call, and a beginning of the reply that
    cannot be continued exactly.
    """
    messages = [] if system is None else [Message(role="system", content=system)]
    calls: dict[str, str] = {}  # ids of the calls that the next turn must answer, and their paths
    for turn in turns:
        if calls and turn.role != "user":
            raise _unanswered(calls, turn.path)
        if turn.role == "user":
            messages += _user(turn, calls)
            calls = {}
        elif turn.role == "assistant":
            calls = _ids(turn)
            messages.append(_assistant(turn))
        else:
            messages.append(Message(role="system", content=_content(turn.blocks)))
    if calls:
        raise _unanswered(calls, "messages")
    last = turns[-1]
    if last.role != "assistant":
        return Chat(tuple(messages), is_begun=False)
    if not last.blocks and len(messages) > 1:  # the only turn that may be empty: the reply has no beginning yet
        return Chat(tuple(messages[:-1]), is_begun=False)
    _check_beginning(last)
    return Chat(tuple(messages), is_begun=True)


def _user(turn: Turn, calls: dict[str, str]) -> list[Message]:
    """Return the messages of a user's turn: first each result as its own message, then texts and images."""
    found: list[Message] = []
    rest: list[Block] = []
    open_calls = dict(calls)
    for block in turn.blocks:
        if block.type != "tool_result":
            rest.append(block)
            continue
        id_ = block.fields["tool_use_id"]
        if rest:
            raise InvalidField(f"{block.path}.type", "tool_result", "text or image: tool_result blocks come first")
        if open_calls.pop(id_, None) is None:
            allowed = "the id of a tool_use block of the message before, each answered once"
            raise InvalidField(f"{block.path}.tool_use_id", id_, allowed)
        found.append(Message(role="tool", content=_result(block), tool_call_id=id_))
    if open_calls:
        raise _unanswered(open_calls, turn.path)
    if rest or not found:
        found.append(Message(role="user", content=_content(rest)))
    return found


def _result(block: Block) -> str | tuple[Part, ...]:
    content = text_of(block.fields.get("content", ""))
    if not block.fields.get("is_error"):
        return content
    return ERROR + content if isinstance(content, str) else (TextPart(ERROR), *content)


def _unanswered(calls: dict[str, str], path: str) -> InvalidField:
    id_, where = next(iter(calls.items()))
    return InvalidField(path, id_, f"a tool_result block for each tool_use block, first of all; {where} has none")


def _ids(turn: Turn) -> dict[str, str]:
    found: dict[str, str] = {}
    for block in turn.blocks:
        if block.type == "tool_use":
            if block.fields["id"] in found:
                raise InvalidField(f"{block.path}.id", block.fields["id"], "a different id for each tool_use block")
            found[block.fields["id"]] = block.path
    return found


def _assistant(turn: Turn) -> Message:
    thoughts = [block.fields["thinking"] for block in turn.blocks if block.type == "thinking"]
    return Message(
        role="assistant",
        content=_content(turn.blocks),
        reasoning_content="".join(thoughts) if thoughts else None,
        tool_calls=tuple(_call(block.fields) for block in turn.blocks if block.type == "tool_use"),
    )


def _call(fields: dict[str, Any]) -> ToolCall:
    return ToolCall(id=fields["id"], name=fields["name"], arguments=fields["input"])


def _content(blocks: Sequence[Block]) -> str | tuple[Part, ...]:
    """Return the texts and images of a turn."""
    if len(blocks) == 1 and "text" in blocks[0].fields:  # most turns
        text: str = blocks[0].fields["text"]
        return text
    parts: list[Part] = []
    begins = False
    for block in blocks:
        begins = begins or block.begins
        if block.type in ("text", "image"):
            if begins and parts:
                parts.append(BETWEEN_TURNS)
            parts.append(block.fields["part"] if block.type == "image" else TextPart(block.fields["text"]))
            begins = False
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    return tuple(parts) or ""


def _check_beginning(turn: Turn) -> None:
    """Raise ``InvalidField`` unless the turn ends in text without blanks at its end.

    The reply must continue exactly this text, and templates cut off blanks at the end.
    """
    last = turn.blocks[-1] if turn.blocks else None
    if last is None or last.type != "text" or not last.fields["text"]:
        allowed = "text: the reply continues the last message, which is the assistant's"
        raise InvalidField(last.path if last else turn.path, last.type if last else "", allowed)
    if last.fields["text"][-1].isspace():
        where = last.path if last.path.endswith(".content") else f"{last.path}.text"
        allowed = "a text without blanks at its end, where the reply goes on"
        raise InvalidField(where, last.fields["text"][-40:], allowed)
