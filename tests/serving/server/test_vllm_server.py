"""A real server over vLLM with a store: kills of its engine cost a pause, and every request has its row and usage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_backends import VLLM_PYTHON, WITHOUT_VLLM, text_bundle, vllm_settings
from recovery_requests import COMPLETIONS, SAMPLED, STREAM, answer_to
from server_calls import engine_pid, engine_pids, health, until
from serving_process import Running, running

from mlflow_llm.serving.metering import Store, Usage, UsageFilter

pytestmark = pytest.mark.skipif(not VLLM_PYTHON, reason=WITHOUT_VLLM)
KILLS = int(os.environ.get("MLFLOW_LLM_KILLS", "1"))  # docs/contributing.md: 100 by hand
COMMON = {"model": "assistant", "prompt": "abc", "max_tokens": 500, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    COMMON | sampling | stream | shape
    for sampling in ({"temperature": 0}, SAMPLED)
    for stream in ({}, STREAM)
    for shape in ({}, {"logprobs": 2})
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'ledger.db'}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def served(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root: Path = tmp_path_factory.mktemp("vllm")
    url = f"sqlite:///{store.engine.url.database}"
    bundle = text_bundle(root)
    settings = vllm_settings(max_num_seqs=32)
    with running(
        bundle, core=None, engine=settings, database=url, state_dir=str(root / "state"), seconds=600
    ) as server:
        yield server


def test_kills_lose_no_stream_and_no_row(served: Running, store: Store) -> None:
    """Requests that run when their engine is killed get the text and usage of an undisturbed run; each leaves one row,
    whose tokens are those of its usage."""
    undisturbed = [answer_to(served, COMPLETIONS, body) for body in REQUESTS]
    assert {status for status, _ in undisturbed} == {200}, undisturbed
    for _ in range(KILLS):
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            answers = [pool.submit(answer_to, served, COMPLETIONS, body) for body in REQUESTS]
            until(lambda: health(served)["running"] > 0 or all(one.done() for one in answers))  # noqa: B023
            pid = engine_pid(served)
            os.kill(pid, signal.SIGKILL)
            assert [one.result() for one in answers] == undisturbed
        until(lambda: engine_pids(served) - {0, pid})  # noqa: B023
    expected = (KILLS + 1) * len(REQUESTS)
    rows = lambda: [row for row in Usage(store).rows(UsageFilter()) if row.task == "completions"]  # noqa: E731
    until(lambda: len(rows()) >= expected and all(row.status != "open" for row in rows()))
    found = rows()
    assert len(found) == expected
    assert {row.status for row in found} == {"ok"}
    wanted = sorted(usage["completion_tokens"] for _, (_, usage) in undisturbed)
    assert sorted(row.completion_tokens for row in found) == sorted(wanted * (KILLS + 1))


def test_a_field_that_vllm_lacks_is_a_400(served: Running) -> None:
    """Over HTTP too, what vLLM cannot do is refused by its name."""
    status, answer = answer_to(served, COMPLETIONS, COMMON | {"use_beam_search": True, "best_of": 2, "temperature": 0})
    assert status == 400, answer
    until(lambda: health(served)["running"] == 0)
