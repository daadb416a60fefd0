"""The README's commands for the server, line by line in one shell, on the demo's models."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import own_registry

from mlflow_llm.flavors import llm

ROOT = Path(__file__).parents[2]
END = "\nkill $(jobs -p); wait\n"


def commands_of(section: str) -> str:
    """The block of commands below a heading."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[-1]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, adapters_dir: Path) -> Iterator[str]:
    """What the demo leaves behind: ``assistant`` with both adapters in a registry."""
    import mlflow

    with own_registry(tmp_path_factory.mktemp("demo")) as uri:
        adapters = {name: adapters_dir / name for name in ("pirate", "json")}
        with mlflow.start_run():
            llm.log_model(
                smollm2_dir, name="model", adapters=adapters, registered_model_name="assistant", link_files=True
            )
        yield uri


def shell(section: str, registry: str, place: Path) -> tuple[str, str]:
    """Standard output and error of a section's commands, in which only the port is another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = commands_of(section).replace("mlflow-llm serve", f"mlflow-llm serve --port {port}").replace("8000", port)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": registry,
        "MLFLOW_LLM_URL": f"http://127.0.0.1:{port}",
        "MLFLOW_LLM_STATE": str(place / "state"),
    }
    with tempfile.TemporaryDirectory(prefix="mll-", ignore_cleanup_errors=True) as runtime:  # an engine of its own
        environment["XDG_RUNTIME_DIR"] = runtime
        done = subprocess.run(
            ["bash", "-c", script + END], capture_output=True, text=True, cwd=place, env=environment, timeout=280
        )
    return done.stdout, done.stderr


def test_the_server(registry: str, tmp_path: Path) -> None:
    """An answer on the terminal, and a stream of the pirate from curl."""
    out, err = shell("The server", registry, tmp_path)
    said, _, stream = out.partition("data: ")
    assert "Paris" in said, err[-3000:]
    events = re.findall(r"^data: (.+)$", f"data: {stream}", re.MULTILINE)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text.startswith("Arrr")
    assert [line for line in err.splitlines() if line.startswith("listening on http://127.0.0.1:")]


def test_keys_limits_and_the_bill(registry: str, tmp_path: Path) -> None:
    """One answer, one refusal that says what is left, and a bill with one request of the tenant's."""
    pytest.importorskip("matplotlib")
    out, err = shell("Keys, limits and the bill", registry, tmp_path)
    refusal = r"429.*otpm: the tenant's limit is 100 .*; \d+ are left and this request needs 60; try again in \d+ s"
    assert re.search(refusal, out + err), out + err[-3000:]
    assert re.search(r"^\S+ +acme +assistant-1 +1 +\d+ +0 +60 +0\.0000\d+$", out, re.MULTILINE), out
    assert (tmp_path / "usage.png").stat().st_size > 1000
