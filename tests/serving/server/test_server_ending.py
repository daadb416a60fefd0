"""A real server that is asked to end, or is killed: what runs is finished, unless it is asked twice."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from gated_core import steps_more
from instant_model import write_instant_model
from processes import alive_after
from recovery_requests import CHAT, COMPLETIONS, SAMPLED, STREAM, answer_to
from server_calls import BODY, asking, draining, health, until
from server_processes import ENGINE, controllers, engines
from serving_process import GATED_CORE, Running, running

LASTING: dict[str, Any] = BODY | {"max_tokens": 160}
PROMPTS: dict[str, Any] = {"model": "assistant", "prompt": ["a", "b"], "max_tokens": 160, "ignore_eos": True} | SAMPLED
REQUESTS = [(CHAT, LASTING), (CHAT, LASTING | STREAM), (COMPLETIONS, PROMPTS), (COMPLETIONS, PROMPTS | STREAM)]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Running]:
    """Yield a server that waits ten minutes for running requests, and whose steps may be held back."""
    with running(write_instant_model(tmp_path), core=GATED_CORE, drain_timeout=600.0) as server:
        yield server


def test_what_runs_is_finished(patient: Running) -> None:
    """Replies and streams running at a SIGTERM are complete; then the server ends with status 0, no process left and no
    worker error.
    """
    family = psutil.Process(patient.process.pid).children(recursive=True)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        undisturbed = list(pool.map(lambda request: answer_to(patient, *request), REQUESTS))
        assert {status for status, _ in undisturbed} == {200}
        until(lambda: health(patient)["running"] == 0)
        with steps_more(patient.model_dir, 20):
            answers = [pool.submit(answer_to, patient, *request) for request in REQUESTS]
            until(lambda: health(patient)["running"] == len(REQUESTS))
            patient.terminate()
            until(lambda: draining(patient))
            assert not any(answer.done() for answer in answers)
        assert [answer.result() for answer in answers] == undisturbed
    assert patient.process.wait(240) == 0, patient.log()[-4000:]
    assert not alive_after(family, 240)
    assert '"level": "error"' not in patient.log(), patient.log()[-4000:]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(patient: Running, second: signal.Signals) -> None:
    """A second SIGTERM, or SIGINT, does not wait for a stream that does not end."""
    family = psutil.Process(patient.process.pid).children(recursive=True)
    steps = steps_more(patient.model_dir, 20)
    with steps, asking(patient, BODY | {"stream": True, "max_tokens": 4000}) as answer:
        answer.readline()
        patient.terminate()
        until(lambda: draining(patient))
        patient.process.send_signal(second)
        patient.process.wait(240)
    assert not alive_after(family, 240)


def test_nothing_is_left_of_a_killed_arbiter(tmp_path: Path) -> None:
    """After kill -9 of the arbiter its workers drain, and controller process and engines end by themselves."""
    with running(write_instant_model(tmp_path, step_delay=0.005), engine=ENGINE, workers=2) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (controller,) = controllers(server)
        directory = Path(controller.cmdline()[-1])
        pids = engines(server)
        with asking(server, BODY | STREAM | {"max_tokens": 40}) as answer:
            answer.readline()
            server.process.kill()
            assert answer.read().decode().rstrip().endswith("[DONE]")
        assert not alive_after(family)
        assert not directory.exists()
        assert not alive_after(pids)


def test_a_worker_that_starts_ends_with_its_arbiter(tmp_path: Path) -> None:
    """A worker that has not begun to serve ends with its killed arbiter instead of looking for an engine."""
    with running(write_instant_model(tmp_path), engine=ENGINE) as server:
        arbiter = psutil.Process(server.process.pid)
        (controller,) = controllers(server)
        directory = Path(controller.cmdline()[-1])
        others = {process.pid for process in arbiter.children()}
        (worker,) = others - {controller.pid}
        os.kill(worker, signal.SIGKILL)
        until(lambda: {process.pid for process in arbiter.children()} - others)
        (starting,) = {process.pid for process in arbiter.children()} - others
        os.kill(starting, signal.SIGSTOP)
        server.process.kill()
        controller.kill()
        until(lambda: not engines(server))
        os.kill(starting, signal.SIGCONT)
        assert not alive_after([starting])
        shutil.rmtree(directory, ignore_errors=True)  # otherwise the next server's start would remove it
