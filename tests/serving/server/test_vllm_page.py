"""The commands of docs/vllm.md, as they stand, with a model in a registry and an interpreter that has vLLM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mlflow
import pytest
from flavor_models import byte_tokenizer, tiny_llama

from mlflow_llm.flavors import llm

PYTHON = os.environ.get("MLFLOW_LLM_VLLM_PYTHON")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="MLFLOW_LLM_VLLM_PYTHON names no interpreter with vLLM (docs/vllm.md)"
)


def blocks() -> list[str]:
    """Return the page's commands, but for those that install packages."""
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not re.search(r"-m venv|/pip ", line)]


def test_the_page_s_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor accepts the interpreter, and the server that the page starts answers the page's request."""
    assert PYTHON is not None
    (tmp_path / "vllm-env").symlink_to(Path(PYTHON).parents[1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = tiny_llama(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    llm.log_model(model, name="model", tokenizer=tokenizer, registered_model_name="assistant")
    mlflow.MlflowClient().set_registered_model_alias("assistant", "champion", 1)
    doctor, serve, ask = blocks()
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    told = subprocess.run(["bash", "-ec", doctor], env=env, capture_output=True, text=True, check=True).stdout
    assert "no problems found" in told
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(["bash", "-ec", f"exec {serve}"], env=env, stdout=log, stderr=log)
    try:
        url = re.search(r"http://[\w.:]+", ask)[0]  # type: ignore[index]
        until = time.monotonic() + 600
        while not _is_ready(url):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        answer = subprocess.run(["bash", "-ec", ask], env=env, capture_output=True, text=True, check=True).stdout
        assert '"finish_reason"' in answer
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(240)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
