"""``mlflow-llm run`` with real weights: from a wheel, a directory, and a registered model, to an answer.

``MLFLOW_LLM_WHEEL`` names the built wheel; tests/run.sh sets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import mlflow
import pytest
from stores import own_registry

from mlflow_llm.flavors import llm

WHEEL = os.environ.get("MLFLOW_LLM_WHEEL", "")


def run(*words: str, cwd: Path, tracking: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_T")}
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", "run", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment | ({"MLFLOW_TRACKING_URI": tracking} if tracking else {}),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


QUESTION = ("--temperature", "0", "--max-tokens", "12", "What is the capital of France?")


@pytest.fixture(scope="module")
def registered(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder and the URI of a store in which ``assistant`` has two versions."""
    folder = tmp_path_factory.mktemp("run")
    with own_registry(folder / "store") as uri:
        for _ in range(2):
            with mlflow.start_run():
                llm.log_model(smollm2_dir, name="assistant", registered_model_name="assistant", link_files=True)
    return folder, uri


def test_run_a_registered_model_by_its_name(registered: tuple[Path, str]) -> None:
    """A plain name is the latest version of the registered model, which is said; the steps of the load are lines."""
    folder, uri = registered
    done = run("assistant", *QUESTION, cwd=folder, tracking=uri)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    lines = done.stderr.splitlines()
    assert "models:/assistant/latest is models:/assistant/2" in lines
    assert "starting the engine" in lines
    assert any(line.startswith("ready after ") for line in lines)


@pytest.mark.skipif(not WHEEL, reason="MLFLOW_LLM_WHEEL does not name a built wheel")
def test_two_commands_from_a_wheel_to_an_answer(smollm2_dir: Path, tmp_path: Path) -> None:
    """In an environment without the package, ``pip install WHEEL`` finds every library that it needs and makes the
    command, and ``mlflow-llm run DIR MESSAGE`` answers."""
    pytest.importorskip("pip")
    environment, libraries = tmp_path / "environment", tmp_path / "libraries"
    venv.create(environment, with_pip=False, symlinks=True)
    libraries.mkdir()
    for folder in (Path(entry) for entry in sys.path if Path(entry).name == "site-packages"):
        for entry in folder.iterdir():
            ours = entry.name.startswith(("mlflow_llm", "__editable__")) or entry.suffix == ".pth"
            if not ours and not (libraries / entry.name).exists():
                (libraries / entry.name).symlink_to(entry)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(f"{libraries}\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    for command in (
        [*pip, "install", "--no-index", "--no-compile", WHEEL],
        [str(environment / "bin/mlflow-llm"), "run", str(smollm2_dir), *QUESTION],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert (site_packages / "mlflow_llm").is_dir()


def test_run_a_directory(registered: tuple[Path, str], smollm2_dir: Path) -> None:
    """A directory that is not logged yet is run as it is, without a store."""
    folder, _ = registered
    done = run(str(smollm2_dir), *QUESTION, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert not list(folder.glob("*.db"))


def test_a_name_that_nothing_has(registered: tuple[Path, str]) -> None:
    """The error for a name that neither a directory nor the registry has names both, and the nearest names."""
    folder, uri = registered
    done = run("asistant", "Hello", cwd=folder, tracking=uri)
    assert done.returncode == 1
    assert "asistant: no model's directory or file here" in done.stderr
    assert "did you mean assistant?" in done.stderr
    assert "Traceback" not in done.stderr
