"""Child processes run the package that is installed, whatever lies in the working directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlflow_llm
from mlflow_llm.serving.system import child
from mlflow_llm.serving.system.files import cache_dir

PACKAGE = Path(mlflow_llm.__file__).parent
CODE = ("__init__.py", "serving/__init__.py", "serving/system/child.py", "serving/system/files.py")
SHOW = "from mlflow_llm.serving.system import child; print(child.own_place()); print(child.package_place())"


def tree(root: Path, *, kernels: bool, more: str = "") -> Path:
    """Create the part of a package that decides which copy runs, with or without a kernel library."""
    for name in CODE:
        path = root / "mlflow_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, path)
    with (root / "mlflow_llm" / CODE[0]).open("a") as file:
        file.write(more)
    if kernels:
        (root / "mlflow_llm" / child.KERNELS).parent.mkdir(parents=True)
        (root / "mlflow_llm" / child.KERNELS).touch()
    return root


def places(cwd: Path, installed: Path) -> tuple[list[str], str]:
    """Return the import places of a process in ``cwd`` and of its children, and its warnings."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", SHOW], cwd=cwd, env=environment, capture_output=True, text=True)
    return done.stdout.split(), done.stderr


def test_no_other_module_starts_an_interpreter() -> None:
    """No other module of the package starts an interpreter but an isolated one (-I): each would have to remember -P
    and the environment."""
    found = {
        str(path.relative_to(PACKAGE))
        for folder in ("serving", "plugin", "flavors")
        for path in (PACKAGE / folder).rglob("*.py")
        if re.search(r'\[sys\.executable, "-(?!I)', path.read_text()) or '"-m", "mlflow_llm' in path.read_text()
    }
    assert found == {"serving/system/child.py"}


def test_a_package_in_the_working_directory_is_not_run(tmp_path: Path) -> None:
    """A package of our name in the working directory is not imported by a child process."""
    poison = tmp_path / "mlflow_llm" / "__init__.py"
    poison.parent.mkdir()
    poison.write_text("raise SystemExit('the working directory was imported')")
    command, environment = child.python_command("serving.engine.native.survey"), child.environment()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)["package"] == child.package_place(), done.stderr


def test_a_checkout_beside_the_same_code_with_kernels(tmp_path: Path) -> None:
    """Imported from a checkout without kernels, the package has its engines run by the installed one, and says so."""
    checkout, installed = tree(tmp_path / "checkout", kernels=False), tree(tmp_path / "installed", kernels=True)
    shown, warned = places(checkout, installed)
    assert shown == [str(checkout), str(installed)]
    assert f"engines run {installed}" in warned


def test_a_checkout_with_other_code(tmp_path: Path) -> None:
    """A checkout that differs from the installed package is not mixed with it: it runs without kernels and warns."""
    checkout = tree(tmp_path / "checkout", kernels=False, more="CHANGED = True\n")
    installed = tree(tmp_path / "installed", kernels=True)
    shown, warned = places(checkout, installed)
    assert shown == [str(checkout)] * 2
    assert "has no compiled kernels" in warned


@pytest.mark.parametrize("kernels", [True, False])
def test_a_checkout_without_an_installed_package(tmp_path: Path, kernels: bool) -> None:
    """A checkout runs by itself, with its own kernels if they were built in place."""
    checkout, installed = tree(tmp_path / "checkout", kernels=kernels), tree(tmp_path / "installed", kernels=False)
    shown, warned = places(checkout, installed)
    assert (shown, warned) == ([str(checkout)] * 2, "")


def test_relative_paths_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative PYTHONPATH entries keep their meaning in children with another working directory; empty ones are
    dropped.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"here{os.pathsep}{os.pathsep}/there")
    paths = child.environment()["PYTHONPATH"].split(os.pathsep)
    assert paths[-2:] == [str(tmp_path / "here"), "/there"]
    assert str(tmp_path) not in paths


def test_relative_directories_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache or state directory given as a relative path is the same one for children that work elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_LLM_CACHE", "cache")
    monkeypatch.setenv("MLFLOW_LLM_STATE", "")
    environment = child.environment()
    assert environment["MLFLOW_LLM_STATE"] == ""
    show = "from mlflow_llm.serving.system import files; print(files.cache_dir('x'))"
    done = subprocess.run([sys.executable, "-P", "-c", show], cwd="/", env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(cache_dir("x")) == str(tmp_path / "cache" / "x"), done.stderr
