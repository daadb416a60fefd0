"""Input items of the Responses API: their JSON schemas, and reading them into ``request.Message``.

Source of the format: the API reference of ``/v1/responses``. Clients send items back as replies had them: one turn of
the assistant (reasoning, texts, calls) is several items here, but one message for a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import (
    Entry,
    Reader,
    any_of,
    list_of,
    one_of,
    one_of_types,
    reader,
    record,
    refused,
    short_text,
    string,
    type_of,
)
from ...interface.request import MAX_MESSAGES, MediaPart, Message, Part, TextPart, ToolCall
from ..fields.image_parts import DETAIL, NO_FILES, ONLY_OF_USERS, Forms, MediaLimit, url_image, url_reader
from ..fields.messages import ROLES, call_arguments

MAX_ID = 512
MAX_NAME = 128  # characters of a tool's name
IMAGES = frozenset({"input_image"})
ONLY_IMAGES = "this server reads texts and images"
IN_AN_OUTPUT = "chat templates write a tool's output as a text; a message of the user after it may have images"
NO_TOOLS_OF_ITS_OWN = "this server runs no tools of its own"
NOT_STORED = "responses are not stored; send the items themselves"

_ID = short_text(MAX_ID)
_NAME = short_text(MAX_NAME)
_DIRECT = one_of({"type": "direct"}, why=NO_TOOLS_OF_ITS_OWN)


@reader(type="array")
def _any_list(value: Any, path: str) -> None:
    """Accept a list that a reply had and that no template reads."""
    if not isinstance(value, list | tuple):
        raise InvalidField(path, value, "a list")


# Fields that replies add to an item. They have no effect here: nothing is stored under an id.
_COMMON = {
    "id": Entry(string, "as the reply had it; nothing is stored under it"),
    "status": Entry(one_of("in_progress", "completed", "incomplete"), "as the reply had it"),
}
_CALLED = _COMMON | {"caller": Entry(_DIRECT), "namespace": Entry(_NAME, "the namespace of the tool")}

_HINT = {
    "prompt_cache_breakpoint": Entry(
        record(mode=Entry(one_of("explicit"), required='"explicit"')), "a hint, which the prefix cache does not need"
    )
}
_INPUT_TEXT = record(type=type_of("input_text"), text=Entry(string, required="a string"), **_HINT)
_FORMS = Forms(data=True, paths=False)
_INPUT_IMAGE = record(
    type=type_of("input_image"),
    image_url=Entry(url_reader(_FORMS), required=_FORMS.allowed),
    detail=DETAIL,
    file_id=Entry(refused(NO_FILES)),
    **_HINT,
)


@reader(**_INPUT_IMAGE.schema)
def _input_image(value: Any, path: str) -> dict[str, Any]:
    """Read an image, the ``part`` of what is returned."""
    if isinstance(value, dict) and value.get("image_url") is None and value.get("file_id") is not None:
        raise InvalidField(f"{path}.file_id", value["file_id"], f"null: {NO_FILES}")
    found = _INPUT_IMAGE(value, path)
    return {"part": url_image(found["image_url"], f"{path}.image_url", path, "input_image", _FORMS)}


_OUTPUT_TEXT = record(
    type=type_of("output_text"),
    text=Entry(string, required="a string"),
    annotations=Entry(one_of([], why="annotations are not read")),
    logprobs=Entry(_any_list, "as the reply had them"),
)
_REFUSAL = record(
    type=type_of("refusal"), refusal=Entry(string, "what the assistant said instead", required="a string")
)
_NOT_READ = dict.fromkeys(("input_file", "input_audio"), ONLY_IMAGES)


def _content(parts: Mapping[str, Reader[dict[str, Any]]], no_image: str = "") -> Reader[str | tuple[Part, ...]]:
    """Return a reader of a string, or of a list of texts and images; ``no_image`` says why there are none."""
    known = _NOT_READ | ({"input_image": no_image} if no_image else {})
    entries = list_of(one_of_types(parts, known, "a part"), "a string or a list of parts")

    @reader(**any_of(string.schema, entries.schema))
    def read(value: Any, path: str) -> str | tuple[Part, ...]:
        if isinstance(value, str):
            return string(value, path)
        return tuple(map(_part_of, entries(value, path)))

    return read


def _part_of(found: dict[str, Any]) -> Part:
    image: MediaPart | None = found.get("part")
    return image or TextPart(found.get("text", found.get("refusal", "")))


_GIVEN = _content({"input_text": _INPUT_TEXT, "input_image": _input_image})
_TOLD = _content({"input_text": _INPUT_TEXT}, ONLY_OF_USERS)
_SAID = _content({"output_text": _OUTPUT_TEXT, "input_text": _INPUT_TEXT, "refusal": _REFUSAL}, ONLY_OF_USERS)
_RETURNED = _content({"input_text": _INPUT_TEXT}, IN_AN_OUTPUT)


def _message(content: Reader[Any], *roles: str) -> Reader[dict[str, Any]]:
    return record(
        type=Entry(one_of("message")),
        role=Entry(one_of(*roles), required="one of " + ", ".join(roles)),
        content=Entry(content, required="a string or a list of parts"),
        phase=Entry(refused("the chat template reads no phases")),
        **_COMMON,
    )


_USER = _message(_GIVEN, "user")
_SYSTEM = _message(_TOLD, "system", "developer")
_ASSISTANT = _message(_SAID, "assistant")
_MESSAGES = {"user": _USER, "system": _SYSTEM, "developer": _SYSTEM, "assistant": _ASSISTANT}
_OUTPUT = {
    "call_id": Entry(_ID, required="the call_id of the call that this answers"),
    "output": Entry(_RETURNED, required="a string or a list of text parts"),
    "name": Entry(string, "of the tool"),
}
_SUMMARY = list_of(record(type=type_of("summary_text"), text=Entry(string, required="a string")), "a list of texts")
_THOUGHT = list_of(record(type=type_of("reasoning_text"), text=Entry(string, required="a string")), "a list of texts")

_ITEMS: Mapping[str, Reader[dict[str, Any]]] = {
    "function_call": record(
        type=type_of("function_call"),
        call_id=Entry(_ID, required="the id of this call"),
        name=Entry(_NAME, required="the name of the function"),
        arguments=Entry(string, required="the arguments of the call, as JSON text"),
        **_CALLED,
    ),
    "function_call_output": record(type=type_of("function_call_output"), **_OUTPUT, **_CALLED),
    "custom_tool_call": record(
        type=type_of("custom_tool_call"),
        call_id=Entry(_ID, required="the id of this call"),
        name=Entry(_NAME, required="the name of the tool"),
        input=Entry(string, required="a string"),
        **_CALLED,
    ),
    "custom_tool_call_output": record(type=type_of("custom_tool_call_output"), **_OUTPUT, **_CALLED),
    "reasoning": record(
        type=type_of("reasoning"),
        summary=Entry(_SUMMARY, "read where there is no content"),
        content=Entry(_THOUGHT, "what the model thought, for templates that show it again"),
        encrypted_content=Entry(string, "encrypted by another server, so it says nothing to this model"),
        **_COMMON,
    ),
}
_HOSTED = (
    "file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call",
    "code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "program", "program_output",
)  # fmt: skip
_REFUSED: Mapping[str, str] = {
    "item_reference": NOT_STORED,
    "compaction": "conversations are not compacted",
    "compaction_trigger": "conversations are not compacted",
    **dict.fromkeys(_HOSTED, NO_TOOLS_OF_ITS_OWN),
}
_TYPED = one_of_types({"message": _USER, **_ITEMS}, _REFUSED, "an item")


@reader(**any_of(_USER.schema, _SYSTEM.schema, _ASSISTANT.schema, *(item.schema for item in _ITEMS.values())))
def _item(value: Any, path: str) -> dict[str, Any]:
    """Read one item. A message may leave out ``type``; the returned item always has it."""
    if not isinstance(value, dict):
        raise InvalidField(path, value, "a message or another item: an object")
    if value.get("type") not in (None, "message"):
        return _TYPED(value, path)
    if "role" not in value and "id" in value:
        raise InvalidField(path, value, f"a message or another item, not a reference to one: {NOT_STORED}")
    role = value.get("role")
    read = _MESSAGES.get(role) if isinstance(role, str) else None
    if read is None:
        raise InvalidField(f"{path}.role", role, "one of " + ", ".join(_MESSAGES))
    return read(value, path) | {"type": "message"}


_LIST = list_of(_item, f"a string or a list of 1 to {MAX_MESSAGES} items", minimum=1, maximum=MAX_MESSAGES)


@reader(**any_of(string.schema, _LIST.schema))
def read_input(value: Any, path: str) -> tuple[Message, ...]:
    """Read a string, which is a message of the user, or a list of items.

    The schema cannot express that arguments must be JSON, that an output must follow its call, nor which URLs and data
    images may have.
    """
    if isinstance(value, str):
        return (Message(role="user", content=string(value, path)),)
    if isinstance(value, list | tuple):
        MediaLimit(value, path, IMAGES).check()
    turns = _Turns()
    for i, item in enumerate(_LIST(value, path)):
        turns.add(item, f"{path}[{i}]")
    if not (messages := turns.ended()):
        raise InvalidField(path, value, "at least one item that this model can read")
    return messages


class _Turns:
    """The messages into which items are joined: consecutive reasoning, texts and calls of the assistant are one
    message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open: dict[str, str] = {}  # call_id of each call without an output, and the item type of that output
        self._thoughts: list[str] = []
        self._said: tuple[Part, ...] | str | None = None
        self._called: list[ToolCall] = []

    def add(self, item: dict[str, Any], path: str) -> None:
        match item["type"]:
            case "reasoning":
                texts = item.get("content") or item.get("summary") or ()
                self._thoughts += [text["text"] for text in texts]
            case "message" if item["role"] == "assistant":
                self._say(item["content"])
            case "message":
                self._close()
                self._messages.append(Message(role=ROLES[item["role"]], content=item["content"]))
            case "function_call" | "custom_tool_call":
                self._call(item, path)
            case _:
                self._answer(item, path)

    def ended(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _say(self, content: str | tuple[Part, ...]) -> None:
        """Add a text. A text after calls belongs to the message of the calls, whose outputs follow it."""
        if self._said is not None and not self._called:
            self._close()
        self._said = content if self._said is None else (*_parts(self._said), *_parts(content))

    def _call(self, item: dict[str, Any], path: str) -> None:
        call_id = item["call_id"]
        if call_id in self._open:
            raise InvalidField(f"{path}.call_id", call_id, "an id that no other call has that waits for its output")
        self._open[call_id] = f"{item['type']}_output"
        if item["type"] == "custom_tool_call":
            arguments = {"input": item["input"]}
        else:
            arguments = call_arguments(item["arguments"], f"{path}.arguments")
        name = joined(item.get("namespace"), item["name"])
        self._called.append(ToolCall(id=call_id, name=name, arguments=arguments))

    def _answer(self, item: dict[str, Any], path: str) -> None:
        call_id = item["call_id"]
        if self._open.pop(call_id, None) != item["type"]:
            expected = item["type"].removesuffix("_output")
            raise InvalidField(f"{path}.call_id", call_id, f"the call_id of a {expected} before it, without an output")
        self._close()
        name = item.get("name")
        name = None if name is None else joined(item.get("namespace"), name)
        self._messages.append(Message(role="tool", content=item["output"], name=name, tool_call_id=call_id))

    def _close(self) -> None:
        """End the assistant's turn, if one is open."""
        if self._said is not None or self._called or self._thoughts:
            self._messages.append(
                Message(
                    role="assistant",
                    content=self._said if self._said is not None else "",
                    reasoning_content="\n".join(self._thoughts) if self._thoughts else None,
                    tool_calls=tuple(self._called),
                )
            )
        self._thoughts, self._said, self._called = [], None, []


def joined(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool of a namespace; without one, its own."""
    return name if namespace is None else f"{namespace}__{name}"


def _parts(content: str | tuple[Part, ...]) -> tuple[Part, ...]:
    return (TextPart(content),) if isinstance(content, str) else content
