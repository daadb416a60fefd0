"""Draft counts of an engine in replies, streamed or not, and in the ledger, but on no bill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.events import DraftCounts, Finished
from mlflow_llm.serving.metering import Keys, Ledger, Price, Store, Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.testing import instant_core

BODY = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
PREDICTION = {"prediction": {"type": "content", "content": [{"type": "text", "text": "Hello"}]}}
DETAILS = {
    "accepted_prediction_tokens": 3,
    "rejected_prediction_tokens": 1,
    "draft_tokens": 9,
    "accepted_draft_tokens": 6,
}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    ledger = Ledger(store, state_dir=tmp_path / "state")
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    yield ledger
    ledger.close()
    store.close()


def test_drafts_in_replies_and_ledger(
    make: Callable[..., WorkerState], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies, whole and streamed, and ledger rows have the draft counts of requests with a prediction, at the same
    cost.
    """
    monkeypatch.setattr(instant_core, "Finished", partial(Finished, drafts=DraftCounts(9, 6, 4, 3)))
    keys = Keys(ledger.store)
    secret, _ = keys.create("acme")
    client = create_app(make(keys=keys, mode=PayPerToken(ledger), ledger=ledger)).test_client()

    def ask(**more: Any) -> Any:
        return client.post("/v1/chat/completions", json=BODY | more, headers={"Authorization": f"Bearer {secret}"})

    assert ask(**PREDICTION).json["usage"]["completion_tokens_details"] == DETAILS
    streamed = ask(**PREDICTION, stream=True, stream_options={"include_usage": True}).text
    last = json.loads(streamed.split("data: ")[-2])
    assert last["usage"]["completion_tokens_details"] == DETAILS
    assert ask().json["usage"]["completion_tokens_details"] == {"draft_tokens": 9, "accepted_draft_tokens": 6}
    rows = list(Usage(ledger.store).rows(UsageFilter()))
    assert [(row.draft_tokens, row.accepted_draft_tokens, row.completion_tokens) for row in rows] == [(9, 6, 4)] * 3
    (total,) = Usage(ledger.store).sums(UsageFilter(), ("tenant",))
    assert (total.draft_tokens, total.accepted_draft_tokens) == (27, 18)
    assert total.cost == sum(row.prompt_tokens + 2 * row.completion_tokens for row in rows)
