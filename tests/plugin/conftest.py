"""Fixtures of a saved model of a few kilobytes, and of directories for state and engines."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers as tf
from mlflow.deployments import get_deploy_client
from processes import alive_after
from stub_deployments import stub_command
from tiny_models import COMMON, make_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mlflow_llm.flavors import llm
from mlflow_llm.plugin import local_config
from mlflow_llm.serving.system.files import STATE_VARIABLE

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random Llama with a byte tokenizer by the flavor."""
    return save(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="session")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save another model, a layer deeper."""
    return save(tmp_path_factory.mktemp("second"), num_hidden_layers=3)


def save(root: Path, **config: int) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
    llama = tf.LlamaConfig(**(COMMON | {"vocab_size": 272, "eos_token_id": 256} | config))
    make_model(llama).save_pretrained(root / "hf")
    tokenizer.save_pretrained(root / "hf")
    llm.save_model(root / "model", root / "hf")
    return root / "model"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide state and runtime directories of the test alone, and check that no process or engine is left."""
    with tempfile.TemporaryDirectory(prefix="mlp-", ignore_cleanup_errors=True) as root:
        monkeypatch.setenv(STATE_VARIABLE, f"{root}/state")
        monkeypatch.setenv("XDG_RUNTIME_DIR", root)
        yield Path(root)
        left = [p for p in psutil.process_iter() if belongs(p, root)]
        alive = alive_after(left)
        reported = [" ".join(p.cmdline()) for p in alive]
        for process in alive:
            process.kill()
        assert not reported


def belongs(process: psutil.Process, root: str) -> bool:
    """Return whether ``process`` is another one that was started with the test's environment."""
    with contextlib.suppress(psutil.Error):
        ours = process.environ().get("XDG_RUNTIME_DIR") == root
        return ours and process.pid != psutil.Process().pid and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def client(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide a client of target ``llm`` whose servers are stubs; its deployments are deleted at the end."""
    monkeypatch.setattr(local_config, "command", stub_command(local_config.command))
    found = get_deploy_client("llm")
    yield found
    for deployment in found.list_deployments():
        found.delete_deployment(deployment["name"])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Make model directories: of our flavor ``one``, ``two``, ``slow`` and ``bad``, of another ``sk``."""
    for name in ("one", "two", "slow", "bad", "sk"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MLmodel").write_text(f"flavors:\n  {'sklearn' if name == 'sk' else 'llm'}: {{}}\n")
    return tmp_path


@pytest.fixture
def stranger() -> Iterator[int]:
    """Provide the port of a foreign server, which answers everything with 200 and its own JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "12")
            self.end_headers()
            self.wfile.write(b'{"up": true}')

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()
