"""Mutated and hostile requests to every inference route, in process; ``tests/fuzz.py`` does it for hours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from fuzz import MODEL, Mutator, Target, fault, targets

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app

TARGETS = list(targets())
MUTATED = 60  # of each sound request
OBJECTS = [target for target in TARGETS if not target.tail]
FIRST = {target.path: target for target in reversed(OBJECTS)}.values()  # of each route


def name_of(target: Target) -> str:
    return f"{target.dialect.name}-{target.path}-{TARGETS.index(target)}"


@pytest.fixture(scope="module")
def patient(make: Callable[..., WorkerState]) -> FlaskClient:
    return create_app(make(refusals_per_minute=0)).test_client()


def post(client: FlaskClient, target: Target, body: bytes, **headers: str) -> Any:
    kind = "application/octet-stream" if target.tail else "application/json"
    return client.post(target.path, data=body, headers={"Content-Type": kind} | headers)


def check(target: Target, answer: Any, body: bytes) -> None:
    wrong = fault(target, answer.status_code, answer.headers, answer.data)
    assert wrong is None, f"{wrong}: {body[:2000]!r}"


def test_every_route_is_tried() -> None:
    """Each inference route of each dialect has a valid request to mutate."""
    assert {route.path for dialect in DIALECTS.values() for route in dialect.routes} == {
        route.path
        for target in TARGETS
        for route in target.dialect.routes
        if route.path.replace("<name>", MODEL).replace("<model_version>", "1") == target.path
    }


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_mutated_requests(patient: FlaskClient, target: Target) -> None:
    """Any mutated request is answered or refused in its dialect's form."""
    mutator = Mutator(name_of(target))
    for _ in range(MUTATED):
        body, headers = mutator.request(target)
        check(target, patient.post(target.path, data=body, headers=headers), body)


def large(sound: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Return bodies of 10 MB by their kind."""
    text = json.dumps(sound)
    yield "10 MB of an unknown field", json.dumps({**sound, "filler": "x" * 10_000_000}).encode()
    if "hello" in text:
        yield "10 MB of text", text.replace("hello", "x" * 10_000_000).encode()
    yield "10 MB of nothing", b"{" + b" " * 10_000_000
    yield "10 MB of small values", (text[:-1] + ', "metadata": [' + "0," * 5_000_000 + "0]}").encode()


def hostile(sound: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Return bodies that are hard on a parser, by their kind."""
    text = json.dumps(sound)
    field = json.dumps(next(name for name in sound if name not in ("id", "model")))

    def replaced(by: str) -> bytes:
        return (text[:-1] + f", {field}x: {by}" + "}").replace(f"{field}x", field).encode()

    def added(by: str) -> bytes:
        return (text[:-1] + ', "metadata": ' + by + "}").encode()

    for depth in (100, 1000, 100_000):
        yield f"{depth} deep", added("[" * depth + "]" * depth)
        yield f"{depth} objects deep", added('{"a":' * depth + "1" + "}" * depth)
        yield f"{depth} open", added("[" * depth)
    for raw in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"):
        yield f"invalid UTF-8 {raw!r}", text.encode().replace(b'"', b'"' + raw, 4)
        yield f"a value of {raw!r}", text[:-1].encode() + b', "user": "' + raw + b'"}'
    yield "half a surrogate pair", added('"\\ud800"')
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "-" + "9" * 40, "1.5e-400"):
        yield f"a number {number[:10]}", added(number)
        yield f"numbers {number[:10]}", added(f"[{number}, {number}]")
    yield "duplicate keys", replaced("1")
    yield "duplicate keys within", added('{"a": 1, "a": 2}')
    yield "duplicate keys, escaped", added('{"a": 1, "\\u0061": 2}')
    for other in (b"", b" ", b"null", b"[]", b'"a"', b"\0", b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16")):
        yield f"no object {other[:8]!r}", other


@pytest.mark.parametrize("target", OBJECTS, ids=name_of)
def test_hostile_bodies_are_refused(patient: FlaskClient, target: Target) -> None:
    """Large, deep and broken bodies, with invalid numbers or duplicate keys, are a 4xx with the reason in the dialect's
    form.
    """
    sound = dict(target.body)
    for what, body in (*hostile(sound), *(large(sound) if target in FIRST else ())):
        answer = post(patient, target, body)
        assert 400 <= answer.status_code < 500, (what, answer.status_code, answer.data[:300])
        check(target, answer, body)
        if what.startswith("duplicate"):
            assert "twice" in answer.text, (what, answer.text[:300])


BINARY = [target for target in TARGETS if target.tail]
LIES: tuple[tuple[str, Any], ...] = (
    ("shape", [1, 4]),
    ("shape", [1, 2**31]),
    ("shape", [2**62, 2**62]),
    ("shape", [-1]),
    ("shape", [0, 0]),
    ("shape", [1] * 1000),
    ("datatype", "INT64"),
    ("datatype", "FP32"),
    ("parameters", {"binary_data_size": 11}),
    ("parameters", {"binary_data_size": 13}),
    ("parameters", {"binary_data_size": -1}),
    ("parameters", {"binary_data_size": 2**63}),
    ("parameters", {"binary_data_size": "12"}),
    ("parameters", None),
)


@pytest.mark.parametrize("target", BINARY, ids=name_of)
def test_tensors_with_wrong_sizes(patient: FlaskClient, target: Target) -> None:
    """A shape, datatype, size or header that does not fit the bytes is refused."""
    for name, lie in LIES:
        first, *rest = target.body["inputs"]
        head = json.dumps({**target.body, "inputs": [{**first, name: lie}, *rest]}).encode()
        answer = post(patient, target, head + target.tail, **{"Inference-Header-Content-Length": str(len(head))})
        assert answer.status_code == 400, (name, lie, answer.text[:300])
        check(target, answer, head)
    head = json.dumps(target.body).encode()
    for length in (
        "0",
        "1",
        "-1",
        str(len(head) - 1),
        str(len(head) + 1),
        str(len(head) + 10**9),
        "1e3",
        "x",
        "9" * 40,
    ):
        answer = post(patient, target, head + target.tail, **{"Inference-Header-Content-Length": length})
        assert answer.status_code == 400, (length, answer.text[:300])
        check(target, answer, head)
