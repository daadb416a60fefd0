"""Logits between engine and caller: each row once, whatever happens on the way, and no more than a reader takes."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from processes import gone
from transport_place import by_sequence, completion, eventually

from mlflow_llm.serving.interface.events import Event, Finished, Logits, PromptScored, TokenLogprob, Tokens
from mlflow_llm.serving.interface.request import Beams, Sequence, ValidRequest
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport.client.event_stream import HIGH_BYTES, LOW_BYTES, EventBuffer, event_buffer
from mlflow_llm.serving.transport.client.inflight import InflightRequest

MAX_TOKENS = 1000


class Sink(list[Event]):
    """A reader that keeps up."""

    paused, is_full, is_drained = False, False, False
    put = list.append


def asking(request: ValidRequest, **more: Any) -> ValidRequest:
    assert request.sampling is not None
    asked = {"context_logits": True, "generation_logits": True, **more}
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **asked))


def rows(of: Any, start: int, stop: int, index: int = 0) -> Logits:
    return Logits(index, of, start, stop - start, bytes(b for row in range(start, stop) for b in [row] * 8))


def gathered(events: Iterable[Event]) -> dict[Any, bytes]:
    found: dict[Any, bytes] = {}
    for event in events:
        if isinstance(event, Logits):
            key = (event.of, event.index)
            assert event.start * 8 == len(found.get(key, b""))
            found[key] = found.get(key, b"") + event.data
    return found


def test_a_next_attempt_gives_what_is_missing() -> None:
    """The next attempt asks for context logits from the first missing row on, and repeated rows are passed on once."""
    sink = Sink()
    inflight = InflightRequest(asking(completion(prompt=(1, 2, 3, 4, 5))), 1, sink)
    for event in (rows("context", 0, 2), rows("context", 2, 3)):
        inflight.deliver(event)
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert again.sequences[0].context_logits_from == 3
    for event in (rows("context", 2, 4), rows("context", 4, 5), rows("generation", 0, 1), rows("generation", 1, 2)):
        inflight.deliver(event)
    inflight.deliver(Tokens(0, (7,)))  # what came with row 1 is lost
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert again.sequences[0].context_logits_from == 5
    assert again.sequences[0].resumed_token_ids == (7,)
    for event in (rows("generation", 1, 2), Tokens(0, (8,)), rows("generation", 2, 3), Tokens(0, (9,))):
        inflight.deliver(event)
    assert gathered(sink) == {
        ("context", 0): rows("context", 0, 5).data, ("generation", 0): rows("generation", 0, 3).data
    }  # fmt: skip


def test_a_prompt_that_was_read_is_not_read_again() -> None:
    """A prompt-only request is not run again once all that it asked of its prompt has come."""
    sink = Sink()
    both = asking(completion(max_tokens=0), prompt_logprobs=0, logprobs=0, generation_logits=False)
    inflight = InflightRequest(both, 1, sink)
    inflight.deliver(rows("context", 0, 3))
    assert inflight.continuation(MAX_TOKENS) is not None
    inflight.deliver(PromptScored(0, (TokenLogprob(2, -1.0),)))
    assert inflight.continuation(MAX_TOKENS) is None
    assert isinstance(sink[-1], Finished)
    assert sink[-1].reason == "length"
    alone = InflightRequest(asking(completion(max_tokens=0), generation_logits=False), 1, sink)
    alone.deliver(rows("context", 0, 2))
    assert alone.continuation(MAX_TOKENS) is not None
    alone.deliver(rows("context", 2, 3))
    assert alone.continuation(MAX_TOKENS) is None


def test_a_search_that_is_run_again_gives_its_rows_once() -> None:
    """A search that is run again does not repeat rows that came before their tokens."""
    sink = Sink()
    request = asking(completion(n=2), beams=Beams(width=2))
    inflight = InflightRequest(request, 1, sink)
    inflight.deliver(rows("context", 0, 3))
    inflight.deliver(rows("generation", 0, 2))
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert again.sequences[0] == msgspec.structs.replace(request.sequences[0], context_logits_from=3)
    for event in (rows("generation", 0, 3), Tokens(0, (5, 6, 0)), Finished(0, "stop"), rows("generation", 0, 1, 1)):
        inflight.deliver(event)
    assert gathered(sink) == {
        ("context", 0): rows("context", 0, 3).data,
        ("generation", 0): rows("generation", 0, 3).data,
        ("generation", 1): rows("generation", 0, 1).data,
    }


def test_a_buffer_of_logits_is_full_by_bytes() -> None:
    """A buffer of logits is full by bytes before the usual number of events, and drained when few bytes are left."""
    buffer = event_buffer(asking(completion()), queue.SimpleQueue())
    part = Logits(0, "context", 0, 1, bytes(HIGH_BYTES // 8))
    for _ in range(8):
        assert not buffer.is_full
        buffer.put(part)
    assert buffer.is_full
    buffer.paused = True
    while not buffer.is_drained:
        buffer.get()
    assert buffer.events.qsize() <= LOW_BYTES * 8 // HIGH_BYTES
    assert not buffer.is_full
    assert type(event_buffer(completion(), queue.SimpleQueue())) is EventBuffer


@pytest.mark.parametrize("n", [2])
def test_an_unread_request_leaves_the_engine_which_is_killed(place: Any, make_bundle: Any, n: int) -> None:
    """A request paused for its unread bytes, whose engine is killed, gives an undisturbed engine's rows when read."""
    bundle = make_bundle(vocab_size=2**16)
    request = asking(completion(max_tokens=110, n=n, prompt=(4, 5, 6)), stop_token_ids=())
    sequences = tuple(
        Sequence(prompt_token_ids=s.prompt_token_ids, seed=s.seed, context_logits_from=3 * (i > 0))
        for i, s in enumerate(request.sequences)
    )
    request = msgspec.structs.replace(request, sequences=sequences)
    expected = list(InstantEngine(bundle).submit(request))
    with place.connect(bundle) as engine:
        stream = engine.submit(request)
        assert eventually(lambda: stream.buffer.paused and engine.health().num_running == 0)
        pid = engine.info.pid
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: gone(pid))
        found = list(stream)
    tokens = [event for event in found if not isinstance(event, Logits)]
    assert by_sequence(tokens) == by_sequence([event for event in expected if not isinstance(event, Logits)])
    for of in ("context", "generation"):
        for index in range(n):
            parts = [[e for e in events if isinstance(e, Logits) and (e.of, e.index) == (of, index)]
                     for events in (found, expected)]  # fmt: skip
            assert b"".join(e.data for e in parts[0]) == b"".join(e.data for e in parts[1])
            assert [e.start for e in parts[0]] == sorted({e.start for e in parts[0]})
    place.assert_clean()
