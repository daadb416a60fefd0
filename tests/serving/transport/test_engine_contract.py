"""The contract of engines, over each backend in its own process: what clients rely on, whoever computes the tokens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_backends import BACKENDS, CONTEXT, VLLM_PYTHON, WITHOUT_VLLM, Backend, make_backend
from transport_place import Place, by_sequence, completion, eventually

from mlflow_llm.serving.interface.events import Failed, Finished, PromptScored, Timed, Tokens
from mlflow_llm.serving.interface.request import Beams, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.transport import connect

KILLS = int(os.environ.get("MLFLOW_LLM_KILLS", "1"))  # docs/contributing.md: 100 by hand
PARAMS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "vllm" and not VLLM_PYTHON, reason=WITHOUT_VLLM))
    for name in BACKENDS
]


class Engines:
    """A backend with a client of its engine process."""

    def __init__(self, backend: Backend, place: Place) -> None:
        self.backend, self.place = backend, place
        self.engine = connect(backend.bundle, backend.settings, state_dir=place.runtime, core=backend.core)


@pytest.fixture(scope="module", params=PARAMS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    place = Place()
    try:
        made = Engines(make_backend(request.param, tmp_path_factory.mktemp("model")), place)
        with made.engine:
            yield made
        place.assert_clean()
    finally:
        place.close()


def changed(request: ValidRequest, **sampling: Any) -> ValidRequest:
    assert request.sampling is not None
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))


def test_a_sequence_ends_once_and_counts_its_tokens(engines: Engines) -> None:
    """Each choice gets its tokens and one end, which counts them; the engine's own count is no smaller."""
    before = engines.engine.health().generated_tokens
    request = changed(completion(n=3, max_tokens=20), stop_token_ids=())
    tokens, ends = by_sequence(engines.engine.submit(request))
    assert {index: len(ids) for index, ids in tokens.items()} == {0: 20, 1: 20, 2: 20}
    for index in range(3):
        end = ends[index]
        assert isinstance(end, Finished)
        assert (end.reason, end.num_generated_tokens) == ("length", 20)
    assert eventually(lambda: engines.engine.health().generated_tokens >= before + 60)


def test_a_batch_changes_no_text(engines: Engines) -> None:
    """Requests that run together have the texts that they have alone, greedy and sampled."""
    requests = [completion(f"b{i}", temperature=float(i % 2), prompt=(i, 5, 9), max_tokens=24) for i in range(6)]
    alone = [by_sequence(engines.engine.submit(msgspec.structs.replace(one, request_id=f"alone {i}")))[0]
             for i, one in enumerate(requests)]  # fmt: skip
    streams = [engines.engine.submit(one) for one in requests]
    assert [by_sequence(stream)[0] for stream in streams] == alone


def test_a_stop_token_ends_a_text(engines: Engines) -> None:
    """A text ends with its first stop token, which it includes, unless ``min_tokens`` forbids it."""
    plain = changed(completion(temperature=0.0, max_tokens=12), stop_token_ids=())
    text = by_sequence(engines.engine.submit(plain))[0][0]
    stop = text[4]
    tokens, ends = by_sequence(engines.engine.submit(changed(plain, stop_token_ids=(stop,))))
    assert tokens[0] == text[: text.index(stop) + 1]
    assert ends[0].reason == "stop"  # type: ignore[union-attr]
    run = changed(plain, stop_sequences=(tuple(text[5:7]),))
    tokens, ends = by_sequence(engines.engine.submit(run))
    assert tuple(tokens[0][-2:]) == tuple(text[5:7])
    assert ends[0].reason == "stop"  # type: ignore[union-attr]


def test_a_seed_decides_a_text(engines: Engines) -> None:
    """The same seed gives the same text, and another seed another one."""
    texts = []
    for seed in (3, 3, 4):
        request = changed(completion(max_tokens=30), stop_token_ids=())
        sequence = msgspec.structs.replace(request.sequences[0], seed=seed)
        texts.append(by_sequence(engines.engine.submit(msgspec.structs.replace(request, sequences=(sequence,))))[0][0])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_text_goes_on_as_it_would_have(engines: Engines, temperature: float) -> None:
    """A request resumed after any of its tokens goes on with the rest of its text, which alone is sent."""
    assert engines.engine.info.capabilities.resumes
    request = changed(completion(temperature=temperature, max_tokens=16), stop_token_ids=(), presence_penalty=0.5)
    text = by_sequence(engines.engine.submit(request))[0][0]
    for count in (1, 7, 15):
        sequence = msgspec.structs.replace(request.sequences[0], resumed_token_ids=tuple(text[:count]))
        again = msgspec.structs.replace(request, request_id=f"r{count}{temperature}", sequences=(sequence,))
        tokens, ends = by_sequence(engines.engine.submit(again))
        assert tokens[0] == text[count:]
        assert ends[0].num_generated_tokens == 16  # type: ignore[union-attr]


def test_log_probabilities_come_with_each_token(engines: Engines) -> None:
    """Each token has its log probability and as many alternatives as are asked for, and so has the prompt's."""
    request = changed(completion(max_tokens=5), stop_token_ids=(), logprobs=2, prompt_logprobs=1)
    events = list(engines.engine.submit(request))
    scores = [score for event in events if isinstance(event, Tokens) for score in event.logprobs]
    drawn = [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]
    assert [score.token_id for score in scores] == drawn
    assert all(len(score.top) == 2 and score.top[0][1] >= score.top[1][1] for score in scores)
    (prompt,) = [event for event in events if isinstance(event, PromptScored)]
    assert [score.token_id for score in prompt.logprobs] == [2, 3]
    assert all(len(score.top) == 1 for score in prompt.logprobs)


def test_a_prompt_is_scored_without_a_token(engines: Engines) -> None:
    """With ``max_tokens`` 0 a prompt is scored, and no token is sent or counted."""
    if engines.backend.name == "instant":
        pytest.skip("the instant engine ends such a request at its first token")
    tokens, ends = by_sequence(engines.engine.submit(changed(completion(max_tokens=0), prompt_logprobs=0)))
    assert not tokens
    assert (ends[0].reason, ends[0].num_generated_tokens) == ("length", 0)  # type: ignore[union-attr]


def test_a_request_may_ask_for_its_steps(engines: Engines) -> None:
    """With ``timings``, each token has the time of its step."""
    request = msgspec.structs.replace(changed(completion(max_tokens=6), stop_token_ids=()), timings=True)
    steps = [step for event in engines.engine.submit(request) if isinstance(event, Timed) for step in event.steps]
    assert len(steps) == 6
    assert all(0 <= step.waited <= step.elapsed for step in steps)


def test_a_sequence_can_be_finished_or_aborted(engines: Engines) -> None:
    """``finish`` ends one choice and lets the other run; ``close`` ends all, and the engine has nothing left."""
    request = msgspec.structs.replace(changed(completion(n=2, max_tokens=120), stop_token_ids=()), stream=True)
    stream = engines.engine.submit(request)
    next(stream)
    stream.finish(0)
    tokens, ends = by_sequence(stream)
    assert (ends[0].reason, ends[1].reason) == ("abort", "length")  # type: ignore[union-attr]
    assert len(tokens[1]) >= 119
    stream = engines.engine.submit(msgspec.structs.replace(request, request_id="aborted"))
    next(stream)
    stream.close()
    assert eventually(lambda: engines.engine.health().num_running == 0)


def test_a_deadline_ends_a_text(engines: Engines) -> None:
    """A request whose time is over ends with "deadline"."""
    request = msgspec.structs.replace(completion(max_tokens=200), deadline=time.monotonic() - 1.0)
    _, ends = by_sequence(engines.engine.submit(request))
    assert ends[0].reason == "deadline"  # type: ignore[union-attr]


def test_an_unknown_adapter_is_refused(engines: Engines) -> None:
    """A request for an adapter that is not loaded fails by name, and others go on."""
    (failed,) = engines.engine.submit(msgspec.structs.replace(completion(), adapter="nobody"))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.param) == ("not_found", "adapter")
    assert by_sequence(engines.engine.submit(completion(max_tokens=2)))[0][0]


def test_a_prompt_beyond_the_context_is_refused(engines: Engines) -> None:
    """A prompt that is longer than the context fails, and names its limit."""
    (failed,) = engines.engine.submit(completion(prompt=(5,) * (CONTEXT + 1)))
    assert isinstance(failed, Failed)
    assert failed.kind == "context_too_long"
    assert str(CONTEXT) in failed.message


def test_what_an_engine_cannot_do_is_refused_by_name(engines: Engines) -> None:
    """A backend without an ability refuses the field that asks for it, and its ``Capabilities`` say so."""
    if engines.backend.name == "instant":
        pytest.skip("the instant engine leaves these to the validation above it")
    able = engines.engine.info.capabilities
    beams = by_sequence(engines.engine.submit(changed(completion(max_tokens=3), beams=Beams(width=2))))[1]
    refused = [event for event in beams.values() if isinstance(event, Failed)]
    assert bool(refused) is not able.beam_search
    assert not refused or refused[0].param == "beam_width"


@pytest.mark.parametrize("turn", range(KILLS))
def test_a_killed_engine_loses_nothing(engines: Engines, turn: int) -> None:
    """After a kill -9 in the middle of their texts, requests have the tokens, ends and counts that they have without;
    the engine that takes over reports at least as many generated tokens as were delivered by it."""
    requests = [
        msgspec.structs.replace(
            changed(
                completion(f"k{turn}.{i}", n=1 + i % 2, temperature=float(i % 2), prompt=(i + 1, 9), max_tokens=600),
                stop_token_ids=(),
            ),
            stream=True,
        )
        for i in range(4)
    ]
    expected = [
        by_sequence(engines.engine.submit(msgspec.structs.replace(one, request_id=f"whole {one.request_id}")))
        for one in requests
    ]
    streams = [engines.engine.submit(one) for one in requests]
    begun = [[next(stream)] for stream in streams]  # every request has delivered something
    pid = engines.engine.info.pid
    os.kill(pid, signal.SIGKILL)
    found: list[Any] = [None] * len(streams)

    def read(i: int) -> None:
        found[i] = by_sequence([*begun[i], *streams[i]])

    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(len(streams))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(240)
        assert not reader.is_alive()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ends), (_, wanted) in zip(found, expected, strict=True):
        assert {i: (e.reason, e.num_generated_tokens) for i, e in ends.items()} == {
            i: (e.reason, e.num_generated_tokens) for i, e in wanted.items()
        }
    assert by_sequence(engines.engine.submit(completion(max_tokens=1)))[0][0]  # if all was sent before the kill
    assert engines.engine.info.pid != pid


def test_a_prompt_is_told_from_its_resumed_tokens(engines: Engines) -> None:
    """Two prompts at once in one request have their own texts."""
    sequences = tuple(Sequence(prompt_token_ids=(i, 3), seed=i) for i in (11, 12))
    request = ValidRequest(
        request_id="two", task="completions", model="m", sequences=sequences, sampling=Sampling(max_tokens=6)
    )
    tokens, ends = by_sequence(engines.engine.submit(request))
    assert sorted(tokens) == [0, 1]
    assert {end.reason for end in ends.values()} == {"length"}  # type: ignore[union-attr]
