"""Large bodies and large replies beside a loop that has other streams to serve."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from mlflow_llm.serving.frontend import invoke
from mlflow_llm.serving.frontend.offload import Offload
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.wire import bodies
from mlflow_llm.serving.interface.errors import MAX_SHOWN_VALUE, InvalidField

TEXT = "some words, and more of them. "
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 100}], "max_tokens": 1}),
    "control tokens": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "</s>" * 1200}]}),
    "completions": ("/v1/completions", {"prompt": TEXT * 100, "max_tokens": 1}),
    "token ids": ("/v1/completions", {"prompt": [1] * 3000, "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": [TEXT] * 100}),
    "refused": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 10_000}]}),
}


@pytest.fixture
def turning() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap a function so that it returns only after the event loop has turned ten times while it ran."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            over = threading.Event()
            loop.loop.run_callback_threadsafe(lambda: gevent.spawn(turn, over))
            assert over.wait(240), "the loop stood still"
            return function(*args, **named)

        return wrapped

    def turn(over: threading.Event) -> None:
        for _ in range(10):
            gevent.sleep(0)
        over.set()

    loop = gevent.get_hub()
    return wrap


@pytest.mark.parametrize("kind", BODIES)
def test_the_loop_turns_while_a_body_is_read(
    make: Callable[..., WorkerState], monkeypatch: pytest.MonkeyPatch, turning: Any, kind: str
) -> None:
    """The event loop goes on while a large body is decoded and validated and a large reply is written."""
    server, seen = make(offload_bytes=2048), []
    for name in ("_decode", "prepare", "_whole") if kind == "embeddings" else ("_decode", "prepare"):
        function = turning(getattr(invoke, name))

        def noted(*args: Any, name: str = name, function: Callable[..., Any] = function, **named: Any) -> Any:
            seen.append(name)
            return function(*args, **named)

        monkeypatch.setattr(invoke, name, noted)
    path, body = BODIES[kind]
    client = create_app(server).test_client()
    answer = gevent.spawn(lambda: client.post(path, json={"model": "assistant", **body})).get()
    if kind in ("refused", "control tokens"):
        assert answer.status_code == 400
        assert "4096 tokens" in answer.json["error"]["message"]
    else:
        assert answer.status_code == 200
    assert seen == ["_decode", "prepare"] + ["_whole"] * (kind == "embeddings")


def test_an_error_of_a_thread_is_raised_here_and_printed_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    """Bad input found on a thread raises the same error as on the loop, and logs no traceback."""

    def refuse() -> None:
        raise InvalidField("messages", 1, "a list")

    def ask() -> str:
        with pytest.raises(InvalidField) as caught:
            Offload(0)(1, refuse)
        return caught.value.message

    assert gevent.spawn(ask).get() == "messages: 1 is not allowed; expected a list"
    gevent.sleep(0.01)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("announced", [True, False])
def test_the_loop_turns_between_pieces_of_a_body(announced: bool) -> None:
    """The event loop goes on between reads of megabytes that have already arrived."""
    data = b"x" * (10 * bodies.READ_CHUNK_BYTES)
    environ: dict[str, Any] = {"wsgi.input": io.BytesIO(data)}
    environ |= {"CONTENT_LENGTH": str(len(data))} if announced else {"wsgi.input_terminated": True}
    turns, reading = 0, gevent.spawn(bodies.read_body, environ, len(data))
    while not reading.ready():
        gevent.sleep(0)
        turns += 1
    assert reading.get() == data
    assert turns >= 9


@pytest.mark.parametrize("make_value", [list, tuple, lambda n: dict.fromkeys(n, "x" * 10**6)])
def test_a_refused_value_is_shown_by_its_beginning(make_value: Callable[..., Any]) -> None:
    """A message shows a value's first characters, as they are in the whole of it, and looks at no more."""

    class Counted(int):
        seen = 0

        def __repr__(self) -> str:
            Counted.seen += 1
            return int.__repr__(self)

    value = make_value(map(Counted, range(10**5)))
    message = InvalidField("field", value, "less").message
    assert Counted.seen <= MAX_SHOWN_VALUE
    small = make_value(map(Counted, range(40)))
    assert message.split(" is not allowed")[0][: MAX_SHOWN_VALUE - 1] == f"field: {small!r}"[: MAX_SHOWN_VALUE - 1]
