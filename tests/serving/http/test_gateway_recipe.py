"""docs/gateway.md's recipe for the tracking server's gateway, command by command in one shell, over a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_process import Running

DOCUMENT = Path(__file__).parents[3] / "docs/gateway.md"
SECTION = "The gateway of the tracking server: provider `openai`"
# LiteLLM, which MLflow imports where it is installed, would ask a server elsewhere for prices
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def blocks() -> tuple[str, str, str]:
    """Return the documented commands: the tracking server's, the endpoint's and the requests."""
    text = DOCUMENT.read_text().partition(f"\n## {SECTION}\n")[2]
    start, make, ask = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return start, make, ask


@pytest.fixture
def ports(observed: Running) -> dict[str, str]:
    """Return the document's ports with free ones of this machine in their place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"5000": str(probe.getsockname()[1]), "8000": observed.url.rpartition(":")[2]}


@contextlib.contextmanager
def tracking_server(script: str, port: str, place: Path) -> Iterator[None]:
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec 2>&1\n{script}"],
            stdout=log,
            cwd=place,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, (place / "log").read_text()[-2000:]
            assert time.monotonic() < until, (place / "log").read_text()[-2000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(240)


def test_the_recipe(ports: dict[str, str], tmp_path: Path) -> None:
    """All three routes answer with our text and exact usage, the second as a stream with usage in its last chunk."""
    start, make, ask = (re.sub("5000|8000", lambda found: ports[found[0]], block) for block in blocks())
    separate = ask.replace("\ncurl ", "\necho; echo ----; curl ")
    # of several workers uvicorn ends one that imports for more than five seconds, as a busy machine does
    with tracking_server(start.replace("mlflow server", "mlflow server --workers 1"), ports["5000"], tmp_path):
        done = subprocess.run(
            ["bash", "-c", f"set -e\n{make}\necho; echo ----\n{separate}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    made, *answers = done.stdout.split("\n----\n")
    assert json.loads(made)["endpoint"]["name"] == "assistant"
    whole, streamed, passed = answers
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    texts = [json.loads(answer)["choices"][0]["message"]["content"] for answer in (whole, passed)]
    texts.append("".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]))
    assert len(texts[0]) > 10
    usages = [json.loads(whole)["usage"], json.loads(passed)["usage"], chunks[-1]["usage"]]
    assert [usage["completion_tokens"] for usage in usages] == [64, 64, 64]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
