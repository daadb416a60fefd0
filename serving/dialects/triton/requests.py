"""Requests of ``generate`` and ``generate_stream`` in MindIE's form: ``id``, ``text_input`` and ``parameters``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ...interface.errors import InvalidField
from ...interface.labels import Labels
from ...interface.readers import INT32_MAX, UINT64_MAX, boolean, integer, number, one_of, reader, text
from ...interface.request import RawCompletion, RawSampling
from ..fields.fields import Field, Table
from ..fields.tables import OPENAI
from ..mindie.requests import FLOAT_MAX

MAX_TEXT = 512 * 2**10  # characters
MAX_NEW_TOKENS = 20  # the default
ID = re.compile(r"[A-Za-z0-9_-]{1,256}")


@reader(type="string", minLength=1, maxLength=MAX_TEXT)
def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(path, value, "a string")
    if not 1 <= len(value) <= MAX_TEXT:
        raise InvalidField(path, f"{len(value)} characters", f"a text of 1 to {MAX_TEXT} characters")
    return str(_UNICODE(value, path))


@reader(type="object")
def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object")
    return value


_UNICODE = text(re.compile(r"[\s\S]*"), "a string")

_POSITIVE = number(0, FLOAT_MAX, above=True)


def _shared(name: str, /, **changes: Any) -> Field:
    """Return the field as OpenAI's completions have it, with this document's ``changes``."""
    return OPENAI["completions"].fields[name].replace(**changes)


PARAMETERS = Table(
    required="",
    fields={
        field.name: field
        for field in (
            Field(
                name="details",
                read=boolean,
                target="details",
                description="return details in each event",
                default=False,
            ),
            Field(
                name="do_sample",
                read=boolean,
                target="do_sample",
                description="sample tokens; false: always take the most probable one",
                default=False,
            ),
            _shared(
                "max_tokens",
                read=integer(1, INT32_MAX),
                name="max_new_tokens",
                description="maximum number of tokens to generate, at most maxIterTimes",
                default=MAX_NEW_TOKENS,
            ),
            _shared("repetition_penalty", read=_POSITIVE, default=1.0),
            _shared("seed", read=integer(1, UINT64_MAX)),
            _shared("temperature", read=_POSITIVE, description="sampling temperature", default=1.0),
            _shared(
                "top_k",
                read=integer(0, INT32_MAX),
                description="the k most probable tokens, fewer than the vocabulary has; 0: all",
                default=0,
            ),
            _shared("top_p", default=1.0),
            Field(
                name="batch_size",
                read=integer(1, INT32_MAX),
                target=None,
                note="how many sequences run together is the engine's affair; details say how many did",
            ),
            _shared("typical_p", default_words=""),
            Field(
                name="watermark",
                read=one_of(False, why="watermarks are not supported"),
                target=None,
                note="watermarks are not supported",
            ),
            Field(
                name="perf_stat",
                read=boolean,
                target="perf_stat",
                description="the last event has the duration of each step",
                default=False,
            ),
        )
    },
)
BODY = Table(
    required="text_input",
    fields={
        field.name: field
        for field in (
            Field(
                name="id",
                read=text(ID, "1 to 256 letters, digits, underscores and dashes"),
                target="id",
                description="returned in the reply; random by default",
            ),
            Field(name="text_input", read=_text, target="text", description="the prompt, as it goes to the model"),
            Field(name="parameters", read=_object, target="parameters"),
        )
    },
)


class Echo(Struct, frozen=True, kw_only=True, array_like=True):
    """The parts of a request that its reply repeats or needs. ``version`` is the one in the path."""

    id: str | None = None
    version: str | None = None
    details: bool = False
    perf_stat: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Echo)


def echo_of(echoed: bytes) -> Echo:
    """Decode what ``read_generate`` kept of a request."""
    return _decoder.decode(echoed)


def body_schema() -> dict[str, Any]:
    """Return the JSON schema of the bodies that ``read_generate`` accepts."""
    found = BODY.schema()
    found["properties"]["parameters"] = {"anyOf": [PARAMETERS.schema(), {"type": "null"}]}
    return found


def read_generate(body: Mapping[str, Any], *, version: str | None, stream: bool) -> RawCompletion:
    """Read a body. Raises ``InvalidField``, which names a parameter as ``parameters.<name>``."""
    found = BODY.read(body)
    try:
        given = PARAMETERS.read(found.get("parameters", {}))
    except InvalidField as error:
        error.rename(f"parameters.{error.param}")
        raise
    sampling = {key.removeprefix("sampling."): given.pop(key) for key in list(given) if key.startswith("sampling.")}
    if not given.get("do_sample"):
        sampling["temperature"] = 0.0  # greedy, among the tokens that top_k, top_p and typical_p leave
    details, perf_stat = bool(given.get("details")), bool(given.get("perf_stat"))
    echo = Echo(id=found.get("id"), version=version, details=details, perf_stat=perf_stat)
    return RawCompletion(
        prompts=(found["text"],),
        use_raw_prompt=True,
        stream=stream,
        timings=details or perf_stat,
        labels=Labels(client_request_id=echo.id) if echo.id else None,
        echoed=_encoder.encode(echo),
        sampling=RawSampling(exact_bounds=True, **_with_default_length(sampling)),
    )


def _with_default_length(sampling: dict[str, Any]) -> dict[str, Any]:
    """Add the default of ``max_tokens``, which is reduced to what context and endpoint allow; a requested value is
    not."""
    return sampling if "max_tokens" in sampling else sampling | {"max_tokens": MAX_NEW_TOKENS, "clip_max_tokens": True}
