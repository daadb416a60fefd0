"""Images in messages: which forms each dialect takes, and what is made of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.dialects.anthropic.requests import COUNT_BODY, read_count_request
from mlflow_llm.serving.dialects.fields.image_parts import MAX_IMAGE, MAX_MEDIA, MAX_URL, base64_of, image_url
from mlflow_llm.serving.dialects.openai.tokenize import read_tokenize
from mlflow_llm.serving.dialects.responses.fields import read_count_request as read_response_count
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import MediaPart, Message, RawChat, TextPart

DATA = base64.b64encode(b"\x89PNG").decode()
PNG = f"data:image/png;base64,{DATA}"
URL = "https://H.example:8080/a%20b?x=1#y"
CACHED = {"cache_control": {"type": "ephemeral"}}
OPENAI = ("openai", "databricks", "mlflow", "openvino")


def openai(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": fields}


def base64_block(data: Any, media_type: Any = "image/png") -> dict[str, Any]:
    return source(type="base64", media_type=media_type, data=data)


def response(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def body(dialect: str, *messages: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "m", "input" if dialect == "responses" else "messages": list(messages)}
    return asked | ({"max_tokens": 9} if dialect == "anthropic" else {})


def decoded(dialect: str, *messages: dict[str, Any]) -> tuple[Message, ...]:
    codec = DIALECTS[dialect]
    route = next(route for route in codec.routes if route.task in ("chat", None))
    raw = codec.decode(Head(route, {}), json.dumps(body(dialect, *messages)).encode())
    assert isinstance(raw, RawChat)
    jsonschema.validate(body(dialect, *messages), codec.request_schemas["chat"])
    return raw.messages


def user(dialect: str, *parts: Any) -> Any:
    (message,) = decoded(dialect, {"role": "user", "content": list(parts)})
    return message.content


def refusal(dialect: str, *messages: dict[str, Any]) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        decoded(dialect, *messages)
    assert len(caught.value.message) < 600
    return caught.value


def refused(dialect: str, *parts: Any) -> InvalidField:
    return refusal(dialect, {"role": "user", "content": [*parts]})


def expected(field: str, name: str, root: str = "messages", **more: Any) -> MediaPart:
    part = f"{root}[0].content[1]"
    return MediaPart(kind="image", max_bytes=20 * 2**20, field=part + field, part=part, name=name, **more)


def test_the_types_of_data() -> None:
    """PNG, JPEG, WebP and GIF data are accepted, and their media type is not passed on."""
    for kind in ("png", "jpeg", "webp", "gif"):
        for dialect, part in (
            ("openai", openai(f"data:image/{kind};base64,{DATA}")),
            ("responses", response(f"data:image/{kind};base64,{DATA}")),
            ("anthropic", base64_block(DATA, f"image/{kind}")),
        ):
            (found,) = user(dialect, part)
            assert (found.source, found.place, found.content) == ("data", "", DATA)


@pytest.mark.parametrize("dialect", OPENAI)
@pytest.mark.parametrize(
    ("url", "place"),
    [
        (PNG, {"source": "data", "content": DATA}),
        (URL, {"source": "url", "place": "h.example:8080", "content": URL}),
        ("http://h.example/a.php", {"source": "url", "place": "h.example", "content": "http://h.example/a.php"}),
        ("file:///srv/a%20b", {"source": "path", "place": "/srv/a b", "content": "/srv/a b"}),
        ("/srv/a?b.png", {"source": "path", "place": "/srv/a?b.png", "content": "/srv/a?b.png"}),
    ],
)
@pytest.mark.parametrize("detail", [{}, *({"detail": value} for value in ("auto", "low", "high", None))])
def test_openais(dialect: str, url: str, place: dict[str, str], detail: dict[str, Any]) -> None:
    """URLs, data URLs and, as in vLLM, paths are read, and texts keep their places before and after."""
    found = user(dialect, {"type": "text", "text": "a"}, openai(url, **detail), {"type": "text", "text": "b"})
    assert found == (TextPart("a"), expected(".image_url.url", "image_url", **place), TextPart("b"))


@pytest.mark.parametrize(
    ("block", "field", "place"),
    [
        (base64_block(DATA), ".source.data", {"source": "data", "content": DATA}),
        (base64_block(DATA) | CACHED, ".source.data", {"source": "data", "content": DATA}),
        (source(type="url", url=URL), ".source.url", {"source": "url", "place": "h.example:8080", "content": URL}),
    ],
)
def test_anthropics(block: dict[str, Any], field: str, place: dict[str, str]) -> None:
    """A block with base64 or a URL is read, and a cache breakpoint is ignored as a hint."""
    found = user("anthropic", {"type": "text", "text": "a"}, block)
    assert found == (TextPart("a"), expected(field, "image", **place))
    assert user("anthropic", block, block)[0].part == "messages[0].content[0]"
    assert user("anthropic", block) == (user("anthropic", block, block)[0],)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (PNG, {"source": "data", "content": DATA}),
        (URL, {"source": "url", "place": "h.example:8080", "content": URL}),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"detail": "auto", "file_id": None},
        {"detail": "low"},
        {"detail": "high"},
        {"prompt_cache_breakpoint": {"mode": "explicit"}},
    ],
)
def test_responses(url: str, place: dict[str, str], more: dict[str, Any]) -> None:
    """The part has its URL as a string beside the type."""
    found = user("responses", {"type": "input_text", "text": "a"}, response(url, **more))
    assert found == (TextPart("a"), expected(".image_url", "input_image", "input", **place))


@pytest.mark.parametrize(
    ("given", "kind", "place"),
    [
        ({"image_url": PNG}, "image", {"source": "data", "content": DATA}),
        ({"image_url": "/a.png"}, "image", {"source": "path", "place": "/a.png", "content": "/a.png"}),
        ({"image_url": "file:///a%20b.jpg"}, "image", {"source": "path", "place": "/a b.jpg", "content": "/a b.jpg"}),
        ({"image_url": URL}, "image", {"source": "url", "place": "h.example:8080", "content": URL}),
        ({"audio_url": "/a.mp3"}, "audio", {"source": "path", "place": "/a.mp3", "content": "/a.mp3"}),
        ({"video_url": "http://h/a.mp4"}, "video", {"source": "url", "place": "h", "content": "http://h/a.mp4"}),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_mindies(role: str, given: dict[str, str], kind: str, place: dict[str, str]) -> None:
    """Media are read in messages of any role, with the type of their part."""
    (name, url) = next(iter(given.items()))
    message = {"role": role, "content": [{"type": "text", "text": "a"}, {"type": name, name: url}]}
    (found,) = decoded("mindie", message | ({"tool_call_id": "c"} if role == "tool" else {}))
    max_bytes = (512 if kind == "video" else 20) * 2**20
    part = "messages[0].content[1]"
    assert found.content == (
        TextPart("a"),
        MediaPart(kind=kind, max_bytes=max_bytes, field=f"{part}.{name}", part=part, name=name, **place),
    )


BAD_DATA = [
    ("", "1 to 20971520 bytes"),
    ("!!!!", "valid base64"),
    ("aGk", "valid base64"),
    ("a===", "valid base64"),
    ("====", "valid base64"),
    ("=", "valid base64"),
    ("==", "valid base64"),
    ("aG=k", "valid base64"),
    ("aGk=aGk=", "valid base64"),
    ("aGk=====", "valid base64"),
    ("aGk=\n", "valid base64"),
    ("aG k=", "valid base64"),
    (" aGk=", "valid base64"),
    ("aGkä", "valid base64"),
    ("aG-_", "valid base64"),
    ("\ud800aa=", "valid base64"),
]


@pytest.mark.parametrize(("data", "allowed"), BAD_DATA)
def test_data_that_is_not_base64(data: str, allowed: str) -> None:
    """Invalid base64 is refused in every dialect with its field, without repeating the data."""
    found = [
        refused("openai", openai(f"data:image/png;base64,{data}")),
        refused("mindie", {"type": "image_url", "image_url": f"data:image/png;base64,{data}"}),
        refused("responses", response(f"data:image/png;base64,{data}")),
        *([refused("anthropic", base64_block(data))] if data.isascii() else []),
    ]
    fields = ["image_url.url", "image_url", "image_url", "source.data"]
    for error, field in zip(found, fields, strict=False):
        assert error.param is not None
        assert error.param.endswith(f"[0].content[0].{field}")
        assert allowed in error.message
        assert not data or data not in error.message


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 100, 101, 102])
def test_sizes_of_data(size: int) -> None:
    """The size of base64 data is computed exactly without decoding it."""
    text = base64.b64encode(b"x" * size).decode()
    if size:
        assert base64_of(text, "f", size) == text
    for max_bytes in (size - 1, 0):
        with pytest.raises(InvalidField, match=f"'{size} bytes' is not allowed; expected 1 to {max_bytes} bytes"):
            base64_of(text, "f", max_bytes)


def test_the_largest_data() -> None:
    """Inline data of 20 MiB is accepted, and one byte more is refused."""
    text = base64.b64encode(bytes(MAX_IMAGE)).decode()
    assert image_url(openai(f"data:image/png;base64,{text}"), "p").content == text
    longer = base64.b64encode(bytes(MAX_IMAGE + 1)).decode()
    for data in (longer, "A" * (2 * MAX_IMAGE)):
        with pytest.raises(InvalidField, match="expected 1 to 20971520 bytes"):
            image_url(openai(f"data:image/png;base64,{data}"), "p")


@given(data=st.binary(max_size=40), junk=st.text(max_size=8))
def test_base64_as_python_reads_it(data: bytes, junk: str) -> None:
    """Base64 is accepted exactly if Python's strict decoder accepts it and the result is not empty."""
    text = base64.b64encode(data).decode()
    if data:
        assert base64_of(text, "f", 40) == text
    for given_text in (text + junk, junk):
        try:
            taken = bool(base64_of(given_text, "f", 999))
        except InvalidField:
            taken = False
        try:
            valid = len(given_text) % 4 == 0 and len(base64.b64decode(given_text, validate=True)) > 0
        except ValueError:
            valid = False
        assert taken == valid


DETAIL = 'one of "auto", "low", "high"'


@pytest.mark.parametrize(
    ("part", "field", "allowed"),
    [
        (openai(PNG, detail="medium"), "image_url.detail", DETAIL),
        (openai(PNG, detail=5), "image_url.detail", DETAIL),
        (openai(PNG, colour="red"), "image_url.colour", "no such field"),
        (openai(PNG) | {"uuid": "u"}, "uuid", "no such field"),
        ({"type": "image_url"}, "image_url", '{"url": …}'),
        ({"type": "image_url", "image_url": PNG}, "image_url", 'an object {"url": …}, not the URL itself'),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "an absolute path, an http or https URL, or data:"),
        (openai(None), "image_url.url", "an absolute path, an http or https URL, or data:"),
        (openai(""), "image_url.url", "an absolute path, an http or https URL, or data:"),
        (openai(5), "image_url.url", "an absolute path"),
        (openai("a.png"), "image_url.url", "an absolute path"),
        (openai("ftp://h/a.png"), "image_url.url", "an absolute path"),
        (openai("file://host/a.png"), "image_url.url", "an absolute path"),
        (openai("file:///a%00"), "image_url.url", "an absolute path"),
        (openai("http://[::1/a.png"), "image_url.url", "an absolute path"),
        (openai("http://h:99999/a.png"), "image_url.url", "an absolute path"),
        (openai("http:///a.png"), "image_url.url", "a URL with a host"),
        (openai("http://user:word@h/a.png"), "image_url.url", "without a user's name"),
        (openai("https://h/\ud800"), "image_url.url", "without lone surrogates"),
        (openai("https://h/" + "a" * MAX_URL), "image_url.url", "at most 4096"),
        (openai("data:image/png,aGk="), "image_url.url", "image/png, image/jpeg, image/webp, image/gif"),
        (openai("data:image/svg+xml;base64,aGk="), "image_url.url", "image/png, image/jpeg, image/webp, image/gif"),
        (openai("data:;base64,aGk="), "image_url.url", "image/png, image/jpeg, image/webp, image/gif"),
        ({"type": "video_url", "video_url": {"url": URL}}, "type", 'one of "text", "image_url"'),
        ({"type": "input_audio", "input_audio": {}}, "type", 'one of "text", "image_url"'),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "type", 'one of "text", "image_url"'),
        ({"type": "file", "file": {}}, "type", 'one of "text", "image_url"'),
        ({"type": ["image_url"]}, "type", 'one of "text", "image_url"'),
    ],
)
@pytest.mark.parametrize("dialect", OPENAI)
def test_refusals_of_openais(dialect: str, part: dict[str, Any], field: str, allowed: str) -> None:
    """An unreadable part is refused with its path and what is allowed."""
    error = refused(dialect, {"type": "text", "text": "a"}, part)
    assert error.param == f"messages[0].content[1].{field}"
    assert allowed in error.message


@pytest.mark.parametrize(
    ("block", "field", "allowed"),
    [
        (source(type="file", file_id="f"), "source.type", 'one of "base64", "url": this server keeps no files'),
        (source(type="text", data="a"), "source.type", 'one of "base64", "url"'),
        ({"type": "image"}, "source", "an object with the data or the URL of an image"),
        ({"type": "image", "source": URL}, "source", "an object with a type"),
        (source(type="url"), "source.url", "an http or https URL"),
        (source(type="url", url=PNG), "source.url", "an http or https URL"),
        (source(type="url", url="file:///a.png"), "source.url", "an http or https URL"),
        (source(type="url", url="/a.png"), "source.url", "an http or https URL"),
        (source(type="url", url="https://h", more=1), "source.more", "no such field"),
        (base64_block(None), "source.data", "a text in base64"),
        (base64_block(5), "source.data", "a string"),
        (base64_block(PNG), "source.data", "valid base64"),
        (base64_block(DATA, "image/bmp"), "source.media_type", '"image/png", "image/jpeg"'),
        (base64_block(DATA, None), "source.media_type", "one of image/png"),
        (base64_block(DATA) | {"detail": "auto"}, "detail", "no such field"),
        (base64_block(DATA) | {"cache_control": {"type": "x"}}, "cache_control.type", "ephemeral"),
        ({"type": "document"}, "type", '"text", "image", "tool_result": this server reads texts and images'),
    ],
)
def test_refusals_of_anthropics(block: dict[str, Any], field: str, allowed: str) -> None:
    """An unreadable block is refused with its path and what is allowed."""
    error = refused("anthropic", {"type": "text", "text": "a"}, block)
    assert error.param == f"messages[0].content[1].{field}"
    assert allowed in error.message


@pytest.mark.parametrize(
    ("part", "field", "allowed"),
    [
        ({"type": "input_image", "file_id": "f"}, "file_id", "null: this server keeps no files"),
        (response(PNG, file_id="f"), "file_id", "null: this server keeps no files"),
        ({"type": "input_image"}, "image_url", "an http or https URL, or data:"),
        (response({"url": PNG}), "image_url", "an http or https URL, or data:"),
        (response(""), "image_url", "an http or https URL, or data:"),
        (response("/a.png"), "image_url", "an http or https URL, or data:"),
        (response("file:///a.png"), "image_url", "an http or https URL, or data:"),
        (response("data:image/tiff;base64,aGk="), "image_url", "image/png, image/jpeg, image/webp, image/gif"),
        (response(PNG, detail="original"), "detail", DETAIL),
        (response(PNG, more=1), "more", "no such field"),
        ({"type": "input_file", "file_id": "f"}, "type", '"input_text", "input_image": this server reads texts'),
        ({"type": "input_audio"}, "type", '"input_text", "input_image": this server reads texts'),
    ],
)
def test_refusals_of_responses(part: dict[str, Any], field: str, allowed: str) -> None:
    """An unreadable part is refused with its path and what is allowed."""
    error = refused("responses", {"type": "input_text", "text": "a"}, part)
    assert error.param == f"input[0].content[1].{field}"
    assert allowed in error.message


ONLY = "only messages of the user have images"
ANTHROPIC_CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESPONSES_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("dialect", "messages", "param", "allowed"),
    [
        *(
            ("openai", [{"content": [openai(PNG)], **whose}], "messages[0].content[0].type", f'"text": {ONLY}')
            for whose in (
                {"role": "system"}, {"role": "developer"}, {"role": "assistant"}, {"role": "tool", "tool_call_id": "c"},
            )
        ),
        ("anthropic", [{"role": "system", "content": [base64_block(DATA)]}], "messages[0].content[0].type", ONLY),
        ("anthropic", [{"role": "assistant", "content": [base64_block(DATA)]}], "messages[0].content[0].type", ONLY),
        (
            "anthropic",
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [ANTHROPIC_CALL]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [base64_block(DATA)]}
                ]},
            ],
            "messages[2].content[0].content[0].type",
            "chat templates write a tool's result as a text",
        ),
        ("responses", [{"role": "system", "content": [response(PNG)]}], "input[0].content[0].type", ONLY),
        ("responses", [{"role": "developer", "content": [response(PNG)]}], "input[0].content[0].type", ONLY),
        ("responses", [{"role": "assistant", "content": [response(PNG)]}], "input[0].content[0].type", ONLY),
        (
            "responses",
            [RESPONSES_CALL, {"type": "function_call_output", "call_id": "c", "output": [response(PNG)]}],
            "input[1].output[0].type",
            "chat templates write a tool's output as a text",
        ),
    ],
)  # fmt: skip
def test_only_users_have_images(dialect: str, messages: list[dict[str, Any]], param: str, allowed: str) -> None:
    """Images in messages of other roles and in tool results are refused by their path."""
    error = refusal(dialect, *messages)
    assert error.param == param
    assert allowed in error.message


def test_system_prompts_of_anthropic() -> None:
    """An image in Anthropic's system field is refused."""
    codec = DIALECTS["anthropic"]
    asked = body("anthropic", {"role": "user", "content": "a"}) | {"system": [base64_block(DATA)]}
    with pytest.raises(InvalidField, match=f"system\\[0\\].type: 'image' is not allowed.*{ONLY}"):
        codec.decode(Head(codec.routes[0], {}), json.dumps(asked).encode())


def test_a_image_after_a_result() -> None:
    """The tool results of a turn come first, then its texts and images as a user message."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
    found = decoded(
        "anthropic",
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [ANTHROPIC_CALL]},
        {"role": "user", "content": [result, base64_block(DATA), {"type": "text", "text": "b"}]},
    )
    assert [message.role for message in found] == ["user", "assistant", "tool", "user"]
    image, text = found[-1].content
    assert isinstance(image, MediaPart)
    assert (image.part, text) == ("messages[2].content[1]", TextPart("b"))


def test_turns_of_anthropic_that_are_joined() -> None:
    """An empty line separates two joined turns, whatever the second begins with."""
    found = decoded(
        "anthropic",
        {"role": "user", "content": "a"},
        {"role": "user", "content": [base64_block(DATA), {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    )
    (first, between, image, text, again, last) = found[0].content
    assert (first, between, text) == (TextPart("a"), TextPart("\n\n"), TextPart("b"))
    assert (again, last) == (TextPart("\n\n"), TextPart("c"))
    assert isinstance(image, MediaPart)
    assert (image.part, image.field) == ("messages[1].content[0]", "messages[1].content[0].source.data")


BAD = {  # images that are counted before anything of them is read
    "openai": openai("!"),
    "databricks": openai("!"),
    "mlflow": openai("!"),
    "openvino": openai("!"),
    "mindie": {"type": "image_url", "image_url": "!"},
    "anthropic": base64_block("!"),
    "responses": response("!"),
}
GOOD = {
    **dict.fromkeys(OPENAI, openai(PNG)),
    "mindie": {"type": "image_url", "image_url": PNG},
    "anthropic": base64_block(DATA),
    "responses": response(URL),
}


@pytest.mark.parametrize("dialect", GOOD)
def test_how_many(dialect: str) -> None:
    """A request may have at most 20 images, and more are refused before any is read."""
    text = {"type": "input_text" if dialect == "responses" else "text", "text": "x"}
    half = {"role": "user", "content": [text, *[GOOD[dialect]] * (MAX_MEDIA // 2), text]}
    other = {"role": "assistant", "content": "a"}
    found = [part for message in decoded(dialect, half, other, half) for part in message.content]
    assert sum(isinstance(part, MediaPart) for part in found) == 20
    bad = {"role": "user", "content": [BAD[dialect]] * 10}
    error = refusal(dialect, bad, other, half, {"role": "user", "content": [GOOD[dialect]]})
    assert error.param == ("input" if dialect == "responses" else "messages")
    what = "images, videos and sounds" if dialect == "mindie" else "images"
    assert f"'21 {what}' is not allowed; expected at most 20 in a request" in error.message


def test_requests_that_are_only_counted() -> None:
    """Requests whose tokens are only counted may have the same images."""
    asked = {"model": "m", "messages": [{"role": "user", "content": [base64_block(DATA)]}]}
    jsonschema.validate(asked, COUNT_BODY.schema)
    assert read_count_request(asked).messages[0].content == user("anthropic", base64_block(DATA))
    found = read_response_count({"input": [{"role": "user", "content": [response(URL)]}]})
    assert found.messages[0].content == user("responses", response(URL))
    chat = read_tokenize({"model": "m", "messages": [{"role": "user", "content": [openai(PNG)]}]}, "").chat
    assert chat is not None
    assert chat.messages[0].content == user("openai", openai(PNG))


def test_what_a_response_repeats() -> None:
    """A response repeats neither the input nor its images."""
    codec = DIALECTS["responses"]
    raw = codec.decode(
        Head(codec.routes[0], {}),
        json.dumps(body("responses", {"role": "user", "content": [response(PNG)]})).encode(),
    )
    assert DATA.encode() not in raw.echoed


URLS = st.sampled_from([PNG, URL, "/a", "file:///a", "http://", "http://[", "data:image/png;base64,", "http://h:x/"])
KEYS = st.sampled_from(
    ["type", "url", "detail", "image_url", "source", "data", "media_type", "file_id", "cache_control"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | URLS | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)
TYPES = st.sampled_from(["image_url", "image", "input_image", "base64", "url", "image/png", "auto", "ephemeral"])
FUZZED = settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@FUZZED
@given(
    part=st.dictionaries(KEYS, JSON | TYPES | st.dictionaries(KEYS, JSON | TYPES | st.text(), max_size=4), max_size=4),
    kind=st.sampled_from(["image_url", "image", "input_image"]),
    role=st.sampled_from(["user", "assistant", "system"]),
)
def test_junk_is_read_or_refused(part: dict[str, Any], kind: str, role: str) -> None:
    """Any part is an image or an error of the caller's with a short message, in every dialect."""
    for dialect in GOOD:
        for junk in (part, part | {"type": kind}):
            _read(DIALECTS[dialect], dialect, {"role": role, "content": [junk]})


@FUZZED
@given(url=st.text(max_size=30) | st.builds(str.__add__, URLS, st.text(max_size=10)))
def test_junk_urls(url: str) -> None:
    """Any accepted URL gives a content and a source, and the schema accepts it too."""
    for dialect, part in (
        ("openai", openai(url)),
        ("mindie", {"type": "image_url", "image_url": url}),
        ("responses", response(url)),
        ("anthropic", source(type="url", url=url)),
    ):
        found = _read(DIALECTS[dialect], dialect, {"role": "user", "content": [part]})
        if found is not None:
            (image,) = found.messages[0].content
            assert isinstance(image, MediaPart)
            assert image.content
            assert bool(image.place) == (image.source != "data")
            assert jsonschema.Draft202012Validator(DIALECTS[dialect].request_schemas["chat"]).is_valid(
                body(dialect, {"role": "user", "content": [part]})
            )


def _read(codec: Any, dialect: str, message: dict[str, Any]) -> RawChat | None:
    read: Callable[[dict[str, Any]], Any] | None = getattr(codec, "read", None)
    try:
        if read is not None:
            found = read(body(dialect, message))
        else:
            route = next(route for route in codec.routes if route.task in ("chat", None))
            found = codec.decode(Head(route, {}), json.dumps(body(dialect, message)).encode())
    except InvalidField as refused:
        message_length = len(refused.message)
    else:
        assert isinstance(found, RawChat)
        return found
    assert message_length < 600
    return None
