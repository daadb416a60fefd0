"""Streams whose reply takes long to begin: what clients get meanwhile, and how such a stream goes on and fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import anthropic
import gevent
import httpx
import openai
import pytest
from gated_core import steps_up_to
from gevent.event import Event
from instant_model import write_instant_model
from serving_process import GATED_CORE, Running, running

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.dialects.triton.requests import read_generate
from mlflow_llm.serving.frontend.streams.first_bytes import FirstBytes, Patience
from mlflow_llm.serving.frontend.streams.in_flight import ClientGone, InterruptibleIterator
from mlflow_llm.serving.frontend.streams.stream import Stream
from mlflow_llm.serving.interface.errors import DeadlineExceeded, InvalidField, ServingError
from mlflow_llm.serving.interface.reply import Delta, Done, Ended, Piece, Usage
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.observability.access_record import AccessRecord

NAME: ContextVar[str] = ContextVar("name")
REPLY: tuple[Piece, ...] = (
    Delta(index=0, text="He", num_tokens=1, token_ids=(1,)),
    Delta(index=0, text="y", num_tokens=1, token_ids=(2,)),
    Ended(index=0, finish_reason="stop"),
    Done(usage=Usage(prompt_tokens=2, completion_tokens=2)),
)
TRITON = b'{"text_input": "a", "max_tokens": 4, "temperature": 1.0}'
STREAM = DIALECTS["generate"].routes[-1]
ECHOED = {
    "generate": read_generate({"text_input": "a"}, version=None, stream=True).echoed,
    "triton-generate": DIALECTS["triton-generate"].decode(Head(STREAM, {}), TRITON).echoed,
}
KINDS = [
    (name, task)
    for name in DIALECTS
    for task in ("chat", "completions")
    if name not in ("kserve", "rerank") and (task == "chat" or name in ("openai", "databricks", "mlflow", "openvino"))
]
SIGNS = 3


class Slow:
    """A reply that begins when ``go`` is set, with ``error`` if there is one."""

    def __init__(self, dialect: str, task: str = "chat", *, error: ServingError | None = None, at_first: float = 0.0):
        request = ValidRequest(
            request_id="r1",
            task=task,  # type: ignore[arg-type]
            model="m",
            sequences=(Sequence(prompt_token_ids=(1, 2)),),
            sampling=Sampling(max_tokens=9),
            created=1,
        )
        self.go, self.ended, self.error = Event(), False, error
        self.record = AccessRecord(request_id="r1", method="POST", path="/")
        pull: InterruptibleIterator[Piece] = InterruptibleIterator(self._pieces())
        held = ExitStack()
        held.callback(self._end)
        held.callback(pull.close)
        encoder = DIALECTS[dialect].stream(request, ECHOED.get(dialect, b""))
        self.stream = Stream(encoder, pull, self.record, held, None, Patience(at_first, 0.001, pull.interrupt))

    def _pieces(self) -> Iterator[Piece]:
        self.go.wait()
        if self.error is not None:
            raise self.error
        yield from REPLY

    def _end(self) -> None:
        self.ended = True

    def begun(self) -> list[bytes]:
        """Return the first bytes and some signs of life; the reply has not begun."""
        self.stream.prime()
        return [next(self.stream) for _ in range(SIGNS)]

    def rest(self) -> bytes:
        self.go.set()
        return b"".join(self.stream)


def data(sent: bytes) -> list[Any]:
    lines = [line for line in sent.decode().split("\n") if line.startswith("data:") and line != "data: [DONE]"]
    return [json.loads(line[5:]) for line in lines]


def text(sent: bytes) -> str:
    found = ""
    for event in data(sent):
        choices = event.get("choices") or [{}]
        delta = event.get("delta") or choices[0].get("delta") or choices[0]
        said = delta if isinstance(delta, str) else delta.get("content") or delta.get("text")
        found += said or event.get("text_output") or ""
    return found


@pytest.mark.parametrize(("dialect", "task"), KINDS)
def test_a_stream_begins_before_its_reply(dialect: str, task: str) -> None:
    """Each dialect has bytes for a client that waits, more of them later, and then the same reply."""
    slow = Slow(dialect, task)
    begun = slow.begun()
    assert all(begun)
    assert all(chunk.endswith(b"\n\n") for chunk in begun)
    rest = slow.rest()
    assert text(b"".join(begun) + rest) == "Hey"
    assert (slow.ended, slow.record.finished) == (True, True)
    quick = Slow(dialect, task, at_first=60.0)
    quick.go.set()
    quick.stream.prime()
    whole = b"".join(quick.stream)
    assert whole.endswith(rest[-40:])


@pytest.mark.parametrize("dialect", ["openai", "databricks", "mlflow", "openvino", "mindie"])
@pytest.mark.parametrize("task", ["chat", "completions"])
def test_only_data_where_clients_know_nothing_else(dialect: str, task: str) -> None:
    """MLflow's clients raise at a comment: what is sent are chunks, the role once, and no text."""
    if dialect == "mindie" and task == "completions":
        return
    slow = Slow(dialect, task)
    begun = b"".join(slow.begun())
    slow.stream.close()
    assert all(line.startswith("data: {") for line in begun.decode().split("\n") if line)
    chunks = [event["choices"][0] for event in data(begun)]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * SIGNS
    if task == "chat":
        roles = ["assistant"] * SIGNS if dialect == "mindie" else ["assistant", None, None]
        assert [chunk["delta"].get("role") for chunk in chunks] == roles
        assert [chunk["delta"]["content"] for chunk in chunks] == [""] * SIGNS
    else:
        assert [chunk["text"] for chunk in chunks] == [""] * SIGNS


def test_pings_of_messages() -> None:
    """Anthropic's stream: the message's start, then pings."""
    slow = Slow("anthropic")
    kinds = [event["type"] for event in data(b"".join(slow.begun()))]
    assert kinds == ["message_start"] + ["ping"] * SIGNS
    assert data(slow.rest())[-1]["type"] == "message_stop"


def test_a_response_is_in_progress() -> None:
    """A response is created and in progress once; comments follow, which have no number."""
    slow = Slow("responses")
    sent = b"".join(slow.begun())
    assert [event["type"] for event in data(sent)] == ["response.created", "response.in_progress"]
    assert sent.endswith(b"\n\n: keep-alive\n\n: keep-alive\n\n")
    events = data(sent + slow.rest())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(("dialect", "task"), KINDS)
def test_an_error_after_the_beginning(dialect: str, task: str) -> None:
    """It is the dialect's event, the last of the stream; everything is released, and the record has its status."""
    error = DeadlineExceeded("timeout: late")
    slow = Slow(dialect, task, error=error)
    begun = b"".join(slow.begun())
    sent = begun + slow.rest()
    assert "timeout: late" in sent.decode()
    assert sent.endswith(b"\n\n")
    assert (slow.ended, slow.record.finished) == (True, True)


def test_an_error_before_it_has_its_own_status() -> None:
    """An error before the first byte is raised, so that it keeps its own status."""
    slow = Slow("openai", error=InvalidField("stop", "x", "y"), at_first=60.0)
    slow.go.set()
    with pytest.raises(InvalidField):
        slow.stream.prime()
    slow.stream.release()
    assert slow.ended


def test_a_client_that_leaves_meanwhile() -> None:
    """Nothing goes on for a client that does not wait any longer."""
    slow = Slow("openai")
    slow.begun()
    slow.stream.close()
    assert (slow.ended, slow.go.is_set()) == (True, False)
    with pytest.raises(StopIteration):
        next(slow.stream)


def test_a_disconnect_ends_the_wait() -> None:
    """The interruption of what makes the first bytes reaches the greenlet that waits for them."""
    slow = Slow("openai", at_first=60.0)
    patience = slow.stream.patience
    assert patience is not None
    gevent.spawn(patience.interrupt, ClientGone())
    with pytest.raises(ClientGone):
        slow.stream.prime()


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a server whose streams begin at once; its engine's steps may be held back."""
    bundle = write_instant_model(tmp_path_factory.mktemp("gated"), vocab_size=94)
    with running(bundle, core=GATED_CORE, stream_start_after=0.0, stream_keep_alive=0.05) as server:
        yield server


ASK: dict[str, Any] = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


def first_bytes(make: Any) -> FirstBytes:
    """Have first bytes made that are waited for as long as it takes."""
    return FirstBytes(make, Patience(600.0, 600.0, lambda error: None))


def test_streams_share_a_greenlet() -> None:
    """The greenlet that has made first bytes, or failed to, makes those of the next stream, in its context."""
    seen = []

    def make() -> bytes:
        seen.append((gevent.getcurrent(), NAME.get()))
        gevent.sleep(0)
        if NAME.get() == "b":
            raise DeadlineExceeded("late")
        return NAME.get().encode()

    for name in ("a", "b", "c"):
        NAME.set(name)
        first = first_bytes(make)
        assert first.are_ready()
        if name == "b":
            with pytest.raises(DeadlineExceeded):
                first.get()
        else:
            assert first.get() == name.encode()
    assert [name for _, name in seen] == ["a", "b", "c"]
    assert len({id(greenlet) for greenlet, _ in seen}) == 1


def test_a_slow_stream_holds_no_other_up() -> None:
    """Streams that begin meanwhile have greenlets of their own, and each gets its own bytes."""
    go = Event()

    def slow() -> bytes:
        go.wait()
        return b"slow"

    waiting = [first_bytes(slow) for _ in range(100)]
    other = first_bytes(lambda: b"other")
    assert other.are_ready()
    assert other.get() == b"other"
    go.set()
    for one in waiting:
        assert one.are_ready()
        assert one.get() == b"slow"
    again = first_bytes(lambda: b"again")
    assert again.are_ready()
    assert again.get() == b"again"


def test_bytes_while_nothing_is_computed(gated: Running) -> None:
    """Over a socket: the head and chunks come while the engine takes no step, and the rest is the reply."""
    ask = ASK | {"model": "assistant"}
    whole = httpx.post(f"{gated.url}/v1/chat/completions", json=ask, timeout=240)
    wanted = whole.json()["choices"][0]["message"]["content"]
    with httpx.Client(timeout=240) as client:
        with steps_up_to(gated.model_dir, 0):
            sending = client.stream("POST", f"{gated.url}/v1/chat/completions", json=ask | {"stream": True})
            answer = sending.__enter__()
            lines = answer.iter_lines()
            first = [next(lines) for _ in range(6)]
        sent = "\n".join((*first, *lines))
        sending.__exit__(None, None, None)
    assert answer.status_code == 200
    assert text(sent.encode()) == wanted


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "databricks"])
def test_unmodified_clients_bear_it(gated: Running, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's, Anthropic's and MLflow's own clients read such a stream as any other."""
    if api == "messages":
        claude = anthropic.Anthropic(base_url=gated.url, api_key="x", max_retries=0)
        with steps_up_to(gated.model_dir, 0):
            stream: Any = iter(
                claude.messages.create(max_tokens=4, messages=ASK["messages"], model="assistant", stream=True)
            )
            assert next(stream).type == "message_start"
        assert [event.type for event in stream][-1] == "message_stop"
        claude.close()
        return
    if api == "databricks":
        from mlflow.deployments import get_deploy_client

        monkeypatch.setenv("DATABRICKS_HOST", gated.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", "token")
        with steps_up_to(gated.model_dir, 0):
            found = get_deploy_client("databricks").predict_stream(endpoint="assistant", inputs=dict(ASK))
            chunks = [next(found) for _ in range(SIGNS)]
        chunks += list(found)
        assert chunks[-1]["usage"]["completion_tokens"] == 4
        return
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="x", max_retries=0) as gpt:
        with steps_up_to(gated.model_dir, 0):
            if api == "chat":
                stream = gpt.chat.completions.create(**ASK, model="assistant", stream=True)
            elif api == "completions":
                stream = gpt.completions.create(model="assistant", prompt="Hi", max_tokens=4, stream=True)
            else:
                stream = gpt.responses.create(model="assistant", input="Hi", max_output_tokens=4, stream=True)
            first = next(stream)
        *_, last = stream
    if api == "responses":
        assert (first.type, last.response.usage.output_tokens) == ("response.created", 4)
    else:
        assert last.choices[0].finish_reason == "length"
