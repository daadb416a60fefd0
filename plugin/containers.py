"""A check before MLflow writes a Dockerfile: a version that holds only an adapter has no base in an image.

MLflow runs no code of a flavor when it makes an image, but it imports the entry points of its artifact repositories
together with itself. This module is one of them, imports nothing of MLflow then, and puts the check around the class
that writes Dockerfiles when MLflow imports that (docs/decisions/0019). It does the same for ``registrations`` and
``judges``.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from . import judges, late_import, registrations

BACKEND = "mlflow.pyfunc.backend"
FLAVOR = "llm"


def repository(uri: str, *_: Any, **__: Any) -> Any:
    """Refuse to open ``uri``: MLflow asks an entry point for a scheme of URIs, and no artifacts have this one."""
    from mlflow.exceptions import MlflowException

    raise MlflowException.invalid_parameter_value(f"{uri}: no artifacts have URIs of this scheme")


def add_check(module: ModuleType) -> None:
    """Let ``PyFuncBackend.generate_dockerfile`` check its model first. Without such a method nothing changes."""
    backend = getattr(module, "PyFuncBackend", None)
    plain = getattr(backend, "generate_dockerfile", None)
    if backend is None or not callable(plain) or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def generate_dockerfile(self: Any, model_uri: Any, *rest: Any, **named: Any) -> Any:
        if model_uri:
            check(model_uri)
        return plain(self, model_uri, *rest, **named)

    backend.generate_dockerfile = generate_dockerfile


def check(model_uri: str) -> None:
    """Raise ``MlflowException`` for a version that holds only an adapter. What cannot be read is left to MLflow."""
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    try:
        base = Model.load(model_uri).flavors.get(FLAVOR, {}).get("base")
    except Exception:  # MLflow reads the model next, and its errors are its own
        return
    if base:
        raise MlflowException.invalid_parameter_value(
            f"model_uri: {model_uri} holds only an adapter over {base}, and an image has no registry to take that from;"
            f" llm.materialise({str(model_uri)!r}, DIR), of mlflow_llm.flavors, writes the whole model, and DIR is then"
            " what to give here"
        )


def install() -> None:
    """Add the check, now or when MLflow imports the class."""
    late_import.when_imported(BACKEND, add_check)


install()
registrations.install()
judges.install()
