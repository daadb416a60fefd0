"""Requests that go on for as long as a test needs, and whether an engine has paused one."""

from __future__ import annotations

import msgspec
from transport_place import completion

from mlflow_llm.serving.transport.client.event_stream import HIGH

LENGTH = 100 * HIGH  # how far an engine gets is up to the machine: it goes on until the word to pause has reached it


def long(name="", length=LENGTH, **given):
    """A request of ``length`` tokens a sequence."""
    request = completion(name, max_tokens=length, **given)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=()))


def paused(engine, stream) -> bool:
    """Nothing of the request is in the engine, whose last word of it has arrived."""
    (running,) = [running for running in engine._state.running() if running.number == stream.handle.number] or [None]
    return running is not None and running.phase == "paused"
