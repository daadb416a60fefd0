"""A benchmark that runs our engine says which kernels it measures, and refuses to measure torch's unasked."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import announced, say_kernels

from mlflow_llm.serving.engine.native import library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What runs an engine in this process or another: ours by its class or parts, a server, MLflow's pyfunc.
STARTS = {"EngineCore", "assemble", "load_model", "LlmServe", "ModelsServe", "real_bundle"}
EXEMPT = {
    "big_body.py": "an engine without weights",
    "load.py": "has the servers that others start",
    "vllm_gateway.py": "the kernels of vLLM on both sides",
}


def called(source: str) -> set[str]:
    """Return the names of all functions that a program calls, those of programs in its string constants among them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "EngineCore(" in node.value:
            names.add("EngineCore")
    return names


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_what_starts_our_engine_says_its_kernels(script: Path) -> None:
    """Each script that starts our engine calls ``say_kernels`` first, or is exempt for a reason."""
    names = called(script.read_text())
    starts = bool(names & STARTS) and script.name not in EXEMPT
    assert not starts or "say_kernels" in names


def test_the_check_finds_scripts() -> None:
    """The scripts that start our engine are found by what they call, so that the test above has something to ask."""
    found = {path.name for path in BENCHMARKS.glob("*.py") if called(path.read_text()) & STARTS}
    assert {"decode.py", "gateway.py", "models_serve.py", "output_head.py", "startup.py"} <= found


def test_kernels_that_are_not_built_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library the message says why, in which folder, and what to run."""
    monkeypatch.setattr(library, "loaded", lambda: "they are not compiled")
    with pytest.raises(SystemExit, match=r"they are not compiled.*build_ext --inplace") as refused:
        say_kernels()
    assert library.__file__ in str(refused.value)


def test_torch_is_measured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--kernels torch`` needs no library, and what is measured is said."""
    monkeypatch.setattr(library, "loaded", lambda: "they are not compiled")
    say_kernels("torch")
    assert capsys.readouterr().err == "kernels measured: torch's, as asked for\n"


@pytest.mark.skipif(library.library() is None, reason="no compiler, or a CPU without AVX2")
def test_the_library_that_runs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The instruction set and the file of the kernels stand in the output."""
    say_kernels()
    assert capsys.readouterr().err == f"kernels measured: {library.instruction_set()}, {library.library_path()}\n"


@pytest.mark.parametrize(("kernels", "loud"), [("native", False), ("torch", True)])
def test_each_engine_says_what_it_runs(kernels: str, loud: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that runs other kernels than ours is announced loudly, with its reason; the core is returned."""
    core: Any = SimpleNamespace(info=SimpleNamespace(kernels=kernels, kernels_summary=f"{kernels} (reason)"))
    assert announced(core) is core
    said = capsys.readouterr().err
    assert f"kernels of this engine: {kernels} (reason)" in said
    assert said.startswith("ATTENTION") == loud
