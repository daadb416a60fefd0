"""``mlflow-llm batch -m``: a file of requests answered in the command's own process."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli

ROWS = [
    {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "a"}]}},
    {"custom_id": "text", "body": {"prompt": "a", "model": "gpt-4o"}},
    {"custom_id": "typo", "body": {"prompt": "a", "max_token": 3}},
    {"custom_id": "vector", "body": {"input": "a"}},
]


@pytest.fixture(scope="module")
def saved(llama_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir, defaults={"max_tokens": 3, "ignore_eos": True})
    return path


def batch(source, output, *more):
    return CliRunner().invoke(cli, ["batch", str(source), "-o", str(output), "-C", "in_process=true", *more])


def test_rows_are_answered_here(saved, tmp_path):
    """Rows are answered with the model's own defaults; a refused row has its error, and the exit status says so."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = batch(source, output, "-m", str(saved))
    assert done.exit_code == 1, done.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["chat", "text", "typo", "vector"]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 400, 400]
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines[:2]} == {3}
    assert "did you mean 'max_tokens'" in lines[2]["error"]["message"]
    assert "2 of 4 rows answered, 2 failed" in done.stderr
    written = output.read_bytes()
    assert batch(source, output, "-m", str(saved)).exit_code == 1
    assert output.read_bytes() == written


def test_a_model_that_is_not_there(tmp_path):
    """A missing model stops the batch before any row is written."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    done = batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", str(tmp_path / "nowhere"))
    assert done.exit_code == 2, done.output
    assert "nowhere" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_conversation_with_an_adapter_that_is_not_there(saved):
    """``chat -m`` refuses an adapter name that the loaded model does not have, instead of answering with the base."""
    words = ["chat", "-m", str(saved), "-C", "in_process=true", "--max-tokens", "2"]
    done = CliRunner().invoke(cli, [*words, "--model", "pirate", "Hi"])
    assert (done.exit_code, "there is no pirate; available: " in done.output) == (1, True), done.output
