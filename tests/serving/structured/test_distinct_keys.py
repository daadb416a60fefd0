"""Keys that come twice."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest

from mlflow_llm.serving.structured.distinct_keys import Keys, KeyTokens

TABLE = [b"a", b'"', b'a"', b'"a"', b'":', b'","a":', b', "a"', b'b"', b'ab"', b"{", b"\\", b'}, "a"']
TWICE = b'{"a":1,"a":'
TOKENS = KeyTokens([*TABLE, TWICE])


NAMES = ["a", "b", 'a"', "\\", "{", "é", ""]


def note(found: list[bool], pairs: list[tuple[str, object]]) -> None:
    found.append(len(pairs) > len(dict(pairs)))


def forbidden(text: str) -> set[bytes]:
    keys = Keys()
    keys.feed(text.encode())
    return {[*TABLE, TWICE][token] for token in keys.forbidden(TOKENS, lambda _: True)}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('{"', set()),
        ('{"a": 1, "', {b'a"'}),
        ('{"ab": 1, "a', {b'b"'}),
        ('{"a": 1, "a', {b'"', b'":', b'","a":', b'"a"'}),
        ('{"a": 1, "b', set()),
        ('{"a": 1, ', {b'"a"', b', "a"', TWICE}),
        ('{"a": 1', {b', "a"', TWICE}),
        ('{"a": "x', {b'","a":'}),
        ('{"a": {"b": 1', {b'}, "a"', TWICE}),
        ('{"a": {"', set()),
        ('{"a": [{"a": 1}, {"', set()),
        ('{"a\\"": 1, "a\\', set()),
        ('["a", "', set()),
        ('"{\\"a\\": 1, \\"', set()),
        ('<call>{"a": 1, "', {b'a"'}),
        ('if (x) { printf("a", "', set()),
        ('char *x[] = {"a", "', set()),
        ('[1] {"name": "f", "arguments": {"a": 1, "', {b'a"'}),
    ],
)
def test_tokens_with_which_a_key_comes_twice_are_forbidden(text: str, tokens: set[bytes]) -> None:
    """Tokens that would repeat a key are forbidden, within the key, before it and as a whole; inner objects have their
    own keys.
    """
    assert forbidden(text) == tokens


def test_keys_are_followed_as_a_reader_of_json_finds_them() -> None:
    """For random values fed in pieces ``came_twice`` is set exactly where a JSON reader finds a duplicate key."""
    draw = random.Random(0)

    def text(depth: int) -> str:
        kind = draw.random()
        if depth and kind < 0.5:
            pairs = (f"{json.dumps(draw.choice(NAMES))}: {text(depth - 1)}" for _ in range(draw.randint(0, 3)))
            return "{" + ", ".join(pairs) + "}"
        if depth and kind < 0.7:
            return "[" + ", ".join(text(depth - 1) for _ in range(draw.randint(0, 3))) + "]"
        return json.dumps(draw.choice([1, None, '{"a', "a\\", "]", ""]))

    for _ in range(500):
        written = text(4)
        found: list[bool] = []
        json.loads(written, object_pairs_hook=partial(note, found))
        keys, data = Keys(), written.encode()
        while data:
            size = draw.randint(1, 5)
            keys.feed(data[:size])
            data = data[size:]
        assert keys.came_twice == any(found), written
