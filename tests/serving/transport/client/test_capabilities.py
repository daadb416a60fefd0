"""Requests for capabilities that an engine lacks, refused or reduced by its client with the reason."""

from __future__ import annotations

import msgspec
import pytest
from transport_place import completion

from mlflow_llm.serving.interface.engine import Capabilities, EngineInfo, Health
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.client.protocol_state import ClientState

INFO = EngineInfo(
    content_hash="x", tasks=("completions",), vocab_size=9, max_model_len=99, max_num_seqs=9, max_kv_tokens=99,
    backend="other",
)  # fmt: skip


class Sink(list):
    """A reader that takes nothing: its buffer is always full."""

    paused, is_full, is_drained = False, True, False
    put = list.append


def welcome(state: ClientState, resumes: bool) -> None:
    info = msgspec.structs.replace(INFO, capabilities=Capabilities(resumes=resumes))
    state.hello("")
    state.outbox.clear()
    state.receive(m.encode(m.Welcome("g", info, Health(status="ready"))))


def outgoing(state: ClientState) -> list[str]:
    frames = [type(m.decode_for_engine(frame)).__name__ for frame in state.outbox]
    state.outbox.clear()
    return frames


@pytest.mark.parametrize("resumes", [True, False])
def test_only_an_engine_that_resumes_gets_a_request_again(resumes: bool) -> None:
    """After a death requests with delivered tokens continue if the engine can resume them and fail otherwise; the rest
    restart.
    """
    state, begun, fresh = ClientState("c"), Sink(), Sink()
    welcome(state, resumes)
    number = state.submit(completion("begun"), begun)
    state.submit(completion("fresh"), fresh)
    begun.is_full = fresh.is_full = False
    state.receive(m.encode(m.Events(1, ((number, Tokens(0, (5,))),))))
    state.disconnected()
    welcome(state, resumes)
    assert outgoing(state) == ["Submit"] * (2 if resumes else 1)
    assert [getattr(event, "kind", "") for event in begun[1:]] == ([] if resumes else ["engine_died"])
    assert fresh == []


@pytest.mark.parametrize("resumes", [True, False])
def test_only_a_request_that_can_be_resumed_is_paused(resumes: bool) -> None:
    """A request with a slow reader is paused only if its text could be resumed afterwards."""
    state = ClientState("c")
    welcome(state, resumes)
    number = state.submit(completion("slow"), Sink())
    outgoing(state)
    state.receive(m.encode(m.Events(1, ((number, Tokens(0, (5,))),))))
    assert outgoing(state) == (["Finish"] if resumes else [])
