"""A client that openapi-python-client generates from the OpenAPI document, against a real server."""

from __future__ import annotations

import compileall
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from instant_model import write_instant_model
from serving_process import running

from mlflow_llm.serving.http.openapi.document import document
from mlflow_llm.serving.http.routes import ROUTES

GENERATOR = shutil.which("openapi-python-client", path=str(Path(sys.executable).parent)) or shutil.which(
    "openapi-python-client"
)
USE = """
import importlib, json, pkgutil, sys
import generated
for module in pkgutil.walk_packages(generated.__path__, "generated."):
    importlib.import_module(module.name)
from generated import Client
from generated.api.anthropic import post_v1_messages
from generated.api.openai import get_v1_models, post_tokenize, post_v1_chat_completions, post_v1_completions
from generated.models import AnthropicChatRequest, OpenaiChatRequest, OpenaiCompletionsRequest
client = Client(base_url=sys.argv[1])
asked = {"model": "assistant", "messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 2}
with client:
    models = get_v1_models.sync(client=client)
    chat = post_v1_chat_completions.sync(client=client, body=OpenaiChatRequest.from_dict(asked))
    message = post_v1_messages.sync(client=client, body=AnthropicChatRequest.from_dict(asked))
    prompt = {"model": "assistant", "prompt": "1 2", "max_tokens": 2}
    completion = post_v1_completions.sync(client=client, body=OpenaiCompletionsRequest.from_dict(prompt))
    wrong = OpenaiChatRequest.from_dict({**asked, "temperature": 9})
    refused = post_v1_chat_completions.sync_detailed(client=client, body=wrong)
print(json.dumps({
    "models": [model.id for model in models.data],
    "chat": chat.usage.completion_tokens,
    "message": message.usage.output_tokens,
    "completion": completion.usage.completion_tokens,
    "refused": [int(refused.status_code), refused.parsed.error.message],
}))
"""


@pytest.mark.skipif(GENERATOR is None, reason="openapi-python-client is not installed")
def test_a_generated_client_works(tmp_path: Path) -> None:
    """Every route is generated without a warning, every module is imported, and replies and errors are typed."""
    made = document(ROUTES)
    (tmp_path / "openapi.json").write_text(json.dumps(made))
    (tmp_path / "config.yaml").write_text("post_hooks: []\n")
    assert GENERATOR is not None
    command = [GENERATOR, "generate", "--path", "openapi.json", "--config", "config.yaml", "--meta", "none"]
    done = subprocess.run(
        [*command, "--output-path", "generated", "--fail-on-warning"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    modules = [path for path in (tmp_path / "generated" / "api").glob("*/*.py") if path.name != "__init__.py"]
    assert len(modules) == sum(len(operations) for operations in made["paths"].values())
    assert compileall.compile_dir(tmp_path / "generated", quiet=1)
    bundle = write_instant_model(tmp_path / "model")
    with running(bundle) as server:
        used = subprocess.run(
            [sys.executable, "-c", USE, server.url], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert used.returncode == 0, used.stderr[-3000:]
    found = json.loads(used.stdout)
    assert found["models"] == ["assistant", "assistant:pirate"]
    assert (found["chat"], found["message"], found["completion"]) == (2, 2, 2)
    assert found["refused"][0] == 400
    assert "temperature" in found["refused"][1]
