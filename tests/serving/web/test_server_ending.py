"""A real server that is asked to end: what runs is finished, unless it is asked twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from instant_model import write_instant_model
from processes import alive_after
from serving_process import Running, running
from test_server import BODY, asking, draining, health, until
from test_server_recovery import CHAT, COMPLETIONS, SAMPLED, STREAM, answer_to

LASTING: dict[str, Any] = BODY | {"max_tokens": 160}
PROMPTS: dict[str, Any] = {"model": "assistant", "prompt": ["a", "b"], "max_tokens": 160, "ignore_eos": True} | SAMPLED
REQUESTS = [(CHAT, LASTING), (CHAT, LASTING | STREAM), (COMPLETIONS, PROMPTS), (COMPLETIONS, PROMPTS | STREAM)]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Running]:
    """A server of 50 ms a step that would wait five minutes for what runs."""
    bundle = write_instant_model(tmp_path, step_delay=0.05)
    with running(bundle, drain_timeout=300.0) as server:
        yield server


def test_what_runs_is_finished(patient: Running) -> None:
    """Whole replies and streams under way at a SIGTERM have the text and usage of undisturbed ones; then the server
    ends by itself, with exit status 0 and no process left."""
    family = psutil.Process(patient.process.pid).children(recursive=True)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        undisturbed = list(pool.map(lambda request: answer_to(patient, *request), REQUESTS))
        assert {status for status, _ in undisturbed} == {200}
        until(lambda: health(patient)["running"] == 0)
        answers = [pool.submit(answer_to, patient, *request) for request in REQUESTS]
        until(lambda: health(patient)["running"] == len(REQUESTS))
        patient.terminate()
        until(lambda: draining(patient))
        assert not any(answer.done() for answer in answers), "nothing ran while the server drained"
        assert [answer.result() for answer in answers] == undisturbed
    assert patient.process.wait(60) == 0, patient.log()[-4000:]
    assert not alive_after(family, 60)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(patient: Running, second: signal.Signals) -> None:
    """A second SIGTERM, or SIGINT, does not wait for a stream of minutes."""
    family = psutil.Process(patient.process.pid).children(recursive=True)
    with asking(patient, BODY | {"stream": True, "max_tokens": 4000}) as answer:
        answer.readline()
        patient.terminate()
        until(lambda: draining(patient))
        patient.process.send_signal(second)
        patient.process.wait(30)
    assert not alive_after(family, 30)
