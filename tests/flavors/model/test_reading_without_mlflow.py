"""Reading a model directory without MLflow, whose import takes longer than everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow import pyfunc
from mlflow.models.model import MLMODEL_FILE_NAME

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import names
from mlflow_llm.flavors.llm.model.bundle_reader import saved_config
from mlflow_llm.serving.interface.errors import PackagingError

CODE = """
import sys
from mlflow_llm.serving.control import mlflow_resolver
status = mlflow_resolver.main(sys.argv[1:])
print(status, *(name for name in ("mlflow", "torch", "transformers") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def saved(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    llm.save_model(path, llama_dir, kv_cache_dtype="int8")
    return path


def resolved(*words: str | Path) -> tuple[dict[str, object], str]:
    """Return the resolver's printed answer, and its exit status with the imported modules."""
    done = subprocess.run([sys.executable, "-P", "-c", CODE, *map(str, words)], capture_output=True, check=True)
    answer, said = done.stdout.decode().splitlines()
    return json.loads(answer), said


def test_a_directory_is_resolved_without_mlflow(saved: Path) -> None:
    """A model directory is resolved with its settings and without importing MLflow."""
    answer, said = resolved(saved)
    assert said == "0"
    (model,) = answer["models"]  # type: ignore[misc]
    assert model["config"]["kv_cache_dtype"] == "int8"
    assert model["uri"] == str(saved)


def test_a_directory_without_a_model_is_refused_without_mlflow(tmp_path: Path) -> None:
    """A directory without a model is refused by its path, without importing MLflow."""
    answer, said = resolved(tmp_path)
    assert said == "1"
    assert str(tmp_path) in str(answer["error"])


def test_a_name_of_the_registry_is_looked_up_by_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry URI imports MLflow and is reported as missing if it does not exist."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'no.db'}")
    answer, said = resolved("models:/nobody/1")
    assert said.startswith("1 mlflow")
    assert answer["missing"]


def test_names_are_mlflows() -> None:
    """The copied names equal MLflow's constants."""
    assert names.MLMODEL == MLMODEL_FILE_NAME
    assert names.PYFUNC == pyfunc.FLAVOR_NAME
    assert names.MODEL_CONFIG == pyfunc.MODEL_CONFIG


@pytest.mark.parametrize("content", ["", "[]", "flavors: 3", "flavors: [llm]", "flavors: {llm: {}", "\0"])
def test_a_damaged_mlmodel_is_named(tmp_path: Path, content: str) -> None:
    """An MLmodel file that is not a YAML object is refused by name."""
    (tmp_path / names.MLMODEL).write_text(content)
    with pytest.raises(PackagingError, match="MLmodel"):
        saved_config(tmp_path)


def test_a_missing_mlmodel_is_named(tmp_path: Path) -> None:
    """A missing MLmodel file is refused by name, because the model's settings would be lost."""
    with pytest.raises(PackagingError, match=r"MLmodel is missing in .*: the model's settings"):
        saved_config(tmp_path)


@pytest.mark.parametrize("function", [None, {}, {"config": None}, {"config": ["dtype"]}])
def test_an_mlmodel_without_settings_is_named(tmp_path: Path, function: object) -> None:
    """An MLmodel file without the model's settings is refused with the offending value."""
    (tmp_path / names.MLMODEL).write_text(yaml.safe_dump({"flavors": {"llm": {}, "python_function": function}}))
    with pytest.raises(PackagingError, match=r"lacks the model's settings: python_function\.config is (None|\[)"):
        saved_config(tmp_path)


def test_another_flavors_model_is_refused(tmp_path: Path) -> None:
    """A model without this flavor is refused with the flavors it has."""
    (tmp_path / names.MLMODEL).write_text(yaml.safe_dump({"flavors": {"sklearn": {}, "python_function": {}}}))
    with pytest.raises(PackagingError, match="its flavors are python_function, sklearn"):
        saved_config(tmp_path)


def test_public_names_are_imported_when_asked_for() -> None:
    """Public names are imported lazily, by attribute and by ``import *``; an unknown one is an AttributeError."""
    assert set(llm.__all__) == set(llm.MODULES)
    assert {name for name in llm.__all__ if not name.startswith("_")} == set(dir(llm))
    found: dict[str, object] = {}
    exec("from mlflow_llm.flavors.llm import *", found)
    assert set(llm.__all__) <= set(found)
    with pytest.raises(AttributeError, match="has no attribute 'log_modle'"):
        llm.log_modle  # type: ignore[attr-defined]  # noqa: B018
