"""A batch of SmolLM2 and MiniLM, through OpenAI's client."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from llm_server import WARNINGS_OF_CLIENTS, served

pytestmark = WARNINGS_OF_CLIENTS
QUESTIONS = ["What is the capital of France?", "Name a colour.", "What is two plus two?", "Who wrote Hamlet?"]


def batch_of(client: openai.OpenAI, endpoint: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    end = time.monotonic() + 240
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < end, batch
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.1)
    assert batch.output_file_id is not None, batch
    return [
        json.loads(line)["response"]["body"] for line in client.files.content(batch.output_file_id).text.splitlines()
    ]


def test_replies_of_a_batch_are_those_of_requests(assistant: Path, embedder: Path, tmp_path: Path) -> None:
    """Greedy texts and vectors of a batch equal those of the same requests by themselves."""
    models = ("-m", f"{assistant}=assistant", "-m", f"{embedder}=embedder")
    database = f"sqlite:///{tmp_path / 'serving.db'}"
    with (
        served(tmp_path, *models, "--database", database, MLFLOW_LLM_STATE=str(tmp_path / "state")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        chats = [
            {"model": "assistant", "messages": [{"role": "user", "content": one}], "max_tokens": 12, "temperature": 0}
            for one in QUESTIONS
        ]
        replies = batch_of(client, "/v1/chat/completions", chats)
        for body, reply in zip(chats, replies, strict=True):
            alone = client.chat.completions.create(**body)
            assert reply["choices"][0]["message"]["content"] == alone.choices[0].message.content
            assert reply["usage"]["completion_tokens"] == alone.usage.completion_tokens
        (vectors,) = batch_of(client, "/v1/embeddings", [{"model": "embedder", "input": QUESTIONS}])
        alone = client.embeddings.create(model="embedder", input=QUESTIONS, encoding_format="float")
        for mine, its in zip(vectors["data"], alone.data, strict=True):
            assert mine["embedding"] == pytest.approx(its.embedding, abs=1e-5)
