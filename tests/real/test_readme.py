"""The README's commands from first to last, as printed, in one shell, after the demo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlflow
import psutil
import pytest
from stores import own_registry

from mlflow_llm.flavors import llm

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:## (?P<heading>[^\n]+)|```(?P<language>bash|python)\n(?P<code>.*?)^```)$", re.MULTILINE | re.DOTALL
)
MARK = "-- section:"
MAX_SECONDS = 1700.0  # seconds: about 90 on two idle cores
pytestmark = pytest.mark.timeout(1800)
# The first two commands have tests of their own, and the second is the one that runs this.
PROLOGUE = 'bash() { case "$1" in examples/quickstart/demo.sh|tests/run.sh) ;; *) command bash "$@";; esac; }\nset -m\n'


def script() -> str:
    """Return all commands in order; the Python blocks of neighbouring sections are one session, as a notebook is."""
    steps: list[tuple[str, str]] = []
    heading = ""
    parts = [PROLOGUE]
    for found in BLOCK.finditer((ROOT / "README.md").read_text()):
        if found["heading"]:
            heading = found["heading"]
        elif found["language"] == "python" and steps and steps[-1][0] == "python":
            steps[-1] = ("python", steps[-1][1] + found["code"])
        else:
            steps.append((found["language"], found["code"]))
            parts.append(f"echo; echo '{MARK}{heading}'; echo '{MARK}{heading}' >&2\n@{len(steps) - 1}@")
    for number, (language, code) in enumerate(steps):
        run = f"python -u - <<'END_OF_PYTHON'\n{code}END_OF_PYTHON\n" if language == "python" else code
        parts = [part.replace(f"@{number}@", run) for part in parts]
    return "".join(parts)


@contextlib.contextmanager
def demo_folder(smollm2: Path, adapters: Path, folder: Path) -> Iterator[Path]:
    """Make the folder that the demo leaves: environment, weights, adapters, and a store with ``assistant`` version
    1."""
    (folder / ".cache/models").mkdir(parents=True)
    (folder / ".cache/models/smollm2").symlink_to(smollm2)
    (folder / ".cache/models/adapters").symlink_to(adapters)
    (folder / ".venv-demo").symlink_to(sys.prefix)
    with own_registry(folder / ".demo") as uri:
        assert uri == f"sqlite:///{folder}/.demo/mlflow.db"
        with mlflow.start_run():
            llm.log_model(
                smollm2,
                name="assistant",
                adapters={name: adapters / name for name in ("pirate", "json")},
                registered_model_name="assistant",
                link_files=True,
            )
    yield folder


def network_of_its_own() -> list[str]:
    """Return a command prefix under which the README's ports are free, or () where that is not allowed."""
    prefix = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else []


def end_session(leader: int) -> None:
    """Kill what a shell left behind; job control gave each background command a group of its own."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader:
                process.kill()


@pytest.fixture(scope="module")
def transcript(
    smollm2_dir: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], str, Path]]:
    """Return standard output by section, standard error, and the folder the script ran in."""
    pytest.importorskip("matplotlib")
    with demo_folder(smollm2_dir, adapters_dir, tmp_path_factory.mktemp("readme")) as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        with tempfile.TemporaryDirectory(prefix="mll-", ignore_cleanup_errors=True) as runtime:
            environment = kept | {
                "XDG_RUNTIME_DIR": runtime,
                "MLFLOW_LLM_STATE": str(folder / "state"),
                "PYTHONWARNINGS": "ignore",
            }
            command = [*network_of_its_own(), "bash", "-c", script()]
            with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
                shell = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,
                )
                try:
                    shell.wait(timeout=MAX_SECONDS)
                finally:
                    end_session(shell.pid)
                    shell.wait()
        said, reported = (folder / "out").read_text(), (folder / "err").read_text()
        sections = {name: text for name, _, text in (part.partition("\n") for part in said.split(MARK)[1:])}
        yield sections, reported, folder


def test_python_blocks(transcript: tuple[dict[str, str], str, Path]) -> None:
    """The model is logged as version 2 and predicted with in every printed way."""
    sections, err, _ = transcript
    assert "Arrr" in sections["Log"], err[-3000:]
    assert "Traceback" not in err, err[-3000:]


def test_models_serve(transcript: tuple[dict[str, str], str, Path]) -> None:
    """The pirate answers through MLflow's own server, with usage."""
    sections, err, _ = transcript
    reply = json.loads(sections["Serve"].strip().splitlines()[-1])
    assert reply["choices"][0]["message"]["content"].startswith("Arrr"), err[-3000:]
    assert reply["usage"]["total_tokens"] > reply["usage"]["completion_tokens"] > 0


def test_the_server(transcript: tuple[dict[str, str], str, Path]) -> None:
    """The server answers on the terminal, and streams the pirate to curl; its log is elsewhere."""
    sections, err, folder = transcript
    said, _, stream = sections["The server"].partition("data: ")
    assert "Paris" in said, err[-3000:]
    events = re.findall(r"^data: (.+)$", f"data: {stream}", re.MULTILINE)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text.startswith("Arrr")
    log = [json.loads(line) for line in (folder / "server.log").read_text().splitlines()]
    assert [one["url"] for one in log if one["event"] == "listening"] == 2 * ["http://127.0.0.1:8000"]
    assert log[-1]["event"] == "stopped"
    assert "listening" not in err


def test_keys_limits_and_the_bill(transcript: tuple[dict[str, str], str, Path]) -> None:
    """There is one answer, one refusal with the remaining budget, and a bill with one request of the tenant's."""
    sections, err, folder = transcript
    out = sections["Keys, limits and the bill"]
    refusal = r"429.*otpm: the tenant's limit is 100 .*; \d+ are left and this request needs 60; try again in \d+ s"
    assert re.search(refusal, out + err), out + err[-3000:]
    assert re.search(r"^\S+ +acme +assistant-1 +1 +\d+ +0 +60 +.*0\.0000\d+$", out, re.MULTILINE), out
    assert (folder / "usage.png").stat().st_size > 1000
