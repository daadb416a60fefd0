"""Content blocks of the Messages API: their JSON schemas and readers, by type.

Source of the format: the API reference of ``/v1/messages``.
"""

from __future__ import annotations

from typing import Any

from ...interface.readers import (
    Entry,
    Reader,
    any_of,
    boolean,
    list_of,
    obj,
    one_of,
    one_of_types,
    reader,
    record,
    refused,
    short_text,
    string,
    type_of,
)
from ..fields.image_parts import NO_FILES, ONLY_OF_USERS, TYPES, Forms, data_image, url_image, url_reader

MAX_NAME = 128  # characters of a tool's name
MAX_ID = 512
ONLY_IMAGES = "this server reads texts and images"
IN_A_RESULT = "chat templates write a tool's result as a text; an image may be a block of its own after the results"
NO_SERVER_TOOLS = "this server runs no tools of its own"

NAME = short_text(MAX_NAME)
ID = short_text(MAX_ID)

# A breakpoint has no effect, because every prefix of a prompt is cached and found again without it.
CACHE_CONTROL = record(
    type=type_of("ephemeral"),
    ttl=Entry(one_of("5m", "1h"), "prefixes stay as long as there is room"),
)
_HINT = {"cache_control": Entry(CACHE_CONTROL, "a hint, which the prefix cache does not need")}

TEXT = record(
    type=type_of("text"),
    text=Entry(string, required="a string"),
    citations=Entry(one_of([], why="citations are not read")),
    **_HINT,
)

_DATA = record(
    type=type_of("base64"),
    media_type=Entry(one_of(*TYPES), required="one of " + ", ".join(TYPES)),
    data=Entry(string, "base64 without line breaks", required="a text in base64"),
)
_FORMS = Forms(data=False, paths=False)
_URL = record(type=type_of("url"), url=Entry(url_reader(_FORMS), required=_FORMS.allowed))
_IMAGE = record(
    type=type_of("image"),
    source=Entry(
        one_of_types({"base64": _DATA, "url": _URL}, {"file": NO_FILES}, "an object"),
        required="an object with the data or the URL of an image",
    ),
    **_HINT,
)


@reader(**_IMAGE.schema)
def _image(value: Any, path: str) -> dict[str, Any]:
    """Read an image, the block's ``part``."""
    source, where = _IMAGE(value, path)["source"], f"{path}.source"
    if source["type"] == "base64":
        part = data_image(source["data"], f"{where}.data", path, "image")
    else:
        part = url_image(source["url"], f"{where}.url", path, "image", _FORMS)
    return {"type": "image", "part": part}


_NOT_READ = dict.fromkeys(
    ("document", "search_result", "container_upload", "tool_reference", "browser_state"), ONLY_IMAGES
)
_NOT_HERE = _NOT_READ | {"image": ONLY_OF_USERS}
SERVER_BLOCKS = dict.fromkeys(
    (
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ),
    NO_SERVER_TOOLS,
)


def texts_or(block: Reader[Any], *, minimum: int = 0) -> Reader[str | tuple[dict[str, Any], ...]]:
    """Return a reader of a string or a list of at least ``minimum`` blocks."""
    blocks = list_of(
        block, "a string or a list of content blocks" + (", not empty" if minimum else ""), minimum=minimum
    )

    @reader(**any_of(string.schema, blocks.schema))
    def read(value: Any, path: str) -> str | tuple[dict[str, Any], ...]:
        return string(value, path) if isinstance(value, str) else blocks(value, path)

    return read


TOOL_RESULT = record(
    type=type_of("tool_result"),
    tool_use_id=Entry(ID, required="the id of the tool_use block that this answers"),
    content=Entry(texts_or(one_of_types({"text": TEXT}, _NOT_READ | {"image": IN_A_RESULT}, "a content block"))),
    is_error=Entry(boolean, "the model reads the content after the word Error"),
    toolset_name=Entry(refused(NO_SERVER_TOOLS)),
    **_HINT,
)
TOOL_USE = record(
    type=type_of("tool_use"),
    id=Entry(ID, required="the id of this call"),
    name=Entry(NAME, required="the name of the tool"),
    input=Entry(obj, required="an object"),
    caller=Entry(one_of({"type": "direct"}, why=NO_SERVER_TOOLS)),
    toolset_name=Entry(refused(NO_SERVER_TOOLS)),
    **_HINT,
)
THINKING = record(
    type=type_of("thinking"),
    thinking=Entry(string, required="a string"),
    signature=Entry(string, "accepted and not checked"),
)
REDACTED_THINKING = record(
    type=type_of("redacted_thinking"),
    data=Entry(string, "encrypted, so it says nothing to this model"),
)

SYSTEM_BLOCK = one_of_types({"text": TEXT}, _NOT_HERE, "a text block")
USER_BLOCK = one_of_types(
    {"text": TEXT, "image": _image, "tool_result": TOOL_RESULT},
    _NOT_READ | SERVER_BLOCKS,
    "a content block of a user's turn",
)
ASSISTANT_BLOCK = one_of_types(
    {"text": TEXT, "tool_use": TOOL_USE, "thinking": THINKING, "redacted_thinking": REDACTED_THINKING},
    _NOT_HERE | SERVER_BLOCKS,
    "a content block of an assistant's turn",
)
