"""Requests that go on for as long as a test needs, and streams of them that are paused."""

from __future__ import annotations

import msgspec
from transport_place import completion, eventually

from mlflow_llm.serving.transport.client.event_stream import HIGH_EVENTS

LENGTH = 100 * HIGH_EVENTS  # an engine's progress depends on the machine: it goes on until the request to pause arrives


def long(name="", length=LENGTH, **given):
    """Return a request of ``length`` tokens a sequence."""
    request = completion(name, max_tokens=length, **given)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=()))


def submit_paused(engine, *requests):
    """Their streams, once nothing of any of them is in the engine, whose last word of each has arrived.

    An engine that ran while this process did not may have come to a request's end before the word to pause: that one is
    submitted again."""
    streams = {request.request_id: engine.submit(request) for request in requests}

    def are_paused():
        running = {one.number: one for one in engine.state.running()}
        for request in requests:
            stream = streams[request.request_id]
            if stream.handle.number and stream.handle.number not in running:
                stream.close()
                streams[request.request_id] = engine.submit(request)
        found = [running.get(stream.handle.number) for stream in streams.values()]
        return all(one is not None and one.phase == "paused" for one in found)

    if not eventually(are_paused):
        states = [(one.phase, one.wanted, [len(ids) for ids in one.delivered]) for one in engine.state.running()]
        raise AssertionError(f"not paused: {states}")
    return list(streams.values())
