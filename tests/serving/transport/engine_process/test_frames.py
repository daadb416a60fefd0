"""The framing of a step's events: one frame per client, unless it has many logits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
from offline_server import ONE, offline_server
from transport_place import completion

from mlflow_llm.serving.interface.events import Finished, Logits
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.engine_process import server as module
from mlflow_llm.serving.transport.engine_process.server import LOCAL


def test_many_logits_are_several_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is sent as soon as it has so many bytes of logits, and events stay in order."""
    request = completion("a", max_tokens=1, n=4)
    assert request.sampling is not None
    sampling = msgspec.structs.replace(request.sampling, context_logits=True, generation_logits=True)
    monkeypatch.setattr(module, "FRAME_BYTES", 20_000)  # two contexts of three rows of 1,000 numbers
    with offline_server(tmp_path) as server:
        server.handle(ONE, m.Submit(1, msgspec.structs.replace(request, sampling=sampling)))
        server.handle(ONE, m.Submit(2, completion("b", max_tokens=1, n=4)))
        server.sent.clear()
        server.send_events(server.core.step(), 1)
        frames = [message.items for message in server.sent[ONE] if isinstance(message, m.Events)]
        sizes = [sum(len(e.data) for _, e in items if isinstance(e, Logits)) for items in frames]
        assert len(frames) == 3
        assert all(20_000 <= size < 20_000 + 12_000 for size in sizes[:-1])
        assert sum(sizes) == 4 * (3 + 1) * 4000
        events = [(number, event) for items in frames for number, event in items]
        assert [event.index for number, event in events if number == 1 and isinstance(event, Finished)] == [0, 1, 2, 3]
        assert sum(number == 2 for number, _ in events) == 8


def test_messages_are_taken_between_steps_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is work messages are received between steps without waiting."""
    with offline_server(tmp_path) as server, zmq.Context() as context:
        router, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind("inproc://engine")
        client.setsockopt(zmq.IDENTITY, ONE[1:])
        client.connect("inproc://engine")
        server.sockets[LOCAL] = router
        server.handle(ONE, m.Submit(1, completion("a", max_tokens=50)))
        monkeypatch.setattr(server.poller, "poll", lambda wait: 1 / 0)
        server.take()
        client.send(m.encode(m.Submit(2, completion("b", max_tokens=50))))
        server.take()
        assert server.core.health().num_running == 2
        router.close(0)
        client.close(0)
