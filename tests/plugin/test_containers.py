"""The check before MLflow writes a Dockerfile, against other forms of MLflow than today's."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin import containers


def module_of(**names: object) -> ModuleType:
    module = ModuleType(containers.BACKEND)
    vars(module).update(names)
    return module


@pytest.mark.parametrize("backend", [None, type("PyFuncBackend", (), {}), 7], ids=repr)
def test_a_module_of_another_shape_is_left_alone(backend: object) -> None:
    """A module without such a class or method is not changed, and nothing is raised."""
    module = module_of(PyFuncBackend=backend)
    containers.add_check(module)
    assert module.PyFuncBackend is backend
    assert not hasattr(backend, "generate_dockerfile")


def test_the_check_is_added_once_and_passes_all_arguments_on() -> None:
    """A call without a model, and one whose model cannot be read, reach MLflow with their arguments."""

    class PyFuncBackend:
        def generate_dockerfile(self, model_uri: str | None, output_dir: str, **options: object) -> tuple[object, ...]:
            return model_uri, output_dir, options

    module = module_of(PyFuncBackend=PyFuncBackend)
    containers.add_check(module)
    once = PyFuncBackend.generate_dockerfile
    containers.add_check(module)
    assert PyFuncBackend.generate_dockerfile is once
    assert PyFuncBackend().generate_dockerfile(None, "out", install_java=True) == (None, "out", {"install_java": True})
    given = PyFuncBackend().generate_dockerfile(model_uri="/nowhere", output_dir="out")
    assert given == ("/nowhere", "out", {})


def test_importing_mlflow_imports_no_more_than_the_check() -> None:
    """With the entry point, ``import mlflow`` imports neither the backend nor a flavor, server or torch of ours."""
    program = (
        "import sys, mlflow\n"
        f"assert {containers.BACKEND!r} not in sys.modules\n"
        "print(*sorted(name for name in sys.modules if name.startswith('mlflow_llm')), 'torch' in sys.modules)\n"
        "import mlflow.pyfunc.backend as backend\n"
        "print(hasattr(backend.PyFuncBackend.generate_dockerfile, '__wrapped__'))"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    plugin = [
        "mlflow_llm.plugin",
        *(f"mlflow_llm.plugin.{name}" for name in ("containers", "judges", "late_import", "registrations")),
    ]
    assert run.stdout.split() == ["mlflow_llm", *plugin, "False", "True"]


def test_the_scheme_of_the_entry_point_has_no_artifacts() -> None:
    """MLflow registers the entry point as a scheme of URIs, which nothing uses."""
    with pytest.raises(MlflowException, match="no artifacts have URIs of this scheme"):
        containers.repository("mlflow-llm-containers://a")
